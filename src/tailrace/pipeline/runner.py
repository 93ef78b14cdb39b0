"""Run the commands `run`, `capture`, `apply` and `drop`: start processes, watch them, end them.

`run` keeps capture in a child process, so a pause or an out-of-memory kill of the Spark side never costs the source's
connection. All processes stay in one process group, and none outlives its parent.
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
"""Ticks to wait for a log that no process writes."""
POINT_TICKS_MAX = 10
"""Ticks that a run waits, once caught up, for a consistent point with all tables."""


@contextmanager
def stop_signal(stop_requested: threading.Event | None = None) -> Iterator[threading.Event]:
    """Yield an event that SIGTERM sets; Ctrl-C stays an exception.

    Outside the main thread SIGTERM never sets it.
    """
    stop_requested = stop_requested or threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop_requested
        return

    def ask(_number: int, _frame: FrameType | None) -> None:
        stop_requested.set()

    before = signal.signal(signal.SIGTERM, ask)
    try:
        yield stop_requested
    finally:
        signal.signal(signal.SIGTERM, before)


class _SigtermReceived(BaseException):
    """SIGTERM arrived before anything ran that checks for it."""


@contextmanager
def _stopped_at_once() -> Iterator[None]:
    """Let SIGTERM end this block like Ctrl-C.

    A new slot may wait for other sessions' transactions for hours.
    """

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
    """Capture into the log until stopped or, on request, until caught up.

    Caught up means that everything committed before the start is in the log. As a child of `run` it continues after
    that: the log must not stop while tables are being loaded.
    """
    if child:
        die_with_parent()
    begun = time.monotonic()
    with stop_signal() as stop_requested:
        try:
            with _stopped_at_once():
                capturing = LogCapture(settings, until_caught_up=until_caught_up, take_over=take_over)
        except _SigtermReceived:
            return Summary(
                name=settings.name,
                command="capture",
                seconds=time.monotonic() - begun,
                exit_code=ExitCode.INTERRUPTED if until_caught_up and not child else ExitCode.OK,
                message="stopped before it started",
            )
        # Objects of imported libraries live for ever; collecting them again and again delays a window by 100 ms.
        gc.collect()
        gc.freeze()
        observer.event("capture started", position=capturing.log.position, slot=capturing.source.settings.slot)

        def stopping() -> bool:
            return stop_requested.is_set() or (until_caught_up and not child and capturing.runtime.caught_up)

        # The status is for people, and a child has no output for them.
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
    """Report the status of a capture to the observer about twice a second."""
    if capturing is None:
        yield
        return
    done = threading.Event()
    source = capturing.source

    def watch() -> None:
        registry, lag = (
            TableRegistry(ChangeLog.open(settings.log.path), settings.tables.layout, logs_changes=False),
            SourceWatch(source),
        )
        for table in source.tables():
            registry.add(table.table, table)
        while not done.wait(TICK_SECONDS):
            registry.refresh_index()
            observer.tick(measure(settings, registry, source, lag.lag()))

    def guarded() -> None:
        with suppress(TailraceError):  # a failing status stops nothing
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
    """Run the whole pipeline until it is caught up or `stop` is set."""
    with stop_signal(stop) as stop_requested:
        identify(settings.source.url)  # report common mistakes before anything starts
        child = CaptureChild.of(settings, until_caught_up=until_caught_up, take_over=take_over)
        try:
            log = child.wait_for_log(stop_requested)
            if log is None:
                code = ExitCode.INTERRUPTED if until_caught_up else ExitCode.OK
                message = "stopped before it started"
                return Summary(name=settings.name, command="run", seconds=0.0, exit_code=code, message=message)
            return _apply(
                settings,
                log,
                "run",
                until_caught_up=until_caught_up,
                observer=observer,
                stop_requested=stop_requested,
                capture_alive=child.check,
                take_over=take_over,
            )
        finally:
            child.stop()


def apply(settings: PipelineSettings, *, until_caught_up: bool, observer: Observer, take_over: bool = False) -> Summary:
    """Load tables and apply what the log holds."""
    with stop_signal() as stop_requested:
        log = ChangeLog.open(settings.log.path)
        source = identify(settings.source.url)
        if (source.system, source.database) != (log.source.system, log.source.database):
            raise LogForeign(
                "the log belongs to another source", log=log.path, hint="Set `source.url` to the database of this log."
            )
        return _apply(
            settings,
            log,
            "apply",
            until_caught_up=until_caught_up,
            observer=observer,
            stop_requested=stop_requested,
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
    stop_requested: threading.Event,
    capture_alive: Callable[[], None] | None,
    take_over: bool,
) -> Summary:
    from tailrace.pipeline.apply.applier import Applier  # it imports pyspark, and capture must not

    started = time.monotonic()
    source = open_source_for_log(settings, log, loads=True)
    lease = LogLease(log.path, APPLIER_LEASE, take_over=take_over)
    try:
        horizon = source.committed_until() if until_caught_up and capture_alive else None
        applier = Applier(settings, log, source)
        try:
            applier.discover()
            if until_caught_up:
                applier.stop_resting()
            observer.event("starting Spark", tables=len(applier.registry.tables))
            applier.start()
            watch, goal = SourceWatch(source), None if horizon else applier.registry.refresh_index()
            caught_up, still_ticks, point_ticks = False, 0, 0
            while not stop_requested.is_set():
                lease.check()
                applier.check()
                if capture_alive:
                    capture_alive()
                applier.registry.refresh_index()
                if goal is None and horizon is not None and applier.registry.index.position >= horizon:
                    goal = applier.registry.index.last_commit
                status = measure(settings, applier.registry, source, watch.lag(), applier.merging_share)
                observer.tick(status)
                write_status_file(log.path, status)
                applier.retention_holds.publish()
                caught_up = goal is not None and applier.is_caught_up(goal)
                if until_caught_up and caught_up:
                    point_ticks += 1
                    if applier.ensure_complete_point() or capture_alive is None or point_ticks > POINT_TICKS_MAX:
                        break
                if until_caught_up and capture_alive is None and goal is not None:
                    still_ticks = still_ticks + 1 if _nobody_captures(log) and applier.waits_for_log(goal) else 0
                    if still_ticks > STILL_TICKS_MAX:
                        raise NotCaptured(
                            "the loaded rows are newer than the log, and no capture runs",
                            log=log.path,
                            hint="Start `tailrace capture FILE` too, or use `tailrace run FILE`. The loaded rows stay.",
                        )
                stop_requested.wait(TICK_SECONDS)
        finally:
            applier.stop()
            applier.retention_holds.publish(now=True)
            write_status_file(log.path, measure(settings, applier.registry, source, None))
        status = measure(settings, applier.registry, source, watch.lag())
        stopped = until_caught_up and not caught_up
        return _summary(settings, command, started, status, applier.registry.index, stopped=stopped)
    finally:
        lease.release()


def _nobody_captures(log: ChangeLog) -> bool:
    return log_lease.live_holder_pid(log.path) is None


def _summary(
    settings: PipelineSettings, command: str, started: float, status: PipelineStatus, index: LogIndex, *, stopped: bool
) -> Summary:
    blocked, count = sum(table.state.is_blocked for table in status.tables), len(status.tables)
    message = "every table is up to date"
    if blocked:
        message = f"{count - blocked} of {count} tables are up to date"
    if stopped:
        message = "stopped before it was caught up"
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
    lease = LogLease(log.path)
    try:
        return open_source(settings, log.log_id).drop()
    finally:
        lease.release()
