"""`tables`: each name means one table, whatever is in it, and a pattern never mixes up schema and table."""

from __future__ import annotations

import pytest

from tailrace.errors import ConfigError
from tailrace.model.schema import TableId
from tailrace.pipeline.capture.embedded_capture import stream_settings
from tailrace.pipeline.config.settings import matches, names_table
from tailrace.spark.datasource.table_patterns import TablePattern, format_table_name, parse_table_patterns

DOT_IN_SCHEMA, DOT_IN_NAME = TableId("a.b", "c"), TableId("a", "b.c")
ODD = TableId('x, y [1] "z"', "*.?")
TABLES = (DOT_IN_SCHEMA, DOT_IN_NAME, ODD, TableId("a", "b"), TableId("public", "orders"), TableId("public.old", "t"))


@pytest.mark.parametrize(
    ("text", "taken"),
    [
        ('"a.b"."c"', [DOT_IN_SCHEMA]), ('"a.b".c', [DOT_IN_SCHEMA]), ('a."b.c"', [DOT_IN_NAME]),
        ('"a.b".*', [DOT_IN_SCHEMA]), ("a.*", [DOT_IN_NAME, TableId("a", "b")]), ("a[.]b.*", [DOT_IN_SCHEMA]),
        ("public.*", [TableId("public", "orders")]), ("*", list(TABLES)), ("*.*", list(TABLES)), ('"*".b', []),
        (' public . orders ,"a.b" . "c"', [DOT_IN_SCHEMA, TableId("public", "orders")]),
        ('"x, y [1] ""z"""."*.?"', [ODD]),
    ],
)  # fmt: skip
def test_what_is_in_quotes_is_taken_as_it_is_and_dots_divide(text: str, taken: list[TableId]) -> None:
    patterns = parse_table_patterns("tables", text)
    assert [table for table in TABLES if any(pattern.matches(table) for pattern in patterns)] == taken
    source = stream_settings("postgresql://x/y", "/log", tuple(pattern.to_setting for pattern in patterns)).source
    assert [table for table in TABLES if matches(source, table)] == taken, "a capture takes the same"
    named = {pattern.table for pattern in patterns} - {None}
    assert [table for table in TABLES if names_table(source, table)] == [table for table in taken if table in named]


@pytest.mark.parametrize(
    "text",
    ["a.b.c", '"a.b.c"', "orders", "public*", "public.", ".t", "", "public.t,", 'a."b', 'a."b"c', "a[b.c", 'a.""'],
)
def test_what_could_mean_several_or_none_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match="the option `tables` has") as caught:
        parse_table_patterns("tables", text)
    assert "public.orders, sales.*; `*` is all" in caught.value.hint
    with pytest.raises(ConfigError, match="has a name twice"):
        parse_table_patterns("tables", 'public.t, "public"."t"')


@pytest.mark.parametrize("table", TABLES)
def test_a_name_that_an_error_gives_can_be_given_back(table: TableId) -> None:
    assert parse_table_patterns("tables", format_table_name(table)) == (TablePattern.of(table),)
