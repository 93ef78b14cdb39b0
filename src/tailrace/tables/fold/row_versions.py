"""Changes as versions of rows: when each began, and when it ended.

What a transaction leaves of a row is one version, however often it changed it; what it makes and takes away again is
none. Versions are in the order of `_seq`. Times never go back, though commit times may: each change counts as made at
the latest time of commit that the table has seen so far, so the table remembers that (`Folded.clock`, `timed`). A
version that the same transaction began in an earlier batch is replaced, so it does not matter where a batch was cut.

Pure: no Spark, no I/O.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa

from tailrace.model import change
from tailrace.model.schema import TableSchema
from tailrace.tables.delta.diff import clamp_to_minimum
from tailrace.tables.fold.fold import END_VERSION, UPSERT, Flags, FoldedChanges, TruncateEffect, as_type
from tailrace.tables.fold.row_ids import Ints
from tailrace.tables.fold.row_states import RowStates
from tailrace.tables.spec import CURRENT, TIME, VALID_FROM, VALID_TO, TableSpec

LATEST = "\0latest"
"""Beside changes of which only some are folded together: the latest time of commit up to each among all, µs since
1970. No source can have a column of this name."""


def fold_versions(form: TableSpec, schema: TableSchema, stored: TableSchema, changes: pa.Table) -> FoldedChanges:
    """The versions that come in, and which keys' current ones they end."""
    states = RowStates(schema, changes)
    times, txs = latest_times(changes), changes.column(change.TX).to_numpy()
    runs = _Runs(states, txs)
    kept = states.alive[runs.last]
    ended = np.where(runs.follows, np.roll(times[states.row[runs.last]], -1), -1)
    made, closing = runs.last[kept], runs.first[runs.begins & ~states.inserted[runs.first] & states.first[runs.first]]
    which = np.concatenate([made, closing])
    operations = np.repeat(np.array([UPSERT, END_VERSION], np.int8), [made.size, closing.size])
    starts = np.concatenate([times[states.row[made]], np.full(closing.size, -1)])
    ends = np.concatenate([ended[kept], times[states.row[closing]]])
    own = {VALID_FROM: _times(starts), VALID_TO: _times(ends), CURRENT: pa.array((ends < 0) & (operations == UPSERT))}
    rows = pa.array(states.row[which])
    added = [
        own[column.name] if column.name in own else as_type(changes.column(column.name), column.type).take(rows)
        for column in form.added_columns
    ]
    folded = states.rows(which, stored, added, operations)
    clock = int(times[-1]) if times.size else None
    if (at := states.truncated_at) is None:
        return FoldedChanges(truncated=False, rows=folded, latest_time=clock)
    values = {VALID_TO: pa.scalar(int(times[at]), TIME), CURRENT: pa.scalar(False)}
    return FoldedChanges(
        truncated=False, rows=folded, latest_time=clock, truncate_effect=TruncateEffect(values=values, tx=int(txs[at]))
    )


def latest_times(changes: pa.Table) -> Ints:
    """For each change the latest time of commit so far."""
    if LATEST in changes.column_names:
        known: Ints = changes.column(LATEST).to_numpy()
        return known
    committed = as_type(changes.column(change.COMMITTED_AT), TIME).cast(pa.int64()).to_numpy()
    times: Ints = np.maximum.accumulate(committed.clip(0))
    return times


class _Runs:
    """States of one key that one transaction made, each run by its first and its last; the runs of a key in order."""

    def __init__(self, states: RowStates, txs: Ints) -> None:
        order = np.argsort(states.key, kind="stable")
        keys, made_by = states.key[order], txs[states.row[order]]
        same_key = keys[1:] == keys[:-1]
        starts = np.concatenate([np.ones(min(order.size, 1), np.bool_), ~(same_key & (made_by[1:] == made_by[:-1]))])
        heads = np.flatnonzero(starts)
        self.first: Ints = order[heads]
        self.last: Ints = order[np.concatenate([heads[1:], [order.size]])[: heads.size] - 1]
        key_of = states.key[self.first]
        same = key_of[1:] == key_of[:-1]
        self.begins: Flags = np.concatenate([np.ones(min(heads.size, 1), np.bool_), ~same])
        """Whether it is the first of its key,"""
        self.follows: Flags = np.concatenate([same, np.zeros(min(heads.size, 1), np.bool_)])
        """and whether another one of it comes after."""


def _times(values: Ints) -> Any:
    return pa.array(values, mask=values < 0).cast(TIME)


def clamp_times(stored: TableSchema, folded: FoldedChanges, clock: int) -> FoldedChanges:
    """The same with no time before the clock."""
    if folded.latest_time is None:
        return folded
    least = pa.scalar(clock, TIME)
    rows = folded.rows
    for name in (VALID_FROM, VALID_TO):
        at = stored.names.index(name)
        rows = rows.set_column(at, rows.schema.field(at), clamp_to_minimum(rows.column(at), least))
    return replace(
        folded,
        rows=rows,
        truncate_effect=clamp_truncate(folded.truncate_effect, clock),
        latest_time=max(folded.latest_time, clock),
    )


def clamp_truncate(ended: TruncateEffect | None, clock: int) -> TruncateEffect | None:
    """What a TRUNCATE does, with no time before the clock."""
    if ended is None:
        return None
    least = pa.scalar(clock, TIME)
    return replace(
        ended, values={**ended.values, VALID_TO: max(ended.values[VALID_TO], least, key=lambda time: time.value)}
    )
