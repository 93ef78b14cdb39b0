"""The log's disk fills, turns read-only or lies, under a capture of a real server: it is told, and nothing is lost."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tailrace.changelog.format.commit_file import commit_path
from tailrace.changelog.read.reader import ChangeLog
from tests.support.disks import mounted
from tests.support.pipelines import Pipeline, Running, eventually, execute

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0, reason="SKIPPED LOUDLY: a failing disk was not tried, mounting one needs root"
)
SEALING = "log: {path: ./changes, seal: {commits: 3, age: 1s}, grace: 1s}"
TEXT = "(SELECT string_agg(md5(random()::text || g || n), '') FROM generate_series(1, {size}) n)"
"""32 times so many bytes, which no compression makes smaller."""


@pytest.fixture
def pipeline(database: str, tmp_path: Path) -> Iterator[Pipeline]:
    """A pipeline whose log lies on a disk of its own, of 4 MiB, with a table `t`."""
    execute(database, "CREATE TABLE t (id int PRIMARY KEY, x text)")
    made = Pipeline(tmp_path / "pipeline", database)
    with mounted(made.log, "-t", "tmpfs", "-o", "size=4m", "tmpfs"):
        yield made


@pytest.fixture
def capture(pipeline: Pipeline) -> Iterator[Running]:
    """A capture that has begun."""
    running = pipeline.start("capture")
    assert eventually(lambda: "capture started" in running.said()), running.said()
    yield running
    running.end()


def insert(pipeline: Pipeline, first: int, last: int, size: int = 1) -> None:
    rows = f"SELECT g, {TEXT.format(size=size)} FROM generate_series({first}, {last}) g"
    execute(pipeline.url, f"INSERT INTO t {rows}")


def captured(pipeline: Pipeline) -> list[int]:
    """The keys in the log, in the order they came."""
    log = ChangeLog.open(pipeline.log)
    return [key for batch in log.follow(0) for key in batch.data.column("id").to_pylist()]


def fill(disk: Path, leave: int) -> Path:
    """Leave only so many bytes."""
    free = os.statvfs(disk)
    filler = disk / "filler"
    filler.write_bytes(bytes(free.f_bavail * free.f_bsize - leave))
    return filler


def test_a_capture_whose_disk_is_full_says_so_and_goes_on_by_itself(pipeline: Pipeline, capture: Running) -> None:
    insert(pipeline, 1, 10)
    assert eventually(lambda: len(captured(pipeline)) == 10)
    filler = fill(pipeline.log, leave=64 << 10)
    insert(pipeline, 11, 20, size=1_000)
    insert(pipeline, 21, 30)
    assert eventually(lambda: capture.said().count("code=log-full") >= 2), capture.said()
    assert "error log or sink failed, trying again" in capture.said()
    assert "Free space on that disk" in capture.said()
    assert capture.process.poll() is None
    assert captured(pipeline) == list(range(1, 11))
    filler.unlink()
    assert eventually(lambda: len(captured(pipeline)) == 30), capture.said()
    assert captured(pipeline) == list(range(1, 31))
    assert capture.terminate() == 0, capture.said()
    assert "Traceback" not in capture.said()


def test_a_large_transaction_that_does_not_fit_is_taken_back_and_comes_again_whole(
    pipeline: Pipeline, capture: Running
) -> None:
    insert(pipeline, 1, 10)
    insert(pipeline, 11, 1_200, size=1_000)
    assert eventually(lambda: "code=log-full" in capture.said()), capture.said()
    insert(pipeline, 1_201, 1_210)
    assert eventually(lambda: list((pipeline.log / "big").glob("*/*")) == []), "its pieces took the room"
    assert captured(pipeline) == list(range(1, 11))
    subprocess.run(["mount", "-o", "remount,size=200m", str(pipeline.log)], check=True)
    assert eventually(lambda: len(captured(pipeline)) == 1_210, pause=0.5), capture.said()
    assert captured(pipeline) == list(range(1, 1_211))
    assert list((pipeline.log / "big").glob("*/*")), "it was large"
    assert capture.terminate() == 0, capture.said()


def test_a_capture_started_on_a_full_disk_is_told_and_loses_nothing(pipeline: Pipeline) -> None:
    filler = fill(pipeline.log, leave=0)
    done = pipeline.call("capture", "--until-caught-up")
    assert done.returncode == 4, done.stderr
    assert "error: the log cannot be used: No space left on device" in done.stderr
    assert "hint: Free space on that disk" in done.stderr
    filler.unlink()
    assert pipeline.call("capture", "--until-caught-up").returncode == 0
    insert(pipeline, 1, 10)
    filler = fill(pipeline.log, leave=0)
    capture = pipeline.start("capture", "--until-caught-up")
    try:
        assert eventually(lambda: "code=log-full" in capture.said()), capture.said()
        filler.unlink()
        assert capture.wait() == 0, capture.said()
    finally:
        capture.end()
    assert captured(pipeline) == list(range(1, 11))


def test_a_keeper_without_room_stops_no_capture(pipeline: Pipeline) -> None:
    settings = pipeline.file.read_text()
    assert pipeline.call("capture", "--until-caught-up").returncode == 0
    for key in range(1, 6):
        insert(pipeline, key, key, size=5_000)
    assert pipeline.call("capture", "--until-caught-up").returncode == 0
    pipeline.file.write_text(settings.replace("log: ./changes", SEALING))
    filler = fill(pipeline.log, leave=200 << 10)  # for small commits, not for a copy of the large ones
    capture = pipeline.start("capture")
    try:
        assert eventually(lambda: "log maintenance failed, will be tried again" in capture.said()), capture.said()
        insert(pipeline, 6, 15)
        assert eventually(lambda: len(captured(pipeline)) == 15), capture.said()
        filler.unlink()
        insert(pipeline, 16, 20, size=1_000)
        assert eventually(lambda: len(captured(pipeline)) == 20), capture.said()
        assert captured(pipeline) == list(range(1, 21))
        assert capture.terminate() == 0, capture.said()
        assert "Traceback" not in capture.said()
    finally:
        capture.end()
    assert pipeline.call("capture", "--until-caught-up").returncode == 0
    assert captured(pipeline) == list(range(1, 21))


def test_a_disk_that_turns_read_only_ends_the_capture_and_the_next_start_loses_nothing(
    pipeline: Pipeline, capture: Running
) -> None:
    insert(pipeline, 1, 10)
    assert eventually(lambda: len(captured(pipeline)) == 10)
    with mounted(pipeline.log, "--bind", str(pipeline.log)):
        subprocess.run(["mount", "-o", "remount,bind,ro", str(pipeline.log)], check=True)
        insert(pipeline, 11, 20)
        assert capture.wait() == 4, capture.said()
        assert "Read-only file system" in capture.said()
        assert "hint: Mount the file system writable" in capture.said()
        assert "Traceback" not in capture.said()
        assert captured(pipeline) == list(range(1, 11))
    assert pipeline.call("capture", "--until-caught-up").returncode == 0
    assert captured(pipeline) == list(range(1, 21))


def test_a_torn_newest_commit_is_told_and_so_is_that_the_source_no_longer_has_it(pipeline: Pipeline) -> None:
    assert pipeline.call("capture", "--until-caught-up").returncode == 0
    insert(pipeline, 1, 10)
    assert pipeline.call("capture", "--until-caught-up").returncode == 0
    newest = commit_path(pipeline.log, ChangeLog.open(pipeline.log).newest())
    good = newest.read_bytes()
    newest.write_bytes(bytes(len(good)))
    torn = pipeline.call("capture", "--until-caught-up")
    assert torn.returncode == 4, torn.stderr
    assert "If the machine has just crashed" in torn.stderr
    newest.unlink()
    missing = pipeline.call("capture", "--until-caught-up")
    assert missing.returncode == 3, missing.stderr
    assert "error: " in missing.stderr
    newest.write_bytes(good)
    insert(pipeline, 11, 20)
    assert pipeline.call("capture", "--until-caught-up").returncode == 0
    assert captured(pipeline) == list(range(1, 21))
