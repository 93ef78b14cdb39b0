"""Kill a big load again and again, at random, while writers hammer all tables; it goes on, and ends equal."""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from tailrace.demo.server import EmbeddedPostgres
from tests.support.pipelines import Pipeline, eventually, execute

KILLS = int(os.environ.get("TAILRACE_LOAD_KILLS", "2"))
MASTERS = {"local": "local[2]", "cluster": "local-cluster[2,1,1024]"}
TABLES = ("ints", "pairs", "uuids", "keyless")
ROWS = 40_000
SCHEMA = """
CREATE TABLE ints (id int PRIMARY KEY, x int, pad text, large text);
ALTER TABLE ints ALTER large SET STORAGE EXTERNAL;
CREATE TABLE pairs (a text, b int, x int, pad text, PRIMARY KEY (b, a));
CREATE TABLE uuids (id uuid PRIMARY KEY DEFAULT gen_random_uuid(), x int, pad text);
CREATE TABLE keyless (a int, pad text);
ALTER TABLE keyless REPLICA IDENTITY FULL;
INSERT INTO ints SELECT g, 0, repeat('p', 500), CASE WHEN g % 20 = 0 THEN repeat(md5(g::text), 100) END
  FROM generate_series(1, {rows}) g;
INSERT INTO pairs SELECT md5(g::text), g % 1000, 0, repeat('p', 500) FROM generate_series(1, {rows}) g;
INSERT INTO uuids (x, pad) SELECT g, repeat('p', 500) FROM generate_series(1, {rows}) g;
INSERT INTO keyless SELECT g % 5000, repeat('p', 100) FROM generate_series(1, {rows} / 4) g;
"""
LOAD = """\
load: {{chunk: 1MiB, connections: 2}}
spark: {{master: "{master}"}}
"""


@contextmanager
def hammering(url: str) -> Iterator[None]:
    """Writers on every table, until the block is left."""
    stop = threading.Event()
    failed: list[psycopg.Error] = []

    def write(seed: int) -> None:
        chance = random.Random(seed)
        try:
            with psycopg.connect(url, autocommit=True) as connection:
                while not stop.is_set():
                    n, m = chance.randint(1, ROWS), chance.randint(1, ROWS)
                    with connection.transaction():
                        connection.execute("UPDATE ints SET x = x + 1 WHERE id BETWEEN %s AND %s", (n, n + 20))
                        connection.execute("UPDATE ints SET id = id + 1000000 WHERE id = %s", (m,))
                        connection.execute("DELETE FROM ints WHERE id = %s", (ROWS - m,))
                        connection.execute("UPDATE pairs SET x = x + 1, b = b + 1 WHERE b = %s", (n % 1000,))
                        connection.execute("INSERT INTO uuids (x, pad) VALUES (%s, 'new')", (n,))
                        connection.execute("UPDATE keyless SET a = a + 1 WHERE a = %s", (n % 5000,))
                    time.sleep(0.01)
        except psycopg.Error as error:
            failed.append(error)

    writer = threading.Thread(target=write, args=(1,), daemon=True)
    writer.start()
    try:
        yield
    finally:
        stop.set()
        writer.join()
    assert not failed, failed


def chunks_staged(pipeline: Pipeline) -> int:
    return len(list((pipeline.log / "seed").glob("*/chunk-*.json")))


def run_and_kill(pipeline: Pipeline, later: float) -> None:
    """Kill everything a while after the load has got on."""
    before = chunks_staged(pipeline)
    running = pipeline.start("run")
    try:
        goes_on = lambda: chunks_staged(pipeline) > before or _all_loaded(pipeline)  # noqa: E731
        assert eventually(goes_on, seconds=120, pause=0.2), running.said()
        time.sleep(later)
        running.kill_group()
        assert eventually(lambda: not running.alive(), seconds=5), running.alive()
    finally:
        running.end()


@pytest.mark.timeout(300 + KILLS * 90)
@pytest.mark.parametrize("where", [name for name in MASTERS if name == "local" or KILLS >= 10])
def test_a_load_killed_again_and_again_ends_equal_to_the_source(tmp_path: Path, where: str) -> None:
    chance = random.Random(os.environ.get("TAILRACE_SEED", "23"))
    with EmbeddedPostgres() as server:
        url = server.url()
        execute(url, SCHEMA.format(rows=ROWS), "ANALYZE")
        pipeline = Pipeline(tmp_path / "pipeline", url)
        with pipeline.file.open("a") as settings:
            settings.write(LOAD.format(master=MASTERS[where]))
        with hammering(url):
            for _ in range(KILLS):
                run_and_kill(pipeline, chance.uniform(0.0, 3.0))
        pipeline.catch_up()
        pipeline.assert_equal(*TABLES)
        assert not list((pipeline.log / "seed").glob("*/plan.json"))


def _all_loaded(pipeline: Pipeline) -> bool:
    note = pipeline.log / "status" / "apply.json"
    if not note.exists():
        return False
    tables = json.loads(note.read_text())["tables"]
    return len(tables) == len(TABLES) and all(table["applied_commit"] is not None for table in tables)
