"""The memory source's own promises; those of every source are in the contract suite."""

from __future__ import annotations

import threading
import time

import pyarrow as pa
import pytest

from tailrace.capture.memory.source import MemoryCapture, batch_of
from tailrace.capture.port import Stream
from tailrace.errors import ConfigError, PositionLost, SourceUnreachable, Unsupported
from tailrace.model import change
from tailrace.model.batch import ChangeBatch, Window
from tailrace.model.change import Operation
from tailrace.model.position import ZERO, Lsn
from tests.support.changes import SHOP, Change, insert, move, table_schema
from tests.support.windows import batch, ids, named


@pytest.fixture
def source() -> MemoryCapture:
    return MemoryCapture()


def inserts(*keys: int) -> ChangeBatch:
    return batch_of(SHOP, *[(Operation.INSERT, {"id": key}) for key in keys])


def read(stream: Stream, after: Lsn = ZERO) -> Window:
    window = stream.read(after, 0.0)
    assert window is not None
    return window


def test_a_request_for_a_snapshot_is_an_error(source: MemoryCapture) -> None:
    with pytest.raises(Unsupported, match="snapshot"):
        source.snapshot()
    assert source.capabilities.live
    assert source.capabilities.lag


def test_positions_increase(source: MemoryCapture) -> None:
    positions = [source.commit(inserts(1)), source.quiet(10), source.commit(inserts(2))]
    assert positions == sorted(set(positions))
    assert source.end == positions[-1]


def test_a_transaction_is_numbered_over_all_its_batches(source: MemoryCapture) -> None:
    end = source.commit(inserts(1, 2), batch(named("public", "other", 2), insert(3), first=77))
    window = read(source.live(ZERO))
    rows = [row for found in window.batches for row in found.data.to_pylist()]
    assert [row[change.SEQ] for row in rows] == [row[change.TX_INDEX] for row in rows] == [0, 1, 2]
    assert {row[change.POSITION] for row in rows} == {str(end)}
    assert (window.rows, window.transactions, window.start, window.end) == (3, 1, ZERO, end)
    assert rows[0][change.COMMITTED_AT].timestamp() * 1e6 == pytest.approx(window.last_committed_at)


def test_several_transactions_may_share_a_window() -> None:
    source = MemoryCapture(window_transactions_max=2)
    ends = [source.commit(inserts(n, n + 10)) for n in range(3)]
    window = read(source.live(ZERO))
    assert ids(window.batches) == [(0, 0), (1, 10), (2, 1), (3, 11)]
    assert (window.transactions, window.end) == (2, ends[1])
    assert [row["_tx"] for found in window.batches for row in found.data.to_pylist()] == [1, 1, 2, 2]


def test_confirmed_changes_are_removed(source: MemoryCapture) -> None:
    first, second = source.commit(inserts(1)), source.commit(inserts(2))
    stream = source.live(ZERO)
    stream.confirm(first)
    assert source.confirmed == first
    with pytest.raises(PositionLost):
        source.live(ZERO)
    with pytest.raises(PositionLost):
        stream.read(ZERO, 0.0)
    assert read(source.live(first), first).end == second


def test_confirming_less_than_before_takes_nothing_back(source: MemoryCapture) -> None:
    first, second = source.commit(inserts(1)), source.commit(inserts(2))
    stream = source.live(ZERO)
    stream.confirm(second)
    stream.confirm(first)
    assert source.confirmed == second


def test_confirming_part_of_a_transaction_keeps_the_whole(source: MemoryCapture) -> None:
    end = source.commit(inserts(1, 2))
    middle = Lsn(end.value - 1)
    source.live(ZERO).confirm(middle)
    assert ids(read(source.live(middle), middle).batches) == [(0, 1), (1, 2)]


def test_a_position_beyond_the_end_belongs_to_another_source(source: MemoryCapture) -> None:
    with pytest.raises(PositionLost):
        source.live(Lsn(1))
    with pytest.raises(ConfigError):
        source.live(ZERO).confirm(Lsn(1))


def test_a_transaction_needs_changes(source: MemoryCapture) -> None:
    for nothing in ((), (inserts(),)):
        with pytest.raises(ConfigError, match="needs changes"):
            source.commit(*nothing)


def test_a_broken_read_breaks_that_stream_and_no_other(source: MemoryCapture) -> None:
    source.commit(inserts(1))
    source.break_next_read(SourceUnreachable("cut"))
    stream = source.live(ZERO)
    for _ in range(2):
        with pytest.raises(SourceUnreachable, match="cut"):
            stream.read(ZERO, 0.0)
    assert ids(read(source.live(ZERO)).batches) == [(0, 1)]


def test_a_read_that_waits_is_woken_by_a_commit_and_by_a_fault(source: MemoryCapture) -> None:
    stream = source.live(ZERO)
    threading.Timer(0.1, source.commit, [inserts(1)]).start()
    began = time.monotonic()
    window = stream.read(ZERO, 240.0)
    assert window is not None
    threading.Timer(0.1, source.break_next_read, [SourceUnreachable("cut")]).start()
    with pytest.raises(SourceUnreachable):
        stream.read(window.end, 240.0)
    assert time.monotonic() - began < 240


def test_a_closed_stream_answers_nothing(source: MemoryCapture) -> None:
    end = source.commit(inserts(1))
    stream = source.live(ZERO)
    stream.close()
    with pytest.raises(ValueError, match="closed"):
        stream.read(ZERO, 0.0)
    with pytest.raises(ValueError, match="closed"):
        stream.confirm(end)
    assert source.confirmed == ZERO


def test_lag_is_the_size_of_the_kept_log(source: MemoryCapture) -> None:
    first = source.commit(inserts(1))
    end = source.quiet(1000)
    source.live(ZERO).confirm(first)
    lag = source.lag()
    assert (lag.end, lag.confirmed, lag.retained_bytes) == (end, first, 1000)


def test_values_named_like_metadata_columns_are_kept() -> None:
    odd = table_schema({"_op": pa.string(), "_seq": pa.int64()}, key=("_seq",))
    source = MemoryCapture()
    source.commit(batch_of(odd, (Operation.UPDATE, {"_op": "mine", "_seq": 5}), (Operation.TRUNCATE, {})))
    (found,) = read(source.live(ZERO)).batches
    events = list(found.events())
    assert [event.operation for event in events] == [Operation.UPDATE, Operation.TRUNCATE]
    assert events[0].values == {"_op": "mine", "_seq": 5}
    assert found.truncates == 1


# --- a transaction in parts --------------------------------------------------------------------------------


def test_a_large_transaction_arrives_in_parts_of_the_requested_size() -> None:
    source = MemoryCapture(part_rows_max=4)
    end = source.commit(inserts(*range(5)), batch(named("public", "other", 2), *map(insert, range(5, 11))))
    stream = source.live(ZERO)
    windows = [read(stream) for _ in range(3)]
    assert [ids(window.batches) for window in windows] == [
        [(0, 0), (1, 1), (2, 2), (3, 3)],
        [(0, 4), (1, 5), (2, 6), (3, 7)],
        [(0, 8), (1, 9), (2, 10)],
    ]
    assert [(window.open, window.continues) for window in windows] == [(True, False), (True, True), (False, True)]
    assert [window.end for window in windows] == [ZERO, ZERO, end]
    assert windows[-1].continued_end == end
    rows = [row for window in windows for found in window.batches for row in found.data.to_pylist()]
    assert [row[change.TX_INDEX] for row in rows] == list(range(11))
    assert [change.POSITION in row for row in rows] == [False] * 8 + [True] * 3


def test_a_transaction_of_exactly_one_part_is_not_split() -> None:
    source = MemoryCapture(part_rows_max=4)
    source.commit(inserts(*range(4)))
    assert not read(source.live(ZERO)).open


def test_small_transactions_share_a_window_with_the_end_of_a_large_one_and_not_with_its_beginning() -> None:
    source = MemoryCapture(window_transactions_max=3, part_rows_max=2)
    for keys in ((1,), (2,), (10, 11, 12), (3,), (20, 21, 22), (4,)):
        end = source.commit(inserts(*keys))
    stream, after, found = source.live(ZERO), ZERO, []
    while after < end:
        window = read(stream, after)
        found.append(([key for _, key in ids(window.batches)], window.open, window.transactions))
        after = window.end
    assert found == [
        ([1, 2], False, 2),
        ([10, 11], True, 0),
        ([12, 3], False, 2),
        ([20, 21], True, 0),
        ([22, 4], False, 2),
    ]


def test_a_part_counts_only_its_own_moves_and_truncates() -> None:
    source = MemoryCapture(part_rows_max=2)
    source.commit(batch(SHOP, insert(1, unfit=("n",)), Change(op="truncate"), *move(2, 3), insert(4)))
    stream = source.live(ZERO)
    counts = [[(found.moves, found.truncates, found.unfit) for found in read(stream).batches] for _ in range(3)]
    assert counts == [[(0, 1, 1)], [(1, 0, 0)], [(0, 0, 0)]]
