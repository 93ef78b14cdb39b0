"""A table's rows as built from its changes.

This is the simplest interpreter of `row_write`, and serves as the reference.

Every write is applied in order, by its content and nothing else. So the rows are those of the source, even if the last
changes arrive again. The state of a key that is written whole does not depend on what was there.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from tailrace.model.event import Delete, Merge, Replace, Row, RowWrite, Truncate

Key: TypeAlias = tuple[Any, ...]


class Mirror:
    """One table: rows by key, or, without a key, in order of arrival."""

    def __init__(self) -> None:
        self.rows: dict[Key, Row] = {}
        self._count = 0

    def apply(self, write: RowWrite) -> None:
        match write:
            case Truncate():
                self.rows.clear()
            case Delete(key=None, old=old) if old is not None:
                self._take_out(old)
            case Delete(key=key) if key is not None:
                self.rows.pop(_key(key), None)
            case Replace(key=None, row=row, old=old):
                if old is not None:
                    self._take_out(old)
                self._count += 1
                self.rows[(self._count,)] = row
            case Replace(key=key, row=row) if key is not None:
                self.rows[_key(key)] = row
            case Merge(key=key, columns=columns, base=base):
                old = self.rows.pop(_key(base), None)
                current = self.rows.get(_key(key), old)
                if current is not None:
                    self.rows[_key(key)] = current | columns

    def _take_out(self, row: Row) -> None:
        """Remove one row that equals it, if there is one."""
        for key, candidate in self.rows.items():
            if candidate == row:
                del self.rows[key]
                return

    def copy(self) -> Mirror:
        mirror = Mirror()
        mirror.rows, mirror._count = dict(self.rows), self._count
        return mirror


def _key(key: Row) -> Key:
    return tuple(key.values())
