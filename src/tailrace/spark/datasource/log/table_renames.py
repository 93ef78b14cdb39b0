"""Tables that got another name, for a reader who asks for names.

A row is of the table by whose name it was written, as in a pipeline, to which a renamed table is another one. So what
was written under a name that is not asked for never comes, and its reader is warned once where that begins or ends.
Where a name went from one table to another, as when two were swapped, the reader lacks what the second one had before:
for a table that is asked for by its name that is a gap, after everything before it was delivered.
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
from tailrace.spark.datasource.log.coverage_check import ANEW_HINT
from tailrace.spark.datasource.log.log_options import LogOptions

log = logging.getLogger(__name__)


class TableRenames:
    """Under which names the tables of one reader were written."""

    def __init__(self, options: LogOptions, log: ChangeLog, index: LogIndex) -> None:
        self._options = options
        self._log = log
        self._index = index
        self._taken: dict[tuple[int, int], bool] = {}
        self._renamed: frozenset[int] = frozenset()
        """Those that had a name that is asked for, and one that is not."""
        self._warned: set[tuple[int, int]] = set()

    def refresh(self, tables: frozenset[int]) -> None:
        """Take in the names that these tables have had by now."""
        self._renamed = tables & self._log.schemas.numbers_matching(lambda table: not self._options.matches(table))

    def includes(self, item: Slice) -> bool:
        """Whether rows were written under a name that is asked for."""
        which = item.table, item.schema
        if which not in self._taken:
            self._taken[which] = self._options.matches(self._name(item))
        return self._taken[which]

    def first_gap(self, after: LogOffset, to: int) -> tuple[int, LogGap] | None:
        """The first commit, of all after a place and up to a commit, in which a name is another table's, and the
        error; whoever lacks nothing in the middle is warned."""
        found = []
        for before, item in self._changes(after, to):
            if self.includes(item) and self._options.names_explicitly(self._name(item)) and self._name_was_reused(item):
                found.append((item.first, self._another(before, item)))
            else:
                self._warn(before, item)
        return min(found, key=lambda missing: missing[0], default=None)

    def _changes(self, after: LogOffset, to: int) -> Iterator[tuple[Slice, Slice]]:
        """What was written last under the one name, and first under the other."""
        for number in self._renamed:
            for before, item in itertools.pairwise(self._index.pending(number, 0, to)):
                if item.first > after.commit and self.includes(before) != self.includes(item):
                    yield before, item

    def _name_was_reused(self, item: Slice) -> bool:
        """Whether another table was written under the same name before."""
        name, gone = self._name(item), self._log.trimmed().tables
        others = set(self._log.schemas.numbers_named(name)) - {item.table}
        return any(
            other in gone or any(self._name(early) == name for early in self._index.pending(other, 0, item.first))
            for other in others
        )

    def _another(self, before: Slice, item: Slice) -> LogGap:
        return LogGap(
            "another table has this name now, and what was written to it under its former one is not among these rows",
            table=self._name(item),
            formerly=self._name(before),
            commit=item.first,
            hint=ANEW_HINT.format(commit=item.first + 1),
        )

    def _warn(self, before: Slice, item: Slice) -> None:
        if (which := (item.table, item.first)) in self._warned:
            return
        self._warned.add(which)
        came, went = "what was written to it before is not asked for", "what is written to it since is not asked for"
        log.warning(
            "table %s is called %s from commit %d on: %s",
            self._name(before),
            self._name(item),
            item.first,
            came if self.includes(item) else went,
            extra={"table": str(self._name(before)), "renamed": str(self._name(item)), "commit": item.first},
        )

    def _name(self, item: Slice) -> TableId:
        return self._log.schemas.get(item.table, item.schema).schema.table
