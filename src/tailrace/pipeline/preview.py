"""What `tailrace evolve --dry-run` tells: what would be done to each lake table for what became of its source."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from tailrace.changelog.reader import ChangeLog
from tailrace.errors import TailraceError
from tailrace.model.schema import TableSchema
from tailrace.pipeline.life import Lives, TableLife
from tailrace.pipeline.report import TableEvolution
from tailrace.pipeline.settings import PipelineSettings
from tailrace.pipeline.wiring import open_source
from tailrace.tables.evolving import Recast, Refresh, ValueOf, plan


def preview(settings: PipelineSettings) -> tuple[TableEvolution, ...]:
    """Every loaded table, and what would become of it; nothing is touched."""
    log = ChangeLog.open(settings.log.path)
    source = open_source(settings, log.log_id)
    lives = Lives(log, settings.tables.path)
    lives.grow()
    found = []
    for table in sorted(source.tables(), key=lambda table: table.table):
        life = lives.add(table.table, table, settings.load.mode_of(table.table))
        if life.cursor is None or life.shape is None:
            continue
        shapes = [*_told(lives, life)]
        with suppress(TailraceError):  # dropped since
            shapes.append(source.describe(life.table)[0])
        found.append(_evolution(settings, life, shapes, source.value_of))
    return tuple(found)


def _told(lives: Lives, life: TableLife) -> Iterator[TableSchema]:
    """The shapes of changes that are not applied yet, in order."""
    for item in lives.pending(life, lives.index.commit):
        yield lives.log.schemas.get(item.table, item.schema).schema


def _evolution(
    settings: PipelineSettings, life: TableLife, shapes: list[TableSchema], value_of: ValueOf
) -> TableEvolution:
    assert life.shape is not None, "a loaded table"
    here, steps, action, why, hint = life.shape, list[str](), "none", None, None
    for shape in shapes:
        step = plan(here, shape, settings.tables.evolution.policies, value_of) if shape.columns else None
        if step is None:
            continue
        if isinstance(step, Recast):
            action, here = "apply", step.schema
            steps += step.said or ("note the new shape; no row changes",)
        elif isinstance(step, Refresh):
            action, why = "refresh", step.why
            break
        else:
            action, why, hint = "stop", str(step.fields["change"]), step.hint
            break
    return TableEvolution(
        schema=life.table.schema, table=life.table.name, action=action, steps=tuple(steps), why=why, hint=hint
    )
