"""Record the ranges of changes that the log lacks, because the source had discarded them.

`gaps.json` has every gap, oldest first: the commit that passes it, and the source's positions on both sides. Tables
whose position is before a gap are reloaded, and readers get an error.

The record is written before the commit, and counts only if that commit exists. It is first written before the slot is
created, so that after a crash in between a slot that is ahead of the log is known to be ours. Until that slot exists
nothing is missing, and such a record does not count either.
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
    """Changes that ended after `start`, up to and including `end`, are missing.

    `commit` leads from one position to the other.
    """

    commit: int
    start: Lsn
    end: Lsn

    @property
    def is_unconfirmed(self) -> bool:
        """True if the slot was not created.

        The commit of this number may then be any other.
        """
        return self.start == self.end

    @property
    def error(self) -> LogGap:
        """The error for a reader that follows the log."""
        return LogGap(
            "the source had discarded changes before they were read",
            after=self.start,
            upto=self.end,
            hint=f"Read the tables as a whole, then continue after commit {self.commit}: "
            f"`follow(after={self.commit})`.",
        )


def read_gaps(log: LogPath) -> tuple[Gap, ...]:
    """Return all recorded gaps, unconfirmed ones too; a log without a record has none."""
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
    """Return all confirmed gaps.

    Raise LogCorrupt if the record has fewer of them than the newest commit has passed.
    """
    gaps, path, passed = read_gaps(log), commit_path(log, newest), 0
    # The commit may not exist, or be sealed already. A damaged one raises when it is read.
    with suppress(FileNotFoundError, LogCorrupt), files.explain_errors_but_missing(path):
        passed = read_header(path).gaps
    if passed > sum(gap.commit <= newest for gap in gaps):
        raise _unreadable(log, "is missing, or older than the log")
    return tuple(gap for gap in gaps if not gap.is_unconfirmed)


def _unreadable(log: LogPath, why: str) -> LogCorrupt:
    return LogCorrupt(
        f"the record of the log's gaps {why}",
        path=log / GAPS_FILE,
        hint=f"Restore it from a copy of the log. Without one: {NEW_LOG_HINT}",
    )


def record_gap(log: LogPath, gap: Gap) -> None:
    """Make a gap before the log's next commit durable."""
    with files.explain_errors(log / GAPS_FILE):
        stamp = files.read_stamp(log / GAPS_FILE)
    known = [*(earlier for earlier in read_gaps(log) if earlier.commit < gap.commit), gap]
    stored = [{"commit": item.commit, "start": str(item.start), "end": str(item.end)} for item in known]
    with files.explain_errors(log / GAPS_FILE), files.refuse_second_writer(log / GAPS_FILE):
        files.compare_and_swap(log / GAPS_FILE, records.encode({"format": FORMAT, "gaps": stored}), stamp)
