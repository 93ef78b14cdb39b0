"""Messages that applications write into the source log: rows of the `message` stream."""

from __future__ import annotations

import pytest

from tailrace.capture.postgres.decode import EPOCH_2000, Decoder
from tailrace.errors import ProtocolViolation
from tailrace.model.batch import Window
from tailrace.model.position import ZERO, Lsn
from tailrace.model.system_streams import MESSAGE_STREAM
from tests.support.pgoutput import INT4, Sent, decode, decode_in_parts, describe, message, transaction

ITEMS = Sent(oid=1, name="items", columns=(("id", INT4, -1),))


def message_rows(*windows: Window) -> list[tuple[str, bytes, bool]]:
    return [
        (row["prefix"], row["content"], row["transactional"])
        for window in windows
        for batch in window.batches
        if batch.schema == MESSAGE_STREAM
        for row in batch.data.to_pylist()
    ]


def test_a_message_is_between_the_rows_of_its_transaction() -> None:
    window = decode(
        transaction(ITEMS.relation(), ITEMS.insert(1), message("app", b"hello"), ITEMS.insert(2), xid=9, end=0x200)
    )
    assert message_rows(window) == [("app", b"hello", True)]
    (row,) = window.batches[0].data.to_pylist()
    assert (row["_op"], row["_seq"], row["_tx"], row["_tx_index"]) == ("message", 1, 9, 1)
    assert row["_position"] == "0/200"
    assert window.batches[1].data.column("_seq").to_pylist() == [0, 2]
    assert (window.rows, window.transactions) == (3, 1)


def test_a_message_outside_of_a_transaction_is_one_of_its_own() -> None:
    at = EPOCH_2000 + 5
    window = decode([message("app", b"\x00\xff", lsn=0x300, outside_at=at)])
    assert message_rows(window) == [("app", b"\x00\xff", False)]
    (row,) = window.batches[0].data.to_pylist()
    assert (row["_position"], row["_tx"], row["_tx_index"]) == ("0/300", 0, 0)
    assert int(window.batches[0].data.column("_committed_at")[0].value) == at
    assert (window.transactions, window.last_committed_at) == (1, at)


def test_messages_and_transactions_keep_the_order_of_the_wire() -> None:
    window = decode(
        [
            message("a", b"1", lsn=0x10, outside_at=EPOCH_2000),
            *transaction(ITEMS.relation(), message("b", b"2"), ITEMS.insert(1), xid=8, end=0x20),
            message("c", b"3", lsn=0x30, outside_at=EPOCH_2000),
        ]
    )
    rows = sorted((row for batch in window.batches for row in batch.data.to_pylist()), key=lambda row: row["_seq"])
    assert [(row["_op"], row["_position"], row["_tx"], row["_tx_index"]) for row in rows] == [
        ("message", "0/10", 0, 0),
        ("message", "0/20", 8, 0),
        ("insert", "0/20", 8, 1),
        ("message", "0/30", 0, 0),
    ]


def test_a_delivered_message_is_not_delivered_again() -> None:
    sent = [message("app", b"x", lsn=0x300, outside_at=EPOCH_2000)]
    assert message_rows(decode(sent, after=Lsn(0x2FF))) == [("app", b"x", False)]
    assert decode(sent, after=Lsn(0x300)).is_empty


def test_a_message_of_a_transaction_that_is_over_is_not_delivered_again() -> None:
    sent = transaction(message("app", b"x"), end=0x200)
    assert decode(sent, after=Lsn(0x200)).is_empty


def test_an_unwanted_message_leaves_no_row_and_no_number() -> None:
    decoder = Decoder(describe, wanted=lambda prefix: prefix == "mine")
    window = decode(
        transaction(ITEMS.relation(), message("theirs", b"x"), ITEMS.insert(1), message("mine", b"y")), decoder=decoder
    )
    assert message_rows(window) == [("mine", b"y", True)]
    assert sorted(n for batch in window.batches for n in batch.data.column("_seq").to_pylist()) == [0, 1]


def test_messages_of_a_large_transaction_arrive_with_its_parts() -> None:
    sent = transaction(ITEMS.relation(), message("a", b"1"), ITEMS.insert(1), message("b", b"22"), message("c", b""))
    whole, parts = decode(sent), decode_in_parts(sent, [3, 4])
    assert message_rows(whole) == message_rows(*parts) == [("a", b"1", True), ("b", b"22", True), ("c", b"", True)]
    assert parts[0].open
    assert "_position" not in parts[0].batches[0].data.schema.names


GOOD = message("app", b"hello")


@pytest.mark.parametrize(
    "bad",
    [b"M", GOOD[:9], GOOD[:12], GOOD[:-1], GOOD[:14] + b"\xff" * 4 + GOOD[18:], b"M\0" + GOOD[2:], GOOD[:10] + b"xx"],
)
def test_a_truncated_or_misplaced_message_is_refused(bad: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        decode(transaction(ITEMS.relation(), bad, ITEMS.insert(1)))


@pytest.mark.parametrize("bad", [GOOD, message("app", b"", outside_at=EPOCH_2000)[:-1], b"M\0"])
def test_a_malformed_message_outside_of_a_transaction_is_refused(bad: bytes) -> None:
    with pytest.raises(ProtocolViolation):
        decode([bad], after=ZERO)
