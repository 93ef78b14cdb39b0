"""The estimated size of changes is about that of a file with their rows."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from tailrace.tables.size_estimate import SAMPLE_ROWS, SizeEstimate, estimate_bytes
from tailrace.tables.staging import stage
from tests.support.changes import SHOP, changes, delete, insert, record_batches, table_schema, update

WORDS = "the same words again and again " * 4
ROWS = [{"id": n, "name": f"customer {n % 7}", "big": WORDS, "n": n} for n in range(9000)]


def test_the_estimate_is_about_the_size_of_the_rows_file(tmp_path: Path) -> None:
    (file,) = stage(tmp_path, "x", SHOP, record_batches(SHOP, ROWS))
    batch = changes(SHOP, *(insert(n, name=f"customer {n % 7}", big=WORDS, n=n) for n in range(len(ROWS))))
    assert batch.nbytes > 10 * file.size, "in memory they are far larger"
    assert estimate_bytes(SHOP, batch) == pytest.approx(file.size, rel=0.5)


def test_the_estimate_does_not_depend_on_batches() -> None:
    whole = changes(SHOP, *(insert(n, name=f"n{n}", big="b" * 50, n=n) for n in range(3 * SAMPLE_ROWS)))
    estimate = SizeEstimate(SHOP)
    for batch in whole.to_batches(max_chunksize=100):
        estimate.add(batch)
    assert estimate.bytes == pytest.approx(estimate_bytes(SHOP, whole), rel=0.05)


def test_metadata_and_old_rows_do_not_count() -> None:
    plain = changes(SHOP, *(update(n, name="x", big="b", n=1) for n in range(50)))
    with_before = changes(
        SHOP, *(update(n, name="x", big="b", n=1, before={"id": n, "big": "before " * 99}) for n in range(50))
    )
    assert with_before.nbytes > 5 * plain.nbytes
    assert estimate_bytes(SHOP, with_before) == estimate_bytes(SHOP, plain)


def test_no_changes_are_zero_bytes_and_a_delete_is_more() -> None:
    assert estimate_bytes(SHOP, changes(SHOP)) == 0
    assert SizeEstimate(SHOP).bytes == 0
    assert estimate_bytes(SHOP, changes(SHOP, delete(1))) > 0


def test_a_type_that_parquet_lacks_counts_with_its_size_in_memory() -> None:
    odd = table_schema({"id": pa.int64(), "v": pa.month_day_nano_interval()})
    estimate = SizeEstimate(odd)
    estimate.add(
        pa.table([pa.array([1, 2]), pa.array([(1, 2, 3)] * 2, pa.month_day_nano_interval())], names=["id", "v"])
    )
    assert estimate.bytes == 2 * (8 + 16)
