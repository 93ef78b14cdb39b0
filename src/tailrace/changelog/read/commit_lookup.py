"""Look up which commit rows are in, and when it was written.

A row does not have its commit's number. `_seq` is dense over the log, and a commit says which `_seq` follows it. So one
search finds the commits of many rows, in the commits' own files or in sealed lists. The last block that was looked up
is kept, because rows arrive in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

from tailrace.changelog.format.commit_file import CommitHeader
from tailrace.changelog.format.seal import Seal, SealedFile, commits_table
from tailrace.changelog.read.reader import ChangeLog
from tailrace.errors import LogError, LogTrimmed
from tailrace.model import change
from tailrace.model.position import ZERO, Lsn
from tailrace.storage import files

Int64Array = npt.NDArray[np.int64]
_T = TypeVar("_T")

_TRIES_MAX = 5
"""Tries for one commit that is sealed, merged or trimmed at every look."""


@dataclass(frozen=True)
class CommitSize:
    """The size of a commit's rows of some tables."""

    commit: int
    rows: int
    bytes: float
    """The size in the log; for sealed rows, their share of the file."""


@dataclass(frozen=True)
class CommitBlock:
    """Commits that were looked up at once, oldest first.

    Of a run without rows only the last may be there.
    """

    first: int
    first_seq: int
    commit: Int64Array
    next_seq: Int64Array
    written_at: Int64Array
    committed_at: Int64Array
    """Commit time of a commit's newest transaction, µs since 1970; -1 if it has none."""

    @property
    def last(self) -> int:
        return int(self.commit[-1])

    def covers_rows(self, first_seq: int, last_seq: int) -> bool:
        return self.first_seq <= first_seq and last_seq < self.next_seq[-1]


@dataclass(frozen=True)
class LogStart:
    """The start of a log that has a certain commit as its oldest."""

    position: Lsn
    """Everything that ended after it is in the log; 0/0 if unknown."""
    written_at: int
    """Everything committed later, by the source's clock, is in the log; µs since 1970."""


class CommitLookup:
    """A lookup of the log's commits, from one on."""

    def __init__(self, log: ChangeLog, first: int) -> None:
        self._log = log
        self._block: CommitBlock | None = None
        self._next = first

    def locate(self, seqs: Int64Array) -> tuple[CommitBlock, Int64Array]:
        """Return a block and, per row, the index of its commit.

        The rows of one batch are together in the log.
        """
        first, last = int(seqs[0]), int(seqs[-1])
        block = self._block
        while block is None or not block.covers_rows(first, last):
            block = self._block = block_of(self._log, self._next if block is None else block.last + 1)
            self._next = block.last + 1
        return block, np.searchsorted(block.next_seq, seqs, side="right")

    def commits_of(self, seqs: Int64Array) -> Int64Array:
        """Return the commits of these rows."""
        block, indexes = self.locate(seqs)
        commits: Int64Array = block.commit[indexes]
        return commits


class CommitSizer:
    """Measures commits for one reader, which repeats nearly the same request."""

    def __init__(self, log: ChangeLog) -> None:
        self._log = log
        self._known: tuple[tuple[str, frozenset[int]], list[CommitSize]] = (("", frozenset()), [])

    def measure(self, tables: frozenset[int], first: int, last: int) -> Iterator[CommitSize]:
        """Yield the size of each commit's rows of these tables, in order.

        Commits without any of their rows are left out.
        """
        commit = max(first, self._log.trimmed().commit + 1)
        while commit <= last:
            end, sizes = _look_up(
                self._log,
                commit,
                lambda header: (header.commit, _measure_commit(header, tables)),
                lambda seal: (seal.last, self._measure_seal(seal, tables)),
            )
            yield from (size for size in sizes if commit <= size.commit <= last)
            commit = end + 1

    def _measure_seal(self, seal: Seal, tables: frozenset[int]) -> list[CommitSize]:
        key = seal.stem, tables
        if self._known[0] != key:
            self._known = key, _measure_seal(self._log, seal, tables)
        return self._known[1]


def commit_blocks(log: ChangeLog, first: int, last: int) -> Iterator[CommitBlock]:
    """Yield the blocks of commits from one to another."""
    commit = first
    while commit <= last:
        block = block_of(log, commit)
        yield block
        commit = block.last + 1


def block_of(log: ChangeLog, commit: int) -> CommitBlock:
    """Return the block with a commit: the list of its seal, or the commit alone."""
    return _look_up(log, commit, _of_header, lambda seal: _of_seal(log, seal))


def log_start_at(log: ChangeLog, commit: int) -> LogStart:
    """Return the start of a log whose oldest kept commit is this one."""
    return _look_up(log, commit, _start_of_header, lambda seal: _start_of_seal(log, seal))


def _start_of_header(header: CommitHeader) -> LogStart:
    return LogStart(_complete_after(header.start, header.end, header.rows), header.written_at)


def _start_of_seal(log: ChangeLog, seal: Seal) -> LogStart:
    first = log.seal_index.commit_list(seal)
    rows = int(first.next_seq[0]) - seal.first_seq
    return LogStart(_complete_after(seal.start, Lsn(int(first.end[0])), rows), seal.written_from)


def _complete_after(start: Lsn, end: Lsn, rows: int) -> Lsn:
    """Return the position after which the log has everything.

    A log is begun by a commit without rows, which leads from zero to the position where the source starts to send.
    """
    return end if start == ZERO and not rows else start


def _look_up(log: ChangeLog, commit: int, of_header: Callable[[CommitHeader], _T], of_seal: Callable[[Seal], _T]) -> _T:
    """Return a value from a commit's file, or from the seal that covers it.

    The commit may be sealed and merged meanwhile.
    """
    for _ in range(_TRIES_MAX):
        log.seal_index.refresh()
        seal = log.seal_index.covering(commit)
        try:
            return of_header(log.header(commit)) if seal is None else of_seal(seal)
        except FileNotFoundError:
            continue
        except LogError:
            log.seal_index.refresh()
            if seal is not None or log.seal_index.covering(commit) is None:
                raise
    raise LogTrimmed(
        "the log is being trimmed at this commit",
        commit=commit,
        log=log.path,
        hint="Start again. Give the reader a name (`consumer`): the log then waits for it.",
    )


def _of_seal(log: ChangeLog, seal: Seal) -> CommitBlock:
    table = commits_table(log.path, seal)
    times = table.column("committed_at").fill_null(-1)
    commit, next_seq, written_at = (table.column(name).to_numpy() for name in ("commit", "next_seq", "written_at"))
    return CommitBlock(seal.first, seal.first_seq, commit, next_seq, written_at, times.to_numpy())


def _of_header(header: CommitHeader) -> CommitBlock:
    committed_at = -1 if header.committed_at is None else header.committed_at
    values = header.commit, header.next_seq, header.written_at, committed_at
    return CommitBlock(header.commit, header.next_seq - header.rows, *(np.array([value], np.int64) for value in values))


def _measure_commit(header: CommitHeader, tables: frozenset[int]) -> list[CommitSize]:
    bodies = [body for body in header.bodies if body.table in tables]
    size = float(sum(body.size for body in bodies))
    return [CommitSize(header.commit, sum(body.rows for body in bodies), size)] if bodies else []


def _measure_seal(log: ChangeLog, seal: Seal, tables: frozenset[int]) -> list[CommitSize]:
    trimmed = log.trimmed()
    rows: dict[int, int] = {}
    size: dict[int, float] = {}
    for file in seal.files:
        if file.table not in tables or trimmed.is_trimmed(file.table, file.last_seq):
            continue
        commits, counts = np.unique(_commits_in(log, file), return_counts=True)
        for commit, count in zip(commits.tolist(), counts.tolist(), strict=True):
            rows[commit] = rows.get(commit, 0) + count
            size[commit] = size.get(commit, 0.0) + file.size * count / file.rows
    return [CommitSize(commit, rows[commit], size[commit]) for commit in sorted(rows)]


def _commits_in(log: ChangeLog, file: SealedFile) -> Int64Array:
    path = log.path / file.file
    with (
        files.explain_errors_but_missing(path),
        pq.ParquetFile(files.arrow_source(path), memory_map=True, page_checksum_verification=True) as parquet,
    ):
        commits: Int64Array = parquet.read([change.COMMIT], use_threads=False).column(0).to_numpy()
    return commits
