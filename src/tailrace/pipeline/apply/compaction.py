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
from tailrace.pipeline.loads.load_commit import Run, run_one
from tailrace.pipeline.tables.registry import Lives, TableLife
from tailrace.tables.compaction_plan import Upkeep
from tailrace.tasks.work import Outcome, TendWork, tend_table

log = logging.getLogger(__name__)

COMMITS_MIN = 8
"""Of a table, before its files are looked at again."""
LOOK_SECONDS = 1.0
PAUSE_SECONDS_MIN = 2.0
REMOVE_SECONDS = 3600.0
"""Between two looks for old files of a table: none of them is younger than that."""


class Tending:
    """Tends whatever tables need it, until told to stop."""

    def __init__(
        self,
        settings: UpkeepSettings,
        lives: Lives,
        *,
        run: Run,
        advance: Callable[[TableLife], None],
        stopping: threading.Event,
    ) -> None:
        self._budget = settings.budget
        self._upkeep = Upkeep(
            file_bytes=settings.file if settings.join else None, remove_after_seconds=settings.remove_after
        )
        self._lives = lives
        self._run = run
        self._advance = advance
        self._stopping = stopping
        self._removes_at: dict[TableId, float] = {}

    def work(self) -> None:
        """Look for a table, tend it, rest."""
        pause = LOOK_SECONDS
        while not self._stopping.wait(pause):
            life = self._next()
            outcome = self._tend(life) if life is not None else None
            pause = LOOK_SECONDS if outcome is None else pause_after(outcome, self._budget)

    def _next(self) -> TableLife | None:
        """The one with the most commits since it was last tended."""
        lives = list(self._lives.tables.values())
        due = [life for life in lives if life.state.going_on and life.untended >= COMMITS_MIN]
        return max(due, key=lambda life: life.untended, default=None)

    def _tend(self, life: TableLife) -> Outcome | None:
        started = time.monotonic()
        with life.lock:
            life.untended = 0
            if life.cursor is None:
                return None
            upkeep = self._upkeep
            if started < self._removes_at.get(life.table, 0.0):
                upkeep = replace(upkeep, remove_after_seconds=None)
            else:
                self._removes_at[life.table] = started + REMOVE_SECONDS
            work = TendWork(table=life.table, place=life.place, expected=life.cursor, upkeep=upkeep)
            outcome = run_one(self._run, tend_table, work, life)
            life.version = None
        used = None if outcome.cpu_seconds is None else round(outcome.cpu_seconds, 3)
        said = {"table": str(life.table), "seconds": round(outcome.seconds, 3), "cpu_seconds": used}
        if outcome.error is not None:
            # Whoever applies next meets the same trouble, and says so.
            log.warning("table not tended", extra={**said, "code": outcome.error.code})
        elif outcome.tended is not None:
            life.bytes_written += outcome.tended.bytes
            joined, made, removed = outcome.tended.joined, outcome.tended.made, outcome.tended.removed
            log.info("table tended", extra={**said, "joined": joined, "into": made, "removed": removed})
        self._advance(life)  # what came meanwhile was left for us
        return outcome


def pause_after(outcome: Outcome, budget: float) -> float:
    """How long to leave the tables alone, so that what was done and this together use the budget's share of a core.

    Where it is not known what a piece of work used, it counts as one core all the time that it took.
    """
    used = outcome.seconds if outcome.cpu_seconds is None else outcome.cpu_seconds
    return max(PAUSE_SECONDS_MIN, used / budget - outcome.seconds)
