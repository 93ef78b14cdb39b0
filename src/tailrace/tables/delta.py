"""Delta tables written by delta-rs: no jar, no JVM, one machine.

Every commit is a compare-and-swap on the version that was read, and carries our position; there is no other
way to write in here. Whatever can be refused is refused before the commit. An object holds two names and a form
and nothing else, so Spark may send it to its workers.

Callers speak of the source's shape; what is written has the table's own, which its form makes of it (`stored`).

The file is longer than most because everything that commits stands in it.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import CommitProperties, DeltaTable, TableFeatures, write_deltalake
from deltalake import Schema as DeltaSchema
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction

from tailrace import failpoints
from tailrace.errors import (
    ForeignWrite,
    FormChanged,
    SchemaChanged,
    TableUnusable,
    TailraceError,
    Unsupported,
)
from tailrace.model.schema import Column, TableId, TableSchema
from tailrace.tables.base import Applied, Cursor, Reread
from tailrace.tables.deltalog import (
    REPLACE_HINT,
    Position,
    Written,
    app_id,
    data_path,
    file_names,
    is_ours,
    last_position,
    make_durable,
    position_of,
    source_of,
)
from tailrace.tables.deltashape import (
    NTZ,
    add_action,
    create_table,
    delta_fields,
    is_naive,
    parts_of,
    refuse_features,
    repartition,
)
from tailrace.tables.evolving import Recast
from tailrace.tables.featured import Featured, removed_rows
from tailrace.tables.features import PLAIN_FILES, Features, features_of, refuse_for_delta_rs, refuse_unknown
from tailrace.tables.fold import UPSERT, Flags, Folded
from tailrace.tables.folder import find_folder, make_folder, unreadable
from tailrace.tables.formed import compared, keeping, loaded, recast_into
from tailrace.tables.forms import CURRENT, DELETED, PLAIN, Form, Origin, TableMode
from tailrace.tables.history import timed
from tailrace.tables.limits import refuse_far_dates, refuse_names
from tailrace.tables.lookup import held, with_bases, without
from tailrace.tables.merge import only_new, operations, rows_to_put, upserts_of
from tailrace.tables.partitions import Parts, refuse_misfits, texts_of, values_of
from tailrace.tables.paths import anothers
from tailrace.tables.pump import pump
from tailrace.tables.recast import Laid, kept_columns, lay_out, only_adds, recast_rows
from tailrace.tables.refresh import all_rows, compare
from tailrace.tables.rewriting import plan
from tailrace.tables.staging import StagedFile, discard, stage
from tailrace.tables.upkeep import Tended, Upkeep, remove_files, to_join


@dataclass(frozen=True, kw_only=True)
class Opened:
    """The table as it stood at one version."""

    folder: Path
    table: DeltaTable
    position: Position


class DeltaRsTable:
    """A table of one change log; keeps the promises of `LakeTable`."""

    def __init__(self, path: Path, log_id: str, form: Form = PLAIN, features: Features | None = None) -> None:
        """`features`: what the table gets when it is loaded, where Spark's connector writes its rows; None: delta-rs
        does, and the table may have none."""
        self._path = path.absolute()
        self._log_id = log_id
        self._form = form
        self._features = features

    def cursor(self) -> Cursor | None:
        return None if (opened := self._open()) is None else opened.position.cursor

    def shape(self) -> TableSchema | None:
        return None if (opened := self._open()) is None else opened.position.schema

    def rows(self) -> int:
        """From the files' statistics, which every writer of ours adds."""
        newest = self._newest()
        if newest is None:
            return 0
        folder, table = newest
        adds = pa.table(table.get_add_actions(flatten=True))
        removed = removed_rows(folder, table.version()) if features_of(table).deletion_vectors else 0
        return int(pc.sum(adds.column("num_records"), min_count=0).as_py()) - removed

    def version(self) -> int | None:
        """Delta's own number of the newest version; None if there is no table."""
        newest = self._newest()
        return None if newest is None else newest[1].version()

    def files(self) -> list[str]:
        """The data files of the newest version, by name."""
        newest = self._newest()
        return [] if newest is None else file_names(newest[1])

    def load(
        self, schema: TableSchema, batches: Iterable[pa.RecordBatch], cursor: Cursor, *, origin: Origin | None = None
    ) -> int:
        stored = self._form.stored(schema)
        refuse_names(stored)
        table = self._own_table(schema.table)
        name = f"load-{uuid.uuid4().hex}"
        origin = origin or Origin(seq=cursor.seq, position=str(cursor.position), read_at=time.time_ns() // 1000)
        rows = loaded(self._form, schema, batches, origin)
        files = stage(self._path, name, stored, rows, self._form.partition_by)
        try:
            return self._land(table, schema, files, cursor, origin)
        except TailraceError:
            self._discard(name)
            raise

    def land(
        self, schema: TableSchema, files: Sequence[StagedFile], cursor: Cursor, *, origin: Origin | None = None,
        kept: Sequence[Column] = (),
    ) -> int:  # fmt: skip
        refuse_names(self._form.stored(schema))
        return self._land(self._own_table(schema.table), schema, files, cursor, origin, kept)

    def refuse_foreign(self, table: TableId) -> None:
        self._own_table(table)

    def _land(
        self, table: DeltaTable | None, schema: TableSchema, files: Sequence[StagedFile], cursor: Cursor,
        origin: Origin | None, kept: Sequence[Column] = (),
    ) -> int:  # fmt: skip
        """Swap what was there when the table was looked at for these files."""
        rows = sum(file.rows for file in files)
        if table is not None and _holds(table, files):
            return rows
        folder = make_folder(self._path)
        stored = self._form.stored(schema)
        stored = replace(stored, columns=(*stored.columns, *kept), facts=None) if kept else stored
        position = self._position(schema, cursor, origin.read_at if origin else 0)
        properties, adds = position.properties(), self._adds_of(folder, files)
        wanted = self._features or PLAIN_FILES
        if wanted.any or (table is not None and features_of(table).any):
            if table is not None:
                refuse_unknown(self._path, table)
            featured = Featured(folder=folder, table=table)
            self._commit(lambda: featured.land(wanted, stored, adds, position))
            self._make_durable(folder, featured.following)
            return rows
        if table is None:
            fields = delta_fields(stored)
            self._commit(lambda: create_table(folder, fields, adds, self._form.partition_by, properties))
            self._make_durable(folder, 0)
            return rows
        self._swap(folder, table, stored, files, properties)
        # The object does not follow its own commit, but that one can only be the next.
        self._make_durable(folder, table.version() + 1)
        return rows

    def _swap(
        self, folder: Path, table: DeltaTable, schema: TableSchema, files: Sequence[StagedFile],
        properties: CommitProperties, mode: Literal["append", "overwrite"] = "overwrite",
    ) -> None:  # fmt: skip
        """Make the files all that the table holds, with these columns; or add them."""
        adds, by = self._adds_of(folder, files), self._form.partition_by
        if table.metadata().partition_columns != list(by):
            assert mode == "overwrite", "a table of another form is replaced as a whole"
            self._commit(lambda: repartition(folder, table, delta_fields(schema), adds, by, properties))
            return
        self.add_features(folder, table, schema)
        self._commit(
            lambda: table.create_write_transaction(
                [*adds], mode=mode, schema=delta_fields(schema), partition_by=list(by), commit_properties=properties
            )
        )

    def _adds_of(self, folder: Path, files: Sequence[StagedFile]) -> list[AddAction]:
        return [add_action(self._path, folder, file) for file in files]

    def add_features(self, folder: Path, table: DeltaTable, schema: TableSchema) -> None:
        """Allow the table timestamps without a zone, a feature that a new schema does not bring along.

        A commit of its own that changes no rows. It repeats the position, unless others wrote since: what a crash
        leaves behind it is neither more nor less ours than it was.
        """
        if NTZ in (table.protocol().writer_features or ()) or not any(map(is_naive, schema.columns)):
            return
        try:
            opened = self._open_any()
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
        if here.seq >= cursor.seq or (folded.empty and not touch):
            return Applied(committed=False, cursor=here)
        self.refuse_elsewhere(opened.position, schema, expected)
        stored, clock = self._form.stored(schema), opened.position.clock
        folded = timed(stored, folded, clock)
        if not folded.truncated:
            only = CURRENT if self._form.mode is TableMode.HISTORY else None
            marks = DELETED if self._form.soft_delete else None
            rows = with_bases(stored, opened.table, folded.rows, None if only else reread, only=only, marks=marks)
            folded = replace(folded, rows=rows)
        self._write(opened, stored, folded, self._properties(schema, cursor, folded.clock or clock))
        version = opened.table.version()
        written = self._make_durable(opened.folder, version)
        upserted = int(np.count_nonzero(operations(folded) == UPSERT))
        return Applied(
            committed=True, cursor=cursor, upserted=upserted, deleted=folded.rows.num_rows - upserted,
            bytes=written.bytes, version=version,
        )  # fmt: skip

    def holds(self, schema: TableSchema, keys: pa.Table) -> Flags:
        stored = self._form.stored(schema)
        return held(stored, self.opened().table, keys.rename_columns(list(map(self._form.name_of, keys.column_names))))

    def put(self, schema: TableSchema, rows: pa.Table, expected: Cursor) -> Applied:
        opened = self.opened()
        self.refuse_elsewhere(opened.position, schema, expected)
        whole = rows_to_put(self._form, schema, rows, expected)
        self._write(opened, self._form.stored(schema), whole, opened.position.properties())
        version = opened.table.version()
        written = self._make_durable(opened.folder, version)
        return Applied(
            committed=True, cursor=expected, upserted=rows.num_rows, bytes=written.bytes, version=version
        )

    def refresh(
        self, schema: TableSchema, files: Sequence[StagedFile], expected: Cursor, cursor: Cursor, *,
        keys: Sequence[StagedFile] | None = None, origin: Origin | None = None,
    ) -> Applied:  # fmt: skip
        appends = self._form.mode is TableMode.APPEND
        if not schema.key and not appends:
            raise Unsupported("only a table with a key can be refreshed", table=schema.table, hint=REPLACE_HINT)
        opened = self.opened()
        here, clock, before = opened.position.cursor, opened.position.clock, opened.table.version()
        if (here != expected and here.seq >= cursor.seq) or (appends and _holds(opened.table, files)):
            return Applied(committed=False, cursor=here)
        self.refuse_elsewhere(opened.position, schema, expected)
        origin = origin or Origin(seq=cursor.seq, position=str(cursor.position), read_at=time.time_ns() // 1000)
        properties = self._properties(schema, cursor, max(clock, origin.read_at))
        if appends:
            self._swap(opened.folder, opened.table, self._form.stored(schema), files, properties, mode="append")
            self._make_durable(opened.folder, before + 1)
            return Applied(committed=True, cursor=cursor, upserted=sum(file.rows for file in files))
        refuse_features(self._path, opened.table, self._form.partition_by)
        shape, others = compared(self._form, schema)
        try:
            found = compare(
                opened.folder, shape, table=file_names(opened.table), staged=[file.path for file in files],
                keys=None if keys is None else [file.path for file in keys],
                kept=[*others, *kept_columns(opened.table, self._form.stored(schema))],
                keeping=keeping(self._form, origin, clock), parts=self._parts(opened, schema, files),
            )  # fmt: skip
            if not found.empty:
                self._exchange(opened, found.stored, [found.rows()], found.kept, properties, changes_rows=True)
            elif cursor != here:
                self._append(opened.table, pa.schema(shape.row_fields()).empty_table(), properties)
            else:
                return Applied(committed=False, cursor=here)
        except (OSError, pa.ArrowException) as exc:
            raise unreadable(self._path, exc) from exc
        self._make_durable(opened.folder, before + 1)
        upserted, deleted = found.counts()
        return Applied(committed=True, cursor=cursor, upserted=upserted, deleted=deleted)

    def _parts(self, opened: Opened, schema: TableSchema, staged: Iterable[StagedFile]) -> Parts:
        """What is not in the files of the table, nor in those that were staged."""
        if not self._form.partition_by:
            return {}
        columns = self._form.stored(schema).columns
        return {**parts_of(opened.table), **{file.path: values_of(file.values, columns) for file in staged}}

    def _exchange(
        self, opened: Opened, stored: TableSchema, parts: Iterable[Iterable[pa.RecordBatch]], gone: Iterable[str],
        properties: CommitProperties, *, changes_rows: bool,
    ) -> None:  # fmt: skip
        """Swap some files for others with these rows, those of each part in files of their own."""
        folder, now = opened.folder, time.time_ns() // 1_000_000
        name, by = f"{EXCHANGE}-{uuid.uuid4().hex}", self._form.partition_by
        fields, there = delta_fields(stored), parts_of(opened.table)
        try:
            staged = [stage(self._path, f"{name}-{n}", stored, rows, by) for n, rows in enumerate(parts)]
            adds = self._adds_of(folder, [file for files in staged for file in files])
            actions: list[AddAction | RemoveAction] = [replace(add, data_change=changes_rows) for add in adds]
            actions += [
                RemoveAction(old, changes_rows, now, (folder / old).stat().st_size, texts_of(there.get(old, {})))
                for old in gone
            ]
            self._commit(
                lambda: opened.table.create_write_transaction(
                    actions, mode="append", schema=fields, partition_by=list(by), commit_properties=properties
                )
            )
        except BaseException:
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
        refuse_features(self._path, opened.table, self._form.partition_by)
        before = opened.table.version()
        own = recast_into(self._form, recast)
        laid = lay_out(opened.table, own)
        shape = replace(own.schema, columns=laid.columns, facts=None)
        refuse_names(shape)
        properties = self._properties(recast.schema, here, opened.position.clock)
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
        name = f"{RECAST}-{uuid.uuid4().hex}"
        files = stage(self._path, name, shape, recast_rows(opened.table, laid), self._form.partition_by)
        try:
            self._swap(opened.folder, opened.table, shape, files, properties)
        except TailraceError:
            self._discard(name)
            raise

    def lay(self, opened: Opened, shape: TableSchema, laid: Laid, schema: TableSchema) -> None:
        """Give a table with column mapping these columns, of which none has other values; no file is touched."""
        refuse_unknown(self._path, opened.table)
        featured = Featured(folder=opened.folder, table=opened.table)
        after = replace(opened.position, schema=schema)
        self._commit(lambda: featured.lay(shape, laid, after))
        self._make_durable(opened.folder, featured.following)

    def tend(self, upkeep: Upkeep, expected: Cursor) -> Tended:
        opened = self.opened()
        if opened.position.cursor != expected:
            raise self.elsewhere(opened.position.cursor, expected)
        table, properties = opened.table, opened.position.properties()
        if features_of(table).any:
            return self._tend_featured(opened, upkeep)
        done = Tended()
        adds, parts = pa.table(table.get_add_actions(flatten=True)), parts_of(table)
        names = map(data_path, adds.column("path").to_pylist())
        sizes = dict(zip(names, adds.column("size_bytes").to_pylist(), strict=True))
        if upkeep.file_bytes is not None and (some := to_join(sizes, upkeep.file_bytes, parts)):
            refuse_features(self._path, table, self._form.partition_by)
            shape, before = self._form.stored(opened.position.schema), table.version()
            stored = replace(shape, columns=(*shape.columns, *kept_columns(table, shape)), facts=None)
            rows = all_rows(opened.folder, some, stored.columns, parts)
            self._exchange(opened, stored, [rows], some, properties, changes_rows=False)
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

    def _tend_featured(self, opened: Opened, upkeep: Upkeep) -> Tended:
        refuse_unknown(self._path, opened.table)
        featured, done = Featured(folder=opened.folder, table=opened.table), Tended()
        if upkeep.file_bytes is not None and (some := to_join(featured.sizes(), upkeep.file_bytes)):
            shape = self._form.stored(opened.position.schema)
            stored = replace(shape, columns=(*shape.columns, *kept_columns(opened.table, shape)), facts=None)
            own, name = featured.in_files(stored), f"exchange-{uuid.uuid4().hex}"
            adds = self._adds_of(opened.folder, stage(self._path, name, own, featured.rows_of(some, own.columns)))
            try:
                self._commit(lambda: featured.exchange(some, adds, opened.position))
            except TailraceError:
                self._discard(name)
                raise
            written = self._make_durable(opened.folder, featured.following)
            done = Tended(joined=written.removed, made=written.added, bytes=written.bytes)
            opened.table.update_incremental()
        if (age := upkeep.remove_after_seconds) is not None:
            self._commit(lambda: featured.remember(age, opened.position))
            opened.table.update_incremental()
            try:
                done = replace(done, removed=featured.remove(age))
            except (DeltaError, OSError) as exc:
                raise unreadable(self._path, exc) from exc
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
        if self._features is not None:
            refuse_for_delta_rs(self._path, features_of(opened.table), ours=True)
        table = opened.table
        if schema.key and not folded.truncated and not only_new(self._form, folded):
            self._put(opened, schema, folded, properties)
            return
        upserts = upserts_of(schema, folded)
        refuse_far_dates(schema, upserts.columns)
        refuse_misfits(schema, self._form.partition_by, upserts)
        if folded.truncated:
            self._commit(
                # The columns that are kept stay, empty.
                lambda: write_deltalake(
                    table, upserts, mode="overwrite", schema_mode="merge", commit_properties=properties
                )
            )
        elif (operations(folded) == UPSERT).all():
            self._append(table, upserts, properties)
        else:
            self._rewrite(opened, schema, folded, upserts, properties)

    def _put(
        self, opened: Opened, schema: TableSchema, folded: Folded, properties: CommitProperties
    ) -> None:
        """Change the rows that rows with a key are about, and bring in those of keys that are not there."""
        refuse_features(self._path, opened.table, self._form.partition_by)
        try:
            found = plan(self._form, schema, opened.folder, opened.table, folded)
            if found.files or found.fresh.size:
                self._exchange(opened, found.stored, found.parts(), found.files, properties, changes_rows=True)
                opened.table.update_incremental()
            else:  # nothing changes, but the position has moved all the same
                self._append(opened.table, pa.schema(schema.row_fields()).empty_table(), properties)
        except (OSError, pa.ArrowException) as exc:
            raise unreadable(self._path, exc) from exc

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

        pump(upserts.schema, rows(), lambda reader: self._commit(lambda: write(reader), streams=True))

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

    def _position(self, schema: TableSchema, cursor: Cursor, clock: int) -> Position:
        return Position(log=self._log_id, cursor=cursor, schema=schema, form=self._form, clock=clock)

    def _properties(self, schema: TableSchema, cursor: Cursor, clock: int) -> CommitProperties:
        return self._position(schema, cursor, clock).properties()

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
        opened = self._open_any()
        if opened is not None and not self._form.alike(opened.position.form, opened.position.schema):
            raise FormChanged(
                "the table was made in another form than the settings ask for", path=self._path,
                made=opened.position.form.described, asked=self._form.described, hint=_FORM_HINT,
            )  # fmt: skip
        return opened

    def _open_any(self) -> Opened | None:
        """The same, in whatever form."""
        newest = self._newest()
        if newest is None:
            return None
        folder, table = newest
        seq = table.transaction_version(app_id(self._log_id))
        if seq is None:
            return None
        if self._features is None and (found := features_of(table)).any:
            refuse_for_delta_rs(self._path, found, ours=is_ours(folder, table.version(), self._log_id))
        position = position_of(folder, table.version(), self._log_id)
        if position.cursor.seq != seq:
            raise ForeignWrite(
                "the table's position and its transaction number differ", path=self._path, hint=REPLACE_HINT
            )
        return Opened(folder=folder, table=table, position=position)

    def _own_table(self, source: TableId) -> DeltaTable | None:
        """What a load of this source table may replace, whoever changed it; None where there is nothing."""
        newest = self._newest()
        if newest is None:
            return None
        folder, table = newest
        if table.transaction_version(app_id(self._log_id)) is None:
            other = last_position(folder, table.version())
            raise ForeignWrite(
                "a table that this change log did not make already stands here", path=self._path,
                **({"log": other.log} if other else {}),
                hint="Move it away, or choose another `tables.path` or `tables.names`.",
            )  # fmt: skip
        if (made_of := source_of(folder, table.version())) not in (None, source):
            raise anothers(self._path, made_of, source)
        return table


EXCHANGE, RECAST = "exchange", "recast"
UNCOMMITTED = (EXCHANGE, RECAST)
"""How files are called that only a commit makes part of the table; who alone writes it may discard them."""
ONE_APPLIER = "Stop the other process that applies to it; only one `tailrace run` or `tailrace apply` may."
_FORM_HINT = "Set it back as it was, or have all that the table holds replaced: `tailrace snapshot FILE TABLE`."


def _holds(table: DeltaTable, files: Sequence[StagedFile]) -> bool:
    """Whether the files are in the table already: a load's files are landed once, and all at once."""
    held = set(file_names(table))
    return any(file.path in held for file in files)
