"""Rules that add columns: copied, set, computed, or made by a user function.

A column made only of unsent values is unsent too, as none of them has changed. A column made of sent and unsent values
is unknown: the rule fails at the row.
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
"""The new columns, and the faults; faulty rows are null in all columns."""


@dataclass
class DerivedStep(RuleStep):
    """Makes columns of others, or of nothing."""

    inputs: tuple[str, ...] = ()
    outputs: dict[str, pa.DataType] | None = None
    compute: Callable[[dict[str, pa.Array], int], DerivedColumns] = lambda found, _: (found, ())

    def apply(self, rows: RowImages) -> None:
        assert self.outputs is not None, "set when the step is made"
        for image in rows.images:
            if image.which != change.MOVED_FROM:  # a key is never derived
                self._apply_to(rows, image, self.outputs)

    def _apply_to(self, rows: RowImages, image: Image, outputs: dict[str, pa.DataType]) -> None:
        chosen, doubts = self.evaluate_when(rows, image)
        unknown, unsent = rows.unknown_rows(image, self.inputs), self._unsent_rows(rows, image)
        results, faults = self.compute({name: image.columns[name] for name in self.inputs}, rows.count)
        applies = np.ones(rows.count, np.bool_) if chosen is None else chosen
        doubtful, lacking = faulty_rows(doubts, rows.count), faulty_rows(unknown, rows.count)
        first = next(iter(outputs))
        rows.fail(self.rule.name, first, *doubts)
        applies = applies & ~doubtful
        rows.fail(self.rule.name, first, *restrict_faults(unknown, ~unsent & applies))
        relevant = applies if image.valid is None else applies & image.valid
        rows.fail(self.rule.name, first, *restrict_faults(faults, relevant & ~lacking))
        for name, kind in outputs.items():
            before = image.columns.get(name)
            values = null_rows(results[name], lacking)
            if not applies.all():
                values = pc.if_else(pa.array(applies), values, pa.nulls(rows.count, kind) if before is None else before)
            values = null_rows(values, doubtful)
            image.columns[name] = values
            if image.which == AFTER:
                self._note_unsent(rows, name, applies, unsent)
            if texts := rows.unfit.pop((image.which, name), None):
                kept = {row: text for row, text in texts.items() if not applies[row]}
                rows.unfit |= {(image.which, name): kept} if kept else {}

    def _unsent_rows(self, rows: RowImages, image: Image) -> Mask:
        """Return the rows of which no input was sent.

        None of the inputs has changed then, and so the result has not.
        """
        if image.which != AFTER or not self.inputs or not all(name in rows.unsent for name in self.inputs):
            return np.zeros(rows.count, np.bool_)
        none_sent: Mask = np.logical_and.reduce([rows.unsent[name] for name in self.inputs])
        return none_sent

    @staticmethod
    def _note_unsent(rows: RowImages, name: str, applies: Mask, unsent: Mask) -> None:
        unsent_rows = (rows.unsent.get(name, np.zeros(rows.count, np.bool_)) & ~applies) | (unsent & applies)
        rows.unsent.pop(name, None)
        if unsent_rows.any():
            rows.unsent[name] = unsent_rows


def _make_derived_step(rule: Any, output: OutputSchema, _: Keyring) -> RuleStep | None:
    inputs: tuple[str, ...] = ()
    target = rule.to if isinstance(rule, rules.Copy) else rule.column
    before = output.columns.get(target)
    compute: Callable[[dict[str, pa.Array], int], DerivedColumns]
    if isinstance(rule, rules.Copy):
        inputs = named_columns(rule, output, [rule.column])
        if not inputs:
            return None
        kind, column = output.columns[rule.column].type, rule.column
        compute = lambda columns, _: ({target: columns[column]}, ())  # noqa: E731 - one of four
    elif isinstance(rule, rules.Set):
        kind = parse_type(rule.type) if rule.type else before.type if before else None
        value = column_work.to_scalar(rule.value, kind)
        if pa.types.is_null(value.type):
            raise output.rule_error(rule, "new column has no type", "Name it, for example `type: string`.")
        kind = value.type
        compute = lambda _, count: ({target: column_work.repeat_value(value, count)}, ())  # noqa: E731
    else:
        expression = Expression(rule.expression)
        inputs = named_columns(rule, output, expression.columns)
        if set(inputs) != set(expression.columns):
            return None
        result_type = expression.result_type(output.types)
        if pa.types.is_decimal256(result_type) and not rule.type:
            hint = "Name its type, for example `type: decimal(38, 10)`: a result that does not fit is then a failure."
            raise output.rule_error(rule, "result may have more than 38 digits", hint)
        kind = parse_type(rule.type) if rule.type else result_type
        compute = lambda columns, count: _compute(expression, columns, count, target, kind)  # noqa: E731
    require_key_kept(rule, output, [target])
    if before is not None and before.type != kind and rule.when is not None:
        raise output.rule_error(rule, "rule with `when` gives a column two types", "Leave `when` or `type` out.")
    output.columns[target] = OutputColumn(kind, f"{kind}", None if before is None else before.source_index)
    output.columns[target].mark(rule)
    return DerivedStep(rule, when_expression(rule), inputs=inputs, outputs={target: kind}, compute=compute)


def _compute(
    expression: Expression, columns: dict[str, pa.Array], count: int, target: str, kind: pa.DataType
) -> DerivedColumns:
    together = pa.StructArray.from_arrays(list(columns.values()), names=list(columns)) if columns else pa.nulls(count)

    def work(part: pa.Array) -> pa.Array:
        parts = {name: part.field(name) for name in columns}
        result = expression.evaluate(parts, len(part))
        try:
            return column_work.cast_checked(result, kind)
        except pa.ArrowException:
            raise RuleValueError(f"its result does not fit {column_work.type_name(kind)}") from None

    values, faults = column_work.try_by_halves(work, together, kind, expression_error_text)
    return {target: values}, faults


def _make_function_step(rule: Any, output: OutputSchema, _: Keyring) -> RuleStep | None:
    inputs = named_columns(rule, output, rule.columns)
    if set(inputs) != set(rule.columns):
        return None
    require_key_kept(rule, output, inputs)
    function = _import_function(rule, output)
    fields = pa.schema([pa.field(name, output.columns[name].type) for name in inputs])
    try:
        result = function(pa.RecordBatch.from_pylist([], fields))
    except Exception as error:  # the user's own code
        raise output.rule_error(
            rule,
            f"function failed with no rows: {type(error).__name__}",
            "Make it accept an empty record batch: it is called with one to learn which columns it returns.",
        ) from error
    if not isinstance(result, pa.RecordBatch):
        raise output.rule_error(rule, "function did not return a record batch", "Return a `pyarrow.RecordBatch`.")
    outputs = {one.name: one.type for one in result.schema}
    require_key_kept(rule, output, list(outputs))
    for name in [name for name in inputs if name not in outputs]:
        del output.columns[name]
    for name, kind in outputs.items():
        known = output.columns.get(name)
        output.columns[name] = OutputColumn(kind, f"{kind}", known.source_index if known else None)
        output.columns[name].mark(rule)
    dropped = tuple(name for name in inputs if name not in outputs)
    if dropped and rule.when is not None:
        raise output.rule_error(
            rule, "function with `when` does not return the columns it was given", "Leave `when` out."
        )
    return FunctionStep(
        rule,
        when_expression(rule),
        inputs=inputs,
        outputs=outputs,
        compute=_FunctionCall(function, fields, result.schema),
        dropped=dropped,
    )


@dataclass
class FunctionStep(DerivedStep):
    """Makes columns with a user function; inputs that it does not return are dropped."""

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

    def __call__(self, columns: dict[str, pa.Array], count: int) -> DerivedColumns:
        together = pa.StructArray.from_arrays([columns[name] for name in self.fields.names], fields=list(self.fields))
        kind = pa.struct(list(self.made))
        values, faults = column_work.try_by_halves(self._call, together, kind, _failed)
        return dict(zip(self.made.names, values.flatten(), strict=True)), faults

    def _call(self, part: pa.StructArray) -> pa.Array:
        try:
            result = self.function(pa.RecordBatch.from_struct_array(part))
            whole = (
                isinstance(result, pa.RecordBatch) and result.num_rows == len(part) and result.schema.equals(self.made)
            )
        except Exception as error:  # the user's own code: its message may quote values
            raise RuleValueError(f"the function raised {type(error).__name__}", error) from None
        if not whole:
            raise RuleValueError("the function returned other columns than with no rows, or another number of rows")
        return result.to_struct_array()


def _import_function(rule: rules.Function, output: OutputSchema) -> Callable[[pa.RecordBatch], Any]:
    if callable(rule.function):
        return rule.function
    module, _, name = rule.function.partition(":")
    try:
        return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]  # any object
    except (ImportError, AttributeError) as error:
        raise output.rule_error(
            rule, "function cannot be found", "Put its module on Python's path (PYTHONPATH).", function=rule.function
        ) from error


STEP_FACTORIES: dict[str, StepFactory] = {
    "copy": _make_derived_step, "set": _make_derived_step, "compute": _make_derived_step,
    "function": _make_function_step,
}  # fmt: skip
