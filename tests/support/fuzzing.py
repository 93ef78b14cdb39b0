"""Runs in a process of its own, on guarded buffers: see `guarded`.

The last number printed is the case that was running. Cases follow from the seed alone, so a crash can be run
again: stop before that number and look at the case.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from tailrace.capture.postgres import values
from tailrace.capture.postgres.decode import EPOCH_2000, Decoder
from tailrace.capture.postgres.values import NULL, Cells
from tailrace.errors import ProtocolViolation
from tailrace.model.position import ZERO, Lsn
from tests.support.guarded import Guarded
from tests.support.pgoutput import (
    FLOAT8,
    INT4,
    INT4_ARRAY,
    NUMERIC,
    TEXT,
    TIMESTAMPTZ,
    UNSENT,
    Sent,
    describe,
    laid_out,
    message,
    numeric,
    transaction,
    truncate,
)

TEXTS: list[tuple[pa.DataType, bytes]] = [
    (pa.int64(), b"-9223372036854775808"), (pa.int32(), b"1"), (pa.int16(), b"-1"), (pa.bool_(), b"t"),
    (pa.float64(), b"1.5e-10"), (pa.string(), "né".encode()), (pa.binary(), b"\\x01ff"),
    (pa.decimal128(38, 10), b"-1.25"), (pa.date32(), b"0044-03-15 BC"), (pa.date32(), b"-infinity"),
    (pa.timestamp("us"), b"2026-01-02 03:04:05.6"), (pa.timestamp("us", "UTC"), b"2026-01-02 03:04:05.6+05:30:15"),
    (pa.timestamp("us"), b"0044-03-15 12:00:00 BC"), (pa.list_(pa.int32()), b"{1,NULL,-3}"),
    (pa.list_(pa.string()), b'{a,"b \\" c",NULL,"NULL"}'), (pa.list_(pa.binary()), b'{"\\\\x01"}'),
    (pa.list_(pa.timestamp("us", "UTC")), b'{"2026-01-02 03:04:05+00"}'),
]  # fmt: skip
"""A good text for every kernel; what is fed in lies near these."""

ITEMS = Sent(
    oid=1,
    name="items",
    columns=(("id", INT4, -1), ("note", TEXT, -1), ("price", NUMERIC, numeric(10, 2)), ("at", TIMESTAMPTZ, -1)),
)
WHOLE = Sent(oid=2, name="whole", replica="f", columns=(("id", TEXT, -1), ("x", FLOAT8, -1), ("list", INT4_ARRAY, -1)))
_AT = "2026-01-02 03:04:05.6+00"


def sample() -> list[bytes]:
    """Every kind of message, as a server would send them."""
    return [
        *transaction(ITEMS.relation(), ITEMS.insert(1, "a", "1.25", _AT), ITEMS.update(1, UNSENT, None, _AT)),
        *transaction(
            WHOLE.relation(),
            WHOLE.insert("k", "NaN", "{1,NULL}"),
            WHOLE.update("l", 2.5, UNSENT, old=("k", "NaN", "{1,NULL}")),
            ITEMS.update(2, UNSENT, "1.00", _AT, key=(1, None, None, None)),
            ITEMS.delete(key=(2, None, None, None)),
            WHOLE.delete(old=("l", 2.5, None)),
            truncate(ITEMS, WHOLE),
            message("inside", b"\x00\xff"),
            xid=8,
            end=0x200,
        ),
        message("outside", b"", lsn=0x280, outside_at=EPOCH_2000),
    ]


def mutated(rng: random.Random, data: bytes) -> bytes:
    """The data with a few bytes changed, put in or left out."""
    changed = bytearray(data)
    for _ in range(rng.choice((0, 1, 1, 2, 4))):
        place = rng.randrange(len(changed) + 1)
        kind = rng.randrange(4)
        byte = rng.choice(b'-.:+ ,"\\{}0919tfnubNKOx\x00\xff') if kind else rng.randrange(256)
        if kind == 1 or place == len(changed):
            changed.insert(place, byte)
        elif kind == 2:
            del changed[place]
        else:
            changed[place] = byte
    return bytes(changed[: rng.randrange(len(changed) + 1)] if rng.random() < 0.2 else changed)


def values_at_the_edge(rounds: str) -> None:
    """Feed near-good texts, each time with a forbidden page right behind the last or before the first."""
    guarded, rng = Guarded(), random.Random(7)
    for n in range(int(rounds)):
        kind, good = rng.choice(TEXTS)
        texts = [mutated(rng, good) for _ in range(rng.randrange(1, 4))]
        sys.stdout.write(f"{n}\n")
        sys.stdout.flush()
        ends = np.cumsum([len(text) for text in texts])
        size = np.array([len(text) for text in texts], np.int64)
        place = guarded.at_end if n % 2 else guarded.at_start
        cells = Cells(place(b"".join(texts)), np.array(ends - size, np.int64), size)
        found = values.convert_cells(cells, kind)
        assert found.column.null_count == found.unfit.size, (kind, texts)
    nulls = np.full(3, NULL, np.int64)
    for kind, _ in TEXTS:
        assert values.convert_cells(Cells(guarded.at_end(b""), nulls * 0, nulls), kind).column.null_count == 3


def mutants(rng: random.Random, rounds: int) -> Iterator[list[bytes]]:
    """Streams that differ from a good one in a few bytes, or in which messages there are."""
    good = sample()
    for _ in range(rounds):
        messages = list(good)
        for _ in range(rng.choice((1, 1, 2))):
            place = rng.randrange(len(messages))
            how = rng.randrange(8)
            if how == 0:
                del messages[place]
            elif how == 1:
                messages.insert(place, rng.choice(good))
            else:
                messages[place] = _bent(rng, messages[place])
        if messages:
            yield messages


def _bent(rng: random.Random, message: bytes) -> bytes:
    bent = bytearray(message)
    for _ in range(rng.choice((1, 1, 1, 2))):
        bent[rng.randrange(len(bent))] = rng.choice((rng.randrange(256), *b"tbnuKON\x00\x01\x7f\xff"))
    if rng.random() < 0.25:
        bent = bent[: rng.randrange(1, len(bent) + 1)]
    return bytes(bent)


def streams_at_the_edge(rounds: str, seed: str = "11") -> None:
    """Decode bent streams: rows, or ProtocolViolation, and nothing else."""
    guarded, counts = Guarded(), {"rows": 0, "violations": 0}
    for n, messages in enumerate(mutants(random.Random(int(seed)), int(rounds))):
        sys.stdout.write(f"{n}\n")
        sys.stdout.flush()
        b, starts = laid_out(messages)
        place = guarded.at_end if n % 2 else guarded.at_start
        try:
            window = Decoder(describe).decode(place(b), starts, len(messages), ZERO, Lsn(1))
        except ProtocolViolation:
            counts["violations"] += 1
            continue
        counts["rows"] += 1
        for batch in window.batches:
            batch.data.validate()
    sys.stdout.write(f"\n{counts}\n")
    assert min(counts.values()) > int(rounds) // 50, counts


def dealt(rng: random.Random, messages: list[bytes]) -> Iterator[tuple[list[bytes], bool]]:
    """The messages in parts, and whether each is open, as a reader with little room hands them over: what is
    whole first, else what there is of a transaction."""
    held: list[bytes] = []
    whole, is_open = 0, False
    for one in messages:
        held.append(one)
        if one[:1] == b"B":
            is_open = True
        elif one[:1] == b"C" and len(one) >= 18:
            whole, is_open = len(held), False
        elif one[:1] == b"M" and len(one) >= 10 and not is_open:
            whole = len(held)  # outside of a transaction it is one by itself
        if rng.random() < 0.6:
            continue
        if whole:
            yield held[:whole], False
            del held[:whole]
        if held and is_open:
            yield held, True
            held = []
        whole = 0
    if held:
        yield held, False


def parts_at_the_edge(rounds: str, seed: str = "13") -> None:
    """Decode bent streams in parts: the same rows as at once, or a refusal where that is refused too."""
    guarded, rng, counts = Guarded(), random.Random(int(seed)), {"rows": 0, "violations": 0, "open": 0}
    for n, messages in enumerate(mutants(random.Random(int(seed)), int(rounds))):
        sys.stdout.write(f"{n}\n")
        sys.stdout.flush()
        b, starts = laid_out(messages)
        expected = -1
        try:
            expected = Decoder(describe).decode(guarded.at_end(b), starts, len(messages), ZERO, Lsn(1)).rows
        except ProtocolViolation:
            counts["violations"] += 1
        found, decoder = 0, Decoder(describe)
        try:
            for part, is_open in dealt(rng, messages):
                b, starts = laid_out(part)
                room = (guarded.at_end if n % 2 else guarded.at_start)(b)
                if is_open:
                    window = decoder.decode_part(room, starts, len(part), ZERO)
                    counts["open"] += window is not None
                else:
                    window = decoder.decode(room, starts, len(part), ZERO, Lsn((1 << 64) - 1))
                for batch in window.batches if window else ():
                    batch.data.validate()
                found += window.rows if window else 0
            found = -1 if decoder.inside else found  # its end never came
        except ProtocolViolation:
            found = -1
        assert found == expected, (found, expected)
        counts["rows"] += expected >= 0
    sys.stdout.write(f"\n{counts}\n")
    assert min(counts.values()) > int(rounds) // 50, counts
