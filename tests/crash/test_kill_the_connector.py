"""Kill everything, Spark's Java process included, while a connector of its own applies transactions that take several
commits, of several tables or of one. Whatever was committed of them, every change is in each table exactly once in the
end.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from tailrace.demo.server import EmbeddedPostgres
from tailrace.pipeline.tables.registry import ROWS_PER_APPLY_MAX
from tailrace.tables.table_folder import SCRATCH
from tests.support.engines import IS_ICEBERG, commits_of, data_folder, engine_lines, only_connectors, rows_of
from tests.support.pipelines import Pipeline, assert_log_is_whole, eventually, execute

pytestmark = [only_connectors, pytest.mark.timeout(1800)]

NAMES = ("m", "k", "h", "a")
RULES = """\
  rules:
    "public.h": {mode: history}
    "public.a": {mode: append, metadata: [_op]}
"""
ROWS = 2000
LARGE = ROWS_PER_APPLY_MAX * 6 // 5
"""Changes of one transaction that one commit of a table does not take, if they lie in several pieces of the log."""
PLACES = (
    "apply.before_table:1", "table.before_commit:3", *["iceberg.staged:2"] * IS_ICEBERG, "table.after_commit:1",
    "apply.batch_done:1",
)  # fmt: skip
"""Four tables are under way at once: some have committed when others have not."""
KILL_SECONDS_MAX = 600.0


@pytest.fixture
def pipeline(tmp_path: Path) -> Iterator[Pipeline]:
    with EmbeddedPostgres() as server:
        for name in NAMES:
            key = "" if name == "k" else "PRIMARY KEY"
            execute(
                server.url(),
                f"CREATE TABLE {name} (id int {key}, x int, t text)",
                f"INSERT INTO {name} SELECT g, 0, md5(g::text) FROM generate_series(1, {ROWS}) g",
            )
        execute(server.url(), "ALTER TABLE k REPLICA IDENTITY FULL", "CREATE TABLE large (id int PRIMARY KEY, t text)")
        made = Pipeline(tmp_path / "one", server.url())
        made.file.write_text(made.file.read_text().replace("  format: delta\n", engine_lines()) + RULES)
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
        assert eventually(lambda: not running.alive()), running.alive()
    finally:
        running.end()


def kill_in_a_merge(pipeline: Pipeline) -> None:
    """Kill everything once the connector writes files of the mirror, before it has committed them."""
    folder = pipeline.lake / "public" / "m"
    files = data_folder(folder)
    there, commits = set(files.glob("*.parquet")), commits_of(folder)
    running = pipeline.start("run")
    try:
        writes = lambda: set(files.glob("*.parquet")) - there  # noqa: E731
        assert eventually(writes, seconds=KILL_SECONDS_MAX, pause=0.005), running.said()
        running.kill_group()
        assert eventually(lambda: not running.alive()), running.alive()
    finally:
        running.end()
    assert (folder / SCRATCH).exists(), "it was in the middle of it"
    assert commits_of(folder) == commits


def content(pipeline: Pipeline, name: str) -> list[dict[str, int]]:
    rows: list[dict[str, int]] = rows_of(pipeline.lake / "public" / name).to_pylist()
    return rows


def assert_equal(pipeline: Pipeline, name: str) -> None:
    with psycopg.connect(pipeline.url) as connection:
        wanted = Counter(connection.execute(f"SELECT id, x, t FROM {name}".encode()).fetchall())
    assert Counter((row["id"], row["x"], row["t"]) for row in content(pipeline, name)) == wanted


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
    assert_equal(pipeline, "m")
    assert_equal(pipeline, "k")
    assert sorted(row["id"] for row in content(pipeline, "large")) == [*range(1, LARGE + 1)]
    assert_log_is_whole(pipeline.log)
    # A row is there from the transaction that made it on, and was changed in each that followed.
    made = dict.fromkeys(range(1, ROWS + 1), 0) | {-turn: turn for turn in range(1, turns + 1)}
    wanted = Counter((row, x) for row, first in made.items() for x in range(first, turns + 1))
    versions = content(pipeline, "h")
    assert Counter((row["id"], row["x"]) for row in versions) == wanted
    assert Counter(row["id"] for row in versions if row["_current"]) == Counter(list(made))
    assert Counter((row["id"], row["x"]) for row in content(pipeline, "a")) == wanted
