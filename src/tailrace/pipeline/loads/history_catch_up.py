"""Apply the log to a table that keeps the past, before its load commit.

First the log is applied up to the load point, so that the table has every change once, each in its own schema. Then the
table is recast to the load's schema. Rows that the source rewrote meanwhile come from the load alone. The table never
has a schema that its rows were not carried over to.

A schema that the rows cannot be carried over to stops the table, and so does a schema change with policy `stop`. If a
person has requested the load, only the first of the two ends the catch-up, and the load then replaces all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from tailrace.changelog.read.index import Slice
from tailrace.changelog.read.row_steps import rows_until_position
from tailrace.errors import BaseRowMissing, SchemaChanged
from tailrace.model.position import Lsn
from tailrace.model.schema import TableSchema
from tailrace.pipeline.loads.running_load import RunningLoad, table_changed_error
from tailrace.pipeline.tables.managed_table import ApplyRange, ManagedTable
from tailrace.pipeline.tables.registry import ROWS_PER_APPLY_MAX, TableRegistry
from tailrace.tables.evolve.carry_over import carry_over
from tailrace.tables.evolve.schema_plan import Recast
from tailrace.tables.spec import TableMode

ApplyCallback = Callable[[ManagedTable, ApplyRange], None]
"""Makes one commit of a suspended table, or raises."""


def apply_to_load_point(registry: TableRegistry, load: RunningLoad, point: Lsn, apply: ApplyCallback) -> None:
    """Apply the log to the table up to the load point of a complete load.

    The caller holds the table's lock, and the log has passed the point.
    """
    managed, schema, asked = load.managed, load.record.plan.schema, load.record.request is not None
    registry.refresh_from_table(managed)
    if (end := catch_up_limit(registry, load, point)) is not None:
        if (
            (missing := registry.missing_from(managed)) is not None
            and missing < end
            and not _mark_owed(managed, schema, apply)
        ):
            end = missing
        while (apply_range := _next_range(registry, managed, end, schema, asked=asked)) is not None:
            try:
                apply(managed, apply_range)
            except BaseRowMissing:
                if managed.apply_suspended:
                    raise
                break  # the load has the row
    if (
        load.where is not None
        or not managed.location.spec.keeps_past
        or managed.schema is None
        or managed.applied_position is None
    ):
        return
    if _evolved_past(managed.schema, schema):
        raise table_changed_error(managed.table)
    if (recast := plan_carry_over(registry, managed, schema, asked=asked)) is not None:
        apply(managed, ApplyRange((), managed.applied_position, recast))


def catch_up_limit(registry: TableRegistry, load: RunningLoad, point: Lsn) -> Lsn | None:
    """Return the position up to which the log must be applied before the load commit. None: no catch-up is needed here.

    A table that keeps the past takes from a load only what the log does not have. The catch-up stops at the first gap,
    because later changes may build on rows that are missing. Tables that store changes as they are (`append` mode and
    messages) go past it. A table that failed at anything but a schema change could not apply what follows, so it gets
    no catch-up.
    """
    managed, spec = load.managed, load.managed.location.spec
    can_apply = not load.state_before.is_blocked or isinstance(load.error_before, SchemaChanged)
    suspended = managed.apply_suspended or (spec.soft_delete and registry.has_missing_changes(managed))
    if managed.applied_position is None or managed.load_only or not (suspended and can_apply):
        return None
    missing = None if spec.mode is TableMode.APPEND or spec.holds_messages else registry.missing_from(managed)
    return point if missing is None else min(point, missing)


def _mark_owed(managed: ManagedTable, known: TableSchema, apply: ApplyCallback) -> bool:
    """Mark the table's schema as owing a reload before it passes a gap.

    The mark is needed because the load may never be committed.
    Return False if the schema has no catalogue facts to store the mark in.
    """
    assert managed.applied_position is not None, "a table that was loaded"
    assert managed.schema is not None, "a table that was loaded"
    schema = known if managed.schema.facts is None and managed.schema == known else managed.schema
    if not schema.owed and schema.facts is not None:
        apply(managed, ApplyRange((), managed.applied_position, Recast(schema=schema.with_owed(True))))
    return schema.facts is not None


def _next_range(
    registry: TableRegistry, managed: ManagedTable, point: Lsn, known: TableSchema, *, asked: bool
) -> ApplyRange | None:
    """Return the next range, or None.

    None also means that a schema change ends the catch-up of a requested load. `apply_to_load_point` then decides what
    happens.
    """
    try:
        return next_range_to(registry, managed, point, known, asked=asked)
    except SchemaChanged:
        if asked:
            return None
        raise


def next_range_to(
    registry: TableRegistry, managed: ManagedTable, point: Lsn, known: TableSchema | None = None, *, asked: bool = False
) -> ApplyRange | None:
    """Return the next range of a suspended table up to a position. None when it is there.

    Rows without catalogue facts whose columns are those of `known` take the facts of `known`. If a person has `asked`
    for the load, no evolution policy applies.
    """
    assert managed.applied_position is not None, "a table that was loaded"
    assert managed.schema is not None, "a table that was loaded"
    index = registry.index
    pending = [item for item in registry.pending(managed, index.last_commit) if index.start_of(item.first) < point]
    if managed.applied_position.position >= point or not pending:
        return None
    whole = [item for item in pending if index.end_of(item.last) <= point]
    if not whole:
        pending = list(_slices_before(registry, managed.applied_position.seq, pending, point))
    taken: list[Slice] = []
    for item in whole or pending:
        if taken and whole and sum(other.rows for other in taken) + item.rows > ROWS_PER_APPLY_MAX:
            break
        recast = _recast_before(registry, managed, item, known, asked=asked)
        if recast is not None and taken:
            break
        if recast is not None:
            return ApplyRange((), managed.applied_position, recast)
        taken.append(item)
    if not taken:
        return None
    if not whole and len(taken) == len(pending):
        return ApplyRange(
            tuple(taken), replace(registry.applied_position_at(point), load=managed.applied_position.load), until=point
        )
    return ApplyRange(
        tuple(taken), registry.position_after(managed.applied_position, taken, pending[len(taken) :], taken[-1].last)
    )


def _slices_before(registry: TableRegistry, seq: int, items: list[Slice], point: Lsn) -> Iterator[Slice]:
    """Yield the slices that have rows before the point, from slices that go past it.

    One commit may have several slices of a table, each with its own schema.
    """
    for item in items:
        rows = registry.log.read(item.first, item.last, tables=[item.table], after_seq=seq, to_seq=item.last_seq)
        if any(rows_until_position(batch, point).data.num_rows for batch in rows if batch.data.num_rows):
            yield item
        seq = item.last_seq


def _recast_before(
    registry: TableRegistry, managed: ManagedTable, item: Slice, known: TableSchema | None, *, asked: bool
) -> Recast | None:
    """Return the recast that the table needs before the slice; None if its rows fit.

    The load has what a rewrite at the source did to existing rows; the log has later changes.
    """
    assert managed.schema is not None, "a table that was loaded"
    step = registry.schema_change_before(managed, item)
    if step is None or isinstance(step, Recast):
        return step
    schema = registry.schema_of_slice(managed.schema, item)
    if isinstance(step, SchemaChanged) and (not asked or schema.table != managed.table):
        raise step
    # A row may be sent before the catalogue shows its DDL. The default for older rows would then not be known.
    return _carry_over(
        registry, managed, known if known is not None and schema.facts is None and schema == known else schema
    )


def plan_carry_over(
    registry: TableRegistry, managed: ManagedTable, schema: TableSchema, *, asked: bool
) -> Recast | None:
    """Return the recast that a table needs before a load commit with this schema.

    None: the table has the schema. If a person has `asked` for the load, None also means that the rows cannot be
    carried over; the load then replaces all rows.
    """
    if managed.schema is None or _fits(managed.schema, schema):
        return None
    step = registry.plan_schema_change(managed, schema)
    if isinstance(step, Recast):
        return step
    if isinstance(step, SchemaChanged) and not asked:
        raise step
    try:
        return _carry_over(registry, managed, schema)
    except SchemaChanged:
        if asked:
            return None
        raise


def _carry_over(registry: TableRegistry, managed: ManagedTable, schema: TableSchema) -> Recast | None:
    assert managed.schema is not None, "a table that was loaded"
    if _fits(managed.schema, schema):
        return None
    recast = carry_over(
        managed.location.spec, managed.schema, schema, registry.policies_of(managed.table), registry.value_of
    )
    if isinstance(recast, SchemaChanged):
        raise recast
    return recast


def _fits(schema: TableSchema, other: TableSchema) -> bool:
    """Return whether rows of one schema can be applied to a table of the other."""
    return schema.relation == other.relation and schema.same_rows(other)


def _evolved_past(schema: TableSchema, planned: TableSchema) -> bool:
    """Return whether the table evolved past the schema in which the load read it."""
    if schema.facts is None or planned.facts is None or _fits(schema, planned):
        return False
    return schema.facts.position > planned.facts.position
