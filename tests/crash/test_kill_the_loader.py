"""Kill a big load again and again, at random, while writers hammer all tables; it goes on, and ends equal.

Only a kill that fell into a load counts. The server's own log tells that nothing is read again that was on record.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psycopg
import pytest
from psycopg import sql

from tailrace.capture.postgres.chunks import ChunkKind
from tailrace.demo.server import EmbeddedPostgres
from tailrace.tasks.load_store import LoadStore
from tests.support.pipelines import Pipeline, eventually, execute

KILLS = int(os.environ.get("TAILRACE_LOAD_KILLS", "0"))
MASTERS = {"local": "local[2]", "cluster": "local-cluster[2,1,1024]"}
TABLES = ("ints", "pairs", "uuids", "keyless")
ROWS = 40_000 if KILLS >= 10 else 20_000
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
                connection.execute("SET log_statement = none")
                while not stop.is_set():
                    n, m = chance.randint(1, ROWS), chance.randint(1, ROWS)
                    with connection.transaction():
                        connection.execute("UPDATE ints SET x = x + 1 WHERE id BETWEEN %s AND %s", (n, n + 20))
                        connection.execute("UPDATE ints SET id = id + 1000000 WHERE id = %s", (m,))
                        connection.execute("DELETE FROM ints WHERE id = %s", (ROWS - m,))
                        connection.execute("UPDATE pairs SET x = x + 1, b = b + 1 WHERE b = %s", (n % 1000,))
                        connection.execute("INSERT INTO uuids (x, pad) VALUES (%s, 'new')", (n,))
                        connection.execute("UPDATE keyless SET a = a + 1 WHERE a = %s", (n % 5000,))
                    time.sleep(0.02)
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


def chunks_on_record(pipeline: Pipeline) -> set[Path]:
    return set((pipeline.log / "seed").glob("*/chunk-*.json"))


def is_half_read(pipeline: Pipeline) -> bool:
    """Whether there is a load that lacks chunks."""
    seeds = LoadStore(pipeline.log)
    return any(len(seeds.staged_chunks(seed.id)) < len(seed.plan.chunks) for seed in seeds.unfinished_loads())


def is_loaded(pipeline: Pipeline) -> bool:
    """Whether every table is there, and no load is wished for, under way or being replayed."""
    there = all((pipeline.lake / "public" / table / "_delta_log").exists() for table in TABLES)
    return there and not LoadStore(pipeline.log).requests() and not list((pipeline.log / "seed").glob("*/plan.json"))


class Record:
    """What is on record now of loads that outlive their process, and what the server was told to read since."""

    def __init__(self, pipeline: Pipeline, server: EmbeddedPostgres) -> None:
        seeds = LoadStore(pipeline.log)
        self._known = {
            f" where {sql.SQL(' and ').join(chunk.conditions_sql()).as_string(None)}) "
            for seed in seeds.unfinished_loads()
            if seed.plan.cut is ChunkKind.KEY
            for chunk in seed.plan.chunks
            if chunk.number in seeds.staged_chunks(seed.id)
        }
        self._server_log, self._since = server.log_file, server.log_file.stat().st_size

    def assert_nothing_of_it_was_read_again(self) -> int:
        """How many chunks there were not to be read again."""
        with self._server_log.open("rb") as server_log:
            server_log.seek(self._since)
            read = [line.decode() for line in server_log if b" copy (select " in line.lower()]
        assert read, "something was read"
        assert not [line for line in read if any(known in line for known in self._known)]
        return len(self._known)


def run_and_kill(pipeline: Pipeline, later: float) -> None:
    """Kill everything a while after the load has got on."""
    before = chunks_on_record(pipeline)
    running = pipeline.start("run")
    try:
        assert eventually(lambda: chunks_on_record(pipeline) - before, pause=0.05), running.said()
        time.sleep(later)
        running.kill_group()
        assert eventually(lambda: not running.alive()), running.alive()
    finally:
        running.end()


def run_until_loaded(pipeline: Pipeline, written: ExitStack) -> None:
    """Writers go on until the last load has ended; then the tables come to what they wrote last."""
    running = pipeline.start("run")
    try:
        assert eventually(lambda: is_loaded(pipeline), pause=0.2), running.said()
        written.close()
        equal = lambda: all(verdict.equal for verdict in pipeline.compare(*TABLES))  # noqa: E731
        assert eventually(equal, pause=1.0), pipeline.compare(*TABLES)
        assert running.terminate() == 0, running.said()
    finally:
        running.end()


@pytest.mark.skipif(
    not KILLS, reason="test_kill_anywhere kills at each place of a load; TAILRACE_LOAD_KILLS says how often at random"
)
@pytest.mark.timeout(300 + KILLS * 90)
@pytest.mark.parametrize("where", [name for name in MASTERS if name == "local" or KILLS >= 10])
def test_a_load_killed_again_and_again_ends_equal_to_the_source(tmp_path: Path, where: str) -> None:
    chance = random.Random(os.environ.get("TAILRACE_SEED", "23"))
    with EmbeddedPostgres(settings={"log_statement": "all"}) as server, ExitStack() as written:
        url = server.url()
        execute(url, SCHEMA.format(rows=ROWS), "ANALYZE")
        pipeline = Pipeline(tmp_path / "pipeline", url)
        with pipeline.file.open("a") as settings:
            settings.write(LOAD.format(master=MASTERS[where]))
        written.enter_context(hammering(url))
        kills = kept = 0
        for _ in range(KILLS * 3):
            record = Record(pipeline, server)
            run_and_kill(pipeline, chance.uniform(0.0, 1.0))
            kept += record.assert_nothing_of_it_was_read_again()
            if not is_half_read(pipeline):
                assert pipeline.ask("snapshot", "public.*").returncode == 0
                continue
            kills += 1
            if kills == KILLS:
                break
        assert kills == KILLS, "a load lasts long enough to be killed"
        record = Record(pipeline, server)
        run_until_loaded(pipeline, written)
        kept += record.assert_nothing_of_it_was_read_again()
        assert kept, "some of it outlived its process"
