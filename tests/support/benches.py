"""Sources under test: one `Bench` for each, and what a caller does with any of them."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest

from tailrace.capture.memory.source import MemoryCapture, batch_of
from tailrace.capture.port import ChangeCapture, Stream
from tailrace.capture.postgres import stream as postgres_stream
from tailrace.capture.postgres.config import PostgresSettings
from tailrace.capture.postgres.source import PostgresCapture
from tailrace.demo.server import EmbeddedPostgres
from tailrace.errors import SlotBusy, SourceUnreachable
from tailrace.model import change
from tailrace.model.batch import ChangeBatch, Window
from tailrace.model.change import Operation
from tailrace.model.position import Lsn
from tailrace.model.schema import TableId, TableSchema
from tests.support.changes import table_schema
from tests.support.windows import named

COME_SECONDS_MAX = 240.0
"""However busy the machine is: a limit that only guards costs nothing."""
INSERT_BYTES = 18
"""About what one of the rows below takes on PostgreSQL's wire."""

Row = dict[str, Any]


class Bench(Protocol):
    """A source, and a hand on the database behind it. There are two tables, `items` and `others`."""

    begin: Lsn
    """Where a new log begins."""

    @property
    def capture(self) -> ChangeCapture: ...

    def write(self, *rows: tuple[str, int]) -> None:
        """Insert (table, id) pairs in one transaction."""

    def write_many(self, begin: int, end: int) -> None:
        """Insert these ids in one transaction, the first half into `items` and the rest into `others`."""

    def give_in_parts(self, rows: int) -> None:
        """Have transactions larger than about so many rows come in parts of about that size."""

    def write_elsewhere(self) -> None:
        """Move the log on without a change that anyone captures."""

    def confirmed(self) -> Lsn:
        """What the source believes is durable elsewhere."""


class MemoryBench:
    def __init__(self) -> None:
        self.capture = MemoryCapture(window_transactions_max=3)
        self.begin = self.capture.end
        shape = table_schema({"id": pa.int64()})
        self._shapes = {
            name: named("public", name, n, like=shape) for n, name in enumerate(("items", "others"), start=1)
        }

    def write(self, *rows: tuple[str, int]) -> None:
        self.capture.commit(*[batch_of(self._shapes[table], (Operation.INSERT, {"id": n})) for table, n in rows])

    def write_many(self, begin: int, end: int) -> None:
        middle = (begin + end) // 2
        self.capture.commit(
            _inserts(self._shapes["items"], begin, middle), _inserts(self._shapes["others"], middle, end)
        )

    def give_in_parts(self, rows: int) -> None:
        self.capture.part_rows_max = rows

    def write_elsewhere(self) -> None:
        self.capture.quiet(4096)

    def confirmed(self) -> Lsn:
        return self.capture.confirmed


def _inserts(schema: TableSchema, begin: int, end: int) -> ChangeBatch:
    """As `batch_of` makes them, many at once."""
    one = batch_of(schema, (Operation.INSERT, {"id": 0}))
    columns = [pa.nulls(end - begin, field.type).fill_null(one.data.column(field.name)[0]) for field in one.data.schema]
    columns[one.data.schema.get_field_index("id")] = pa.array(np.arange(begin, end))
    return ChangeBatch(schema=schema, data=pa.RecordBatch.from_arrays(columns, schema=one.data.schema))


class PostgresBench:
    def __init__(self, server: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        name = f"bench_{uuid.uuid4().hex[:12]}"
        self.schema = name
        self.connection = server.connect()
        self.execute(f"create schema {name}")
        for table in ("items", "others", "elsewhere"):
            self.execute(f"create table {name}.{table} (id int8 primary key)")
        wanted = {TableId(name, "items"), TableId(name, "others")}
        self.capture = PostgresCapture(
            PostgresSettings(url=server.url(), wanted=wanted.__contains__, slot=name, publication=name)
        )
        begin = self.capture.prepare(None)
        assert begin is not None
        self.begin = begin

    def execute(self, text: str) -> list[tuple[Any, ...]]:
        found = self.connection.execute(text.encode())
        return found.fetchall() if found.description else []

    def write(self, *rows: tuple[str, int]) -> None:
        with self.connection.transaction():
            for table, n in rows:
                self.execute(f"insert into {self.schema}.{table} values ({n})")

    def write_many(self, begin: int, end: int) -> None:
        middle = (begin + end) // 2
        with self.connection.transaction():
            for table, low, high in (("items", begin, middle), ("others", middle, end)):
                self.execute(f"insert into {self.schema}.{table} select generate_series({low}, {high} - 1)")

    def give_in_parts(self, rows: int) -> None:
        self._monkeypatch.setattr(postgres_stream, "BIG_BYTES", rows * INSERT_BYTES)
        self._monkeypatch.setattr(postgres_stream, "DRAIN_BYTES", rows * INSERT_BYTES // 8)

    def write_elsewhere(self) -> None:
        self.execute(
            f"insert into {self.schema}.elsewhere select coalesce(max(id), 0) + 1 from {self.schema}.elsewhere"
        )

    def confirmed(self) -> Lsn:
        found = self.capture.lag().confirmed
        assert found is not None
        return found

    def walsender(self) -> int:
        """The server's process that serves the slot now."""
        ((pid,),) = self.execute(f"select active_pid from pg_replication_slots where slot_name = '{self.schema}'")
        return int(pid)

    def close(self) -> None:
        self.capture.drop()
        self.connection.close()


class Streams:
    """Opens streams, and closes those a test left open before its source goes."""

    def __init__(self, capture: ChangeCapture) -> None:
        self._capture = capture
        self._open: list[Stream] = []

    def open(self, after: Lsn) -> Stream:
        deadline = time.monotonic() + COME_SECONDS_MAX
        while True:
            try:
                stream = self._capture.live(after)
            except (SourceUnreachable, SlotBusy):  # the server may be slow to notice that the last one is gone
                assert time.monotonic() < deadline
                time.sleep(0.05)
            else:
                self._open.append(stream)
                return stream

    def close(self, stream: Stream) -> None:
        self._open.remove(stream)
        stream.close()

    def close_all(self) -> None:
        for stream in list(self._open):
            self.close(stream)


def take(stream: Stream, after: Lsn, rows: int, *, confirm: bool = False) -> list[Window]:
    """Windows until this many rows came, as a caller takes them that makes each durable. Empty ones are left
    out: a source may move the position whenever it likes, but not inside a transaction."""
    taken: list[Window] = []
    deadline = time.monotonic() + COME_SECONDS_MAX
    while sum(window.rows for window in taken) < rows or taken[-1].open:
        assert time.monotonic() < deadline, f"only {sum(window.rows for window in taken)} of {rows} rows came"
        window = stream.read(after, 0.2)
        if window is None:
            continue
        assert window.start == after
        assert window.end == after if window.open else window.end > after
        assert window.continues == (bool(taken) and taken[-1].open)
        after = window.end
        if confirm and not window.open:
            stream.confirm(after)
        if not window.is_empty:
            taken.append(window)
    return taken


def rows_of(*windows: Window) -> list[Row]:
    """Every row, window by window, in order of `_seq` within each."""
    found: list[Row] = []
    for window in windows:
        rows = [{"table": batch.schema.table.name} | row for batch in window.batches for row in batch.data.to_pylist()]
        found += sorted(rows, key=lambda row: int(row[change.SEQ]))
    return found


def keys(*windows: Window) -> list[int]:
    """The id of every row, in order."""
    return list(map(int, numbers("id", *windows)))


def numbers(name: str, *windows: Window) -> npt.NDArray[np.int64]:
    """A column of whole numbers over all tables, in order of `_seq` within each window."""
    found = [np.empty(0, np.int64)]
    for window in windows:
        if window.batches:
            seqs, values = (
                np.concatenate([batch.data.column(column).cast(pa.int64()).to_numpy() for batch in window.batches])
                for column in (change.SEQ, name)
            )
            found.append(values[np.argsort(seqs)])
    return np.concatenate(found)


def quiet_window(stream: Stream, after: Lsn) -> Window:
    """The next window, with rows or without."""
    return _next(stream, after, lambda window: True)


def next_rows(stream: Stream, after: Lsn) -> Window:
    """The next window with rows; the position may have moved before, and the caller has not made that durable."""
    return _next(stream, after, lambda window: not window.is_empty)


def _next(stream: Stream, after: Lsn, wanted: Callable[[Window], bool]) -> Window:
    deadline = time.monotonic() + COME_SECONDS_MAX
    while time.monotonic() < deadline:
        window = stream.read(after, 0.2)
        if window is not None and wanted(window):
            return window
    pytest.fail("nothing came")
