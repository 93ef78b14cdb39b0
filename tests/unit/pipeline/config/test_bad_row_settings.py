"""`on_bad_row`, for all tables and in a rule, and every mistake in it with its line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tailrace.model.schema import TableId
from tailrace.pipeline.config.settings_file import check_settings, load_settings

FILE = """\
name: shop
source: {{url: "postgresql://localhost/shop", tables: ["public.*"]}}
log: ./changes
tables:
  path: ./lake
  {line}
"""


def write(folder: Path, line: str) -> Path:
    file = folder / "tailrace.yaml"
    file.write_text(FILE.format(line=line))
    return file


def test_by_default_a_bad_row_stops_its_table(tmp_path: Path) -> None:
    assert not load_settings(write(tmp_path, "format: delta")).tables.dead_letters_enabled(TableId("public", "orders"))


def test_the_last_pattern_that_matches_a_table_decides(tmp_path: Path) -> None:
    rules = 'rules: {"public.pay*": {on_bad_row: stop}, "*.payday": {on_bad_row: dead-letter}}'
    line = f"on_bad_row: dead-letter\n  {rules}"
    tables = load_settings(write(tmp_path, line)).tables
    found = {name: tables.dead_letters_enabled(TableId("public", name)) for name in ("orders", "payments", "payday")}
    assert found == {"orders": True, "payments": False, "payday": True}


@pytest.mark.parametrize(
    ("line", "where", "hint"),
    [
        ("on_bad_row: skip", "tables.on_bad_row", "`on_bad_row: dead-letter`"),
        ("on_bad_row: {}", "tables.on_bad_row", "`on_bad_row: stop`"),
        ('rules: {"public.a": {on_bad_row: skip}}', "tables.rules", "For example"),
        ("on_bad_rwo: stop", "tables", "on_bad_row"),
    ],
)
def test_a_mistake_is_reported_with_its_line_and_remedy(tmp_path: Path, line: str, where: str, hint: str) -> None:
    (problem,) = check_settings(write(tmp_path, line), environment={})
    assert problem.where.startswith(where)
    assert (problem.line, hint in problem.hint) == (6, True), problem
