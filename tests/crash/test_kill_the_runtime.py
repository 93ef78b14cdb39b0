"""A program that captures with a runtime is killed: what was not acknowledged comes again, what was does not."""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.process
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from tailrace import failpoints
from tailrace.demo.server import EmbeddedPostgres
from tailrace.state.checkpoint_stores import FileCheckpointStore
from tailrace.transforms.steps.encryption import associated_data
from tests.support.databases import database
from tests.support.runtime_worker import ITEMS, KEY_ID, KEY_VARIABLE, forked

ROOT = Path(__file__).parents[2]
SCANNING = "runtime.scan_saved"
"""Passed only while tables are read, so it comes first."""
PLACES = (
    "state.written", "state.replaced", "state.saved", "capture.window_read", "capture.piece_read",
    "runtime.sink_written", "runtime.sink_flushed", "runtime.prefix_saved", "capture.before_confirm",
    "capture.after_confirm",
)  # fmt: skip
READ = 300
"""Rows that are there at first."""
KEY = bytes(range(32))
THOROUGH = "TAILRACE_THOROUGH" in os.environ


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedPostgres]:
    with EmbeddedPostgres() as running:
        yield running


@pytest.fixture
def url(server: EmbeddedPostgres) -> Iterator[str]:
    with database(server, f"library_{os.urandom(4).hex()}") as name:
        with psycopg.connect(server.url(name), autocommit=True) as connection:
            connection.execute("create table items (id int8 primary key, name text)")
        yield server.url(name)


def write(url: str, first: int, last: int) -> None:
    """One transaction."""
    with psycopg.connect(url) as connection:
        connection.execute(
            "insert into items select i, 'name ' || i from generate_series(%s::int, %s::int) i", (first, last)
        )


class Worker:
    """The program, in a process group of its own."""

    def __init__(self, url: str, folder: Path, how: str, rows: int, *more: str, **environment: str) -> None:
        folder.mkdir(exist_ok=True)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.runtime_worker", url, str(folder), how, str(rows), *more],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, **environment},
        )
        self.said: list[dict[str, Any]] = []

    def until(self, what: str) -> dict[str, Any]:
        """Read on until it has said this."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self.said.append(json.loads(line))
            if what in self.said[-1]:
                return self.said[-1]
        raise AssertionError(f"it ended before it said {what}: {self._process.wait()}")

    def kill(self) -> None:
        self._process.kill()
        self.wait()

    def wait(self) -> int:
        """To its end; how that was."""
        assert self._process.stdout is not None
        self.said += [json.loads(line) for line in self._process.stdout if line.strip()]
        self._process.stdout.close()
        return self._process.wait()

    @property
    def ids(self) -> list[int]:
        return [key for item in self.said for key in item.get("ids", ())]


def killed_before_the_acknowledgement(url: str, folder: Path, *more: str, **environment: str) -> list[str]:
    """100 rows, taken and not acknowledged, then taken by another: the names that the second was given."""
    first = Worker(url, folder, "hold", 100, *more, **environment)
    first.until("started")
    write(url, 1, 100)
    first.until("marker")
    first.kill()
    assert first.ids == list(range(1, 101))
    second = Worker(url, folder, "all", 100, *more, **environment)
    assert second.until("started")["committed"] == 0
    ended = second.until("ended")
    assert second.wait() == 0
    assert second.ids == list(range(1, 101)), "the batch comes again, whole"
    assert second.said[1]["seqs"] == first.said[1]["seqs"] == list(range(100))
    assert ended["committed"] == 100
    names: list[str] = second.said[1]["names"]
    return names


def test_killed_before_the_acknowledgement_the_batch_comes_again_whole(url: str, tmp_path: Path) -> None:
    assert killed_before_the_acknowledgement(url, tmp_path) == [f"name {key}" for key in range(1, 101)]


def test_killed_before_the_acknowledgement_every_value_that_comes_again_is_encrypted(url: str, tmp_path: Path) -> None:
    names = killed_before_the_acknowledgement(url, tmp_path, "encrypt", **{KEY_VARIABLE: KEY.hex()})
    sealed = [bytes.fromhex(name) for name in names]
    head = bytes([2, len(KEY_ID)]) + KEY_ID.encode()
    assert all(value.startswith(head) and b"name" not in value for value in sealed)
    opened = [
        AESGCM(KEY).decrypt(rest[:12], rest[12:], associated_data(ITEMS, "name")).decode()
        for value in sealed
        if (rest := value.removeprefix(head))
    ]
    assert opened == [f"name {key}" for key in range(1, 101)]


def test_a_snapshot_killed_after_its_first_acknowledgement_goes_on_behind_it(url: str, tmp_path: Path) -> None:
    write(url, 1, 600)
    first = Worker(url, tmp_path, "one", 600, "snapshot")
    assert first.until("marker")["committed"] == len(first.ids)
    first.kill()
    assert 0 < len(first.ids) <= 100
    write(url, 1000, 1000)
    second = Worker(url, tmp_path, "all", 602, "snapshot")  # the new row is read, and comes from the stream too
    assert second.until("started")["committed"] == len(first.ids)
    assert second.until("ended")["committed"] == 602
    assert second.wait() == 0
    by_kind = Counter((item["kind"], key) for item in second.said for key in item.get("ids", ()))
    read = sorted(key for kind, key in by_kind if kind == "snapshot")
    assert set(read) >= set(range(1, 601)) - set(first.ids), "the rest arrives"
    assert not set(first.ids) & set(second.ids), "nothing acknowledged comes again"
    assert ("stream", 1000) in by_kind, "and the stream goes on from the snapshot's own position"


def test_a_sink_that_inserts_what_is_absent_by_number_ends_equal_to_the_source(url: str, tmp_path: Path) -> None:
    """Killed in the middle of a snapshot with a batch under way, whose rows then change, shift and go."""
    write(url, 1, 400)
    by_number: dict[int, tuple[str, int, str]] = {}

    def insert_if_absent(worker: Worker) -> None:
        for said in (item for item in worker.said if "ids" in item):
            for seq, *row in zip(said["seqs"], said["ops"], said["ids"], said["names"], strict=True):
                assert by_number.setdefault(seq, tuple(row)) == tuple(row), "one number, two rows"

    for turn in range(2):
        killed = Worker(url, tmp_path, "two", 10_000, "snapshot")
        killed.until("marker")
        killed.kill()
        insert_if_absent(killed)
        taken = killed.said[-2]["ids"]
        with psycopg.connect(url) as connection:
            connection.execute("delete from items where id = any(%s)", (taken[:3],))
            connection.execute("update items set name = %s where id = %s", (f"new {turn}", taken[7]))
    write(url, 1000, 1000)
    last = Worker(url, tmp_path, "until", 1000, "snapshot")
    last.until("ended")
    assert last.wait() == 0
    insert_if_absent(last)
    rows: dict[int, str] = {}
    for _, (operation, key, name) in sorted(by_number.items()):
        if operation == "delete":
            rows.pop(key, None)
        else:
            rows[key] = name
    with psycopg.connect(url) as connection:
        assert rows == dict(connection.execute("select id, name from items").fetchall())


def test_the_places_are_all_that_the_runtime_passes() -> None:
    """Of what only a history keeps, and of removing, see test_kill_the_stores."""
    named = {name for name in failpoints.NAMES if name.startswith(("capture.", "runtime.", "state."))}
    assert {SCANNING, *PLACES} == named - {"state.created", "state.removed"}


def test_killed_at_every_named_place_of_the_loop_nothing_is_lost(url: str, tmp_path: Path) -> None:
    """Under load, each place in turn. A number has one row, and the count is exact."""
    hits = tmp_path / "hits"
    write(url, 1, READ)
    last = READ
    turns = (SCANNING, *PLACES * (3 if THOROUGH else 1))
    workers = multiprocessing.get_context("forkserver")
    workers.set_forkserver_preload(["tests.support.runtime_worker"])

    def worker(place: str, how: str, rows: int, *more: str) -> multiprocessing.process.BaseProcess:
        given = (place, hits, url, str(tmp_path), how, str(rows), "snapshot", *more)
        started = workers.Process(target=forked, args=given)
        started.start()
        return started

    for place in turns:
        how = "prefix" if place == "runtime.prefix_saved" else "run"
        more = ("parts",) if place == "capture.piece_read" else ()
        running = worker(f"{place}:2", how, 10_000_000, *more)
        while running.is_alive():
            write(url, last + 1, last + 70)
            last += 70
            running.join(0.1)
        assert running.exitcode == -signal.SIGKILL, place
    assert Counter(hits.read_text().split()) == Counter(turns)
    last += 1
    write(url, last, last)
    running = worker("", "run", last)
    running.join()
    assert running.exitcode == 0
    with FileCheckpointStore(tmp_path / "state") as store:
        checkpoint = store.load("default")
    assert checkpoint is not None
    assert_nothing_lost(tmp_path / "out", last, checkpoint.metadata["rows"] + checkpoint.metadata["passed"])


def assert_nothing_lost(out: Path, last: int, next_seq: int) -> None:
    """A number has one row, and a row of the stream one number, once no table is read any more; all that was there at
    first was read, all the rest streamed."""
    by_number: dict[int, set[tuple[str, int]]] = {}
    for file in sorted(out.glob("*.jsonl")):
        for line in file.read_text().splitlines():
            event = json.loads(line)
            by_number.setdefault(event["seq"], set()).add((event["op"], event["after"]["id"]))
    assert max(by_number) == next_seq - 1
    assert all(len(rows) == 1 for rows in by_number.values())
    read_upto = max(seq for seq, rows in by_number.items() if any(kind == "read" for kind, _ in rows))
    assert {seq for seq in by_number if seq > read_upto} == set(range(read_upto + 1, next_seq))
    found = Counter(row for rows in by_number.values() for row in rows)
    assert {count for (kind, _), count in found.items() if kind == "insert"} == {1}
    assert {key for kind, key in found if kind == "read"} >= set(range(1, READ + 1))
    streamed = {key for kind, key in found if kind == "insert"}
    assert streamed == set(range(min(streamed), last + 1))
    assert {key for _, key in found} == set(range(1, last + 1))
