"""A transaction too large to hold arrives in parts, with the same rows as whole, wherever it is cut."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tailrace.capture.postgres.decode import EPOCH_2000, Decoder
from tailrace.errors import ProtocolViolation
from tailrace.model import change
from tailrace.model.batch import Window
from tailrace.model.position import ZERO, Lsn
from tests.support.guarded import run_guarded
from tests.support.pgoutput import (
    INT4,
    INT8,
    NUMERIC,
    TEXT,
    UNSENT,
    Sent,
    begin,
    commit,
    decode,
    decode_in_parts,
    decode_part,
    describe,
    numeric,
    transaction,
    truncate,
)

ITEMS = Sent(oid=1, name="items", columns=(("id", INT4, -1), ("note", TEXT, -1), ("big", TEXT, -1)))
WIDER = Sent(oid=1, name="items", columns=(*ITEMS.columns, ("more", INT4, -1)))
WHOLE = Sent(oid=2, name="whole", replica="f", columns=ITEMS.columns)
OTHER = Sent(oid=3, name="other", columns=(("id", INT8, -1),))
PRICES = Sent(oid=4, name="prices", columns=(("id", INT4, -1), ("price", NUMERIC, numeric(6, 2))))

AT = EPOCH_2000 + 5_000_000
LARGE = transaction(
    ITEMS.relation(),
    ITEMS.insert(1, "a", "x"),
    OTHER.relation(),
    OTHER.insert(5),
    ITEMS.update(2, "b", UNSENT, key=(1, None, None)),
    ITEMS.update(2, UNSENT, UNSENT),
    WHOLE.relation(),
    WHOLE.insert(1, "w", "huge"),
    WHOLE.update(2, "v", UNSENT, old=(1, "w", "huge")),
    truncate(ITEMS, OTHER),
    PRICES.relation(),
    PRICES.insert(1, "NaN"),
    OTHER.insert(6),
    WIDER.relation(),
    WIDER.insert(3, None, None, 9),
    WHOLE.delete(old=(2, "v", "huge")),
    WIDER.delete(key=(3, None, None, None)),
    OTHER.insert(7),
    xid=70,
    end=0x500,
    at=AT,
)
"""Every kind of change, over four tables, one of which changes its schema."""


def rows(*windows: Window) -> list[dict[str, Any]]:
    """Return every row in order, without what a part cannot know: its `_seq` and its transaction's end."""
    found = []
    for window in windows:
        of_window = [
            dict.fromkeys(change.OPTIONAL)
            | {"table": batch.schema.table.name, "shape": len(batch.schema.columns)}
            | row
            for batch in window.batches
            for row in batch.data.to_pylist()
        ]
        of_window.sort(key=lambda row: int(row[change.SEQ]))
        assert [row[change.SEQ] for row in of_window] == list(range(window.rows)), "`_seq` counts in each window"
        assert {change.POSITION in row for row in of_window} <= {not window.open}
        found += of_window
    for row in found:
        del row[change.SEQ]
        row.pop(change.POSITION, None)
    return found


def counts(*windows: Window) -> tuple[int, int, int, int]:
    batches = [batch for window in windows for batch in window.batches]
    return (
        sum(window.rows for window in windows),
        sum(batch.moves for batch in batches),
        sum(batch.truncates for batch in batches),
        sum(batch.unfit for batch in batches),
    )


def ids(*windows: Window) -> list[int]:
    return [row["id"] for row in rows(*windows)]


# --- the same rows -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("parts", [2, 3])
def test_a_transaction_gives_the_same_rows_wherever_it_is_cut(parts: int) -> None:
    whole = decode(LARGE)
    assert counts(whole) == (16, 2, 2, 1)
    for cuts in itertools.combinations(range(1, len(LARGE)), parts - 1):
        windows = decode_in_parts(LARGE, cuts)
        assert rows(*windows) == rows(whole), cuts
        assert counts(*windows) == counts(whole), cuts


def test_a_transaction_may_arrive_message_by_message() -> None:
    windows = decode_in_parts(LARGE, range(1, len(LARGE)))
    assert rows(*windows) == rows(decode(LARGE))
    assert [window.open for window in windows] == [True] * (len(windows) - 1) + [False]
    assert [window.continues for window in windows] == [False] + [True] * (len(windows) - 1)


def test_a_part_has_what_is_known_of_its_transaction_and_no_more() -> None:
    first, last = decode_in_parts(LARGE, [6], after=Lsn(0x20), end=Lsn(0x600))
    assert (first.start, first.end, first.transactions, first.last_committed_at) == (Lsn(0x20), Lsn(0x20), 0, None)
    for batch in first.batches:
        fields = [field for field in batch.schema.change_schema() if field.name in batch.data.schema.names]
        assert batch.data.schema.names == [field.name for field in fields]
        assert change.POSITION not in batch.data.schema.names
        batch.data.validate(full=True)
        assert {event.position for event in batch.events()} == {None}
    assert {(row[change.TX], row[change.COMMITTED_AT].timestamp()) for row in rows(first, last)} == {(70, AT / 1e6)}
    assert [row[change.TX_INDEX] for row in rows(first, last)] == list(range(16))
    assert (last.start, last.end, last.continued_end) == (Lsn(0x20), Lsn(0x600), Lsn(0x500))
    assert (last.transactions, last.last_committed_at) == (1, AT)
    positions = [row[change.POSITION] for batch in last.batches for row in batch.data.to_pylist()]
    assert set(positions) == {"0/500"}


def test_whole_transactions_may_follow_the_end_of_a_split_one() -> None:
    after = transaction(OTHER.insert(8), OTHER.insert(9), xid=71, end=0x600)
    windows = decode_in_parts([*LARGE, *after], [4, 9], end=Lsn(0x600))
    assert rows(*windows) == rows(decode([*LARGE, *after]))
    last = windows[-1]
    assert (last.transactions, last.continued_end, last.end) == (2, Lsn(0x500), Lsn(0x600))
    ends = {row["id"]: row[change.POSITION] for b in last.batches for row in b.data.to_pylist()}
    assert (ends[7], ends[8], ends[9]) == ("0/500", "0/600", "0/600")


def test_nothing_of_one_transaction_reaches_into_the_next() -> None:
    decoder = Decoder(describe)
    decode_in_parts(LARGE, [3, 8], decoder=decoder)
    assert not decoder.inside
    later = transaction(OTHER.insert(8), OTHER.insert(9), xid=71, end=0x600)
    window = decode(later, after=Lsn(0x500), decoder=decoder)
    assert (window.continues, window.continued_end, window.transactions) == (False, None, 1)
    assert [row[change.TX_INDEX] for row in rows(window)] == [0, 1]
    large = transaction(*[OTHER.insert(n) for n in range(10, 20)], xid=72, end=0x700)
    again = decode_in_parts(large, [5], after=Lsn(0x600), decoder=decoder)
    assert ids(*again) == list(range(10, 20))
    assert [row[change.TX_INDEX] for row in rows(*again)] == list(range(10))
    assert [window.continues for window in again] == [False, True]


def test_an_end_without_rows_still_finishes_its_transaction() -> None:
    windows = decode_in_parts(LARGE, [len(LARGE) - 1])
    last = windows[-1]
    assert (last.rows, last.batches, last.transactions, last.continued_end) == (0, (), 1, Lsn(0x500))
    assert not last.is_empty


def test_a_part_without_rows_is_no_window_and_is_not_continued() -> None:
    decoder = Decoder(describe)
    assert decode_part(LARGE[:2], decoder) is None  # a beginning, and a table's description
    assert decoder.inside
    second = decode_part(LARGE[2:5], decoder)
    assert second is not None
    assert (second.open, second.continues) == (True, False)
    assert rows(second, decode(LARGE[5:], decoder=decoder)) == rows(decode(LARGE))


def test_the_id_of_a_transaction_in_parts_is_widened_once() -> None:
    decoder = Decoder(describe, xid_near=(1 << 32) - 5)
    messages = transaction(OTHER.relation(), OTHER.insert(1), OTHER.insert(2), xid=3)
    windows = decode_in_parts(messages, [3], decoder=decoder)
    assert {row[change.TX] for row in rows(*windows)} == {(1 << 32) + 3}


# --- a transaction that is over ----------------------------------------------------------------------------


@pytest.mark.parametrize("cuts", [[1], [6], [2, 9], list(range(1, len(LARGE)))])
def test_a_large_transaction_that_is_over_is_dropped_whole(cuts: list[int]) -> None:
    later = transaction(OTHER.insert(8), xid=71, end=0x600)
    (window,) = decode_in_parts([*LARGE, *later], cuts, after=Lsn(0x500), end=Lsn(0x600))
    assert (ids(window), window.transactions, window.continues) == ([8], 1, False)
    assert [row[change.TX_INDEX] for row in rows(window)] == [0]
    (nothing,) = decode_in_parts(LARGE, cuts, after=Lsn(0x500), end=Lsn(0x500))
    assert nothing.is_empty


def test_positions_of_parts_beyond_63_bits_are_compared_as_unsigned() -> None:
    far = (1 << 63) + 0x100
    messages = transaction(OTHER.relation(), OTHER.insert(1), OTHER.insert(2), end=far)
    assert len(decode_in_parts(messages, [3], after=Lsn(far), end=Lsn(far))) == 1
    assert ids(*decode_in_parts(messages, [3], after=Lsn(far - 8), end=Lsn(far))) == [1, 2]
    assert ids(*decode_in_parts(messages, [3], after=Lsn(0x100), end=Lsn(far))) == [1, 2]


# --- anything else is refused ------------------------------------------------------------------------------

TINY = transaction(OTHER.relation(), OTHER.insert(1), OTHER.insert(2))


def test_a_part_must_not_hold_the_end_of_its_transaction() -> None:
    for messages in (TINY, [*TINY, begin(8, 0x200), OTHER.insert(3)]):
        with pytest.raises(ProtocolViolation):
            decode_part(messages, Decoder(describe))


def test_a_part_must_be_inside_a_transaction() -> None:
    with pytest.raises(ProtocolViolation):
        decode_part([OTHER.relation()], Decoder(describe))
    with pytest.raises(ProtocolViolation):
        decode_part([OTHER.relation(), OTHER.insert(1)], Decoder(describe))


def test_a_window_must_not_end_inside_a_split_transaction() -> None:
    with pytest.raises(ProtocolViolation):
        decode_in_parts(TINY[:-1], [3])


def test_a_transaction_must_not_begin_inside_a_split_one() -> None:
    with pytest.raises(ProtocolViolation):
        decode_in_parts([*TINY[:3], *TINY], [3])


def test_a_transaction_with_another_end_than_its_beginning_says_is_refused() -> None:
    """Its first rows are delivered or dropped by what its beginning says of its end."""
    kept = [*TINY[:-1], commit(0x40)]
    dropped = [begin(end=0x40), *TINY[1:-1], commit(0x100)]
    for messages in (kept, dropped):
        with pytest.raises(ProtocolViolation):
            decode_in_parts(messages, [3], after=Lsn(0x80))


def test_a_transaction_that_ends_after_its_window_is_refused() -> None:
    with pytest.raises(ProtocolViolation):
        decode_in_parts(TINY, [3], end=Lsn(0x80))


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_malformed_message_in_a_later_part_is_refused(cut: int) -> None:
    for bad in (OTHER.insert(1, 2), b"Z123456789", ITEMS.insert(1, None, None), OTHER.insert(3)[:-1]):
        with pytest.raises(ProtocolViolation):
            decode_in_parts([*TINY[:3], bad, *TINY[3:]], [cut])


@pytest.mark.slow
def test_bent_streams_in_parts_give_the_same_as_at_once_and_read_nothing_outside() -> None:
    done = run_guarded("tests.support.fuzzing:parts_at_the_edge", "1500")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_a_new_decoder_is_in_no_transaction() -> None:
    assert not Decoder(describe).inside
    assert decode_in_parts(TINY, [2], after=ZERO)[-1].rows == 2
