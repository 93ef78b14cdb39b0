"""Work that Spark's connector does, from the log to the commit: no row passes the driver.

Asserted on every plan that was executed, on what tasks returned as Spark counts it, and on what came into this process.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tailrace.spark.writers.merge_table import BROADCAST_ROWS_MAX
from tailrace.tables.spec import PLAIN_MIRROR, LoadOrigin, TableMode, TableSpec
from tailrace.tasks.apply import advance_table
from tests.support.changes import KEYLESS, SHOP, Change, delete, insert, move, record_batches, truncate, update
from tests.support.engines import only_spark, open_table, session, spark_engine
from tests.unit.tasks.test_fold_files import START, apply_work

pytestmark = only_spark

BIG = ("big",)
RESULT_BYTES_MAX = 4096
"""Of one task: counts, and the names of files."""
ORIGIN = LoadOrigin(seq=START.seq, position="0/0", read_at=0)


@dataclass
class Driver:
    """What came to the driver."""

    plans: list[str] = field(default_factory=list)
    """As they were executed."""
    returned: int = 0
    """By all tasks, in bytes."""
    rows: list[int] = field(default_factory=list)
    """How many came into this process, each time that any were asked for,"""
    results: list[int] = field(default_factory=list)
    """and the bytes of each thing that a task of ours answered."""

    def local(self) -> Iterator[set[str]]:
        """The columns of everything that a plan was given by the driver."""
        for plan in self.plans:
            for found in re.finditer(r"\) (?:LocalTableScan|Scan ExistingRDD)[^\n]*\nOutput \[\d+\]: \[(.*)\]", plan):
                yield {name.rpartition("#")[0] for name in found[1].split(", ")}


@contextmanager
def watched(patch: pytest.MonkeyPatch) -> Iterator[Driver]:
    from pyspark.core.rdd import RDD
    from pyspark.sql.classic.dataframe import DataFrame

    driver, taken, gathered = Driver(), DataFrame.collect, RDD.collect

    def collect(self: DataFrame) -> Any:
        rows = taken(self)
        driver.rows.append(len(rows))
        return rows

    def gather(self: RDD[Any]) -> Any:
        results = gathered(self)
        driver.results += [len(pickle.dumps(result)) for result in results]
        return results

    def refused(*_: Any, **__: Any) -> Any:
        raise AssertionError("rows on the driver")

    patch.setattr(DataFrame, "collect", collect)
    patch.setattr(RDD, "collect", gather)
    for name in ("toArrow", "toPandas", "toLocalIterator"):
        patch.setattr(DataFrame, name, refused)
    plans, stages = set(executed()), set(finished())
    yield driver
    driver.plans = [plan for number, plan in executed().items() if number not in plans]
    driver.returned = sum(size for number, size in finished().items() if number not in stages)


def executed() -> dict[int, str]:
    """Every plan that Spark has executed, as it keeps them for its pages."""
    spark = session()
    spark._jsc.sc().listenerBus().waitUntilEmpty()
    found = spark._jsparkSession.sharedState().statusStore().executionsList()
    items = [found.apply(i) for i in range(found.size())]
    return {item.executionId(): item.physicalPlanDescription() for item in items}


def finished() -> dict[int, int]:
    """What the tasks of each stage have returned, in bytes."""
    spark = session()
    context: Any = spark.sparkContext
    none = context._gateway.new_array(context._jvm.double, 0)
    found = spark._jsc.sc().statusStore().stageList(None, False, False, none, None)
    return {found.apply(i).stageId(): found.apply(i).resultSize() for i in range(found.size())}


def apply(
    folder: Path,
    patch: pytest.MonkeyPatch,
    rows: Sequence[Change],
    form: TableSpec = PLAIN_MIRROR,
    *,
    there: int = 5,
    schema: Any = SHOP,
) -> Driver:
    """Changes of a real log into a table of so many rows, as a pipeline has it done."""
    folder.mkdir(exist_ok=True)
    work = apply_work(folder, schema, [rows], form)
    table = open_table(work.location.path, work.location.log_id, form)
    held = [{"id": i, "name": f"n{i}", "big": f"large {i}", "n": i} for i in range(there)]
    held = held if schema.key else [{"a": 1, "b": "x"}] * there
    table.load(schema, record_batches(schema, held), START, origin=ORIGIN)
    with watched(patch) as driver:
        (done,) = spark_engine().run(advance_table, [replace(work, location=replace(work.location, engine="spark"))])
    assert (done.error, done.rows, done.version) == (None, len(rows), 1)
    assert table.applied_position() == work.position_after
    return driver


def some(form: TableSpec) -> list[Change]:
    rows = [update(1, n=1, unchanged=BIG), delete(2), *move(3, 33, unchanged=BIG), insert(6)]
    return [*rows, *([truncate()] if form.keeps_past else [])]


FORMS = [PLAIN_MIRROR, TableSpec(soft_delete=True), TableSpec(mode=TableMode.HISTORY), TableSpec(mode=TableMode.APPEND)]
CASES = [(SHOP, form, some(form)) for form in FORMS]
CASES += [(KEYLESS, PLAIN_MIRROR, [delete({"a": 1, "b": "x"}), insert({"a": 2, "b": "y"})])]


@pytest.mark.parametrize(("schema", "form", "rows"), CASES, ids=[*map(str, FORMS), "keyless"])
def test_a_row_is_never_handed_to_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, schema: Any, form: TableSpec, rows: list[Change]
) -> None:
    driver = apply(tmp_path, monkeypatch, rows, form, schema=schema)
    assert max(driver.rows, default=0) <= 1, "counts, and nothing else"
    assert driver.results
    assert max(driver.results) <= RESULT_BYTES_MAX
    assert any(re.search(r"Scan parquet.*\n(?:.*\n){0,6}?.*c0#", plan) for plan in driver.plans), "rows come from files"
    for columns in driver.local():
        assert columns.isdisjoint({*schema.names, "c0", "c1"}), "and not from here"


def test_what_comes_to_the_driver_does_not_grow_with_the_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = BROADCAST_ROWS_MAX + 1
    # As small in files as can be: Spark takes such for few rows, however many they are.
    rows = [update(i, name="n", big="the same", n=0) for i in range(count)]
    few = apply(tmp_path / "few", monkeypatch, rows[:100])
    many = apply(tmp_path / "many", monkeypatch, rows, there=2 * count)
    assert max(many.results) <= RESULT_BYTES_MAX
    assert max(many.rows, default=0) <= 1
    assert not [plan for plan in many.plans if "BroadcastExchange" in plan]
    assert many.returned < 2 * few.returned, (few.returned, many.returned)
