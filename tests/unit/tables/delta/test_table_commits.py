"""Guarantees and errors of commits to a Delta table."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from tailrace import failpoints
from tailrace.errors import BaseRowMissing, ForeignWrite, TableUnusable
from tailrace.model.position import Lsn
from tailrace.tables.compaction_plan import UpkeepPlan
from tailrace.tables.delta import commit_log
from tailrace.tables.delta.features import Features
from tailrace.tables.delta.table import UNCOMMITTED, DeltaRsTable
from tailrace.tables.evolve.schema_plan import Recast
from tailrace.tables.fold.by_mode import fold_by_mode
from tailrace.tables.port import AppliedPosition
from tailrace.tables.spec import TableMode, TableSpec
from tailrace.tables.staging import discard
from tests.support.changes import SHOP, Change, changes, insert, record_batches, table_schema, update

WIDER = table_schema({"id": pa.int64(), "name": pa.string(), "big": pa.string(), "n": pa.int64()})
APPEND = TableSpec(mode=TableMode.APPEND)


def at(seq: int) -> AppliedPosition:
    return AppliedPosition(seq=seq, commit=seq, position=Lsn(seq))


class Table:
    """A table that changes are applied to, one by one."""

    def __init__(self, path: Path, spec: TableSpec = TableSpec(), rows: list[dict[str, Any]] | None = None) -> None:  # noqa: B008 # frozen
        self.path, self.form, self.seq = path, spec, 0
        self.table = DeltaRsTable(path, "log", spec)
        self.table.load(SHOP, record_batches(SHOP, rows or []), at(0))

    def apply(self, *rows: Change) -> None:
        folded = fold_by_mode(self.form, SHOP, changes(SHOP, *rows, first=self.seq + 1))
        self.table.apply(SHOP, folded, at(self.seq), at(self.seq + 1))
        self.seq += 1

    def content(self, version: int | None = None) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = pa.table(DeltaTable(str(self.path), version=version).scan()).to_pylist()
        return sorted(rows, key=lambda row: (row["id"], row["n"] or 0))


def test_a_partitioned_table_made_over_one_with_features_replaces_the_rows_that_change(tmp_path: Path) -> None:
    rows = [{"id": 1, "name": "a b", "n": 1}, {"id": 2, "name": "z", "n": 1}]
    featured = DeltaRsTable(tmp_path / "t", "log", TableSpec(), Features(deletion_vectors=True))
    featured.load(SHOP, record_batches(SHOP, rows), at(0))
    table = Table(tmp_path / "t", TableSpec(partition_by=("name",)), rows)
    table.apply(update(1, name="a b", n=2), update(2, name="z", n=2))
    assert [(row["id"], row["n"]) for row in table.content()] == [(1, 2), (2, 2)]


def test_upkeep_is_refused_after_a_concurrent_apply(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table(tmp_path / "t", APPEND)
    for n in range(1, 10):
        table.apply(insert(n, name="x"))
    hit, seq_before = failpoints.hit, table.seq

    def after_joining(name: str) -> None:
        hit(name)
        if name == "table.after_commit" and table.seq == seq_before:
            table.seq = seq_before  # simulates another process
            monkeypatch.setattr(failpoints, "hit", hit)
            table.apply(insert(10, name="x"))

    monkeypatch.setattr(failpoints, "hit", after_joining)
    with pytest.raises(ForeignWrite):
        table.table.compact(UpkeepPlan(file_bytes=1 << 20, remove_after_seconds=0), at(seq_before))
    assert table.table.applied_position() == at(seq_before + 1)
    assert [row["id"] for row in table.content()] == list(range(1, 11))


def test_files_of_an_old_version_are_not_discarded_as_strays(tmp_path: Path) -> None:
    table = Table(tmp_path / "t")
    for n in range(1, 12):
        table.apply(update(1, name=f"x{n}") if n > 1 else insert(1, name="x1"))
    log = tmp_path / "t" / "_delta_log"
    DeltaTable(str(table.path), version=5).create_checkpoint()
    for version in range(6):  # as readers' own clean-up does after 30 days
        (log / f"{version:020d}.json").unlink()
    stray = tmp_path / "t" / "part-exchange-0-000.parquet"
    stray.write_bytes(b"left by one that was killed")
    assert sum(discard(table.path, prefix) for prefix in UNCOMMITTED) == 1 + 4, "those of versions that nobody can read"
    assert table.content(version=5)[0]["name"] == "x5"


def test_the_check_for_leftovers_at_start_reads_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table(tmp_path / "t")
    for n in range(1, 6):
        table.apply(insert(n, name="x"))
    monkeypatch.setattr(commit_log._Commit, "read", None)
    assert sum(discard(table.path, prefix, last=True) for prefix in UNCOMMITTED) == 0
    monkeypatch.undo()
    stray = tmp_path / "t" / "part-exchange-0-000.parquet"
    stray.write_bytes(b"left by one that was killed")
    assert sum(discard(table.path, prefix, last=True) for prefix in UNCOMMITTED) == 1
    assert not stray.exists()


def test_every_commit_of_a_recast_is_flushed_to_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zoned = table_schema({"id": pa.int64(), "t": pa.timestamp("us", "UTC")})
    naive = table_schema({"id": pa.int64(), "t": pa.timestamp("us")})
    table = DeltaRsTable(tmp_path / "t", "log")
    table.load(zoned, record_batches(zoned, [{"id": 1, "t": 5}]), at(0))
    synced, fsync = list[str](), commit_log.fsync

    def record_fsync(path: Path) -> None:
        synced.append(path.name)
        fsync(path)

    monkeypatch.setattr(commit_log, "fsync", record_fsync)
    table.evolve(Recast(schema=naive), at(0))
    newest = table.version()
    assert newest == 2, "the feature, and the rows"
    assert {f"{version:020d}.json" for version in (1, 2)} <= set(synced)


def partial() -> Change:
    return update(1, name="z", unchanged=("big",))


@pytest.mark.parametrize(
    "work",
    [
        lambda table: table.table.compact(UpkeepPlan(file_bytes=1 << 20, remove_after_seconds=None), at(table.seq)),
        lambda table: table.table.evolve(Recast(schema=WIDER), at(table.seq)),
        lambda table: table.table.keys_exist(SHOP, pa.table({"id": pa.array([1], pa.int64())})),
        lambda table: table.apply(partial()),
        lambda table: table.apply(update(1, name="z")),
    ],
    ids=["tend", "evolve", "holds", "partial", "whole"],
)
@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"no Parquet")], ids=["gone", "broken"])
def test_a_missing_or_broken_file_is_reported_with_the_table_s_path(
    tmp_path: Path, work: Callable[[Table], object], damage: Callable[[Path], object]
) -> None:
    table = Table(tmp_path / "t")
    for n in range(1, 10):
        table.apply(insert(10 - n, name="x", big="y"))
    for name in table.table.files():
        damage(table.path / name)
    with pytest.raises(TableUnusable, match=str(table.path)):
        work(table)


def test_a_partial_change_of_a_missing_row_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    table = Table(tmp_path / "t", rows=[{"id": 1, "name": "x", "big": "y"}])
    table.apply(insert(50, name="x", big="y"))
    table.apply(update(50, name="z", unchanged=("big",)))
    assert [row["big"] for row in table.content()] == ["y", "y"]
    before = table.table.version()
    with pytest.raises(BaseRowMissing):
        table.apply(update(2, name="z", unchanged=("big",)), insert(3, name="x"))
    assert table.table.version() == before


def test_the_result_has_the_bytes_that_were_written(tmp_path: Path) -> None:
    table = Table(tmp_path / "t")
    folded = fold_by_mode(table.form, SHOP, changes(SHOP, insert(1, name="x"), first=1))
    done = table.table.apply(SHOP, folded, at(0), at(1))
    commit = table.path / "_delta_log" / f"{done.version:020d}.json"
    adds = [action["add"] for action in map(json.loads, commit.read_text().splitlines()) if "add" in action]
    assert done.bytes == sum(add["size"] for add in adds) > 0
