"""Every engine and every spec: what a lake table holds after any changes.

An engine is one more way to open a table (`OPEN`); the rest of this file is the same for all. `make engines` runs it
with Spark's connector.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.errors import BaseRowMissing, FormChanged, TableUnusable, ValueUnfit
from tailrace.model.policies import DEFAULT_POLICIES
from tailrace.model.schema import Column, Identity, TableId
from tailrace.tables.compaction_plan import UpkeepPlan
from tailrace.tables.evolve.carry_over import carry_over
from tailrace.tables.evolve.schema_plan import Recast, no_value
from tailrace.tables.fold.by_mode import fold_by_mode
from tailrace.tables.spec import PLAIN_MIRROR, TableMode, TableSpec
from tests.support import engines, forms
from tests.support.changes import (
    COMPOSITE,
    KEYLESS,
    SHOP,
    arrival,
    delete,
    insert,
    move,
    table_schema,
    truncate,
    update,
)
from tests.support.engines import ENGINE, examples
from tests.support.forms import (
    LOADED_SEQ,
    READ_AT,
    Account,
    Formed,
    OpenTable,
    again,
    ordered,
    pieces,
    second,
    steps_with,
    stored,
    story,
    tx,
)

LOG = "0b1c9a3e-6f3b-4e7e-9d80-5e1d5d6a7b11"
OPEN: dict[str, OpenTable] = {ENGINE: lambda path, form: engines.open_table(path, LOG, form)}

MARKED = TableSpec(soft_delete=True, metadata=("_op", "_seq", "_tx"))
HISTORY = TableSpec(mode=TableMode.HISTORY, metadata=("_op",))
APPEND = TableSpec(mode=TableMode.APPEND)
ROWS = [{"id": i, "name": f"n{i}", "big": f"large {i}", "n": i} for i in (1, 2, 3)]
BIG = ("big",)


@pytest.fixture(params=sorted(OPEN), scope="session")
def open_table(request: pytest.FixtureRequest) -> OpenTable:
    return OPEN[request.param]


@pytest.fixture
def made(open_table: OpenTable, tmp_path: Path) -> Any:
    def make(form: TableSpec, rows: Any = ROWS, schema: Any = SHOP) -> Formed:
        return Formed(open_table(tmp_path / "t", form), form, tmp_path / "t", schema, rows)

    return make


# --- metadata ----------------------------------------------------------------------------------------------


def test_a_mirror_names_the_change_of_each_row(made: Any) -> None:
    table = made(TableSpec(metadata=("_position", "_op", "_committed_at")))
    made_new = tx(3000, insert(9, name="z"), update(9, name="y", unchanged=BIG))
    table.apply(tx(2000, update(1, name="a", big="b")), made_new)
    assert table.tuples("id", "name", "_op", "_position", "_committed_at") == [
        (1, "a", "update", "0/10", second(2000)),
        (2, "n2", "read", "0/0", None),
        (3, "n3", "read", "0/0", None),
        (9, "y", "update", "0/20", second(3000)),
    ]


def test_metadata_that_was_not_requested_is_left_out(made: Any) -> None:
    table = made(TableSpec(metadata=("_seq",)))
    table.apply(tx(1, delete(1), *move(2, 8, unchanged=BIG, name="moved")))
    assert table.content() == [
        {"id": 8, "name": "moved", "big": "large 2", "n": None, "_seq": 102},
        {"id": 3, "name": "n3", "big": "large 3", "n": 3, "_seq": LOADED_SEQ},
    ]


# --- soft delete -------------------------------------------------------------------------------------------


def test_a_deleted_row_stays_marked_with_its_last_values(made: Any) -> None:
    table = made(TableSpec(soft_delete=True))
    table.apply(tx(1, update(2, name="last", unchanged=BIG), delete(2)), tx(2, delete(1), delete(77)))
    assert table.tuples("id", "name", "big", "_deleted") == [
        (1, "n1", "large 1", True),
        (2, "last", "large 2", True),
        (3, "n3", "large 3", False),
    ]
    table.apply(tx(3, insert(1, name="again")))
    assert table.tuples("id", "name", "big", "_deleted")[0] == (1, "again", None, False)


def test_a_truncate_marks_every_row(made: Any) -> None:
    table = made(MARKED)
    table.apply(tx(1, update(1, name="x", unchanged=BIG)), tx(2, truncate(), insert(2, name="new")), tx(3, truncate()))
    assert table.tuples("id", "name", "_deleted", "_op", "_seq") == [
        (1, "x", True, "truncate", 101),
        (2, "new", True, "truncate", 103),
        (3, "n3", True, "truncate", 101),
    ]


def test_a_row_that_moves_leaves_its_old_key_marked(made: Any) -> None:
    table = made(TableSpec(soft_delete=True))
    table.apply(tx(1, *move(1, 5, unchanged=BIG), *move(5, 6, unchanged=BIG, name="b")))
    assert table.tuples("id", "big", "_deleted") == [
        (1, "large 1", True),
        (2, "large 2", False),
        (3, "large 3", False),
        (5, "large 1", True),
        (6, "large 1", False),
    ]


# --- append ------------------------------------------------------------------------------------------------


def test_every_change_is_a_row(made: Any) -> None:
    table = made(APPEND, rows=ROWS[:1])
    table.apply(tx(5, insert(7, big="b", n=1), update(7, n=2, unchanged=BIG)), tx(6, *move(7, 8, unchanged=BIG)))
    table.apply(tx(7, delete(1)), tx(8, truncate()))
    assert table.tuples("_seq", "_op", "id", "big", "_unchanged", "_tx", "_tx_index", "_position") == [
        (100, "insert", 7, "b", None, 1, 0, "0/10"),
        (101, "update", 7, None, ["big"], 1, 1, "0/10"),
        (102, "delete", 7, None, None, 2, 0, "0/20"),
        (103, "insert", 8, None, ["big"], 2, 1, "0/20"),
        (104, "delete", 1, None, None, 3, 0, "0/30"),
        (105, "truncate", None, None, None, 4, 0, "0/40"),
        (99, "read", 1, "large 1", None, None, None, "0/0"),
    ]
    assert table.tuples("_seq", "_committed_at")[1:3] == [(101, second(5)), (102, second(6))]


def test_changes_of_a_keyless_table_are_rows_too(made: Any) -> None:
    table = made(APPEND, rows=[], schema=KEYLESS)
    table.apply(tx(5, insert({"a": 1}), insert({"a": 1}), delete({"a": 1})))
    assert table.tuples("_seq", "_op", "a") == [(100, "insert", 1), (101, "insert", 1), (102, "delete", 1)]


def test_a_value_that_does_not_fit_is_refused_in_every_change(made: Any) -> None:
    table = made(APPEND)
    with pytest.raises(ValueUnfit):
        table.apply(tx(1, update(1, unfit=("name",)), update(1, name="mended")))


# --- history -----------------------------------------------------------------------------------------------

VALID = ("id", "name", "_valid_from", "_valid_to", "_current")


def test_a_row_has_a_version_for_each_transaction_that_changed_it(made: Any) -> None:
    table = made(HISTORY, rows=ROWS[:1])
    table.apply(tx(2000, update(1, name="b", unchanged=BIG), update(1, name="c", unchanged=BIG)))
    table.apply(tx(3000, delete(1)), tx(4000, insert(1, name="d", big="new")))
    assert table.tuples(*VALID, "big", "_op", "_seq") == [
        (1, "c", second(2000), second(3000), False, "large 1", "update", 101),
        (1, "d", second(4000), None, True, "new", "insert", 103),
        (1, "n1", second(READ_AT), second(2000), False, "large 1", "read", 99),
    ]


def test_a_row_inserted_and_deleted_in_one_transaction_has_no_version(made: Any) -> None:
    table = made(HISTORY, rows=[])
    table.apply(tx(2000, insert(1, name="a"), update(1, name="b"), delete(1)), tx(3000, insert(2, name="x")))
    assert table.tuples(*VALID) == [(2, "x", second(3000), None, True)]


def test_a_moved_key_ends_one_row_and_begins_another(made: Any) -> None:
    table = made(HISTORY, rows=ROWS[:1])
    table.apply(tx(2000, *move(1, 5, unchanged=BIG, name="m")), tx(3000, *move(5, 6, unchanged=BIG, name="o")))
    assert table.tuples(*VALID, "big") == [
        (1, "n1", second(READ_AT), second(2000), False, "large 1"),
        (5, "m", second(2000), second(3000), False, "large 1"),
        (6, "o", second(3000), None, True, "large 1"),
    ]


def test_a_truncate_ends_all(made: Any) -> None:
    table = made(HISTORY, rows=ROWS[:2])
    table.apply(tx(2000, update(1, name="b", unchanged=BIG)), tx(3000, truncate(), insert(2, name="again")))
    assert table.tuples(*VALID) == [
        (1, "b", second(2000), second(3000), False),
        (1, "n1", second(READ_AT), second(2000), False),
        (2, "again", second(3000), None, True),
        (2, "n2", second(READ_AT), second(3000), False),
    ]


def test_time_never_goes_back_although_a_clock_does(made: Any) -> None:
    table = made(HISTORY, rows=ROWS[:1])
    table.apply(tx(5000, update(1, name="b", unchanged=BIG)))
    table.apply(tx(3000, update(1, name="c", unchanged=BIG)), tx(10, insert(2)), tx(6000, delete(1)))
    table.apply(tx(10, truncate()))
    assert table.tuples(*VALID) == [
        (1, "b", second(5000), second(5000), False),
        (1, "c", second(5000), second(6000), False),
        (1, "n1", second(READ_AT), second(5000), False),
        (2, None, second(5000), second(6000), False),
    ]


def test_a_partial_change_of_a_past_row_is_refused(made: Any) -> None:
    table = made(HISTORY)
    table.apply(tx(2000, delete(1)))
    with pytest.raises(BaseRowMissing):
        table.apply(tx(3000, update(1, name="b", unchanged=BIG)))


# --- any cutting, any repetition ---------------------------------------------------------------------------

STEPS = steps_with(st.sampled_from([None, "", "x", "y"]))


@pytest.mark.slow
@pytest.mark.parametrize("form", [MARKED, HISTORY], ids=str)
@settings(max_examples=examples(25), deadline=None)
@given(steps=STEPS, cuts=st.sets(st.integers(1, 24), max_size=3))
def test_any_grouping_of_the_changes_gives_the_same_table(
    open_table: OpenTable, form: TableSpec, steps: list[Any], cuts: set[int]
) -> None:
    begun, transactions = story(steps)
    batch = stored(COMPOSITE, transactions)
    account = Account.of(COMPOSITE, begun, batch)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t"
        table = Formed(open_table(path, form), form, path, COMPOSITE, begun)
        for piece in pieces(batch, cuts):
            here = table.seq
            assert table.take(piece).committed == bool(piece.num_rows)
            after, table.seq = table.content(), here
            assert not table.take(piece).committed, "a repeated batch does nothing"
            assert table.content() == after
        wanted = account.versions if form is HISTORY else account.marked.values()
        assert table.content() == ordered(wanted)


@settings(max_examples=examples(15), deadline=None)
@given(steps=STEPS, cuts=st.sets(st.integers(1, 24), max_size=3))
def test_any_grouping_of_the_changes_appends_each_once(open_table: OpenTable, steps: list[Any], cuts: set[int]) -> None:
    begun, transactions = story(steps)
    batch = stored(COMPOSITE, transactions)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t"
        table = Formed(open_table(path, APPEND), APPEND, path, COMPOSITE, begun)
        for piece in pieces(batch, cuts):
            table.take(piece)
        names = [*COMPOSITE.names, "_seq", "_op", "_tx", "_tx_index", "_position", "_committed_at"]
        read = [row for row in table.content(*names, "_unchanged") if row["_op"] == "read"]
        assert ordered({name: row[name] for name in COMPOSITE.names} for row in read) == ordered(begun)
        wanted = [{"_unchanged": None} | row for row in batch.to_pylist()]
        wanted = [{name: row[name] for name in (*names, "_unchanged")} for row in wanted]
        assert [row for row in table.content(*names, "_unchanged") if row["_op"] != "read"] == ordered(wanted)


# --- reading a table again ---------------------------------------------------------------------------------


NOW = [{"id": 1, "name": "n1", "big": "large 1", "n": 1}, {"id": 2, "name": "other", "big": "b", "n": 5}]
"""The source's rows: the first row is unchanged, the second has changed, the third was deleted."""


def test_rows_that_did_not_change_keep_their_metadata(made: Any) -> None:
    table = made(TableSpec(metadata=("_op", "_seq")))
    table.apply(tx(2000, update(1, name="n1", big="large 1", n=1)))
    again(table, NOW, "again", 3000)
    assert table.tuples("id", "name", "_op", "_seq") == [(1, "n1", "update", 100), (2, "other", "read", 101)]


def test_rows_that_a_load_does_not_find_are_marked(made: Any) -> None:
    table = made(MARKED)
    table.apply(tx(2000, delete(1), insert(4, name="four"), delete(4)))
    again(table, NOW, "again", 3000)
    assert table.tuples("id", "name", "_deleted", "_op", "_seq", "_tx") == [
        (1, "n1", False, "read", 103, None),
        (2, "other", False, "read", 103, None),
        (3, "n3", True, "delete", 103, None),
        (4, "four", True, "delete", 102, 1),
    ]


def test_a_row_that_a_load_finds_changed_gets_a_version(made: Any) -> None:
    table = made(HISTORY)
    table.apply(tx(5000, update(1, name="n1", big="large 1", n=1)))
    again(table, NOW, "again", 3000)
    assert table.tuples("id", "name", "_valid_from", "_valid_to", "_current", "_op") == [
        (1, "n1", second(READ_AT), second(5000), False, "read"),
        (1, "n1", second(5000), None, True, "update"),
        (2, "n2", second(READ_AT), second(5000), False, "read"),
        (2, "other", second(5000), None, True, "read"),
        (3, "n3", second(READ_AT), second(5000), False, "read"),
    ]
    table.apply(tx(4000, delete(1)))
    assert table.tuples("id", "_valid_to")[1] == (1, second(5000))


def test_a_load_adds_what_it_reads_to_a_table_of_changes(made: Any) -> None:
    table = made(APPEND, rows=ROWS[:1])
    again(table, NOW, "again", 3000)
    assert table.tuples("_seq", "_op", "id") == [(100, "read", 1), (100, "read", 2), (99, "read", 1)]


# --- schema, upkeep, and refusals --------------------------------------------------------------------------

EVERY = [TableSpec(metadata=("_seq", "_op")), MARKED, HISTORY, APPEND]


@pytest.mark.parametrize("form", EVERY, ids=str)
def test_a_table_of_any_spec_evolves_and_is_maintained(made: Any, form: TableSpec) -> None:
    table = made(form)
    for n in range(9):
        table.apply(tx(2000 + n, insert(10 + n, name="x")))
    before = table.content(*SHOP.names)
    files = UpkeepPlan(file_bytes=1 << 20, remove_after_seconds=None)
    assert table.table.compact(files, table.cursor(table.seq)).files_compacted >= 8
    assert table.content(*SHOP.names) == before
    columns = (
        *SHOP.columns[:3],
        Column(name="m", source_type="int", type=pa.int32()),
        Column(name="extra", source_type="text", type=pa.string()),
    )
    after = replace(SHOP, columns=columns)
    recast = Recast(schema=after, added=("extra",), renamed=(("n", "m"),), backfilled=(("extra", pa.scalar("e")),))
    assert table.table.evolve(recast, table.cursor(table.seq)).committed
    assert not table.table.evolve(recast, table.cursor(table.seq)).committed
    assert table.table.schema() == after
    table.schema = after
    table.apply(tx(3000, insert(30, m=7, extra="new")))
    rows = {(row["id"], row["m"], row["extra"]) for row in table.content("id", "m", "extra")}
    filled = None if form is APPEND else "e"
    assert rows >= {(1, 1, filled), (10, None, filled), (30, 7, "new")}
    assert all(row["_seq"] is not None for row in table.content("_seq"))


@pytest.mark.parametrize(
    "form", [MARKED, HISTORY, APPEND, replace(HISTORY, partition_by=("n", "name"))],
    ids=["soft-delete", "history", "append", "history-in-partitions"],
)  # fmt: skip
def test_a_kept_past_is_carried_over_to_another_schema_and_compared_with_a_load(made: Any, form: TableSpec) -> None:
    """`n` becomes wider, `name` gets a type that cannot hold it.

    The first row is the same at the source, the second is not.
    """
    table = made(form)
    table.apply(tx(2000, delete(3)))
    columns = (
        SHOP.columns[0],
        Column(name="name", source_type="integer", type=pa.int32()),
        SHOP.columns[2],
        Column(name="n", source_type="bigint", type=pa.int64()),
    )
    after = replace(SHOP, columns=columns)
    carried = carry_over(form, SHOP, after, DEFAULT_POLICIES, no_value)
    assert isinstance(carried, Recast)
    assert table.table.evolve(carried, table.cursor(table.seq)).committed
    table.schema = after
    now: list[dict[str, Any]] = [
        {"id": 1, "name": None, "big": "large 1", "n": 1},
        {"id": 2, "name": 4, "big": "large 2", "n": 2**40},
    ]
    again(table, now, "again", 4000)
    names = ("id", "name", "name__dropped", "big", "n")
    old = [(i, None, f"n{i}", f"large {i}", i) for i in (1, 2, 3)]
    new = [(1, None, None, "large 1", 1), (2, 4, None, "large 2", 2**40)]
    rows: list[tuple[Any, ...]] = [old[0], new[1], old[2]]
    if form.mode is not TableMode.MIRROR:
        rows = [*old, new[1]] if form is not APPEND else [*old, (3, None, None, None, None), *new]
    assert Counter(table.tuples(*names)) == Counter(rows)
    if form.mode is TableMode.HISTORY:
        assert {(row["id"], row["n"]) for row in table.content("id", "n", "_current") if row["_current"]} == {
            (1, 1),
            (2, 2**40),
        }


@pytest.mark.parametrize("form", EVERY, ids=str)
def test_a_table_of_another_spec_is_refused_until_it_is_reloaded(
    open_table: OpenTable, tmp_path: Path, form: TableSpec
) -> None:
    table = Formed(open_table(tmp_path / "t", PLAIN_MIRROR), PLAIN_MIRROR, tmp_path / "t", rows=ROWS)
    other = open_table(tmp_path / "t", form)
    with pytest.raises(FormChanged) as refused:
        other.applied_position()
    assert "tailrace snapshot FILE TABLE" in refused.value.hint
    with pytest.raises(FormChanged):
        other.evolve(Recast(schema=SHOP), table.cursor(table.seq))
    assert table.content() == ordered(ROWS)
    again = Formed(other, form, tmp_path / "t", rows=ROWS)
    assert len(again.content()) == 3
    with pytest.raises(FormChanged):
        table.apply(tx(1, insert(9)))


@pytest.mark.parametrize("form", [PLAIN_MIRROR, MARKED], ids=str)
def test_a_row_that_a_chunk_saw_after_its_move_is_removed_once_the_source_lacks_it(
    open_table: OpenTable, tmp_path: Path, form: TableSpec
) -> None:
    table = Formed(open_table(tmp_path / "t", form), form, tmp_path / "t", rows=[{"id": 2, "big": "large"}])
    batch = stored(SHOP, [tx(2000, *move(1, 2, unchanged=("big",)), delete(2))], table.seq + 1)

    def source_has_none(_keys: pa.Table) -> pa.Table:
        return pa.schema(SHOP.row_fields()).empty_table()

    here, then = table.cursor(table.seq), table.cursor(table.seq + batch.num_rows)
    table.table.apply(SHOP, fold_by_mode(form, SHOP, batch), here, then, refetch=source_has_none, touch=True)
    gone = [(2, "large", True)]
    assert table.tuples("id", "big", *(["_deleted"] if form.soft_delete else [])) == (gone if form.soft_delete else [])


@pytest.mark.parametrize("form", [PLAIN_MIRROR, MARKED], ids=str)
@pytest.mark.parametrize("emptied", [False, True])
def test_a_row_without_its_value_takes_none_from_an_earlier_row(
    open_table: OpenTable, tmp_path: Path, form: TableSpec, emptied: bool
) -> None:
    earlier = [{"id": i, "big": "earlier"} for i in (1, 2, 3)]
    table = Formed(open_table(tmp_path / "t", form), form, tmp_path / "t", rows=earlier)
    came = (arrival(1, unchanged=BIG), update(2, unchanged=BIG))
    batch = stored(SHOP, [tx(2000, *([truncate()] if emptied else [delete(2)]), *came)], table.seq + 1)
    here, then = table.cursor(table.seq), table.cursor(table.seq + batch.num_rows)
    folded = fold_by_mode(table.form, SHOP, batch, can_refetch=True)
    with pytest.raises(BaseRowMissing):
        table.table.apply(SHOP, folded, here, then)

    def source_has_the_first(keys: pa.Table) -> pa.Table:
        assert sorted(keys.column("id").to_pylist()) == [1, 2]
        return pa.Table.from_pylist([{"id": 1, "big": "now"}], pa.schema(SHOP.row_fields()))

    applied = table.table.apply(SHOP, folded, here, then, refetch=source_has_the_first)
    assert (applied.committed, applied.upserted) == (True, 1)
    left = [(1, "now", False), (3, "earlier", emptied)]
    if form.soft_delete:
        assert table.tuples("id", "big", "_deleted") == left
    else:
        assert table.tuples("id", "big") == [(key, big) for key, big, deleted in left if not deleted]


def test_names_of_columns_that_the_table_lacks_do_not_change_the_spec(open_table: OpenTable, tmp_path: Path) -> None:
    table = Formed(open_table(tmp_path / "t", HISTORY), HISTORY, tmp_path / "t", rows=ROWS)
    more = replace(HISTORY, renamed_columns=(("nope", "other"),))
    assert open_table(tmp_path / "t", more).applied_position() == table.cursor(table.seq)
    with pytest.raises(FormChanged):
        open_table(tmp_path / "t", replace(HISTORY, renamed_columns=(("name", "other"),))).applied_position()


@pytest.mark.parametrize(
    ("form", "schema", "said"),
    [
        (HISTORY, KEYLESS, "needs a table with a key"),
        (TableSpec(soft_delete=True), KEYLESS, "needs a table with a key"),
        (TableSpec(metadata=("_seq",)), KEYLESS, "needs a table with a key"),
        (HISTORY, replace(SHOP, identity=Identity.NONE), "does not send which rows"),
        (
            TableSpec(soft_delete=True),
            table_schema({"id": pa.int64(), engines.MARK.upper(): pa.bool_()}),
            "has the name of one",
        ),
        (APPEND, table_schema({"id": pa.int64(), "_op": pa.string()}), "has the name of one"),
    ],
)
def test_a_spec_that_the_source_table_cannot_have_is_refused(
    open_table: OpenTable, tmp_path: Path, form: TableSpec, schema: Any, said: str
) -> None:
    with pytest.raises(TableUnusable, match=said) as refused:
        Formed(open_table(tmp_path / "t", form), form, tmp_path / "t", schema)
    assert refused.value.hint
    assert not (tmp_path / "t").exists()


# --- other names -------------------------------------------------------------------------------------------

NAMED = (("big", "large"), ("id", "number"))


@pytest.mark.parametrize("form", [PLAIN_MIRROR, *EVERY], ids=str)
def test_columns_have_the_requested_names(made: Any, form: TableSpec) -> None:
    table = made(replace(form, renamed_columns=NAMED))
    table.apply(tx(2000, update(1, name="b", unchanged=BIG)), tx(3000, *move(2, 8, unchanged=BIG), delete(3)))
    assert "id" not in table.content()[0]
    rows = {(row["number"], row["name"], row["large"]) for row in table.content("number", "name", "large")}
    if form is APPEND:
        unchanged = [row["_unchanged"] for row in table.content("_unchanged", "_seq") if row["_seq"] in (100, 102)]
        assert unchanged == [["large"], ["large"]]
    else:
        assert rows >= {(1, "b", "large 1"), (8, None, "large 2")}
        again(table, [{"id": 1, "name": "b", "big": "large 1", "n": None}], "again", 4000)
    recast = Recast(schema=replace(SHOP, columns=(SHOP.columns[0], SHOP.columns[2])), dropped=("name",))
    table.table.evolve(recast, table.cursor(table.seq))
    assert {"number", "large", "n"} <= table.content()[0].keys()
    assert "name" not in table.content()[0]


def test_a_refetched_row_has_the_metadata_of_its_change(made: Any) -> None:
    form = TableSpec(soft_delete=True, metadata=("_seq",), renamed_columns=NAMED)
    table = made(form, rows=ROWS[:1])
    partial = tx(1, update(7, unchanged=BIG), *move(1, 8, unchanged=BIG), update(9, unchanged=BIG))

    def refetch(keys: pa.Table) -> pa.Table:
        assert sorted(keys.column("number").to_pylist()) == [7, 8, 9]
        rows = [{"number": key, "name": "now", "large": f"read {key}", "n": 0} for key in (7, 8)]
        return pa.Table.from_pylist(rows, pa.schema(form.stored_schema(SHOP).row_fields()[:4]))

    folded = fold_by_mode(form, SHOP, stored(SHOP, [partial]))
    table.table.apply(SHOP, folded, table.cursor(LOADED_SEQ), table.cursor(103), refetch=refetch)
    assert table.tuples("number", "name", "large", "_deleted", "_seq") == [
        (1, "n1", "large 1", True, 101),
        (7, "now", "read 7", False, 100),
        (8, "now", "read 8", False, 102),
    ]


def test_changes_of_a_keyless_table_find_their_rows_under_other_names(made: Any) -> None:
    table = made(TableSpec(renamed_columns=(("a", "b"), ("b", "a"))), rows=[{"a": 1, "b": "x"}] * 2, schema=KEYLESS)
    table.apply(tx(1, delete({"a": 1}, b="x")))
    assert table.content() == [{"b": 1, "a": "x"}]


def test_two_columns_of_one_name_are_refused(made: Any) -> None:
    with pytest.raises(TableUnusable, match="would have the same name") as refused:
        made(TableSpec(renamed_columns=(("big", "NAME"),)))
    assert refused.value.hint.startswith("Rename one of them")
    assert "columns:" in refused.value.hint


def test_a_column_with_the_name_of_the_mark_is_refused(made: Any) -> None:
    with pytest.raises(TableUnusable, match="has the name of one that the table spec adds") as refused:
        made(TableSpec(soft_delete=True, deleted_column=engines.MARK, renamed_columns=(("big", engines.MARK),)))
    assert "`soft_delete`" in refused.value.hint


def test_a_folder_of_another_source_table_is_never_written(open_table: OpenTable, tmp_path: Path) -> None:
    first = Formed(open_table(tmp_path / "t", PLAIN_MIRROR), PLAIN_MIRROR, tmp_path / "t", rows=ROWS)
    other = replace(SHOP, table=TableId("public", "other"))
    load, look = lambda: first.table.load(other, [], first.cursor(200)), lambda: first.table.refuse_foreign(other.table)
    for use in (load, look):
        with pytest.raises(TableUnusable, match="overlaps") as refused:
            use()
        assert "tables.names" in refused.value.hint
    assert len(first.content()) == 3


# --- the guide ---------------------------------------------------------------------------------------------

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "modes.md"
ORDERS = table_schema({"id": pa.int64(), "state": pa.string(), "note": pa.string()})
BEGUN = 1763283600


@pytest.mark.parametrize(
    "form",
    [TableSpec(metadata=("_op", "_seq")), TableSpec(soft_delete=True), APPEND, TableSpec(mode=TableMode.HISTORY)],
    ids=str,
)
def test_the_guide_shows_what_a_reader_sees(
    open_table: OpenTable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: TableSpec
) -> None:
    monkeypatch.setattr(forms, "READ_AT", BEGUN)
    rows = [{"id": 1, "state": "new", "note": "long"}, {"id": 2, "state": "new", "note": "text"}]
    table = Formed(open_table(tmp_path / "t", form), form, tmp_path / "t", ORDERS, rows)
    packed, sent = (update(1, state=state, unchanged=("note",)) for state in ("packed", "sent"))
    third = insert(3, state="new", note="-")
    table.apply(tx(BEGUN + 60, packed, sent), tx(BEGUN + 120, delete(2)), tx(BEGUN + 180, third))
    names = form.stored_schema(ORDERS).names
    shown = GUIDE.read_text().split(f"\n| {' | '.join(names)} |\n")[1].split("\n\n")[0]
    assert sorted(shown.splitlines()[1:]) == sorted(
        "|" + "".join(f" {_shown(row[name])} |".replace("  ", " ") for name in names) for row in table.content()
    )


def _shown(value: Any) -> str:
    if isinstance(value, datetime):
        return f"{value:%Y-%m-%d %H:%M}"
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None else value[0] if isinstance(value, list) else str(value)


# --- messages ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("partition_by", [(), ("id",)])
def test_a_load_of_messages_adds_what_is_missing_and_takes_nothing_away(made: Any, partition_by: Any) -> None:
    form = TableSpec(holds_messages=True, partition_by=partition_by)
    table = made(form)
    table.apply(tx(1, insert(4, name="n4")))
    again(table, [ROWS[1] | {"name": "other"}, ROWS[0] | {"id": 5}], "second", READ_AT + 9)
    assert table.tuples("id", "name") == [(1, "n1"), (2, "other"), (3, "n3"), (4, "n4"), (5, "n1")]
    again(table, [], "third", READ_AT + 19)
    assert [number for (number,) in table.tuples("id")] == [1, 2, 3, 4, 5]
    assert TableSpec.from_json(form.to_json()) == form
