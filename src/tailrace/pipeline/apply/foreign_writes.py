"""Detect foreign writes on idle lake tables; active tables detect them at the next apply.

For a Delta table the watch looks up two names, and opens the table only if its version has changed. An unreadable table
stops nothing here: the next change finds the same problem and reports it.
"""

from __future__ import annotations

import time
from contextlib import suppress

from tailrace.errors import ForeignWrite, TailraceError
from tailrace.pipeline.report import TableState
from tailrace.pipeline.tables.managed_table import ManagedTable
from tailrace.pipeline.tables.registry import TableRegistry
from tailrace.tables.table_errors import not_loaded, table_went_back

LOOK_SECONDS = 30.0


class ForeignWriteWatch:
    """Checks live tables from time to time."""

    def __init__(self, registry: TableRegistry) -> None:
        self._registry = registry
        self._due = 0.0

    def run_if_due(self) -> None:
        """Stop tables with foreign writes, if a check is due.

        A table that was restored or removed is stopped too.
        """
        if time.monotonic() < self._due:
            return
        for managed in list(self._registry.tables.values()):
            if managed.state is TableState.LIVE:
                self._check_table(managed)
        self._due = time.monotonic() + LOOK_SECONDS

    def _check_table(self, managed: ManagedTable) -> None:
        if not managed.lock.acquire(blocking=False):
            return  # the work that holds the lock checks the table itself
        try:
            if managed.state is TableState.LIVE:
                with suppress(TailraceError):
                    _stop_if_foreign(managed)
        finally:
            managed.lock.release()


def _stop_if_foreign(managed: ManagedTable) -> None:
    """Stop the table if it is not as our last commit left it."""
    if managed.lake_version is not None and managed.location.is_newest_version(managed.lake_version):
        return
    table, applied = managed.location.open_for_reading(), managed.applied_position
    try:
        version, stored = table.version(), table.applied_position()
        if stored is None:
            managed.fail(not_loaded(managed.location.path))
        # A load may go back, and a killed worker may have left a commit that it did not report.
        elif applied is not None and stored.load == applied.load and stored.seq < applied.seq:
            managed.fail(table_went_back(managed.location.path, stored, applied))
        else:
            managed.lake_version = version
    except ForeignWrite as error:
        managed.fail(error)
