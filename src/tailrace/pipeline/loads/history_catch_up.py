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
from tailrace.changelog.read.row_steps import upto_position
from tailrace.errors import BaseRowMissing, SchemaChanged
from tailrace.model.position import Lsn
from tailrace.model.schema import TableSchema
from tailrace.pipeline.loads.running_load import Load, was_changed
from tailrace.pipeline.tables.registry import ROWS_PER_APPLY_MAX, Lives, Stretch, TableLife
from tailrace.tables.evolve.carry_over import carry
from tailrace.tables.evolve.schema_plan import Recast
from tailrace.tables.spec import TableMode

Take = Callable[[TableLife, Stretch], None]
"""Makes one commit of a table that stands still, or raises why not."""


def bring_to(lives: Lives, load: Load, point: Lsn, take: Take) -> None:
    """Bring the table to a load that was read whole; whoever calls holds its lock, and the log has passed the point."""
    life, schema, asked = load.life, load.seed.plan.schema, load.seed.wish is not None
    lives.look_again(life)
    if (end := told_to(lives, load, point)) is not None:
        if (lacks := lives.lacks_from(life)) is not None and lacks < end and not _says_owed(life, schema, take):
            end = lacks
        while (stretch := _next_stretch(lives, life, end, schema, asked=asked)) is not None:
            try:
                take(life, stretch)
            except BaseRowMissing:
                if life.halted:
                    raise
                break  # the load has the row
    if load.where is not None or not life.place.form.retains or life.shape is None or life.cursor is None:
        return
    if _went_past(life.shape, schema):
        raise was_changed(life.table)
    if (recast := carry_to(lives, life, schema, asked=asked)) is not None:
        take(life, Stretch((), life.cursor, recast))


def told_to(lives: Lives, load: Load, point: Lsn) -> Lsn | None:
    """How far the table must come towards the load's point by the log; None: not at all, or it does so by itself.

    Of a table that keeps what the source no longer has a load brings only what the log does not tell. Where the log
    lacks changes that ends: what comes after may build on rows that nobody was told of. Only a change that is kept as
    such says what it says. One that broke at anything but a change of its shape could not take what came after that.
    """
    life, form = load.life, load.life.place.form
    takes = not load.state_before.broken or isinstance(load.stopped_by, SchemaChanged)
    stands = life.halted or (form.soft_delete and lives.misses(life))
    if life.cursor is None or life.once or not (stands and takes):
        return None
    lacks = None if form.mode is TableMode.APPEND or form.keeps else lives.lacks_from(life)
    return point if lacks is None else min(point, lacks)


def _says_owed(life: TableLife, known: TableSchema, take: Take) -> bool:
    """Have the table say itself that a load is owed, before it goes past what the log lacks: the load may not land.
    False: it cannot, for want of facts."""
    assert life.cursor is not None, "a table that was loaded"
    assert life.shape is not None, "a table that was loaded"
    shape = known if life.shape.facts is None and life.shape == known else life.shape
    if not shape.owed and shape.facts is not None:
        take(life, Stretch((), life.cursor, Recast(schema=shape.with_owed(True))))
    return shape.facts is not None


def _next_stretch(lives: Lives, life: TableLife, point: Lsn, known: TableSchema, *, asked: bool) -> Stretch | None:
    """None also where a person has asked for the load and the log goes no further: `carry_to` says what then."""
    try:
        return stretch_to(lives, life, point, known, asked=asked)
    except SchemaChanged:
        if asked:
            return None
        raise


def stretch_to(
    lives: Lives, life: TableLife, point: Lsn, known: TableSchema | None = None, *, asked: bool = False
) -> Stretch | None:
    """The next stretch that brings a halted table to a position, or towards it; None when it is there. The facts of
    `known` stand for those of rows that have its columns and came without any. If a person has `asked` for it, no
    policy is in the way."""
    assert life.cursor is not None, "a table that was loaded"
    assert life.shape is not None, "a table that was loaded"
    index = lives.index
    pending = [item for item in lives.pending(life, index.commit) if index.start_of(item.first) < point]
    if life.cursor.position >= point or not pending:
        return None
    whole = [item for item in pending if index.end_of(item.last) <= point]
    if not whole:
        pending = list(_of_before(lives, life.cursor.seq, pending, point))
    taken: list[Slice] = []
    for item in whole or pending:
        if taken and whole and sum(other.rows for other in taken) + item.rows > ROWS_PER_APPLY_MAX:
            break
        recast = _recast_before(lives, life, item, known, asked=asked)
        if recast is not None and taken:
            break
        if recast is not None:
            return Stretch((), life.cursor, recast)
        taken.append(item)
    if not taken:
        return None
    if not whole and len(taken) == len(pending):
        return Stretch(tuple(taken), replace(lives.cursor_at(point), load=life.cursor.load), upto=point)
    return Stretch(tuple(taken), lives.reached(life.cursor, taken, pending[len(taken) :], taken[-1].last))


def _of_before(lives: Lives, seq: int, items: list[Slice], point: Lsn) -> Iterator[Slice]:
    """Of slices that go past the point those with rows of before it; one commit may hold several of a table, each of
    another shape."""
    for item in items:
        rows = lives.log.read(item.first, item.last, tables=[item.table], after_seq=seq, to_seq=item.last_seq)
        if any(upto_position(batch, point).data.num_rows for batch in rows if batch.data.num_rows):
            yield item
        seq = item.last_seq


def _recast_before(
    lives: Lives, life: TableLife, item: Slice, known: TableSchema | None, *, asked: bool
) -> Recast | None:
    """What the table must become to take the slice; None where its rows fit. What a rewrite did to rows at rest the
    load brings; what came after it comes from the log."""
    assert life.shape is not None, "a table that was loaded"
    step = lives.step_before(life, item)
    if step is None or isinstance(step, Recast):
        return step
    shape = lives.shape_of(life.shape, item)
    if isinstance(step, SchemaChanged) and (not asked or shape.table != life.table):
        raise step
    # A row may be sent before the catalogue shows what made it so; a constant of older rows would not be known.
    return _carried(lives, life, known if known is not None and shape.facts is None and shape == known else shape)


def carry_to(lives: Lives, life: TableLife, schema: TableSchema, *, asked: bool) -> Recast | None:
    """What a table must become for a load of this shape to land as a difference; None where it is that. If a person has
    `asked` for the load, also where that cannot be: then all that the table holds is replaced."""
    if life.shape is None or _fits(life.shape, schema):
        return None
    step = lives.planned(life, schema)
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


def _carried(lives: Lives, life: TableLife, schema: TableSchema) -> Recast | None:
    assert life.shape is not None, "a table that was loaded"
    if _fits(life.shape, schema):
        return None
    found = carry(life.place.form, life.shape, schema, lives.policies_of(life.table), lives.value_of)
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
    return shape.facts.at > planned.facts.at
