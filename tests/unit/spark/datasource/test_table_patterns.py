"""Each name in `tables` means one table, and a pattern never mixes up schema and table."""

from __future__ import annotations

import pytest

from tailrace.errors import ConfigError
from tailrace.model.schema import TableId
from tailrace.pipeline.capture.embedded_capture import stream_settings
from tailrace.pipeline.config.source_settings import matches, names_table
from tailrace.spark.datasource.table_patterns import TablePattern, format_table_name, parse_table_patterns

DOT_IN_SCHEMA, DOT_IN_NAME = TableId("a.b", "c"), TableId("a", "b.c")
ODD = TableId('x, y [1] "z"', "*.?")
TABLES = (DOT_IN_SCHEMA, DOT_IN_NAME, ODD, TableId("a", "b"), TableId("public", "orders"), TableId("public.old", "t"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('"a.b"."c"', [DOT_IN_SCHEMA]), ('"a.b".c', [DOT_IN_SCHEMA]), ('a."b.c"', [DOT_IN_NAME]),
        ('"a.b".*', [DOT_IN_SCHEMA]), ("a.*", [DOT_IN_NAME, TableId("a", "b")]), ("a[.]b.*", [DOT_IN_SCHEMA]),
        ("public.*", [TableId("public", "orders")]), ("*", list(TABLES)), ("*.*", list(TABLES)), ('"*".b', []),
        (' public . orders ,"a.b" . "c"', [DOT_IN_SCHEMA, TableId("public", "orders")]),
        ('"x, y [1] ""z"""."*.?"', [ODD]),
    ],
)  # fmt: skip
def test_quoted_parts_are_literal_and_a_dot_separates_schema_and_table(text: str, expected: list[TableId]) -> None:
    patterns = parse_table_patterns("tables", text)
    assert [table for table in TABLES if any(pattern.matches(table) for pattern in patterns)] == expected
    source = stream_settings("postgresql://x/y", "/log", tuple(pattern.to_setting for pattern in patterns)).source
    assert [table for table in TABLES if matches(source, table)] == expected, "a capture matches the same tables"
    named = {pattern.table for pattern in patterns} - {None}
    assert [table for table in TABLES if names_table(source, table)] == [table for table in expected if table in named]


@pytest.mark.parametrize(
    "text",
    ["a.b.c", '"a.b.c"', "orders", "public*", "public.", ".t", "", "public.t,", 'a."b', 'a."b"c', "a[b.c", 'a.""'],
)
def test_an_ambiguous_or_empty_name_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match="the option `tables` has") as caught:
        parse_table_patterns("tables", text)
    assert "public.orders, sales.*; `*` is all" in caught.value.hint
    with pytest.raises(ConfigError, match="has a name twice"):
        parse_table_patterns("tables", 'public.t, "public"."t"')


@pytest.mark.parametrize("table", TABLES)
def test_a_name_from_an_error_can_be_used_as_an_option(table: TableId) -> None:
    assert parse_table_patterns("tables", format_table_name(table)) == (TablePattern.of(table),)
