"""COPY's text: the very values the stream would carry, or an error; never a row that is not there."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.capture.postgres.copy import batches_of
from tailrace.errors import SourceError, ValueUnfit
from tailrace.model.schema import TableSchema
from tests.support.changes import table_schema
from tests.support.pgoutput import INT4, TEXT, Sent, decode, transaction

TEXTS = table_schema({"a": pa.string(), "b": pa.string()}, key=("a",))
ESCAPES = {"\\": "\\\\", "\b": "\\b", "\f": "\\f", "\n": "\\n", "\r": "\\r", "\t": "\\t", "\v": "\\v"}


def copied(text: str | None) -> str:
    """A value as COPY writes it."""
    return "\\N" if text is None else re.sub(r"[\\\b\f\n\r\t\v]", lambda found: ESCAPES[found[0]], text)


def line(*texts: str | None) -> str:
    return "\t".join(map(copied, texts)) + "\n"


def read(schema: TableSchema, *pieces: str) -> list[dict[str, Any]]:
    """The rows of the pieces, each in a buffer with room behind it that must not matter."""
    laid = [np.frombuffer(piece.encode() + b"9\t\n\\", np.uint8).copy() for piece in pieces]
    rows = []
    for batch in batches_of(schema, [(buffer, buffer.size - 4) for buffer in laid]):
        assert batch.schema.equals(pa.schema(schema.row_fields()))
        batch.validate(full=True)
        rows += batch.to_pylist()
    return rows


def test_every_escape_is_undone() -> None:
    for plain, escaped in ESCAPES.items():
        assert read(TEXTS, f"x{escaped}y\t{escaped}\n") == [{"a": f"x{plain}y", "b": plain}]


def test_null_is_not_the_text_that_stands_for_it() -> None:
    assert read(TEXTS, "\\N\t\\\\N\n") == [{"a": None, "b": "\\N"}]
    assert read(TEXTS, "\t\\N\n") == [{"a": "", "b": None}]


def test_an_escaped_backslash_does_not_escape_what_follows() -> None:
    assert read(TEXTS, line("\\n", "\\\\t")) == [{"a": "\\n", "b": "\\\\t"}]


def test_several_pieces_are_several_batches_in_order() -> None:
    assert [row["a"] for row in read(TEXTS, line("1", "") + line("2", ""), line("3", ""))] == ["1", "2", "3"]


def test_the_end_of_the_data_is_no_row() -> None:
    assert read(TEXTS, line("\\.", ".")) == [{"a": "\\.", "b": "."}]


@pytest.mark.parametrize(
    "broken",
    ["a\n", "a\tb\tc\n", "a\tb\na\n", "a\tb", "a\tb\nc", "a\tb\nc\t", "a\tb\n\\N", "\n", "a\tb\n\\", "\\Na\tb\n",
     "a\t\\N\\N\n"],
)
def test_a_line_that_is_not_a_row_is_refused(broken: str) -> None:
    with pytest.raises(SourceError, match="cannot be read"):
        read(TEXTS, broken)


def test_a_row_of_one_column_that_is_cut_is_refused() -> None:
    single = table_schema({"a": pa.string()}, key=("a",))
    assert read(single, "1\n2\n\n") == [{"a": "1"}, {"a": "2"}, {"a": ""}]
    with pytest.raises(SourceError, match="cannot be read"):
        read(single, "1\n2")


def test_a_value_that_does_not_fit_stops_the_load_and_is_not_shown() -> None:
    schema = table_schema({"id": pa.int32(), "price": pa.decimal128(6, 2)})
    with pytest.raises(ValueUnfit) as caught:
        read(schema, "1\t12.50\n2\tNaN\n")
    assert caught.value.fields["column"] == "price"
    assert "NaN" not in str(caught.value)


def test_a_column_named_like_one_of_ours_keeps_its_name() -> None:
    schema = table_schema({"_op": pa.string(), "_seq": pa.int32()}, key=("_seq",))
    assert read(schema, "x\t7\n") == [{"_op": "x", "_seq": 7}]


PLAIN = st.none() | st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=20)


@given(st.lists(st.tuples(PLAIN, PLAIN), max_size=10))
@settings(deadline=None)
def test_every_text_survives(rows: list[tuple[str | None, str | None]]) -> None:
    found = read(TEXTS, "".join(line(*row) for row in rows))
    assert [(row["a"], row["b"]) for row in found] == rows


@given(PLAIN)
@settings(deadline=None)
def test_snapshot_and_stream_read_the_same_text_alike(text: str | None) -> None:
    table = Sent(oid=1, name="things", columns=(("id", INT4, -1), ("b", TEXT, -1)))
    (batch,) = decode(transaction(table.relation(), table.insert(1, text))).batches
    streamed = {name: batch.data.column(name)[0].as_py() for name in ("id", "b")}
    assert read(batch.schema, line("1", text)) == [streamed]
