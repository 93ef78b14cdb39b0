"""Conclusions from the facts of two versions, and their limits."""

from __future__ import annotations

import json
from dataclasses import replace

import pyarrow as pa
import pytest

from tailrace.model.catalogue_facts import CatalogueFacts, ColumnFacts, StorageFacts
from tailrace.model.evolution import ExistingValue, SchemaChangeKind, compare_schemas, is_newer_version, same_version
from tailrace.model.schema import Column, Identity, TableId, TableSchema


def column(name: str, kind: str = "integer") -> Column:
    return Column(name=name, source_type=kind, type=pa.int32() if kind == "integer" else pa.string())


def fact(number: int, *, fill: str | None = None, stamp: int = 1, nullable: bool = True) -> ColumnFacts:
    return ColumnFacts(number=number, nullable=nullable, default=fill, fast_default=fill, definition_version=stamp)


def own(file: int | None = 7) -> StorageFacts:
    return StorageFacts(relation=9, name="public.items", file=file, attached=False)


def table(
    *columns: Column,
    facts: tuple[ColumnFacts, ...] | None = None,
    storage: tuple[StorageFacts, ...] = (own(),),
    made: int = 0,
) -> TableSchema:
    return TableSchema(
        table=TableId("public", "items"),
        relation=9,
        columns=columns,
        key=("id",),
        identity=Identity.KEY,
        facts=CatalogueFacts(columns=facts, storage=storage, columns_ever=made or len(columns))
        if facts is not None
        else None,
    )


ID, A, B = column("id"), column("a"), column("b")
ONE = table(ID, facts=(fact(1),))
TWO = table(ID, A, facts=(fact(1), fact(2)))


def kinds(old: TableSchema, new: TableSchema) -> list[tuple[SchemaChangeKind, str | None]]:
    return [(change.kind, change.column) for change in compare_schemas(old, new).changes]


def test_a_schema_is_read_back_with_its_facts() -> None:
    schema = table(
        ID,
        A,
        facts=(fact(1, nullable=False), fact(4, fill="x", stamp=99)),
        storage=(own(None), StorageFacts(relation=10, name="public.p", file=3, attached=True)),
    )
    stored = json.loads(json.dumps(schema.to_json()))
    assert TableSchema.from_json(stored).facts == schema.facts
    assert [item["number"] for item in stored["columns"]] == [1, 4]


def test_without_facts_a_record_says_unknown() -> None:
    stored = json.loads(json.dumps(table(ID).to_json()))
    assert stored["facts"] == stored["columns"][0]["number"] == stored["columns"][0]["default"] == "unknown"
    assert TableSchema.from_json(stored).facts is None
    del stored["facts"]
    assert TableSchema.from_json(stored).facts is None, "as an older version wrote it"


def test_facts_do_not_make_schemas_differ() -> None:
    assert table(ID) == ONE
    assert hash(table(ID)) == hash(ONE)


@pytest.mark.parametrize(
    ("rewritten", "fill", "at_rest"),
    [(False, None, ExistingValue.NULL), (True, None, ExistingValue.WRITTEN), (False, "5", ExistingValue.CONSTANT)],
)
def test_the_value_of_an_added_column_in_existing_rows(
    rewritten: bool, fill: str | None, at_rest: ExistingValue
) -> None:
    new = table(ID, A, facts=(fact(1), fact(2, fill=fill)), storage=(own(8 if rewritten else 7),))
    (change,) = compare_schemas(ONE, new).changes
    assert (change.kind, change.existing_value, change.constant) == (SchemaChangeKind.ADD, at_rest, fill)
    assert compare_schemas(ONE, new).rewritten is rewritten


@pytest.mark.parametrize(("old", "new"), [(table(ID), TWO), (ONE, table(ID, A)), (table(ID), table(ID, A))])
def test_where_facts_are_missing_nothing_is_concluded(old: TableSchema, new: TableSchema) -> None:
    found = compare_schemas(old, new)
    assert found.rewritten is None
    assert [change.existing_value for change in found.changes] == [ExistingValue.UNKNOWN]


def test_a_newly_published_column_has_unknown_values() -> None:
    old = table(ID, facts=(fact(1),), made=2)
    (change,) = compare_schemas(old, table(ID, A, facts=(fact(1), fact(2, fill="5")))).changes
    assert (change.kind, change.existing_value, change.constant) == (SchemaChangeKind.ADD, ExistingValue.UNKNOWN, None)


def test_a_column_replaced_by_one_of_its_name_and_type_leaves_everything_unknown() -> None:
    found = compare_schemas(TWO, table(ID, A, facts=(fact(1), fact(3, fill="5")), made=3))
    assert found.rewritten is None
    assert [(change.kind, change.existing_value) for change in found.changes] == [
        (SchemaChangeKind.DROP, None),
        (SchemaChangeKind.ADD, ExistingValue.UNKNOWN),
    ]


def test_new_storage_alone_is_no_rewrite() -> None:
    assert compare_schemas(ONE, table(ID, facts=(fact(1),), storage=(own(8),))).rewritten is False
    assert compare_schemas(ONE, table(ID, facts=(fact(1, stamp=2),))).rewritten is False
    assert compare_schemas(ONE, table(ID, facts=(fact(1, stamp=2),), storage=(own(8),))).rewritten is True


def test_a_rename_needs_the_numbers_of_both_versions() -> None:
    renamed = table(ID, B, facts=(fact(1), fact(2, stamp=2)))
    assert kinds(TWO, renamed) == [(SchemaChangeKind.RENAME, "b")]
    assert kinds(TWO, table(ID, B)) == [(SchemaChangeKind.DROP, "a"), (SchemaChangeKind.ADD, "b")]
    assert kinds(TWO, table(ID, A, facts=(fact(1), fact(3)))) == [
        (SchemaChangeKind.DROP, "a"),
        (SchemaChangeKind.ADD, "a"),
    ]


def test_a_column_can_be_renamed_and_retyped_at_once() -> None:
    new = table(ID, column("b", "text"), facts=(fact(1), fact(2, stamp=2)), storage=(own(8),))
    assert kinds(TWO, new) == [(SchemaChangeKind.RENAME, "b"), (SchemaChangeKind.RETYPE, "b")]
    assert compare_schemas(TWO, new).rewritten is True


def test_names_keys_and_identities_are_compared() -> None:
    new = replace(ONE, table=TableId("other", "items"), key=(), identity=Identity.FULL)
    assert kinds(ONE, new) == [
        (SchemaChangeKind.RENAME_TABLE, None),
        (SchemaChangeKind.KEY, None),
        (SchemaChangeKind.IDENTITY, None),
    ]


def test_the_same_version_is_one_that_nothing_contradicts() -> None:
    unknown = table(ID)
    assert same_version(ONE, ONE)
    assert same_version(ONE, unknown), "nothing is known that would speak against it"
    assert not same_version(unknown, ONE), "what was before is not known"
    assert not same_version(ONE, TWO)
    assert not same_version(ONE, table(ID, facts=(fact(2),)))
    assert not same_version(ONE, table(ID, facts=(fact(1, stamp=2),), storage=(own(8),)))
    assert not same_version(ONE, table(ID, facts=(fact(1, stamp=2, nullable=False),))), "it matters to the next one"
    assert same_version(ONE, table(ID, facts=(fact(1),), storage=(own(8),))), "a file alone proves nothing"


def test_partitions_count_when_they_may_have_rows() -> None:
    def split(*parts: tuple[int, bool], file: int = 1) -> TableSchema:
        storage = [StorageFacts(relation=oid, name=f"p{oid}", file=file, attached=attached) for oid, attached in parts]
        return table(ID, facts=(fact(1),), storage=(own(None), *storage))

    assert not same_version(split((1, False)), split((1, False), (2, False))), "it may go again"
    assert kinds(split((1, False)), split((1, False), (2, False))) == []
    assert kinds(split((1, False)), split((1, False), (2, True))) == [(SchemaChangeKind.ATTACH, None)]
    assert kinds(split((1, False), (2, True)), split((2, True))) == [(SchemaChangeKind.DETACH, None)]
    assert kinds(split((1, False)), split((1, False), file=2)) == [(SchemaChangeKind.REPLACE, None)]


def test_an_owed_load_stays_owed_until_its_commit() -> None:
    assert TWO.facts is not None
    owed = replace(TWO, facts=replace(TWO.facts, rows_unknown=True))
    stored = json.loads(json.dumps(owed.to_json()))
    assert TableSchema.from_json(stored).same_with_facts(owed)
    assert "owed" not in TWO.to_json()["facts"], "as an older version reads it"
    assert is_newer_version(owed, TWO), "though nothing else is new in it"
    assert compare_schemas(owed, TWO).rewritten is None
    assert not is_newer_version(owed, replace(TWO, facts=None)), "it has no facts; the catalogue will"
    renamed = table(ID, B, facts=(fact(1), fact(2)))
    assert kinds(owed, renamed) == [(SchemaChangeKind.RENAME, "b")], "columns are still known by their numbers"
