"""Rebuild a lake table, for `tailrace rebuild`; the source is not asked.

The base is one of the table's own versions, or the kept files of its last load. The rebuild takes the newest base that
surely holds what its position says, and that the log can bring to the end. Changes are applied to a second table in
ranges, as a pipeline applies them. One commit then swaps the two. No other process applies meanwhile: the rebuild holds
the applier's lease.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tailrace.changelog.read import consumers
from tailrace.changelog.read.consumers import TableProgress
from tailrace.changelog.read.reader import ChangeLog
from tailrace.changelog.read.row_steps import rows_until_position
from tailrace.changelog.write.log_lease import LogLease
from tailrace.control.load_requests import suggest_tables
from tailrace.deadletters.store import DeadLetterStore
from tailrace.errors import RELOAD_TABLE_HINT, ConfigError, LogBusy, LogTrimmed, SchemaChanged
from tailrace.model.position import ZERO, Lsn
from tailrace.model.schema import TableId
from tailrace.pipeline.capture.source_factory import open_source
from tailrace.pipeline.config.settings import PipelineSettings
from tailrace.pipeline.report import TableState
from tailrace.pipeline.status import APPLIER_LEASE, STATUS_FILE, known_tables
from tailrace.pipeline.tables.managed_table import ApplyRange, ManagedTable
from tailrace.pipeline.tables.registry import TableRegistry
from tailrace.storage import files
from tailrace.tables.delta.load_snapshots import KeptLoadStore
from tailrace.tables.delta.rebuild_table import RebuildBase, rebuild_bases_with
from tailrace.tables.location import TableLocation
from tailrace.tables.port import AppliedPosition
from tailrace.tables.table_errors import refuse_other_spec
from tailrace.tasks.rebuild_backend import DeltaRebuildBackend, RebuildBackend, RebuildSession
from tailrace.tasks.work import ApplyWork

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LEASE_SECONDS_MAX = 2.0
BEFORE_ALL = -1
"""Version of a kept load: older than every version that dead letters were replayed into."""
NO_TABLE = "there is no lake table, and no kept load of it"
_TOO_NEW = "it is newer than the given position"
Progress = Callable[[int, int], None]
"""Called with the changes replayed so far, and the total."""


@dataclass(frozen=True, kw_only=True)
class RebuildResult:
    """The result of a rebuild."""

    schema: str
    table: str
    base_version: int | None
    """None for a kept load: it is not a version of the table."""
    base: str
    """`load`: version of a load commit; `version`: a later one; `seed`: a kept load."""
    base_position: str
    base_rows: int
    changes: int
    """Number of changes that were replayed."""
    position: str
    commit: int
    rows: int
    version: int
    seconds: float

    @property
    def name(self) -> str:
        return f"{self.schema}.{self.table}"

    def to_json(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "seconds": round(self.seconds, 3)}


def rebuild(
    settings: PipelineSettings,
    name: str,
    *,
    to: str | None,
    from_version: int | None,
    progress: Progress,
    spark: SparkSession | None = None,
) -> RebuildResult:
    """Rebuild the table, at a position of the log or at its end.

    An Iceberg table needs a session with the connector; one is started if it is not given.
    """
    log = ChangeLog.open(settings.log.path)
    table, position = _find_table(settings, log, name), None if to is None else Lsn.parse(to)
    try:
        lease = LogLease(log.path, APPLIER_LEASE, wait_seconds=LEASE_SECONDS_MAX)
    except LogBusy as busy:
        raise LogBusy(
            "another process applies to the tables",
            **busy.fields,
            hint="Stop that `tailrace run` or `tailrace apply` first; capture may continue.",
        ) from busy
    try:
        with _open_backend(settings, log, table, spark) as backend:
            return _TableRebuild(settings, log, table, position, backend).run(from_version, progress)
    finally:
        lease.release()


@contextmanager
def _open_backend(
    settings: PipelineSettings, log: ChangeLog, table: TableId, spark: SparkSession | None
) -> Iterator[RebuildBackend]:
    """Yield the backend that makes the new table."""
    location = settings.tables.layout.location(table, log.log_id)
    if location.catalog is None:
        yield DeltaRebuildBackend(location)
        return
    # Spark is slow to import, and a Delta table does without it.
    from tailrace.pipeline.apply.spark_start import LazySpark
    from tailrace.spark.writers.iceberg_rebuild import IcebergRebuildBackend

    with LazySpark(settings, log, spark) as lazy_spark:
        yield IcebergRebuildBackend(location, lazy_spark.get)


class _TableRebuild:
    """One rebuild of one table."""

    def __init__(
        self, settings: PipelineSettings, log: ChangeLog, table: TableId, to: Lsn | None, backend: RebuildBackend
    ) -> None:
        self._settings, self._log, self._table, self._to, self._backend = settings, log, table, to, backend
        # The source is not connected to: only its value parser is used.
        parse_value = open_source(settings, log.log_id).parse_value
        self._registry = TableRegistry(log, settings.tables.layout, settings.tables.policies_of, parse_value, until=to)
        self._location = settings.tables.layout.location(table, log.log_id)
        self._kept_loads = KeptLoadStore(settings.tables.path, log.log_id).of(table)
        self._whole_after = ZERO
        """The base may hold rows as new as this position."""
        newest = self._registry.refresh_index()
        self._index = self._registry.index
        if to is not None and to > self._index.position:
            raise ConfigError(
                "the log does not reach this position",
                to=to,
                log_position=self._index.position,
                hint="Give a position up to the log's, or leave `--to` out.",
            )
        self._end = newest if to is None else self._index.commit_at(to)
        self._end_seq = self._index.next_seq(self._end) - 1

    def run(self, from_version: int | None, progress: Progress) -> RebuildResult:
        started = time.monotonic()
        self._location.open_for_reading().refuse_foreign(self._table)
        base = self._base(from_version)
        with self._backend.open_rebuild() as session:
            rows = session.restore_base(base)
            managed = self._managed_table(base, session.location)
            self._whole_after = self._mixed_until(managed) or ZERO
            changes = self._replay(session, managed, progress)
            applied = base.commit_record.applied_position if managed.load_only else self._applied_position(base)
            self._hold_log(managed, applied)
            rows_now = session.swap(applied)
        self._forget_failure()
        version = self._location.open_for_reading().version()
        assert version is not None, "just swapped"
        return RebuildResult(
            schema=self._table.schema,
            table=self._table.name,
            base_version=None if base.kept_load else base.version,
            base="seed" if base.kept_load else "load" if base.loaded else "version",
            base_position=str(base.commit_record.applied_position.position),
            base_rows=rows,
            changes=changes,
            position=str(applied.position),
            commit=applied.commit,
            rows=rows_now,
            version=version,
            seconds=time.monotonic() - started,
        )

    # The base.

    def _base(self, version: int | None) -> RebuildBase:
        """Return the newest usable base, or the requested version."""
        why: str | None = None
        newest: RebuildBase | None = None
        first: RebuildBase | None = None
        for base in rebuild_bases_with(self._location, self._kept_loads):
            if version is not None and (base.version != version or base.kept_load is not None):
                continue
            reason = self._unusable(base)
            if reason is None:
                return base
            if reason == _TOO_NEW and version is None:
                first = base  # an older base that is unusable gives the better reason
                continue
            newest = newest or base
            why = why or f"{'the kept load' if base.kept_load else f'version {base.version}'}: {reason}"
        if version is not None:
            raise ConfigError(
                "the table cannot be rebuilt from this version",
                table=self._table,
                version=version,
                why=why or "no commit of this log made it, or it was removed",
                hint="Leave `--from-version` out to use the newest usable version.",
            )
        if why is None and first is not None:
            raise LogTrimmed(
                "no version of the table is as old as this position",
                table=self._table,
                to=self._to,
                hint=f"Give a position from {first.commit_record.applied_position.position} on, or leave `--to` out.",
            )
        if newest is not None:  # a load would also replace the past, and a person must decide that
            refuse_other_spec(self._location.path, self._location.spec, newest.commit_record)
        never = self._location.open_for_reading().version() is None
        raise LogTrimmed(
            "no version of the table can be rebuilt with this log",
            table=self._table,
            why=why or (NO_TABLE if never else "the table has no version of this log"),
            hint="Run `tailrace run FILE`: it loads the table, unless its loads are paused or stopped."
            if never
            else RELOAD_TABLE_HINT,
        )

    def _unusable(self, base: RebuildBase) -> str | None:
        """Return why the table cannot be rebuilt from this base; None if it can."""
        applied, managed = base.commit_record.applied_position, self._managed_table(base, self._location)
        if not self._location.spec.is_equivalent(base.commit_record.spec, base.commit_record.schema):
            return f"it was written as {base.commit_record.spec.described}"
        if applied.commit > self._index.last_commit:
            return "it is ahead of the log"
        if self._to is not None and applied.position > self._to:
            return _TOO_NEW
        if self._to is not None and base.recast and not self._has_changes_in_base_schema(managed):
            return "its schema is newer than the given position"
        if (mixed_reason := self._mixed_reason(base, managed)) is not None:
            return mixed_reason
        if (
            trimmed := self._index.trimmed_after_position(
                self._registry.log_numbers(managed), applied.seq, applied.position
            )
        ) is not None:
            return f"the log no longer has the changes after it ({trimmed.why})"
        if not managed.load_only and self._registry.missing_from(managed) is not None:
            return "changes after it were never captured"
        dead_letters = DeadLetterStore(self._log.path, self._table)
        first = dead_letters.first_seq
        version = BEFORE_ALL if base.kept_load else base.version
        if (
            first is not None
            and self._end_seq >= first
            and not dead_letters.is_complete_at(applied.seq, applied.load, version)
        ):
            return "some changes up to or after it were or are dead letters"
        if base.kept_load is not None:
            return None if base.kept_load.is_intact else "some of its files are missing or changed"
        return self._backend.why_unavailable(base)

    def _mixed_reason(self, base: RebuildBase, managed: ManagedTable) -> str | None:
        """Return why a base with rows read at different times cannot be used.

        For a kept load, the log brings all rows to one position, as it did after the load commit; see `_apply`.
        """
        load = base.commit_record.applied_position.load
        if load is not None and self._registry.load_store.ahead_ranges(load) is None:
            return "it is unknown whether some of its rows are newer than others"
        until = self._mixed_until(managed)
        if until is None or (base.kept_load is not None and until <= (self._to or self._index.position)):
            return None
        return f"some of its rows are newer than others, up to {until}"

    def _mixed_until(self, managed: ManagedTable) -> Lsn | None:
        """Return the position that the log must pass to make all rows consistent.

        None if they are already. They are also where the log has passed that position without changes for the table.
        """
        applied = managed.applied_position
        assert applied is not None, "a base has one"
        until = None if applied.load is None else self._registry.load_store.ahead_until(applied.load, applied.position)
        if until is None or self._index.position < until:
            return until
        pending = self._registry.pending(managed, self._index.last_commit)
        return until if any(self._index.start_of(item.first) < until for item in pending) else None

    def _has_changes_in_base_schema(self, managed: ManagedTable) -> bool:
        """Return whether a change to replay already has the schema of the base."""
        schema = managed.schema
        assert schema is not None, "a base has one"
        return any(
            self._registry.schema_of_slice(schema, item).same_with_facts(schema)
            for item in self._registry.pending(managed, self._end)
        )

    def _managed_table(self, base: RebuildBase, location: TableLocation) -> ManagedTable:
        managed = ManagedTable(self._table, location, state=TableState.CATCHING_UP)
        managed.applied_position, managed.schema = base.commit_record.applied_position, base.commit_record.schema
        managed.load_only = self._settings.load.mode_of(self._table) == "initial_only"
        return managed

    # The replay.

    def _replay(self, session: RebuildSession, managed: ManagedTable, progress: Progress) -> int:
        """Apply the log up to the end; return the number of changes."""
        total, done = self._pending(managed), 0
        progress(done, total)
        while managed.applied_position is not None and managed.applied_position.seq < self._end_seq:
            apply_range = self._registry.next_range(managed, self._end)
            if apply_range is None:
                _refuse_stopped(managed)
                break
            done += self._apply(session, managed, self._clipped(apply_range))
            progress(min(done, total), total)
        return done + self._replay_straddling(session, managed)

    def _pending(self, managed: ManagedTable) -> int:
        return sum(item.rows for item in self._registry.pending(managed, self._end))

    def _clipped(self, apply_range: ApplyRange) -> ApplyRange:
        """Return the range without changes after the end.

        Sealed files hold groups of many commits, and the last group may go past the end.
        """
        if apply_range.recast is not None or apply_range.position_after.seq <= self._end_seq:
            return apply_range
        slices = tuple(replace(item, last_seq=min(item.last_seq, self._end_seq)) for item in apply_range.slices)
        position = max(apply_range.position_after.position, self._index.end_of(self._end))
        return ApplyRange(
            slices, replace(apply_range.position_after, seq=self._end_seq, commit=self._end, position=position)
        )

    def _apply(
        self, session: RebuildSession, managed: ManagedTable, apply_range: ApplyRange, upto: Lsn | None = None
    ) -> int:
        """Make one commit of the new table; return the number of changes in it."""
        assert managed.applied_position is not None, "a base has one"
        assert managed.schema is not None, "a base has one"
        if apply_range.recast is not None:
            session.evolve(apply_range.recast, managed.applied_position)
            managed.record_commit(managed.applied_position, apply_range.recast.schema)
            return 0
        work = ApplyWork(
            table=self._table,
            log=self._log.path,
            location=managed.location,
            slices=apply_range.slices,
            schema=managed.schema,
            expected=managed.applied_position,
            position_after=apply_range.position_after,
            until=upto,
        )
        taken = session.apply(work, mixed=managed.applied_position.position < self._whole_after)
        managed.record_commit(taken.applied_position, managed.schema)
        return taken.changes

    def _replay_straddling(self, session: RebuildSession, managed: ManagedTable) -> int:
        """Apply the transactions of the next commit that ended at or before the position."""
        if self._to is None or self._to <= self._index.end_of(self._end) or managed.load_only:
            return 0
        after, done = self._end + 1, 0
        while pending := [item for item in self._registry.pending(managed, after) if item.first <= after <= item.last]:
            # Read first: a schema of a later transaction must not be applied.
            batches = self._log.read(
                after,
                after,
                tables=[pending[0].table],
                after_seq=managed.applied_position.seq if managed.applied_position else 0,
                to_seq=pending[0].last_seq,
            )
            if not any(rows_until_position(batch, self._to).data.num_rows for batch in batches if batch.data.num_rows):
                break
            apply_range = self._registry.next_range(managed, after)
            if apply_range is None:
                _refuse_stopped(managed)
                break
            before = done
            done += self._apply(session, managed, apply_range, self._to)
            if apply_range.recast is None and done == before:
                break
        return done

    # The end.

    def _applied_position(self, base: RebuildBase) -> AppliedPosition:
        """Return the applied position of the rebuilt table."""
        base_position = base.commit_record.applied_position
        if self._to is not None:
            return replace(self._registry.applied_position_at(self._to), load=base_position.load)
        return AppliedPosition(
            seq=max(base_position.seq, self._end_seq),
            commit=max(base_position.commit, self._end),
            position=max(base_position.position, self._index.position),
            load=base_position.load,
        )

    def _hold_log(self, managed: ManagedTable, applied: AppliedPosition) -> None:
        """Make the log keep what the rebuilt table will lack, before the swap."""
        others = [hint for hint in consumers.read_table_progress(self._log.path) if hint.table != self._table]
        numbers = tuple(self._registry.log_numbers(managed))
        own = TableProgress(table=self._table, numbers=numbers, commit=applied.commit, seq=applied.seq)
        consumers.write_table_progress(self._log.path, [*others, own])

    def _forget_failure(self) -> None:
        """Clear the error of the old table from the status file."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            path = self._log.path / STATUS_FILE
            stored = json.loads(path.read_bytes())
            for item in stored["tables"]:
                if TableId.from_json(item) == self._table:
                    item.update(state=TableState.CATCHING_UP.value, reason=None, detail=None, hint=None)
            files.replace(path, json.dumps(stored).encode())


def _refuse_stopped(managed: ManagedTable) -> None:
    """Raise the reason why the table stops; return if there is nothing left to do."""
    if managed.reload_reason is not None:
        raise SchemaChanged(
            "the log alone cannot carry the table over a schema change",
            table=managed.table,
            why=managed.reload_reason,
            hint=RELOAD_TABLE_HINT,
        )
    if managed.state.is_blocked and managed.error is not None:
        raise managed.error


def _find_table(settings: PipelineSettings, log: ChangeLog, name: str) -> TableId:
    """Return the table of this name that the log knows and the settings match."""
    wanted = sorted(table for table in known_tables(log) if settings.has(table))
    found = [table for table in wanted if str(table) == name]
    if len(found) == 1:
        return found[0]
    raise ConfigError(
        f"`{name}` is not a table of this pipeline" if not found else f"`{name}` names two tables",
        hint=suggest_tables(name, wanted),
    )
