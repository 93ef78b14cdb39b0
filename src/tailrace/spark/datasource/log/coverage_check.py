"""Check from which position the log has each table complete.

A reader that starts earlier gets an error or a warning. What was written to a table before it joined the publication is
not in the log.

- A table that was in the publication, left it and joined again lacks changes in the middle. That is an error, raised
  after everything before it was delivered. The same holds for a table requested by its name that was created again.
- A table that a pattern matches when it is created lacks only its beginning, as does any that the log had nothing of
  before. That is a warning, which says from where on the table is complete.

An offset inside a commit (`seq`) was derived from a position, and was compared with the coverage then. An offset
without `seq` is the end of its commit, so it lies before everything that joined after it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from datetime import datetime

from tailrace.changelog.format.coverage import CaptureStart, CaptureStartKind
from tailrace.changelog.read.index import LogIndex
from tailrace.changelog.read.offsets import EARLIEST, LATEST, LogOffset, OffsetOption
from tailrace.changelog.read.reader import ChangeLog
from tailrace.errors import ConfigError, LogGap
from tailrace.model.position import Lsn
from tailrace.spark.datasource.log.log_options import LogOptions

log = logging.getLogger(__name__)

NEW_CHECKPOINT_HINT = "Read the table as a whole, then begin with a new checkpoint and `startingPosition` {commit}."


class CoverageCheck:
    """Capture starts after the log began, for the tables that one reader requests."""

    def __init__(self, options: LogOptions, log: ChangeLog, index: LogIndex) -> None:
        self._options = options
        self._log = log
        self._index = index
        self._checked_to = -1
        self._starts: list[CaptureStart] = []
        self._warned: set[CaptureStart] = set()

    def refresh(self, to: int, tables: frozenset[int]) -> None:
        """Load the capture starts that concern commits up to this one.

        A start is recorded before the publication has the table, so later records concern later commits.
        """
        if to <= self._checked_to:
            return
        relations = {self._log.schemas.latest_of(number).schema.relation for number in tables}
        self._starts = [
            start
            for start in self._log.coverage().starts
            if start.commit and start.kind is not CaptureStartKind.MOVED
            if self._options.matches(start.table) or start.relation in relations
        ]
        self._checked_to = to

    def refuse_start(self, option: OffsetOption, offset: LogOffset) -> None:
        """Refuse an explicit start from before a table was captured, or complete."""
        if option in (EARLIEST, LATEST):
            return
        position = option if isinstance(option, Lsn) else self._index.end_of(offset.commit)
        for start in self._starts:
            if position >= start.complete_from:
                continue
            commit = self._commit_of(start)
            if self._is_break(start, commit):
                if offset.commit >= commit - 1:  # otherwise everything before the gap is delivered first
                    raise _missing(start, commit)
            elif self._options.names_explicitly(start.table):
                raise _too_early(start, option)

    def first_gap(self, after: LogOffset, to: int) -> tuple[int, LogGap] | None:
        """Return the first commit before which changes are missing, with the error.

        Only commits after an offset, and up to a commit, count.
        """
        gaps = [(commit, start) for commit, start in self._between(after, to) if self._is_break(start, commit)]
        if not gaps:
            return None
        commit, start = min(gaps, key=lambda item: item[0])
        return commit, _missing(start, commit)

    def warn_of_late_starts(self, after: LogOffset, to: int) -> None:
        """Warn once about each table whose beginning is missing."""
        for commit, start in self._between(after, to):
            if start not in self._warned and not self._is_break(start, commit):
                self._warned.add(start)
                log.warning(
                    "the log has table %s from %s on: read the table as a whole for what was written to it before",
                    start.table,
                    start.complete_from,
                    extra={"table": str(start.table), "complete_from": str(start.complete_from)},
                )

    def _between(self, after: LogOffset, to: int) -> Iterator[tuple[int, CaptureStart]]:
        for start in self._starts:
            commit = self._commit_of(start)
            if commit <= to and after < LogOffset(commit - 1, 1):
                yield commit, start

    def _commit_of(self, start: CaptureStart) -> int:
        """Return the first commit that may have changes from after the capture start."""
        if start.announced_at < self._log.trimmed().position:
            return start.commit + 1
        return self._index.commit_at(start.announced_at) + 1

    def _is_break(self, start: CaptureStart, commit: int) -> bool:
        """Return whether changes are missing in the middle.

        A reader that had nothing yet lacks only the beginning.
        """
        is_known = start.kind is CaptureStartKind.AGAIN or (
            start.kind is CaptureStartKind.ANOTHER and self._options.names_explicitly(start.table)
        )
        return is_known and self._index.next_seq(commit - 1) > 1


def _missing(start: CaptureStart, commit: int) -> LogGap:
    why = "was not captured for a while" if start.kind is CaptureStartKind.AGAIN else "was created again"
    return LogGap(
        f"the table {why}, and the log lacks what was written before capture resumed",
        table=start.table,
        commit=commit,
        complete_from=start.complete_from,
        hint=NEW_CHECKPOINT_HINT.format(commit=start.complete_from),
    )


def _too_early(start: CaptureStart, option: OffsetOption) -> ConfigError:
    return ConfigError(
        "the start is before the log has the table",
        table=start.table,
        asked=option.isoformat() if isinstance(option, datetime) else option,
        complete_from=start.complete_from,
        hint=f"Set `startingPosition` to `earliest` for all that the log has, or to {start.complete_from} or later. "
        'For what was there before, read the table as a whole: `spark.read.format("cdc")` with `url`.',
    )
