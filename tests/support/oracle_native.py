"""A native subscriber: PostgreSQL's own replica of the workload's tables, on a second server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tailrace.demo.server import EmbeddedPostgres
from tests.support.pipelines import eventually
from tests.support.workload_tables import TYPES, Table

NAME = "native"
MARKER = "marker"
"""A table with a row for each time that somebody waited."""
CATCH_UP_SECONDS_MAX = 240.0


@dataclass(frozen=True, kw_only=True)
class Published:
    """How a table is published, where not all of it is."""

    table: Table
    how: str
    """What stands after its name: a list of columns, a condition."""
    made_as: tuple[str, ...] = ()
    """How the subscriber makes its table, if it gets fewer columns."""


class Subscriber:
    """Tables on a second server that follow those of the first."""

    def __init__(
        self,
        source: EmbeddedPostgres,
        target: EmbeddedPostgres,
        tables: Sequence[Table],
        in_part: Sequence[Published] = (),
    ) -> None:
        self._source, self._target = source, target
        self._marks = 0
        self.url = target.url()
        parts = {part.table: part for part in in_part}
        self._make_tables(tables, parts)
        how = {table: parts[table].how if table in parts else "" for table in tables}
        told = [MARKER, *(f"{table.sql} {how[table]}" for table in tables if not table.inserts_only)]
        silent = [table.sql for table in tables if table.inserts_only]
        via = "publish_via_partition_root = true"
        names = [NAME]
        self._on(source, f"create publication {NAME} for table only {', only '.join(told)} with ({via})")
        if silent:
            names.append(f"{NAME}_inserts")
            self._on(
                source,
                f"create publication {NAME}_inserts for table only {', only '.join(silent)} "
                f"with ({via}, publish = 'insert, truncate')",
            )
        self._on(
            target,
            f"create subscription {NAME} connection '{source.url()}' publication {', '.join(names)} "
            f"with (slot_name = {NAME})",
        )

    def _make_tables(self, tables: Sequence[Table], parts: Mapping[Table, Published]) -> None:
        for server in (self._source, self._target):
            for text in (*TYPES, f"create table {MARKER} (n int primary key)"):
                self._on(server, text)
            for table in tables:
                part = parts.get(table)
                made = part.made_as if part and part.made_as and server is self._target else table.make
                for text in made:
                    # A subscriber with foreign keys could not truncate one table without the other.
                    if server is self._source or "foreign key" not in text:
                        self._on(server, text)

    def catch_up(self) -> None:
        """Wait until the subscriber has all that is committed by now."""
        self._marks += 1
        self._on(self._source, f"insert into {MARKER} values ({self._marks})")
        assert eventually(self._is_marked, CATCH_UP_SECONDS_MAX, pause=0.05), self._target.log_tail()

    def _is_marked(self) -> bool:
        return bool(self._on(self._target, f"select 1 from {MARKER} where n = {self._marks}"))

    def close(self) -> None:
        """Let go of the source's slot."""
        self._on(self._target, f"drop subscription {NAME}")

    def _on(self, server: EmbeddedPostgres, text: str) -> list[tuple[Any, ...]]:
        with server.connect() as connection:
            found = connection.execute(text.encode())
            return found.fetchall() if found.description else []
