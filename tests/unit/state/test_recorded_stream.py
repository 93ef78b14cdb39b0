"""Every schema is in the history once, before its first row is delivered, however often rows repeat."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tailrace.capture.memory.source import MemoryCapture, batch_of
from tailrace.errors import SourceUnreachable, StateFull, TailraceError
from tailrace.model.batch import ChangeBatch, Window
from tailrace.model.change import Operation
from tailrace.model.position import ZERO, Lsn
from tailrace.model.schema import Column, TableSchema
from tailrace.model.system_streams import MESSAGE_STREAM
from tailrace.state.recorded_stream import RecordedStream, SchemaRecorder
from tailrace.state.schema_history import MemorySchemaHistory, SchemaHistory, SchemaVersion
from tailrace.state.schema_history_stores import FileSchemaHistory
from tests.support.changes import SHOP, insert
from tests.support.runtimes import LogLoop
from tests.support.windows import batch, open_window, window

WIDER = replace(SHOP, columns=(*SHOP.columns, Column(name="extra", source_type="text", type=pa.string())))


def one(schema: TableSchema, key: int) -> ChangeBatch:
    return batch_of(schema, (Operation.INSERT, {"id": key}))


class Sink:
    """A sink that keeps windows and looks into the history at each."""

    def __init__(self, history: SchemaHistory) -> None:
        self.position, self.rows = ZERO, 0
        self._history = history

    def append(self, window: Window) -> None:
        for item in window.batches:
            schemas = [version.schema for version in self._history.versions(item.schema.table)]
            assert item.schema in schemas, "a row came before its shape was in the history"
        self.rows += window.rows
        self.position = window.end


def run(source: MemoryCapture, history: SchemaHistory, sink: Sink) -> LogLoop:
    runtime = LogLoop(
        lambda after: RecordedStream(source.live(after), history), sink, target=source.end, retry_seconds_max=5
    )
    runtime.run(lambda: runtime.caught_up)
    return runtime


def versions(history: SchemaHistory) -> list[TableSchema]:
    return [version.schema for version in history.versions(SHOP.table)]


@pytest.mark.parametrize("part_rows", [None, 2])
def test_the_loop_delivers_no_row_before_its_schema_is_durable(tmp_path: Path, part_rows: int | None) -> None:
    source = MemoryCapture(window_transactions_max=3, part_rows_max=part_rows)
    for schema in (SHOP, SHOP, WIDER, SHOP):
        source.commit(one(schema, 1), one(schema, 2))
    source.commit(one(SHOP, 3), one(WIDER, 4), one(WIDER, 5))
    with FileSchemaHistory(tmp_path) as history:
        sink = Sink(history)
        run(source, history, sink)
        assert sink.rows == 11
        assert versions(history) == [SHOP, WIDER, SHOP, WIDER]
    with FileSchemaHistory(tmp_path) as history:
        assert versions(history) == [SHOP, WIDER, SHOP, WIDER]


def test_a_version_has_the_time_and_position_of_its_first_row() -> None:
    source, history = MemoryCapture(window_transactions_max=9), MemorySchemaHistory()
    source.commit(one(SHOP, 1))
    end = source.commit(one(SHOP, 2), one(WIDER, 3))
    run(source, history, Sink(history))
    made = history.latest(SHOP.table)
    assert made is not None
    assert made.position == end
    assert made.time is not None
    assert history.at_time(SHOP.table, made.time) == made


def test_a_broken_source_repeats_rows_and_records_no_version_twice() -> None:
    source, history = MemoryCapture(), MemorySchemaHistory()
    for n, schema in enumerate((SHOP, WIDER, SHOP, WIDER)):
        source.commit(one(schema, n))
    source.break_next_read(SourceUnreachable("gone"))
    sink = Sink(history)
    run(source, history, sink)
    assert versions(history) == [SHOP, WIDER, SHOP, WIDER]


STORY = (
    window(0, 10, batch(SHOP, insert(1))),
    window(10, 20, batch(SHOP, insert(2)), batch(WIDER, insert(3), first=1)),
    window(20, 30, batch(SHOP, insert(4))),
    window(30, 40, batch(WIDER, insert(5))),
)


def at_their_ends(found: Window) -> Window:
    """Return the batch with the positions that a source gives: where each transaction ends."""
    batches = []
    for item in found.batches:
        place = item.data.schema.get_field_index("_position")
        reported = pa.array([str(found.end)] * len(item), pa.string())
        batches.append(replace(item, data=item.data.set_column(place, item.data.schema.field(place), reported)))
    return replace(found, batches=tuple(batches))


@pytest.mark.parametrize("stopped", range(1, len(STORY) + 1))
@pytest.mark.parametrize("resumed", range(len(STORY)))
def test_rows_repeated_from_any_position_find_their_versions(stopped: int, resumed: int) -> None:
    """Recorded up to one position and repeated from an earlier one, the history is unchanged."""
    story, history = [at_their_ends(found) for found in STORY], MemorySchemaHistory()
    first = SchemaRecorder(history)
    for found in story[:stopped]:
        first.record_window(found)
    again = SchemaRecorder(history)
    for found in story[min(resumed, stopped) :]:
        again.record_window(found)
    assert versions(history) == [SHOP, WIDER, SHOP, WIDER]


def test_a_schema_that_returns_after_a_restart_is_a_new_version() -> None:
    history = MemorySchemaHistory()
    story = [at_their_ends(found) for found in STORY]
    for found in story[:2]:
        SchemaRecorder(history).record_window(found)
    SchemaRecorder(history).record_window(story[2])
    assert versions(history) == [SHOP, WIDER, SHOP]


def test_a_part_of_a_transaction_is_recorded_although_its_position_is_unknown() -> None:
    history = MemorySchemaHistory()
    SchemaRecorder(history).record_window(open_window(10, batch(SHOP, insert(1))))
    made = history.latest(SHOP.table)
    assert made is not None
    assert (made.position, made.version) == (None, 1)


def test_a_version_of_unknown_position_makes_the_one_before_it_repeat_rather_than_vanish() -> None:
    history = MemorySchemaHistory()
    feed = SchemaRecorder(history)
    feed.record_window(at_their_ends(window(0, 10, batch(SHOP, insert(1)))))
    feed.record_window(open_window(10, batch(WIDER, insert(2))))
    SchemaRecorder(history).record_window(at_their_ends(window(10, 20, batch(SHOP, insert(3)))))
    assert versions(history) == [SHOP, WIDER, SHOP]


def test_system_streams_are_not_recorded() -> None:
    history = MemorySchemaHistory()
    message = batch_of(MESSAGE_STREAM, (Operation.MESSAGE, {"prefix": "a", "content": b"b", "transactional": True}))
    SchemaRecorder(history).record_window(Window(start=Lsn(0), end=Lsn(1), batches=(message,), transactions=1, rows=1))
    assert history.tables() == ()


class Failing(MemorySchemaHistory):
    """A history that has no room, so many times."""

    def __init__(self, error: Callable[[], TailraceError], times: int) -> None:
        super().__init__()
        self._error, self.times = error, times

    def _add(self, version: object) -> None:
        if self.times:
            self.times -= 1
            raise self._error()


def test_a_row_waits_while_its_schema_cannot_be_stored_and_is_not_lost() -> None:
    source, history = MemoryCapture(), Failing(lambda: StateFull("no room"), times=1)
    source.commit(one(SHOP, 1))
    sink = Sink(history)
    runtime = run(source, history, sink)
    assert (sink.rows, runtime.progress.reconnects, history.times) == (1, 1, 0)
    assert source.confirmed == source.end


def test_a_window_the_history_failed_on_is_returned_again_also_by_a_stream_that_returns_it_once() -> None:
    class Once:
        """A stream like a server that sends parts of a transaction: it never returns a window twice."""

        def __init__(self) -> None:
            self._left = [open_window(0, one(SHOP, 1)), window(0, 9, one(SHOP, 2))]

        def read(self, after: Lsn, wait_seconds: float) -> Window | None:
            return self._left.pop(0) if self._left else None

        def confirm(self, position: Lsn) -> None: ...

        def close(self) -> None: ...

    class Failing(MemorySchemaHistory):
        failures = 1

        def record(self, *given: Any, **more: Any) -> SchemaVersion:
            if self.failures:
                self.failures -= 1
                raise StateFull("no room", hint="Make some.")
            return super().record(*given, **more)

    stream = RecordedStream(Once(), Failing())
    with pytest.raises(StateFull):
        stream.read(ZERO, 0.0)
    found = [stream.read(ZERO, 0.0), stream.read(ZERO, 0.0), stream.read(ZERO, 0.0)]
    assert [given and given.end for given in found] == [ZERO, Lsn(9), None]
