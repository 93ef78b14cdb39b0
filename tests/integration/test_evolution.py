"""Every ALTER that matters, with and without rows after it: the lake table equals the source by content."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from deltalake import DeltaTable

from tailrace.pipeline.report import TableState
from tests.integration.conftest import server_version
from tests.support.engines import IS_SPARK
from tests.support.loads import Local, Scene, managed_table
from tests.support.pipelines import Pipeline, eventually, execute

MADE = (
    "CREATE TABLE {t} (id int PRIMARY KEY, a int NOT NULL, b text, n numeric(10,2), v varchar(5), e int)",
    "INSERT INTO {t} SELECT g, g * 10, 'b' || g, g + 0.5, 'v' || g, NULL FROM generate_series(1, 50) g",
)


ALTERS = {
    "add": "ALTER TABLE {t} ADD c int",
    "add-two": "ALTER TABLE {t} ADD c int, ADD d timestamp",
    "add-constant": "ALTER TABLE {t} ADD c int DEFAULT 7",
    "add-constant-text": "ALTER TABLE {t} ADD c text NOT NULL DEFAULT 'it''s, \"x\" {{y}}'",
    "add-constant-array": "ALTER TABLE {t} ADD c int[] DEFAULT '{{1,2,NULL}}'",
    "add-constant-time": "ALTER TABLE {t} ADD c timestamptz DEFAULT '2020-01-02 03:04:05.678+02'",
    "add-constant-json": "ALTER TABLE {t} ADD c jsonb DEFAULT '{{\"k\": [1, 2]}}'",
    "add-constant-bytes": "ALTER TABLE {t} ADD c bytea DEFAULT '\\x00ff'",
    "add-constant-numeric": "ALTER TABLE {t} ADD c numeric(8,3) DEFAULT 1.5",
    "add-volatile": "ALTER TABLE {t} ADD c double precision DEFAULT random()",
    "add-serial": "ALTER TABLE {t} ADD c serial",
    "add-generated": "ALTER TABLE {t} ADD c int GENERATED ALWAYS AS (a + 1) STORED",
    "add-key-later": "ALTER TABLE {t} ADD c int DEFAULT 3, DROP CONSTRAINT {t}_pkey, ADD PRIMARY KEY (id, c)",
    "drop": "ALTER TABLE {t} DROP b",
    "drop-and-add": "ALTER TABLE {t} DROP b, ADD b int DEFAULT 5",
    "rename": "ALTER TABLE {t} RENAME a TO z",
    "rename-key": "ALTER TABLE {t} RENAME id TO ident",
    "swap-names": "ALTER TABLE {t} RENAME a TO x; ALTER TABLE {t} RENAME e TO a; ALTER TABLE {t} RENAME x TO e",
    "widen": "ALTER TABLE {t} ALTER a TYPE bigint",
    "widen-numeric": "ALTER TABLE {t} ALTER n TYPE numeric(14,2)",
    "widen-text": "ALTER TABLE {t} ALTER v TYPE text",
    "longer-varchar": "ALTER TABLE {t} ALTER v TYPE varchar(500)",
    "narrow": "ALTER TABLE {t} ALTER a TYPE smallint",
    "narrow-numeric": "ALTER TABLE {t} ALTER n TYPE numeric(5,1)",
    "retype": "ALTER TABLE {t} ALTER a TYPE text",
    "retype-using": "ALTER TABLE {t} ALTER a TYPE int USING a * 2",
    "retype-date": "ALTER TABLE {t} ALTER e TYPE date USING NULL",
    "key": "ALTER TABLE {t} DROP CONSTRAINT {t}_pkey, ADD PRIMARY KEY (a)",
    "key-gone": "ALTER TABLE {t} DROP CONSTRAINT {t}_pkey, REPLICA IDENTITY FULL",
    "not-null": "ALTER TABLE {t} ALTER v SET NOT NULL",
    "default": "ALTER TABLE {t} ALTER v SET DEFAULT 'x'",
    "recreate": "DROP TABLE {t}; CREATE TABLE {t} (id int PRIMARY KEY, a text); INSERT INTO {t} VALUES (1, 'new')",
    "vacuum-full": "VACUUM FULL {t}",
    "truncate": "TRUNCATE {t}",
    "several": "ALTER TABLE {t} ADD c int DEFAULT 1, DROP b, ALTER v TYPE text; ALTER TABLE {t} RENAME a TO z",
}
KEPT = {"drop": ("b",), "drop-and-add": ("b__dropped",), "several": ("b",)}
"""What stays of what was dropped."""


READ_AGAIN = {
    "add-volatile", "add-serial", "add-key-later", "widen", "narrow", "narrow-numeric", "retype",
    "retype-using", "retype-date", "key", "key-gone", "recreate",
}  # fmt: skip
"""What cannot be known without that: its rows were rewritten, or it has another key."""


SETTLED_SECONDS_MAX = 1200 if IS_SPARK else 300


def run(url: str, table: str, statements: str) -> None:
    execute(url, *(part.format(t=table) for part in statements.split("; ")))


def table_of(name: str) -> str:
    return f"t_{name.replace('-', '_')}"


def settled(scene: Scene, applying: Local, *tables: str) -> bool:
    """Whether the tables are what the catalogue shows, and all that was committed is in them."""

    def is_so(table: str) -> bool:
        now = managed_table(applying, table)
        shape = applying._source.describe([now.table])[now.table]
        assert now.state is not TableState.NEEDS_SNAPSHOT, "it is loaded by itself"
        there = now.schema == shape and now.schema is not None and now.schema.facts == shape.facts
        return there and now.state is TableState.LIVE and now.pending_schema is None and now.reload_reason is None

    waiting = list(tables)
    deadline = time.monotonic() + SETTLED_SECONDS_MAX
    while waiting and time.monotonic() < deadline:
        waiting = [table for table in waiting if not is_so(table)]
        time.sleep(0.2)
    assert not waiting, [told(applying, table) for table in waiting]
    return scene.settled(applying)


def told(applying: Local, table: str) -> str:
    """Where a table stands that did not become what it should."""
    now = managed_table(applying, table)
    owed = f"reload={now.reload_reason!r} pending={now.pending_schema} load={now.load_status}"
    return f"{table}: {now.state} {now.error!r} {owed}"


def assert_equal(scene: Scene, table: str, *kept: str) -> None:
    """By content; the lake table may have columns that the source had."""
    (verdict,) = scene.pipeline.compare(table)
    assert (verdict.missing, verdict.extra, verdict.differing) == (0, 0, 0), verdict
    assert verdict.source_rows == verdict.lake_rows
    assert verdict.columns == tuple(f"{name}: not in the source" for name in kept), verdict


def make(url: str, *tables: str) -> None:
    for table in tables:
        run(url, table, "; ".join(MADE))


@pytest.mark.timeout(SETTLED_SECONDS_MAX + 480)
def test_after_an_alter_and_no_row_more(database: str, tmp_path: Path) -> None:
    tables = {name: table_of(name) for name in ALTERS}
    make(database, *tables.values())
    with Scene(tmp_path, database, connections=2) as scene, scene.loader() as applying:
        assert scene.settled(applying)
        loads = {table: managed_table(applying, table).last_load for table in tables.values()}
        for name, table in tables.items():
            run(database, table, ALTERS[name])
        assert settled(scene, applying, *tables.values())
        for name, table in tables.items():
            assert_equal(scene, table, *KEPT.get(name, ()))
        again = {name for name, table in tables.items() if loads[table] != managed_table(applying, table).last_load}
        # Since 18 a stored generated column is sent, and each row has a value of its own in it.
        assert again == READ_AGAIN | ({"add-generated"} if server_version() >= 18 else set())


def test_versions_that_nobody_applied_meanwhile_are_gone_through(database: str, tmp_path: Path) -> None:
    make(database, "t")
    with Scene(tmp_path, database) as scene:
        with scene.loader() as applying:
            scene.assert_equal(applying, "t")
        for number, alter in enumerate(
            (
                "ALTER TABLE t ADD c int",
                "ALTER TABLE t ADD d text NOT NULL DEFAULT 'it''s'",
                "ALTER TABLE t DROP b",
                "ALTER TABLE t RENAME e TO z",
                "ALTER TABLE t ALTER n TYPE numeric(14,2)",
                "ALTER TABLE t ALTER v TYPE varchar(500)",
                "ALTER TABLE t ALTER v TYPE text",
            ),
            100,
        ):
            execute(
                database,
                alter,
                f"INSERT INTO t (id, a) VALUES ({number}, 1)",
                f"UPDATE t SET n = n + 1 WHERE id = {number - 60}",
                f"UPDATE t SET id = {-number} WHERE id = {number - 80}",
                f"DELETE FROM t WHERE id = {number - 70}",
            )
            horizon, registry = applying._source.committed_until(), applying.registry
            assert eventually(lambda: registry.refresh_index() and registry.index.position >= horizon), "captured"  # noqa: B023
        with scene.loader() as applying:
            assert settled(scene, applying, "t")
            assert_equal(scene, "t", "b")
        assert managed_table(applying, "t").last_load is None, "nothing was read again"


@pytest.mark.timeout(SETTLED_SECONDS_MAX + 480)
def test_rows_before_and_after_an_alter(database: str, tmp_path: Path) -> None:
    names = ["add", "add-constant", "drop", "rename", "widen", "retype-using", "key", "narrow", "recreate"]
    tables = {name: table_of(name) for name in names}
    make(database, *tables.values())
    with Scene(tmp_path, database) as scene, scene.loader() as applying:
        assert scene.settled(applying)
        for name, table in tables.items():
            run(database, table, "UPDATE {t} SET e = 1 WHERE id < 20; DELETE FROM {t} WHERE id = 7")
            run(database, table, ALTERS[name])
            run(database, table, "INSERT INTO {t} VALUES (100, 1000); DELETE FROM {t} WHERE id = 9")
        assert settled(scene, applying, *tables.values())
        for name, table in tables.items():
            assert_equal(scene, table, *KEPT.get(name, ()))


def test_what_would_be_done_is_told_and_nothing_is_touched(database: str, tmp_path: Path) -> None:
    names = [
        "add-constant",
        "drop",
        "drop-and-add",
        "rename",
        "retype-using",
        "default",
        "widen-text",
        "widen-numeric",
        "recreate",
    ]
    tables = {name: table_of(name) for name in names}
    make(database, *tables.values(), "changes", "stuck")
    with Scene(tmp_path, database).set_tables("rules: {public.changes: {mode: append, columns: {c: d}}}") as scene:
        with scene.loader() as applying:
            assert scene.settled(applying)
        scene.stop_capture()  # so that nobody publishes what is made again
        for name, table in tables.items():
            run(database, table, ALTERS[name])
        run(database, "changes", ALTERS["add-constant"])
        run(database, "stuck", ALTERS["retype"])
        failed = {"state": "failed", "reason": "value-unfit", "detail": "a value does not fit", "hint": "Mend it."}
        note = {"tables": [{"schema": "public", "table": "stuck", **failed}]}
        (scene.settings.log.path / "status" / "apply.json").write_text(json.dumps(note))
        scene.pipeline.stops_at("rename")
        versions = {table: lake_version(tmp_path, table) for table in tables.values()}
        told = scene.pipeline.ask("evolve", "--dry-run", "--json")
        assert told.returncode == 0, told.stderr
        found = {table["table"]: table for table in json.loads(told.stdout)["tables"]}
        assert {table["action"] for name, table in found.items() if "default" in name} == {"none"}
        added = found["t_add_constant"]
        assert (added["action"], added["steps"]) == ("apply", ["add c", "fill c with its default in every row"])
        assert found["t_retype_using"]["why"] == "its rows were rewritten"
        assert (found["t_rename"]["action"], found["t_rename"]["why"]) == ("stop", "renamed a to z")
        kept = "keep b, which the source no longer has"
        assert found["t_drop"]["steps"] == [kept]
        assert found["t_drop_and_add"]["steps"] == [
            "add b",
            "fill b with its default in every row",
            f"{kept}, as b__dropped",
        ]
        assert found["t_widen_text"]["action"] == "apply"
        assert found["t_widen_text"]["steps"] == ["record the new schema; no row changes"]
        assert (found["t_widen_numeric"]["action"], found["t_widen_numeric"]["steps"]) == ("apply", ["widen n"])
        assert (found["t_recreate"]["action"], found["t_recreate"]["why"]) == ("refresh", "dropped and created again")
        assert (found["stuck"]["action"], found["stuck"]["why"]) == ("stop", "a value does not fit"), "not loaded anew"
        assert found["changes"]["steps"] == ["add d"], "a change did not bring what came later; under the lake's name"
        said = scene.pipeline.ask("evolve", "--dry-run").stdout
        assert "public.t_retype_using: reload: its rows were rewritten\n" in said
        assert "public.t_rename: stop: renamed a to z. `evolution.rename` is `stop` for it." in said
        assert "public.t_default: nothing to do\n" in said
        assert {table: lake_version(tmp_path, table) for table in tables.values()} == versions
        refused = scene.pipeline.ask("evolve")
        assert (refused.returncode, "--dry-run" in refused.stderr) == (2, True)


def lake_version(folder: Path, table: str) -> int:
    return DeltaTable(str(folder / "lake" / "public" / table)).version()


def test_a_run_until_caught_up_evolves_what_nobody_wrote_to(database: str, tmp_path: Path) -> None:
    names = ["add-constant", "rename", "retype-using"]
    tables = {name: table_of(name) for name in names}
    make(database, *tables.values())
    pipeline = Pipeline(tmp_path, database)
    pipeline.catch_up()
    for name, table in tables.items():
        run(database, table, ALTERS[name])
    pipeline.catch_up()
    pipeline.assert_equal(*tables.values())
    assert {table["state"] for table in pipeline.status()["tables"]} == {"live"}
    point = json.loads(pipeline.ask("at", "--json").stdout)
    assert point["missing"] == [], "also the one that was loaded anew, with nothing in the log after it"
    assert {table["table"]: table["version"] for table in point["tables"]} == {
        table: lake_version(tmp_path, table) for table in tables.values()
    }
