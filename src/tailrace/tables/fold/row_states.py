"""Compute a row's whole state after every change, for tables that keep the past.

A state is a key's row after one change. Values that the change did not have are in the state before it, through any
chain of key moves. At the chain's start they are in the table, or, if rows can be refetched, only at the source. A
TRUNCATE ends every existing row, each by a state of its own. A delete of a row that is known not to exist makes no
state.

Pure: no Spark, no I/O. No Python object per row.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from tailrace.kernels import kernel
from tailrace.model.change import Operation
from tailrace.model.schema import TableSchema
from tailrace.tables.fold.fold import FoldInput, KeyNumbers, UnsentValues, operation_codes, refuse_unfit
from tailrace.tables.fold.folded_changes import (
    NOWHERE,
    UPSERT,
    Codes,
    Flags,
    folded_rows,
    key_ordinals,
    ordinal_lists,
    take_rows,
)
from tailrace.tables.fold.row_ids import Ints

_UPDATED, _DELETED, _TRUNCATED = Operation.UPDATE.code, Operation.DELETE.code, Operation.TRUNCATE.code


class RowStates:
    """The states of a batch of changes in order. Each array has one value per state."""

    def __init__(self, schema: TableSchema, changes: pa.Table, *, can_refetch: bool = False) -> None:
        self._schema = schema
        self._batch = FoldInput(schema, changes, operation_codes(changes), empty_before=False)
        self._gaps = UnsentValues.of(self._batch)
        self._keys = KeyNumbers(self._batch)
        operations = self._batch.operations
        size, truncates = operations.size, np.flatnonzero(operations == _TRUNCATED)
        states_max = size * 2 if truncates.size else size
        self.row, self.key, self.prev, self._root = (np.full(states_max, NOWHERE, np.int64) for _ in range(4))
        self.alive, self._moved, self.first = (np.zeros(states_max, np.bool_) for _ in range(3))
        partial = np.zeros(size, np.bool_)
        if self._gaps is not None:
            partial[:] = self._gaps.flags.any(axis=1)
        found = _walk(
            operations,
            self._keys.own,
            self._keys.old,
            partial,
            self._keys.limit,
            can_refetch,
            self.row,
            self.key,
            self.alive,
            self.prev,
            self._root,
            self._moved,
            self.first,
        )
        if found < 0:
            raise self._batch.base_missing(-found - 1, "a partial change arrived for a row that does not exist")
        for name in ("row", "key", "alive", "prev", "_root", "_moved", "first"):
            setattr(self, name, getattr(self, name)[:found])
        self.truncated_at = int(truncates[0]) if truncates.size else None
        """The first TRUNCATE; None without one."""

    def __len__(self) -> int:
        return int(self.row.size)

    @property
    def inserted(self) -> Flags:
        """Flags of states whose change inserted the row."""
        operations = self._batch.operations[self.row]
        flags: Flags = (operations != _UPDATED) & (operations != _DELETED) & (operations != _TRUNCATED)
        return flags

    def rows(self, which: Ints, stored: TableSchema, added: list[pa.Array], operations: Codes) -> pa.Table:
        """Return states as folded rows of the table's schema. The source's columns are first, then the added ones."""
        ordinals, keys = range(len(self._schema.columns)), set(key_ordinals(self._schema))
        picked, missing = [], np.zeros((which.size, len(ordinals)), np.bool_)
        for ordinal in ordinals:
            source = self._source(ordinal, is_key=ordinal in keys)[which]
            # A row that is only marked or ended needs just its key: the table's row has and keeps the other values.
            wanted = (operations == UPSERT) | (ordinal in keys)
            missing[:, ordinal] = wanted & (source == NOWHERE)
            picked.append(np.where(wanted & (source != NOWHERE), self.row[source], NOWHERE))
        refuse_unfit(self._batch, picked, np.ones(which.size, np.bool_))
        partial = missing.any(axis=1)
        base = self._keys.structs(np.where(partial, self._root[which], NOWHERE))
        absent = ordinal_lists(missing, np.arange(len(ordinals), dtype=np.int16))
        return folded_rows(
            stored,
            [*take_rows(self._batch.own, picked), *added],
            operations,
            absent=absent,
            base=base,
            moved=self._moved[which] & partial,
        )

    def _source(self, ordinal: int, *, is_key: bool) -> Ints:
        """Return, per state, the state that has a column's value; -1: the table has it."""
        operations = self._batch.operations[self.row]
        gaps = operations == _TRUNCATED if is_key else (operations == _TRUNCATED) | (operations == _DELETED)
        if self._gaps is not None and ordinal in self._gaps.ordinals:
            gaps = gaps | self._gaps.flags[self.row, self._gaps.ordinals.index(ordinal)]
        source = np.arange(len(self))
        if gaps.any():
            _reach(self.prev, gaps, source)
        return source


@kernel
def _walk(
    operations: Codes,
    own: Ints,
    old: Ints,
    partial: Flags,
    keys: int,
    can_refetch: bool,
    row: Ints,
    key: Ints,
    alive: Flags,
    prev: Ints,
    root: Ints,
    moved: Flags,
    first: Flags,
) -> int:
    """Walk the changes in order. Return the number of states, or an error code below zero.

    The code -i - 1 means that change i lacks values and has no base. If rows can be refetched, such a state has no root
    instead: no row of the table is its base.
    """
    count = epoch = listed = 0
    last, since = np.full(keys, -1, np.int64), np.full(keys, -1, np.int64)
    left, touched = np.full(keys, -1, np.int64), np.empty(keys, np.int64)
    for i in range(own.size):
        if operations[i] == _TRUNCATED:
            for j in range(listed):
                before = last[touched[j]]
                if alive[before]:
                    row[count], key[count], alive[count], prev[count] = i, touched[j], False, before
                    root[count], moved[count], first[count] = root[before], moved[before], False
                    last[touched[j]] = count
                    count += 1
            listed = 0
            epoch += 1
            continue
        k = own[i]
        seen = since[k] == epoch
        known = alive[last[k]] if seen else epoch == 0
        before, base, based = -1, -1, False
        if operations[i] == _DELETED or operations[i] == _UPDATED:
            left[k] = i if known and operations[i] == _DELETED else -1
            if known:
                before, base = (last[k], root[last[k]]) if seen else (-1, k)
                based = True
            elif operations[i] == _DELETED:
                continue
        elif old[i] >= 0 and i > 0 and left[old[i]] == i - 1:
            before, base, based = last[old[i]], root[last[old[i]]], True
        if partial[i] and not (based or can_refetch):
            return -i - 1
        row[count], key[count], alive[count], prev[count] = i, k, operations[i] != _DELETED, before
        root[count] = base if based or partial[i] else k
        arrived = operations[i] != _UPDATED and operations[i] != _DELETED and based
        moved[count] = arrived or (before >= 0 and moved[before])
        first[count] = not seen and epoch == 0
        if not seen:
            touched[listed], since[k] = k, epoch
            listed += 1
        last[k] = count
        count += 1
    return count


@kernel
def _reach(prev: Ints, gaps: Flags, source: Ints) -> None:
    """Give every state with a gap the source of the state before it."""
    for i in range(source.size):
        if gaps[i]:
            source[i] = source[prev[i]] if prev[i] >= 0 else -1
