"""Partitioned Delta tables: properties of Delta's protocol and log alone.

Promises of every table are checked in `test_partitions.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from deltalake import DeltaTable

from tailrace.tables.delta.features import Features
from tailrace.tables.delta.rebuild_table import DeltaTableRebuild, rebuild_bases
from tailrace.tables.delta.table import DeltaRsTable
from tailrace.tables.location import TableLocation
from tailrace.tables.spec import PLAIN_MIRROR, TableMode, TableSpec
from tests.support.changes import SHOP, delete, insert, update
from tests.support.engines import FEATURES, commits_of, of_delta, open_table
from tests.support.forms import Formed, Row, ordered, tx
from tests.support.partitions import assert_partitioned, own_columns

pytestmark = of_delta("their partitions are Delta's")

LOG = "0b1c9a3e-6f3b-4e7e-9d80-5e1d5d6a7b11"
HISTORY = TableSpec(mode=TableMode.HISTORY, metadata=("_op",), partition_by=("_current", "n"))
MIRROR = TableSpec(partition_by=("name",))
BIG = ("big",)
ROWS = [{"id": i, "name": f"n {i % 2}", "big": f"large {i}", "n": i} for i in (1, 2, 3)]
without_features = pytest.mark.skipif(FEATURES.any, reason="of tables that have none of Spark's features")


@pytest.fixture
def made(tmp_path: Path) -> Any:
    return lambda form: Formed(open_table(tmp_path / "t", LOG, form), form, tmp_path / "t", SHOP, ROWS)


@without_features
def test_partition_values_are_in_the_log_and_the_folders_but_not_in_the_files(made: Any) -> None:
    table = made(TableSpec(partition_by=("name", "n")))
    table.apply(tx(1, update(1, name=None, n=7, unchanged=BIG)))
    names = table.table.files()
    assert {str(Path(name).parent) for name in names} == {
        "name=n%200/n=2",
        "name=n%201/n=3",
        "name=__HIVE_DEFAULT_PARTITION__/n=7",
    }
    assert {own_columns(table.folder / name, "name", "n") for name in names} == {("id", "big")}
    commit = (table.folder / "_delta_log" / f"{1:020d}.json").read_text().splitlines()
    (add,) = [action["add"] for action in map(json.loads, commit) if "add" in action]
    assert add["partitionValues"] == {"name": None, "n": "7"}


def test_versions_with_an_earlier_partitioning_can_still_be_read(tmp_path: Path) -> None:
    """An Iceberg table forgets columns that it was partitioned by earlier."""
    path = tmp_path / "t"
    for form in (MIRROR, PLAIN_MIRROR, TableSpec(partition_by=("n",))):
        Formed(open_table(path, LOG, form), form, path, rows=ROWS[: 1 + len(form.partition_by)])
    assert commits_of(path) == 2
    versions = [pa.table(DeltaTable(str(path), version=number).scan()).num_rows for number in range(3)]
    assert versions == [2, 1, 2]


@without_features
def test_a_table_with_spark_features_can_be_replaced_by_a_partitioned_one_and_back(tmp_path: Path) -> None:
    path = tmp_path / "t"
    rows: list[Row] = [*ROWS, {"id": 4, "name": "a/b é%", "big": None, "n": None}]
    featured = DeltaRsTable(path, LOG, PLAIN_MIRROR, Features(deletion_vectors=True))
    Formed(featured, PLAIN_MIRROR, path, rows=rows)
    assert_partitioned(table := Formed(open_table(path, LOG, MIRROR), MIRROR, path, rows=rows))
    assert ordered(pl.read_delta(str(path)).to_dicts()) == table.content() == ordered(rows)
    table.apply(tx(1, update(4, name="x", n=1, unchanged=BIG)))
    assert table.tuples("id", "name")[-1] == (4, "x")
    Formed(featured, PLAIN_MIRROR, path, rows=rows)
    assert DeltaTable(str(path)).metadata().partition_columns == []
    assert table.table.rows() == len(rows)


@without_features
@pytest.mark.parametrize("form", [MIRROR, HISTORY], ids=str)
def test_a_table_is_rebuilt_with_its_partitions(made: Any, form: TableSpec) -> None:
    table = made(form)
    table.apply(tx(2000, update(1, name="a/b", n=8, unchanged=BIG)))
    wanted = table.content()
    table.apply(tx(3000, delete(2), insert(9, name="later", n=9)))
    place = TableLocation(path=table.folder, log_id=LOG, spec=form)
    _, base, _ = rebuild_bases(place)
    with DeltaTableRebuild(place) as rebuilding:
        assert rebuilding.restore_base(base) == len(wanted)
        assert rebuilding.swap(base.commit_record.applied_position) == len(wanted)
    assert table.content() == wanted
    assert_partitioned(table)
    assert open_table(table.folder, LOG, form).applied_position() == base.commit_record.applied_position
