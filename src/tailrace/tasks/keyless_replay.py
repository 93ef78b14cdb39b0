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
from tailrace.deadletters.conversion import ConversionResult, convert_rows, convert_rows_at_rest
from tailrace.deadletters.keyed import unfit_cause
from tailrace.deadletters.keyless import EACH_HINT, IMAGE_HINT, find_rejectable_rows
from tailrace.deadletters.store import CAUSE, DeadLetterBatch, DeadLetterStore
from tailrace.errors import TailraceError, ValueUnfit
from tailrace.model import change
from tailrace.model.change import Operation
from tailrace.model.schema import TableSchema
from tailrace.storage.files import LogPath
from tailrace.tables.fold.by_mode import fold_by_mode, with_added_columns
from tailrace.tables.fold.fold import FoldedChanges
from tailrace.tables.fold.whole_rows import whole_rows
from tailrace.tables.location import TableLocation
from tailrace.tables.port import AppliedPosition
from tailrace.tables.spec import LoadOrigin, TableMode
from tailrace.tasks.dead_letters import value_from_text
from tailrace.tasks.fold_files import FoldedFiles, write_folded
from tailrace.tasks.work import Outcome, as_tailrace_error

_RESHAPED = "the table has other columns by now, and what the row has in them is not known"


@dataclass(frozen=True, kw_only=True)
class ReplayChangesWork:
    """Bring in the changes of a table's open letters that it has a place for now."""

    log: LogPath
    location: TableLocation
    schema: TableSchema
    expected: AppliedPosition


@dataclass(frozen=True, kw_only=True)
class StageReplayChangesWork:
    """The same, as a file that Spark's connector adds."""

    work: ReplayChangesWork
    path: Path


@dataclass(frozen=True, kw_only=True)
class ReplayIntent:
    """What a commit is to bring, and the name that it is to bear; without one there is nothing to bring."""

    replay_id: str | None
    previous_replay_id: str | None
    """The name that the table bears."""
    dead_letters: int = 0


def replay_changes(work: ReplayChangesWork) -> Outcome:
    """One commit of what may come in, then what became of the letters."""
    started, table, version = time.monotonic(), work.schema.table, None
    try:
        promised, folded = _record_intent(work)
        if promised.replay_id is not None:
            done = work.location.open().append_rows(
                work.schema, folded, work.expected, after=promised.previous_replay_id, late=promised.replay_id
            )
            version = done.version
        left = confirm_replay(work, promised, version)
    except Exception as error:  # the task's boundary
        return Outcome(table=table, error=as_tailrace_error(error))
    return Outcome(
        table=table, rows=promised.dead_letters, seconds=time.monotonic() - started, dead_letters=left, version=version
    )


def stage_replay_changes(asked: StageReplayChangesWork) -> tuple[ReplayIntent, FoldedFiles] | TailraceError:
    """What `deliver_late` would add, as a file."""
    form = asked.work.location.spec
    try:
        promised, folded = _record_intent(asked.work)
        return promised, write_folded(asked.path, form.stored_schema(asked.work.schema), folded, form.partition_by)
    except Exception as error:  # the task's boundary
        return as_tailrace_error(error)


def confirm_replay(work: ReplayChangesWork, promised: ReplayIntent, version: int | None) -> int:
    """The commit is made, if there was anything to bring: say so, and how many letters are left."""
    failpoints.hit("letters.delivered")
    letters = DeadLetterStore(work.log, work.schema.table)
    if promised.replay_id is not None:
        letters.confirm_replay(promised.replay_id, version)
    letters.remove_closed(work.expected.seq)
    return letters.count(work.expected.seq)


@dataclass(frozen=True, kw_only=True)
class _ReplayAttempt:
    """Letters of one step in the shape that the table has now."""

    bundle: DeadLetterBatch
    accepted: pa.Table
    """The changes that it can take."""
    causes: dict[int, TailraceError]
    """Why it cannot take the others, by their `_seq`."""


def _record_intent(work: ReplayChangesWork) -> tuple[ReplayIntent, FoldedChanges]:
    """Find out what the table can take, and promise it; letters that it cannot have the cause of now."""
    letters, looked, seq = (
        DeadLetterStore(work.log, work.schema.table),
        work.location.open_for_reading(),
        work.expected.seq,
    )
    after = looked.replay_id()
    letters.recover(work.expected.load, after)
    tried = [_try_replay(work, bundle, looked.columns()) for bundle in letters.read_open(seq)]
    for one in tried:
        _record_new_causes(letters, seq, one)
    seqs = [number for one in tried for number in one.accepted.column(change.SEQ).to_pylist()]
    folded = _fold_accepted(work, tried)
    if not seqs:
        return ReplayIntent(replay_id=None, previous_replay_id=after), folded
    late, none = uuid.uuid4().hex, work.schema.change_schema().empty_table()
    letters.write(work.schema, seq, none, [], seqs, there=True, late=late)
    failpoints.hit("letters.promised")
    return ReplayIntent(replay_id=late, previous_replay_id=after, dead_letters=len(seqs)), folded


def _try_replay(work: ReplayChangesWork, bundle: DeadLetterBatch, held: list[str]) -> _ReplayAttempt:
    form, shape, seqs = work.location.spec, work.schema, bundle.seqs
    each = form.mode is TableMode.APPEND
    hint = EACH_HINT if each else IMAGE_HINT
    if each:
        made = convert_rows(
            bundle.schema, shape, bundle.changes, value_from_text, kept=_retained_columns(work, bundle.schema, held)
        )
    elif (images := convert_rows_at_rest(bundle.schema, shape, bundle.changes, value_from_text)) is not None:
        made = ConversionResult(changes=images, blocked={})
    else:
        cause = ValueUnfit(_RESHAPED, table=shape.table, hint=IMAGE_HINT)
        return _ReplayAttempt(
            bundle=bundle, accepted=shape.change_schema().empty_table(), causes=dict.fromkeys(seqs, cause)
        )
    by = form.partitions_of(shape)
    bad = find_rejectable_rows(shape, made.changes, by)
    causes = {seqs[row]: unfit_cause(shape, made.changes, row, by, hint) for row in np.flatnonzero(bad).tolist()}
    for row, (why, column) in made.blocked.items():
        position = made.changes.column(change.POSITION)[row].as_py()
        causes[seqs[row]] = ValueUnfit(why, table=shape.table, column=column, position=position, hint=hint)
        bad[row] = True
    return _ReplayAttempt(bundle=bundle, accepted=made.changes.filter(pa.array(~bad)), causes=causes)


def _retained_columns(work: ReplayChangesWork, shape: TableSchema, held: list[str]) -> set[str]:
    """The letters' columns that only the lake table still has, perhaps put aside under another name."""
    name_of = work.location.spec.lake_name
    others = set(held) - set(work.location.spec.stored_schema(work.schema).names)
    return {
        name
        for name in shape.names
        if any(other == name_of(name) or other.startswith(f"{name_of(name)}__dropped") for other in others)
    }


def _record_new_causes(letters: DeadLetterStore, seq: int, tried: _ReplayAttempt) -> None:
    """Have letters say why they are still there, where that is news."""
    bundle = tried.bundle
    before = dict(zip(bundle.seqs, bundle.rows.column(CAUSE).to_pylist(), strict=True))
    news = {number: cause for number, cause in tried.causes.items() if cause.headline != before[number]}
    if news:
        rows = bundle.changes.filter(pa.array([number in news for number in bundle.seqs]))
        causes = [news[number] for number in bundle.seqs if number in news]
        letters.write(bundle.schema, seq, rows, causes, [], origin=bundle.origin)


def _fold_accepted(work: ReplayChangesWork, tried: list[_ReplayAttempt]) -> FoldedChanges:
    """All that comes in, as the table takes it."""
    form, shape = work.location.spec, work.schema
    none = shape.change_schema().empty_table()
    if form.mode is not TableMode.APPEND:
        came = pa.concat_tables([none, *(one.accepted for one in tried)])
        return fold_by_mode(form, shape, _with_op(came, Operation.INSERT))
    changes = pa.concat_tables([none, *(_from_load(one.accepted, read=False) for one in tried)])
    folded = fold_by_mode(form, shape, changes.sort_by(change.SEQ))
    rows = [folded.rows, *(rows for one in tried for rows in _read_rows(work, one))]
    return replace(folded, rows=pa.concat_tables(rows))


def _read_rows(work: ReplayChangesWork, tried: _ReplayAttempt) -> Iterator[pa.Table]:
    """Rows that a load could not bring, as it would have brought them."""
    form, shape, read = work.location.spec, work.schema, _from_load(tried.accepted, read=True)
    if not read.num_rows:
        return
    stored, said = form.stored_schema(shape), tried.bundle.origin
    position = read.column(change.POSITION)[0].as_py() if said is None else said.position
    # Where it is not on record they come before all that the log has for the table.
    origin = LoadOrigin(seq=0 if said is None else said.seq, position=position, read_at=0)
    own = read.select([change.stored_name(name) for name in shape.names]).rename_columns(shape.names)
    rows = with_added_columns(form, shape, own.to_batches(), origin)
    yield whole_rows(stored, pa.Table.from_batches(rows, pa.schema(stored.row_fields()))).rows


def _from_load(changes: pa.Table, *, read: bool) -> pa.Table:
    """Those that a load has read, or the others."""
    return changes.filter(pa.array((changes.column(change.SEQ).to_numpy() < 0) == read))


def _with_op(changes: pa.Table, operation: Operation) -> pa.Table:
    place = changes.schema.get_field_index(change.OP)
    named = pa.array([operation.value] * changes.num_rows, pa.string())
    return changes.set_column(place, changes.schema.field(place), named)
