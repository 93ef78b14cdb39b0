"""What each table has in the log, as slices: built from headers and seals alone, grown as the log grows.

A slice is the rows of one table in one commit or, where commits are sealed, in one row group. What was sealed is
taken from the seals, so what is kept here does not grow with the number of commits.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from tailrace.changelog.format.commit_file import CommitHeader
from tailrace.changelog.format.seal import Seal
from tailrace.changelog.format.trimmed import NOTHING_TRIMMED, TrimmedTable, TrimRecord
from tailrace.changelog.read.reader import ChangeLog
from tailrace.errors import LogError
from tailrace.model.position import ZERO, Lsn


@dataclass(frozen=True, slots=True)
class Slice:
    """Rows of one table that lie together."""

    table: int
    first: int
    last: int
    """The commits they come from; where they are one commit's, it may hold more slices of the table."""
    schema: int
    rows: int
    last_seq: int
    committed_at: int
    """Of the newest transaction in a commit, of the last one in a row group; µs since 1970."""
    has_special_rows: bool = False
    """Whether a TRUNCATE, or a value that its type cannot hold, may be among them."""


class _UnsealedCommit(NamedTuple):
    """A commit that is not sealed."""

    commit: int
    start: Lsn
    end: Lsn
    next_seq: int
    transactions: int
    rows: int
    bytes: int
    newest: int | None
    """When the newest of all transactions up to here was committed."""


class LogIndex:
    """The slices of every table, in order. One thread grows it; any may read, also meanwhile."""

    def __init__(self, log: ChangeLog) -> None:
        self._log = log
        self._slices: dict[int, list[Slice]] = {}
        self._hot: list[_UnsealedCommit] = []
        self._seals: tuple[Seal, ...] = ()
        self._gone = NOTHING_TRIMMED
        self._shapes: set[tuple[int, int]] = set()
        self._captured: dict[int, int] = {}
        self.last_commit = 0
        self.transactions = 0
        self.rows = 0
        self.bytes = 0

    def grow(self, to: int | None = None) -> None:
        """Take in the commits up to a number, or all there are; those that are sealed, in any case."""
        newest = self._log.newest() if to is None else to
        while True:
            self._log.seal_index.refresh()
            gone = self._log.trimmed()
            if self._log.seal_index.seals != self._seals or gone != self._gone:
                self._rebuild(self._log.seal_index.seals, gone)
            try:
                for header in self._log.headers(self.last_commit, newest):
                    self._add(header)
                return
            except LogError:
                # Sealed, and its own file gone, since we looked; or else the error is what it says.
                self._log.seal_index.refresh()
                if max(self._log.seal_index.last_commit, self._log.trimmed().commit) <= self.last_commit:
                    raise

    def _rebuild(self, seals: tuple[Seal, ...], gone: TrimRecord) -> None:
        """Begin again from the seals: some of the commits are in them now, or gone."""
        sealed = max(seals[-1].last if seals else 0, gone.commit)
        hot = [item for item in self._hot if item.commit > sealed]
        later = {table: [item for item in found if item.first > sealed] for table, found in self._slices.items()}
        slices: dict[int, list[Slice]] = {}
        if gone.tables:
            self._log.schemas.load()  # a table all of whose rows are gone is still known by its name
        captured = {number: table.rows for number, table in gone.tables.items()}
        kept = [file for seal in seals for file in seal.files if not gone.is_trimmed(file.table, file.last_seq)]
        for file in kept:
            self._know(file.table, file.schema)
            captured[file.table] = captured.get(file.table, 0) + file.rows
            slices.setdefault(file.table, []).extend(
                Slice(
                    file.table,
                    group.first,
                    group.last,
                    file.schema,
                    group.rows,
                    group.last_seq,
                    group.committed_at,
                    bool(file.truncates or file.unfit),
                )
                for group in file.groups
            )
        for table, found in later.items():
            slices.setdefault(table, []).extend(found)
            captured[table] = captured.get(table, 0) + sum(item.rows for item in found)
        self.bytes = sum(file.size for file in kept) + sum(item.bytes for item in hot)
        # A seal that is gone as a whole may still be there for a moment; the record counts what it held.
        commits: list[Seal | _UnsealedCommit] = [*(seal for seal in seals if seal.last > gone.commit), *hot]
        self.transactions = gone.transactions + sum(item.transactions for item in commits)
        self.rows = gone.rows + sum(item.rows for item in commits)
        # Others read meanwhile: a commit is found in its new place before it goes from the old one.
        self._gone = gone
        self._seals = seals
        self._hot = hot
        self._slices, self._captured = slices, captured
        self.last_commit = hot[-1].commit if hot else sealed

    def _add(self, header: CommitHeader) -> None:
        for body in header.bodies:
            self._know(body.table, body.schema)  # all of them first: a store may not answer, and then it is asked again
        for body in header.bodies:
            self._captured[body.table] = self._captured.get(body.table, 0) + body.rows
            self._slices.setdefault(body.table, []).append(
                Slice(
                    body.table,
                    header.commit,
                    header.commit,
                    body.schema,
                    body.rows,
                    body.last_seq,
                    header.committed_at or 0,
                    bool(body.truncates or body.unfit),
                )
            )
        size = header.bodies_at + sum(body.size for body in header.bodies)
        self.transactions += header.transactions
        self.rows += header.rows
        self.bytes += size
        newest = _newest(self.committed_until(self.last_commit), header.committed_at)
        # Readers find a commit here, so what else is known of it must be there first.
        self._hot.append(
            _UnsealedCommit(
                header.commit, header.start, header.end, header.next_seq, header.transactions, header.rows, size, newest
            )
        )
        self.last_commit = header.commit

    def _know(self, table: int, schema: int) -> None:
        if (table, schema) not in self._shapes:
            self._log.schemas.get(table, schema)
            self._shapes.add((table, schema))

    @property
    def first_commit(self) -> int:
        """The oldest commit that is kept, wholly or in part."""
        return self._gone.commit + 1

    @property
    def position(self) -> Lsn:
        return self.end_of(self.last_commit)

    def _unsealed(self, commit: int) -> _UnsealedCommit | None:
        hot = self._hot
        place = commit - hot[0].commit if hot else -1
        return hot[place] if 0 <= place < len(hot) else None

    def end_of(self, commit: int) -> Lsn:
        """Where a commit ends in the source's log."""
        if found := self._unsealed(commit):
            return found.end
        for seal in reversed(self._seals):
            if commit == seal.last:
                return seal.end
            if seal.first <= commit < seal.last:
                commits = self._log.seal_index.commit_list_near(seal)
                return Lsn(int(commits.end[commits.index_of(commit)]))
        return self._gone.position if commit else ZERO

    def start_of(self, commit: int) -> Lsn:
        """Where a commit begins in the source's log."""
        found = self._unsealed(commit)
        return found.start if found else self.end_of(commit - 1)

    def next_seq(self, commit: int) -> int:
        """The `_seq` of the first row after a commit."""
        if found := self._unsealed(commit):
            return found.next_seq
        for seal in reversed(self._seals):
            if commit == seal.last:
                return seal.next_seq
            if seal.first <= commit < seal.last:
                commits = self._log.seal_index.commit_list_near(seal)
                return int(commits.next_seq[commits.index_of(commit)])
        return self._gone.next_seq if commit else 1

    def committed_until(self, commit: int) -> int | None:
        """When the newest of all transactions up to a commit was committed, by the source's clock, as far as they are
        kept; None if none is."""
        if found := self._unsealed(commit):
            return found.newest
        known = [seal.committed_at for seal in self._seals if seal.last <= commit]
        for seal in reversed(self._seals):
            if seal.first <= commit < seal.last:
                commits = self._log.seal_index.commit_list_near(seal)
                known += map(int, commits.committed_at[: commits.index_of(commit) + 1])
        return _newest(*known)

    def commit_at(self, position: Lsn) -> int:
        """The last commit that ends at or before the position; 0 if none does."""
        hot = self._hot  # once: another thread may put a shorter one in its place
        if hot and hot[0].end <= position:
            return hot[0].commit - 1 + bisect.bisect_right(hot, position, key=lambda item: item.end)
        for seal in reversed(self._seals):
            if seal.end <= position:
                return seal.last
            if seal.start < position:
                commits = self._log.seal_index.commit_list_near(seal)
                place = int(commits.end.searchsorted(position.value, side="right"))
                return int(commits.commit[place - 1]) if place else seal.first - 1
        return self._gone.commit if self._gone.position <= position else 0

    def furthest_commit(self, after: int, rows_max: int) -> int:
        """The furthest commit that brings at most so many rows; a step at least, if there is one.

        What is trimmed brings none: whoever lacks rows of it learns so when reading them.
        """
        end, rows = max(after, self._gone.commit), 0
        seals = [(seal.last, seal.rows) for seal in self._seals if seal.last > end]
        sealed = seals[-1][0] if seals else end
        hot = self._hot  # once: another thread may put a shorter one in its place
        hot = hot[bisect.bisect_right(hot, sealed, key=lambda item: item.commit) :]
        for last, count in [*seals, *((item.commit, item.rows) for item in hot)]:
            rows += count
            if rows > rows_max and end > after:
                break
            end = last
        return end

    def pending(self, table: int, seq: int, to: int) -> list[Slice]:
        """A table's slices that hold rows after `seq`, those that begin in a commit up to `to`."""
        slices = self._slices.get(table, [])
        first = bisect.bisect_right(slices, seq, key=lambda item: item.last_seq)
        return slices[first : bisect.bisect_right(slices, to, key=lambda item: item.first)]

    def trimmed_after(self, table: int, seq: int) -> TrimmedTable | None:
        """What the log no longer holds of the table's rows after `seq`; None if it holds them all."""
        return self._gone.trimmed_after(table, seq)

    def trimmed_after_position(self, tables: Iterable[int], seq: int, position: Lsn) -> TrimmedTable | None:
        """The same of some tables' rows that ended after the position, too: a load's point may lie past rows that its
        `_seq` does not cover."""
        found = (gone for table in tables if (gone := self.trimmed_after(table, seq)) is not None)
        return next((gone for gone in found if gone.commit > self.commit_at(position)), None)

    def rows_captured(self, table: int) -> int:
        """Rows of the table that the log has or had."""
        return self._captured.get(table, 0)


def _newest(*times: int | None) -> int | None:
    return max((time for time in times if time is not None and time >= 0), default=None)
