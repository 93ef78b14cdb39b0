"""Which files are joined: those of one size, and each row seldom."""

from __future__ import annotations

import itertools
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from tailrace.tables.compaction_plan import FILES_MIN, STEPS, ESTIMATE_ROWS_MIN, files_to_compact, rows_per_file
from tailrace.tables.delta.table import DeltaRsTable
from tests.support.changes import SHOP, record_batches
from tests.support.mirrors import LOG, at

MIB = 1 << 20
AIM = 128 * MIB


@pytest.mark.parametrize(
    ("sizes", "joined"),
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
def test_files_are_joined_with_others_of_their_size(sizes: list[int], joined: int) -> None:
    assert len(files_to_compact({str(number): size for number, size in enumerate(sizes)}, AIM)) == joined


def test_a_row_is_written_anew_once_a_step_at_most() -> None:
    written, files, names = 0, dict[str, int](), itertools.count()
    for _ in range(40_000):
        files[str(next(names))] = 4_000
        while some := files_to_compact(files, AIM):
            made = sum(files.pop(name) for name in some)
            files[str(next(names))] = made
            written += made
    assert sum(files.values()) == 160_000_000
    assert written <= (STEPS + 1) * sum(files.values())
    assert len(files) < FILES_MIN * (STEPS + 1) + sum(files.values()) // (AIM // 2) + 1


def test_files_are_joined_with_others_of_their_partition_alone_and_not_too_much_at_once() -> None:
    parts = {f"{p}-{n}": {"p": pa.scalar(p)} for p in ("a", "b", "c", "few") for n in range(4 if p == "few" else 9)}
    sizes = dict.fromkeys(parts, AIM // 10)
    joined = files_to_compact(sizes, AIM, parts)
    assert {name[0] for name in joined} == {"a", "b"}
    assert len(joined) == 18
    assert files_to_compact({name: size for name, size in sizes.items() if name.startswith("few")}, AIM, parts) == []


def test_a_table_tells_how_many_of_its_rows_make_a_file_once_it_has_some(tmp_path: Path) -> None:
    def told(count: int) -> int:
        rows = [{"id": i, "big": f"large {i}"} for i in range(count)]
        DeltaRsTable(tmp_path, LOG).load(SHOP, record_batches(SHOP, rows), at(0))
        return rows_per_file(DeltaTable(str(tmp_path)), MIB)

    assert told(0) == 0
    assert told(ESTIMATE_ROWS_MIN - 1) == 0, "a small file is mostly head and foot"
    many = told(ESTIMATE_ROWS_MIN)
    (size,) = (file.stat().st_size for file in tmp_path.glob("*.parquet") if file.name in names(tmp_path))
    assert many == MIB * ESTIMATE_ROWS_MIN // size


def names(folder: Path) -> set[str]:
    return {Path(uri).name for uri in DeltaTable(str(folder)).file_uris()}
