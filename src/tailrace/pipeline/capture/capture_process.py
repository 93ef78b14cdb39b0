"""Capture as a child process: it ends with us, however we end, and is started again if it is killed.

Killed means by a signal, as an out-of-memory killer does it. A child that ends by itself says why, and that
is an error of the whole pipeline. Starting again is safe at any moment: the log knows where to go on.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress

from tailrace.changelog.read.reader import FIRST_COMMIT, ChangeLog
from tailrace.changelog.write import log_lease
from tailrace.errors import LogUnusable, SourceError, TailraceError
from tailrace.pipeline.config.settings import PipelineSettings
from tailrace.pipeline.report import error_from_json
from tailrace.storage.files import LogPath

log = logging.getLogger(__name__)

START_SECONDS_MAX = 90.0
"""Waiting for lease and slot, 30 s each, and for the server."""
STOP_SECONDS_MAX = 15.0


class CaptureChild:
    """A process that captures into a log, as our child."""

    def __init__(self, log: LogPath, command: Sequence[str], *, once: Sequence[str] = (), told: bytes = b"") -> None:
        """`once`: flags for the first start alone. `told`: what it reads from its input, which others cannot see."""
        self._path = log
        self._command = [sys.executable, "-m", *command]
        self._told = told
        self.restarts = RestartLimit()
        self._process = self._start(*once)

    @classmethod
    def of(cls, settings: PipelineSettings, *, until_caught_up: bool, take_over: bool = False) -> CaptureChild:
        """The one of a pipeline."""
        command = ["tailrace", "capture", str(settings.file), "--child", *["--until-caught-up"] * until_caught_up]
        # Only the first one: started again, it must not take back what somebody has taken from us since.
        return cls(settings.log.path, command, once=["--take-over"] * take_over)

    def _start(self, *flags: str) -> subprocess.Popen[bytes]:
        # Ctrl-C reaches the whole group; the child is stopped by us, once tables are at rest.
        main = threading.current_thread() is threading.main_thread()
        before = signal.signal(signal.SIGINT, signal.SIG_IGN) if main else None
        try:
            process = subprocess.Popen(
                [*self._command, *flags],
                stdin=subprocess.PIPE if self._told else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                # Files that Spark has added are on the path of this process only.
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} if self._told else None,
            )
            if process.stdin is not None:
                with suppress(BrokenPipeError), process.stdin as told:
                    told.write(self._told)
            return process
        finally:
            if main:
                signal.signal(signal.SIGINT, before)

    def wait_for_log(self, asked: threading.Event, *, begun: Callable[[], bool] = lambda: True) -> ChangeLog | None:
        """The log, once capture has it and what was `begun` is so; None if asked to stop."""
        deadline = time.monotonic() + START_SECONDS_MAX
        while time.monotonic() < deadline:
            if asked.is_set():
                return None
            self.check()
            try:
                found = ChangeLog.open(self._path)
                if (
                    found.newest() >= FIRST_COMMIT
                    and log_lease.live_holder_pid(self._path) == self._process.pid
                    and begun()
                ):
                    return found
            except LogUnusable:
                pass
            time.sleep(0.1)
        raise SourceError(
            "capture did not start in time",
            seconds=START_SECONDS_MAX,
            hint="A new slot waits for transactions that are open at the source (see pg_stat_activity); end them, or "
            "run `tailrace capture FILE` to see more.",
        ).with_option_hint(
            "A new slot waits for transactions that are open at the source (see pg_stat_activity): end "
            "them, or look at what the driver's standard error says."
        )

    def check(self) -> None:
        """Start the child again if it was killed; raise what ended it if it ended by itself."""
        code = self._process.poll()
        if code is None:
            return
        assert self._process.stdout is not None, "a pipe"
        with self._process.stdout as said:
            error = _error(said.read(), code)
        if code >= 0 or not self.restarts.try_one_more():
            raise error
        log.warning("capture was killed, started again", extra={"signal": -code, "times": self.restarts.count})
        self._process = self._start()

    def stop(self) -> None:
        """Ask it to end, and make sure that it does."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_SECONDS_MAX)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


def _error(said: bytes, code: int) -> TailraceError:
    try:
        return error_from_json(json.loads(said.splitlines()[-1])["error"])
    except (ValueError, KeyError, IndexError):
        return SourceError(
            "the capture process ended",
            exit_code=code,
            hint="Run `tailrace capture FILE --log-level debug` to see why.",
        ).with_option_hint("Look at what the driver's standard error says.")


RESTARTS_MAX = 5
RESTARTS_SECONDS = 3600.0
"""In which there may be so many."""


class RestartLimit:
    """Those of one process, or one query."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: deque[float] = deque(maxlen=RESTARTS_MAX)
        self.count = 0

    def try_one_more(self) -> bool:
        """Count a restart, unless there were too many of late: whether it may be."""
        now = self._clock()
        if len(self._last) == RESTARTS_MAX and now < self._last[0] + RESTARTS_SECONDS:
            return False
        self._last.append(now)
        self.count += 1
        return True
