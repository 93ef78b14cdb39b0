"""Detect schema changes of tables that get no new rows.

All earlier rows are in the source log before the position that is recorded with the new schema. So a table can change
to it once it has applied everything up to there, if its own schema is still the one that was compared.
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
    """Reads the source's catalogue from time to time."""

    def __init__(self, source: PostgresCapture, registry: TableRegistry) -> None:
        self._source = source
        self._registry = registry
        self._compared: dict[TableId, tuple[str, TableSchema]] = {}
        """By table, its definition and the lake table's schema when they were last compared."""
        self._complete_from: dict[TableId, Lsn | None] = {}
        """By table, the position from which the log was complete at the last check."""
        self._due = 0.0
        self.has_run = False
        """True once the tables of the start were checked, or the source did not answer."""

    def run_if_due(self) -> None:
        """Compare the tables if a check is due; an unreachable source is tried again later."""
        if time.monotonic() < self._due:
            return
        schemas = {
            managed.table: managed.schema
            for managed in list(self._registry.tables.values())
            if managed.state.is_applying and managed.schema is not None
        }
        with suppress(TailraceError):
            self._reload_after_gaps(schemas)
            stamps = self._source.definition_versions(list(schemas)) if schemas else {}
            changed = [table for table, stamp in stamps.items() if not self._is_compared(table, stamp, schemas[table])]
            if changed:
                self._compare({table: (stamps[table], schemas[table]) for table in changed})
        self._due, self.has_run = time.monotonic() + LOOK_SECONDS, True

    def _reload_after_gaps(self, tables: Collection[TableId]) -> None:
        """Reload tables that were not published for a while, e.g. without an identity.

        Changes of that time were not captured.
        """
        published = self._registry.log.coverage()
        complete_from = {table: published.complete_from(table) for table in tables}
        for table in complete_from.keys() & self._complete_from.keys():
            managed = self._registry.tables[table]
            # A table that lost its identity is published in another way since, and stops for that.
            if (
                complete_from[table] == self._complete_from[table]
                or has_lost_identity(managed)
                or self._stops_at_recreated(managed)
            ):
                continue
            # A concurrent apply would set it to live again, and it would be neither loaded nor applied.
            if not managed.lock.acquire(blocking=False):
                complete_from[table] = self._complete_from[table]  # so that the next check finds it
                continue
            try:
                if self._registry.has_missing_changes(managed):  # otherwise it was loaded since
                    self._registry.require_reload(managed, NOT_PUBLISHED)
            finally:
                managed.lock.release()
        self._complete_from = complete_from

    def _stops_at_recreated(self, managed: ManagedTable) -> bool:
        """Return whether the table was recreated and its policy is to stop for that."""
        now, policies = self._source.describe([managed.table]), self._registry.policies_of(managed.table)
        return managed.table in now and stops_at_recreated(managed, now[managed.table].source_schema.relation, policies)

    def tables_with_pending_schema(self) -> list[ManagedTable]:
        """Return the tables that can take their pending schema now.

        No row may come to wake them.
        """
        position, tables = self._registry.index.position, list(self._registry.tables.values())
        pending = [(managed, managed.pending_schema) for managed in tables if managed.state.is_applying]
        return [managed for managed, schema in pending if schema is not None and schema.horizon <= position]

    def _is_compared(self, table: TableId, stamp: str, schema: TableSchema) -> bool:
        compared_version, compared_schema = self._compared.get(table, ("", None))
        return compared_version == stamp and compared_schema is schema

    def _compare(self, changed: dict[TableId, tuple[str, TableSchema]]) -> None:
        """Set a pending schema where the catalogue differs from the table's schema."""
        described = self._source.describe(changed)
        horizon = self._source.committed_until()
        for table, schema in described.items():
            if not schema.columns:
                continue  # recreated, and not published yet
            self._compared[table] = changed[table]
            _, before = changed[table]
            if not before.same_with_facts(schema):
                self._registry.tables[table].pending_schema = PendingSchema(
                    schema=schema, horizon=horizon, compared_with=before
                )
