"""Keeps the log in order beside the one who writes it: seals, joins, cleans up and trims, at low priority.

Nothing depends on it but the number of files and the room they take: it may fail, fall behind or be killed, and
capture goes on. It runs in a thread of the capture process; the work itself is done outside the interpreter's lock.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tailrace.changelog.format import commit_path
from tailrace.changelog.lease import WAIT_SECONDS_MAX
from tailrace.changelog.reader import ChangeLog
from tailrace.changelog.retention import ROOM, Policy, Trim, disk_bytes, trim
from tailrace.changelog.sealing import GRACE_SECONDS, Sealed, Sealer
from tailrace.errors import LogBusy, LogCorrupt, LogFull, TailraceError

log = logging.getLogger(__name__)

TICK_SECONDS = 1.0
TRIM_SECONDS = 10.0
RETRY_SECONDS = 30.0
STOP_SECONDS_MAX = 10.0
"""For the round under way. What it leaves unfinished is swept and done again."""
NICE = 10


@dataclass(frozen=True, kw_only=True)
class Keeping:
    """When commits are sealed, and what is kept."""

    seal_bytes: int = 128 << 20
    seal_commits: int = 4_096
    seal_seconds: float = 600.0
    """The unsealed commits are sealed when they pass one of these; the last is the age of the oldest."""
    grace_seconds: float = GRACE_SECONDS
    policy: Policy = field(default_factory=Policy)


@dataclass(frozen=True, kw_only=True)
class Kept:
    """What one round did."""

    sealed: Sealed = field(default_factory=Sealed)
    trimmed: Trim = field(default_factory=Trim)


class Unsealed:
    """How much is waiting to be sealed, counted as it comes."""

    def __init__(self, change_log: ChangeLog) -> None:
        self._log = change_log
        self._found: dict[int, tuple[int, float]] = {}
        """By commit, in order: its bytes, and when we first saw it. By our own clock: the machine's may jump."""

    def due(self, keeping: Keeping) -> bool:
        """Whether it is time to seal."""
        newest = self._log.newest()
        self._log.cold.refresh()
        first = max(self._log.cold.last, self._log.trimmed().commit) + 1
        now = time.monotonic()
        for commit in range(max(first, max(self._found, default=0) + 1), newest + 1):
            with suppress(FileNotFoundError):
                self._found[commit] = (_size_of(self._log.path, commit), now)
        self._found = {commit: found for commit, found in self._found.items() if commit >= first}
        if not self._found:
            return False
        _, since = next(iter(self._found.values()))
        return (
            len(self._found) >= keeping.seal_commits
            or sum(size for size, _ in self._found.values()) >= keeping.seal_bytes
            or now - since >= keeping.seal_seconds
        )


def _size_of(path: Path, commit: int) -> int:
    big = path / "big" / f"{commit:020d}"
    pieces = sum(piece.stat().st_size for piece in big.iterdir()) if big.is_dir() else 0
    return commit_path(path, commit).stat().st_size + pieces


class Keeper:
    """The thread. Rounds are bounded; `stop` waits for the one under way."""

    def __init__(self, path: Path, keeping: Keeping) -> None:
        self._path = path
        self._keeping = keeping
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tailrace-keeper", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(STOP_SECONDS_MAX)

    def _run(self) -> None:
        with suppress(OSError, AttributeError):  # only Linux has a priority per thread
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        tended: _Tended | None = None
        wait = TICK_SECONDS
        while not self._stopping.wait(wait):
            wait = TICK_SECONDS
            try:
                tended = tended or _Tended(self._path, self._keeping)
                tended.look()
            except LogBusy:
                continue  # someone seals by hand
            except TailraceError as error:
                tended = None  # sweep what was begun before beginning again
                level = logging.ERROR if isinstance(error, LogCorrupt) else logging.WARNING
                said = {"code": error.code, "reason": error.message}
                log.log(level, "the log could not be put in order, tried again", extra=said)
                wait = RETRY_SECONDS
            except Exception as error:  # the thread's boundary: capture must go on
                tended = None
                log.exception("keeper failed", extra={"reason": type(error).__name__})
                wait = RETRY_SECONDS


class _Tended:
    """The log, swept once, and what is waiting in it."""

    def __init__(self, path: Path, keeping: Keeping) -> None:
        self._log = ChangeLog.open(path)
        self._keeping = keeping
        self._unsealed = Unsealed(self._log)
        self._trim_due = 0.0
        # A lock that another host's process left behind is only given up to one who waits.
        with Sealer(path, wait_seconds=WAIT_SECONDS_MAX):
            pass

    def look(self) -> None:
        """Do what is due."""
        due = self._unsealed.due(self._keeping)
        if due or time.monotonic() >= self._trim_due:
            keep(self._log, self._keeping, seal=due)
            self._trim_due = time.monotonic() + TRIM_SECONDS


def keep(change_log: ChangeLog, keeping: Keeping, *, seal: bool) -> Kept:
    """One round: seal if asked to, then join, clean up and trim."""
    with Sealer(change_log.path, wait_seconds=0.0, log=change_log) as sealer:
        full = _is_nearly_full(change_log.path, keeping.policy)
        try:
            sealed = sealer.seal() if seal or full else Sealed()
            if seal:
                sealed += sealer.join()
        except LogFull:
            # To seal needs room; what was replaced, or is kept for nobody, may have it.
            sealer.clean(0.0)
            trim(sealer, keeping.policy)
            raise
        # Room is worth more than the comfort of a reader who must look a file up again.
        sealed += sealer.clean(0.0 if full else keeping.grace_seconds)
        return Kept(sealed=sealed, trimmed=trim(sealer, keeping.policy))


def _is_nearly_full(path: Path, policy: Policy) -> bool:
    return policy.max_bytes is not None and disk_bytes(path) > policy.max_bytes * ROOM
