"""What the lake tables tell the log: which of its rows they have covered, so that it keeps the others for them.

Only what a table's own commit says is called covered. A table that fails goes on holding what it lacks; one that is
being loaded holds what comes after its snapshot; one that will be loaded, or that the settings no longer name, holds
nothing. Said every few seconds and at the end: what is said late only makes the log keep more.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress

from tailrace.changelog.read import consumers
from tailrace.changelog.read.consumers import TableProgress
from tailrace.errors import LogError
from tailrace.pipeline.config.settings import PipelineSettings
from tailrace.pipeline.report import TableState
from tailrace.pipeline.tables.managed_table import ManagedTable
from tailrace.pipeline.tables.registry import TableRegistry

PUBLISH_SECONDS = 5.0


class RetentionHolds:
    """Speaks for the tables of one applying process."""

    def __init__(self, lives: TableRegistry) -> None:
        self._lives = lives
        self._said = {hint.table: hint for hint in consumers.read_table_progress(lives.log.path)}
        self._begun = False
        self._due = 0.0
        self._speaking = threading.Lock()

    def enable(self) -> None:
        """From here on the tables are known: one that is not among them needs nothing."""
        self._begun = True

    def publish(self, *, now: bool = False) -> None:
        """Say where every table stands, if that was not done just now. Silent until they are known."""
        with self._speaking:
            if not self._begun or (not now and time.monotonic() < self._due):
                return
            self._due = time.monotonic() + PUBLISH_SECONDS
            self._lives.check_trimmed()
            hints = [hint for life in list(self._lives.tables.values()) if (hint := self._hint(life))]
            with suppress(LogError):  # a disk that is full: what was said before holds more, not less
                consumers.write_table_progress(self._lives.log.path, hints)
                self._said = {hint.table: hint for hint in hints}

    def _hint(self, life: ManagedTable) -> TableProgress | None:
        index, commit = self._lives.index, self._lives.index.last_commit
        numbers = tuple(self._lives.log_numbers(life))
        if life.load_floor is not None:
            # The rows that the table itself lacks too, if it goes on meanwhile and would go on without the load.
            goes_on = life.state not in (TableState.NEW, TableState.SEEDING, TableState.NEEDS_SNAPSHOT)
            first = life.load_floor
            if goes_on and life.applied_position is not None and life.applied_position.seq < first.seq:
                first = life.applied_position
            return TableProgress(table=life.table, numbers=numbers, commit=first.commit, seq=first.seq)
        if life.state in (TableState.NEW, TableState.PAUSED) or (life.load_only and life.catch_up_load is None):
            return None  # its load will see everything up to then, or nothing is applied to it any more
        if life.applied_position is None:
            return self._said.get(life.table)  # it cannot be read now; what it lacks, it may still need
        if life.state is TableState.NEEDS_SNAPSHOT:
            return TableProgress(
                table=life.table, numbers=numbers, commit=life.applied_position.commit, seq=life.applied_position.seq
            )
        # A load's point may lie past rows that its commit and `_seq` do not name.
        reached = commit if not self._lives.pending(life, commit) else index.commit_at(life.applied_position.position)
        return TableProgress(
            table=life.table,
            numbers=numbers,
            commit=max(life.applied_position.commit, reached),
            seq=max(life.applied_position.seq, index.next_seq(reached) - 1),
        )


def release_unwanted(settings: PipelineSettings) -> None:
    """Let go of what tables hold that the settings no longer name, also where nobody applies."""
    path = settings.log.path
    said = consumers.read_table_progress(path)
    wanted = [hint for hint in said if settings.has(hint.table)]
    if len(wanted) < len(said):
        with suppress(LogError):  # a full disk must not stop a capture from starting
            consumers.write_table_progress(path, wanted)
