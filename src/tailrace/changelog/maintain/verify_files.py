"""Check that sealed files hold the rows that their seal names.

A file is checked byte for byte, then row number by row number. Nothing here decides what belongs to the log. Memory is
bounded by one row group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

from tailrace.changelog.format.schemas import LogSchemaVersion
from tailrace.changelog.format.seal import Seal, SealedFile, check_file, commits_path, sealed_file_error
from tailrace.model import change
from tailrace.model.system_streams import SCHEMA_STREAM_NUMBER
from tailrace.storage import files
from tailrace.storage.files import LogPath

LIST_ROWS = 65_536
_WRAP = (1 << 64) - 1

SeqArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SeqDigest:
    """A digest of a set of `_seq`: count, sum, and sum of squares.

    Its size is fixed. Wrong numbers that match all three do not occur by accident.
    """

    count: int = 0
    total: int = 0
    squares: int = 0

    def __add__(self, other: SeqDigest) -> SeqDigest:
        return SeqDigest(
            self.count + other.count, (self.total + other.total) & _WRAP, (self.squares + other.squares) & _WRAP
        )

    @classmethod
    def of(cls, seqs: SeqArray) -> SeqDigest:
        wide = seqs.astype(np.uint64)
        return cls(len(seqs), int(wide.sum()), int((wide * wide).sum()))

    @classmethod
    def of_range(cls, first: int, end: int) -> SeqDigest:
        """Return the digest of every number from `first` up to, but without, `end`."""

        def squares(n: int) -> int:
            return n * (n - 1) * (2 * n - 1) // 6

        total = (end * (end - 1) - first * (first - 1)) // 2
        return cls(end - first, total & _WRAP, (squares(end) - squares(first)) & _WRAP)


def is_run(seqs: SeqArray, rows: int, first: int, last: int, table: int) -> bool:
    """Return true if these are `rows` numbers in order, from the first to the last."""
    if len(seqs) != rows or not rows or (int(seqs[0]), int(seqs[-1])) != (first, last):
        return False
    # Records of the `schema` stream have the numbers of the rows that they announce; several may announce one.
    return bool((np.diff(seqs) >= (0 if table == SCHEMA_STREAM_NUMBER else 1)).all())


def check_commit_list(log: LogPath, seal: Seal) -> None:
    """Check a seal's list of commits: complete, in order, and adding up to the seal."""
    path = commits_path(log, seal.stem)
    check_file(path, seal.commits_size, seal.commits_crc)
    commit, end, next_seq, rows = seal.first - 1, seal.start.value, seal.first_seq, 0
    in_order = True
    with pq.ParquetFile(files.arrow_source(path)) as parquet:
        for batch in parquet.iter_batches(batch_size=LIST_ROWS, use_threads=False):
            commits, ends, next_seqs, counts = (
                batch.column(name).to_numpy() for name in ("commit", "end", "next_seq", "rows")
            )
            in_order &= bool(
                (np.diff(commits, prepend=commit) > 0).all()
                and (np.diff(ends, prepend=end) >= 0).all()
                and (np.diff(next_seqs, prepend=next_seq) == counts).all()
            )
            commit, end, next_seq = int(commits[-1]), int(ends[-1]), int(next_seqs[-1])
            rows += int(counts.sum())
    if not in_order or (commit, end, next_seq) != (seal.last, seal.end.value, seal.next_seq):
        raise sealed_file_error(path, "its commits are not those of the seal")
    if rows != seal.rows or seal.next_seq - seal.first_seq != rows:
        raise sealed_file_error(path, "its rows do not add up to those of the seal")


def check_sealed_file(log: LogPath, file: SealedFile, schema_of: Callable[[int, int], LogSchemaVersion]) -> SeqDigest:
    """Check a sealed file against its seal; return the digest of its row numbers."""
    path = log / file.file
    check_file(path, file.size, file.crc)
    version = schema_of(file.table, file.schema)
    numbers, seq, commit = SeqDigest(), file.first_seq - 1, file.first
    with pq.ParquetFile(files.arrow_source(path), memory_map=True) as parquet:
        needed = {name for name in version.arrow_schema.names if name not in change.OPTIONAL} | {change.COMMIT}
        if needed - set(parquet.schema_arrow.names) or parquet.num_row_groups != len(file.groups):
            raise sealed_file_error(path, "it does not have the columns or the row groups it should")
        for index, group in enumerate(file.groups):
            rows = parquet.read_row_group(index, columns=[change.SEQ, change.COMMIT], use_threads=False)
            seqs, commits = (rows.column(name).to_numpy() for name in (change.SEQ, change.COMMIT))
            in_order = is_run(seqs, group.rows, int(seqs[0]) if len(seqs) else 0, group.last_seq, file.table)
            if (
                not in_order
                or seqs[0] < (seq if file.table == SCHEMA_STREAM_NUMBER else seq + 1)
                or (commits[0], commits[-1]) != (group.first, group.last)
                or commits[0] < commit
                or (np.diff(commits) < 0).any()
            ):
                raise sealed_file_error(path, "its rows are not the ones the seal names")
            numbers, seq, commit = numbers + SeqDigest.of(seqs), int(seqs[-1]), int(commits[-1])
    if (numbers.count, seq, commit) != (file.rows, file.last_seq, file.last):
        raise sealed_file_error(path, "its rows are not the ones the seal names")
    return numbers
