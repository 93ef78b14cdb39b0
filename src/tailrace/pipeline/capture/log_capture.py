"""Capture changes into the log: no Spark, no Java, a process of its own.

A first start makes the log's meta.json, publication, slot and first commit, in this order; after a crash in between the
next start continues there. A later start, and every opening of the stream, refuses to continue unless two things hold.
The log's position is in the server's own past, and the slot can still deliver everything after it. Once another process
has taken over the log, nothing more is written or confirmed, and soon nothing more is read.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from tailrace.capture.port import SourceId, Stream
from tailrace.capture.postgres.publications import PublishedTables
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
"""Seconds between two looks for new tables at the source."""
SCHEMAS_AT_ONCE_MAX = 100
"""Tables whose schemas are read with one connection."""
RELOADING_MODES = {"when_needed", "always", "initial_only"}
"""Load modes of tables that lose nothing when the server has discarded unread changes."""
CATCH_UP_IDLE_SECONDS = 1.0
"""Idle seconds before an empty commit, for a capture that only catches up.

Tables loaded meanwhile get a consistent point once the log has passed their loads; the usual ten seconds would be a
long wait.
"""
CHECK_SECONDS = 0.1
"""Seconds between two checks of the lease. Every append checks it too."""


class LeasedLogWriter(LogWriter):
    """A log writer that writes only while it holds the lease."""

    def check(self) -> None:
        """Raise LogFenced once another process has taken over the log."""
        self._lease.check()

    def is_lost(self) -> bool:
        """Return whether another process has taken over the log."""
        return self._lease.lost()

    def append(self, window: Window) -> CommitHeader | None:
        self.check()
        try:
            return super().append(window)
        except LogFenced:
            self.check()  # names the new owner, if the log was taken over
            raise
        except LogUnusable as error:
            self.check()
            # Only another writer, at its first commit, removes temporary files. Where its lock does not reach us, this
            # is how we notice it.
            if isinstance(error.__cause__, FileNotFoundError) and (self.path / "hot").is_dir():
                raise LogFenced(
                    "another writer has removed the commit that we were writing",
                    log=self.path,
                    hint="Stop one of the two writers of this log, then start again.",
                ) from error
            raise

    @classmethod
    def open(cls, path: LogPath, source: SourceId, *, take_over: bool) -> LeasedLogWriter:
        """Open the log; after a forced takeover, append an empty commit first.

        The number of that commit fences the former writer before we look at what the slot has confirmed. Otherwise the
        former writer could commit and confirm after our look, and those changes would seem lost to us.
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
                if lost:  # another process took over after us: do not take it back
                    raise
            except BaseException:
                log.close()
                raise
        raise LogBusy(
            "another process keeps writing the log",
            log=path,
            hint="Stop that process: it does not notice that the log was taken over.",
        )


class LogCapture:
    """A capture that is ready to run: it holds the log, publication and slot exist."""

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
            with self._holding_log():
                start = self._prepare(settings, position, take_over)
            self._check_rules()
            if start is not None:
                self.log.append(Window(start=ZERO, end=start))
            target = self.source.committed_until() if until_caught_up else None
        except BaseException:
            self.log.close()
            raise
        self._keeper = open_maintenance(settings)
        self.sink = LogSink(self.log)
        idle = CATCH_UP_IDLE_SECONDS if until_caught_up else None
        self.runtime = CdcRuntime(self, self.sink, target=target, idle_seconds_max=idle)
        self.started = time.monotonic()

    def _publish(self, published: PublishedTables) -> None:
        if published.done:
            confirm_tables(self.log.path, published.tables, published.position)
        else:
            announce_tables(
                self.log.path, published.tables, published.position, commit=self.log.commit, moved=published.moved
            )
            self._unseen.update(table for table, _ in published.tables)

    def _prepare(self, settings: PipelineSettings, position: Lsn | None, take_over: bool) -> Lsn | None:
        """Return the position that a new log begins at.

        If the position is lost and every table may be reloaded automatically, the log continues from a new slot and
        records the gap.
        """
        try:
            return self.source.prepare(position, self._origin(), take_over=take_over)
        except PositionLost as error:
            self.log.check()  # without the lease, a slot that the new owner moved looks the same
            lost = Gap(commit=self.log.commit + 1, start=self.log.position, end=self.log.position)
            begun = any(gap.commit == lost.commit for gap in read_gaps(self.log.path))
            modes = {settings.load.mode_of(table.table) for table in self.source.tables()}
            if not modes <= RELOADING_MODES or not self.source.settings.slot_create:
                raise
            if "confirmed" in error.fields and not begun:
                raise  # an older copy of the log: readers that are ahead of it know other changes by its numbers
            record_gap(self.log.path, lost)
            end = self.source.prepare(None, take_over=take_over)
            if end is None or end <= self.log.position:
                raise
            self.log.check()
            lost = replace(lost, end=end)
            record_gap(self.log.path, lost)
            self._identity = identify(settings.source.url)
            self.log.timeline = self._identity.timeline  # a failover's older timeline ends here
            self.log.append(Window(start=lost.start, end=lost.end))
            log.warning(
                "changes are lost, tables are reloaded",
                extra={"reason": error.message, "after": str(lost.start), "upto": str(lost.end)},
            )
            return None

    def _origin(self) -> SourceId:
        """Return the history that the log's position was read from."""
        return replace(self._identity, timeline=self.log.timeline)

    @contextmanager
    def _holding_log(self) -> Iterator[None]:
        """Check the lease before the source is asked, and again if the source refuses.

        If another process has taken over and moves the slot, our position looks lost. The hint of that error, to move
        the log away, must then never be shown.
        """
        self.log.check()
        try:
            yield
        except TailraceError:
            self.log.check()
            raise

    def live(self, after: Lsn) -> Stream:
        """Open the stream after a position of the log, while we hold the log."""
        with self._holding_log():
            stream = self.source.live(after, self._origin())
        # After a failover that kept our history, positions are of the new timeline.
        self.log.timeline = stream.timeline
        return stream

    def _check_rules(self) -> None:
        """Refuse rules that the published tables do not allow.

        Warn of rules that match no table.
        """
        if self._ruled is None:
            return
        self._ruled.check_rules()
        for idle in self._ruled.rules.unmatched_rules():
            if idle.no_table:
                log.warning("rule matches no table", extra={"rule": idle.rule, "why": idle.reason})

    def run(self, stopping: Callable[[], bool]) -> None:
        """Capture until asked to stop, then release slot and log."""

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
            except Exception as error:  # the thread's boundary: no thread must end silently
                broken.append(error)

        self._keeper.start()
        ended, broken = threading.Event(), list[Exception]()
        for work, name in ((self._publish_until, "tailrace-publish"), (self._record_schemas_until, "tailrace-note")):
            threading.Thread(target=guarded, args=(work,), name=name, daemon=True).start()
        try:
            self.runtime.run(self.sink, stopping_or_taken_over)
        finally:
            ended.set()
            self._keeper.stop()
            self.log.close()
            for idle in self._ruled.rules.unmatched_rules() if self._ruled is not None else ():
                # Loads apply the rules in other processes, which do not count matches.
                why = idle.reason if idle.no_table else "no change matched it; rows of loads are not counted"
                log.warning("rule never matched", extra={"rule": idle.rule, "why": why})

    def _publish_until(self, ended: threading.Event) -> None:
        """Publish tables that match the settings as soon as they exist, and no others."""
        reported_code = ""
        while not ended.wait(PUBLISH_SECONDS):
            try:
                if not self.log.is_lost():
                    self.source.publish_new()
                reported_code = ""
            except TailraceError as error:  # retried; the stream reports a source that cannot be reached
                if error.code != reported_code and not isinstance(error, SourceUnreachable):
                    log.warning("tables cannot be published", extra={"code": error.code, "reason": error.message})
                reported_code = error.code

    def _record_schemas_until(self, ended: threading.Event) -> None:
        """Record the schemas of tables that the log has no rows of.

        This runs in a thread of its own, because a locked table can make it wait.
        """
        seconds, listed = 0.0, False
        while not ended.wait(seconds):
            seconds = PUBLISH_SECONDS
            with suppress(TailraceError):  # retried; the stream reports a source that cannot be reached
                if not listed:
                    self._unseen.update(table.table for table in self.source.tables())
                    listed = True
                self._record_schemas(ended)

    def _record_schemas(self, ended: threading.Event) -> None:
        self._unseen.difference_update([schema.table for schema in self.log.latest_schemas()])
        while self._unseen and not ended.is_set() and not self.log.is_lost():
            tables = list(self._unseen)[:SCHEMAS_AT_ONCE_MAX]
            for schema in self.source.describe(tables).values():
                record_known_table(self.log.path, schema)
            self._unseen.difference_update(tables)
