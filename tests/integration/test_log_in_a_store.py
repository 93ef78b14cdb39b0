"""The log in an object store: moto's S3 server, a process of its own, over HTTP.

The same suite as for a folder runs over a store in memory (tests/unit/changelog); here is what only a network has.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from tailrace.changelog.format.commit_file import commit_path
from tailrace.changelog.maintain.retention import RetentionPolicy, trim
from tailrace.changelog.maintain.seal_contents import SealLimits
from tailrace.changelog.maintain.sealer import Sealer
from tailrace.changelog.maintain.verify import verify
from tailrace.changelog.read.consumers import read_holds
from tailrace.changelog.read.reader import ChangeLog
from tailrace.changelog.write import log_lease
from tailrace.changelog.write import writer as writer_module
from tailrace.changelog.write.log_lease import LogLease
from tailrace.changelog.write.writer import LogWriter
from tailrace.errors import LogBusy, LogFenced, LogTrimmed, LogUnreachable, LogUnusable
from tailrace.pipeline.config.settings_file import load_settings
from tailrace.spark.datasource.log.log_options import LogOptions
from tailrace.spark.datasource.log.log_schema import resolve_frame
from tailrace.spark.datasource.log.stream_42 import LogStreamReader
from tailrace.spark.session.arrow_types import spark_schema
from tailrace.storage import objects
from tailrace.storage.files import parse_log_path
from tailrace.storage.objects import ObjectPath
from tests.support.loads import Scene
from tests.support.logs import Diary, assert_nothing_left_over, inserts, read_all, rows_of, seal, write_everything
from tests.support.pipelines import execute
from tests.support.stores import ENVIRONMENT, S3, LossyWay, s3_server
from tests.support.windows import SOURCE, ids, rows_window, window


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    with pytest.MonkeyPatch.context() as patch, s3_server() as found:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        yield found


@pytest.fixture
def log(s3: S3) -> ObjectPath:
    return s3.place()


class NoLease:
    """A lease that keeps nobody out."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def release(self) -> None: ...

    def check(self) -> None: ...


def keys(log: ObjectPath, after: int = 0) -> list[object]:
    return [key for _, key in ids(list(ChangeLog.open(log).follow(after)))]


# ---- what the log is for ---------------------------------------------------------------------------------


def test_a_log_is_written_read_sealed_joined_trimmed_and_found_without_a_flaw(log: ObjectPath) -> None:
    diary = Diary(log)
    write_everything(diary)
    diary.piece(inserts(20))
    diary.finish(inserts(21))
    assert read_all(log) == diary.rows()
    seal(log, join=False, grace_seconds=None, limits=SealLimits(commits=3))
    seal(log, limits=SealLimits(commits=3, merge_count=2))
    diary.commit(inserts(22))
    assert read_all(log) == diary.rows()
    assert read_all(log, table="public.other") == [row for row in diary.rows() if row.schema.relation == 2]
    verdict = verify(log)
    assert (verdict.flaws, verdict.commits) == ((), diary.writer.commit)
    with Sealer(log) as sealer:
        assert trim(sealer, RetentionPolicy(age_seconds=0.0)).files
        sealer.clean(0.0)
    with pytest.raises(LogTrimmed):
        read_all(log)
    assert [row.values["id"] for row in rows_of(ChangeLog.open(log).follow())] == [22]
    diary.close()
    assert_nothing_left_over(log)


def test_a_log_is_opened_by_its_url_and_what_the_environment_says(
    log: ObjectPath, s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint)
    writer = LogWriter(str(log), SOURCE)
    writer.append(rows_window(0, 100, 1, 2))
    writer.close()
    assert [key for _, key in ids(list(ChangeLog.open(str(log)).follow(0, consumer="nightly")))] == [1, 2]
    assert [hold.name for hold in read_holds(parse_log_path(str(log)))] == ["nightly"]


def test_a_log_is_the_same_log_by_either_spelling(log: ObjectPath, s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3.endpoint)
    sparks = str(log).replace("s3://", "s3a://")
    writer = LogWriter(sparks, SOURCE)
    writer.append(rows_window(0, 100, 1))
    with pytest.raises(LogBusy):
        LogLease(parse_log_path(str(log)), wait_seconds=0.0)
    writer.close()
    assert [key for _, key in ids(list(ChangeLog.open(sparks).follow(0, consumer="nightly")))] == [1]
    writer = LogWriter(str(log), SOURCE)
    writer.append(rows_window(100, 200, 2))
    writer.close()
    assert [key for _, key in ids(list(ChangeLog.open(sparks).follow(consumer="nightly")))] == [2], "it goes on"
    assert ChangeLog.open(sparks).log_id == ChangeLog.open(log).log_id


SHOP = """
CREATE TABLE things (id int PRIMARY KEY, amount numeric(10, 2));
INSERT INTO things SELECT g, g FROM generate_series(1, 2000) g;
CREATE TABLE others (id int PRIMARY KEY, said text)
"""


def test_a_pipeline_captures_loads_applies_and_sets_aside_with_its_log_in_a_store(
    log: ObjectPath, s3: S3, database: str, tmp_path: Path
) -> None:
    execute(database, *SHOP.strip().split(";\n"))
    scene = Scene(tmp_path, database)
    text = scene.pipeline.file.read_text() + "  on_bad_row: dead-letter\n"
    scene.pipeline.file.write_text(text.replace("./changes", f"{{path: {log}, endpoint: {s3.endpoint}}}"))
    settings = load_settings(scene.pipeline.file)
    scene.settings = scene.settings.model_copy(update={"log": settings.log, "tables": settings.tables})
    assert scene.settings.log.path == log
    with scene, scene.loader() as applying:
        scene.assert_equal(applying, "things", "others")
        execute(database, "UPDATE things SET amount = 'NaN' WHERE id = 7", "INSERT INTO others VALUES (1, 'one')")
        execute(database, "DELETE FROM things WHERE id % 3 = 0", "UPDATE others SET said = 'two'")
        assert scene.settled(applying)
        scene.pipeline.assert_equal("others")
        (letter,) = json.loads(scene.pipeline.ask("dead-letters", "list", "--json").stdout)["letters"]
        assert letter["table"] == "things"
        execute(database, "UPDATE things SET amount = 7 WHERE id = 7")
        scene.record_point(applying)
        status = json.loads(scene.pipeline.ask("status", "--json").stdout)
        assert status["log"]["path"] == str(log)
    shown = json.loads(scene.pipeline.ask("log", "show", "--json").stdout)
    assert {table["table"] for table in shown["tables"]} >= {"things", "others"}
    sealed = scene.pipeline.ask("log", "seal", "--json")
    assert json.loads(sealed.stdout)["commits"] > 0, sealed.stderr
    assert scene.pipeline.ask("log", "verify").returncode == 0
    assert json.loads(scene.pipeline.ask("at", "--json").stdout)["tables"]
    assert not (tmp_path / "changes").exists()


def test_two_servers_that_have_a_log_of_one_name_are_told_apart(log: ObjectPath) -> None:
    with s3_server() as another:
        there = ObjectPath.parse(str(log), endpoint=another.endpoint)
        for where, content in ((log, b"here"), (there, b"there")):
            (where / "sealed").write_bytes(content)
        assert [bytes(objects.object_cache.view(where / "sealed")) for where in (log, there)] == [b"here", b"there"]


class Writing:
    """A capture that has nothing to do."""

    def start(self) -> None: ...

    def catch_up(self) -> None: ...

    def check(self) -> None: ...

    def stop(self) -> None: ...


def test_a_stream_that_captures_goes_on_in_the_store_that_its_option_names(log: ObjectPath, s3: S3) -> None:
    diary = Diary(log)
    for key in (1, 2, 3):
        diary.commit(inserts(key))
    options = {"log": str(log), "logEndpoint": s3.endpoint, "url": "postgresql://x@127.0.0.1:1/x", "tables": "*"}
    made = resolve_frame(LogOptions.parse({**options, "startingPosition": "3"}))

    def started() -> LogStreamReader:
        return LogStreamReader(made, spark_schema(made.fields), Writing())

    place = {"log": ChangeLog.open(log).log_id, "commit": 2}
    assert started().initialOffset() == place, "it is no new log"
    assert started().latestOffset(place, ReadAllAvailable())["commit"] == 3, "the checkpoint is of this one"
    diary.close()


# ---- one wins --------------------------------------------------------------------------------------------


@pytest.fixture
def rivals(log: ObjectPath, monkeypatch: pytest.MonkeyPatch) -> tuple[LogWriter, LogWriter]:
    """Two writers of one log, neither knowing of the other."""
    monkeypatch.setattr(writer_module, "LogLease", NoLease)
    first = LogWriter(log, SOURCE)
    first.append(window(0, 100))
    return first, LogWriter(log, SOURCE)


def test_of_two_who_take_a_number_the_second_is_refused(rivals: tuple[LogWriter, LogWriter], log: ObjectPath) -> None:
    one, other = rivals
    one.append(rows_window(100, 200, 1))
    stored = commit_path(log, 2).read_bytes()
    with pytest.raises(LogFenced):
        other.append(rows_window(100, 200, 1))  # the very same rows are not the very same commit
    assert commit_path(log, 2).read_bytes() == stored
    one.append(rows_window(200, 300, 2))
    assert keys(log) == [1, 2]


def test_a_second_process_waits_for_the_lease_and_is_told_who_has_it(log: ObjectPath) -> None:
    writer = LogWriter(log, SOURCE)
    with pytest.raises(LogBusy) as caught:
        LogLease(log, wait_seconds=0.3)
    assert caught.value.fields["pid"] == os.getpid()
    assert log_lease.live_holder_pid(log) == os.getpid()
    writer.close()
    LogLease(log, wait_seconds=0.0).release()
    assert log_lease.live_holder_pid(log) is None


def test_a_lease_that_was_taken_over_is_lost_and_is_not_written_again(log: ObjectPath) -> None:
    old = LogLease(log, renew_seconds=600.0)
    new = LogLease(log, take_over=True)
    assert new.was_forced
    old.renew()
    assert old.lost()
    assert not new.lost()
    with pytest.raises(LogFenced):
        old.check()
    old.release()
    assert log_lease.live_holder_pid(log) == os.getpid()
    new.release()


def test_a_lease_of_another_host_is_taken_once_nobody_renews_it(log: ObjectPath) -> None:
    (log / "owner.json").write_bytes(b'{"pid": 1, "host": "far", "boot": "x", "space": "y", "token": "t"}')
    begun = time.monotonic()
    found = LogLease(log, wait_seconds=240.0, expiry_seconds=0.5)
    assert found.was_forced
    assert time.monotonic() - begun >= 0.5
    found.release()


# ---- answers that are lost -------------------------------------------------------------------------------


def test_a_commit_whose_answer_was_lost_is_known_as_our_own(s3: S3, log: ObjectPath) -> None:
    way = LossyWay(s3)
    with way.open() as lossy:
        there = ObjectPath.parse(str(log), endpoint=lossy.endpoint)
        writer = LogWriter(there, SOURCE)
        writer.append(window(0, 100))
        way.lose = lambda line: line.startswith("PUT") and "/hot/" in line and len(way.lost) < 2
        header = writer.append(rows_window(100, 200, 1))
        assert header is not None
        assert header.commit == 2
        assert len(way.lost) == 2
        writer.append(rows_window(200, 300, 2))
        writer.close()
    assert keys(log) == [1, 2]
    assert verify(log).flaws == ()


def test_a_shape_and_a_seal_whose_answers_were_lost_are_known_too(s3: S3, log: ObjectPath) -> None:
    way = LossyWay(s3)
    seen: set[str] = set()

    def first_time(line: str) -> bool:
        new = line.startswith("PUT") and line not in seen
        seen.add(line)
        return new

    way.lose = first_time
    with way.open() as lossy:
        diary = Diary(ObjectPath.parse(str(log), endpoint=lossy.endpoint))
        diary.commit(inserts(1))
        diary.piece(inserts(2))
        diary.finish(inserts(3))
        seal(diary.path, grace_seconds=None)
        diary.close()
    assert len(way.lost) >= 8
    assert read_all(log) == diary.rows()
    assert verify(log).flaws == ()


def test_a_name_that_another_took_while_our_answer_was_lost_is_not_ours(s3: S3, log: ObjectPath) -> None:
    objects.put_new(log / "name", b"theirs")
    way = LossyWay(s3)
    way.lose = lambda line: line.startswith("PUT") and not way.lost
    with way.open() as lossy, pytest.raises(FileExistsError):
        objects.put_new(ObjectPath.parse(str(log), endpoint=lossy.endpoint) / "name", b"ours")
    assert (log / "name").read_bytes() == b"theirs"


def test_without_an_answer_nothing_more_is_taken_and_the_next_writer_finds_what_was_done(
    s3: S3, log: ObjectPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "_TRIES_MAX", 0)
    way = LossyWay(s3)
    with way.open() as lossy:
        writer = LogWriter(ObjectPath.parse(str(log), endpoint=lossy.endpoint), SOURCE)
        writer.append(window(0, 100))
        monkeypatch.setattr(objects, "PUT_SECONDS_MAX", 1.0)
        way.lose = lambda line: line.startswith("PUT") and "/hot/" in line
        way.refuse = lambda line: "/hot/" in line and bool(way.lost)
        with pytest.raises(LogUnusable, match="may not be durable"):
            writer.append(rows_window(100, 200, 1))
        way.lose = way.refuse = lambda line: False
        with pytest.raises(LogUnusable, match="not known"):
            writer.append(rows_window(100, 200, 1))
        writer.close()
    later = LogWriter(log, SOURCE)
    assert (later.commit, later.position.value) == (2, 200)
    later.append(rows_window(200, 300, 2))
    later.close()
    assert keys(log) == [1, 2]


# ---- stores that do not answer, or say no ----------------------------------------------------------------


def test_a_store_that_is_not_there_is_told_so_and_is_worth_another_try(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "_TRIES_MAX", 0)
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LogUnreachable) as caught:
        ChangeLog.open(parse_log_path("s3://bucket/log", endpoint="http://127.0.0.1:9"))
    assert "127.0.0.1" not in caught.value.message
    assert "log.endpoint" in caught.value.hint


def test_a_bucket_that_is_not_there_is_told_so(s3: S3) -> None:
    nowhere = parse_log_path("s3://no-such-bucket/log", endpoint=s3.endpoint)
    with pytest.raises(LogUnusable, match="there is no log here"):
        ChangeLog.open(nowhere)
    with pytest.raises(LogUnusable, match="no such bucket"):
        LogWriter(nowhere, SOURCE)


# ---- side by side, and killed ----------------------------------------------------------------------------


def test_a_reader_gets_every_row_once_while_commits_are_sealed_joined_and_removed(log: ObjectPath) -> None:
    diary = Diary(log)
    diary.commit(inserts(0))
    read: list[int] = []

    def follow() -> None:
        for batch in ChangeLog.open(log).follow(0, wait_seconds=240.0):
            read.extend(batch.data.column("id").to_pylist())
            if read[-1] == 20:
                return

    reader = threading.Thread(target=follow)
    reader.start()
    for key in range(1, 21):
        diary.commit(inserts(key))
        if key % 5 == 0:
            seal(log, limits=SealLimits(commits=2, merge_count=2))
    reader.join(240.0)
    diary.close()
    assert read == list(range(21))


WRITER = """
import sys
from tailrace.storage.files import parse_log_path
from tests.support.logs import Diary, inserts
diary = Diary(parse_log_path(sys.argv[1], endpoint=sys.argv[2]))
diary.commit(inserts(10))
diary.piece(inserts(11))
diary.piece(inserts(12))
diary.finish(inserts(13))
"""


KILLED = {
    "log.schema_recorded": [], "log.before_write": [], "log.after_write": [], "log.after_link": [10],
    "log.piece_written:2": [10], "log.after_link:2": [10, 11, 12, 13],
}  # fmt: skip
"""Where, and which rows are in the log then."""
OFTEN = KILLED if os.environ.get("TAILRACE_THOROUGH") else ("log.after_write", "log.piece_written:2", "log.after_link")


@pytest.mark.parametrize("at", OFTEN)
def test_a_writer_killed_between_two_puts_leaves_whole_commits_and_the_next_one_goes_on_at_once(
    log: ObjectPath, s3: S3, tmp_path: Path, at: str
) -> None:
    left = KILLED[at]
    environment = {
        **os.environ,
        "TAILRACE_FAILPOINT": at,
        "TAILRACE_FAILPOINT_LOG": str(tmp_path / "hits"),
        "TAILRACE_FAILPOINT_SCOPE": "process",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    command = [sys.executable, "-c", WRITER, str(log), s3.endpoint]
    assert subprocess.run(command, env=environment, timeout=240, check=False).returncode == -9
    LogLease(log, wait_seconds=0.0).release()  # the dead one's is free: it was a process of this machine
    diary = Diary(log)
    assert keys(log) == left
    diary.commit(inserts(20))
    assert keys(log) == [*left, 20]
    diary.close()
    assert verify(log).flaws == ()
    assert_nothing_left_over(log)
