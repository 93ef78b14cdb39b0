"""Plan a lake table's reaction to a schema change. It is a recast, a reload or a stop.

Nothing is lost silently. A change is applied by a recast only if it provably leaves existing rows as they were, or
changes them in a known way. Otherwise the rows are read again from the source.

Pure: no Spark, no I/O.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pyarrow as pa

from tailrace.errors import SchemaChanged
from tailrace.model.evolution import Evolution, ExistingValue, SchemaChange, SchemaChangeKind, compare_schemas
from tailrace.model.policies import EvolutionPolicies, EvolutionPolicy
from tailrace.model.schema import RULE_MARK, Column, Identity, TableSchema
from tailrace.tables.schema_errors import IDENTITY_HINT
from tailrace.tables.spec import PLAIN_MIRROR, TableMode, TableSpec


@dataclass(frozen=True, kw_only=True)
class Recast:
    """The changes that give a lake table the new schema, in one commit.

    Columns that are not named stay as they are. If none is named, the table only records the new facts about the
    source.
    """

    schema: TableSchema
    added: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    """Pairs of old name and new name."""
    backfilled: tuple[tuple[str, pa.Scalar], ...] = ()
    """Added columns that get a value in existing rows, with that value."""
    dropped: tuple[str, ...] = ()
    kept_apart: tuple[str, ...] = ()
    """Columns that start empty because their new type cannot hold the old values. These stay under another name."""

    @property
    def descriptions(self) -> tuple[str, ...]:
        """Each change in a few words, for people."""
        return (
            *(f"rename {old} to {new}" for old, new in self.renamed if old != new),
            *(f"add {name}" for name in self.added),
            *(f"fill {name} with its default in every row" for name, _ in self.backfilled),
            *(f"drop {name}" for name in self.dropped),
            *(f"start {name} empty, and keep its old values in another column" for name in self.kept_apart),
        )


@dataclass(frozen=True, kw_only=True)
class ReloadNeeded:
    """The table must be reloaded, for this reason."""

    schema: TableSchema
    why: str


_ALLOW_HINT = (
    "Its changes are kept in the log. Change the policy and start again to continue from there. Or run `tailrace "
    "snapshot FILE TABLE` to reload the table."
)
_RENAMED_HINT = (
    "Under its new name it is a separate table, loaded automatically if the settings match it. This lake table stays "
    "as it is: exclude the old name in `source.exclude`, or rename the table back and run `tailrace snapshot FILE "
    "TABLE`."
)
_OWED = "a load of it was not committed"
EvolutionStep = Recast | ReloadNeeded | SchemaChanged
"""The next step for a table; `SchemaChanged` is the error that it stops with."""
ParseValue = Callable[[Column, str], pa.Scalar | None]
"""Parse a constant's text as a value of the column. None if its type cannot hold it."""


def no_value(_: Column, __: str) -> pa.Scalar | None:
    """Parse nothing: for callers that do not know how the source writes values."""
    return None


def plan_evolution(
    old: TableSchema,
    new: TableSchema,
    policies: EvolutionPolicies,
    value_of: ParseValue,
    spec: TableSpec = PLAIN_MIRROR,
) -> EvolutionStep | None:
    """Plan the step for a table of schema `old` when rows of schema `new` arrive. None: nothing to do."""
    if old.covers(new):
        return None
    if old.table != new.table:
        return _stop(old, f"renamed to {new.table}", _RENAMED_HINT)
    if new.identity is Identity.NONE and old.identity is not Identity.NONE and new.relation == old.relation:
        return _stop(old, "without a replica identity the source no longer sends updates and deletes", IDENTITY_HINT)
    # No policy applies to an owed load: it was begun before, and was not committed.
    owed, old = old.owed, old.with_owed(False)
    found = compare_schemas(old, new)
    answers = list(_answers(old, new, found, policies, spec))
    for kind, policy, why in answers:
        if policy is EvolutionPolicy.STOP:
            return _stop(old, why, f"`evolution.{kind}` is `stop` for it. {_ALLOW_HINT}")
    if reasons := [why for _, policy, why in answers if policy is EvolutionPolicy.REFRESH] + [_OWED] * owed:
        return ReloadNeeded(schema=new, why="; ".join(dict.fromkeys(reasons)))
    return _recast(new, found, policies, value_of)


def _stop(old: TableSchema, change: str, hint: str) -> SchemaChanged:
    return SchemaChanged("the source table's schema changed", table=old.table, change=change, hint=hint)


def _answers(
    old: TableSchema, new: TableSchema, found: Evolution, policies: EvolutionPolicies, spec: TableSpec
) -> Iterator[tuple[str, EvolutionPolicy, str]]:
    """Yield each change's kind, the policy for it, and a description."""
    if old.relation != new.relation:
        yield "recreate", policies.recreate, "dropped and created again"
        return
    names = {str(item.old): str(item.new) for item in found.changes if item.kind is SchemaChangeKind.RENAME}
    if tuple(names.get(name, name) for name in old.key) != new.key:
        yield "key", policies.key, "another key"
    elif old.identity is Identity.NONE and new.identity is not Identity.NONE:
        yield "key", policies.key, "updates and deletes were not sent until now"
    if found.rewritten or _unknown(found):
        why = "its rows were rewritten" if found.rewritten else "its rows may have been rewritten"
        yield "rewrite", policies.rewrite, why
    if policies.rename is EvolutionPolicy.STOP and (pair := _perhaps_renamed(old, new, found)) is not None:
        yield "rename", policies.rename, f"{pair[0]} may have been renamed to {pair[1]}"
    for item in found.changes:
        if answer := _answer(old, new, item, policies, spec):
            yield answer


def _perhaps_renamed(old: TableSchema, new: TableSchema, found: Evolution) -> tuple[str, str] | None:
    """Return a dropped and an added column of one type that may be a rename.

    Only where no column numbers show that they are two columns.
    """
    if old.facts and new.facts:
        return None
    dropped = [item for item in found.changes if item.kind is SchemaChangeKind.DROP]
    added = [item for item in found.changes if item.kind is SchemaChangeKind.ADD]
    return next(((str(a.column), str(b.column)) for a in dropped for b in added if a.old == b.new), None)


def _unknown(found: Evolution) -> bool:
    """Return whether existing rows may have changed at the source in an unknown way."""
    return found.rewritten is None or any(item.existing_value is ExistingValue.UNKNOWN for item in found.changes)


def _answer(
    old: TableSchema, new: TableSchema, item: SchemaChange, policies: EvolutionPolicies, spec: TableSpec
) -> tuple[str, EvolutionPolicy, str] | None:
    match item.kind:
        case SchemaChangeKind.ADD:
            return "add", policies.add, f"added {item.column}"
        case SchemaChangeKind.DROP:
            # A row of a keyless mirror is identified by all its values, so a dropped column would hide it.
            policy = policies.drop
            if policy is EvolutionPolicy.KEEP_NULL and not new.key and spec.mode is not TableMode.APPEND:
                policy = EvolutionPolicy.REFRESH
            return "drop", policy, f"dropped {item.column}"
        case SchemaChangeKind.RENAME:
            return "rename", policies.rename, f"renamed {item.old} to {item.new}"
        case SchemaChangeKind.RETYPE:
            was, now = column_of(old, new, str(item.column))
            if is_wider(was, now):
                return "widen", policies.widen, f"widened {item.column}"
            if is_narrower(was, now):
                return *policies.narrow_policy, f"narrowed {item.column}"
            return "retype", policies.retype, f"retyped {item.column}"
        case SchemaChangeKind.ATTACH | SchemaChangeKind.DETACH | SchemaChangeKind.REPLACE:
            return "partition", policies.partition, f"attached or detached partition {item.old or item.new}"
    return None


def column_of(old: TableSchema, new: TableSchema, name: str) -> tuple[Column, Column]:
    """Return a new column after its old version, matched by number where known."""
    index = new.names.index(name)
    if old.facts and new.facts:
        return old.columns[old.facts.numbers.index(new.facts.numbers[index])], new.columns[index]
    return old.columns[old.names.index(name)], new.columns[index]


INTEGERS = (pa.int16(), pa.int32(), pa.int64())
_TEXTS = ("text", "character varying")
_LENGTHS = (*_TEXTS, "character", "bit varying", "bit")
_MOMENTS = tuple(f"{kind} {zone} time zone" for kind in ("time", "timestamp") for zone in ("with", "without"))
_SECOND_DIGITS_MAX = 6


def is_wider(was: Column, now: Column) -> bool:
    """Return whether every value of one column is the same value in the other."""
    if was.rule_marks != now.rule_marks:
        return False
    (kind, limits), (other, others) = _limits(was), _limits(now)
    if was.type != now.type:
        return "oid" not in (kind, other) and type_contains(
            was.type, now.type
        )  # a negative integer becomes another oid
    # Many types arrive as text, and two types may print the same value differently.
    same_kind = kind == other or {kind, other} <= set(_TEXTS)
    return same_kind and all(mine <= theirs for mine, theirs in zip(limits, others, strict=True))


def is_narrower(was: Column, now: Column) -> bool:
    """Return whether the new column is of the same kind but holds fewer values."""
    if was.rule_marks != now.rule_marks or is_wider(was, now):
        return False
    (kind, limits), (other, others) = _limits(was), _limits(now)
    less = kind == other and any(mine > theirs for mine, theirs in zip(limits, others, strict=True))
    return less or is_wider(now, was)


def _limits(column: Column) -> tuple[str, tuple[float, ...]]:
    """Return the source type without its brackets, and the limits in them where understood."""
    written = column.source_type.partition(RULE_MARK)[0]
    kind = re.sub(r"\([^)]*\)", "", written).removesuffix("[]")
    numbers = [int(number) for number in re.findall(r"-?\d+", "".join(re.findall(r"\([^)]*\)", written)))]
    if kind in _LENGTHS:
        return kind, (numbers[0] if numbers else math.inf,)
    if kind in _MOMENTS or kind.split(" ")[0] == "interval":
        return kind, (numbers[0] if numbers else _SECOND_DIGITS_MAX,)
    if kind == "numeric":
        return kind, (numbers[0] - numbers[-1], numbers[-1]) if len(numbers) == 2 else (math.inf, math.inf)
    return kind, ()


def type_contains(was: pa.DataType, now: pa.DataType) -> bool:
    """Return whether every value of one type is a value of the other."""
    if was == now:
        return True
    if was in INTEGERS and now in INTEGERS:
        return INTEGERS.index(was) < INTEGERS.index(now)
    if pa.types.is_float32(was) and pa.types.is_float64(now):
        return True
    if pa.types.is_decimal(was) and pa.types.is_decimal(now):
        return bool(now.scale >= was.scale and now.precision - now.scale >= was.precision - was.scale)
    if pa.types.is_list(was) and pa.types.is_list(now):
        return type_contains(was.value_type, now.value_type)
    return False


def _recast(
    new: TableSchema, found: Evolution, policies: EvolutionPolicies, value_of: ParseValue
) -> Recast | ReloadNeeded:
    added, renamed, backfilled, dropped = [], [], [], []
    for item in found.changes:
        if item.kind is SchemaChangeKind.RENAME:
            renamed.append((str(item.old), str(item.new)))
        elif item.kind is SchemaChangeKind.DROP and policies.drop is EvolutionPolicy.APPLY:
            dropped.append(str(item.column))
        elif item.kind is SchemaChangeKind.ADD:
            added.append(str(item.column))
            if item.existing_value is not ExistingValue.CONSTANT:
                continue
            column = next(column for column in new.columns if column.name == item.column)
            value = value_of(column, item.constant or "")
            if value is None:
                return ReloadNeeded(schema=new, why=f"added {item.column} with a default that cannot be parsed")
            backfilled.append((column.name, value))
    return Recast(
        schema=new, added=tuple(added), renamed=tuple(renamed), backfilled=tuple(backfilled), dropped=tuple(dropped)
    )
