"""What goes wrong at a user's site gives one clear error with the remedy, and nothing is lost."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tailrace.demo.server import EmbeddedPostgres
from tests.integration.conftest import server_version
from tests.support.pipelines import RUN_SECONDS_MAX, Pipeline, execute


def refused(pipeline: Pipeline, code: int, *parts: str, command: str = "capture") -> str:
    """The command ends with this code, an `error:` and a `hint:` that hold these parts, and no traceback."""
    done = pipeline.call(command, "--until-caught-up")
    said = done.stderr
    assert done.returncode == code, said
    assert said.count("error: ") == 1, said
    assert said.count("hint: ") == 1, said
    assert "Traceback" not in said
    for part in parts:
        assert part in said, said
    return said


def test_a_wrong_password_is_told_without_showing_it(tmp_path: Path) -> None:
    with EmbeddedPostgres(version=server_version(), auth="scram-sha-256", password="right-one") as server:
        url = f"postgresql://postgres:wrong-one@127.0.0.1:{server.port}/postgres"
        for command in ("capture", "run"):
            said = refused(Pipeline(tmp_path, url), 3, "refused the login", "source.url", command=command)
            assert "wrong-one" not in said


def test_a_missing_database_is_told(server: EmbeddedPostgres, tmp_path: Path) -> None:
    refused(Pipeline(tmp_path, server.url("nowhere")), 3, "database does not exist", "nowhere")


def test_globs_that_match_no_table_are_told(database: str, tmp_path: Path) -> None:
    execute(database, "CREATE TABLE t (id int PRIMARY KEY)")
    refused(Pipeline(tmp_path, database, tables='["Public.*"]'), 2, "no table at the source matches", "source.tables")


def test_a_server_that_is_not_there_is_told(tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, "postgresql://postgres@127.0.0.1:1/x")
    refused(pipeline, 3, "cannot be reached", "host and port")


def test_a_server_without_a_logical_log_is_told_what_to_change(tmp_path: Path) -> None:
    with EmbeddedPostgres(version=server_version(), settings={"wal_level": "replica"}) as server:
        refused(Pipeline(tmp_path, server.url()), 3, "wal_level=replica", "ALTER SYSTEM SET wal_level = logical")


def test_a_role_that_may_not_replicate_is_told_what_to_grant(server: EmbeddedPostgres, tmp_path: Path) -> None:
    execute(server.url(), "DROP ROLE IF EXISTS weak", "CREATE ROLE weak LOGIN")
    refused(Pipeline(tmp_path, server.url(user="weak")), 3, "may not replicate", 'ALTER ROLE "weak" REPLICATION')


def test_a_log_folder_that_cannot_be_written_is_told(database: str, tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, database)
    pipeline.log.write_text("a file stands here")
    refused(pipeline, 4, "log cannot be used", "`log:`")


def test_a_log_folder_without_the_right_to_write_is_told(database: str, tmp_path: Path) -> None:
    pipeline = Pipeline(tmp_path, database)
    tmp_path.chmod(0o555)
    command = [sys.executable, "-m", "tailrace", "capture", str(pipeline.file), "--until-caught-up"]
    if os.geteuid() == 0:  # root is stopped by no mode, unless it has laid that power down
        command = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", *command]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=RUN_SECONDS_MAX)
    tmp_path.chmod(0o755)
    assert done.returncode == 4, done.stderr
    assert "Permission denied" in done.stderr
    assert "hint: Give this user the right to write there" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_log_of_another_source_is_refused(server: EmbeddedPostgres, database: str, tmp_path: Path) -> None:
    execute(database, "CREATE TABLE t (id int PRIMARY KEY)")
    pipeline = Pipeline(tmp_path, database)
    assert pipeline.call("capture", "--until-caught-up").returncode == 0
    settings = pipeline.file.read_text()
    refused(Pipeline(tmp_path, server.url("postgres")), 4, "belongs to another source", "source.url")
    pipeline.file.write_text(settings)
    assert pipeline.call("capture", "--until-caught-up").returncode == 0


def test_a_damaged_commit_is_told_before_a_row_is_delivered(database: str, tmp_path: Path) -> None:
    execute(database, "CREATE TABLE t (id int PRIMARY KEY, x text)")
    pipeline = Pipeline(tmp_path, database)
    assert pipeline.call("capture", "--until-caught-up").returncode == 0
    execute(database, "INSERT INTO t SELECT g, 'x' FROM generate_series(1, 100) g")
    assert pipeline.call("capture", "--until-caught-up").returncode == 0
    newest = max((pipeline.log / "hot").glob("*.arrow"))
    bytes_before = newest.read_bytes()
    damaged = bytearray(bytes_before)
    damaged[20] ^= 1
    newest.write_bytes(damaged)
    refused(pipeline, 4, "damaged", newest.name, "Restore")
    newest.write_bytes(bytes_before)
    assert pipeline.call("capture", "--until-caught-up").returncode == 0


def test_what_the_settings_forbid_is_not_created(database: str, tmp_path: Path) -> None:
    execute(database, "CREATE TABLE t (id int PRIMARY KEY)")
    extra = "  slot: {name: mine, create: false}\n  publication: {name: mine, create: false}\n"
    pipeline = Pipeline(tmp_path, database, extra=extra)
    refused(pipeline, 3, "publication does not exist", 'CREATE PUBLICATION "mine" FOR TABLE "public"."t"')
    execute(database, "CREATE PUBLICATION mine FOR TABLE t")
    refused(pipeline, 3, "slot does not exist", "pg_create_logical_replication_slot('mine', 'pgoutput')")
    execute(database, "SELECT pg_create_logical_replication_slot('mine', 'pgoutput')", "INSERT INTO t VALUES (1)")
    assert pipeline.call("capture", "--until-caught-up").returncode == 0
    assert pipeline.call("drop", "--yes").stdout.strip() == "nothing to remove"


def test_a_changed_or_poisoned_table_fails_alone_and_loses_nothing(database: str, tmp_path: Path) -> None:
    execute(
        database,
        "CREATE TABLE steady (id int PRIMARY KEY, x int)",
        "CREATE TABLE altered (id int PRIMARY KEY, x int)",
        "CREATE TABLE poisoned (id int PRIMARY KEY, n numeric(6, 2))",
        "CREATE TABLE taken (id int PRIMARY KEY)",
        "INSERT INTO steady VALUES (1, 1)",
        "INSERT INTO altered VALUES (1, 1)",
        "INSERT INTO poisoned VALUES (1, 1)",
        "CREATE TABLE lettered (id int PRIMARY KEY, n numeric(6, 2))",
        "INSERT INTO lettered VALUES (1, 1)",
    )
    pipeline = Pipeline(tmp_path, database)
    pipeline.stops_at("add")
    rule = '  rules: {"public.lettered": {on_bad_row: dead-letter}}\n'
    pipeline.file.write_text(pipeline.file.read_text() + rule)
    (pipeline.lake / "public" / "taken" / "_delta_log").mkdir(parents=True)
    (pipeline.lake / "public" / "taken" / "_delta_log" / f"{0:020d}.json").write_text("not a commit\n")
    first = pipeline.call("run", "--until-caught-up")
    assert first.returncode == 5, first.stderr
    assert "public.taken is failed" in first.stderr
    execute(
        database,
        "INSERT INTO altered VALUES (2, 2)",
        "ALTER TABLE altered ADD COLUMN y text",
        "INSERT INTO altered VALUES (3, 3, 'y')",
        "INSERT INTO poisoned VALUES (2, 'NaN')",
        "INSERT INTO steady VALUES (2, 2)",
        "INSERT INTO lettered VALUES (2, 'NaN')",
        "UPDATE lettered SET n = 5",
        "INSERT INTO lettered VALUES (3, 'NaN')",
    )
    second = pipeline.call("run", "--until-caught-up")
    assert second.returncode == 5, second.stderr
    pipeline.assert_equal("steady")
    altered, poisoned = pipeline.table_status("altered"), pipeline.table_status("poisoned")
    assert (altered["state"], altered["reason"]) == ("failed", "schema-changed")
    assert "added y" in altered["detail"]
    assert altered["rows_captured"] - altered["rows_applied"] == 1, "what came before the change was applied"
    assert (poisoned["state"], poisoned["reason"]) == ("failed", "value-unfit")
    lettered = pipeline.table_status("lettered")
    assert (lettered["state"], lettered["dead_letters"]) == ("live", 1), "one row waits, and the table does not"
    assert "NaN" not in second.stderr, "a row's value never enters an error"
    assert "hint: " in second.stderr
