"""A transaction too large to hold arrives in parts, once and whole, from every source."""

from __future__ import annotations

import contextlib
import time

import pytest

from tailrace.capture.port import Stream
from tailrace.errors import SourceUnreachable
from tailrace.model import change
from tailrace.model.batch import Window
from tailrace.model.position import Lsn
from tailrace.runtime.intake import ReadAheadStream
from tests.contract.conftest import HELD_BACK_SECONDS
from tests.support.benches import (
    COME_SECONDS_MAX,
    INSERT_BYTES,
    Bench,
    PostgresBench,
    Streams,
    keys,
    next_rows,
    numbers,
    quiet_window,
    rows_of,
    take,
)

LARGE = 200_000
PART = 20_000
PARTS_MIN = LARGE // PART // 2


# --- order -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_large_transaction_arrives_once_and_whole_in_parts(bench: Bench, streams: Streams) -> None:
    bench.give_in_parts(PART)
    bench.write(("items", -2), ("others", -1))
    bench.write_many(0, LARGE)
    bench.write(("items", LARGE))
    windows = take(streams.open(bench.begin), bench.begin, LARGE + 3)
    assert keys(*windows) == list(range(-2, LARGE + 1))
    parts = [window for window in windows if window.open]
    before, finish = windows[: windows.index(parts[0])], windows[windows.index(parts[-1]) + 1]
    assert keys(*before) == [-2, -1], "what was whole came first"
    assert len(parts) >= PARTS_MIN
    assert max(part.rows for part in parts) <= 2 * PART, "no part is much larger than asked for"
    assert [part.continues for part in parts] == [False] + [True] * (len(parts) - 1)
    assert finish.continues
    assert sum(window.transactions for window in windows) == 3


def test_the_rows_of_a_large_transaction_name_their_transaction(bench: Bench, streams: Streams) -> None:
    bench.give_in_parts(50)
    bench.write_many(0, 1000)
    windows = take(streams.open(bench.begin), bench.begin, 1000)
    *parts, finish = windows
    rows = rows_of(*windows)
    assert len({(row[change.TX], row[change.COMMITTED_AT]) for row in rows}) == 1
    assert [row[change.TX_INDEX] for row in rows] == list(range(1000))
    for part in parts:
        assert numbers(change.SEQ, part).tolist() == list(range(part.rows)), "`_seq` counts in each window"
        assert (part.transactions, part.last_committed_at) == (0, None)
        for batch in part.batches:
            fields = batch.schema.change_schema()
            names = batch.data.schema.names
            assert names == [field.name for field in fields if field.name in names]
            assert change.POSITION not in names, "where it ends is not known yet"
    assert finish.continued_end is not None
    assert {row[change.POSITION] for row in rows_of(finish)} <= {str(finish.continued_end)}


def test_large_transactions_follow_one_another(bench: Bench, streams: Streams) -> None:
    bench.give_in_parts(100)
    for n in range(5):
        bench.write_many(1000 * n, 1000 * n + 900)
        bench.write(("items", 1000 * n + 900))
    windows = take(streams.open(bench.begin), bench.begin, 4505)
    assert keys(*windows) == [1000 * n + k for n in range(5) for k in range(901)]
    assert sum(window.transactions for window in windows) == 10
    for window in windows:
        if window.open:
            assert len(set(numbers(change.TX, window).tolist())) == 1, "an open window is one transaction's"


def test_a_transaction_that_fits_is_never_split(bench: Bench, streams: Streams) -> None:
    bench.write_many(0, 20_000)
    (window,) = take(streams.open(bench.begin), bench.begin, 20_000)
    assert (window.open, window.continues, window.transactions) == (False, False, 1)


# --- repetition --------------------------------------------------------------------------------------------


def test_reopened_between_two_parts_the_transaction_begins_again(bench: Bench, streams: Streams) -> None:
    bench.give_in_parts(200)
    bench.write_many(0, 2000)
    first = streams.open(bench.begin)
    for continues in (False, True):
        window = quiet_window(first, bench.begin) if continues else next_rows(first, bench.begin)
        assert (window.open, window.continues) == (True, continues)
    streams.close(first)
    assert bench.confirmed() == bench.begin
    assert keys(*take(streams.open(bench.begin), bench.begin, 2000)) == list(range(2000))


def test_the_end_of_a_transaction_that_was_not_made_durable_is_delivered_again(bench: Bench, streams: Streams) -> None:
    """The parts were stored, the window that finishes the transaction was not.

    A source delivers that window again, or begins the transaction again, and the window says which.
    """
    bench.give_in_parts(200)
    bench.write_many(0, 2000)
    stream = streams.open(bench.begin)
    kept = take(stream, bench.begin, 2000)[:-1]
    again = [next_rows(stream, bench.begin)]
    while again[-1].open:
        again.append(quiet_window(stream, bench.begin))
    assert keys(*kept if again[0].continues else (), *again) == list(range(2000))


def test_a_large_transaction_that_is_over_is_not_delivered_again(bench: Bench, streams: Streams) -> None:
    bench.give_in_parts(200)
    bench.write_many(0, 2000)
    end = take(streams.open(bench.begin), bench.begin, 2000)[-1].end
    streams.close_all()
    bench.write(("items", 2000))
    assert keys(*take(streams.open(end), end, 1)) == [2000]


# --- durability --------------------------------------------------------------------------------------------


def test_a_large_transaction_is_confirmed_as_a_whole(bench: Bench, streams: Streams) -> None:
    bench.give_in_parts(200)
    bench.write_many(0, 2000)
    stream = streams.open(bench.begin)
    stream.confirm(bench.begin)
    window = next_rows(stream, bench.begin)
    assert window.open
    time.sleep(0.3)
    assert bench.confirmed() == bench.begin
    rest = _rest(stream, bench.begin)
    stream.confirm(rest)
    deadline = time.monotonic() + COME_SECONDS_MAX
    while bench.confirmed() < rest:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _rest(stream: Stream, after: Lsn) -> Lsn:
    """Read a transaction to its end."""
    while (window := quiet_window(stream, after)).open:
        assert window.continues
    assert window.continues
    return window.end


def test_the_position_does_not_move_between_two_parts(bench: Bench, streams: Streams) -> None:
    """Not even to what the source has reported before the transaction began."""
    bench.write_elsewhere()
    stream = streams.open(bench.begin)
    quiet_window(stream, bench.begin)  # not made durable: the caller waits until it is worth it
    bench.give_in_parts(PART // 10)
    bench.write_many(0, LARGE)
    windows: list[Window] = []
    while not windows or windows[-1].open:
        window = stream.read(bench.begin, 0.0)  # so it is often asked when the next part is not there yet
        if window is not None and (windows or not window.is_empty):
            windows.append(window)
    assert [window.open for window in windows] == [True] * (len(windows) - 1) + [False]
    assert keys(*windows) == list(range(LARGE))


# --- PostgreSQL's own ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
def test_a_reader_that_holds_back_buffers_little_and_answers_keepalives(postgres: PostgresBench) -> None:
    postgres.give_in_parts(PART)
    with contextlib.closing(postgres.capture.live(postgres.begin)) as stream:
        assert isinstance(stream, ReadAheadStream)
        sender = postgres.walsender()
        postgres.write_many(0, LARGE)
        begun, most = time.monotonic(), 0
        while time.monotonic() < begun + HELD_BACK_SECONDS or most <= PART * INSERT_BYTES:
            assert time.monotonic() < begun + COME_SECONDS_MAX, f"only {most} bytes are held"
            most = max(most, stream.held_bytes)
            time.sleep(0.1)
        assert most < 3 * PART * INSERT_BYTES, "one part waits, one is being filled"
        windows = take(stream, postgres.begin, LARGE)
        assert keys(*windows) == list(range(LARGE))
        assert len(windows) >= PARTS_MIN
        assert postgres.walsender() == sender, "the server cut the connection"


def test_a_large_transaction_that_is_rolled_back_is_never_seen(
    postgres: PostgresBench, postgres_streams: Streams
) -> None:
    postgres.give_in_parts(200)
    stream = postgres_streams.open(postgres.begin)
    with postgres.connection.transaction(force_rollback=True):
        postgres.write_many(0, 5000)
    with postgres.connection.transaction():
        postgres.write_many(5000, 6000)
        with postgres.connection.transaction(force_rollback=True):
            postgres.write_many(6000, 9000)
        postgres.write_many(9000, 10_000)
    windows = take(stream, postgres.begin, 2000)
    assert keys(*windows) == [*range(5000, 6000), *range(9000, 10_000)]
    assert windows[0].open
    assert sum(window.transactions for window in windows) == 1


def test_a_row_larger_than_a_part_still_arrives(postgres: PostgresBench, postgres_streams: Streams) -> None:
    postgres.give_in_parts(100)
    postgres.execute(f"alter table {postgres.schema}.items add big text")
    stream = postgres_streams.open(postgres.begin)
    postgres.execute(
        f"insert into {postgres.schema}.items select g, repeat(g::text, 3000000) from generate_series(1, 8) g"
    )
    windows = take(stream, postgres.begin, 8)
    assert [(row["id"], len(row["big"])) for row in rows_of(*windows)] == [(n, 3_000_000) for n in range(1, 9)]


@pytest.mark.slow
def test_a_connection_that_breaks_between_two_parts_loses_nothing(
    postgres: PostgresBench, postgres_streams: Streams
) -> None:
    postgres.give_in_parts(PART)
    stream = postgres_streams.open(postgres.begin)
    postgres.write_many(0, LARGE)
    assert next_rows(stream, postgres.begin).open
    postgres.execute(f"select pg_terminate_backend({postgres.walsender()})")
    with pytest.raises(SourceUnreachable):
        # Where all of it was already on its way, nothing arrives after it.
        next_rows(stream, _rest(stream, postgres.begin))
    postgres_streams.close(stream)
    again = take(postgres_streams.open(postgres.begin), postgres.begin, LARGE)
    assert keys(*again) == list(range(LARGE))


def test_a_window_that_could_not_be_decoded_is_not_skipped(postgres: PostgresBench, postgres_streams: Streams) -> None:
    """A table's schema is looked up while a window is decoded; here the connection for that breaks."""
    stream = postgres_streams.open(postgres.begin)
    postgres.execute(
        "select pg_terminate_backend(pid) from pg_stat_activity "
        "where backend_type = 'client backend' and pid <> pg_backend_pid()"
    )
    postgres.write(("items", 1))
    with pytest.raises(SourceUnreachable):
        next_rows(stream, postgres.begin)
    postgres.write(("items", 2))
    with pytest.raises(SourceUnreachable, match="not decoded"):
        next_rows(stream, postgres.begin)
    postgres_streams.close(stream)
    assert keys(*take(postgres_streams.open(postgres.begin), postgres.begin, 2)) == [1, 2]
