"""Tends tables beside applying to them: joins small files, and removes old ones if that is wished.

It uses at most a part of one core. While a table is tended its changes wait, so it is done table by table, and
only for those that have had some commits since.
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
"""Of a table, before its files are looked at again."""
LOOK_SECONDS = 1.0
PAUSE_SECONDS_MIN = 2.0
REMOVE_SECONDS = 3600.0
"""Between two looks for old files of a table: none of them is younger than that."""


class Compactor:
    """Tends whatever tables need it, until told to stop."""

    def __init__(
        self,
        settings: UpkeepSettings,
        lives: TableRegistry,
        *,
        run: RunTasks,
        advance: Callable[[ManagedTable], None],
        stopping: threading.Event,
    ) -> None:
        self._budget = settings.budget
        self._upkeep = UpkeepPlan(
            file_bytes=settings.file if settings.join else None, remove_after_seconds=settings.remove_after
        )
        self._lives = lives
        self._run = run
        self._advance = advance
        self._stopping = stopping
        self._removes_at: dict[TableId, float] = {}

    def run(self) -> None:
        """Look for a table, tend it, rest."""
        pause = LOOK_SECONDS
        while not self._stopping.wait(pause):
            life = self._next()
            outcome = self._tend(life) if life is not None else None
            pause = LOOK_SECONDS if outcome is None else pause_after(outcome, self._budget)

    def _next(self) -> ManagedTable | None:
        """The one with the most commits since it was last tended."""
        lives = list(self._lives.tables.values())
        due = [life for life in lives if life.state.is_applying and life.commits_since_compaction >= COMMITS_MIN]
        return max(due, key=lambda life: life.commits_since_compaction, default=None)

    def _tend(self, life: ManagedTable) -> Outcome | None:
        started = time.monotonic()
        with life.lock:
            life.commits_since_compaction = 0
            if life.applied_position is None:
                return None
            upkeep = self._upkeep
            if started < self._removes_at.get(life.table, 0.0):
                upkeep = replace(upkeep, remove_after_seconds=None)
            else:
                self._removes_at[life.table] = started + REMOVE_SECONDS
            work = CompactWork(table=life.table, location=life.location, expected=life.applied_position, upkeep=upkeep)
            outcome = run_task(self._run, compact_table, work, life)
            life.lake_version = None
        used = None if outcome.cpu_seconds is None else round(outcome.cpu_seconds, 3)
        said = {"table": str(life.table), "seconds": round(outcome.seconds, 3), "cpu_seconds": used}
        if outcome.error is not None:
            # Whoever applies next meets the same trouble, and says so.
            log.warning("table not tended", extra={**said, "code": outcome.error.code})
        elif outcome.upkeep_result is not None:
            life.bytes_written += outcome.upkeep_result.bytes
            joined, made, removed = (
                outcome.upkeep_result.files_compacted,
                outcome.upkeep_result.files_written,
                outcome.upkeep_result.files_removed,
            )
            log.info("table tended", extra={**said, "joined": joined, "into": made, "removed": removed})
        self._advance(life)  # what came meanwhile was left for us
        return outcome


def pause_after(outcome: Outcome, budget: float) -> float:
    """How long to leave the tables alone, so that what was done and this together use the budget's share of a core.

    Where it is not known what a piece of work used, it counts as one core all the time that it took.
    """
    used = outcome.seconds if outcome.cpu_seconds is None else outcome.cpu_seconds
    return max(PAUSE_SECONDS_MIN, used / budget - outcome.seconds)
