"""Rules made ready for one table: each a step that rows go through.

A step is made once for a shape, where everything is refused that can be: a rule that would destroy the key, a column of
the wrong type, an expression that cannot be computed. What is left to fail with rows is noted with them, never raised,
and the value that failed is null: whoever drives the steps halts, or sets the rows aside.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.model.schema import TableId
from tailrace.transforms import rules
from tailrace.transforms.expression import Expression, columns_of
from tailrace.transforms.output_schema import OutputSchema
from tailrace.transforms.row_images import AFTER, Image, RowImages
from tailrace.transforms.rules import Rule
from tailrace.transforms.secrets import Keyring
from tailrace.transforms.steps import column_values as column_work
from tailrace.transforms.steps import encryption, hashes
from tailrace.transforms.steps.column_values import ColumnResult, parse_type
from tailrace.transforms.steps.row_filter import ConditionResult, keep_wanted_rows
from tailrace.transforms.transform_errors import UNFIT_REASON, RowFault, RowFaults, faulty_rows, restrict_faults

Mask = npt.NDArray[np.bool_]
RoutedRows = tuple[TableId | None, RowImages]
"""Rows, and the table that they were sent to, if to another."""


@dataclass
class RuleStep:
    """One rule, for one table."""

    rule: Rule
    when: Expression | None
    count_rows: Callable[[int], None] = lambda _: None
    """Hears of how many rows it was applied to."""

    def apply(self, rows: RowImages) -> None:
        """Work on the rows, in place."""

    def route(self, lot: RoutedRows) -> list[RoutedRows]:
        """The same for whoever may send rows to several tables."""
        self.apply(lot[1])
        return [lot]

    def evaluate_when(self, rows: RowImages, image: Image) -> tuple[Mask | None, RowFaults]:
        """The rows of which `when` is true (None: all), and those of which nobody can say. It is of every row that a
        rule before has failed at: the value that it would be judged by may be the one that is missing, and what the
        rule hides must not stand in a letter for that."""
        if self.when is None:
            self.count_rows(rows.count if image.which == AFTER else 0)
            return None, ()
        found, odd = self.when.evaluate_condition(image.columns, rows.count)
        self.count_rows(int(found.sum()) if image.which == AFTER else 0)
        return found | rows.failed_rows, (*rows.unknown_rows(image, self.when.columns), *odd)


@dataclass
class ValueStep(RuleStep):
    """Values of some columns become others, each by itself."""

    columns: tuple[str, ...] = ()
    transform: Callable[[str, pa.Array], ColumnResult] = lambda _, values: (values, ())
    types_after: dict[str, pa.DataType] = field(default_factory=dict)
    ignores_value: bool = False
    """Whether it does not look at the value."""

    def apply(self, rows: RowImages) -> None:
        for image in rows.images:
            names = [name for name in self.columns if name in image.columns]
            if not names:
                continue
            chosen, doubts = self.evaluate_when(rows, image)
            for name in names:
                self._apply_to(rows, image, name, chosen, doubts)

    def _apply_to(self, rows: RowImages, image: Image, name: str, chosen: Mask | None, doubts: RowFaults) -> None:
        values = image.columns[name]
        texts = rows.unfit.get((image.which, name), {})
        if texts:
            odd = np.zeros(rows.count, np.bool_)
            odd[[row for row in texts if chosen is None or chosen[row]]] = True
            rows.unfit.pop((image.which, name))
            if kept := {row: text for row, text in texts.items() if not odd[row]}:
                rows.unfit[image.which, name] = kept
            if not self.ignores_value:
                rows.fail(self.rule.name, name, RowFault(reason=UNFIT_REASON, rows=odd))
        if doubts:
            rows.fail(self.rule.name, name, *restrict_faults(doubts, _there(values)))
            values = null_rows(values, faulty_rows(doubts, rows.count))
        if chosen is None:
            made, faults = self._worked(name, values)
        else:
            made, faults = self._worked(name, null_rows(values, ~chosen))
            others, left = column_work.cast(null_rows(values, chosen), made.type)
            made = pc.if_else(pa.array(chosen), made, others)
            faults = (*faults, *left)
        rows.fail(self.rule.name, name, *faults)
        image.columns[name] = made

    def _worked(self, name: str, values: pa.Array) -> ColumnResult:
        """The values as the rule makes them. What Arrow would say of a value it cannot work on must not be heard."""
        try:
            return self.transform(name, values)
        except pa.ArrowException as error:
            why = f"it cannot be applied to the value ({type(error).__name__})"
            return pa.nulls(len(values), self.types_after[name]), (RowFault(reason=why, rows=_there(values)),)


def _there(values: pa.Array) -> Mask:
    """The rows that have a value."""
    return np.asarray(pc.is_valid(values).to_numpy(zero_copy_only=False), np.bool_)


def null_rows(values: pa.Array, rows: Mask) -> pa.Array:
    """The values, null in these rows."""
    return pc.if_else(pa.array(rows), pa.scalar(None, values.type), values) if rows.any() else values


@dataclass
class ColumnsStep(RuleStep):
    """Columns go, or have other names."""

    dropped: tuple[str, ...] = ()
    names: dict[str, str] | None = None

    def apply(self, rows: RowImages) -> None:
        self.count_rows(rows.count)
        for name in self.dropped:
            rows.drop(name)
        if self.names:
            rows.rename(self.names)


@dataclass
class FilterStep(RuleStep):
    """Rows that are not wanted go; a change that makes one so is a delete."""

    where: Expression | None = None
    key: tuple[str, ...] = ()

    def apply(self, rows: RowImages) -> None:
        assert self.where is not None, "made ready"
        self.count_rows(rows.count)

        def wanted(image: Image) -> ConditionResult:
            assert self.where is not None, "made ready"
            found, odd = self.where.evaluate_condition(image.columns, rows.count)
            if self.when is None:
                return found, odd
            concerned, odder = self.when.evaluate_condition(image.columns, rows.count)
            return found | ~concerned, (*odd, *odder)

        keep_wanted_rows(rows, wanted, columns_of((self.where, self.when)), self.key, self.rule.name)


def when_expression(rule: Rule) -> Expression | None:
    """The rule's `when`."""
    return None if rule.when is None else Expression(rule.when)


def named_columns(rule: Rule, shape: OutputSchema, wanted: Sequence[str]) -> tuple[str, ...]:
    """The columns that the rule names. One that names a table means all of them, as a name that is mistyped, or was
    changed at the source, must not let values through; one with a pattern means the tables that have them."""
    missing = [name for name in wanted if name not in shape.columns]
    if missing and rule.exact_tables:
        raise shape.rule_error(
            rule,
            "a rule names a column that the table does not have",
            f"Columns are named as the rules before have left them. There are: {', '.join(shape.columns)}.",
            column=missing[0],
        )
    return tuple(name for name in wanted if name in shape.columns)


def require_key_kept(rule: Rule, shape: OutputSchema, names: Sequence[str], *, still_a_key: bool = False) -> None:
    """Refuse what would make rows of different keys one, or a row unknown by its key."""
    if shape.row_is_key and rule.do in ("encrypt", "function"):
        raise shape.rule_error(
            rule,
            "a rule would destroy the key: without one, rows are known by all their values, which must come out "
            "equal each time",
            "Give the table a primary key, or use `hmac`.",
        )
    hit = [name for name in names if name in shape.key]
    if hit and not still_a_key:
        raise shape.rule_error(
            rule,
            "a rule would destroy the table's key",
            "Leave the key's columns out of it. `sha256`, `hmac` and `rename` keep a key one.",
            column=hit[0],
        )
    if hit and rule.when is not None and not set(Expression(rule.when).columns) <= set(shape.key):
        raise shape.rule_error(
            rule,
            "a rule on the key may depend on nothing but the key: old keys come without the rest of the row",
            "Leave `when` out, or use the key's columns in it.",
            column=hit[0],
        )


_CHANGED_TYPE = ("mask", "redact", "sha256", "hmac", "encrypt")


def _make_value(rule: Any, shape: OutputSchema, keys: Keyring) -> RuleStep | None:
    names = named_columns(rule, shape, rule.columns)
    if not names:
        return None
    require_key_kept(rule, shape, names, still_a_key=rule.do in ("sha256", "hmac") or _is_kept(rule, shape, names))
    for name in names:
        kind = shape.columns[name].type
        odd = pa.types.is_binary(kind) and rule.do == "mask"
        if rule.do in _CHANGED_TYPE and rule.do != "redact" and (odd or not column_work.is_textual(kind)):
            raise shape.rule_error(
                rule,
                f"`{rule.do}` cannot be done to a column of {kind}",
                "Use `redact`, `null` or `exclude`.",
                column=name,
            )
    to = {name: _type_after(rule, shape, name) for name in names}
    work = _worker(rule, shape, keys)
    for name in names:
        shape.columns[name].mark(rule, to[name])
    return ValueStep(
        rule,
        when_expression(rule),
        columns=names,
        transform=work,
        types_after=to,
        ignores_value=rule.do in ("redact", "null"),
    )


def _is_kept(rule: Rule, shape: OutputSchema, names: Sequence[str]) -> bool:
    """Whether a cast gives different values for different values."""
    if not isinstance(rule, rules.Cast):
        return False
    to = parse_type(rule.to)
    exact = (pa.int16(), pa.int32(), pa.int64())

    def kept(kind: pa.DataType) -> bool:
        wider = kind in exact and to in exact and exact.index(kind) <= exact.index(to)
        printed = pa.types.is_string(to) and (kind in exact or pa.types.is_date(kind) or pa.types.is_decimal(kind))
        return kind == to or wider or printed

    return all(kept(shape.columns[name].type) for name in names)


def _type_after(rule: Rule, shape: OutputSchema, name: str) -> pa.DataType:
    kind = shape.columns[name].type
    match rule:
        case rules.Mask() | rules.Redact() | rules.Sha256() | rules.Hmac():
            return pa.string()
        case rules.Encrypt():
            return pa.binary()
        case rules.TruncateValues() if not (pa.types.is_string(kind) or pa.types.is_binary(kind)):
            raise shape.rule_error(
                rule, f"`truncate` cannot be done to a column of {kind}", "It cuts texts.", column=name
            )
        case rules.Decrypt() if not pa.types.is_binary(kind):
            raise shape.rule_error(rule, f"a column of {kind} cannot be decrypted", "It must be a binary.", column=name)
        case rules.Cast() | rules.Decrypt():
            to = parse_type(rule.to)
            probe = pa.string() if isinstance(rule, rules.Decrypt) else kind
            try:
                pa.array([], probe).cast(to)
            except pa.ArrowException:
                said = f"a column of {probe} cannot be cast to {to}"
                raise shape.rule_error(rule, said, "Name another type.", column=name) from None
            return to
    return kind


def _worker(rule: Rule, shape: OutputSchema, keys: Keyring) -> Callable[[str, pa.Array], ColumnResult]:
    table = shape.source.table
    match rule:
        case rules.Mask():
            return lambda _, values: (column_work.mask(values, rule.keep_first, rule.keep_last, rule.char), ())
        case rules.Redact():
            return lambda _, values: (column_work.redact(values, rule.text), ())
        case rules.Null():
            return lambda _, values: (pa.nulls(len(values), values.type), ())
        case rules.TruncateValues():
            return lambda _, values: (column_work.truncate(values, rule.length), ())
        case rules.Sha256():
            return lambda _, values: (hashes.sha256(values), ())
        case rules.Hmac():
            secret = keys.key(rule.key)
            return lambda _, values: (hashes.hmac_sha256(values, secret), ())
        case rules.Encrypt():
            cipher = keys.cipher(rule.key)
            return lambda name, values: encryption.encrypt(
                values, cipher, rule.key, encryption.associated_data(table, name)
            )
        case rules.Decrypt():
            return lambda name, values: _decrypted(rule, table, name, values, keys)
        case rules.Cast():
            to = parse_type(rule.to)
            return lambda _, values: column_work.cast(values, to)
    raise AssertionError("a rule without its work")


def _decrypted(rule: rules.Decrypt, table: TableId, name: str, values: pa.Array, keys: Keyring) -> ColumnResult:
    tables = encryption.possible_tables(rule.of_table) if rule.of_table else (table,)
    bounds = encryption.accepted_associated_data(tables, rule.of_column or name)
    plain, faults = encryption.decrypt(values, lambda key: keys.cipher(key) if key in keys.ids else None, bounds)
    to = parse_type(rule.to)
    if pa.types.is_binary(to):
        return plain, faults
    text, no_text = column_work.cast(plain, pa.string(), "what was decrypted")
    made, unfit = column_work.cast(text, to, "what was decrypted")
    return made, (*faults, *no_text, *unfit)


def _make_filter(rule: Any, shape: OutputSchema, _: Keyring) -> RuleStep | None:
    where = Expression(rule.where)
    if set(named_columns(rule, shape, where.columns)) != set(where.columns):
        return None
    if not pa.types.is_boolean(where.result_type(shape.types)):
        raise shape.rule_error(rule, "`where` is no condition", "Write a comparison, for example `country == 'DE'`.")
    shape.mark_rows(rule)
    return FilterStep(rule, when_expression(rule), where=where, key=shape.key)


def _make_columns(rule: Any, shape: OutputSchema, _: Keyring) -> RuleStep | None:
    if isinstance(rule, rules.Rename):
        names = named_columns(rule, shape, list(rule.columns))
        renamed = {name: rule.columns[name] for name in names}
        if not renamed:
            return None
        after = [renamed.get(name, name) for name in shape.columns]
        if len(set(after)) < len(after):
            twice = next(name for name in after if after.count(name) > 1)
            raise shape.rule_error(rule, "a rule gives two columns one name", "Give each its own.", column=twice)
        shape.columns = dict(zip(after, shape.columns.values(), strict=True))
        shape.key = tuple(renamed.get(name, name) for name in shape.key)
        return ColumnsStep(rule, None, names=renamed)

    def hit(name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, glob) for glob in rule.columns)

    if isinstance(rule, rules.Exclude) and rule.exact_tables:
        named_columns(rule, shape, [glob for glob in rule.columns if not any(sign in glob for sign in "*?[")])
    gone = tuple(name for name in shape.columns if hit(name) == isinstance(rule, rules.Exclude))
    if not gone:
        # One that names all columns there are does its work once there is another.
        return ColumnsStep(rule, None) if isinstance(rule, rules.Include) else None
    require_key_kept(rule, shape, gone)
    if len(gone) == len(shape.columns):
        raise shape.rule_error(rule, "a rule leaves no column", "Name those that are wanted.")
    shape.columns = {name: made for name, made in shape.columns.items() if name not in gone}
    # Or a lake table would keep what it has of a column that the source still has.
    shape.mark_rows(rule)
    return ColumnsStep(rule, None, dropped=gone)


StepFactory = Callable[[Any, OutputSchema, Keyring], RuleStep | None]
"""A rule, what the table is by then, and the keys; to a step, or None if the rule does not concern the table."""
STEP_FACTORIES: dict[str, StepFactory] = {
    **dict.fromkeys(
        ("mask", "redact", "null", "truncate", "sha256", "hmac", "encrypt", "decrypt", "cast"), _make_value
    ),
    "filter": _make_filter, "include": _make_columns, "exclude": _make_columns, "rename": _make_columns,
}  # fmt: skip
