"""Write the table of docs/reference/types.md from the rules that the capture itself goes by: `type_page.py`.

What stands outside the two marks is written by hand and left alone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_type

from tailrace.capture.postgres.types import RULES, USER_DEFINED_TYPES, TypeRule

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "types.md"
BEGIN, END = "<!-- written by tools/type_page.py -->", "<!-- up to here -->"
_HEAD = ("PostgreSQL", "Arrow (in the log)", "Spark", "Values")
_TEXT = pa.string()


def page(text: str) -> str:
    """The page with its table written anew."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    table = "\n".join(_line(*cells) for cells in [_HEAD, ("---",) * len(_HEAD), *_rows()])
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{after}"


def _rows() -> Iterator[tuple[str, str, str, str]]:
    for rule in (rule for rule in RULES if rule.listed):
        yield from _of_rule(rule)
    yield "arrays of the types above", "`list` of it", "`array` of it", "one dimension from 1 on; others do not fit"
    yield "arrays of `numeric` without limits, or with p > 38", *_names(_TEXT), "as `{1.5,NULL}`"
    for rule in (rule for rule in RULES if not rule.listed):
        yield from _of_rule(rule)
    for name, note in USER_DEFINED_TYPES.values():
        yield name, *_names(_TEXT), note
    yield "arrays of the types from `time` to here", *_names(_TEXT), 'as `{a,NULL,"b c"}`'
    yield "domains", "that of the base type", "that of the base type", "as the base type"
    yield "any other type (an extension's)", *_names(_TEXT), "as the server prints it; noted once in the program's log"


def _of_rule(rule: TypeRule) -> Iterator[tuple[str, str, str, str]]:
    names = ", ".join(f"`{name}`" for name in rule.types)
    if not pa.types.is_decimal(rule.arrow):
        yield names, *_names(rule.arrow), rule.note
        return
    digits = rule.arrow.precision
    # The numbers in brackets only: decimal128 has digits of its own.
    arrow, spark = (f"{name.split('(')[0]}(p, s)`" for name in _names(rule.arrow))
    yield f"{names}, p ≤ {digits}", arrow, spark, rule.note
    yield f"`numeric` without limits, or p > {digits}", *_names(_TEXT), "all digits; `NaN`, `Infinity`, `-Infinity`"


def _names(arrow: pa.DataType) -> tuple[str, str]:
    """The type as Arrow and as Spark call it: what Spark itself makes of Arrow's."""
    return f"`{arrow}`", f"`{from_arrow_type(arrow, prefer_timestamp_ntz=True).simpleString()}`"


def _line(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def main() -> int:
    PAGE.write_text(page(PAGE.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
