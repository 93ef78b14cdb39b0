"""Tries dead letters again that a person asks for, beside the applying to all tables.

Reading is done at once; the table takes what was read when it has passed what the reading saw, so nothing waits for
it. Where there is no key to read by the letters' own changes are tried, with nothing read. The request stays on record
until it is answered: a process that is started later does it.
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
"""Of reading for one request: rows may get letters faster than they are read."""
TROUBLES_MAX = 60
"""Of one request, such as a source that cannot be reached, before it is given up."""


class DeadLetterReplayer:
    """Tries whatever letters it is asked to, until told to stop."""

    def __init__(
        self,
        lives: TableRegistry,
        source: PostgresCapture,
        *,
        run: RunTasks,
        merging: Callable[[], AbstractContextManager[None]],
        stopping: threading.Event,
    ) -> None:
        self._lives = lives
        self._source = source
        self._run = run
        self._merging = merging
        """Around whatever changes a table."""
        self._stopping = stopping
        self._seen: dict[TableId, Lsn] = {}
        """What was read and is not in its table yet, and what that table must pass."""
        self._rounds: dict[TableId, int] = {}
        self._troubles: dict[TableId, int] = {}

    @property
    def is_idle(self) -> bool:
        """Whether nothing is asked for that could be done now. What waits for a log that nobody writes cannot."""
        path = self._lives.log.path
        return not any(
            self._can_go_on(life)
            for life in self._lots()
            if DeadLetterStore(path, life.table).replay_requested_at is not None
        )

    def _lots(self) -> list[ManagedTable]:
        """The tables that have or had letters, and go on."""
        lives = [self._lives.tables.get(table) for table in tables_with_dead_letters(self._lives.log.path)]
        return [life for life in lives if life is not None and life.state.is_applying and life.catch_up_load is None]

    def _can_go_on(self, life: ManagedTable) -> bool:
        seen = self._seen.get(life.table)
        return (
            seen is None
            or self._lives.index.position >= seen
            or log_lease.live_holder_pid(self._lives.log.path) is not None
        )

    def run(self) -> None:
        """Look, do a step for each table, rest."""
        while not self._stopping.wait(LOOK_SECONDS):
            for life in self._lots():
                self._look(life)

    def _look(self, life: ManagedTable) -> None:
        letters = DeadLetterStore(self._lives.log.path, life.table)
        try:
            asked = letters.replay_requested_at
            if asked is None or life.applied_position is None:
                return
            tired = self._rounds.get(life.table, 0) >= ROUNDS_MAX or self._troubles.get(life.table, 0) >= TROUBLES_MAX
            if tired or life.schema is None or not letters.count(life.applied_position.seq, life.applied_position.load):
                self._end(letters, asked)
            elif not life.location.spec.can_repair(life.schema):
                if self._bring_late(life):
                    self._end(letters, asked)
            elif life.table not in self._seen:
                self._read(life)
            elif self._deliver(life, self._seen[life.table]):
                self._end(letters, asked)
        except TailraceError as error:
            self._trouble(life, error)

    def _read(self, life: ManagedTable) -> None:
        assert life.applied_position is not None, "a table that goes on"
        assert life.schema is not None, "a table that goes on"
        work = RefetchWork(
            log=self._lives.log.path,
            schema=life.schema,
            expected=life.applied_position,
            reader=self._source.row_reader(READ_SECONDS_MAX),
            partition_by=life.location.spec.partitions_of(life.schema),
        )
        outcome = run_task(self._run, refetch_dead_letters, work, life)
        if outcome.error is not None:
            raise outcome.error
        assert outcome.seen_until is not None, "it was read"
        self._seen[life.table] = outcome.seen_until

    def _deliver(self, life: ManagedTable, seen: Lsn) -> bool:
        """Whether all that was read is in the table, or can never be."""
        with life.lock:
            if not self._passed(life, seen):
                return False
            assert life.applied_position is not None, "a table that goes on"
            assert life.schema is not None, "a table that goes on"
            work = ReplayRowsWork(
                log=self._lives.log.path, location=life.location, schema=life.schema, expected=life.applied_position
            )
            with self._merging():
                outcome = run_task(self._run, replay_rows, work, life)
            if outcome.version is not None:
                life.lake_version = outcome.version
        del self._seen[life.table]
        self._rounds[life.table] = self._rounds.get(life.table, 0) + 1
        self._told(life, outcome)
        return not outcome.needs_refetch

    def _bring_late(self, life: ManagedTable) -> bool:
        """Bring in what the letters themselves hold: there is nothing to read, and so nothing to wait for. Whether the
        table goes on."""
        with life.lock:
            if not life.state.is_applying or life.applied_position is None or life.schema is None:
                return False
            work = ReplayChangesWork(
                log=self._lives.log.path, location=life.location, schema=life.schema, expected=life.applied_position
            )
            with self._merging():
                outcome = run_task(self._run, replay_changes, work, life)
            if outcome.version is not None:
                life.lake_version = outcome.version
        self._told(life, outcome)
        return True

    def _told(self, life: ManagedTable, outcome: Outcome) -> None:
        if outcome.error is not None:
            raise outcome.error
        log.info(
            "dead letters tried again",
            extra={"table": str(life.table), "delivered": outcome.rows, "left": outcome.dead_letters},
        )

    def _passed(self, life: ManagedTable, seen: Lsn) -> bool:
        """Whether the table holds everything that ended at or before the position."""
        if not life.state.is_applying or life.applied_position is None:
            return False
        if life.applied_position.position >= seen:
            return True
        return self._lives.index.position >= seen and not self._lives.pending(life, self._lives.index.last_commit)

    def _end(self, letters: DeadLetterStore, asked: float) -> None:
        letters.complete_replay_request(asked)
        self._seen.pop(letters.table, None)
        self._rounds.pop(letters.table, None)
        self._troubles.pop(letters.table, None)

    def _trouble(self, life: ManagedTable, error: TailraceError) -> None:
        """What may pass by itself is tried again, for a while; the letters stay in any case."""
        said = {"table": str(life.table), "code": error.code, "reason": error.message}
        log.warning("dead letters not tried again", extra=said)
        self._seen.pop(life.table, None)
        more = 1 if error.remedy is Remedy.RETRY else TROUBLES_MAX
        self._troubles[life.table] = self._troubles.get(life.table, 0) + more
