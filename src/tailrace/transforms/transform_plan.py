"""Rules ready to run, the same steps for every batch of a table.

Batches of snapshot and stream pass the same steps. Rows that a rule fails at are never let through. With `halt` nothing
of the batch is returned, so nothing can be acknowledged past it. With `dead-letter` the rows become dead letters, each
with its rule and cause. Or they are marked in the batch (`apply_marking`), for a log whose readers handle values that
did not fit. A marked row has null instead of the value, and the rule's name in `_unfit`.
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
    "Fix the row at the source or the rule, and start again: nothing was let through. With `on_error: dead-letter` "
    "only such rows become dead letters."
)
LOAD_HINT = (
    "Fix the row at the source or the rule: nothing was let through. With `tables.on_bad_row: dead-letter` a load of "
    "a mirror with a key makes dead letters of such rows."
)
_STEP_FACTORIES = {**steps.STEP_FACTORIES, **derived_columns.STEP_FACTORIES, **routes.STEP_FACTORIES}


@dataclass(frozen=True, kw_only=True)
class DeadLetter:
    """Rows that a rule failed at, as the source sent them.

    Apply them again once the cause is fixed.
    """

    rule: str
    cause: str
    column: str
    batch: ChangeBatch
    """The source's rows, in memory only. To store them is to store what the rule hides."""

    @property
    def positions(self) -> list[str | None]:
        """The position where each row's transaction ended."""
        data = self.batch.data
        known = change.POSITION in data.schema.names
        return data.column(change.POSITION).to_pylist() if known else [None] * data.num_rows


OnDeadLetter = Callable[[DeadLetter], None]
"""A function that takes dead letters. When it returns they are safe, and the other rows proceed."""


@dataclass(frozen=True, kw_only=True)
class TransformResult:
    """The output rows of a batch, and its dead letters."""

    batches: tuple[ChangeBatch, ...]
    dead_letters: tuple[DeadLetter, ...] = ()


@dataclass(frozen=True, kw_only=True)
class UnmatchedRule:
    """A rule that has matched nothing."""

    rule: str
    reason: str
    no_table: bool = False


@dataclass
class TablePlan:
    """The steps for one schema, and their output schema."""

    source: TableSchema
    target: TableSchema
    steps: tuple[RuleStep, ...]
    claim_table: Callable[[TableId], None] = lambda _: None
    """Called with tables that only rows name; it may refuse them."""
    _routed: dict[TableId, TableSchema] = field(default_factory=dict)

    def run(self, rows: RowImages) -> list[tuple[TableSchema, RowImages]]:
        routed: list[RoutedRows] = [(None, rows)]
        for step in self.steps:
            routed = [result for item in routed for result in step.route(item)]
        return [(self.schema_for(table), some) for table, some in routed if some.count]

    def schema_for(self, table: TableId | None) -> TableSchema:
        """Return the schema for rows sent to a table; None means the default target."""
        if table is None or table == self.target.table:
            return self.target
        if table not in self._routed:
            self.claim_table(table)
            self._routed[table] = routed_schema(self.target, table)
        return self._routed[table]


class TransformPlan:
    """All rules, for any table. One thread uses it. It can be pickled, without its keys."""

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
        """Return the steps for a schema. A stream passes the same object again, and gets the same plan."""
        known = self._plans.get(id(schema))
        if known is not None:
            return known
        if not isinstance(schema, TableSchema):
            raise ConfigError(
                "value is not a table schema",
                found=type(schema).__name__,
                hint="Pass a `TableSchema`, such as `batch.schema`.",
            )
        output = OutputSchema.from_table(schema)
        nothing = is_system(schema) or not schema.columns
        if self._names is not None and not is_system(schema):
            self._names.tables_for(schema.table)
        matching = (rule for rule in self.transforms.rules if matches_any(rule.tables, schema.table))
        rules = () if nothing else tuple(matching)
        rule_steps = [step for rule in rules if (step := self._step(rule, output)) is not None]
        if len(self._plans) >= SCHEMAS_KEPT_MAX:
            self._plans.clear()
        plan = self._plans[id(schema)] = TablePlan(
            source=schema, target=output.to_table_schema(), steps=tuple(rule_steps)
        )
        if (names := self._names) is not None:
            plan.claim_table = lambda table: names.claim(table, schema.table)
        return plan

    def _step(self, rule: Rule, output: OutputSchema) -> RuleStep | None:
        try:
            when = when_expression(rule)
            if when is not None and not set(when.columns) <= set(output.columns) and not rule.exact_tables:
                return None
            if when is not None and not pa.types.is_boolean(when.result_type(output.types)):
                raise output.rule_error(rule, "`when` is not a condition", "Write one, for example `country == 'DE'`.")
            if self._names is not None and isinstance(rule, Outbox):
                _refuse_other_types(rule, output)
            step = _STEP_FACTORIES[rule.do](rule, output, self._keys)
        except RuleInvalid:
            raise
        except ConfigError as error:
            fields = {"rule": rule.name, "table": output.source.table, **error.fields}
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
        """Return what the rules make of a schema, the same for snapshot and stream.

        `table` is one of the targets with a condition; by default it is the default target.
        """
        return self.table_plan(schema).schema_for(table)

    def require_keys(self) -> None:
        """Refuse rules whose keys are not available. Else the first row of a table would fail."""
        self._keys.require(self.transforms.rules)

    def unmatched_rules(self) -> list[UnmatchedRule]:
        """Return the rules that have matched no table yet, or no row."""
        unmatched = []
        for rule in self.transforms.rules:
            if not self._tables[rule.name]:
                unmatched.append(
                    UnmatchedRule(rule=rule.name, reason="no table has the columns it names", no_table=True)
                )
            elif not self._rows[rule.name] and not (rule.do == "route" and rule.when is None):
                unmatched.append(UnmatchedRule(rule=rule.name, reason="no row matched"))
        return unmatched

    # Changes.

    def apply(self, batch: ChangeBatch) -> TransformResult:
        """Return the batch transformed; rows that a rule with `dead-letter` failed at are dead letters."""
        if not isinstance(batch, ChangeBatch):
            raise ConfigError(
                "value is not a change batch",
                found=type(batch).__name__,
                hint="Pass the result of `batch_of(…)`, or the items of `batch.batches` one by one.",
            )
        plan = self.table_plan(batch.schema)
        if not plan.steps:
            return TransformResult(batches=(batch,))
        routed = plan.run(open_batch(batch))
        self._halt(plan.source, routed, batch)
        dead_letters, rejected = [], np.zeros(len(batch), np.bool_)
        old_halves = np.zeros(len(batch), np.bool_)
        for _, rows in routed:
            for failure in rows.failures:
                new_failures = (
                    failure.rows & ~rejected[rows.source_rows]
                )  # a row is one dead letter, of the first rule that failed
                if new_failures.any():
                    failed = rows.source_rows[new_failures]
                    rejected[failed] = True
                    old = _old_halves(batch, failed, rejected)
                    old_halves[old] = rejected[old] = True
                    dead_letters.append(_dead_letter(failure, batch, np.sort(np.concatenate([failed, old]))))
        for _, rows in routed:
            rows.take(~(rows.failed_rows | old_halves[rows.source_rows]))
        return TransformResult(
            batches=tuple(to_batch(rows, schema) for schema, rows in routed if rows.count),
            dead_letters=tuple(dead_letters),
        )

    def apply_marking(self, batch: ChangeBatch) -> tuple[ChangeBatch, ...]:
        """Return the batch transformed, with rejected rows marked in `_unfit`."""
        plan = self.table_plan(batch.schema)
        if not plan.steps:
            return (batch,)
        routed = plan.run(open_batch(batch))
        self._halt(plan.source, routed, batch)
        for schema, rows in routed:
            _mark(schema, rows)
        return tuple(to_batch(rows, schema) for schema, rows in routed)

    def apply_all(self, batches: Sequence[ChangeBatch], on_dead_letter: OnDeadLetter) -> tuple[ChangeBatch, ...]:
        """Return the batches transformed, each row with its `_seq`.

        Dead letters are passed to `on_dead_letter` once all batches have been transformed, and before a row is
        returned.
        """
        applied = [self.apply(batch) for batch in batches]
        for one in applied:
            for letter in one.dead_letters:
                on_dead_letter(letter)
        return tuple(made for one in applied for made in one.batches)

    def transform_window(self, window: Window[P], on_dead_letter: OnDeadLetter | None = None) -> Window[P] | None:
        """Return the window transformed; rows are renumbered if some were removed or added.

        Rejected rows are marked, or go to `on_dead_letter`. None means: the window was a part of a transaction, and no
        row is left.
        """
        if on_dead_letter is None:
            batches = tuple(made for batch in window.batches for made in self.apply_marking(batch))
        else:
            batches = self.apply_all(window.batches, on_dead_letter)
        if len(batches) == len(window.batches) and all(map(operator.is_, batches, window.batches)):
            return window
        if window.open and not batches:
            return None
        numbered = renumber(batches)
        return replace(window, batches=numbered, rows=sum(map(len, numbered)))

    # Snapshots.

    def transform_rows(self, schema: TableSchema, data: pa.RecordBatch, into: TableId | None = None) -> pa.RecordBatch:
        """Return a snapshot's rows, of the source schema, in the output schema.

        This is for a load that makes no dead letters: a failure is raised. A runtime makes changes of such rows and
        applies the rules to those. `into` is the table that is loaded, where rules send rows to several: other tables'
        rows are left out.
        """
        plan = self.table_plan(schema)
        if not plan.steps:
            return data
        routed = plan.run(open_snapshot_rows(schema, data))
        for _, rows in routed:
            for failure in rows.failures:
                hint = HALT_HINT if self._policy[failure.rule] == "halt" else LOAD_HINT
                raise _transform_error(plan.source, failure, None, hint) from failure.error
        fields = pa.schema(plan.target.row_fields())
        parts = [
            pa.RecordBatch.from_arrays([rows.after.columns[name] for name in fields.names], schema=fields)
            for rows in _rows_to_load(plan, routed, into)
        ]
        return pa.concat_batches(parts) if parts else pa.RecordBatch.from_pylist([], fields)

    def transform_marked_rows(
        self, schema: TableSchema, data: pa.RecordBatch, unfit: pa.Array, into: TableId | None = None
    ) -> tuple[pa.RecordBatch, pa.Array]:
        """Return the same for rows with unfit values, and the cells of `_unfit` for them.

        The cells also name rows that a rule with `dead-letter` failed at.
        """
        plan = self.table_plan(schema)
        if not plan.steps:
            return data, unfit
        routed = plan.run(open_snapshot_rows(schema, data, unfit))
        for target, rows in routed:
            for failure in rows.failures:
                if self._policy[failure.rule] == "halt":
                    raise _transform_error(plan.source, failure, None) from failure.error
            _mark(target, rows)
        fields = pa.schema(plan.target.row_fields())
        parts = [(pa.RecordBatch.from_pylist([], fields), pa.nulls(0, change.UNFIT_TYPE))]
        for rows in _rows_to_load(plan, routed, into):
            transformed = to_batch(rows, plan.target).data
            columns = [transformed.column(change.stored_name(name)) for name in fields.names]
            has_cells = change.UNFIT in transformed.schema.names
            cells = transformed.column(change.UNFIT) if has_cells else pa.nulls(transformed.num_rows, change.UNFIT_TYPE)
            parts.append((pa.RecordBatch.from_arrays(columns, schema=fields), cells))
        return pa.concat_batches([transformed for transformed, _ in parts]), pa.concat_arrays(
            [cells for _, cells in parts]
        )

    def _halt(self, schema: TableSchema, routed: list[tuple[TableSchema, RowImages]], batch: ChangeBatch) -> None:
        for _, rows in routed:
            for failure in rows.failures:
                if self._policy[failure.rule] == "halt":
                    raise _transform_error(
                        schema, failure, _position(batch, int(rows.source_rows[failure.rows][0]))
                    ) from failure.error


def _mark(schema: TableSchema, rows: RowImages) -> None:
    """Mark rows that a rule failed at in `_unfit`."""
    for failure in rows.failures:
        column = failure.column if failure.column in rows.after.columns else schema.names[0]
        texts = rows.unfit.setdefault((AFTER, column), {})
        texts.update(
            dict.fromkeys(np.flatnonzero(failure.rows).tolist(), change.rule_failure_text(failure.rule, failure.reason))
        )


def _refuse_other_types(rule: Outbox, output: OutputSchema) -> None:
    """Refuse a changed type column: the source is asked which types there are."""
    type_column, source_columns = output.columns.get(rule.type_column), output.source.columns
    if type_column is not None and (
        type_column.source_index is None
        or type_column.is_changed
        or source_columns[type_column.source_index].name != rule.type_column
    ):
        raise output.rule_error(
            rule,
            "an earlier rule has changed the type of messages",
            "Put `outbox` before that rule.",
            column=rule.type_column,
        )


def _plan_of(transforms: Transforms, with_names: bool) -> TransformPlan:
    return TransformPlan(transforms, names=OutputTables(transforms.rules) if with_names else None)


def _rows_to_load(
    plan: TablePlan, routed: list[tuple[TableSchema, RowImages]], into: TableId | None
) -> list[RowImages]:
    """Return the rows of the table that is loaded. A row may reach one table in several ways."""
    if into is None and any(target is not plan.target for target, _ in routed):
        raise Unsupported(
            "rows of one table would be loaded into several",
            table=plan.source.table,
            hint="Name the table to load in `into`.",
        )
    return [rows for target, rows in routed if into is None or target.table == into]


def _position(batch: ChangeBatch, row: int) -> str | None:
    if change.POSITION not in batch.data.schema.names:
        return None
    position: str = batch.data.column(change.POSITION)[row].as_py()
    return position or None  # injected changes have none


def _transform_error(
    schema: TableSchema, failure: RuleFailure, position: str | None, hint: str = HALT_HINT
) -> TransformFailed:
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


_BORROWING = {change.MOVED_FROM, change.UNCHANGED}


def _old_halves(batch: ChangeBatch, rows: Any, rejected: Any) -> Any:
    """Return the deletes of old keys that these key moves take unsent values from.

    Handed out alone, such a delete would remove the values, and the dead letter could not be applied again.
    """
    names = set(batch.data.schema.names)
    if not names >= _BORROWING:
        return rows[:0]
    borrowing = [batch.data.column(name).is_valid().to_numpy(zero_copy_only=False) for name in _BORROWING]
    before = rows[np.logical_and.reduce(borrowing)[rows] & (rows > 0)] - 1
    deletes = batch.data.column(change.OP).take(pa.array(before)).to_pylist()
    return before[
        np.array([operation == Operation.DELETE.value for operation in deletes], np.bool_) & ~rejected[before]
    ]


def _dead_letter(failure: RuleFailure, batch: ChangeBatch, rows: Any) -> DeadLetter:
    data = batch.data.take(pa.array(rows))
    names = set(data.schema.names)
    moves = len(data) - data.column(change.MOVED_FROM).null_count if change.MOVED_FROM in names else 0
    return DeadLetter(
        rule=failure.rule,
        cause=failure.reason,
        column=failure.column,
        batch=replace(batch, data=data, ends=None, moves=moves, truncates=0),
    )
