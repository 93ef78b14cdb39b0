"""Where the log lacks changes, because the source had discarded them before they were read.

    gaps.json   every such place, oldest first: the commit that passes it, and the source's positions on both sides

Tables that stand before such a place are loaded anew, and readers are told. The record is written before the commit:
one of a commit that is not there counts for nothing. It is first written before the slot is made, so that after a crash
in between a slot that is ahead of the log is known to be ours; until that slot is there nothing is missing, and what is
written so counts for nothing either.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from tailrace.changelog.format.commit_file import commit_path, read_header
from tailrace.errors import NEW_LOG_HINT, LogCorrupt, LogGap
from tailrace.model.position import Lsn
from tailrace.storage import files, records
from tailrace.storage.files import LogPath

FORMAT = 1
GAPS_FILE = "gaps.json"


@dataclass(frozen=True, kw_only=True)
class Gap:
    """Changes that ended after `start`, and not after `end`, are missing; `commit` leads from one to the other."""

    commit: int
    start: Lsn
    end: Lsn

    @property
    def is_unconfirmed(self) -> bool:
        """Whether that is all: the slot was not made, and the commit of this number may be like any other."""
        return self.start == self.end

    @property
    def error(self) -> LogGap:
        """What whoever follows the log is told."""
        return LogGap(
            "the source had discarded changes before they were read",
            after=self.start,
            upto=self.end,
            hint=f"Read the tables as a whole, then go on after commit {self.commit}: `follow(after={self.commit})`.",
        )


def read_gaps(log: LogPath) -> tuple[Gap, ...]:
    """All that are on record, also those that were only begun; a log without a record has none."""
    path = log / GAPS_FILE
    try:
        with files.explain_errors_but_missing(path):
            text = path.read_bytes()
        return tuple(
            Gap(commit=gap["commit"], start=Lsn.parse(gap["start"]), end=Lsn.parse(gap["end"]))
            for gap in records.decode(text, FORMAT)["gaps"]
        )
    except FileNotFoundError:
        return ()
    except (ValueError, KeyError, TypeError) as error:
        raise _unreadable(log, f"cannot be read: {error}") from error


def confirmed_gaps(log: LogPath, newest: int) -> tuple[Gap, ...]:
    """All that are gaps, if the record tells of as many as the newest commit has passed."""
    found, path, passed = read_gaps(log), commit_path(log, newest), 0
    # There may be none yet, or a newer one in its place; one that is damaged is told when it is read.
    with suppress(FileNotFoundError, LogCorrupt), files.explain_errors_but_missing(path):
        passed = read_header(path).gaps
    if passed > sum(gap.commit <= newest for gap in found):
        raise _unreadable(log, "is missing, or older than the log")
    return tuple(gap for gap in found if not gap.is_unconfirmed)


def _unreadable(log: LogPath, why: str) -> LogCorrupt:
    return LogCorrupt(
        f"the record of what the log lacks {why}",
        path=log / GAPS_FILE,
        hint=f"Restore it from a copy of the log. Without one: {NEW_LOG_HINT}",
    )


def record_gap(log: LogPath, gap: Gap) -> None:
    """Make it durable that the log's next commit leaves something out."""
    with files.explain_errors(log / GAPS_FILE):
        stamp = files.read_stamp(log / GAPS_FILE)
    known = [*(before for before in read_gaps(log) if before.commit < gap.commit), gap]
    stored = [{"commit": item.commit, "start": str(item.start), "end": str(item.end)} for item in known]
    with files.explain_errors(log / GAPS_FILE), files.refuse_second_writer(log / GAPS_FILE):
        files.compare_and_swap(log / GAPS_FILE, records.encode({"format": FORMAT, "gaps": stored}), stamp)
