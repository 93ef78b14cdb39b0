"""PostgreSQL as a `ChangeCapture`: wires settings to stream, snapshot and lag."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import psycopg
import pyarrow as pa

from tailrace.capture.port import Capabilities, Lag, SourceId, TimelineStream
from tailrace.capture.postgres import preflight, server_history, values
from tailrace.capture.postgres.catalogue import Catalogue, SourceTable
from tailrace.capture.postgres.chunks import CHUNK_BYTES, ChunkKind, Plan, find_leaves, plan_table
from tailrace.capture.postgres.config import PostgresSettings
from tailrace.capture.postgres.connect import connect, connect_replication, map_error, redacted_url
from tailrace.capture.postgres.preflight import PublishedTables
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
"""To wait for a table that somebody has locked, before others wait behind us."""


def identify(url: str) -> SourceId:
    """Which database this is, after checking that it can be captured from."""
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
        self.on_publish: Callable[[PublishedTables], None] = lambda told: None
        """Hears of tables that are about to be published, and again when they are."""
        self._origin: SourceId | None = None
        """The history that the position is of which it was last prepared for."""
        self.scan_chunk_bytes = CHUNK_BYTES
        """What a scan reads in one snapshot of its own, about,"""
        self.scan_seconds_max = OPEN_SECONDS_MAX
        """and how long that may take, whoever takes the rows included."""
        self._published: set[tuple[int, Identity]] | None = None
        """The tables that were wanted when the publications were last brought in line."""

    def remember_schemas(self, shapes: Iterable[TableSchema]) -> None:
        """Learn the last shape that each table was known to have, as a log has it: rows may come of a table that has
        been changed or dropped since."""
        self._known.update((shape.relation, shape) for shape in shapes)

    def identify(self) -> SourceId:
        """Which database this is, after checking that it can be captured from."""
        return identify(self.settings.url)

    def prepare(self, position: Lsn | None, origin: SourceId | None = None, *, take_over: bool = False) -> Lsn | None:
        """Make publication and slot; the point a new log begins at, if it is new.

        `origin` is the history that `position` was read from; with `take_over` whoever reads the slot is ended.
        """
        self._origin = origin
        if position is not None and origin is not None:
            preflight.check_history(self.settings.url, origin, position)
        with self._connected() as connection:
            preflight.check_origin(connection, self.settings)
            self._published = self._wanted(connection)
            if not preflight.ensure_publications(connection, self.settings, self.on_publish):
                raise ConfigError(
                    "no table at the source matches the settings",
                    source=redacted_url(self.settings.url),
                    hint="Look at `source.tables` and `source.exclude` (globs are `schema.table`, case included), "
                    "or in a program at `wanted`.",
                ).with_option_hint("Look at the option `tables`, case included.")
            if position is not None:
                preflight.wait_for_slot(connection, self.settings.slot, take_over=take_over)
            return preflight.ensure_slot(connection, self.settings, position, take_over=take_over)

    def unprepare(self) -> None:
        """Drop the slot that was just made for a new stream: nothing was kept of where that begins."""
        if self.settings.slot_create:
            with self._connected() as connection:
                preflight.drop_slot(connection, self.settings.slot)

    @contextmanager
    def _connected(self) -> Iterator[psycopg.Connection]:
        """A connection for some questions; a server that goes away in the middle of them is told as ours."""
        try:
            with connect(self.settings.url) as connection:
                yield connection
        except psycopg.Error as error:
            raise map_error(error, self.settings.url) from error

    def publish_new(self) -> None:
        """Bring the publications in line with the tables that are wanted now, if those are others than before."""
        if not self.settings.publication_create:
            return
        with self._connected() as connection:
            _wait_briefly(connection)
            wanted = self._wanted(connection)
            if wanted and wanted != self._published:
                preflight.ensure_publications(connection, self.settings, self.on_publish)
            self._published = wanted

    def _wanted(self, connection: psycopg.Connection) -> set[tuple[int, Identity]]:
        return {(table.oid, table.identity) for table in preflight.select_tables(connection, self.settings)}

    def tables(self) -> list[SourceTable]:
        """The tables that are wanted, as the catalogue has them now."""
        with self._connected() as connection:
            return preflight.select_tables(connection, self.settings)

    @property
    def discovers_tables(self) -> bool:
        """Whether rows may come of tables that `tables()` did not have before they came."""
        return False

    def learn_tables(self, shapes: Iterable[TableSchema]) -> None:
        """Learn of such tables, as a log has them."""

    def name_at_source(self, table: TableId) -> TableId:
        """What the source calls a table of `tables()`."""
        return table

    def publications_by_table(self) -> dict[TableId, set[str]]:
        """The publications of ours that hold each table now."""
        with self._connected() as connection:
            return preflight.publications_by_table(connection, self.settings)

    def definition_versions(self, tables: Sequence[TableId]) -> dict[TableId, str]:
        """For each table that is there a text that is another one whenever its definition, or its storage, is."""
        with self._connected() as connection:
            return Catalogue(connection).definition_versions(tables)

    def describe(self, tables: Iterable[TableId], *, unpublished: bool = False) -> dict[TableId, TableSchema]:
        """The shapes of those that are there, as the catalogue has them now. One that is not published has no column;
        with `unpublished` it has those that it will have once we have published it, if we may."""
        unpublished = unpublished and self.settings.publication_create
        found: dict[TableId, TableSchema] = {}
        with self._connected() as connection:
            catalogue = Catalogue(connection)
            for table in tables:
                with suppress(SourceTableMissing), catalogue.one_view():
                    found[table] = catalogue.describe(table, self.settings.publications, unpublished=unpublished)
        return found

    def parse_value(self, column: Column, text: str) -> pa.Scalar | None:
        """A value from the text that the server prints of it; None if the column's type cannot hold it."""
        return values.parse_value(text, column.type)

    def committed_until(self) -> Lsn:
        """Everything committed until now ends at or before this position."""
        with self._connected() as connection:
            return preflight.committed_until(connection)

    def server_time(self) -> int:
        """The source's time, µs since 1970: everything committed until now bears this one or an earlier."""
        with self._connected() as connection:
            return preflight.server_time(connection)

    def live(self, after: Lsn, origin: SourceId | None = None) -> TimelineStream:
        """The stream after a position of `origin`, or of what it was prepared for; the server behind the URL may be
        another one than before."""
        origin = origin or self._origin
        catalogue = _LazyCatalogue(self.settings, self._known)
        session = connect_replication(self.settings.url)
        try:
            # Of this very session: the next one may be answered by another server.
            server = (
                server_history.require_same_history(session, origin, after)
                if origin
                else server_history.identify(session)[0]
            )
            # Asked for less than was confirmed, the server would begin at what was, without a word.
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
        """The table in chunks, as its files are now: made before the snapshot that the chunks are read in."""
        with self._connected() as connection:
            _wait_briefly(connection)
            return plan_table(connection, table, self.settings.publications, cut, chunk_bytes)

    def is_unchanged(self, plan: Plan) -> bool:
        """Whether the table's rows still lie in the files that the plan was made for."""
        with self._connected() as connection:
            _wait_briefly(connection)
            now = find_leaves(connection, plan.schema)
        return {(leaf.oid, leaf.file) for leaf in now} == {(leaf.oid, leaf.file) for leaf in plan.leaves}

    def require_valid_condition(self, schema: TableSchema, condition: str) -> None:
        """Raise ConfigError, with the server's words, unless rows of the table can be picked with this condition."""
        with self._connected() as connection:
            _wait_briefly(connection)
            require_valid_condition(connection, schema, condition)

    def wait_for_writers(self, stopping: Callable[[], bool]) -> BarrierSnapshot | None:
        """What chunks that are read in snapshots of their own begin with."""
        return wait_for_writers(self.settings.url, self.settings.standby, stopping)

    def scan(self, tables: Sequence[TableId], *, live: bool, where: str | None = None) -> PostgresScan:
        """Read tables for a runtime; `where` is SQL."""
        return PostgresScan(self, ScanProgress(tables=tuple(tables), incremental=live, where=where), fresh=True)

    def resume_scan(self, record: Mapping[str, Any]) -> PostgresScan | None:
        return resume_scan(self, record)

    def open_transactions(self) -> str | None:
        """What a load that begins waits for, in words."""
        return open_transactions(self.settings.url)

    def chunk_reader(self, seconds_max: float, at_least: Lsn) -> SnapshotReader:
        """Reads a chunk in a snapshot of its own, from the standby if there is one."""
        return SnapshotReader(
            self.settings.standby or self.settings.url,
            None,
            self.settings.publications,
            self.settings.invalid_text_replaced,
            at_least=at_least,
            seconds_max=seconds_max,
        )

    def row_reader(self, seconds_max: float) -> SnapshotReader:
        """Reads rows again by their keys, as the source has them now."""
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
        """Remove slot and publications; what was removed."""
        with self._connected() as connection:
            gone = []
            if self.settings.slot_create and preflight.drop_slot(connection, self.settings.slot):
                gone.append(f"slot {self.settings.slot}")
            gone += [f"publication {name}" for name in preflight.drop_publications(connection, self.settings)]
            return gone


class _LazyCatalogue:
    """A catalogue connection that is opened again when the last one has broken; shapes are asked for rarely."""

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
        shapes = catalogue.describe_messages(messages, self._settings.publications, self._known)
        self._known.update((shape.relation, shape) for shape in shapes)
        return shapes

    def next_transaction(self) -> int:
        """The server's next 64-bit transaction id: transactions in the stream lie near it."""
        return Catalogue(self.connection()).next_transaction()


def _wait_briefly(connection: psycopg.Connection) -> None:
    connection.execute(f"set lock_timeout = '{LOCK_SECONDS_MAX}s'")
