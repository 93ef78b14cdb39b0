"""Tables that keep more than the source has, through every ALTER that matters: the past stays, and what the source
wrote anew comes beside it. What each must hold is told by a plain account, in Python, of its rows and what became of
them."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

import polars as pl
import psycopg
import pytest
from psycopg.rows import dict_row

from tailrace.changelog.read.reader import ChangeLog
from tailrace.control.evolution_preview import ADDED_AGAIN, COMPARED, preview
from tailrace.errors import TableUnusable
from tailrace.pipeline.loads import load_commit
from tailrace.pipeline.loads.history_catch_up import plan_carry_over
from tailrace.pipeline.report import TableEvolution, TableState
from tailrace.tasks.work import Outcome, RefreshWork
from tests.integration.test_evolution import SETTLED_SECONDS_MAX, run, settled
from tests.support.loads import Local, Scene, managed_table, wait_for_state
from tests.support.pipelines import eventually, execute, lose_the_slot

Row = dict[str, Any]
MODES = {"h": "mode: history", "a": "mode: append", "s": "soft_delete: true"}
RULES = ", ".join(f'"public.{name}_*": {{{said}}}' for name, said in MODES.items())
MADE = (
    "CREATE TABLE {t} (id int PRIMARY KEY, a int NOT NULL, b text, n numeric(10,2), v varchar(5)); "
    "INSERT INTO {t} SELECT g, g * 10, 'b' || g, g + 0.5, 'v' || g FROM generate_series(1, 4) g"
)
COLUMNS = ("id", "a", "b", "n", "v")


@dataclass(frozen=True, kw_only=True)
class Altered:
    """What is done to a table at the source, and to what its lake table holds of before."""

    sql: str
    becomes: Callable[[Row], Row] = lambda row: row
    reads: bool = False
    """Whether the table is read again."""


def aside(name: str) -> Callable[[Row], Row]:
    return lambda row: {**row, name: None, f"{name}__dropped": row[name]}


def recast(name: str, how: Callable[[Any], Any]) -> Callable[[Row], Row]:
    return lambda row: {**row, name: None if row[name] is None else how(row[name])}


def two_places(number: int) -> Decimal:
    return Decimal(number).quantize(Decimal("0.01"))


def renamed(row: Row) -> Row:
    return {"z" if name == "a" else name: value for name, value in row.items()}


ALTERS = {
    "add": Altered(sql="ALTER TABLE {t} ADD c int", becomes=lambda row: row | {"c": None}),
    "constant": Altered(sql="ALTER TABLE {t} ADD c int DEFAULT 7", becomes=lambda row: row | {"c": 7}),
    "volatile": Altered(sql="ALTER TABLE {t} ADD c serial", becomes=lambda row: row | {"c": None}, reads=True),
    "drop": Altered(sql="ALTER TABLE {t} DROP b"),
    "rename": Altered(sql="ALTER TABLE {t} RENAME a TO z", becomes=renamed),
    "longer": Altered(sql="ALTER TABLE {t} ALTER n TYPE numeric(14,2), ALTER v TYPE text"),
    "widen": Altered(sql="ALTER TABLE {t} ALTER a TYPE bigint", reads=True),
    "widen_key": Altered(sql="ALTER TABLE {t} ALTER id TYPE bigint", reads=True),
    "using": Altered(sql="ALTER TABLE {t} ALTER a TYPE bigint USING a * (id % 2 + 1)", reads=True),
    "to_numeric": Altered(
        sql="ALTER TABLE {t} ALTER a TYPE numeric(14,2)", becomes=recast("a", two_places), reads=True
    ),
    "to_text": Altered(
        sql="ALTER TABLE {t} ALTER a TYPE text, ALTER n TYPE text",
        becomes=lambda row: recast("n", str)(recast("a", str)(row)), reads=True,
    ),
    "narrow": Altered(sql="ALTER TABLE {t} ALTER a TYPE smallint", becomes=aside("a"), reads=True),
    "narrow_numeric": Altered(sql="ALTER TABLE {t} ALTER n TYPE numeric(5,1)", becomes=aside("n"), reads=True),
    "to_int": Altered(sql="ALTER TABLE {t} ALTER b TYPE int USING length(b)", becomes=aside("b"), reads=True),
    "several": Altered(
        sql="ALTER TABLE {t} ALTER a TYPE bigint, DROP b; ALTER TABLE {t} RENAME a TO z", becomes=renamed, reads=True
    ),
    "again": Altered(
        sql="DROP TABLE {t}; CREATE TABLE {t} (id int PRIMARY KEY, a text); INSERT INTO {t} VALUES (1, '10'), (9, 'x')",
        becomes=recast("a", str), reads=True,
    ),
}  # fmt: skip


class Account:
    """What one table must hold. The rows of the past, those that are, and every change, as dictionaries."""

    def __init__(self, mode: str, rows: list[Row]) -> None:
        self.mode = mode
        self.now = {row["id"]: row for row in rows}
        self.past: list[Row] = []
        self.gone: dict[int, Row] = {}
        self.changes = [row | {"_op": "read"} for row in rows]

    def put(self, row: Row, op: str) -> None:
        self.changes.append(row | {"_op": op})
        if (was := self.now.get(row["id"])) is not None:
            self.past.append(was)
        self.now[row["id"]] = row

    def delete(self, key: int) -> None:
        self.changes.append({"id": key, "_op": "delete"})
        self.past.append(self.now[key])
        self.gone[key] = self.now.pop(key)

    def truncate(self) -> None:
        self.changes.append({"_op": "truncate"})
        self.past += self.now.values()
        self.gone |= self.now
        self.now = {}

    def alter(self, altered: Altered, source: list[Row]) -> None:
        """Rows become what they can be; then those that the source has otherwise come beside them, or end."""
        self.past, self.changes = list(map(altered.becomes, self.past)), list(map(self._change(altered), self.changes))
        self.now = {key: altered.becomes(row) for key, row in self.now.items()}
        self.gone = {key: altered.becomes(row) for key, row in self.gone.items()}
        found = {row["id"]: row for row in source}
        for key in list(self.now):
            if key not in found:
                self.past.append(self.now[key])
                self.gone[key] = self.now.pop(key)
        for key, row in found.items():
            was = self.now.get(key)
            if was is None or any(was[name] != value for name, value in row.items()):
                self.past += [was] if was is not None else []
                self.now[key] = row
        self.changes += [row | {"_op": "read"} for row in source] if altered.reads else []

    @staticmethod
    def _change(altered: Altered) -> Callable[[Row], Row]:
        def becomes(row: Row) -> Row:
            whole = altered.becomes({**dict.fromkeys(COLUMNS), **row})
            return {name: None if name == "c" else value for name, value in whole.items()}

        return becomes

    def content(self) -> list[Row]:
        if self.mode == "a":
            return self.changes
        if self.mode == "s":
            return [row | {"_deleted": False} for row in self.now.values()] + [
                row | {"_deleted": True} for key, row in self.gone.items() if key not in self.now
            ]
        return [row | {"_current": True} for row in self.now.values()] + [
            row | {"_current": False} for row in self.past
        ]


def in_source(database: str, table: str) -> list[Row]:
    with psycopg.connect(database, row_factory=dict_row) as connection:
        return connection.execute(f"SELECT * FROM {table}").fetchall()


OWN = {"_op", "_current", "_deleted"}


def in_lake(applying: Local, table: str) -> list[Row]:
    frame = pl.read_delta(str(managed_table(applying, table).location.path))
    names = [name for name in frame.columns if not name.startswith("_") or name in OWN]
    return frame.select(names).to_dicts()


def counted(rows: list[Row]) -> Counter[str]:
    """What each row has, null or not there being the same; types count."""
    return Counter(str(sorted((name, value) for name, value in row.items() if value is not None)) for row in rows)


def assert_told(applying: Local, accounts: dict[str, Account]) -> None:
    wrong = {}
    for table, account in accounts.items():
        expected, found = counted(account.content()), counted(in_lake(applying, table))
        if found != expected:
            wrong[table] = (found - expected, expected - found)
    assert not wrong


def assert_in_time(applying: Local, table: str) -> None:
    """Versions of a row follow one another, and none begins before the one before."""
    columns = ("id", "_seq", "_valid_from", "_valid_to", "_current")
    rows = pl.read_delta(str(managed_table(applying, table).location.path)).select(columns).rows()
    for key in {row[0] for row in rows}:
        mine = sorted((row for row in rows if row[0] == key), key=lambda row: (row[2], row[4], row[1]))
        for one, two in itertools.pairwise(mine):
            assert one[3] is not None, (table, mine)
            assert one[2] <= one[3] <= two[2], (table, mine)


def make(database: str, *names: str) -> list[str]:
    """A table of each name for each mode."""
    tables = [f"{mode}_{name}" for name in names for mode in MODES]
    for table in tables:
        run(database, table, MADE)
    return tables


def begin(database: str, scene: Scene, applying: Local, tables: list[str]) -> dict[str, Account]:
    """Give each a past."""
    assert scene.settled(applying)
    accounts = {table: Account(table[0], in_source(database, table)) for table in tables}
    for table, account in accounts.items():
        row = account.now[2] | {"a": 21}
        run(database, table, "UPDATE {t} SET a = 21 WHERE id = 2; DELETE FROM {t} WHERE id = 3")
        account.put(row, "update")
        account.delete(3)
    return accounts


@pytest.mark.timeout(SETTLED_SECONDS_MAX + 480)
def test_the_past_stays_through_every_alter_with_and_without_rows_after_it(database: str, tmp_path: Path) -> None:
    tables = make(database, *ALTERS)
    with Scene(tmp_path, database, connections=2).set_tables(f"rules: {{{RULES}}}") as scene:
        with scene.loader() as applying:
            accounts = begin(database, scene, applying, tables)
            assert scene.settled(applying)
        for table in accounts:
            run(database, table, ALTERS[table[2:]].sql)
        told = dry_run(scene)
        with scene.loader() as applying:
            assert settled(scene, applying, *accounts)
            for table, account in accounts.items():
                altered = ALTERS[table[2:]]
                account.alter(altered, in_source(database, table))
                assert told[table].action == ("refresh" if altered.reads else "apply"), told[table]
            assert_told(applying, accounts)
            assert told["h_widen"].steps == (COMPARED,)
            assert told["a_narrow"].steps == ("start a empty, and keep its old values in another column", ADDED_AGAIN)
            assert told["s_several"].steps == ("rename a to z", "keep b, which the source no longer has", COMPARED)
            for table, account in accounts.items():
                account.put(updated(database, table, account), "update")
            assert settled(scene, applying, *accounts)
            assert_told(applying, accounts)
            for table in accounts:
                if table.startswith("h_"):
                    assert_in_time(applying, table)


def updated(database: str, table: str, account: Account) -> Row:
    """A row that is changed in the new shape; in a mirror it keeps what the source no longer has."""
    name = "z" if ALTERS[table[2:]].becomes is renamed else "a"
    with psycopg.connect(database, row_factory=dict_row) as connection:
        row = connection.execute(f"UPDATE {table} SET {name} = '5' WHERE id = 1 RETURNING *").fetchone()
    assert row is not None
    kept = {name: value for name, value in account.now[1].items() if name not in row}
    return row | (kept if account.mode == "s" else {})


def dry_run(scene: Scene) -> dict[str, TableEvolution]:
    return {found.table: found for found in preview(scene.settings)}


def test_changes_between_two_alters_are_applied_in_the_shape_they_have(database: str, tmp_path: Path) -> None:
    """While nobody applies: what the log has comes first, each change once, and the load after it."""
    tables = make(database, "t")
    with Scene(tmp_path, database).set_tables(f"rules: {{{RULES}}}") as scene:
        with scene.loader() as applying:
            accounts = begin(database, scene, applying, tables)
            assert scene.settled(applying)
        for table in tables:
            run(database, table, "INSERT INTO {t} VALUES (5, 50); ALTER TABLE {t} ALTER a TYPE bigint")
            run(database, table, "UPDATE {t} SET a = 51 WHERE id = 5")
        scene.wait_for_capture()  # so that the catalogue is asked about that shape while it is so
        for table in tables:
            run(database, table, "ALTER TABLE {t} ALTER a TYPE text USING 'x' || a")
            run(database, table, "UPDATE {t} SET a = 'y' WHERE id = 5")
        with scene.loader() as applying:
            assert settled(scene, applying, *tables)
            empty = dict.fromkeys(("b", "n", "v"))
            altered = Altered(sql="", becomes=recast("a", str), reads=True)
            for table, account in accounts.items():
                account.put({"id": 5, "a": 50, **empty}, "insert")
                account.put({"id": 5, "a": 51, **empty}, "update")
                account.put({"id": 5, "a": "y", **empty}, "update")
                account.alter(altered, in_source(database, table))
            assert_told(applying, accounts)
            assert_in_time(applying, "h_t")


def test_what_the_log_has_of_a_table_from_before_it_was_made_again_is_not_passed_over(
    database: str, tmp_path: Path
) -> None:
    tables = make(database, "again")
    with Scene(tmp_path, database).set_tables(f"rules: {{{RULES}}}") as scene:
        with scene.loader() as applying:
            accounts = begin(database, scene, applying, tables)
            assert scene.settled(applying)
        for table, account in accounts.items():
            first, last = account.now[1] | {"a": 99}, account.now[4] | {"a": 88}
            run(database, table, "UPDATE {t} SET a = 99 WHERE id = 1; UPDATE {t} SET a = 88 WHERE id = 4")
            run(database, table, "DELETE FROM {t} WHERE id = 4; " + ALTERS["again"].sql)
            account.put(first, "update")
            account.put(last, "update")
            account.delete(4)
        comings = ChangeLog.open(scene.settings.log.path).coverage
        assert eventually(
            lambda: sum(coming.confirmed_at is not None for coming in comings().starts) == 2 * len(tables)
        )
        with scene.loader() as applying:
            assert settled(scene, applying, *accounts)
            for table, account in accounts.items():
                account.alter(ALTERS["again"], in_source(database, table))
            assert_told(applying, accounts)
            assert_in_time(applying, "h_again")


def test_what_cannot_be_known_by_its_key_any_more_stops_and_is_whole(database: str, tmp_path: Path) -> None:
    alters = {
        "key": "ALTER TABLE {t} DROP CONSTRAINT {t}_pkey, ADD PRIMARY KEY (a)",
        "short": "ALTER TABLE {t} ALTER id TYPE smallint",
    }
    tables = make(database, *alters)
    with Scene(tmp_path, database).set_tables(f"rules: {{{RULES}}}") as scene:
        with scene.loader() as applying:
            accounts = begin(database, scene, applying, tables)
            assert scene.settled(applying)
        for table in tables:
            run(database, table, alters[table[2:]])
        told = dry_run(scene)
        stopped, going = ([table for table in tables if (table[0] == "a") is appends] for appends in (False, True))
        with scene.loader() as applying:
            for table in stopped:
                wait_for_state(applying, table, TableState.FAILED)
                error = managed_table(applying, table).error
                assert error is not None
                assert (error.code, "another `name`" in error.hint) == ("schema-changed", True)
                assert told[table].action == "stop"
                assert told[table].hint == error.hint
                assert str(error.fields["change"]) in str(told[table].why)
            assert_told(applying, {table: accounts[table] for table in stopped})
            assert settled(scene, applying, *going)
            for table in going:
                becomes = aside("id") if table == "a_short" else Altered(sql="").becomes
                accounts[table].alter(Altered(sql="", becomes=becomes, reads=True), in_source(database, table))
            assert_told(applying, {table: accounts[table] for table in going})


def test_columns_that_come_and_go_with_a_truncate_or_without_a_key_stop_nothing(database: str, tmp_path: Path) -> None:
    tables = make(database, "t")
    execute(database, "CREATE TABLE a_keyless (x int, y int)", "ALTER TABLE a_keyless REPLICA IDENTITY FULL")
    execute(database, "INSERT INTO a_keyless VALUES (1, 2)")
    with Scene(tmp_path, database).set_tables(f"rules: {{{RULES}}}") as scene, scene.loader() as applying:
        accounts = begin(database, scene, applying, tables)
        assert scene.settled(applying)
        for table in tables:  # the new file may be the ALTER's or the TRUNCATE's, so the rows are not trusted
            altered = f"ALTER TABLE {table} ADD c int DEFAULT 7"
            execute(database, f"TRUNCATE {table}; {altered}; INSERT INTO {table} VALUES (1, 1)")
        execute(database, "ALTER TABLE a_keyless DROP y", "INSERT INTO a_keyless VALUES (3)")
        assert settled(scene, applying, *tables, "a_keyless")
        for table, account in accounts.items():
            account.truncate()
            account.alter(ALTERS["constant"], [])
            (row,) = in_source(database, table)
            account.put(row, "insert")
            account.changes.append(row | {"_op": "read"})
        assert_told(applying, accounts)
        assert counted(in_lake(applying, "a_keyless")) == counted(
            [{"x": 1, "y": 2, "_op": "read"}, {"x": 3, "_op": "insert"}]
        )


def test_a_load_that_is_owed_is_made_after_a_crash(database: str, tmp_path: Path) -> None:
    """The table has the new columns, and nobody has told it what the source made of its rows."""
    tables = make(database, "t")
    with Scene(tmp_path, database).set_tables(f"rules: {{{RULES}}}") as scene:
        with scene.loader() as applying:
            accounts = begin(database, scene, applying, tables)
            assert scene.settled(applying)
            source = applying._source
        for table in tables:
            run(database, table, ALTERS["using"].sql)
            found = managed_table(applying, table)
            now = source.describe([found.table])[found.table]
            carried = plan_carry_over(applying.registry, found, now, asked=False)
            assert carried is not None
            assert found.applied_position is not None
            found.location.open().evolve(carried, found.applied_position)
        with scene.loader() as applying:
            assert settled(scene, applying, *tables)
            for table, account in accounts.items():
                account.alter(ALTERS["using"], in_source(database, table))
            assert_told(applying, accounts)


@pytest.mark.parametrize("rewrite", ["refresh", "stop"])
def test_a_load_that_is_owed_for_what_was_lost_is_made_though_the_table_has_come_further(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rewrite: str
) -> None:
    """By the log it goes past what the source had discarded, and only then it shows that the load cannot land. Nothing
    was altered, so no policy is asked."""
    tables = make(database, "t")

    def full(work: RefreshWork) -> Outcome:
        return Outcome(table=work.schema.table, error=TableUnusable("the disk is full", hint="Make room."))

    scene = Scene(tmp_path, database, mode="when_needed")
    scene.set_tables(f"rules: {{{RULES}}}", f"evolution: {{rewrite: {rewrite}}}")
    with scene, scene.loader() as applying:
        accounts = begin(database, scene, applying, tables)
        assert scene.settled(applying)
    lose_the_slot(database)
    for table in tables:  # nobody hears of it
        run(database, table, "UPDATE {t} SET a = 77 WHERE id = 4; INSERT INTO {t} VALUES (7, 70)")
    with scene:
        for table, account in accounts.items():
            run(database, table, "INSERT INTO {t} VALUES (8, 80)")
            account.changes.append({"id": 8, "a": 80, "_op": "insert"})
        scene.wait_for_capture()
        with monkeypatch.context() as patched, scene.loader() as applying:
            patched.setattr(load_commit, "refresh_table", full)
            for table in tables:
                wait_for_state(applying, table, TableState.FAILED)
        with scene.loader() as applying:
            assert settled(scene, applying, *tables)
            for table, account in accounts.items():
                account.alter(Altered(sql="", reads=True), in_source(database, table))
            assert_told(applying, accounts)
            assert_in_time(applying, "h_t")


def test_a_person_who_has_a_stopped_table_loaded_keeps_the_past_where_it_can_be(database: str, tmp_path: Path) -> None:
    tables = make(database, "t")
    lines = (f"rules: {{{RULES}}}", "evolution: {retype: stop, rewrite: stop}")
    with Scene(tmp_path, database).set_tables(*lines) as scene, scene.loader() as applying:
        accounts = begin(database, scene, applying, tables)
        assert scene.settled(applying)
        for table in tables:
            run(database, table, ALTERS["narrow"].sql)
            wait_for_state(applying, table, TableState.FAILED)
            assert scene.pipeline.ask("snapshot", f"public.{table}").returncode == 0
        assert settled(scene, applying, *tables)
        for table, account in accounts.items():
            account.alter(ALTERS["narrow"], in_source(database, table))
        assert_told(applying, accounts)


def test_a_load_in_a_shape_of_before_begins_again(database: str, tmp_path: Path) -> None:
    """A mirror goes on while it is read again, so it may have taken on another shape when the load lands."""
    run(database, "s_t", MADE)
    asked = threading.Event()

    def alter() -> None:
        if asked.is_set():
            asked.clear()
            run(database, "s_t", "ALTER TABLE {t} ADD c int")
            assert eventually(has_c)

    def has_c() -> bool:
        shape = managed_table(applying, "s_t").schema
        return shape is not None and "c" in shape.names

    scene = Scene(tmp_path, database).set_tables(f"rules: {{{RULES}}}")
    with scene, scene.loader(before=lambda _: alter()) as applying:
        accounts = begin(database, scene, applying, ["s_t"])
        assert scene.settled(applying)
        load = managed_table(applying, "s_t").last_load
        asked.set()
        scene.pipeline.ask("snapshot", "public.s_t")
        assert eventually(lambda: managed_table(applying, "s_t").last_load is not load)
        assert settled(scene, applying, "s_t")
        accounts["s_t"].alter(ALTERS["add"], in_source(database, "s_t"))
        assert_told(applying, accounts)
        assert all(row.keys() == {*COLUMNS, "c", "_deleted"} for row in in_lake(applying, "s_t")), "none beside"
