"""What `tailrace evolve --dry-run` tells: what would be done to each lake table for what became of its source, or of
the settings that say what it is."""

from __future__ import annotations

from collections.abc import Iterator

from tailrace.changelog.reader import ChangeLog
from tailrace.errors import FormChanged, SchemaChanged, TableUnusable, TailraceError
from tailrace.model.evolution import is_news
from tailrace.model.schema import TableId, TableSchema
from tailrace.pipeline.life import Lives, TableLife
from tailrace.pipeline.report import TableEvolution
from tailrace.pipeline.settings import PipelineSettings, matches
from tailrace.pipeline.wiring import open_source
from tailrace.tables.carrying import carry
from tailrace.tables.evolving import Recast, Refresh, ValueOf, plan
from tailrace.tables.forms import TableMode
from tailrace.tables.shapes import RELOAD_HINT

COMPARED, ADDED_AGAIN = "keep the past, and write what differs", "keep the past, and add every row as `read`"
"""How a load lands in a table that keeps the past."""


def preview(settings: PipelineSettings) -> tuple[TableEvolution, ...]:
    """Every loaded table, and what would become of it; nothing is touched."""
    log = ChangeLog.open(settings.log.path)
    source = open_source(settings, log.log_id)
    lives = Lives(log, settings.tables.layout)
    lives.grow()
    there = {table.table: table for table in source.tables()}
    gone = {shape.table for shape in _known(log) if matches(settings.source, shape.table)} - there.keys()
    now = source.describe(there)
    found = []
    for table in sorted({*there, *gone}):
        life = lives.add(table, there.get(table), settings.load.mode_of(table))
        if life.cursor is not None and life.shape is not None:
            shapes = [*_told(lives, life), *([now[table]] if table in now else [])]
            found.append(_evolution(settings, life, shapes, source.value_of, gone=table in gone))
        elif isinstance(life.error, FormChanged):
            found.append(_stopped(life.table, life.error))
    return tuple(found)


def _known(log: ChangeLog) -> Iterator[TableSchema]:
    """Every shape that the log has seen."""
    return (version.schema for version in log.schemas.after(0))


def _told(lives: Lives, life: TableLife) -> Iterator[TableSchema]:
    """The shapes of changes that are not applied yet, in order."""
    assert life.shape is not None, "a loaded table"
    for item in lives.pending(life, lives.index.commit):
        yield lives.shape_of(life.shape, item)


def _refused(life: TableLife, shape: TableSchema) -> TableUnusable | None:
    """Why the lake table cannot be made of the new shape."""
    try:
        life.place.form.stored(shape)
    except TableUnusable as error:
        return error
    return None


def _stopped(table: TableId, error: TailraceError) -> TableEvolution:
    return TableEvolution(
        schema=table.schema, table=table.name, action="stop", why=error.headline, hint=error.hint
    )


def _refused_load(step: Refresh, carried: Recast | SchemaChanged | None) -> tuple[str, str]:
    """Why a table is not loaded by itself, and what to do."""
    if isinstance(carried, SchemaChanged):
        return f"it must be loaded anew: {carried.fields['change']}", carried.hint
    return f"it must be loaded anew: {step.why}", RELOAD_HINT


def _evolution(
    settings: PipelineSettings, life: TableLife, shapes: list[TableSchema], value_of: ValueOf, *, gone: bool
) -> TableEvolution:
    assert life.shape is not None, "a loaded table"
    here, steps, action, hint = life.shape, list[str](), "none", None
    policies, form = settings.tables.evolution.policies, life.place.form
    why = "the source does not have it any more" if gone else None
    shapes = [shape for shape in shapes if shape.columns]  # one without is made anew, and not published yet
    if life.once:
        shapes, why = [], "it is loaded once, and changes are not applied"
    for shape in shapes:
        step = plan(here, shape, policies, value_of, form) if is_news(here, shape) else None
        if step is None:
            continue
        if not isinstance(step, SchemaChanged) and (refused := _refused(life, step.schema)) is not None:
            action, why, hint = "stop", refused.headline, refused.hint
            break
        if isinstance(step, Recast):
            before, here = here, step.schema
            if before == here:
                continue  # more is known of it, and that is all
            action = "apply"
            steps += step.said or ("note the new shape; no row changes",)
        elif isinstance(step, Refresh):
            action, why = "refresh", step.why if action != "refresh" else why
            # A table that keeps every change goes through every shape on its way to the load; others do not.
            to = step.schema if form.exact else shapes[-1]
            carried = carry(form, here, to, policies, value_of) if form.retains and not life.rereads else None
            if life.rereads or isinstance(carried, SchemaChanged):
                action, (why, hint) = "stop", _refused_load(step, carried)
            if not isinstance(carried, Recast):
                break
            steps, here = [*steps, *carried.said], carried.schema
            if not form.exact:
                break
        else:
            action, why, hint = "stop", str(step.fields["change"]), step.hint
            break
    if action == "refresh" and form.retains:
        steps.append(ADDED_AGAIN if form.mode is TableMode.APPEND else COMPARED)
    return TableEvolution(
        schema=life.table.schema, table=life.table.name, action=action, steps=tuple(steps), why=why, hint=hint
    )
