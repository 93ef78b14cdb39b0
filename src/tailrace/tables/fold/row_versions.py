"""Fold changes to versions of rows, each with its begin and its end.

A transaction leaves one version of a row, however often it changed the row. A row that it inserts and deletes again has
no version. Versions are in the order of `_seq`.

Times never decrease, though commit times may. Each change counts as made at the latest commit time that the table has
seen so far, so the table records that time (`FoldedChanges.latest_time`). If the same transaction began a version in an
earlier batch, that version is replaced. So it does not matter where a batch was split.

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
from tailrace.tables.fold.fold import as_type
from tailrace.tables.fold.folded_changes import END_VERSION, UPSERT, Flags, FoldedChanges, TruncateEffect
from tailrace.tables.fold.row_ids import Ints
from tailrace.tables.fold.row_states import RowStates
from tailrace.tables.spec import CURRENT, TIME, VALID_FROM, VALID_TO, TableSpec

LATEST = "\0latest"
"""Column with the latest commit time among all changes so far, µs since 1970.

Set when only some of the changes are folded together. No source column can have this name.
"""


def fold_versions(spec: TableSpec, schema: TableSchema, stored: TableSchema, changes: pa.Table) -> FoldedChanges:
    """Return the new versions, and the keys whose current versions end."""
    states = RowStates(schema, changes)
    times, txs = latest_times(changes), changes.column(change.TX).to_numpy()
    runs = _Runs(states, txs)
    kept = states.alive[runs.last]
    ended = np.where(runs.follows, np.roll(times[states.row[runs.last]], -1), -1)
    new, ended_before = (
        runs.last[kept],
        runs.first[runs.begins & ~states.inserted[runs.first] & states.first[runs.first]],
    )
    chosen = np.concatenate([new, ended_before])
    operations = np.repeat(np.array([UPSERT, END_VERSION], np.int8), [new.size, ended_before.size])
    starts = np.concatenate([times[states.row[new]], np.full(ended_before.size, -1)])
    ends = np.concatenate([ended[kept], times[states.row[ended_before]]])
    version_columns = {
        VALID_FROM: _times(starts),
        VALID_TO: _times(ends),
        CURRENT: pa.array((ends < 0) & (operations == UPSERT)),
    }
    rows = pa.array(states.row[chosen])
    added = [
        version_columns[column.name]
        if column.name in version_columns
        else as_type(changes.column(column.name), column.type).take(rows)
        for column in spec.added_columns
    ]
    folded = states.rows(chosen, stored, added, operations)
    clock = int(times[-1]) if times.size else None
    if (truncate := states.truncated_at) is None:
        return FoldedChanges(truncated=False, rows=folded, latest_time=clock)
    values = {VALID_TO: pa.scalar(int(times[truncate]), TIME), CURRENT: pa.scalar(False)}
    return FoldedChanges(
        truncated=False,
        rows=folded,
        latest_time=clock,
        truncate_effect=TruncateEffect(values=values, tx=int(txs[truncate])),
    )


def latest_times(changes: pa.Table) -> Ints:
    """Return for each change the latest commit time so far."""
    if LATEST in changes.column_names:
        known: Ints = changes.column(LATEST).to_numpy()
        return known
    committed = as_type(changes.column(change.COMMITTED_AT), TIME).cast(pa.int64()).to_numpy()
    times: Ints = np.maximum.accumulate(committed.clip(0))
    return times


class _Runs:
    """Runs of states of one key made by one transaction, in order. Each with its first and last state."""

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
        """Flags of runs that are the first of their key."""
        self.follows: Flags = np.concatenate([same, np.zeros(min(heads.size, 1), np.bool_)])
        """Flags of runs that another run of their key follows."""


def _times(values: Ints) -> Any:
    return pa.array(values, mask=values < 0).cast(TIME)


def clamp_times(stored: TableSchema, folded: FoldedChanges, clock: int) -> FoldedChanges:
    """Return the folded changes with no time before the clock."""
    if folded.latest_time is None:
        return folded
    least = pa.scalar(clock, TIME)
    rows = folded.rows
    for name in (VALID_FROM, VALID_TO):
        index = stored.names.index(name)
        rows = rows.set_column(index, rows.schema.field(index), clamp_to_minimum(rows.column(index), least))
    return replace(
        folded,
        rows=rows,
        truncate_effect=clamp_truncate(folded.truncate_effect, clock),
        latest_time=max(folded.latest_time, clock),
    )


def clamp_truncate(ended: TruncateEffect | None, clock: int) -> TruncateEffect | None:
    """Return the truncate effect with no time before the clock."""
    if ended is None:
        return None
    least = pa.scalar(clock, TIME)
    return replace(
        ended, values={**ended.values, VALID_TO: max(ended.values[VALID_TO], least, key=lambda time: time.value)}
    )
