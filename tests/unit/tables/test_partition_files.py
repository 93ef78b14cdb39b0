"""Staging of partitioned tables, and removal of files with names that Spark has given.

Spark's connector leaves non-ASCII characters in file names as they are, and delta-rs does not. If a commit removes a
file under another name than the log's, readers still count the file as part of the table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from tailrace.errors import TableUnusable
from tailrace.model.schema import Column
from tailrace.tables import staging
from tailrace.tables.compaction_plan import UpkeepPlan, remove_files
from tailrace.tables.delta.commit_log import actions_of, file_names
from tailrace.tables.delta.table import DeltaRsTable
from tailrace.tables.evolve.schema_plan import Recast
from tailrace.tables.spec import PLAIN_MIRROR, TableMode, TableSpec
from tailrace.tables.staging import discard, stage
from tests.support.changes import KEYLESS, SHOP, delete, insert, record_batches, table_schema, truncate, update
from tests.support.forms import Formed, again, ordered, tx

LOG = "0b1c9a3e-6f3b-4e7e-9d80-5e1d5d6a7b11"
MIRROR = TableSpec(partition_by=("name",))
HISTORY = TableSpec(mode=TableMode.HISTORY, partition_by=("name",))
ROWS = [{"id": i, "name": f"n {i % 2}", "big": f"large {i}", "n": i} for i in (1, 2, 3)]


def opened(path: Path, spec: TableSpec) -> DeltaRsTable:
    return DeltaRsTable(path, LOG, spec)


def files(table: Formed) -> list[str]:
    return file_names(DeltaTable(str(table.folder)))


def test_rows_of_many_partitions_are_written_with_few_files_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "OPEN_FILES_MAX", 3)
    monkeypatch.setattr(staging, "WAITING_BYTES_MAX", 2_000)
    monkeypatch.setattr(staging, "GROUP_ROWS_MAX", 100)
    open_now: list[int] = []
    opening = staging._Parts._opened

    def counted(parts: Any, group: Any) -> Any:
        found = opening(parts, group)
        open_now.append(len(list(Path("/proc/self/fd").iterdir())))
        return found

    monkeypatch.setattr(staging._Parts, "_opened", counted)
    rows = [{"id": i, "name": f"p{i * 7 % 20}", "big": "x", "n": i} for i in range(1000)]
    before = len(list(Path("/proc/self/fd").iterdir()))
    table = Formed(opened(tmp_path / "t", MIRROR), MIRROR, tmp_path / "t", SHOP, rows)
    assert max(open_now) <= before + 3 + 4
    assert {str(Path(name).parent) for name in files(table)} == {f"name=p{i}" for i in range(20)}
    assert table.content() == ordered(rows)
    assert table.table.rows() == 1000
    assert len(DeltaTable(str(table.folder)).file_uris()) > 20


def test_numbered_files_hold_their_partition_columns_and_are_in_one_folder(tmp_path: Path) -> None:
    schema = table_schema({"id": pa.int64(), "p": pa.string()})
    rows = [{"id": i, "p": p} for i, p in enumerate(["a/b", None, "a/b"])]
    files = stage(tmp_path / "t", "load", schema, record_batches(schema, rows), ("p",), numbered=True)
    found = {file.values["p"]: pq.ParquetFile(tmp_path / "t" / file.path).read() for file in files}
    assert {p: table.to_pylist() for p, table in found.items()} == {"a/b": [rows[0], rows[2]], None: [rows[1]]}
    assert all("/" not in file.path for file in files)
    assert [field.metadata[b"PARQUET:field_id"] for field in found[None].schema] == [b"1", b"2"]


def test_a_load_s_staged_files_are_discarded_by_name(tmp_path: Path) -> None:
    path, by = tmp_path / "t", ("name", "n")
    stage(path, "one-a", SHOP, record_batches(SHOP, ROWS), by)
    stage(path, "two-a", SHOP, record_batches(SHOP, ROWS), by)
    assert opened(path, MIRROR).applied_position() is None, "folders of partitions are not a table, and not in the way"
    assert discard(path, "one") == 3
    assert {file.name[:9] for file in path.rglob("*.parquet")} == {"part-two-"}
    (path / "name=n%200" / "n=2" / "notes.txt").write_text("mine")
    with pytest.raises(TableUnusable, match="not a Delta table"):
        opened(path, MIRROR).applied_position()


# --- files that Spark has named ----------------------------------------------------------------------------

ODD: list[dict[str, Any]] = [
    {"id": 1, "name": "é b", "big": "x", "n": 1}, {"id": 2, "name": "é b", "big": "y", "n": 2},
    {"id": 3, "name": "水/%", "big": "z", "n": 3}, {"id": 4, "name": None, "big": "w", "n": 4},
]  # fmt: skip


def name_as_spark_does(folder: Path) -> None:
    """Give the files that delta-rs has written the names that Spark's connector would give them."""
    new_names = dict[str, str]()
    for name in file_names(DeltaTable(str(folder))):
        column, _, value = unquote(name.partition("/")[0]).partition("=")
        if not value.isascii():
            disk = f"{column}={value.replace('%', '%25').replace('/', '%2F')}/{Path(name).name}"
            (folder / disk).parent.mkdir(exist_ok=True)
            (folder / name).rename(folder / disk)
            new_names[quote(name, safe="/=")] = disk.replace("%", "%25").replace(" ", "%20")
    for commit in (folder / "_delta_log").glob("*.json"):
        text = commit.read_text()
        for old, new in new_names.items():
            text = text.replace(old, new)
        commit.write_text(text)


def assert_removed_as_added(folder: Path, partition_by: Sequence[str]) -> None:
    """Check that every file is removed under exactly the name it was added by."""
    live = set[str]()
    for version in range(DeltaTable(str(folder)).version() + 1):
        actions = actions_of(folder, version)
        removed = [action["remove"] for action in actions if "remove" in action]
        assert {action["path"] for action in removed} <= live
        # A map: the order of its keys means nothing.
        assert all(sorted(action["partitionValues"]) in ([], sorted(partition_by)) for action in removed)
        live -= {action["path"] for action in removed}
        live |= {action["add"]["path"] for action in actions if "add" in action}
    assert sorted(map(unquote, live)) == sorted(file_names(DeltaTable(str(folder))))


def odd(tmp_path: Path, spec: TableSpec = MIRROR, rows: Any = ODD, schema: Any = SHOP) -> Formed:
    table = Formed(opened(tmp_path / "t", spec), spec, tmp_path / "t", schema, rows)
    name_as_spark_does(table.folder)
    assert not all(map(str.isascii, files(table)))
    return table


def _loaded(table: Formed, form: TableSpec) -> None:
    Formed(opened(table.folder, form), form, table.folder, rows=ODD[:2])


def _evolved(table: Formed) -> None:
    shape = replace(SHOP, columns=(*SHOP.columns[:3], Column(name="m", source_type="int", type=pa.int32())))
    table.table.evolve(Recast(schema=shape, renamed=(("n", "m"),)), table.cursor(table.seq))


STEPS: dict[str, tuple[Callable[[Formed], object], list[tuple[int, str]]]] = {
    "update": (lambda table: table.apply(tx(1, update(1, name="é b", big="new", n=9))), [(1, "new"), (2, "y")]),
    "leave": (lambda table: table.apply(tx(1, update(1, name="a", big="x", n=1))), [(1, "x"), (2, "y")]),
    "delete": (lambda table: table.apply(tx(1, delete(2))), [(1, "x")]),
    "truncate": (lambda table: table.apply(tx(1, truncate(), insert(1, name="水", big="q"))), [(1, "q")]),
    "load": (lambda table: _loaded(table, MIRROR), [(1, "x"), (2, "y")]),
    "another spec": (lambda table: _loaded(table, PLAIN_MIRROR), [(1, "x"), (2, "y")]),
    "evolve": (_evolved, [(1, "x"), (2, "y")]),
    "refresh": (lambda table: again(table, [ODD[0] | {"big": "other"}], "again", 2000), [(1, "other")]),
}  # fmt: skip


@pytest.mark.parametrize("listed", [False, True], ids=["", "checkpoint"])
@pytest.mark.parametrize("step", STEPS)
def test_files_that_spark_has_named_are_removed(tmp_path: Path, step: str, listed: bool) -> None:
    table = odd(tmp_path)
    if listed:
        DeltaTable(str(table.folder)).create_checkpoint()
    act, wanted = STEPS[step]
    act(table)
    assert_removed_as_added(table.folder, ("name",))
    found = {row["id"]: row["big"] for row in pl.read_delta(str(table.folder)).to_dicts()}
    assert sorted((key, big) for key, big in found.items() if key < 3) == wanted
    assert (3 in found) == (step in ("update", "leave", "delete", "evolve"))


def test_a_history_and_a_table_without_a_key_find_their_files(tmp_path: Path) -> None:
    history = odd(tmp_path / "h", HISTORY)
    history.apply(tx(2000, update(1, name="é b", big="new", n=9)), tx(3000, delete(3)))
    assert history.tuples("id", "big", "_current")[:2] == [(1, "new", True), (1, "x", False)]
    keyless = odd(
        tmp_path / "k", TableSpec(partition_by=("b",)), [{"a": 1, "b": "é"}] * 2 + [{"a": 2, "b": "ü"}], KEYLESS
    )
    keyless.apply(tx(1, delete({"a": 1}, b="é")))
    assert keyless.content() == [{"a": 1, "b": "é"}, {"a": 2, "b": "ü"}]
    for table in (history, keyless):
        assert_removed_as_added(table.folder, table.form.partition_by)


def test_files_that_spark_has_named_are_compacted_and_removed(tmp_path: Path) -> None:
    table = Formed(opened(tmp_path / "t", MIRROR), MIRROR, tmp_path / "t", rows=ODD)
    for n in range(9):
        table.apply(tx(1, insert(10 + n, name="é b")))
    name_as_spark_does(table.folder)
    before, old = table.content(), files(table)
    tended = table.table.compact(UpkeepPlan(file_bytes=1 << 20, remove_after_seconds=None), table.cursor(table.seq))
    assert (tended.files_compacted, tended.files_written) == (10, 1)
    assert_removed_as_added(table.folder, ("name",))
    state = opened(table.folder, MIRROR).opened()
    assert remove_files(table.folder, state.table, 0, state.commit_record.properties()) == 10
    assert {name for name in old if (table.folder / name).exists()} == {*old} & {*files(table)}
    assert table.content() == before
