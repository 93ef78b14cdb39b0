"""What is attacked, and what must hold whatever the bytes are.

A target takes an input and gives an outcome: a digest of the rows, or the code of the error that a user would see.
Whatever else is raised is a finding. The same input must give the same outcome in every engine (compiled, compiled
with bounds checks, interpreted) and wherever its bytes lie; see `judge` for that, and for crashes, hangs and memory.
What is checked here is what rows must be: whole Arrow arrays, no more of them than the bytes can hold, the same in
parts as at once, and no value that depends on its neighbours.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import itertools
import math
import random
import struct
import uuid
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pyarrow as pa

from tailrace.capture.postgres import decode as decoding
from tailrace.capture.postgres import stream, values, wire
from tailrace.capture.postgres.catalogue import parse_relation
from tailrace.capture.postgres.copy_binary import (
    BOOL,
    DATE,
    DECIMAL,
    FLOAT4,
    FLOAT8,
    INSTANT,
    INT2,
    INT4,
    INT8,
    JSONB,
    OID,
    PRINTED,
    UUID,
    BinaryRows,
    binary_kind,
)
from tailrace.capture.postgres.decode import Decoder
from tailrace.capture.postgres.invalid_text import TextHandling, check_text
from tailrace.capture.postgres.types import arrow_type
from tailrace.capture.postgres.values import ABSENT, NULL, Bytes, Cells
from tailrace.errors import SourceError, TableError, Unsupported, ValueUnfit
from tailrace.model import change
from tailrace.model.batch import ChangeBatch, Window
from tailrace.model.position import ZERO, Lsn
from tailrace.model.schema import Column
from tests.fuzz.frames import LENGTH_MAX, frames, pieces
from tests.support.fuzzing import dealt
from tests.support.guarded import Guarded
from tests.support.pgcopy import END, HEAD
from tests.support.pgoutput import describe, describe_one, laid_out
from tests.support.typecases import UNFIT, bits_of, plain

Place = Callable[[bytes], Bytes]
"""Where a target's bytes are put: against a page that must not be touched, if crashes are looked for."""
Target = Callable[[bytes, Place], bytes]

ROW_BYTES_MIN = 4
"""What the smallest row takes on the wire: a table's number in a truncate."""
LAST = Lsn((1 << 64) - 1)
ANYHOW = 192
"""From here on the input's first byte asks for parts that no reader makes."""
TEXTS = tuple(TextHandling)
AFTER = (0, 0, 0, 0, 1, 0x100, 0x1FF, 0x1000000, 1 << 63, (1 << 64) - 1)
"""Positions that a stream is read from, by the input's second byte."""


def outcome(run: Callable[[], Iterable[bytes]]) -> bytes:
    """A digest of what was made, or the error's code and words."""
    digest = hashlib.blake2b(digest_size=12)
    try:
        for part in run():
            digest.update(part)
    except (SourceError, TableError, Unsupported) as error:  # a `ConfigError` would send the user to the wrong place
        return f"{error.code}: {error.message}".encode()
    return b"rows " + digest.hexdigest().encode()


# --- messages ----------------------------------------------------------------------------------------------


def decode(data: bytes, place: Place) -> bytes:
    """A byte that says where to cut, one that says where to begin and what is known of texts, and messages as the
    reader lays them out."""
    seed, after, text = _head(data)
    messages = pieces(data[2:])
    once = outcome(lambda: _decoded(_whole(messages, after, place, text), data, text))
    if seed >= ANYHOW:
        outcome(lambda: _decoded(_anyhow(messages, after, place, text, seed), data, text))
        return once
    with small_batches() if seed % 2 else contextlib.nullcontext():
        parts = outcome(lambda: _decoded(_in_parts(messages, after, place, text, seed), data, text))
    # A transaction that ends elsewhere than its beginning said is judged by its end if it is whole, and refused
    # if it came in parts. That matters only where some are dropped.
    assert parts == once or not (_is_rows(parts) or (_is_rows(once) and not after.value)), (once, parts)
    return once


@contextlib.contextmanager
def small_batches() -> Iterator[None]:
    """Batches are cut for their size, as they would be where there are millions of values."""
    limits = decoding.BATCH_CELLS_MAX, decoding.BATCH_BYTES_MAX
    decoding.BATCH_CELLS_MAX, decoding.BATCH_BYTES_MAX = 8, 128
    try:
        yield
    finally:
        decoding.BATCH_CELLS_MAX, decoding.BATCH_BYTES_MAX = limits


def _head(data: bytes) -> tuple[int, Lsn, TextHandling]:
    seed, how = (data[:2] + bytes(2))[:2]
    return seed, Lsn(AFTER[how % len(AFTER)]), TEXTS[how // len(AFTER) % len(TEXTS)]


def _is_rows(found: bytes) -> bool:
    return found.startswith(b"rows ")


def _wanted(prefix: str) -> bool:
    """Messages of applications are kept or not by their prefix: here some of each."""
    return len(prefix) % 4 != 3


def _whole(messages: list[bytes], after: Lsn, place: Place, text: TextHandling) -> Iterator[Window]:
    b, starts = laid_out(messages)
    yield Decoder(describe, wanted=_wanted, text=text).decode(place(b), starts, len(messages), after, LAST)


def _in_parts(messages: list[bytes], after: Lsn, place: Place, text: TextHandling, seed: int) -> Iterator[Window]:
    decoder = Decoder(describe, wanted=_wanted, text=text)
    for part, is_open in dealt(random.Random(seed), messages):
        b, starts = laid_out(part)
        if is_open:
            window = decoder.decode_part(place(b), starts, len(part), after)
            if window is not None:
                yield window
        else:
            yield decoder.decode(place(b), starts, len(part), after, LAST)
    if decoder.inside:
        yield from _whole([b"?"], after, place, text)  # its end never came: refused, as it is at once


def _anyhow(messages: list[bytes], after: Lsn, place: Place, text: TextHandling, seed: int) -> Iterator[Window]:
    """In parts that no reader makes: cut anywhere, and what is called open need not be."""
    decoder, rng = Decoder(describe, wanted=_wanted, text=text), random.Random(seed)
    while messages:
        cut = rng.randrange(1, len(messages) + 1)
        b, starts = laid_out(messages[:cut])
        if rng.random() < 0.6:
            window = decoder.decode_part(place(b), starts, cut, after)
            if window is not None:
                yield window
        else:
            yield decoder.decode(place(b), starts, cut, after, max(after, Lsn(rng.choice(AFTER))))
        messages = messages[cut:]


def _decoded(windows: Iterable[Window], data: bytes, text: TextHandling) -> Iterator[bytes]:
    """What the windows hold, in a form that does not depend on where one ended and the next began."""
    batches: dict[Any, list[ChangeBatch]] = {}
    rows = 0
    for window in windows:
        rows += window.rows
        check_window(window, data, text)
        for batch in window.batches:
            batches.setdefault(repr(batch.schema), []).append(batch)
    assert rows * ROW_BYTES_MIN <= len(data), "more rows than the bytes can hold"
    for shape in sorted(batches):
        yield shape.encode()
        completed = [batch.with_all_columns() for batch in batches[shape]]
        for place, field in enumerate(completed[0].schema):
            if field.name not in (change.SEQ, change.POSITION):
                yield content(pa.concat_arrays([batch.column(place) for batch in completed]))
    counts = [(len(one), one.moves, one.truncates, one.unfit) for some in batches.values() for one in some]
    yield np.array(counts, np.int64).reshape(-1, 4).sum(axis=0).tobytes()


def check_window(window: Window, data: bytes, text: TextHandling) -> None:
    """A window says how many rows it has, numbers them from zero, and every one can be read."""
    numbers = [batch.data.column(change.SEQ).to_numpy() for batch in window.batches]
    assert sum(map(len, window.batches)) == window.rows
    if numbers:
        assert (np.sort(np.concatenate(numbers)) == np.arange(window.rows)).all(), "rows are not in order"
    for batch in window.batches:
        assert (np.diff(batch.data.column(change.SEQ).to_numpy()) > 0).all(), "a batch is not in order"
        check_whole(pa.StructArray.from_arrays(batch.data.columns, fields=list(batch.data.schema)), data, text)
        for name in (change.OP, change.TX, change.TX_INDEX, change.COMMITTED_AT):
            assert not batch.data.column(name).null_count


def check_whole(array: pa.Array, data: bytes, text: TextHandling) -> None:
    """Every offset lies inside, every text is UTF-8, unless texts are not checked and the input has one that is not."""
    array.validate()
    try:
        array.validate(full=True)
    except pa.ArrowInvalid as error:
        if "UTF8" not in str(error) or text is not TextHandling.SOUND:
            raise
        plain = data.replace(b"\\", b"")
        for column in _texts(array):
            raw = column.cast(pa.binary()).to_pylist()
            assert all(_is_utf8(one) or one.replace(b"\\", b"") in plain for one in raw if one is not None)


def _texts(array: pa.Array) -> Iterator[pa.Array]:
    if pa.types.is_struct(array.type):
        for child in array.flatten():
            yield from _texts(child)
    elif pa.types.is_list(array.type):
        yield from _texts(array.flatten())
    elif pa.types.is_string(array.type):
        yield array


def _is_utf8(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


def content(array: pa.Array) -> bytes:
    """What the array says, whatever its buffers look like: nulls, lengths and the bytes of every value."""
    head, kept = struct.pack(">q", len(array)), array
    if array.null_count:
        head, kept = head + array.is_valid().to_numpy(zero_copy_only=False).tobytes(), array.drop_null()
    if pa.types.is_struct(array.type):
        return head + b"".join(content(child) for child in array.flatten())
    if pa.types.is_boolean(array.type):
        return head + bytes(kept.to_numpy(zero_copy_only=False).tobytes())
    if pa.types.is_fixed_size_binary(array.type) or not _has_offsets(array.type):
        width = array.type.bit_width // 8
        begin, end = kept.offset * width, (kept.offset + len(kept)) * width
        return head + (kept.buffers()[1].to_pybytes()[begin:end] if len(kept) else b"")
    offsets = np.frombuffer(kept.buffers()[1], np.int32)[kept.offset : kept.offset + len(kept) + 1]
    head += np.diff(offsets).tobytes()
    if pa.types.is_list(array.type):
        return head + content(kept.flatten())
    return head + (kept.buffers()[2].to_pybytes()[offsets[0] : offsets[-1]] if len(kept) else b"")


def _has_offsets(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_binary(kind) or pa.types.is_list(kind))


# --- values ------------------------------------------------------------------------------------------------


def value(data: bytes, place: Place) -> bytes:
    """A type's number and modifier, then texts; two lengths stand for a null and for a value not sent."""
    number, modifier = struct.unpack(">Ii", (data[:8] + bytes(8))[:8])
    cells = frames(data[8:])
    return outcome(lambda: _column(number, modifier, cells, data, place))


def _column(number: int, modifier: int, cells: list[tuple[int, bytes]], data: bytes, place: Place) -> Iterator[bytes]:
    kind = arrow_type(number, modifier)
    found = _typed(kind, cells, place)
    check_whole(found.column, data, TextHandling.SOUND)
    missing = np.array([length > LENGTH_MAX for length, _ in cells], bool)
    assert found.column.type == kind
    assert len(found.column) == len(cells)
    assert found.column.null_count == missing.sum() + found.unfit.size
    assert not missing[found.unfit].any(), "a null fits every type"
    for text in TEXTS:
        checked = check_text(found, text)
        check_whole(checked.column, data, text)
        assert checked.column.null_count == missing.sum() + checked.unfit.size
        yield checked.unfit.tobytes()
        yield content(checked.column)
    if len(cells) > 1:
        for row, cell in enumerate(cells):
            alone = _typed(kind, [cell], place)
            assert bool(alone.unfit.size) == (row in found.unfit), "a value depends on its neighbours"
            here = found.column[row : row + 1]
            assert content(alone.column) == content(here), "a value depends on its neighbours"


def _typed(kind: pa.DataType, cells: list[tuple[int, bytes]], place: Place) -> values.ConvertedColumn:
    size = np.array([len(text) for _, text in cells], np.int64)
    at = np.cumsum(size) - size
    for row, (length, _) in enumerate(cells):
        if length > LENGTH_MAX:
            size[row] = NULL if length == LENGTH_MAX + 2 else ABSENT
    return values.convert_cells(Cells(place(b"".join(text for _, text in cells)), at, size), kind)


# --- a copy ------------------------------------------------------------------------------------------------


def copy(data: bytes, place: Place) -> bytes:
    """A relation message, which says what the table looks like, and COPY's bytes for the rest. The highest bits of
    the message's length say what is known of texts."""
    head = int.from_bytes(data[:2], "big")
    length = head & 0x3FFF
    text = TEXTS[(head >> 14) % len(TEXTS)]
    return outcome(lambda: _copied(data[2 : 2 + length], data[2 + length :], place, text))


def _copied(relation: bytes, data: bytes, place: Place, text: TextHandling) -> Iterator[bytes]:
    schema = describe_one(relation)
    types = [(number, modifier) for _, number, modifier in parse_relation(relation)[3]]
    kinds = [binary_kind(*of, column.type) for of, column in zip(types, schema.columns, strict=True)]
    assert _drained([data[at : at + 40] for at in range(0, len(data), 40)], place) == data
    cuts, ended = _row_cuts(data, len(kinds))
    expected = None if cuts is None else [_cells(data[at:end]) for at, end in itertools.pairwise(cuts)]
    columns = [[row[number] for row in expected or []] for number in range(len(kinds))]
    wanted = [_meant(kind, column, cells) for kind, column, cells in zip(kinds, schema.columns, columns, strict=True)]
    if any(_REFUSED in column for column in wanted):
        expected = None
    try:
        batches = list(BinaryRows(schema, kinds, text).batches([(place(data), len(data))]))
    except ValueUnfit:
        assert expected is not None
        # What a type's text holds, and whether it is any, is for other targets.
        assert any(UNFIT in column for column in wanted) or PRINTED in kinds or text is TextHandling.REFUSED
        raise
    except SourceError:
        assert expected is None or not ended, "a copy was refused that can be read"
        raise
    assert cuts is not None
    assert expected is not None, "a copy was read that must be refused"
    assert ended, "a copy was read that has no end"
    assert [batch.num_rows for batch in batches] == ([len(expected)] if expected else [])
    yield str(len(expected)).encode()
    pieces = [data[at:end] for at, end in itertools.pairwise([0, *cuts[1::2], len(data)])]
    # One after the other: all are put in the same place.
    parted = list(BinaryRows(schema, kinds, text).batches((place(piece), len(piece)) for piece in pieces))
    for number, column in enumerate(schema.columns if batches else ()):
        array = batches[0].column(number)
        check_whole(array, b"\0".join(one or b"" for one in columns[number]), text)
        assert content(pa.concat_arrays([batch.column(number) for batch in parted])) == content(array)
        if kinds[number] != PRINTED and (text is not TextHandling.REPLACED or not pa.types.is_string(column.type)):
            assert plain(array) == wanted[number]
        yield content(array)


def _drained(messages: list[bytes], place: Place) -> bytes:
    """The bytes as the reader of a copy lays them out, in a buffer that is too small for some messages."""
    found, buffer, server, state = b"", place(bytes(36)), _server(), np.zeros(wire.STATE_SIZE, np.int64)
    server.begin(messages)
    for _ in range(4 + 2 * len(messages)):
        why = wire.drain_copy(server.functions, 0, buffer, state, 32)
        found += buffer[: int(state[wire.BYTES])].tobytes()
        if why == wire.FULL and not state[wire.BYTES]:
            buffer = np.empty(int(state[wire.PENDING_SIZE]) * 2, np.uint8)
        state[wire.BYTES] = 0
        if why == wire.DRY:
            break
    assert server.settled, "a row was lost or kept"
    return found


# COPY's bytes read another way, slowly.


def _row_cuts(data: bytes, columns: int) -> tuple[list[int] | None, bool]:
    """Where the first row begins and where each ends, None if it must be refused; and whether all rows are there."""
    if not data.startswith(HEAD[:-4]) or len(data) < len(HEAD):
        return None, False
    cuts = [len(HEAD) + int.from_bytes(data[15:19], "big")]
    if cuts[0] > len(data):
        return None, False
    while data[cuts[-1] :] not in (END, b""):
        at = cuts[-1] + 2
        if data[at - 2 : at] != columns.to_bytes(2, "big"):
            return None, False
        for _ in range(columns):
            length = int.from_bytes(data[at : at + 4], "big")
            at += 4 + (0 if length == 0xFFFFFFFF else length)
            if at > len(data):
                return None, False
        cuts.append(at)
    return cuts, cuts[-1] < len(data)


def _cells(row: bytes) -> list[bytes | None]:
    found: list[bytes | None] = []
    at = 2
    while at < len(row):
        length = int.from_bytes(row[at : at + 4], "big", signed=True)
        found.append(row[at + 4 : at + 4 + length] if length >= 0 else None)
        at += 4 + max(length, 0)
    return found


_REFUSED = object()
"""What no server sends."""
_SIZES = {BOOL: 1, INT2: 2, INT4: 4, INT8: 8, OID: 4, FLOAT4: 4, FLOAT8: 8, DATE: 4, INSTANT: 8, UUID: 16}
_DAYS, _DAY = 10_957, 86_400_000_000
_INFINITE = {
    DATE: {2**31 - 1: 2_932_896, -(2**31): -719_162},
    INSTANT: {2**63 - 1: 2_932_897 * _DAY - 1, -(2**63): -719_162 * _DAY},
}


def _meant(kind: int, column: Column, cells: list[bytes | None]) -> list[Any]:
    return [None if cell is None else _one_meant(kind, column.type, cell) for cell in cells]


def _one_meant(kind: int, wanted: pa.DataType, cell: bytes) -> Any:
    """A value as `plain` has it, or that it does not fit, or that it is none."""
    if len(cell) != _SIZES.get(kind, len(cell)):
        return _REFUSED
    number = int.from_bytes(cell, "big", signed=kind != OID)
    if kind == BOOL:
        return number != 0
    if kind in (INT2, INT4, INT8, OID):
        return number
    if kind in (DATE, INSTANT):
        limit, later = (2**31, _DAYS) if kind == DATE else (2**63, _DAYS * _DAY)
        number = _INFINITE[kind].get(number, number + later)
        return number if number < limit else UNFIT
    if kind in (FLOAT4, FLOAT8):
        (found,) = struct.unpack(">f" if kind == FLOAT4 else ">d", cell)
        return bits_of(found if found == found else math.nan)
    if kind == DECIMAL:
        return _number(wanted, cell)
    if kind == UUID:
        return str(uuid.UUID(bytes=cell)).encode()
    if kind == JSONB:
        return cell[1:] if cell[:1] == b"\1" else _REFUSED
    return cell


def _number(wanted: pa.Decimal128Type, cell: bytes) -> Any:
    if len(cell) < 8 or len(cell) != 8 + 2 * int.from_bytes(cell[:2], "big"):
        return _REFUSED
    weight, sign, places, *digits = struct.unpack(f">hHH{len(cell) // 2 - 4}H", cell[2:])
    if sign not in (0, 0x4000) or places > wanted.scale:
        return UNFIT
    last = weight - len(digits) + 1
    if digits and 4 * last + wanted.scale <= -4:
        return UNFIT
    if any(digit >= 10_000 for digit in digits):
        return _REFUSED
    whole = sum(digit * 10_000**n for n, digit in enumerate(reversed(digits)))
    scaled = whole * Fraction(10) ** (4 * min(last, 100) + wanted.scale)
    if scaled.denominator != 1 or scaled >= 10**wanted.precision:
        return UNFIT
    return int(scaled) * (-1 if sign else 1)


# --- the wire ----------------------------------------------------------------------------------------------


class Server:
    """Stands in for libpq: hands out what a server might send, one message at a time, each against a page that
    must not be read, and counts that all of them are given back."""

    def __init__(self, room: Place) -> None:
        self._room = room
        self._messages: list[bytes] = []
        self._lent = 0
        self.end = ZERO
        """How far the last reader came."""
        word = ctypes.c_int64
        self._keep = (
            ctypes.CFUNCTYPE(word, word, word, word)(self._get),
            ctypes.CFUNCTYPE(word, word, word, word)(self._read),
            ctypes.CFUNCTYPE(word, word, word, word)(self._free),
        )
        addresses = [ctypes.cast(function, ctypes.c_void_p).value for function in self._keep]
        memcpy = ctypes.cast(ctypes.CDLL(None).memcpy, ctypes.c_void_p).value
        self.functions = np.array([*addresses, memcpy], np.int64)

    def begin(self, messages: list[bytes]) -> None:
        self._messages, self._lent = messages[::-1], 0

    @property
    def settled(self) -> bool:
        """Whether everything was taken and given back."""
        return not self._messages and not self._lent

    def _get(self, connection: int, out: int, asynchronous: int) -> int:
        if not self._messages:
            return 0
        message = self._messages.pop()
        self._lent += 1
        ctypes.c_int64.from_address(out).value = self._room(message).ctypes.data
        return len(message)

    def _read(self, connection: int, unused: int, either: int) -> int:
        return 1

    def _free(self, address: int, unused: int, either: int) -> int:
        self._lent -= 1
        return 0


@functools.cache
def _server() -> Server:
    return Server(Guarded().at_end)


ROOMS = (64, 8, 256, 1024)
"""How large the reader's buffer is at first: small enough that it has to grow."""


def read(data: bytes, place: Place) -> bytes:
    """What a server sends, message by message, read and decoded as the stream does it."""
    seed, after, text = _head(data)
    messages = pieces(data[2:])
    little, ample = ROOMS[seed % len(ROOMS)], 1 << 16
    found = outcome(lambda: _told(_read(messages, after, place, text, little), data, text))
    at_once = outcome(lambda: _told(_read(messages, after, place, text, ample), data, text))
    assert found == at_once or not (_is_rows(found) or _is_rows(at_once)), (found, at_once)
    return at_once


def _told(windows: Iterable[Window], data: bytes, text: TextHandling) -> Iterator[bytes]:
    """What the windows hold, and how far the reader has come."""
    yield from _decoded(windows, data, text)
    yield str(_server().end).encode()


def _read(messages: list[bytes], after: Lsn, place: Place, text: TextHandling, room: int) -> Iterator[Window]:
    decoder, buffer, server = Decoder(describe, wanted=_wanted, text=text), _buffer(place(bytes(room))), _server()
    server.begin(messages)
    for _ in range(64 + 4 * len(messages)):
        filled = int(buffer.state[wire.BYTES])
        why = wire.drain_messages(server.functions, 0, buffer.bytes, buffer.starts, buffer.state, filled + room)
        if why == wire.FULL:
            buffer.make_room()
        if not buffer.whole:
            if why == wire.DRY:
                break
            continue
        size, count = buffer.offered
        end = max(after, buffer.end)
        yield decoder.decode(buffer.bytes[:size], buffer.starts, count, after, end)
        following = _buffer(np.empty(64, np.uint8))
        following.take_rest(buffer)
        buffer = following
    assert server.settled, "a message was lost or kept"
    server.end = buffer.end


def _buffer(room: Bytes) -> stream._MessageBuffer:
    """As the reader's, but not megabytes at once."""
    buffer = object.__new__(stream._MessageBuffer)
    buffer.bytes, buffer.starts = room, np.zeros(2 + room.size // 32, np.int64)
    buffer.state = np.zeros(wire.STATE_SIZE, np.int64)
    return buffer


TARGETS: dict[str, Target] = {"decode": decode, "value": value, "copy": copy, "read": read}
