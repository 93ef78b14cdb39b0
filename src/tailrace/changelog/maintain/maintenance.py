"""Keeps the log in order beside the one who writes it: seals, joins, cleans up and trims, at low priority.

Nothing depends on it but the number of files and the room they take: it may fail, fall behind or be killed, and
capture goes on. It has a process of its own: in a thread of the capture process, one that is to wait for others would
keep the interpreter's lock from them while it waits.

What the process is to do comes on its stdin, what it has to say goes to its stdout, and it ends when its stdin does.
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
"""For the round under way. What it leaves unfinished is swept and done again."""
NICE = 10
_MAIN = f"import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); from {__name__} import main; main()"
"""Ctrl-C is meant for the one who starts it, also while it imports."""
_USUAL = frozenset(vars(logging.makeLogRecord({})))


@dataclass(frozen=True, kw_only=True)
class MaintenancePolicy:
    """When commits are sealed, and what is kept."""

    seal_bytes: int = 128 << 20
    seal_commits: int = 4_096
    seal_seconds: float = 600.0
    """The unsealed commits are sealed when they pass one of these; the last is the age of the oldest."""
    grace_seconds: float = GRACE_SECONDS
    retention: RetentionPolicy = field(default_factory=RetentionPolicy)
    check_seconds: float = 1.0
    retry_seconds: float = 30.0
    """How often to look whether something is due, and how long to wait after a failure."""


@dataclass(frozen=True, kw_only=True)
class MaintenanceResult:
    """What one round did."""

    sealed: SealResult = field(default_factory=SealResult)
    trimmed: TrimResult = field(default_factory=TrimResult)


class UnsealedCommits:
    """How much is waiting to be sealed, counted as it comes."""

    def __init__(self, change_log: ChangeLog) -> None:
        self._log = change_log
        self._found: dict[int, tuple[int, float]] = {}
        """By commit, in order: its bytes, and when we first saw it. By our own clock: the machine's may jump."""

    def is_seal_due(self, keeping: MaintenancePolicy) -> bool:
        """Whether it is time to seal."""
        newest = self._log.newest()
        self._log.seal_index.refresh()
        first = max(self._log.seal_index.last_commit, self._log.trimmed().commit) + 1
        now = time.monotonic()
        known = max(first, max(self._found, default=0) + 1)
        if known <= newest:
            sizes = _sizes_from(self._log.path, known)
            self._found |= {commit: (sizes[commit], now) for commit in range(known, newest + 1) if commit in sizes}
        self._found = {commit: found for commit, found in self._found.items() if commit >= first}
        if not self._found:
            return False
        _, since = next(iter(self._found.values()))
        return (
            len(self._found) >= keeping.seal_commits
            or sum(size for size, _ in self._found.values()) >= keeping.seal_bytes
            or now - since >= keeping.seal_seconds
        )


def _sizes_from(path: LogPath, first: int) -> dict[int, int]:
    """What commits from one on take, by their numbers."""
    before = commit_path(path, first - 1).name
    with files.explain_errors(path):
        hot = files.file_sizes(path / "hot", before)
        found = {int(file.stem): size for file, size in hot.items() if file.stem.isdigit()}
        for piece, size in files.file_sizes(path / "big", before.partition(".")[0] + "~").items():
            if (number := piece.parent.name).isdigit() and int(number) in found:
                found[int(number)] += size
    return found


class LogMaintenance:
    """The process, seen from the one who captures. Rounds are bounded; `stop` waits for the one under way."""

    def __init__(self, path: LogPath, keeping: MaintenancePolicy) -> None:
        self._work = (path, keeping, log.getEffectiveLevel())
        self._keeping = keeping
        self._stopping = threading.Event()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread = threading.Thread(target=self._watch, name="tailrace-keeper", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        with self._lock:
            self._stopping.set()
            if self._process is not None and self._process.stdin is not None:
                with suppress(OSError):  # it died before it read what it is to do
                    self._process.stdin.close()
        if self._thread.is_alive():
            self._thread.join(STOP_SECONDS_MAX)
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._thread.join()

    def _watch(self) -> None:
        """Have a process as long as one is wanted. The kernel ends it with this thread, if nothing else does."""
        wait = self._keeping.check_seconds
        while not self._stopping.wait(wait):
            wait = self._keeping.retry_seconds
            try:
                code = self._attend()
            except OSError as error:  # too many processes or files, or too little memory
                said = {"reason": str(error), "wait": wait}
                log.warning("keeper could not be started, will be tried again", extra=said)
                continue
            if not self._stopping.is_set():
                log.warning("keeper ended, will be started again", extra={"exit_code": code, "wait": wait})

    def _attend(self) -> int:
        """Start a process and log what it says until it ends; its exit code."""
        with self._lock:
            if self._stopping.is_set():
                return 0
            command = [sys.executable, "-c", _MAIN]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            self._process = process
        assert process.stdin is not None, "a pipe"
        assert process.stdout is not None, "a pipe"
        with process:
            with suppress(OSError, ValueError):  # it has ended already, or is to end
                pickle.dump(self._work, process.stdin)
                process.stdin.flush()
            for line in process.stdout:
                with suppress(ValueError, KeyError, TypeError):  # not ours: something printed
                    said = json.loads(line)
                    logging.getLogger(said["logger"]).log(said["level"], said["message"], extra=said["extra"])
        return process.returncode


class _LogRelay(logging.Handler):
    """Hands what is logged to the process that started us."""

    def emit(self, record: logging.LogRecord) -> None:
        said = {
            "logger": record.name,
            "level": record.levelno,
            "message": record.getMessage(),
            "extra": {name: value for name, value in vars(record).items() if name not in _USUAL},
        }
        with suppress(OSError, ValueError):  # nobody listens any more
            os.write(sys.stdout.fileno(), json.dumps(said, default=str).encode() + b"\n")


def main() -> None:
    """The process."""
    die_with_parent()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # meant for the one who started us, who then ends us
    os.nice(NICE)
    try:
        path, keeping, level = pickle.load(sys.stdin.buffer)  # noqa: S301 - from the one who started us
    except EOFError:  # stopped before it began
        return
    logging.getLogger("tailrace").setLevel(level)
    logging.getLogger().addHandler(_LogRelay())
    maintain(path, keeping, lambda seconds: bool(select.select([sys.stdin], [], [], seconds)[0]))


def maintain(path: LogPath, keeping: MaintenancePolicy, stopped: Callable[[float], bool]) -> None:
    """Keep the log in order until `stopped`, which waits so many seconds for the answer."""
    tended: _MaintainedLog | None = None
    wait = 0.0
    while not stopped(wait):
        wait = keeping.check_seconds
        try:
            tended = tended or _MaintainedLog(path, keeping)
            tended.run_due()
        except LogBusy:
            continue  # someone seals by hand
        except TailraceError as error:
            tended = None  # sweep what was begun before beginning again
            level = logging.ERROR if isinstance(error, LogCorrupt) else logging.WARNING
            said = {"code": error.code, "reason": error.message}
            log.log(level, "the log could not be put in order, tried again", extra=said)
            wait = keeping.retry_seconds
        except Exception as error:  # the process's boundary: it is to go on
            tended = None
            last = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{Path(last.filename).name}:{last.lineno}"
            log.exception("keeper failed", extra={"reason": type(error).__name__, "at": place})
            wait = keeping.retry_seconds


class _MaintainedLog:
    """The log, swept once, and what is waiting in it."""

    def __init__(self, path: LogPath, keeping: MaintenancePolicy) -> None:
        self._log = ChangeLog.open(path)
        self._keeping = keeping
        self._unsealed = UnsealedCommits(self._log)
        self._trim_due = 0.0
        # A lock that another host's process left behind is only given up to one who waits.
        with Sealer(path, wait_seconds=WAIT_SECONDS_MAX):
            pass

    def run_due(self) -> None:
        """Do what is due."""
        due = self._unsealed.is_seal_due(self._keeping)
        if due or time.monotonic() >= self._trim_due:
            maintain_once(self._log, self._keeping, seal=due)
            self._trim_due = time.monotonic() + TRIM_EVERY_SECONDS


def maintain_once(change_log: ChangeLog, keeping: MaintenancePolicy, *, seal: bool) -> MaintenanceResult:
    """One round: seal if asked to, then join, clean up and trim."""
    with Sealer(change_log.path, wait_seconds=0.0, log=change_log) as sealer:
        full = _is_nearly_full(change_log.path, keeping.retention)
        try:
            sealed = sealer.seal() if seal or full else SealResult()
            if seal:
                sealed += sealer.merge_seals()
        except LogFull:
            # To seal needs room; what was replaced, or is kept for nobody, may have it.
            sealer.clean(0.0)
            trim(sealer, keeping.retention)
            raise
        # Room is worth more than the comfort of a reader who must look a file up again.
        sealed += sealer.clean(0.0 if full else keeping.grace_seconds)
        return MaintenanceResult(sealed=sealed, trimmed=trim(sealer, keeping.retention))


def _is_nearly_full(path: LogPath, policy: RetentionPolicy) -> bool:
    return policy.max_bytes is not None and disk_bytes(path) > policy.max_bytes * ROOM_RATIO
