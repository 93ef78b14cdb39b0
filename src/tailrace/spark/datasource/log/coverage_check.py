"""Since when the log has the tables that a reader asks for, and what the reader is told who begins before that.

What was written to a table before it came into the publication is not in the log. Of a table that was in it, was out
for a while and came in again, the reader would lack something in the middle: that is an error, after everything before
it was delivered. So it is for a table that was asked for by its name and was made anew. Of one that a pattern takes
when it is made, and of any that the log had nothing of before, the reader lacks the beginning: that is a warning, which
says from where on the table is complete.

A place inside of a commit (`seq`) was named by a position, and was compared with these when it was; one without is
the end of its commit, and so lies before whatever came in after that.
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

ANEW_HINT = "Read the table as a whole, then begin with a new checkpoint and `startingPosition` {commit}."


class CoverageCheck:
    """What came into the publication after the log had begun, of the tables that one reader asks for."""

    def __init__(self, options: LogOptions, log: ChangeLog, index: LogIndex) -> None:
        self._options = options
        self._log = log
        self._index = index
        self._seen = -1
        self._found: list[CaptureStart] = []
        self._warned: set[CaptureStart] = set()

    def refresh(self, to: int, tables: frozenset[int]) -> None:
        """Take in what has to do with commits up to this one. It is on record before the publication has it, so what
        comes later has to do with later commits."""
        if to <= self._seen:
            return
        relations = {self._log.schemas.latest_of(number).schema.relation for number in tables}
        self._found = [
            coming
            for coming in self._log.coverage().starts
            if coming.commit and coming.kind is not CaptureStartKind.MOVED
            if self._options.matches(coming.table) or coming.relation in relations
        ]
        self._seen = to

    def refuse_start(self, point: OffsetOption, place: LogOffset) -> None:
        """Refuse a start from before a table was there, or whole, whoever asked for that very start."""
        if point in (EARLIEST, LATEST):
            return
        position = point if isinstance(point, Lsn) else self._index.end_of(place.commit)
        for coming in self._found:
            if position >= coming.complete_from:
                continue
            commit = self._commit_of(coming)
            if self._is_break(coming, commit):
                if place.commit >= commit - 1:  # else everything before it is delivered first
                    raise _missing(coming, commit)
            elif self._options.names_explicitly(coming.table):
                raise _too_early(coming, point)

    def first_gap(self, after: LogOffset, to: int) -> tuple[int, LogGap] | None:
        """The first commit that changes are missing before, of all after a place and up to a commit, and the error."""
        found = [(commit, coming) for commit, coming in self._between(after, to) if self._is_break(coming, commit)]
        if not found:
            return None
        commit, coming = min(found, key=lambda item: item[0])
        return commit, _missing(coming, commit)

    def warn_of_late_starts(self, after: LogOffset, to: int) -> None:
        """Warn of tables whose beginning is missing, of each once."""
        for commit, coming in self._between(after, to):
            if coming not in self._warned and not self._is_break(coming, commit):
                self._warned.add(coming)
                log.warning(
                    "the log has table %s from %s on: what was written to it before is to be had by reading the table "
                    "as a whole",
                    coming.table,
                    coming.complete_from,
                    extra={"table": str(coming.table), "complete_from": str(coming.complete_from)},
                )

    def _between(self, after: LogOffset, to: int) -> Iterator[tuple[int, CaptureStart]]:
        for coming in self._found:
            commit = self._commit_of(coming)
            if commit <= to and after < LogOffset(commit - 1, 1):
                yield commit, coming

    def _commit_of(self, coming: CaptureStart) -> int:
        """The first commit that may have something from after the table came in."""
        if coming.announced_at < self._log.trimmed().position:
            return coming.commit + 1
        return self._index.commit_at(coming.announced_at) + 1

    def _is_break(self, coming: CaptureStart, commit: int) -> bool:
        """Whether something is missing in the middle; a reader who had nothing yet only lacks the beginning."""
        known = coming.kind is CaptureStartKind.AGAIN or (
            coming.kind is CaptureStartKind.ANOTHER and self._options.names_explicitly(coming.table)
        )
        return known and self._index.next_seq(commit - 1) > 1


def _missing(coming: CaptureStart, commit: int) -> LogGap:
    why = "was not captured for a while" if coming.kind is CaptureStartKind.AGAIN else "was made anew"
    return LogGap(
        f"the table {why}, and what was written to it before it was captured again is not in the log",
        table=coming.table,
        commit=commit,
        complete_from=coming.complete_from,
        hint=ANEW_HINT.format(commit=coming.complete_from),
    )


def _too_early(coming: CaptureStart, point: OffsetOption) -> ConfigError:
    return ConfigError(
        "the log has the table only from later on",
        table=coming.table,
        asked=point.isoformat() if isinstance(point, datetime) else point,
        complete_from=coming.complete_from,
        hint=f"`startingPosition` `earliest` gives all that it has; {coming.complete_from}, or later, is possible too. "
        'What was there before is had by reading the table as a whole: `spark.read.format("cdc")` with `url`.',
    )
