"""Rules that make columns of others, or of nothing: copied, set, computed, or by a function of the user's.

What is made of values that were not sent was not sent either, as none of them has changed. What would be made of one
that was and one that was not, nobody knows: the rule has failed at the row.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.model import change
from tailrace.transforms import rules
from tailrace.transforms.expression import Expression
from tailrace.transforms.output_schema import OutputColumn, OutputSchema
from tailrace.transforms.row_images import AFTER, Image, RowImages
from tailrace.transforms.secrets import Keyring
from tailrace.transforms.steps import column_values as column_work
from tailrace.transforms.steps.column_values import parse_type
from tailrace.transforms.steps.rule_steps import (
    RuleStep,
    StepFactory,
    named_columns,
    null_rows,
    require_key_kept,
    when_expression,
)
from tailrace.transforms.transform_errors import (
    RowFaults,
    RuleValueError,
    expression_error_text,
    faulty_rows,
    restrict_faults,
)

Mask = npt.NDArray[np.bool_]
DerivedColumns = tuple[dict[str, pa.Array], RowFaults]
"""The columns that were made, and what failed; those rows are null in all of them."""


@dataclass
class DerivedStep(RuleStep):
    """Columns made of others, or of nothing."""

    inputs: tuple[str, ...] = ()
    outputs: dict[str, pa.DataType] | None = None
    compute: Callable[[dict[str, pa.Array], int], DerivedColumns] = lambda found, _: (found, ())

    def apply(self, rows: RowImages) -> None:
        assert self.outputs is not None, "made ready"
        for image in rows.images:
            if image.which != change.MOVED_FROM:  # a key is never derived
                self._apply_to(rows, image, self.outputs)

    def _apply_to(self, rows: RowImages, image: Image, outputs: dict[str, pa.DataType]) -> None:
        chosen, doubts = self.evaluate_when(rows, image)
        unknown, unsent = rows.unknown_rows(image, self.inputs), self._unsent(rows, image)
        made, faults = self.compute({name: image.columns[name] for name in self.inputs}, rows.count)
        applies = np.ones(rows.count, np.bool_) if chosen is None else chosen
        doubtful, lacking = faulty_rows(doubts, rows.count), faulty_rows(unknown, rows.count)
        first = next(iter(outputs))
        rows.fail(self.rule.name, first, *doubts)
        applies = applies & ~doubtful
        rows.fail(self.rule.name, first, *restrict_faults(unknown, ~unsent & applies))
        there = applies if image.valid is None else applies & image.valid
        rows.fail(self.rule.name, first, *restrict_faults(faults, there & ~lacking))
        for name, kind in outputs.items():
            before = image.columns.get(name)
            values = null_rows(made[name], lacking)
            if not applies.all():
                values = pc.if_else(pa.array(applies), values, pa.nulls(rows.count, kind) if before is None else before)
            values = null_rows(values, doubtful)
            image.columns[name] = values
            if image.which == AFTER:
                self._note(rows, name, applies, unsent)
            if texts := rows.unfit.pop((image.which, name), None):
                kept = {row: text for row, text in texts.items() if not applies[row]}
                rows.unfit |= {(image.which, name): kept} if kept else {}

    def _unsent(self, rows: RowImages, image: Image) -> Mask:
        """The rows of which no input was sent: then none has changed, and what is made of them has not."""
        if image.which != AFTER or not self.inputs or not all(name in rows.unsent for name in self.inputs):
            return np.zeros(rows.count, np.bool_)
        none_sent: Mask = np.logical_and.reduce([rows.unsent[name] for name in self.inputs])
        return none_sent

    @staticmethod
    def _note(rows: RowImages, name: str, applies: Mask, unsent: Mask) -> None:
        absent = (rows.unsent.get(name, np.zeros(rows.count, np.bool_)) & ~applies) | (unsent & applies)
        rows.unsent.pop(name, None)
        if absent.any():
            rows.unsent[name] = absent


def _make_derived(rule: Any, shape: OutputSchema, _: Keyring) -> RuleStep | None:
    inputs: tuple[str, ...] = ()
    target = rule.to if isinstance(rule, rules.Copy) else rule.column
    before = shape.columns.get(target)
    work: Callable[[dict[str, pa.Array], int], DerivedColumns]
    if isinstance(rule, rules.Copy):
        inputs = named_columns(rule, shape, [rule.column])
        if not inputs:
            return None
        kind, column = shape.columns[rule.column].type, rule.column
        work = lambda found, _: ({target: found[column]}, ())  # noqa: E731 - one of four
    elif isinstance(rule, rules.Set):
        kind = parse_type(rule.type) if rule.type else before.type if before else None
        value = column_work.to_scalar(rule.value, kind)
        if pa.types.is_null(value.type):
            raise shape.rule_error(rule, "a column that is made needs a type", "Name it, for example `type: string`.")
        kind = value.type
        work = lambda _, count: ({target: column_work.repeat_value(value, count)}, ())  # noqa: E731
    else:
        expression = Expression(rule.expression)
        inputs = named_columns(rule, shape, expression.columns)
        if set(inputs) != set(expression.columns):
            return None
        own = expression.result_type(shape.types)
        if pa.types.is_decimal256(own) and not rule.type:
            hint = "Name its type, for example `type: decimal(38, 10)`: a result that it cannot hold is a failure."
            raise shape.rule_error(rule, "a result may have more than 38 digits", hint)
        kind = parse_type(rule.type) if rule.type else own
        work = lambda found, count: _computed(expression, found, count, target, kind)  # noqa: E731
    require_key_kept(rule, shape, [target])
    if before is not None and before.type != kind and rule.when is not None:
        raise shape.rule_error(rule, "a rule with `when` gives a column two types", "Leave `when` or `type` out.")
    shape.columns[target] = OutputColumn(kind, f"{kind}", None if before is None else before.source_index)
    shape.columns[target].mark(rule)
    return DerivedStep(rule, when_expression(rule), inputs=inputs, outputs={target: kind}, compute=work)


def _computed(
    expression: Expression, found: dict[str, pa.Array], count: int, target: str, kind: pa.DataType
) -> DerivedColumns:
    together = pa.StructArray.from_arrays(list(found.values()), names=list(found)) if found else pa.nulls(count)

    def work(some: pa.Array) -> pa.Array:
        parts = {name: some.field(name) for name in found}
        made = expression.evaluate(parts, len(some))
        try:
            return column_work.cast_checked(made, kind)
        except pa.ArrowException:
            raise RuleValueError(f"its result does not fit {column_work.type_name(kind)}") from None

    values, faults = column_work.try_by_halves(work, together, kind, expression_error_text)
    return {target: values}, faults


def _make_function(rule: Any, shape: OutputSchema, _: Keyring) -> RuleStep | None:
    inputs = named_columns(rule, shape, rule.columns)
    if set(inputs) != set(rule.columns):
        return None
    require_key_kept(rule, shape, inputs)
    function = _imported(rule, shape)
    fields = pa.schema([pa.field(name, shape.columns[name].type) for name in inputs])
    try:
        made = function(pa.RecordBatch.from_pylist([], fields))
    except Exception as error:  # the user's own code
        raise shape.rule_error(
            rule,
            f"a function failed with no rows: {type(error).__name__}",
            "It is called with none, to learn which columns it gives.",
        ) from error
    if not isinstance(made, pa.RecordBatch):
        raise shape.rule_error(rule, "a function gave no record batch", "It must return a `pyarrow.RecordBatch`.")
    outputs = {one.name: one.type for one in made.schema}
    require_key_kept(rule, shape, list(outputs))
    for name in [name for name in inputs if name not in outputs]:
        del shape.columns[name]
    for name, kind in outputs.items():
        known = shape.columns.get(name)
        shape.columns[name] = OutputColumn(kind, f"{kind}", known.source_index if known else None)
        shape.columns[name].mark(rule)
    gone = tuple(name for name in inputs if name not in outputs)
    if gone and rule.when is not None:
        raise shape.rule_error(rule, "a function with `when` must return the columns it was given", "Leave `when` out.")
    return FunctionStep(
        rule,
        when_expression(rule),
        inputs=inputs,
        outputs=outputs,
        compute=_FunctionCall(function, fields, made.schema),
        dropped=gone,
    )


@dataclass
class FunctionStep(DerivedStep):
    """Columns that a function of the user's makes of others; those that it does not give back go."""

    dropped: tuple[str, ...] = ()

    def apply(self, rows: RowImages) -> None:
        super().apply(rows)
        for name in self.dropped:
            rows.drop(name)


def _failed(error: Exception) -> str:
    return f"the function's columns cannot be used ({type(error).__name__})"


@dataclass
class _FunctionCall:
    function: Callable[[pa.RecordBatch], Any]
    fields: pa.Schema
    made: pa.Schema

    def __call__(self, found: dict[str, pa.Array], count: int) -> DerivedColumns:
        together = pa.StructArray.from_arrays([found[name] for name in self.fields.names], fields=list(self.fields))
        kind = pa.struct(list(self.made))
        values, faults = column_work.try_by_halves(self._call, together, kind, _failed)
        return dict(zip(self.made.names, values.flatten(), strict=True)), faults

    def _call(self, some: pa.StructArray) -> pa.Array:
        try:
            made = self.function(pa.RecordBatch.from_struct_array(some))
            whole = isinstance(made, pa.RecordBatch) and made.num_rows == len(some) and made.schema.equals(self.made)
        except Exception as error:  # the user's own code: its words may hold values
            raise RuleValueError(f"the function raised {type(error).__name__}", error) from None
        if not whole:
            raise RuleValueError(
                "the function gave other columns than with no rows, or not as many rows as it was given"
            )
        return made.to_struct_array()


def _imported(rule: rules.Function, shape: OutputSchema) -> Callable[[pa.RecordBatch], Any]:
    if callable(rule.function):
        return rule.function
    module, _, name = rule.function.partition(":")
    try:
        return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]  # whatever it is
    except (ImportError, AttributeError) as error:
        raise shape.rule_error(
            rule, "a function cannot be found", "Is the module on Python's path (PYTHONPATH)?", function=rule.function
        ) from error


STEP_FACTORIES: dict[str, StepFactory] = {
    "copy": _make_derived, "set": _make_derived, "compute": _make_derived, "function": _make_function,
}  # fmt: skip
