"""One point across tables: money that moves between two of them neither appears nor vanishes."""

from __future__ import annotations

import json
import time
from datetime import datetime
from pathlib import Path

import psycopg
import pyarrow as pa
import pytest
from deltalake import DeltaTable

from tailrace.pipeline.points.consistent_point import build_point
from tailrace.pipeline.points.ledger import ConsistentPoint, Ledger
from tests.support.loads import Scene, managed_table
from tests.support.pipelines import COME_SECONDS_MAX, eventually, execute
from tests.support.transfers import ACCOUNTS, ALL_MONEY, MADE, transfers

POINTS_MIN = 8


def money_in(lake: Path, table: str, version: int) -> int:
    found = pa.table(DeltaTable(str(lake / "public" / table), version=version).scan(columns=["money"]))
    assert found.num_rows == ACCOUNTS
    return sum(found.column("money").to_pylist())


def test_no_point_sees_money_appear_or_vanish(database: str, tmp_path: Path) -> None:
    execute(database, *MADE)
    ledger = Ledger(tmp_path / "changes")

    def whole() -> dict[tuple[int, ...], ConsistentPoint]:
        return {tuple(point.versions.values()): point for point in ledger.points() if not point.missing}

    with Scene(tmp_path, database) as scene, scene.loader() as applying:
        assert scene.settled(applying)
        applying.by_hand = True
        with transfers(database) as stopping:
            deadline = time.monotonic() + COME_SECONDS_MAX
            while len(whole()) < POINTS_MIN and time.monotonic() < deadline:
                applying._bring_tables_to(applying.registry.refresh_index())
                stopping.wait(0.1)
        points = whole()
        assert len(points) >= POINTS_MIN, "they are different ones"
        sums = {
            sum(money_in(tmp_path / "lake", table.name, version) for table, version in point.versions.items())
            for point in points.values()
        }
        assert sums == {ALL_MONEY}


def test_a_table_that_is_worked_on_is_missing_and_is_there_again_though_nothing_more_comes(
    database: str, tmp_path: Path
) -> None:
    execute(database, *MADE)
    with Scene(tmp_path, database) as scene, scene.loader() as applying:
        scene.record_point(applying)
        before = Ledger(tmp_path / "changes").at()
        left = managed_table(applying, "left_accounts")
        with left.lock:
            execute(database, "UPDATE right_accounts SET money = 0 WHERE id = 1")
            scene.wait_for_capture()
            right = managed_table(applying, "right_accounts")
            assert eventually(lambda: not applying.registry.pending(right, applying.registry.refresh_index()))
            assert eventually(lambda: build_point(applying.registry, applying.registry.refresh_index()) is not None)
            applying._bring_tables_to(applying.registry.refresh_index())
            *_, last = Ledger(tmp_path / "changes").points()
            assert (list(last.versions), list(last.missing)) == ([right.table], [left.table])
            told = scene.pipeline.ask("at").stdout
            assert f"commit {before.commit}\n" in told, "the last one that has both"
        assert scene.settled(applying)
        applying.advance_skipped()
        after = Ledger(tmp_path / "changes").at()
        assert not after.missing
        assert after.versions[right.table] > before.versions[right.table]
        assert after.versions[left.table] >= before.versions[left.table]


def test_just_after_a_load_the_time_is_the_sources_whatever_our_own_clock_says(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ours is an hour ahead: a point that bore its time would hide all that are noted within the next hour."""
    execute(database, *MADE)

    def server_time() -> datetime:
        with psycopg.connect(database) as connection:
            ((now,),) = connection.execute("SELECT clock_timestamp()").fetchall()
        assert isinstance(now, datetime)
        return now

    ahead = time.time_ns() + 3_600_000_000_000
    monkeypatch.setattr(time, "time_ns", lambda: ahead)
    begun = server_time()
    with Scene(tmp_path, database) as scene, scene.loader() as applying:
        scene.record_point(applying)
        loaded = Ledger(tmp_path / "changes").at()
        assert begun <= loaded.time <= server_time()
        execute(database, "UPDATE left_accounts SET money = 0 WHERE id = 1")
        scene.record_point(applying)
        changed = Ledger(tmp_path / "changes").at()
        assert loaded.time < changed.time <= server_time()
    with Scene(tmp_path, database) as scene, scene.loader() as applying:
        scene.record_point(applying)
        assert Ledger(tmp_path / "changes").at().time == changed.time, "nothing has been committed since"


def test_points_are_told_by_time_and_by_position(database: str, tmp_path: Path) -> None:
    execute(database, *MADE, 'CREATE TABLE "z\nz" (id int PRIMARY KEY)')
    scene = Scene(tmp_path, database)
    with scene:
        assert scene.pipeline.ask("at").returncode == 2, "there is none yet"
        with scene.loader() as applying:
            points = []
            for number in (1, 2):
                execute(database, f"UPDATE left_accounts SET money = 0 WHERE id = {number}")
                scene.record_point(applying)
                points.append(json.loads(scene.pipeline.ask("at", "--json").stdout))
        assert scene.pipeline.ask("evolve", "--dry-run").stdout.splitlines()[2:] == ["public.z z: nothing to do"]
    first, second = points
    assert [(table["schema"], table["table"]) for table in second["tables"]] == [
        ("public", "left_accounts"),
        ("public", "right_accounts"),
        ("public", "z\nz"),
    ]
    assert first["tables"][0]["version"] < second["tables"][0]["version"]
    assert first["tables"][1] == second["tables"][1]
    assert first["time"] < second["time"]
    for flag, name in (("--position", "position"), ("--time", "time")):
        assert json.loads(scene.pipeline.ask("at", flag, first[name], "--json").stdout) == first
        assert json.loads(scene.pipeline.ask("at", flag, second[name], "--json").stdout) == second
    version = second["tables"][0]["version"]
    told = scene.pipeline.ask("at", "--time", "2999-01-01").stdout.splitlines()
    assert (told[1], len(told)) == (f"public.left_accounts: version {version}", 4)
    assert told[3].startswith("public.z z: version "), "a name is one line"
    for wrong, said in (
        (("--time", "yesterday"), "the time is not valid"),
        (("--time", "1999-01-01"), "the first consistent point is later"),
        (("--position", "here"), "not a log sequence number"),
        (("--position", "0/1", "--time", "2999-01-01"), "one of the two"),
    ):
        refused = scene.pipeline.ask("at", *wrong)
        assert (refused.returncode, said in refused.stderr) == (2, True), refused.stderr
