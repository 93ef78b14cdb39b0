"""Write Delta tables on one machine, without a jar or JVM. We write the files, and delta-rs commits them.

Every commit is a compare-and-swap on the version that was read, and has our position. There is no other way to write
here. (Only a change of partitioning, which replaces all rows, checks the version first and then commits.) Everything
that can be refused is refused before the commit. An object holds only plain data, so Spark may send it to its workers.

Callers pass the source's schema. What is written has the table's own schema, which the table spec derives from it
(`stored`).

The file is longer than most because it has everything that a commit may be refused for.
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
from tailrace.tables.fold.folded_changes import UPSERT, Flags, FoldedChanges
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
    """The table at one version."""

    folder: Path
    table: DeltaTable
    commit_record: CommitRecord

    @property
    def next_version(self) -> int:
        """The version that the next commit makes; a commit of any other version is refused."""
        return self.table.version() + 1


def _translate_errors(method: Callable[Concatenate[DeltaRsTable, P], T]) -> Callable[Concatenate[DeltaRsTable, P], T]:
    """Decorate a method so that unreadable and unwritable files raise our error."""

    @functools.wraps(method)
    def translated(table: DeltaRsTable, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(table, *args, **kwargs)
        except (DeltaError, OSError, pa.ArrowException) as exc:
            raise unreadable(table._path, exc) from exc

    return translated


class DeltaRsTable:
    """A table of one change log, as `LakeTable` specifies."""

    def __init__(
        self,
        path: Path,
        log_id: str,
        spec: TableSpec = PLAIN_MIRROR,
        features: Features | None = None,
        file_bytes: int = FILE_BYTES,
    ) -> None:
        """Describe a table; it is opened by each method.

        `features` are what a load gives the table where Spark's connector writes its rows. None: delta-rs writes them,
        and the table may have no features. `file_bytes` is the target size of a file.
        """
        self._path = path.absolute()
        self._log_id = log_id
        self._spec = spec
        self._features = features
        self._file_bytes = file_bytes

    def applied_position(self) -> AppliedPosition | None:
        return None if (opened := self._open()) is None else opened.commit_record.applied_position

    def schema(self) -> TableSchema | None:
        return None if (opened := self._open()) is None else opened.commit_record.schema

    def replay_id(self) -> str | None:
        return None if (opened := self._open()) is None else opened.commit_record.replay_id

    def columns(self) -> list[str]:
        """Return the names of all columns, including those that the source has dropped."""
        return list(column_types(self.opened().table))

    def rows(self) -> int:
        """Return the number of rows, from the files' statistics, which all our writers add."""
        newest = self._newest()
        if newest is None:
            return 0
        folder, table = newest
        adds = pa.table(table.get_add_actions(flatten=True))
        removed = removed_rows(folder, table.version()) if features_of(table).deletion_vectors else 0
        return int(pc.sum(adds.column("num_records"), min_count=0).as_py()) - removed

    def version(self) -> int | None:
        """Return Delta's own number of the newest version; None if there is no table."""
        newest = self._newest()
        return None if newest is None else newest[1].version()

    def identity(self, version: int | None = None) -> str | None:
        """Return the table's Delta id at a version; None if there is no such version.

        A folder whose table was made again has another id.
        """
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
        """Return the names of the newest version's data files."""
        newest = self._newest()
        return [] if newest is None else file_names(newest[1])

    def load(
        self,
        schema: TableSchema,
        batches: Iterable[pa.RecordBatch],
        position: AppliedPosition,
        *,
        origin: LoadOrigin | None = None,
    ) -> int:
        stored = self._spec.stored_schema(schema)
        refuse_names(stored)
        table = self._own_table(schema.table)
        origin = origin or LoadOrigin(seq=position.seq, position=str(position.position), read_at=time.time_ns() // 1000)
        with self._staging("load") as name:
            rows = with_added_columns(self._spec, schema, batches, origin)
            files = self._staged(name, stored, rows)
            return self._commit_files(table, schema, files, position, origin)

    def commit_load(
        self,
        schema: TableSchema,
        files: Sequence[StagedFile],
        position: AppliedPosition,
        *,
        origin: LoadOrigin | None = None,
        kept: Sequence[Column] = (),
    ) -> int:
        refuse_names(self._spec.stored_schema(schema))
        return self._commit_files(self._own_table(schema.table), schema, files, position, origin, kept)

    def refuse_foreign(self, table: TableId) -> None:
        self._own_table(table)

    def _commit_files(
        self,
        table: DeltaTable | None,
        schema: TableSchema,
        files: Sequence[StagedFile],
        applied: AppliedPosition,
        origin: LoadOrigin | None,
        kept: Sequence[Column] = (),
    ) -> int:
        """Replace the table's contents, as they were when it was opened, by these files."""
        rows = sum(file.rows for file in files)
        if table is not None and _holds(table, files):
            return rows
        folder = make_folder(self._path)
        stored = self._spec.stored_schema(schema)
        stored = replace(stored, columns=(*stored.columns, *kept), facts=None) if kept else stored
        record = self._record(schema, applied, origin.read_at if origin else 0)
        adds = self._adds_of(folder, files)
        features = self._features or NO_FEATURES
        if features.any or (table is not None and features_of(table).any):
            if table is not None:
                refuse_unknown(self._path, table)
            raw = RawDeltaCommit(folder=folder, table=table)
            self._commit(lambda: raw.commit_load(features, stored, adds, record))
            self._make_durable(folder, raw.next_version)
            return rows
        if table is None:
            fields = delta_fields(stored)
            self._commit(lambda: create_table(folder, fields, adds, record))
            self._make_durable(folder, 0)
            return rows
        self._swap(folder, table, stored, files, record)
        # The object does not update after its own commit, but that can only be the next version.
        self._make_durable(folder, table.version() + 1)
        return rows

    def _swap(
        self,
        folder: Path,
        table: DeltaTable,
        schema: TableSchema,
        files: Sequence[StagedFile],
        record: CommitRecord,
        mode: Literal["append", "overwrite"] = "overwrite",
    ) -> None:
        """Make the files all that the table holds, with these columns; or append them."""
        adds, partition_by = self._adds_of(folder, files), self._spec.partition_by
        if mode == "overwrite" and has_odd_file_names(table):
            refuse_unknown(self._path, table)
            raw = RawDeltaCommit(folder=folder, table=table)
            self._commit(lambda: raw.commit_load(NO_FEATURES, schema, adds, record))
            return
        if table.metadata().partition_columns != list(partition_by):
            assert mode == "overwrite", "a table with other partitions is replaced as a whole"
            self._commit(lambda: repartition(folder, table, delta_fields(schema), adds, record))
            return
        self.add_features(folder, table, schema)
        self._commit(
            lambda: table.create_write_transaction(
                [*adds],
                mode=mode,
                schema=delta_fields(schema),
                partition_by=list(partition_by),
                commit_properties=record.properties(),
            )
        )

    def _adds_of(self, folder: Path, files: Sequence[StagedFile]) -> list[AddAction]:
        return [add_action(self._path, folder, file) for file in files]

    def add_features(self, folder: Path, table: DeltaTable, schema: TableSchema) -> None:
        """Allow the table timestamps without a zone.

        A new schema does not add this feature. This is a separate commit that changes no rows. It repeats the position,
        unless others have written since: so a crash after it leaves a table that is as much ours as before.
        """
        if NTZ in (table.protocol().writer_features or ()) or not any(map(is_naive, schema.columns)):
            return
        try:
            opened = self._open_any()
            record = None if opened is None else opened.commit_record
        except (ForeignWrite, TableUnusable):
            record = None
        properties = CommitProperties(max_commit_retries=0) if record is None else record.properties()
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
        position: AppliedPosition,
        *,
        touch: bool = False,
        refetch: Refetch | None = None,
    ) -> WriteResult:
        opened = self.opened()
        here = opened.commit_record.applied_position
        if here.covers(position) or (folded.empty and not touch):
            return WriteResult(committed=False, applied_position=here)
        refuse_other_position(self._path, opened.commit_record, schema, expected)
        stored, clock = self._spec.stored_schema(schema), opened.commit_record.latest_time
        folded = clamp_times(stored, folded, clock)
        # A history never refetches, because its versions are made from past values. Without refetching, the write
        # finds missing rows.
        if refetch is not None and self._spec.mode is not TableMode.HISTORY:
            folded = replace(folded, rows=self._with_bases(opened, stored, folded.rows, refetch))
        record = self._record(schema, position, folded.latest_time or clock, opened.commit_record.replay_id)
        written = self._write(opened, stored, folded, record)
        upserted = int(np.count_nonzero(operations(folded) == UPSERT))
        return WriteResult(
            committed=True,
            applied_position=position,
            upserted=upserted,
            deleted=folded.rows.num_rows - upserted,
            bytes=written.bytes,
            version=opened.next_version,
        )

    def _with_bases(self, opened: OpenedDelta, stored: TableSchema, rows: pa.Table, refetch: Refetch) -> pa.Table:
        baseless = self._without_base(opened, stored, rows)
        if baseless is None:
            return rows
        answers = refetch(baseless.keys)  # outside error translation: an error here is the source's, not the table's
        return baseless.fill_from(answers, deleted_column=self._spec.deleted_column if self._spec.soft_delete else None)

    @_translate_errors
    def _without_base(self, opened: OpenedDelta, stored: TableSchema, rows: pa.Table) -> RowsWithoutBase | None:
        return find_rows_without_base(stored, opened.table, rows)

    @_translate_errors
    def keys_exist(self, schema: TableSchema, keys: pa.Table) -> Flags:
        stored = self._spec.stored_schema(schema)
        only = CURRENT if self._spec.mode is TableMode.HISTORY else None
        named = keys.rename_columns(list(map(self._spec.lake_name, keys.column_names)))
        return keys_exist(stored, self.opened().table, named, only)

    @_translate_errors
    def upsert_rows(
        self, schema: TableSchema, rows: pa.Table, expected: AppliedPosition, metadata: pa.Table | None = None
    ) -> WriteResult:
        opened = self.opened()
        refuse_other_position(self._path, opened.commit_record, schema, expected)
        stored = self._spec.stored_schema(schema)
        whole = clamp_times(
            stored, fold_for_upsert(self._spec, schema, rows, expected, metadata), opened.commit_record.latest_time
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

    @_translate_errors
    def append_rows(
        self,
        schema: TableSchema,
        folded: FoldedChanges,
        expected: AppliedPosition,
        *,
        previous_replay_id: str | None,
        replay_id: str,
    ) -> WriteResult:
        opened = self.opened()
        refuse_other_position(self._path, opened.commit_record, schema, expected)
        refuse_other_replay(self._path, opened.commit_record, previous_replay_id)
        record = replace(opened.commit_record, replay_id=replay_id)
        written = self._write(opened, self._spec.stored_schema(schema), folded, record)
        return WriteResult(
            committed=True,
            applied_position=expected,
            upserted=folded.rows.num_rows,
            bytes=written.bytes,
            version=opened.next_version,
        )

    @_translate_errors
    def merge_load(
        self,
        schema: TableSchema,
        files: Sequence[StagedFile],
        expected: AppliedPosition,
        position: AppliedPosition,
        *,
        keys: Sequence[StagedFile] | None = None,
        origin: LoadOrigin | None = None,
    ) -> WriteResult:
        appends = self._spec.mode is TableMode.APPEND
        if not schema.key and not appends:
            raise Unsupported(
                "a table without a key can only be reloaded as a whole", table=schema.table, hint=REPLACE_HINT
            )
        opened = self.opened()
        here, clock = opened.commit_record.applied_position, opened.commit_record.latest_time
        if (here != expected and here.covers(position)) or (appends and _holds(opened.table, files)):
            return WriteResult(committed=False, applied_position=here)
        refuse_other_position(self._path, opened.commit_record, schema, expected)
        origin = origin or LoadOrigin(seq=position.seq, position=str(position.position), read_at=time.time_ns() // 1000)
        record = self._record(schema, position, max(clock, origin.read_at), opened.commit_record.replay_id)
        if appends:
            self._swap(opened.folder, opened.table, self._spec.stored_schema(schema), files, record, mode="append")
            self._make_durable(opened.folder, opened.table.version() + 1)
            return WriteResult(committed=True, applied_position=position, upserted=sum(file.rows for file in files))
        refuse_features(self._path, opened.table, self._spec.partition_by)
        (compared, others), parts = split_compared(self._spec, schema), self._parts(opened, schema, files)
        key_files = None if keys is None else [file.path for file in keys]
        diff = diff_files(
            opened.folder,
            compared,
            table=file_names(opened.table),
            staged=[file.path for file in files],
            keys=file_names(opened.table) if self._spec.holds_messages else key_files,
            lake_only_columns=[*others, *retained_columns(opened.table, self._spec.stored_schema(schema))],
            retirement_rule=retirement_rule(self._spec, origin, clock),
            parts=parts,
        )
        if diff.empty and position == here:
            return WriteResult(committed=False, applied_position=here)
        rows, removed = ([], []) if diff.empty else ([diff.rows()], list(diff.staying))
        self._exchange(opened, diff.stored, rows, removed, parts, record)
        upserted, deleted = diff.counts()
        return WriteResult(committed=True, applied_position=position, upserted=upserted, deleted=deleted)

    def _parts(self, opened: OpenedDelta, schema: TableSchema, staged: Iterable[StagedFile]) -> PartitionValues:
        """Return the partition values, which are not in the files."""
        if not self._spec.partition_by:
            return {}
        columns = self._spec.stored_schema(schema).columns
        return {**partition_values_of(opened.table), **{file.path: values_of(file.values, columns) for file in staged}}

    def _exchange(
        self,
        opened: OpenedDelta,
        stored: TableSchema,
        rows: Iterable[Iterable[pa.RecordBatch]],
        removed: Sequence[str],
        parts: PartitionValues,
        record: CommitRecord,
        *,
        changes_rows: bool = True,
    ) -> CommitFiles:
        """Replace some files by new ones in one commit; without any, only the position moves."""
        folder, partition_by = opened.folder, self._spec.partition_by
        with self._staging(EXCHANGE) as name:
            staged = [self._staged(f"{name}-{n}", stored, batches) for n, batches in enumerate(rows)]
            adds = self._adds_of(folder, [file for files in staged for file in files])
            if has_odd_file_names(opened.table):
                refuse_unknown(self._path, opened.table)
                raw = RawDeltaCommit(folder=folder, table=opened.table)
                self._commit(lambda: raw.exchange(removed, adds, record, changes_rows=changes_rows))
            else:
                actions: list[AddAction | RemoveAction] = [replace(add, data_change=changes_rows) for add in adds]
                actions += remove_actions(folder, removed, parts, changes_rows=changes_rows)
                delta_schema, properties = delta_fields(stored), record.properties()
                self._commit(
                    lambda: opened.table.create_write_transaction(
                        actions,
                        mode="append",
                        schema=delta_schema,
                        partition_by=list(partition_by),
                        commit_properties=properties,
                    )
                )
        self._make_durable(folder, opened.next_version)
        return CommitFiles(len(adds), len(removed), sum(add.size for add in adds))

    def _staged(
        self, name: str, stored: TableSchema, rows: Iterable[pa.RecordBatch], partition_by: Sequence[str] | None = None
    ) -> tuple[StagedFile, ...]:
        """Stage rows in files of the target size, with the spec's partitions by default."""
        partition_by = self._spec.partition_by if partition_by is None else partition_by
        return stage(self._path, name, stored, rows, partition_by, file_bytes=self._file_bytes)

    @contextlib.contextmanager
    def _staging(self, kind: str) -> Iterator[str]:
        """Yield a name for files that will join the table; remove the files on failure."""
        name = f"{kind}-{uuid.uuid4().hex}"
        try:
            yield name
        except BaseException:
            with contextlib.suppress(TailraceError):  # the first error is the one to report
                discard(self._path, name)
            raise

    @_translate_errors
    def evolve(self, recast: Recast, expected: AppliedPosition) -> WriteResult:
        opened = self.opened()
        here, old = opened.commit_record.applied_position, opened.commit_record.schema
        if here == expected and old.same_with_facts(recast.schema):
            return WriteResult(committed=False, applied_position=here)
        if here != expected:
            raise wrong_position(self._path, here, expected)
        refuse_features(self._path, opened.table, self._spec.partition_by)
        own = recast_for_spec(self._spec, recast)
        plan = plan_columns(opened.table, own)
        new_schema = replace(own.schema, columns=plan.columns, facts=None)
        refuse_names(new_schema)
        record = self._record(recast.schema, here, opened.commit_record.latest_time, opened.commit_record.replay_id)
        self.add_features(opened.folder, opened.table, new_schema)
        before, written = opened.table.version(), 0
        if not only_adds(opened.table, plan):
            written = self._recast(opened, new_schema, plan, record)
        elif plan.added:
            fields = list(DeltaSchema.from_arrow(pa.schema([(c.name, c.type) for c in plan.added])).fields)
            self._commit(lambda: opened.table.alter.add_columns(fields, commit_properties=record.properties()))
        else:
            self._exchange(opened, new_schema, [], [], {}, record)
        self._make_durable(opened.folder, before + 1)
        return WriteResult(committed=True, applied_position=here, bytes=written)

    def _recast(self, opened: OpenedDelta, schema: TableSchema, plan: RecastColumns, record: CommitRecord) -> int:
        """Rewrite every row and swap the files; return the bytes written."""
        with self._staging(RECAST) as name:
            files = self._staged(name, schema, recast_rows(opened.table, plan))
            self._swap(opened.folder, opened.table, schema, files, record)
        return sum(file.size for file in files)

    def set_columns(self, opened: OpenedDelta, stored: TableSchema, plan: RecastColumns, schema: TableSchema) -> None:
        """Set the columns of a table with column mapping, when no value changes. No file is touched."""
        refuse_unknown(self._path, opened.table)
        raw = RawDeltaCommit(folder=opened.folder, table=opened.table)
        record = replace(opened.commit_record, schema=schema)
        self._commit(lambda: raw.set_columns(stored, plan, record))
        self._make_durable(opened.folder, raw.next_version)

    @_translate_errors
    def compact(self, upkeep: UpkeepPlan, expected: AppliedPosition) -> UpkeepResult:
        opened = self._at(expected)
        table = opened.table
        if features_of(table).any:
            return self._compact_with_features(opened, upkeep)
        done = UpkeepResult()
        adds = pa.table(table.get_add_actions(flatten=True))
        parts = partition_values_of(table, adds)
        names = map(data_path, adds.column("path").to_pylist())
        sizes = dict(zip(names, adds.column("size_bytes").to_pylist(), strict=True))
        if upkeep.file_bytes is not None and (chosen := files_to_compact(sizes, upkeep.file_bytes, parts)):
            refuse_features(self._path, table, self._spec.partition_by)
            own = self._spec.stored_schema(opened.commit_record.schema)
            stored = replace(own, columns=(*own.columns, *retained_columns(table, own)), facts=None)
            rows = all_rows(opened.folder, chosen, stored.columns, parts)
            written = self._exchange(opened, stored, [rows], chosen, parts, opened.commit_record, changes_rows=False)
            done = UpkeepResult(files_compacted=written.removed, files_written=written.added, bytes=written.bytes)
        if (age := upkeep.remove_after_seconds) is not None:
            opened = self._at(expected)
            table, before = opened.table, opened.table.version()
            removed, properties = list[int](), opened.commit_record.properties()
            # Not by delta-rs: it would also give a table with timestamps without a zone the feature `variantType`.
            later = RawDeltaCommit(folder=opened.folder, table=table)
            self._commit(lambda: later.keep_removed_files(age, opened.commit_record))
            table.update_incremental()
            self._commit(lambda: removed.append(remove_files(opened.folder, table, age, properties)))
            table.update_incremental()
            for version in range(before + 1, table.version() + 1):
                self._make_durable(opened.folder, version)
            done = replace(done, files_removed=removed[0])
        return done

    def _compact_with_features(self, opened: OpenedDelta, upkeep: UpkeepPlan) -> UpkeepResult:
        refuse_unknown(self._path, opened.table)
        raw, done = RawDeltaCommit(folder=opened.folder, table=opened.table), UpkeepResult()
        parts = raw.parts()
        if upkeep.file_bytes is not None and (chosen := files_to_compact(raw.sizes(), upkeep.file_bytes, parts)):
            stored_schema = self._spec.stored_schema(opened.commit_record.schema)
            stored = replace(
                stored_schema,
                columns=(*stored_schema.columns, *retained_columns(opened.table, stored_schema)),
                facts=None,
            )
            own, partition_by = raw.in_files(stored), raw.names_in_files(self._spec.partition_by)
            with self._staging(EXCHANGE) as name:
                files = self._staged(name, own, raw.rows_of(chosen, own.columns, parts), partition_by)
                adds = self._adds_of(opened.folder, files)
                self._commit(lambda: raw.exchange(chosen, adds, opened.commit_record, changes_rows=False))
            self._make_durable(opened.folder, raw.next_version)
            done = UpkeepResult(
                files_compacted=len(chosen), files_written=len(adds), bytes=sum(add.size for add in adds)
            )
        if (age := upkeep.remove_after_seconds) is not None:
            opened = self._at(opened.commit_record.applied_position)
            later = RawDeltaCommit(folder=opened.folder, table=opened.table)
            self._commit(lambda: later.keep_removed_files(age, opened.commit_record))
            opened.table.update_incremental()
            done = replace(done, files_removed=later.remove(age))
        return done

    def _at(self, expected: AppliedPosition) -> OpenedDelta:
        """Open the table; refuse one at another position."""
        opened = self.opened()
        if opened.commit_record.applied_position != expected:
            raise wrong_position(self._path, opened.commit_record.applied_position, expected)
        return opened

    def opened(self) -> OpenedDelta:
        """Open the table; refuse one without a position of this log."""
        opened = self._open()
        if opened is None:
            raise not_loaded(self._path)
        return opened

    @_translate_errors
    def _write(
        self, opened: OpenedDelta, schema: TableSchema, folded: FoldedChanges, record: CommitRecord
    ) -> CommitFiles:
        """Make one commit: replace the files that hold a changed row, and add new rows."""
        if self._features is not None:
            refuse_for_delta_rs(self._path, features_of(opened.table), ours=True)
        refuse_features(self._path, opened.table, self._spec.partition_by)
        plan = plan_rewrite(self._spec, schema, opened.folder, opened.table, folded)
        return self._exchange(opened, plan.stored, plan.parts(), plan.removed_files, plan.partition_values, record)

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
        """Flush a commit to disk; the files that it adds are there already."""
        try:
            sync_commit(folder, version)
        except OSError as exc:
            raise unreadable(self._path, exc) from exc

    def _record(
        self, schema: TableSchema, applied: AppliedPosition, latest_time: int, replay_id: str | None = None
    ) -> CommitRecord:
        return CommitRecord(
            log=self._log_id,
            applied_position=applied,
            schema=schema,
            spec=self._spec,
            latest_time=latest_time,
            replay_id=replay_id,
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
        """Open the newest version; None if it has no position of this log."""
        opened = self._open_any()
        if opened is not None:
            refuse_other_spec(self._path, self._spec, opened.commit_record)
        return opened

    def _open_any(self) -> OpenedDelta | None:
        """Open the newest version, with any table spec."""
        newest = self._newest()
        if newest is None:
            return None
        folder, table = newest
        seq = table.transaction_version(app_id(self._log_id))
        if seq is None:
            return None
        if self._features is None and (features := features_of(table)).any:
            refuse_for_delta_rs(self._path, features, ours=is_ours(folder, table.version(), self._log_id))
        record = commit_record_of(folder, table.version(), self._log_id)
        if record.applied_position.seq > seq:  # a reload with Spark that moved back leaves a number that is ahead
            raise ForeignWrite(
                "the table's position and its transaction number differ", path=self._path, hint=REPLACE_HINT
            )
        return OpenedDelta(folder=folder, table=table, commit_record=record)

    def _own_table(self, source: TableId) -> DeltaTable | None:
        """Return the table that a load of this source table may replace, or None."""
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
"""Name prefixes of files that only a commit makes part of the table.

The table's one writer may discard them.
"""


def _holds(table: DeltaTable, files: Sequence[StagedFile]) -> bool:
    """Return whether the table has these files.

    A load's files are committed once, all together.
    """
    current = set(file_names(table))
    return any(file.path in current for file in files)
