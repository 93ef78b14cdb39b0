"""Delta tables written by delta-rs: no jar, no JVM, one machine.

Every commit is a compare-and-swap on the version that was read, and carries our position; there is no other
way to write in here. Whatever can be refused is refused before the commit. An object holds two names and
nothing else, so Spark may send it to its workers.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import CommitProperties, DeltaTable, TableFeatures, write_deltalake
from deltalake import Schema as DeltaSchema
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction, create_table_with_add_actions

from tailrace import failpoints
from tailrace.errors import ForeignWrite, SchemaChanged, TableUnusable, TailraceError, Unsupported
from tailrace.model.schema import Column, TableSchema
from tailrace.tables.base import Applied, Cursor, Reread
from tailrace.tables.deltalog import (
    REPLACE_HINT,
    Position,
    Written,
    app_id,
    file_names,
    has_commits,
    last_position,
    make_durable,
    position_of,
)
from tailrace.tables.evolving import Recast
from tailrace.tables.fold import UPSERT, Folded
from tailrace.tables.folder import find_folder, make_folder, unreadable
from tailrace.tables.limits import refuse_far_dates, refuse_names
from tailrace.tables.lookup import with_bases, without
from tailrace.tables.merge import merge_of, operations, upserts_of
from tailrace.tables.pump import pump
from tailrace.tables.recast import Laid, kept_columns, lay_out, only_adds, recast_rows
from tailrace.tables.refresh import all_rows, compare
from tailrace.tables.staging import StagedFile, discard, stage
from tailrace.tables.upkeep import Tended, Upkeep, remove_files, to_join


@dataclass(frozen=True, kw_only=True)
class Opened:
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

    def version(self) -> int | None:
        """Delta's own number of the newest version; None if there is no table."""
        newest = self._newest()
        return None if newest is None else newest[1].version()

    def files(self) -> list[str]:
        """The data files of the newest version, by name."""
        newest = self._newest()
        return [] if newest is None else file_names(newest[1])

    def load(self, schema: TableSchema, batches: Iterable[pa.RecordBatch], cursor: Cursor) -> int:
        refuse_names(schema)
        table = self._own_table()
        name = f"load-{uuid.uuid4().hex}"
        files = stage(self._path, name, schema, batches)
        try:
            return self._land(table, schema, files, cursor)
        except TailraceError:
            self._discard(name)
            raise

    def land(self, schema: TableSchema, files: Sequence[StagedFile], cursor: Cursor) -> int:
        refuse_names(schema)
        return self._land(self._own_table(), schema, files, cursor)

    def refuse_foreign(self) -> None:
        self._own_table()

    def _land(
        self, table: DeltaTable | None, schema: TableSchema, files: Sequence[StagedFile], cursor: Cursor
    ) -> int:
        """Swap what was there when the table was looked at for these files."""
        rows = sum(file.rows for file in files)
        held = set() if table is None else set(file_names(table))
        if any(file.path in held for file in files):
            return rows  # a load's files are landed once, and all at once
        folder = make_folder(self._path)
        properties = self._properties(schema, cursor)
        if table is None:
            adds, fields = [self._add(folder, file) for file in files], _delta_fields(schema)
            self._commit(lambda: _create(folder, fields, adds, properties))
            self._make_durable(folder, 0)
            return rows
        self._swap(folder, table, schema, files, properties)
        # The object does not follow its own commit, but that one can only be the next.
        self._make_durable(folder, table.version() + 1)
        return rows

    def _swap(
        self, folder: Path, table: DeltaTable, schema: TableSchema, files: Sequence[StagedFile],
        properties: CommitProperties,
    ) -> None:  # fmt: skip
        """Make the files all that the table holds, with these columns."""
        adds = [self._add(folder, file) for file in files]
        self.add_features(folder, table, schema)
        self._commit(
            lambda: table.create_write_transaction(
                [*adds], mode="overwrite", schema=_delta_fields(schema), commit_properties=properties
            )
        )

    def _add(self, folder: Path, file: StagedFile) -> AddAction:
        try:
            found = (folder / file.path).stat()
        except FileNotFoundError:
            found = None
        except OSError as exc:
            raise unreadable(self._path, exc) from exc
        if found is None or found.st_size != file.size:
            raise TableUnusable(
                "a staged file is gone, or not what was written",
                path=self._path, file=file.path, hint=_LOAD_AGAIN,
            )  # fmt: skip
        return AddAction(
            path=file.path, size=file.size, partition_values={}, modification_time=found.st_mtime_ns // 1_000_000,
            data_change=True, stats=file.stats,
        )  # fmt: skip

    def add_features(self, folder: Path, table: DeltaTable, schema: TableSchema) -> None:
        """Allow the table timestamps without a zone, a feature that a new schema does not bring along.

        A commit of its own that changes no rows. It repeats the position, unless others wrote since: what a crash
        leaves behind it is neither more nor less ours than it was.
        """
        if _NTZ in (table.protocol().writer_features or ()) or not any(map(_is_naive, schema.columns)):
            return
        try:
            opened = self._open()
            position = None if opened is None else opened.position
        except (ForeignWrite, TableUnusable):
            position = None
        properties = CommitProperties(max_commit_retries=0) if position is None else position.properties()
        self._commit(
            lambda: table.alter.add_feature(
                TableFeatures.TimestampWithoutTimezone,
                allow_protocol_versions_increase=True,
                commit_properties=properties,
            )
        )
        self._make_durable(folder, table.version())

    def apply(
        self, schema: TableSchema, folded: Folded, expected: Cursor, cursor: Cursor, *, touch: bool = False,
        reread: Reread | None = None,
    ) -> Applied:  # fmt: skip
        opened = self.opened()
        here = opened.position.cursor
        idle = not folded.truncated and not folded.rows.num_rows
        if here.seq >= cursor.seq or (idle and not touch):
            return Applied(committed=False, cursor=here)
        self.refuse_elsewhere(opened.position, schema, expected)
        if not folded.truncated:
            folded = replace(folded, rows=with_bases(schema, opened.table, folded.rows, reread))
        self._write(opened, schema, folded, self._properties(schema, cursor))
        version = opened.table.version()
        written = self._make_durable(opened.folder, version)
        upserted = int(np.count_nonzero(operations(folded) == UPSERT))
        return Applied(
            committed=True, cursor=cursor, upserted=upserted, deleted=folded.rows.num_rows - upserted,
            bytes=written.bytes, version=version,
        )  # fmt: skip

    def refresh(
        self, schema: TableSchema, files: Sequence[StagedFile], expected: Cursor, cursor: Cursor, *,
        keys: Sequence[StagedFile] | None = None,
    ) -> Applied:  # fmt: skip
        if not schema.key:
            raise Unsupported("only a table with a key can be refreshed", table=schema.table, hint=REPLACE_HINT)
        opened = self.opened()
        here = opened.position.cursor
        if here != expected and here.seq >= cursor.seq:
            return Applied(committed=False, cursor=here)
        self.refuse_elsewhere(opened.position, schema, expected)
        self._refuse_features(opened.table)
        properties, before = self._properties(schema, cursor), opened.table.version()
        try:
            found = compare(
                opened.folder, schema, table=file_names(opened.table), staged=[file.path for file in files],
                keys=None if keys is None else [file.path for file in keys], kept=kept_columns(opened.table, schema),
            )  # fmt: skip
            if not found.empty:
                self._exchange(opened, found.stored, found.rows(), found.kept, properties, changes_rows=True)
            elif cursor != here:
                self._append(opened.table, pa.schema(schema.row_fields()).empty_table(), properties)
            else:
                return Applied(committed=False, cursor=here)
        except (OSError, pa.ArrowException) as exc:
            raise unreadable(self._path, exc) from exc
        self._make_durable(opened.folder, before + 1)
        upserted, deleted = found.counts()
        return Applied(committed=True, cursor=cursor, upserted=upserted, deleted=deleted)

    def _refuse_features(self, table: DeltaTable) -> None:
        """Refuse files that do not say by themselves which rows the table holds."""
        others = set(table.protocol().reader_features or ()) - {_NTZ}
        if others:
            raise TableUnusable(
                "the table uses features that a refresh does not know", path=self._path,
                features=", ".join(sorted(others)), hint=REPLACE_HINT,
            )  # fmt: skip

    def _exchange(
        self, opened: Opened, stored: TableSchema, rows: Iterable[pa.RecordBatch], gone: Iterable[str],
        properties: CommitProperties, *, changes_rows: bool,
    ) -> None:  # fmt: skip
        """Swap some files for others with these rows."""
        folder, now = opened.folder, time.time_ns() // 1_000_000
        name = f"exchange-{uuid.uuid4().hex}"
        adds = [self._add(folder, file) for file in stage(self._path, name, stored, rows)]
        actions: list[AddAction | RemoveAction] = [replace(add, data_change=changes_rows) for add in adds]
        actions += [RemoveAction(old, changes_rows, now, (folder / old).stat().st_size, {}) for old in gone]
        fields = _delta_fields(stored)
        try:
            self._commit(
                lambda: opened.table.create_write_transaction(
                    actions, mode="append", schema=fields, commit_properties=properties
                )
            )
        except TailraceError:
            self._discard(name)
            raise

    def _discard(self, name: str) -> None:
        """Leave no strays of what has failed; where that fails too the first error is the one to tell."""
        with contextlib.suppress(TailraceError):
            discard(self._path, name)

    def evolve(self, recast: Recast, expected: Cursor) -> Applied:
        opened = self.opened()
        here, old = opened.position.cursor, opened.position.schema
        if here == expected and old.same_as(recast.schema):
            return Applied(committed=False, cursor=here)
        if here != expected:
            raise self.elsewhere(here, expected)
        self._refuse_features(opened.table)
        before = opened.table.version()
        laid = lay_out(opened.table, recast)
        shape = replace(recast.schema, columns=laid.columns, facts=None)
        refuse_names(shape)
        properties = self._properties(recast.schema, here)
        if not only_adds(opened.table, laid):
            self._recast(opened, shape, laid, properties)
        elif laid.added:
            self.add_features(opened.folder, opened.table, shape)
            before = opened.table.version()
            fields = list(DeltaSchema.from_arrow(pa.schema([(c.name, c.type) for c in laid.added])).fields)
            self._commit(lambda: opened.table.alter.add_columns(fields, commit_properties=properties))
        else:
            self._append(opened.table, laid.fields.empty_table(), properties)
        self._make_durable(opened.folder, before + 1)
        return Applied(committed=True, cursor=here)

    def _recast(self, opened: Opened, shape: TableSchema, laid: Laid, properties: CommitProperties) -> None:
        """Write every row anew, and swap the files."""
        name = f"recast-{uuid.uuid4().hex}"
        files = stage(self._path, name, shape, recast_rows(opened.table, laid))
        try:
            self._swap(opened.folder, opened.table, shape, files, properties)
        except TailraceError:
            self._discard(name)
            raise

    def tend(self, upkeep: Upkeep, expected: Cursor) -> Tended:
        opened = self.opened()
        if opened.position.cursor != expected:
            raise self.elsewhere(opened.position.cursor, expected)
        table, properties = opened.table, opened.position.properties()
        done = Tended()
        adds = pa.table(table.get_add_actions(flatten=True))
        sizes = dict(zip(adds.column("path").to_pylist(), adds.column("size_bytes").to_pylist(), strict=True))
        if upkeep.file_bytes is not None and (some := to_join(sizes, upkeep.file_bytes)):
            self._refuse_features(table)
            shape, before = opened.position.schema, table.version()
            stored = replace(shape, columns=(*shape.columns, *kept_columns(table, shape)), facts=None)
            rows = all_rows(opened.folder, some, stored.columns)
            self._exchange(opened, stored, rows, some, properties, changes_rows=False)
            written = self._make_durable(opened.folder, before + 1)
            done = Tended(joined=written.removed, made=written.added, bytes=written.bytes)
        if (age := upkeep.remove_after_seconds) is not None:
            table.update_incremental()
            removed, before = list[int](), table.version()
            self._commit(lambda: removed.append(remove_files(opened.folder, table, age, properties)))
            table.update_incremental()
            for version in range(before + 1, table.version() + 1):
                self._make_durable(opened.folder, version)
            done = replace(done, removed=removed[0])
        return done

    def opened(self) -> Opened:
        """The table as it stands; refuses where `cursor` is None."""
        opened = self._open()
        if opened is None:
            raise TableUnusable("the table has not been loaded", path=self._path, hint="Load it first.")
        return opened

    def refuse_elsewhere(self, position: Position, schema: TableSchema, expected: Cursor) -> None:
        """Refuse to go on from another position, or with rows of another shape."""
        if position.cursor != expected:
            raise self.elsewhere(position.cursor, expected)
        if not position.schema.same_rows(schema):
            raise SchemaChanged(
                "the table was loaded with other columns", table=schema.table, path=self._path, hint=REPLACE_HINT
            )

    def elsewhere(self, here: Cursor, expected: Cursor) -> ForeignWrite:
        """What an apply that starts from another position is told."""
        return ForeignWrite(
            "the table is not where this apply starts from", path=self._path, expected_seq=expected.seq,
            found_seq=here.seq, hint=ONE_APPLIER,
        )  # fmt: skip

    def _write(
        self, opened: Opened, schema: TableSchema, folded: Folded, properties: CommitProperties
    ) -> None:
        """One commit, in the cheapest way that is exact."""
        table, before = opened.table, opened.table.version()
        upserts = upserts_of(schema, folded)
        refuse_far_dates(schema, upserts.columns)
        if folded.truncated:
            self._commit(
                # The columns that are kept stay, empty.
                lambda: write_deltalake(
                    table, upserts, mode="overwrite", schema_mode="merge", commit_properties=properties
                )
            )
        elif schema.key and folded.rows.num_rows:
            self._commit(merge_of(schema, table, folded.rows, properties))
        elif (operations(folded) == UPSERT).all():
            self._append(table, upserts, properties)
        else:
            self._rewrite(opened, schema, folded, upserts, properties)
        if table.version() == before:
            # A merge that found nothing to change makes no commit, but the position has moved all the same.
            self._append(table, upserts.slice(0, 0), properties)

    def _append(self, table: DeltaTable, rows: pa.Table, properties: CommitProperties) -> None:
        self._commit(
            lambda: write_deltalake(
                table, rows, mode="append", schema_mode="merge", commit_properties=properties
            )
        )

    def _rewrite(
        self, opened: Opened, schema: TableSchema, folded: Folded, upserts: pa.Table, properties: CommitProperties
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
        pump(fields, batches, lambda reader: self._commit(lambda: write(reader), streams=True))

    def _commit(self, write: Callable[[], object], *, streams: bool = False) -> None:
        """Run the one call that commits. A stream passes the first failpoint itself, at its end."""
        if not streams:
            failpoints.hit("table.before_commit")
        try:
            write()
        except CommitFailedError as exc:
            raise ForeignWrite(
                "someone else committed to the table at the same time", path=self._path, hint=ONE_APPLIER
            ) from exc
        except (DeltaError, OSError) as exc:
            raise unreadable(self._path, exc) from exc
        failpoints.hit("table.after_commit")

    def _make_durable(self, folder: Path, version: int) -> Written:
        try:
            return make_durable(folder, version)
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

    def _open(self) -> Opened | None:
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
                "the table's position and its transaction number differ", path=self._path, hint=REPLACE_HINT
            )
        return Opened(folder=folder, table=table, position=position)

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


_NTZ = "timestampNtz"
_LOAD_AGAIN = "Load the table again; nobody else may write or remove files in its folder meanwhile."
ONE_APPLIER = "Stop the other process that applies to it; only one `tailrace run` or `tailrace apply` may."


def _create(folder: Path, fields: DeltaSchema, adds: list[AddAction], properties: CommitProperties) -> None:
    """A new table; one that was made meanwhile is not overwritten."""
    try:
        create_table_with_add_actions(str(folder), fields, adds, mode="error", commit_properties=properties)
    except DeltaError as exc:
        if has_commits(folder):
            raise CommitFailedError("a table was made here meanwhile") from exc
        raise


def _delta_fields(schema: TableSchema) -> DeltaSchema:
    return DeltaSchema.from_arrow(pa.schema(schema.row_fields()))


def _is_naive(column: Column) -> bool:
    kind = column.type.value_type if pa.types.is_list(column.type) else column.type
    return pa.types.is_timestamp(kind) and kind.tz is None
