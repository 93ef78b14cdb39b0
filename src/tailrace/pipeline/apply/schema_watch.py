"""Notices what was done to tables at the source and no row tells of: DDL on a table that nobody writes.

The rows of before are all in the server's log before the position that is noted with the new shape. So a table that
has applied everything up to there, and is still what it was when the catalogue was asked, can become that.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from contextlib import suppress

from tailrace.capture.postgres.source import PostgresCapture
from tailrace.errors import TailraceError
from tailrace.model.position import Lsn
from tailrace.model.schema import TableId, TableSchema
from tailrace.pipeline.tables.managed_table import ManagedTable, PendingSchema, has_lost_identity, stops_at_recreated
from tailrace.pipeline.tables.registry import NOT_PUBLISHED, TableRegistry

LOOK_SECONDS = 5.0


class SchemaWatch:
    """Asks the source's catalogue now and then."""

    def __init__(self, source: PostgresCapture, lives: TableRegistry) -> None:
        self._source = source
        self._lives = lives
        self._seen: dict[TableId, tuple[str, TableSchema]] = {}
        """What each table's definition, and the lake table's shape, were when they were last compared."""
        self._since: dict[TableId, Lsn | None] = {}
        """From where on nothing of each table is missing, when it was last looked up."""
        self._due = 0.0
        self.has_run = False
        """Whether the tables that are there at a start have been looked at, or the source does not answer."""

    def run_if_due(self) -> None:
        """Ask, if that was not done just now; a source that does not answer is asked again."""
        if time.monotonic() < self._due:
            return
        shapes = {
            life.table: life.schema
            for life in list(self._lives.tables.values())
            if life.state.is_applying and life.schema is not None
        }
        with suppress(TailraceError):
            self._notice_gaps(shapes)
            stamps = self._source.definition_versions(list(shapes)) if shapes else {}
            changed = [table for table, stamp in stamps.items() if not self._is_seen(table, stamp, shapes[table])]
            if changed:
                self._compare({table: (stamps[table], shapes[table]) for table in changed})
        self._due, self.has_run = time.monotonic() + LOOK_SECONDS, True

    def _notice_gaps(self, tables: Collection[TableId]) -> None:
        """Tables that were not published for a while, e.g. without an identity: what was written then was not told."""
        published = self._lives.log.coverage()
        since = {table: published.complete_from(table) for table in tables}
        for table in since.keys() & self._since.keys():
            life = self._lives.tables[table]
            # One that has lost its identity is published otherwise since, and stops for that.
            if since[table] == self._since[table] or has_lost_identity(life) or self._stops(life):
                continue
            # Whoever is applying to it would call it live again, and it would be neither loaded nor applied to.
            if not life.lock.acquire(blocking=False):
                since[table] = self._since[table]  # so that it is noticed at the next look
                continue
            try:
                if self._lives.has_missing_changes(life):  # else it was loaded since
                    self._lives.require_reload(life, NOT_PUBLISHED)
            finally:
                life.lock.release()
        self._since = since

    def _stops(self, life: ManagedTable) -> bool:
        """Whether that is so because the table was made again, and it is to stop for that."""
        now, policies = self._source.describe([life.table]), self._lives.policies_of(life.table)
        return life.table in now and stops_at_recreated(life, now[life.table].source_schema.relation, policies)

    def tables_with_pending_schema(self) -> list[ManagedTable]:
        """The tables that can become what was seen: nothing else may come to wake them."""
        position, lives = self._lives.index.position, list(self._lives.tables.values())
        told = [(life, life.pending_schema) for life in lives if life.state.is_applying]
        return [life for life, seen in told if seen is not None and seen.horizon <= position]

    def _is_seen(self, table: TableId, stamp: str, shape: TableSchema) -> bool:
        seen, beside = self._seen.get(table, ("", None))
        return seen == stamp and beside is shape

    def _compare(self, changed: dict[TableId, tuple[str, TableSchema]]) -> None:
        """Announce what the catalogue shows, where that is not what the table is."""
        found = self._source.describe(changed)
        horizon = self._source.committed_until()
        for table, shape in found.items():
            if not shape.columns:
                continue  # made anew, and not published yet
            self._seen[table] = changed[table]
            _, before = changed[table]
            if not before.same_with_facts(shape):
                self._lives.tables[table].pending_schema = PendingSchema(
                    schema=shape, horizon=horizon, compared_with=before
                )
