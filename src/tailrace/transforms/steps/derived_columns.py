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
from tailrace.transforms.output_schema import Made, Shape
from tailrace.transforms.row_images import AFTER, Image, Rows
from tailrace.transforms.secrets import Keyring
from tailrace.transforms.steps import column_values as column_work
from tailrace.transforms.steps.column_values import type_named
from tailrace.transforms.steps.rule_steps import Maker, Step, condition, keep_key, named, without
from tailrace.transforms.transform_errors import Failed, Faults, all_of, only, trouble

Mask = npt.NDArray[np.bool_]
Derived = tuple[dict[str, pa.Array], Faults]
"""The columns that were made, and what failed; those rows are null in all of them."""


@dataclass
class DerivedStep(Step):
    """Columns made of others, or of nothing."""

    inputs: tuple[str, ...] = ()
    outputs: dict[str, pa.DataType] | None = None
    work: Callable[[dict[str, pa.Array], int], Derived] = lambda found, _: (found, ())

    def apply(self, rows: Rows) -> None:
        assert self.outputs is not None, "made ready"
        for image in rows.images:
            if image.which != change.MOVED_FROM:  # a key is never derived
                self._apply_to(rows, image, self.outputs)

    def _apply_to(self, rows: Rows, image: Image, outputs: dict[str, pa.DataType]) -> None:
        chosen, doubts = self.decide(rows, image)
        unknown, unsent = rows.unknown(image, self.inputs), self._unsent(rows, image)
        made, faults = self.work({name: image.columns[name] for name in self.inputs}, rows.count)
        applies = np.ones(rows.count, np.bool_) if chosen is None else chosen
        doubtful, lacking = all_of(doubts, rows.count), all_of(unknown, rows.count)
        first = next(iter(outputs))
        rows.fail(self.rule.name, first, *doubts)
        applies = applies & ~doubtful
        rows.fail(self.rule.name, first, *only(unknown, ~unsent & applies))
        there = applies if image.valid is None else applies & image.valid
        rows.fail(self.rule.name, first, *only(faults, there & ~lacking))
        for name, kind in outputs.items():
            before = image.columns.get(name)
            values = without(made[name], lacking)
            if not applies.all():
                values = pc.if_else(pa.array(applies), values, pa.nulls(rows.count, kind) if before is None else before)
            values = without(values, doubtful)
            image.columns[name] = values
            if image.which == AFTER:
                self._note(rows, name, applies, unsent)
            if texts := rows.unfit.pop((image.which, name), None):
                kept = {row: text for row, text in texts.items() if not applies[row]}
                rows.unfit |= {(image.which, name): kept} if kept else {}

    def _unsent(self, rows: Rows, image: Image) -> Mask:
        """The rows of which no input was sent: then none has changed, and what is made of them has not."""
        if image.which != AFTER or not self.inputs or not all(name in rows.absent for name in self.inputs):
            return np.zeros(rows.count, np.bool_)
        none_sent: Mask = np.logical_and.reduce([rows.absent[name] for name in self.inputs])
        return none_sent

    @staticmethod
    def _note(rows: Rows, name: str, applies: Mask, unsent: Mask) -> None:
        absent = (rows.absent.get(name, np.zeros(rows.count, np.bool_)) & ~applies) | (unsent & applies)
        rows.absent.pop(name, None)
        if absent.any():
            rows.absent[name] = absent


def _make_derived(rule: Any, shape: Shape, _: Keyring) -> Step | None:
    inputs: tuple[str, ...] = ()
    target = rule.to if isinstance(rule, rules.Copy) else rule.column
    before = shape.columns.get(target)
    work: Callable[[dict[str, pa.Array], int], Derived]
    if isinstance(rule, rules.Copy):
        inputs = named(rule, shape, [rule.column])
        if not inputs:
            return None
        kind, column = shape.columns[rule.column].type, rule.column
        work = lambda found, _: ({target: found[column]}, ())  # noqa: E731 - one of four
    elif isinstance(rule, rules.Set):
        kind = type_named(rule.type) if rule.type else before.type if before else None
        value = column_work.scalar(rule.value, kind)
        if pa.types.is_null(value.type):
            raise shape.refuse(rule, "a column that is made needs a type", "Name it, for example `type: string`.")
        kind = value.type
        work = lambda _, count: ({target: column_work.repeated(value, count)}, ())  # noqa: E731
    else:
        expression = Expression(rule.expression)
        inputs = named(rule, shape, expression.columns)
        if set(inputs) != set(expression.columns):
            return None
        own = expression.type(shape.types)
        if pa.types.is_decimal256(own) and not rule.type:
            hint = "Name its type, for example `type: decimal(38, 10)`: a result that it cannot hold is a failure."
            raise shape.refuse(rule, "a result may have more than 38 digits", hint)
        kind = type_named(rule.type) if rule.type else own
        work = lambda found, count: _computed(expression, found, count, target, kind)  # noqa: E731
    keep_key(rule, shape, [target])
    if before is not None and before.type != kind and rule.when is not None:
        raise shape.refuse(rule, "a rule with `when` gives a column two types", "Leave `when` or `type` out.")
    shape.columns[target] = Made(kind, f"{kind}", None if before is None else before.place)
    shape.columns[target].mark(rule)
    return DerivedStep(rule, condition(rule), inputs=inputs, outputs={target: kind}, work=work)


def _computed(
    expression: Expression, found: dict[str, pa.Array], count: int, target: str, kind: pa.DataType
) -> Derived:
    together = pa.StructArray.from_arrays(list(found.values()), names=list(found)) if found else pa.nulls(count)

    def work(some: pa.Array) -> pa.Array:
        parts = {name: some.field(name) for name in found}
        made = expression.evaluate(parts, len(some))
        try:
            return column_work.fitted(made, kind)
        except pa.ArrowException:
            raise Failed(f"its result does not fit {column_work.name_of(kind)}") from None

    values, faults = column_work.tried(work, together, kind, trouble)
    return {target: values}, faults


def _make_function(rule: Any, shape: Shape, _: Keyring) -> Step | None:
    inputs = named(rule, shape, rule.columns)
    if set(inputs) != set(rule.columns):
        return None
    keep_key(rule, shape, inputs)
    function = _imported(rule, shape)
    fields = pa.schema([pa.field(name, shape.columns[name].type) for name in inputs])
    try:
        made = function(pa.RecordBatch.from_pylist([], fields))
    except Exception as error:  # the user's own code
        raise shape.refuse(
            rule,
            f"a function failed with no rows: {type(error).__name__}",
            "It is called with none, to learn which columns it gives.",
        ) from error
    if not isinstance(made, pa.RecordBatch):
        raise shape.refuse(rule, "a function gave no record batch", "It must return a `pyarrow.RecordBatch`.")
    outputs = {one.name: one.type for one in made.schema}
    keep_key(rule, shape, list(outputs))
    for name in [name for name in inputs if name not in outputs]:
        del shape.columns[name]
    for name, kind in outputs.items():
        known = shape.columns.get(name)
        shape.columns[name] = Made(kind, f"{kind}", known.place if known else None)
        shape.columns[name].mark(rule)
    gone = tuple(name for name in inputs if name not in outputs)
    if gone and rule.when is not None:
        raise shape.refuse(rule, "a function with `when` must return the columns it was given", "Leave `when` out.")
    return FunctionStep(
        rule, condition(rule), inputs=inputs, outputs=outputs, work=_Called(function, fields, made.schema), gone=gone
    )


@dataclass
class FunctionStep(DerivedStep):
    """Columns that a function of the user's makes of others; those that it does not give back go."""

    gone: tuple[str, ...] = ()

    def apply(self, rows: Rows) -> None:
        super().apply(rows)
        for name in self.gone:
            rows.drop(name)


def _failed(error: Exception) -> str:
    return f"the function's columns cannot be used ({type(error).__name__})"


@dataclass
class _Called:
    function: Callable[[pa.RecordBatch], Any]
    fields: pa.Schema
    made: pa.Schema

    def __call__(self, found: dict[str, pa.Array], count: int) -> Derived:
        together = pa.StructArray.from_arrays([found[name] for name in self.fields.names], fields=list(self.fields))
        kind = pa.struct(list(self.made))
        values, faults = column_work.tried(self._call, together, kind, _failed)
        return dict(zip(self.made.names, values.flatten(), strict=True)), faults

    def _call(self, some: pa.StructArray) -> pa.Array:
        try:
            made = self.function(pa.RecordBatch.from_struct_array(some))
            whole = isinstance(made, pa.RecordBatch) and made.num_rows == len(some) and made.schema.equals(self.made)
        except Exception as error:  # the user's own code: its words may hold values
            raise Failed(f"the function raised {type(error).__name__}", error) from None
        if not whole:
            raise Failed("the function gave other columns than with no rows, or not as many rows as it was given")
        return made.to_struct_array()


def _imported(rule: rules.Function, shape: Shape) -> Callable[[pa.RecordBatch], Any]:
    if callable(rule.function):
        return rule.function
    module, _, name = rule.function.partition(":")
    try:
        return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]  # whatever it is
    except (ImportError, AttributeError) as error:
        raise shape.refuse(
            rule, "a function cannot be found", "Is the module on Python's path (PYTHONPATH)?", function=rule.function
        ) from error


MAKERS: dict[str, Maker] = {
    "copy": _make_derived, "set": _make_derived, "compute": _make_derived, "function": _make_function,
}  # fmt: skip
