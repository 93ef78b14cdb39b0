"""Expressions over columns: `country == 'DE' and amount > 10.50`, as Arrow computes them.

The language is a small part of Python's, parsed and never run: names are columns (`col("odd name")` for those that are
no names), with literals, comparisons, `and or not in is`, arithmetic, `x if c else y` and the functions below. Null is
SQL's: what is compared with null is null, and null is not true. What a condition keeps away from a row is not asked of
it: `n / d if d != 0 else 0` divides by no zero. A literal becomes a value of the column that it stands
beside; one with a fraction is never a float unless the column is one, so decimals compare exactly.
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
"""More characters than a text has."""
EXPONENT_MAX = 400
"""Of a literal: beyond that no type of a column has numbers, and its digits would fill the memory."""
Columns = Mapping[str, pa.Array]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Literal:
    """A value as it was written; it gets a type from what it stands beside."""

    value: bool | int | Decimal | str | None


Value = Any
"""An Arrow array, an Arrow scalar, or a `Literal`."""


def _texts(value: Value) -> Value:
    if isinstance(value, Literal):
        return pa.scalar(None if value.value is None else str(value.value), pa.string())
    return value if pa.types.is_string(value.type) else value.cast(pa.string())


def _plain(value: Value) -> Any:
    if not isinstance(value, Literal):
        raise _ExpressionError("an argument must be a literal")
    return value.value


def _whole(value: Value) -> int:
    found = _plain(value)
    if isinstance(found, bool) or not isinstance(found, int):
        raise _ExpressionError("an argument must be a whole number")
    if abs(found) > WHOLE_MAX:
        raise _ExpressionError("an argument is too large a number")
    return found


def _concat(*parts: Value) -> Value:
    return pc.binary_join_element_wise(*map(_texts, parts), "")


def _coalesce(first: Value, *others: Value) -> Value:
    return functools.reduce(lambda one, other: _reckoned(pc.coalesce, *_beside(one, other)), others, first)


def _substring(text: Value, start: Value, length: Value) -> Value:
    begin = _whole(start)
    if begin < 1 or _whole(length) < 0:
        raise _ExpressionError("`substring` counts from 1")
    return pc.utf8_slice_codeunits(_texts(text), begin - 1, begin - 1 + _whole(length))


FUNCTIONS: dict[str, tuple[int, int, Callable[..., Value]]] = {
    "upper": (1, 1, lambda text: pc.utf8_upper(_texts(text))),
    "lower": (1, 1, lambda text: pc.utf8_lower(_texts(text))),
    "trim": (1, 1, lambda text: pc.utf8_trim_whitespace(_texts(text))),
    "length": (1, 1, lambda text: pc.utf8_length(_texts(text))),
    "text": (1, 1, _texts),
    "concat": (1, 20, _concat),
    "coalesce": (2, 20, _coalesce),
    "substring": (3, 3, _substring),
    "replace": (3, 3, lambda text, old, new: pc.replace_substring(_texts(text), str(_plain(old)), str(_plain(new)))),
    "starts_with": (2, 2, lambda text, part: pc.starts_with(_texts(text), str(_plain(part)))),
    "ends_with": (2, 2, lambda text, part: pc.ends_with(_texts(text), str(_plain(part)))),
    "contains": (2, 2, lambda text, part: pc.match_substring(_texts(text), str(_plain(part)))),
    "matches": (2, 2, lambda text, regex: pc.match_substring_regex(_texts(text), str(_plain(regex)))),
    "abs": (1, 1, lambda number: pc.abs_checked(number)),
    "year": (1, 1, lambda moment: pc.year(moment)),
    "month": (1, 1, lambda moment: pc.month(moment)),
    "day": (1, 1, lambda moment: pc.day(moment)),
}
"""How many arguments each takes, at least and at most, and what it does."""
_GIVEN_TEXTS = ("replace", "starts_with", "ends_with", "contains", "matches")

_COMPARISONS: dict[type[ast.cmpop], Callable[[Value, Value], Value]] = {
    ast.Eq: pc.equal, ast.NotEq: pc.not_equal, ast.Lt: pc.less, ast.LtE: pc.less_equal, ast.Gt: pc.greater,
    ast.GtE: pc.greater_equal,
}  # fmt: skip
_ARITHMETIC: dict[type[ast.operator], Callable[[Value, Value], Value]] = {
    ast.Add: pc.add_checked, ast.Sub: pc.subtract_checked, ast.Mult: pc.multiply_checked, ast.Div: pc.divide_checked,
}  # fmt: skip


# Given as Arrow's own: for a value of Python's it looks for pandas, each time.
_FALSE, _TRUE = pa.scalar(False), pa.scalar(True)


class _ExpressionError(Exception):
    """What is wrong with an expression; it becomes a ConfigError that says whose it is."""


@dataclass(frozen=True)
class Expression:
    """One that was parsed. It holds its text, so it can be pickled."""

    text: str

    def __post_init__(self) -> None:
        try:
            _check(_parse(self.text), self.text)
        except _ExpressionError as wrong:
            raise ConfigError(
                f"an expression cannot be used: {wrong}",
                expression=self.text,
                hint="It looks like `country == 'DE' and amount > 10.50`; see docs/guides/transforms.md.",
            ) from None

    @functools.cached_property
    def columns(self) -> tuple[str, ...]:
        """The columns it names."""
        return _columns_in(_parse(self.text))

    def evaluate(self, columns: Columns, rows: int) -> pa.Array:
        """A value for each row."""
        found = _evaluate(_parse(self.text).body, columns, self.text)
        if isinstance(found, Literal):
            found = _typed_alone(found)
        if isinstance(found, pa.Scalar):
            found = pa.array([found.as_py()] * 1, found.type).take(pa.array(np.zeros(rows, np.int64)))
        return found.combine_chunks() if isinstance(found, pa.ChunkedArray) else found

    def is_true(self, columns: Columns, rows: int) -> Mask:
        """The rows of which it is true; null is not."""
        found = self.evaluate(columns, rows)
        found = pc.fill_null(found, _FALSE) if found.null_count else found
        return np.asarray(found.to_numpy(zero_copy_only=False), np.bool_)

    def evaluate_condition(self, columns: Columns, rows: int) -> tuple[Mask, RowFaults]:
        """The same, and the rows of which it cannot be computed, such as for an overflow: it is not true of those."""
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
        """The type of what it gives for columns of these types; refused where it cannot be computed of them."""
        missing = [name for name in self.columns if name not in types]
        if missing:
            raise ConfigError(
                f"an expression names the column `{missing[0]}`, which the table does not have",
                expression=self.text,
                hint="Columns are named as the rules before have left them.",
            )
        try:
            return self.evaluate({name: pa.array([], kind) for name, kind in types.items()}, 0).type
        except (_ExpressionError, pa.ArrowException, TypeError, ValueError) as error:
            # Nothing of a row is in here: it was computed of columns without rows.
            said = str(error).strip().partition("\n")[0][:200]
            raise ConfigError(
                f"an expression cannot be computed of the table's columns: {said}",
                expression=self.text,
                hint="Compare like with like; `text(x)` makes a text of anything.",
            ) from None


def _columns_in(tree: ast.AST) -> tuple[str, ...]:
    called = {id(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    found = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and id(node) not in called]
    found += [_column_of(node) for node in ast.walk(tree) if isinstance(node, ast.Call) and _is_col(node)]
    return tuple(dict.fromkeys(found))


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
            raise _ExpressionError(f"it has a {type(node).__name__}, which is not known here")
        if isinstance(node, ast.Constant):
            _literal(node, text)
        if isinstance(node, ast.Call):
            _check_call(node)
        if isinstance(node, ast.Compare):
            _check_compared(node)


def _check_compared(node: ast.Compare) -> None:
    """Refuse what is never true, though it looks as if it could be."""
    sides = [node.left, *node.comparators]
    for left, operator, right in zip(sides, node.ops, sides[1:], strict=False):
        within = isinstance(operator, ast.In | ast.NotIn) and isinstance(right, ast.List | ast.Tuple)
        if within and any(map(_is_none, right.elts)):  # type: ignore[attr-defined]  # it is one of the two
            raise _ExpressionError("None is in no list: write `x is None or x in (…)`")
        if not isinstance(operator, ast.Is | ast.IsNot) and (_is_none(left) or _is_none(right)):
            raise _ExpressionError("nothing is equal to None: write `is None`, or `is not None`")


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _check_call(node: ast.Call) -> None:
    if not isinstance(node.func, ast.Name) or node.keywords:
        raise _ExpressionError("a function is called by its name, and its arguments have none")
    if _is_col(node):
        _column_of(node)
        return
    if node.func.id not in FUNCTIONS:
        raise _ExpressionError(f"there is no function `{node.func.id}`; there are col, {', '.join(FUNCTIONS)}")
    least, most, _ = FUNCTIONS[node.func.id]
    if not least <= len(node.args) <= most:
        raise _ExpressionError(f"`{node.func.id}` takes {least if least == most else f'{least} to {most}'} arguments")
    if node.func.id in _GIVEN_TEXTS and any(map(_is_none, node.args[1:])):
        raise _ExpressionError(f"what `{node.func.id}` is given must be a text, not None")
    if node.func.id == "matches" and isinstance(regex := node.args[1], ast.Constant):
        try:
            pc.match_substring_regex(pa.array([""]), str(regex.value))
        except pa.ArrowException:
            raise _ExpressionError("what `matches` is given is no regular expression") from None


def _is_col(node: ast.Call) -> bool:
    return isinstance(node.func, ast.Name) and node.func.id == "col"


def _column_of(node: ast.Call) -> str:
    named = node.args[0] if len(node.args) == 1 else None
    if not isinstance(named, ast.Constant) or not isinstance(named.value, str):
        raise _ExpressionError('a column is named as `col("its name")`')
    return named.value


def _literal(node: ast.Constant, text: str) -> Literal:
    value = node.value
    if isinstance(value, float):
        # The text, and not the float that Python has made of it: 0.1 is 0.1 here.
        written = (ast.get_source_segment(text.strip(), node) or repr(value)).replace("_", "")
        try:
            number = Decimal(written)
        except InvalidOperation:  # its exponent has too many digits
            number = Decimal("Infinity")
        if not number.is_finite() or abs(number.adjusted()) > EXPONENT_MAX:
            raise _ExpressionError("a number has a larger exponent than those of any column")
        return Literal(number)
    if value is None or isinstance(value, bool | int | str):
        return Literal(value)
    raise _ExpressionError("a literal is a text, a number, True, False or None")


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
            found = _truth(_evaluate(node.values[0], columns, text))
            for part in node.values[1:]:
                other = _truth(_where(functools.partial(_undecided, found, both), part, columns, text))
                found = pc.and_kleene(found, other) if both else pc.or_kleene(found, other)
            return found
        case ast.UnaryOp(op=ast.Not()):
            return pc.invert(_truth(_evaluate(node.operand, columns, text)))
        case ast.UnaryOp():
            inner = _evaluate(node.operand, columns, text)
            if isinstance(inner, Literal):
                if isinstance(inner.value, bool) or not isinstance(inner.value, int | Decimal):
                    raise _ExpressionError("only a number has a sign")
                return Literal(-inner.value)
            return pc.negate_checked(inner)
        case ast.BinOp():
            left, right = _beside(_evaluate(node.left, columns, text), _evaluate(node.right, columns, text))
            return _reckoned(_ARITHMETIC[type(node.op)], left, right)
        case ast.IfExp():
            test = pc.fill_null(_truth(_evaluate(node.test, columns, text)), _FALSE)
            body = _where(lambda: test, node.body, columns, text)
            pair = _beside(body, _where(lambda: pc.invert(test), node.orelse, columns, text))
            return _reckoned(functools.partial(pc.if_else, test), *pair)
        case ast.Compare():
            return _compare(node, columns, text)
    raise _ExpressionError(f"it has a {type(node).__name__} where none can be")


def _undecided(found: Value, both: bool) -> Value:
    """The rows of which the next part of an `and`, or of an `or`, decides."""
    return found if both else pc.invert(found)


def _where(wanted: Callable[[], Value], node: ast.expr, columns: Columns, text: str) -> Value:
    """The values of an expression, which may be null in rows in which it is not wanted."""
    try:
        return _evaluate(node, columns, text)
    except pa.ArrowException:
        decided = pc.fill_null(wanted(), _TRUE)
        if isinstance(decided, pa.Scalar) or pc.all(decided).as_py() is not False:
            raise
    rows = np.flatnonzero(decided.to_numpy(zero_copy_only=False))
    named = {name: columns[name].take(pa.array(rows)) for name in _columns_in(node)}
    found = _evaluate(node, named, text)
    if not isinstance(found, pa.Array):
        return found
    places = np.full(len(decided), -1)
    places[rows] = np.arange(len(rows))
    return found.take(pa.array(places, mask=places < 0))


def _compare(node: ast.Compare, columns: Columns, text: str) -> Value:
    left, found = node.left, []
    for operator, right in zip(node.ops, node.comparators, strict=True):
        one = _evaluate(left, columns, text)
        match operator:
            case ast.In() | ast.NotIn():
                within = _is_in(one, right, columns, text)
                found.append(pc.invert(within) if isinstance(operator, ast.NotIn) else within)
            case ast.Is() | ast.IsNot():
                if _plain(_evaluate(right, columns, text)) is not None or isinstance(one, Literal):
                    raise _ExpressionError("`is` asks for None; compare with `==`")
                found.append(pc.is_null(one) if isinstance(operator, ast.Is) else pc.is_valid(one))
            case _:
                pair = _beside(one, _evaluate(right, columns, text))
                found.append(_reckoned(_COMPARISONS[type(operator)], *pair))
        left = right
    return functools.reduce(pc.and_kleene, found)


def _is_in(one: Value, many: ast.expr, columns: Columns, text: str) -> Value:
    if not isinstance(many, ast.List | ast.Tuple) or not many.elts:
        raise _ExpressionError("`in` is followed by a list, for example `in ('a', 'b')`")
    choices = (_beside(one, _evaluate(item, columns, text)) for item in many.elts)
    return functools.reduce(pc.or_kleene, (_reckoned(pc.equal, left, right) for left, right in choices))


def _truth(value: Value) -> Value:
    if isinstance(value, Literal):
        if not isinstance(value.value, bool):
            raise _ExpressionError("a literal that is neither True nor False stands where a condition is wanted")
        return pa.scalar(value.value)
    if not pa.types.is_boolean(value.type):
        raise _ExpressionError(f"a {value.type} stands where a condition is wanted")
    return value


def _typed_alone(literal: Literal) -> pa.Scalar:
    return _exact(literal.value) if isinstance(literal.value, Decimal) else pa.scalar(literal.value)


def _beside(left: Value, right: Value) -> tuple[Value, Value]:
    """Both as values that can be computed with each other."""
    if isinstance(left, Literal) and isinstance(right, Literal):
        if isinstance(left.value, str) != isinstance(right.value, str):
            raise _ExpressionError("a text stands beside a number")
        return _typed_alone(left), _typed_alone(right)
    if isinstance(left, Literal):
        second, first = _with_literal(right, left)
        return first, second
    if isinstance(right, Literal):
        return _with_literal(left, right)
    return _alike(left, right)


def _alike(left: Value, right: Value) -> tuple[Value, Value]:
    """Two columns. Integers beside decimals become decimals: Arrow would make floats of some."""
    kinds = (left.type, right.type)
    if any(map(pa.types.is_decimal, kinds)) and any(map(pa.types.is_integer, kinds)):
        left, right = (_as_decimal(side) if pa.types.is_integer(side.type) else side for side in (left, right))
    elif pa.types.is_string(kinds[0]) != pa.types.is_string(kinds[1]):
        raise _ExpressionError(f"a {kinds[0]} stands beside a {kinds[1]}")
    return left, right


def _reckoned(work: Callable[[Value, Value], Value], left: Value, right: Value) -> Value:
    """Of decimals with twice the digits, where the result may have more than theirs have room for."""
    try:
        return work(left, right)
    except pa.ArrowInvalid:
        kinds = (left.type, right.type)
        if not all(map(pa.types.is_decimal128, kinds)):
            raise
        return work(*(one.cast(pa.decimal256(one.type.precision, one.type.scale)) for one in (left, right)))


def _as_decimal(integers: Value) -> Value:
    return integers.cast(pa.decimal128(20, 0))


def _exact(number: Any) -> pa.Scalar:
    """A number as a decimal with all its digits: Arrow knows no exponents."""
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
        return _as_decimal(column), _exact(value)
    if pa.types.is_decimal(kind) and number:
        return column, _exact(value)
    if pa.types.is_floating(kind) and number:
        return column.cast(pa.float64()), pa.scalar(float(str(value)), pa.float64())
    if pa.types.is_string(kind) and isinstance(value, str):
        return column, pa.scalar(value, pa.string())
    if pa.types.is_binary(kind) and isinstance(value, str):
        return column, pa.scalar(value.encode(), kind)
    if pa.types.is_temporal(kind) and isinstance(value, str):
        return column, pa.scalar(value, pa.string()).cast(kind)
    raise _ExpressionError(f"a {type(value).__name__} stands beside a column of {kind}")


def columns_of(expressions: Iterable[Expression | None]) -> tuple[str, ...]:
    """The columns that some of them name."""
    return tuple(dict.fromkeys(name for one in expressions if one is not None for name in one.columns))
