"""Rules as steps, each prepared for one table.

A step is made once per schema. Everything that can be refused is refused then: a rule that would destroy the key, a
column of the wrong type, an expression that cannot be computed. A failure at rows is noted with them, never raised, and
the failed value is null. The caller of the steps halts, or makes dead letters.
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
"""Rows and the table they were sent to; None for the default target."""


@dataclass
class RuleStep:
    """One rule, for one table."""

    rule: Rule
    when: Expression | None
    count_rows: Callable[[int], None] = lambda _: None
    """Called with the number of rows that the rule was applied to."""

    def apply(self, rows: RowImages) -> None:
        """Change the rows in place."""

    def route(self, lot: RoutedRows) -> list[RoutedRows]:
        """Apply the rule; return the rows with their tables.

        A rule that sends rows to several tables overrides this.
        """
        self.apply(lot[1])
        return [lot]

    def evaluate_when(self, rows: RowImages, image: Image) -> tuple[Mask | None, RowFaults]:
        """Return the rows for which `when` is true (None: all), and the undecidable ones.

        It counts as true for every row that an earlier rule failed at. The value it needs may be the missing one, and a
        dead letter must not reveal what the rule hides.
        """
        if self.when is None:
            self.count_rows(rows.count if image.which == AFTER else 0)
            return None, ()
        chosen, faults = self.when.evaluate_condition(image.columns, rows.count)
        self.count_rows(int(chosen.sum()) if image.which == AFTER else 0)
        return chosen | rows.failed_rows, (*rows.unknown_rows(image, self.when.columns), *faults)


@dataclass
class ValueStep(RuleStep):
    """Changes values of some columns, each value alone."""

    columns: tuple[str, ...] = ()
    transform: Callable[[str, pa.Array], ColumnResult] = lambda _, values: (values, ())
    types_after: dict[str, pa.DataType] = field(default_factory=dict)
    ignores_value: bool = False
    """True if the rule does not look at the value."""

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
            unfit = np.zeros(rows.count, np.bool_)
            unfit[[row for row in texts if chosen is None or chosen[row]]] = True
            rows.unfit.pop((image.which, name))
            if kept := {row: text for row, text in texts.items() if not unfit[row]}:
                rows.unfit[image.which, name] = kept
            if not self.ignores_value:
                rows.fail(self.rule.name, name, RowFault(reason=UNFIT_REASON, rows=unfit))
        if doubts:
            rows.fail(self.rule.name, name, *restrict_faults(doubts, _has_value(values)))
            values = null_rows(values, faulty_rows(doubts, rows.count))
        if chosen is None:
            result, faults = self._transformed(name, values)
        else:
            result, faults = self._transformed(name, null_rows(values, ~chosen))
            others, cast_faults = column_work.cast(null_rows(values, chosen), result.type)
            result = pc.if_else(pa.array(chosen), result, others)
            faults = (*faults, *cast_faults)
        rows.fail(self.rule.name, name, *faults)
        image.columns[name] = result

    def _transformed(self, name: str, values: pa.Array) -> ColumnResult:
        """Return the values as the rule makes them. Arrow's message stays out: it may quote a value."""
        try:
            return self.transform(name, values)
        except pa.ArrowException as error:
            reason = f"it cannot be applied to the value ({type(error).__name__})"
            return pa.nulls(len(values), self.types_after[name]), (RowFault(reason=reason, rows=_has_value(values)),)


def _has_value(values: pa.Array) -> Mask:
    """Return the rows that have a value."""
    return np.asarray(pc.is_valid(values).to_numpy(zero_copy_only=False), np.bool_)


def null_rows(values: pa.Array, rows: Mask) -> pa.Array:
    """Return the values, null in these rows."""
    return pc.if_else(pa.array(rows), pa.scalar(None, values.type), values) if rows.any() else values


@dataclass
class ColumnsStep(RuleStep):
    """Drops or renames columns."""

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
    """Removes unwanted rows; an update that makes a row unwanted becomes a delete."""

    where: Expression | None = None
    key: tuple[str, ...] = ()

    def apply(self, rows: RowImages) -> None:
        assert self.where is not None, "set when the step is made"
        self.count_rows(rows.count)

        def wanted(image: Image) -> ConditionResult:
            assert self.where is not None, "set when the step is made"
            matching, faults = self.where.evaluate_condition(image.columns, rows.count)
            if self.when is None:
                return matching, faults
            applies, when_faults = self.when.evaluate_condition(image.columns, rows.count)
            return matching | ~applies, (*faults, *when_faults)

        keep_wanted_rows(rows, wanted, columns_of((self.where, self.when)), self.key, self.rule.name)


def when_expression(rule: Rule) -> Expression | None:
    """Return the rule's `when` as an expression."""
    return None if rule.when is None else Expression(rule.when)


def named_columns(rule: Rule, output: OutputSchema, wanted: Sequence[str]) -> tuple[str, ...]:
    """Return those of the named columns that the table has.

    A rule that names its tables exactly must find all of them: a column mistyped, or renamed at the source, must not
    let values through. A rule with a table pattern is meant for the tables that have the columns.
    """
    missing = [name for name in wanted if name not in output.columns]
    if missing and rule.exact_tables:
        raise output.rule_error(
            rule,
            "rule names a column that the table does not have",
            f"Use the column names that the earlier rules have left: {', '.join(output.columns)}.",
            column=missing[0],
        )
    return tuple(name for name in wanted if name in output.columns)


def require_key_kept(rule: Rule, output: OutputSchema, names: Sequence[str], *, still_a_key: bool = False) -> None:
    """Refuse a rule that would merge keys, or make a row's key unknown."""
    if output.row_is_key and rule.do in ("encrypt", "function"):
        raise output.rule_error(
            rule,
            "rule would destroy the key: without a key, rows are identified by all their values, which must be equal "
            "each time",
            "Give the table a primary key, or use `hmac`.",
        )
    hit = [name for name in names if name in output.key]
    if hit and not still_a_key:
        raise output.rule_error(
            rule,
            "rule would destroy the table's key",
            "Leave the key's columns out of the rule, or use `sha256`, `hmac` or `rename`, which keep a key unique.",
            column=hit[0],
        )
    if hit and rule.when is not None and not set(Expression(rule.when).columns) <= set(output.key):
        raise output.rule_error(
            rule,
            "rule on the key depends on other columns: old keys are sent without the rest of the row",
            "Leave `when` out, or use only the key's columns in it.",
            column=hit[0],
        )


_TYPE_CHANGING_RULES = ("mask", "redact", "sha256", "hmac", "encrypt")


def _make_value_step(rule: Any, output: OutputSchema, keys: Keyring) -> RuleStep | None:
    names = named_columns(rule, output, rule.columns)
    if not names:
        return None
    require_key_kept(
        rule, output, names, still_a_key=rule.do in ("sha256", "hmac") or _keeps_values_distinct(rule, output, names)
    )
    for name in names:
        kind = output.columns[name].type
        masks_binary = pa.types.is_binary(kind) and rule.do == "mask"
        if (
            rule.do in _TYPE_CHANGING_RULES
            and rule.do != "redact"
            and (masks_binary or not column_work.is_textual(kind))
        ):
            raise output.rule_error(
                rule,
                f"`{rule.do}` cannot be used on a column of {kind}",
                "Use `redact`, `null` or `exclude`.",
                column=name,
            )
    types_after = {name: _type_after(rule, output, name) for name in names}
    transform = _worker(rule, output, keys)
    for name in names:
        output.columns[name].mark(rule, types_after[name])
    return ValueStep(
        rule,
        when_expression(rule),
        columns=names,
        transform=transform,
        types_after=types_after,
        ignores_value=rule.do in ("redact", "null"),
    )


def _keeps_values_distinct(rule: Rule, output: OutputSchema, names: Sequence[str]) -> bool:
    """Return whether a cast keeps different values different."""
    if not isinstance(rule, rules.Cast):
        return False
    to = parse_type(rule.to)
    exact = (pa.int16(), pa.int32(), pa.int64())

    def stays_distinct(kind: pa.DataType) -> bool:
        wider = kind in exact and to in exact and exact.index(kind) <= exact.index(to)
        printed = pa.types.is_string(to) and (kind in exact or pa.types.is_date(kind) or pa.types.is_decimal(kind))
        return kind == to or wider or printed

    return all(stays_distinct(output.columns[name].type) for name in names)


def _type_after(rule: Rule, output: OutputSchema, name: str) -> pa.DataType:
    kind = output.columns[name].type
    match rule:
        case rules.Mask() | rules.Redact() | rules.Sha256() | rules.Hmac():
            return pa.string()
        case rules.Encrypt():
            return pa.binary()
        case rules.TruncateValues() if not (pa.types.is_string(kind) or pa.types.is_binary(kind)):
            raise output.rule_error(
                rule, f"`truncate` cannot be used on a column of {kind}", "Use it on strings and binaries.", column=name
            )
        case rules.Decrypt() if not pa.types.is_binary(kind):
            raise output.rule_error(
                rule, f"column of {kind} cannot be decrypted", "Decrypt binary columns only.", column=name
            )
        case rules.Cast() | rules.Decrypt():
            to = parse_type(rule.to)
            probe = pa.string() if isinstance(rule, rules.Decrypt) else kind
            try:
                pa.array([], probe).cast(to)
            except pa.ArrowException:
                message = f"column of {probe} cannot be cast to {to}"
                raise output.rule_error(rule, message, "Name another type.", column=name) from None
            return to
    return kind


def _worker(rule: Rule, output: OutputSchema, keys: Keyring) -> Callable[[str, pa.Array], ColumnResult]:
    table = output.source.table
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
            return lambda name, values: _decrypt(rule, table, name, values, keys)
        case rules.Cast():
            to = parse_type(rule.to)
            return lambda _, values: column_work.cast(values, to)
    raise AssertionError("a rule without an implementation")


def _decrypt(rule: rules.Decrypt, table: TableId, name: str, values: pa.Array, keys: Keyring) -> ColumnResult:
    tables = encryption.possible_tables(rule.of_table) if rule.of_table else (table,)
    bounds = encryption.accepted_associated_data(tables, rule.of_column or name)
    plain, faults = encryption.decrypt(values, lambda key: keys.cipher(key) if key in keys.ids else None, bounds)
    to = parse_type(rule.to)
    if pa.types.is_binary(to):
        return plain, faults
    text, text_faults = column_work.cast(plain, pa.string(), "the decrypted value")
    result, cast_faults = column_work.cast(text, to, "the decrypted value")
    return result, (*faults, *text_faults, *cast_faults)


def _make_filter_step(rule: Any, output: OutputSchema, _: Keyring) -> RuleStep | None:
    where = Expression(rule.where)
    if set(named_columns(rule, output, where.columns)) != set(where.columns):
        return None
    if not pa.types.is_boolean(where.result_type(output.types)):
        raise output.rule_error(
            rule, "`where` is not a condition", "Write a comparison, for example `country == 'DE'`."
        )
    output.mark_rows(rule)
    return FilterStep(rule, when_expression(rule), where=where, key=output.key)


def _make_columns_step(rule: Any, output: OutputSchema, _: Keyring) -> RuleStep | None:
    if isinstance(rule, rules.Rename):
        names = named_columns(rule, output, list(rule.columns))
        renamed = {name: rule.columns[name] for name in names}
        if not renamed:
            return None
        after = [renamed.get(name, name) for name in output.columns]
        if len(set(after)) < len(after):
            duplicate = next(name for name in after if after.count(name) > 1)
            raise output.rule_error(
                rule, "rule gives two columns the same name", "Give each its own name.", column=duplicate
            )
        output.columns = dict(zip(after, output.columns.values(), strict=True))
        output.key = tuple(renamed.get(name, name) for name in output.key)
        return ColumnsStep(rule, None, names=renamed)

    def matches_rule(name: str) -> bool:
        return any(fnmatch.fnmatchcase(name, glob) for glob in rule.columns)

    if isinstance(rule, rules.Exclude) and rule.exact_tables:
        named_columns(rule, output, [glob for glob in rule.columns if not any(sign in glob for sign in "*?[")])
    dropped = tuple(name for name in output.columns if matches_rule(name) == isinstance(rule, rules.Exclude))
    if not dropped:
        # An include of all current columns takes effect once the table has another one.
        return ColumnsStep(rule, None) if isinstance(rule, rules.Include) else None
    require_key_kept(rule, output, dropped)
    if len(dropped) == len(output.columns):
        raise output.rule_error(rule, "rule leaves no column", "Name the columns to keep.")
    output.columns = {name: made for name, made in output.columns.items() if name not in dropped}
    # Without a mark, a lake table would keep the data of a column that the source still has.
    output.mark_rows(rule)
    return ColumnsStep(rule, None, dropped=dropped)


StepFactory = Callable[[Any, OutputSchema, Keyring], RuleStep | None]
"""A function that makes a rule's step for one table.

Its arguments are the rule, the output schema so far, and the keys. It returns None if the rule does not apply to the
table.
"""
STEP_FACTORIES: dict[str, StepFactory] = {
    **dict.fromkeys(
        ("mask", "redact", "null", "truncate", "sha256", "hmac", "encrypt", "decrypt", "cast"), _make_value_step
    ),
    "filter": _make_filter_step, "include": _make_columns_step, "exclude": _make_columns_step,
    "rename": _make_columns_step,
}  # fmt: skip
