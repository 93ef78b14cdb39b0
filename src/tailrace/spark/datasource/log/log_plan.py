"""Plan the reads of one Spark reader of a change log. Decides the commits, the end, and each task's part.

A step ends on a commit that has rows of the requested tables. It never passes a commit where rows are missing, or whose
rows the DataFrame cannot hold. Everything before such a commit is delivered, and then the error is raised. The rows of
a step are divided by `_seq`, so any number of tasks reads each row once.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tailrace.changelog.read.commit_lookup import CommitLookup, CommitSizer
from tailrace.changelog.read.index import LogIndex, Slice
from tailrace.changelog.read.merged_schema import fits_schema
from tailrace.changelog.read.offsets import LogOffset, starting_offset
from tailrace.changelog.read.reader import SEQ_MAX, ChangeLog
from tailrace.errors import LogGap, LogTrimmed, SchemaChanged, TailraceError
from tailrace.model import change
from tailrace.model.position import Lsn
from tailrace.spark.datasource.log.change_feed import find_unsupported, partial_rows_error
from tailrace.spark.datasource.log.coverage_check import NEW_CHECKPOINT_HINT, CoverageCheck
from tailrace.spark.datasource.log.log_options import RowFormat
from tailrace.spark.datasource.log.log_schema import LogFrame
from tailrace.spark.datasource.log.table_renames import TableRenames

_ENVELOPE_HINT = " Or set `onSchemaChange` to `envelope`, with which a stream continues."


@dataclass(frozen=True, kw_only=True)
class LogPart:
    """Rows that one task reads. They are of these commits and tables, after a `_seq` and up to another."""

    log_id: str
    tables: frozenset[int]
    first: int
    last: int
    after_seq: int
    to_seq: int


class LogPlanner:
    """The open log of one reader. What it knows of the log grows as it plans."""

    def __init__(self, frame: LogFrame) -> None:
        self._frame = frame
        self._options = frame.options
        self.log = ChangeLog.open(frame.options.log_path)
        self._index = LogIndex(self.log)
        self._sizer = CommitSizer(self.log)
        self._coverage = CoverageCheck(frame.options, self.log, self._index)
        self._renames = TableRenames(frame.options, self.log, self._index)
        self._fitting: set[tuple[int, int]] = set()
        self._unsupported: dict[tuple[int, int], tuple[LogOffset, tuple[int, TailraceError] | None]] = {}
        """Results of the search for unsupported rows, by table and a slice's last row.

        Each has the offset after which the search began.
        """
        self._known: tuple[int, frozenset[int]] = (-1, frozenset())

    def newest(self) -> int:
        """Return the log's newest commit."""
        return self.log.newest()

    def newest_matching(self) -> int:
        """Return the newest commit with rows of the requested tables; 0 without one.

        Rows that were trimmed count too.
        """
        newest = self.newest()
        tables = self.tables(newest)
        trimmed = [table.commit for table in self.log.trimmed_tables(self.log.trimmed(), tables).values()]
        return max([*trimmed, *(item.last for item in self._slices(LogOffset(0), newest, tables))], default=0)

    def tables(self, upto: int) -> frozenset[int]:
        """Return the log's numbers of requested tables that ever had rows up to a commit."""
        if self._known[0] < upto:
            self._index.grow(upto)
            if self._known[0] < 0:
                self.log.schemas.load()
            self._known = upto, self.log.schemas.numbers_matching(self._options.matches)
            self._renames.refresh(self._known[1])
        return self._known[1]

    def start_offset(self) -> LogOffset:
        """Return the offset after which the requested range begins."""
        option, newest = self._options.start, self.newest()
        tables = self.tables(newest)
        offset = starting_offset(self.log, option, tables)
        self._coverage.refresh(newest, tables)
        self._coverage.refuse_start(option, offset)
        return self.with_last_seq(offset) if isinstance(option, Lsn) else offset

    def with_last_seq(self, offset: LogOffset) -> LogOffset:
        """Return the same offset with the `_seq` of the last row before it.

        Any two such offsets can be compared.
        """
        return LogOffset(offset.commit, max(offset.seq, self._index.next_seq(offset.commit) - 1))

    def next_end(self, after: LogOffset, to: int, *, limited: bool) -> int:
        """Return the commit to read to, `to` at most.

        If there is nothing to read, it is the reader's own commit.
        """
        tables = self.tables(to)
        self.refuse_trimmed(after, tables)
        slices = self._slices(after, to, tables)
        end, error = self._reachable_end(after, to, slices)
        slices = [item for item in slices if item.first <= end]
        if error is not None and (not slices or end == after.commit):
            raise error
        if not slices:
            return after.commit
        end = min(end, slices[-1].last)
        if limited and (self._options.rows_max or self._options.bytes_max):
            end = self._limited_end(after, end, tables)
        return end

    def plan_parts(self, after: LogOffset, to: int, to_seq: int = SEQ_MAX) -> list[LogPart]:
        """Divide the rows between two offsets into parts, one for each task."""
        tables = self.tables(to)
        self.refuse_trimmed(after, tables)
        slices = self._slices(after, to, tables)
        end, error = self._reachable_end(after, to, slices)
        if error is not None and end < to:
            raise error
        whole = LogPart(
            log_id=self.log.log_id,
            tables=frozenset(item.table for item in slices),
            first=after.commit + 1,
            last=to,
            after_seq=after.seq,
            to_seq=to_seq,
        )
        return self._split(whole, slices) if slices else []

    def refuse_trimmed(self, after: LogOffset, tables: frozenset[int]) -> None:
        """Refuse to read trimmed rows, before a task looks for them."""
        trimmed = self.log.trimmed()
        for number, table in self.log.trimmed_tables(trimmed, tables).items():
            if after.commit < table.commit and table.last_seq > after.seq:
                raise LogTrimmed(
                    "the log no longer holds changes that were not read",
                    table=self.log.schemas.latest_of(number).schema.table,
                    after=after.commit,
                    gone_to=table.commit,
                    hint=NEW_CHECKPOINT_HINT.format(commit="earliest")
                    + " Give the stream a name with the option `consumer`: the log then keeps rows for it.",
                )

    def _slices(self, after: LogOffset, to: int, tables: frozenset[int]) -> list[Slice]:
        """Return the tables' slices after an offset, in order. The last may extend past the commit."""
        seq = max(after.seq, self._index.next_seq(after.commit) - 1 if after.commit <= self._index.last_commit else 0)
        slices = [
            item for table in tables for item in self._index.pending(table, seq, to) if self._renames.includes(item)
        ]
        return sorted(slices, key=lambda item: (item.last_seq, item.first))

    def _reachable_end(self, after: LogOffset, to: int, slices: Sequence[Slice]) -> tuple[int, TailraceError | None]:
        """Return the last readable offset, and the error that stops the reader there."""
        end = to
        error: TailraceError | None = None
        self._coverage.refresh(to, self.tables(to))
        self._coverage.warn_of_late_starts(after, to)
        for gap_before in (self._coverage.first_gap(after, to), self._renames.first_gap(after, to)):
            if gap_before is not None and gap_before[0] <= end:
                end, error = gap_before[0] - 1, gap_before[1]
        for gap in self.log.gaps():
            if after.commit < gap.commit <= end:
                end, error = gap.commit - 1, _missing(gap.error, gap.commit)
        for item in slices:
            obstacle = self._obstacle(item, after, slices) if item.first <= end else None
            if obstacle is not None and obstacle[0] <= end:
                end, error = obstacle[0] - 1, obstacle[1]
        return max(end, after.commit), error

    def _obstacle(self, item: Slice, after: LogOffset, slices: Sequence[Slice]) -> tuple[int, TailraceError] | None:
        """Return the first commit whose rows do not fit the DataFrame's columns, and the error."""
        if (error := self._schema_error(item, slices)) is not None:
            return item.first, error
        if item.has_special_rows and self._options.row_format is RowFormat.CHANGELOG:
            return self._first_unsupported(item, after)
        return None

    def _first_unsupported(self, item: Slice, after: LogOffset) -> tuple[int, TailraceError] | None:
        """Return the first commit that a change feed cannot represent, and the error. Looks after an offset.

        Rows are read only here. The result is kept, so that they are not read again with every micro-batch.
        """
        searched_after, result = self._unsupported.get((item.table, item.last_seq), (None, None))
        if (
            searched_after is None
            or searched_after > after
            or (result is not None and (after.seq or result[0] <= after.commit))
        ):
            result = self._find_unsupported(item, after)
            self._unsupported[item.table, item.last_seq] = after, result
        return result

    def _find_unsupported(self, item: Slice, after: LogOffset) -> tuple[int, TailraceError] | None:
        first = max(item.first, after.commit + 1)
        commits = CommitLookup(self.log, first)
        rows = self.log.read(first, item.last, tables={item.table}, after_seq=after.seq, to_seq=item.last_seq)
        for batch in filter(self._options.matches_rows, rows):
            if (
                result := find_unsupported(batch, commits.commits_of(batch.data.column(change.SEQ).to_numpy()))
            ) is not None:
                return result
        return None

    def _schema_error(self, item: Slice, slices: Sequence[Slice]) -> TailraceError | None:
        """Return why rows of a schema version do not fit; None if they do."""
        version_id = item.table, item.schema
        if self._frame.schema is None or version_id in self._fitting:
            return None
        version = self.log.schemas.get(*version_id).schema
        if not fits_schema(version, self._frame.schema) and not self._options.with_envelope:
            return SchemaChanged(
                "the table has columns or types now that the DataFrame does not have",
                table=version.table,
                commit=item.first,
                hint="Start the stream again, from `spark.readStream` on and with the same checkpoint; create a "
                "DataFrame of a read again. It then has them, and everything before was delivered."
                + (_ENVELOPE_HINT if self._options.row_format is RowFormat.TYPED else ""),
            )
        if self._options.row_format is RowFormat.CHANGELOG:
            last = max(other.last for other in slices if (other.table, other.schema) == version_id)
            if (error := partial_rows_error(version, last)) is not None:
                return error
        self._fitting.add(version_id)
        return None

    def _limited_end(self, after: LogOffset, to: int, tables: frozenset[int]) -> int:
        """Return the furthest commit within the limits. At least one commit with rows is read."""
        rows_max, bytes_max = self._options.rows_max, self._options.bytes_max
        end, rows, size = after.commit, 0, 0.0
        for weight in self._sizer.measure(tables, after.commit + 1, to):
            rows, size = rows + weight.rows, size + weight.bytes
            over = (rows_max is not None and rows > rows_max) or (bytes_max is not None and size > bytes_max)
            if over and end > after.commit:
                return end
            end = weight.commit
        return end

    def _split(self, whole: LogPart, slices: Sequence[Slice]) -> list[LogPart]:
        """Divide the rows into parts of about the same number.

        A commit is divided only if it is larger than a part, and never for a change feed, which folds it.
        """
        total = sum(item.rows for item in slices)
        count = min(-(-total // self._options.rows_per_partition), self._options.partitions_max)
        share = -(-total // count)
        sizes: Counter[int] = Counter()
        for item in slices:
            sizes[item.last] += item.rows if item.first == item.last else 0
        parts: list[LogPart] = []
        rows, first, after_seq = 0, max(whole.first, min(item.first for item in slices)), whole.after_seq
        for item, following in itertools.pairwise(slices):
            rows += item.rows
            divisible = self._options.row_format is not RowFormat.CHANGELOG and sizes[item.last] > share
            if rows >= share and (following.first > item.last or divisible):
                last = min(whole.last, item.last)
                parts.append(replace(whole, first=first, last=last, after_seq=after_seq, to_seq=item.last_seq))
                rows, first, after_seq = 0, last, item.last_seq
        return [*parts, replace(whole, first=first, after_seq=after_seq)]


def _missing(gap: LogGap, commit: int) -> LogGap:
    return LogGap(gap.message, hint=NEW_CHECKPOINT_HINT.format(commit=commit + 1), **gap.fields)
