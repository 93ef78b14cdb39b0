"""Split changes into storable ones and dead letters, for keyless tables and append mode.

Invariant for a keyless table: its rows and its open dead letters together are the rows of the source. A row that does
not fit is never in the table. So its delete clears a dead letter of the same image, the oldest first, and nothing else.
If there is no such dead letter, a person has dropped it. After a schema change a dead letter may fit that did not
before. Then a delete clears the dead letter first: the table may hold copies of the row, but it may hold none.

In append mode each change is a separate row. One that does not fit is left out, and no later change makes up for it.
The result does not depend on how the changes were split into batches.

Pure: no Spark, no I/O.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.deadletters.conversion import convert_rows_at_rest
from tailrace.deadletters.keyed import NO_SEQS, SplitResult, unfit_cause, unfit_rows
from tailrace.model import change
from tailrace.model.change import Operation
from tailrace.model.schema import TableSchema
from tailrace.tables.evolve.schema_plan import ParseValue, no_value
from tailrace.tables.fold.fold import as_type, fold, old_unfit, own_unfit
from tailrace.tables.fold.folded_changes import Flags
from tailrace.tables.fold.row_ids import Ints, image_numbers, one_array
from tailrace.tables.limits import find_unstorable_rows

EACH_HINT = (
    "Correct the row at the source, which adds a new change. Then drop the dead letter: `tailrace dead-letters FILE "
    "list TABLE --forget`. Or give the column a type that holds the value, and run `tailrace dead-letters FILE replay "
    "TABLE` to add this change too."
)
IMAGE_HINT = "Correct the row at the source, or delete it: that clears the dead letter."


@dataclass(frozen=True, kw_only=True)
class DeadLetterImages:
    """Open dead letters of a keyless table. Changes are in `_seq` order, in the table's schema."""

    changes: pa.Table
    unidentified: Ints
    """`_seq` of those that cannot be converted to that schema: only a TRUNCATE clears them."""

    @classmethod
    def of(
        cls, schema: TableSchema, dead_letters: Iterable[tuple[TableSchema, pa.Table]], value_of: ParseValue = no_value
    ) -> DeadLetterImages:
        """Convert changes, each with its schema."""
        pieces, lost = [schema.change_schema().empty_table()], [NO_SEQS]
        for old, changes in dead_letters:
            if (images := convert_rows_at_rest(old, schema, changes, value_of)) is not None:
                pieces.append(images)
            else:
                lost.append(changes.column(change.SEQ).to_numpy())
        return cls(changes=pa.concat_tables(pieces).sort_by(change.SEQ), unidentified=np.concatenate(lost))


def split_rejects_of_append(schema: TableSchema, changes: pa.Table, partition_by: Mapping[str, str]) -> SplitResult:
    """Split changes that have every column, for append mode."""
    changes = changes.combine_chunks()
    bad = find_rejectable_rows(schema, changes, partition_by)
    return _split(schema, changes, bad, np.flatnonzero(bad), NO_SEQS, partition_by, EACH_HINT)


def split_rejects_keyless(
    schema: TableSchema, changes: pa.Table, dead: DeadLetterImages, partition_by: Mapping[str, str]
) -> SplitResult:
    """Split changes that are in `_seq` order and have every column, for a keyless table.

    An update is split into the deleted row and the inserted row.
    """
    truncates = np.flatnonzero(pc.equal(changes.column(change.OP), Operation.TRUNCATE.value).to_numpy())
    first = int(truncates[-1]) + 1 if truncates.size else 0
    rows = split_updates(schema, changes.slice(first)).combine_chunks()
    bad = find_rejectable_rows(schema, rows, partition_by)
    all_open = np.concatenate([dead.changes.column(change.SEQ).to_numpy(), dead.unidentified])
    known = dead.changes
    if truncates.size:
        known = known.slice(0, 0)
    fits = ~find_rejectable_rows(schema, known, partition_by)
    rejected, cleared = _match_rejects(schema, known.filter(pa.array(~fits)), rows, np.flatnonzero(bad))
    if fits.any():
        deletes = pc.equal(rows.column(change.OP), Operation.DELETE.value).to_numpy()
        matched, cleared_by_deletes = _match_deletes(
            schema, known.filter(pa.array(fits)), rows, np.flatnonzero(deletes & ~bad)
        )
        bad[matched], cleared = True, np.concatenate([cleared, cleared_by_deletes])
    split = _split(schema, rows, bad, rejected, all_open if truncates.size else cleared, partition_by, IMAGE_HINT)
    if not truncates.size:
        return split
    return SplitResult(
        changes=pa.concat_tables([changes.slice(first - 1, 1), split.changes]),
        dead_letters=split.dead_letters,
        causes=split.causes,
        cleared=split.cleared,
    )


def split_updates(schema: TableSchema, changes: pa.Table) -> pa.Table:
    """Split each update of a keyless table into a delete and an insert, put last."""
    updates = pc.equal(changes.column(change.OP), Operation.UPDATE.value)
    changed = changes.filter(updates)
    if not changed.num_rows:
        return changes
    before = one_array(changed.column(change.BEFORE))
    if before.null_count or changes.column(change.UNCHANGED).null_count < changes.num_rows:
        fold(schema, changes)  # raises the error
    unfit = one_array(changed.column(change.UNFIT))
    deletes = _with(changed, change.OP, pa.array([Operation.DELETE.value] * changed.num_rows))
    for i, column in enumerate(schema.columns):
        deletes = _with(deletes, change.stored_name(column.name), pc.struct_field(before, [i]))
    deletes = _with(deletes, change.UNFIT, old_unfit(schema, unfit))
    inserts = _with(changed, change.OP, pa.array([Operation.INSERT.value] * changed.num_rows))
    inserts = _with(inserts, change.UNFIT, own_unfit(schema, unfit))
    return pa.concat_tables([changes.filter(pc.invert(updates)), deletes, inserts])


def _with(changes: pa.Table, name: str, values: Any) -> pa.Table:
    index = changes.schema.get_field_index(name)
    return changes.set_column(index, changes.schema.field(index), values)


def find_rejectable_rows(schema: TableSchema, rows: pa.Table, partition_by: Mapping[str, str]) -> Flags:
    """Flag rows with a value that the table cannot hold."""
    unfit, _ = unfit_rows(schema, rows)
    unstorable, _ = find_unstorable_rows(schema, _own(schema, rows), rows.num_rows, partition_by)
    return unfit | unstorable


def _own(schema: TableSchema, rows: pa.Table) -> list[Any]:
    return [rows.column(change.stored_name(column.name)) for column in schema.columns]


def _match_rejects(schema: TableSchema, dead: pa.Table, rows: pa.Table, bad: Ints) -> tuple[Ints, Ints]:
    """Return rejects that become dead letters, and the `_seq` of dead letters that others cleared."""
    rejects = rows.take(pa.array(bad))
    deletes = pc.equal(rejects.column(change.OP), Operation.DELETE.value).to_numpy()
    # An update deletes its old row first, in whatever order the two rows are here.
    order = np.lexsort((~deletes, rejects.column(change.SEQ).to_numpy()))
    numbers = _numbers(schema, dead, rejects)
    waiting = defaultdict[int, deque[int]](deque)
    for index, number in enumerate(numbers[: dead.num_rows].tolist()):
        waiting[number].append(~index)
    cleared = list[int]()
    for index in order.tolist():
        same_image = waiting[int(numbers[dead.num_rows + index])]
        if not deletes[index]:
            same_image.append(index)
        elif same_image and (matched := same_image.popleft()) < 0:
            cleared.append(~matched)
    remaining = sorted(index for indices in waiting.values() for index in indices if index >= 0)
    return bad[np.array(remaining, np.int64)], dead.column(change.SEQ).to_numpy()[np.array(cleared, np.int64)]


def _match_deletes(schema: TableSchema, dead: pa.Table, rows: pa.Table, deletes: Ints) -> tuple[Ints, Ints]:
    """Return deletes that match dead letters, and the `_seq` of those."""
    numbers = _numbers(schema, dead, rows.take(pa.array(deletes)))
    waiting = defaultdict[int, deque[int]](deque)
    for index, number in enumerate(numbers[: dead.num_rows].tolist()):
        waiting[number].append(index)
    pairs = [
        (index, waiting[number].popleft())
        for index, number in zip(deletes.tolist(), numbers[dead.num_rows :].tolist(), strict=True)
        if waiting[number]
    ]
    matched, cleared = (
        (np.array(indices, np.int64) for indices in zip(*pairs, strict=True)) if pairs else (NO_SEQS, NO_SEQS)
    )
    return matched, dead.column(change.SEQ).to_numpy()[cleared]


def _numbers(schema: TableSchema, dead: pa.Table, rows: pa.Table) -> Ints:
    """Number equal images equally, by all values and the texts of unfit ones."""
    if not dead.num_rows + rows.num_rows:
        return NO_SEQS
    columns = [
        pa.chunked_array([*as_type(mine, column.type).chunks, *as_type(theirs, column.type).chunks], column.type)
        for column, mine, theirs in zip(schema.columns, _own(schema, dead), _own(schema, rows), strict=True)
    ]
    unfit = [own_unfit(schema, one_array(piece.column(change.UNFIT))) for piece in (dead, rows)]
    return image_numbers([*columns, pa.chunked_array(unfit, change.UNFIT_TYPE)]).numbers


def _split(
    schema: TableSchema,
    rows: pa.Table,
    bad: Flags,
    rejected: Ints,
    cleared: Ints,
    partition_by: Mapping[str, str],
    hint: str,
) -> SplitResult:
    applicable = rows.filter(pa.array(~bad))
    return SplitResult(
        changes=_with(applicable, change.UNFIT, pa.nulls(applicable.num_rows, change.UNFIT_TYPE)),
        dead_letters=rows.take(pa.array(rejected)),
        cleared=cleared,
        causes=[unfit_cause(schema, rows, row, partition_by, hint) for row in rejected.tolist()],
    )
