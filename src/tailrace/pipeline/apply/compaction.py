"""Compact lake tables while they are applied.

Old files are removed too, if the settings ask for it. Upkeep uses at most a share of one core. While a table is
compacted its changes wait. So tables are compacted one by one, and only after they have had some commits since the last
time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from tailrace.model.schema import TableId
from tailrace.pipeline.config.settings import UpkeepSettings
from tailrace.pipeline.loads.load_commit import RunTasks, run_task
from tailrace.pipeline.tables.managed_table import ManagedTable
from tailrace.pipeline.tables.registry import TableRegistry
from tailrace.tables.compaction_plan import UpkeepPlan
from tailrace.tasks.apply import compact_table
from tailrace.tasks.work import CompactWork, Outcome

log = logging.getLogger(__name__)

COMMITS_MIN = 8
"""Commits of a table before its files are checked again."""
LOOK_SECONDS = 1.0
PAUSE_SECONDS_MIN = 2.0
REMOVE_SECONDS = 3600.0
"""Seconds between two removals of old files of a table; no file removed is younger."""


class Compactor:
    """Compacts the tables that need it until asked to stop."""

    def __init__(
        self,
        settings: UpkeepSettings,
        registry: TableRegistry,
        *,
        run: RunTasks,
        advance: Callable[[ManagedTable], None],
        stopping: threading.Event,
    ) -> None:
        self._budget = settings.budget
        self._upkeep = UpkeepPlan(
            file_bytes=settings.file if settings.join else None, remove_after_seconds=settings.remove_after
        )
        self._registry = registry
        self._run = run
        self._advance = advance
        self._stopping = stopping
        self._removes_at: dict[TableId, float] = {}

    def run(self) -> None:
        """Compact one table after the other, with pauses."""
        pause = LOOK_SECONDS
        while not self._stopping.wait(pause):
            managed = self._next()
            outcome = self._compact(managed) if managed is not None else None
            pause = LOOK_SECONDS if outcome is None else pause_after(outcome, self._budget)

    def _next(self) -> ManagedTable | None:
        """Return the table with the most commits since its last compaction."""
        tables = list(self._registry.tables.values())
        due = [
            managed
            for managed in tables
            if managed.state.is_applying and managed.commits_since_compaction >= COMMITS_MIN
        ]
        return max(due, key=lambda managed: managed.commits_since_compaction, default=None)

    def _compact(self, managed: ManagedTable) -> Outcome | None:
        started = time.monotonic()
        with managed.lock:
            managed.commits_since_compaction = 0
            if managed.applied_position is None:
                return None
            upkeep = self._upkeep
            if started < self._removes_at.get(managed.table, 0.0):
                upkeep = replace(upkeep, remove_after_seconds=None)
            else:
                self._removes_at[managed.table] = started + REMOVE_SECONDS
            work = CompactWork(
                table=managed.table, location=managed.location, expected=managed.applied_position, upkeep=upkeep
            )
            outcome = run_task(self._run, compact_table, work, managed)
            managed.lake_version = None
        used = None if outcome.cpu_seconds is None else round(outcome.cpu_seconds, 3)
        fields = {"table": str(managed.table), "seconds": round(outcome.seconds, 3), "cpu_seconds": used}
        if outcome.error is not None:
            # The next apply to the table finds the same problem and reports it.
            log.warning("table not compacted", extra={**fields, "code": outcome.error.code})
        elif outcome.upkeep_result is not None:
            managed.bytes_written += outcome.upkeep_result.bytes
            compacted, written, removed = (
                outcome.upkeep_result.files_compacted,
                outcome.upkeep_result.files_written,
                outcome.upkeep_result.files_removed,
            )
            log.info("table compacted", extra={**fields, "joined": compacted, "into": written, "removed": removed})
        self._advance(managed)  # micro-batches skipped the table while we held its lock
        return outcome


def pause_after(outcome: Outcome, budget: float) -> float:
    """Return the pause that keeps upkeep within its budget.

    Work and pause together then use the budget's share of one core. Work whose CPU time is unknown counts as one core
    for its whole duration.
    """
    used = outcome.seconds if outcome.cpu_seconds is None else outcome.cpu_seconds
    return max(PAUSE_SECONDS_MIN, used / budget - outcome.seconds)
