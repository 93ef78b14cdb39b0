"""Maintain the log at low priority, in a process next to the capture.

It seals, merges, cleans and trims. Only the number of files and the room they take depend on it. It may fail, fall
behind or be killed, and capture continues. It has a process of its own: a thread of the capture process would keep the
interpreter's lock from the other threads while it waits.

The process gets its orders on stdin, reports on stdout, and ends when its stdin does.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tailrace.changelog.format.commit_file import commit_path
from tailrace.changelog.maintain.retention import ROOM_RATIO, RetentionPolicy, TrimResult, disk_bytes, trim
from tailrace.changelog.maintain.sealer import GRACE_SECONDS, Sealer, SealResult
from tailrace.changelog.read.reader import ChangeLog
from tailrace.changelog.write.log_lease import WAIT_SECONDS_MAX
from tailrace.errors import LogBusy, LogCorrupt, LogFull, TailraceError
from tailrace.processes import die_with_parent
from tailrace.storage import files
from tailrace.storage.files import LogPath

log = logging.getLogger(__name__)

TRIM_EVERY_SECONDS = 10.0
STOP_SECONDS_MAX = 10.0
"""Seconds for the round under way; what it leaves unfinished is swept and done again."""
NICE = 10
_PROGRAM = f"import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); from {__name__} import main; main()"
"""The process's program. It ignores Ctrl-C, which is meant for its parent, even while it imports."""
_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({})))


@dataclass(frozen=True, kw_only=True)
class MaintenancePolicy:
    """Rules that say when commits are sealed, and what is kept."""

    seal_bytes: int = 128 << 20
    seal_commits: int = 4_096
    seal_seconds: float = 600.0
    """The age of the oldest unsealed commit that makes a seal due.

    Unsealed commits are sealed when they pass `seal_bytes`, `seal_commits` or this.
    """
    grace_seconds: float = GRACE_SECONDS
    retention: RetentionPolicy = field(default_factory=RetentionPolicy)
    check_seconds: float = 1.0
    retry_seconds: float = 30.0
    """Seconds to wait after a failure; `check_seconds` is the wait between two checks."""


@dataclass(frozen=True, kw_only=True)
class MaintenanceResult:
    """The result of one round."""

    sealed: SealResult = field(default_factory=SealResult)
    trimmed: TrimResult = field(default_factory=TrimResult)


class UnsealedCommits:
    """The commits that wait to be sealed, counted as they arrive."""

    def __init__(self, change_log: ChangeLog) -> None:
        self._log = change_log
        self._unsealed_sizes: dict[int, tuple[int, float]] = {}
        """Bytes and time of the first look, by commit, in order.

        The time is by our own clock: the machine's may jump.
        """

    def is_seal_due(self, policy: MaintenancePolicy) -> bool:
        """Return true if it is time to seal."""
        newest = self._log.newest()
        self._log.seal_index.refresh()
        first = max(self._log.seal_index.last_commit, self._log.trimmed().commit) + 1
        now = time.monotonic()
        known = max(first, max(self._unsealed_sizes, default=0) + 1)
        if known <= newest:
            sizes = _sizes_from(self._log.path, known)
            self._unsealed_sizes |= {
                commit: (sizes[commit], now) for commit in range(known, newest + 1) if commit in sizes
            }
        self._unsealed_sizes = {commit: entry for commit, entry in self._unsealed_sizes.items() if commit >= first}
        if not self._unsealed_sizes:
            return False
        _, oldest_seen = next(iter(self._unsealed_sizes.values()))
        return (
            len(self._unsealed_sizes) >= policy.seal_commits
            or sum(size for size, _ in self._unsealed_sizes.values()) >= policy.seal_bytes
            or now - oldest_seen >= policy.seal_seconds
        )


def _sizes_from(path: LogPath, first: int) -> dict[int, int]:
    """Return the bytes of each commit from one on."""
    before = commit_path(path, first - 1).name
    with files.explain_errors(path):
        commit_sizes = files.file_sizes(path / "hot", before)
        sizes = {int(file.stem): size for file, size in commit_sizes.items() if file.stem.isdigit()}
        for piece, size in files.file_sizes(path / "big", before.partition(".")[0] + "~").items():
            if (number := piece.parent.name).isdigit() and int(number) in sizes:
                sizes[int(number)] += size
    return sizes


class LogMaintenance:
    """The maintenance process, seen from the capture process.

    Rounds are bounded; `stop` waits for the one under way.
    """

    def __init__(self, path: LogPath, policy: MaintenancePolicy) -> None:
        self._orders = (path, policy, log.getEffectiveLevel())
        self._policy = policy
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._watch, name="tailrace-log-maintenance", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        with self._lock:
            self._stopping.set()
            if self._process is not None and self._process.stdin is not None:
                with suppress(OSError):  # it died before it read its orders
                    self._process.stdin.close()
        if self._thread.is_alive():
            self._thread.join(STOP_SECONDS_MAX)
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._thread.join()

    def _watch(self) -> None:
        """Keep a process running until `stop`.

        If nothing else ends the process, the kernel does when this thread ends.
        """
        wait = self._policy.check_seconds
        while not self._stopping.wait(wait):
            wait = self._policy.retry_seconds
            try:
                code = self._run_process()
            except OSError as error:  # too many processes or files, or too little memory
                fields = {"reason": str(error), "wait": wait}
                log.warning("log maintenance could not be started, will be tried again", extra=fields)
                continue
            if not self._stopping.is_set():
                log.warning("log maintenance ended, will be started again", extra={"exit_code": code, "wait": wait})

    def _run_process(self) -> int:
        """Start a process and log its reports until it ends; return its exit code."""
        with self._lock:
            if self._stopping.is_set():
                return 0
            command = [sys.executable, "-c", _PROGRAM]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            self._process = process
        assert process.stdin is not None, "a pipe"
        assert process.stdout is not None, "a pipe"
        with process:
            with suppress(OSError, ValueError):  # it has ended, or is about to
                pickle.dump(self._orders, process.stdin)
                process.stdin.flush()
            for line in process.stdout:
                with suppress(ValueError, KeyError, TypeError):  # not a record of ours: something printed
                    record = json.loads(line)
                    logging.getLogger(record["logger"]).log(record["level"], record["message"], extra=record["extra"])
        return process.returncode


class _LogRelay(logging.Handler):
    """Sends log records to the parent process."""

    def emit(self, record: logging.LogRecord) -> None:
        fields = {
            "logger": record.name,
            "level": record.levelno,
            "message": record.getMessage(),
            "extra": {name: value for name, value in vars(record).items() if name not in _STANDARD_FIELDS},
        }
        with suppress(OSError, ValueError):  # the parent no longer reads
            os.write(sys.stdout.fileno(), json.dumps(fields, default=str).encode() + b"\n")


def main() -> None:
    """Run the maintenance process."""
    die_with_parent()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # meant for the parent, which then ends us
    os.nice(NICE)
    try:
        path, policy, level = pickle.load(sys.stdin.buffer)  # noqa: S301 - from our parent process
    except EOFError:  # stopped before it started
        return
    logging.getLogger("tailrace").setLevel(level)
    logging.getLogger().addHandler(_LogRelay())
    maintain(path, policy, lambda seconds: bool(select.select([sys.stdin], [], [], seconds)[0]))


def maintain(path: LogPath, policy: MaintenancePolicy, stopped: Callable[[float], bool]) -> None:
    """Maintain the log until `stopped`, which waits so many seconds for its answer."""
    maintained: _MaintainedLog | None = None
    wait = 0.0
    while not stopped(wait):
        wait = policy.check_seconds
        try:
            maintained = maintained or _MaintainedLog(path, policy)
            maintained.run_due()
        except LogBusy:
            continue  # another process seals
        except TailraceError as error:
            maintained = None  # the next try sweeps what this one left
            level = logging.ERROR if isinstance(error, LogCorrupt) else logging.WARNING
            fields = {"code": error.code, "reason": error.message}
            log.log(level, "log maintenance failed, will be tried again", extra=fields)
            wait = policy.retry_seconds
        except Exception as error:  # the process's boundary: it must continue
            maintained = None
            last = traceback.extract_tb(error.__traceback__)[-1]
            location = f"{Path(last.filename).name}:{last.lineno}"
            log.exception("log maintenance failed unexpectedly", extra={"reason": type(error).__name__, "at": location})
            wait = policy.retry_seconds


class _MaintainedLog:
    """The log, swept once, and its unsealed commits."""

    def __init__(self, path: LogPath, policy: MaintenancePolicy) -> None:
        self._log = ChangeLog.open(path)
        self._policy = policy
        self._unsealed = UnsealedCommits(self._log)
        self._trim_due = 0.0
        # Only a process that waits gets a lease that another host's process left behind.
        with Sealer(path, wait_seconds=WAIT_SECONDS_MAX):
            pass

    def run_due(self) -> None:
        """Do what is due."""
        due = self._unsealed.is_seal_due(self._policy)
        if due or time.monotonic() >= self._trim_due:
            maintain_once(self._log, self._policy, seal=due)
            self._trim_due = time.monotonic() + TRIM_EVERY_SECONDS


def maintain_once(change_log: ChangeLog, policy: MaintenancePolicy, *, seal: bool) -> MaintenanceResult:
    """Run one round: seal if requested, then merge, clean up and trim."""
    with Sealer(change_log.path, wait_seconds=0.0, log=change_log) as sealer:
        full = _is_nearly_full(change_log.path, policy.retention)
        try:
            sealed = sealer.seal() if seal or full else SealResult()
            if seal:
                sealed += sealer.merge_seals()
        except LogFull:
            # To seal needs room. Replaced files, and rows that no reader needs, may free it.
            sealer.clean(0.0)
            trim(sealer, policy.retention)
            raise
        # Room is worth more than a reader's second lookup of a file.
        sealed += sealer.clean(0.0 if full else policy.grace_seconds)
        return MaintenanceResult(sealed=sealed, trimmed=trim(sealer, policy.retention))


def _is_nearly_full(path: LogPath, policy: RetentionPolicy) -> bool:
    return policy.max_bytes is not None and disk_bytes(path) > policy.max_bytes * ROOM_RATIO
