"""Commit a load: all staged rows in one table commit, at the load point.

The table's own commit decides: if it names the load, the load is committed, even if the worker died right after it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pyarrow as pa

from tailrace.deadletters.step_file import CAUSE, DeadLetterOrigin
from tailrace.deadletters.store import DeadLetterStore
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
"""Runs one Spark task per piece of work."""


def run_task(run: RunTasks, task: Callable[[Any], Outcome], work: Any, managed: ManagedTable) -> Outcome:
    """Run one piece of work on a table.

    A killed worker is a failed outcome; whether it committed is then read from the table.
    """
    try:
        return run(task, [work])[0]
    except Exception as error:
        managed.mark_outcome_unknown()
        failure = TableFailed(
            f"a task died: {type(error).__name__}", table=managed.table, hint="Wait: it is tried again."
        )
        return Outcome(table=managed.table, error=failure)


def find_load_point(registry: TableRegistry, record: LoadRecord) -> Lsn:
    """Return the load point, after which the catch-up starts.

    It is the exported snapshot's position, or the position just before the first transaction in the log that the
    barrier's snapshot did not see.
    """
    if record.snapshot_position is not None:
        return record.snapshot_position
    barrier = record.barrier
    assert barrier is not None, "a chunked load has a barrier"
    index = registry.index
    first, last = index.commit_at(barrier.floor) + 1, min(index.commit_at(barrier.ceiling) + 1, index.last_commit)
    numbers = registry.log_numbers_of(record.plan.schema)
    starts = [barrier.ceiling]
    for batch in registry.log.read(first, last, tables=numbers) if numbers and first <= last else ():
        rows = pa.Table.from_batches([batch.with_all_columns()]).select([change.POSITION, change.TX])
        for pair in rows.group_by([change.POSITION, change.TX]).aggregate([]).to_pylist():
            at = Lsn.parse(pair[change.POSITION])
            if at > barrier.floor and not barrier.sees(pair[change.TX]):
                starts.append(Lsn(at.value - 1))
    return min(starts)


def applied_position_after(registry: TableRegistry, load: RunningLoad, start: Lsn) -> AppliedPosition:
    """Return the table's applied position after the load commit. Call it only while no other work on the table runs.

    A partial load leaves some rows as they are, and these are no newer than the table. So the catch-up starts at the
    table's own position if that is earlier.
    """
    managed, position = load.managed, replace(registry.applied_position_at(start), load=load.record.id)
    if load.where is None or managed.applied_position is None:
        return position
    if registry.needs_full_load(managed):
        raise SourceRewritten(
            "the table must be loaded as a whole", table=managed.table, hint="Wait: that load begins automatically."
        )
    return (
        replace(managed.applied_position, load=load.record.id)
        if managed.applied_position.position < start
        else position
    )


def newest_row_position(registry: TableRegistry, load: RunningLoad, start: Lsn) -> Lsn:
    """Return the newest position of any row in the table after the load commit."""
    seen = [start, *(staged.seen_until for staged in load.staged.values())]
    managed = load.managed
    if load.where is not None and managed.applied_position is not None:
        # Rows that stay are as new as the table, or as an earlier read of them that the log has not passed yet.
        earlier = (
            registry.load_store.ahead_until(managed.applied_position.load, managed.applied_position.position)
            if managed.applied_position.load
            else None
        )
        seen += [managed.applied_position.position, earlier or start]
    return max(seen)


def finish_load(
    registry: TableRegistry, load: RunningLoad, position: AppliedPosition, run: RunTasks
) -> AppliedPosition:
    """Commit the staged rows of a load, and return the table's applied position.

    A worker may die, or a disk fill up, just after the commit. The table's own commit then decides.
    """
    table = load.managed.location.open_for_reading()
    current_load = load.managed.applied_position.load if load.managed.applied_position is not None else None
    store = DeadLetterStore(registry.log.path, load.managed.table)
    writes_difference, spec = _writes_difference(table, load), load.managed.location.spec
    # A load only adds to a table that keeps every change or version; its open dead letters are still missing there.
    adds_only = writes_difference and spec.needs_exact_load
    whole, replay_id = load.where is None and not adds_only, None
    with suppress(TailraceError):  # an unreadable table is replaced, and its dead letters with it
        replay_id = table.replay_id()
    store.before_load(load.record.id, whole=whole, now=current_load, seq=position.seq, replay_id=replay_id)
    if adds_only and load.managed.applied_position is not None:
        store.discard_after(load.managed.applied_position.seq)
    if adds_only and spec.mode is TableMode.HISTORY:
        store.supersede_by_load(load.record.id, load.record.plan.schema, position.seq)
    _store_dead_letters(registry, load, store, position)
    try:
        _commit(registry, load, position, run, writes_difference=writes_difference)
    except TailraceError as error:
        with suppress(TailraceError):
            if (committed := table.applied_position()) is not None and committed.load == load.record.id:
                return committed
        raise error
    committed = table.applied_position()
    assert committed is not None, "just committed"
    return committed


def _store_dead_letters(
    registry: TableRegistry, load: RunningLoad, store: DeadLetterStore, position: AppliedPosition
) -> None:
    """Store the load's rejected rows as dead letters of the table. They count after the load commit."""
    rows = registry.load_store.dead_letters(load.record.id, [load.staged[number] for number in sorted(load.staged)])
    if not rows:
        return
    count = sum(bundle.rows.num_rows for bundle in rows)
    refuse_too_many(load.record.plan.schema, count, rows[0].rows.column(CAUSE)[0].as_py())
    store.write_load_rejects(
        load.record.id, position.seq, rows, DeadLetterOrigin(load.origin.seq, load.origin.position)
    )
    log.warning(
        "rows of a load became dead letters",
        extra={"table": str(load.managed.table), "dead_letters": count, "see": "tailrace dead-letters FILE list"},
    )


def _writes_difference(table: OpenedTable, load: RunningLoad) -> bool:
    """Return whether the load commit writes only differing rows, instead of replacing all rows.

    A table that keeps the past is only replaced if its schema or spec differs and could not be carried over, and a
    person has requested the load.
    """
    managed, schema = load.managed, None
    if load.mode is LoadMode.REFRESH or load.where or managed.location.spec.keeps_past:
        # A table with foreign writes is no base for a difference, and the person who asked knows that it is replaced.
        with suppress(FormChanged, *([ForeignWrite, TableUnusable] if load.record.request is not None else [])):
            schema = table.schema()
    return schema is not None and schema.same_rows(load.record.plan.schema)


def _commit(
    registry: TableRegistry, load: RunningLoad, position: AppliedPosition, run: RunTasks, *, writes_difference: bool
) -> None:
    managed, plan = load.managed, load.record.plan
    if writes_difference:
        work = RefreshWork(
            schema=plan.schema,
            location=managed.location,
            log=registry.log.path,
            load_id=load.record.id,
            is_partial=load.where is not None,
            position_after=position,
            origin=load.origin,
        )
        outcome = run_task(run, refresh_table, work, managed)
        if outcome.error is not None:
            raise outcome.error
        return
    if load.where is not None:
        raise Unsupported(
            "the table cannot be reloaded in part: it does not exist, or has another schema",
            table=managed.table,
            hint="Run it without --where, to reload the whole table.",
        )
    assert load.is_complete, "a load is committed with all its chunks"
    files = [file for number in sorted(load.staged) for file in load.staged[number].files]
    commit_files(run, managed, plan.schema, files, position, load.origin)


def commit_files(
    run: RunTasks,
    managed: ManagedTable,
    schema: TableSchema,
    files: Sequence[StagedFile],
    position: AppliedPosition,
    origin: LoadOrigin | None = None,
) -> None:
    """Replace a table's content with staged files. Runs here, or in a Spark task for a table in a catalog."""
    location = managed.location
    if location.catalog is None:
        location.open().commit_load(schema, files, position, origin=origin)
        return
    work = CommitLoadWork(schema=schema, location=location, files=tuple(files), position_after=position, origin=origin)
    outcome = run_task(run, commit_load, work, managed)
    if outcome.error is not None:
        raise outcome.error
