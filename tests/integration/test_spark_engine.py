"""Tables that Spark's connector writes: beside delta-rs, and under a whole pipeline. What passes the driver:
`test_spark_driver.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tailrace.errors import TableFailed
from tailrace.tables.compaction_plan import UpkeepPlan
from tailrace.tables.delta.table import DeltaRsTable
from tailrace.tables.fold.fold import fold
from tailrace.tables.spec import TableMode, TableSpec
from tailrace.tables.staging import StagedFile, stage
from tests.support.changes import KEYLESS, SHOP, changes, delete, insert, move, record_batches, truncate, update
from tests.support.engines import only_spark, open_table, session
from tests.support.forms import Account, Formed, ordered, tx
from tests.support.mirrors import BIG, LOG, ROWS, at, by_id, content
from tests.support.pipelines import Pipeline, execute

pytestmark = only_spark

HISTORY = TableSpec(mode=TableMode.HISTORY, metadata=("_op",))
FILE_BYTES = 64 << 10


def test_the_connector_writes_files_of_about_the_size_aimed_at(tmp_path: Path) -> None:
    from tailrace.spark.writers.delta_writer import SparkDeltaTable

    rows = [{"id": i, "name": f"{i * 7919 % 99991}", "big": f"{i * 104729}" * 20, "n": i} for i in range(30_000)]
    table = SparkDeltaTable(session(), tmp_path / "t", LOG, file_bytes=FILE_BYTES)
    DeltaRsTable(tmp_path / "t", LOG).load(SHOP, record_batches(SHOP, rows), at(0))
    (whole,) = (size_of(tmp_path / "t", name) for name in table.files())
    assert whole > 3 * FILE_BYTES
    every = [update(row["id"], name="new", big=row["big"], n=0) for row in rows]
    table.apply(SHOP, fold(SHOP, changes(SHOP, *every)), at(0), at(10))
    assert max(size_of(tmp_path / "t", name) for name in table.files()) < 2 * FILE_BYTES
    assert table.rows() == len(rows)


def size_of(folder: Path, name: str) -> int:
    return (folder / name).stat().st_size


def test_each_engine_goes_on_with_the_other_s_table(tmp_path: Path) -> None:
    path = tmp_path / "t"
    engines = [DeltaRsTable(path, LOG), open_table(path, LOG)]
    engines[0].load(SHOP, record_batches(SHOP, ROWS), at(0))
    steps: list[tuple[Any, ...]] = [
        (update(1, n=1, unchanged=BIG), delete(2)),
        (*move(1, 11, unchanged=BIG), insert(6, big="six")),
        (update(11, n=2, unchanged=BIG), update(6, n=1, unchanged=BIG)),
        (delete(77), *move(3, 33, unchanged=BIG)),
    ]
    for number, rows in enumerate(steps):
        table = engines[(number + 1) % 2]
        applied = table.apply(SHOP, fold(SHOP, changes(SHOP, *rows)), at(number * 10), at(number * 10 + 10))
        assert (applied.committed, applied.version) == (True, number + 1)
        for engine in engines:
            assert (engine.applied_position(), engine.schema()) == (at(number * 10 + 10), SHOP)
    assert by_id(content(path, SHOP)) == {11: "large 1", 4: "large 4", 5: "large 5", 6: "six", 33: "large 3"}


@pytest.mark.parametrize("form", [TableSpec(soft_delete=True, metadata=("_op", "_seq", "_tx")), HISTORY], ids=str)
def test_a_table_of_any_form_goes_on_with_either(tmp_path: Path, form: TableSpec) -> None:
    path = tmp_path / "t"
    by = [DeltaRsTable(path, LOG, form), open_table(path, LOG, form)]
    rows = [{"id": i, "name": "begun", "big": f"large {i}", "n": i} for i in (1, 2, 3)]
    table, account = Formed(by[0], form, path, SHOP, rows), Account(SHOP)
    for number, given in enumerate(
        [
            (tx(2000, update(1, name="a", n=1, unchanged=BIG), delete(2)), tx(1500, *move(1, 11, unchanged=BIG, n=5))),
            (tx(2500, update(11, name="b", n=2, unchanged=BIG)), tx(3000, truncate(), insert(3, name="c", n=0))),
            (
                tx(2800, update(3, name="d", n=1, unchanged=BIG), insert(2, n=2)),
                tx(4000, *move(3, 1, unchanged=BIG, n=4)),
            ),
        ]
    ):
        table.table = by[(number + 1) % 2]
        assert table.apply(*given).committed
    account.load(rows)
    for batch in table.given:
        account.take(batch)
    assert table.content() == ordered(account.versions if form is HISTORY else account.marked.values())


def test_small_files_are_joined_and_the_position_stays(tmp_path: Path) -> None:
    path, files = tmp_path / "t", list[StagedFile]()
    for number in range(10):
        files += stage(path, f"load-{number}", SHOP, record_batches(SHOP, [{"id": number, "big": str(number)}]))
    table = open_table(path, LOG)
    table.commit_load(SHOP, files, at(0))
    tended = table.compact(UpkeepPlan(file_bytes=1 << 20, remove_after_seconds=None), at(0))
    assert (tended.files_compacted, tended.files_written, len(table.files())) == (10, 1, 1)
    for engine in (table, DeltaRsTable(path, LOG)):
        assert (engine.applied_position(), engine.rows()) == (at(0), 10)
    assert table.compact(UpkeepPlan(file_bytes=1 << 20, remove_after_seconds=3600.0), at(0)).files_compacted == 0
    assert by_id(content(path, SHOP)) == {number: str(number) for number in range(10)}


SOURCE = """
CREATE TABLE orders (id int PRIMARY KEY, name text, big text, at timestamp, tz timestamptz, n numeric(12, 3), l int[]);
ALTER TABLE orders ALTER big SET STORAGE EXTERNAL;
CREATE TABLE marks (a int, b text);
ALTER TABLE marks REPLICA IDENTITY FULL;
CREATE TABLE cleared (id int PRIMARY KEY, t text);
INSERT INTO orders SELECT g, 'n' || g, repeat('x', 5000), now(), now(), g, ARRAY[g] FROM generate_series(1, 50) g;
INSERT INTO marks VALUES (1, 'x'), (1, 'x'), (1, 'x'), (2, NULL);
INSERT INTO cleared VALUES (1, 'a');
"""
FIRST = [
    "UPDATE orders SET name = 'changed' WHERE id <= 10",
    "UPDATE orders SET id = 1000 WHERE id = 1",
    "DELETE FROM orders WHERE id = 2",
    "DELETE FROM marks WHERE ctid = (SELECT min(ctid) FROM marks)",
    "TRUNCATE cleared",
    "INSERT INTO cleared VALUES (2, 'b')",
    "ALTER TABLE orders ADD extra text DEFAULT 'filled'",
    "ALTER TABLE orders RENAME name TO title",
    "INSERT INTO orders (id, title) VALUES (2000, 'new')",
]
SECOND = ["UPDATE orders SET n = n + 1", "INSERT INTO marks VALUES (3, 'z')", "DELETE FROM cleared"]


def test_a_pipeline_changes_its_engine_and_back(database: str, tmp_path: Path) -> None:
    execute(database, *(line for line in SOURCE.split(";\n") if line.strip()))
    pipeline = Pipeline(tmp_path / "one", database)
    plain = pipeline.file.read_text()
    pipeline.catch_up()
    execute(database, *FIRST)
    pipeline.file.write_text(plain + "  engine: spark\n")
    pipeline.catch_up()
    pipeline.assert_equal("orders", "marks", "cleared")
    assert "Apache-Spark" in newest_commit(pipeline.lake / "public" / "orders")
    execute(database, *SECOND)
    pipeline.file.write_text(plain)
    pipeline.catch_up()
    pipeline.assert_equal("orders", "marks", "cleared")
    assert "Apache-Spark" not in newest_commit(pipeline.lake / "public" / "orders")


def test_jars_that_cannot_be_had_are_named_with_the_next_step(database: str, tmp_path: Path) -> None:
    execute(database, "CREATE TABLE t (id int PRIMARY KEY)")
    pipeline = Pipeline(tmp_path / "one", database)
    wrong = "io.delta:delta-spark_9.9_2.13:1.0"
    spark = f'spark: {{settings: {{spark.jars.packages: "{wrong}"}}}}\n'
    pipeline.file.write_text(spark + pipeline.file.read_text() + "  engine: spark\n")
    done = pipeline.call("run", "--until-caught-up")
    assert done.returncode == TableFailed.exit_code, done.stderr
    assert f"error: Spark did not start with its Delta connector (packages={wrong})" in done.stderr
    assert "hint: Check that this machine can fetch the jars" in done.stderr


def newest_commit(folder: Path) -> str:
    return max((folder / "_delta_log").glob("*.json")).read_text()


@pytest.mark.parametrize("rows", [(truncate(), insert({"a": 5})), (delete({"a": 1, "b": "x"}), insert({"a": 5}))])
def test_a_keyless_table_goes_on_with_either(tmp_path: Path, rows: tuple[Any, ...]) -> None:
    path = tmp_path / "t"
    DeltaRsTable(path, LOG).load(KEYLESS, record_batches(KEYLESS, [{"a": 1, "b": "x"}] * 3), at(0))
    open_table(path, LOG).apply(KEYLESS, fold(KEYLESS, changes(KEYLESS, *rows)), at(0), at(10))
    more = fold(KEYLESS, changes(KEYLESS, insert({"a": 6}), insert({"a": 6}), delete({"a": 5})))
    DeltaRsTable(path, LOG).apply(KEYLESS, more, at(10), at(20))
    left = sorted(str(row["a"]) for row in content(path, KEYLESS))
    assert left == (["6", "6"] if rows[0].op == "truncate" else ["1", "1", "6", "6"])
