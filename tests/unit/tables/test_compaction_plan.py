"""Only files of one size are compacted together, and each row is rewritten seldom."""

from __future__ import annotations

import itertools
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from tailrace.tables.compaction_plan import ESTIMATE_ROWS_MIN, FILES_MIN, STEPS, files_to_compact, rows_per_file
from tailrace.tables.delta.table import DeltaRsTable
from tests.support.changes import SHOP, record_batches
from tests.support.mirrors import LOG, at

MIB = 1 << 20
AIM = 128 * MIB


@pytest.mark.parametrize(
    ("sizes", "compacted"),
    [
        ([], 0),
        ([1000] * (FILES_MIN - 1), 0),
        ([1000] * FILES_MIN, FILES_MIN),
        ([1000] * 100, 100),
        ([1000] * 3 + [MIB] * 4 + [10 * MIB] * 4, 0),
        ([1000] * 3 + [MIB // 2] * FILES_MIN, FILES_MIN),
        ([40 * MIB] * FILES_MIN, 3),
        ([100 * MIB] * 100, 0),
    ],
)
def test_files_are_compacted_with_others_of_their_size(sizes: list[int], compacted: int) -> None:
    assert len(files_to_compact({str(number): size for number, size in enumerate(sizes)}, AIM)) == compacted


def test_a_row_is_rewritten_at_most_once_per_step() -> None:
    written, files, names = 0, dict[str, int](), itertools.count()
    for _ in range(40_000):
        files[str(next(names))] = 4_000
        while chosen := files_to_compact(files, AIM):
            merged = sum(files.pop(name) for name in chosen)
            files[str(next(names))] = merged
            written += merged
    assert sum(files.values()) == 160_000_000
    assert written <= (STEPS + 1) * sum(files.values())
    assert len(files) < FILES_MIN * (STEPS + 1) + sum(files.values()) // (AIM // 2) + 1


def test_files_are_compacted_within_their_partition_and_not_too_many_at_once() -> None:
    parts = {f"{p}-{n}": {"p": pa.scalar(p)} for p in ("a", "b", "c", "few") for n in range(4 if p == "few" else 9)}
    sizes = dict.fromkeys(parts, AIM // 10)
    compacted = files_to_compact(sizes, AIM, parts)
    assert {name[0] for name in compacted} == {"a", "b"}
    assert len(compacted) == 18
    assert files_to_compact({name: size for name, size in sizes.items() if name.startswith("few")}, AIM, parts) == []


def test_rows_per_file_are_estimated_once_a_table_has_enough_rows(tmp_path: Path) -> None:
    def estimated(count: int) -> int:
        rows = [{"id": i, "big": f"large {i}"} for i in range(count)]
        DeltaRsTable(tmp_path, LOG).load(SHOP, record_batches(SHOP, rows), at(0))
        return rows_per_file(DeltaTable(str(tmp_path)), MIB)

    assert estimated(0) == 0
    assert estimated(ESTIMATE_ROWS_MIN - 1) == 0, "a small file is mostly header and footer"
    many = estimated(ESTIMATE_ROWS_MIN)
    (size,) = (file.stat().st_size for file in tmp_path.glob("*.parquet") if file.name in names(tmp_path))
    assert many == MIB * ESTIMATE_ROWS_MIN // size


def names(folder: Path) -> set[str]:
    return {Path(uri).name for uri in DeltaTable(str(folder)).file_uris()}
