"""How a table that keeps the past comes to where a load of it was read, before the load lands as a difference.

By the log first, so that every change is in it once, in the shape that each has; then to the load's own shape. What the
source wrote anew meanwhile comes with the load alone. The table is never in a shape that its rows were not carried
over to. One that they cannot be carried over to, or that a policy says `stop` for, stops the table unless a person has
asked for the load: then only the first of the two ends what the log brings, and all that the table holds is replaced.
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
"""Makes one commit of a table that stands still, or raises why not."""


def apply_to_load_point(lives: TableRegistry, load: RunningLoad, point: Lsn, take: ApplyCallback) -> None:
    """Bring the table to a load that was read whole; whoever calls holds its lock, and the log has passed the point."""
    life, schema, asked = load.managed, load.record.plan.schema, load.record.request is not None
    lives.refresh_from_table(life)
    if (end := catch_up_limit(lives, load, point)) is not None:
        if (lacks := lives.missing_from(life)) is not None and lacks < end and not _says_owed(life, schema, take):
            end = lacks
        while (stretch := _next_range(lives, life, end, schema, asked=asked)) is not None:
            try:
                take(life, stretch)
            except BaseRowMissing:
                if life.apply_suspended:
                    raise
                break  # the load has the row
    if (
        load.where is not None
        or not life.location.spec.keeps_past
        or life.schema is None
        or life.applied_position is None
    ):
        return
    if _went_past(life.schema, schema):
        raise table_changed_error(life.table)
    if (recast := plan_carry_over(lives, life, schema, asked=asked)) is not None:
        take(life, ApplyRange((), life.applied_position, recast))


def catch_up_limit(lives: TableRegistry, load: RunningLoad, point: Lsn) -> Lsn | None:
    """How far the table must come towards the load's point by the log; None: not at all, or it does so by itself.

    Of a table that keeps what the source no longer has a load brings only what the log does not tell. Where the log
    lacks changes that ends: what comes after may build on rows that nobody was told of. Only a change that is kept as
    such says what it says. One that broke at anything but a change of its shape could not take what came after that.
    """
    life, form = load.managed, load.managed.location.spec
    takes = not load.state_before.is_blocked or isinstance(load.error_before, SchemaChanged)
    stands = life.apply_suspended or (form.soft_delete and lives.has_missing_changes(life))
    if life.applied_position is None or life.load_only or not (stands and takes):
        return None
    lacks = None if form.mode is TableMode.APPEND or form.holds_messages else lives.missing_from(life)
    return point if lacks is None else min(point, lacks)


def _says_owed(life: ManagedTable, known: TableSchema, take: ApplyCallback) -> bool:
    """Have the table say itself that a load is owed, before it goes past what the log lacks: the load may not land.
    False: it cannot, for want of facts."""
    assert life.applied_position is not None, "a table that was loaded"
    assert life.schema is not None, "a table that was loaded"
    shape = known if life.schema.facts is None and life.schema == known else life.schema
    if not shape.owed and shape.facts is not None:
        take(life, ApplyRange((), life.applied_position, Recast(schema=shape.with_owed(True))))
    return shape.facts is not None


def _next_range(
    lives: TableRegistry, life: ManagedTable, point: Lsn, known: TableSchema, *, asked: bool
) -> ApplyRange | None:
    """None also where a person has asked for the load and the log goes no further: `carry_to` says what then."""
    try:
        return next_range_to(lives, life, point, known, asked=asked)
    except SchemaChanged:
        if asked:
            return None
        raise


def next_range_to(
    lives: TableRegistry, life: ManagedTable, point: Lsn, known: TableSchema | None = None, *, asked: bool = False
) -> ApplyRange | None:
    """The next stretch that brings a halted table to a position, or towards it; None when it is there. The facts of
    `known` stand for those of rows that have its columns and came without any. If a person has `asked` for it, no
    policy is in the way."""
    assert life.applied_position is not None, "a table that was loaded"
    assert life.schema is not None, "a table that was loaded"
    index = lives.index
    pending = [item for item in lives.pending(life, index.last_commit) if index.start_of(item.first) < point]
    if life.applied_position.position >= point or not pending:
        return None
    whole = [item for item in pending if index.end_of(item.last) <= point]
    if not whole:
        pending = list(_of_before(lives, life.applied_position.seq, pending, point))
    taken: list[Slice] = []
    for item in whole or pending:
        if taken and whole and sum(other.rows for other in taken) + item.rows > ROWS_PER_APPLY_MAX:
            break
        recast = _recast_before(lives, life, item, known, asked=asked)
        if recast is not None and taken:
            break
        if recast is not None:
            return ApplyRange((), life.applied_position, recast)
        taken.append(item)
    if not taken:
        return None
    if not whole and len(taken) == len(pending):
        return ApplyRange(
            tuple(taken), replace(lives.applied_position_at(point), load=life.applied_position.load), until=point
        )
    return ApplyRange(
        tuple(taken), lives.position_after(life.applied_position, taken, pending[len(taken) :], taken[-1].last)
    )


def _of_before(lives: TableRegistry, seq: int, items: list[Slice], point: Lsn) -> Iterator[Slice]:
    """Of slices that go past the point those with rows of before it; one commit may hold several of a table, each of
    another shape."""
    for item in items:
        rows = lives.log.read(item.first, item.last, tables=[item.table], after_seq=seq, to_seq=item.last_seq)
        if any(rows_until_position(batch, point).data.num_rows for batch in rows if batch.data.num_rows):
            yield item
        seq = item.last_seq


def _recast_before(
    lives: TableRegistry, life: ManagedTable, item: Slice, known: TableSchema | None, *, asked: bool
) -> Recast | None:
    """What the table must become to take the slice; None where its rows fit. What a rewrite did to rows at rest the
    load brings; what came after it comes from the log."""
    assert life.schema is not None, "a table that was loaded"
    step = lives.schema_change_before(life, item)
    if step is None or isinstance(step, Recast):
        return step
    shape = lives.schema_of_slice(life.schema, item)
    if isinstance(step, SchemaChanged) and (not asked or shape.table != life.table):
        raise step
    # A row may be sent before the catalogue shows what made it so; a constant of older rows would not be known.
    return _carried(lives, life, known if known is not None and shape.facts is None and shape == known else shape)


def plan_carry_over(lives: TableRegistry, life: ManagedTable, schema: TableSchema, *, asked: bool) -> Recast | None:
    """What a table must become for a load of this shape to land as a difference; None where it is that. If a person has
    `asked` for the load, also where that cannot be: then all that the table holds is replaced."""
    if life.schema is None or _fits(life.schema, schema):
        return None
    step = lives.plan_schema_change(life, schema)
    if isinstance(step, Recast):
        return step
    if isinstance(step, SchemaChanged) and not asked:
        raise step
    try:
        return _carried(lives, life, schema)
    except SchemaChanged:
        if asked:
            return None
        raise


def _carried(lives: TableRegistry, life: ManagedTable, schema: TableSchema) -> Recast | None:
    assert life.schema is not None, "a table that was loaded"
    if _fits(life.schema, schema):
        return None
    found = carry_over(life.location.spec, life.schema, schema, lives.policies_of(life.table), lives.value_of)
    if isinstance(found, SchemaChanged):
        raise found
    return found


def _fits(shape: TableSchema, other: TableSchema) -> bool:
    """Whether rows of the one can be applied to a table of the other."""
    return shape.relation == other.relation and shape.same_rows(other)


def _went_past(shape: TableSchema, planned: TableSchema) -> bool:
    """Whether the table took on another shape while it was read in the one of before."""
    if shape.facts is None or planned.facts is None or _fits(shape, planned):
        return False
    return shape.facts.position > planned.facts.position
