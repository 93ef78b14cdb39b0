"""A table's folder: the name verbatim where possible, never outside its root."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import unquote

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from hypothesis import given
from hypothesis import strategies as st

from tailrace.errors import TableUnusable
from tailrace.model.position import Lsn
from tailrace.model.schema import TableId
from tailrace.tables.delta.table import DeltaRsTable
from tailrace.tables.port import AppliedPosition
from tailrace.tables.table_paths import table_path
from tests.support.changes import SHOP, record_batches

ROOT = Path("/lake")
NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)


@pytest.mark.parametrize("name", ["orders", "Order Items", 'He said "hi"', "naïve", "a.b", "a\\b", "~", "-rf", "日本"])
def test_an_ordinary_name_is_the_folder_verbatim(name: str) -> None:
    assert table_path(ROOT, TableId("public", name)) == ROOT / "public" / name


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("a/b", "a%2Fb"), ("100%", "100%25"), ("a%2Fb", "a%252Fb"), (".hidden", "%2Ehidden"), (".", "%2E"),
        ("..", "%2E."), ("a.", "a."), ("tab\there", "tab%09here"), ("\x00", "%00"), ("\x7f", "%7F"),
        ("\x85", "%C2%85"), ("../../etc", "%2E.%2F..%2Fetc"),
    ],
)  # fmt: skip
def test_characters_that_a_path_cannot_hold_are_percent_encoded(name: str, folder: str) -> None:
    assert table_path(ROOT, TableId("public", name)) == ROOT / "public" / folder
    assert table_path(ROOT, TableId(name, "t")) == ROOT / folder / "t"


def test_names_with_dots_do_not_share_a_folder() -> None:
    assert table_path(ROOT, TableId("a.b", "c")) != table_path(ROOT, TableId("a", "b.c"))


@pytest.mark.parametrize("name", ["", "x" * 256, "/" * 86, "é" * 128])
def test_an_unusable_folder_name_is_refused_with_a_hint(name: str) -> None:
    with pytest.raises(TableUnusable) as refused:
        table_path(ROOT, TableId("public", name))
    assert "Rename" in refused.value.hint


@pytest.mark.parametrize("table", [TableId("public", "_delta_log"), TableId("_delta_log", "t")])
def test_the_name_of_delta_s_log_folder_is_refused(table: TableId) -> None:
    with pytest.raises(TableUnusable, match="Delta's log folder") as refused:
        table_path(ROOT, table)
    assert "`name:`" in refused.value.hint
    assert table_path(ROOT, table, "log/of_{table}") == ROOT / "log" / f"of_{table.name}"


@pytest.mark.parametrize("name", ["x" * 255, "/" * 85])
def test_a_name_of_255_bytes_is_a_folder(name: str) -> None:
    assert len(table_path(ROOT, TableId("public", name)).name.encode()) == 255


@given(NAMES, NAMES)
def test_no_path_leaves_its_root_and_every_path_reads_back(schema: str, name: str) -> None:
    path = table_path(ROOT, TableId(schema, name))
    assert path.resolve().relative_to(ROOT).parts == path.relative_to(ROOT).parts
    assert tuple(unquote(part) for part in path.relative_to(ROOT).parts) == (schema, name)


@pytest.mark.parametrize("template", ["{schema}/{table}", "{schema}/{table}/data", "{table}", "{table}/{schema}/d"])
@pytest.mark.parametrize("table", [TableId("a[b", "t"), TableId("public", "a/b"), TableId("a|b", "c^d")], ids=str)
def test_a_name_that_delta_rs_cannot_use_is_still_written_in_the_lake(
    tmp_path: Path, template: str, table: TableId
) -> None:
    lake = tmp_path / "lake"
    path = table_path(lake, table, template)
    DeltaRsTable(path, "a-log").load(
        SHOP, record_batches(SHOP, [{"id": 1}]), AppliedPosition(seq=0, commit=0, position=Lsn(1))
    )
    assert path.resolve().is_relative_to(lake)
    assert [entry.name for entry in tmp_path.iterdir()] == ["lake"]
    assert pa.table(DeltaTable(str(path.resolve())).scan()).column("id").to_pylist() == [1]
