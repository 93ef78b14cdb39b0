"""Kill the whole process group at every named place, under load; afterwards the tables equal the source."""

from __future__ import annotations

import os
import random
import subprocess
from collections import Counter
from pathlib import Path

import psycopg
import pytest

from tailrace import failpoints
from tailrace.demo.server import EmbeddedPostgres
from tailrace.demo.shop import Workload
from tailrace.demo.shop_tables import SCHEMA_SQL, TABLES, load_first_rows
from tests.support.pipelines import Pipeline, assert_log_is_whole, descendants, eventually, group_members

NAMES = [table for _, table in TABLES]
KILL_SECONDS_MAX = 400.0

# A table is described and loaded only once, so these come before the others.
FIRST = (
    "log.schema_recorded", "load.planned", "load.snapshot_open", "load.before_record", "load.after_record",
    "load.landed",
)  # fmt: skip
# Passed only by a transaction too large to hold, so one is written before each.
PIECES = ("capture.piece_read", "log.piece_written")
# Passed only by whoever puts the log in order, which has a crash test of its own (test_kill_the_sealer).
# So have dead letters and rebuilds, which need rows of their own; what is kept of a load (test_kept_loads); what only
# Iceberg tables have (test_kill_the_connector); and what the library does and keeps and a pipeline does not
# (test_kill_the_runtime, test_kill_the_stores).
IN_ORDER = ("seal.", "clean.", "trim.", "letters.", "rebuild.", "seed.", "state.", "runtime.", "iceberg.")
PLACES = [name for name in failpoints.NAMES if not name.startswith(IN_ORDER)]
ROUNDS = int(os.environ.get("TAILRACE_SOAK_ROUNDS", "0"))


@pytest.fixture
def shop(tmp_path: Path):  # type: ignore[no-untyped-def] # a generator of one pair
    with EmbeddedPostgres() as server:
        with server.connect() as connection:
            connection.execute("CREATE DATABASE shop")
        with server.connect("shop") as connection:
            connection.execute(SCHEMA_SQL)
            load_first_rows(connection, scale=0.3)
        yield (
            Pipeline(tmp_path / "pipeline", server.url("shop")),
            Workload(server.url("shop"), transactions_per_second=60),
        )


def run_into(pipeline: Pipeline, name: str, turn: int, hits: Path) -> None:
    """Run the pipeline with one failpoint armed until it has killed everything."""
    armed = {"TAILRACE_FAILPOINT": f"{name}:{turn}", "TAILRACE_FAILPOINT_LOG": str(hits)}
    # Tables that were loaded before the first row of theirs came would never be loaded again. The other places of a
    # capture are passed with or without a Spark beside it; that is tried where there is time.
    alone = name == "log.schema_recorded" or (name.startswith(("capture.", "log.")) and not ROUNDS)
    running = pipeline.start("capture" if alone else "run", environment=armed)
    try:
        assert running.wait(KILL_SECONDS_MAX) == -9, f"{name} was not reached\n{running.said()}"
        assert eventually(lambda: not running.alive(), seconds=30), running.alive()
    except subprocess.TimeoutExpired:
        pytest.fail(f"{name}:{turn} was not reached\n{pipeline.status()}\n{running.said()}")
    finally:
        running.end()


def write_large_transaction(url: str) -> None:
    """Some 40 MiB on the wire, in rows that the workload does not know of."""
    with psycopg.connect(url) as connection:
        connection.execute(
            "INSERT INTO customers (id, reference, name, notes, joined_at) "
            "SELECT least(0, (SELECT min(id) FROM customers)) - i, gen_random_uuid(), 'Large ' || i, "
            "repeat(md5(i::text), 2000), now() FROM generate_series(1, 600) AS i"
        )


@pytest.mark.timeout(1500 + ROUNDS * 120)
def test_killed_at_every_named_place_the_tables_equal_the_source_in_the_end(shop, tmp_path: Path) -> None:  # type: ignore[no-untyped-def] # the fixture's pair
    pipeline, workload = shop
    hits = tmp_path / "hits"
    chance = random.Random(os.environ.get("TAILRACE_SEED", "17"))
    later = [name for name in PLACES if name not in FIRST]
    chance.shuffle(later)
    with workload:
        for name in (*FIRST, *later):
            if name in PIECES:
                write_large_transaction(pipeline.url)
            # Loading happens once a table and in several workers, so only the others can wait for a later turn.
            turns = 1 if name.startswith(("load.", "log.schema")) else 2 if name in PIECES else 4
            run_into(pipeline, name, chance.randint(1, turns), hits)
        for _ in range(ROUNDS):
            name = chance.choice(later)
            if name in PIECES:
                write_large_transaction(pipeline.url)
            run_into(pipeline, name, chance.randint(1, 2 if name in PIECES else 20), hits)
    counted = Counter(hits.read_text().split())
    assert set(counted) == set(PLACES), counted
    pipeline.catch_up()
    pipeline.assert_equal(*NAMES)
    assert_log_is_whole(pipeline.log)


def test_a_process_that_outlives_its_parent_ends_by_itself(shop) -> None:  # type: ignore[no-untyped-def] # the fixture's pair
    pipeline, workload = shop
    with workload:
        running = pipeline.start("run")
        try:
            live = lambda: [t["state"] for t in pipeline.status()["tables"]] == ["live"] * len(NAMES)  # noqa: E731
            assert eventually(live, pause=1), running.said()
            assert any("java" in command for command in running.alive())
            assert descendants(running.process.pid) <= group_members(running.process.pid)
            running.process.kill()
            running.process.wait()
            assert eventually(lambda: not running.alive(), seconds=30), running.alive()
        finally:
            running.end()
    pipeline.catch_up()
    pipeline.assert_equal(*NAMES)
