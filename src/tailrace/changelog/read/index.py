"""Index the slices of every table in the log, from headers and seals alone.

A slice is the rows of one table in one commit or, where commits are sealed, in one row group. The index grows with the
log. What was sealed is taken from the seals, so its size does not grow with the number of commits.
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
    """Rows of one table that are together in the log."""

    table: int
    first: int
    last: int
    """`first` and `last` are the commits of its rows.

    If they are one commit, that may hold more slices of the table.
    """
    schema: int
    rows: int
    last_seq: int
    committed_at: int
    """Newest commit time in a commit; that of the last transaction in a row group. µs since 1970."""
    has_special_rows: bool = False
    """True if it may have a TRUNCATE, or a value that its type cannot hold."""


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
    """The newest commit time of all transactions up to here."""


class LogIndex:
    """The slices of every table, in order. One thread grows it; any thread may read meanwhile."""

    def __init__(self, log: ChangeLog) -> None:
        self._log = log
        self._slices: dict[int, list[Slice]] = {}
        self._unsealed_commits: list[_UnsealedCommit] = []
        self._seals: tuple[Seal, ...] = ()
        self._trimmed = NOTHING_TRIMMED
        self._known_schemas: set[tuple[int, int]] = set()
        self._captured: dict[int, int] = {}
        self.last_commit = 0
        self.transactions = 0
        self.rows = 0
        self.bytes = 0

    def grow(self, to: int | None = None) -> None:
        """Load the commits up to a number, or all there are.

        Sealed ones are loaded in any case.
        """
        newest = self._log.newest() if to is None else to
        while True:
            self._log.seal_index.refresh()
            trimmed = self._log.trimmed()
            if self._log.seal_index.seals != self._seals or trimmed != self._trimmed:
                self._rebuild(self._log.seal_index.seals, trimmed)
            try:
                for header in self._log.headers(self.last_commit, newest):
                    self._add(header)
                return
            except LogError:
                # The commit was sealed and its own file removed since we looked; otherwise the error is real.
                self._log.seal_index.refresh()
                if max(self._log.seal_index.last_commit, self._log.trimmed().commit) <= self.last_commit:
                    raise

    def _rebuild(self, seals: tuple[Seal, ...], trimmed: TrimRecord) -> None:
        """Begin again from the seals: some of the commits are in them now, or trimmed."""
        sealed = max(seals[-1].last if seals else 0, trimmed.commit)
        unsealed = [item for item in self._unsealed_commits if item.commit > sealed]
        later = {
            table: [item for item in table_slices if item.first > sealed]
            for table, table_slices in self._slices.items()
        }
        slices: dict[int, list[Slice]] = {}
        if trimmed.tables:
            self._log.schemas.load()  # a table whose rows are all trimmed is still known by its name
        captured = {number: table.rows for number, table in trimmed.tables.items()}
        kept = [file for seal in seals for file in seal.files if not trimmed.is_trimmed(file.table, file.last_seq)]
        for file in kept:
            self._load_schema(file.table, file.schema)
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
        for table, table_slices in later.items():
            slices.setdefault(table, []).extend(table_slices)
            captured[table] = captured.get(table, 0) + sum(item.rows for item in table_slices)
        self.bytes = sum(file.size for file in kept) + sum(item.bytes for item in unsealed)
        # A seal that is trimmed as a whole may still exist for a moment; the record counts what it held.
        commits: list[Seal | _UnsealedCommit] = [*(seal for seal in seals if seal.last > trimmed.commit), *unsealed]
        self.transactions = trimmed.transactions + sum(item.transactions for item in commits)
        self.rows = trimmed.rows + sum(item.rows for item in commits)
        # Other threads read meanwhile: a commit must be found in its seal before it leaves the unsealed ones.
        self._trimmed = trimmed
        self._seals = seals
        self._unsealed_commits = unsealed
        self._slices, self._captured = slices, captured
        self.last_commit = unsealed[-1].commit if unsealed else sealed

    def _add(self, header: CommitHeader) -> None:
        for body in header.bodies:
            self._load_schema(
                body.table, body.schema
            )  # all of them first: if a store does not answer, this commit is added again
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
        # Readers find a commit here, so everything else about it must be there first.
        self._unsealed_commits.append(
            _UnsealedCommit(
                header.commit, header.start, header.end, header.next_seq, header.transactions, header.rows, size, newest
            )
        )
        self.last_commit = header.commit

    def _load_schema(self, table: int, schema: int) -> None:
        if (table, schema) not in self._known_schemas:
            self._log.schemas.get(table, schema)
            self._known_schemas.add((table, schema))

    @property
    def first_commit(self) -> int:
        """The oldest commit that is kept, as a whole or in part."""
        return self._trimmed.commit + 1

    @property
    def position(self) -> Lsn:
        return self.end_of(self.last_commit)

    def _unsealed_commit(self, commit: int) -> _UnsealedCommit | None:
        unsealed = self._unsealed_commits
        index = commit - unsealed[0].commit if unsealed else -1
        return unsealed[index] if 0 <= index < len(unsealed) else None

    def end_of(self, commit: int) -> Lsn:
        """Return the source position where a commit ends."""
        if unsealed := self._unsealed_commit(commit):
            return unsealed.end
        for seal in reversed(self._seals):
            if commit == seal.last:
                return seal.end
            if seal.first <= commit < seal.last:
                commits = self._log.seal_index.commit_list_near(seal)
                return Lsn(int(commits.end[commits.index_of(commit)]))
        return self._trimmed.position if commit else ZERO

    def start_of(self, commit: int) -> Lsn:
        """Return the source position where a commit begins."""
        unsealed = self._unsealed_commit(commit)
        return unsealed.start if unsealed else self.end_of(commit - 1)

    def next_seq(self, commit: int) -> int:
        """Return the `_seq` of the first row after a commit."""
        if unsealed := self._unsealed_commit(commit):
            return unsealed.next_seq
        for seal in reversed(self._seals):
            if commit == seal.last:
                return seal.next_seq
            if seal.first <= commit < seal.last:
                commits = self._log.seal_index.commit_list_near(seal)
                return int(commits.next_seq[commits.index_of(commit)])
        return self._trimmed.next_seq if commit else 1

    def committed_until(self, commit: int) -> int | None:
        """Return the newest commit time of all transactions up to a commit.

        It is by the source's clock, and None if no transaction is kept.
        """
        if unsealed := self._unsealed_commit(commit):
            return unsealed.newest
        times = [seal.committed_at for seal in self._seals if seal.last <= commit]
        for seal in reversed(self._seals):
            if seal.first <= commit < seal.last:
                commits = self._log.seal_index.commit_list_near(seal)
                times += map(int, commits.committed_at[: commits.index_of(commit) + 1])
        return _newest(*times)

    def commit_at(self, position: Lsn) -> int:
        """Return the last commit that ends at or before the position; 0 if none does."""
        unsealed = self._unsealed_commits  # once: another thread may replace it with a shorter one
        if unsealed and unsealed[0].end <= position:
            return unsealed[0].commit - 1 + bisect.bisect_right(unsealed, position, key=lambda item: item.end)
        for seal in reversed(self._seals):
            if seal.end <= position:
                return seal.last
            if seal.start < position:
                commits = self._log.seal_index.commit_list_near(seal)
                index = int(commits.end.searchsorted(position.value, side="right"))
                return int(commits.commit[index - 1]) if index else seal.first - 1
        return self._trimmed.commit if self._trimmed.position <= position else 0

    def furthest_commit(self, after: int, rows_max: int) -> int:
        """Return the furthest commit within so many rows.

        It is at least one step, if there is one. Trimmed commits count no rows: a reader that lacks their rows gets an
        error when it reads them.
        """
        end, rows = max(after, self._trimmed.commit), 0
        seals = [(seal.last, seal.rows) for seal in self._seals if seal.last > end]
        sealed = seals[-1][0] if seals else end
        unsealed = self._unsealed_commits  # once: another thread may replace it with a shorter one
        unsealed = unsealed[bisect.bisect_right(unsealed, sealed, key=lambda item: item.commit) :]
        for last, count in [*seals, *((item.commit, item.rows) for item in unsealed)]:
            rows += count
            if rows > rows_max and end > after:
                break
            end = last
        return end

    def pending(self, table: int, seq: int, to: int) -> list[Slice]:
        """Return a table's slices with rows after `seq`.

        Only slices that begin in a commit up to `to` count.
        """
        slices = self._slices.get(table, [])
        first = bisect.bisect_right(slices, seq, key=lambda item: item.last_seq)
        return slices[first : bisect.bisect_right(slices, to, key=lambda item: item.first)]

    def trimmed_after(self, table: int, seq: int) -> TrimmedTable | None:
        """Return what is trimmed of the table's rows after `seq`; None if nothing is."""
        return self._trimmed.trimmed_after(table, seq)

    def trimmed_after_position(self, tables: Iterable[int], seq: int, position: Lsn) -> TrimmedTable | None:
        """Return what is trimmed of some tables after `seq` and after the position, too.

        A load's position may be past rows that its `_seq` does not cover.
        """
        trimmed = (found for table in tables if (found := self.trimmed_after(table, seq)) is not None)
        return next((found for found in trimmed if found.commit > self.commit_at(position)), None)

    def rows_captured(self, table: int) -> int:
        """Return how many rows of the table the log has or had."""
        return self._captured.get(table, 0)


def _newest(*times: int | None) -> int | None:
    return max((time for time in times if time is not None and time >= 0), default=None)
