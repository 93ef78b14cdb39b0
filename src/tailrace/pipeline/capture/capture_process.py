"""Run capture as a child process, and restart it if it is killed.

The child ends with its parent, however that ends. Killed means ended by a signal, as an out-of-memory killer does it. A
child that exits reports why, and that is an error of the whole pipeline. A restart is safe at any moment: the log knows
the position to continue from.
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
"""Limit for waiting for lease and slot, 30 s each, and for the server."""
STOP_SECONDS_MAX = 15.0


class CaptureChild:
    """A child process that captures into a log."""

    def __init__(self, log: LogPath, command: Sequence[str], *, once: Sequence[str] = (), stdin: bytes = b"") -> None:
        """Start the child.

        `once` holds flags for the first start alone. `stdin` is what the child reads from its input, which other users
        cannot see.
        """
        self._path = log
        self._command = [sys.executable, "-m", *command]
        self._stdin = stdin
        self.restarts = RestartLimit()
        self._process = self._start(*once)

    @classmethod
    def of(cls, settings: PipelineSettings, *, until_caught_up: bool, take_over: bool = False) -> CaptureChild:
        """Start the child of a pipeline."""
        command = ["tailrace", "capture", str(settings.file), "--child", *["--until-caught-up"] * until_caught_up]
        # Only at the first start: a restart must not take back a log that another process has taken since.
        return cls(settings.log.path, command, once=["--take-over"] * take_over)

    def _start(self, *flags: str) -> subprocess.Popen[bytes]:
        # Ctrl-C reaches the whole group, but we stop the child ourselves, after the apply side has stopped.
        main = threading.current_thread() is threading.main_thread()
        before = signal.signal(signal.SIGINT, signal.SIG_IGN) if main else None
        try:
            process = subprocess.Popen(
                [*self._command, *flags],
                stdin=subprocess.PIPE if self._stdin else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                # Files that Spark has added are on the path of this process only.
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} if self._stdin else None,
            )
            if process.stdin is not None:
                with suppress(BrokenPipeError), process.stdin as stdin:
                    stdin.write(self._stdin)
            return process
        finally:
            if main:
                signal.signal(signal.SIGINT, before)

    def wait_for_log(
        self, stop_requested: threading.Event, *, begun: Callable[[], bool] = lambda: True
    ) -> ChangeLog | None:
        """Return the log once the child holds it and `begun` is true.

        Return None if asked to stop.
        """
        deadline = time.monotonic() + START_SECONDS_MAX
        while time.monotonic() < deadline:
            if stop_requested.is_set():
                return None
            self.check()
            try:
                log = ChangeLog.open(self._path)
                if (
                    log.newest() >= FIRST_COMMIT
                    and log_lease.live_holder_pid(self._path) == self._process.pid
                    and begun()
                ):
                    return log
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
        """Restart the child if it was killed; raise its error if it exited."""
        code = self._process.poll()
        if code is None:
            return
        assert self._process.stdout is not None, "a pipe"
        with self._process.stdout as output:
            error = _error(output.read(), code)
        if code >= 0 or not self.restarts.try_one_more():
            raise error
        log.warning("capture was killed, started again", extra={"signal": -code, "times": self.restarts.count})
        self._process = self._start()

    def stop(self) -> None:
        """Ask the child to end, and kill it if it does not."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(STOP_SECONDS_MAX)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


def _error(output: bytes, code: int) -> TailraceError:
    try:
        return error_from_json(json.loads(output.splitlines()[-1])["error"])
    except (ValueError, KeyError, IndexError):
        return SourceError(
            "the capture process ended",
            exit_code=code,
            hint="Run `tailrace capture FILE --log-level debug` to see why.",
        ).with_option_hint("Look at what the driver's standard error says.")


RESTARTS_MAX = 5
RESTARTS_SECONDS = 3600.0
"""Window within which `RESTARTS_MAX` counts."""


class RestartLimit:
    """A limit for restarts of one process, or of one query.

    It allows so many restarts within an hour, for as long as the pipeline runs. A child that dies at once each time is
    reported soon; one that is killed once a month is restarted for years.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: deque[float] = deque(maxlen=RESTARTS_MAX)
        self.count = 0

    def try_one_more(self) -> bool:
        """Count a restart and return True; return False if there were too many recently."""
        now = self._clock()
        if len(self._last) == RESTARTS_MAX and now < self._last[0] + RESTARTS_SECONDS:
            return False
        self._last.append(now)
        self.count += 1
        return True
