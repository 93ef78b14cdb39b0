"""How a load ends: one commit of everything that was staged, at the position just before the replay."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pyarrow as pa

from tailrace.deadletters.store import CAUSE, DeadLetterStore
from tailrace.deadletters.store import DeadLetterOrigin as LettersOrigin
from tailrace.errors import (
    ForeignWrite,
    FormChanged,
    SourceRewritten,
    TableFailed,
    TableUnusable,
    TailraceError,
    Unsupported,
)
from tailrace.model import change
from tailrace.model.position import Lsn
from tailrace.model.schema import TableSchema
from tailrace.pipeline.loads.running_load import RunningLoad
from tailrace.pipeline.tables.managed_table import ManagedTable
from tailrace.pipeline.tables.registry import TableRegistry
from tailrace.tables.delta.table import DeltaRsTable
from tailrace.tables.iceberg.table import IcebergTable
from tailrace.tables.port import AppliedPosition
from tailrace.tables.spec import LoadOrigin, TableMode
from tailrace.tables.staging import StagedFile
from tailrace.tasks.load import commit_load, refresh_table
from tailrace.tasks.load_dead_letters import refuse_too_many
from tailrace.tasks.load_store import LoadMode, LoadRecord
from tailrace.tasks.work import CommitLoadWork, Outcome, RefreshWork

log = logging.getLogger(__name__)

OpenedTable = DeltaRsTable | IcebergTable

RunTasks = Callable[[Callable[[Any], Outcome], Sequence[Any]], list[Outcome]]
"""Runs a task for each piece of work, on Spark."""


def run_task(run: RunTasks, task: Callable[[Any], Outcome], work: Any, life: ManagedTable) -> Outcome:
    """One piece of work on a table; that its worker was killed is an outcome too, of which the table says the rest."""
    try:
        return run(task, [work])[0]
    except Exception as error:
        life.mark_outcome_unknown()
        said = TableFailed(f"a task died: {type(error).__name__}", table=life.table, hint="It is tried again.")
        return Outcome(table=life.table, error=said)


def find_load_point(lives: TableRegistry, seed: LoadRecord) -> Lsn:
    """What the replay starts after: the exported snapshot's point, or just before the first transaction in the
    log that the noted snapshot did not see."""
    if seed.snapshot_position is not None:
        return seed.snapshot_position
    noted = seed.barrier
    assert noted is not None, "one of the two"
    index = lives.index
    first, last = index.commit_at(noted.floor) + 1, min(index.commit_at(noted.ceiling) + 1, index.last_commit)
    numbers = lives.log_numbers_of(seed.plan.schema)
    starts = [noted.ceiling]
    for batch in lives.log.read(first, last, tables=numbers) if numbers and first <= last else ():
        rows = pa.Table.from_batches([batch.with_all_columns()]).select([change.POSITION, change.TX])
        for pair in rows.group_by([change.POSITION, change.TX]).aggregate([]).to_pylist():
            at = Lsn.parse(pair[change.POSITION])
            if at > noted.floor and not noted.sees(pair[change.TX]):
                starts.append(Lsn(at.value - 1))
    return min(starts)


def applied_position_after(lives: TableRegistry, load: RunningLoad, start: Lsn) -> AppliedPosition:
    """Where the table stands once the load has landed; to be asked while nobody else is at work on it.

    What a load leaves as it is, because only a part was read, is no newer than the table: the log is gone through
    from there.
    """
    life, there = load.managed, replace(lives.applied_position_at(start), load=load.record.id)
    if load.where is None or life.applied_position is None:
        return there
    if lives.needs_full_load(life):
        raise SourceRewritten(
            "the table has to be loaded as a whole", table=life.table, hint="That is begun by itself."
        )
    return replace(life.applied_position, load=load.record.id) if life.applied_position.position < start else there


def newest_row_position(lives: TableRegistry, load: RunningLoad, start: Lsn) -> Lsn:
    """The newest that any row of the table may be once the load has landed."""
    seen = [start, *(staged.seen_until for staged in load.staged.values())]
    life = load.managed
    if load.where is not None and life.applied_position is not None:
        # The rows that stay are as new as the table, or as what was read of it that the log has not passed.
        earlier = (
            lives.load_store.ahead_until(life.applied_position.load, life.applied_position.position)
            if life.applied_position.load
            else None
        )
        seen += [life.applied_position.position, earlier or start]
    return max(seen)


def finish_load(lives: TableRegistry, load: RunningLoad, cursor: AppliedPosition, run: RunTasks) -> AppliedPosition:
    """Put what was staged into the table; returns where that stands now.

    A worker may die, or a disk fill up, just after the commit: what the table itself says is so.
    """
    table = load.managed.location.open_for_reading()
    now = load.managed.applied_position.load if load.managed.applied_position is not None else None
    letters = DeadLetterStore(lives.log.path, load.managed.table)
    refreshes, form = _refreshes(table, load), load.managed.location.spec
    # What every change or version is kept of is added to, and still lacks what its letters hold.
    adds = refreshes and form.needs_exact_load
    whole, late = load.where is None and not adds, None
    with suppress(TailraceError):  # of a table that cannot be told all is replaced, and its letters with it
        late = table.replay_id()
    letters.before_load(load.record.id, whole=whole, now=now, seq=cursor.seq, late=late)
    if adds and load.managed.applied_position is not None:
        letters.discard_after(load.managed.applied_position.seq)
    if adds and form.mode is TableMode.HISTORY:
        letters.supersede_by_load(load.record.id, load.record.plan.schema, cursor.seq)
    _keep_letters(lives, load, letters, cursor)
    try:
        _commit(lives, load, cursor, run, refreshes=refreshes)
    except TailraceError as error:
        with suppress(TailraceError):
            if (found := table.applied_position()) is not None and found.load == load.record.id:
                return found
        raise error
    found = table.applied_position()
    assert found is not None, "just landed"
    return found


def _keep_letters(lives: TableRegistry, load: RunningLoad, letters: DeadLetterStore, cursor: AppliedPosition) -> None:
    """Rows that the load could not bring are letters of the table once it has landed."""
    rows = lives.load_store.dead_letters(load.record.id, [load.staged[number] for number in sorted(load.staged)])
    if not rows:
        return
    count = sum(bundle.rows.num_rows for bundle in rows)
    refuse_too_many(load.record.plan.schema, count, rows[0].rows.column(CAUSE)[0].as_py())
    letters.write_load_rejects(load.record.id, cursor.seq, rows, LettersOrigin(load.origin.seq, load.origin.position))
    log.warning(
        "rows of a load set aside as dead letters",
        extra={"table": str(load.managed.table), "letters": count, "see": "tailrace dead-letters FILE list"},
    )


def _refreshes(table: OpenedTable, load: RunningLoad) -> bool:
    """Whether a load is written as what differs, and not as all that the table holds; of a table that keeps the past
    never instead of that, unless it has another shape or form, that could not be carried over, and a person has asked
    for it."""
    life, shape = load.managed, None
    if load.mode is LoadMode.REFRESH or load.where or life.location.spec.keeps_past:
        # One that was changed by others is not to be built on, and whoever asked was told that it is replaced.
        with suppress(FormChanged, *([ForeignWrite, TableUnusable] if load.record.request is not None else [])):
            shape = table.schema()
    return shape is not None and shape.same_rows(load.record.plan.schema)


def _commit(
    lives: TableRegistry, load: RunningLoad, cursor: AppliedPosition, run: RunTasks, *, refreshes: bool
) -> None:
    life, plan = load.managed, load.record.plan
    if refreshes:
        work = RefreshWork(
            schema=plan.schema,
            location=life.location,
            log=lives.log.path,
            load_id=load.record.id,
            is_partial=load.where is not None,
            position_after=cursor,
            origin=load.origin,
        )
        outcome = run_task(run, refresh_table, work, life)
        if outcome.error is not None:
            raise outcome.error
        return
    if load.where is not None:
        raise Unsupported(
            "a part of the table cannot be read again: the table is not there, or has another shape",
            table=life.table,
            hint="Run it without --where: the whole table is loaded.",
        )
    assert load.is_complete, "a load lands with all its chunks"
    files = [file for number in sorted(load.staged) for file in load.staged[number].files]
    commit_files(run, life, plan.schema, files, cursor, load.origin)


def commit_files(
    run: RunTasks,
    life: ManagedTable,
    schema: TableSchema,
    files: Sequence[StagedFile],
    cursor: AppliedPosition,
    origin: LoadOrigin | None = None,
) -> None:
    """Make staged files all that a table holds: here, or where Spark is if only that can commit."""
    place = life.location
    if place.catalog is None:
        place.open().commit_load(schema, files, cursor, origin=origin)
        return
    work = CommitLoadWork(schema=schema, location=place, files=tuple(files), position_after=cursor, origin=origin)
    outcome = run_task(run, commit_load, work, life)
    if outcome.error is not None:
        raise outcome.error
