"""Read rows out of sealed files, as they were in their commits.

A file is checked as a whole before its first row is delivered. Rows are delivered in bounded batches, at most a row
group each. Both rows of a key move are in one batch, as they were in the commit: `Event.row_write` needs both.
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
"""Rows held while tables are read side by side, of all of them together."""
ROWS_AT_ONCE_MIN = 512
"""Rows of each table that are held at least."""


@dataclass(frozen=True)
class RowSpan:
    """The rows to read, by commits and by `_seq`.

    They are of commits from `first` to `last`, after one `_seq` and up to another.
    """

    first: int
    last: int
    after_seq: int
    to_seq: int


class SealedFileReader:
    """Reads sealed files of one log.

    `checked` collects the files that need no further check.
    """

    def __init__(
        self, log: LogPath, schema_of: Callable[[int, int], LogSchemaVersion], checked: set[tuple[str, int]]
    ) -> None:
        self._log = log
        self._schema_of = schema_of
        self._checked = checked

    def open(self, file: SealedFile) -> pq.ParquetFile:
        """Open a checked file; raise FileNotFoundError if it is gone."""
        path = self._log / file.file
        if (file.file, file.crc) not in self._checked:
            check_file(path, file.size, file.crc)
            self._checked.add((file.file, file.crc))
        # Checked once as a whole, and page by page each time: it may have been damaged since.
        with files.explain_store_errors(path):
            source = files.arrow_source(path)
        return pq.ParquetFile(source, memory_map=True, page_checksum_verification=True)

    def batches(
        self, file: SealedFile, span: RowSpan, rows_max: int | None = None
    ) -> Iterator[tuple[int, int, ChangeBatch]]:
        """Yield the rows of a file in the span.

        Each batch has its table and the number of the commit before it. It is one row group, or at most `rows_max`
        rows.
        """
        no_commits = file.last < span.first or file.first > span.last
        if no_commits or file.last_seq <= span.after_seq or file.first_seq > span.to_seq:
            return
        version = self._schema_of(file.table, file.schema)
        with self.open(file) as parquet:
            before = file.first_seq - 1
            for index, group in enumerate(file.groups):
                begin, before = before, group.last_seq
                if group.last_seq <= span.after_seq or group.last < span.first:
                    continue
                if group.first > span.last or begin >= span.to_seq:
                    return
                if parquet.metadata.row_group(index).num_rows != group.rows:
                    raise sealed_file_error(self._log / file.file, "a row group is not as long as it was")
                for piece in self._pieces(parquet, index, rows_max or group.rows, self._log / file.file):
                    wanted = _rows_in_span(piece, span)
                    if wanted.num_rows:
                        yield (
                            group.first - 1,
                            file.table,
                            batch_with_counts(version.schema, wanted.drop_columns([change.COMMIT])),
                        )

    def _pieces(self, parquet: pq.ParquetFile, index: int, rows: int, path: LogPath) -> Iterator[pa.RecordBatch]:
        try:
            yield from _keep_moves_together(parquet.iter_batches(rows, row_groups=[index], use_threads=False))
        except (OSError, pa.ArrowException) as error:
            raise sealed_file_error(path, "a page of it cannot be read") from error

    def batches_by_commit(
        self, sealed: list[SealedFile], commits: CommitList, span: RowSpan
    ) -> Iterator[tuple[int, int, ChangeBatch]]:
        """Yield the rows of many tables commit by commit, as before sealing."""
        rows_max = max(ROWS_AT_ONCE // len(sealed), ROWS_AT_ONCE_MIN)
        sources = [
            (file.table, _SealedRows(file.first_seq, (item[2] for item in self.batches(file, span, rows_max))))
            for file in sorted(sealed, key=lambda file: file.first_seq)
        ]
        for commit, next_seq in zip(commits.commit.tolist(), commits.next_seq.tolist(), strict=True):
            if commit > span.last:
                return
            for table, source in sources:
                for batch in source.until(next_seq):
                    yield commit - 1, table, batch


def _keep_moves_together(pieces: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the pieces so that no key move is split.

    Where a piece begins with a moved row, the delete of its old key moves into it from the piece before.
    """
    pending: pa.RecordBatch | None = None
    for piece in pieces:
        following = piece
        if pending is not None:
            if change.MOVED_FROM in piece.schema.names and piece.column(change.MOVED_FROM)[0].is_valid:
                last = pending.num_rows - 1
                following, pending = pa.concat_batches([pending.slice(last), piece]), pending.slice(0, last)
            if pending.num_rows:
                yield pending
        pending = following
    if pending is not None:
        yield pending


class _SealedRows:
    """One file's batches, read piece by piece.

    The file is opened when its first row is due.
    """

    def __init__(self, first_seq: int, batches: Iterator[ChangeBatch]) -> None:
        self._next_seq = first_seq
        self._batches = batches
        self._pending: ChangeBatch | None = None

    def until(self, next_seq: int) -> Iterator[ChangeBatch]:
        """Yield the rows before a `_seq`."""
        while self._next_seq < next_seq:
            pending = self._pending or next(self._batches, None)
            if pending is None:
                return
            seqs = pending.data.column(change.SEQ).to_numpy()
            rows = int(np.searchsorted(seqs, next_seq))
            if rows:
                yield batch_with_counts(pending.schema, pending.data.slice(0, rows))
            self._pending = None
            if rows < len(seqs):
                self._pending = replace(pending, data=pending.data.slice(rows))  # counted when it is yielded
                self._next_seq = int(seqs[rows])


def _rows_in_span(rows: pa.RecordBatch, span: RowSpan) -> pa.RecordBatch:
    seqs, commits = rows.column(change.SEQ).to_numpy(), rows.column(change.COMMIT).to_numpy()
    begin = max(int(np.searchsorted(seqs, span.after_seq, side="right")), int(np.searchsorted(commits, span.first)))
    end = min(
        int(np.searchsorted(seqs, span.to_seq, side="right")), int(np.searchsorted(commits, span.last, side="right"))
    )
    return rows.slice(begin, max(0, end - begin))
