"""Changes that a lake table cannot take, where no key ties them together: tables without one, and tables of changes.

What must stay true: the rows that a table without a key holds and its open letters are together the rows of the source.
A row that does not fit is never in the table, so one that goes takes with it a letter of the same image, the oldest
first, and nothing else; where there is none a person has dropped it. Where the table has got other columns a letter may
fit that did not: then a row that goes takes the letter, though the table may hold copies of it, for it may hold none.

In a table of changes each is a row by itself: one that does not fit is left out, and nothing that comes later makes up
for it. The result does not depend on how the changes were cut into batches.

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
from tailrace.tables.fold.fold import Flags, as_type, fold, old_unfit, own_unfit
from tailrace.tables.fold.row_ids import Ints, image_numbers, one_array
from tailrace.tables.limits import find_unstorable_rows

EACH_HINT = (
    "Mend the row at the source: that comes as a change of its own. Then drop the letter: `tailrace dead-letters FILE "
    "list TABLE --forget`. Or give the column a type that holds the value, and run `tailrace dead-letters FILE replay "
    "TABLE`: this change comes too."
)
IMAGE_HINT = "Mend the row at the source, or delete it: the letter goes with it."


@dataclass(frozen=True, kw_only=True)
class DeadLetterImages:
    """Open letters of a table without a key: their changes in `_seq` order, as rows of the table's shape."""

    changes: pa.Table
    unidentified: Ints
    """`_seq` of those of which nobody can say what they are in that shape: only a TRUNCATE clears them."""

    @classmethod
    def of(
        cls, schema: TableSchema, letters: Iterable[tuple[TableSchema, pa.Table]], value_of: ParseValue = no_value
    ) -> DeadLetterImages:
        """Changes, each with the shape that it is of."""
        pieces, lost = [schema.change_schema().empty_table()], [NO_SEQS]
        for shape, changes in letters:
            if (images := convert_rows_at_rest(shape, schema, changes, value_of)) is not None:
                pieces.append(images)
            else:
                lost.append(changes.column(change.SEQ).to_numpy())
        return cls(changes=pa.concat_tables(pieces).sort_by(change.SEQ), unidentified=np.concatenate(lost))


def split_rejects_of_append(schema: TableSchema, changes: pa.Table, partition_by: Mapping[str, str]) -> SplitResult:
    """Tell changes, which have every column, apart for a table in which each is a row."""
    changes = changes.combine_chunks()
    bad = find_rejectable_rows(schema, changes, partition_by)
    return _apart(schema, changes, bad, np.flatnonzero(bad), NO_SEQS, partition_by, EACH_HINT)


def split_rejects_keyless(
    schema: TableSchema, changes: pa.Table, dead: DeadLetterImages, partition_by: Mapping[str, str]
) -> SplitResult:
    """Tell changes, which stand in `_seq` order and have every column, apart for a table without a key. Each update is
    then the row that went and the row that came."""
    truncates = np.flatnonzero(pc.equal(changes.column(change.OP), Operation.TRUNCATE.value).to_numpy())
    first = int(truncates[-1]) + 1 if truncates.size else 0
    rows = split_updates(schema, changes.slice(first)).combine_chunks()
    bad = find_rejectable_rows(schema, rows, partition_by)
    cleared = np.concatenate([dead.changes.column(change.SEQ).to_numpy(), dead.unidentified])
    known = dead.changes
    if truncates.size:
        known = known.slice(0, 0)
    fits = ~find_rejectable_rows(schema, known, partition_by)
    letters, gone = _matched(schema, known.filter(pa.array(~fits)), rows, np.flatnonzero(bad))
    if fits.any():
        deletes = pc.equal(rows.column(change.OP), Operation.DELETE.value).to_numpy()
        met, more = _met(schema, known.filter(pa.array(fits)), rows, np.flatnonzero(deletes & ~bad))
        bad[met], gone = True, np.concatenate([gone, more])
    found = _apart(schema, rows, bad, letters, cleared if truncates.size else gone, partition_by, IMAGE_HINT)
    if not truncates.size:
        return found
    return SplitResult(
        changes=pa.concat_tables([changes.slice(first - 1, 1), found.changes]),
        dead_letters=found.dead_letters,
        causes=found.causes,
        cleared=found.cleared,
    )


def split_updates(schema: TableSchema, changes: pa.Table) -> pa.Table:
    """The changes of a table without a key, each update as the row that went and the row that came; those last."""
    updates = pc.equal(changes.column(change.OP), Operation.UPDATE.value)
    changed = changes.filter(updates)
    if not changed.num_rows:
        return changes
    before = one_array(changed.column(change.BEFORE))
    if before.null_count or changes.column(change.UNCHANGED).null_count < changes.num_rows:
        fold(schema, changes)  # says what is wrong
    unfit = one_array(changed.column(change.UNFIT))
    went = _with(changed, change.OP, pa.array([Operation.DELETE.value] * changed.num_rows))
    for i, column in enumerate(schema.columns):
        went = _with(went, change.stored_name(column.name), pc.struct_field(before, [i]))
    went = _with(went, change.UNFIT, old_unfit(schema, unfit))
    came = _with(changed, change.OP, pa.array([Operation.INSERT.value] * changed.num_rows))
    came = _with(came, change.UNFIT, own_unfit(schema, unfit))
    return pa.concat_tables([changes.filter(pc.invert(updates)), went, came])


def _with(changes: pa.Table, name: str, values: Any) -> pa.Table:
    place = changes.schema.get_field_index(name)
    return changes.set_column(place, changes.schema.field(place), values)


def find_rejectable_rows(schema: TableSchema, rows: pa.Table, partition_by: Mapping[str, str]) -> Flags:
    """The rows with a value that the table cannot hold."""
    unfit, _ = unfit_rows(schema, rows)
    unheld, _ = find_unstorable_rows(schema, _own(schema, rows), rows.num_rows, partition_by)
    return unfit | unheld


def _own(schema: TableSchema, rows: pa.Table) -> list[Any]:
    return [rows.column(change.stored_name(column.name)) for column in schema.columns]


def _matched(schema: TableSchema, dead: pa.Table, rows: pa.Table, bad: Ints) -> tuple[Ints, Ints]:
    """Which of the bad rows stay letters, and the `_seq` of the letters that went with others of them."""
    some = rows.take(pa.array(bad))
    deletes = pc.equal(some.column(change.OP), Operation.DELETE.value).to_numpy()
    # Of an update the row that went comes first, whichever stands first here.
    order = np.lexsort((~deletes, some.column(change.SEQ).to_numpy()))
    numbers = _numbers(schema, dead, some)
    waiting = defaultdict[int, deque[int]](deque)
    for place, number in enumerate(numbers[: dead.num_rows].tolist()):
        waiting[number].append(~place)
    gone = list[int]()
    for place in order.tolist():
        one = waiting[int(numbers[dead.num_rows + place])]
        if not deletes[place]:
            one.append(place)
        elif one and (known := one.popleft()) < 0:
            gone.append(~known)
    stay = sorted(place for places in waiting.values() for place in places if place >= 0)
    return bad[np.array(stay, np.int64)], dead.column(change.SEQ).to_numpy()[np.array(gone, np.int64)]


def _met(schema: TableSchema, dead: pa.Table, rows: pa.Table, deletes: Ints) -> tuple[Ints, Ints]:
    """Which of the rows that go are those of letters, and the letters' `_seq`."""
    numbers = _numbers(schema, dead, rows.take(pa.array(deletes)))
    waiting = defaultdict[int, deque[int]](deque)
    for place, number in enumerate(numbers[: dead.num_rows].tolist()):
        waiting[number].append(place)
    pairs = [
        (place, waiting[number].popleft())
        for place, number in zip(deletes.tolist(), numbers[dead.num_rows :].tolist(), strict=True)
        if waiting[number]
    ]
    met, gone = (np.array(places, np.int64) for places in zip(*pairs, strict=True)) if pairs else (NO_SEQS, NO_SEQS)
    return met, dead.column(change.SEQ).to_numpy()[gone]


def _numbers(schema: TableSchema, dead: pa.Table, rows: pa.Table) -> Ints:
    """Equal numbers for equal images: all values, and the text of those that do not fit."""
    if not dead.num_rows + rows.num_rows:
        return NO_SEQS
    columns = [
        pa.chunked_array([*as_type(mine, column.type).chunks, *as_type(theirs, column.type).chunks], column.type)
        for column, mine, theirs in zip(schema.columns, _own(schema, dead), _own(schema, rows), strict=True)
    ]
    unfit = [own_unfit(schema, one_array(piece.column(change.UNFIT))) for piece in (dead, rows)]
    return image_numbers([*columns, pa.chunked_array(unfit, change.UNFIT_TYPE)]).numbers


def _apart(
    schema: TableSchema,
    rows: pa.Table,
    bad: Flags,
    letters: Ints,
    cleared: Ints,
    partition_by: Mapping[str, str],
    hint: str,
) -> SplitResult:
    taken = rows.filter(pa.array(~bad))
    return SplitResult(
        changes=_with(taken, change.UNFIT, pa.nulls(taken.num_rows, change.UNFIT_TYPE)),
        dead_letters=rows.take(pa.array(letters)),
        cleared=cleared,
        causes=[unfit_cause(schema, rows, row, partition_by, hint) for row in letters.tolist()],
    )
