"""Replay dead letters without a key. They go into tables in `append` mode, and into mirrors of keyless tables.

There is no key to refetch a row by, but a dead letter holds its change as it was. Once the table can take the change,
it is written late. In `append` mode it becomes the row it would have been, with its own `_seq` and metadata columns. In
a keyless mirror it becomes one more copy of its row. The source still has that row: deleting the row closes the dead
letter.

Invariant: a change is written once, by a two-phase replay. First an intent is stored: a replay id and the dead letters
to clear. Then the table commit carries that id, and so does every later commit. After any crash, recovery
(`DeadLetterStore.recover`) finds in the table whether the commit was made. A commit is made only if the table still has
the replay id that it had when the intent was prepared.
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
from tailrace.deadletters.step_file import CAUSE, DeadLetterBatch
from tailrace.deadletters.store import DeadLetterStore
from tailrace.errors import TailraceError, ValueUnfit
from tailrace.model import change
from tailrace.model.change import Operation
from tailrace.model.schema import TableSchema
from tailrace.storage.files import LogPath
from tailrace.tables.fold.by_mode import fold_by_mode, with_added_columns
from tailrace.tables.fold.folded_changes import FoldedChanges
from tailrace.tables.fold.whole_rows import whole_rows
from tailrace.tables.location import TableLocation
from tailrace.tables.port import AppliedPosition
from tailrace.tables.spec import LoadOrigin, TableMode
from tailrace.tasks.dead_letters import value_from_text
from tailrace.tasks.fold_files import FoldedFiles, write_folded
from tailrace.tasks.work import Outcome, as_tailrace_error

_RESHAPED = "the table has other columns now, and the row's values for them are not known"


@dataclass(frozen=True, kw_only=True)
class ReplayChangesWork:
    """Write the changes of a table's open dead letters that the table can take now."""

    log: LogPath
    location: TableLocation
    schema: TableSchema
    expected: AppliedPosition


@dataclass(frozen=True, kw_only=True)
class StageReplayChangesWork:
    """Write those changes to a file, for Spark's connector to add."""

    work: ReplayChangesWork
    path: Path


@dataclass(frozen=True, kw_only=True)
class ReplayIntent:
    """Replay id for the next table commit, and its number of dead letters."""

    replay_id: str | None
    """Id for the commit; None: there is nothing to replay."""
    previous_replay_id: str | None
    """Replay id that the table has now."""
    dead_letters: int = 0


def replay_changes(work: ReplayChangesWork) -> Outcome:
    """Write changes that the table can take in one commit. Then close their dead letters."""
    started, table, version = time.monotonic(), work.schema.table, None
    try:
        intent, folded = _record_intent(work)
        if intent.replay_id is not None:
            write = work.location.open().append_rows(
                work.schema,
                folded,
                work.expected,
                previous_replay_id=intent.previous_replay_id,
                replay_id=intent.replay_id,
            )
            version = write.version
        still_open = confirm_replay(work, intent, version)
    except Exception as error:  # the task's boundary
        return Outcome(table=table, error=as_tailrace_error(error))
    return Outcome(
        table=table,
        rows=intent.dead_letters,
        seconds=time.monotonic() - started,
        dead_letters=still_open,
        version=version,
    )


def stage_replay_changes(stage_work: StageReplayChangesWork) -> tuple[ReplayIntent, FoldedFiles] | TailraceError:
    """Write the rows that `replay_changes` would add to a file."""
    spec = stage_work.work.location.spec
    try:
        intent, folded = _record_intent(stage_work.work)
        return intent, write_folded(
            stage_work.path, spec.stored_schema(stage_work.work.schema), folded, spec.partition_by
        )
    except Exception as error:  # the task's boundary
        return as_tailrace_error(error)


def confirm_replay(work: ReplayChangesWork, intent: ReplayIntent, version: int | None) -> int:
    """Record that the replay commit was made, if any. Return the number of dead letters still open."""
    failpoints.hit("letters.delivered")
    store = DeadLetterStore(work.log, work.schema.table)
    if intent.replay_id is not None:
        store.confirm_replay(intent.replay_id, version)
    store.remove_closed(work.expected.seq)
    return store.count(work.expected.seq)


@dataclass(frozen=True, kw_only=True)
class _ReplayAttempt:
    """Dead letters of one step, converted to the table's current schema."""

    bundle: DeadLetterBatch
    accepted: pa.Table
    """Changes that the table can take."""
    causes: dict[int, TailraceError]
    """Cause for each other change, by `_seq`."""


def _record_intent(work: ReplayChangesWork) -> tuple[ReplayIntent, FoldedChanges]:
    """Find the changes that the table can take, and store the intent. Update the causes of the others."""
    store, table, seq = (
        DeadLetterStore(work.log, work.schema.table),
        work.location.open_for_reading(),
        work.expected.seq,
    )
    previous_replay_id = table.replay_id()
    store.recover(work.expected.load, previous_replay_id)
    attempts = [_try_replay(work, bundle, table.columns()) for bundle in store.read_open(seq)]
    for attempt in attempts:
        _record_new_causes(store, seq, attempt)
    seqs = [number for attempt in attempts for number in attempt.accepted.column(change.SEQ).to_pylist()]
    folded = _fold_accepted(work, attempts)
    if not seqs:
        return ReplayIntent(replay_id=None, previous_replay_id=previous_replay_id), folded
    replay_id, empty = uuid.uuid4().hex, work.schema.change_schema().empty_table()
    store.write(work.schema, seq, empty, [], seqs, already_applied=True, replay_id=replay_id)
    failpoints.hit("letters.promised")
    return ReplayIntent(replay_id=replay_id, previous_replay_id=previous_replay_id, dead_letters=len(seqs)), folded


def _try_replay(work: ReplayChangesWork, bundle: DeadLetterBatch, lake_columns: list[str]) -> _ReplayAttempt:
    spec, schema, seqs = work.location.spec, work.schema, bundle.seqs
    is_append = spec.mode is TableMode.APPEND
    hint = EACH_HINT if is_append else IMAGE_HINT
    if is_append:
        converted = convert_rows(
            bundle.schema,
            schema,
            bundle.changes,
            value_from_text,
            lake_only_columns=_retained_columns(work, bundle.schema, lake_columns),
        )
    elif (images := convert_rows_at_rest(bundle.schema, schema, bundle.changes, value_from_text)) is not None:
        converted = ConversionResult(changes=images, blocked={})
    else:
        cause = ValueUnfit(_RESHAPED, table=schema.table, hint=IMAGE_HINT)
        return _ReplayAttempt(
            bundle=bundle, accepted=schema.change_schema().empty_table(), causes=dict.fromkeys(seqs, cause)
        )
    partition_by = spec.partitions_of(schema)
    rejected = find_rejectable_rows(schema, converted.changes, partition_by)
    causes = {
        seqs[row]: unfit_cause(schema, converted.changes, row, partition_by, hint)
        for row in np.flatnonzero(rejected).tolist()
    }
    for row, (reason, column) in converted.blocked.items():
        position = converted.changes.column(change.POSITION)[row].as_py()
        causes[seqs[row]] = ValueUnfit(reason, table=schema.table, column=column, position=position, hint=hint)
        rejected[row] = True
    return _ReplayAttempt(bundle=bundle, accepted=converted.changes.filter(pa.array(~rejected)), causes=causes)


def _retained_columns(work: ReplayChangesWork, schema: TableSchema, lake_columns: list[str]) -> set[str]:
    """Return columns of the dead letters that only the lake table still has. They may be renamed `…__dropped…`."""
    lake_name = work.location.spec.lake_name
    extra = set(lake_columns) - set(work.location.spec.stored_schema(work.schema).names)
    return {
        name
        for name in schema.names
        if any(other == lake_name(name) or other.startswith(f"{lake_name(name)}__dropped") for other in extra)
    }


def _record_new_causes(store: DeadLetterStore, seq: int, attempt: _ReplayAttempt) -> None:
    """Store the current cause of dead letters whose cause has changed."""
    bundle = attempt.bundle
    old_causes = dict(zip(bundle.seqs, bundle.rows.column(CAUSE).to_pylist(), strict=True))
    new_causes = {number: cause for number, cause in attempt.causes.items() if cause.headline != old_causes[number]}
    if new_causes:
        rows = bundle.changes.filter(pa.array([number in new_causes for number in bundle.seqs]))
        causes = [new_causes[number] for number in bundle.seqs if number in new_causes]
        store.write(bundle.schema, seq, rows, causes, [], origin=bundle.origin)


def _fold_accepted(work: ReplayChangesWork, attempts: list[_ReplayAttempt]) -> FoldedChanges:
    """Fold the accepted changes by the table's mode."""
    spec, schema = work.location.spec, work.schema
    empty = schema.change_schema().empty_table()
    if spec.mode is not TableMode.APPEND:
        images = pa.concat_tables([empty, *(attempt.accepted for attempt in attempts)])
        return fold_by_mode(spec, schema, _with_op(images, Operation.INSERT))
    changes = pa.concat_tables([empty, *(_from_load(attempt.accepted, read=False) for attempt in attempts)])
    folded = fold_by_mode(spec, schema, changes.sort_by(change.SEQ))
    rows = [folded.rows, *(rows for attempt in attempts for rows in _read_rows(work, attempt))]
    return replace(folded, rows=pa.concat_tables(rows))


def _read_rows(work: ReplayChangesWork, attempt: _ReplayAttempt) -> Iterator[pa.Table]:
    """Yield rows that a load rejected, as the load would have written them."""
    spec, schema, read = work.location.spec, work.schema, _from_load(attempt.accepted, read=True)
    if not read.num_rows:
        return
    stored, origin_record = spec.stored_schema(schema), attempt.bundle.origin
    position = read.column(change.POSITION)[0].as_py() if origin_record is None else origin_record.position
    # Without a stored origin, the rows sort before everything that the log has for the table.
    origin = LoadOrigin(seq=0 if origin_record is None else origin_record.seq, position=position, read_at=0)
    values = read.select([change.stored_name(name) for name in schema.names]).rename_columns(schema.names)
    rows = with_added_columns(spec, schema, values.to_batches(), origin)
    yield whole_rows(stored, pa.Table.from_batches(rows, pa.schema(stored.row_fields()))).rows


def _from_load(changes: pa.Table, *, read: bool) -> pa.Table:
    """Return the changes that a load read, or the other ones."""
    return changes.filter(pa.array((changes.column(change.SEQ).to_numpy() < 0) == read))


def _with_op(changes: pa.Table, operation: Operation) -> pa.Table:
    index = changes.schema.get_field_index(change.OP)
    operations = pa.array([operation.value] * changes.num_rows, pa.string())
    return changes.set_column(index, changes.schema.field(index), operations)
