"""`tailrace rebuild`: a lake table made anew from one of its own versions, or from what is kept of its last load, and
the log; the source is not asked.

The newest is taken that is known to hold what its position says and that the log can bring to the end. Changes are
applied to a table beside it, stretch by stretch as a pipeline applies them, and one commit swaps the two. Nothing else
applies meanwhile: the applier's lease is held.
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
"""A seed has no version that rows were put into later."""
NO_TABLE = "there is no lake table, and nothing is kept of a load of it"
_TOO_NEW = "it is newer than the position that is asked for"
Progress = Callable[[int, int], None]
"""Called with how many changes are replayed, and how many there are."""


@dataclass(frozen=True, kw_only=True)
class RebuildResult:
    """What a rebuild did."""

    schema: str
    table: str
    base_version: int | None
    """None for a seed: that is none of the table's versions."""
    base: str
    """`load`: as a load has landed it; `version`: with changes since; `seed`: what is kept of a load."""
    base_position: str
    base_rows: int
    changes: int
    """How many were replayed."""
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
    """Make the table anew, at a position of the log or at its end. An Iceberg table needs a session with the connector:
    one is started if it is not given."""
    log = ChangeLog.open(settings.log.path)
    table, position = _known(settings, log, name), None if to is None else Lsn.parse(to)
    try:
        held = LogLease(log.path, APPLIER_LEASE, wait_seconds=LEASE_SECONDS_MAX)
    except LogBusy as busy:
        raise LogBusy(
            "a process applies to the tables",
            **busy.fields,
            hint="Stop that `tailrace run` or `tailrace apply` first; capture may go on.",
        ) from busy
    try:
        with _maker(settings, log, table, spark) as maker:
            return _TableRebuild(settings, log, table, position, maker).run(from_version, progress)
    finally:
        held.release()


@contextmanager
def _maker(
    settings: PipelineSettings, log: ChangeLog, table: TableId, spark: SparkSession | None
) -> Iterator[RebuildBackend]:
    """Who makes the new table."""
    place = settings.tables.layout.location(table, log.log_id)
    if place.catalog is None:
        yield DeltaRebuildBackend(place)
        return
    # Spark is slow to import, and a Delta table does without it.
    from tailrace.pipeline.apply.spark_start import LazySpark
    from tailrace.spark.writers.iceberg_rebuild import IcebergRebuildBackend

    with LazySpark(settings, log, spark) as session:
        yield IcebergRebuildBackend(place, session.get)


class _TableRebuild:
    def __init__(
        self, settings: PipelineSettings, log: ChangeLog, table: TableId, to: Lsn | None, maker: RebuildBackend
    ) -> None:
        self._settings, self._log, self._table, self._to, self._maker = settings, log, table, to, maker
        # How the source writes values is known without asking it.
        value_of = open_source(settings, log.log_id).parse_value
        self._lives = TableRegistry(log, settings.tables.layout, settings.tables.policies_of, value_of, until=to)
        self._place = settings.tables.layout.location(table, log.log_id)
        self._seeds = KeptLoadStore(settings.tables.path, log.log_id).of(table)
        self._whole_after = ZERO
        """Rows of the base may be as new as this."""
        newest = self._lives.refresh_index()
        self._index = self._lives.index
        if to is not None and to > self._index.position:
            raise ConfigError(
                "the log does not reach this position",
                to=to,
                log_position=self._index.position,
                hint="Give a position up to there, or leave `--to` out.",
            )
        self._end = newest if to is None else self._index.commit_at(to)
        self._end_seq = self._index.next_seq(self._end) - 1

    def run(self, from_version: int | None, progress: Progress) -> RebuildResult:
        started = time.monotonic()
        self._place.open_for_reading().refuse_foreign(self._table)
        base = self._base(from_version)
        with self._maker.open_rebuild() as making:
            rows = making.restore_base(base)
            life = self._life(base, making.location)
            self._whole_after = self._mixed_until(life) or ZERO
            changes = self._replay(making, life, progress)
            cursor = base.commit_record.applied_position if life.load_only else self._cursor(base)
            self._hold(life, cursor)
            rows_now = making.swap(cursor)
        self._forget_failure()
        version = self._place.open_for_reading().version()
        assert version is not None, "just swapped"
        return RebuildResult(
            schema=self._table.schema,
            table=self._table.name,
            base_version=None if base.kept_load else base.version,
            base="seed" if base.kept_load else "load" if base.loaded else "version",
            base_position=str(base.commit_record.applied_position.position),
            base_rows=rows,
            changes=changes,
            position=str(cursor.position),
            commit=cursor.commit,
            rows=rows_now,
            version=version,
            seconds=time.monotonic() - started,
        )

    # The base.

    def _base(self, wanted: int | None) -> RebuildBase:
        """The newest that will do, or the version that is wished for."""
        why: str | None = None
        newest: RebuildBase | None = None
        first: RebuildBase | None = None
        for base in rebuild_bases_with(self._place, self._seeds):
            if wanted is not None and (base.version != wanted or base.kept_load is not None):
                continue
            reason = self._unusable(base)
            if reason is None:
                return base
            if reason == _TOO_NEW and wanted is None:
                first = base  # what stands before the position says why that will not do, if there is one
                continue
            newest = newest or base
            why = why or f"{'the kept seed' if base.kept_load else f'version {base.version}'}: {reason}"
        if wanted is not None:
            raise ConfigError(
                "the table cannot be rebuilt from this version",
                table=self._table,
                version=wanted,
                why=why or "no commit of this log made it, or the table no longer remembers it",
                hint="Leave `--from-version` out: the newest that will do is taken.",
            )
        if why is None and first is not None:
            raise LogTrimmed(
                "nothing is left of the table that is as old as this",
                table=self._table,
                to=self._to,
                hint=f"Give a position from {first.commit_record.applied_position.position} on, or leave `--to` out.",
            )
        if newest is not None:  # a load would replace the past as well, and that is a person's to say
            refuse_other_spec(self._place.path, self._place.spec, newest.commit_record)
        never = self._place.open_for_reading().version() is None
        raise LogTrimmed(
            "the log covers no version of the table that it could be rebuilt from",
            table=self._table,
            why=why or (NO_TABLE if never else "the table has no version of this log"),
            hint="`tailrace run FILE` loads it, unless it is held back." if never else RELOAD_TABLE_HINT,
        )

    def _unusable(self, base: RebuildBase) -> str | None:
        """Why the table cannot be rebuilt from this version."""
        cursor, life = base.commit_record.applied_position, self._life(base, self._place)
        if not self._place.spec.is_equivalent(base.commit_record.spec, base.commit_record.schema):
            return f"it was made as {base.commit_record.spec.described}"
        if cursor.commit > self._index.last_commit:
            return "it holds more than the log does"
        if self._to is not None and cursor.position > self._to:
            return _TOO_NEW
        if self._to is not None and base.recast and not self._has_come(life):
            return "it has a shape that came after the position that is asked for"
        if (mixed := self._mixed(base, life)) is not None:
            return mixed
        if (
            gone := self._index.trimmed_after_position(self._lives.log_numbers(life), cursor.seq, cursor.position)
        ) is not None:
            return f"the log no longer holds the changes after it ({gone.why})"
        if not life.load_only and self._lives.missing_from(life) is not None:
            return "changes after it were never captured"
        letters = DeadLetterStore(self._log.path, self._table)
        first = letters.first_seq
        version = BEFORE_ALL if base.kept_load else base.version
        if (
            first is not None
            and self._end_seq >= first
            and not letters.is_complete_at(cursor.seq, cursor.load, version)
        ):
            return "changes after it, or at it, were or are in dead letters"
        if base.kept_load is not None:
            return None if base.kept_load.is_intact else "files of it are gone, or are not what they were"
        return self._maker.why_unavailable(base)

    def _mixed(self, base: RebuildBase, life: ManagedTable) -> str | None:
        """Why a base will not do some of whose rows are newer than others, for they were read at different times. Of a
        seed the log makes them one moment's, as it did when the load had landed; see `_take`."""
        load = base.commit_record.applied_position.load
        if load is not None and self._lives.load_store.ahead_ranges(load) is None:
            return "it is no longer known whether some of its rows are newer than others"
        until = self._mixed_until(life)
        if until is None or (base.kept_load is not None and until <= (self._to or self._index.position)):
            return None
        return f"some of its rows are newer than others, up to {until}"

    def _mixed_until(self, life: ManagedTable) -> Lsn | None:
        """What the log must pass for the table to be one moment's; None if it is that. So it also is where the log has
        passed that, and had nothing for the table on the way."""
        cursor = life.applied_position
        assert cursor is not None, "a base has one"
        until = None if cursor.load is None else self._lives.load_store.ahead_until(cursor.load, cursor.position)
        if until is None or self._index.position < until:
            return until
        pending = self._lives.pending(life, self._index.last_commit)
        return until if any(self._index.start_of(item.first) < until for item in pending) else None

    def _has_come(self, life: ManagedTable) -> bool:
        """Whether a change of the table's shape is among those that are replayed."""
        shape = life.schema
        assert shape is not None, "a base has one"
        return any(
            self._lives.schema_of_slice(shape, item).same_with_facts(shape)
            for item in self._lives.pending(life, self._end)
        )

    def _life(self, base: RebuildBase, place: TableLocation) -> ManagedTable:
        life = ManagedTable(self._table, place, state=TableState.CATCHING_UP)
        life.applied_position, life.schema = base.commit_record.applied_position, base.commit_record.schema
        life.load_only = self._settings.load.mode_of(self._table) == "initial_only"
        return life

    # The replay.

    def _replay(self, making: RebuildSession, life: ManagedTable, progress: Progress) -> int:
        """Apply what the log has up to the end; how many changes."""
        total, done = self._pending(life), 0
        progress(done, total)
        while life.applied_position is not None and life.applied_position.seq < self._end_seq:
            stretch = self._lives.next_range(life, self._end)
            if stretch is None:
                _refuse_stopped(life)
                break
            done += self._take(making, life, self._clipped(stretch))
            progress(min(done, total), total)
        return done + self._replay_straddling(making, life)

    def _pending(self, life: ManagedTable) -> int:
        return sum(item.rows for item in self._lives.pending(life, self._end))

    def _clipped(self, stretch: ApplyRange) -> ApplyRange:
        """What is sealed lies in groups of many commits, of which the last may go on past the end."""
        if stretch.recast is not None or stretch.position_after.seq <= self._end_seq:
            return stretch
        slices = tuple(replace(item, last_seq=min(item.last_seq, self._end_seq)) for item in stretch.slices)
        position = max(stretch.position_after.position, self._index.end_of(self._end))
        return ApplyRange(
            slices, replace(stretch.position_after, seq=self._end_seq, commit=self._end, position=position)
        )

    def _take(self, making: RebuildSession, life: ManagedTable, stretch: ApplyRange, upto: Lsn | None = None) -> int:
        """One commit of the new table; how many changes came in."""
        assert life.applied_position is not None, "a base has one"
        assert life.schema is not None, "a base has one"
        if stretch.recast is not None:
            making.evolve(stretch.recast, life.applied_position)
            life.record_commit(life.applied_position, stretch.recast.schema)
            return 0
        work = ApplyWork(
            table=self._table,
            log=self._log.path,
            location=life.location,
            slices=stretch.slices,
            schema=life.schema,
            expected=life.applied_position,
            position_after=stretch.position_after,
            until=upto,
        )
        taken = making.apply(work, mixed=life.applied_position.position < self._whole_after)
        life.record_commit(taken.applied_position, life.schema)
        return taken.changes

    def _replay_straddling(self, making: RebuildSession, life: ManagedTable) -> int:
        """The commit that the position lies in: those of its transactions that ended at or before it."""
        if self._to is None or self._to <= self._index.end_of(self._end) or life.load_only:
            return 0
        after, done = self._end + 1, 0
        while pending := [item for item in self._lives.pending(life, after) if item.first <= after <= item.last]:
            # Looked at first: a shape that comes later must not be taken on.
            batches = self._log.read(
                after,
                after,
                tables=[pending[0].table],
                after_seq=life.applied_position.seq if life.applied_position else 0,
                to_seq=pending[0].last_seq,
            )
            if not any(rows_until_position(batch, self._to).data.num_rows for batch in batches if batch.data.num_rows):
                break
            stretch = self._lives.next_range(life, after)
            if stretch is None:
                _refuse_stopped(life)
                break
            before = done
            done += self._take(making, life, stretch, self._to)
            if stretch.recast is None and done == before:
                break
        return done

    # The end.

    def _cursor(self, base: RebuildBase) -> AppliedPosition:
        """Where the table stands then."""
        was = base.commit_record.applied_position
        if self._to is not None:
            return replace(self._lives.applied_position_at(self._to), load=was.load)
        return AppliedPosition(
            seq=max(was.seq, self._end_seq),
            commit=max(was.commit, self._end),
            position=max(was.position, self._index.position),
            load=was.load,
        )

    def _hold(self, life: ManagedTable, cursor: AppliedPosition) -> None:
        """Have the log keep what the table will lack, before it does."""
        others = [hint for hint in consumers.read_table_progress(self._log.path) if hint.table != self._table]
        numbers = tuple(self._lives.log_numbers(life))
        mine = TableProgress(table=self._table, numbers=numbers, commit=cursor.commit, seq=cursor.seq)
        consumers.write_table_progress(self._log.path, [*others, mine])

    def _forget_failure(self) -> None:
        """Why a process gave up the table of before is over; what it was loaded with stays known."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            path = self._log.path / STATUS_FILE
            stored = json.loads(path.read_bytes())
            for item in stored["tables"]:
                if TableId.from_json(item) == self._table:
                    item.update(state=TableState.CATCHING_UP.value, reason=None, detail=None, hint=None)
            files.replace(path, json.dumps(stored).encode())


def _refuse_stopped(life: ManagedTable) -> None:
    """Raise why the table goes no further; nothing, if there is nothing left to do."""
    if life.reload_reason is not None:
        raise SchemaChanged(
            "the log alone does not bring the table over a change of its shape",
            table=life.table,
            why=life.reload_reason,
            hint=RELOAD_TABLE_HINT,
        )
    if life.state.is_blocked and life.error is not None:
        raise life.error


def _known(settings: PipelineSettings, log: ChangeLog, name: str) -> TableId:
    """The table of this name that the log knows and the settings match."""
    wanted = sorted(table for table in known_tables(log) if settings.has(table))
    found = [table for table in wanted if str(table) == name]
    if len(found) == 1:
        return found[0]
    raise ConfigError(
        f"`{name}` is no table of this pipeline" if not found else f"`{name}` names two tables",
        hint=suggest_tables(name, wanted),
    )
