"""Rules that send rows to other tables, or make plain rows of changes.

A row goes to one table. Where a change moves it from one to another it is a delete in the first and an insert in the
second, as far as the old row was told.
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
"""That one outbox may send messages of one batch to."""
NOWHERE = TableId("", "")
_METADATA = {one.name: one.type for one in change.REQUIRED}


@dataclass
class RouteStep(RuleStep):
    """Rows of which `when` is true go to another table."""

    to: TableId = NOWHERE
    key: tuple[str, ...] = ()

    def route(self, lot: RoutedRows) -> list[RoutedRows]:
        table, rows = lot
        assert self.when is not None, "made ready"
        self.count_rows(int(self.when.evaluate_condition(rows.after.columns, rows.count)[0].sum()))
        sent, columns = rows.copy(), self.when.columns
        keep_wanted_rows(sent, _true(self.when, sent, is_true=True), columns, self.key, self.rule.name)
        keep_wanted_rows(rows, _true(self.when, rows, is_true=False), columns, self.key, self.rule.name)
        # A row that cannot be judged has failed, and is in both: either table may have one of before.
        return [(table, rows), (self.to, sent)]


def _true(when: Expression, rows: RowImages, *, is_true: bool) -> Callable[[Image], ConditionResult]:
    def judged(image: Image) -> ConditionResult:
        found, odd = when.evaluate_condition(image.columns, rows.count)
        return found == is_true, odd

    return judged


@dataclass
class OutboxStep(RuleStep):
    """Each inserted row goes to the table that its type names. One of which `when` is not true is no message."""

    template: str = ""
    column: str = ""
    source: TableId = NOWHERE

    def route(self, lot: RoutedRows) -> list[RoutedRows]:
        _, rows = lot
        new = rows.is_op(Operation.INSERT) | rows.is_op(Operation.READ)
        if (moved := rows.image(change.MOVED_FROM)) is not None:  # a message of before, under another key
            new = new & ~moved.valid if moved.valid is not None else np.zeros(rows.count, np.bool_)
        rows.take(new)
        rows.images = rows.images[:1]
        chosen, doubts = self.evaluate_when(rows, rows.after)
        if chosen is not None:
            rows.fail(self.rule.name, self.column, *doubts)
            rows.take(chosen | rows.failed_rows)
        kinds = rows.after.columns[self.column]
        named = np.asarray(pc.fill_null(pc.not_equal(kinds, ""), False).to_numpy(zero_copy_only=False), np.bool_)
        rows.fail(self.rule.name, self.column, RowFault(reason="the row names no type", rows=~named))
        found = [kind for kind in pc.unique(kinds.drop_null()).to_pylist() if kind]
        if len(found) > TABLES_MAX:
            why = f"one batch has messages of more than {TABLES_MAX:,} types"
            rows.fail(self.rule.name, self.column, RowFault(reason=why, rows=np.ones(rows.count, np.bool_)))
            return [lot]
        lots: list[RoutedRows] = []
        for kind in found:
            some = rows.copy()
            is_it = pc.fill_null(pc.equal(kinds, kind), False)
            some.take(np.asarray(is_it.to_numpy(zero_copy_only=False), np.bool_))
            some.drop(self.column)
            lots.append((target_table(self.template, self.source, type=kind), some))
        rows.take(~named)
        rows.drop(self.column)
        return [*lots, lot] if rows.count else lots


@dataclass
class UnwrapStep(RuleStep):
    """Rows as they are, without old ones; deletes go, or are marked. Rows of which `when` is not true stay what they
    were, with nulls in the columns that are made."""

    metadata: tuple[tuple[str, str], ...] = ()
    marker: str | None = None
    key: tuple[str, ...] = ()
    whole: bool = False
    """Whether the source sends all of a row that goes."""

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
            rows.take(~deleted | rows.failed_rows)  # what a rule before has failed at must be heard of

    @staticmethod
    def _add(rows: RowImages, name: str, values: pa.Array, applies: Mask) -> None:
        rows.after.columns[name] = null_rows(values, ~applies)
        if (before := rows.image(change.BEFORE)) is not None:
            before.columns[name] = pa.nulls(rows.count, values.type)

    def _mark(self, rows: RowImages, deleted: Mask, marker: str) -> None:
        if not self.whole:  # only the key was told: the rest stays as it is
            made = {marker, *(name for _, name in self.metadata)}
            for name in rows.after.columns.keys() - set(self.key) - made:
                rows.unsent[name] = rows.unsent.get(name, np.zeros(rows.count, np.bool_)) | deleted
        rows.metadata[change.OP] = pc.if_else(pa.array(deleted), Operation.UPDATE.value, rows.metadata[change.OP])


def _make_route(rule: Any, shape: OutputSchema, _: Keyring) -> RuleStep | None:
    to, when = target_table(rule.to, shape.source.table), when_expression(rule)
    if when is None:
        shape.table = to
        return RuleStep(rule, None)
    shape.mark_rows(rule)
    return RouteStep(rule, when, to=to, key=shape.key)


def _make_outbox(rule: Any, shape: OutputSchema, _: Keyring) -> RuleStep | None:
    if len(named_columns(rule, shape, [rule.type_column, rule.key_column])) < 2:
        return None
    if not pa.types.is_string(shape.columns[rule.type_column].type):
        raise shape.rule_error(rule, "the type of a message must be a text", "Cast it before.", column=rule.type_column)
    if rule.type_column == rule.key_column:
        raise shape.rule_error(rule, "a message's type is not its key", "Name two columns.", column=rule.key_column)
    del shape.columns[rule.type_column]
    shape.key = (rule.key_column,)
    if rule.when is not None:
        shape.mark_rows(rule)
    return OutboxStep(rule, when_expression(rule), template=rule.to, column=rule.type_column, source=shape.source.table)


def _make_unwrap(rule: Any, shape: OutputSchema, _: Keyring) -> RuleStep | None:
    if shape.row_is_key:
        raise shape.rule_error(
            rule,
            "a rule would destroy the key: without one, rows are known by their old values",
            "Give the table a primary key.",
        )
    _refuse_untold(rule, shape)
    metadata = tuple(rule.metadata.items())
    marker = rule.marker if rule.deletes == "mark" else None
    for name, kind in [(name, _METADATA[of]) for of, name in metadata] + ([(marker, pa.bool_())] if marker else []):
        if name in shape.columns:
            raise shape.rule_error(rule, "a rule makes a column that is there already", "Name another.", column=name)
        shape.columns[name] = OutputColumn(kind, f"{kind}", None)
        shape.columns[name].mark(rule)
    if marker is None:
        shape.mark_rows(rule)
    whole = shape.source.identity is Identity.FULL
    return UnwrapStep(rule, when_expression(rule), metadata=metadata, marker=marker, key=shape.key, whole=whole)


def _refuse_untold(rule: Any, shape: OutputSchema) -> None:
    """Of a row that goes, `when` must be known: it decides whether that is said."""
    when = when_expression(rule)
    untold = [name for name in when.columns if name not in shape.key] if when is not None else []
    if untold and shape.source.identity is Identity.KEY:
        raise shape.rule_error(
            rule,
            "`when` looks at a column that the source does not send of a deleted row",
            f"Use the key's columns in it, or ALTER TABLE {shape.source.table} REPLICA IDENTITY FULL.",
            column=untold[0],
        )


STEP_FACTORIES: dict[str, StepFactory] = {"route": _make_route, "outbox": _make_outbox, "unwrap": _make_unwrap}
