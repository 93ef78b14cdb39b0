"""What changes weigh is about what a file of their rows would: amplification compares like with like."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from tailrace.tables.size_estimate import SAMPLE_ROWS, SizeEstimate, estimate_bytes
from tailrace.tables.staging import stage
from tests.support.changes import SHOP, changes, delete, insert, record_batches, table_schema, update

WORDS = "the same words again and again " * 4
ROWS = [{"id": n, "name": f"customer {n % 7}", "big": WORDS, "n": n} for n in range(9000)]


def test_rows_weigh_about_what_their_file_has(tmp_path: Path) -> None:
    (file,) = stage(tmp_path, "x", SHOP, record_batches(SHOP, ROWS))
    came = changes(SHOP, *(insert(n, name=f"customer {n % 7}", big=WORDS, n=n) for n in range(len(ROWS))))
    assert came.nbytes > 10 * file.size, "in memory they are far larger"
    assert estimate_bytes(SHOP, came) == pytest.approx(file.size, rel=0.5)


def test_added_in_pieces_they_weigh_the_same() -> None:
    came = changes(SHOP, *(insert(n, name=f"n{n}", big="b" * 50, n=n) for n in range(3 * SAMPLE_ROWS)))
    weight = SizeEstimate(SHOP)
    for batch in came.to_batches(max_chunksize=100):
        weight.add(batch)
    assert weight.bytes == pytest.approx(estimate_bytes(SHOP, came), rel=0.05)


def test_what_a_change_says_besides_its_row_weighs_nothing() -> None:
    plain = changes(SHOP, *(update(n, name="x", big="b", n=1) for n in range(50)))
    with_before = changes(
        SHOP, *(update(n, name="x", big="b", n=1, before={"id": n, "big": "before " * 99}) for n in range(50))
    )
    assert with_before.nbytes > 5 * plain.nbytes
    assert estimate_bytes(SHOP, with_before) == estimate_bytes(SHOP, plain)


def test_nothing_weighs_nothing_and_a_delete_something() -> None:
    assert estimate_bytes(SHOP, changes(SHOP)) == 0
    assert SizeEstimate(SHOP).bytes == 0
    assert estimate_bytes(SHOP, changes(SHOP, delete(1))) > 0


def test_a_type_that_no_file_holds_is_weighed_as_it_lies_in_memory() -> None:
    odd = table_schema({"id": pa.int64(), "v": pa.month_day_nano_interval()})
    weight = SizeEstimate(odd)
    weight.add(pa.table([pa.array([1, 2]), pa.array([(1, 2, 3)] * 2, pa.month_day_nano_interval())], names=["id", "v"]))
    assert weight.bytes == 2 * (8 + 16)
