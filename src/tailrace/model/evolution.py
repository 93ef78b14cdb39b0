"""What became of a table between two versions of its shape, and of the rows that were there already.

A log brings rows and not DDL: rows at rest can change without one. What can be proven from the facts of both versions
is stated, and the rest is called unknown. A rename is one only if the column's number proves it; otherwise it is a
drop and an add.

Rows were written anew if their storage is another one and a column's definition changed with it. Storage alone proves
nothing, as VACUUM FULL, CLUSTER and TRUNCATE make it anew too. Only of a partition it counts by itself: the source
does not tell of its TRUNCATE.

A lake table whose columns moved on before a load told what its rows are (`Facts.owed`) keeps that unknown, whatever
comes next.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tailrace.model.catalogue_facts import UNKNOWN, CatalogueFacts
from tailrace.model.schema import Column, TableSchema


class SchemaChangeKind(enum.Enum):
    """What was done to the table."""

    RENAME_TABLE = "rename table"
    """Or moved to another schema."""
    ADD = "add"
    DROP = "drop"
    RENAME = "rename"
    RETYPE = "retype"
    NULLABILITY = "nullability"
    DEFAULT = "default"
    KEY = "key"
    IDENTITY = "identity"
    ATTACH = "attach"
    """A partition that may have had rows."""
    DETACH = "detach"
    REPLACE = "replace"
    """A partition's rows were written anew, or truncated: of a partition alone the source does not say which."""


class ExistingValue(enum.Enum):
    """What rows that were there already have in a column that was added.

    One that was there all along and is only published now had values that nobody was told: unknown.
    """

    NULL = "null"
    CONSTANT = "constant"
    WRITTEN = "written"
    """A value of its own for each row."""
    UNKNOWN = UNKNOWN


@dataclass(frozen=True, kw_only=True)
class SchemaChange:
    """One difference. `was` and `now` are names, types, key columns or expressions, as the kind says."""

    kind: SchemaChangeKind
    column: str | None = None
    old: Any = None
    new: Any = None
    existing_value: ExistingValue | None = None
    """Of an added column,"""
    constant: str | None = None
    """and the constant, as text."""

    def to_json(self) -> dict[str, Any]:
        given = {
            "kind": self.kind.value,
            "column": self.column,
            "was": self.old,
            "now": self.new,
            "at_rest": self.existing_value and self.existing_value.value,
            "value": self.constant,
        }
        always = {"kind"} | ({"was", "now"} if self.old is not None or self.new is not None else set())
        return {name: value for name, value in given.items() if name in always or value is not None}

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> SchemaChange:
        at_rest = stored.get("at_rest")
        return cls(
            kind=SchemaChangeKind(stored["kind"]),
            column=stored.get("column"),
            old=stored.get("was"),
            new=stored.get("now"),
            existing_value=None if at_rest is None else ExistingValue(at_rest),
            constant=stored.get("value"),
        )


@dataclass(frozen=True, kw_only=True)
class Evolution:
    """All differences between two versions."""

    changes: tuple[SchemaChange, ...]
    rewritten: bool | None
    """Whether all rows were written anew, perhaps with other values; None: unknown."""

    def to_json(self) -> dict[str, Any]:
        return {
            "changes": [change.to_json() for change in self.changes],
            "rewritten": UNKNOWN if self.rewritten is None else self.rewritten,
        }

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> Evolution:
        rewritten = stored["rewritten"]
        return cls(
            changes=tuple(SchemaChange.from_json(change) for change in stored["changes"]),
            rewritten=None if rewritten == UNKNOWN else bool(rewritten),
        )


def compare_schemas(old: TableSchema, new: TableSchema) -> Evolution:
    """What became of the table from one version to the next."""
    rewritten = _rewritten(old.facts, new.facts) if old.facts and new.facts else None
    if old.facts and new.facts and (_hides_columns(old.facts, new.facts) or _gave_way(_types(old), _types(new))):
        rewritten = None
    if old.facts and old.facts.rows_unknown:
        rewritten = None
    changes = [*_of_table(old, new), *_of_columns(old, new, rewritten)]
    if old.facts and new.facts:
        changes += _of_partitions(old.facts, new.facts, rewritten=bool(rewritten))
    return Evolution(changes=tuple(changes), rewritten=rewritten)


def same_version(old: TableSchema, new: TableSchema) -> bool:
    """Whether `new` is the version `old` still: rows of one are rows of the other, and nothing else is known of it that
    could matter when the next one comes."""
    return old == new and (new.facts is None or (old.facts is not None and old.facts.same_but_file(new.facts)))


def is_newer_version(old: TableSchema, new: TableSchema) -> bool:
    """Whether a version that rows have is another one than what a table knows, and newer.

    The catalogue is asked when rows come, and when a table is loaded or looked at. So what stands with rows can be
    older than what the table knows: the source announces nothing anew for a partition more, or a type's new name. Only
    in what rows consist of it cannot, for no row comes from before a load.
    """
    if same_version(old, new):
        return False
    if old.facts is None or new.facts is None or not old.same_rows(new):
        return True
    if (old.table, old.relation, old.facts.numbers) != (new.table, new.relation, new.facts.numbers):
        return True
    return old.facts.rows_unknown or new.facts.position > old.facts.position


def _rewritten(old: CatalogueFacts, new: CatalogueFacts) -> bool:
    files = {item.relation: item.file for item in old.storage}
    moved = any(files.get(item.relation, item.file) != item.file for item in new.storage)
    stamps = {(column.number, column.definition_version) for column in old.columns}
    return moved and stamps != {(column.number, column.definition_version) for column in new.columns}


def _hides_columns(old: CatalogueFacts, new: CatalogueFacts) -> bool:
    """Whether columns were made and dropped again in between: rows that come now may still have such a one."""
    return new.columns_ever - old.columns_ever > sum(
        number > old.columns_ever for number in (*new.numbers, *new.unpublished)
    )


def _gave_way(old: dict[int, str], new: dict[int, str]) -> bool:
    """Whether a column gave way to another of its type: rows that come now may still have the one before, renamed."""
    gone, came = ({mine[number] for number in mine.keys() - theirs} for mine, theirs in ((old, new), (new, old)))
    return bool(gone & came)


def _types(schema: TableSchema) -> dict[int, str]:
    """By the number of the column; of a shape that has facts."""
    numbers = schema.facts.numbers if schema.facts else ()
    return dict(zip(numbers, (column.source_type for column in schema.columns), strict=True))


def _of_table(old: TableSchema, new: TableSchema) -> Iterator[SchemaChange]:
    if old.table != new.table:
        yield SchemaChange(kind=SchemaChangeKind.RENAME_TABLE, old=str(old.table), new=str(new.table))
    if old.key != new.key:
        yield SchemaChange(kind=SchemaChangeKind.KEY, old=list(old.key), new=list(new.key))
    if old.identity != new.identity:
        yield SchemaChange(kind=SchemaChangeKind.IDENTITY, old=old.identity.value, new=new.identity.value)


def _of_columns(old: TableSchema, new: TableSchema, rewritten: bool | None) -> Iterator[SchemaChange]:
    before: Sequence[int | str] = old.names
    after: Sequence[int | str] = new.names
    if old.facts and new.facts:
        before, after = old.facts.numbers, new.facts.numbers
    mine = dict(zip(before, range(len(old.columns)), strict=True))
    for number, column in zip(before, old.columns, strict=True):
        if number not in after:
            yield SchemaChange(kind=SchemaChangeKind.DROP, column=column.name, old=column.source_type)
    for place, (number, column) in enumerate(zip(after, new.columns, strict=True)):
        if number not in mine:
            is_new = bool(old.facts and new.facts and new.facts.columns[place].number > old.facts.columns_ever)
            yield _added(new.facts, place, column, rewritten if is_new else None)
        else:
            yield from _of_column(old, new, mine[number], place)


def _added(facts: CatalogueFacts | None, place: int, column: Column, rewritten: bool | None) -> SchemaChange:
    fill = facts.columns[place].fast_default if facts and rewritten is not None else None
    if fill is not None:
        at_rest = ExistingValue.CONSTANT
    else:
        at_rest = {None: ExistingValue.UNKNOWN, True: ExistingValue.WRITTEN, False: ExistingValue.NULL}[rewritten]
    return SchemaChange(
        kind=SchemaChangeKind.ADD, column=column.name, new=column.source_type, existing_value=at_rest, constant=fill
    )


def _of_column(old: TableSchema, new: TableSchema, before: int, after: int) -> Iterator[SchemaChange]:
    was, now = old.columns[before], new.columns[after]
    if was.name != now.name:
        yield SchemaChange(kind=SchemaChangeKind.RENAME, column=now.name, old=was.name, new=now.name)
    if (was.source_type, was.type) != (now.source_type, now.type):
        yield SchemaChange(kind=SchemaChangeKind.RETYPE, column=now.name, old=was.source_type, new=now.source_type)
    if old.facts and new.facts:
        told, tells = old.facts.columns[before], new.facts.columns[after]
        if told.nullable != tells.nullable:
            yield SchemaChange(
                kind=SchemaChangeKind.NULLABILITY, column=now.name, old=told.nullable, new=tells.nullable
            )
        if told.default != tells.default:
            yield SchemaChange(kind=SchemaChangeKind.DEFAULT, column=now.name, old=told.default, new=tells.default)


def _of_partitions(old: CatalogueFacts, new: CatalogueFacts, *, rewritten: bool) -> Iterator[SchemaChange]:
    before, after = ({item.relation: item for item in facts.storage} for facts in (old, new))
    for item in old.storage:
        if item.relation not in after:
            yield SchemaChange(kind=SchemaChangeKind.DETACH, old=item.name)
    for item in new.storage:
        if item.relation not in before:
            if item.attached:
                yield SchemaChange(kind=SchemaChangeKind.ATTACH, new=item.name)
        elif len(after) > 1 and before[item.relation].file != item.file and not rewritten:
            yield SchemaChange(kind=SchemaChangeKind.REPLACE, new=item.name)
