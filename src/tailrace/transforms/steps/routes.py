"""Rules that send rows to other tables, or make plain rows of changes.

A row goes to one table. A change that moves a row to another table is a delete in the first and an insert in the
second, as far as the old row was sent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.model import change
from tailrace.model.change import Operation
from tailrace.model.schema import Identity, TableId
from tailrace.transforms.expression import Expression
from tailrace.transforms.output_schema import OutputColumn, OutputSchema
from tailrace.transforms.output_tables import target_table
from tailrace.transforms.row_images import Image, RowImages
from tailrace.transforms.secrets import Keyring
from tailrace.transforms.steps.row_filter import ConditionResult, keep_wanted_rows
from tailrace.transforms.steps.rule_steps import (
    RoutedRows,
    RuleStep,
    StepFactory,
    named_columns,
    null_rows,
    when_expression,
)
from tailrace.transforms.transform_errors import RowFault, faulty_rows

Mask = npt.NDArray[np.bool_]
TABLES_MAX = 1_000
"""Most tables that one batch of an outbox may have messages for."""
NOWHERE = TableId("", "")
_METADATA = {one.name: one.type for one in change.REQUIRED}


@dataclass
class RouteStep(RuleStep):
    """Sends rows for which `when` is true to another table."""

    to: TableId = NOWHERE
    key: tuple[str, ...] = ()

    def route(self, lot: RoutedRows) -> list[RoutedRows]:
        table, rows = lot
        assert self.when is not None, "set when the step is made"
        self.count_rows(int(self.when.evaluate_condition(rows.after.columns, rows.count)[0].sum()))
        sent, columns = rows.copy(), self.when.columns
        keep_wanted_rows(sent, _condition_is(self.when, sent, is_true=True), columns, self.key, self.rule.name)
        keep_wanted_rows(rows, _condition_is(self.when, rows, is_true=False), columns, self.key, self.rule.name)
        # An undecidable row has failed and is in both: either table may have its old row.
        return [(table, rows), (self.to, sent)]


def _condition_is(when: Expression, rows: RowImages, *, is_true: bool) -> Callable[[Image], ConditionResult]:
    def condition(image: Image) -> ConditionResult:
        matching, faults = when.evaluate_condition(image.columns, rows.count)
        return matching == is_true, faults

    return condition


@dataclass
class OutboxStep(RuleStep):
    """Sends each inserted row to the table that its type names; others are not messages."""

    template: str = ""
    column: str = ""
    source: TableId = NOWHERE

    def route(self, lot: RoutedRows) -> list[RoutedRows]:
        _, rows = lot
        new = rows.is_op(Operation.INSERT) | rows.is_op(Operation.READ)
        if (moved := rows.image(change.MOVED_FROM)) is not None:  # an old message under another key
            new = new & ~moved.valid if moved.valid is not None else np.zeros(rows.count, np.bool_)
        rows.take(new)
        rows.images = rows.images[:1]
        chosen, doubts = self.evaluate_when(rows, rows.after)
        if chosen is not None:
            rows.fail(self.rule.name, self.column, *doubts)
            rows.take(chosen | rows.failed_rows)
        type_column = rows.after.columns[self.column]
        named = np.asarray(pc.fill_null(pc.not_equal(type_column, ""), False).to_numpy(zero_copy_only=False), np.bool_)
        rows.fail(self.rule.name, self.column, RowFault(reason="the row names no type", rows=~named))
        types = [type_ for type_ in pc.unique(type_column.drop_null()).to_pylist() if type_]
        if len(types) > TABLES_MAX:
            reason = f"one batch has messages of more than {TABLES_MAX:,} types"
            rows.fail(self.rule.name, self.column, RowFault(reason=reason, rows=np.ones(rows.count, np.bool_)))
            return [lot]
        routed: list[RoutedRows] = []
        for type_ in types:
            messages = rows.copy()
            has_type = pc.fill_null(pc.equal(type_column, type_), False)
            messages.take(np.asarray(has_type.to_numpy(zero_copy_only=False), np.bool_))
            messages.drop(self.column)
            routed.append((target_table(self.template, self.source, type=type_), messages))
        rows.take(~named)
        rows.drop(self.column)
        return [*routed, lot] if rows.count else routed


@dataclass
class UnwrapStep(RuleStep):
    """Removes old rows, and drops or marks deletes.

    Rows for which `when` is not true stay as they were, with nulls in the new columns.
    """

    metadata: tuple[tuple[str, str], ...] = ()
    marker: str | None = None
    key: tuple[str, ...] = ()
    whole: bool = False
    """True if the source sends all values of a deleted row."""

    def apply(self, rows: RowImages) -> None:
        chosen, doubts = self.evaluate_when(rows, rows.after)
        rows.fail(self.rule.name, next(iter(rows.after.columns)), *doubts)
        applies = np.ones(rows.count, np.bool_) if chosen is None else chosen & ~faulty_rows(doubts, rows.count)
        deleted = rows.is_op(Operation.DELETE) & applies
        for source, name in self.metadata:
            self._add(rows, name, rows.metadata.get(source, pa.nulls(rows.count, _METADATA[source])), applies)
        if self.marker is not None:
            self._mark(rows, deleted, self.marker)
            self._add(rows, self.marker, pa.array(deleted), applies)
        if (before := rows.image(change.BEFORE)) is not None:
            before.valid = ~applies if before.valid is None else before.valid & ~applies
        if self.marker is None:
            rows.take(~deleted | rows.failed_rows)  # keeps failures of earlier rules, so that they are reported

    @staticmethod
    def _add(rows: RowImages, name: str, values: pa.Array, applies: Mask) -> None:
        rows.after.columns[name] = null_rows(values, ~applies)
        if (before := rows.image(change.BEFORE)) is not None:
            before.columns[name] = pa.nulls(rows.count, values.type)

    def _mark(self, rows: RowImages, deleted: Mask, marker: str) -> None:
        if not self.whole:  # only the key was sent: the other values stay as they are
            new_columns = {marker, *(name for _, name in self.metadata)}
            for name in rows.after.columns.keys() - set(self.key) - new_columns:
                rows.unsent[name] = rows.unsent.get(name, np.zeros(rows.count, np.bool_)) | deleted
        rows.metadata[change.OP] = pc.if_else(pa.array(deleted), Operation.UPDATE.value, rows.metadata[change.OP])


def _make_route_step(rule: Any, output: OutputSchema, _: Keyring) -> RuleStep | None:
    target, when = target_table(rule.to, output.source.table), when_expression(rule)
    if when is None:
        output.table = target
        return RuleStep(rule, None)
    output.mark_rows(rule)
    return RouteStep(rule, when, to=target, key=output.key)


def _make_outbox_step(rule: Any, output: OutputSchema, _: Keyring) -> RuleStep | None:
    if len(named_columns(rule, output, [rule.type_column, rule.key_column])) < 2:
        return None
    if not pa.types.is_string(output.columns[rule.type_column].type):
        raise output.rule_error(
            rule, "type column of messages is not a string", "Cast it in an earlier rule.", column=rule.type_column
        )
    if rule.type_column == rule.key_column:
        raise output.rule_error(
            rule, "type column and key column are the same", "Name two columns.", column=rule.key_column
        )
    del output.columns[rule.type_column]
    output.key = (rule.key_column,)
    if rule.when is not None:
        output.mark_rows(rule)
    return OutboxStep(
        rule, when_expression(rule), template=rule.to, column=rule.type_column, source=output.source.table
    )


def _make_unwrap_step(rule: Any, output: OutputSchema, _: Keyring) -> RuleStep | None:
    if output.row_is_key:
        raise output.rule_error(
            rule,
            "rule would destroy the key: without a key, rows are identified by their old values",
            "Give the table a primary key.",
        )
    _require_when_is_sent(rule, output)
    metadata = tuple(rule.metadata.items())
    marker = rule.marker if rule.deletes == "mark" else None
    for name, kind in [(name, _METADATA[source]) for source, name in metadata] + (
        [(marker, pa.bool_())] if marker else []
    ):
        if name in output.columns:
            raise output.rule_error(rule, "rule makes a column that exists already", "Use another name.", column=name)
        output.columns[name] = OutputColumn(kind, f"{kind}", None)
        output.columns[name].mark(rule)
    if marker is None:
        output.mark_rows(rule)
    whole = output.source.identity is Identity.FULL
    return UnwrapStep(rule, when_expression(rule), metadata=metadata, marker=marker, key=output.key, whole=whole)


def _require_when_is_sent(rule: Any, output: OutputSchema) -> None:
    """Refuse a `when` on columns that the source does not send of deleted rows."""
    when = when_expression(rule)
    unsent = [name for name in when.columns if name not in output.key] if when is not None else []
    if unsent and output.source.identity is Identity.KEY:
        raise output.rule_error(
            rule,
            "`when` uses a column that the source does not send of a deleted row",
            f"Use only the key's columns in it, or run ALTER TABLE {output.source.table} REPLICA IDENTITY FULL.",
            column=unsent[0],
        )


STEP_FACTORIES: dict[str, StepFactory] = {
    "route": _make_route_step,
    "outbox": _make_outbox_step,
    "unwrap": _make_unwrap_step,
}
