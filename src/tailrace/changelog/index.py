"""What each table has in the log, commit by commit: built from headers alone, grown as the log grows."""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from tailrace.changelog.reader import ChangeLog
from tailrace.model.position import ZERO, Lsn


@dataclass(frozen=True, slots=True)
class Slice:
    """One table's rows in one commit."""

    table: int
    commit: int
    body: int
    """Its place among the commit's bodies."""
    schema: int
    rows: int
    last_seq: int
    committed_at: int
    """Of the commit's last transaction, µs since 1970."""


class LogIndex:
    """The slices of every table, in order. One thread grows it; any may read."""

    def __init__(self, log: ChangeLog) -> None:
        self._log = log
        self._slices: dict[int, list[Slice]] = {}
        self._ends: list[Lsn] = []
        self._next_seqs: list[int] = []
        self._captured: dict[int, int] = {}
        self._shapes: set[tuple[int, int]] = set()
        self.commit = 0
        self.transactions = 0
        self.rows = 0
        self.bytes = 0

    def grow(self, to: int | None = None) -> None:
        """Take in the commits up to a number, or all there are."""
        for header in self._log.headers(self.commit, to):
            for place, body in enumerate(header.bodies):
                if (body.table, body.schema) not in self._shapes:
                    self._log.schemas.get(body.table, body.schema)
                    self._shapes.add((body.table, body.schema))
                self._captured[body.table] = self._captured.get(body.table, 0) + body.rows
                self.bytes += body.size
                self._slices.setdefault(body.table, []).append(Slice(
                    body.table, header.commit, place, body.schema, body.rows, body.last_seq, header.committed_at or 0,
                ))  # fmt: skip
            # Readers find a commit by its end, so what else is known of it must be there first.
            self._next_seqs.append(header.next_seq)
            self._ends.append(header.end)
            self.transactions += header.transactions
            self.rows += header.rows
            self.bytes += header.bodies_at
            self.commit = header.commit

    @property
    def position(self) -> Lsn:
        return self._ends[-1] if self._ends else ZERO

    def end_of(self, commit: int) -> Lsn:
        """Where a commit ends in the source's log."""
        return self._ends[commit - 1]

    def start_of(self, commit: int) -> Lsn:
        """Where a commit begins in the source's log."""
        return self._ends[commit - 2] if commit > 1 else ZERO

    def next_seq(self, commit: int) -> int:
        return self._next_seqs[commit - 1] if commit else 1

    def commit_at(self, position: Lsn) -> int:
        """The last commit that ends at or before the position; 0 if none does."""
        return bisect.bisect_right(self._ends, position)

    def pending(self, table: int, seq: int, to: int) -> list[Slice]:
        """A table's slices that hold rows after `seq`, up to a commit."""
        slices = self._slices.get(table, [])
        first = bisect.bisect_right(slices, seq, key=lambda item: item.last_seq)
        return slices[first : bisect.bisect_right(slices, to, key=lambda item: item.commit)]

    def captured(self, table: int) -> int:
        """Rows of the table in the log."""
        return self._captured.get(table, 0)
