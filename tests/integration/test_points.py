"""One point across tables: money that moves between two of them neither appears nor vanishes."""

from __future__ import annotations

import json
import random
import threading
import time
from pathlib import Path

import psycopg
import pyarrow as pa
from deltalake import DeltaTable

from tailrace.pipeline.ledger import Ledger
from tests.support.loads import Scene
from tests.support.pipelines import execute

ACCOUNTS, MONEY = 20, 1000
POINTS_MIN = 8
MADE = tuple(
    statement
    for table in ("left_accounts", "right_accounts")
    for statement in (
        f"CREATE TABLE {table} (id int PRIMARY KEY, money int NOT NULL)",
        f"INSERT INTO {table} SELECT g, {MONEY} FROM generate_series(1, {ACCOUNTS}) g",
    )
)


def transfer(url: str, stopping: threading.Event, seed: int) -> None:
    chance = random.Random(seed)
    with psycopg.connect(url, autocommit=True) as connection:
        while not stopping.is_set():
            amount, one, other = chance.randint(1, 50), chance.randint(1, ACCOUNTS), chance.randint(1, ACCOUNTS)
            with connection.transaction():
                connection.execute("UPDATE left_accounts SET money = money - %s WHERE id = %s", (amount, one))
                connection.execute("UPDATE right_accounts SET money = money + %s WHERE id = %s", (amount, other))


def money_in(lake: Path, table: str, version: int) -> int:
    found = pa.table(DeltaTable(str(lake / "public" / table), version=version).scan(columns=["money"]))
    assert found.num_rows == ACCOUNTS
    return sum(found.column("money").to_pylist())


def test_no_point_sees_money_appear_or_vanish(database: str, tmp_path: Path) -> None:
    execute(database, *MADE)
    stopping, ledger = threading.Event(), Ledger(tmp_path / "changes")
    writers = [threading.Thread(target=transfer, args=(database, stopping, seed)) for seed in (1, 2)]
    with Scene(tmp_path, database) as scene, scene.loader() as applying:
        assert scene.settled(applying)
        for writer in writers:
            writer.start()
        try:
            deadline = time.monotonic() + 60
            while len(list(ledger.points())) < POINTS_MIN and time.monotonic() < deadline:
                applying._come_to(applying.lives.grow())
                stopping.wait(0.1)
        finally:
            stopping.set()
            for writer in writers:
                writer.join()
        points = list(ledger.points())
        assert len(points) >= POINTS_MIN
        sums = {
            sum(money_in(tmp_path / "lake", table.name, version) for table, version in point.versions.items())
            for point in points
            if len(point.versions) == 2
        }
        assert sums == {2 * ACCOUNTS * MONEY}
        assert len({tuple(point.versions.values()) for point in points}) >= POINTS_MIN, "they are different ones"


def test_points_are_told_by_time_and_by_position(database: str, tmp_path: Path) -> None:
    execute(database, *MADE)
    scene = Scene(tmp_path, database)
    with scene:
        assert scene.pipeline.ask("at").returncode == 2, "there is none yet"
        with scene.loader() as applying:
            points = []
            for number in (1, 2):
                execute(database, f"UPDATE left_accounts SET money = 0 WHERE id = {number}")
                scene.note_point(applying)
                points.append(json.loads(scene.pipeline.ask("at", "--json").stdout))
    first, second = points
    assert [(table["schema"], table["table"]) for table in second["tables"]] == [
        ("public", "left_accounts"), ("public", "right_accounts"),
    ]  # fmt: skip
    assert first["tables"][0]["version"] < second["tables"][0]["version"]
    assert first["tables"][1] == second["tables"][1]
    assert first["time"] < second["time"]
    for flag, name in (("--position", "position"), ("--time", "time")):
        assert json.loads(scene.pipeline.ask("at", flag, first[name], "--json").stdout) == first
        assert json.loads(scene.pipeline.ask("at", flag, second[name], "--json").stdout) == second
    version = second["tables"][0]["version"]
    assert f"public.left_accounts: version {version}\n" in scene.pipeline.ask("at", "--time", "2999-01-01").stdout
    for wrong, said in (
        (("--time", "yesterday"), "this is no time"), (("--time", "1999-01-01"), "the first point that is known"),
        (("--position", "here"), "not a log sequence number"),
        (("--position", "0/1", "--time", "2999-01-01"), "one of the two"),
    ):  # fmt: skip
        refused = scene.pipeline.ask("at", *wrong)
        assert (refused.returncode, said in refused.stderr) == (2, True), refused.stderr
