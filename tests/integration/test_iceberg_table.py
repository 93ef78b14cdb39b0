"""A real Iceberg table, written by Spark's connector: what is Iceberg's own of the promises of `LakeTable`.

What holds for every format is asked in `test_delta_table.py` and `tests/contract/test_table_specs.py`, which
`make engines` runs for Iceberg too. Rows are read back by pyiceberg, which shares no code with the connector.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import psycopg
import pyarrow as pa
import pytest

from tailrace.errors import ForeignWrite, TableUnusable
from tailrace.model.schema import Column, TableSchema
from tailrace.tables.compaction_plan import UpkeepPlan
from tailrace.tables.evolve.schema_plan import Recast
from tailrace.tables.fold.fold import fold
from tailrace.tables.iceberg.catalogs import Catalog
from tailrace.tables.iceberg.commit_log import IcebergMetadata
from tailrace.tables.iceberg.table import IcebergTable
from tailrace.tables.spec import PLAIN_MIRROR, TableSpec
from tailrace.tables.staging import FILE_BYTES
from tests.support import others
from tests.support.changes import SHOP, changes, delete, insert, record_batches, table_schema, truncate, update
from tests.support.engines import history_of, only_iceberg, open_table, partitions_of, rows_of, session, spark_rows
from tests.support.engines import metadata_of as engine_metadata
from tests.support.forms import Formed, ordered, tx
from tests.support.mirrors import BIG, LOG, ROWS, Mirror, at, by_id
from tests.support.others import run_sql
from tests.support.rest_catalog import rest_catalog

pytestmark = only_iceberg


@pytest.fixture
def shop(tmp_path: Path) -> Mirror:
    return Mirror(tmp_path / "t", rows=ROWS)


def metadata_of(mirror: Mirror) -> IcebergMetadata:
    return engine_metadata(mirror.folder)


def summaries(mirror: Mirror) -> list[dict[str, str]]:
    """Of the snapshots that the newest came from, and its own."""
    found = metadata_of(mirror)
    by_number = {item["snapshot-id"]: item["summary"] for item in found.document["snapshots"]}
    return [by_number[number] for number in history_of(found)]


# --- the position, and what a commit is ----------------------------------------------------------------------


def test_a_row_that_changes_is_struck_out_where_it_lies(shop: Mirror) -> None:
    shop.apply(update(1, n=5, unchanged=BIG), delete(2))
    (loaded, merged) = summaries(shop)
    assert (loaded["total-data-files"], merged.get("deleted-data-files")) == ("1", None)
    assert (merged["total-delete-files"], merged["total-position-deletes"]) == ("1", "2")
    assert shop.table.rows() == 4
    assert by_id(shop.content()) == {1: "large 1", 3: "large 3", 4: "large 4", 5: "large 5"}


def test_the_table_knows_the_size_of_file_that_is_aimed_at(shop: Mirror) -> None:
    assert metadata_of(shop).document["properties"]["write.target-file-size-bytes"] == str(FILE_BYTES)


def test_nothing_is_left_of_what_was_staged(shop: Mirror) -> None:
    shop.apply(update(1, big="x"))
    assert not list((shop.folder / "_staged").glob("*"))
    assert not (shop.folder / "_tailrace").exists()
    assert metadata_of(shop).orphan_snapshots() == []


# --- other writers -------------------------------------------------------------------------------------------


def at_point(monkeypatch: pytest.MonkeyPatch, place: Any, name: str, act: Callable[[], object]) -> None:
    """Do something just before a function of ours is run for the first time."""
    real = getattr(place, name)

    def first(*arguments: Any, **more: Any) -> Any:
        monkeypatch.setattr(place, name, real)
        act()
        return real(*arguments, **more)

    monkeypatch.setattr(place, name, first)


@pytest.mark.parametrize("meanwhile", [others.append, others.compact])
def test_a_commit_made_before_ours_is_published_fails_ours(
    shop: Mirror, monkeypatch: pytest.MonkeyPatch, meanwhile: others.Act
) -> None:
    from tailrace.spark.writers.iceberg_commits import IcebergCommits

    shop.apply(insert(9))
    before = history_of(metadata_of(shop))
    at_point(monkeypatch, IcebergCommits, "publish", lambda: meanwhile(shop.folder))
    with pytest.raises(ForeignWrite, match="at the same time"):
        shop.apply(update(1, big="mine"))
    after = history_of(metadata_of(shop))
    assert after[: len(before)] == before
    assert len(after) == len(before) + 1, "theirs is there, and ours is not"
    if meanwhile is others.compact:
        assert shop.apply(update(1, big="again")).committed, "and what was staged is no hindrance"
        assert (by_id(shop.content())[1], metadata_of(shop).orphan_snapshots()) == ("again", [])


def test_two_appliers_of_one_log_one_wins(shop: Mirror, monkeypatch: pytest.MonkeyPatch) -> None:
    from tailrace.spark.writers.iceberg_commits import IcebergCommits

    at_point(monkeypatch, IcebergCommits, "publish", lambda: shop.apply(update(1, big="winner")))
    with pytest.raises(ForeignWrite):
        shop.apply(update(1, big="loser"))
    assert (shop.seq, by_id(shop.content())[1]) == (10, "winner")


def test_columns_that_someone_else_changes_stop_the_table(shop: Mirror) -> None:
    run_sql(shop.folder, "ALTER TABLE {t} ADD COLUMN theirs int")
    with pytest.raises(ForeignWrite, match="columns"):
        shop.table.applied_position()


def test_what_someone_else_partitions_a_table_by_stops_it(shop: Mirror) -> None:
    run_sql(shop.folder, "ALTER TABLE {t} ADD PARTITION FIELD name")
    with pytest.raises(TableUnusable, match="partitioned by") as refused:
        shop.apply(insert(9))
    assert refused.value.fields["found"] == "name"


def test_a_table_that_is_set_back_takes_its_position_back_with_its_rows(shop: Mirror) -> None:
    shop.apply(update(1, big="x"))
    first = history_of(metadata_of(shop))[0]
    run_sql(shop.folder, f"CALL {{c}}.system.rollback_to_snapshot('{{n}}', {first})")
    assert shop.table.applied_position() == at(0)
    shop.apply(update(1, big="y"))
    assert (shop.seq, by_id(shop.content())[1]) == (10, "y")


# --- shape ---------------------------------------------------------------------------------------------------


def reshaped(*columns: tuple[str, pa.DataType]) -> TableSchema:
    return replace(SHOP, columns=tuple(Column(name=name, source_type="", type=kind) for name, kind in columns))


def test_a_name_that_is_used_again_is_another_column(shop: Mirror) -> None:
    """A column by its number: no file is touched, and none gives old values to a new column."""
    files = {file.name for file in (shop.folder / "data").iterdir()}
    after = reshaped(
        ("id", pa.int64()), ("big", pa.string()), ("label", pa.string()), ("n", pa.int64()), ("name", pa.string())
    )
    recast = Recast(schema=after, renamed=(("name", "label"),), added=("name",))
    assert shop.table.evolve(recast, at(0)).committed
    assert {file.name for file in (shop.folder / "data").iterdir()} == files
    shop.schema = after
    shop.apply(insert(9, label="l", name="new", n=1 << 40))
    rows = {row["id"]: row for row in rows_of(shop.folder).to_pylist()}
    assert rows[1] == {"id": 1, "big": "large 1", "label": "n1", "n": 1, "name": None}
    assert rows[9] == {"id": 9, "big": None, "label": "l", "n": 1 << 40, "name": "new"}
    gone = replace(after, columns=after.columns[:-1])
    shop.table.evolve(Recast(schema=gone, dropped=("name",)), at(10))
    shop.table.evolve(Recast(schema=after, added=("name",)), at(10))
    assert {row["name"] for row in rows_of(shop.folder).to_pylist()} == {None}, "a dropped column does not come back"


def test_values_that_change_are_written_in_the_commit_of_the_shape(tmp_path: Path) -> None:
    before = table_schema(
        {
            "id": pa.int64(),
            "n": pa.int64(),
            "tags": pa.list_(pa.string()),
            "at": pa.timestamp("us", "UTC"),
            "d": pa.decimal128(9, 2),
        }
    )
    row = {"id": 1, "n": 5, "tags": ["a", None], "at": datetime(1, 1, 1, tzinfo=UTC), "d": Decimal("1.50")}
    mirror = Mirror(tmp_path / "t", before, [row])
    columns = (
        before.columns[0],
        replace(before.columns[1], type=pa.string()),
        *before.columns[2:],
        Column(name="extra", source_type="", type=pa.int32()),
    )
    after = replace(before, columns=columns)
    recast = Recast(schema=after, added=("extra",), backfilled=(("extra", pa.scalar(7, pa.int32())),))
    mirror.table.evolve(recast, at(0))
    assert rows_of(mirror.folder).to_pylist() == [{**row, "n": "5", "extra": 7}]
    assert (mirror.version, mirror.table.schema()) == (1, after)


# --- upkeep --------------------------------------------------------------------------------------------------


OTHERS = table_schema({"name": pa.list_(pa.int32()), "k": pa.int64(), "day": pa.date32()}, key=("k",))


def test_a_table_is_loaded_anew_with_other_columns_and_other_partitions(tmp_path: Path) -> None:
    """The numbers that its columns had are other columns' then, and one of them is a list."""
    by_id_form, by_day = TableSpec(partition_by=("id",)), TableSpec(partition_by=("day",))
    table = Formed(open_table(tmp_path / "t", LOG, by_id_form), by_id_form, tmp_path / "t", SHOP, ROWS)
    table.apply(tx(1, update(1, n=5, unchanged=BIG)))
    days = [date(2020, 1, 1), None, date(2020, 1, 1)]
    rows = [{"name": [k], "k": k, "day": day} for k, day in enumerate(days)]
    table = Formed(open_table(tmp_path / "t", LOG, by_day), by_day, tmp_path / "t", OTHERS, rows)
    assert sorted(len(spec["fields"]) for spec in engine_metadata(tmp_path / "t").specs) == [0, 1]
    table.apply(tx(1, update({"k": 1}, day=date(2021, 1, 1), name=[7]), delete({"k": 2})))
    wanted = ordered([rows[0], {"name": [7], "k": 1, "day": date(2021, 1, 1)}])
    table.table.compact(UpkeepPlan(file_bytes=1 << 20, remove_after_seconds=0), table.cursor(table.seq))
    assert table.content() == wanted
    assert ordered(spark_rows(tmp_path / "t").to_pylist()) == wanted
    now = TableSpec(partition_by=("day", "k"))
    table = Formed(open_table(tmp_path / "t", LOG, now), now, tmp_path / "t", OTHERS, rows)
    table.apply(tx(1, truncate(), insert({"k": 1}, day=None, name=[1])))
    assert table.content() == [{"name": [1], "k": 1, "day": None}]
    table = Formed(open_table(tmp_path / "t", LOG), PLAIN_MIRROR, tmp_path / "t", OTHERS, rows)
    assert [spec["fields"] for spec in engine_metadata(tmp_path / "t").specs] == [[]]
    assert ordered(spark_rows(tmp_path / "t").to_pylist()) == table.content() == ordered(rows)


def test_a_column_that_takes_the_name_of_what_a_table_is_partitioned_by(tmp_path: Path) -> None:
    form = TableSpec(partition_by=("name",))
    table = Formed(open_table(tmp_path / "t", LOG, form), form, tmp_path / "t", SHOP, ROWS)
    columns = (SHOP.columns[0], replace(SHOP.columns[2], name="name"), SHOP.columns[3])
    recast = Recast(schema=replace(SHOP, columns=columns), renamed=(("big", "name"),), kept_apart=())
    assert table.table.evolve(recast, table.cursor(table.seq)).committed
    table.schema = recast.schema
    table.apply(tx(1, update(1, n=5, name="x"), delete(2)))
    assert table.tuples("id", "name", "name__dropped") == [
        (1, "x", "n1"),
        (3, "large 3", "n3"),
        (4, "large 4", "n4"),
        (5, "large 5", "n5"),
    ]
    assert {values["name"] for values in partitions_of(tmp_path / "t").values()} >= {"x", "large 3"}


def test_small_files_are_joined_and_old_snapshots_go(shop: Mirror) -> None:
    for key in range(10, 19):
        shop.apply(insert(key, big="new"))
    before = by_id(shop.content())
    tended = shop.table.compact(UpkeepPlan(file_bytes=1 << 20, remove_after_seconds=0.0), at(90))
    assert (tended.files_compacted, tended.files_written) == (10, 1)
    found = metadata_of(shop)
    assert len(found.document["snapshots"]) == 1
    assert len(list((shop.folder / "data").glob("*.parquet"))) == 1
    assert (shop.seq, by_id(shop.content())) == (90, before)
    assert shop.apply(delete(10)).committed


# --- catalogs and format versions ----------------------------------------------------------------------------


def used(catalog: Catalog, folder: Path) -> IcebergMetadata:
    """A table through its first life: made, changed, refused, evolved, loaded anew."""
    from tailrace.spark.writers.iceberg_writer import SparkIcebergTable

    table = SparkIcebergTable(session(), folder, LOG, catalog)
    assert table.applied_position() is None
    table.load(SHOP, record_batches(SHOP, ROWS), at(0))
    again = SparkIcebergTable(session(), folder, LOG, catalog)
    for seq, row in ((10, update(1, big="x", n=3)), (20, delete(2)), (30, update(3, n=9, unchanged=BIG))):
        again.apply(SHOP, fold(SHOP, changes(SHOP, row)), at(seq - 10), at(seq))
    with pytest.raises(ForeignWrite, match="starts from"):
        table.apply(SHOP, fold(SHOP, changes(SHOP, insert(6))), at(20), at(40))
    after = replace(SHOP, columns=(*SHOP.columns, Column(name="more", source_type="", type=pa.int32())))
    table.evolve(Recast(schema=after, added=("more",)), at(30))
    found = IcebergTable(folder, LOG, catalog).metadata()
    assert found is not None
    assert (table.applied_position(), table.schema(), table.rows()) == (at(30), after, 4)
    return found


def table_rows(location: str) -> dict[int, Any]:
    from pyiceberg.table import StaticTable

    rows = StaticTable.from_metadata(location).scan().to_arrow().to_pylist()
    return {row["id"]: (row["big"], row["n"], row["more"]) for row in rows}


USED = {1: ("x", 3, None), 3: ("large 3", 9, None), 4: ("large 4", 4, None), 5: ("large 5", 5, None)}


def test_a_database_may_be_the_catalog(tmp_path: Path) -> None:
    file = tmp_path / "catalog.db"
    catalog = Catalog(kind="jdbc", root=tmp_path / "lake", uri=f"jdbc:sqlite:{file}")
    used(catalog, tmp_path / "lake" / "public" / "t")
    location = catalog._metadata_location(("tailrace", "public", "t"))
    assert location is not None
    assert table_rows(location) == USED


def test_a_database_of_postgresql_may_be_the_catalog(
    tmp_path: Path, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, url = tmp_path / "lake" / "public" / "t", urlsplit(database)
    given = {"jdbc.user": url.username, "jdbc.password": url.password}
    catalog = Catalog(
        kind="jdbc",
        root=tmp_path / "lake",
        uri=f"jdbc:postgresql://{url.hostname}:{url.port}{url.path}",
        properties={name: value for name, value in given.items() if value},
    )
    used(catalog, folder)
    with psycopg.connect(database) as connection:
        (listed,) = connection.execute("select table_namespace, table_name, metadata_location from iceberg_tables")
    assert (listed[:2], table_rows(listed[2])) == (("public", "t"), USED)
    assert_second_is_refused(catalog, folder, monkeypatch)


def test_a_server_may_be_the_catalog(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "lake" / "public" / "t"
    with rest_catalog(session(), tmp_path / "rest.db") as uri:
        catalog = Catalog(kind="rest", root=tmp_path / "lake", uri=uri)
        used(catalog, folder)
        newest = max((folder / "metadata").glob("*.metadata.json"), key=lambda file: file.stat().st_mtime_ns)
        assert table_rows(str(newest)) == USED
        assert_second_is_refused(catalog, folder, monkeypatch)


def test_a_server_that_wants_a_token_gives_one_to_both_sides_for_a_credential(tmp_path: Path) -> None:
    from tailrace.spark.writers.iceberg_writer import SparkIcebergTable

    folder, given = tmp_path / "lake" / "public" / "t", {"credential": "us:s3cret", "header.X-Key": "s3cret"}
    with rest_catalog(session(), tmp_path / "rest.db", "us:s3cret") as uri:
        known = Catalog(kind="rest", root=tmp_path / "lake", uri=uri, properties=given)
        used(known, folder)
        assert known.metadata(folder) is not None
        own = SparkIcebergTable(session(), folder, LOG, known).session
        for name in given:
            ((_, shown),) = own.sql(f"SET `spark.sql.catalog.tailrace.{name}`").collect()
            assert "redacted" in shown
        for properties in ({}, {"credential": "us:other"}):
            stranger = Catalog(kind="rest", root=tmp_path / "lake", uri=uri, properties=properties)
            with pytest.raises(TableUnusable, match="HTTP 401"):
                stranger.metadata(folder)


def assert_second_is_refused(catalog: Catalog, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The catalog itself refuses what does not follow what was looked at."""
    from tailrace.spark.writers.iceberg_commits import IcebergCommits
    from tailrace.spark.writers.iceberg_writer import SparkIcebergTable

    table = SparkIcebergTable(session(), folder, LOG, catalog)
    shape = table.schema()
    assert shape is not None
    with monkeypatch.context() as patched:
        real = IcebergCommits._base
        patched.setattr(IcebergCommits, "_base", lambda self, opened, seen: overtake(real(self, opened, seen)))

        def overtake(base: Any) -> Any:
            patched.undo()
            table.apply(shape, fold(shape, changes(shape, update(1, big="first"))), at(30), at(40))
            return base

        with pytest.raises(ForeignWrite, match="at the same time"):
            table.apply(shape, fold(shape, changes(shape, update(1, big="second"))), at(30), at(40))
    assert table.applied_position() == at(40)


@pytest.mark.parametrize("version", [2, 3])
def test_a_server_follows_a_table_through_other_partitions(tmp_path: Path, version: Literal[2, 3]) -> None:
    from tailrace.spark.writers.iceberg_writer import SparkIcebergTable

    folder = tmp_path / "lake" / "public" / "t"
    with rest_catalog(session(), tmp_path / "rest.db") as uri:
        catalog = Catalog(kind="rest", root=tmp_path / "lake", uri=uri, version=version)
        for number, (by, schema) in enumerate([(("id",), SHOP), (("n", "id"), SHOP), (("k",), OTHERS), ((), SHOP)]):
            table = SparkIcebergTable(session(), folder, LOG, catalog, TableSpec(partition_by=by))
            others: list[dict[str, Any]] = [{"name": [1], "k": 1, "day": None}, {"name": None, "k": 2, "day": None}]
            rows = ROWS if schema is SHOP else others
            seq = number * 100
            table.load(schema, record_batches(schema, rows), at(seq))
            key = 1 if schema is SHOP else {"k": 1}
            table.apply(schema, fold(schema, changes(schema, delete(key))), at(seq), at(seq + 10))
            found = table.metadata()
            assert found is not None
            assert (found.partition_by, table.rows()) == (list(by), len(rows) - 1)


def test_format_version_3_strikes_rows_out_with_vectors(tmp_path: Path) -> None:
    folder = tmp_path / "public" / "t"
    found = used(Catalog(kind="hadoop", root=tmp_path, version=3), folder)
    assert found.document["format-version"] == 3
    assert list((folder / "data").glob("*.puffin"))
