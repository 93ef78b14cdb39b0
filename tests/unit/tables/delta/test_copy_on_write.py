"""Changes rewrite only the files that hold an affected row."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from tailrace.errors import BaseRowMissing, TableUnusable
from tailrace.model.position import Lsn
from tailrace.model.schema import Identity, TableSchema
from tailrace.tables import staging
from tailrace.tables.delta.table import DeltaRsTable
from tailrace.tables.evolve.schema_plan import Recast
from tailrace.tables.fold.fold import fold
from tailrace.tables.port import AppliedPosition
from tailrace.tables.staging import stage
from tests.support.changes import SHOP, Change, changes, delete, insert, record_batches, table_schema, truncate, update

LOG = "a-log"
SMALL_FILE = 300
TEXT_KEYS = table_schema({"id": pa.string(), "big": pa.string()})
ODD = table_schema({"id": pa.int64(), "a.b": pa.int64(), "a": pa.float64(), "lists": pa.list_(pa.string())})


def at(seq: int) -> AppliedPosition:
    return AppliedPosition(seq=seq, commit=seq // 10, position=Lsn(seq * 16))


class Lake:
    """A table of three files, with the keys 1 to 10, 11 to 20 and 21 to 30."""

    def __init__(self, path: Path, schema: TableSchema = SHOP) -> None:
        self.path, self.schema, self.table, self.seq = path, schema, DeltaRsTable(path, LOG), 0
        self.first = [self._stage(low) for low in (1, 11, 21)]
        self.table.commit_load(schema, [file for files in self.first for file in files], at(0))
        self.names = [files[0].path for files in self.first]

    def _stage(self, low: int) -> Any:
        kinds = {"big": "large {}", "name": "n{}"}
        number = str if pa.types.is_string(self.schema.columns[0].type) else int
        rows = [
            {"id": number(i), **{name: text.format(i) for name, text in kinds.items() if name in self.schema.names}}
            for i in range(low, low + 10)
        ]
        return stage(self.path, f"load-{low}", self.schema, record_batches(self.schema, rows))

    def apply(self, *rows: Change) -> None:
        folded = fold(self.schema, changes(self.schema, *rows))
        self.table.apply(self.schema, folded, at(self.seq), at(self.seq + 1))
        self.seq += 1

    def content(self) -> dict[Any, dict[str, Any]]:
        rows = pa.table(DeltaTable(str(self.path)).scan()).to_pylist()
        assert len({row["id"] for row in rows}) == len(rows)
        return {row["id"]: row for row in rows}

    def files(self) -> list[str]:
        return sorted(self.table.files())

    def stats(self, name: str) -> dict[str, Any]:
        for commit in sorted((self.path / "_delta_log").glob("*.json"), reverse=True):
            for action in map(json.loads, commit.read_text().splitlines()):
                if action.get("add", {}).get("path") == name:
                    found: dict[str, Any] = json.loads(action["add"]["stats"])
                    return found
        raise AssertionError(name)


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(tmp_path / "t")


def test_files_without_an_affected_row_stay(lake: Lake) -> None:
    lake.apply(update(15, big="changed"), delete(12))
    assert set(lake.names) - set(lake.files()) == {lake.names[1]}
    assert lake.content()[15]["big"] == "changed"
    assert sorted(lake.content()) == [i for i in range(1, 31) if i != 12]


def test_a_file_that_the_bounds_exclude_is_not_even_read(lake: Lake) -> None:
    (lake.path / lake.names[2]).write_bytes(b"no Parquet")
    lake.apply(update(15, big="changed"), insert(0), insert(31))
    assert len(lake.files()) == 3


def test_a_missing_key_between_the_bounds_changes_no_file(lake: Lake) -> None:
    lake.apply(delete(12))
    before = lake.files()
    lake.apply(delete(12))
    assert lake.files() == before
    assert lake.table.applied_position() == at(2)


def test_new_rows_are_added_to_the_smallest_rewritten_file(lake: Lake) -> None:
    lake.apply(*(delete(i) for i in range(12, 20)))
    lake.apply(update(1, big="x"), update(11, big="x"), insert(99))
    assert lake.names[2] in lake.files()
    highest = sorted(lake.stats(name)["maxValues"]["id"] for name in lake.files())
    assert highest == [10, 30, 99]
    assert len(lake.content()) == 30 - 8 + 1


def test_new_rows_alone_get_a_file_of_their_own(lake: Lake) -> None:
    lake.apply(insert(99))
    assert set(lake.names) < set(lake.files())


def test_a_file_whose_rows_are_all_deleted_is_removed(lake: Lake) -> None:
    lake.apply(*(delete(i) for i in range(11, 21)))
    assert lake.files() == sorted([lake.names[0], lake.names[2]])


def test_rows_keep_their_order(lake: Lake) -> None:
    lake.apply(update(15, big="changed"), delete(12), insert(40))
    (new,) = set(lake.files()) - set(lake.names)
    assert pq.read_table(lake.path / new).column("id").to_pylist() == [11, *range(13, 21), 40]


def test_a_failure_in_the_second_file_leaves_nothing_of_the_first(lake: Lake) -> None:
    whole = (lake.path / lake.names[2]).read_bytes()
    before = sorted(path.name for path in lake.path.iterdir())
    # Its footer and its key are intact, so the damage is only found when the rows are copied.
    with pq.ParquetFile(lake.path / lake.names[2]) as file:
        offset = file.metadata.row_group(0).column(SHOP.names.index("big")).data_page_offset
    (lake.path / lake.names[2]).write_bytes(whole[:offset] + b"\xff" * 24 + whole[offset + 24 :])
    with pytest.raises(TableUnusable):
        lake.apply(update(1, big="x"), update(25, big="x"))
    assert sorted(path.name for path in lake.path.iterdir()) == before
    assert lake.table.applied_position() == at(0)


def test_keys_of_text_are_found(tmp_path: Path) -> None:
    lake = Lake(tmp_path / "t", TEXT_KEYS)
    lake.apply(update("15", big="changed"), delete("12"), insert("15b", big="new"))
    content = lake.content()
    assert (content["15"]["big"], content["15b"]["big"], len(content)) == ("changed", "new", 30)


def test_a_name_with_a_dot_is_a_column_like_any_other(tmp_path: Path) -> None:
    lake = Lake(tmp_path / "t", ODD)
    changed: dict[str, Any] = {"a.b": 7, "a": 0.5, "lists": ["x", None]}
    new: dict[str, Any] = {"a.b": 8}
    lake.apply(update(15, **changed), insert(31, **new))
    content = lake.content()
    assert content[15] == {"id": 15, **changed}
    assert content[31]["a.b"] == 8


def test_rewritten_floats_with_a_nan_have_no_bounds(tmp_path: Path) -> None:
    lake = Lake(tmp_path / "t", ODD)
    lake.apply(update(15, a=float("nan")), update(16, a=2.0), update(1, a=1.0))
    stats_by_lowest_id = {
        low: stats for name in lake.files() if (stats := lake.stats(name)) and (low := stats["minValues"]["id"])
    }
    assert "a" not in stats_by_lowest_id[11]["maxValues"]
    assert stats_by_lowest_id[1]["maxValues"]["a"] == 1.0


def test_inserted_floats_with_a_nan_have_no_bounds(tmp_path: Path) -> None:
    lake = Lake(tmp_path / "t", ODD)
    lake.apply(insert(31, a=float("nan")), insert(32, a=2.0))
    lake.apply(truncate(), insert(1, a=float("nan")))
    (after,) = lake.files()
    assert "a" not in lake.stats(after)["maxValues"]
    loose = table_schema({"id": pa.int64(), "a": pa.float64()}, key=(), identity=Identity.FULL)
    keyless = Lake(tmp_path / "k", loose)
    keyless.apply(insert(31, a=float("nan")), insert(32, a=2.0))
    (new,) = set(keyless.files()) - set(keyless.names)
    assert "a" not in keyless.stats(new)["maxValues"]


def test_without_a_key_only_files_with_a_removed_copy_are_rewritten(tmp_path: Path) -> None:
    lake = Lake(tmp_path / "t", table_schema({"id": pa.int64(), "name": pa.string()}, key=(), identity=Identity.FULL))
    lake.apply(delete({"id": 15, "name": "n15"}), insert(40, name="new"))
    assert set(lake.names) - set(lake.files()) == {lake.names[1]}
    assert sorted(lake.content()) == [*(i for i in range(1, 31) if i != 15), 40]
    before = lake.files()
    with pytest.raises(BaseRowMissing):
        lake.apply(delete({"id": 3, "name": "n3"}), delete({"id": 3, "name": "other"}))
    assert lake.files() == before


def test_loaded_rewritten_and_recast_files_have_the_target_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "GROUP_ROWS_MAX", 10)
    table = DeltaRsTable(tmp_path, LOG, file_bytes=SMALL_FILE)
    rows = [{"id": i, "big": f"{i}" * 9, "name": "n", "n": i} for i in range(40)]
    table.load(SHOP, record_batches(SHOP, rows), at(0))
    assert len(table.files()) == 4
    table.apply(SHOP, fold(SHOP, changes(SHOP, *(insert(i, big="b" * 99) for i in range(100, 120)))), at(0), at(10))
    assert len(table.files()) == 6, "new rows are not all put into one file"
    wider = replace(SHOP, columns=tuple(replace(c, type=pa.int64()) if c.name == "n" else c for c in SHOP.columns))
    table.evolve(Recast(schema=wider), at(10))
    assert len(table.files()) == 6
    assert table.rows() == 60
