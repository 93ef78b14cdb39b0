"""The promises of every source (capture/port.py). A new source adds a `Bench` and passes unchanged."""

from __future__ import annotations

import time

import psycopg
import pyarrow as pa
import pytest

from tailrace.capture.postgres import stream as postgres_stream
from tailrace.demo.server import EmbeddedPostgres
from tailrace.errors import PositionLost, SourceUnreachable, Unsupported
from tailrace.model import change
from tailrace.model.change import Operation
from tailrace.model.position import Lsn
from tests.contract.conftest import HELD_BACK_SECONDS
from tests.support.benches import COME_SECONDS_MAX, Bench, PostgresBench, Streams, keys, quiet_window, rows_of, take

# --- order -------------------------------------------------------------------------------------------------


def test_changes_arrive_in_order_of_commit(bench: Bench, streams: Streams) -> None:
    for n in range(0, 40, 2):
        bench.write(("items", n), ("others", n + 1))
    found = rows_of(*take(streams.open(bench.begin), bench.begin, 40))
    assert [row["id"] for row in found] == list(range(40))
    assert [row["table"] for row in found] == ["items", "others"] * 20


def test_windows_hold_whole_transactions(bench: Bench, streams: Streams) -> None:
    sizes = [1, 7, 2, 30, 1, 1, 12]
    n = 0
    for size in sizes:
        bench.write(*[("items" if k % 3 else "others", n + k) for k in range(size)])
        n += size
    windows = take(streams.open(bench.begin), bench.begin, n)
    of_window = [{row[change.TX] for row in rows_of(window)} for window in windows]
    assert sum(map(len, of_window)) == len(set().union(*of_window)) == len(sizes)
    assert [window.transactions for window in windows] == list(map(len, of_window))
    for window in windows:
        rows = rows_of(window)
        assert [row[change.SEQ] for row in rows] == list(range(window.rows))
        for row in rows:
            assert window.start < Lsn.parse(row[change.POSITION]) <= window.end
    indexes: dict[int, list[int]] = {}
    for row in rows_of(*windows):
        indexes.setdefault(row[change.TX], []).append(row[change.TX_INDEX])
    assert [len(found) for found in indexes.values()] == sizes
    assert all(found == list(range(len(found))) for found in indexes.values())


def test_windows_join_without_a_gap(bench: Bench, streams: Streams) -> None:
    stream, after, seen = streams.open(bench.begin), bench.begin, []
    for n in range(5):
        bench.write(("items", n))
        (window,) = take(stream, after, 1)
        assert window.start >= after
        seen += keys(window)
        after = window.end
    assert seen == [0, 1, 2, 3, 4]


def test_a_batch_follows_its_schema(bench: Bench, streams: Streams) -> None:
    bench.write(("items", 1))
    (window,) = take(streams.open(bench.begin), bench.begin, 1)
    (batch,) = window.batches
    fields = [field for field in batch.schema.change_schema() if field.name in batch.data.schema.names]
    assert batch.data.schema.equals(pa.schema(fields))
    batch.data.validate(full=True)
    assert (window.last_committed_at or 0) > 0
    assert [event.operation for event in batch.events()] == [Operation.INSERT]


# --- repetition --------------------------------------------------------------------------------------------


def test_nothing_at_or_before_the_position_is_delivered(bench: Bench, streams: Streams) -> None:
    stream = streams.open(bench.begin)
    bench.write(("items", 1), ("items", 2))
    (first,) = take(stream, bench.begin, 2)
    bench.write(("items", 3))
    streams.close(stream)
    (second,) = take(streams.open(first.end), first.end, 1)
    assert keys(second) == [3]


def test_reopened_without_a_confirmation_everything_is_delivered_again(bench: Bench, streams: Streams) -> None:
    for n in range(3):
        bench.write(("items", n), ("others", n + 10))
    first = streams.open(bench.begin)
    once = rows_of(*take(first, bench.begin, 6))
    streams.close(first)
    again = rows_of(*take(streams.open(bench.begin), bench.begin, 6))
    same = (change.POSITION, change.TX, change.TX_INDEX, change.COMMITTED_AT, "table", "id")
    assert [[row[name] for name in same] for row in once] == [[row[name] for name in same] for row in again]


def test_reopened_after_a_confirmation_only_the_rest_is_delivered(bench: Bench, streams: Streams) -> None:
    bench.write(("items", 1))
    stream = streams.open(bench.begin)
    (first,) = take(stream, bench.begin, 1, confirm=True)
    bench.write(("items", 2))
    streams.close(stream)
    assert keys(*take(streams.open(first.end), first.end, 1)) == [2]


def test_a_window_that_was_not_made_durable_is_delivered_again(bench: Bench, streams: Streams) -> None:
    """`after` is what the caller has; a window that it could not keep must not be skipped silently."""
    stream = streams.open(bench.begin)
    bench.write(("items", 1))
    (lost,) = take(stream, bench.begin, 1)
    bench.write(("items", 2))
    try:
        found = keys(*take(stream, lost.start, 1))
    except SourceUnreachable:  # "open me again" is an honest answer too
        streams.close(stream)
        found = keys(*take(streams.open(lost.start), lost.start, 1))
    assert found[0] == 1


# --- durability --------------------------------------------------------------------------------------------


def test_reading_and_closing_confirm_nothing(bench: Bench, streams: Streams) -> None:
    bench.write(("items", 1))
    before = bench.confirmed()
    stream = streams.open(bench.begin)
    take(stream, bench.begin, 1)
    time.sleep(0.3)
    assert bench.confirmed() == before
    streams.close(stream)
    assert bench.confirmed() == before


def test_a_confirmation_reaches_the_source(bench: Bench, streams: Streams) -> None:
    bench.write(("items", 1))
    stream = streams.open(bench.begin)
    (window,) = take(stream, bench.begin, 1, confirm=True)
    deadline = time.monotonic() + COME_SECONDS_MAX
    while bench.confirmed() < window.end:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert bench.confirmed() == window.end


def test_a_position_before_the_confirmed_one_is_reported_lost(bench: Bench, streams: Streams) -> None:
    bench.write(("items", 1))
    stream = streams.open(bench.begin)
    take(stream, bench.begin, 1, confirm=True)
    deadline = time.monotonic() + COME_SECONDS_MAX
    while bench.confirmed() == bench.begin:  # a server that still sends when it is left may not read the last word
        assert time.monotonic() < deadline
        time.sleep(0.05)
    streams.close(stream)
    with pytest.raises(PositionLost):
        streams.open(bench.begin)


def test_a_quiet_source_moves_its_position(bench: Bench, streams: Streams) -> None:
    stream = streams.open(bench.begin)
    bench.write_elsewhere()
    window = quiet_window(stream, bench.begin)
    assert window.is_empty
    assert (window.start, window.rows, window.transactions) == (bench.begin, 0, 0)
    assert window.end > bench.begin
    stream.confirm(window.end)
    bench.write(("items", 1))
    assert keys(*take(stream, window.end, 1)) == [1]


def test_without_changes_a_read_returns_none(bench: Bench, streams: Streams) -> None:
    """A position may move alone, but rows are only delivered for commits."""
    window = streams.open(bench.begin).read(bench.begin, 0.05)
    assert window is None or window.is_empty


def test_lag_shows_what_the_source_retains(bench: Bench, streams: Streams) -> None:
    bench.write(("items", 1))
    lag = bench.capture.lag()
    assert lag.confirmed is not None
    assert lag.end > lag.confirmed
    assert (lag.retained_bytes or 0) > 0


def test_a_missing_capability_is_refused(bench: Bench) -> None:
    if bench.capture.capabilities.snapshot:
        with bench.capture.snapshot() as snapshot:
            assert snapshot.position >= bench.begin
    else:
        with pytest.raises(Unsupported):
            bench.capture.snapshot()


# --- PostgreSQL's own ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
def test_keepalives_are_answered_while_the_caller_holds_back(
    server: EmbeddedPostgres, postgres: PostgresBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One reader with room left in its buffer, and one that has stopped reading its socket."""
    other = PostgresBench(server, monkeypatch)
    roomy = postgres.capture.live(postgres.begin)
    monkeypatch.setattr(postgres_stream, "BUFFER_BYTES_MAX", 1)
    full = other.capture.live(other.begin)
    try:
        senders = postgres.walsender(), other.walsender()
        for bench in (postgres, other):
            bench.write(("items", 1))
        time.sleep(0.3)  # the first window lies ready; what follows fills the buffer
        for bench in (postgres, other):
            bench.write(*[("items", n) for n in range(2, 200)])
        time.sleep(HELD_BACK_SECONDS)
        for bench, stream in ((postgres, roomy), (other, full)):
            windows = take(stream, bench.begin, 199)
            bench.write(("items", 200))
            windows += take(stream, windows[-1].end, 1)
            assert keys(*windows) == list(range(1, 201))
        assert (postgres.walsender(), other.walsender()) == senders, "the server cut the connection"
    finally:
        roomy.close()
        full.close()
        other.close()


def test_a_rollback_is_never_seen(postgres: PostgresBench) -> None:
    stream = postgres.capture.live(postgres.begin)
    with pytest.raises(psycopg.errors.UniqueViolation):
        postgres.write(("items", 1), ("items", 1))
    postgres.write(("items", 2))
    assert keys(*take(stream, postgres.begin, 1)) == [2]
    stream.close()


def test_a_connection_that_the_server_ends_is_an_error_to_retry(postgres: PostgresBench) -> None:
    stream = postgres.capture.live(postgres.begin)
    postgres.execute(f"select pg_terminate_backend({postgres.walsender()})")
    with pytest.raises(SourceUnreachable):
        quiet_window(stream, Lsn((1 << 64) - 1))
    stream.close()
