"""Preview evolution: what a run would do to each lake table, for `tailrace evolve --dry-run`.

The reason may be a schema change at the source, or a change in the settings.
"""

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

COMPARED, ADDED_AGAIN = "keep the past and write changed rows", "keep the past and add every row again as `read`"
"""Steps of a load into a table that keeps the past."""
_AT_A_CHANGE = (ValueUnfit.code, BaseRowMissing.code)


def preview(settings: PipelineSettings) -> tuple[TableEvolution, ...]:
    """Return what would be done to every loaded table; nothing is changed.

    Tables that are stopped for another reason are included.
    """
    log = ChangeLog.open(settings.log.path)
    source = open_source_for_log(settings, log)
    registry = TableRegistry(log, settings.tables.layout, logs_changes=False)
    registry.refresh_index()
    at_source = {table.table: table for table in source.tables()}
    gone = {schema.table for schema in _known_schemas(log) if settings.has(schema.table)} - at_source.keys()
    current, stored = source.describe(at_source, unpublished=True), read_status_file(log.path)
    previews = []
    for table in sorted({*at_source, *gone}):
        managed = registry.add(table, at_source.get(table), settings.load.mode_of(table))
        if managed.error is not None and not isinstance(managed.error, SchemaChanged):
            previews.append(_stopped(managed.table, managed.error))
        elif managed.applied_position is not None and managed.schema is not None:
            schemas = [*_pending_schemas(registry, managed), *([current[table]] if table in current else [])]
            planned = _evolution(settings, managed, schemas, source.parse_value, gone=table in gone)
            stopped = planned.action in ("apply", "refresh") and _stopped_at_change(
                settings, registry, stored.get(table), table
            )
            previews.append(stopped or planned)
    return tuple(previews)


def _stopped_at_change(
    settings: PipelineSettings, registry: TableRegistry, entry: Mapping[str, Any] | None, table: TableId
) -> TableEvolution | None:
    """Return a `stop` for a table that fails at a change before its new schema.

    Only a load gets past that change.
    """
    if entry is None or entry["state"] != TableState.FAILED.value or entry["reason"] not in _AT_A_CHANGE:
        return None
    if settings.tables.dead_letters_enabled(table) or any(
        request.table == table for request in registry.load_store.requests()
    ):
        return None
    return TableEvolution(schema=table.schema, table=table.name, action="stop", why=entry["detail"], hint=entry["hint"])


def _known_schemas(log: ChangeLog) -> Iterator[TableSchema]:
    """Yield every schema that the log has seen."""
    return (version.schema for version in log.schemas.versions_after(0))


def _pending_schemas(registry: TableRegistry, managed: ManagedTable) -> Iterator[TableSchema]:
    """Yield the schemas of changes that are not applied yet, in order."""
    assert managed.schema is not None, "a loaded table"
    for item in registry.pending(managed, registry.index.last_commit):
        yield registry.schema_of_slice(managed.schema, item)


def _schema_error(managed: ManagedTable, schema: TableSchema) -> TableUnusable | None:
    """Return the error that prevents the lake table from having this schema."""
    try:
        managed.location.spec.stored_schema(schema)
    except TableUnusable as error:
        return error
    return None


def _stopped(table: TableId, error: TailraceError) -> TableEvolution:
    return TableEvolution(schema=table.schema, table=table.name, action="stop", why=error.headline, hint=error.hint)


def _widened_columns(spec: TableSpec, old: TableSchema, new: TableSchema) -> Iterator[str]:
    """Yield columns whose values are rewritten with a wider type, beyond the recast's own steps."""
    for item in compare_schemas(old, new).changes:
        if item.kind is SchemaChangeKind.RETYPE:
            was, now = column_of(old, new, str(item.column))
            if was.type != now.type:
                yield f"widen {spec.lake_name(now.name)}"


def _kept_columns(columns: set[str], before: TableSchema, recast: Recast) -> Iterator[str]:
    """Yield columns that the source no longer has and that newly stay.

    `columns` becomes the columns that the table has after this step.
    """
    plan = plan_columns(dict.fromkeys(columns, pa.null()), recast)
    for column, old in list(zip(plan.columns, plan.source_names, strict=True))[len(recast.schema.columns) :]:
        if old not in recast.kept_apart and (old in before.names or old != column.name):
            yield f"keep {old}, which the source no longer has" + (f", as {column.name}" if column.name != old else "")
    columns.clear()
    columns.update(column.name for column in plan.columns)


def _reload_refusal(step: ReloadNeeded, carried: Recast | SchemaChanged | None) -> tuple[str, str]:
    """Return why a table is not reloaded automatically, and a hint."""
    if isinstance(carried, SchemaChanged):
        return f"it must be reloaded: {carried.fields['change']}", carried.hint
    return f"it must be reloaded: {step.why}", RELOAD_HINT


def _evolution(
    settings: PipelineSettings, managed: ManagedTable, schemas: list[TableSchema], value_of: ParseValue, *, gone: bool
) -> TableEvolution:
    assert managed.schema is not None, "a loaded table"
    current, steps, action, hint = managed.schema, list[str](), "none", None
    columns = set(managed.location.open_for_reading().columns())
    policies, spec = settings.tables.policies_of(managed.table), managed.location.spec
    why = "the source no longer has this table" if gone else None
    if not all(schema.columns for schema in schemas):
        schemas, why = [schema for schema in schemas if schema.columns], "no publication has this table"
    if managed.load_only:
        schemas, why = [], "it is loaded once, and changes are not applied"
    for schema in schemas:
        step = plan_evolution(current, schema, policies, value_of, spec) if is_newer_version(current, schema) else None
        if step is None:
            continue
        if not isinstance(step, SchemaChanged) and (refused := _schema_error(managed, step.schema)) is not None:
            action, why, hint = "stop", refused.headline, refused.hint
            break
        if isinstance(step, Recast):
            before, current = current, step.schema
            if before == current:
                continue  # the new version only adds details
            action = "apply"
            own = recast_for_spec(spec, step)
            descriptions = (
                *own.descriptions,
                *_kept_columns(columns, spec.stored_schema(before), own),
                *_widened_columns(spec, before, current),
            )
            steps += descriptions or ("record the new schema; no row changes",)
        elif isinstance(step, ReloadNeeded):
            action, why = "refresh", step.why if action != "refresh" else why
            # A table that keeps every change takes every schema on its way to the load; others take only the last.
            to = step.schema if spec.needs_exact_load else schemas[-1]
            carried = (
                carry_over(spec, current, to, policies, value_of)
                if spec.keeps_past and not managed.may_refetch
                else None
            )
            if managed.may_refetch or isinstance(carried, SchemaChanged):
                action, (why, hint) = "stop", _reload_refusal(step, carried)
            if not isinstance(carried, Recast):
                break
            if (refused := _schema_error(managed, carried.schema)) is not None:
                action, why, hint = "stop", refused.headline, refused.hint
                break
            own = recast_for_spec(spec, carried)
            steps, current = (
                [*steps, *own.descriptions, *_kept_columns(columns, spec.stored_schema(current), own)],
                carried.schema,
            )
            if not spec.needs_exact_load:
                break
        else:
            action, why, hint = "stop", str(step.fields["change"]), step.hint
            break
    if action == "refresh" and spec.keeps_past:
        steps.append(ADDED_AGAIN if spec.mode is TableMode.APPEND else COMPARED)
    return TableEvolution(
        schema=managed.table.schema, table=managed.table.name, action=action, steps=tuple(steps), why=why, hint=hint
    )
