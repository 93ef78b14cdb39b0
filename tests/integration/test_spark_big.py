"""A transaction of many changes through Spark's connector: no process holds it.

A million by default, in a few minutes, for plain tables. With TAILRACE_THOROUGH=1 ten, in a quarter of an hour, and
with deletion vectors as well: under the same limits that shows more, for what grows with the transaction grows tenfold.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import psycopg
import pytest

from tailrace.changelog.read.reader import ChangeLog
from tailrace.tables.delta.features import Features
from tailrace.tables.delta.table import DeltaRsTable
from tests.support.engines import only_spark, session
from tests.support.memory import MIB, Peaks
from tests.support.pipelines import Pipeline, execute

pytestmark = only_spark

THOROUGH = "TAILRACE_THOROUGH" in os.environ
CHANGES = int(os.environ.get("TAILRACE_BIG_CHANGES", "10000000" if THOROUGH else "1000000"))
THERE = CHANGES // 10
DRIVER_MIB_MAX, WORKER_MIB_MAX, CAPTURE_MIB_MAX = 450, 600, 600
HEAP_MIB, BESIDE_HEAP_MIB_MAX = 1024, 768
"""Java's heap as it is without settings, and what its process may have beside that."""
RUN_SECONDS_MAX = 3000.0


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("features", [
    pytest.param("", id="plain"),
    pytest.param("  deletion_vectors: true\n", id="vectors", marks=pytest.mark.skipif(
        not THOROUGH, reason="once more as long: TAILRACE_THOROUGH=1")),
])  # fmt: skip
def test_a_transaction_of_many_changes_is_held_by_no_process(database: str, tmp_path: Path, features: str) -> None:
    execute(
        database,
        "CREATE TABLE big (id int PRIMARY KEY, a bigint, t text, n numeric(12, 2), at timestamptz)",
        f"INSERT INTO big SELECT g, g, 'row ' || g, g, now() FROM generate_series(1, {THERE}) g",
    )
    pipeline = Pipeline(tmp_path / "one", database)
    pipeline.file.write_text(pipeline.file.read_text() + "  engine: spark\n" + features)
    pipeline.catch_up()
    with psycopg.connect(database) as connection:
        connection.execute(f"UPDATE big SET a = -a WHERE id <= {THERE // 2}".encode())
        connection.execute(f"DELETE FROM big WHERE id > {THERE // 2}".encode())
        new = f"generate_series({THERE + 1}, {CHANGES}) g"
        connection.execute(f"INSERT INTO big SELECT g, g, 'row ' || g, g, now() FROM {new}".encode())
    started = time.monotonic()
    running = pipeline.start("run", "--until-caught-up")
    try:
        peaks = Peaks.watch(running.process, RUN_SECONDS_MAX)
        assert running.wait(60) == 0, running.said()
    finally:
        running.end()
    print(f"\n{CHANGES:,} changes in {time.monotonic() - started:.0f} s, MiB: {peaks}")
    big = pipeline.lake / "public" / "big"
    rows = session().read.format("delta").load(str(big))
    (found,) = rows.selectExpr("count(*)", "count(distinct id)", "sum(a)", "min(id)", "max(id)").collect()
    kept = THERE // 2
    total = CHANGES * (CHANGES + 1) // 2 - THERE * (THERE + 1) // 2 - kept * (kept + 1) // 2
    assert tuple(found) == (CHANGES - THERE + kept, CHANGES - THERE + kept, total, 1, CHANGES)
    log = ChangeLog.open(pipeline.log)
    table = DeltaRsTable(big, log.log_id, features=Features(deletion_vectors=bool(features)))
    assert table.rows() == CHANGES - THERE + kept
    commits = [commit.read_bytes() for commit in (big / "_delta_log").glob("*.json")]
    assert any(b"Apache-Spark" in commit for commit in commits), "by the engine under test"
    assert peaks.driver <= DRIVER_MIB_MAX * MIB, peaks
    assert peaks.worker <= WORKER_MIB_MAX * MIB, peaks
    assert peaks.capture <= CAPTURE_MIB_MAX * MIB, peaks
    assert peaks.java <= (HEAP_MIB + BESIDE_HEAP_MIB_MAX) * MIB, peaks
