"""The differences between two versions of a table's schema, and their effect on existing rows.

A log contains rows and no DDL: existing rows can change without a change in the log. What the facts of both versions
prove is stated; everything else is unknown. A rename is one only if the column's number proves it; otherwise it is a
drop and an add.

Rows were rewritten if their storage differs and a column's definition changed with it. Storage alone proves nothing, as
VACUUM FULL, CLUSTER and TRUNCATE replace it too. Only for a partition the storage alone counts, because the source does
not announce a partition's TRUNCATE.

A lake table may follow a schema change before a reload has established its rows (`TableSchema.owed`). Such a table
keeps its rows' state unknown, whatever changes follow.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tailrace.model.catalogue_facts import UNKNOWN, CatalogueFacts
from tailrace.model.schema import Column, TableSchema


class SchemaChangeKind(enum.Enum):
    """The kind of a schema change."""

    RENAME_TABLE = "rename table"
    """The table was renamed, or moved to another schema."""
    ADD = "add"
    DROP = "drop"
    RENAME = "rename"
    RETYPE = "retype"
    NULLABILITY = "nullability"
    DEFAULT = "default"
    KEY = "key"
    IDENTITY = "identity"
    ATTACH = "attach"
    """A partition was attached that may have had rows."""
    DETACH = "detach"
    REPLACE = "replace"
    """A partition's rows were rewritten or truncated. For a single partition the source does not say which."""


class ExistingValue(enum.Enum):
    """The value of existing rows in an added column.

    A column that existed before and is published only now had values that the log never received: unknown.
    """

    NULL = "null"
    CONSTANT = "constant"
    WRITTEN = "written"
    """A value of its own for each row."""
    UNKNOWN = UNKNOWN


@dataclass(frozen=True, kw_only=True)
class SchemaChange:
    """One difference. `old` and `new` are names, types, key columns or expressions, depending on the kind."""

    kind: SchemaChangeKind
    column: str | None = None
    old: Any = None
    new: Any = None
    existing_value: ExistingValue | None = None
    """For an added column: what existing rows have in it."""
    constant: str | None = None
    """For an added column: the constant that existing rows have in it, as text."""

    def to_json(self) -> dict[str, Any]:
        fields = {
            "kind": self.kind.value,
            "column": self.column,
            "was": self.old,
            "now": self.new,
            "at_rest": self.existing_value and self.existing_value.value,
            "value": self.constant,
        }
        always = {"kind"} | ({"was", "now"} if self.old is not None or self.new is not None else set())
        return {name: value for name, value in fields.items() if name in always or value is not None}

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
    """True if all rows were rewritten, perhaps with other values; None: unknown."""

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
    """Return what was done to the table between two versions."""
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
    """Return whether `new` is still the version `old`.

    Then rows of one are rows of the other, and nothing more is known of `new` that could matter for the next version.
    """
    return old == new and (new.facts is None or (old.facts is not None and old.facts.same_but_file(new.facts)))


def is_newer_version(old: TableSchema, new: TableSchema) -> bool:
    """Return whether the version of rows is newer than what a table knows.

    The catalogue is read when rows arrive, and when a table is loaded or checked. So the version with the rows can be
    older than what the table knows: the source does not announce another partition, or a type's new name. In what rows
    consist of it cannot be older, for no row is from before a load.
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
    """Return whether columns were added and dropped in between. Rows that arrive now may still have one."""
    return new.columns_ever - old.columns_ever > sum(
        number > old.columns_ever for number in (*new.numbers, *new.unpublished)
    )


def _gave_way(old: dict[int, str], new: dict[int, str]) -> bool:
    """Return whether a column was replaced by another of its type.

    Rows that arrive now may still have the former one, renamed.
    """
    dropped, added = ({mine[number] for number in mine.keys() - theirs} for mine, theirs in ((old, new), (new, old)))
    return bool(dropped & added)


def _types(schema: TableSchema) -> dict[int, str]:
    """Return the type of each column by number; empty for a schema without facts."""
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
    for index, (number, column) in enumerate(zip(after, new.columns, strict=True)):
        if number not in mine:
            is_new = bool(old.facts and new.facts and new.facts.columns[index].number > old.facts.columns_ever)
            yield _added(new.facts, index, column, rewritten if is_new else None)
        else:
            yield from _of_column(old, new, mine[number], index)


def _added(facts: CatalogueFacts | None, index: int, column: Column, rewritten: bool | None) -> SchemaChange:
    fill = facts.columns[index].fast_default if facts and rewritten is not None else None
    if fill is not None:
        existing = ExistingValue.CONSTANT
    else:
        existing = {None: ExistingValue.UNKNOWN, True: ExistingValue.WRITTEN, False: ExistingValue.NULL}[rewritten]
    return SchemaChange(
        kind=SchemaChangeKind.ADD, column=column.name, new=column.source_type, existing_value=existing, constant=fill
    )


def _of_column(old: TableSchema, new: TableSchema, before: int, after: int) -> Iterator[SchemaChange]:
    was, now = old.columns[before], new.columns[after]
    if was.name != now.name:
        yield SchemaChange(kind=SchemaChangeKind.RENAME, column=now.name, old=was.name, new=now.name)
    if (was.source_type, was.type) != (now.source_type, now.type):
        yield SchemaChange(kind=SchemaChangeKind.RETYPE, column=now.name, old=was.source_type, new=now.source_type)
    if old.facts and new.facts:
        old_facts, new_facts = old.facts.columns[before], new.facts.columns[after]
        if old_facts.nullable != new_facts.nullable:
            yield SchemaChange(
                kind=SchemaChangeKind.NULLABILITY, column=now.name, old=old_facts.nullable, new=new_facts.nullable
            )
        if old_facts.default != new_facts.default:
            yield SchemaChange(
                kind=SchemaChangeKind.DEFAULT, column=now.name, old=old_facts.default, new=new_facts.default
            )


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
