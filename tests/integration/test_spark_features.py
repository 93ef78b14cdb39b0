"""Deletion vectors and column mapping, which only Spark's connector writes: what they spare, and that all is there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from deltalake.exceptions import DeltaProtocolError

from tailrace import tables_at
from tailrace.changelog.read.reader import ChangeLog
from tailrace.errors import TableUnusable
from tailrace.model.schema import Column, TableSchema
from tailrace.tables.compaction_plan import UpkeepPlan
from tailrace.tables.delta.commit_log import actions_of
from tailrace.tables.delta.features import Features
from tailrace.tables.delta.table import DeltaRsTable
from tailrace.tables.evolve.schema_plan import Recast
from tailrace.tables.fold.fold import fold
from tailrace.tables.staging import StagedFile, stage
from tests.support.changes import SHOP, changes, delete, insert, move, record_batches, truncate, update
from tests.support.engines import only_spark, open_table, session
from tests.support.mirrors import BIG, LOG, at, by_id, content
from tests.support.pipelines import Pipeline, execute

pytestmark = only_spark

VECTORS, MAPPING = Features(deletion_vectors=True), Features(column_mapping=True)
BOTH = Features(deletion_vectors=True, column_mapping=True)
MANY = [{"id": i, "name": f"n{i}", "big": f"large {i}", "n": i} for i in range(1, 101)]


def read(path: Path) -> list[dict[str, Any]]:
    """As Spark reads it."""
    return [row.asDict() for row in session().read.format("delta").load(str(path)).collect()]


def newest(path: Path, table: Any) -> list[dict[str, Any]]:
    return actions_of(path, table.version())


def apply(table: Any, seq: int, *rows: Any, schema: TableSchema = SHOP) -> Any:
    return table.apply(schema, fold(schema, changes(schema, *rows)), at(seq), at(seq + 10))


def test_rows_that_change_get_a_vector_and_their_file_stays(tmp_path: Path) -> None:
    table = open_table(tmp_path, LOG, features=VECTORS)
    table.load(SHOP, record_batches(SHOP, MANY), at(0))
    (file,) = table.files()
    size = (tmp_path / file).stat().st_size
    applied = apply(
        table,
        0,
        update(1, name="one", n=1, unchanged=BIG),
        delete(2),
        *move(3, 333, unchanged=BIG),
        insert(1000),
        delete(4),
    )
    adds = {action["add"]["path"]: action["add"] for action in newest(tmp_path, table) if "add" in action}
    assert adds[file]["deletionVector"]["cardinality"] == 4, "rows went, and the file is the same"
    assert applied.bytes < size, "it was not written anew"
    expected = {row["id"]: row["big"] for row in MANY} | {333: "large 3", 1000: None}
    for gone in (2, 3, 4):
        del expected[gone]
    assert by_id(read(tmp_path)) == by_id(content(tmp_path, SHOP)) == expected
    assert table.rows() == len(expected) == DeltaRsTable(tmp_path, LOG, features=VECTORS).rows()
    with pytest.raises(TableUnusable, match="deletionVectors") as refused:
        DeltaRsTable(tmp_path, LOG).applied_position()
    assert "tables.engine: spark" in refused.value.hint
    assert pl.read_delta(str(tmp_path)).height == len(expected), "Polars reads vectors"


def test_columns_are_renamed_dropped_and_added_and_no_file_is_touched(tmp_path: Path) -> None:
    table = open_table(tmp_path, LOG, features=MAPPING)
    table.load(SHOP, record_batches(SHOP, MANY[:5]), at(0))
    files, id_, name, big, n = table.files(), *SHOP.columns
    title, was_n, was_big = replace(name, name="title, or so"), replace(n, name="big"), replace(big, name="n")
    steps = [
        Recast(schema=replace(SHOP, columns=(id_, title, big, n)), renamed=((name.name, title.name),)),
        Recast(
            schema=replace(SHOP, columns=(id_, was_n, was_big)),
            renamed=(("big", "n"), ("n", "big")),
            dropped=(title.name,),
        ),
        Recast(schema=replace(SHOP, columns=(id_, was_n, was_big, name)), added=("name",)),
    ]
    for step, recast in enumerate(steps):
        shape = recast.schema
        assert table.evolve(recast, at(0)).committed
        assert (table.version(), table.files(), table.schema()) == (step + 1, files, shape)
        assert not [action for action in newest(tmp_path, table) if {"add", "remove"} & set(action)]
        assert not table.evolve(recast, at(0)).committed, "it is so already"
    assert read(tmp_path) == [{"id": row["id"], "big": row["n"], "n": row["big"], "name": None} for row in MANY[:5]], (
        "what was called so before does not come back"
    )
    apply(table, 0, update(1, big=7, n="seven", name="new"), delete(2), schema=shape)
    found = {row["id"]: (row["big"], row["n"], row["name"]) for row in read(tmp_path)}
    assert found == {1: (7, "seven", "new")} | {i: (i, f"large {i}", None) for i in (3, 4, 5)}
    assert {row["id"]: row["name"] for row in content(tmp_path, shape)} == {1: "new", 3: None, 4: None, 5: None}
    with pytest.raises(DeltaProtocolError, match="columnMapping"):
        pl.read_delta(str(tmp_path))


def test_what_changes_values_is_written_anew(tmp_path: Path) -> None:
    table = open_table(tmp_path, LOG, features=BOTH)
    table.load(SHOP, record_batches(SHOP, MANY[:5]), at(0))
    apply(table, 0, delete(2))
    fresh = Column(name="at", source_type="timestamp", type=pa.timestamp("us"))
    shape = replace(SHOP, columns=(*SHOP.columns[:3], replace(SHOP.columns[3], type=pa.int64()), fresh))
    filled = (("at", pa.scalar(1_000_000, pa.timestamp("us"))),)
    table.evolve(Recast(schema=shape, added=("at",), backfilled=filled), at(10))
    assert {(row["n"], row["at"].year) for row in read(tmp_path)} == {(n, 1970) for n in (1, 3, 4, 5)}
    apply(table, 10, truncate(), insert(9, big="nine"), schema=shape)
    assert by_id(read(tmp_path)) == by_id(content(tmp_path, shape)) == {9: "nine"}
    assert table.rows() == 1


def test_files_with_vectors_are_joined_without_the_rows_that_went(tmp_path: Path) -> None:
    files = list[StagedFile]()
    for number in range(10):
        rows = [{"id": number * 10 + i, "big": f"{number}.{i}"} for i in range(10)]
        files += stage(tmp_path, f"load-{number}", SHOP, record_batches(SHOP, rows))
    table = open_table(tmp_path, LOG, features=BOTH)
    table.commit_load(SHOP, files, at(0))
    renamed = replace(SHOP, columns=(SHOP.columns[0], replace(SHOP.columns[1], name="title"), *SHOP.columns[2:]))
    table.evolve(Recast(schema=renamed, renamed=(("name", "title"),)), at(0))
    apply(table, 0, *(delete(number * 10 + 3) for number in range(10)), update(0, big="x", title="t"), schema=renamed)
    before = by_id(read(tmp_path))
    assert len(before) == table.rows() == 90
    vectors = list(tmp_path.glob("**/deletion_vector_*.bin"))
    assert vectors
    java = session()._jvm
    assert java is not None
    java.org.apache.spark.sql.delta.DeltaLog.forTable(session()._jsparkSession, str(tmp_path)).checkpoint()
    assert table.rows() == 90, "the list of files tells of the vectors, too"
    tended = table.compact(UpkeepPlan(file_bytes=1 << 20, remove_after_seconds=None), at(10))
    assert (tended.files_compacted >= 10, tended.files_written, table.applied_position(), table.rows()) == (
        True,
        1,
        at(10),
        90,
    )
    assert by_id(read(tmp_path)) == by_id(content(tmp_path, renamed)) == before
    assert table.compact(UpkeepPlan(file_bytes=None, remove_after_seconds=0.0), at(10)).files_removed >= 10 + len(
        vectors
    )
    apply(table, 10, update(1, big="y", title="u"), delete(2), schema=renamed)
    assert table.compact(UpkeepPlan(file_bytes=None, remove_after_seconds=0.0), at(20)).files_removed == 0, (
        "all is in use"
    )
    del before[2]
    assert by_id(read(tmp_path)) == before | {1: "y"}
    table.load(SHOP, record_batches(SHOP, MANY[:2]), at(30))
    assert by_id(read(tmp_path)) == by_id(content(tmp_path, SHOP)) == {1: "large 1", 2: "large 2"}
    assert table.rows() == 2


def test_loaded_anew_without_them_every_reader_has_it_again(tmp_path: Path) -> None:
    open_table(tmp_path, LOG, features=BOTH).load(SHOP, record_batches(SHOP, MANY), at(0))
    apply(open_table(tmp_path, LOG, features=BOTH), 0, delete(5))
    plain = DeltaRsTable(tmp_path, LOG)
    plain.load(SHOP, record_batches(SHOP, MANY[:3]), at(20))
    apply(plain, 20, delete(1))
    apply(open_table(tmp_path, LOG), 30, delete(2))
    assert by_id(read(tmp_path)) == by_id(content(tmp_path, SHOP)) == {3: "large 3"}
    assert pl.read_delta(str(tmp_path))["id"].to_list() == [3]


def test_a_feature_that_someone_turned_on_is_named(tmp_path: Path) -> None:
    table = open_table(tmp_path, LOG)
    table.load(SHOP, record_batches(SHOP, MANY[:3]), at(0))
    session().sql(f"ALTER TABLE delta.`{tmp_path}` SET TBLPROPERTIES ('delta.columnMapping.mode' = 'name')")
    with pytest.raises(TableUnusable, match="columnMapping") as refused:
        DeltaRsTable(tmp_path, LOG).applied_position()
    assert "tailrace snapshot FILE TABLE" in refused.value.hint
    table.load(SHOP, record_batches(SHOP, MANY[:2]), at(10))
    assert (table.applied_position(), len(read(tmp_path))) == (at(10), 2)


SETTINGS = """  engine: spark
  column_mapping: true
  rules: {"public.orders": {deletion_vectors: true}}
"""


def test_a_pipeline_has_tables_with_them(database: str, tmp_path: Path) -> None:
    execute(
        database,
        "CREATE TABLE orders (id int PRIMARY KEY, name text, n numeric(12, 3), gone int)",
        "CREATE TABLE marks (a int, b text)",
        "ALTER TABLE marks REPLICA IDENTITY FULL",
        "INSERT INTO orders SELECT g, 'n' || g, g, g FROM generate_series(1, 50) g",
        "INSERT INTO marks VALUES (1, 'x'), (1, 'x'), (2, NULL)",
    )
    pipeline = Pipeline(tmp_path / "one", database)
    plain = pipeline.file.read_text()
    pipeline.file.write_text(plain + SETTINGS)
    pipeline.catch_up()
    orders = pipeline.lake / "public" / "orders"
    table = DeltaRsTable(orders, ChangeLog.open(pipeline.log).log_id, features=BOTH)
    files = table.files()
    execute(
        database,
        "ALTER TABLE orders RENAME name TO title",
        "ALTER TABLE orders DROP gone",
        "ALTER TABLE marks RENAME b TO c",
        "DELETE FROM marks WHERE a = 2",
        "UPDATE orders SET title = 'changed' WHERE id <= 10",
        "DELETE FROM orders WHERE id = 11",
    )
    pipeline.catch_up()
    assert set(files) <= set(table.files()), "renamed, dropped, updated and deleted, and not written anew"
    assert table.rows() == 49
    rows = {row["id"]: row["title"] for row in read(orders)}
    assert rows == {i: "changed" if i <= 10 else f"n{i}" for i in range(1, 51) if i != 11}
    past = tables_at(session(), pipeline.file)["public.orders"]
    assert {row["id"]: row["title"] for row in past.collect()} == rows
    assert sorted(row["c"] for row in read(pipeline.lake / "public" / "marks")) == ["x", "x"]
    pipeline.file.write_text(plain)
    done = pipeline.call("run", "--until-caught-up")
    assert "does not write" in done.stderr + done.stdout
