"""The commands' work: run, capture, apply, drop. Starts what is needed, watches it, ends it.

`run` keeps capture in a child process, so that a pause or an out-of-memory kill of the Spark side never costs
the source's connection. All processes stay in one process group and none outlives its parent.
"""

from __future__ import annotations

import gc
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from tailrace.capture.postgres.source import identify
from tailrace.changelog.read.index import LogIndex
from tailrace.changelog.read.reader import ChangeLog
from tailrace.changelog.write import log_lease
from tailrace.changelog.write.log_lease import LogLease
from tailrace.errors import ExitCode, LogForeign, NotCaptured, TailraceError
from tailrace.pipeline.capture.capture_process import CaptureChild
from tailrace.pipeline.capture.log_capture import LogCapture
from tailrace.pipeline.capture.source_factory import open_source, open_source_for_log
from tailrace.pipeline.config.settings import PipelineSettings
from tailrace.pipeline.report import Observer, PipelineStatus, Summary
from tailrace.pipeline.status import APPLIER_LEASE, SourceWatch, measure, write_status_file
from tailrace.pipeline.tables.registry import TableRegistry
from tailrace.processes import die_with_parent

TICK_SECONDS = 0.5
STILL_TICKS_MAX = 10
"""For which a log that nobody writes to is waited for."""
POINT_TICKS_MAX = 10
"""For which a run that has caught up waits until all tables can be told as of one point."""


@contextmanager
def stop_signal(asked: threading.Event | None = None) -> Iterator[threading.Event]:
    """An event that SIGTERM sets; Ctrl-C stays an exception. Elsewhere than in the main thread, never set."""
    asked = asked or threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return

    def ask(_number: int, _frame: FrameType | None) -> None:
        asked.set()

    before = signal.signal(signal.SIGTERM, ask)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGTERM, before)


class _SigtermReceived(BaseException):
    """SIGTERM came while nothing ran yet that looks for it."""


@contextmanager
def _stopped_at_once() -> Iterator[None]:
    """SIGTERM ends what is done here, like Ctrl-C: a new slot may wait for others' transactions for hours."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        raise _SigtermReceived

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def capture(
    settings: PipelineSettings,
    *,
    until_caught_up: bool,
    observer: Observer,
    child: bool = False,
    take_over: bool = False,
) -> Summary:
    """Capture into the log until stopped or, if asked, until everything committed before the start is in.

    As a child of `run` it goes on after catching up: the log must not stop while tables are being loaded.
    """
    if child:
        die_with_parent()
    begun = time.monotonic()
    with stop_signal() as asked:
        try:
            with _stopped_at_once():
                capturing = LogCapture(settings, until_caught_up=until_caught_up, take_over=take_over)
        except _SigtermReceived:
            return Summary(
                name=settings.name,
                command="capture",
                seconds=time.monotonic() - begun,
                exit_code=ExitCode.INTERRUPTED if until_caught_up and not child else ExitCode.OK,
                message="stopped before it began",
            )
        # What the libraries made stays for ever; looking through it again and again holds up a window for 100 ms.
        gc.collect()
        gc.freeze()
        observer.event("capture started", position=capturing.log.position, slot=capturing.source.settings.slot)

        def stopping() -> bool:
            return asked.is_set() or (until_caught_up and not child and capturing.runtime.caught_up)

        # The status is for people; a child has none to show it to.
        with _watched(settings, observer, None if child else capturing):
            capturing.run(stopping)
    done = capturing.runtime.progress
    stopped = until_caught_up and not child and not capturing.runtime.caught_up
    return Summary(
        name=settings.name,
        command="capture",
        seconds=time.monotonic() - capturing.started,
        transactions=done.transactions,
        rows_captured=done.rows,
        exit_code=ExitCode.INTERRUPTED if stopped else ExitCode.OK,
        message=f"the log reaches {capturing.log.position}",
    )


@contextmanager
def _watched(settings: PipelineSettings, observer: Observer, capturing: LogCapture | None) -> Iterator[None]:
    """Tell the observer about twice a second how a capture stands."""
    if capturing is None:
        yield
        return
    done = threading.Event()
    source = capturing.source

    def watch() -> None:
        lives, lag = (
            TableRegistry(ChangeLog.open(settings.log.path), settings.tables.layout, tells=False),
            SourceWatch(source),
        )
        for table in source.tables():
            lives.add(table.table, table)
        while not done.wait(TICK_SECONDS):
            lives.refresh_index()
            observer.tick(measure(settings, lives, source, lag.lag()))

    def guarded() -> None:
        with suppress(TailraceError):  # a status that cannot be had stops nothing
            watch()

    watcher = threading.Thread(target=guarded, name="tailrace-watch", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def run(
    settings: PipelineSettings,
    *,
    until_caught_up: bool,
    observer: Observer,
    stop: threading.Event | None = None,
    take_over: bool = False,
) -> Summary:
    """The whole pipeline, until it is caught up or `stop` is set."""
    with stop_signal(stop) as asked:
        identify(settings.source.url)  # the common mistakes, told before anything is started
        child = CaptureChild.of(settings, until_caught_up=until_caught_up, take_over=take_over)
        try:
            log = child.wait_for_log(asked)
            if log is None:
                code = ExitCode.INTERRUPTED if until_caught_up else ExitCode.OK
                said = "stopped before it began"
                return Summary(name=settings.name, command="run", seconds=0.0, exit_code=code, message=said)
            return _apply(
                settings,
                log,
                "run",
                until_caught_up=until_caught_up,
                observer=observer,
                asked=asked,
                capture_alive=child.check,
                take_over=take_over,
            )
        finally:
            child.stop()


def apply(settings: PipelineSettings, *, until_caught_up: bool, observer: Observer, take_over: bool = False) -> Summary:
    """Load tables and apply what the log holds."""
    with stop_signal() as asked:
        log = ChangeLog.open(settings.log.path)
        found = identify(settings.source.url)
        if (found.system, found.database) != (log.source.system, log.source.database):
            raise LogForeign(
                "the log belongs to another source",
                log=log.path,
                hint="Point `source.url` at the database this log was made from.",
            )
        return _apply(
            settings,
            log,
            "apply",
            until_caught_up=until_caught_up,
            observer=observer,
            asked=asked,
            capture_alive=None,
            take_over=take_over,
        )


def _apply(
    settings: PipelineSettings,
    log: ChangeLog,
    command: str,
    *,
    until_caught_up: bool,
    observer: Observer,
    asked: threading.Event,
    capture_alive: Callable[[], None] | None,
    take_over: bool,
) -> Summary:
    from tailrace.pipeline.apply.applier import Applier  # pyspark comes with it, and capture must not

    started = time.monotonic()
    source = open_source_for_log(settings, log, loads=True)
    held = LogLease(log.path, APPLIER_LEASE, take_over=take_over)
    try:
        horizon = source.committed_until() if until_caught_up and capture_alive else None
        applying = Applier(settings, log, source)
        try:
            applying.discover()
            if until_caught_up:
                applying.stop_resting()
            observer.event("starting Spark", tables=len(applying.registry.tables))
            applying.start()
            watch, goal = SourceWatch(source), None if horizon else applying.registry.refresh_index()
            caught_up, still, unpointed = False, 0, 0
            while not asked.is_set():
                held.check()
                applying.check()
                if capture_alive:
                    capture_alive()
                applying.registry.refresh_index()
                if goal is None and horizon is not None and applying.registry.index.position >= horizon:
                    goal = applying.registry.index.last_commit
                status = measure(settings, applying.registry, source, watch.lag(), applying.merging_share)
                observer.tick(status)
                write_status_file(log.path, status)
                applying.retention_holds.publish()
                caught_up = goal is not None and applying.is_caught_up(goal)
                if until_caught_up and caught_up:
                    unpointed += 1
                    if applying.ensure_complete_point() or capture_alive is None or unpointed > POINT_TICKS_MAX:
                        break
                if until_caught_up and capture_alive is None and goal is not None:
                    still = still + 1 if _nobody_captures(log) and applying.waits_for_log(goal) else 0
                    if still > STILL_TICKS_MAX:
                        raise NotCaptured(
                            "what was loaded is newer than the log, and nobody captures",
                            log=log.path,
                            hint="Start `tailrace capture FILE` beside it, or use `tailrace run FILE`. What was "
                            "loaded stays.",
                        )
                asked.wait(TICK_SECONDS)
        finally:
            applying.stop()
            applying.retention_holds.publish(now=True)
            write_status_file(log.path, measure(settings, applying.registry, source, None))
        status = measure(settings, applying.registry, source, watch.lag())
        stopped = until_caught_up and not caught_up
        return _summary(settings, command, started, status, applying.registry.index, stopped=stopped)
    finally:
        held.release()


def _nobody_captures(log: ChangeLog) -> bool:
    return log_lease.live_holder_pid(log.path) is None


def _summary(
    settings: PipelineSettings, command: str, started: float, status: PipelineStatus, index: LogIndex, *, stopped: bool
) -> Summary:
    broken, count = sum(table.state.is_blocked for table in status.tables), len(status.tables)
    message = "every table holds all that was asked for"
    if broken:
        message = f"{count - broken} of {count} tables hold all that was asked for"
    if stopped:
        message = "stopped before it had caught up"
    return Summary(
        name=settings.name,
        command=command,
        seconds=time.monotonic() - started,
        transactions=index.transactions,
        rows_captured=index.rows,
        tables=status.tables,
        exit_code=ExitCode.INTERRUPTED if stopped else ExitCode.OK,
        message=message,
    )


def drop(settings: PipelineSettings) -> list[str]:
    """Remove slot and publications; log and tables stay."""
    log = ChangeLog.open(settings.log.path)
    held = LogLease(log.path)
    try:
        return open_source(settings, log.log_id).drop()
    finally:
        held.release()
