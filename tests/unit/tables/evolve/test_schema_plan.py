"""A schema change's plan for a lake table, and the table's rows after it."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from tailrace.errors import ForeignWrite, SchemaChanged
from tailrace.model.catalogue_facts import CatalogueFacts, ColumnFacts, StorageFacts
from tailrace.model.policies import DEFAULT_POLICIES, EvolutionPolicies, EvolutionPolicy
from tailrace.model.position import Lsn
from tailrace.model.schema import RULE_MARK, Column, Identity, TableId, TableSchema
from tailrace.tables.evolve.schema_plan import Recast, ReloadNeeded, is_narrower, is_wider, plan_evolution
from tailrace.tables.fold.fold import fold
from tailrace.tables.port import AppliedPosition
from tailrace.tables.staging import stage
from tests.support import others
from tests.support.changes import changes, delete, insert, record_batches, truncate, update
from tests.support.engines import commits_of, data_folder, open_table, rows_of, staging

if TYPE_CHECKING:
    from tests.support.engines import AnyTable

KEEP, APPLY, STOP, REFRESH = (
    EvolutionPolicy.KEEP_NULL,
    EvolutionPolicy.APPLY,
    EvolutionPolicy.STOP,
    EvolutionPolicy.REFRESH,
)
START = AppliedPosition(seq=7, commit=1, position=Lsn(160))
NEXT = AppliedPosition(seq=9, commit=2, position=Lsn(200))


def schema_of(
    *columns: tuple[int, str, pa.DataType],
    fills: dict[str, str] | None = None,
    key: tuple[str, ...] = ("id",),
    file: int = 5,
    stamp: int = 1,
    relation: int = 9,
    made: int = 0,
    name: str = "t",
) -> TableSchema:
    """A schema with its facts: each column's number, name and type."""
    return TableSchema(
        table=TableId("public", name),
        relation=relation,
        key=key,
        identity=Identity.KEY,
        columns=tuple(Column(name=name, source_type=str(kind), type=kind) for _, name, kind in columns),
        facts=CatalogueFacts(
            columns=tuple(
                ColumnFacts(
                    number=number,
                    nullable=True,
                    default=None,
                    fast_default=(fills or {}).get(name),
                    definition_version=stamp,
                )
                for number, name, _ in columns
            ),
            storage=(StorageFacts(relation=relation, name="public.t", file=file, attached=False),),
            columns_ever=made or max(number for number, _, _ in columns),
        ),
    )


ID, A, B = (1, "id", pa.int64()), (2, "a", pa.int32()), (3, "b", pa.string())
OLD = schema_of(ID, A, B)
ROWS = [{"id": i, "a": i * 10, "b": f"b{i}"} for i in (1, 2, 3)]


def value_of(column: Column, text: str) -> pa.Scalar | None:
    return None if text == "odd" else pa.scalar(text).cast(column.type)


def planned(new: TableSchema, policies: EvolutionPolicies = DEFAULT_POLICIES, *, old: TableSchema = OLD) -> Any:
    return plan_evolution(old, new, policies, value_of)


def recast(new: TableSchema, policies: EvolutionPolicies = DEFAULT_POLICIES, *, old: TableSchema = OLD) -> Recast:
    found = planned(new, policies, old=old)
    assert isinstance(found, Recast), found
    return found


# --- the plan ----------------------------------------------------------------------------------------------


def test_the_same_version_needs_nothing() -> None:
    assert planned(schema_of(ID, A, B)) is None
    assert recast(schema_of(ID, A, B, file=6)).descriptions == (), (
        "VACUUM FULL: the next ALTER is not taken for a rewrite"
    )


@pytest.mark.parametrize(
    ("new", "policies", "why"),
    [
        (schema_of(ID, A, B, relation=10), {}, "created again"),
        (schema_of(ID, A, B, key=("id", "a")), {}, "another key"),
        (schema_of(ID, A, B, file=6, stamp=2), {}, "rewritten"),
        (schema_of(ID, (2, "a", pa.int64()), B, file=6, stamp=2), {}, "rewritten"),
        (schema_of(ID, (2, "a", pa.string()), B), {}, "retyped a"),
        (schema_of(ID, (2, "a", pa.int16()), B), {}, "narrowed a"),
        (schema_of(ID, (2, "a", pa.int16()), B), {"narrow": REFRESH, "retype": STOP, "widen": STOP}, "narrowed a"),
        (schema_of(ID, (2, "a", pa.string()), B), {"narrow": STOP}, "retyped a"),
        (replace(schema_of(ID, A, B, (4, "c", pa.int32())), facts=None), {}, "may have been rewritten"),
        (schema_of(ID, A, B, (4, "c", pa.int32()), fills={"c": "odd"}), {}, "cannot be parsed"),
        (schema_of(ID, A), {"drop": REFRESH}, "dropped b"),
        (schema_of(ID, (2, "x", pa.int32()), B), {"rename": REFRESH}, "renamed a to x"),
        (schema_of(ID, A, B, (4, "c", pa.int32())), {"add": REFRESH}, "added c"),
    ],
)
def test_an_unknown_or_unwanted_change_reloads_the_table(
    new: TableSchema, policies: dict[str, EvolutionPolicy], why: str
) -> None:
    found = planned(new, EvolutionPolicies(**policies))
    assert isinstance(found, ReloadNeeded)
    assert why in found.why


@pytest.mark.parametrize(
    ("new", "kind", "change"),
    [
        (schema_of(ID, A, B, (4, "c", pa.int32())), "add", "added c"),
        (schema_of(ID, A), "drop", "dropped b"),
        (schema_of(ID, (2, "x", pa.int32()), B), "rename", "renamed a to x"),
        (schema_of(ID, (2, "a", pa.int64()), B), "widen", "widened a"),
        (schema_of(ID, (2, "a", pa.int16()), B), "narrow", "narrowed a"),
        (schema_of(ID, (2, "a", pa.int16()), B), "retype", "narrowed a"),
        (schema_of(ID, (2, "a", pa.int16()), B), "widen", "narrowed a"),
        (schema_of(ID, (2, "a", pa.int16()), B, file=6, stamp=2), "narrow", "narrowed a"),
        (schema_of(ID, (2, "a", pa.string()), B), "retype", "retyped a"),
        (schema_of(ID, (2, "a", pa.string()), B, file=6, stamp=2), "retype", "retyped a"),
        (schema_of(ID, (2, "a", pa.int64()), B, file=6, stamp=2), "widen", "widened a"),
        (schema_of(ID, A, B, file=6, stamp=2), "rewrite", "rewritten"),
        (schema_of(ID, A, B, key=("a",)), "key", "another key"),
        (schema_of(ID, A, B, relation=10), "recreate", "created again"),
    ],
)
def test_a_policy_of_stop_stops_and_names_itself(new: TableSchema, kind: str, change: str) -> None:
    found = planned(new, EvolutionPolicies(**{kind: STOP}))
    assert isinstance(found, SchemaChanged)
    assert change in found.headline
    assert f"`evolution.{kind}` is `stop`" in found.hint
    assert "Change the policy and start again" in found.hint


@pytest.mark.parametrize(
    ("new", "stops"), [((ID, (2, "x", pa.int32()), B), True), ((ID, (2, "x", pa.int64()), B), False)]
)
def test_a_possible_rename_without_column_numbers_stops_too(
    new: tuple[tuple[int, str, pa.DataType], ...], stops: bool
) -> None:
    unknown = replace(schema_of(*new, file=6), facts=None)
    found = planned(unknown, EvolutionPolicies(rename=STOP))
    assert isinstance(found, SchemaChanged) is stops
    assert not stops or "a may have been renamed to x" in found.headline
    assert isinstance(planned(unknown), ReloadNeeded)


def test_an_owed_load_ignores_policies_but_later_changes_do_not() -> None:
    assert OLD.facts is not None
    owed = replace(OLD, facts=replace(OLD.facts, rows_unknown=True))
    assert planned(OLD, EvolutionPolicies(rewrite=STOP), old=owed) == ReloadNeeded(
        schema=OLD, why="a load of it was not committed"
    )
    assert isinstance(
        planned(schema_of(ID, A, B, file=6, stamp=2), EvolutionPolicies(rewrite=STOP), old=owed), SchemaChanged
    )


def test_a_renamed_table_stops_under_its_old_name() -> None:
    found = planned(schema_of(ID, A, B, name="other"))
    assert isinstance(found, SchemaChanged)
    assert "renamed to public.other" in found.headline
    assert "evolution" not in found.hint


def test_a_keyless_table_does_not_keep_a_dropped_column() -> None:
    old, new = replace(OLD, key=()), replace(schema_of(ID, A), key=())
    assert isinstance(planned(new, old=old), ReloadNeeded)
    assert recast(new, EvolutionPolicies(drop=APPLY), old=old).dropped == ("b",)


@pytest.mark.parametrize(
    ("was", "now", "wider"),
    [
        (pa.int16(), pa.int32(), True),
        (pa.int32(), pa.int64(), True),
        (pa.int64(), pa.int32(), False),
        (pa.int32(), pa.float64(), False),
        (pa.float32(), pa.float64(), True),
        (pa.decimal128(10, 2), pa.decimal128(12, 2), True),
        (pa.decimal128(10, 2), pa.decimal128(12, 4), True),
        (pa.decimal128(10, 2), pa.decimal128(11, 4), False),
        (pa.decimal128(12, 2), pa.decimal128(10, 2), False),
        (pa.list_(pa.int32()), pa.list_(pa.int64()), True),
        (pa.string(), pa.binary(), False),
        (pa.date32(), pa.timestamp("us"), False),
    ],
)
def test_types_that_hold_all_values_of_another(was: pa.DataType, now: pa.DataType, wider: bool) -> None:
    old, new = (Column(name="a", source_type=str(kind), type=kind) for kind in (was, now))
    assert is_wider(old, new) is wider
    assert is_narrower(new, old) is wider


@pytest.mark.parametrize(
    ("was", "now", "wider"),
    [
        ("character varying(10)", "text", True),
        ("character varying(10)", "character varying", True),
        ("character varying(10)", "character varying(20)", True),
        ("character varying(10)[]", "text[]", True),
        ("text", "character varying", True),
        ("cidr", "inet", False),
        ("character(5)", "text", False),
        ("xml", "text", False),
    ],
)
def test_a_type_stored_as_text_is_wider_only_among_text_types(was: str, now: str, wider: bool) -> None:
    old, new = (Column(name="a", source_type=kind, type=pa.string()) for kind in (was, now))
    assert is_wider(old, new) is wider


@pytest.mark.parametrize(
    ("was", "now"),
    [
        ("text", "character varying(5)"),
        ("character varying", "character varying(5)"),
        ("character varying(10)", "character varying(5)"),
        ("character varying(10)[]", "character varying(5)[]"),
        ("character(10)", "character(5)"),
        ("bit varying(10)", "bit varying(5)"),
        ("timestamp without time zone", "timestamp(0) without time zone"),
        ("timestamp(6) with time zone", "timestamp(3) with time zone"),
        ("time without time zone", "time(3) without time zone"),
        ("interval", "interval(0)"),
        ("interval day to second(6)", "interval day to second(3)"),
        ("numeric", "numeric(50,2)"),
        ("numeric(50,2)", "numeric(48,2)"),
        ("numeric(50,2)", "numeric(49,1)"),
    ],
)
def test_a_smaller_limit_in_brackets_makes_a_type_narrower(was: str, now: str) -> None:
    old, new = (Column(name="a", source_type=kind, type=pa.string()) for kind in (was, now))
    assert (is_wider(old, new), is_narrower(old, new)) == (False, True)
    assert (is_wider(new, old), is_narrower(new, old)) == (True, False)


@pytest.mark.parametrize(
    ("was", "now", "narrower"),
    [
        (("numeric", pa.string()), ("numeric(10,2)", pa.decimal128(10, 2)), True),
        (("numeric(10,2)", pa.decimal128(10, 2)), ("numeric", pa.string()), False),
        (("numeric(10,2)", pa.decimal128(10, 2)), ("numeric(11,4)", pa.decimal128(11, 4)), True),
        (("numeric(50,2)", pa.string()), ("numeric(50,10)", pa.string()), True),
        (("numeric(10,0)", pa.decimal128(10, 0)), ("bigint", pa.int64()), False),
        (("text", pa.string()), ("integer", pa.int32()), False),
        (("text", pa.string()), ("uuid", pa.string()), False),
        (("geometry(Point,4326)", pa.string()), ("geometry(Polygon,4326)", pa.string()), False),
    ],
)
def test_only_a_type_of_the_same_kind_is_narrower(
    was: tuple[str, pa.DataType], now: tuple[str, pa.DataType], narrower: bool
) -> None:
    assert is_narrower(column(*was), column(*now)) is narrower


def test_an_oid_is_not_wider_than_an_integer() -> None:
    """The server rewrites no row, and shows a negative value as another one."""
    old, new = column("integer", pa.int32()), column("oid", pa.int64())
    assert (is_wider(old, new), is_narrower(new, old)) == (False, False)


def test_a_type_made_wider_by_a_rule_is_a_retype() -> None:
    old = schema_of(ID, A, B)
    made = column(f"int32{RULE_MARK}compute#1f", pa.int64())
    found = planned(replace(old, columns=(old.columns[0], made, old.columns[2])))
    assert isinstance(found, ReloadNeeded)
    assert found.why == "retyped a"


def column(source_type: str, arrow: pa.DataType) -> Column:
    return Column(name="a", source_type=source_type, type=arrow)


# --- the table ---------------------------------------------------------------------------------------------


@pytest.fixture
def table(tmp_path: Path) -> AnyTable:
    return filled(tmp_path / "t", OLD, ROWS)


def filled(path: Path, schema: TableSchema, rows: list[dict[str, Any]]) -> AnyTable:
    table = open_table(path, "a-log")
    table.load(schema, record_batches(schema, rows), START)
    return table


def content(table: AnyTable) -> list[dict[str, Any]]:
    rows = rows_of(table._path).to_pylist()
    return sorted(rows, key=lambda row: str(row["id"]))


def applied(table: AnyTable, schema: TableSchema, *rows: Any) -> None:
    start = table.applied_position()
    assert start is not None
    table.apply(schema, fold(schema, changes(schema, *rows)), start, replace(start, seq=start.seq + 1))


@pytest.mark.parametrize(
    ("new", "policies", "rows"),
    [
        (schema_of(ID, A, B, (4, "c", pa.int32())), {}, [row | {"c": None} for row in ROWS]),
        (schema_of(ID, A, B, (4, "c", pa.int32()), fills={"c": "5"}), {}, [row | {"c": 5} for row in ROWS]),
        (schema_of(ID, A), {}, ROWS),
        (schema_of(ID, A), {"drop": APPLY}, [{"id": row["id"], "a": row["a"]} for row in ROWS]),
        (schema_of(ID, (2, "x", pa.int32()), B), {}, [{"id": r["id"], "x": r["a"], "b": r["b"]} for r in ROWS]),
        (schema_of(ID, (2, "a", pa.int64()), B), {}, ROWS),
        (schema_of(ID, A, (4, "b", pa.int32())), {}, [
            {"id": r["id"], "a": r["a"], "b": None, "b__dropped": r["b"]} for r in ROWS
        ]),
        (schema_of(ID, (3, "a", pa.string()), (2, "b", pa.int32())), {}, [
            {"id": r["id"], "a": r["b"], "b": r["a"]} for r in ROWS
        ]),
        (schema_of(ID, B, A), {}, ROWS),
    ],
    ids=["add", "add-filled", "drop-kept", "drop", "rename", "widen", "drop-and-add", "swap", "order"],
)  # fmt: skip
def test_existing_rows_get_the_new_schema(
    table: AnyTable, new: TableSchema, policies: dict[str, EvolutionPolicy], rows: list[dict[str, Any]]
) -> None:
    done = table.evolve(recast(new, EvolutionPolicies(**policies)), START)
    assert (done.committed, done.applied_position) == (True, START)
    assert content(table) == rows
    assert (table.applied_position(), table.schema()) == (START, new)
    assert table.schema().facts == new.facts  # type: ignore[union-attr]
    kinds = {field.name: field.type for field in rows_of(table._path).schema}
    assert all(kinds[column.name] == column.type or pa.types.is_string(column.type) for column in new.columns)


def test_a_key_may_be_renamed(table: AnyTable) -> None:
    new = schema_of((1, "ident", pa.int64()), A, B, key=("ident",))
    table.evolve(recast(new), START)
    applied(table, new, update({"ident": 1}, a=5, b="x"), delete({"ident": 2}))
    rows = sorted(rows_of(table._path).to_pylist(), key=lambda row: row["ident"])
    assert rows == [{"ident": 1, "a": 5, "b": "x"}, {"ident": 3, "a": 30, "b": "b3"}]


def test_a_recast_reports_the_bytes_it_wrote(table: AnyTable) -> None:
    wider = schema_of(ID, A, B, (4, "c", pa.int32()))
    assert table.evolve(recast(wider), START).bytes == 0, "no row is written"
    filled = schema_of(ID, A, B, (4, "c", pa.int32()), (5, "d", pa.int32()), fills={"d": "5"})
    done = table.evolve(recast(filled, old=wider), START)
    assert done.bytes == sum((data_folder(table._path) / name).stat().st_size for name in table.files()) > 0


def test_a_repeated_recast_makes_no_commit(table: AnyTable) -> None:
    step = recast(schema_of(ID, A, B, (4, "c", pa.int32()), fills={"c": "5"}))
    table.evolve(step, START)
    commits = commits_of(table._path)
    assert table.evolve(step, START).committed is False
    assert commits_of(table._path) == commits


def test_a_null_column_costs_no_rewrite(table: AnyTable) -> None:
    before = table.files()
    table.evolve(recast(schema_of(ID, A, B, (4, "c", pa.timestamp("us")))), START)
    assert table.files() == before
    applied(table, schema_of(ID, A, B, (4, "c", pa.timestamp("us"))), insert(4, a=1))
    assert [row["c"] for row in content(table)] == [None] * 4


def test_new_rows_have_null_in_a_retained_column_and_others_keep_their_values(table: AnyTable) -> None:
    new = schema_of(ID, A)
    table.evolve(recast(new), START)
    applied(table, new, insert(4, a=40), update(1, a=11), delete(2))
    assert content(table) == [
        {"id": 1, "a": 11, "b": "b1"},
        {"id": 3, "a": 30, "b": "b3"},
        {"id": 4, "a": 40, "b": None},
    ]
    applied(table, new, truncate(), insert(5, a=50))
    assert content(table) == [{"id": 5, "a": 50, "b": None}]


def test_a_retained_column_survives_a_partial_reload(table: AnyTable, tmp_path: Path) -> None:
    new = schema_of(ID, A)
    table.evolve(recast(new), START)
    rows = [{"id": 1, "a": 10}, {"id": 2, "a": 21}, {"id": 4, "a": 40}]
    files = stage(staging(tmp_path / "t"), "again", new, record_batches(new, rows))
    table.merge_load(new, files, START, NEXT)
    assert content(table) == [
        {"id": 1, "a": 10, "b": "b1"},
        {"id": 2, "a": 21, "b": None},
        {"id": 4, "a": 40, "b": None},
    ]


def test_a_reload_leaves_only_the_source_s_columns(table: AnyTable) -> None:
    new = schema_of(ID, A)
    table.evolve(recast(new), START)
    table.load(new, record_batches(new, [{"id": 1, "a": 1}]), NEXT)
    assert content(table) == [{"id": 1, "a": 1}]


def test_many_changes_at_once(table: AnyTable) -> None:
    new = schema_of(
        ID, (3, "note", pa.string()), (4, "price", pa.decimal128(10, 2)), (5, "a", pa.string()), fills={"price": "1.50"}
    )
    table.evolve(recast(new), START)
    assert content(table)[0] == {"id": 1, "note": "b1", "price": Decimal("1.50"), "a": None, "a__dropped": 10}


def test_an_empty_table_evolves_too(tmp_path: Path) -> None:
    table = filled(tmp_path / "e", OLD, [])
    new = schema_of(ID, (2, "x", pa.int64()), (4, "c", pa.int32()), fills={"c": "5"})
    table.evolve(recast(new), START)
    applied(table, new, insert(1, x=2, c=3))
    assert content(table) == [{"id": 1, "x": 2, "c": 3, "b": None}]


def test_a_recast_from_another_position_is_refused(table: AnyTable) -> None:
    with pytest.raises(ForeignWrite, match="not at the position"):
        table.evolve(recast(schema_of(ID, A)), NEXT)


def test_a_table_with_a_foreign_write_is_not_recast(table: AnyTable) -> None:
    others.append(table._path)
    with pytest.raises(ForeignWrite):
        table.evolve(recast(schema_of(ID, A)), START)
