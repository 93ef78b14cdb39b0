"""What a new version of a source table's shape means for its lake table: a recast of the rows it has, a load anew,
or a stop.

Nothing is lost in silence: what cannot be proven to leave rows at rest as they were, or to change them in a way that
is known, is read again from the source. Pure: no Spark, no I/O.
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
    """How the lake table's rows become rows of the new shape, in one commit. Columns not named stay as they are; if
    none is named, the table only takes note of what is known of the source now."""

    schema: TableSchema
    added: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()
    """Old name, new name."""
    backfilled: tuple[tuple[str, pa.Scalar], ...] = ()
    """Of those that are added, the ones that rows at rest have a value in."""
    dropped: tuple[str, ...] = ()
    kept_apart: tuple[str, ...] = ()
    """Columns that begin empty beside what they were: their type cannot hold that, so it stays under another name."""

    @property
    def descriptions(self) -> tuple[str, ...]:
        """In a few words each, for people."""
        return (
            *(f"rename {old} to {new}" for old, new in self.renamed if old != new),
            *(f"add {name}" for name in self.added),
            *(f"fill {name} with its default in every row" for name, _ in self.backfilled),
            *(f"drop {name}" for name in self.dropped),
            *(f"begin {name} anew, and keep what it was beside it" for name in self.kept_apart),
        )


@dataclass(frozen=True, kw_only=True)
class ReloadNeeded:
    """The table must be loaded anew, and why."""

    schema: TableSchema
    why: str


_ALLOW_HINT = (
    "Its changes are kept in the log. Set it otherwise and start again: the table goes on from there. Or run `tailrace "
    "snapshot FILE TABLE`: the table is loaded anew."
)
_RENAMED_HINT = (
    "Under its new name it is a table of its own, loaded by itself if the settings match it. This lake table stays as "
    "it is: exclude the old name in `source.exclude`, or rename the table back and run `tailrace snapshot FILE TABLE`."
)
_OWED = "a load of it did not land"
EvolutionStep = Recast | ReloadNeeded | SchemaChanged
"""What comes next for a table: the last is the error that it stops with."""
ParseValue = Callable[[Column, str], pa.Scalar | None]
"""A constant's text as a value of the column; None if the type cannot hold it."""


def no_value(_: Column, __: str) -> pa.Scalar | None:
    """Where nobody knows how the source writes values."""
    return None


def plan_evolution(
    old: TableSchema,
    new: TableSchema,
    policies: EvolutionPolicies,
    value_of: ParseValue,
    form: TableSpec = PLAIN_MIRROR,
) -> EvolutionStep | None:
    """What to do with a table of the shape `old`, now that rows of the shape `new` come; None: nothing."""
    if old.covers(new):
        return None
    if old.table != new.table:
        return _stop(old, f"renamed to {new.table}", _RENAMED_HINT)
    if new.identity is Identity.NONE and old.identity is not Identity.NONE and new.relation == old.relation:
        return _stop(old, "updates and deletes are no longer told, for want of a replica identity", IDENTITY_HINT)
    # No policy is for a load that is owed: it was begun before, and did not land.
    owed, old = old.owed, old.with_owed(False)
    found = compare_schemas(old, new)
    answers = list(_answers(old, new, found, policies, form))
    for kind, policy, why in answers:
        if policy is EvolutionPolicy.STOP:
            return _stop(old, why, f"`evolution.{kind}` is `stop` for it. {_ALLOW_HINT}")
    if again := [why for _, policy, why in answers if policy is EvolutionPolicy.REFRESH] + [_OWED] * owed:
        return ReloadNeeded(schema=new, why="; ".join(dict.fromkeys(again)))
    return _recast(new, found, policies, value_of)


def _stop(old: TableSchema, change: str, hint: str) -> SchemaChanged:
    return SchemaChanged("the source table changed its shape", table=old.table, change=change, hint=hint)


def _answers(
    old: TableSchema, new: TableSchema, found: Evolution, policies: EvolutionPolicies, form: TableSpec
) -> Iterator[tuple[str, EvolutionPolicy, str]]:
    """For each thing that changed: its kind, what the policy says, and what it was, in words."""
    if old.relation != new.relation:
        yield "recreate", policies.recreate, "dropped and created again"
        return
    names = {str(item.old): str(item.new) for item in found.changes if item.kind is SchemaChangeKind.RENAME}
    if tuple(names.get(name, name) for name in old.key) != new.key:
        yield "key", policies.key, "another key"
    elif old.identity is Identity.NONE and new.identity is not Identity.NONE:
        yield "key", policies.key, "updates and deletes were not told until now"
    if found.rewritten or _unknown(found):
        why = "its rows were written anew" if found.rewritten else "it is not known what became of its rows"
        yield "rewrite", policies.rewrite, why
    if policies.rename is EvolutionPolicy.STOP and (pair := _perhaps_renamed(old, new, found)) is not None:
        yield "rename", policies.rename, f"{pair[0]} may have been renamed to {pair[1]}"
    for item in found.changes:
        if answer := _answer(old, new, item, policies, form):
            yield answer


def _perhaps_renamed(old: TableSchema, new: TableSchema, found: Evolution) -> tuple[str, str] | None:
    """A column that went and one of its type that came, where no number says that they are two."""
    if old.facts and new.facts:
        return None
    went = [item for item in found.changes if item.kind is SchemaChangeKind.DROP]
    came = [item for item in found.changes if item.kind is SchemaChangeKind.ADD]
    return next(((str(a.column), str(b.column)) for a in went for b in came if a.old == b.new), None)


def _unknown(found: Evolution) -> bool:
    """Whether it is not known what rows at rest have now, of something that may have touched them."""
    return found.rewritten is None or any(item.existing_value is ExistingValue.UNKNOWN for item in found.changes)


def _answer(
    old: TableSchema, new: TableSchema, item: SchemaChange, policies: EvolutionPolicies, form: TableSpec
) -> tuple[str, EvolutionPolicy, str] | None:
    match item.kind:
        case SchemaChangeKind.ADD:
            return "add", policies.add, f"added {item.column}"
        case SchemaChangeKind.DROP:
            # A row of a mirror without a key is known by all that it has, so a column of the past would hide it.
            policy = policies.drop
            if policy is EvolutionPolicy.KEEP_NULL and not new.key and form.mode is not TableMode.APPEND:
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
            return "partition", policies.partition, f"partition {item.old or item.new} came or went"
    return None


def column_of(old: TableSchema, new: TableSchema, name: str) -> tuple[Column, Column]:
    """A column of the new shape, and what it was: found by its number where that is known."""
    place = new.names.index(name)
    if old.facts and new.facts:
        return old.columns[old.facts.numbers.index(new.facts.numbers[place])], new.columns[place]
    return old.columns[old.names.index(name)], new.columns[place]


INTEGERS = (pa.int16(), pa.int32(), pa.int64())
_TEXTS = ("text", "character varying")
_LENGTHS = (*_TEXTS, "character", "bit varying", "bit")
_MOMENTS = tuple(f"{kind} {zone} time zone" for kind in ("time", "timestamp") for zone in ("with", "without"))
_SECOND_DIGITS_MAX = 6


def is_wider(was: Column, now: Column) -> bool:
    """Whether every value of one column is the same value in the other."""
    if was.rule_marks != now.rule_marks:
        return False
    (kind, limits), (other, others) = _limits(was), _limits(now)
    if was.type != now.type:
        return "oid" not in (kind, other) and type_contains(
            was.type, now.type
        )  # a negative integer becomes another oid
    # Many types arrive as text, and what one prints another may print otherwise.
    alike = kind == other or {kind, other} <= set(_TEXTS)
    return alike and all(mine <= theirs for mine, theirs in zip(limits, others, strict=True))


def is_narrower(was: Column, now: Column) -> bool:
    """Whether one column is of the other's kind, and does not hold all that it did."""
    if was.rule_marks != now.rule_marks or is_wider(was, now):
        return False
    (kind, limits), (other, others) = _limits(was), _limits(now)
    less = kind == other and any(mine > theirs for mine, theirs in zip(limits, others, strict=True))
    return less or is_wider(now, was)


def _limits(column: Column) -> tuple[str, tuple[float, ...]]:
    """The source's type without what stands in brackets, and what that limits, as far as it is known of the type."""
    written = column.source_type.partition(RULE_MARK)[0]
    kind = re.sub(r"\([^)]*\)", "", written).removesuffix("[]")
    given = [int(number) for number in re.findall(r"-?\d+", "".join(re.findall(r"\([^)]*\)", written)))]
    if kind in _LENGTHS:
        return kind, (given[0] if given else math.inf,)
    if kind in _MOMENTS or kind.split(" ")[0] == "interval":
        return kind, (given[0] if given else _SECOND_DIGITS_MAX,)
    if kind == "numeric":
        return kind, (given[0] - given[-1], given[-1]) if len(given) == 2 else (math.inf, math.inf)
    return kind, ()


def type_contains(was: pa.DataType, now: pa.DataType) -> bool:
    """Whether every value of one type is one of the other."""
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
    added, renamed, filled, dropped = [], [], [], []
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
                return ReloadNeeded(schema=new, why=f"added {item.column} with a default that is not understood")
            filled.append((column.name, value))
    return Recast(
        schema=new, added=tuple(added), renamed=tuple(renamed), backfilled=tuple(filled), dropped=tuple(dropped)
    )
