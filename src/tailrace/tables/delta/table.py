"""Delta tables of one machine: no jar, no JVM. The files are ours, the commits delta-rs's.

Every commit is a compare-and-swap on the version that was read, and carries our position; there is no other
way to write in here. (Only another partitioning, which replaces all rows, is looked at first and then committed.)
Whatever can be refused is refused before the commit. An object holds two names and a form
and nothing else, so Spark may send it to its workers.

Callers speak of the source's shape; what is written has the table's own, which its form makes of it (`stored`).

The file is longer than most because whatever a commit may be refused for stands in it.
"""

from __future__ import annotations

import contextlib
import functools
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Concatenate, Literal, ParamSpec, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import CommitProperties, DeltaTable, TableFeatures
from deltalake import Schema as DeltaSchema
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction, RemoveAction

from tailrace import failpoints
from tailrace.errors import ForeignWrite, TableUnusable, TailraceError, Unsupported
from tailrace.model.schema import Column, TableId, TableSchema
from tailrace.tables.compaction_plan import UpkeepPlan, UpkeepResult, files_to_compact, remove_files
from tailrace.tables.delta.commit_log import (
    REPLACE_HINT,
    CommitFiles,
    CommitRecord,
    app_id,
    commit_record_of,
    data_path,
    file_names,
    is_ours,
    last_commit_record,
    source_of,
    sync_commit,
)
from tailrace.tables.delta.copy_on_write import plan_rewrite
from tailrace.tables.delta.diff import all_rows, diff_files
from tailrace.tables.delta.features import NO_FEATURES, Features, features_of, refuse_for_delta_rs, refuse_unknown
from tailrace.tables.delta.key_lookup import RowsWithoutBase, find_rows_without_base, keys_exist
from tailrace.tables.delta.raw_commit import RawDeltaCommit, removed_rows
from tailrace.tables.delta.schema_mapping import (
    NTZ,
    add_action,
    create_table,
    delta_fields,
    has_odd_file_names,
    is_naive,
    partition_values_of,
    refuse_features,
    remove_actions,
    repartition,
)
from tailrace.tables.evolve.recast_columns import (
    RecastColumns,
    column_types,
    only_adds,
    plan_columns,
    recast_rows,
    retained_columns,
)
from tailrace.tables.evolve.schema_plan import Recast
from tailrace.tables.fold.by_mode import recast_for_spec, retirement_rule, split_compared, with_added_columns
from tailrace.tables.fold.fold import UPSERT, Flags, FoldedChanges
from tailrace.tables.fold.row_versions import clamp_times
from tailrace.tables.fold.whole_rows import fold_for_upsert, operations
from tailrace.tables.limits import refuse_names
from tailrace.tables.partitions import PartitionValues, values_of
from tailrace.tables.port import AppliedPosition, Refetch, WriteResult
from tailrace.tables.spec import CURRENT, PLAIN_MIRROR, LoadOrigin, TableMode, TableSpec
from tailrace.tables.staging import FILE_BYTES, StagedFile, discard, stage
from tailrace.tables.table_errors import (
    concurrent_commit,
    location_taken,
    not_loaded,
    refuse_other_position,
    refuse_other_replay,
    refuse_other_spec,
    wrong_position,
)
from tailrace.tables.table_folder import find_folder, make_folder, refuse_inside, unreadable
from tailrace.tables.table_paths import folder_taken

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class OpenedDelta:
    """The table as it stood at one version."""

    folder: Path
    table: DeltaTable
    commit_record: CommitRecord

    @property
    def next_version(self) -> int:
        """The version that the next commit makes: it is refused if it does not."""
        return self.table.version() + 1


def _explained(method: Callable[Concatenate[DeltaRsTable, P], T]) -> Callable[Concatenate[DeltaRsTable, P], T]:
    """Files that cannot be read or written are told as an error of ours."""

    @functools.wraps(method)
    def explained(table: DeltaRsTable, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(table, *args, **kwargs)
        except (DeltaError, OSError, pa.ArrowException) as exc:
            raise unreadable(table._path, exc) from exc

    return explained


class DeltaRsTable:
    """A table of one change log; keeps the promises of `LakeTable`."""

    def __init__(
        self,
        path: Path,
        log_id: str,
        form: TableSpec = PLAIN_MIRROR,
        features: Features | None = None,
        file_bytes: int = FILE_BYTES,
    ) -> None:
        """`features`: what the table gets when it is loaded, where Spark's connector writes its rows; None: delta-rs
        does, and the table may have none. `file_bytes`: the size of file that is aimed at."""
        self._path = path.absolute()
        self._log_id = log_id
        self._form = form
        self._features = features
        self._file_bytes = file_bytes

    def applied_position(self) -> AppliedPosition | None:
        return None if (opened := self._open()) is None else opened.commit_record.applied_position

    def schema(self) -> TableSchema | None:
        return None if (opened := self._open()) is None else opened.commit_record.schema

    def replay_id(self) -> str | None:
        return None if (opened := self._open()) is None else opened.commit_record.replay_id

    def columns(self) -> list[str]:
        """All that it holds, by name, those included that the source has dropped."""
        return list(column_types(self.opened().table))

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

    def identity(self, version: int | None = None) -> str | None:
        """Which table the newest version is of, or another: a folder that is made anew has another one. None if there
        is no such version."""
        newest = self._newest()
        if newest is None:
            return None
        if version is not None and newest[1].version() != version:
            try:
                newest[1].load_as_version(version)
            except (DeltaError, OSError):
                return None
        return str(newest[1].metadata().id)

    def files(self) -> list[str]:
        """The data files of the newest version, by name."""
        newest = self._newest()
        return [] if newest is None else file_names(newest[1])

    def load(
        self,
        schema: TableSchema,
        batches: Iterable[pa.RecordBatch],
        cursor: AppliedPosition,
        *,
        origin: LoadOrigin | None = None,
    ) -> int:
        stored = self._form.stored_schema(schema)
        refuse_names(stored)
        table = self._own_table(schema.table)
        origin = origin or LoadOrigin(seq=cursor.seq, position=str(cursor.position), read_at=time.time_ns() // 1000)
        with self._staging("load") as name:
            rows = with_added_columns(self._form, schema, batches, origin)
            files = self._staged(name, stored, rows)
            return self._land(table, schema, files, cursor, origin)

    def commit_load(
        self,
        schema: TableSchema,
        files: Sequence[StagedFile],
        cursor: AppliedPosition,
        *,
        origin: LoadOrigin | None = None,
        kept: Sequence[Column] = (),
    ) -> int:
        refuse_names(self._form.stored_schema(schema))
        return self._land(self._own_table(schema.table), schema, files, cursor, origin, kept)

    def refuse_foreign(self, table: TableId) -> None:
        self._own_table(table)

    def _land(
        self,
        table: DeltaTable | None,
        schema: TableSchema,
        files: Sequence[StagedFile],
        cursor: AppliedPosition,
        origin: LoadOrigin | None,
        kept: Sequence[Column] = (),
    ) -> int:
        """Swap what was there when the table was looked at for these files."""
        rows = sum(file.rows for file in files)
        if table is not None and _holds(table, files):
            return rows
        folder = make_folder(self._path)
        stored = self._form.stored_schema(schema)
        stored = replace(stored, columns=(*stored.columns, *kept), facts=None) if kept else stored
        position = self._position(schema, cursor, origin.read_at if origin else 0)
        adds = self._adds_of(folder, files)
        wanted = self._features or NO_FEATURES
        if wanted.any or (table is not None and features_of(table).any):
            if table is not None:
                refuse_unknown(self._path, table)
            featured = RawDeltaCommit(folder=folder, table=table)
            self._commit(lambda: featured.commit_load(wanted, stored, adds, position))
            self._make_durable(folder, featured.next_version)
            return rows
        if table is None:
            fields = delta_fields(stored)
            self._commit(lambda: create_table(folder, fields, adds, position))
            self._make_durable(folder, 0)
            return rows
        self._swap(folder, table, stored, files, position)
        # The object does not follow its own commit, but that one can only be the next.
        self._make_durable(folder, table.version() + 1)
        return rows

    def _swap(
        self,
        folder: Path,
        table: DeltaTable,
        schema: TableSchema,
        files: Sequence[StagedFile],
        position: CommitRecord,
        mode: Literal["append", "overwrite"] = "overwrite",
    ) -> None:
        """Make the files all that the table holds, with these columns; or add them."""
        adds, by = self._adds_of(folder, files), self._form.partition_by
        if mode == "overwrite" and has_odd_file_names(table):
            refuse_unknown(self._path, table)
            featured = RawDeltaCommit(folder=folder, table=table)
            self._commit(lambda: featured.commit_load(NO_FEATURES, schema, adds, position))
            return
        if table.metadata().partition_columns != list(by):
            assert mode == "overwrite", "a table of another form is replaced as a whole"
            self._commit(lambda: repartition(folder, table, delta_fields(schema), adds, position))
            return
        self.add_features(folder, table, schema)
        self._commit(
            lambda: table.create_write_transaction(
                [*adds],
                mode=mode,
                schema=delta_fields(schema),
                partition_by=list(by),
                commit_properties=position.properties(),
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
            position = None if opened is None else opened.commit_record
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
        self,
        schema: TableSchema,
        folded: FoldedChanges,
        expected: AppliedPosition,
        cursor: AppliedPosition,
        *,
        touch: bool = False,
        reread: Refetch | None = None,
    ) -> WriteResult:
        opened = self.opened()
        here = opened.commit_record.applied_position
        if here.covers(cursor) or (folded.empty and not touch):
            return WriteResult(committed=False, applied_position=here)
        refuse_other_position(self._path, opened.commit_record, schema, expected)
        stored, clock = self._form.stored_schema(schema), opened.commit_record.latest_time
        folded = clamp_times(stored, folded, clock)
        # A version is never read again: what it comes from is of the past. Otherwise the write finds what is missing.
        if reread is not None and self._form.mode is not TableMode.HISTORY:
            folded = replace(folded, rows=self._with_bases(opened, stored, folded.rows, reread))
        position = self._position(schema, cursor, folded.latest_time or clock, opened.commit_record.replay_id)
        written = self._write(opened, stored, folded, position)
        upserted = int(np.count_nonzero(operations(folded) == UPSERT))
        return WriteResult(
            committed=True,
            applied_position=cursor,
            upserted=upserted,
            deleted=folded.rows.num_rows - upserted,
            bytes=written.bytes,
            version=opened.next_version,
        )

    def _with_bases(self, opened: OpenedDelta, stored: TableSchema, rows: pa.Table, reread: Refetch) -> pa.Table:
        baseless = self._without_base(opened, stored, rows)
        if baseless is None:
            return rows
        given = reread(baseless.keys)  # what goes wrong here is the source's, and not told as the table's
        return baseless.fill_from(given, marks=self._form.deleted_column if self._form.soft_delete else None)

    @_explained
    def _without_base(self, opened: OpenedDelta, stored: TableSchema, rows: pa.Table) -> RowsWithoutBase | None:
        return find_rows_without_base(stored, opened.table, rows)

    @_explained
    def keys_exist(self, schema: TableSchema, keys: pa.Table) -> Flags:
        stored = self._form.stored_schema(schema)
        only = CURRENT if self._form.mode is TableMode.HISTORY else None
        named = keys.rename_columns(list(map(self._form.lake_name, keys.column_names)))
        return keys_exist(stored, self.opened().table, named, only)

    @_explained
    def upsert_rows(
        self, schema: TableSchema, rows: pa.Table, expected: AppliedPosition, said: pa.Table | None = None
    ) -> WriteResult:
        opened = self.opened()
        refuse_other_position(self._path, opened.commit_record, schema, expected)
        stored = self._form.stored_schema(schema)
        whole = clamp_times(
            stored, fold_for_upsert(self._form, schema, rows, expected, said), opened.commit_record.latest_time
        )
        clock = opened.commit_record.latest_time if whole.latest_time is None else whole.latest_time
        written = self._write(opened, stored, whole, replace(opened.commit_record, latest_time=clock))
        return WriteResult(
            committed=True,
            applied_position=expected,
            upserted=rows.num_rows,
            bytes=written.bytes,
            version=opened.next_version,
        )

    @_explained
    def append_rows(
        self, schema: TableSchema, folded: FoldedChanges, expected: AppliedPosition, *, after: str | None, late: str
    ) -> WriteResult:
        opened = self.opened()
        refuse_other_position(self._path, opened.commit_record, schema, expected)
        refuse_other_replay(self._path, opened.commit_record, after)
        position = replace(opened.commit_record, replay_id=late)
        written = self._write(opened, self._form.stored_schema(schema), folded, position)
        return WriteResult(
            committed=True,
            applied_position=expected,
            upserted=folded.rows.num_rows,
            bytes=written.bytes,
            version=opened.next_version,
        )

    @_explained
    def merge_load(
        self,
        schema: TableSchema,
        files: Sequence[StagedFile],
        expected: AppliedPosition,
        cursor: AppliedPosition,
        *,
        keys: Sequence[StagedFile] | None = None,
        origin: LoadOrigin | None = None,
    ) -> WriteResult:
        appends = self._form.mode is TableMode.APPEND
        if not schema.key and not appends:
            raise Unsupported("only a table with a key can be refreshed", table=schema.table, hint=REPLACE_HINT)
        opened = self.opened()
        here, clock = opened.commit_record.applied_position, opened.commit_record.latest_time
        if (here != expected and here.covers(cursor)) or (appends and _holds(opened.table, files)):
            return WriteResult(committed=False, applied_position=here)
        refuse_other_position(self._path, opened.commit_record, schema, expected)
        origin = origin or LoadOrigin(seq=cursor.seq, position=str(cursor.position), read_at=time.time_ns() // 1000)
        position = self._position(schema, cursor, max(clock, origin.read_at), opened.commit_record.replay_id)
        if appends:
            self._swap(opened.folder, opened.table, self._form.stored_schema(schema), files, position, mode="append")
            self._make_durable(opened.folder, opened.table.version() + 1)
            return WriteResult(committed=True, applied_position=cursor, upserted=sum(file.rows for file in files))
        refuse_features(self._path, opened.table, self._form.partition_by)
        (shape, others), parts = split_compared(self._form, schema), self._parts(opened, schema, files)
        stay = None if keys is None else [file.path for file in keys]
        found = diff_files(
            opened.folder,
            shape,
            table=file_names(opened.table),
            staged=[file.path for file in files],
            keys=file_names(opened.table) if self._form.holds_messages else stay,
            kept=[*others, *retained_columns(opened.table, self._form.stored_schema(schema))],
            keeping=retirement_rule(self._form, origin, clock),
            parts=parts,
        )
        if found.empty and cursor == here:
            return WriteResult(committed=False, applied_position=here)
        rows, gone = ([], []) if found.empty else ([found.rows()], list(found.staying))
        self._exchange(opened, found.stored, rows, gone, parts, position)
        upserted, deleted = found.counts()
        return WriteResult(committed=True, applied_position=cursor, upserted=upserted, deleted=deleted)

    def _parts(self, opened: OpenedDelta, schema: TableSchema, staged: Iterable[StagedFile]) -> PartitionValues:
        """What is not in the files of the table, nor in those that were staged."""
        if not self._form.partition_by:
            return {}
        columns = self._form.stored_schema(schema).columns
        return {**partition_values_of(opened.table), **{file.path: values_of(file.values, columns) for file in staged}}

    def _exchange(
        self,
        opened: OpenedDelta,
        stored: TableSchema,
        rows: Iterable[Iterable[pa.RecordBatch]],
        gone: Sequence[str],
        parts: PartitionValues,
        position: CommitRecord,
        *,
        changes_rows: bool = True,
    ) -> CommitFiles:
        """Swap some files for others, each of the rows' parts in files of their own. Without any the position moves."""
        folder, by = opened.folder, self._form.partition_by
        with self._staging(EXCHANGE) as name:
            staged = [self._staged(f"{name}-{n}", stored, some) for n, some in enumerate(rows)]
            adds = self._adds_of(folder, [file for files in staged for file in files])
            if has_odd_file_names(opened.table):
                refuse_unknown(self._path, opened.table)
                featured = RawDeltaCommit(folder=folder, table=opened.table)
                self._commit(lambda: featured.exchange(gone, adds, position, changes_rows=changes_rows))
            else:
                actions: list[AddAction | RemoveAction] = [replace(add, data_change=changes_rows) for add in adds]
                actions += remove_actions(folder, gone, parts, changes_rows=changes_rows)
                fields, said = delta_fields(stored), position.properties()
                self._commit(
                    lambda: opened.table.create_write_transaction(
                        actions, mode="append", schema=fields, partition_by=list(by), commit_properties=said
                    )
                )
        self._make_durable(folder, opened.next_version)
        return CommitFiles(len(adds), len(gone), sum(add.size for add in adds))

    def _staged(
        self, name: str, stored: TableSchema, rows: Iterable[pa.RecordBatch], by: Sequence[str] | None = None
    ) -> tuple[StagedFile, ...]:
        """Rows in files of the size aimed at, in the partitions that the form asks for unless others are named."""
        by = self._form.partition_by if by is None else by
        return stage(self._path, name, stored, rows, by, file_bytes=self._file_bytes)

    @contextlib.contextmanager
    def _staging(self, kind: str) -> Iterator[str]:
        """A name for files that are to become part of the table: what fails leaves none of them."""
        name = f"{kind}-{uuid.uuid4().hex}"
        try:
            yield name
        except BaseException:
            with contextlib.suppress(TailraceError):  # the first error is the one to tell
                discard(self._path, name)
            raise

    @_explained
    def evolve(self, recast: Recast, expected: AppliedPosition) -> WriteResult:
        opened = self.opened()
        here, old = opened.commit_record.applied_position, opened.commit_record.schema
        if here == expected and old.same_with_facts(recast.schema):
            return WriteResult(committed=False, applied_position=here)
        if here != expected:
            raise wrong_position(self._path, here, expected)
        refuse_features(self._path, opened.table, self._form.partition_by)
        own = recast_for_spec(self._form, recast)
        laid = plan_columns(opened.table, own)
        shape = replace(own.schema, columns=laid.columns, facts=None)
        refuse_names(shape)
        position = self._position(recast.schema, here, opened.commit_record.latest_time, opened.commit_record.replay_id)
        self.add_features(opened.folder, opened.table, shape)
        before, written = opened.table.version(), 0
        if not only_adds(opened.table, laid):
            written = self._recast(opened, shape, laid, position)
        elif laid.added:
            fields = list(DeltaSchema.from_arrow(pa.schema([(c.name, c.type) for c in laid.added])).fields)
            self._commit(lambda: opened.table.alter.add_columns(fields, commit_properties=position.properties()))
        else:
            self._exchange(opened, shape, [], [], {}, position)
        self._make_durable(opened.folder, before + 1)
        return WriteResult(committed=True, applied_position=here, bytes=written)

    def _recast(self, opened: OpenedDelta, shape: TableSchema, laid: RecastColumns, position: CommitRecord) -> int:
        """Write every row anew, and swap the files; how many bytes that took."""
        with self._staging(RECAST) as name:
            files = self._staged(name, shape, recast_rows(opened.table, laid))
            self._swap(opened.folder, opened.table, shape, files, position)
        return sum(file.size for file in files)

    def set_columns(self, opened: OpenedDelta, shape: TableSchema, laid: RecastColumns, schema: TableSchema) -> None:
        """Give a table with column mapping these columns, of which none has other values; no file is touched."""
        refuse_unknown(self._path, opened.table)
        featured = RawDeltaCommit(folder=opened.folder, table=opened.table)
        after = replace(opened.commit_record, schema=schema)
        self._commit(lambda: featured.set_columns(shape, laid, after))
        self._make_durable(opened.folder, featured.next_version)

    @_explained
    def compact(self, upkeep: UpkeepPlan, expected: AppliedPosition) -> UpkeepResult:
        opened = self._at(expected)
        table = opened.table
        if features_of(table).any:
            return self._tend_featured(opened, upkeep)
        done = UpkeepResult()
        adds = pa.table(table.get_add_actions(flatten=True))
        parts = partition_values_of(table, adds)
        names = map(data_path, adds.column("path").to_pylist())
        sizes = dict(zip(names, adds.column("size_bytes").to_pylist(), strict=True))
        if upkeep.file_bytes is not None and (some := files_to_compact(sizes, upkeep.file_bytes, parts)):
            refuse_features(self._path, table, self._form.partition_by)
            shape = self._form.stored_schema(opened.commit_record.schema)
            stored = replace(shape, columns=(*shape.columns, *retained_columns(table, shape)), facts=None)
            rows = all_rows(opened.folder, some, stored.columns, parts)
            written = self._exchange(opened, stored, [rows], some, parts, opened.commit_record, changes_rows=False)
            done = UpkeepResult(files_compacted=written.removed, files_written=written.added, bytes=written.bytes)
        if (age := upkeep.remove_after_seconds) is not None:
            opened = self._at(expected)
            table, before = opened.table, opened.table.version()
            removed, properties = list[int](), opened.commit_record.properties()
            # Not by delta-rs: it would give a table with timestamps without a zone the feature `variantType` as well.
            later = RawDeltaCommit(folder=opened.folder, table=table)
            self._commit(lambda: later.keep_removed_files(age, opened.commit_record))
            table.update_incremental()
            self._commit(lambda: removed.append(remove_files(opened.folder, table, age, properties)))
            table.update_incremental()
            for version in range(before + 1, table.version() + 1):
                self._make_durable(opened.folder, version)
            done = replace(done, files_removed=removed[0])
        return done

    def _tend_featured(self, opened: OpenedDelta, upkeep: UpkeepPlan) -> UpkeepResult:
        refuse_unknown(self._path, opened.table)
        featured, done = RawDeltaCommit(folder=opened.folder, table=opened.table), UpkeepResult()
        parts = featured.parts()
        if upkeep.file_bytes is not None and (some := files_to_compact(featured.sizes(), upkeep.file_bytes, parts)):
            shape = self._form.stored_schema(opened.commit_record.schema)
            stored = replace(shape, columns=(*shape.columns, *retained_columns(opened.table, shape)), facts=None)
            own, by = featured.in_files(stored), featured.names_in_files(self._form.partition_by)
            with self._staging(EXCHANGE) as name:
                files = self._staged(name, own, featured.rows_of(some, own.columns, parts), by)
                adds = self._adds_of(opened.folder, files)
                self._commit(lambda: featured.exchange(some, adds, opened.commit_record, changes_rows=False))
            self._make_durable(opened.folder, featured.next_version)
            done = UpkeepResult(files_compacted=len(some), files_written=len(adds), bytes=sum(add.size for add in adds))
        if (age := upkeep.remove_after_seconds) is not None:
            opened = self._at(opened.commit_record.applied_position)
            later = RawDeltaCommit(folder=opened.folder, table=opened.table)
            self._commit(lambda: later.keep_removed_files(age, opened.commit_record))
            opened.table.update_incremental()
            done = replace(done, files_removed=later.remove(age))
        return done

    def _at(self, expected: AppliedPosition) -> OpenedDelta:
        """The table as it stands; refuses one that is elsewhere."""
        opened = self.opened()
        if opened.commit_record.applied_position != expected:
            raise wrong_position(self._path, opened.commit_record.applied_position, expected)
        return opened

    def opened(self) -> OpenedDelta:
        """The table as it stands; refuses where `cursor` is None."""
        opened = self._open()
        if opened is None:
            raise not_loaded(self._path)
        return opened

    @_explained
    def _write(
        self, opened: OpenedDelta, schema: TableSchema, folded: FoldedChanges, position: CommitRecord
    ) -> CommitFiles:
        """One commit: the files that hold a row concerned are exchanged, and rows that come in are added."""
        if self._features is not None:
            refuse_for_delta_rs(self._path, features_of(opened.table), ours=True)
        refuse_features(self._path, opened.table, self._form.partition_by)
        found = plan_rewrite(self._form, schema, opened.folder, opened.table, folded)
        return self._exchange(
            opened, found.stored, found.parts(), found.removed_files, found.partition_values, position
        )

    def _commit(self, write: Callable[[], object]) -> None:
        """Run the one call that commits."""
        failpoints.hit("table.before_commit")
        try:
            write()
        except CommitFailedError as exc:
            raise concurrent_commit(self._path) from exc
        except (DeltaError, OSError) as exc:
            raise unreadable(self._path, exc) from exc
        failpoints.hit("table.after_commit")

    def _make_durable(self, folder: Path, version: int) -> None:
        """Push a commit to the disk, where the files that it adds are already."""
        try:
            sync_commit(folder, version)
        except OSError as exc:
            raise unreadable(self._path, exc) from exc

    def _position(
        self, schema: TableSchema, cursor: AppliedPosition, clock: int, late: str | None = None
    ) -> CommitRecord:
        return CommitRecord(
            log=self._log_id, applied_position=cursor, schema=schema, spec=self._form, latest_time=clock, replay_id=late
        )

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

    def _open(self) -> OpenedDelta | None:
        """The table at its newest version; None if it holds no position of this log."""
        opened = self._open_any()
        if opened is not None:
            refuse_other_spec(self._path, self._form, opened.commit_record)
        return opened

    def _open_any(self) -> OpenedDelta | None:
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
        position = commit_record_of(folder, table.version(), self._log_id)
        if position.applied_position.seq > seq:  # a number that is ahead is left by a refresh with Spark that went back
            raise ForeignWrite(
                "the table's position and its transaction number differ", path=self._path, hint=REPLACE_HINT
            )
        return OpenedDelta(folder=folder, table=table, commit_record=position)

    def _own_table(self, source: TableId) -> DeltaTable | None:
        """What a load of this source table may replace, whoever changed it; None where there is nothing."""
        newest = self._newest()
        if newest is None:
            refuse_inside(self._path)
            return None
        folder, table = newest
        if table.transaction_version(app_id(self._log_id)) is None:
            other = last_commit_record(folder, table.version())
            raise location_taken(self._path, other.log if other else None)
        if (made_of := source_of(folder, table.version())) not in (None, source):
            raise folder_taken(self._path, made_of, source)
        return table


EXCHANGE, RECAST = "exchange", "recast"
UNCOMMITTED = (EXCHANGE, RECAST)
"""How files are called that only a commit makes part of the table; who alone writes it may discard them."""


def _holds(table: DeltaTable, files: Sequence[StagedFile]) -> bool:
    """Whether the files are in the table already: a load's files are landed once, and all at once."""
    held = set(file_names(table))
    return any(file.path in held for file in files)
