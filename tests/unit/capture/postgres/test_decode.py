"""Messages to batches: order, whole transactions, unsent values, key moves, and refusal of anything else."""

from __future__ import annotations

import struct
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.capture.postgres import decode as decode_module
from tailrace.capture.postgres.decode import EPOCH_2000, Decoder
from tailrace.errors import ProtocolViolation
from tailrace.model import change
from tailrace.model.batch import ChangeBatch, Window
from tailrace.model.position import Lsn
from tailrace.runtime.output_batch import join_windows, number_in_sequence, split_at_row
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
    describe,
    numeric,
    transaction,
    truncate,
)

ITEMS = Sent(oid=1, name="items", columns=(("id", INT4, -1), ("note", TEXT, -1), ("big", TEXT, -1)))
WHOLE = Sent(oid=2, name="whole", replica="f", columns=ITEMS.columns)
OTHER = Sent(oid=3, name="other", columns=(("id", INT8, -1),))
PRICES = Sent(oid=4, name="prices", columns=(("id", INT4, -1), ("price", NUMERIC, numeric(6, 2))))


def rows(window: Window) -> list[dict[str, Any]]:
    """Return every row of the window in `_seq` order, with every optional column and its table."""
    found = [
        dict.fromkeys(change.OPTIONAL) | {"table": batch.schema.table.name} | row
        for batch in window.batches
        for row in batch.data.to_pylist()
    ]
    return sorted(found, key=lambda row: int(row[change.SEQ]))


def brief(window: Window) -> list[tuple[Any, ...]]:
    return [(row["_op"], row["id"], row["note"], row["big"], row["_unchanged"]) for row in rows(window)]


def one(window: Window) -> ChangeBatch:
    (batch,) = window.batches
    return batch


# --- operations --------------------------------------------------------------------------------------------


def test_insert_update_and_delete_arrive_as_they_were_written() -> None:
    window = decode(
        transaction(
            ITEMS.relation(), ITEMS.insert(1, "a", None), ITEMS.update(1, "b", "x"), ITEMS.delete(key=(1, None, None))
        )
    )
    assert brief(window) == [
        ("insert", 1, "a", None, None),
        ("update", 1, "b", "x", None),
        ("delete", 1, None, None, None),
    ]
    assert (window.transactions, window.rows) == (1, 3)


def test_an_empty_text_is_not_null() -> None:
    assert brief(decode(transaction(ITEMS.relation(), ITEMS.insert(1, "", None))))[0][2:4] == ("", None)


def test_a_delete_under_full_identity_carries_the_whole_old_row() -> None:
    window = decode(transaction(WHOLE.relation(), WHOLE.delete(old=(1, "a", "x"))))
    assert brief(window) == [("delete", 1, "a", "x", None)]


def test_a_truncate_is_one_row_for_each_table() -> None:
    window = decode(transaction(ITEMS.relation(), OTHER.relation(), truncate(ITEMS, OTHER), OTHER.insert(5)))
    assert [(row["table"], row["_op"], row["id"], row["_seq"]) for row in rows(window)] == [
        ("items", "truncate", None, 0),
        ("other", "truncate", None, 1),
        ("other", "insert", 5, 2),
    ]
    assert {batch.schema.table.name: batch.truncates for batch in window.batches} == {"items": 1, "other": 1}


def test_optional_columns_are_left_out_when_no_row_needs_them() -> None:
    batch = one(decode(transaction(ITEMS.relation(), ITEMS.insert(1, "a", "x"), ITEMS.update(1, "b", "y"))))
    assert not set(change.OPTIONAL) & set(batch.data.schema.names)
    assert (batch.moves, batch.truncates, batch.unfit) == (0, 0, 0)


def test_a_batch_follows_the_schema_of_its_table() -> None:
    batch = one(decode(transaction(WHOLE.relation(), WHOLE.update(2, UNSENT, UNSENT, old=(1, None, "x")))))
    fields = batch.schema.change_schema()
    assert batch.data.schema.equals(pa.schema([f for f in fields if f.name in batch.data.schema.names]))
    batch.data.validate(full=True)


# --- values that were not sent -----------------------------------------------------------------------------


def test_an_unsent_value_is_named_and_is_not_a_null() -> None:
    window = decode(transaction(ITEMS.relation(), ITEMS.update(1, None, UNSENT), ITEMS.update(2, "b", "c")))
    assert brief(window) == [("update", 1, None, None, ["big"]), ("update", 2, "b", "c", None)]


def test_several_unsent_values_are_all_named_in_order() -> None:
    window = decode(transaction(ITEMS.relation(), ITEMS.update(1, UNSENT, UNSENT)))
    assert brief(window) == [("update", 1, None, None, ["note", "big"])]


def test_under_full_identity_an_unsent_value_is_taken_from_the_old_row() -> None:
    window = decode(transaction(WHOLE.relation(), WHOLE.update(1, "b", UNSENT, old=(1, "a", "huge"))))
    assert brief(window) == [("update", 1, "b", "huge", None)]
    assert rows(window)[0]["_before"] == {"id": 1, "note": "a", "big": "huge"}


# --- key moves ---------------------------------------------------------------------------------------------


def test_a_key_change_is_a_delete_and_an_insert_next_to_it() -> None:
    window = decode(transaction(ITEMS.relation(), ITEMS.update(2, "b", UNSENT, key=(1, None, None))))
    assert brief(window) == [("delete", 1, None, None, None), ("insert", 2, "b", None, ["big"])]
    gone, come = rows(window)
    assert (gone["_moved_from"], come["_moved_from"]) == (None, {"id": 1})
    assert (gone["_seq"], come["_seq"], gone["_tx_index"], come["_tx_index"]) == (0, 1, 0, 1)
    assert one(window).moves == 1


def test_a_key_change_under_full_identity_keeps_the_large_value() -> None:
    window = decode(transaction(WHOLE.relation(), WHOLE.update(2, "b", UNSENT, old=(1, "a", "huge"))))
    assert brief(window) == [("delete", 1, "a", "huge", None), ("insert", 2, "b", "huge", None)]
    come = rows(window)[1]
    assert come["_moved_from"] == {"id": 1}
    assert come["_before"] == {"id": 1, "note": "a", "big": "huge"}


@pytest.mark.parametrize("old", [{"key": (1, None, None)}, {"old": (1, "a", "x")}], ids=["K", "O"])
def test_an_old_tuple_with_an_equal_key_is_no_move(old: dict[str, Any]) -> None:
    table = WHOLE if "old" in old else ITEMS
    window = decode(transaction(table.relation(), table.update(1, "b", "y", **old)))
    assert [row["_op"] for row in rows(window)] == ["update"]
    assert one(window).moves == 0


def test_a_key_that_was_not_sent_has_not_moved() -> None:
    big_key = Sent(oid=9, name="items", columns=ITEMS.columns, key=("big",))
    window = decode(transaction(big_key.relation(), big_key.update(1, "b", UNSENT, key=(None, None, "k"))))
    assert brief(window) == [("update", 1, "b", "k", None)]


def test_a_key_of_several_columns_moves_when_the_last_of_them_changes() -> None:
    pair = Sent(oid=9, name="items", columns=ITEMS.columns, key=("id", "big"))
    window = decode(transaction(pair.relation(), pair.update(1, "b", "xz", key=(1, None, "xy"))))
    assert rows(window)[1]["_moved_from"] == {"id": 1, "big": "xy"}
    same = decode(transaction(pair.relation(), pair.update(1, "b", "xy", key=(1, None, "xy"))))
    assert [row["_op"] for row in rows(same)] == ["update"]


def test_a_key_that_grows_by_a_character_moves() -> None:
    window = decode(transaction(ITEMS.relation(), ITEMS.update(11, "b", "x", key=(1, None, None))))
    assert [row["_op"] for row in rows(window)] == ["delete", "insert"]


# --- order and transactions --------------------------------------------------------------------------------


def test_rows_of_several_tables_keep_the_order_of_the_wire() -> None:
    window = decode(
        [
            *transaction(
                ITEMS.relation(),
                OTHER.relation(),
                OTHER.insert(1),
                ITEMS.insert(2, None, None),
                OTHER.insert(3),
                end=0x100,
                xid=7,
            ),
            *transaction(ITEMS.insert(4, None, None), OTHER.insert(5), end=0x1_00000200, xid=8),
        ]
    )
    found = [(r["_seq"], r["id"], r["table"], r["_tx_index"], r["_tx"], r["_position"]) for r in rows(window)]
    assert found == [
        (0, 1, "other", 0, 7, "0/100"),
        (1, 2, "items", 1, 7, "0/100"),
        (2, 3, "other", 2, 7, "0/100"),
        (3, 4, "items", 0, 8, "1/200"),
        (4, 5, "other", 1, 8, "1/200"),
    ]
    assert len(window.batches) == 2
    assert window.transactions == 2


def test_every_batch_is_in_order_of_seq() -> None:
    window = decode(transaction(ITEMS.relation(), *[ITEMS.insert(n, None, None) for n in range(50)], truncate(ITEMS)))
    seqs = one(window).data.column("_seq").to_pylist()
    assert seqs == list(range(51))


def test_the_time_of_commit_is_the_servers_in_utc() -> None:
    at = EPOCH_2000 + 123_456_789
    window = decode(
        [
            *transaction(ITEMS.relation(), ITEMS.insert(1, None, None), at=at),
            *transaction(ITEMS.insert(2, None, None), end=0x200, at=at + 5),
        ]
    )
    column = one(window).data.column("_committed_at")
    assert column.type == pa.timestamp("us", "UTC")
    assert column.cast(pa.int64()).to_pylist() == [at, at + 5]
    assert window.last_committed_at == at + 5


def test_a_window_has_the_newest_time_of_its_transactions_also_where_the_servers_clock_went_back() -> None:
    at = EPOCH_2000 + 123_456_789
    window = decode(
        [
            *transaction(ITEMS.relation(), ITEMS.insert(1, None, None), at=at),
            *transaction(ITEMS.insert(2, None, None), end=0x200, xid=8, at=at + 50),
            *transaction(ITEMS.insert(3, None, None), end=0x300, xid=9, at=at + 5),
        ]
    )
    assert window.last_committed_at == at + 50
    later = decode([*transaction(ITEMS.relation(), ITEMS.insert(4, None, None), end=0x400, xid=10, at=at + 7)])
    whole = join_windows(number_in_sequence([window, later], 0))
    assert whole.last_committed_at == at + 50
    assert [part.last_committed_at for part in split_at_row(whole, 1) if part is not None] == [at, at + 50]
    assert [part.last_committed_at for part in split_at_row(whole, 2) if part is not None] == [at + 50, at + 7]


def test_a_transaction_that_ends_at_or_before_the_position_is_dropped_whole() -> None:
    messages = [
        *transaction(ITEMS.relation(), ITEMS.insert(1, None, None), ITEMS.insert(2, None, None), end=0x100),
        *transaction(ITEMS.insert(3, None, None), end=0x200, xid=8),
        *transaction(ITEMS.insert(4, None, None), end=0x300, xid=9),
    ]
    for after, kept in [(0xFF, [1, 2, 3, 4]), (0x100, [3, 4]), (0x1FF, [3, 4]), (0x200, [4]), (0x300, [])]:
        window = decode(messages, after=Lsn(after))
        assert [row["id"] for row in rows(window)] == kept
        assert [row["_seq"] for row in rows(window)] == list(range(len(kept)))
        assert window.start == Lsn(after)
    assert decode(messages, after=Lsn(0x300)).is_empty
    assert decode(messages, after=Lsn(0x300)).last_committed_at is None


def test_positions_beyond_63_bits_are_compared_as_unsigned() -> None:
    far = (1 << 63) + 0x100
    messages = transaction(ITEMS.relation(), ITEMS.insert(1, None, None), end=far)
    assert decode(messages, after=Lsn(far), end=Lsn(far)).rows == 0
    assert decode(messages, after=Lsn(far - 1), end=Lsn(far)).rows == 1
    assert decode(messages, after=Lsn(0x100), end=Lsn(far)).rows == 1


def test_a_dropped_transaction_still_gives_the_schema_of_a_table() -> None:
    decoder = Decoder(describe)
    first = transaction(ITEMS.relation(), ITEMS.insert(1, None, None), end=0x100)
    assert decode(first, after=Lsn(0x100), decoder=decoder).is_empty
    later = transaction(ITEMS.insert(2, None, None), end=0x200)
    assert decode(later, after=Lsn(0x100), decoder=decoder).rows == 1


@pytest.mark.parametrize(
    ("near", "sent", "expected"),
    [
        (5, 7, 7),
        ((1 << 32) - 1, (1 << 32) - 1, (1 << 32) - 1),
        ((1 << 32) - 1, 3, (1 << 32) + 3),
        ((1 << 32) + 3, (1 << 32) - 1, (1 << 32) - 1),
        ((5 << 32) + 10, 9, (5 << 32) + 9),
    ],
)
def test_a_transaction_id_is_widened_to_the_epoch_nearest_by(near: int, sent: int, expected: int) -> None:
    window = decode(
        transaction(ITEMS.relation(), ITEMS.insert(1, None, None), xid=sent), decoder=Decoder(describe, xid_near=near)
    )
    assert rows(window)[0]["_tx"] == expected


def test_transaction_ids_keep_rising_over_an_epoch_and_between_windows() -> None:
    decoder = Decoder(describe, xid_near=(1 << 32) - 2)
    first = decode(
        [
            *transaction(ITEMS.relation(), ITEMS.insert(1, None, None), xid=(1 << 32) - 1, end=0x100),
            *transaction(ITEMS.insert(2, None, None), xid=3, end=0x200),
        ],
        decoder=decoder,
    )
    second = decode(transaction(ITEMS.insert(3, None, None), xid=4, end=0x300), decoder=decoder)
    found = [row["_tx"] for row in rows(first) + rows(second)]
    assert found == [(1 << 32) - 1, (1 << 32) + 3, (1 << 32) + 4]


# --- schemas -----------------------------------------------------------------------------------------------

WIDER = Sent(oid=1, name="items", columns=(*ITEMS.columns, ("more", INT4, -1)))


def test_a_table_that_changes_its_schema_within_a_window_gives_a_batch_of_each() -> None:
    window = decode(
        [
            *transaction(ITEMS.relation(), ITEMS.insert(1, None, None), end=0x100),
            *transaction(WIDER.relation(), WIDER.insert(2, None, None, 9), end=0x200),
            *transaction(WIDER.insert(3, None, None, 9), end=0x300),
        ]
    )
    shapes = [(len(batch.schema.columns), batch.data.column("id").to_pylist()) for batch in window.batches]
    assert shapes == [(3, [1]), (4, [2, 3])]
    assert [row["_seq"] for row in rows(window)] == [0, 1, 2]


def test_a_table_that_is_described_again_unchanged_stays_in_one_batch() -> None:
    window = decode(
        [
            *transaction(ITEMS.relation(), ITEMS.insert(1, None, None), end=0x100),
            *transaction(ITEMS.relation(), ITEMS.insert(2, None, None), end=0x200),
        ]
    )
    assert one(window).data.column("id").to_pylist() == [1, 2]


def test_a_schema_lasts_from_one_window_to_the_next() -> None:
    decoder = Decoder(describe)
    decode(transaction(ITEMS.relation(), ITEMS.insert(1, None, None)), decoder=decoder)
    assert decode(transaction(ITEMS.insert(2, "x", None), end=0x200), decoder=decoder).rows == 1
    wide = transaction(WIDER.relation(), WIDER.insert(3, None, None, 1), end=0x300)
    assert len(one(decode(wide, decoder=decoder)).schema.columns) == 4


def test_a_column_named_like_a_metadata_column_keeps_its_value() -> None:
    odd = Sent(oid=1, name="odd", columns=(("id", INT4, -1), ("_op", TEXT, -1), ("_seq", INT4, -1)))
    batch = one(decode(transaction(odd.relation(), odd.insert(1, "mine", 99))))
    (event,) = batch.events()
    assert event.values == {"id": 1, "_op": "mine", "_seq": 99}
    assert (event.operation.value, event.seq) == ("insert", 0)


def test_a_table_of_1600_columns_is_decoded() -> None:
    wide = Sent(oid=1, name="wide", columns=(("id", INT4, -1), *((f"c{n}", INT4, -1) for n in range(1599))))
    batch = one(decode(transaction(wide.relation(), wide.insert(1, *range(1599)))))
    assert batch.data.column("c1598").to_pylist() == [1598]


def test_many_relations_in_one_window_are_all_learned() -> None:
    tables = [Sent(oid=n + 1, name=f"t{n}", columns=OTHER.columns) for n in range(1500)]
    window = decode(transaction(*[m for table in tables for m in (table.relation(), table.insert(1))]))
    assert (window.rows, len(window.batches)) == (1500, 1500)


# --- values that do not fit --------------------------------------------------------------------------------


def test_an_unfit_value_is_kept_as_its_exact_text() -> None:
    window = decode(
        transaction(PRICES.relation(), PRICES.insert(1, "12.50"), PRICES.insert(2, "NaN"), PRICES.insert(3, None))
    )
    found = [(row["price"], row["_unfit"]) for row in rows(window)]
    assert found == [(Decimal("12.50"), None), (None, [{"column": "price", "text": "NaN"}]), (None, None)]
    assert one(window).unfit == 1


def test_several_unfit_values_of_a_row_are_all_kept() -> None:
    table = Sent(oid=1, name="t", columns=(("id", INT4, -1), ("a", INT4, -1), ("b", INT4, -1)))
    window = decode(transaction(table.relation(), table.insert(1, "x" * 300, "é")))
    assert rows(window)[0]["_unfit"] == [{"column": "a", "text": "x" * 300}, {"column": "b", "text": "é"}]
    assert one(window).unfit == 2


def test_an_unfit_old_value_is_not_a_silent_null() -> None:
    table = Sent(oid=4, name="prices", replica="f", columns=PRICES.columns)
    window = decode(transaction(table.relation(), table.update(1, "12.50", old=(1, "NaN"))))
    (row,) = rows(window)
    assert row["_unfit"] == [{"column": "_before.price", "text": "NaN"}]


# --- large windows -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("limit", "most"), [("BATCH_BYTES_MAX", 400), ("BATCH_CELLS_MAX", 30)])
def test_a_large_window_is_split_into_batches_that_together_are_the_same(
    monkeypatch: pytest.MonkeyPatch, limit: str, most: int
) -> None:
    messages = [
        *transaction(
            ITEMS.relation(),
            OTHER.relation(),
            *[m for n in range(60) for m in (ITEMS.insert(n, "x" * 20, None), OTHER.insert(n))],
        ),
        *transaction(truncate(ITEMS), ITEMS.update(2, "y", UNSENT, key=(1, None, None)), end=0x200),
    ]
    whole = decode(messages)
    monkeypatch.setattr(decode_module, limit, most)
    split = decode(messages)
    assert len(whole.batches) == 2
    assert len(split.batches) > 6
    assert rows(split) == rows(whole)
    for batch in split.batches:
        seqs = batch.data.column("_seq").to_pylist()
        assert seqs == sorted(seqs)
        assert batch.data.nbytes < 4000
    assert sum(batch.moves for batch in split.batches) == 1
    assert sum(batch.truncates for batch in split.batches) == 1


@pytest.mark.parametrize("limit", ["BATCH_BYTES_MAX", "BATCH_CELLS_MAX"])
def test_a_truncate_that_is_first_in_a_large_window_is_not_lost(monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    messages = transaction(ITEMS.relation(), OTHER.relation(), truncate(ITEMS), OTHER.insert(1), truncate(OTHER))
    monkeypatch.setattr(decode_module, limit, 8)
    assert [(row["_seq"], row["_op"]) for row in rows(decode(messages))] == [
        (0, "truncate"),
        (1, "insert"),
        (2, "truncate"),
    ]


# --- anything else is refused ------------------------------------------------------------------------------


def test_a_change_of_an_undescribed_table_is_refused() -> None:
    for messages in (
        transaction(ITEMS.insert(1, None, None)),
        transaction(ITEMS.relation(), truncate(ITEMS, OTHER)),
        transaction(ITEMS.insert(1, None, None), ITEMS.relation()),
    ):
        with pytest.raises(ProtocolViolation, match="before its table was described"):
            decode(messages)


MALFORMED: dict[str, list[bytes]] = {
    "an unknown message": transaction(b"Z1234567890"),
    "a change outside a transaction": [ITEMS.relation(), ITEMS.insert(1, None, None)],
    "a truncate outside a transaction": [ITEMS.relation(), truncate(ITEMS)],
    "a commit without a begin": [commit()],
    "a transaction that does not end": [begin(), ITEMS.relation(), ITEMS.insert(1, None, None)],
    "a begin inside a transaction": [
        *transaction(ITEMS.relation(), ITEMS.insert(1, None, None), begin(8), ITEMS.insert(2, None, None))
    ],
    "a begin cut short": [begin()[:-1], commit()],
    "a commit cut short": [begin(), commit()[:-1]],
    "an insert cut short": transaction(ITEMS.relation(), ITEMS.insert(1, "abc", "def")[:-1]),
    "an insert of its head only": transaction(ITEMS.relation(), ITEMS.insert(1, None, None)[:6]),
    "a truncate that names too few": transaction(ITEMS.relation(), truncate(ITEMS, ITEMS)[:-1]),
    "a truncate of two thousand million": transaction(
        ITEMS.relation(), b"T" + struct.pack(">IB", 2**31 - 1, 0)
    ),
    "too few columns": transaction(ITEMS.relation(), ITEMS.insert(1, None)),
    "too many columns": transaction(ITEMS.relation(), ITEMS.insert(1, None, None, None)),
    "an old tuple of another width": transaction(ITEMS.relation(), ITEMS.update(1, None, None, key=(1,))),
    "a delete without the old row": transaction(ITEMS.relation(), b"D" + struct.pack(">I", 1) + b"N\0\3nnn"),
    "an update without the new row": transaction(ITEMS.relation(), b"U" + ITEMS.delete(key=(1, None, None))[1:]),
    "a value longer than its message": transaction(
        ITEMS.relation(), b"I" + struct.pack(">I", 1) + b"N\0\3t\xff\xff\xff\xffnn"
    ),
    "an unknown kind of value": transaction(
        ITEMS.relation(), ITEMS.insert(1, None, None).replace(b"n", b"q")
    ),
    "a value in binary, which was not asked for": transaction(
        ITEMS.relation(), b"I" + struct.pack(">I", 1) + b"N\0\3b\0\0\0\4\0\0\0\1nn"
    ),
    "a relation cut short": transaction(ITEMS.relation()[:-1]),
    "a relation of its head only": transaction(ITEMS.relation()[:5]),
}  # fmt: skip


@pytest.mark.parametrize("messages", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_stream_is_refused(messages: list[bytes]) -> None:
    with pytest.raises(ProtocolViolation):
        decode(messages)


def test_an_error_contains_no_row_values() -> None:
    with pytest.raises(ProtocolViolation) as caught:
        decode(transaction(ITEMS.relation(), ITEMS.insert(1, "secret", "secret", None)))
    assert "secret" not in str(caught.value)


def test_messages_without_rows_are_skipped() -> None:
    origin, kind = b"O" + b"\0" * 9, b"Y" + b"\0" * 7
    window = decode(transaction(origin, kind, ITEMS.relation(), ITEMS.insert(1, None, None)))
    assert window.rows == 1


@given(st.data())
@settings(deadline=None, max_examples=60)
def test_a_window_is_the_same_however_its_transactions_are_distributed(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=8))
    made = [
        transaction(ITEMS.relation(), *[ITEMS.insert(10 * n + k, None, None) for k in range(size)], end=16 * n + 16)
        for n, size in enumerate(sizes)
    ]
    cut = data.draw(st.integers(0, len(made)))
    decoder = Decoder(describe)
    dealt = []
    for part, after in ((made[:cut], 0), (made[cut:], 16 * cut)):
        if part:
            messages = [message for tx in part for message in tx]
            dealt += [row["id"] for row in rows(decode(messages, after=Lsn(after), decoder=decoder))]
    assert dealt == [10 * n + k for n, size in enumerate(sizes) for k in range(size)]


@pytest.mark.slow
def test_bent_streams_give_rows_or_a_refusal_and_read_nothing_outside() -> None:
    done = run_guarded("tests.support.fuzzing:streams_at_the_edge", "1500")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def test_a_window_without_messages_is_empty() -> None:
    window = Decoder(describe).decode(np.empty(0, np.uint8), np.zeros(1, np.int64), 0, Lsn(5), Lsn(9))
    assert (window.is_empty, window.rows, window.start, window.end) == (True, 0, Lsn(5), Lsn(9))
