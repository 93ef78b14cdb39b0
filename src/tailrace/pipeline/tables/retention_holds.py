"""Publish which log rows the lake tables have applied, so that retention keeps the others.

Only rows that a table's own commit covers count as applied. A failed table keeps holding what it lacks. A table that is
being loaded holds rows after its snapshot. A table that will be loaded, or that the settings no longer name,
holds nothing. Progress is published every few seconds and at the end; publishing late only makes the log keep more.
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
    """Holds of the tables of one applying process."""

    def __init__(self, registry: TableRegistry) -> None:
        self._registry = registry
        self._published = {progress.table: progress for progress in consumers.read_table_progress(registry.log.path)}
        self._enabled = False
        self._due = 0.0
        self._lock = threading.Lock()

    def enable(self) -> None:
        """Start publishing. All tables are known now, and a table that is not among them holds nothing."""
        self._enabled = True

    def publish(self, *, now: bool = False) -> None:
        """Publish the progress of every table, if due and enabled."""
        with self._lock:
            if not self._enabled or (not now and time.monotonic() < self._due):
                return
            self._due = time.monotonic() + PUBLISH_SECONDS
            self._registry.check_trimmed()
            progress_records = [
                progress for managed in list(self._registry.tables.values()) if (progress := self._progress(managed))
            ]
            with suppress(LogError):  # full disk: the records published before hold more, not less
                consumers.write_table_progress(self._registry.log.path, progress_records)
                self._published = {progress.table: progress for progress in progress_records}

    def _progress(self, managed: ManagedTable) -> TableProgress | None:
        index, commit = self._registry.index, self._registry.index.last_commit
        numbers = tuple(self._registry.log_numbers(managed))
        if managed.load_floor is not None:
            # A table that applies during the load also holds the rows it lacks, in case the load fails.
            applies = managed.state not in (TableState.NEW, TableState.SEEDING, TableState.NEEDS_SNAPSHOT)
            first = managed.load_floor
            if applies and managed.applied_position is not None and managed.applied_position.seq < first.seq:
                first = managed.applied_position
            return TableProgress(table=managed.table, numbers=numbers, commit=first.commit, seq=first.seq)
        if managed.state in (TableState.NEW, TableState.PAUSED) or (
            managed.load_only and managed.catch_up_load is None
        ):
            return None  # its load will read everything up to then, or nothing is applied to it any more
        if managed.applied_position is None:
            return self._published.get(managed.table)  # the table cannot be read now, and may still need what it lacks
        if managed.state is TableState.NEEDS_SNAPSHOT:
            return TableProgress(
                table=managed.table,
                numbers=numbers,
                commit=managed.applied_position.commit,
                seq=managed.applied_position.seq,
            )
        # A load point may be past rows that the table's commit and `_seq` do not cover.
        reached = (
            commit
            if not self._registry.pending(managed, commit)
            else index.commit_at(managed.applied_position.position)
        )
        return TableProgress(
            table=managed.table,
            numbers=numbers,
            commit=max(managed.applied_position.commit, reached),
            seq=max(managed.applied_position.seq, index.next_seq(reached) - 1),
        )


def release_unwanted(settings: PipelineSettings) -> None:
    """Remove the holds of tables that the settings no longer name.

    This also works while no process applies.
    """
    path = settings.log.path
    published = consumers.read_table_progress(path)
    wanted = [progress for progress in published if settings.has(progress.table)]
    if len(wanted) < len(published):
        with suppress(LogError):  # a full disk must not stop a capture from starting
            consumers.write_table_progress(path, wanted)
