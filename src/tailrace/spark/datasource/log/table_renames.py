"""Handle renamed tables for a reader that requests tables by name.

A row belongs to the name under which it was written, as in a pipeline, which treats a renamed table as another one. So
rows written under a name that is not requested are never delivered. The reader is warned once where that begins or
ends. Where a name moved from one table to another, as when two were swapped, the reader lacks the second table's
earlier rows. For a table requested by its name that is a gap, raised after everything before it was delivered.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator

from tailrace.changelog.read.index import LogIndex, Slice
from tailrace.changelog.read.offsets import LogOffset
from tailrace.changelog.read.reader import ChangeLog
from tailrace.errors import LogGap
from tailrace.model.schema import TableId
from tailrace.spark.datasource.log.coverage_check import NEW_CHECKPOINT_HINT
from tailrace.spark.datasource.log.log_options import LogOptions

log = logging.getLogger(__name__)


class TableRenames:
    """The names under which one reader's tables were written."""

    def __init__(self, options: LogOptions, log: ChangeLog, index: LogIndex) -> None:
        self._options = options
        self._log = log
        self._index = index
        self._included: dict[tuple[int, int], bool] = {}
        self._renamed: frozenset[int] = frozenset()
        """Tables that had both a requested name and one that is not requested."""
        self._warned: set[tuple[int, int]] = set()

    def refresh(self, tables: frozenset[int]) -> None:
        """Load the names that these tables have had so far."""
        self._renamed = tables & self._log.schemas.numbers_matching(lambda table: not self._options.matches(table))

    def includes(self, item: Slice) -> bool:
        """Return whether rows were written under a requested name."""
        version_id = item.table, item.schema
        if version_id not in self._included:
            self._included[version_id] = self._options.matches(self._name(item))
        return self._included[version_id]

    def first_gap(self, after: LogOffset, to: int) -> tuple[int, LogGap] | None:
        """Return the first commit where a name moved to another table, with the error.

        Only commits after an offset, and up to a commit, count. A reader that lacks nothing in the middle is warned
        instead.
        """
        gaps = []
        for before, item in self._changes(after, to):
            if self.includes(item) and self._options.names_explicitly(self._name(item)) and self._name_was_reused(item):
                gaps.append((item.first, self._reused_name_error(before, item)))
            else:
                self._warn(before, item)
        return min(gaps, key=lambda gap: gap[0], default=None)

    def _changes(self, after: LogOffset, to: int) -> Iterator[tuple[Slice, Slice]]:
        """Yield the last slice under one name with the first slice under the other."""
        for number in self._renamed:
            for before, item in itertools.pairwise(self._index.pending(number, 0, to)):
                if item.first > after.commit and self.includes(before) != self.includes(item):
                    yield before, item

    def _name_was_reused(self, item: Slice) -> bool:
        """Return whether another table was written under the same name before."""
        name, trimmed = self._name(item), self._log.trimmed().tables
        others = set(self._log.schemas.numbers_named(name)) - {item.table}
        return any(
            other in trimmed
            or any(self._name(earlier) == name for earlier in self._index.pending(other, 0, item.first))
            for other in others
        )

    def _reused_name_error(self, before: Slice, item: Slice) -> LogGap:
        return LogGap(
            "another table has this name now, and its rows under the former name are not among these rows",
            table=self._name(item),
            formerly=self._name(before),
            commit=item.first,
            hint=NEW_CHECKPOINT_HINT.format(commit=item.first + 1),
        )

    def _warn(self, before: Slice, item: Slice) -> None:
        if (rename := (item.table, item.first)) in self._warned:
            return
        self._warned.add(rename)
        joins, leaves = "changes before that are not requested", "changes after that are not requested"
        log.warning(
            "table %s is called %s from commit %d on: %s",
            self._name(before),
            self._name(item),
            item.first,
            joins if self.includes(item) else leaves,
            extra={"table": str(self._name(before)), "renamed": str(self._name(item)), "commit": item.first},
        )

    def _name(self, item: Slice) -> TableId:
        return self._log.schemas.get(item.table, item.schema).schema.table
