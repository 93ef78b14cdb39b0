"""Rules that send rows to other tables, or make plain rows of changes.

A row goes to one table. Where a change moves it from one to another it is a delete in the first and an insert in the
second, as far as the old row was told.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.model import change
from tailrace.model.change import Operation
from tailrace.model.schema import TableId
from tailrace.transforms.expression import Expression
from tailrace.transforms.rows import FAILED, Image, Rows
from tailrace.transforms.secrets import Keyring
from tailrace.transforms.shape import Made, Shape
from tailrace.transforms.splitting import Judged, narrow
from tailrace.transforms.steps import Lot, Maker, Step, condition, named

Mask = npt.NDArray[np.bool_]
TABLES_MAX = 1_000
"""That one outbox may send messages of one batch to."""
NOWHERE = TableId("", "")
_METADATA = {one.name: one.type for one in change.ALWAYS}


def target(template: str, table: TableId, **more: str) -> TableId:
    """The table that a template means."""
    schema, _, name = template.partition(".")

    def filled(text: str) -> str:
        for key, value in {"schema": table.schema, "table": table.name, **more}.items():
            text = text.replace(f"{{{key}}}", value)
        return text

    return TableId(filled(schema), filled(name))


@dataclass
class SplitStep(Step):
    """Rows of which `when` is true go to another table."""

    to: TableId = NOWHERE
    key: tuple[str, ...] = ()

    def share_out(self, lot: Lot) -> list[Lot]:
        table, rows = lot
        assert self.when is not None, "made ready"
        self.count(int(self.when.judge(rows.after.columns, rows.count)[0].sum()))
        sent, columns = rows.copy(), self.when.columns
        narrow(sent, _true(self.when, sent, is_true=True), columns, self.key, self.rule.name)
        narrow(rows, _true(self.when, rows, is_true=False), columns, self.key, self.rule.name)
        # A row that cannot be judged has failed, and is in both: once is enough.
        if rows.failures:
            mine = [one for one in rows.failures if one.rule == self.rule.name]
            rows.take(~np.logical_or.reduce([one.rows for one in mine]) if mine else np.ones(rows.count, np.bool_))
        return [(table, rows), (self.to, sent)]


def _true(when: Expression, rows: Rows, *, is_true: bool) -> Callable[[Image], Judged]:
    def judged(image: Image) -> Judged:
        found, odd = when.judge(image.columns, rows.count)
        return found == is_true, odd

    return judged


@dataclass
class OutboxStep(Step):
    """Each inserted row goes to the table that its type names."""

    template: str = ""
    column: str = ""
    source: TableId = NOWHERE

    def share_out(self, lot: Lot) -> list[Lot]:
        _, rows = lot
        rows.take(rows.is_op(Operation.INSERT) | rows.is_op(Operation.READ))
        self.count(rows.count)
        rows.images = rows.images[:1]
        kinds = rows.after.columns[self.column]
        named = np.asarray(pc.is_valid(kinds).to_numpy(zero_copy_only=False), np.bool_)
        rows.fail(self.rule.name, self.column, FAILED, ~named)
        found = pc.unique(kinds.drop_null()).to_pylist()
        if len(found) > TABLES_MAX:
            rows.fail(self.rule.name, self.column, FAILED, np.ones(rows.count, np.bool_))
            return [lot]
        lots: list[Lot] = []
        for kind in found:
            some = rows.copy()
            is_it = pc.fill_null(pc.equal(kinds, kind), False)
            some.take(np.asarray(is_it.to_numpy(zero_copy_only=False), np.bool_))
            some.drop(self.column)
            lots.append((target(self.template, self.source, type=kind), some))
        rows.take(~named)
        rows.drop(self.column)
        return [*lots, lot] if rows.count else lots


@dataclass
class UnwrapStep(Step):
    """Rows as they are, without old ones; deletes go, or are marked."""

    metadata: tuple[tuple[str, str], ...] = ()
    marker: str | None = None
    key: tuple[str, ...] = ()

    def apply(self, rows: Rows) -> None:
        self.count(rows.count)
        deleted = rows.is_op(Operation.DELETE)
        for source, name in self.metadata:
            kind = _METADATA[source]
            rows.after.columns[name] = rows.about.get(source, pa.nulls(rows.count, kind))
        if self.marker is not None:
            self._mark(rows, deleted, self.marker)
        rows.images = [image for image in rows.images if image.which != change.BEFORE]
        if self.marker is None:
            rows.take(~deleted)

    def _mark(self, rows: Rows, deleted: Mask, marker: str) -> None:
        before = rows.image(change.BEFORE)
        bare = deleted if before is None or before.valid is None else deleted & ~before.valid
        if bare.any():  # only the key was told: the rest stays as it is
            made = {marker, *(name for _, name in self.metadata)}
            for name in rows.after.columns.keys() - set(self.key) - made:
                rows.absent[name] = rows.absent.get(name, np.zeros(rows.count, np.bool_)) | bare
        rows.after.columns[marker] = pa.array(deleted)
        rows.about[change.OP] = pc.if_else(pa.array(deleted), Operation.UPDATE.value, rows.about[change.OP])


def _make_route(rule: Any, shape: Shape, _: Keyring) -> Step | None:
    to, when = target(rule.to, shape.source.table), condition(rule)
    if when is None:
        shape.table = to
        return Step(rule, None)
    return SplitStep(rule, when, to=to, key=shape.key)


def _make_outbox(rule: Any, shape: Shape, _: Keyring) -> Step | None:
    if len(named(rule, shape, [rule.type_column, rule.key_column])) < 2:
        return None
    if not pa.types.is_string(shape.columns[rule.type_column].type):
        raise shape.refuse(rule, "the type of a message must be a text", "Cast it before.", column=rule.type_column)
    if rule.type_column == rule.key_column:
        raise shape.refuse(rule, "a message's type is not its key", "Name two columns.", column=rule.key_column)
    del shape.columns[rule.type_column]
    shape.key = (rule.key_column,)
    return OutboxStep(rule, None, template=rule.to, column=rule.type_column, source=shape.source.table)


def _make_unwrap(rule: Any, shape: Shape, _: Keyring) -> Step | None:
    if shape.row_is_key:
        raise shape.refuse(
            rule, "a rule would destroy the key: without one, rows are known by their old values",
            "Give the table a primary key.",
        )  # fmt: skip
    metadata = tuple(rule.metadata.items())
    marker = rule.marker if rule.deletes == "mark" else None
    for name, kind in [(name, _METADATA[of]) for of, name in metadata] + ([(marker, pa.bool_())] if marker else []):
        if name in shape.columns:
            raise shape.refuse(rule, "a rule makes a column that is there already", "Name another.", column=name)
        shape.columns[name] = Made(kind, f"{kind}", None)
        shape.columns[name].mark(rule)
    if marker is None:
        shape.mark_rows(rule)
    return UnwrapStep(rule, None, metadata=metadata, marker=marker, key=shape.key)


MAKERS: dict[str, Maker] = {"route": _make_route, "outbox": _make_outbox, "unwrap": _make_unwrap}
