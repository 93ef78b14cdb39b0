"""What is concluded from the facts of two versions, and what is not."""

from __future__ import annotations

import json
from dataclasses import replace

import pyarrow as pa
import pytest

from tailrace.model.catalogue_facts import ColumnFacts, Facts, Storage
from tailrace.model.evolution import AtRest, Kind, evolve, is_news, same_version
from tailrace.model.schema import Column, Identity, TableId, TableSchema


def column(name: str, kind: str = "integer") -> Column:
    return Column(name=name, source_type=kind, type=pa.int32() if kind == "integer" else pa.string())


def fact(number: int, *, fill: str | None = None, stamp: int = 1, nullable: bool = True) -> ColumnFacts:
    return ColumnFacts(number=number, nullable=nullable, default=fill, fill=fill, stamp=stamp)


def own(file: int | None = 7) -> Storage:
    return Storage(relation=9, name="public.items", file=file, attached=False)


def table(
    *columns: Column,
    facts: tuple[ColumnFacts, ...] | None = None,
    storage: tuple[Storage, ...] = (own(),),
    made: int = 0,
) -> TableSchema:
    return TableSchema(
        table=TableId("public", "items"),
        relation=9,
        columns=columns,
        key=("id",),
        identity=Identity.KEY,
        facts=Facts(columns=facts, storage=storage, made=made or len(columns)) if facts is not None else None,
    )


ID, A, B = column("id"), column("a"), column("b")
ONE = table(ID, facts=(fact(1),))
TWO = table(ID, A, facts=(fact(1), fact(2)))


def kinds(old: TableSchema, new: TableSchema) -> list[tuple[Kind, str | None]]:
    return [(change.kind, change.column) for change in evolve(old, new).changes]


def test_a_shape_reads_back_with_its_facts() -> None:
    schema = table(
        ID,
        A,
        facts=(fact(1, nullable=False), fact(4, fill="x", stamp=99)),
        storage=(own(None), Storage(relation=10, name="public.p", file=3, attached=True)),
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


def test_facts_do_not_make_shapes_differ() -> None:
    assert table(ID) == ONE
    assert hash(table(ID)) == hash(ONE)


@pytest.mark.parametrize(
    ("rewritten", "fill", "at_rest"),
    [(False, None, AtRest.NULL), (True, None, AtRest.WRITTEN), (False, "5", AtRest.CONSTANT)],
)
def test_what_an_added_column_has_at_rest(rewritten: bool, fill: str | None, at_rest: AtRest) -> None:
    new = table(ID, A, facts=(fact(1), fact(2, fill=fill)), storage=(own(8 if rewritten else 7),))
    (change,) = evolve(ONE, new).changes
    assert (change.kind, change.at_rest, change.value) == (Kind.ADD, at_rest, fill)
    assert evolve(ONE, new).rewritten is rewritten


@pytest.mark.parametrize(("old", "new"), [(table(ID), TWO), (ONE, table(ID, A)), (table(ID), table(ID, A))])
def test_where_facts_are_missing_nothing_is_concluded(old: TableSchema, new: TableSchema) -> None:
    found = evolve(old, new)
    assert found.rewritten is None
    assert [change.at_rest for change in found.changes] == [AtRest.UNKNOWN]


def test_a_column_that_is_only_published_now_had_values_nobody_was_told() -> None:
    old = table(ID, facts=(fact(1),), made=2)
    (change,) = evolve(old, table(ID, A, facts=(fact(1), fact(2, fill="5")))).changes
    assert (change.kind, change.at_rest, change.value) == (Kind.ADD, AtRest.UNKNOWN, None)


def test_a_column_in_the_place_of_another_of_its_name_and_type_leaves_everything_unknown() -> None:
    found = evolve(TWO, table(ID, A, facts=(fact(1), fact(3, fill="5")), made=3))
    assert found.rewritten is None
    assert [(change.kind, change.at_rest) for change in found.changes] == [
        (Kind.DROP, None),
        (Kind.ADD, AtRest.UNKNOWN),
    ]


def test_new_storage_alone_is_no_rewrite() -> None:
    assert evolve(ONE, table(ID, facts=(fact(1),), storage=(own(8),))).rewritten is False
    assert evolve(ONE, table(ID, facts=(fact(1, stamp=2),))).rewritten is False
    assert evolve(ONE, table(ID, facts=(fact(1, stamp=2),), storage=(own(8),))).rewritten is True


def test_a_rename_needs_the_numbers_of_both_versions() -> None:
    renamed = table(ID, B, facts=(fact(1), fact(2, stamp=2)))
    assert kinds(TWO, renamed) == [(Kind.RENAME, "b")]
    assert kinds(TWO, table(ID, B)) == [(Kind.DROP, "a"), (Kind.ADD, "b")]
    assert kinds(TWO, table(ID, A, facts=(fact(1), fact(3)))) == [(Kind.DROP, "a"), (Kind.ADD, "a")]


def test_a_column_can_be_renamed_and_retyped_at_once() -> None:
    new = table(ID, column("b", "text"), facts=(fact(1), fact(2, stamp=2)), storage=(own(8),))
    assert kinds(TWO, new) == [(Kind.RENAME, "b"), (Kind.RETYPE, "b")]
    assert evolve(TWO, new).rewritten is True


def test_names_keys_and_identities_are_compared() -> None:
    new = replace(ONE, table=TableId("other", "items"), key=(), identity=Identity.FULL)
    assert kinds(ONE, new) == [(Kind.RENAME_TABLE, None), (Kind.KEY, None), (Kind.IDENTITY, None)]


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
        storage = [Storage(relation=oid, name=f"p{oid}", file=file, attached=attached) for oid, attached in parts]
        return table(ID, facts=(fact(1),), storage=(own(None), *storage))

    assert not same_version(split((1, False)), split((1, False), (2, False))), "it may go again"
    assert kinds(split((1, False)), split((1, False), (2, False))) == []
    assert kinds(split((1, False)), split((1, False), (2, True))) == [(Kind.ATTACH, None)]
    assert kinds(split((1, False), (2, True)), split((2, True))) == [(Kind.DETACH, None)]
    assert kinds(split((1, False)), split((1, False), file=2)) == [(Kind.REPLACE, None)]


def test_a_load_that_is_owed_stays_so_until_it_lands_whatever_comes_next() -> None:
    assert TWO.facts is not None
    owed = replace(TWO, facts=replace(TWO.facts, owed=True))
    stored = json.loads(json.dumps(owed.to_json()))
    assert TableSchema.from_json(stored).same_as(owed)
    assert "owed" not in TWO.to_json()["facts"], "as an older version reads it"
    assert is_news(owed, TWO), "though nothing else is new in it"
    assert evolve(owed, TWO).rewritten is None
    assert not is_news(owed, replace(TWO, facts=None)), "it tells nothing; the catalogue will"
    renamed = table(ID, B, facts=(fact(1), fact(2)))
    assert kinds(owed, renamed) == [(Kind.RENAME, "b")], "columns are still known by their numbers"
