"""Delta tables written by delta-rs: no jar, no JVM, one machine.

Every commit is a compare-and-swap on the version that was read, and carries our position; there is no other
way to write in here. Whatever can be refused is refused before the commit. An object holds two names and
nothing else, so Spark may send it to its workers.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import CommitProperties, DeltaTable, write_deltalake
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError

from tailrace import failpoints
from tailrace.errors import ForeignWrite, SchemaChanged, TableUnusable, ValueUnfit
from tailrace.model.schema import TableSchema
from tailrace.tables.base import Applied, Cursor
from tailrace.tables.deltalog import Position, app_id, last_position, make_durable, position_of
from tailrace.tables.fold import UPSERT, Folded, key_ordinals
from tailrace.tables.folder import find_folder, make_folder, unreadable
from tailrace.tables.lookup import merge_source, without

BATCHES_IN_FLIGHT_MAX = 4
HANDOVER_SECONDS = 0.2

# delta-rs computes statistics with a calendar that ends in the year 262142 and dies on a date past it.
DAYS_MAX = 95_000_000


@dataclass(frozen=True, kw_only=True)
class _Opened:
    """The table as it stood at one version."""

    folder: Path
    table: DeltaTable
    position: Position


class DeltaRsTable:
    """A mirror table of one change log; keeps the promises of `LakeTable`."""

    def __init__(self, path: Path, log_id: str) -> None:
        self._path = path.absolute()
        self._log_id = log_id

    def cursor(self) -> Cursor | None:
        opened = self._open()
        return None if opened is None else opened.position.cursor

    def shape(self) -> TableSchema | None:
        opened = self._open()
        return None if opened is None else opened.position.schema

    def rows(self) -> int:
        """From the files' statistics, which every writer of ours adds."""
        found = self._adds()
        return 0 if found is None else int(pc.sum(found.column("num_records"), min_count=0).as_py())

    def files(self) -> list[str]:
        """The data files of the newest version, by name."""
        found = self._adds()
        return [] if found is None else [str(name) for name in found.column("path").to_pylist()]

    def load(self, schema: TableSchema, batches: Iterable[pa.RecordBatch], cursor: Cursor) -> int:
        _refuse_names(schema)
        table = self._own_table()
        folder = make_folder(self._path)
        target: DeltaTable | str = str(folder) if table is None else table
        properties = self._properties(schema, cursor)
        count = _Count()

        def write(rows: pa.RecordBatchReader) -> None:
            # On a new path `error`, so that a table made meanwhile is not overwritten.
            mode, schema_mode = ("error", None) if table is None else ("overwrite", "overwrite")
            write_deltalake(
                target, rows, mode=mode, schema_mode=schema_mode, commit_properties=properties  # type: ignore[call-overload,arg-type,unused-ignore]
            )  # fmt: skip

        fields = pa.schema(schema.row_fields())
        self._stream(fields, count.each(_own_batches(schema, batches)), write)
        self._make_durable(folder, 0 if table is None else table.version())
        return count.rows

    def apply(
        self, schema: TableSchema, folded: Folded, expected: Cursor, cursor: Cursor, *, touch: bool = False
    ) -> Applied:
        opened = self._open()
        if opened is None:
            raise TableUnusable("the table has not been loaded", path=self._path, hint="Load it first.")
        here = opened.position.cursor
        idle = not folded.truncated and not folded.rows.num_rows
        if here.seq >= cursor.seq or (idle and not touch):
            return Applied(committed=False, cursor=here)
        if here != expected:
            raise ForeignWrite(
                "the table is not where this apply starts from", path=self._path,
                expected_seq=expected.seq, found_seq=here.seq, hint=_ONE_APPLIER,
            )  # fmt: skip
        if not opened.position.schema.same_rows(schema):
            raise SchemaChanged(
                "the table was loaded with other columns", table=schema.table, path=self._path, hint=_RELOAD
            )
        self._write(opened, schema, folded, self._properties(schema, cursor))
        self._make_durable(opened.folder, opened.table.version())
        upserted = int(np.count_nonzero(_operations(folded) == UPSERT))
        deleted = folded.rows.num_rows - upserted
        return Applied(committed=True, cursor=cursor, upserted=upserted, deleted=deleted)

    def _write(
        self, opened: _Opened, schema: TableSchema, folded: Folded, properties: CommitProperties
    ) -> None:
        """One commit, in the cheapest way that is exact."""
        table, before = opened.table, opened.table.version()
        upserts = _upserts(schema, folded)
        _refuse_far_dates(schema, upserts.columns)
        if folded.truncated:
            self._commit(
                lambda: write_deltalake(table, upserts, mode="overwrite", commit_properties=properties)
            )
        elif schema.key and folded.rows.num_rows:
            merge = _merge(schema, table, folded.rows, properties)
            self._commit(merge)
        elif (_operations(folded) == UPSERT).all():
            self._append(table, upserts, properties)
        else:
            self._rewrite(opened, schema, folded, upserts, properties)
        if table.version() == before:
            # A merge that found nothing to change makes no commit, but the position has moved all the same.
            self._append(table, upserts.slice(0, 0), properties)

    def _append(self, table: DeltaTable, rows: pa.Table, properties: CommitProperties) -> None:
        self._commit(lambda: write_deltalake(table, rows, mode="append", commit_properties=properties))

    def _rewrite(
        self, opened: _Opened, schema: TableSchema, folded: Folded, upserts: pa.Table, properties: CommitProperties
    ) -> None:  # fmt: skip
        """Everything but the rows to be removed, then the rows to be added."""
        reading = DeltaTable(str(opened.folder), version=opened.table.version())
        removals = folded.rows.filter(pc.less(folded.rows.column("copies"), 0))

        def rows() -> Iterator[pa.RecordBatch]:
            yield from without(schema, reading, removals)
            yield from upserts.to_batches()

        def write(kept: pa.RecordBatchReader) -> None:
            write_deltalake(opened.table, kept, mode="overwrite", commit_properties=properties)

        self._stream(upserts.schema, rows(), write)

    def _stream(
        self,
        fields: pa.Schema,
        batches: Iterator[pa.RecordBatch],
        write: Callable[[pa.RecordBatchReader], None],
    ) -> None:
        _pump(fields, batches, lambda reader: self._commit(lambda: write(reader), streams=True))

    def _commit(self, write: Callable[[], object], *, streams: bool = False) -> None:
        """Run the one call that commits. A stream passes the first failpoint itself, at its end."""
        if not streams:
            failpoints.hit("table.before_commit")
        try:
            write()
        except CommitFailedError as exc:
            raise ForeignWrite(
                "someone else committed to the table at the same time", path=self._path, hint=_ONE_APPLIER
            ) from exc
        except (DeltaError, OSError) as exc:
            raise unreadable(self._path, exc) from exc
        failpoints.hit("table.after_commit")

    def _make_durable(self, folder: Path, version: int) -> None:
        try:
            make_durable(folder, version)
        except OSError as exc:
            raise unreadable(self._path, exc) from exc

    def _properties(self, schema: TableSchema, cursor: Cursor) -> CommitProperties:
        return Position(log=self._log_id, cursor=cursor, schema=schema).properties()

    def _newest(self) -> tuple[Path, DeltaTable] | None:
        folder = find_folder(self._path)
        if folder is None:
            return None
        try:
            return folder, DeltaTable(str(folder))
        except TableNotFoundError:
            return None
        except (DeltaError, OSError) as exc:
            raise unreadable(self._path, exc) from exc

    def _open(self) -> _Opened | None:
        """The table at its newest version; None if it holds no position of this log."""
        newest = self._newest()
        if newest is None:
            return None
        folder, table = newest
        seq = table.transaction_version(app_id(self._log_id))
        if seq is None:
            return None
        position = position_of(folder, table.version(), self._log_id)
        if position.cursor.seq != seq:
            raise ForeignWrite(
                "the table's position and its transaction number differ", path=self._path, hint=_RELOAD
            )
        return _Opened(folder=folder, table=table, position=position)

    def _own_table(self) -> DeltaTable | None:
        """What a load may replace; None where there is nothing. Others' changes to our table do not hinder it."""
        newest = self._newest()
        if newest is None:
            return None
        folder, table = newest
        if table.transaction_version(app_id(self._log_id)) is None:
            other = last_position(folder, table.version())
            raise ForeignWrite(
                "a table that this change log did not make already stands here", path=self._path,
                **({"log": other.log} if other else {}),
                hint="Move it away, or choose another `tables.path`.",
            )  # fmt: skip
        return table

    def _adds(self) -> pa.Table | None:
        newest = self._newest()
        return None if newest is None else pa.table(newest[1].get_add_actions(flatten=True))


_ONE_APPLIER = "Stop the other process that applies to it; only one `tailrace run` or `tailrace apply` may."
_RELOAD = "Move the folder away or delete it; the next `tailrace run` loads the table again."


def _merge(
    schema: TableSchema, table: DeltaTable, rows: pa.Table, properties: CommitProperties
) -> Callable[[], object]:
    """The merge, ready to run; a base row that is missing is found here."""
    source, kept = merge_source(schema, table, rows)
    names = [quoted(column.name) for column in schema.columns]
    fresh = {name: f"s.c{i}" for i, name in enumerate(names)}
    over = {
        name: f"CASE WHEN s.k{i} THEN t.{name} ELSE s.c{i} END" if i in kept else fresh[name]
        for i, name in enumerate(names)
    }
    keys = key_ordinals(schema)
    # What is streamed is not looked at for file pruning, but pruning cannot print a list as SQL.
    streamed = any(pa.types.is_nested(schema.columns[i].type) for i in keys)
    merger = table.merge(
        source,
        predicate=" AND ".join(f"t.{names[i]} = s.c{i}" for i in keys),
        source_alias="s",
        target_alias="t",
        streamed_exec=streamed,
        commit_properties=properties,
    )
    merger = merger.when_matched_delete("s.op = 1").when_matched_update(over, "s.op = 0")
    return merger.when_not_matched_insert(fresh, "s.op = 0").execute


def quoted(name: str) -> str:
    """A column's name as SQL, verbatim."""
    return '"' + name.replace('"', '""') + '"'


def _operations(folded: Folded) -> Any:
    return folded.rows.column("op").to_numpy()


def _upserts(schema: TableSchema, folded: Folded) -> pa.Table:
    """The rows that come in, as the table's own columns; a keyless row as often as it came."""
    operations = _operations(folded)
    copies = np.where(operations == UPSERT, folded.rows.column("copies").to_numpy(), 0)
    places = pa.array(np.repeat(np.arange(copies.size), copies))
    rows = folded.rows.select(range(len(schema.columns))).take(places)
    return pa.Table.from_arrays(rows.columns, schema=pa.schema(schema.row_fields()))


@dataclass
class _Count:
    rows: int = 0

    def each(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            self.rows += batch.num_rows
            yield batch


def _own_batches(schema: TableSchema, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    fields = pa.schema(schema.row_fields())
    for batch in batches:
        _refuse_far_dates(schema, batch.columns)
        yield pa.RecordBatch.from_arrays(batch.columns, schema=fields)


def _refuse_far_dates(schema: TableSchema, columns: Iterable[Any]) -> None:
    for column, values in zip(schema.columns, columns, strict=True):
        if pa.types.is_date32(column.type) and len(values) > values.null_count:
            ends = pc.min_max(values.cast(pa.int32()))
            if max(-ends["min"].as_py(), ends["max"].as_py()) > DAYS_MAX:
                raise ValueUnfit(
                    "a date lies past the year 262000, which delta-rs cannot write",
                    table=schema.table, column=column.name,
                    hint="Exclude the table, or change the column's type to text, then reload the table.",
                )  # fmt: skip


def _refuse_names(schema: TableSchema) -> None:
    if not schema.columns:
        raise TableUnusable(
            "the table has no columns, and Delta has no such tables", table=schema.table,
            hint="Exclude it in `source.exclude`.",
        )  # fmt: skip
    seen: dict[str, str] = {}
    for name in schema.names:
        other = seen.setdefault(name.lower(), name)
        if other != name:
            raise TableUnusable(
                "two columns differ only in case, which Delta does not allow",
                table=schema.table, columns=f"{other}, {name}",
                hint="Rename one at the source, or publish the table without it, or exclude the table.",
            )  # fmt: skip


_ABORT = object()


class _Aborted(Exception):
    """Ends a stream in an error, so that nothing is committed; never leaves this module."""


def _pump(
    fields: pa.Schema, batches: Iterable[pa.RecordBatch], write: Callable[[pa.RecordBatchReader], None]
) -> None:
    """Read in the caller's thread, write in another.

    delta-rs pulls a stream from inside its own runtime, where nothing else that uses the runtime, such as a
    scan, may be called; and what `batches` raises must reach the caller as it is.
    """
    handover: queue.Queue[Any] = queue.Queue(BATCHES_IN_FLIGHT_MAX)

    def pulled() -> Iterator[pa.RecordBatch]:
        while (batch := handover.get()) is not None:
            if batch is _ABORT:
                raise _Aborted
            yield batch
        failpoints.hit("table.before_commit")

    with ThreadPoolExecutor(max_workers=1) as writer:
        written = writer.submit(write, pa.RecordBatchReader.from_batches(fields, pulled()))
        try:
            for batch in batches:
                _hand(handover, batch, written)
        except BaseException:
            _hand(handover, _ABORT, written)
            wait_for([written])
            raise
        _hand(handover, None, written)
        written.result()


def _hand(handover: queue.Queue[Any], batch: object, written: Future[None]) -> None:
    """Give the writer a batch; if it has ended, its error is raised."""
    while True:
        if written.done():
            written.result()
            return
        try:
            handover.put(batch, timeout=HANDOVER_SECONDS)
            return
        except queue.Full:
            continue
