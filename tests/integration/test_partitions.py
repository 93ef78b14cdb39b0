"""Partitioned tables over a real server: loaded, changed, set aside, rebuilt, stopped and loaded anew."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl

from tailrace.deadletters.store import DeadLetterStore
from tailrace.model.schema import TableId
from tailrace.pipeline.report import TableState
from tests.support.loads import Local, Scene, managed_table, wait_for_state
from tests.support.pipelines import eventually, execute

MADE = (
    "CREATE TABLE m (id int PRIMARY KEY, region text, day date, large text)",
    "ALTER TABLE m ALTER large SET STORAGE EXTERNAL",
    "INSERT INTO m SELECT g, 'r ' || g % 3, date '2026-01-01' + g % 2, repeat('l', 3000) FROM generate_series(1, 60) g",
    "CREATE TABLE h (id int PRIMARY KEY, x int)",
    "INSERT INTO h SELECT g, g FROM generate_series(1, 5) g",
    "CREATE TABLE k (region text, x int)",
    "ALTER TABLE k REPLICA IDENTITY FULL",
    "INSERT INTO k SELECT 'a/b', 1 FROM generate_series(1, 4)",
    "CREATE TABLE wrong (id int PRIMARY KEY)",
    "CREATE TABLE r (id int PRIMARY KEY, region text, other text)",
    "INSERT INTO r VALUES (1, 'a', 'b/é')",
)
SECONDS_MAX = 300.0
"""A commit by Spark is several jobs."""
RULES = (
    "on_bad_row: dead-letter",
    "partition_by: [region]",
    "rules:",
    '  "public.m": {partition_by: [area, day], columns: {region: area}}',
    '  "public.h": {mode: history, partition_by: [_current]}',
)


def rows(applying: Local, name: str, *columns: str) -> list[tuple[Any, ...]]:
    return sorted(pl.read_delta(str(managed_table(applying, name).location.path)).select(columns).rows(), key=str)


def test_partitioned_tables_follow_their_source(database: str, tmp_path: Path) -> None:
    execute(database, *MADE)
    with Scene(tmp_path, database).set_tables(*RULES) as scene:
        with scene.loader() as applying:
            wait_for_state(applying, "wrong", TableState.FAILED)
            error = managed_table(applying, "wrong").error
            assert error is not None
            assert (error.code, error.fields["column"]) == ("table-unusable", "region")
            assert scene.settled(applying)
            assert len({Path(file).parent for file in managed_table(applying, "m").location.open().files()}) == 6
            execute(
                database,
                "UPDATE m SET region = 'a%=/b' WHERE id < 5",
                "DELETE FROM m WHERE id = 9",
                "UPDATE m SET id = 100, day = NULL WHERE id = 10",
                "INSERT INTO m VALUES (200, '', '2026-01-01', 'x')",
                "UPDATE h SET x = 0 WHERE id < 3",
                "DELETE FROM k WHERE ctid = '(0,1)'",
                "UPDATE k SET region = NULL",
            )
            assert scene.settled(applying)
            assert [row for row in rows(applying, "m", "id", "area") if row[1] == "a%=/b"] == [
                (1, "a%=/b"),
                (2, "a%=/b"),
                (3, "a%=/b"),
                (4, "a%=/b"),
            ]
            assert rows(applying, "k", "region", "x") == [(None, 1)] * 3
            assert rows(applying, "h", "id", "x", "_current")[:3] == [(1, 0, True), (1, 1, False), (2, 0, True)]
            (letter,) = json.loads(scene.pipeline.ask("dead-letters", "list", "--json").stdout)["letters"]
            assert (letter["table"], letter["code"]) == ("m", "value-unfit")
            assert "partition" in letter["cause"]
            assert 200 not in dict(rows(applying, "m", "id", "area"))
            execute(database, "UPDATE m SET region = 'mended' WHERE id = 200")
            scene.pipeline.ask("dead-letters", "replay")
            letters = DeadLetterStore(scene.settings.log.path, TableId("public", "m"))
            assert eventually(lambda: letters.replay_requested_at is None, SECONDS_MAX)
            assert scene.settled(applying)
            before = rows(applying, "m", "id", "area", "day", "large")
            assert (200, "mended") in rows(applying, "m", "id", "area")
        rebuilt = scene.pipeline.ask("rebuild", "public.m")
        assert rebuilt.returncode == 0, rebuilt.stderr
        with scene.loader() as applying:
            assert scene.settled(applying)
            assert rows(applying, "m", "id", "area", "day", "large") == before
            execute(database, "ALTER TABLE r DROP region; ALTER TABLE r RENAME other TO region")
            execute(database, "ALTER TABLE m DROP day")
            told = scene.pipeline.ask("evolve", "--dry-run").stdout
            assert "the partition column does not exist" in told
            execute(database, "INSERT INTO r VALUES (2, 'c')")
            assert eventually(lambda: len(rows(applying, "r", "id")) == 2, SECONDS_MAX)
            assert rows(applying, "r", "id", "region", "region__dropped") == [(1, "b/é", "a"), (2, "c", None)]
            execute(database, "UPDATE m SET region = 'later' WHERE id = 1")
            wait_for_state(applying, "m", TableState.FAILED)
            error = managed_table(applying, "m").error
            assert error is not None
            assert (error.code, error.fields["column"]) == ("table-unusable", "day")
            assert rows(applying, "m", "id", "area", "day", "large") == before
        scene.set_tables("partition_by: []", 'rules: {"public.h": {mode: history, partition_by: [_current]}}')
        told = scene.pipeline.ask("evolve", "--dry-run").stdout
        assert "the table was made with another table spec than the settings ask for" in told
        assert "made=mirror, partitioned by region, asked=mirror)" in told
        with scene.loader() as applying:
            wait_for_state(applying, "m", TableState.FAILED)
            error = managed_table(applying, "m").error
            assert error is not None
            assert error.code == "form-changed"
            assert scene.pipeline.ask("snapshot", "public.m", "public.k").returncode == 0
            wait_for_state(applying, "m", TableState.LIVE)
            wait_for_state(applying, "k", TableState.LIVE)
            scene.assert_equal(applying, "m", "k")
