"""Partitioned tables that Spark's connector writes, alone and by turns with delta-rs, and with its own features."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from deltalake import DeltaTable

from tailrace.errors import TableUnusable, ValueUnfit
from tailrace.model.schema import Column
from tailrace.spark.writers.staged_rows import is_misfit
from tailrace.tables.compaction_plan import UpkeepPlan
from tailrace.tables.delta.features import NO_FEATURES, Features
from tailrace.tables.delta.table import DeltaRsTable
from tailrace.tables.evolve.schema_plan import Recast
from tailrace.tables.fold.by_mode import fold_by_mode
from tailrace.tables.partitions import find_unusable_values
from tailrace.tables.spec import TableMode, TableSpec
from tests.support.changes import COMPOSITE, KEYLESS, SHOP, KeylessModel, delete, insert, move, truncate, update
from tests.support.engines import only_spark, open_table, session
from tests.support.forms import Account, Formed, again, ordered, pieces, stored, story, tx
from tests.unit.tables.test_partition_files import assert_removed_as_added

pytestmark = only_spark

LOG = "0b1c9a3e-6f3b-4e7e-9d80-5e1d5d6a7b11"
NAMES = [None, "x", "a/b %", "é=1 水", " ~+"]
BIG = ("big",)
MIRROR = TableSpec(partition_by=("name",))
FORMS = [
    MIRROR, TableSpec(soft_delete=True, metadata=("_op", "_seq", "_tx"), partition_by=("name", "_deleted")),
    TableSpec(mode=TableMode.HISTORY, metadata=("_op",), partition_by=("_current", "name")),
    TableSpec(mode=TableMode.APPEND, partition_by=("name", "_op")),
]  # fmt: skip
BOTH = Features(deletion_vectors=True, column_mapping=True)
ROWS = [{"id": i, "name": NAMES[i % 5], "big": f"large {i}", "n": i} for i in range(1, 11)]


def read(path: Path) -> list[dict[str, Any]]:
    """As Spark reads it."""
    return ordered(pa.table(session().read.format("delta").load(str(path)).toArrow()).to_pylist())


def engines(path: Path, form: TableSpec) -> list[Any]:
    return [open_table(path, LOG, form, NO_FEATURES), DeltaRsTable(path, LOG, form)]


def steps(count: int) -> list[Any]:
    some = random.Random(20261116)
    kinds = ["insert", "insert", "update", "update", "delete", "move", "truncate"]
    return [
        (
            some.choice(kinds),
            some.randint(0, 3),
            some.randint(0, 3),
            some.choice(NAMES),
            some.choice([(), ("big",), ("name", "big")]),
            some.random() < 0.5,
            some.randint(900, 1100),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize(("form", "first"), [(form, at % 2) for at, form in enumerate(FORMS)], ids=str)
def test_either_engine_goes_on_where_the_other_stopped(tmp_path: Path, form: TableSpec, first: int) -> None:
    path, turns = tmp_path / "t", engines(tmp_path / "t", form)
    begun, transactions = story(steps(16))
    batch = stored(COMPOSITE, transactions)
    table = Formed(turns[first], form, path, COMPOSITE, begun)
    for turn, piece in enumerate(pieces(batch, {*range(0, batch.num_rows, batch.num_rows // 3)})):
        table.table = turns[(first + turn) % 2]
        table.take(piece)
        assert read(path) == table.content() == ordered(pl.read_delta(str(path)).to_dicts())
        assert DeltaTable(str(path)).metadata().partition_columns == list(form.partition_by)
    account = Account.of(COMPOSITE, begun, batch)
    held = {FORMS[0]: account.live.values(), FORMS[1]: account.marked.values(), FORMS[2]: account.versions}
    if form in held:
        assert table.content() == ordered(held[form])
    else:
        assert len(table.content()) == len(begun) + batch.num_rows
    assert_put_right(table, turns)


def assert_put_right(table: Formed, turns: list[Any]) -> None:
    """Joined by one engine, given another shape by each, and read anew by each."""
    before = table.content()
    turns[0].compact(UpkeepPlan(file_bytes=1 << 20, remove_after_seconds=None), table.cursor(table.seq))
    assert read(table.folder) == table.content() == before
    shape = table.schema
    for number, engine in enumerate(turns):
        new = Column(name=f"new{number}", source_type="text", type=pa.string())
        shape = replace(shape, columns=(*shape.columns, new))
        recast = Recast(schema=shape, added=(new.name,), backfilled=((new.name, pa.scalar("f")),))
        engine.evolve(recast, table.cursor(table.seq))
        assert ordered({name: row[name] for name in before[0]} for row in read(table.folder)) == before
    table.schema = shape
    for number, engine in enumerate(turns):
        table.table = engine
        again(table, [{"shop": 7, "code": f"c{number}", "name": NAMES[3]}], f"again{number}", 2000)
        assert read(table.folder) == table.content()
    assert_removed_as_added(table.folder, table.form.partition_by)


def test_tables_without_a_key_are_gone_on_with(tmp_path: Path) -> None:
    form, model, some = TableSpec(partition_by=("b",)), KeylessModel(), random.Random(7)
    path, turns = tmp_path / "t", engines(tmp_path / "t", TableSpec(partition_by=("b",)))
    table = Formed(turns[0], form, path, KEYLESS)
    for turn in range(4):
        table.table = turns[turn % 2]
        told = list[Any]()
        for _ in range(6):
            kind = some.choice(["insert", "insert", "update", "delete"])
            told += model.step(kind, (some.randint(0, 1), some.choice(NAMES)), (some.randint(0, 1), some.choice(NAMES)))
        table.apply(tx(1, *told))
        wanted = [dict(zip(KEYLESS.names, image, strict=True)) for image in model.rows.elements()]
        assert read(path) == table.content() == ordered(wanted)
    for turn in (0, 1):
        table.table = turns[turn]
        table.apply(tx(1, truncate(), insert({"a": turn}, b="é")))
        assert read(path) == table.content() == [{"a": turn, "b": "é"}]
    assert_removed_as_added(path, form.partition_by)


def test_tables_with_features_are_partitioned_too(tmp_path: Path) -> None:
    path = tmp_path / "t"
    table = Formed(open_table(path, LOG, MIRROR, BOTH), MIRROR, path, rows=ROWS)
    for n in range(8):
        table.apply(tx(1, insert(20 + n, name=NAMES[3], big="b"), insert(40 + n, name=NAMES[2])))
    there = open_table(path, LOG, MIRROR, BOTH)
    files = there.files()
    table.apply(tx(1, update(20, name=NAMES[3], big="c"), delete(3), delete(40), *move(4, 99, name="x", unchanged=BIG)))
    assert set(files) & set(there.files())
    title = replace(SHOP, columns=(*SHOP.columns[:2], replace(SHOP.columns[2], name="large"), SHOP.columns[3]))
    table.table.evolve(Recast(schema=title, renamed=(("big", "large"),)), table.cursor(table.seq))
    table.schema = title
    before = table.content()
    assert read(path) == before
    assert {row["id"]: row["large"] for row in before if row["id"] in (3, 4, 20, 40, 99)} == {20: "c", 99: "large 4"}
    tended = table.table.compact(UpkeepPlan(file_bytes=1 << 24, remove_after_seconds=0.0), table.cursor(table.seq))
    assert tended.files_removed >= tended.files_compacted >= 16
    assert DeltaTable(str(path)).metadata().partition_columns == ["name"]
    assert read(path) == table.content() == before
    assert there.rows() == len(before)
    table.apply(tx(1, update(21, name="moved", large="d"), delete(41)))
    again(table, [{"id": 1, "name": NAMES[1], "large": "large 1", "n": 1}, {"id": 9, "name": "é"}], "again", 2000)
    assert read(path) == table.content()
    assert table.tuples("id", "name", "large") == [(1, "x", "large 1"), (9, "é", None)]
    plain = Formed(DeltaRsTable(path, LOG, MIRROR), MIRROR, path, rows=ROWS)
    plain.apply(tx(1, delete(1)))
    assert read(path) == plain.content() == ordered(ROWS[1:])


@pytest.mark.parametrize("features", [NO_FEATURES, BOTH], ids=["plain", "features"])
def test_a_column_that_takes_the_place_of_a_partitions_is_looked_at(tmp_path: Path, features: Features) -> None:
    path = tmp_path / "t"
    rows = [row | {"big": f"b {row['n']}/"} for row in ROWS]
    table = Formed(open_table(path, LOG, MIRROR, features), MIRROR, path, rows=[*rows, {"id": 99, "big": ""}])
    id_, name, _, n = SHOP.columns
    recast = Recast(schema=replace(SHOP, columns=(id_, n, name)), renamed=(("big", "name"),))
    with pytest.raises(ValueUnfit, match="cannot be a partition value"):
        table.table.evolve(recast, table.cursor(table.seq))
    assert len(read(path)) == 11
    table.apply(tx(1, delete(99)))
    table.table.evolve(recast, table.cursor(table.seq))
    wanted = [{"id": i, "n": i, "name": f"b {i}/", "name__dropped": NAMES[i % 5]} for i in range(1, 11)]
    assert read(path) == table.content() == ordered(wanted)
    assert DeltaTable(str(path)).metadata().partition_columns == ["name"]


def test_a_row_that_is_read_again_has_a_value_for_a_partition(tmp_path: Path) -> None:
    path = tmp_path / "t"
    table = Formed(open_table(path, LOG, MIRROR), MIRROR, path, rows=ROWS)
    batch = stored(SHOP, [tx(1, update(77, name="x", unchanged=BIG))], table.seq + 1)
    here, then = table.cursor(table.seq), table.cursor(table.seq + 1)
    for value, fits in (("", False), ("é/", True)):

        def now(_keys: pa.Table, value: str = value) -> pa.Table:
            row = {"id": 77, "name": value, "big": "b", "n": 1}
            return pa.Table.from_pylist([row], pa.schema(SHOP.row_fields()))

        if fits:
            table.table.apply(SHOP, fold_by_mode(MIRROR, SHOP, batch), here, then, refetch=now)
            continue
        with pytest.raises(ValueUnfit, match="cannot be a partition value"):
            table.table.apply(SHOP, fold_by_mode(MIRROR, SHOP, batch), here, then, refetch=now)
    assert [row["name"] for row in read(path) if row["id"] == 77] == ["é/"]


def test_spark_and_arrow_refuse_the_same_values() -> None:
    kinds: list[tuple[pa.DataType, list[Any]]] = [
        (
            pa.string(),
            [
                "",
                "x",
                "__HIVE_DEFAULT_PARTITION__",
                "L" * 253,
                "L" * 254,
                "é" * 42,
                "é" * 43,
                "~" * 84,
                "~" * 85,
                "-_." * 84,
                "💧" * 21,
                "💧" * 22,
                "a/" * 63,
                "a/" * 64,
                None,
            ],
        ),
        (pa.date32(), [-719_163, -719_162, 0, 2_932_896, 2_932_897, None]),
        (
            pa.timestamp("us"),
            [-62_135_596_800_000_001, -62_135_596_800_000_000, 253_402_300_799_999_999, 253_402_300_800_000_000, None],
        ),
        (pa.int32(), [0, None]),
    ]
    for kind, values in kinds:
        column = Column(name="p", source_type="", type=kind)
        rows = session().createDataFrame(pa.table({"p": pa.array(values, kind)}))
        rows = rows.selectExpr("CAST(p AS timestamp_ntz) AS p") if pa.types.is_timestamp(kind) else rows
        found = [row[0] or False for row in rows.select(is_misfit(column, rows["p"])).collect()]
        assert found == find_unusable_values("p", pa.array(values, kind)).tolist()


def test_a_column_that_is_gone_stops_a_table_with_features(tmp_path: Path) -> None:
    path = tmp_path / "t"
    table = Formed(open_table(path, LOG, MIRROR, BOTH), MIRROR, path, rows=ROWS)
    gone = Recast(schema=replace(SHOP, columns=(SHOP.columns[0], *SHOP.columns[2:])), dropped=("name",))
    with pytest.raises(TableUnusable, match="partition column does not exist"):
        table.table.evolve(gone, table.cursor(table.seq))
    assert read(path) == ordered(ROWS)
