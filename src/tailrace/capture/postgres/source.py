"""PostgreSQL as a `ChangeCapture`: connects settings with stream, snapshot and lag."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import psycopg
import pyarrow as pa

from tailrace.capture.port import Capabilities, Lag, SourceId, TimelineStream
from tailrace.capture.postgres import preflight, publications, server_history, values
from tailrace.capture.postgres.catalogue import Catalogue, SourceTable
from tailrace.capture.postgres.chunks import CHUNK_BYTES, ChunkKind, Plan, find_leaves, plan_table
from tailrace.capture.postgres.config import PostgresSettings
from tailrace.capture.postgres.connect import connect, connect_replication, map_error, redacted_url
from tailrace.capture.postgres.publications import PublishedTables
from tailrace.capture.postgres.row_condition import require_valid_condition
from tailrace.capture.postgres.snapshot import (
    OPEN_SECONDS_MAX,
    BarrierSnapshot,
    ExactSnapshot,
    SnapshotReader,
    open_transactions,
    wait_for_writers,
)
from tailrace.capture.postgres.stream import PostgresStream
from tailrace.capture.postgres.table_scan import PostgresScan, ScanProgress, resume_scan
from tailrace.errors import ConfigError, SourceTableMissing
from tailrace.model.position import Lsn
from tailrace.model.schema import Column, Identity, TableId, TableSchema
from tailrace.validation import require_instance

LOCK_SECONDS_MAX = 5
"""Time to wait for a locked table, before other sessions wait behind us."""


def identify(url: str) -> SourceId:
    """Return which database this is, after checking that it can be captured from."""
    with connect(url) as connection:
        preflight.check_server(connection)
    return preflight.identify(url)


class PostgresCapture:
    """One PostgreSQL database. Holds plain settings; connections are opened where they are used."""

    capabilities = Capabilities(live=True, snapshot=True, lag=True)

    def __init__(self, settings: PostgresSettings) -> None:
        require_instance("settings", settings, PostgresSettings, "Give `PostgresSettings(url=…, wanted=…, slot=…, …)`.")
        self.settings = settings
        self._known: dict[int, TableSchema] = {}
        self.on_publish: Callable[[PublishedTables], None] = lambda published: None
        """Called with tables that are about to be published, and again when they are."""
        self._origin: SourceId | None = None
        """The history of the position that it was last prepared for."""
        self.scan_chunk_bytes = CHUNK_BYTES
        """About how much a scan reads in one snapshot of its own."""
        self.scan_seconds_max = OPEN_SECONDS_MAX
        """Time limit of one such snapshot, including the time the caller takes over the rows."""
        self._published: set[tuple[int, Identity]] | None = None
        """The wanted tables when the publications were last brought in line."""

    def remember_schemas(self, schemas: Iterable[TableSchema]) -> None:
        """Learn the last known schema of each table, as a log has it.

        Rows may be of a table that has been changed or dropped since.
        """
        self._known.update((schema.relation, schema) for schema in schemas)

    def identify(self) -> SourceId:
        """Return which database this is, after checking that it can be captured from."""
        return identify(self.settings.url)

    def prepare(self, position: Lsn | None, origin: SourceId | None = None, *, take_over: bool = False) -> Lsn | None:
        """Create publication and slot. Return the position where a new log begins, if it is new.

        `origin` is the history that `position` was read from. With `take_over`, another reader of the slot is ended.
        """
        self._origin = origin
        if position is not None and origin is not None:
            preflight.check_history(self.settings.url, origin, position)
        with self._connected() as connection:
            preflight.check_origin(connection, self.settings)
            self._published = self._wanted(connection)
            if not publications.ensure_publications(connection, self.settings, self.on_publish):
                raise ConfigError(
                    "no table at the source matches the settings",
                    source=redacted_url(self.settings.url),
                    hint="Check `source.tables` and `source.exclude` (globs are `schema.table`, case included), or "
                    "in a program `wanted`.",
                ).with_option_hint("Check the option `tables`, case included.")
            if position is not None:
                preflight.wait_for_slot(connection, self.settings.slot, take_over=take_over)
            return preflight.ensure_slot(connection, self.settings, position, take_over=take_over)

    def unprepare(self) -> None:
        """Drop the slot that was just created for a new stream. No stored state has its position."""
        if self.settings.slot_create:
            with self._connected() as connection:
                preflight.drop_slot(connection, self.settings.slot)

    @contextmanager
    def _connected(self) -> Iterator[psycopg.Connection]:
        """Open a connection for some queries; a failure of the server becomes a Tailrace error."""
        try:
            with connect(self.settings.url) as connection:
                yield connection
        except psycopg.Error as error:
            raise map_error(error, self.settings.url) from error

    def publish_new(self) -> None:
        """Bring the publications in line with the wanted tables, if those have changed."""
        if not self.settings.publication_create:
            return
        with self._connected() as connection:
            _wait_briefly(connection)
            wanted = self._wanted(connection)
            if wanted and wanted != self._published:
                publications.ensure_publications(connection, self.settings, self.on_publish)
            self._published = wanted

    def _wanted(self, connection: psycopg.Connection) -> set[tuple[int, Identity]]:
        return {(table.oid, table.identity) for table in publications.select_tables(connection, self.settings)}

    def tables(self) -> list[SourceTable]:
        """Return the wanted tables, as the catalogue has them now."""
        with self._connected() as connection:
            return publications.select_tables(connection, self.settings)

    @property
    def discovers_tables(self) -> bool:
        """True if rows may be of tables that `tables()` did not list before."""
        return False

    def learn_tables(self, schemas: Iterable[TableSchema]) -> None:
        """Learn such tables, as a log has them."""

    def name_at_source(self, table: TableId) -> TableId:
        """Return the source's name of a table of `tables()`."""
        return table

    def publications_by_table(self) -> dict[TableId, set[str]]:
        """Return the publications of ours that contain each table now."""
        with self._connected() as connection:
            return publications.publications_by_table(connection, self.settings)

    def definition_versions(self, tables: Sequence[TableId]) -> dict[TableId, str]:
        """Return, per existing table, a text that changes with its definition or storage."""
        with self._connected() as connection:
            return Catalogue(connection).definition_versions(tables)

    def describe(self, tables: Iterable[TableId], *, unpublished: bool = False) -> dict[TableId, TableSchema]:
        """Return the current schemas of those tables that exist.

        A table that is not published has no columns. With `unpublished` it has those that it will have once we have
        published it, if we may.
        """
        unpublished = unpublished and self.settings.publication_create
        schemas: dict[TableId, TableSchema] = {}
        with self._connected() as connection:
            catalogue = Catalogue(connection)
            for table in tables:
                with suppress(SourceTableMissing), catalogue.one_view():
                    schemas[table] = catalogue.describe(table, self.settings.publications, unpublished=unpublished)
        return schemas

    def parse_value(self, column: Column, text: str) -> pa.Scalar | None:
        """Return the value of a text that the server printed. None if the column's type cannot hold it."""
        return values.parse_value(text, column.type)

    def committed_until(self) -> Lsn:
        """Return a position at or after the end of everything committed until now."""
        with self._connected() as connection:
            return preflight.committed_until(connection)

    def server_time(self) -> int:
        """Return the source's time, µs since 1970. Everything committed until now has this time or an earlier one."""
        with self._connected() as connection:
            return preflight.server_time(connection)

    def live(self, after: Lsn, origin: SourceId | None = None) -> TimelineStream:
        """Open the stream after a position of `origin` or of the prepared history.

        The server behind the URL may have changed since.
        """
        origin = origin or self._origin
        catalogue = _LazyCatalogue(self.settings, self._known)
        session = connect_replication(self.settings.url)
        try:
            # From this very session: the next one may be answered by another server.
            server = (
                server_history.require_same_history(session, origin, after)
                if origin
                else server_history.identify(session)[0]
            )
            # Asked for a position before the confirmed one, the server would silently begin at the confirmed one.
            preflight.ensure_slot(catalogue.connection(), self.settings, after)
            if self._origin is not None:
                self._origin = replace(self._origin, timeline=server.timeline)
            return PostgresStream(
                self.settings,
                session,
                server.timeline,
                after,
                catalogue.describe_messages,
                catalogue.next_transaction(),
                catalogue.close,
            )
        except BaseException:
            session.finish()
            catalogue.close()
            raise

    def snapshot(self) -> ExactSnapshot:
        return ExactSnapshot(
            self.settings.url, self.settings.publications, invalid_text_replaced=self.settings.invalid_text_replaced
        )

    def plan(self, table: TableId, cut: ChunkKind, chunk_bytes: int) -> Plan:
        """Return the table's chunks for its current files. Call it before the chunks' snapshot is taken."""
        with self._connected() as connection:
            _wait_briefly(connection)
            return plan_table(connection, table, self.settings.publications, cut, chunk_bytes)

    def is_unchanged(self, plan: Plan) -> bool:
        """Return whether the table's rows are still in the files of the plan."""
        with self._connected() as connection:
            _wait_briefly(connection)
            now = find_leaves(connection, plan.schema)
        return {(leaf.oid, leaf.file) for leaf in now} == {(leaf.oid, leaf.file) for leaf in plan.leaves}

    def require_valid_condition(self, schema: TableSchema, condition: str) -> None:
        """Raise ConfigError, with the server's message, unless this condition can select rows of the table."""
        with self._connected() as connection:
            _wait_briefly(connection)
            require_valid_condition(connection, schema, condition)

    def wait_for_writers(self, stopping: Callable[[], bool]) -> BarrierSnapshot | None:
        """Return the snapshot at which a chunked load begins."""
        return wait_for_writers(self.settings.url, self.settings.standby, stopping)

    def scan(self, tables: Sequence[TableId], *, live: bool, where: str | None = None) -> PostgresScan:
        """Read tables for a runtime; `where` is SQL."""
        return PostgresScan(self, ScanProgress(tables=tuple(tables), incremental=live, where=where), fresh=True)

    def resume_scan(self, record: Mapping[str, Any]) -> PostgresScan | None:
        return resume_scan(self, record)

    def open_transactions(self) -> str | None:
        """Describe the open transactions that a beginning load waits for."""
        return open_transactions(self.settings.url)

    def chunk_reader(self, seconds_max: float, at_least: Lsn) -> SnapshotReader:
        """Return a reader for a chunk in a snapshot of its own. It reads the standby, if there is one."""
        return SnapshotReader(
            self.settings.standby or self.settings.url,
            None,
            self.settings.publications,
            self.settings.invalid_text_replaced,
            at_least=at_least,
            seconds_max=seconds_max,
        )

    def row_reader(self, seconds_max: float) -> SnapshotReader:
        """Return a reader that refetches rows by their keys, as the source has them now."""
        return SnapshotReader(
            self.settings.url,
            None,
            self.settings.publications,
            self.settings.invalid_text_replaced,
            seconds_max=seconds_max,
        )

    def lag(self) -> Lag:
        with self._connected() as connection:
            return preflight.lag(connection, self.settings.slot)

    def drop(self) -> list[str]:
        """Remove slot and publications; return what was removed."""
        with self._connected() as connection:
            removed = []
            if self.settings.slot_create and preflight.drop_slot(connection, self.settings.slot):
                removed.append(f"slot {self.settings.slot}")
            removed += [f"publication {name}" for name in publications.drop_publications(connection, self.settings)]
            return removed


class _LazyCatalogue:
    """A catalogue connection that is reopened after it broke; schemas are rarely looked up."""

    def __init__(self, settings: PostgresSettings, known: dict[int, TableSchema]) -> None:
        self._settings = settings
        self._known = known
        self._connection: psycopg.Connection | None = None

    def connection(self) -> psycopg.Connection:
        if self._connection is None or self._connection.closed or self._connection.broken:
            self.close()
            self._connection = connect(self._settings.url)
        return self._connection

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def describe_messages(self, messages: Sequence[bytes]) -> list[TableSchema]:
        catalogue = Catalogue(self.connection())
        schemas = catalogue.describe_messages(messages, self._settings.publications, self._known)
        self._known.update((schema.relation, schema) for schema in schemas)
        return schemas

    def next_transaction(self) -> int:
        """Return the server's next 64-bit transaction id: those in the stream are near it."""
        return Catalogue(self.connection()).next_transaction()


def _wait_briefly(connection: psycopg.Connection) -> None:
    connection.execute(f"set lock_timeout = '{LOCK_SECONDS_MAX}s'")
