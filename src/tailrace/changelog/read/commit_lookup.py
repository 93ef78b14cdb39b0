"""Which commit rows are in, and when it was written: looked up by `_seq`, in commits' own files or in sealed lists.

A row does not bear its commit's number. `_seq` is dense over the log and a commit says which `_seq` follows it, so one
search finds the commits of many rows. What was looked up last is kept: rows come in order.
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
"""Of one commit that is sealed, joined or trimmed whenever we look."""


@dataclass(frozen=True)
class CommitSize:
    """What a commit brings of some tables."""

    commit: int
    rows: int
    bytes: float
    """As it lies in the log; of sealed rows, their share of the file."""


@dataclass(frozen=True)
class CommitBlock:
    """Commits that were looked up at once, oldest first; of a run without rows only the last may be there."""

    first: int
    first_seq: int
    commit: Int64Array
    next_seq: Int64Array
    written_at: Int64Array
    committed_at: Int64Array
    """Of a commit's newest transaction, µs since 1970; -1 if it has none."""

    @property
    def last(self) -> int:
        return int(self.commit[-1])

    def covers_rows(self, first_seq: int, last_seq: int) -> bool:
        return self.first_seq <= first_seq and last_seq < self.next_seq[-1]


@dataclass(frozen=True)
class LogStart:
    """Where and when a log begins that has this commit as its oldest."""

    position: Lsn
    """All that ended after it is there; 0/0 if that is not known."""
    written_at: int
    """What was committed later, by the source's clock, is there; µs since 1970."""


class CommitLookup:
    """The commits of a log, from one on."""

    def __init__(self, log: ChangeLog, first: int) -> None:
        self._log = log
        self._block: CommitBlock | None = None
        self._next = first

    def locate(self, seqs: Int64Array) -> tuple[CommitBlock, Int64Array]:
        """Where the commits of these rows stand in a block; rows of one batch lie together."""
        first, last = int(seqs[0]), int(seqs[-1])
        block = self._block
        while block is None or not block.covers_rows(first, last):
            block = self._block = block_of(self._log, self._next if block is None else block.last + 1)
            self._next = block.last + 1
        return block, np.searchsorted(block.next_seq, seqs, side="right")

    def commits_of(self, seqs: Int64Array) -> Int64Array:
        """The commits of these rows."""
        block, places = self.locate(seqs)
        found: Int64Array = block.commit[places]
        return found


class CommitSizer:
    """Weighs commits of a log for one reader, who asks for much the same again and again."""

    def __init__(self, log: ChangeLog) -> None:
        self._log = log
        self._known: tuple[tuple[str, frozenset[int]], list[CommitSize]] = (("", frozenset()), [])

    def measure(self, tables: frozenset[int], first: int, last: int) -> Iterator[CommitSize]:
        """What each commit brings of these tables, in order; commits without any of their rows are left out."""
        commit = max(first, self._log.trimmed().commit + 1)
        while commit <= last:
            end, found = _looked_up(
                self._log,
                commit,
                lambda header: (header.commit, _weigh_hot(header, tables)),
                lambda seal: (seal.last, self._weigh_seal(seal, tables)),
            )
            yield from (weight for weight in found if commit <= weight.commit <= last)
            commit = end + 1

    def _weigh_seal(self, seal: Seal, tables: frozenset[int]) -> list[CommitSize]:
        which = seal.stem, tables
        if self._known[0] != which:
            self._known = which, _weigh_seal(self._log, seal, tables)
        return self._known[1]


def commit_blocks(log: ChangeLog, first: int, last: int) -> Iterator[CommitBlock]:
    """The blocks of commits from one to another."""
    commit = first
    while commit <= last:
        block = block_of(log, commit)
        yield block
        commit = block.last + 1


def block_of(log: ChangeLog, commit: int) -> CommitBlock:
    """The block that has a commit: the list of the seal that covers it, or the commit alone."""
    return _looked_up(log, commit, _of_header, lambda seal: _of_seal(log, seal))


def log_start_at(log: ChangeLog, commit: int) -> LogStart:
    """What is known of the place before a commit, the oldest that is kept."""
    return _looked_up(log, commit, _begin_of_header, lambda seal: _begin_of_seal(log, seal))


def _begin_of_header(header: CommitHeader) -> LogStart:
    return LogStart(_told_after(header.start, header.end, header.rows), header.written_at)


def _begin_of_seal(log: ChangeLog, seal: Seal) -> LogStart:
    first = log.seal_index.commit_list(seal)
    rows = int(first.next_seq[0]) - seal.first_seq
    return LogStart(_told_after(seal.start, Lsn(int(first.end[0])), rows), seal.written_from)


def _told_after(start: Lsn, end: Lsn, rows: int) -> Lsn:
    """A log is begun by a commit without rows, from nowhere to where the source begins to tell."""
    return end if start == ZERO and not rows else start


def _looked_up(
    log: ChangeLog, commit: int, of_header: Callable[[CommitHeader], _T], of_seal: Callable[[Seal], _T]
) -> _T:
    """What a commit's file says, or what the seal that covers it says. It may be sealed and joined meanwhile."""
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
        "the log is being trimmed where it is read",
        commit=commit,
        log=log.path,
        hint="Start again. A reader with a name (`consumer`) is waited for.",
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


def _weigh_hot(header: CommitHeader, tables: frozenset[int]) -> list[CommitSize]:
    bodies = [body for body in header.bodies if body.table in tables]
    size = float(sum(body.size for body in bodies))
    return [CommitSize(header.commit, sum(body.rows for body in bodies), size)] if bodies else []


def _weigh_seal(log: ChangeLog, seal: Seal, tables: frozenset[int]) -> list[CommitSize]:
    gone = log.trimmed()
    rows: dict[int, int] = {}
    size: dict[int, float] = {}
    for file in seal.files:
        if file.table not in tables or gone.is_trimmed(file.table, file.last_seq):
            continue
        commits, counts = np.unique(_commits_in(log, file), return_counts=True)
        for commit, some in zip(commits.tolist(), counts.tolist(), strict=True):
            rows[commit] = rows.get(commit, 0) + some
            size[commit] = size.get(commit, 0.0) + file.size * some / file.rows
    return [CommitSize(commit, rows[commit], size[commit]) for commit in sorted(rows)]


def _commits_in(log: ChangeLog, file: SealedFile) -> Int64Array:
    path = log.path / file.file
    with (
        files.explain_errors_but_missing(path),
        pq.ParquetFile(files.arrow_source(path), memory_map=True, page_checksum_verification=True) as parquet,
    ):
        found: Int64Array = parquet.read([change.COMMIT], use_threads=False).column(0).to_numpy()
    return found
