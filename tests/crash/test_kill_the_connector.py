"""Kill everything, Spark's Java process included, while its connector applies transactions that take several commits,
of several tables or of one. Whatever was committed of them, every change is in each table exactly once in the end.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pyarrow as pa
import pytest
from deltalake import DeltaTable

from tailrace.demo.server import EmbeddedPostgres
from tailrace.pipeline.life import ROWS_PER_APPLY_MAX
from tailrace.spark.merging import SCRATCH
from tests.support.engines import only_spark
from tests.support.pipelines import Pipeline, assert_log_is_whole, eventually, execute

pytestmark = [only_spark, pytest.mark.timeout(1800)]

NAMES = ("m", "k", "h", "a")
TABLES = """\
  engine: spark
  rules:
    "public.h": {mode: history}
    "public.a": {mode: append, metadata: [_op]}
"""
ROWS = 2000
LARGE = ROWS_PER_APPLY_MAX * 6 // 5
"""Changes of one transaction that one commit of a table does not take, if they lie in several pieces of the log."""
PLACES = ("apply.before_table:1", "table.before_commit:3", "table.after_commit:1", "apply.batch_done:1")
"""Four tables are under way at once: some have committed when others have not."""
KILL_SECONDS_MAX = 600.0


@pytest.fixture
def pipeline(tmp_path: Path) -> Iterator[Pipeline]:
    with EmbeddedPostgres() as server:
        for name in NAMES:
            key = "" if name == "k" else "PRIMARY KEY"
            execute(
                server.url(), f"CREATE TABLE {name} (id int {key}, x int, t text)",
                f"INSERT INTO {name} SELECT g, 0, md5(g::text) FROM generate_series(1, {ROWS}) g",
            )  # fmt: skip
        execute(server.url(), "ALTER TABLE k REPLICA IDENTITY FULL", "CREATE TABLE large (id int PRIMARY KEY, t text)")
        made = Pipeline(tmp_path / "one", server.url())
        made.file.write_text(made.file.read_text() + TABLES)
        made.catch_up()
        yield made


def write(url: str, turn: int) -> None:
    """One transaction that changes every row of every table."""
    with psycopg.connect(url) as connection:
        for name in NAMES:
            connection.execute(f"UPDATE {name} SET x = {turn}".encode())
            connection.execute(f"INSERT INTO {name} VALUES ({-turn}, {turn}, 'new')".encode())


def run_into(pipeline: Pipeline, failpoint: str, hits: Path) -> None:
    armed = {"TAILRACE_FAILPOINT": failpoint, "TAILRACE_FAILPOINT_LOG": str(hits)}
    running = pipeline.start("run", environment=armed)
    try:
        assert running.wait(KILL_SECONDS_MAX) == -9, f"{failpoint} was not reached\n{running.said()}"
        assert eventually(lambda: not running.alive(), seconds=5), running.alive()
    finally:
        running.end()


def kill_in_a_merge(pipeline: Pipeline) -> None:
    """Kill everything once the connector writes files of the mirror, before it has committed them."""
    folder = pipeline.lake / "public" / "m"
    there = set(folder.glob("*.parquet"))
    commits = set((folder / "_delta_log").glob("*.json"))
    running = pipeline.start("run")
    try:
        writes = lambda: set(folder.glob("*.parquet")) - there  # noqa: E731
        assert eventually(writes, seconds=KILL_SECONDS_MAX, pause=0.005), running.said()
        running.kill_group()
        assert eventually(lambda: not running.alive(), seconds=5), running.alive()
    finally:
        running.end()
    assert (folder / SCRATCH).exists(), "it was in the middle of it"
    assert set((folder / "_delta_log").glob("*.json")) == commits


def content(pipeline: Pipeline, name: str) -> list[dict[str, int]]:
    rows: list[dict[str, int]] = pa.table(DeltaTable(str(pipeline.lake / "public" / name)).scan()).to_pylist()
    return rows


def test_killed_anywhere_while_the_connector_applies_every_change_is_there_once(
    pipeline: Pipeline, tmp_path: Path
) -> None:
    hits = tmp_path / "hits"
    execute(pipeline.url, f"INSERT INTO large SELECT g, repeat(md5(g::text), 2) FROM generate_series(1, {LARGE}) g")
    run_into(pipeline, "table.after_commit:1", hits)
    assert 0 < len(content(pipeline, "large")) < LARGE, "some of the transaction is in"
    for turn, failpoint in enumerate(PLACES, 1):
        write(pipeline.url, turn)
        run_into(pipeline, failpoint, hits)
    places = ["table.after_commit:1", *PLACES]
    # Several tables may come to a place before the first of them has killed all.
    passed = [name for name, _ in itertools.groupby(hits.read_text().split())]
    assert passed == [failpoint.partition(":")[0] for failpoint in places]
    turns = len(PLACES) + 1
    write(pipeline.url, turns)
    kill_in_a_merge(pipeline)
    pipeline.catch_up()
    pipeline.assert_equal("m", "k")
    assert sorted(row["id"] for row in content(pipeline, "large")) == [*range(1, LARGE + 1)]
    assert_log_is_whole(pipeline.log)
    # A row is there from the transaction that made it on, and was changed in each that followed.
    made = dict.fromkeys(range(1, ROWS + 1), 0) | {-turn: turn for turn in range(1, turns + 1)}
    wanted = Counter((row, x) for row, first in made.items() for x in range(first, turns + 1))
    versions = content(pipeline, "h")
    assert Counter((row["id"], row["x"]) for row in versions) == wanted
    assert Counter(row["id"] for row in versions if row["_current"]) == Counter(list(made))
    assert Counter((row["id"], row["x"]) for row in content(pipeline, "a")) == wanted
