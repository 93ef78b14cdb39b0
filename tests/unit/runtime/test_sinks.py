"""Sinks: flushed rows are durable, rejected rows are reported, failed batches are repeated."""

from __future__ import annotations

import errno
import io
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest

from tailrace.capture.memory.source import MemoryCapture
from tailrace.errors import ConfigError, SinkError, SinkUnready
from tailrace.model.event_json import to_debezium_line
from tailrace.model.position import ZERO
from tailrace.model.schema import Identity
from tailrace.runtime.loop import CdcRuntime
from tailrace.runtime.output_batch import Batch, number_from
from tailrace.runtime.sinks import FanOut, JsonlSink, MemorySink, Sink, StreamSink, TableRouter
from tailrace.state.checkpoint_stores import MemoryCheckpointStore
from tailrace.testing.changes import changes, delete, table
from tests.support.changes import SHOP
from tests.support.runtimes import inserts, until
from tests.support.windows import named

OTHER = named("public", "others", 20)


def batch() -> Batch:
    """Return one transaction as a runtime hands it out."""
    source = MemoryCapture()
    source.commit(inserts(1, 2), inserts(3, schema=OTHER))
    runtime = CdcRuntime(source, MemoryCheckpointStore())
    runtime.start()
    found = runtime.poll()
    runtime.force_stop()
    return found


def lines(folder: Path) -> list[int]:
    files = sorted(folder.glob("*.jsonl"))
    return [json.loads(line)["seq"] for file in files for line in file.read_text().splitlines()]


def test_a_stream_gets_a_line_for_each_change() -> None:
    stream = io.StringIO()
    sink = StreamSink(stream)
    sink.write(batch())
    sink.flush(True)
    found = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [(item["table"], item["after"]["id"]) for item in found] == [
        ("public.things", 1),
        ("public.things", 2),
        ("public.others", 3),
    ]
    other = io.StringIO()
    debezium = StreamSink(other, encode=to_debezium_line)
    debezium.write(batch())
    debezium.flush(True)
    assert json.loads(other.getvalue().splitlines()[0])["op"] == "c"


def test_a_deleted_row_is_in_the_file_with_all_that_the_source_sent(tmp_path: Path) -> None:
    keyed, keyless = table("public.k", id=pa.int64(), v=pa.string()), table("public.nk", key=(), a=pa.int64())
    source = MemoryCapture()
    source.commit(changes(replace(keyed, identity=Identity.FULL), delete({"id": 1, "v": "x"})))
    end = source.commit(changes(keyless, delete({"a": 5})))
    sinks = JsonlSink(tmp_path / "ours"), JsonlSink(tmp_path / "theirs", encode=to_debezium_line)
    CdcRuntime(source, MemoryCheckpointStore()).run(FanOut(*sinks), until(lambda: source.confirmed == end))
    for sink, folder in zip(sinks, ("ours", "theirs"), strict=True):
        sink.close()
        found = (tmp_path / folder / "00000001.jsonl").read_text().splitlines()
        assert [json.loads(line)["before"] for line in found] == [{"id": 1, "v": "x"}, {"a": 5}]


def test_a_closed_pipe_is_an_error_without_retry() -> None:
    class Gone(io.StringIO):
        def flush(self) -> None:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    with pytest.raises(SinkError) as reported:
        StreamSink(Gone()).flush(True)
    assert not isinstance(reported.value, SinkUnready)


def test_files_are_rolled_and_stay_empty_before_the_flush(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path, bytes_max=1)
    sink.write(batch())
    assert lines(tmp_path) == []
    for _ in range(3):
        sink.flush(False)
        sink.write(batch())
    assert len(list(tmp_path.glob("*.jsonl"))) == 3
    sink.close()
    again = JsonlSink(tmp_path, bytes_max=1)
    again.write(batch())
    again.flush(True)
    assert lines(tmp_path) == [0, 1, 2] * 4
    again.close()


def test_a_line_that_was_torn_by_a_crash_is_cut_off(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path, fsync="never")
    sink.write(batch())
    sink.flush(True)
    sink.close()
    file = tmp_path / "00000001.jsonl"
    file.write_bytes(file.read_bytes() + b'{"seq": 3, "half')
    JsonlSink(tmp_path).close()
    assert lines(tmp_path) == [0, 1, 2]


def test_a_closed_sink_touches_no_other_file(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "out")
    sink.write(batch())
    sink.close()
    precious = b"of another"
    others = [os.open(tmp_path / f"{n}", os.O_RDWR | os.O_CREAT) for n in range(3)]  # one has its old number
    for handle in others:
        os.write(handle, precious)
    for attempt in (lambda: sink.flush(True), lambda: sink.write(batch())):
        with pytest.raises(SinkError, match="sink is closed") as reported:
            attempt()
        assert not isinstance(reported.value, SinkUnready), "waiting opens it no more"
    sink.close()
    for handle in others:
        assert os.pread(handle, 100, 0) == precious
        os.close(handle)
    assert lines(tmp_path / "out") == [], "what was not flushed was delivered to nobody"


def test_a_with_block_closes_its_sink(tmp_path: Path) -> None:
    with JsonlSink(tmp_path) as sink:
        sink.write(batch())
        sink.flush(True)
    with pytest.raises(SinkError, match="closed"):
        sink.flush(True)
    assert lines(tmp_path) == [0, 1, 2]


def test_a_failing_last_sync_is_raised_and_the_file_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = JsonlSink(tmp_path, fsync="interval", fsync_seconds=3600.0)
    sink.write(batch())
    sink.flush(False)

    def fsync(handle: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(SinkError, match="cannot be written"):
        sink.close()
    sink.close()


def test_a_closed_stream_is_an_error_without_retry() -> None:
    stream = io.StringIO()
    stream.close()
    with pytest.raises(SinkError, match="the stream is closed") as reported:
        StreamSink(stream).flush(True)
    assert not isinstance(reported.value, SinkUnready)


def test_a_flush_that_fails_leaves_nothing_behind_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = JsonlSink(tmp_path)
    source = MemoryCapture()
    end = source.commit(inserts(1, 2, 3))
    whole, full = os.fsync, [OSError(errno.ENOSPC, "No space left")]

    def fsync(handle: int) -> None:
        if full:
            assert source.confirmed == ZERO
            raise full.pop()
        whole(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    CdcRuntime(source, MemoryCheckpointStore()).run(sink, until(lambda: source.confirmed == end))
    sink.close()
    assert lines(tmp_path) == [0, 1, 2]


def test_a_new_file_that_cannot_be_opened_leaves_the_old_one_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No file is closed twice either: its number may belong to another file by then."""
    sink = JsonlSink(tmp_path, bytes_max=1)
    sink.write(batch())
    sink.flush(True)
    closed: list[int] = []
    whole_open, whole_close = os.open, os.close

    def refused(path: object, *given: object, **named: object) -> int:
        if str(path).endswith("2.jsonl"):
            raise OSError(errno.EMFILE, "Too many open files")
        return whole_open(path, *given, **named)  # type: ignore[arg-type] # as it was given

    def noted(handle: int) -> None:
        closed.append(handle)
        whole_close(handle)

    monkeypatch.setattr(os, "open", refused)
    monkeypatch.setattr(os, "close", noted)
    for _ in range(2):
        sink.write(batch())
        with pytest.raises(SinkUnready):
            sink.flush(True)
    assert closed == []
    monkeypatch.undo()
    sink.write(batch())
    sink.flush(True)
    sink.close()
    assert lines(tmp_path) == [0, 1, 2] * 2
    assert len(list(tmp_path.glob("*.jsonl"))) == 2


def test_a_torn_line_that_could_not_be_cut_off_is_cut_off_before_the_next_flush(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = JsonlSink(tmp_path)

    def broken(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", broken)
    monkeypatch.setattr(os, "ftruncate", broken)
    sink.write(batch())
    with pytest.raises(SinkUnready):
        sink.flush(True)
    monkeypatch.undo()
    sink.write(batch())
    sink.flush(True)
    sink.close()
    assert lines(tmp_path) == [0, 1, 2]


def test_files_are_synced_by_time_by_size_when_idle_and_when_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)

    def flushed(sink: JsonlSink, *, caught_up: bool) -> int:
        synced.clear()
        sink.write(batch())
        sink.flush(caught_up)
        return len(synced)

    rarely = JsonlSink(tmp_path / "rarely", fsync="interval", fsync_seconds=3600.0, fsync_bytes=1 << 30)
    assert flushed(rarely, caught_up=False) == 0
    assert flushed(rarely, caught_up=True) == 1, "nothing more is waiting"
    assert flushed(rarely, caught_up=False) == 0
    synced.clear()
    rarely.close()
    assert len(synced) == 1
    by_size = JsonlSink(tmp_path / "size", fsync="interval", fsync_seconds=3600.0, fsync_bytes=1)
    by_time = JsonlSink(tmp_path / "time", fsync="interval", fsync_seconds=0.0, fsync_bytes=1 << 30)
    assert flushed(by_size, caught_up=False) == flushed(by_time, caught_up=False) == 1
    never = JsonlSink(tmp_path / "never", fsync="never")
    assert flushed(never, caught_up=True) == 0
    for sink in (by_size, by_time, never):
        sink.close()
    with pytest.raises(ConfigError):
        JsonlSink(tmp_path, fsync="sometimes")  # type: ignore[arg-type] # what a user may write


def test_a_batch_that_one_of_two_sinks_failed_on_is_written_once_by_the_other(tmp_path: Path) -> None:
    class Full(MemorySink):
        left = 1

        def write(self, batch: Batch) -> tuple[()]:
            if self.left:
                self.left -= 1
                raise SinkUnready("not now", hint="Wait.")
            return super().write(batch)

    source = MemoryCapture()
    end = source.commit(inserts(1, 2, 3))
    sink, full = JsonlSink(tmp_path), Full()
    runtime = CdcRuntime(source, MemoryCheckpointStore())
    runtime.run(FanOut(sink, full), until(lambda: source.confirmed == end))
    sink.close()
    assert lines(tmp_path) == [0, 1, 2]
    assert full.rows == 3


def test_injected_rows_replace_no_batch_and_are_written_once(tmp_path: Path) -> None:
    """They are outside the source's order: their numbers are below zero, or meaningless."""
    sink, memory, given = JsonlSink(tmp_path), MemorySink(), batch()
    below = replace(given, ack=None, window=number_from(given.window, -9))
    for one in (given, below, replace(given, ack=None), replace(given, ack=None), below):
        sink.write(one)
        memory.write(one)
    sink.flush(True)
    memory.flush(True)
    sink.close()
    assert lines(tmp_path) == [event.seq for event in memory.events()] == [0, 1, 2, 0, 1, 2, 0, 1, 2, -9, -8, -7]


def test_fan_out_is_delivered_when_all_have_it() -> None:
    class Failing(MemorySink):
        def flush(self, caught_up: bool) -> None:
            raise SinkUnready("not now", hint="Wait.")

    one, two = MemorySink(), MemorySink()
    both = FanOut(one, two)
    both.write(batch())
    both.flush(True)
    assert (one.rows, two.rows) == (3, 3)
    with pytest.raises(SinkUnready):
        FanOut(one, Failing()).flush(True)


def test_each_table_goes_to_its_own_sink_and_others_are_rejected() -> None:
    things, rest = MemorySink(), MemorySink()
    router = TableRouter({SHOP.table: things}, otherwise=rest)
    assert list(router.write(batch())) == []
    router.flush(True)
    assert (things.rows, rest.rows) == (2, 1)
    (rejected,) = TableRouter({SHOP.table: things}).write(batch())
    assert (rejected.table, rejected.seq) == (OTHER.table, 2)


class Answering:
    """A custom sink that returns this for every batch."""

    def __init__(self, answer: object) -> None:
        self.answer, self.flushes = answer, 0

    def write(self, batch: Batch) -> Any:
        return self.answer

    def flush(self, caught_up: bool) -> None:
        self.flushes += 1


WAYS: dict[str, Callable[[Sink], Sink]] = {
    "alone": lambda sink: sink,
    "one of several": lambda sink: FanOut(MemorySink(), sink),
    "behind a router": lambda sink: TableRouter({}, otherwise=sink),
}


def run_into(sink: Sink) -> MemoryCheckpointStore:
    source, store = MemoryCapture(), MemoryCheckpointStore()
    source.commit(inserts(1))
    runtime = CdcRuntime(source, store)
    runtime.start()
    runtime.run(sink, lambda: runtime.progress.rows == 1)
    return store


@pytest.mark.parametrize("way", WAYS)
def test_a_sink_that_returns_none_took_every_row(way: str) -> None:
    sink = Answering(None)
    run_into(WAYS[way](sink))
    assert sink.flushes


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("answer", [True, ["no"], "no", {"seq": 1}])
def test_a_wrong_answer_of_write_is_refused_with_what_to_return(way: str, answer: object) -> None:
    sink = Answering(answer)
    with pytest.raises(SinkError, match="instead of rejected rows") as raised:
        run_into(WAYS[way](sink))
    assert "Rejected(table=" in str(raised.value.hint)
    assert not sink.flushes


@pytest.mark.parametrize("make", [
    lambda: StreamSink(cast("Any", 3)), lambda: StreamSink(cast("Any", io.BytesIO())),
    lambda: StreamSink(encode=cast("Any", 3)), lambda: JsonlSink(""), lambda: JsonlSink(cast("Any", None)),
    lambda: TableRouter(cast("Any", [SHOP.table])),
])  # fmt: skip
def test_invalid_arguments_of_a_sink_are_refused_before_any_row(make: Callable[[], object]) -> None:
    with pytest.raises(ConfigError) as raised:
        make()
    assert raised.value.hint


def test_a_folder_has_one_sink_at_a_time(tmp_path: Path) -> None:
    first = JsonlSink(tmp_path)
    with pytest.raises(SinkError, match="folder is in use by another sink") as raised:
        JsonlSink(tmp_path)
    assert "Close that sink first" in raised.value.hint
    first.close()
    JsonlSink(tmp_path).close()
    forgotten = JsonlSink(tmp_path)
    del forgotten
    FanOut(TableRouter({SHOP.table: JsonlSink(tmp_path)}), MemorySink()).close()
    JsonlSink(tmp_path).close()


def test_closing_several_sinks_closes_each(tmp_path: Path) -> None:
    class Failing(MemorySink):
        def close(self) -> None:
            raise SinkError("it cannot be closed", hint="Leave it.")

    with pytest.raises(SinkError, match="it cannot be closed"):
        FanOut(JsonlSink(tmp_path), Failing(), JsonlSink(tmp_path / "other")).close()
    JsonlSink(tmp_path).close()
    JsonlSink(tmp_path / "other").close()


def test_a_sink_continues_only_its_own_files(tmp_path: Path) -> None:
    for name in ("\u00b2", "7", "00000000", " 5", "-0000001", "000000011"):
        (tmp_path / f"{name}.jsonl").write_text("somebody's")
    (tmp_path / "00000002.jsonl").write_text("a line\ntorn")
    JsonlSink(tmp_path).close()
    assert (tmp_path / "00000002.jsonl").read_text() == "a line\n"
    assert {path.read_text() for path in tmp_path.glob("*.jsonl")} == {"a line\n", "somebody's"}
