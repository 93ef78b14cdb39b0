"""Loads or compiles every kernel by using it once, on bytes made here. No server is needed.

`make setup` calls this so that the first capture does not wait for the compiler.
"""

from __future__ import annotations

import struct

import numpy as np
import pyarrow as pa

from tailrace.capture.postgres import copy_binary, decode, wire
from tailrace.model.position import ZERO, Lsn
from tailrace.model.schema import Column, Identity, TableId, TableSchema

_TEXTS: list[tuple[pa.DataType, bytes]] = [
    (pa.int64(), b"1"), (pa.int32(), b"1"), (pa.int16(), b"1"), (pa.bool_(), b"t"), (pa.float64(), b"1.5"),
    (pa.float32(), b"1.5"), (pa.string(), b"x"), (pa.binary(), b"\\x01"), (pa.decimal128(12, 2), b"1.25"),
    (pa.date32(), b"2026-01-02"), (pa.timestamp("us"), b"2026-01-02 03:04:05.6"),
    (pa.timestamp("us", "UTC"), b"2026-01-02 03:04:05.6+00"), (pa.list_(pa.int32()), b"{1,NULL}"),
    (pa.list_(pa.string()), b'{a,"b c"}'),
]  # fmt: skip


def _schema() -> TableSchema:
    columns = tuple(Column(name=f"c{n}", source_type=str(kind), type=kind) for n, (kind, _) in enumerate(_TEXTS))
    return TableSchema(
        table=TableId("public", "warm"), relation=1, columns=columns, key=("c0",), identity=Identity.FULL
    )


def _tuple(mark: bytes, first: bytes) -> bytes:
    values = [first] + [text for _, text in _TEXTS[1:]]
    cells = b"".join(b"t" + struct.pack(">I", len(value)) + value for value in values)
    # The last value is not sent, as the server does with a large value that did not change.
    return mark + struct.pack(">H", len(values)) + cells


def _messages() -> list[bytes]:
    old, new = _tuple(b"O", b"1"), _tuple(b"N", b"2")
    unsent = new[: new.rindex(b"t" + struct.pack(">I", len(_TEXTS[-1][1])))] + b"u"
    relation = struct.pack(">I", 1)
    return [
        b"B" + struct.pack(">QQI", 1, 1, 7),
        b"R" + relation,
        b"I" + relation + _tuple(b"N", b"1"),
        b"U" + relation + unsent,
        b"U" + relation + old + new,
        b"D" + relation + old,
        b"T" + struct.pack(">IBI", 1, 0, 1),
        b"M" + struct.pack(">BQ2sI", 1, 1, b"m", 0),
        b"C" + struct.pack(">BQQQ", 0, 1, 2, 1),
    ]


def _copy() -> bytes:
    cells = b"".join(struct.pack(">I", len(text)) + text for _, text in _TEXTS)
    return copy_binary.SIGNATURE + bytes(8) + struct.pack(">H", len(_TEXTS)) + cells + b"\xff\xff"


def warm_kernels() -> None:
    """Compile or load every kernel of the PostgreSQL capture in this process."""
    schema, messages = _schema(), _messages()
    starts = np.zeros(1024, np.int64)
    starts[1 : len(messages) + 1] = np.cumsum([len(message) for message in messages])
    b = np.frombuffer(b"".join(messages), np.uint8).copy()
    window = decode.Decoder(lambda _: [schema]).decode(b, starts, len(messages), ZERO, Lsn(2))
    assert window.rows == 7, window.rows
    # The kind of a column is data: a kernel that reads one kind reads all.
    rows = copy_binary.BinaryRows(schema, [copy_binary.PRINTED] * len(_TEXTS))
    copied = np.frombuffer(_copy(), np.uint8).copy()
    assert [batch.num_rows for batch in rows.batches([(copied, copied.size)])] == [1]
    wire.warm()
