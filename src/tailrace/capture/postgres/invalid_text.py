"""Handling of bytes that are not text, which a database without an encoding may hold.

Any other server has checked every text when it was written, and converts it. One whose encoding is SQL_ASCII stores any
bytes and sends them unchanged. There, a value that is not UTF-8 does not fit its column; or, if the settings say so,
each unreadable byte is replaced by a character.
"""

from __future__ import annotations

import enum
from typing import Any

import numpy as np
import pyarrow as pa
from psycopg.pq.abc import PGconn

from tailrace.capture.postgres.connect import has_no_encoding
from tailrace.capture.postgres.values import ConvertedColumn

TEXT_HINT = (
    "The value is not UTF-8, which a SQL_ASCII database does not check. Correct it at the source, or set "
    "`source.invalid_text: replace`, then run again: the table is reloaded."
)


class TextHandling(enum.Enum):
    """The handling of the texts that a server sends."""

    SOUND = enum.auto()
    """All are UTF-8."""
    REFUSED = enum.auto()
    """A text that is not UTF-8 does not fit its column."""
    REPLACED = enum.auto()
    """In a text that is not UTF-8, `�` replaces what cannot be read."""


def text_handling_of(connection: PGconn, *, replaced: bool) -> TextHandling:
    """Return how to handle this server's texts."""
    if not has_no_encoding(connection):
        return TextHandling.SOUND
    return TextHandling.REPLACED if replaced else TextHandling.REFUSED


def check_text(typed: ConvertedColumn, text: TextHandling) -> ConvertedColumn:
    """Return the column with only valid texts."""
    kind = typed.column.type
    of_list = pa.types.is_list(kind) and pa.types.is_string(kind.value_type)
    if text is TextHandling.SOUND or not (of_list or pa.types.is_string(kind)):
        return typed
    try:
        typed.column.validate(full=True)
    except pa.ArrowInvalid:
        return _mended(typed, text)
    return typed


def _mended(typed: ConvertedColumn, text: TextHandling) -> ConvertedColumn:
    """Check the values one by one. It happens rarely, and in databases of a rare kind."""
    kind = typed.column.type
    plain = typed.column.cast(pa.list_(pa.binary()) if pa.types.is_list(kind) else pa.binary())
    texts, unfit = [], set(typed.unfit.tolist())
    for row, value in enumerate(plain.to_pylist()):
        try:
            texts.append(_decoded(value, "replace" if text is TextHandling.REPLACED else "strict"))
        except UnicodeDecodeError:
            texts.append(None)
            unfit.add(row)
    return ConvertedColumn(pa.array(texts, kind), np.array(sorted(unfit), np.int64))


def _decoded(value: Any, errors: str) -> Any:
    if isinstance(value, list):
        return [_decoded(item, errors) for item in value]
    return value if value is None else value.decode(errors=errors)
