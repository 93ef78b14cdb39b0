"""The loop with rules: nothing passes a halted window, and filtered windows are passed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.capture.memory.source import MemoryCapture, batch_of
from tailrace.capture.port import Stream
from tailrace.changelog.read.reader import ChangeLog
from tailrace.changelog.write.writer import LogWriter
from tailrace.errors import SourceUnreachable, TransformFailed
from tailrace.model import change
from tailrace.model.change import Operation
from tailrace.model.position import ZERO, Lsn
from tailrace.runtime import loop
from tailrace.runtime.loop import CdcRuntime
from tailrace.runtime.position_store import LogSink
from tailrace.storage.files import LogPath
from tailrace.transforms.rules import Cast, Encrypt, Filter, Function, Rule
from tailrace.transforms.transform_plan import TransformPlan
from tailrace.transforms.transformed_stream import TransformedStream
from tests.support.logs import quick_folder
from tests.support.transforms import PEOPLE, person, plan_of

SECONDS_MAX = 240.0
NUMBERS = Cast(name="numbers", columns=("mail",), to="int32")
GERMANS = Filter(where="country == 'DE'")


def commit(source: MemoryCapture, *people: tuple[int, str | None]) -> Lsn:
    rows = [(Operation.INSERT, person(number, mail, None, mail)) for number, mail in people]
    return source.commit(batch_of(PEOPLE, *rows))


def until(reached: Callable[[], bool]) -> Callable[[], bool]:
    deadline = time.monotonic() + SECONDS_MAX

    def stopping() -> bool:
        assert time.monotonic() < deadline, "it never came"
        return reached()

    return stopping


@dataclass(frozen=True)
class Ruled:
    """A source seen through rules."""

    source: MemoryCapture
    plan: TransformPlan

    def live(self, after: Lsn) -> Stream:
        return TransformedStream(self.source.live(after), self.plan)


def capture(source: MemoryCapture, log: LogWriter, plan: TransformPlan, *, target: Lsn) -> None:
    sink = LogSink(log)
    runtime = CdcRuntime(Ruled(source, plan), sink, target=target)
    runtime.run(sink, until(lambda: log.position >= target))


def keys(path: LogPath) -> list[int]:
    log = ChangeLog.open(path)
    batches = log.read(1, log.newest())
    return [key for batch in batches for key in batch.data.column("id").to_pylist()]


@pytest.fixture
def source() -> MemoryCapture:
    return MemoryCapture(window_transactions_max=2)


def test_lesson_1_nothing_passes_a_window_that_a_rule_halted_at(source: MemoryCapture, tmp_path: Path) -> None:
    log = LogWriter(tmp_path / "log", source.identity)
    good = commit(source, (1, "1"))
    capture(source, log, plan_of(NUMBERS), target=good)
    commit(source, (2, "not a number"))
    end = commit(source, (3, "3"))
    for _ in range(2):  # as often as it is tried
        with pytest.raises(TransformFailed) as raised:
            capture(source, log, plan_of(NUMBERS), target=end)
        assert raised.value.fields["rule"] == "numbers"
        assert (log.position, source.confirmed, keys(log.path)) == (good, good, [1])
    capture(source, log, plan_of(NUMBERS.model_copy(update={"on_error": "dead-letter"})), target=end)
    assert (keys(log.path), source.confirmed) == ([1, 2, 3], end)
    log.close()


def test_lesson_1_a_stream_that_a_rule_halted_is_finished() -> None:
    source = MemoryCapture(part_rows_max=1)
    commit(source, (1, "x"), (2, "2"), (3, "3"))  # read on, it would begin in the middle
    stream = TransformedStream(source.live(ZERO), plan_of(NUMBERS))
    for _ in range(3):
        with pytest.raises(TransformFailed):
            stream.read(ZERO, 0.0)


def test_windows_without_rows_left_are_passed_and_confirmed(
    source: MemoryCapture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "IDLE_SECONDS_MAX", 0.05)
    log = LogWriter(tmp_path / "log", source.identity)
    for number in range(10):
        commit(source, (number, "FR"))
    end = commit(source, (99, "DE"))
    capture(source, log, plan_of(GERMANS), target=end)
    assert keys(log.path) == [99]
    end = commit(source, (100, "FR"))
    capture(source, log, plan_of(GERMANS), target=end)
    assert (keys(log.path), source.confirmed) == ([99], end)
    log.close()


def test_nothing_passes_a_window_that_was_interrupted(source: MemoryCapture) -> None:
    def impatient(rows: pa.RecordBatch) -> pa.RecordBatch:
        if rows.num_rows:
            raise KeyboardInterrupt
        return rows

    commit(source, (1, "DE"))
    stream = TransformedStream(source.live(ZERO), plan_of(Function(columns=("mail",), function=impatient)))
    with pytest.raises(KeyboardInterrupt):
        stream.read(ZERO, 0.0)
    with pytest.raises(SourceUnreachable):
        stream.read(ZERO, 0.0)


transactions = st.lists(st.lists(st.sampled_from(["DE", "FR"]), min_size=1, max_size=9), min_size=1, max_size=6)


@settings(max_examples=300 if os.environ.get("TAILRACE_THOROUGH") else 25, deadline=None)
@given(transactions, st.integers(1, 4), st.integers(1, 3))
def test_transactions_in_parts_stay_whole_whatever_a_filter_keeps(
    given: list[list[str]], part: int, together: int
) -> None:
    source = MemoryCapture(window_transactions_max=together, part_rows_max=part)
    wanted, number, end = [], 0, ZERO
    for countries in given:
        people = []
        for country in countries:
            number += 1
            people.append((number, country))
        wanted += [number for number, country in people if country == "DE"]
        end = commit(source, *people)
    with quick_folder(Path(".")) as folder:
        log = LogWriter(folder / "log", source.identity)
        capture(source, log, plan_of(GERMANS), target=end)
        found = ChangeLog.open(log.path)
        batches = list(found.read(1, found.newest()))
        seqs = [seq for batch in batches for seq in batch.data.column(change.SEQ).to_pylist()]
        assert [key for batch in batches for key in batch.data.column("id").to_pylist()] == wanted
        assert (seqs, log.position, source.confirmed) == (list(range(1, len(wanted) + 1)), end, end)
        log.close()


def test_no_byte_of_the_log_is_plaintext(source: MemoryCapture, tmp_path: Path) -> None:
    log = LogWriter(tmp_path / "log", source.identity)
    rule: Rule = Encrypt(columns=("mail", "country"), key="new")
    end = commit(source, *((number, "plain-as-day") for number in range(100)))
    capture(source, log, plan_of(rule), target=end)
    log.close()
    files = [path for path in (tmp_path / "log").rglob("*") if path.is_file()]
    assert any(path.suffix == ".arrow" for path in files)
    assert not [path for path in files if b"plain-as-day" in path.read_bytes()]
