"""DDL in the log: every version of a schema before its first row, with the changes of the table."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from tailrace.capture.port import SourceId
from tailrace.capture.postgres.source import PostgresCapture
from tailrace.changelog.read.reader import ChangeLog
from tailrace.changelog.write.writer import LogWriter
from tailrace.demo.server import EmbeddedPostgres
from tailrace.model.batch import Window
from tailrace.model.position import ZERO
from tests.support.benches import PostgresBench, Streams, take

IDENTITY = SourceId(kind="postgresql", system="1", timeline=1, database="d")


_ITEMS = re.compile(r"\bitems\b(?!_)")


class Diary:
    """The bench's table `items`, captured into a log as a pipeline does it."""

    def __init__(self, postgres: PostgresBench, path: Path) -> None:
        self.postgres, self.path = postgres, path
        self.log = LogWriter(path, IDENTITY)
        self.log.append(Window(start=ZERO, end=postgres.begin))
        self.streams = Streams(postgres.capture)
        self.rows = 0

    def run(self, *statements: str) -> None:
        for statement in statements:
            self.postgres.execute(_ITEMS.sub(f"{self.postgres.schema}.items", statement))

    def catch_up(self, rows: int) -> None:
        """Read that many more rows, on a stream of its own that knows only what the log has."""
        capture = PostgresCapture(self.postgres.capture.settings)
        capture.remember_schemas(self.log.latest_schemas())
        self.streams = Streams(capture)
        stream = self.streams.open(self.log.position)
        for window in take(stream, self.log.position, rows):
            self.log.append(window)
        stream.confirm(self.log.position)
        self.streams.close(stream)

    def records(self, name: str = "items") -> list[dict[str, Any]]:
        """The `schema` stream's records of the table, oldest first."""
        return [
            json.loads(row["definition"]) | {"at": row["_seq"], "version": row["version"]}
            for row in self.rows_of("schema")
            if row["table_name"] == name
        ]

    def rows_of(self, table: str) -> list[dict[str, Any]]:
        return [row for batch in ChangeLog.open(self.path).follow(table=table) for row in batch.data.to_pylist()]

    def close(self) -> None:
        self.streams.close_all()
        self.log.close()


@pytest.fixture
def diary(postgres: PostgresBench, tmp_path: Path) -> Iterator[Diary]:
    made = Diary(postgres, tmp_path / "log")
    made.run("insert into items values (1)")
    made.catch_up(1)
    yield made
    made.close()


Changed = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def changed(diary: Diary) -> Changed:
    """Run statements that write one row, read it, and return the changes of the table's newest version."""

    def run(*statements: str, rows: int = 1) -> list[dict[str, Any]]:
        diary.run(*statements)
        diary.catch_up(rows)
        found: list[dict[str, Any]] = diary.records()[-1]["changes"]
        return found

    return run


def test_the_first_version_has_all_catalogue_facts(diary: Diary) -> None:
    (record,) = diary.records()
    (column,) = record["columns"]
    assert (column["number"], column["nullable"], column["default"]) == (1, False, None)
    assert (record["changes"], record["at"]) == ([], 1)


def test_an_added_column_is_null_in_existing_rows(diary: Diary, changed: Changed) -> None:
    found = changed("alter table items add a int", "insert into items values (2, 3)")
    assert found == [{"kind": "add", "column": "a", "was": None, "now": "integer", "at_rest": "null"}]
    record = diary.records()[-1]
    assert (record["version"], record["rewritten"], record["at"]) == (2, False, 2)


@pytest.mark.parametrize(
    ("definition", "value"),
    [
        ("int default 5", "5"),
        ("text default 'a, \"b\" {c}'", 'a, "b" {c}'),
        ("timestamptz default '2026-01-02 03:04:05+05'", "2026-01-01 22:04:05+00"),
        ("int[] default '{1,NULL}'", "{1,NULL}"),
        ("box default '((1,1),(0,0))'", "(1,1),(0,0)"),
        ("bytea default '\\x00ff'", "\\x00ff"),
        ("text default ''", ""),
    ],
)
def test_a_constant_default_is_recorded_with_its_value(changed: Changed, definition: str, value: str) -> None:
    (found,) = changed(f"alter table items add a {definition}", "insert into items values (2)")
    assert (found["kind"], found["at_rest"], found["value"]) == ("add", "constant", value)


def test_a_default_that_differs_between_rows_is_a_rewrite(diary: Diary, changed: Changed) -> None:
    (found,) = changed("alter table items add a float8 default random()", "insert into items values (2)")
    assert (found["kind"], found["at_rest"]) == ("add", "written")
    assert diary.records()[-1]["rewritten"] is True


def test_a_dropped_column_is_recorded(diary: Diary, changed: Changed) -> None:
    changed("alter table items add a int", "insert into items values (2)")
    assert changed("alter table items drop a", "insert into items values (3)") == [
        {"kind": "drop", "column": "a", "was": "integer", "now": None}
    ]
    assert diary.records()[-1]["rewritten"] is False


def test_a_rename_is_proven_by_the_columns_number(diary: Diary, changed: Changed) -> None:
    changed("alter table items add a int", "insert into items values (2)")
    found = changed("alter table items rename a to b", "insert into items values (3)")
    assert found == [{"kind": "rename", "column": "b", "was": "a", "now": "b"}]
    swapped = changed(
        "alter table items add a int",
        "alter table items rename a to c",
        "alter table items rename b to a",
        "alter table items rename c to b",
        "insert into items values (4)",
    )
    assert [(change["kind"], change["column"]) for change in swapped] == [("rename", "a"), ("add", "b")]


def test_a_column_that_is_dropped_and_added_under_its_name_is_a_new_one(diary: Diary, changed: Changed) -> None:
    changed("alter table items add a int", "insert into items values (2, 7)")
    found = changed("alter table items drop a", "alter table items add a int default 9", "insert into items values (3)")
    assert [(change["kind"], change["column"]) for change in found] == [("drop", "a"), ("add", "a")]
    # Rows that arrive now may still have the former column, so the values of the others are unknown.
    assert found[1]["at_rest"] == diary.records()[-1]["rewritten"] == "unknown"
    assert [record["version"] for record in diary.records()] == [1, 2, 3]


def test_a_new_type_is_recorded_with_whether_the_rows_were_rewritten(diary: Diary, changed: Changed) -> None:
    changed("alter table items add a varchar(5)", "insert into items values (2)")
    found = changed("alter table items alter a type varchar(9)", "insert into items values (3)")
    assert found == [{"kind": "retype", "column": "a", "was": "character varying(5)", "now": "character varying(9)"}]
    assert diary.records()[-1]["rewritten"] is False
    (retype,) = changed("alter table items alter a type int using 1", "insert into items values (4)")
    assert (retype["kind"], retype["now"]) == ("retype", "integer")
    assert diary.records()[-1]["rewritten"] is True


def test_recomputed_values_of_the_same_type_make_a_version(diary: Diary, changed: Changed) -> None:
    changed("alter table items add a int", "insert into items values (2, 3)")
    found = changed("alter table items alter a type int using a + 1", "insert into items values (3, 1)")
    assert found == []
    assert diary.records()[-1]["rewritten"] is True
    assert [record["version"] for record in diary.records()] == [1, 2, 3]


@pytest.mark.parametrize("statement", ["vacuum full {}.items", "cluster {}.items using items_pkey", "analyze {}.items"])
def test_maintenance_makes_no_version(diary: Diary, statement: str) -> None:
    diary.postgres.execute(statement.format(diary.postgres.schema))
    diary.run("insert into items values (2)")
    diary.catch_up(1)
    assert [record["version"] for record in diary.records()] == [1]


@pytest.mark.parametrize("statement", ["truncate {}.items", "vacuum full {}.items"])
def test_an_earlier_rewrite_is_not_attributed_to_a_later_alter(diary: Diary, statement: str) -> None:
    diary.postgres.execute(statement.format(diary.postgres.schema))
    diary.run("insert into items values (2)")
    diary.catch_up(2 if "truncate" in statement else 1)
    assert [record["version"] for record in diary.records()] == [1]
    diary.run("alter table items add a int", "insert into items values (3)")
    diary.catch_up(1)
    (change,) = diary.records()[-1]["changes"]
    assert (change["at_rest"], diary.records()[-1]["rewritten"]) == ("null", False)


def test_a_key_that_became_wider_later_does_not_apply_to_earlier_rows(diary: Diary) -> None:
    diary.run("alter table items add a int not null default 1", "insert into items values (2), (3)")
    diary.catch_up(2)
    diary.run(
        "delete from items where id = 2",
        "update items set id = 33 where id = 3",
        "alter table items drop constraint items_pkey",
        "alter table items add primary key (id, a)",
        "insert into items values (4)",
    )
    diary.catch_up(4)
    assert [record["key"] for record in diary.records()] == [["id"], ["id"], ["id", "a"]]
    rows = diary.rows_of(f"{diary.postgres.schema}.items")[-4:]
    assert [(row["_op"], row["id"]) for row in rows] == [("delete", 2), ("delete", 3), ("insert", 33), ("insert", 4)]


def test_a_key_that_was_dropped_later_still_applies_to_earlier_rows(diary: Diary) -> None:
    diary.run("insert into items values (2)", "delete from items where id = 1")
    diary.run("alter table items drop constraint items_pkey")
    diary.catch_up(2)
    assert [(record["key"], record["identity"]) for record in diary.records()] == [(["id"], "key")]


def test_the_last_rows_of_a_table_that_was_altered_and_dropped_keep_their_key(diary: Diary) -> None:
    diary.run("alter table items replica identity full", "insert into items values (2)")
    diary.catch_up(1)
    diary.run("alter table items add a int", "insert into items values (3, 4)", "drop table items")
    diary.catch_up(1)
    assert [(record["key"], record["identity"]) for record in diary.records()][-1] == (["id"], "full")


def test_a_newly_published_column_is_unknown_in_older_rows(postgres: PostgresBench, tmp_path: Path) -> None:
    schema = postgres.schema
    postgres.execute(f"alter table {schema}.items add a int default 7")
    postgres.execute(f"alter publication {schema} set table {schema}.items (id)")
    diary = Diary(postgres, tmp_path / "log")
    diary.run("insert into items values (1, 2)")
    diary.catch_up(1)
    postgres.execute(f"alter publication {schema} set table {schema}.items")
    diary.run("insert into items values (2, 3)")
    diary.catch_up(1)
    (change,) = diary.records()[-1]["changes"]
    assert (change["kind"], change["column"], change["at_rest"]) == ("add", "a", "unknown")
    diary.close()


def test_a_changed_key_is_recorded(changed: Changed) -> None:
    found = changed(
        "alter table items add a int not null default 1",
        "alter table items drop constraint items_pkey",
        "alter table items add primary key (a, id)",
        "insert into items values (2, 2)",
    )
    assert {"kind": "key", "was": ["id"], "now": ["id", "a"]} in found


def test_a_changed_identity_is_recorded(changed: Changed) -> None:
    found = changed("alter table items replica identity full", "insert into items values (2)")
    assert found == [{"kind": "identity", "was": "key", "now": "full"}]


def test_nullability_and_defaults_are_recorded_with_the_next_version(changed: Changed) -> None:
    changed("alter table items add a int", "insert into items values (2, 1)")
    found = changed(
        "update items set a = 1",
        "alter table items alter a set default 4, alter a set not null, add b int",
        "insert into items values (3)",
        rows=3,
    )
    assert {"kind": "nullability", "column": "a", "was": True, "now": False} in found
    assert {"kind": "default", "column": "a", "was": None, "now": "4"} in found


def test_a_renamed_table_keeps_its_number(diary: Diary) -> None:
    schema = diary.postgres.schema
    diary.run("alter table items rename to goods")
    diary.postgres.execute(f"insert into {schema}.goods values (2)")
    diary.catch_up(1)
    (record,) = diary.records("goods")
    assert record["version"] == 2
    assert record["changes"] == [{"kind": "rename table", "was": f"{schema}.items", "now": f"{schema}.goods"}]
    diary.postgres.execute(f"create schema {schema}_2; alter table {schema}.goods set schema {schema}_2")
    diary.postgres.execute(f"insert into {schema}_2.goods values (3)")
    diary.catch_up(1)
    assert diary.records("goods")[-1]["changes"] == [
        {"kind": "rename table", "was": f"{schema}.goods", "now": f"{schema}_2.goods"}
    ]


def test_each_of_two_versions_in_one_transaction_precedes_its_rows(diary: Diary) -> None:
    with diary.postgres.connection.transaction():
        diary.run("insert into items values (2)", "alter table items add a int", "insert into items values (3, 4)")
    diary.catch_up(2)
    assert [(record["version"], record["at"]) for record in diary.records()] == [(1, 1), (2, 3)]
    rows = diary.rows_of(f"{diary.postgres.schema}.items")
    assert [(row["id"], row.get("a")) for row in rows] == [(1, None), (2, None), (3, 4)]


def test_facts_that_the_catalogue_no_longer_shows_are_unknown(diary: Diary) -> None:
    diary.run(
        "alter table items add a int default 5",
        "insert into items values (2)",
        "alter table items drop a",
        "insert into items values (3)",
    )
    diary.catch_up(2)
    first, second, third = diary.records()
    assert [column["number"] for column in second["columns"]] == ["unknown", "unknown"]
    assert second["facts"] == second["rewritten"] == "unknown"
    (change,) = second["changes"]
    assert (change["kind"], change["at_rest"]) == ("add", "unknown")
    assert third["rewritten"] == "unknown", "what was between is unknown"
    assert third["facts"] != "unknown"
    assert first["version"] == 1


def test_an_unproven_rename_is_a_drop_and_an_add(diary: Diary) -> None:
    diary.run("alter table items add a int", "insert into items values (2, 1)")
    diary.run("alter table items rename a to b", "insert into items values (3, 1)")
    diary.run("alter table items rename b to c", "insert into items values (4, 1)")
    diary.catch_up(3)
    kinds = [[change["kind"] for change in record["changes"]] for record in diary.records()]
    assert kinds == [[], ["add"], ["drop", "add"], ["drop", "add"]]


def test_rows_of_a_dropped_table_keep_its_key_and_types(postgres: PostgresBench, diary: Diary) -> None:
    schema = postgres.schema
    postgres.execute(f"create domain {schema}.amount as numeric(10, 2)")
    diary.run(f"alter table items add a {schema}.amount", "alter table items replica identity full")
    diary.run("insert into items values (2, 1.5)")
    diary.catch_up(1)
    before = diary.log.latest_schemas()
    diary.run("insert into items values (3, 2.5)", "drop table items")
    postgres.execute(f"drop domain {schema}.amount")
    diary.catch_up(1)
    assert diary.log.latest_schemas() == before
    assert diary.rows_of(f"{schema}.items")[-1]["a"] == Decimal("2.50")


def test_an_attached_detached_or_truncated_partition_is_recorded(postgres: PostgresBench, tmp_path: Path) -> None:
    schema = postgres.schema
    postgres.execute(
        f"drop table {schema}.items; create table {schema}.items (id int8 primary key) partition by range (id);"
        f"create table {schema}.p1 partition of {schema}.items for values from (0) to (10);"
        f"create table {schema}.old (id int8 primary key); insert into {schema}.old values (15)"
    )
    postgres.capture.prepare(postgres.begin)
    diary = Diary(postgres, tmp_path / "log")
    try:
        diary.run("insert into items values (1)")
        diary.catch_up(1)
        postgres.execute(f"create table {schema}.p3 partition of {schema}.items for values from (20) to (30)")
        postgres.execute(f"alter table {schema}.p3 alter id set statistics 50")
        diary.run("insert into items values (21)")
        diary.catch_up(1)
        assert [record["changes"] for record in diary.records()] == [[], []], "one that is made as such has no rows"
        postgres.execute(f"alter table {schema}.items attach partition {schema}.old for values from (10) to (20)")
        diary.run("insert into items values (11)")
        diary.catch_up(1)
        assert diary.records()[-1]["changes"] == [{"kind": "attach", "was": None, "now": f"{schema}.old"}]
        with postgres.connection.transaction():
            postgres.execute(
                f"create table {schema}.p4 (like {schema}.items including all); insert into {schema}.p4 values (35);"
                f"alter table {schema}.items attach partition {schema}.p4 for values from (30) to (40)"
            )
        diary.run("insert into items values (31)")
        diary.catch_up(1)
        assert diary.records()[-1]["changes"] == [{"kind": "attach", "was": None, "now": f"{schema}.p4"}]
        postgres.execute(f"alter table {schema}.items detach partition {schema}.p1")
        diary.run("insert into items values (12)")
        diary.catch_up(1)
        assert diary.records()[-1]["changes"] == [{"kind": "detach", "was": f"{schema}.p1", "now": None}]
        postgres.execute(f"truncate {schema}.p3")  # which the server does not report
        diary.run("insert into items values (13)")
        diary.catch_up(1)
        assert diary.records()[-1]["changes"] == [{"kind": "replace", "was": None, "now": f"{schema}.p3"}]
    finally:
        diary.close()


def test_a_constant_default_of_a_partitioned_table_is_recorded(postgres: PostgresBench, tmp_path: Path) -> None:
    schema = postgres.schema
    postgres.execute(
        f"drop table {schema}.items; create table {schema}.items (id int8 primary key) partition by range (id);"
        f"create table {schema}.p1 partition of {schema}.items for values from (0) to (10)"
    )
    postgres.capture.prepare(postgres.begin)
    diary = Diary(postgres, tmp_path / "log")
    try:
        diary.run("insert into items values (1)")
        diary.catch_up(1)
        diary.run("alter table items add a int default 8", "insert into items values (2)")
        diary.catch_up(1)
        (change,) = diary.records()[-1]["changes"]
        assert (change["at_rest"], change["value"]) == ("constant", "8")
    finally:
        diary.close()


@pytest.mark.parametrize("kind", ["plain", "partitioned"])
def test_an_unfinished_alter_table_blocks_nothing(
    postgres: PostgresBench, server: EmbeddedPostgres, tmp_path: Path, kind: str
) -> None:
    schema = postgres.schema
    postgres.execute(f"alter table {schema}.items add g int8 generated always as (id * 2) stored, add v int default 1")
    if kind == "partitioned":
        postgres.execute(
            f"drop table {schema}.items; create table {schema}.items (id int8 primary key, v int default 1)"
            f" partition by range (id); create table {schema}.p1 partition of {schema}.items for values from (0) to (9)"
        )
    postgres.capture.prepare(postgres.begin)
    diary = Diary(postgres, tmp_path / "log")
    postgres.execute(f"insert into {schema}.items (id) values (1)")
    theirs = PostgresCapture(replace(postgres.capture.settings, publication_create=False))
    with server.connect() as other, other.transaction(force_rollback=True):
        other.execute(f"alter table {schema}.items add x int".encode())
        diary.catch_up(1)
        for capture in (postgres.capture, theirs):
            capture.prepare(diary.log.position)
            assert [table.table.name for table in capture.tables()] == ["items", "others"]
            assert len(capture.publications_by_table()) == 2
    assert {column["name"]: column["default"] for column in diary.records()[0]["columns"]}["v"] == "1"
    diary.close()


def test_the_schema_of_a_load_has_the_facts_of_its_snapshot(postgres: PostgresBench, diary: Diary) -> None:
    with postgres.capture.snapshot() as snapshot, snapshot.reader() as reader:
        shape = reader.describe(diary.log.latest_schemas()[0].table)
    assert shape == diary.log.latest_schemas()[0]
    assert shape.facts is not None
    assert shape.facts == diary.log.latest_schemas()[0].facts
