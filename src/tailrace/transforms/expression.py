"""Expressions over columns: `country == 'DE' and amount > 10.50`, computed by Arrow.

The language is a small part of Python's, parsed and never run. Names are columns (`col("odd name")` for those that are
not Python names). It has literals, comparisons, `and or not in is`, arithmetic, `x if c else y` and the functions
below. Null is SQL's: a comparison with null is null, and null is not true. A part that a condition excludes for a row
is not computed for it: `n / d if d != 0 else 0` never divides by zero. A literal gets the type of the column it is
combined with. One with a fraction is a float only if the column is one, so decimals compare exactly.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.errors import ConfigError
from tailrace.transforms.transform_errors import RowFaults, expression_error_text, find_faults_by_halves

LENGTH_MAX = 4_096
NODES_MAX = 500
WHOLE_MAX = 2**31 - 1
"""Largest integer argument: more characters than a string has."""
EXPONENT_MAX = 400
"""Largest exponent of a literal.

No column type has larger numbers, and the digits would fill the memory.
"""
Columns = Mapping[str, pa.Array]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Literal:
    """A literal as written. Its type follows from what it is combined with."""

    value: bool | int | Decimal | str | None


Value = Any
"""An Arrow array, an Arrow scalar, or a `Literal`."""


def _to_strings(value: Value) -> Value:
    if isinstance(value, Literal):
        return pa.scalar(None if value.value is None else str(value.value), pa.string())
    return value if pa.types.is_string(value.type) else value.cast(pa.string())


def _plain(value: Value) -> Any:
    if not isinstance(value, Literal):
        raise _ExpressionError("an argument must be a literal")
    return value.value


def _integer(value: Value) -> int:
    value_ = _plain(value)
    if isinstance(value_, bool) or not isinstance(value_, int):
        raise _ExpressionError("an argument must be a whole number")
    if abs(value_) > WHOLE_MAX:
        raise _ExpressionError("an argument is too large")
    return value_


def _concat(*parts: Value) -> Value:
    return pc.binary_join_element_wise(*map(_to_strings, parts), "")


def _coalesce(first: Value, *others: Value) -> Value:
    return functools.reduce(lambda left, right: _compute(pc.coalesce, *_align(left, right)), others, first)


def _substring(text: Value, start: Value, length: Value) -> Value:
    begin = _integer(start)
    if begin < 1 or _integer(length) < 0:
        raise _ExpressionError("`substring` starts at 1 or more and has a length of 0 or more")
    return pc.utf8_slice_codeunits(_to_strings(text), begin - 1, begin - 1 + _integer(length))


FUNCTIONS: dict[str, tuple[int, int, Callable[..., Value]]] = {
    "upper": (1, 1, lambda text: pc.utf8_upper(_to_strings(text))),
    "lower": (1, 1, lambda text: pc.utf8_lower(_to_strings(text))),
    "trim": (1, 1, lambda text: pc.utf8_trim_whitespace(_to_strings(text))),
    "length": (1, 1, lambda text: pc.utf8_length(_to_strings(text))),
    "text": (1, 1, _to_strings),
    "concat": (1, 20, _concat),
    "coalesce": (2, 20, _coalesce),
    "substring": (3, 3, _substring),
    "replace": (
        3,
        3,
        lambda text, old, new: pc.replace_substring(_to_strings(text), str(_plain(old)), str(_plain(new))),
    ),
    "starts_with": (2, 2, lambda text, part: pc.starts_with(_to_strings(text), str(_plain(part)))),
    "ends_with": (2, 2, lambda text, part: pc.ends_with(_to_strings(text), str(_plain(part)))),
    "contains": (2, 2, lambda text, part: pc.match_substring(_to_strings(text), str(_plain(part)))),
    "matches": (2, 2, lambda text, regex: pc.match_substring_regex(_to_strings(text), str(_plain(regex)))),
    "abs": (1, 1, lambda number: pc.abs_checked(number)),
    "year": (1, 1, lambda moment: pc.year(moment)),
    "month": (1, 1, lambda moment: pc.month(moment)),
    "day": (1, 1, lambda moment: pc.day(moment)),
}
"""Functions by name: fewest and most arguments, and the implementation."""
_STRING_ARGUMENTS = ("replace", "starts_with", "ends_with", "contains", "matches")

_COMPARISONS: dict[type[ast.cmpop], Callable[[Value, Value], Value]] = {
    ast.Eq: pc.equal, ast.NotEq: pc.not_equal, ast.Lt: pc.less, ast.LtE: pc.less_equal, ast.Gt: pc.greater,
    ast.GtE: pc.greater_equal,
}  # fmt: skip
_ARITHMETIC: dict[type[ast.operator], Callable[[Value, Value], Value]] = {
    ast.Add: pc.add_checked, ast.Sub: pc.subtract_checked, ast.Mult: pc.multiply_checked, ast.Div: pc.divide_checked,
}  # fmt: skip


# Arrow scalars: for a Python value Arrow looks for pandas at every call.
_FALSE, _TRUE = pa.scalar(False), pa.scalar(True)


class _ExpressionError(Exception):
    """A problem with an expression; it becomes a ConfigError that names the expression."""


@dataclass(frozen=True)
class Expression:
    """A parsed expression. It holds only its text, so it can be pickled."""

    text: str

    def __post_init__(self) -> None:
        try:
            _check(_parse(self.text), self.text)
        except _ExpressionError as error:
            raise ConfigError(
                f"expression is invalid: {error}",
                expression=self.text,
                hint="Write one such as `country == 'DE' and amount > 10.50`; see docs/guides/transforms.md.",
            ) from None

    @functools.cached_property
    def columns(self) -> tuple[str, ...]:
        """The columns it names."""
        return _columns_in(_parse(self.text))

    def evaluate(self, columns: Columns, rows: int) -> pa.Array:
        """Return a value for each row."""
        result = _evaluate(_parse(self.text).body, columns, self.text)
        if isinstance(result, Literal):
            result = _typed(result)
        if isinstance(result, pa.Scalar):
            result = pa.array([result.as_py()] * 1, result.type).take(pa.array(np.zeros(rows, np.int64)))
        return result.combine_chunks() if isinstance(result, pa.ChunkedArray) else result

    def is_true(self, columns: Columns, rows: int) -> Mask:
        """Return the rows for which it is true; null is not."""
        result = self.evaluate(columns, rows)
        result = pc.fill_null(result, _FALSE) if result.null_count else result
        return np.asarray(result.to_numpy(zero_copy_only=False), np.bool_)

    def evaluate_condition(self, columns: Columns, rows: int) -> tuple[Mask, RowFaults]:
        """Return the rows for which it is true, and the faults.

        Faults are rows for which it cannot be computed, such as for an overflow. It is not true for those.
        """
        used = {name: columns[name] for name in self.columns}
        parts, faults = find_faults_by_halves(
            lambda begin, size: self.is_true({name: values.slice(begin, size) for name, values in used.items()}, size),
            0,
            rows,
            lambda size: np.zeros(size, np.bool_),
            expression_error_text,
        )
        return parts[0] if len(parts) == 1 else np.concatenate(parts), faults

    def result_type(self, types: Mapping[str, pa.DataType]) -> pa.DataType:
        """Return the result's type for columns of these types; refuse what cannot be computed."""
        missing = [name for name in self.columns if name not in types]
        if missing:
            raise ConfigError(
                f"expression names the column `{missing[0]}`, which the table does not have",
                expression=self.text,
                hint="Use the column names that the earlier rules have left.",
            )
        try:
            return self.evaluate({name: pa.array([], kind) for name, kind in types.items()}, 0).type
        except (_ExpressionError, pa.ArrowException, TypeError, ValueError) as error:
            # The text contains no value of a row: the columns are empty.
            reason = str(error).strip().partition("\n")[0][:200]
            raise ConfigError(
                f"expression cannot be computed for the table's columns: {reason}",
                expression=self.text,
                hint="Compare values of one type; `text(x)` makes a string of anything.",
            ) from None


def _columns_in(tree: ast.AST) -> tuple[str, ...]:
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    names = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and id(node) not in called]
    names += [_column_of(node) for node in ast.walk(tree) if isinstance(node, ast.Call) and _is_col(node)]
    return tuple(dict.fromkeys(names))


@functools.lru_cache(maxsize=1_000)
def _parse(text: str) -> ast.Expression:
    if len(text) > LENGTH_MAX:
        raise _ExpressionError("it is too long")
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise _ExpressionError("it is not an expression") from None
    if sum(1 for _ in ast.walk(tree)) > NODES_MAX:
        raise _ExpressionError("it is too long")
    return tree


_KNOWN = (
    ast.Expression, ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.USub, ast.BinOp, ast.Add, ast.Sub, ast.Mult,
    ast.Div, ast.Compare, ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.In, ast.NotIn, ast.Is, ast.IsNot,
    ast.Call, ast.IfExp, ast.Constant, ast.Name, ast.Load, ast.List, ast.Tuple,
)  # fmt: skip


def _check(tree: ast.Expression, text: str) -> None:
    for node in ast.walk(tree):
        if not isinstance(node, _KNOWN):
            raise _ExpressionError(f"it has an unsupported {type(node).__name__}")
        if isinstance(node, ast.Constant):
            _literal(node, text)
        if isinstance(node, ast.Call):
            _check_call(node)
        if isinstance(node, ast.Compare):
            _check_compared(node)


def _check_compared(node: ast.Compare) -> None:
    """Refuse comparisons that are never true although they look as if they could be."""
    sides = [node.left, *node.comparators]
    for left, operator, right in zip(sides, node.ops, sides[1:], strict=False):
        is_membership = isinstance(operator, ast.In | ast.NotIn) and isinstance(right, ast.List | ast.Tuple)
        if is_membership and any(map(_is_none, right.elts)):  # type: ignore[attr-defined]  # it is a list or a tuple
            raise _ExpressionError("None is in no list: write `x is None or x in (…)`")
        if not isinstance(operator, ast.Is | ast.IsNot) and (_is_none(left) or _is_none(right)):
            raise _ExpressionError("nothing is equal to None: write `is None`, or `is not None`")


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _check_call(node: ast.Call) -> None:
    if not isinstance(node.func, ast.Name) or node.keywords:
        raise _ExpressionError("a function is called by its name, with positional arguments")
    if _is_col(node):
        _column_of(node)
        return
    if node.func.id not in FUNCTIONS:
        raise _ExpressionError(f"`{node.func.id}` is not a function; use col, {', '.join(FUNCTIONS)}")
    least, most, _ = FUNCTIONS[node.func.id]
    if not least <= len(node.args) <= most:
        raise _ExpressionError(f"`{node.func.id}` takes {least if least == most else f'{least} to {most}'} arguments")
    if node.func.id in _STRING_ARGUMENTS and any(map(_is_none, node.args[1:])):
        raise _ExpressionError(f"the argument of `{node.func.id}` must be a string, not None")
    if node.func.id == "matches" and isinstance(regex := node.args[1], ast.Constant):
        try:
            pc.match_substring_regex(pa.array([""]), str(regex.value))
        except pa.ArrowException:
            raise _ExpressionError("the argument of `matches` is not a regular expression") from None


def _is_col(node: ast.Call) -> bool:
    return isinstance(node.func, ast.Name) and node.func.id == "col"


def _column_of(node: ast.Call) -> str:
    named = node.args[0] if len(node.args) == 1 else None
    if not isinstance(named, ast.Constant) or not isinstance(named.value, str):
        raise _ExpressionError('`col` takes one string: `col("its name")`')
    return named.value


def _literal(node: ast.Constant, text: str) -> Literal:
    value = node.value
    if isinstance(value, float):
        # The source text, not Python's float of it: 0.1 is exactly 0.1 here.
        written = (ast.get_source_segment(text.strip(), node) or repr(value)).replace("_", "")
        try:
            number = Decimal(written)
        except InvalidOperation:  # its exponent has too many digits
            number = Decimal("Infinity")
        if not number.is_finite() or abs(number.adjusted()) > EXPONENT_MAX:
            raise _ExpressionError("a number has a larger exponent than any column can store")
        return Literal(number)
    if value is None or isinstance(value, bool | int | str):
        return Literal(value)
    raise _ExpressionError("a literal must be a string, a number, True, False or None")


def _evaluate(node: ast.expr, columns: Columns, text: str) -> Value:
    match node:
        case ast.Constant():
            return _literal(node, text)
        case ast.Name():
            return columns[node.id]
        case ast.Call() if _is_col(node):
            return columns[_column_of(node)]
        case ast.Call(func=ast.Name(id=name)):
            return FUNCTIONS[name][2](*(_evaluate(argument, columns, text) for argument in node.args))
        case ast.BoolOp():
            both = isinstance(node.op, ast.And)
            found = _condition(_evaluate(node.values[0], columns, text))
            for part in node.values[1:]:
                other = _condition(_where(functools.partial(_undecided, found, both), part, columns, text))
                found = pc.and_kleene(found, other) if both else pc.or_kleene(found, other)
            return found
        case ast.UnaryOp(op=ast.Not()):
            return pc.invert(_condition(_evaluate(node.operand, columns, text)))
        case ast.UnaryOp():
            inner = _evaluate(node.operand, columns, text)
            if isinstance(inner, Literal):
                if isinstance(inner.value, bool) or not isinstance(inner.value, int | Decimal):
                    raise _ExpressionError("only a number has a sign")
                return Literal(-inner.value)
            return pc.negate_checked(inner)
        case ast.BinOp():
            left, right = _align(_evaluate(node.left, columns, text), _evaluate(node.right, columns, text))
            return _compute(_ARITHMETIC[type(node.op)], left, right)
        case ast.IfExp():
            test = pc.fill_null(_condition(_evaluate(node.test, columns, text)), _FALSE)
            body = _where(lambda: test, node.body, columns, text)
            pair = _align(body, _where(lambda: pc.invert(test), node.orelse, columns, text))
            return _compute(functools.partial(pc.if_else, test), *pair)
        case ast.Compare():
            return _compare(node, columns, text)
    raise _ExpressionError(f"it has a misplaced {type(node).__name__}")


def _undecided(found: Value, both: bool) -> Value:
    """Return the rows that the next part of an `and`, or of an `or`, decides."""
    return found if both else pc.invert(found)


def _where(needed: Callable[[], Value], node: ast.expr, columns: Columns, text: str) -> Value:
    """Return an expression's values, which may be null in rows that do not need them."""
    try:
        return _evaluate(node, columns, text)
    except pa.ArrowException:
        decided = pc.fill_null(needed(), _TRUE)
        if isinstance(decided, pa.Scalar) or pc.all(decided).as_py() is not False:
            raise
    rows = np.flatnonzero(decided.to_numpy(zero_copy_only=False))
    named = {name: columns[name].take(pa.array(rows)) for name in _columns_in(node)}
    values = _evaluate(node, named, text)
    if not isinstance(values, pa.Array):
        return values
    indexes = np.full(len(decided), -1)
    indexes[rows] = np.arange(len(rows))
    return values.take(pa.array(indexes, mask=indexes < 0))


def _compare(node: ast.Compare, columns: Columns, text: str) -> Value:
    left, results = node.left, []
    for operator, right in zip(node.ops, node.comparators, strict=True):
        value = _evaluate(left, columns, text)
        match operator:
            case ast.In() | ast.NotIn():
                membership = _is_in(value, right, columns, text)
                results.append(pc.invert(membership) if isinstance(operator, ast.NotIn) else membership)
            case ast.Is() | ast.IsNot():
                if _plain(_evaluate(right, columns, text)) is not None or isinstance(value, Literal):
                    raise _ExpressionError("`is` asks for None; compare with `==`")
                results.append(pc.is_null(value) if isinstance(operator, ast.Is) else pc.is_valid(value))
            case _:
                pair = _align(value, _evaluate(right, columns, text))
                results.append(_compute(_COMPARISONS[type(operator)], *pair))
        left = right
    return functools.reduce(pc.and_kleene, results)


def _is_in(value: Value, many: ast.expr, columns: Columns, text: str) -> Value:
    if not isinstance(many, ast.List | ast.Tuple) or not many.elts:
        raise _ExpressionError("`in` is followed by a list, for example `in ('a', 'b')`")
    choices = (_align(value, _evaluate(item, columns, text)) for item in many.elts)
    return functools.reduce(pc.or_kleene, (_compute(pc.equal, left, right) for left, right in choices))


def _condition(value: Value) -> Value:
    if isinstance(value, Literal):
        if not isinstance(value.value, bool):
            raise _ExpressionError("a literal used as a condition must be True or False")
        return pa.scalar(value.value)
    if not pa.types.is_boolean(value.type):
        raise _ExpressionError(f"a {value.type} cannot be a condition")
    return value


def _typed(literal: Literal) -> pa.Scalar:
    return _exact_decimal(literal.value) if isinstance(literal.value, Decimal) else pa.scalar(literal.value)


def _align(left: Value, right: Value) -> tuple[Value, Value]:
    """Return both values in types that can be computed with each other."""
    if isinstance(left, Literal) and isinstance(right, Literal):
        if isinstance(left.value, str) != isinstance(right.value, str):
            raise _ExpressionError("a string cannot be combined with a number")
        return _typed(left), _typed(right)
    if isinstance(left, Literal):
        second, first = _with_literal(right, left)
        return first, second
    if isinstance(right, Literal):
        return _with_literal(left, right)
    return _align_columns(left, right)


def _align_columns(left: Value, right: Value) -> tuple[Value, Value]:
    """Align two columns. Integers with decimals become decimals: Arrow would make floats of some."""
    kinds = (left.type, right.type)
    if any(map(pa.types.is_decimal, kinds)) and any(map(pa.types.is_integer, kinds)):
        left, right = (_as_decimal(side) if pa.types.is_integer(side.type) else side for side in (left, right))
    elif pa.types.is_string(kinds[0]) != pa.types.is_string(kinds[1]):
        raise _ExpressionError(f"a {kinds[0]} cannot be combined with a {kinds[1]}")
    return left, right


def _compute(work: Callable[[Value, Value], Value], left: Value, right: Value) -> Value:
    """Compute the result; retry decimals with twice the digits if the result needs more."""
    try:
        return work(left, right)
    except pa.ArrowInvalid:
        kinds = (left.type, right.type)
        if not all(map(pa.types.is_decimal128, kinds)):
            raise
        return work(*(one.cast(pa.decimal256(one.type.precision, one.type.scale)) for one in (left, right)))


def _as_decimal(integers: Value) -> Value:
    return integers.cast(pa.decimal128(20, 0))


def _exact_decimal(number: Any) -> pa.Scalar:
    """Return a number as a decimal with all its digits: Arrow knows no exponents."""
    return pa.scalar(Decimal(format(Decimal(str(number)), "f")))


def _with_literal(column: Value, literal: Literal) -> tuple[Value, Value]:
    kind, value = column.type, literal.value
    if value is None:
        return column, pa.scalar(None, kind)
    number = isinstance(value, int | Decimal) and not isinstance(value, bool)
    if pa.types.is_boolean(kind) and isinstance(value, bool):
        return column, pa.scalar(value)
    if pa.types.is_integer(kind) and number:
        if isinstance(value, int) and -(2**63) <= value < 2**63 and not pa.types.is_uint64(kind):
            return column.cast(pa.int64()), pa.scalar(value, pa.int64())
        return _as_decimal(column), _exact_decimal(value)
    if pa.types.is_decimal(kind) and number:
        return column, _exact_decimal(value)
    if pa.types.is_floating(kind) and number:
        return column.cast(pa.float64()), pa.scalar(float(str(value)), pa.float64())
    if pa.types.is_string(kind) and isinstance(value, str):
        return column, pa.scalar(value, pa.string())
    if pa.types.is_binary(kind) and isinstance(value, str):
        return column, pa.scalar(value.encode(), kind)
    if pa.types.is_temporal(kind) and isinstance(value, str):
        return column, pa.scalar(value, pa.string()).cast(kind)
    raise _ExpressionError(f"a {type(value).__name__} cannot be combined with a column of {kind}")


def columns_of(expressions: Iterable[Expression | None]) -> tuple[str, ...]:
    """Return the columns that these expressions name."""
    return tuple(
        dict.fromkeys(name for expression in expressions if expression is not None for name in expression.columns)
    )
