"""Partitioned tables of every spec, with every engine: what every reader finds in them after any changes.

`make engines` runs this with Spark's connectors, and again with Delta tables that have the connector's features. Fewer
readers support those, and the files of a table with column mapping are in any folder, as those of an Iceberg table are.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import date, datetime
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import duckdb
import polars as pl
import pyarrow as pa
import pytest
from deltalake import DeltaTable
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.errors import FormChanged, TableUnusable, ValueUnfit
from tailrace.model.schema import Column, Identity, TableSchema
from tailrace.tables.compaction_plan import UpkeepPlan, remove_files
from tailrace.tables.delta.commit_log import file_names
from tailrace.tables.delta.table import DeltaRsTable
from tailrace.tables.evolve.schema_plan import Recast
from tailrace.tables.spec import PLAIN_MIRROR, TableMode, TableSpec
from tailrace.tables.staging import stage
from tests.support import engines
from tests.support.changes import (
    COMPOSITE,
    KEYLESS,
    SHOP,
    KeylessModel,
    delete,
    insert,
    move,
    record_batches,
    table_schema,
    truncate,
    update,
)
from tests.support.engines import FEATURES, IS_ICEBERG, examples, not_spark
from tests.support.forms import Account, Formed, again, ordered, pieces, steps_with, stored, story, tx
from tests.support.partitions import assert_partitioned, files_of

LOG = "0b1c9a3e-6f3b-4e7e-9d80-5e1d5d6a7b11"
MARKED = TableSpec(soft_delete=True, metadata=("_op", "_seq", "_tx"), partition_by=("_deleted", "name"))
HISTORY = TableSpec(mode=TableMode.HISTORY, metadata=("_op",), partition_by=("_current", "n"))
APPEND = TableSpec(mode=TableMode.APPEND, partition_by=("_op", "name"))
MIRROR = TableSpec(partition_by=("name",))
EVERY = [MIRROR, MARKED, HISTORY, APPEND]
BIG = ("big",)
ROWS = [{"id": i, "name": f"n {i % 2}", "big": f"large {i}", "n": i} for i in (1, 2, 3)]


def opened(path: Path, form: TableSpec) -> Any:
    return engines.open_table(path, LOG, form)


@pytest.fixture
def made(tmp_path: Path) -> Any:
    def make(form: TableSpec, rows: Any = ROWS, schema: TableSchema = SHOP) -> Formed:
        return Formed(opened(tmp_path / "t", form), form, tmp_path / "t", schema, rows)

    return make


# --- values, as every reader sees them ---------------------------------------------------------------------


def texts(*more: str) -> list[Any]:
    odd = [
        "a/b",
        "100%",
        "x=y",
        "a b",
        "c:d",
        "ünï💧",
        "new\nline",
        "tab\t",
        "back\\slash",
        "q'uo\"te",
        "a%2Fb",
        "..",
        ".",
        "~*?[]{}|^",
        "null",
        "NULL",
        " lead",
        "trail ",
        "\x01",
        "#h?q",
        "2020-01-01",
        "001",
        "+",
        "true",
    ]
    return [*odd, *more, None]


MOMENTS = [
    datetime(2020, 1, 2, 3, 4, 5, 123456), datetime(1950, 1, 2, 3, 4, 5, 1), datetime(1, 1, 1),
    datetime(9999, 12, 31, 23, 59, 59, 999999), datetime(2020, 1, 2), None,
]  # fmt: skip
KINDS: dict[str, tuple[pa.DataType, list[Any]]] = {
    "VARCHAR": (pa.string(), texts("L" * 253, "é" * 42)),
    "BIGINT": (pa.int64(), [-(2**63), -5, 0, 2**63 - 1, None]),
    "SMALLINT": (pa.int16(), [-5, 7, None]),
    "BOOLEAN": (pa.bool_(), [True, False, None]),
    "DATE": (pa.date32(), [date(1, 1, 1), date(1500, 3, 1), date(2024, 2, 29), date(9999, 12, 31), None]),
    "TIMESTAMP": (pa.timestamp("us"), MOMENTS),
}


def by_duckdb(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Read by folder names: the extension that reads Delta's log is not available everywhere."""
    files = [str(folder / name) for name in file_names(DeltaTable(str(folder)))]
    with duckdb.connect() as connection:
        query = f"SELECT id, p, v FROM read_parquet(?, hive_partitioning = true, hive_types = {{'p': {kind}}})"
        rows: list[dict[str, Any]] = connection.sql(query, params=[files]).to_arrow_table().to_pylist()
        return rows


@pytest.mark.parametrize("key", [("id",), ("id", "p")], ids=["apart", "in_the_key"])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_reader_finds_the_values_that_were_written(made: Any, kind: str, key: tuple[str, ...]) -> None:
    arrow, values = KINDS[kind]
    values = values if key == ("id",) else values[:-1]
    schema = table_schema({"id": pa.int64(), "p": arrow, "v": pa.string()}, key=key)
    table = made(TableSpec(partition_by=("p",)), [{"id": i, "p": p, "v": "x"} for i, p in enumerate(values)], schema)
    others = values if len(key) == 2 else [*values[1:], values[0]]
    changed = [update({"id": i, "p": p}, v="y") for i, p in enumerate(others)]
    table.apply(tx(1, *changed, *(insert({"id": 100 + i, "p": p}, v="z") for i, p in enumerate(values))))
    wanted = ordered(
        [{"id": i, "p": p, "v": "y"} for i, p in enumerate(others)]
        + [{"id": 100 + i, "p": p, "v": "z"} for i, p in enumerate(values)]
    )
    assert_readable(table, kind, wanted)
    again(table, [{"id": 0, "p": others[0], "v": "y"}, {"id": 1, "p": others[1], "v": "other"}], "again", 2000)
    assert table.content() == ordered([{"id": 0, "p": others[0], "v": "y"}, {"id": 1, "p": others[1], "v": "other"}])
    table.apply(tx(2, truncate(), *(insert({"id": i, "p": p}, v="w") for i, p in enumerate(values))))
    assert_readable(table, kind, ordered({"id": i, "p": p, "v": "w"} for i, p in enumerate(values)))


def assert_readable(table: Formed, kind: str, wanted: list[Any]) -> None:
    assert table.content() == wanted
    if engines.IS_SPARK:
        assert ordered(engines.spark_rows(table.folder).to_pylist()) == wanted
    if not FEATURES.any and not IS_ICEBERG:
        assert ordered(pl.read_delta(str(table.folder)).to_dicts()) == wanted
        assert ordered(by_duckdb(table.folder, kind)) == wanted


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pa.string(), ""), (pa.string(), "__HIVE_DEFAULT_PARTITION__"), (pa.string(), "L" * 254),
        (pa.string(), "é" * 43), (pa.date32(), -719_163), (pa.date32(), 2_932_897),
        (pa.timestamp("us"), -62_135_596_800_000_001), (pa.timestamp("us"), 253_402_300_800_000_000),
    ],
    ids=str,
)  # fmt: skip
def test_a_value_that_cannot_be_read_back_is_refused_and_nothing_is_written(
    made: Any, tmp_path: Path, kind: pa.DataType, value: Any
) -> None:
    schema = table_schema({"id": pa.int64(), "p": kind})
    form = TableSpec(partition_by=("p",))
    table = made(form, [{"id": 1, "p": None}], schema)
    with pytest.raises(ValueUnfit, match="cannot be a partition value") as refused:
        table.apply(tx(1, update(1, p=value)))
    assert refused.value.fields["column"] == "p"
    assert str(value) not in str(refused.value) or value == ""
    assert table.content() == [{"id": 1, "p": None}]
    other = tmp_path / "other"
    with pytest.raises(ValueUnfit):
        stage(other, "load", schema, record_batches(schema, [{"id": 1, "p": None}, {"id": 2, "p": value}]), ("p",))
    assert not [path for path in other.rglob("*") if path.is_file()]


def test_a_delete_of_a_value_that_the_table_cannot_hold_does_nothing(made: Any) -> None:
    schema = table_schema({"id": pa.int64(), "p": pa.string()}, key=("id", "p"))
    table = made(TableSpec(partition_by=("p",)), [{"id": 1, "p": "a"}], schema)
    table.apply(tx(1, delete({"id": 1, "p": ""}), delete({"id": 1, "p": "nowhere"})))
    assert table.content() == [{"id": 1, "p": "a"}]


# --- any cutting of the changes ----------------------------------------------------------------------------

NAMES = st.sampled_from([None, "x", "a/b %", "é=1"])
STEPS = steps_with(NAMES)


@pytest.mark.parametrize(
    "form", [MIRROR, TableSpec(partition_by=("n", "shop")), MARKED, HISTORY, APPEND], ids=lambda form: form.described
)
@settings(max_examples=examples(8), deadline=None)
@given(steps=STEPS, cuts=st.sets(st.integers(1, 24), max_size=3))
def test_any_grouping_of_the_changes_gives_the_same_table(form: TableSpec, steps: list[Any], cuts: set[int]) -> None:
    begun, transactions = story(steps)
    batch = stored(COMPOSITE, transactions)
    account = Account.of(COMPOSITE, begun, batch)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t"
        table = Formed(opened(path, form), form, path, COMPOSITE, begun)
        for piece in pieces(batch, cuts):
            table.take(piece)
        assert_partitioned(table)
        if form is APPEND:
            names = [*COMPOSITE.names, "_seq", "_op"]
            told = [{name: row[name] for name in names} for row in batch.to_pylist()]
            assert [row for row in table.content(*names) if row["_op"] != "read"] == ordered(told)
            return
        kept = {MARKED: account.marked.values(), HISTORY: account.versions}
        assert table.content() == ordered(kept.get(form, account.live.values()))


@settings(max_examples=examples(8), deadline=None)
@given(
    steps=st.lists(st.tuples(
        st.sampled_from(["insert", "insert", "update", "delete", "truncate"]),
        st.tuples(st.integers(0, 1), NAMES), st.tuples(st.integers(0, 1), NAMES),
    ), min_size=1, max_size=12),
    cut=st.integers(0, 12),
)  # fmt: skip
def test_a_keyless_table_holds_each_row_as_often_as_the_source(steps: list[Any], cut: int) -> None:
    form, model, told = TableSpec(partition_by=("b",)), KeylessModel(), list[Any]()
    for kind, image, other in steps:
        told += model.step(kind, image, other)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t"
        table = Formed(opened(path, form), form, path, KEYLESS)
        for some in (told[:cut], told[cut:]):
            if some:
                table.apply(tx(1, *some))
        assert_partitioned(table)
        wanted = [dict(zip(KEYLESS.names, image, strict=True)) for image in model.rows.elements()]
        assert table.content() == ordered(wanted)


def files_of_other_values(table: Formed, name: str, text: str) -> list[Path]:
    """Return the files of all partitions but those with this value."""
    if IS_ICEBERG:
        found = engines.partitions_of(table.folder)
        return [path for path, values in found.items() if str(values[name]).lower() != text]
    # By what its log says: with column mapping a folder is not called after what is in it. One column is all it has.
    log = sorted((table.folder / "_delta_log").glob("*.json"))
    said = [json.loads(line) for commit in log for line in commit.read_text().splitlines()]
    adds = {unquote(line["add"]["path"]): line["add"]["partitionValues"] for line in said if "add" in line}
    found = table.table.files()  # type: ignore[attr-defined] # all have it
    return [table.folder / file for file in found if [*adds[file].values()] != [text]]


@contextmanager
def hidden(files: list[Path]) -> Iterator[None]:
    """Make every read of these files fail."""
    for file in files:
        file.rename(f"{file}.hidden")
    yield
    for file in files:
        Path(f"{file}.hidden").rename(file)


def test_only_files_of_partitions_that_the_key_names_are_read(made: Any) -> None:
    schema = table_schema({"id": pa.int64(), "p": pa.string(), "v": pa.string()}, key=("id", "p"))
    rows = [{"id": i, "p": p, "v": "x"} for p in ("a/b", "c", "d") for i in range(3)]
    table = made(TableSpec(partition_by=("p",)), rows, schema)
    others = files_of_other_values(table, "p", "a/b")
    assert len(others) == 2
    with hidden(others):
        table.apply(tx(1, update({"id": 1, "p": "a/b"}, v="y")))
    wanted = [row | ({"v": "y"} if (row["id"], row["p"]) == (1, "a/b") else {}) for row in rows]
    assert table.content() == ordered(wanted)


def test_a_table_may_be_partitioned_by_its_whole_key(made: Any) -> None:
    schema = table_schema({"p": pa.string(), "v": pa.string()}, key=("p",))
    table = made(TableSpec(partition_by=("p",)), [{"p": p, "v": "x"} for p in ("a", "b", "c")], schema)
    table.apply(tx(1, update({"p": "a"}, v="y"), delete({"p": "b"}), insert({"p": "d"}, v="z")))
    assert table.tuples("p", "v") == [("a", "y"), ("c", "x"), ("d", "z")]
    again(table, [{"p": "a", "v": "y"}, {"p": "c", "v": "w"}], "again", 2000)
    assert table.tuples("p", "v") == [("a", "y"), ("c", "w")]


def test_a_history_partitioned_by_current_rows_reads_no_past(made: Any) -> None:
    table = made(replace(HISTORY, partition_by=("_current",)))
    table.apply(tx(2000, update(1, name="b", unchanged=BIG), update(2, name="b", unchanged=BIG)))
    past = files_of_other_values(table, "_current", "true")
    assert past
    with hidden(past):
        table.apply(tx(3000, delete(1)))
    assert table.tuples("id", "name", "_current") == [
        (1, "b", False),
        (1, "n 1", False),
        (2, "b", True),
        (2, "n 0", False),
        (3, "n 1", True),
    ]


# --- loading, refetching, schema, upkeep -------------------------------------------------------------------


@pytest.mark.parametrize("form", EVERY, ids=str)
def test_a_table_of_any_spec_is_reopened_evolved_and_maintained(made: Any, form: TableSpec) -> None:
    table = made(form)
    for n in range(18):
        table.apply(tx(2000 + n, insert(10 + n, name=f"n {n % 2}", n=n % 2)))
    before = table.content()
    tended = table.table.compact(UpkeepPlan(file_bytes=1 << 20, remove_after_seconds=None), table.cursor(table.seq))
    assert (tended.files_compacted >= 16, tended.files_written) == (True, 2)
    assert table.content() == before
    assert_partitioned(table)
    now = [{"id": 1, "name": "moved/", "big": "large 1", "n": 1}, {"id": 2, "name": "n 0", "big": "large 2", "n": 2}]
    again(table, now, "again", 3000)
    if form is MIRROR:
        assert table.content() == ordered(now)
    assert_partitioned(table)
    columns = (
        *SHOP.columns[:2],
        Column(name="large", source_type="text", type=pa.string()),
        Column(name="n", source_type="bigint", type=pa.int64()),
        Column(name="extra", source_type="text", type=pa.string()),
    )
    after = replace(SHOP, columns=columns)
    recast = Recast(
        schema=after, added=("extra",), renamed=(("big", "large"),), backfilled=(("extra", pa.scalar("e")),)
    )
    rows = len(table.content())
    assert table.table.evolve(recast, table.cursor(table.seq)).committed
    table.schema = after
    assert len(table.content()) == rows
    table.apply(tx(4000, insert(90, name="new", n=2**40, extra="f"), *move(1, 91, unchanged=("large",), name="gone")))
    assert_partitioned(table)
    found = {(row["id"], row["name"], row["large"], row["n"]) for row in table.content("id", "name", "large", "n")}
    assert found >= {(2, "n 0", "large 2", 2), (90, "new", None, 2**40)}
    assert form is APPEND or (91, "gone", "large 1", None) in found


def test_a_dropped_or_renamed_partition_column_stops_the_table_unchanged(made: Any) -> None:
    table = made(MIRROR)
    gone = Recast(schema=replace(SHOP, columns=(SHOP.columns[0], *SHOP.columns[2:])), dropped=("name",))
    other = replace(SHOP.columns[1], name="title")
    renamed = Recast(
        schema=replace(SHOP, columns=(SHOP.columns[0], other, *SHOP.columns[2:])), renamed=(("name", "title"),)
    )
    for recast in (gone, renamed):
        with pytest.raises(TableUnusable, match="partition column does not exist") as refused:
            table.table.evolve(recast, table.cursor(table.seq))
        assert "`columns: {its new name: name}`" in refused.value.hint
        assert "partition_by" in refused.value.hint
    assert table.content() == ordered(ROWS)


def test_an_existing_value_that_no_partition_can_hold_is_refused_with_a_hint(made: Any) -> None:
    rows: list[dict[str, Any]] = [*ROWS, {"id": 9, "name": "n", "big": "", "n": 9}]
    table = made(MIRROR, rows)
    id_, name, _, n = SHOP.columns
    recast = Recast(schema=replace(SHOP, columns=(id_, n, name)), renamed=(("big", "name"),))
    with pytest.raises(ValueUnfit, match="cannot be a partition value") as refused:
        table.table.evolve(recast, table.cursor(table.seq))
    assert "run `tailrace snapshot FILE TABLE`" in refused.value.hint
    assert table.content() == ordered(rows)


def test_a_truncate_is_followed_by_rows_of_other_partitions(made: Any) -> None:
    table = made(MIRROR)
    table.apply(tx(1, truncate(), insert(9, name="new/one")), tx(2, insert(10, name="n 1")))
    assert table.tuples("id", "name") == [(10, "n 1"), (9, "new/one")]
    assert_partitioned(table)


@not_spark  # which puts such rows in by tasks
def test_single_rows_are_looked_up_and_corrected(made: Any) -> None:
    table = made(TableSpec(partition_by=("name",), renamed_columns=(("n", "number"),)))
    keys = pa.table({"id": pa.array([2, 7], pa.int64())})
    assert table.table.keys_exist(SHOP, keys).tolist() == [True, False]
    rows = pa.Table.from_batches(record_batches(SHOP, [{"id": 2, "name": "elsewhere", "big": "b", "n": 5}]))
    here = table.cursor(table.seq)
    assert table.table.upsert_rows(SHOP, rows, here).committed
    assert table.tuples("id", "name", "number") == [(1, "n 1", 1), (2, "elsewhere", 5), (3, "n 1", 3)]
    bad = pa.Table.from_batches(record_batches(SHOP, [{"id": 2, "name": "", "big": "b", "n": 5}]))
    with pytest.raises(ValueUnfit):
        table.table.upsert_rows(SHOP, bad, here)


@pytest.mark.parametrize(
    ("was", "now"), [(PLAIN_MIRROR, MIRROR), (MIRROR, PLAIN_MIRROR), (MIRROR, TableSpec(partition_by=("n",)))]
)
def test_a_table_with_another_partitioning_is_refused_until_it_is_reloaded(
    tmp_path: Path, was: TableSpec, now: TableSpec
) -> None:
    path = tmp_path / "t"
    Formed(opened(path, was), was, path, rows=ROWS)
    with pytest.raises(FormChanged) as refused:
        opened(path, now).applied_position()
    assert refused.value.fields["asked"] == now.described
    assert "tailrace snapshot FILE TABLE" in refused.value.hint
    before = engines.newest_version(path)
    table = Formed(opened(path, now), now, path, rows=ROWS)
    assert engines.newest_version(path) != before
    assert_partitioned(table)
    assert table.table.applied_position() == table.cursor(table.seq)
    table.apply(tx(1, update(1, name="x", unchanged=BIG)))
    assert table.tuples("id", "name", "big") == [(1, "x", "large 1"), (2, "n 0", "large 2"), (3, "n 1", "large 3")]
    if engines.IS_SPARK:
        assert ordered(engines.spark_rows(path).to_pylist()) == table.content()
    if not FEATURES.column_mapping and not IS_ICEBERG:
        assert ordered(pl.read_delta(str(path)).to_dicts()) == table.content()


@pytest.mark.skipif(FEATURES.any, reason="delta-rs removes no files of a table with features of Spark")
def test_unneeded_files_are_removed_from_every_folder(made: Any) -> None:
    table = made(MIRROR)
    gone = files_of(table)
    table.apply(tx(1, truncate(), insert(9, name="n 1")))
    table.apply(
        tx(2, insert(10, name="n 2"))
    )  # from an Iceberg table a file is removed with the snapshot that dropped it
    here = table.cursor(table.seq)
    assert table.table.compact(UpkeepPlan(file_bytes=None, remove_after_seconds=3600), here).files_removed == 0
    assert len(gone) == 2
    assert all(file.exists() for file in gone)
    remove_now(table)
    assert not any(file.exists() for file in gone)
    assert table.tuples("id", "name") == [(10, "n 2"), (9, "n 1")]


def remove_now(table: Formed) -> None:
    """Run upkeep for files that became unneeded a moment ago."""
    if IS_ICEBERG:
        table.table.compact(UpkeepPlan(file_bytes=None, remove_after_seconds=0), table.cursor(table.seq))
        return
    found = DeltaRsTable(table.folder, LOG, table.form).opened()
    remove_files(table.folder, found.table, 0, found.commit_record.properties())


# --- what is refused ---------------------------------------------------------------------------------------

ODD = table_schema({
    "id": pa.int64(), "list": pa.list_(pa.int32()), "bytes": pa.binary(), "half": pa.float64(),
    "price": pa.decimal128(9, 2), "at": pa.timestamp("us", "UTC"), "a/b": pa.string(), "x=y": pa.string(),
    ".z": pa.string(),
})  # fmt: skip


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nowhere", "does not exist"), ("ID", "does not exist"), ("_op", "does not exist"), ("list", "of this type"),
        ("bytes", "of this type"), ("half", "of this type"), ("price", "of this type"), ("at", "of this type"),
        ("a/b", "in folder names"), ("x=y", "in folder names"), (".z", "in folder names"),
    ],
)  # fmt: skip
def test_a_column_that_cannot_be_a_partition_is_refused_before_anything_is_created(
    made: Any, tmp_path: Path, name: str, said: str
) -> None:
    with pytest.raises(TableUnusable, match=said) as refused:
        made(TableSpec(partition_by=(name,)), [], ODD)
    assert refused.value.fields["column"] == name
    assert "tables.rules" in refused.value.hint
    assert not (tmp_path / "t").exists()


def test_a_table_needs_a_column_besides_its_partition_columns(made: Any) -> None:
    with pytest.raises(TableUnusable, match="needs a column"):
        made(TableSpec(partition_by=("a", "b")), [], KEYLESS)


def test_a_column_cannot_be_a_partition_under_both_of_its_names(made: Any, tmp_path: Path) -> None:
    with pytest.raises(TableUnusable, match="by one column twice") as refused:
        made(TableSpec(renamed_columns=(("name", "title"),), partition_by=("title", "title")), [])
    assert refused.value.fields["column"] == "title"
    assert not (tmp_path / "t").exists()


def test_an_odd_name_is_replaced(made: Any) -> None:
    form = TableSpec(renamed_columns=(("a/b", "ab"),), partition_by=("ab",))
    table = made(form, [], replace(ODD, identity=Identity.KEY))
    table.apply(tx(1, insert({"id": 1, "a/b": "x"})))
    assert table.tuples("id", "ab") == [(1, "x")]
