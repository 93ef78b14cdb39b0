"""Filtering of changes, when only some rows of a table are wanted.

An update that makes a row unwanted becomes a delete, and one that makes it wanted becomes an insert. Without the old
row it is unknown whether the row was wanted. Then the update stays an update, or becomes a delete, which does no harm
to a table without the row. So does a delete of which only the key is known. A TRUNCATE empties every target. A row that
an earlier rule failed at is always wanted: the value that decides may be the missing one, and the failure would go
unreported.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.model import change
from tailrace.model.change import Operation
from tailrace.transforms.row_images import Image, RowImages
from tailrace.transforms.transform_errors import RowFaults, faulty_rows, restrict_faults

Mask = npt.NDArray[np.bool_]
ConditionResult = tuple[Mask, RowFaults]
"""The wanted rows, and the rows for which the condition cannot be computed."""


def keep_wanted_rows(
    rows: RowImages,
    wanted: Callable[[Image], ConditionResult],
    columns: tuple[str, ...],
    key: tuple[str, ...],
    rule: str,
) -> None:
    """Keep the changes of wanted rows. `columns` are those that `wanted` uses."""
    after, before, moved = rows.after, rows.image(change.BEFORE), rows.image(change.MOVED_FROM)
    now, faults = wanted(after)
    now = now | rows.failed_rows
    old_row_known = np.zeros(rows.count, np.bool_)
    was = old_row_known
    if before is not None:
        old_row_known = np.ones(rows.count, np.bool_) if before.valid is None else before.valid.copy()
        was, old_faults = wanted(before)
        if old_doubts := (*rows.unknown_rows(before, columns), *old_faults):
            old_row_known &= ~faulty_rows(old_doubts, rows.count)
        was = was & old_row_known
    deleted, updated = rows.is_op(Operation.DELETE), rows.is_op(Operation.UPDATE)
    written = ~deleted & ~rows.is_op(Operation.TRUNCATE)
    if doubts := (*rows.unknown_rows(after, columns), *faults):
        rows.fail(rule, columns[0], *restrict_faults(doubts, written))
        now = now | faulty_rows(doubts, rows.count)
    never = old_row_known & ~was
    unwanted = deleted & never
    if set(columns) <= set(key):
        unwanted |= deleted & ~now
    leaves = updated & ~now & ~never
    gone = unwanted | (written & ~now & ~leaves)
    enters = updated & now & never
    if leaves.any():
        _make_deletes(rows, leaves, before, key)
    if enters.any():
        rows.metadata[change.OP] = pc.if_else(pa.array(enters), Operation.INSERT.value, rows.metadata[change.OP])
        assert before is not None, "a row that was not wanted has an old row"
        before.valid = ~enters if before.valid is None else before.valid & ~enters
    if moved is not None and moved.valid is not None:
        moved.valid = moved.valid & ~(written & now & never)
    rows.take(~gone)


def _make_deletes(rows: RowImages, which: Mask, before: Image | None, key: tuple[str, ...]) -> None:
    """Turn these updates into deletes of the old row, or of its key alone."""
    rows.metadata[change.OP] = pc.if_else(pa.array(which), Operation.DELETE.value, rows.metadata[change.OP])
    chosen = pa.array(which)
    for name, values in rows.after.columns.items():
        if before is not None:
            # Where there is no old row, what was flattened from it is null already.
            known = before.valid if before.valid is not None else np.ones(rows.count, np.bool_)
            old = before.columns[name]
            old = pc.if_else(pa.array(known), old, values) if name in key else old
        else:
            old = values if name in key else pa.nulls(rows.count, values.type)
        rows.after.columns[name] = pc.if_else(chosen, old, values)
    rows.unsent = {name: others for name, mask in rows.unsent.items() if (others := mask & ~which).any()}
    for cell_key in [cell_key for cell_key in rows.unfit if cell_key[0] == rows.after.which]:
        texts = {row: text for row, text in rows.unfit[cell_key].items() if not which[row]}
        rows.unfit[cell_key] = texts
