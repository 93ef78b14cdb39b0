"""A program that captures with a runtime is killed: what was not acknowledged comes again, what was does not."""

from __future__ import annotations

import json
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

from tailrace.demo.server import EmbeddedPostgres
from tests.support.databases import database

ROOT = Path(__file__).parents[2]
PLACES = ("capture.window_read", "capture.before_confirm", "capture.after_confirm", "state.replaced")
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
            cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True, env={**os.environ, **environment},
        )  # fmt: skip
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


def test_killed_before_the_acknowledgement_the_batch_comes_again_whole(url: str, tmp_path: Path) -> None:
    first = Worker(url, tmp_path, "hold", 100, "hide")
    first.until("started")
    write(url, 1, 100)
    first.until("marker")
    first.kill()
    assert first.ids == list(range(1, 101))
    second = Worker(url, tmp_path, "all", 100, "hide")
    assert second.until("started")["committed"] == 0
    ended = second.until("ended")
    assert second.wait() == 0
    assert second.ids == list(range(1, 101))
    assert second.said[1]["seqs"] == first.said[1]["seqs"] == list(range(100))
    assert ended["committed"] == 100
    names = [name for worker in (first, second) for item in worker.said for name in item.get("names", ())]
    assert len(names) == 200
    assert not [name for name in names if name.startswith("name")], "what comes again passes the same function"


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


@pytest.mark.skipif(not THOROUGH, reason="many processes: it runs where there is time")
def test_killed_at_every_named_place_of_the_loop_nothing_is_lost(url: str, tmp_path: Path) -> None:
    """Each place is hit twice, under load; a row may come twice, with the same number, and the count is exact."""
    hits = tmp_path / "hits"
    last = 0
    for place in PLACES * 2:
        armed = {
            "TAILRACE_FAILPOINT": f"{place}:2", "TAILRACE_FAILPOINT_LOG": str(hits),
        }  # fmt: skip
        worker = Worker(url, tmp_path, "run", 10_000_000, **armed)
        worker_started = place == "state.replaced" or worker.until("started")
        while worker._process.poll() is None:
            write(url, last + 1, last + 70)
            last += 70
        assert worker.wait() == -signal.SIGKILL, (place, worker_started)
    assert Counter(hits.read_text().split()) == Counter(PLACES * 2)
    done = Worker(url, tmp_path, "run", last)
    assert done.until("ended")["committed"] == last
    assert done.wait() == 0
    rows: dict[int, set[int]] = {}
    for file in sorted((tmp_path / "out").glob("*.jsonl")):
        for line in file.read_text().splitlines():
            event = json.loads(line)
            rows.setdefault(event["seq"], set()).add(event["after"]["id"])
    assert rows == {number: {number + 1} for number in range(last)}
