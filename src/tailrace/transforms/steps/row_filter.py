"""What becomes of changes when only some rows of a table are wanted.

An update that makes a row unwanted is a delete, and one that makes it wanted an insert. Where the old row was not told,
nobody knows whether it was wanted: then the update stands, or is a delete, which does no harm to a table that does not
have the row. So is a delete of which only the key is known. A TRUNCATE empties every part. A row that a rule before has
failed at is never unwanted: the value that would say so may be the one that is missing, and nobody would hear of it.
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
"""The rows that are wanted, and those of which that cannot be computed."""


def keep_wanted_rows(
    rows: RowImages,
    wanted: Callable[[Image], ConditionResult],
    columns: tuple[str, ...],
    key: tuple[str, ...],
    rule: str,
) -> None:
    """Keep what concerns wanted rows. `columns` are those that `wanted` looks at."""
    after, before, moved = rows.after, rows.image(change.BEFORE), rows.image(change.MOVED_FROM)
    now, odd = wanted(after)
    now = now | rows.failed_rows
    told = np.zeros(rows.count, np.bool_)
    was = told
    if before is not None:
        told = np.ones(rows.count, np.bool_) if before.valid is None else before.valid.copy()
        was, unsaid = wanted(before)
        if unsure := (*rows.unknown_rows(before, columns), *unsaid):
            told &= ~faulty_rows(unsure, rows.count)
        was = was & told
    deleted, updated = rows.is_op(Operation.DELETE), rows.is_op(Operation.UPDATE)
    written = ~deleted & ~rows.is_op(Operation.TRUNCATE)
    if doubts := (*rows.unknown_rows(after, columns), *odd):
        rows.fail(rule, columns[0], *restrict_faults(doubts, written))
        now = now | faulty_rows(doubts, rows.count)
    never = told & ~was
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
        assert before is not None, "it was told"
        before.valid = ~enters if before.valid is None else before.valid & ~enters
    if moved is not None and moved.valid is not None:
        moved.valid = moved.valid & ~(written & now & never)
    rows.take(~gone)


def _make_deletes(rows: RowImages, which: Mask, before: Image | None, key: tuple[str, ...]) -> None:
    """These updates become deletes: of the old row if it was told, else of its key alone."""
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
    rows.unsent = {name: left for name, mask in rows.unsent.items() if (left := mask & ~which).any()}
    for where in [where for where in rows.unfit if where[0] == rows.after.which]:
        kept = {row: text for row, text in rows.unfit[where].items() if not which[row]}
        rows.unfit[where] = kept
