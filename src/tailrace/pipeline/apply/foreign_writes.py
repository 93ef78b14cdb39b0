"""Notices what others did to lake tables that no change comes for: whoever applied one would find it, and nobody does.

Of a Delta table two names are looked up; only one that has got another version is opened. What cannot be read now stops
nothing here: the next change meets the same trouble, and says so.
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
    """Looks at the tables that are live now and then."""

    def __init__(self, lives: TableRegistry) -> None:
        self._lives = lives
        self._due = 0.0

    def run_if_due(self) -> None:
        """Stop the tables that others have written to, put back or taken away, if it is time to look."""
        if time.monotonic() < self._due:
            return
        for life in list(self._lives.tables.values()):
            if life.state is TableState.LIVE:
                self._look_at(life)
        self._due = time.monotonic() + LOOK_SECONDS

    def _look_at(self, life: ManagedTable) -> None:
        if not life.lock.acquire(blocking=False):
            return  # whoever is at work on it sees by himself
        try:
            if life.state is TableState.LIVE:
                with suppress(TailraceError):
                    _stop_anothers(life)
        finally:
            life.lock.release()


def _stop_anothers(life: ManagedTable) -> None:
    """Stop the table if it is not what we left."""
    if life.lake_version is not None and life.location.is_newest_version(life.lake_version):
        return
    table, cursor = life.location.open_for_reading(), life.applied_position
    try:
        version, found = table.version(), table.applied_position()
        if found is None:
            life.fail(not_loaded(life.location.path))
        # A load may go back, and a commit may be there that nobody was told of, as its worker was killed.
        elif cursor is not None and found.load == cursor.load and found.seq < cursor.seq:
            life.fail(table_went_back(life.location.path, found, cursor))
        else:
            life.lake_version = version
    except ForeignWrite as error:
        life.fail(error)
