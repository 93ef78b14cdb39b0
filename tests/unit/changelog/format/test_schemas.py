"""The log's numbers of a table, as names are added and dropped."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tailrace.changelog.format.schemas import LogSchemas
from tailrace.model.schema import TableId
from tests.support.changes import SHOP


def test_a_table_is_found_by_its_name_and_by_its_relation(tmp_path: Path) -> None:
    schemas = LogSchemas(tmp_path)
    assert schemas.current_numbers(SHOP.table, SHOP.relation) == []
    first = schemas.record(SHOP)
    assert schemas.current_numbers(SHOP.table, None) == [first.table]
    assert schemas.current_numbers(TableId("public", "nobody"), SHOP.relation) == [first.table]
    assert schemas.current_numbers(TableId("public", "nobody"), None) == []


def test_a_recreated_table_has_two_numbers(tmp_path: Path) -> None:
    schemas = LogSchemas(tmp_path)
    first = schemas.record(SHOP)
    assert schemas.current_numbers(SHOP.table, SHOP.relation) == [first.table]
    second = schemas.record(replace(SHOP, relation=SHOP.relation + 1))
    assert schemas.current_numbers(SHOP.table, SHOP.relation) == [first.table, second.table]


def test_after_a_rename_the_old_name_has_no_table(tmp_path: Path) -> None:
    schemas = LogSchemas(tmp_path)
    first = schemas.record(SHOP)
    renamed = replace(SHOP, table=TableId(SHOP.table.schema, "renamed"))
    assert schemas.current_numbers(SHOP.table, None) == [first.table]
    assert schemas.record(renamed).table == first.table
    assert schemas.current_numbers(SHOP.table, None) == []
    assert schemas.current_numbers(renamed.table, None) == [first.table]
    assert schemas.current_numbers(SHOP.table, SHOP.relation) == [first.table]


def test_a_version_added_by_another_thread_breaks_no_search(tmp_path: Path) -> None:
    schemas = LogSchemas(tmp_path)
    first, second = schemas.record(SHOP), schemas.record(replace(SHOP, relation=SHOP.relation + 1))
    found = iter(range(2, 9))

    def wanted(_: TableId) -> bool:
        schemas.record(replace(SHOP, relation=SHOP.relation + next(found)))
        return True

    assert schemas.numbers_matching(wanted) == {first.table, second.table}
    assert len(schemas.numbers_matching(lambda _: True)) == 4
