"""A log of a real PostgreSQL: sealed and trimmed while it is captured, looked at and acted on by hand."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from tailrace.changelog.read.reader import ChangeLog
from tests.support.pipelines import Pipeline, Running, eventually, execute

ORDERLY = "log:\n  path: ./changes\n  seal: {age: 1s}\n  grace: 0s\n"


def pipeline_with(folder: Path, url: str, log: str) -> Pipeline:
    pipeline = Pipeline(folder, url)
    text = pipeline.file.read_text()
    assert "log: ./changes\n" in text
    pipeline.file.write_text(text.replace("log: ./changes\n", log))
    return pipeline


def asked(pipeline: Pipeline, command: str, *flags: str, code: int = 0) -> dict[str, Any]:
    done = pipeline.ask(command, *flags, "--json")
    assert done.returncode == code, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def shown(pipeline: Pipeline) -> dict[str, Any]:
    return asked(pipeline, "log", "show")


def rows_of(pipeline: Pipeline, table: str) -> int:
    return int(next(found["rows"] for found in shown(pipeline)["tables"] if found["table"] == table))


def captured(pipeline: Pipeline, table: str, rows: int) -> bool:
    def there() -> bool:
        tables = shown(pipeline)["tables"]
        return any(found["table"] == table and found["rows"] + found["rows_trimmed"] == rows for found in tables)

    return eventually(there, pause=0.3)


def test_a_log_is_sealed_looked_at_and_trimmed_while_it_is_captured(database: str, tmp_path: Path) -> None:
    execute(database, "CREATE TABLE a (id int PRIMARY KEY, t text)", "CREATE TABLE b (id int PRIMARY KEY)")
    pipeline = pipeline_with(tmp_path, database, ORDERLY)
    capture = pipeline.start("capture")
    try:
        assert eventually(lambda: "capture started" in capture.said())
        execute(
            database,
            "INSERT INTO a SELECT g, md5(g::text) FROM generate_series(1, 1000) g",
            "INSERT INTO b SELECT g FROM generate_series(1, 500) g",
            "UPDATE a SET t = 'x' WHERE id <= 10",
        )
        assert captured(pipeline, "a", 1010)

        # Cold files come by themselves, and any tool reads them by the documented glob.
        assert eventually(lambda: (shown(pipeline)["sealed_commit"] or 0) > 1)
        assert asked(pipeline, "log", "verify")["ok"]
        before = shown(pipeline)
        assert before["cold_bytes"] > 0
        assert before["first_commit"] == 1
        number = next(found["number"] for found in before["tables"] if found["table"] == "a")
        execute(database, "INSERT INTO a VALUES (2001, 'by hand')")
        assert captured(pipeline, "a", 1011)
        asked(pipeline, "log", "seal")
        files = sorted((pipeline.log / "cold" / str(number)).glob("*.parquet"))
        assert sum(pq.ParquetFile(file).metadata.num_rows for file in files) == 1011

        # Only what nobody needs goes.
        reader = ChangeLog.open(pipeline.log)
        assert len(next(reader.follow(0, table="public.a", consumer="slow")))
        trimmed = asked(pipeline, "log", "trim", "--older-than", "0s")
        assert trimmed["rows"] >= 500
        (slow,) = trimmed["readers"]
        assert (slow["name"], slow["state"]) == ("slow", "live")
        assert slow["held_bytes"] > 0
        assert slow["behind_rows"] >= 1000
        assert (rows_of(pipeline, "a"), rows_of(pipeline, "b")) == (1011, 0)
        assert sum(len(batch) for batch in reader.follow(table="public.a", consumer="slow")) == 1011
        assert pipeline.call("consumers", "--forget", "slow").returncode == 0
        assert asked(pipeline, "consumers") == {"consumers": []}
        asked(pipeline, "log", "seal")
        asked(pipeline, "log", "trim", "--older-than", "0s")
        assert rows_of(pipeline, "a") == 0

        # Capture never noticed.
        execute(database, "INSERT INTO a VALUES (3001, 'after')")
        assert captured(pipeline, "a", 1012)
        assert asked(pipeline, "log", "verify")["ok"]
        assert capture.process.poll() is None
    finally:
        ended = capture.terminate()
        said = capture.said()
        capture.end()
    assert ended == 0, said
    assert "log maintenance failed" not in said
    assert pipeline.call("capture", "--until-caught-up").returncode == 0
    assert asked(pipeline, "log", "verify")["ok"]
    status = pipeline.status()["log"]
    assert status["first_commit"] == shown(pipeline)["first_commit"] > 1
    assert status["disk_bytes"] > 0


def test_damage_is_found_by_verify_and_by_nothing_that_only_looks(database: str, tmp_path: Path) -> None:
    execute(database, "CREATE TABLE a (id int PRIMARY KEY, t text)")
    pipeline = Pipeline(tmp_path, database)
    assert pipeline.call("capture", "--until-caught-up").returncode == 0
    execute(database, "INSERT INTO a SELECT g, md5(g::text) FROM generate_series(1, 1000) g")
    assert pipeline.call("capture", "--until-caught-up").returncode == 0
    asked(pipeline, "log", "seal")
    (file,) = ChangeLog.open(pipeline.log).files("public.a")
    damaged = bytearray(file.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    file.write_bytes(damaged)
    found = asked(pipeline, "log", "verify", code=4)
    assert [problem["path"] for problem in found["problems"]] == [str(file)]
    done = pipeline.call("log", "verify")
    assert done.returncode == 4
    assert f"error: {file}: " in done.stderr
    assert "hint: Restore the file from a copy of the log." in done.stderr
    assert shown(pipeline)["rows"] == 1000


def wait_for(pipeline: Pipeline, running: Running, table: str, state: str, reason: str) -> dict[str, Any]:
    """The table as whoever applies says it stands; before that one runs, a status is read from the log alone."""
    found: dict[str, Any] = {}

    def reached() -> bool:
        nonlocal found
        assert running.process.poll() is None, running.said()
        status = pipeline.status()
        found = next(known for known in status["tables"] if known["table"] == table)
        applied = status["apply_pid"] is not None and status["capture_pid"] is not None
        return bool(applied and found["state"] == state and found["reason"] == reason)

    assert eventually(reached, pause=1.0), found
    return found


def test_a_broken_table_holds_its_rows_until_the_log_is_full_and_never_stops_capture(
    database: str, tmp_path: Path
) -> None:
    execute(
        database,
        "CREATE TABLE steady (id int PRIMARY KEY, t text)",
        "CREATE TABLE stuck (id int PRIMARY KEY, t text)",
        "INSERT INTO steady VALUES (1, 'x')",
        "INSERT INTO stuck VALUES (1, 'x')",
    )
    limited = ORDERLY + "  retention: {age: 0s}\n  max_bytes: 2MiB\n"
    pipeline = pipeline_with(tmp_path, database, limited)
    pipeline.stops_at("add")
    pipeline.catch_up()
    assert {reader["name"] for reader in asked(pipeline, "consumers")["consumers"]} == {"public.steady", "public.stuck"}
    execute(
        database,
        "ALTER TABLE stuck ADD COLUMN more int",
        "INSERT INTO stuck VALUES (2, 'y', 2)",
        "INSERT INTO steady VALUES (2, 'y')",
    )
    running = pipeline.start("run")
    try:
        wait_for(pipeline, running, "stuck", "failed", "schema-changed")
        capture_pid = pipeline.status()["capture_pid"]
        for first in (1_000, 2_000):
            execute(database, f"INSERT INTO steady SELECT g, 's' FROM generate_series({first}, {first} + 99) g")

        # Its rows are kept, however old; those of the other table go.
        def stuck_holds() -> bool:
            readers = {reader["name"]: reader for reader in asked(pipeline, "consumers")["consumers"]}
            stuck, steady = readers["public.stuck"], readers["public.steady"]
            return bool(stuck["held_bytes"] > 0 and stuck["state"] == "live" and not steady["behind_rows"])

        assert eventually(stuck_holds, pause=0.5)
        assert eventually(lambda: rows_of(pipeline, "steady") == 0, pause=0.5)
        assert rows_of(pipeline, "stuck") == 1

        # The log is about to be too large: the table that holds the most loses what it holds.
        large = "(SELECT string_agg(md5(random()::text || g || n), '') FROM generate_series(1, 60) n)"
        for first in range(10_000, 18_000, 1_000):
            execute(
                database,
                f"INSERT INTO stuck SELECT g, {large}, 1 FROM generate_series({first}, {first} + 499) g",
                f"INSERT INTO steady SELECT g, 'more' FROM generate_series({first}, {first} + 99) g",
            )
        stuck = wait_for(pipeline, running, "stuck", "needs_snapshot", "log-trimmed")
        assert "tailrace snapshot" in stuck["hint"]
        readers = {reader["name"]: reader for reader in asked(pipeline, "consumers")["consumers"]}
        assert (readers["public.stuck"]["state"], readers["public.stuck"]["held_bytes"]) == ("detached", 0)
        assert eventually(lambda: shown(pipeline)["bytes"] < 2 << 20, pause=0.5)

        # Capture and the other table went on as if nothing had happened.
        execute(database, "INSERT INTO steady VALUES (3, 'z')")
        assert eventually(lambda: pipeline.table_status("steady")["rows_applied"] == 1002, pause=0.5)
        assert pipeline.status()["capture_pid"] == capture_pid
        assert pipeline.table_status("steady")["state"] == "live"
    finally:
        ended = running.terminate()
        said = running.said()
        running.end()
    assert ended == 0, said
    assert "detached from the log" in said
    pipeline.assert_equal("steady")
    table = pipeline.table_status("stuck")
    assert (table["state"], table["reason"]) == ("needs_snapshot", "log-trimmed"), "also when nobody runs"
    assert asked(pipeline, "log", "verify")["ok"]
    shutil.rmtree(pipeline.lake / "public" / "stuck")
    pipeline.catch_up()
    pipeline.assert_equal("steady", "stuck")
