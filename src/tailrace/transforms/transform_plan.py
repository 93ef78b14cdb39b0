"""Rules made ready to work: every batch of a table, from snapshot or stream, goes through the same steps.

What a rule fails at is never let through. With `halt` nothing of the batch comes out, and whoever acknowledges cannot
pass it; with `dead-letter` the rows are set apart, each with its rule and cause, or are marked where they are
(`marking`), for a log whose readers know what to do with a value that did not fit. A marked row has null in the place
of the value, and the rule's name beside it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa

from tailrace.errors import ConfigError, RuleInvalid, TransformFailed, Unsupported
from tailrace.model import change
from tailrace.model.batch import ChangeBatch, Window
from tailrace.model.change import Operation
from tailrace.model.position_kinds import P
from tailrace.model.schema import TableId, TableSchema
from tailrace.model.system_streams import is_system
from tailrace.transforms.output_schema import OutputSchema, routed_schema
from tailrace.transforms.output_tables import OutputTables, matches_any
from tailrace.transforms.row_images import (
    AFTER,
    RowImages,
    RuleFailure,
    open_batch,
    open_snapshot_rows,
    renumber,
    to_batch,
)
from tailrace.transforms.rules import Outbox, Rule, RulesInput, Transforms, parse_rules
from tailrace.transforms.secrets import Keyring
from tailrace.transforms.steps import derived_columns, routes
from tailrace.transforms.steps import rule_steps as steps
from tailrace.transforms.steps.rule_steps import RoutedRows, RuleStep, when_expression

SCHEMAS_KEPT_MAX = 10_000
HALT_HINT = (
    "Mend the row at the source or the rule, and start again: nothing was let through. With `on_error: dead-letter` "
    "only such rows are set aside."
)
LOAD_HINT = (
    "Mend the row at the source or the rule: nothing was let through. With `tables.on_bad_row: dead-letter` a load "
    "sets such rows aside, of mirrors with a key."
)
_MAKERS = {**steps.STEP_FACTORIES, **derived_columns.STEP_FACTORIES, **routes.STEP_FACTORIES}


@dataclass(frozen=True, kw_only=True)
class DeadLetter:
    """Rows that a rule could not be applied to, as they came: apply them again once the cause is mended."""

    rule: str
    cause: str
    column: str
    batch: ChangeBatch
    """The rows as the source sent them. They are in memory alone: storing them is storing what the rule hides."""

    @property
    def positions(self) -> list[str | None]:
        """Where in the source's log each row ended."""
        data = self.batch.data
        known = change.POSITION in data.schema.names
        return data.column(change.POSITION).to_pylist() if known else [None] * data.num_rows


OnDeadLetter = Callable[[DeadLetter], None]
"""Takes rows that were set aside. When it returns, they are as safe as they need to be: the rows beside them go on."""


@dataclass(frozen=True, kw_only=True)
class TransformResult:
    """What came out of a batch."""

    batches: tuple[ChangeBatch, ...]
    dead_letters: tuple[DeadLetter, ...] = ()


@dataclass(frozen=True, kw_only=True)
class UnmatchedRule:
    """A rule that has had nothing to do."""

    rule: str
    reason: str
    no_table: bool = False


@dataclass
class TablePlan:
    """The steps of one shape, and the shape that they make."""

    source: TableSchema
    target: TableSchema
    steps: tuple[RuleStep, ...]
    claim_table: Callable[[TableId], None] = lambda _: None
    """Hears of tables that only rows tell of, and may refuse."""
    _routed: dict[TableId, TableSchema] = field(default_factory=dict)

    def run(self, rows: RowImages) -> list[tuple[TableSchema, RowImages]]:
        lots: list[RoutedRows] = [(None, rows)]
        for step in self.steps:
            lots = [made for lot in lots for made in step.route(lot)]
        return [(self.schema_for(table), some) for table, some in lots if some.count]

    def schema_for(self, table: TableId | None) -> TableSchema:
        """The shape of rows that were sent to a table; None: to none but where all go."""
        if table is None or table == self.target.table:
            return self.target
        if table not in self._routed:
            self.claim_table(table)
            self._routed[table] = routed_schema(self.target, table)
        return self._routed[table]


class TransformPlan:
    """All rules, for whatever tables come. One thread uses it; it can be pickled, and holds no key then."""

    def __init__(
        self,
        transforms: RulesInput,
        *,
        environment: Mapping[str, str] | None = None,
        keyring: Keyring | None = None,
        names: OutputTables | None = None,
    ) -> None:
        self.transforms = transforms = parse_rules(transforms)
        self._names = names
        self._keys = keyring or Keyring(transforms.keys, environment)
        self._plans: dict[int, TablePlan] = {}
        self._policy = {rule.name: rule.on_error for rule in transforms.rules}
        self._tables: dict[str, int] = {rule.name: 0 for rule in transforms.rules}
        self._rows: dict[str, int] = {rule.name: 0 for rule in transforms.rules}

    def __reduce__(self) -> tuple[Any, ...]:
        return _plan_of, (self.transforms, self._names is not None)

    def table_plan(self, schema: TableSchema) -> TablePlan:
        """The steps for a shape. A stream gives the same object again and again, and gets the same one."""
        known = self._plans.get(id(schema))
        if known is not None:
            return known
        if not isinstance(schema, TableSchema):
            raise ConfigError(
                "that is no shape of a table",
                found=type(schema).__name__,
                hint="Give a `TableSchema`; of a batch it is `batch.schema`.",
            )
        shape = OutputSchema.from_table(schema)
        nothing = is_system(schema) or not schema.columns
        if self._names is not None and not is_system(schema):
            self._names.tables_for(schema.table)
        matching = (rule for rule in self.transforms.rules if matches_any(rule.tables, schema.table))
        concerned = () if nothing else tuple(matching)
        made = [step for rule in concerned if (step := self._step(rule, shape)) is not None]
        if len(self._plans) >= SCHEMAS_KEPT_MAX:
            self._plans.clear()
        plan = self._plans[id(schema)] = TablePlan(source=schema, target=shape.to_table_schema(), steps=tuple(made))
        if (names := self._names) is not None:
            plan.claim_table = lambda table: names.claim(table, schema.table)
        return plan

    def _step(self, rule: Rule, shape: OutputSchema) -> RuleStep | None:
        try:
            when = when_expression(rule)
            if when is not None and not set(when.columns) <= set(shape.columns) and not rule.exact_tables:
                return None
            if when is not None and not pa.types.is_boolean(when.result_type(shape.types)):
                raise shape.rule_error(rule, "`when` is no condition", "Write one, for example `country == 'DE'`.")
            if self._names is not None and isinstance(rule, Outbox):
                _refuse_other_types(rule, shape)
            step = _MAKERS[rule.do](rule, shape, self._keys)
        except RuleInvalid:
            raise
        except ConfigError as error:
            fields = {"rule": rule.name, "table": shape.source.table, **error.fields}
            raise RuleInvalid(error.message, hint=error.hint, **fields) from error
        if step is not None:
            self._tables[rule.name] += 1
            step.count_rows = self._counter(rule.name)
        return step

    def _counter(self, rule: str) -> Callable[[int], None]:
        def count(rows: int) -> None:
            self._rows[rule] += rows

        return count

    def transformed_schema(self, schema: TableSchema, table: TableId | None = None) -> TableSchema:
        """What the rules make of a shape: snapshot and stream have it alike. `table` is one of those that rows are sent
        to, if not most of them are."""
        return self.table_plan(schema).schema_for(table)

    def require_keys(self) -> None:
        """Refuse rules whose keys cannot be had. Else that is found out with the first row of a table."""
        self._keys.require(self.transforms.rules)

    def unmatched_rules(self) -> list[UnmatchedRule]:
        """The rules that have met no table yet, or no row."""
        found = []
        for rule in self.transforms.rules:
            if not self._tables[rule.name]:
                found.append(UnmatchedRule(rule=rule.name, reason="no table has what it names", no_table=True))
            elif not self._rows[rule.name] and not (rule.do == "route" and rule.when is None):
                found.append(UnmatchedRule(rule=rule.name, reason="no row was one for it"))
        return found

    # Changes.

    def apply(self, batch: ChangeBatch) -> TransformResult:
        """The batch, transformed; rows that a rule with `dead-letter` failed at are letters."""
        if not isinstance(batch, ChangeBatch):
            raise ConfigError(
                "that is no batch of changes",
                found=type(batch).__name__,
                hint="Give what `batch_of(…)` makes, or one by one what `batch.batches` has.",
            )
        plan = self.table_plan(batch.schema)
        if not plan.steps:
            return TransformResult(batches=(batch,))
        lots = plan.run(open_batch(batch))
        self._halt(plan.source, lots, batch)
        letters, aside = [], np.zeros(len(batch), np.bool_)
        together = np.zeros(len(batch), np.bool_)
        for _, rows in lots:
            for one in rows.failures:
                mine = one.rows & ~aside[rows.source_rows]  # a row is one letter, of the first rule that failed
                if mine.any():
                    failed = rows.source_rows[mine]
                    aside[failed] = True
                    old = _old_rows(batch, failed, aside)
                    together[old] = aside[old] = True
                    letters.append(_letter(one, batch, np.sort(np.concatenate([failed, old]))))
        for _, rows in lots:
            rows.take(~(rows.failed_rows | together[rows.source_rows]))
        return TransformResult(
            batches=tuple(to_batch(rows, schema) for schema, rows in lots if rows.count), dead_letters=tuple(letters)
        )

    def apply_marking(self, batch: ChangeBatch) -> tuple[ChangeBatch, ...]:
        """The batch, transformed; rows that a rule with `dead-letter` failed at say so in `_unfit`."""
        plan = self.table_plan(batch.schema)
        if not plan.steps:
            return (batch,)
        lots = plan.run(open_batch(batch))
        self._halt(plan.source, lots, batch)
        for schema, rows in lots:
            _mark(schema, rows)
        return tuple(to_batch(rows, schema) for schema, rows in lots)

    def apply_all(self, batches: Sequence[ChangeBatch], on_letter: OnDeadLetter) -> tuple[ChangeBatch, ...]:
        """The batches, transformed, each row with the `_seq` it had. What was set aside is told of once all of them
        have passed, and before anyone has a row of them."""
        applied = [self.apply(batch) for batch in batches]
        for one in applied:
            for letter in one.dead_letters:
                on_letter(letter)
        return tuple(made for one in applied for made in one.batches)

    def transform_window(self, window: Window[P], on_letter: OnDeadLetter | None = None) -> Window[P] | None:
        """A window's batches, transformed; rows are numbered anew where some went or came. Rows that a rule failed at
        are marked, or go to `on_letter`.

        None: it was a part of a transaction, and nothing of it is left."""
        if on_letter is None:
            batches = tuple(made for batch in window.batches for made in self.apply_marking(batch))
        else:
            batches = self.apply_all(window.batches, on_letter)
        if len(batches) == len(window.batches) and all(map(operator.is_, batches, window.batches)):
            return window
        if window.open and not batches:
            return None
        numbered = renumber(batches)
        return replace(window, batches=numbered, rows=sum(map(len, numbered)))

    # Snapshots.

    def transform_rows(self, schema: TableSchema, data: pa.RecordBatch, into: TableId | None = None) -> pa.RecordBatch:
        """Rows of a snapshot, of the table's own columns, as rows of the transformed shape; for a load, which can set
        none aside. A runtime makes changes of them, and has `sifted`.

        `into` is the table that is loaded, where rules send rows to several: the others' are left out."""
        plan = self.table_plan(schema)
        if not plan.steps:
            return data
        lots = plan.run(open_snapshot_rows(schema, data))
        for _, rows in lots:
            for one in rows.failures:
                hint = HALT_HINT if self._policy[one.rule] == "halt" else LOAD_HINT
                raise _failed(plan.source, one, None, hint) from one.error
        fields = pa.schema(plan.target.row_fields())
        parts = [
            pa.RecordBatch.from_arrays([rows.after.columns[name] for name in fields.names], schema=fields)
            for rows in _loaded(plan, lots, into)
        ]
        return pa.concat_batches(parts) if parts else pa.RecordBatch.from_pylist([], fields)

    def transform_marked_rows(
        self, schema: TableSchema, data: pa.RecordBatch, unfit: pa.Array, into: TableId | None = None
    ) -> tuple[pa.RecordBatch, pa.Array]:
        """The same, of rows with values that do not fit: those, and what a rule with `dead-letter` failed at, are told
        beside them as `_unfit` has it."""
        plan = self.table_plan(schema)
        if not plan.steps:
            return data, unfit
        lots = plan.run(open_snapshot_rows(schema, data, unfit))
        for target, rows in lots:
            for one in rows.failures:
                if self._policy[one.rule] == "halt":
                    raise _failed(plan.source, one, None) from one.error
            _mark(target, rows)
        fields = pa.schema(plan.target.row_fields())
        parts = [(pa.RecordBatch.from_pylist([], fields), pa.nulls(0, change.UNFIT_TYPE))]
        for rows in _loaded(plan, lots, into):
            made = to_batch(rows, plan.target).data
            columns = [made.column(change.stored_name(name)) for name in fields.names]
            has_cells = change.UNFIT in made.schema.names
            cells = made.column(change.UNFIT) if has_cells else pa.nulls(made.num_rows, change.UNFIT_TYPE)
            parts.append((pa.RecordBatch.from_arrays(columns, schema=fields), cells))
        return pa.concat_batches([made for made, _ in parts]), pa.concat_arrays([cells for _, cells in parts])

    def _halt(self, schema: TableSchema, lots: list[tuple[TableSchema, RowImages]], batch: ChangeBatch) -> None:
        for _, rows in lots:
            for one in rows.failures:
                if self._policy[one.rule] == "halt":
                    raise _failed(schema, one, _position(batch, int(rows.source_rows[one.rows][0]))) from one.error


def _mark(schema: TableSchema, rows: RowImages) -> None:
    """Have rows that a rule failed at say so in `_unfit`."""
    for one in rows.failures:
        column = one.column if one.column in rows.after.columns else schema.names[0]
        texts = rows.unfit.setdefault((AFTER, column), {})
        texts.update(dict.fromkeys(np.flatnonzero(one.rows).tolist(), change.rule_failure_text(one.rule, one.reason)))


def _refuse_other_types(rule: Outbox, shape: OutputSchema) -> None:
    """Which types there are, the source is asked: they must be what it has."""
    made, own = shape.columns.get(rule.type_column), shape.source.columns
    if made is not None and (
        made.source_index is None or made.is_changed or own[made.source_index].name != rule.type_column
    ):
        raise shape.rule_error(
            rule,
            "a rule before it has changed the type of messages",
            "Put `outbox` before that rule.",
            column=rule.type_column,
        )


def _plan_of(transforms: Transforms, apart: bool) -> TransformPlan:
    return TransformPlan(transforms, names=OutputTables(transforms.rules) if apart else None)


def _loaded(plan: TablePlan, lots: list[tuple[TableSchema, RowImages]], into: TableId | None) -> list[RowImages]:
    """The rows of the table that is loaded. A row may come to one table in several ways."""
    if into is None and any(target is not plan.target for target, _ in lots):
        raise Unsupported(
            "rows of one table cannot be loaded into several",
            table=plan.source.table,
            hint="Say which of them is loaded: `into`.",
        )
    return [rows for target, rows in lots if into is None or target.table == into]


def _position(batch: ChangeBatch, row: int) -> str | None:
    if change.POSITION not in batch.data.schema.names:
        return None
    found: str = batch.data.column(change.POSITION)[row].as_py()
    return found or None  # what was injected has none


def _failed(schema: TableSchema, failure: RuleFailure, position: str | None, hint: str = HALT_HINT) -> TransformFailed:
    where = {} if position is None else {"position": position}
    return TransformFailed(
        f"a rule could not be applied: {failure.reason}",
        rule=failure.rule,
        table=schema.table,
        column=failure.column,
        rows=int(failure.rows.sum()),
        **where,
        hint=hint,
    )


_TAKING = {change.MOVED_FROM, change.UNCHANGED}


def _old_rows(batch: ChangeBatch, rows: Any, aside: Any) -> Any:
    """The deletes of old keys that go with these rows: of one that takes values from there which were not sent. Handed
    out alone they would take the values away, and the letter could not be applied any more."""
    names = set(batch.data.schema.names)
    if not names >= _TAKING:
        return rows[:0]
    taking = [batch.data.column(name).is_valid().to_numpy(zero_copy_only=False) for name in _TAKING]
    before = rows[np.logical_and.reduce(taking)[rows] & (rows > 0)] - 1
    deletes = batch.data.column(change.OP).take(pa.array(before)).to_pylist()
    return before[np.array([one == Operation.DELETE.value for one in deletes], np.bool_) & ~aside[before]]


def _letter(failure: RuleFailure, batch: ChangeBatch, rows: Any) -> DeadLetter:
    data = batch.data.take(pa.array(rows))
    names = set(data.schema.names)
    moves = len(data) - data.column(change.MOVED_FROM).null_count if change.MOVED_FROM in names else 0
    return DeadLetter(
        rule=failure.rule,
        cause=failure.reason,
        column=failure.column,
        batch=replace(batch, data=data, ends=None, moves=moves, truncates=0),
    )
