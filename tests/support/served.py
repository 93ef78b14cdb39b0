"""A runtime on a real server: what drives it, what it is asked with, and what it is compared with."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import psycopg

from tailrace.capture.postgres.source import PostgresCapture
from tailrace.model.mirror import Mirror as TableMirror
from tailrace.model.schema import TableId
from tailrace.runtime.loop import CdcRuntime
from tailrace.runtime.output_batch import Batch

SECONDS_MAX = 240.0


class Mirror:
    """A sink that keeps the last state of each key, by what `row_write` says and nothing else."""

    def __init__(self) -> None:
        self._tables: dict[TableId, TableMirror] = {}

    def write(self, batch: Batch) -> tuple[()]:
        for event in batch.events():
            self._tables.setdefault(event.schema.table, TableMirror()).apply(event.row_write())
        return ()

    def flush(self, caught_up: bool) -> None:
        """Nothing is durable here."""

    @property
    def rows(self) -> dict[tuple[Any, ...], dict[str, Any]]:
        return {(str(name), *key): row for name, table in self._tables.items() for key, row in table.rows.items()}

    def forget(self) -> None:
        self._tables.clear()

    def of(self, table: TableId) -> list[dict[str, Any]]:
        found = self._tables.get(table, TableMirror()).rows.values()
        return sorted(found, key=lambda row: str(row))


def sql(source: PostgresCapture, *statements: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(source.settings.url, autocommit=True) as connection:
        for statement in statements[:-1]:
            connection.execute(statement)
        found = connection.execute(statements[-1])
        return found.fetchall() if found.description else []


def rows_of(source: PostgresCapture, table: TableId) -> list[dict[str, Any]]:
    with psycopg.connect(source.settings.url) as connection:
        connection.execute("set timezone = 'UTC'")
        found = connection.execute(f"select * from {table}")
        names = [column.name for column in found.description or ()]
        return sorted((dict(zip(names, row, strict=True)) for row in found.fetchall()), key=lambda row: str(row))


def drive(runtime: CdcRuntime, mirror: Mirror, enough: Callable[[], bool]) -> list[Batch]:
    """Poll, write and acknowledge until it is enough."""
    found, deadline = [], time.monotonic() + SECONDS_MAX
    while not enough():
        assert time.monotonic() < deadline, runtime.control.status()
        batch = runtime.poll()
        if batch.rows:
            mirror.write(batch)
            found.append(batch)
        runtime.commit(batch.ack)
    return found


def reached(runtime: CdcRuntime, source: PostgresCapture) -> Callable[[], bool]:
    """Whether everything that is committed by now was acknowledged, and no snapshot is under way."""
    end = source.committed_until()
    return lambda: runtime.position >= end and runtime.control.status().snapshot is None
