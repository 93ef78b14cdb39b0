"""What a commit to a Delta table may rely on, and what is told where it may not."""

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


class Kept:
    """A table that changes are applied to, one by one."""

    def __init__(self, path: Path, form: TableSpec = TableSpec(), rows: list[dict[str, Any]] | None = None) -> None:  # noqa: B008 # frozen
        self.path, self.form, self.seq = path, form, 0
        self.table = DeltaRsTable(path, "log", form)
        self.table.load(SHOP, record_batches(SHOP, rows or []), at(0))

    def apply(self, *some: Change) -> None:
        folded = fold_by_mode(self.form, SHOP, changes(SHOP, *some, first=self.seq + 1))
        self.table.apply(SHOP, folded, at(self.seq), at(self.seq + 1))
        self.seq += 1

    def content(self, version: int | None = None) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = pa.table(DeltaTable(str(self.path), version=version).scan()).to_pylist()
        return sorted(rows, key=lambda row: (row["id"], row["n"] or 0))


def test_a_partitioned_table_made_over_one_with_features_replaces_the_rows_that_change(tmp_path: Path) -> None:
    rows = [{"id": 1, "name": "a b", "n": 1}, {"id": 2, "name": "z", "n": 1}]
    featured = DeltaRsTable(tmp_path / "t", "log", TableSpec(), Features(deletion_vectors=True))
    featured.load(SHOP, record_batches(SHOP, rows), at(0))
    kept = Kept(tmp_path / "t", TableSpec(partition_by=("name",)), rows)
    kept.apply(update(1, name="a b", n=2), update(2, name="z", n=2))
    assert [(row["id"], row["n"]) for row in kept.content()] == [(1, 2), (2, 2)]


def test_upkeep_is_refused_where_another_has_applied_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Kept(tmp_path / "t", APPEND)
    for n in range(1, 10):
        kept.apply(insert(n, name="x"))
    hit, there = failpoints.hit, kept.seq

    def after_joining(name: str) -> None:
        hit(name)
        if name == "table.after_commit" and kept.seq == there:
            kept.seq = there  # whoever applies beside it
            monkeypatch.setattr(failpoints, "hit", hit)
            kept.apply(insert(10, name="x"))

    monkeypatch.setattr(failpoints, "hit", after_joining)
    with pytest.raises(ForeignWrite):
        kept.table.compact(UpkeepPlan(file_bytes=1 << 20, remove_after_seconds=0), at(there))
    assert kept.table.applied_position() == at(there + 1)
    assert [row["id"] for row in kept.content()] == list(range(1, 11))


def test_what_an_old_version_needs_is_not_taken_for_a_stray(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "t")
    for n in range(1, 12):
        kept.apply(update(1, name=f"x{n}") if n > 1 else insert(1, name="x1"))
    log = tmp_path / "t" / "_delta_log"
    DeltaTable(str(kept.path), version=5).create_checkpoint()
    for version in range(6):  # as readers' own clean-up does after 30 days
        (log / f"{version:020d}.json").unlink()
    stray = tmp_path / "t" / "part-exchange-0-000.parquet"
    stray.write_bytes(b"left by one that was killed")
    assert sum(discard(kept.path, prefix) for prefix in UNCOMMITTED) == 1 + 4, "those of versions that nobody can read"
    assert kept.content(version=5)[0]["name"] == "x5"


def test_a_start_reads_no_commit_to_find_what_was_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = Kept(tmp_path / "t")
    for n in range(1, 6):
        kept.apply(insert(n, name="x"))
    monkeypatch.setattr(commit_log._Commit, "read", None)
    assert sum(discard(kept.path, prefix, last=True) for prefix in UNCOMMITTED) == 0
    monkeypatch.undo()
    stray = tmp_path / "t" / "part-exchange-0-000.parquet"
    stray.write_bytes(b"left by one that was killed")
    assert sum(discard(kept.path, prefix, last=True) for prefix in UNCOMMITTED) == 1
    assert not stray.exists()


def test_every_commit_of_a_recast_is_pushed_to_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    zoned = table_schema({"id": pa.int64(), "t": pa.timestamp("us", "UTC")})
    naive = table_schema({"id": pa.int64(), "t": pa.timestamp("us")})
    table = DeltaRsTable(tmp_path / "t", "log")
    table.load(zoned, record_batches(zoned, [{"id": 1, "t": 5}]), at(0))
    synced, fsync = list[str](), commit_log.fsync

    def noted(path: Path) -> None:
        synced.append(path.name)
        fsync(path)

    monkeypatch.setattr(commit_log, "fsync", noted)
    table.evolve(Recast(schema=naive), at(0))
    newest = table.version()
    assert newest == 2, "the feature, and the rows"
    assert {f"{version:020d}.json" for version in (1, 2)} <= set(synced)


def partial() -> Change:
    return update(1, name="z", unchanged=("big",))


@pytest.mark.parametrize(
    "work",
    [
        lambda kept: kept.table.compact(UpkeepPlan(file_bytes=1 << 20, remove_after_seconds=None), at(kept.seq)),
        lambda kept: kept.table.evolve(Recast(schema=WIDER), at(kept.seq)),
        lambda kept: kept.table.keys_exist(SHOP, pa.table({"id": pa.array([1], pa.int64())})),
        lambda kept: kept.apply(partial()),
        lambda kept: kept.apply(update(1, name="z")),
    ],
    ids=["tend", "evolve", "holds", "partial", "whole"],
)
@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"no Parquet")], ids=["gone", "broken"])
def test_a_file_that_is_gone_or_broken_is_told_with_its_place(
    tmp_path: Path, work: Callable[[Kept], object], damage: Callable[[Path], object]
) -> None:
    kept = Kept(tmp_path / "t")
    for n in range(1, 10):
        kept.apply(insert(10 - n, name="x", big="y"))
    for name in kept.table.files():
        damage(kept.path / name)
    with pytest.raises(TableUnusable, match=str(kept.path)):
        work(kept)


def test_a_partial_change_of_a_row_that_is_not_there_is_refused_without_a_look_at_every_key(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "t", rows=[{"id": 1, "name": "x", "big": "y"}])
    kept.apply(insert(50, name="x", big="y"))
    kept.apply(update(50, name="z", unchanged=("big",)))
    assert [row["big"] for row in kept.content()] == ["y", "y"]
    before = kept.table.version()
    with pytest.raises(BaseRowMissing):
        kept.apply(update(2, name="z", unchanged=("big",)), insert(3, name="x"))
    assert kept.table.version() == before


def test_the_commit_says_what_was_written(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "t")
    folded = fold_by_mode(kept.form, SHOP, changes(SHOP, insert(1, name="x"), first=1))
    done = kept.table.apply(SHOP, folded, at(0), at(1))
    commit = kept.path / "_delta_log" / f"{done.version:020d}.json"
    adds = [action["add"] for action in map(json.loads, commit.read_text().splitlines()) if "add" in action]
    assert done.bytes == sum(add["size"] for add in adds) > 0
