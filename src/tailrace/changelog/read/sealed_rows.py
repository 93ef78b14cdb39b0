"""Rows out of sealed files, as they were in the commits they came from.

A file is checked as a whole before its first row is delivered. Rows come in bounded batches: a row group at most. Both
rows of a key that changed are in one batch, as they were in the commit: `Event.row_write` looks from one to the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tailrace.changelog.format.schemas import LogSchemaVersion
from tailrace.changelog.format.seal import CommitList, SealedFile, check_file, sealed_file_error
from tailrace.changelog.read.row_steps import batch_with_counts
from tailrace.model import change
from tailrace.model.batch import ChangeBatch
from tailrace.storage import files
from tailrace.storage.files import LogPath

ROWS_AT_ONCE = 131_072
"""Of many tables together, held at once while they are read side by side;"""
ROWS_AT_ONCE_MIN = 512
"""but no fewer of each."""


@dataclass(frozen=True)
class RowSpan:
    """The rows that are wanted: of commits from `first` to `last`, after a `_seq` and up to another."""

    first: int
    last: int
    after_seq: int
    to_seq: int


class SealedFileReader:
    """Opens sealed files of one log; notes in `checked` which it need not check again."""

    def __init__(
        self, log: LogPath, shape: Callable[[int, int], LogSchemaVersion], checked: set[tuple[str, int]]
    ) -> None:
        self._log = log
        self._shape = shape
        self._checked = checked

    def open(self, file: SealedFile) -> pq.ParquetFile:
        """The file, checked; FileNotFoundError if it is gone."""
        path = self._log / file.file
        if (file.file, file.crc) not in self._checked:
            check_file(path, file.size, file.crc)
            self._checked.add((file.file, file.crc))
        # Checked once as a whole, and page by page each time: it may be damaged since.
        with files.explain_store_errors(path):
            found = files.arrow_source(path)
        return pq.ParquetFile(found, memory_map=True, page_checksum_verification=True)

    def batches(
        self, file: SealedFile, span: RowSpan, rows_max: int | None = None
    ) -> Iterator[tuple[int, int, ChangeBatch]]:
        """The rows of a file that are wanted, a row group or so many at a time, with table and commit before."""
        outside = file.last < span.first or file.first > span.last
        if outside or file.last_seq <= span.after_seq or file.first_seq > span.to_seq:
            return
        version = self._shape(file.table, file.schema)
        with self.open(file) as parquet:
            before = file.first_seq - 1
            for place, group in enumerate(file.groups):
                begin, before = before, group.last_seq
                if group.last_seq <= span.after_seq or group.last < span.first:
                    continue
                if group.first > span.last or begin >= span.to_seq:
                    return
                if parquet.metadata.row_group(place).num_rows != group.rows:
                    raise sealed_file_error(self._log / file.file, "a row group is not as long as it was")
                for piece in self._pieces(parquet, place, rows_max or group.rows, self._log / file.file):
                    wanted = _cut(piece, span)
                    if wanted.num_rows:
                        yield (
                            group.first - 1,
                            file.table,
                            batch_with_counts(version.schema, wanted.drop_columns([change.COMMIT])),
                        )

    def _pieces(self, parquet: pq.ParquetFile, place: int, rows: int, path: LogPath) -> Iterator[pa.RecordBatch]:
        try:
            yield from _moves_whole(parquet.iter_batches(rows, row_groups=[place], use_threads=False))
        except (OSError, pa.ArrowException) as error:
            raise sealed_file_error(path, "a page of it cannot be read") from error

    def batches_by_commit(
        self, found: list[SealedFile], commits: CommitList, span: RowSpan
    ) -> Iterator[tuple[int, int, ChangeBatch]]:
        """The rows of many tables commit by commit, as they were before they were sealed."""
        rows_max = max(ROWS_AT_ONCE // len(found), ROWS_AT_ONCE_MIN)
        sources = [
            (file.table, _SealedRows(file.first_seq, (item[2] for item in self.batches(file, span, rows_max))))
            for file in sorted(found, key=lambda file: file.first_seq)
        ]
        for commit, next_seq in zip(commits.commit.tolist(), commits.next_seq.tolist(), strict=True):
            if commit > span.last:
                return
            for table, source in sources:
                for batch in source.until(next_seq):
                    yield commit - 1, table, batch


def _moves_whole(pieces: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The pieces; where one begins with a row that was moved, with the delete of its old key from the one before."""
    held: pa.RecordBatch | None = None
    for piece in pieces:
        following = piece
        if held is not None:
            if change.MOVED_FROM in piece.schema.names and piece.column(change.MOVED_FROM)[0].is_valid:
                last = held.num_rows - 1
                following, held = pa.concat_batches([held.slice(last), piece]), held.slice(0, last)
            if held.num_rows:
                yield held
        held = following
    if held is not None:
        yield held


class _SealedRows:
    """One file's batches, taken piece by piece; opened when its first row is due."""

    def __init__(self, first_seq: int, batches: Iterator[ChangeBatch]) -> None:
        self._next_seq = first_seq
        self._batches = batches
        self._held: ChangeBatch | None = None

    def until(self, next_seq: int) -> Iterator[ChangeBatch]:
        """What comes before a `_seq`."""
        while self._next_seq < next_seq:
            held = self._held or next(self._batches, None)
            if held is None:
                return
            seqs = held.data.column(change.SEQ).to_numpy()
            rows = int(np.searchsorted(seqs, next_seq))
            if rows:
                yield batch_with_counts(held.schema, held.data.slice(0, rows))
            self._held = None
            if rows < len(seqs):
                self._held = replace(held, data=held.data.slice(rows))  # counted when it is given out
                self._next_seq = int(seqs[rows])


def _cut(rows: pa.RecordBatch, span: RowSpan) -> pa.RecordBatch:
    seqs, commits = rows.column(change.SEQ).to_numpy(), rows.column(change.COMMIT).to_numpy()
    begin = max(int(np.searchsorted(seqs, span.after_seq, side="right")), int(np.searchsorted(commits, span.first)))
    end = min(
        int(np.searchsorted(seqs, span.to_seq, side="right")), int(np.searchsorted(commits, span.last, side="right"))
    )
    return rows.slice(begin, max(0, end - begin))
