"""Dead letters whose own changes are tried again: in a table of changes, and in a mirror without a key.

There is no key to ask the source by, but a letter holds its change as it came. Once the table has a place for it, it
comes in late: as the row that it would have been, with its own `_seq` and all else that it says of itself; or as one
more copy of its row, which the source still has, for a letter goes with the row that it holds.

What must stay true: a change comes in once. The letters to be cleared are promised under a name before the commit, the
commit bears the name, and so does every one after it. So whoever comes later, after any crash, finds in the table
whether the promise was kept (`Letters.settle`). A commit is made only if the table bears the name that it bore when
that was found out.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from tailrace import failpoints
from tailrace.deadletters.conversion import Refitted, at_rest, refit
from tailrace.deadletters.keyed import unfit_cause
from tailrace.deadletters.keyless import EACH_HINT, IMAGE_HINT, bad_rows
from tailrace.deadletters.store import CAUSE, Bundle, Letters
from tailrace.errors import TailraceError, ValueUnfit
from tailrace.model import change
from tailrace.model.change import Operation
from tailrace.model.schema import TableSchema
from tailrace.storage.files import LogPath
from tailrace.tables.fold.by_mode import fold_into, loaded
from tailrace.tables.fold.fold import Folded
from tailrace.tables.fold.whole_rows import whole_rows
from tailrace.tables.location import Place
from tailrace.tables.port import Cursor
from tailrace.tables.spec import Origin, TableMode
from tailrace.tasks.dead_letters import letter_value
from tailrace.tasks.fold_files import FoldedFiles, write_folded
from tailrace.tasks.work import Outcome, as_ours

_RESHAPED = "the table has other columns by now, and what the row has in them is not known"


@dataclass(frozen=True, kw_only=True)
class LateWork:
    """Bring in the changes of a table's open letters that it has a place for now."""

    log: LogPath
    place: Place
    shape: TableSchema
    expected: Cursor


@dataclass(frozen=True, kw_only=True)
class StageLateWork:
    """The same, as a file that Spark's connector adds."""

    work: LateWork
    path: Path


@dataclass(frozen=True, kw_only=True)
class Promised:
    """What a commit is to bring, and the name that it is to bear; without one there is nothing to bring."""

    late: str | None
    after: str | None
    """The name that the table bears."""
    letters: int = 0


def deliver_late(work: LateWork) -> Outcome:
    """One commit of what may come in, then what became of the letters."""
    started, table, version = time.monotonic(), work.shape.table, None
    try:
        promised, folded = _promise(work)
        if promised.late is not None:
            done = work.place.open().add(work.shape, folded, work.expected, after=promised.after, late=promised.late)
            version = done.version
        left = end_late(work, promised, version)
    except Exception as error:  # the task's boundary
        return Outcome(table=table, error=as_ours(error))
    return Outcome(
        table=table, rows=promised.letters, seconds=time.monotonic() - started, letters=left, version=version
    )


def stage_late(asked: StageLateWork) -> tuple[Promised, FoldedFiles] | TailraceError:
    """What `deliver_late` would add, as a file."""
    form = asked.work.place.form
    try:
        promised, folded = _promise(asked.work)
        return promised, write_folded(asked.path, form.stored(asked.work.shape), folded, form.partition_by)
    except Exception as error:  # the task's boundary
        return as_ours(error)


def end_late(work: LateWork, promised: Promised, version: int | None) -> int:
    """The commit is made, if there was anything to bring: say so, and how many letters are left."""
    failpoints.hit("letters.delivered")
    letters = Letters(work.log, work.shape.table)
    if promised.late is not None:
        letters.keep(promised.late, version)
    letters.tidy(work.expected.seq)
    return letters.count(work.expected.seq)


@dataclass(frozen=True, kw_only=True)
class _Tried:
    """Letters of one step in the shape that the table has now."""

    bundle: Bundle
    good: pa.Table
    """The changes that it can take."""
    causes: dict[int, TailraceError]
    """Why it cannot take the others, by their `_seq`."""


def _promise(work: LateWork) -> tuple[Promised, Folded]:
    """Find out what the table can take, and promise it; letters that it cannot have the cause of now."""
    letters, looked, seq = Letters(work.log, work.shape.table), work.place.look(), work.expected.seq
    after = looked.late()
    letters.settle(work.expected.load, after)
    tried = [_try(work, bundle, looked.columns()) for bundle in letters.open(seq)]
    for one in tried:
        _tell(letters, seq, one)
    seqs = [number for one in tried for number in one.good.column(change.SEQ).to_pylist()]
    folded = _folded(work, tried)
    if not seqs:
        return Promised(late=None, after=after), folded
    late, none = uuid.uuid4().hex, work.shape.change_schema().empty_table()
    letters.write(work.shape, seq, none, [], seqs, there=True, late=late)
    failpoints.hit("letters.promised")
    return Promised(late=late, after=after, letters=len(seqs)), folded


def _try(work: LateWork, bundle: Bundle, held: list[str]) -> _Tried:
    form, shape, seqs = work.place.form, work.shape, bundle.seqs
    each = form.mode is TableMode.APPEND
    hint = EACH_HINT if each else IMAGE_HINT
    if each:
        made = refit(bundle.shape, shape, bundle.changes, letter_value, kept=_kept(work, bundle.shape, held))
    elif (images := at_rest(bundle.shape, shape, bundle.changes, letter_value)) is not None:
        made = Refitted(changes=images, stuck={})
    else:
        cause = ValueUnfit(_RESHAPED, table=shape.table, hint=IMAGE_HINT)
        return _Tried(bundle=bundle, good=shape.change_schema().empty_table(), causes=dict.fromkeys(seqs, cause))
    by = form.partitions_of(shape)
    bad = bad_rows(shape, made.changes, by)
    causes = {seqs[row]: unfit_cause(shape, made.changes, row, by, hint) for row in np.flatnonzero(bad).tolist()}
    for row, (why, column) in made.stuck.items():
        position = made.changes.column(change.POSITION)[row].as_py()
        causes[seqs[row]] = ValueUnfit(why, table=shape.table, column=column, position=position, hint=hint)
        bad[row] = True
    return _Tried(bundle=bundle, good=made.changes.filter(pa.array(~bad)), causes=causes)


def _kept(work: LateWork, shape: TableSchema, held: list[str]) -> set[str]:
    """The letters' columns that only the lake table still has, perhaps put aside under another name."""
    name_of = work.place.form.name_of
    others = set(held) - set(work.place.form.stored(work.shape).names)
    return {
        name
        for name in shape.names
        if any(other == name_of(name) or other.startswith(f"{name_of(name)}__dropped") for other in others)
    }


def _tell(letters: Letters, seq: int, tried: _Tried) -> None:
    """Have letters say why they are still there, where that is news."""
    bundle = tried.bundle
    before = dict(zip(bundle.seqs, bundle.rows.column(CAUSE).to_pylist(), strict=True))
    news = {number: cause for number, cause in tried.causes.items() if cause.headline != before[number]}
    if news:
        rows = bundle.changes.filter(pa.array([number in news for number in bundle.seqs]))
        causes = [news[number] for number in bundle.seqs if number in news]
        letters.write(bundle.shape, seq, rows, causes, [], origin=bundle.origin)


def _folded(work: LateWork, tried: list[_Tried]) -> Folded:
    """All that comes in, as the table takes it."""
    form, shape = work.place.form, work.shape
    none = shape.change_schema().empty_table()
    if form.mode is not TableMode.APPEND:
        came = pa.concat_tables([none, *(one.good for one in tried)])
        return fold_into(form, shape, _with_op(came, Operation.INSERT))
    changes = pa.concat_tables([none, *(_told(one.good, read=False) for one in tried)])
    folded = fold_into(form, shape, changes.sort_by(change.SEQ))
    rows = [folded.rows, *(rows for one in tried for rows in _read_rows(work, one))]
    return replace(folded, rows=pa.concat_tables(rows))


def _read_rows(work: LateWork, tried: _Tried) -> Iterator[pa.Table]:
    """Rows that a load could not bring, as it would have brought them."""
    form, shape, read = work.place.form, work.shape, _told(tried.good, read=True)
    if not read.num_rows:
        return
    stored, said = form.stored(shape), tried.bundle.origin
    position = read.column(change.POSITION)[0].as_py() if said is None else said.position
    # Where it is not on record they come before all that the log has for the table.
    origin = Origin(seq=0 if said is None else said.seq, position=position, read_at=0)
    own = read.select([change.stored_name(name) for name in shape.names]).rename_columns(shape.names)
    rows = loaded(form, shape, own.to_batches(), origin)
    yield whole_rows(stored, pa.Table.from_batches(rows, pa.schema(stored.row_fields()))).rows


def _told(changes: pa.Table, *, read: bool) -> pa.Table:
    """Those that a load has read, or the others."""
    return changes.filter(pa.array((changes.column(change.SEQ).to_numpy() < 0) == read))


def _with_op(changes: pa.Table, operation: Operation) -> pa.Table:
    place = changes.schema.get_field_index(change.OP)
    named = pa.array([operation.value] * changes.num_rows, pa.string())
    return changes.set_column(place, changes.schema.field(place), named)
