"""A real table, held to every promise of `LakeTable`: by delta-rs, or with `make engines` by Spark's connectors."""

from __future__ import annotations

import os
import pickle
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace import failpoints
from tailrace.errors import BaseRowMissing, ForeignWrite, SchemaChanged, TableUnusable, ValueUnfit
from tailrace.model.position import Lsn
from tailrace.model.schema import Identity, TableId, TableSchema
from tailrace.tables.delta.table import DeltaRsTable
from tailrace.tables.fold.fold import fold
from tailrace.tables.port import AppliedPosition, LakeTable, Refetch
from tailrace.tables.spec import PLAIN_MIRROR, TableSpec
from tailrace.tables.table_paths import table_path
from tests.support import others
from tests.support.changes import (
    KEYLESS,
    SHOP,
    Change,
    KeylessModel,
    Model,
    changes,
    delete,
    insert,
    move,
    record_batches,
    table_schema,
    truncate,
    update,
)
from tests.support.engines import (
    COMMITS_FOLDER,
    IS_ICEBERG,
    data_folder,
    examples,
    newest_version,
    not_spark,
    of_delta,
    open_table,
    rows_of,
    staging,
)
from tests.support.forms import Formed, tx
from tests.support.mirrors import BIG, LOG, ROWS, Mirror, at, by_id, content


@pytest.fixture
def shop(tmp_path: Path) -> Mirror:
    return Mirror(tmp_path / "t", rows=ROWS)


@contextmanager
def nothing_committed(mirror: Mirror) -> Iterator[None]:
    before = mirror.version, mirror.content()
    yield
    assert (mirror.version, mirror.content()) == before


# --- position ----------------------------------------------------------------------------------------------


@not_spark  # a session cannot be sent to another process
def test_a_delta_table_is_a_lake_table(tmp_path: Path) -> None:
    table: LakeTable = open_table(tmp_path / "t", LOG)
    assert pickle.loads(pickle.dumps(table)).applied_position() is None


def test_a_folder_without_a_table_has_no_position(tmp_path: Path) -> None:
    table = open_table(tmp_path / "missing", LOG)
    assert (table.applied_position(), table.schema(), table.rows(), table.files()) == (None, None, 0, [])
    assert not (tmp_path / "missing").exists()


def test_what_a_dead_first_load_leaves_is_not_a_table(tmp_path: Path) -> None:
    files = staging(tmp_path / "t"), data_folder(tmp_path / "t")
    for folder in (tmp_path / "t" / COMMITS_FOLDER, *files):
        folder.mkdir(parents=True, exist_ok=True)
    for folder in files:
        (folder / "part-00000-leftover.parquet").write_bytes(b"half")
    assert open_table(tmp_path / "t", LOG).applied_position() is None
    assert len(Mirror(tmp_path / "t", rows=ROWS).content()) == 5


def test_a_load_is_one_commit_with_the_position_and_the_shape(shop: Mirror) -> None:
    assert shop.version == 0
    assert shop.table.applied_position() == at(0)
    assert shop.table.schema() == SHOP
    assert (shop.table.rows(), len(shop.table.files())) == (5, 1)
    assert sorted(shop.content(), key=lambda row: row["id"]) == ROWS


def test_a_position_before_the_first_change_and_past_32_bits_is_kept(tmp_path: Path) -> None:
    table = open_table(tmp_path / "t", LOG)
    for cursor in (
        AppliedPosition(seq=-1, commit=0, position=Lsn(1)),
        AppliedPosition(seq=(1 << 62), commit=1 << 40, position=Lsn((1 << 64) - 1)),
    ):
        table.load(SHOP, [], cursor)
        assert table.applied_position() == cursor


def test_an_empty_table_still_gets_a_commit(tmp_path: Path) -> None:
    mirror = Mirror(tmp_path / "t")
    assert (mirror.seq, mirror.table.rows(), mirror.content()) == (0, 0, [])
    assert mirror.apply(insert(1, big="a")).committed
    assert by_id(mirror.content()) == {1: "a"}


def test_a_table_without_columns_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(TableUnusable, match="no columns") as refused:
        Mirror(tmp_path / "t", replace(SHOP, columns=(), key=()))
    assert "source.exclude" in refused.value.hint


def test_every_commit_carries_the_position(tmp_path: Path) -> None:
    mirror = Mirror(tmp_path / "t", rows=ROWS)
    mirror.apply(update(1, big="x"))
    mirror.apply(delete(77))
    mirror.apply(truncate(), insert(1))
    mirror.table.load(SHOP, record_batches(SHOP, ROWS), at(100))
    keyless = Mirror(tmp_path / "k", KEYLESS)
    keyless.apply(insert({"a": 1}), insert({"a": 1}))
    keyless.apply(delete({"a": 1}))
    keyless.apply(truncate())
    for folder, numbers in ((tmp_path / "t", [0, 10, 20, 30, 100]), (tmp_path / "k", [0, 10, 20, 30])):
        told = others.positions_in(folder)
        assert [stored and stored["seq"] for stored in told] == numbers
        for stored in told:
            assert stored is not None
            assert stored["log"] == LOG
            assert set(stored) == {"format", "log", "seq", "commit", "position", "load", "schema"}


@pytest.mark.parametrize("form", [PLAIN_MIRROR, TableSpec(partition_by=("name",))], ids=["plain", "partitioned"])
def test_a_commit_and_its_files_are_on_disk_when_the_call_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: TableSpec
) -> None:
    pushed: set[int] = set()
    fsync = os.fsync

    def noted(handle: int) -> None:
        fsync(handle)
        pushed.add(os.fstat(handle).st_ino)

    monkeypatch.setattr(os, "fsync", noted)
    folder = tmp_path / "t"
    table = Formed(open_table(folder, LOG, form), form, folder, rows=ROWS)
    for step in ("loaded", "applied", "loaded again", "nothing to merge", "of another partition"):
        if step == "loaded again":
            table.table.load(SHOP, record_batches(SHOP, ROWS), table.cursor(table.seq))
        elif step != "loaded":
            table.apply(tx(1, delete(77) if step == "nothing to merge" else insert(table.seq, name=step)))
        missing = [path for path in others.parts_of(folder) if path.stat().st_ino not in pushed]
        assert not missing, step


def test_an_apply_that_is_repeated_does_nothing(shop: Mirror) -> None:
    result = fold(SHOP, changes(SHOP, update(1, big="x")))
    assert shop.table.apply(SHOP, result, at(0), at(10)).committed
    with nothing_committed(shop):
        for upto in (at(10), at(7)):
            again = shop.table.apply(SHOP, result, at(0), upto)
            assert (again.committed, again.applied_position) == (False, at(10))


def test_an_apply_that_starts_elsewhere_is_refused(shop: Mirror) -> None:
    result = fold(SHOP, changes(SHOP, update(1, big="x")))
    with nothing_committed(shop), pytest.raises(ForeignWrite, match="starts from"):
        shop.table.apply(SHOP, result, at(5), at(10))


def test_an_apply_before_any_load_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TableUnusable, match="no table here"):
        open_table(tmp_path / "t", LOG).apply(SHOP, fold(SHOP, changes(SHOP, insert(1))), at(0), at(1))


def test_a_quiet_table_s_position_does_not_move(shop: Mirror) -> None:
    with nothing_committed(shop):
        assert shop.apply().committed is False
    assert shop.seq == 0


@pytest.mark.parametrize("schema", [SHOP, KEYLESS])
def test_a_position_moves_without_rows_when_asked_to(tmp_path: Path, schema: TableSchema) -> None:
    mirror = Mirror(tmp_path / "t", schema, [{}])
    nothing = fold(schema, changes(schema))
    assert mirror.table.apply(schema, nothing, at(0), at(10), touch=True).committed
    assert (mirror.seq, mirror.version, len(mirror.content())) == (10, 1, 1)


def test_a_batch_that_changes_no_row_still_moves_the_position(shop: Mirror) -> None:
    before = shop.content()
    assert shop.apply(insert(77), delete(77)).committed
    assert (shop.seq, shop.version, shop.content()) == (10, 1, before)


def test_another_shape_is_refused(shop: Mirror) -> None:
    other = table_schema({"id": pa.int64(), "big": pa.string()})
    with nothing_committed(shop), pytest.raises(SchemaChanged):
        shop.table.apply(other, fold(other, changes(other, insert(1))), at(0), at(10))


# --- other writers -----------------------------------------------------------------------------------------


def test_maintenance_keeps_the_position(shop: Mirror) -> None:
    shop.apply(insert(9, big="nine"))
    for maintenance in others.MAINTENANCE:
        before = others.commit_file(shop.folder)
        maintenance(shop.folder)
        assert others.commit_file(shop.folder) != before
        assert shop.table.applied_position() == at(10)
    assert shop.table.schema() == SHOP
    assert shop.apply(update(9, n=1, unchanged=BIG)).committed
    assert by_id(shop.content())[9] == "nine"


@pytest.mark.parametrize("write", others.WRITES)
@pytest.mark.parametrize("then", [None, *dict.fromkeys(others.MAINTENANCE)])
def test_a_foreign_write_stops_the_table_even_under_maintenance(shop: Mirror, write: Any, then: Any) -> None:
    shop.apply(insert(9))
    write(shop.folder)
    foreign_version = newest_version(shop.folder)
    if then:
        then(shop.folder)
    for ask in (shop.table.applied_position, shop.table.schema):
        with pytest.raises(ForeignWrite) as refused:
            ask()
        assert refused.value.fields["version"] == foreign_version
        assert "tailrace snapshot" in refused.value.hint
    result = fold(SHOP, changes(SHOP, insert(10)))
    with pytest.raises(ForeignWrite):
        shop.table.apply(SHOP, result, at(10), at(20))


def test_a_commit_that_only_calls_itself_maintenance_is_foreign(shop: Mirror) -> None:
    others.append(shop.folder)
    others.disown(shop.folder)
    with pytest.raises(ForeignWrite):
        shop.table.applied_position()


def test_a_load_makes_a_table_that_others_changed_ours_again(shop: Mirror) -> None:
    others.append(shop.folder)
    assert shop.table.load(SHOP, record_batches(SHOP, ROWS[:2]), at(30)) == 2
    assert (shop.seq, len(shop.content())) == (30, 2)


def test_a_load_refuses_a_table_that_is_not_ours(tmp_path: Path) -> None:
    others.make_table(tmp_path / "t")
    table = open_table(tmp_path / "t", LOG)
    assert table.applied_position() is None
    with pytest.raises(ForeignWrite) as refused:
        table.load(SHOP, record_batches(SHOP, ROWS), at(0))
    assert refused.value.hint
    assert rows_of(tmp_path / "t").to_pylist() == [{"a": 1}]


def test_a_load_refuses_the_table_of_another_log_and_names_it(tmp_path: Path) -> None:
    mirror = Mirror(tmp_path / "t", rows=ROWS, log="another-log")
    table = open_table(tmp_path / "t", LOG)
    assert table.applied_position() is None
    with nothing_committed(mirror), pytest.raises(ForeignWrite) as refused:
        table.load(SHOP, [], at(0))
    assert refused.value.fields["log"] == "another-log"


def at_the_commit(monkeypatch: pytest.MonkeyPatch, act: Any) -> None:
    """Do something in the moment between reading the table and committing to it."""

    def hit(name: str) -> None:
        if name == "table.before_commit":
            monkeypatch.undo()
            act()

    monkeypatch.setattr(failpoints, "hit", hit)


@pytest.mark.parametrize("meanwhile", others.COMMITS)
@pytest.mark.parametrize("rows", [(update(1, big="x"),), (truncate(), insert(1)), (delete(77),)])
def test_a_commit_made_meanwhile_fails_ours(
    shop: Mirror, monkeypatch: pytest.MonkeyPatch, meanwhile: Any, rows: Any
) -> None:
    shop.apply(update(1, big="y"))  # leaves a file for vacuum to remove
    at_the_commit(monkeypatch, lambda: meanwhile(shop.folder))
    version = shop.version
    with pytest.raises(ForeignWrite, match="at the same time"):
        shop.apply(*rows)
    told = others.positions_in(shop.folder)[version + 1 :]
    assert told, "theirs is there"
    assert not any(told), "and ours is not"


def test_two_appliers_of_one_log_one_wins(shop: Mirror, monkeypatch: pytest.MonkeyPatch) -> None:
    at_the_commit(monkeypatch, lambda: shop.apply(update(1, big="winner")))
    with pytest.raises(ForeignWrite):
        shop.apply(update(1, big="loser"))
    assert (shop.seq, by_id(shop.content())[1]) == (10, "winner")


def test_two_first_loads_one_wins(tmp_path: Path) -> None:
    def batches() -> Iterator[pa.RecordBatch]:
        yield from record_batches(SHOP, ROWS)
        Mirror(tmp_path / "t", rows=ROWS[:1])

    with pytest.raises((ForeignWrite, TableUnusable)):
        open_table(tmp_path / "t", LOG).load(SHOP, batches(), at(5))
    assert open_table(tmp_path / "t", LOG).applied_position() == at(0)
    assert len(content(tmp_path / "t", SHOP)) == 1


# --- loading -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loaded_before", [False, True])
def test_an_error_of_the_source_is_raised_as_it_is_and_commits_nothing(tmp_path: Path, loaded_before: bool) -> None:
    table = open_table(tmp_path / "t", LOG)
    if loaded_before:
        table.load(SHOP, record_batches(SHOP, ROWS), at(0))

    def batches() -> Iterator[pa.RecordBatch]:
        yield from record_batches(SHOP, ROWS)
        raise ConnectionResetError("the source went away")

    with pytest.raises(ConnectionResetError, match="went away"):
        table.load(SHOP, batches(), at(9))
    assert table.applied_position() == (at(0) if loaded_before else None)
    assert table.load(SHOP, record_batches(SHOP, ROWS), at(10)) == 5


def test_a_load_may_replace_the_columns(shop: Mirror) -> None:
    other = table_schema({"id": pa.string(), "at": pa.timestamp("us")})
    shop.table.load(other, record_batches(other, [{"id": "a", "at": datetime(2020, 1, 1)}]), at(10))
    assert shop.table.schema() == other
    assert content(shop.folder, other) == [{"id": "a", "at": datetime(2020, 1, 1)}]


def test_a_load_streams_many_batches(tmp_path: Path) -> None:
    rows = ({"id": i, "big": "x" * 100} for i in range(1, 20_001))
    batches = (batch for row in _grouped(rows, 500) for batch in record_batches(SHOP, row))
    table = open_table(tmp_path / "t", LOG)
    assert table.load(SHOP, batches, at(0)) == 20_000
    assert table.rows() == 20_000


def _grouped(rows: Iterator[Any], size: int) -> Iterator[list[Any]]:
    while group := [row for _, row in zip(range(size), rows, strict=False)]:
        yield group


def test_columns_that_differ_only_in_case_are_refused(tmp_path: Path) -> None:
    schema = table_schema({"id": pa.int64(), "Id": pa.int64()})
    with pytest.raises(TableUnusable, match="case"):
        open_table(tmp_path / "t", LOG).load(schema, [], at(0))


def test_a_date_the_engine_cannot_write_is_refused_by_name(tmp_path: Path) -> None:
    schema = table_schema({"id": pa.int64(), "d": pa.date32()})
    mirror = Mirror(tmp_path / "t", schema)
    far = pa.array([2_145_042_541], pa.int32()).view(pa.date32())
    rows = changes(schema, insert(1))
    folded = fold(schema, rows.set_column(rows.column_names.index("d"), "d", far))
    batch = pa.RecordBatch.from_arrays([pa.array([1]), far], names=["id", "d"])
    with nothing_committed(mirror), pytest.raises(ValueUnfit, match="column=d"):
        mirror.table.apply(schema, folded, at(0), at(1))
    with nothing_committed(mirror), pytest.raises(ValueUnfit, match="column=d"):
        mirror.table.load(schema, [batch], at(1))


# --- rows by their keys ------------------------------------------------------------------------------------


def rows_at(*keys: int, **values: Any) -> pa.Table:
    rows = [{"id": key, "name": None, "big": None, "n": None} | values for key in keys]
    return pa.Table.from_pylist(rows, pa.schema(SHOP.row_fields()))


def mended(shop: Mirror) -> DeltaRsTable:
    assert isinstance(shop.table, DeltaRsTable)
    return shop.table


@not_spark
def test_it_says_which_keys_it_holds(shop: Mirror) -> None:
    shop.apply(delete(2))
    assert mended(shop).keys_exist(SHOP, pa.table({"id": [5, 2, 1, 77]})).tolist() == [True, False, True, False]
    assert mended(shop).keys_exist(SHOP, pa.table({"id": pa.array([], pa.int64())})).tolist() == []


@not_spark
def test_rows_that_are_put_in_replace_those_of_their_keys_and_the_position_stays(shop: Mirror) -> None:
    for _ in range(2):  # a second time it changes nothing
        put = mended(shop).upsert_rows(SHOP, rows_at(1, 9, big="put"), at(0))
        assert (put.committed, put.applied_position, shop.table.applied_position()) == (True, at(0), at(0))
        assert by_id(shop.content()) == {1: "put", 2: "large 2", 3: "large 3", 4: "large 4", 5: "large 5", 9: "put"}
    assert shop.apply(update(9, unchanged=BIG, n=1)).committed, "it goes on from there"


@not_spark
def test_rows_are_not_put_into_a_table_that_has_gone_on(shop: Mirror) -> None:
    shop.apply(insert(9))
    with nothing_committed(shop), pytest.raises(ForeignWrite):
        mended(shop).upsert_rows(SHOP, rows_at(1), at(0))


# --- applying ----------------------------------------------------------------------------------------------


def test_upserts_and_deletes_are_merged(shop: Mirror) -> None:
    applied = shop.apply(update(1, big="new"), delete(2), insert(9, big=None), delete(77))
    assert (applied.upserted, applied.deleted, applied.applied_position) == (2, 2, at(10))
    assert by_id(shop.content()) == {1: "new", 3: "large 3", 4: "large 4", 5: "large 5", 9: None}
    assert shop.table.rows() == 5


def test_an_unchanged_large_value_never_overwrites_what_is_stored(shop: Mirror) -> None:
    shop.apply(
        update(1, n=9, unchanged=BIG), update(2, big=None), insert(9, big="in the batch"), update(9, n=1, unchanged=BIG)
    )
    rows = {row["id"]: (row["big"], row["n"], row["name"]) for row in shop.content()}
    assert rows[1] == ("large 1", 9, None)
    assert rows[2] == (None, None, None)
    assert rows[9] == ("in the batch", 1, None)


def test_a_key_update_keeps_the_large_value_also_twice_in_one_batch(shop: Mirror) -> None:
    shop.apply(*move(1, 10, unchanged=BIG), *move(10, 11, unchanged=BIG), *move(2, 1, unchanged=BIG, n=7))
    expected = {11: "large 1", 1: "large 2", 3: "large 3", 4: "large 4", 5: "large 5"}
    assert by_id(shop.content()) == expected


def test_rows_swap_their_keys_and_keep_their_values(shop: Mirror) -> None:
    shop.apply(
        *move(1, 9, unchanged=BIG),
        *move(2, 1, unchanged=BIG),
        *move(9, 2, unchanged=BIG),
        update(3, unchanged=BIG),
        *move(4, 8, unchanged=("big", "name")),
        *move(8, 4, unchanged=BIG),
    )
    assert by_id(shop.content()) == {1: "large 2", 2: "large 1", 3: "large 3", 4: "large 4", 5: "large 5"}


@pytest.mark.parametrize("rows", [
    (update(1, big="x"), update(77, unchanged=BIG)),
    (update(1, unchanged=BIG), *move(77, 78, unchanged=BIG)),
    (*move(1, 77, unchanged=BIG), *move(88, 1, unchanged=BIG)),
])  # fmt: skip
def test_a_missing_base_row_is_found_before_the_commit(shop: Mirror, rows: tuple[Change, ...]) -> None:
    with nothing_committed(shop), pytest.raises(BaseRowMissing) as refused:
        shop.apply(*rows)
    assert refused.value.hint


def shop_rows(*rows: dict[str, Any]) -> pa.Table:
    return pa.Table.from_batches(record_batches(SHOP, rows), pa.schema(SHOP.row_fields()))


def test_rows_whose_base_is_missing_are_read_again(shop: Mirror) -> None:
    asked = []

    def reread(keys: pa.Table) -> pa.Table:
        asked.append(keys.to_pylist())
        return shop_rows({"id": 88, "big": "now", "name": "new", "n": 8}, {"id": 55, "big": "not asked for"})

    rows = [update(1, n=9, unchanged=BIG), update(88, unchanged=BIG), update(99, unchanged=BIG), delete(3)]
    applied = shop.apply(*rows, reread=reread)
    assert asked == [[{"id": 88}, {"id": 99}]]
    assert (applied.committed, applied.upserted, applied.deleted) == (True, 2, 1)
    found = {row["id"]: row for row in shop.content()}
    assert sorted(found) == [1, 2, 4, 5, 88]
    assert found[1] == {"id": 1, "name": None, "big": "large 1", "n": 9}
    assert found[88] == {"id": 88, "name": "new", "big": "now", "n": 8}


def test_rows_that_moved_are_read_again_by_their_last_key(shop: Mirror) -> None:
    """Also where the table has their old key: by now it may be another row's."""
    asked = []

    def reread(keys: pa.Table) -> pa.Table:
        asked.append(sorted(row["id"] for row in keys.to_pylist()))
        return shop_rows({"id": 12, "big": "twelve"}, {"id": 2, "big": "two"}, {"id": 79, "big": "seventy-nine"})

    shop.apply(
        *move(1, 11, unchanged=BIG),
        *move(11, 12, unchanged=BIG),
        *move(2, 22, unchanged=BIG),
        *move(22, 2, unchanged=BIG),
        *move(78, 79, unchanged=BIG),
        *move(3, 33, unchanged=BIG),
        *move(4, 44, big="whole"),
        reread=reread,
    )
    assert asked == [[2, 12, 33, 79]]
    expected = {2: "two", 5: "large 5", 12: "twelve", 44: "whole", 79: "seventy-nine"}
    assert by_id(shop.content()) == expected


def test_nothing_is_read_again_when_nothing_is_missing(shop: Mirror) -> None:
    def reread(keys: pa.Table) -> pa.Table:
        raise AssertionError

    shop.apply(update(1, n=9, unchanged=BIG), *move(2, 9, big="x"), insert(10), delete(77), reread=reread)
    shop.apply(truncate(), insert(1), update(1, n=1, unchanged=BIG), reread=reread)
    assert len(shop.content()) == 1


def test_a_batch_of_which_no_row_is_left_still_moves_the_position(shop: Mirror) -> None:
    applied = shop.apply(update(77, unchanged=BIG), reread=lambda keys: shop_rows())
    assert (applied.committed, applied.upserted, applied.deleted) == (True, 0, 0)
    assert (shop.seq, len(shop.content())) == (10, 5)


def test_an_error_of_the_rereading_is_raised_as_it_is_and_commits_nothing(shop: Mirror) -> None:
    def reread(keys: pa.Table) -> pa.Table:
        raise ConnectionResetError("the source went away")

    with nothing_committed(shop), pytest.raises(ConnectionResetError):
        shop.apply(update(1, n=9), update(77, unchanged=BIG), reread=reread)


def test_a_truncate_replaces_all_rows_in_one_commit(shop: Mirror) -> None:
    shop.apply(update(1, big="x"), truncate(), insert(3, big="after"), insert(4), delete(4))
    assert (by_id(shop.content()), shop.version, shop.table.rows()) == ({3: "after"}, 1, 1)
    shop.apply(truncate())
    assert (shop.content(), shop.seq, shop.version) == ([], 20, 2)


TYPES: dict[str, pa.DataType] = {
    'I"d x': pa.int64(), "UPPER": pa.int16(), "a.b": pa.int32(), "it's": pa.float32(), "`f`": pa.float64(),
    "sp ace": pa.string(), "bin;ary": pa.binary(), "日": pa.bool_(), "d,e": pa.date32(), "naive": pa.timestamp("us"),
    "zoned": pa.timestamp("us", "UTC"), "num{}": pa.decimal128(38, 9), "texts": pa.list_(pa.string()),
    "bytes": pa.list_(pa.binary()), "nums": pa.list_(pa.decimal128(5, 2)), "times": pa.list_(pa.timestamp("us", "UTC")),
    "_op": pa.string(), "c0": pa.string(), "op": pa.string(), "t": pa.string(), "s": pa.string(), "k1": pa.bool_(),
}  # fmt: skip
EVERY = table_schema(TYPES, key=('I"d x',))
FULL: dict[str, Any] = {
    'I"d x': 1, "UPPER": -3, "a.b": 1 << 30, "it's": 1.5, "`f`": -0.0, "sp ace": "it's \"é\"", "bin;ary": b"\0\xff",
    "日": False, "d,e": date(1, 1, 1), "naive": datetime(9999, 12, 31, 23, 59, 59, 999999),
    "zoned": datetime(1, 1, 1, tzinfo=UTC), "num{}": Decimal("-12345678901234567890123456789.123456789"),
    "texts": ["a", None, ""], "bytes": [b"", None], "nums": [], "times": [datetime(2020, 1, 1, tzinfo=UTC), None],
    "_op": "x", "c0": "y", "op": "z", "t": "t", "s": "s", "k1": True,
}  # fmt: skip


def test_every_type_and_name_survives_load_merge_and_absence(tmp_path: Path) -> None:
    mirror = Mirror(tmp_path / "t", EVERY, [FULL, {'I"d x': 2}])
    others = tuple(name for name in TYPES if name != 'I"d x')
    key, other = {'I"d x': 1}, {'I"d x': 2}
    mirror.apply(update(key, unchanged=others), update(other, **{k: v for k, v in FULL.items() if k in others}))
    assert {row['I"d x']: row for row in mirror.content()} == {1: FULL, 2: FULL | other}
    mirror.apply(*move(key, {'I"d x': 3}, unchanged=others), *move(other, key, unchanged=others))
    assert {row['I"d x']: row for row in mirror.content()} == {3: FULL | {'I"d x': 3}, 1: FULL}


KEYS: list[tuple[pa.DataType, list[Any]]] = [
    (pa.int16(), [1, -1, 5]),
    (pa.string(), ["", "it's", "é"]),
    (pa.binary(), [b"", b"\0", b"\xff"]),
    (pa.bool_(), [True, False]),
    (pa.date32(), [date(1, 1, 1), date(9999, 12, 31), date(2020, 1, 1)]),
    (pa.timestamp("us"), [datetime(2020, 1, 1), datetime(1, 1, 1), datetime(2020, 1, 1, 0, 0, 0, 1)]),
    (pa.timestamp("us", "UTC"), [datetime(1, 1, 1, tzinfo=UTC), datetime(9999, 1, 1, tzinfo=UTC)]),
    (pa.decimal128(38, 5), [Decimal("0.00001"), Decimal(-1), Decimal("1e30")]),
    (pa.float64(), [-0.0, float("inf"), 5e-324]),
    (pa.list_(pa.int32()), [[], [1], [1, None]]),
]


@pytest.mark.parametrize(("kind", "values"), KEYS, ids=lambda value: str(value)[:20])
@pytest.mark.parametrize("composite", [False, True], ids=["alone", "composite"])
def test_keys_of_every_type_are_matched(tmp_path: Path, kind: pa.DataType, values: list[Any], composite: bool) -> None:
    schema = table_schema({"big": pa.string(), "part": pa.int16(), "k": kind}, key=("k", "part")[: 1 + composite])
    mirror = Mirror(tmp_path / "t", schema, [{"k": v, "part": 1, "big": str(i)} for i, v in enumerate(values)])
    mirror.apply(*(update({"k": value, "part": 1}, unchanged=BIG) for value in values))
    expected = {str(i): value for i, value in enumerate(values)}
    assert {row["big"]: row["k"] for row in mirror.content()} == expected
    # The rows trade keys in a ring, through none.
    ring = [values[-1], *values[:-1]]
    first = {"k": values[0], "part": 1}
    free = {"k": values[0], "part": 2} if composite else {"k": None, "part": 1}
    if not composite:
        mirror.apply(*(delete({"k": value}) for value in values[1:]), update(first, big="only"))
        assert [(row["k"], row["big"]) for row in mirror.content()] == [(values[0], "only")]
        return
    moves = [*move(first, free, unchanged=BIG)]
    for source, target in reversed(list(zip(values[1:], ring[1:], strict=True))):
        moves += move({"k": source, "part": 1}, {"k": target, "part": 3}, unchanged=BIG)
    mirror.apply(*moves)
    found = {row["big"]: (row["k"], row["part"]) for row in mirror.content()}
    assert found == {"0": (values[0], 2)} | {str(i): (ring[i], 3) for i in range(1, len(values))}


def test_a_zero_key_that_changes_its_sign_stays_one_row(tmp_path: Path) -> None:
    schema = table_schema({"id": pa.float64(), "big": pa.string()})
    mirror = Mirror(tmp_path / "t", schema, [{"id": -0.0, "big": "kept"}, {"id": 1.0}])
    mirror.apply(*move(-0.0, 0.0, unchanged=BIG))
    assert sorted(str(row) for row in mirror.content()) == ["{'id': 0.0, 'big': 'kept'}", "{'id': 1.0, 'big': None}"]


# --- tables without a key ----------------------------------------------------------------------------------


def test_keyless_inserts_are_appended_as_often_as_they_came(tmp_path: Path) -> None:
    mirror = Mirror(tmp_path / "t", KEYLESS)
    mirror.apply(insert({"a": 1, "b": "x"}), insert({"a": 1, "b": "x"}), insert({}))
    mirror.apply(insert({"a": 1, "b": "x"}))
    assert Counter(map(str, mirror.content())) == {"{'a': 1, 'b': 'x'}": 3, "{'a': None, 'b': None}": 1}
    assert len(mirror.table.files()) == 2


def test_k_deletes_of_one_image_remove_exactly_k_copies(tmp_path: Path) -> None:
    schema = table_schema(
        {"f": pa.float64(), "l": pa.list_(pa.binary()), "d": pa.decimal128(5, 2)}, key=(), identity=Identity.FULL
    )
    nan, null = float("nan"), {"f": None, "l": None, "d": None}
    image = {"f": nan, "l": [b"", None], "d": Decimal("1.50")}
    others = [null, image | {"l": []}, image | {"l": None}, image | {"f": -0.0}, image | {"f": 0.0}]
    mirror = Mirror(tmp_path / "t", schema, [image] * 5 + others)
    mirror.apply(delete(image), delete(image), delete(image | {"f": -0.0}), delete(null), insert(null | {"f": 2.0}))
    left = Counter(map(str, mirror.content()))
    kept = [image] * 3 + [others[1], others[2], others[4], null | {"f": 2.0}]
    assert left == Counter(map(str, kept))
    assert mirror.version == 1


def test_removing_more_copies_than_there_are_is_refused_before_the_commit(tmp_path: Path) -> None:
    mirror = Mirror(tmp_path / "t", KEYLESS, [{"a": 1, "b": "x"}] * 2)
    with nothing_committed(mirror), pytest.raises(BaseRowMissing):
        mirror.apply(*[delete({"a": 1, "b": "x"})] * 3)


def test_a_keyless_update_replaces_one_copy(tmp_path: Path) -> None:
    mirror = Mirror(tmp_path / "t", KEYLESS, [{"a": 1, "b": "x"}] * 2)
    mirror.apply(update({"a": 2, "b": "y"}, before={"a": 1, "b": "x"}))
    assert sorted(map(str, mirror.content())) == ["{'a': 1, 'b': 'x'}", "{'a': 2, 'b': 'y'}"]


# --- folders -----------------------------------------------------------------------------------------------

NAMES = [
    "plain", "a/b", "100%", "a%2Fb", ".hidden", "..", "sp ace", "日本é", "tab\t", "q?#[x]*", "back\\slash", '"', "%41",
    "a^b|c", "q?#*", "a:b", "a`b.c",
]  # fmt: skip
NOT_IN_ICEBERG = re.compile(r"[\[\]\\^|:%]")
"""What no folder of its tables may have, and such names become folders with a percent sign."""


@pytest.mark.parametrize("name", NAMES)
def test_any_name_has_a_folder_that_works(tmp_path: Path, name: str) -> None:
    for table in (TableId("public", name), TableId(name, "t")):
        folder = table_path(tmp_path / "lake", table)
        if IS_ICEBERG and NOT_IN_ICEBERG.search(str(folder.relative_to(tmp_path))):
            with pytest.raises(TableUnusable, match="cannot have this name") as refused:
                Mirror(folder, rows=ROWS)
            assert "tables.rules" in refused.value.hint
            assert not folder.exists()
            continue
        assert open_table(folder, LOG).applied_position() is None
        mirror = Mirror(folder, rows=ROWS)
        mirror.apply(update(1, unchanged=BIG), *move(2, 9, unchanged=BIG))
        assert by_id(mirror.content()) == {1: "large 1", 9: "large 2", 3: "large 3", 4: "large 4", 5: "large 5"}
        mirror.table.load(SHOP, record_batches(SHOP, ROWS[:1]), at(50))
        assert (mirror.seq, len(mirror.table.files()), (folder / COMMITS_FOLDER).is_dir()) == (50, 1, True)
    assert not set(os.listdir(tmp_path)) - {"lake"}


@of_delta("an Iceberg table cannot have such a name")
def test_a_table_with_an_encoded_name_is_loaded_anew_after_its_folder_is_removed(tmp_path: Path) -> None:
    folder = table_path(tmp_path, TableId("public", "a/b"))
    Mirror(folder, rows=ROWS)
    folder.unlink()
    assert open_table(folder, LOG).applied_position() is None
    assert len(Mirror(folder, rows=ROWS[:1]).content()) == 1


def test_a_root_the_engine_cannot_read_back_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TableUnusable, match=r"tables\.path"):
        table_path(tmp_path / "a%20b", TableId("public", "t"))


def test_a_folder_with_other_things_in_it_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "t"
    folder.mkdir()
    (folder / "thesis.tex").write_text("mine")
    for use in (open_table(folder, LOG).applied_position, lambda: Mirror(folder)):
        with pytest.raises(TableUnusable) as refused:
            use()
        assert refused.value.fields["found"] == "thesis.tex"
    assert os.listdir(folder) == ["thesis.tex"]


def test_a_file_in_the_table_s_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t").write_text("mine")
    with pytest.raises(TableUnusable):
        open_table(tmp_path / "t", LOG).applied_position()
    with pytest.raises(TableUnusable):
        open_table(tmp_path / "t" / "below", LOG).load(SHOP, [], at(0))


@pytest.mark.parametrize("garbage", ["garbage", "", '{"commitInfo":{"tailrace":"{}"}}', "[]"])
def test_a_log_that_cannot_be_read_is_an_error_and_never_a_new_table(shop: Mirror, garbage: str) -> None:
    others.commit_file(shop.folder).write_text(garbage)
    with pytest.raises(TableUnusable) as refused:
        shop.table.applied_position()
    assert refused.value.hint
    with pytest.raises(TableUnusable):
        shop.table.load(SHOP, [], at(10))


def test_a_commit_of_ours_that_cannot_be_read_is_an_error(shop: Mirror) -> None:
    shop.apply(insert(9))
    others.garble(shop.folder)
    with pytest.raises(TableUnusable, match=f"version={newest_version(shop.folder)}"):
        shop.table.applied_position()


@contextmanager
def somebody() -> Iterator[None]:
    """Run as a user without rights; the tests may run as root, to whom nothing is denied."""
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_a_folder_one_may_not_read_or_write_is_a_clear_error(shop: Mirror) -> None:
    os.chmod(shop.folder, 0)
    os.chmod(shop.folder.parent, 0o500)
    try:
        with somebody(), pytest.raises(TableUnusable, match="Permission denied"):
            shop.table.applied_position()
        with somebody(), pytest.raises(TableUnusable, match="Permission denied"):
            open_table(shop.folder.parent / "new", LOG).load(SHOP, [], at(0))
    finally:
        os.chmod(shop.folder.parent, 0o700)
        os.chmod(shop.folder, 0o700)
    assert shop.seq == 0


# --- against the model, however the changes are cut -------------------------------------------------------

KINDS = ["insert"] * 5 + ["update"] * 4 + ["move"] * 6 + ["delete"] * 2 + ["truncate"]


def steps_of(*kinds: str) -> st.SearchStrategy[list[tuple[Any, ...]]]:
    step = st.tuples(
        st.sampled_from(kinds),
        st.integers(0, 4),
        st.integers(0, 4),
        st.sampled_from(["a", "b", "", None]),
        st.sampled_from([(), BIG, BIG, ("name", "big")]),
        st.integers(0, 5).map(lambda n: n == 0),
    )
    return st.lists(step, min_size=10, max_size=40)


STEPS = steps_of(*KINDS)
AND_BACK = steps_of(*KINDS, *["leave"] * 5, *["enter"] * 6)
"""With rows that leave and come back, while nobody sees what they are."""


@given(STEPS)
@settings(max_examples=examples(15), deadline=None)
def test_any_history_cut_anywhere_ends_in_the_source_s_rows(steps: list[tuple[Any, ...]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model, pending = Model(), []
        mirror = Mirror(Path(folder) / "t", model.schema)
        for *step, cut in [*steps, ("none", 99, 0, None, (), True)]:
            pending += model.step(*step)
            if cut:
                mirror.apply(*pending)
                pending = []
                found = mirror.content()
                assert sorted(map(str, found)) == sorted(map(str, model.table().values()))


def now_of(model: Model) -> Refetch:
    """The rows as the source has them when all is over."""

    def reread(keys: pa.Table) -> pa.Table:
        wanted = [tuple(key.values()) for key in keys.select(["code", "shop"]).to_pylist()]
        rows = [row for row in model.table().values() if (row["code"], row["shop"]) in wanted]
        return pa.Table.from_pylist(rows, schema=pa.schema(model.schema.row_fields()))

    return reread


@given(AND_BACK)
@settings(max_examples=examples(30), deadline=None)
def test_once_a_row_is_missing_rows_are_read_again_and_end_as_the_source_s(steps: list[tuple[Any, ...]]) -> None:
    model = Model()
    history = [(model.step(*step), cut) for *step, cut in [*steps, ("none", 99, 0, None, (), True)]]
    reread: Refetch | None = None
    with tempfile.TemporaryDirectory() as folder:
        mirror, pending = Mirror(Path(folder) / "t", model.schema), list[Change]()
        for done, cut in history:
            pending += done
            if not cut:
                continue
            try:
                mirror.apply(*pending, reread=reread)
            except BaseRowMissing:
                assert reread is None, "what is missing is read again"
                reread = now_of(model)
                mirror.apply(*pending, reread=reread)
            pending = []
        assert sorted(map(str, mirror.content())) == sorted(map(str, model.table().values()))


@given(AND_BACK, st.lists(st.integers(0, 40), min_size=5, max_size=5))
@settings(max_examples=examples(100 if os.environ.get("TAILRACE_THOROUGH") else 40), deadline=None)
def test_rows_read_at_any_time_and_the_changes_since_end_in_the_source_s_rows(
    steps: list[tuple[Any, ...]], read_at: list[int]
) -> None:
    """A load in parts: each key is read at a time of its own, then everything since the first is replayed."""
    model, history, loaded = Model(), [], []
    for time, (*step, _cut) in enumerate([*steps, *[("none", 99, 0, None, (), False)] * 40]):
        due = [Model.key(number) for number, when in enumerate(read_at) if when == time]
        loaded += [row for row in model.table().values() if {"shop": row["shop"], "code": row["code"]} in due]
        history.append(model.step(*step))

    with tempfile.TemporaryDirectory() as folder:
        mirror = Mirror(Path(folder) / "t", model.schema, loaded)
        pending: list[Change] = []
        for done, (*_, cut) in zip(history, [*steps, *[(True,)] * 40], strict=True):
            pending += done
            if cut:
                mirror.apply(*pending, reread=now_of(model))
                pending = []
        assert sorted(map(str, mirror.content())) == sorted(map(str, model.table().values()))


IMAGE = st.tuples(st.sampled_from([None, 0]), st.sampled_from([None, "x"]))


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["insert"] * 4 + ["update", "delete", "delete", "truncate"]),
            IMAGE,
            IMAGE,
            st.integers(0, 5).map(lambda n: n == 0),
        ),
        min_size=10,
        max_size=30,
    )
)
@settings(max_examples=examples(8), deadline=None)
def test_any_keyless_history_cut_anywhere_ends_in_the_source_s_rows(steps: list[tuple[Any, ...]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model, pending = KeylessModel(), []
        mirror = Mirror(Path(folder) / "t", KEYLESS)
        for *step, cut in [*steps, ("delete", (9, None), (9, None), True)]:
            pending += model.step(*step)
            if cut:
                mirror.apply(*pending)
                pending = []
                assert Counter((row["a"], row["b"]) for row in mirror.content()) == +model.rows


@pytest.mark.parametrize("text", ["a\x85b", "\u2028", "\u2029", "\x0b\x0c", "\x1c\x1d\x1e", "a\r\nb"])
def test_a_text_that_python_would_take_for_several_lines_is_one_value(tmp_path: Path, text: str) -> None:
    mirror = Mirror(tmp_path / "t", rows=[{"id": 1, "name": text, "big": text, "n": 1}])
    mirror.apply(insert(2, name=text, big=text, n=1))
    assert by_id(mirror.content()) == {1: text, 2: text}
    assert mirror.seq == 10
