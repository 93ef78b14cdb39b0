"""Tables of every kind at a real server: what the stream tells of them, what a load reads, and whether both agree.

A `Scene` is a schema of its own and a capture of what is in it. `replay` is the plainest possible reader of a
stream: it knows the rows that must be there afterwards.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tailrace.capture.port import Stream
from tailrace.capture.postgres.config import PostgresSettings
from tailrace.capture.postgres.source import PostgresCapture
from tailrace.demo.server import EmbeddedPostgres
from tailrace.model.event import Event
from tailrace.model.position import Lsn
from tailrace.model.schema import TableId, TableSchema
from tailrace.model.system_streams import is_system

COME_SECONDS_MAX = 240.0
VERSION = int(os.environ.get("TAILRACE_TEST_PG", "16"))
BIG = "(select string_agg(md5(random()::text), '') from generate_series(1, 200))"
"""SQL for a text that is stored apart and that no compression makes small."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Told:
    """One change as the stream told it, and the shape it was told with."""

    schema: TableSchema
    event: Event

    @property
    def op(self) -> str:
        return self.event.operation.value

    @property
    def table(self) -> TableId:
        return self.schema.table

    @property
    def values(self) -> Row:
        return self.event.values

    @property
    def short(self) -> tuple[Any, ...]:
        """The operation, the table and the values sent: `("insert", "t", 1, "x")`; of a truncate no values."""
        sent = (
            []
            if self.op == "truncate"
            else [value for name, value in self.values.items() if name not in self.event.unchanged]
        )
        return (self.op, self.table.name, *sent)


class Scene:
    """A schema of its own on a server, a capture of the tables in it, and a hand on both."""

    def __init__(self, server: EmbeddedPostgres) -> None:
        self._server = server
        self.name = f"scene_{uuid.uuid4().hex[:12]}"
        self._schemas = {self.name}
        self.connection = server.connect()
        self.run(f"create schema {self.name}", f"set search_path = {self.name}")
        self.capture = PostgresCapture(self.settings())
        self._stream: Stream | None = None
        self.position = Lsn(0)
        """Where the stream has come to."""

    def settings(
        self, wanted: Callable[[TableId], bool] | None = None, *, named: Iterable[str] = (), own: bool = False
    ) -> PostgresSettings:
        """A capture of everything here, unless told otherwise; `own`: of a publication that the test has made."""
        names = {TableId(self.name, name) for name in named}
        return PostgresSettings(
            url=self._server.url(),
            wanted=wanted or (lambda table: table.schema in self._schemas),
            named=names.__contains__,
            slot=self.name,
            recreate_slot=True,
            publication=self.name,
            publication_create=not own,
        )

    def schema(self, ending: str) -> str:
        """One more schema."""
        name = f"{self.name}_{ending}"
        self._schemas.add(name)
        self.run(f'create schema "{name}"')
        return name

    def id(self, name: str) -> TableId:
        return TableId(self.name, name)

    def run(self, *statements: str) -> None:
        """Each in a transaction of its own."""
        for statement in statements:
            self.connection.execute(statement.encode())

    def together(self, *statements: str) -> None:
        """All in one transaction."""
        with self.connection.transaction():
            self.run(*statements)

    def ask(self, query: str) -> list[tuple[Any, ...]]:
        return self.connection.execute(query.encode()).fetchall()

    def follow(self, *tables: str, publication: str = "") -> None:
        """Begin to follow these tables, or everything here. With `publication`, SQL that comes after the name, that
        one is followed and is not ours."""
        wanted = {self.id(name) for name in tables}
        if publication:
            self.run(f"create publication {self.name} {publication}")
        self.capture = PostgresCapture(self.settings(wanted.__contains__ if tables else None, own=bool(publication)))
        begin = self.capture.prepare(None)
        assert begin is not None
        self.position = begin
        self._stream = self.capture.live(begin)

    def restart(self) -> None:
        """Stop, and start again as a capture does that comes back."""
        if self._stream is not None:
            self._stream.close()
        assert self.capture.prepare(self.position) is None
        self._stream = self.capture.live(self.position)

    def told(self) -> list[Told]:
        """All that the stream has told since the last time, up to now."""
        assert self._stream is not None
        end, deadline = self.capture.committed_until(), time.monotonic() + COME_SECONDS_MAX
        found: list[Told] = []
        while self.position < end:
            assert time.monotonic() < deadline, "the stream does not come to the end"
            window = self._stream.read(self.position, 0.2)
            if window is None:
                continue
            self.position = window.end
            rows = [
                Told(batch.schema, event)
                for batch in window.batches
                if not is_system(batch.schema)
                for event in batch.events()
            ]
            found += sorted(rows, key=lambda told: told.event.seq)
        return found

    def short(self) -> list[tuple[Any, ...]]:
        return [told.short for told in self.told()]

    def load(self, table: str | TableId) -> tuple[TableSchema, list[Row]]:
        """What a load reads now."""
        name = table if isinstance(table, TableId) else self.id(table)
        with self.capture.snapshot() as snapshot, snapshot.reader() as reader:
            schema = reader.describe(name)
            return schema, [row for batch in reader.rows(schema) for row in batch.to_pylist()]

    def agreed(self, told: Iterable[Told], table: str | TableId) -> list[Row]:
        """The rows that stream and load agree on, in the same shape; the stream told of the table from its first
        row on."""
        name = table if isinstance(table, TableId) else self.id(table)
        mine = [change for change in told if change.table == name]
        schema, loaded = self.load(name)
        assert mine[-1].schema == schema
        replayed = replay(mine)
        assert _sorted(replayed) == _sorted(loaded)
        return _sorted(loaded)

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
        self.connection.close()
        self.capture.drop()
        with self._server.connect() as connection:
            for name in (self.name, f"{self.name}_inserts"):
                connection.execute(f"drop publication if exists {name}".encode())
            for schema in self._schemas:
                connection.execute(f'drop schema if exists "{schema}" cascade'.encode())


def replay(told: Iterable[Told]) -> list[Row]:
    """The rows of one table after these changes, one by one and without any cleverness."""
    rows: list[Row] = []
    gone: Row = {}
    for change in told:
        event, key = change.event, change.schema.key
        if change.op == "truncate":
            rows.clear()
            continue
        if change.op == "insert":
            rows.append(_filled(event, gone if event.moved_from else {}))
            continue
        # Of a keyless table the whole old row is known; of one with a key the key is.
        old = event.before or event.values
        which = old if not key else {name: event.values[name] for name in key}
        at = next(n for n, row in enumerate(rows) if which.items() <= row.items())
        gone = rows.pop(at)
        if change.op == "update":
            rows.append(_filled(event, gone))
    return rows


def _filled(event: Event, base: Mapping[str, Any]) -> Row:
    return {name: base[name] if name in event.unchanged else value for name, value in event.values.items()}


def _sorted(rows: Iterable[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: [(value is not None, str(value)) for value in row.values()])
