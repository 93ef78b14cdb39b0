"""Staged files become a table, or all of one, in one commit with the position."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from tailrace import failpoints
from tailrace.errors import ForeignWrite, TableUnusable
from tailrace.model.position import Lsn
from tailrace.model.schema import TableId, TableSchema
from tailrace.tables.delta.table import DeltaRsTable
from tailrace.tables.fold.fold import fold
from tailrace.tables.port import AppliedPosition
from tailrace.tables.staging import StagedFile, discard, stage
from tailrace.tables.table_paths import table_path
from tests.support.changes import SHOP, changes, insert, record_batches, table_schema, update

LOG = "a-log"
ROWS = [{"id": i, "name": f"n{i}", "big": f"large {i}", "n": i} for i in range(1, 6)]
NAIVE = table_schema({"id": pa.string(), "at": pa.timestamp("us"), "ats": pa.list_(pa.timestamp("us"))})
NAIVE_ROWS = [{"id": "a", "at": datetime(1969, 12, 31, 23, 59, 59, 1), "ats": [datetime(2020, 1, 1)]}]


def at(seq: int) -> AppliedPosition:
    return AppliedPosition(seq=seq, commit=seq // 10, position=Lsn(seq * 16))


class Died(BaseException):
    """Simulates the death of the process."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "public" / "t"


@pytest.fixture
def table(path: Path) -> DeltaRsTable:
    return DeltaRsTable(path, LOG)


def staged(path: Path, name: str, rows: Any = ROWS, schema: TableSchema = SHOP) -> tuple[StagedFile, ...]:
    return stage(path, name, schema, record_batches(schema, rows))


def content(path: Path) -> list[dict[str, Any]]:
    rows = pa.table(DeltaTable(str(path)).scan()).to_pylist()
    return sorted(rows, key=lambda row: str(row["id"]))


def actions(path: Path, kind: str, version: int | None = None) -> list[dict[str, Any]]:
    number = DeltaTable(str(path)).version() if version is None else version
    lines = (path / "_delta_log" / f"{number:020d}.json").read_text().splitlines()
    return [action[kind] for line in lines for action in [json.loads(line)] if kind in action]


def at_the_commit(monkeypatch: pytest.MonkeyPatch, act: Callable[[], object], *, turn: int = 1) -> None:
    """Run something between the read of the table and the commit."""
    remaining = turn

    def hit(name: str) -> None:
        nonlocal remaining
        remaining -= name == "table.before_commit"
        if not remaining:
            monkeypatch.undo()
            act()

    monkeypatch.setattr(failpoints, "hit", hit)


def die() -> None:
    raise Died


# --- a new table -------------------------------------------------------------------------------------------


def test_files_staged_apart_land_in_one_commit_with_the_position(path: Path, table: DeltaRsTable) -> None:
    files = [file for i, row in enumerate(ROWS) for file in staged(path, f"load-{i}", [row])]
    assert table.applied_position() is None
    assert table.commit_load(SHOP, files, at(7)) == 5
    assert (table.applied_position(), table.schema(), table.rows()) == (at(7), SHOP, 5)
    assert DeltaTable(str(path)).version() == 0
    assert content(path) == ROWS
    assert [(add["path"], add["size"], add["stats"]) for add in actions(path, "add")] == [
        (file.path, file.size, file.stats) for file in files
    ]


def test_the_position_has_the_load_s_id(path: Path, table: DeltaRsTable) -> None:
    named = replace(at(7), load="x")
    table.commit_load(SHOP, staged(path, "x"), named)
    assert table.applied_position() == named


def test_changes_are_applied_to_a_loaded_table(path: Path, table: DeltaRsTable) -> None:
    table.commit_load(SHOP, staged(path, "x"), at(0))
    folded = fold(SHOP, changes(SHOP, update(1, n=9, unchanged=("big", "name")), insert(6, big="six")))
    table.apply(SHOP, folded, at(0), at(10))
    assert content(path) == [ROWS[0] | {"n": 9}, *ROWS[1:], {"id": 6, "name": None, "big": "six", "n": None}]


@pytest.mark.parametrize("schema", [SHOP, NAIVE])
def test_no_files_make_an_empty_table(path: Path, table: DeltaRsTable, schema: TableSchema) -> None:
    assert table.commit_load(schema, [], at(3)) == 0
    assert (table.applied_position(), table.schema(), table.rows(), content(path)) == (at(3), schema, 0, [])
    assert [field.name for field in DeltaTable(str(path)).schema().fields] == schema.names


def test_a_timestamp_without_a_zone_adds_its_feature(path: Path, table: DeltaRsTable) -> None:
    table.commit_load(NAIVE, staged(path, "x", NAIVE_ROWS, NAIVE), at(0))
    (protocol,) = actions(path, "protocol")
    assert (protocol["readerFeatures"], protocol["writerFeatures"]) == (["timestampNtz"], ["timestampNtz"])
    assert content(path) == NAIVE_ROWS


def test_a_table_of_any_name_is_loaded(tmp_path: Path) -> None:
    path = table_path(tmp_path, TableId("pu%lic", "a/[b]"))
    table = DeltaRsTable(path, LOG)
    for seq in (0, 1):
        table.commit_load(SHOP, staged(path, f"x{seq}"), at(seq))
        assert (table.applied_position(), content(path.resolve())) == (at(seq), ROWS)


# --- replacing ---------------------------------------------------------------------------------------------


def test_a_load_replaces_all_rows(path: Path, table: DeltaRsTable) -> None:
    old = [*staged(path, "one-1", ROWS[:2]), *staged(path, "one-2", ROWS[2:])]
    table.commit_load(SHOP, old, at(0))
    new = staged(path, "two", [ROWS[0] | {"n": 7}])
    assert table.commit_load(SHOP, new, at(5)) == 1
    assert (table.applied_position(), content(path)) == (at(5), [ROWS[0] | {"n": 7}])
    assert sorted(removed["path"] for removed in actions(path, "remove")) == [file.path for file in old]
    assert all(removed["dataChange"] for removed in actions(path, "remove"))


def test_no_files_empty_a_table(path: Path, table: DeltaRsTable) -> None:
    table.commit_load(SHOP, staged(path, "one"), at(0))
    for seq in (1, 2):
        assert table.commit_load(SHOP, [], at(seq)) == 0
        assert (table.applied_position(), table.files(), content(path)) == (at(seq), [], [])


def test_files_of_the_table_are_not_committed_again(path: Path, table: DeltaRsTable) -> None:
    files = staged(path, "one")
    for _ in range(2):
        assert table.commit_load(SHOP, files, at(0)) == 5
    assert (DeltaTable(str(path)).version(), content(path)) == (0, ROWS)


def test_another_schema_replaces_the_columns_and_their_features(path: Path, table: DeltaRsTable) -> None:
    table.commit_load(SHOP, staged(path, "one"), at(0))
    table.commit_load(NAIVE, staged(path, "two", NAIVE_ROWS, NAIVE), at(5))
    assert (table.applied_position(), table.schema(), content(path)) == (at(5), NAIVE, NAIVE_ROWS)
    assert "timestampNtz" in (DeltaTable(str(path)).protocol().reader_features or ())
    table.commit_load(SHOP, staged(path, "three"), at(6))
    assert (table.applied_position(), table.schema(), content(path)) == (at(6), SHOP, ROWS)
    for version in range(DeltaTable(str(path)).version() + 1):
        assert "tailrace" in actions(path, "commitInfo", version)[0]


def test_a_crash_after_the_feature_commit_leaves_the_old_table(
    path: Path, table: DeltaRsTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    table.commit_load(SHOP, staged(path, "one"), at(0))
    files = staged(path, "two", NAIVE_ROWS, NAIVE)
    at_the_commit(monkeypatch, die, turn=2)
    with pytest.raises(Died):
        table.commit_load(NAIVE, files, at(5))
    assert DeltaTable(str(path)).version() == 1
    assert (table.applied_position(), table.schema(), content(path)) == (at(0), SHOP, ROWS)
    assert table.commit_load(NAIVE, files, at(5)) == 1
    assert (table.applied_position(), content(path)) == (at(5), NAIVE_ROWS)


def test_the_feature_commit_does_not_hide_a_foreign_write(
    path: Path, table: DeltaRsTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    table.commit_load(SHOP, staged(path, "one"), at(0))
    write_deltalake(str(path), pa.Table.from_batches(record_batches(SHOP, ROWS[:1])), mode="append")
    files = staged(path, "two", NAIVE_ROWS, NAIVE)
    at_the_commit(monkeypatch, die, turn=2)
    with pytest.raises(Died):
        table.commit_load(NAIVE, files, at(5))
    with pytest.raises(ForeignWrite):
        table.applied_position()
    table.commit_load(NAIVE, files, at(5))
    assert (table.applied_position(), content(path)) == (at(5), NAIVE_ROWS)


def test_a_load_replaces_a_foreign_write(path: Path, table: DeltaRsTable) -> None:
    table.commit_load(SHOP, staged(path, "one"), at(0))
    write_deltalake(str(path), pa.Table.from_batches(record_batches(SHOP, ROWS[:1])), mode="append")
    table.refuse_foreign(SHOP.table)
    table.commit_load(SHOP, staged(path, "two"), at(5))
    assert (table.applied_position(), content(path)) == (at(5), ROWS)


# --- refusing ----------------------------------------------------------------------------------------------


def test_a_table_that_is_not_ours_is_refused(path: Path, table: DeltaRsTable) -> None:
    table.refuse_foreign(SHOP.table)
    write_deltalake(str(path), pa.table({"id": [1]}))
    files = staged(path, "one")
    for use in (lambda: table.commit_load(SHOP, files, at(0)), lambda: table.refuse_foreign(SHOP.table)):
        with pytest.raises(ForeignWrite, match="did not make"):
            use()
    assert (content(path), discard(path, "one")) == ([{"id": 1}], 1)


def test_a_table_made_concurrently_is_not_overwritten(
    path: Path, table: DeltaRsTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = staged(path, "one")
    at_the_commit(monkeypatch, lambda: write_deltalake(str(path), pa.table({"id": [1]})))
    with pytest.raises(ForeignWrite, match="at the same time"):
        table.commit_load(SHOP, files, at(0))
    assert (DeltaTable(str(path)).version(), content(path)) == (0, [{"id": 1}])


@pytest.mark.parametrize("schema", [SHOP, NAIVE])
def test_a_concurrent_commit_fails_ours(
    path: Path, table: DeltaRsTable, monkeypatch: pytest.MonkeyPatch, schema: TableSchema
) -> None:
    table.commit_load(SHOP, staged(path, "one"), at(0))
    extra = pa.Table.from_batches(record_batches(SHOP, [{"id": 9}]))
    at_the_commit(monkeypatch, lambda: write_deltalake(str(path), extra, mode="append"))
    with pytest.raises(ForeignWrite, match="at the same time"):
        table.commit_load(schema, [], at(5))
    assert (DeltaTable(str(path)).version(), len(content(path))) == (1, 6)


@pytest.mark.parametrize("loss", [os.unlink, lambda file: file.write_bytes(b"PAR1")])
def test_a_missing_or_truncated_staged_file_is_refused(
    path: Path, table: DeltaRsTable, loss: Callable[[Path], object]
) -> None:
    files = [*staged(path, "one-1"), *staged(path, "one-2", [{"id": 9}])]
    loss(path / files[1].path)
    with pytest.raises(TableUnusable, match="part-one-2-000") as refused:
        table.commit_load(SHOP, files, at(0))
    assert refused.value.hint
    assert table.applied_position() is None


def test_a_crash_before_the_commit_leaves_only_strays(
    path: Path, table: DeltaRsTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [*staged(path, "one-1", ROWS[:2]), *staged(path, "one-2", ROWS[2:])]
    at_the_commit(monkeypatch, die)
    with pytest.raises(Died):
        table.commit_load(SHOP, files, at(0))
    assert (table.applied_position(), table.rows()) == (None, 0)
    assert discard(path, "one") == 2
    assert [entry.name for entry in path.iterdir() if entry.name != "_delta_log"] == []
    assert table.load(SHOP, record_batches(SHOP, ROWS), at(0)) == 5


def test_a_refused_load_leaves_no_strays(path: Path, table: DeltaRsTable, monkeypatch: pytest.MonkeyPatch) -> None:
    table.load(SHOP, record_batches(SHOP, ROWS), at(0))
    at_the_commit(monkeypatch, lambda: DeltaRsTable(path, LOG).commit_load(SHOP, [], at(1)))
    with pytest.raises(ForeignWrite):
        table.load(SHOP, record_batches(SHOP, ROWS), at(5))
    assert (table.applied_position(), len(list(path.glob("*.parquet")))) == (at(1), 1)


def test_a_load_commit_is_on_disk(path: Path, table: DeltaRsTable, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: set[int] = set()
    fsync = os.fsync

    def record_fsync(handle: int) -> None:
        fsync(handle)
        synced.add(os.fstat(handle).st_ino)

    monkeypatch.setattr(os, "fsync", record_fsync)
    table.commit_load(SHOP, staged(path, "one"), at(0))
    table.commit_load(NAIVE, staged(path, "two", NAIVE_ROWS, NAIVE), at(1))
    log = path / "_delta_log"
    assert len(list(log.glob("*.json"))) == 3
    for entry in (path, log, *log.glob("*.json"), *path.glob("*.parquet")):
        assert entry.stat().st_ino in synced, entry


@pytest.mark.parametrize("outer", ["public", "public/t"])
def test_no_table_is_made_inside_another_one_of_any_owner(tmp_path: Path, outer: str) -> None:
    write_deltalake(str(tmp_path / outer), pa.table({"id": [1]}))
    inside = DeltaRsTable(tmp_path / "public" / "t" / "inner", LOG)
    for make in (
        lambda: inside.refuse_foreign(SHOP.table),
        lambda: inside.load(SHOP, record_batches(SHOP, ROWS), at(10)),
    ):
        with pytest.raises(TableUnusable, match="inside another table") as caught:
            make()
        assert str(tmp_path / outer) in str(caught.value)
        assert "tables.names" in caught.value.hint
    assert [file.name for file in (tmp_path / outer).iterdir() if file.is_dir()] == ["_delta_log"]
