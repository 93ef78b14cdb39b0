"""Notices what was done to tables at the source and no row tells of: DDL on a table that nobody writes.

The rows of before are all in the server's log before the position that is noted with the new shape. So a table that
has applied everything up to there, and was told of nothing else, can become that.
"""

from __future__ import annotations

import time
from contextlib import suppress

from tailrace.capture.postgres.source import PostgresCapture
from tailrace.errors import TailraceError
from tailrace.model.evolution import same_version
from tailrace.model.schema import TableId, TableSchema
from tailrace.pipeline.life import Announced, Lives, TableLife
from tailrace.pipeline.report import TableState

LOOK_SECONDS = 5.0
_GOING_ON = (TableState.CATCHING_UP, TableState.LIVE)


class ShapeWatch:
    """Asks the source's catalogue now and then."""

    def __init__(self, source: PostgresCapture, lives: Lives) -> None:
        self._source = source
        self._lives = lives
        self._seen: dict[TableId, tuple[str, TableSchema | None]] = {}
        """What each table's definition, and the lake table's shape, were when they were last compared."""
        self._due = 0.0
        self.tried = False
        """Whether the tables that are there at a start have been looked at, or the source does not answer."""

    def look(self) -> None:
        """Ask, if that was not done just now; a source that does not answer is asked again."""
        if time.monotonic() < self._due:
            return
        tables = [life.table for life in list(self._lives.tables.values()) if life.state in _GOING_ON]
        with suppress(TailraceError):
            stamps = self._source.stamps(tables) if tables else {}
            for table, stamp in stamps.items():
                life = self._lives.tables[table]
                if self._seen.get(table) != (seen := (stamp, life.shape)) and self._compare(life):
                    self._seen[table] = seen
        self._due, self.tried = time.monotonic() + LOOK_SECONDS, True

    def _compare(self, life: TableLife) -> bool:
        """Announce what the catalogue shows, if it is not what the table is; False if that is too early to say."""
        shape, horizon = self._source.describe(life.table)
        if not shape.columns:
            return False  # made anew, and not published yet
        if life.shape is not None and not same_version(life.shape, shape):
            life.announced = Announced(shape=shape, horizon=horizon)
        return True
