"""What `tailrace evolve --dry-run` tells: what would be done to each lake table for what became of its source, or of
the settings that say what it is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pyarrow as pa

from tailrace.changelog.read.reader import ChangeLog
from tailrace.errors import BaseRowMissing, SchemaChanged, TableUnusable, TailraceError, ValueUnfit
from tailrace.model.evolution import SchemaChangeKind, compare_schemas, is_newer_version
from tailrace.model.schema import TableId, TableSchema
from tailrace.pipeline.capture.source_factory import open_source_for_log
from tailrace.pipeline.config.settings import PipelineSettings
from tailrace.pipeline.report import TableEvolution, TableState
from tailrace.pipeline.status import read_status_file
from tailrace.pipeline.tables.managed_table import ManagedTable
from tailrace.pipeline.tables.registry import TableRegistry
from tailrace.tables.evolve.carry_over import carry_over
from tailrace.tables.evolve.recast_columns import plan_columns
from tailrace.tables.evolve.schema_plan import ParseValue, Recast, ReloadNeeded, column_of, plan_evolution
from tailrace.tables.fold.by_mode import recast_for_spec
from tailrace.tables.schema_errors import RELOAD_HINT
from tailrace.tables.spec import TableMode, TableSpec

COMPARED, ADDED_AGAIN = "keep the past, and write what differs", "keep the past, and add every row as `read`"
"""How a load lands in a table that keeps the past."""
_AT_A_CHANGE = (ValueUnfit.code, BaseRowMissing.code)


def preview(settings: PipelineSettings) -> tuple[TableEvolution, ...]:
    """Every loaded table, and what would become of it; and those that stand still, whatever becomes of their source.
    Nothing is touched."""
    log = ChangeLog.open(settings.log.path)
    source = open_source_for_log(settings, log)
    lives = TableRegistry(log, settings.tables.layout, tells=False)
    lives.refresh_index()
    there = {table.table: table for table in source.tables()}
    gone = {shape.table for shape in _known(log) if settings.has(shape.table)} - there.keys()
    now, noted = source.describe(there, unpublished=True), read_status_file(log.path)
    found = []
    for table in sorted({*there, *gone}):
        life = lives.add(table, there.get(table), settings.load.mode_of(table))
        if life.error is not None and not isinstance(life.error, SchemaChanged):
            found.append(_stopped(life.table, life.error))
        elif life.applied_position is not None and life.schema is not None:
            shapes = [*_told(lives, life), *([now[table]] if table in now else [])]
            would = _evolution(settings, life, shapes, source.parse_value, gone=table in gone)
            stuck = would.action in ("apply", "refresh") and _stuck(settings, lives, noted.get(table), table)
            found.append(stuck or would)
    return tuple(found)


def _stuck(
    settings: PipelineSettings, lives: TableRegistry, note: Mapping[str, Any] | None, table: TableId
) -> TableEvolution | None:
    """That a table has failed at a change, and will again before it comes to its new shape: a load passes it."""
    if note is None or note["state"] != TableState.FAILED.value or note["reason"] not in _AT_A_CHANGE:
        return None
    if settings.tables.dead_letters_enabled(table) or any(wish.table == table for wish in lives.load_store.requests()):
        return None
    return TableEvolution(schema=table.schema, table=table.name, action="stop", why=note["detail"], hint=note["hint"])


def _known(log: ChangeLog) -> Iterator[TableSchema]:
    """Every shape that the log has seen."""
    return (version.schema for version in log.schemas.versions_after(0))


def _told(lives: TableRegistry, life: ManagedTable) -> Iterator[TableSchema]:
    """The shapes of changes that are not applied yet, in order."""
    assert life.schema is not None, "a loaded table"
    for item in lives.pending(life, lives.index.last_commit):
        yield lives.schema_of_slice(life.schema, item)


def _refused(life: ManagedTable, shape: TableSchema) -> TableUnusable | None:
    """Why the lake table cannot be made of the new shape."""
    try:
        life.location.spec.stored_schema(shape)
    except TableUnusable as error:
        return error
    return None


def _stopped(table: TableId, error: TailraceError) -> TableEvolution:
    return TableEvolution(schema=table.schema, table=table.name, action="stop", why=error.headline, hint=error.hint)


def _widened(form: TableSpec, old: TableSchema, new: TableSchema) -> Iterator[str]:
    """Columns that a recast leaves alone, and whose values are written anew as those of a wider type."""
    for item in compare_schemas(old, new).changes:
        if item.kind is SchemaChangeKind.RETYPE:
            was, now = column_of(old, new, str(item.column))
            if was.type != now.type:
                yield f"widen {form.lake_name(now.name)}"


def _kept(held: set[str], before: TableSchema, recast: Recast) -> Iterator[str]:
    """Columns that the source no longer has and that stay, where that is news. All that the table holds becomes what it
    holds after that."""
    laid = plan_columns(dict.fromkeys(held, pa.null()), recast)
    for column, old in list(zip(laid.columns, laid.source_names, strict=True))[len(recast.schema.columns) :]:
        if old not in recast.kept_apart and (old in before.names or old != column.name):
            yield f"keep {old}, which the source no longer has" + (f", as {column.name}" if column.name != old else "")
    held.clear()
    held.update(column.name for column in laid.columns)


def _refused_load(step: ReloadNeeded, carried: Recast | SchemaChanged | None) -> tuple[str, str]:
    """Why a table is not loaded by itself, and what to do."""
    if isinstance(carried, SchemaChanged):
        return f"it must be loaded anew: {carried.fields['change']}", carried.hint
    return f"it must be loaded anew: {step.why}", RELOAD_HINT


def _evolution(
    settings: PipelineSettings, life: ManagedTable, shapes: list[TableSchema], value_of: ParseValue, *, gone: bool
) -> TableEvolution:
    assert life.schema is not None, "a loaded table"
    here, steps, action, hint = life.schema, list[str](), "none", None
    held = set(life.location.open_for_reading().columns())
    policies, form = settings.tables.policies_of(life.table), life.location.spec
    why = "the source does not have it any more" if gone else None
    if not all(shape.columns for shape in shapes):
        shapes, why = [shape for shape in shapes if shape.columns], "no publication of ours has it"
    if life.load_only:
        shapes, why = [], "it is loaded once, and changes are not applied"
    for shape in shapes:
        step = plan_evolution(here, shape, policies, value_of, form) if is_newer_version(here, shape) else None
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
            own = recast_for_spec(form, step)
            said = (*own.descriptions, *_kept(held, form.stored_schema(before), own), *_widened(form, before, here))
            steps += said or ("note the new shape; no row changes",)
        elif isinstance(step, ReloadNeeded):
            action, why = "refresh", step.why if action != "refresh" else why
            # A table that keeps every change goes through every shape on its way to the load; others do not.
            to = step.schema if form.needs_exact_load else shapes[-1]
            carried = (
                carry_over(form, here, to, policies, value_of) if form.keeps_past and not life.may_refetch else None
            )
            if life.may_refetch or isinstance(carried, SchemaChanged):
                action, (why, hint) = "stop", _refused_load(step, carried)
            if not isinstance(carried, Recast):
                break
            if (refused := _refused(life, carried.schema)) is not None:
                action, why, hint = "stop", refused.headline, refused.hint
                break
            own = recast_for_spec(form, carried)
            steps, here = [*steps, *own.descriptions, *_kept(held, form.stored_schema(here), own)], carried.schema
            if not form.needs_exact_load:
                break
        else:
            action, why, hint = "stop", str(step.fields["change"]), step.hint
            break
    if action == "refresh" and form.keeps_past:
        steps.append(ADDED_AGAIN if form.mode is TableMode.APPEND else COMPARED)
    return TableEvolution(
        schema=life.table.schema, table=life.table.name, action=action, steps=tuple(steps), why=why, hint=hint
    )
