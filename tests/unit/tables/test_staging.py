"""Staged files: complete, on disk, under the given name, and discarded when not needed."""

from __future__ import annotations

import json
import math
import os
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

from tailrace.errors import TableUnusable, ValueUnfit
from tailrace.model.position import Lsn
from tailrace.model.schema import TableId
from tailrace.tables import staging
from tailrace.tables.delta.table import DeltaRsTable
from tailrace.tables.port import AppliedPosition
from tailrace.tables.staging import StagedFile, discard, stage
from tailrace.tables.table_paths import table_path
from tests.support.changes import SHOP, record_batches, table_schema

LOG = "a-log"
ROWS = [{"id": i, "name": f"n{i}", "big": f"large {i}", "n": i} for i in range(1, 6)]
EVERY = table_schema({
    "id": pa.int64(), "small": pa.int16(), "whole": pa.int32(), "real": pa.float32(), "double": pa.float64(),
    "text": pa.string(), "bytes": pa.binary(), "flag": pa.bool_(), "day": pa.date32(), "naive": pa.timestamp("us"),
    "zoned": pa.timestamp("us", "UTC"), "d5": pa.decimal128(5, 2), "d15": pa.decimal128(15, 2),
    "d38": pa.decimal128(38, 9), "texts": pa.list_(pa.string()), "days": pa.list_(pa.date32()),
})  # fmt: skip
FULL: dict[str, Any] = {
    "id": 1, "small": -3, "whole": 1 << 30, "real": 1.5, "double": -0.0, "text": "it's é", "bytes": b"\0\xff",
    "flag": False, "day": date(1, 1, 1), "naive": datetime(1969, 12, 31, 23, 59, 59, 999_999),
    "zoned": datetime(9999, 12, 31, tzinfo=UTC), "d5": Decimal("-1.50"), "d15": Decimal("123456789012.34"),
    "d38": Decimal("-12345678901234567890123456789.123456789"), "texts": ["a", None, ""], "days": [date(2020, 1, 1)],
}  # fmt: skip


def at(seq: int) -> AppliedPosition:
    return AppliedPosition(seq=seq, commit=0, position=Lsn(seq))


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir()) if folder.exists() else []


def staged_rows(folder: Path, files: tuple[StagedFile, ...]) -> list[dict[str, Any]]:
    return [row for file in files for row in pq.read_table(folder / file.path).to_pylist()]


# --- writing -----------------------------------------------------------------------------------------------


def test_rows_are_staged_under_the_name_and_described(tmp_path: Path) -> None:
    files = stage(tmp_path / "s" / "t", "load7-3-0", SHOP, record_batches(SHOP, ROWS))
    (file,) = files
    assert (file.path, file.rows) == ("part-load7-3-0-000.parquet", 5)
    assert file.size == (tmp_path / "s" / "t" / file.path).stat().st_size
    assert staged_rows(tmp_path / "s" / "t", files) == ROWS
    assert StagedFile.from_json(json.loads(json.dumps(file.to_json()))) == file


def test_no_rows_make_no_file_and_no_folder(tmp_path: Path) -> None:
    assert stage(tmp_path / "t", "x", SHOP, []) == ()
    assert stage(tmp_path / "t", "x", SHOP, record_batches(SHOP, [])) == ()
    assert names(tmp_path) == []


def test_a_file_that_is_large_enough_is_followed_by_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "GROUP_ROWS_MAX", 2)
    files = stage(tmp_path, "x", SHOP, record_batches(SHOP, ROWS), file_bytes=100)
    assert [file.path for file in files] == [f"part-x-{n:03d}.parquet" for n in range(3)]
    assert [file.rows for file in files] == [2, 2, 1]
    assert [json.loads(file.stats)["maxValues"]["id"] for file in files] == [2, 4, 5]
    assert staged_rows(tmp_path, files) == ROWS


def test_files_have_about_the_target_size(tmp_path: Path) -> None:
    text = np.random.default_rng(1).integers(97, 123, 12 << 20, np.uint8).tobytes().decode()
    rows = [{"id": i, "big": text[i * 1000 : i * 1000 + 1000], "name": f"p{i % 2}"} for i in range(12_000)]
    target = 2 << 20
    for name, by in (("whole", ()), ("partitioned", ("name",))):
        files = stage(tmp_path / name, "x", SHOP, record_batches(SHOP, rows), by, file_bytes=target)
        full = [file.size for file in files if file.size >= target]
        assert len(full) >= 2, "several are full"
        assert max(full) < 2 * target, "and no file exceeds it by more than a row group"
        assert sum(file.rows for file in files) == len(rows)


def test_row_groups_are_bounded_by_rows_and_by_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "GROUP_ROWS_MAX", 1000)
    monkeypatch.setattr(staging, "GROUP_BYTES_MAX", 50_000)
    rows = [{"id": i, "big": "x" * (0 if i < 5000 else 500)} for i in range(6000)]
    batches = [batch for start in range(0, 6000, 700) for batch in record_batches(SHOP, rows[start : start + 700])]
    (file,) = stage(tmp_path, "x", SHOP, batches)
    footer = pq.read_metadata(tmp_path / file.path)
    groups = [footer.row_group(i) for i in range(footer.num_row_groups)]
    assert sum(group.num_rows for group in groups) == 6000
    assert 700 < max(group.num_rows for group in groups) <= 1000
    assert max(group.num_rows for group in groups[-5:]) <= 100
    assert [row["id"] for row in staged_rows(tmp_path, (file,))] == list(range(6000))


def test_memory_does_not_grow_with_the_rows(tmp_path: Path) -> None:
    text = np.random.default_rng(1).integers(97, 123, 1 << 20, np.uint8).tobytes().decode()

    def batches() -> Iterator[pa.RecordBatch]:
        for i in range(256):
            ids = pa.array(range(i * 1000, i * 1000 + 1000))
            big = pa.array([text[j : j + 1000] for j in range(i, i + 1000)])
            yield pa.record_batch([ids, pa.nulls(1000, pa.string()), big, pa.nulls(1000, pa.int32())], names=SHOP.names)

    before, most = pa.total_allocated_bytes(), 0

    def watched() -> Iterator[pa.RecordBatch]:
        nonlocal most
        for batch in batches():
            most = max(most, pa.total_allocated_bytes() - before)
            yield batch

    tracemalloc.start()
    try:
        files = stage(tmp_path, "x", SHOP, watched())
        python = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert sum(file.rows for file in files) == 256_000
    assert most < 112 << 20
    assert python < 32 << 20


def test_the_file_is_what_delta_rs_writes_itself(tmp_path: Path) -> None:
    (file,) = stage(tmp_path / "ours", "x", EVERY, record_batches(EVERY, [FULL, {"id": 2}]))
    write_deltalake(str(tmp_path / "theirs"), pa.Table.from_batches(record_batches(EVERY, [FULL, {"id": 2}])))
    (other,) = DeltaTable(str(tmp_path / "theirs")).file_uris()
    ours, theirs = (pq.ParquetFile(path) for path in (tmp_path / "ours" / file.path, other))
    for mine, its in zip(ours.schema, theirs.schema, strict=True):
        # The writer may choose the name of a list's elements; this one is the format's own.
        assert mine.path == its.path.replace(".list.item", ".list.element")
        assert (mine.physical_type, mine.max_definition_level, mine.max_repetition_level) == (
            its.physical_type,
            its.max_definition_level,
            its.max_repetition_level,
        )
        assert json.loads(mine.logical_type.to_json()) == json.loads(its.logical_type.to_json())
    assert b"ARROW:schema" not in (ours.schema_arrow.metadata or {})


def test_the_files_are_read_by_duckdb(tmp_path: Path) -> None:
    duckdb = pytest.importorskip("duckdb", reason="SKIPPED LOUDLY: duckdb is not installed")
    (file,) = stage(tmp_path, "x", EVERY, record_batches(EVERY, [FULL, {"id": 2}]))
    with duckdb.connect() as connection:
        connection.execute("set timezone = 'UTC'")
        connection.execute(f"create table t as select * from read_parquet('{tmp_path / file.path}')")
        kinds = dict(connection.execute("select column_name, data_type from duckdb_columns()").fetchall())
        found = connection.sql("select * from t order by id").to_arrow_table().to_pylist()
    assert kinds["naive"] == "TIMESTAMP"
    assert kinds["zoned"] == "TIMESTAMP WITH TIME ZONE"
    assert (kinds["d5"], kinds["d38"], kinds["days"]) == ("DECIMAL(5,2)", "DECIMAL(38,9)", "DATE[]")
    assert found == [FULL, dict.fromkeys(FULL) | {"id": 2}]
    assert math.copysign(1, found[0]["double"]) == -1


def test_files_and_folder_are_on_disk_when_it_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: dict[int, int] = {}
    fsync = os.fsync

    def record_fsync(handle: int) -> None:
        fsync(handle)
        synced[os.fstat(handle).st_ino] = os.fstat(handle).st_size

    monkeypatch.setattr(os, "fsync", record_fsync)
    (file,) = stage(tmp_path / "t", "x", SHOP, record_batches(SHOP, ROWS))
    written = (tmp_path / "t" / file.path).stat()
    assert synced[written.st_ino] == written.st_size
    assert (tmp_path / "t").stat().st_ino in synced


# --- refusing ----------------------------------------------------------------------------------------------


def test_a_source_error_is_raised_unchanged_and_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "GROUP_ROWS_MAX", 1)

    def batches() -> Iterator[pa.RecordBatch]:
        yield from record_batches(SHOP, ROWS)
        assert len(names(tmp_path)) >= 3  # the last row waits for more, the one before may be on its way
        raise ConnectionResetError("the source is unreachable")

    with pytest.raises(ConnectionResetError, match="unreachable"):
        stage(tmp_path, "x", SHOP, batches(), file_bytes=1)
    assert names(tmp_path) == []


def test_a_name_is_used_once(tmp_path: Path) -> None:
    (file,) = stage(tmp_path, "x", SHOP, record_batches(SHOP, ROWS))
    with pytest.raises(TableUnusable, match="File exists"):
        stage(tmp_path, "x", SHOP, record_batches(SHOP, ROWS[:1]))
    assert staged_rows(tmp_path, (file,)) == ROWS


@pytest.mark.parametrize("token", ["", "a/b", "../x", "a b", "é", "a%2Fb", "*"])
def test_a_name_that_is_not_a_plain_token_is_refused(tmp_path: Path, token: str) -> None:
    with pytest.raises(ValueError, match="letters"):
        stage(tmp_path, token, SHOP, record_batches(SHOP, ROWS))
    with pytest.raises(ValueError, match="letters"):
        discard(tmp_path, token)


def test_values_and_columns_that_a_table_cannot_hold_are_refused_by_name(tmp_path: Path) -> None:
    far = pa.array([2_145_042_541], pa.int32()).view(pa.date32())
    dated = table_schema({"id": pa.int64(), "d": pa.date32()})
    with pytest.raises(ValueUnfit, match="column=d"):
        stage(tmp_path, "x", dated, [pa.record_batch([pa.array([1]), far], names=["id", "d"])])
    with pytest.raises(TableUnusable, match="case"):
        stage(tmp_path, "x", table_schema({"id": pa.int64(), "ID": pa.int64()}), [])
    assert names(tmp_path) == []


def test_a_folder_with_other_things_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(TableUnusable, match="not a Delta table"):
        stage(tmp_path, "x", SHOP, record_batches(SHOP, ROWS))
    assert names(tmp_path) == ["thesis.tex"]


def test_many_may_stage_at_once_into_a_missing_folder(tmp_path: Path) -> None:
    path = table_path(tmp_path, TableId("public", "a/b"))

    def one(n: int) -> tuple[StagedFile, ...]:
        return stage(path, f"x-{n}", SHOP, record_batches(SHOP, [ROWS[0] | {"id": n}]))

    with ThreadPoolExecutor(8) as pool:
        files = [file for made in pool.map(one, range(16)) for file in made]
    assert len(names(tmp_path / "public" / ".tailrace")) == 1
    assert DeltaRsTable(path, LOG).commit_load(SHOP, files, at(0)) == 16
    assert sorted(row["id"] for row in pa.table(DeltaTable(str(path.resolve())).scan()).to_pylist()) == list(range(16))


# --- discarding --------------------------------------------------------------------------------------------


def test_strays_are_not_a_table_and_are_discarded_by_load(tmp_path: Path) -> None:
    for name in ("one-1", "one-2", "one", "onerous-1", "two-1"):
        stage(tmp_path / "t", name, SHOP, record_batches(SHOP, ROWS))
    assert DeltaRsTable(tmp_path / "t", LOG).applied_position() is None
    assert discard(tmp_path / "t", "one") == 3
    assert discard(tmp_path / "t", "one") == 0
    assert names(tmp_path / "t") == ["part-onerous-1-000.parquet", "part-two-1-000.parquet"]


def test_discarding_in_a_missing_folder_does_nothing(tmp_path: Path) -> None:
    assert discard(tmp_path / "missing", "x") == 0
    assert names(tmp_path) == []
    assert discard(table_path(tmp_path, TableId("public", "a/b")), "x") == 0
    assert names(tmp_path) == []


def test_files_of_the_table_are_never_discarded(tmp_path: Path) -> None:
    table = DeltaRsTable(tmp_path / "t", LOG)
    used = stage(tmp_path / "t", "one-1-0", SHOP, record_batches(SHOP, ROWS))
    stage(tmp_path / "t", "one-1-1", SHOP, record_batches(SHOP, ROWS))
    table.commit_load(SHOP, used, at(0))
    assert discard(tmp_path / "t", "one") == 1
    assert table.files() == [used[0].path]
    assert len(pa.table(DeltaTable(str(tmp_path / "t")).scan())) == 5


def test_files_of_an_older_version_are_not_discarded_either(tmp_path: Path) -> None:
    table = DeltaRsTable(tmp_path / "t", LOG)
    for seq, name in enumerate(("one", "two")):
        table.commit_load(SHOP, stage(tmp_path / "t", name, SHOP, record_batches(SHOP, ROWS)), at(seq))
    assert discard(tmp_path / "t", "one") == 0
    assert len(pa.table(DeltaTable(str(tmp_path / "t"), version=0).scan())) == 5


def test_nothing_is_discarded_from_a_table_that_cannot_be_read(tmp_path: Path) -> None:
    table = DeltaRsTable(tmp_path / "t", LOG)
    table.commit_load(SHOP, stage(tmp_path / "t", "one", SHOP, record_batches(SHOP, ROWS)), at(0))
    (tmp_path / "t" / "_delta_log" / f"{0:020d}.json").write_text("garbage")
    with pytest.raises(TableUnusable):
        discard(tmp_path / "t", "one")
    assert len(names(tmp_path / "t")) == 2
