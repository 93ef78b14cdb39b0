"""How a load ends: one commit of everything that was staged, at the position just before the replay."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pyarrow as pa

from tailrace.deadletters.store import CAUSE, Letters
from tailrace.deadletters.store import Origin as LettersOrigin
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
from tailrace.pipeline.loads.running_load import Load
from tailrace.pipeline.tables.registry import Lives, TableLife
from tailrace.tables.delta.table import DeltaRsTable
from tailrace.tables.iceberg.table import IcebergTable
from tailrace.tables.port import Cursor
from tailrace.tables.spec import Origin, TableMode
from tailrace.tables.staging import StagedFile
from tailrace.tasks.load_dead_letters import refuse_too_many
from tailrace.tasks.load_store import LoadMode, Seed
from tailrace.tasks.work import LandWork, Outcome, RefreshWork, land_table, refresh_table

log = logging.getLogger(__name__)

Looked = DeltaRsTable | IcebergTable

Run = Callable[[Callable[[Any], Outcome], Sequence[Any]], list[Outcome]]
"""Runs a task for each piece of work, on Spark."""


def run_one(run: Run, task: Callable[[Any], Outcome], work: Any, life: TableLife) -> Outcome:
    """One piece of work on a table; that its worker was killed is an outcome too, of which the table says the rest."""
    try:
        return run(task, [work])[0]
    except Exception as error:
        life.doubt()
        said = TableFailed(f"a task died: {type(error).__name__}", table=life.table, hint="It is tried again.")
        return Outcome(table=life.table, error=said)


def start_of(lives: Lives, seed: Seed) -> Lsn:
    """What the replay starts after: the exported snapshot's point, or just before the first transaction in the
    log that the noted snapshot did not see."""
    if seed.point is not None:
        return seed.point
    noted = seed.noted
    assert noted is not None, "one of the two"
    index = lives.index
    first, last = index.commit_at(noted.floor) + 1, min(index.commit_at(noted.upto) + 1, index.commit)
    numbers = lives.numbers_of(seed.plan.schema)
    starts = [noted.upto]
    for batch in lives.log.read(first, last, tables=numbers) if numbers and first <= last else ():
        rows = pa.Table.from_batches([batch.completed()]).select([change.POSITION, change.TX])
        for pair in rows.group_by([change.POSITION, change.TX]).aggregate([]).to_pylist():
            at = Lsn.parse(pair[change.POSITION])
            if at > noted.floor and not noted.sees(pair[change.TX]):
                starts.append(Lsn(at.value - 1))
    return min(starts)


def cursor_after(lives: Lives, load: Load, start: Lsn) -> Cursor:
    """Where the table stands once the load has landed; to be asked while nobody else is at work on it.

    What a load leaves as it is, because only a part was read, is no newer than the table: the log is gone through
    from there.
    """
    life, there = load.life, replace(lives.cursor_at(start), load=load.seed.id)
    if load.where is None or life.cursor is None:
        return there
    if lives.needs_all(life):
        raise SourceRewritten(
            "the table has to be loaded as a whole", table=life.table, hint="That is begun by itself."
        )
    return replace(life.cursor, load=load.seed.id) if life.cursor.position < start else there


def last_seen(lives: Lives, load: Load, start: Lsn) -> Lsn:
    """The newest that any row of the table may be once the load has landed."""
    seen = [start, *(staged.seen for staged in load.staged.values())]
    life = load.life
    if load.where is not None and life.cursor is not None:
        # The rows that stay are as new as the table, or as what was read of it that the log has not passed.
        earlier = lives.seeds.mixed_until(life.cursor.load, life.cursor.position) if life.cursor.load else None
        seen += [life.cursor.position, earlier or start]
    return max(seen)


def commit(lives: Lives, load: Load, cursor: Cursor, run: Run) -> Cursor:
    """Put what was staged into the table; returns where that stands now.

    A worker may die, or a disk fill up, just after the commit: what the table itself says is so.
    """
    table = load.life.place.look()
    now = load.life.cursor.load if load.life.cursor is not None else None
    letters = Letters(lives.log.path, load.life.table)
    refreshes, form = _refreshes(table, load), load.life.place.form
    # What every change or version is kept of is added to, and still lacks what its letters hold.
    adds = refreshes and form.exact
    whole, late = load.where is None and not adds, None
    with suppress(TailraceError):  # of a table that cannot be told all is replaced, and its letters with it
        late = table.late()
    letters.before_load(load.seed.id, whole=whole, now=now, seq=cursor.seq, late=late)
    if adds and load.life.cursor is not None:
        letters.void(load.life.cursor.seq)
    if adds and form.mode is TableMode.HISTORY:
        letters.pass_by_load(load.seed.id, load.seed.plan.schema, cursor.seq)
    _keep_letters(lives, load, letters, cursor)
    try:
        _commit(lives, load, cursor, run, refreshes=refreshes)
    except TailraceError as error:
        with suppress(TailraceError):
            if (found := table.cursor()) is not None and found.load == load.seed.id:
                return found
        raise error
    found = table.cursor()
    assert found is not None, "just landed"
    return found


def _keep_letters(lives: Lives, load: Load, letters: Letters, cursor: Cursor) -> None:
    """Rows that the load could not bring are letters of the table once it has landed."""
    rows = lives.seeds.letters(load.seed.id, [load.staged[number] for number in sorted(load.staged)])
    if not rows:
        return
    count = sum(bundle.rows.num_rows for bundle in rows)
    refuse_too_many(load.seed.plan.schema, count, rows[0].rows.column(CAUSE)[0].as_py())
    letters.write_load(load.seed.id, cursor.seq, rows, LettersOrigin(load.origin.seq, load.origin.position))
    log.warning(
        "rows of a load set aside as dead letters",
        extra={"table": str(load.life.table), "letters": count, "see": "tailrace dead-letters FILE list"},
    )


def _refreshes(table: Looked, load: Load) -> bool:
    """Whether a load is written as what differs, and not as all that the table holds; of a table that keeps the past
    never instead of that, unless it has another shape or form, that could not be carried over, and a person has asked
    for it."""
    life, shape = load.life, None
    if load.mode is LoadMode.REFRESH or load.where or life.place.form.retains:
        # One that was changed by others is not to be built on, and whoever asked was told that it is replaced.
        with suppress(FormChanged, *([ForeignWrite, TableUnusable] if load.seed.wish is not None else [])):
            shape = table.shape()
    return shape is not None and shape.same_rows(load.seed.plan.schema)


def _commit(lives: Lives, load: Load, cursor: Cursor, run: Run, *, refreshes: bool) -> None:
    life, plan = load.life, load.seed.plan
    if refreshes:
        work = RefreshWork(
            schema=plan.schema,
            place=life.place,
            log=lives.log.path,
            seed=load.seed.id,
            partial=load.where is not None,
            cursor=cursor,
            origin=load.origin,
        )
        outcome = run_one(run, refresh_table, work, life)
        if outcome.error is not None:
            raise outcome.error
        return
    if load.where is not None:
        raise Unsupported(
            "a part of the table cannot be read again: the table is not there, or has another shape",
            table=life.table,
            hint="Run it without --where: the whole table is loaded.",
        )
    assert load.complete, "a load lands with all its chunks"
    files = [file for number in sorted(load.staged) for file in load.staged[number].files]
    land(run, life, plan.schema, files, cursor, load.origin)


def land(
    run: Run,
    life: TableLife,
    schema: TableSchema,
    files: Sequence[StagedFile],
    cursor: Cursor,
    origin: Origin | None = None,
) -> None:
    """Make staged files all that a table holds: here, or where Spark is if only that can commit."""
    place = life.place
    if place.catalog is None:
        place.open().land(schema, files, cursor, origin=origin)
        return
    work = LandWork(schema=schema, place=place, files=tuple(files), cursor=cursor, origin=origin)
    outcome = run_one(run, land_table, work, life)
    if outcome.error is not None:
        raise outcome.error
