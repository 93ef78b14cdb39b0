"""The capture side of a pipeline: no Spark, no Java, a process of its own.

The order of a first start is the log's meta.json, publication, slot, first commit; after any crash in between
the next start finds its place. A later start, and every opening of the stream, refuses to go on unless the
log's position is a point of the server's own past and the slot can still give everything after it. Once the log
was taken over by another process, nothing more is written or confirmed, and soon nothing more is read.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from tailrace.capture.port import SourceId, Stream
from tailrace.capture.postgres.preflight import PublishedTables
from tailrace.capture.postgres.source import PostgresCapture, identify
from tailrace.changelog.format.commit_file import CommitHeader
from tailrace.changelog.format.coverage import announce_tables, confirm_tables
from tailrace.changelog.format.gaps import Gap, read_gaps, record_gap
from tailrace.changelog.format.schemas import known_tables, record_known_table
from tailrace.changelog.write.writer import LogWriter
from tailrace.errors import LogBusy, LogFenced, LogUnusable, PositionLost, SourceUnreachable, TailraceError
from tailrace.model.batch import Window
from tailrace.model.position import ZERO, Lsn
from tailrace.model.schema import TableId
from tailrace.pipeline.capture.source_factory import open_maintenance, open_source
from tailrace.pipeline.config.settings import PipelineSettings
from tailrace.runtime.loop import CdcRuntime
from tailrace.runtime.position_store import LogSink
from tailrace.storage.files import LogPath
from tailrace.transforms.transformed_source import TransformedCapture

log = logging.getLogger(__name__)

FENCE_TRIES_MAX = 5
PUBLISH_SECONDS = 2.0
"""Between two looks for tables that are new at the source."""
NOTED_AT_ONCE_MAX = 100
"""Tables whose shapes are asked for with one connection."""
RELOADING_MODES = {"when_needed", "always", "initial_only"}
"""Modes of tables that lose nothing where the server has lost what we had not read."""
HURRIED_IDLE_SECONDS = 1.0
"""For one that only catches up: tables that are loaded meanwhile are told as of one point when the log has passed their
loads, and nobody waits ten seconds for that."""
CHECK_SECONDS = 0.1
"""Between two looks at the lease while nothing is appended; every append looks for itself."""


class LeasedLogWriter(LogWriter):
    """The log, written only while its lease is ours."""

    def check(self) -> None:
        """Raise LogFenced once somebody has taken the log over."""
        self._lease.check()

    def is_lost(self) -> bool:
        """Whether somebody has taken the log over."""
        return self._lease.lost()

    def append(self, window: Window) -> CommitHeader | None:
        self.check()
        try:
            return super().append(window)
        except LogFenced:
            self.check()  # says who has the log now, if it was taken over
            raise
        except LogUnusable as error:
            self.check()
            # Only another writer, at its first commit, sweeps away what was written aside. Where its lock does not
            # reach us, this is how we learn of it.
            if isinstance(error.__cause__, FileNotFoundError) and (self.path / "hot").is_dir():
                raise LogFenced(
                    "another writer has swept away the commit we were writing",
                    log=self.path,
                    hint="Stop one of the two writers of this log, then start again.",
                ) from error
            raise

    @classmethod
    def open(cls, path: LogPath, source: SourceId, *, take_over: bool) -> LeasedLogWriter:
        """Open the log; one taken by force first gets an empty commit.

        Its number ends whoever lost the log, before we look at what the slot has confirmed: what the other could
        still commit and confirm after our look would seem lost to us.
        """
        forced = False
        for _ in range(FENCE_TRIES_MAX):
            log = cls(path, source, take_over=take_over)
            forced = forced or log._lease.was_forced
            try:
                if forced and log.commit:
                    log.append(Window(start=log.position, end=log.position))
                return log
            except LogFenced:
                lost = log._lease.lost()
                log.close()
                if lost:  # somebody took it over after us, and is not to be robbed in turn
                    raise
            except BaseException:
                log.close()
                raise
        raise LogBusy(
            "another process keeps writing the log",
            log=path,
            hint="Stop that process; it does not see that the log was taken over.",
        )


class LogCapture:
    """A capture that is ready to run: the log is ours, publication and slot are there."""

    def __init__(self, settings: PipelineSettings, *, until_caught_up: bool, take_over: bool = False) -> None:
        self._identity = identify(settings.source.url)
        self.log = LeasedLogWriter.open(settings.log.path, self._identity, take_over=take_over)
        try:
            self.source: PostgresCapture = open_source(settings, self.log.log_id)
            self._ruled = self.source if isinstance(self.source, TransformedCapture) else None
            self.source.remember_schemas(self.log.latest_schemas())
            if self.source.discovers_tables:
                self.source.learn_tables([*known_tables(self.log.path), *self.log.latest_schemas()])
            self.source.on_publish = self._publish
            self._unseen: set[TableId] = set()
            position = self.log.position if self.log.commit else None
            with self._ours():
                begin = self._prepare(settings, position, take_over)
            self._check_rules()
            if begin is not None:
                self.log.append(Window(start=ZERO, end=begin))
            target = self.source.committed_until() if until_caught_up else None
        except BaseException:
            self.log.close()
            raise
        self._keeper = open_maintenance(settings)
        self.sink = LogSink(self.log)
        idle = HURRIED_IDLE_SECONDS if until_caught_up else None
        self.runtime = CdcRuntime(self, self.sink, target=target, idle_seconds_max=idle)
        self.started = time.monotonic()

    def _publish(self, told: PublishedTables) -> None:
        if told.done:
            confirm_tables(self.log.path, told.tables, told.position)
        else:
            announce_tables(self.log.path, told.tables, told.position, commit=self.log.commit, moved=told.moved)
            self._unseen.update(table for table, _ in told.tables)

    def _prepare(self, settings: PipelineSettings, position: Lsn | None, take_over: bool) -> Lsn | None:
        """The point that a new log begins at.

        Where the position is lost, and all tables may be loaded anew by themselves, the log goes on from a new slot,
        and says what it lacks.
        """
        try:
            return self.source.prepare(position, self._origin(), take_over=take_over)
        except PositionLost as error:
            self.log.check()  # to one that has lost the log its successor's slot looks so
            lost = Gap(commit=self.log.commit + 1, start=self.log.position, end=self.log.position)
            begun = any(gap.commit == lost.commit for gap in read_gaps(self.log.path))
            modes = {settings.load.mode_of(table.table) for table in self.source.tables()}
            if not modes <= RELOADING_MODES or not self.source.settings.slot_create:
                raise
            if "confirmed" in error.fields and not begun:
                raise  # a log that was put back: its numbers mean something else to whoever has read further
            record_gap(self.log.path, lost)
            end = self.source.prepare(None, take_over=take_over)
            if end is None or end <= self.log.position:
                raise
            self.log.check()
            lost = replace(lost, end=end)
            record_gap(self.log.path, lost)
            self._identity = identify(settings.source.url)
            self.log.timeline = self._identity.timeline  # what lies before a failover is left behind with it
            self.log.append(Window(start=lost.start, end=lost.end))
            log.warning(
                "changes are lost, tables are loaded anew",
                extra={"reason": error.message, "after": str(lost.start), "upto": str(lost.end)},
            )
            return None

    def _origin(self) -> SourceId:
        """The history that the log's position was read from."""
        return replace(self._identity, timeline=self.log.timeline)

    @contextmanager
    def _ours(self) -> Iterator[None]:
        """Ask for the lease before the source is asked, and again if the source refuses.

        To one that has lost the log a slot that its successor moves looks like a position that is lost. What it
        would then advise, to move the log away, must never be heard.
        """
        self.log.check()
        try:
            yield
        except TailraceError:
            self.log.check()
            raise

    def live(self, after: Lsn) -> Stream:
        """The stream after a position of the log, while that is ours."""
        with self._ours():
            stream = self.source.live(after, self._origin())
        # A failover that kept our history: from here on positions are of the new timeline.
        self.log.timeline = stream.timeline
        return stream

    def _check_rules(self) -> None:
        """Refuse rules that cannot be used on the tables as they are published, and name those that concern none."""
        if self._ruled is None:
            return
        self._ruled.check_rules()
        for idle in self._ruled.rules.unmatched_rules():
            if idle.no_table:
                log.warning("rule concerns no table", extra={"rule": idle.rule, "why": idle.reason})

    def run(self, stopping: Callable[[], bool]) -> None:
        """Capture until told to stop, then let go of slot and log."""

        checked_at = 0.0

        def stopping_or_taken_over() -> bool:
            nonlocal checked_at
            if time.monotonic() >= checked_at + CHECK_SECONDS:
                self.log.check()
                checked_at = time.monotonic()
            if broken:
                raise broken[0]
            return stopping()

        def guarded(work: Callable[[threading.Event], None]) -> None:
            try:
                work(ended)
            except Exception as error:  # the thread's boundary: nothing must end without a word
                broken.append(error)

        self._keeper.start()
        ended, broken = threading.Event(), list[Exception]()
        for work, name in ((self._publish_until, "tailrace-publish"), (self._note_until, "tailrace-note")):
            threading.Thread(target=guarded, args=(work,), name=name, daemon=True).start()
        try:
            self.runtime.run(self.sink, stopping_or_taken_over)
        finally:
            ended.set()
            self._keeper.stop()
            self.log.close()
            for idle in self._ruled.rules.unmatched_rules() if self._ruled is not None else ():
                # Loads go through the rules in other processes, which count nothing.
                why = idle.reason if idle.no_table else "no change was one for it; rows of loads are not counted"
                log.warning("rule never matched", extra={"rule": idle.rule, "why": why})

    def _publish_until(self, ended: threading.Event) -> None:
        """Publish tables that the settings name as soon as they are made, and take in no others."""
        said = ""
        while not ended.wait(PUBLISH_SECONDS):
            try:
                if not self.log.is_lost():
                    self.source.publish_new()
                said = ""
            except TailraceError as error:  # tried again; a source that cannot be reached, the stream tells of
                if error.code != said and not isinstance(error, SourceUnreachable):
                    log.warning("tables cannot be published", extra={"code": error.code, "reason": error.message})
                said = error.code

    def _note_until(self, ended: threading.Event) -> None:
        """Have the log say what tables look like that it has no rows of. In a thread of its own: it may have to wait
        for whoever has a table locked."""
        seconds, listed = 0.0, False
        while not ended.wait(seconds):
            seconds = PUBLISH_SECONDS
            with suppress(TailraceError):  # tried again; a source that cannot be reached, the stream tells of
                if not listed:
                    self._unseen.update(table.table for table in self.source.tables())
                    listed = True
                self._note_shapes(ended)

    def _note_shapes(self, ended: threading.Event) -> None:
        self._unseen.difference_update([shape.table for shape in self.log.latest_schemas()])
        while self._unseen and not ended.is_set() and not self.log.is_lost():
            some = list(self._unseen)[:NOTED_AT_ONCE_MAX]
            for shape in self.source.describe(some).values():
                record_known_table(self.log.path, shape)
            self._unseen.difference_update(some)
