"""Replay dead letters on request, while tables are applied.

Rows are refetched at once. The table takes them when it has passed the position they were read at, so nothing waits for
it. Without a key there is nothing to refetch by, and the dead letters' own changes are applied. A request is stored
until it is completed, so a process that starts later completes it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

from tailrace.capture.postgres.source import PostgresCapture
from tailrace.changelog.write import log_lease
from tailrace.deadletters.store import DeadLetterStore, tables_with_dead_letters
from tailrace.errors import Remedy, TailraceError
from tailrace.model.position import Lsn
from tailrace.model.schema import TableId
from tailrace.pipeline.loads.load_commit import RunTasks, run_task
from tailrace.pipeline.tables.managed_table import ManagedTable
from tailrace.pipeline.tables.registry import TableRegistry
from tailrace.tasks.keyed_replay import RefetchWork, ReplayRowsWork, refetch_dead_letters, replay_rows
from tailrace.tasks.keyless_replay import ReplayChangesWork, replay_changes
from tailrace.tasks.work import Outcome

log = logging.getLogger(__name__)

LOOK_SECONDS = 1.0
READ_SECONDS_MAX = 60.0
ROUNDS_MAX = 10
"""Refetches for one request: new dead letters may arrive faster than rows are read."""
FAILURES_MAX = 60
"""Failures of one request, e.g. an unreachable source, before it is dropped."""


class DeadLetterReplayer:
    """Replays the requested dead letters until asked to stop."""

    def __init__(
        self,
        registry: TableRegistry,
        source: PostgresCapture,
        *,
        run: RunTasks,
        merging: Callable[[], AbstractContextManager[None]],
        stopping: threading.Event,
    ) -> None:
        self._registry = registry
        self._source = source
        self._run = run
        self._merging = merging
        """Context around every change of a table."""
        self._stopping = stopping
        self._seen: dict[TableId, Lsn] = {}
        """By table, the position that it must pass before it takes the refetched rows."""
        self._rounds: dict[TableId, int] = {}
        self._failures: dict[TableId, int] = {}

    @property
    def is_idle(self) -> bool:
        """True if no request can make progress now.

        A request that waits for a log without a capture cannot.
        """
        path = self._registry.log.path
        return not any(
            self._can_progress(managed)
            for managed in self._tables_to_check()
            if DeadLetterStore(path, managed.table).replay_requested_at is not None
        )

    def _tables_to_check(self) -> list[ManagedTable]:
        """Return the applying tables that have or had dead letters."""
        tables = [self._registry.tables.get(table) for table in tables_with_dead_letters(self._registry.log.path)]
        return [
            managed
            for managed in tables
            if managed is not None and managed.state.is_applying and managed.catch_up_load is None
        ]

    def _can_progress(self, managed: ManagedTable) -> bool:
        seen = self._seen.get(managed.table)
        return (
            seen is None
            or self._registry.index.position >= seen
            or log_lease.live_holder_pid(self._registry.log.path) is not None
        )

    def run(self) -> None:
        """Take one step for each table, then rest."""
        while not self._stopping.wait(LOOK_SECONDS):
            for managed in self._tables_to_check():
                self._step(managed)

    def _step(self, managed: ManagedTable) -> None:
        dead_letters = DeadLetterStore(self._registry.log.path, managed.table)
        try:
            requested_at = dead_letters.replay_requested_at
            if requested_at is None or managed.applied_position is None:
                return
            exhausted = (
                self._rounds.get(managed.table, 0) >= ROUNDS_MAX or self._failures.get(managed.table, 0) >= FAILURES_MAX
            )
            if (
                exhausted
                or managed.schema is None
                or not dead_letters.count(managed.applied_position.seq, managed.applied_position.load)
            ):
                self._complete(dead_letters, requested_at)
            elif not managed.location.spec.can_repair(managed.schema):
                if self._apply_own_changes(managed):
                    self._complete(dead_letters, requested_at)
            elif managed.table not in self._seen:
                self._refetch(managed)
            elif self._apply_refetched(managed, self._seen[managed.table]):
                self._complete(dead_letters, requested_at)
        except TailraceError as error:
            self._count_failure(managed, error)

    def _refetch(self, managed: ManagedTable) -> None:
        assert managed.applied_position is not None, "an applying table"
        assert managed.schema is not None, "an applying table"
        work = RefetchWork(
            log=self._registry.log.path,
            schema=managed.schema,
            expected=managed.applied_position,
            reader=self._source.row_reader(READ_SECONDS_MAX),
            partition_by=managed.location.spec.partitions_of(managed.schema),
        )
        outcome = run_task(self._run, refetch_dead_letters, work, managed)
        if outcome.error is not None:
            raise outcome.error
        assert outcome.seen_until is not None, "it was read"
        self._seen[managed.table] = outcome.seen_until

    def _apply_refetched(self, managed: ManagedTable, seen: Lsn) -> bool:
        """Apply the refetched rows; return whether the request needs no further refetch."""
        with managed.lock:
            if not self._has_passed(managed, seen):
                return False
            assert managed.applied_position is not None, "an applying table"
            assert managed.schema is not None, "an applying table"
            work = ReplayRowsWork(
                log=self._registry.log.path,
                location=managed.location,
                schema=managed.schema,
                expected=managed.applied_position,
            )
            with self._merging():
                outcome = run_task(self._run, replay_rows, work, managed)
            if outcome.version is not None:
                managed.lake_version = outcome.version
        del self._seen[managed.table]
        self._rounds[managed.table] = self._rounds.get(managed.table, 0) + 1
        self._log_result(managed, outcome)
        return not outcome.needs_refetch

    def _apply_own_changes(self, managed: ManagedTable) -> bool:
        """Apply the changes that the dead letters hold; return whether the table is applying.

        There is no row to refetch, so there is nothing to wait for.
        """
        with managed.lock:
            if not managed.state.is_applying or managed.applied_position is None or managed.schema is None:
                return False
            work = ReplayChangesWork(
                log=self._registry.log.path,
                location=managed.location,
                schema=managed.schema,
                expected=managed.applied_position,
            )
            with self._merging():
                outcome = run_task(self._run, replay_changes, work, managed)
            if outcome.version is not None:
                managed.lake_version = outcome.version
        self._log_result(managed, outcome)
        return True

    def _log_result(self, managed: ManagedTable, outcome: Outcome) -> None:
        if outcome.error is not None:
            raise outcome.error
        log.info(
            "dead letters replayed",
            extra={"table": str(managed.table), "delivered": outcome.rows, "left": outcome.dead_letters},
        )

    def _has_passed(self, managed: ManagedTable, seen: Lsn) -> bool:
        """Return whether the table holds everything that ended at or before the position."""
        if not managed.state.is_applying or managed.applied_position is None:
            return False
        if managed.applied_position.position >= seen:
            return True
        return self._registry.index.position >= seen and not self._registry.pending(
            managed, self._registry.index.last_commit
        )

    def _complete(self, dead_letters: DeadLetterStore, requested_at: float) -> None:
        dead_letters.complete_replay_request(requested_at)
        self._seen.pop(dead_letters.table, None)
        self._rounds.pop(dead_letters.table, None)
        self._failures.pop(dead_letters.table, None)

    def _count_failure(self, managed: ManagedTable, error: TailraceError) -> None:
        """Count a failure, and retry later if it may pass.

        The dead letters stay in any case.
        """
        fields = {"table": str(managed.table), "code": error.code, "reason": error.message}
        log.warning("dead letters not replayed", extra=fields)
        self._seen.pop(managed.table, None)
        weight = 1 if error.remedy is Remedy.RETRY else FAILURES_MAX
        self._failures[managed.table] = self._failures.get(managed.table, 0) + weight
