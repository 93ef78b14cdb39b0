"""A log changes hands while its writer works.

Each number is won once, and the loser gets an error. Every process here is real, and so is its lease. Where the lease
must not decide, each rival sees the log through a folder of its own. These folders share everything but the lock, as
with hosts whose locks do not reach each other.
"""

from __future__ import annotations

import itertools
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from tailrace.changelog.read.reader import ChangeLog
from tailrace.errors import LogFenced
from tailrace.pipeline.capture.log_capture import LeasedLogWriter
from tests.support.pipelines import eventually
from tests.support.windows import SOURCE, ids, rows_window

ENDLESS = 1_000_000


class Rival:
    """A writing process, and the commits that it reports as won."""

    def __init__(self, folder: Path, name: int, wins: int, *flags: str) -> None:
        self._said = folder.parent / f"rival-{name}.txt"
        with self._said.open("w") as output:
            command = [sys.executable, "-m", "tests.support.rival", str(folder), str(name), str(wins), *flags]
            self.process = subprocess.Popen(command, stdout=output, cwd=Path(__file__).parents[4])

    def lines(self) -> list[list[str]]:
        return [line.split() for line in self._said.read_text().splitlines(keepends=True) if line[-1] == "\n"]

    def won(self) -> dict[int, int]:
        """The keys by commit."""
        return {int(line[0]): int(line[1]) for line in self.lines() if len(line) == 2}

    def wait_for_wins(self, wins: int) -> None:
        assert eventually(lambda: len(self.won()) > wins, pause=0.01), self.lines()[-1:]

    def refused(self) -> bool:
        """True if it ended because it lost the log."""
        return self.process.wait(240) == 6 and self.lines()[-1] == ["log-fenced"]

    def stop_still(self) -> None:
        self.process.send_signal(signal.SIGSTOP)
        state = Path(f"/proc/{self.process.pid}/stat")
        assert eventually(lambda: state.read_text().rpartition(")")[2].split()[0] == "T", pause=0.01)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def ended() -> Iterator[ExitStack]:
    """A list of processes that are all ended after the test."""
    with ExitStack() as stack:
        yield stack


def start(ended: ExitStack, folder: Path, name: int, wins: int, *flags: str) -> Rival:
    rival = Rival(folder, name, wins, *flags)
    ended.callback(rival.end)
    return rival


def assert_whole(folder: Path, reported: Sequence[dict[int, int]]) -> None:
    """Check that the log has no gap, no fork, and each win once.

    `_seq` must be dense, and no number may be won twice.
    """
    log = ChangeLog.open(folder)
    headers = list(log.headers(0))
    assert [header.commit for header in headers] == list(range(1, len(headers) + 1))
    for before, after in itertools.pairwise(headers):
        assert after.start == before.end
    stored = dict[int, int]()
    for header in headers:
        for body in header.bodies:
            batch = log.batch(header, body)
            if "id" in batch.data.schema.names:
                (stored[header.commit],) = batch.data.column("id").to_pylist()
    wins = [win for rival in reported for win in rival.items()]
    assert len({commit for commit, _ in wins}) == len(wins), "a number was won twice"
    missing = {commit: key for commit, key in wins if stored.get(commit) != key}
    assert not missing, "a commit was overwritten or lost"
    # A writer stopped between its commit and its report has won a number without a report.
    assert len(stored) - len(wins) <= len(reported)
    rows = [batch for batch in log.follow(0) if "id" in batch.data.schema.names]
    assert [seq for seq, _ in ids(rows)] == list(range(1, len(stored) + 1))
    assert len(set(stored.values())) == len(stored)


def made(folder: Path) -> Path:
    log = LeasedLogWriter.open(folder, SOURCE, take_over=False)
    log.append(rows_window(0, 100, 0))
    log.close()
    return folder


def view_of(folder: Path, name: str) -> Path:
    """Return the log as seen by another host that its locks do not reach."""
    view = folder.parent / name
    view.mkdir()
    for entry in folder.iterdir():
        if not entry.name.startswith("owner."):
            (view / entry.name).symlink_to(entry)
    return view


def test_of_two_writers_in_threads_the_overtaken_one_is_refused(folder: Path) -> None:
    made(folder)
    reported: list[dict[int, int]] = [{}, {}]
    refused = list[LogFenced]()
    begun = threading.Event()

    def write(turn: int, *, take_over: bool, wins: int) -> None:
        log = LeasedLogWriter.open(folder, SOURCE, take_over=take_over)
        try:
            for key in range(turn * ENDLESS + 1, turn * ENDLESS + 1 + wins):
                begin = log.position.value
                header = log.append(rows_window(begin, begin + 10, key))
                assert header is not None
                reported[turn][header.commit] = key
                if key > 5:
                    begun.set()
        except LogFenced as error:
            refused.append(error)
        finally:
            log.close()

    first = threading.Thread(target=write, args=(0,), kwargs={"take_over": False, "wins": ENDLESS - 1})
    first.start()
    assert begun.wait(240)
    write(1, take_over=True, wins=30)
    first.join()
    assert len(refused) == 1
    assert len(reported[1]) == 30
    assert_whole(folder, [{1: 0}, *reported])


def test_writers_with_separate_locks_win_each_number_once(folder: Path, ended: ExitStack) -> None:
    made(folder)
    rivals = [start(ended, view_of(folder, f"host-{name}"), name, 60, "return") for name in (1, 2)]
    assert [rival.process.wait(240) for rival in rivals] == [0, 0], [rival.lines()[-1:] for rival in rivals]
    reported = [rival.won() for rival in rivals]
    assert [len(wins) for wins in reported] == [60, 60]
    assert_whole(folder, [{1: 0}, *reported])


@pytest.mark.slow
def test_each_take_over_ends_the_process_before(folder: Path, ended: ExitStack) -> None:
    made(folder)
    rivals = [start(ended, folder, 1, ENDLESS)]
    for name in range(2, 6):
        rivals[-1].wait_for_wins(10)
        rivals.append(start(ended, folder, name, ENDLESS if name < 5 else 30, "take-over"))
        assert rivals[-2].refused(), rivals[-2].lines()[-1:]
    assert rivals[-1].process.wait(240) == 0
    assert_whole(folder, [{1: 0}, *[rival.won() for rival in rivals]])


@pytest.mark.slow
def test_a_writer_stopped_during_a_take_over_is_refused_when_it_continues(folder: Path, ended: ExitStack) -> None:
    made(folder)
    chance, reported = random.Random(5), [{1: 0}]
    for name in range(1, 9):
        stopped = start(ended, folder, name, ENDLESS)
        stopped.wait_for_wins(5)
        time.sleep(chance.random() / 50)
        stopped.stop_still()
        log = LeasedLogWriter.open(folder, SOURCE, take_over=True)
        wins = dict[int, int]()
        for key in range(name * 1_000_000 + 900_000, name * 1_000_000 + 900_000 + 5):
            begin = log.position.value
            header = log.append(rows_window(begin, begin + 10, key))
            assert header is not None
            wins[header.commit] = key
        stopped.go_on()
        assert stopped.refused(), stopped.lines()[-1:]
        log.append(rows_window(log.position.value, log.position.value + 10, name * 1_000_000 + 999_999))
        wins[log.commit] = name * 1_000_000 + 999_999
        log.close()
        reported += [stopped.won(), wins]
    assert_whole(folder, reported)


def test_a_writer_woken_before_its_successors_first_rows_cannot_commit(folder: Path, ended: ExitStack) -> None:
    made(folder)
    stopped = start(ended, folder, 1, ENDLESS)
    stopped.wait_for_wins(5)
    stopped.stop_still()
    log = LeasedLogWriter.open(folder, SOURCE, take_over=True)
    fence = log.commit
    assert ChangeLog.open(folder).header(fence).rows == 0, "an empty commit has taken the number"
    stopped.go_on()
    assert stopped.refused()
    assert ChangeLog.open(folder).newest() == fence
    log.append(rows_window(log.position.value, log.position.value + 10, 5))
    assert_whole(folder, [{1: 0}, stopped.won(), {log.commit: 5}])
    log.close()
