"""Transforms in a runtime: declared rules, and a function of the caller's.

Rules apply to the stream, to what a snapshot reads and to injected changes. All three use one plan, so a row has the
same values and types whichever way it takes. Where a rule halts, nothing is handed out, and nothing behind it: the same
rows are tried again. Rejected rows go to `on_dead_letter` before the other rows of their batch are handed out. If it
fails, it is as if the rule had halted.

The caller's function takes Arrow and returns Arrow, for stream and snapshot alike. It changes values, never which rows
there are, nor a change's own metadata: an acknowledgement counts rows of the source. Where it fails, nothing is handed
out, and the next poll tries the same rows again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

from tailrace.capture.port import Stream
from tailrace.errors import ConfigError, SinkError, TailraceError
from tailrace.model import change
from tailrace.model.batch import AnyWindow, ChangeBatch
from tailrace.model.position_kinds import P
from tailrace.model.system_streams import is_system
from tailrace.runtime.observers import ObserverList, RowsDeadLettered, RuleUnmatched
from tailrace.transforms.rules import RulesInput, Transforms

if TYPE_CHECKING:
    from tailrace.transforms.transform_plan import DeadLetter, OnDeadLetter, TransformPlan

log = logging.getLogger(__name__)


class TransformRunner:
    """The rules of a runtime; without rules every row passes unchanged."""

    def __init__(
        self, rules: RulesInput | TransformPlan | None, on_dead_letter: OnDeadLetter | None, observers: ObserverList
    ) -> None:
        self._plan = None if rules is None else _plan_for(rules)
        self._on_letter, self._notify = on_dead_letter, observers
        for rule in self._plan.transforms.rules if self._plan is not None else ():
            if rule.on_error == "dead-letter" and on_dead_letter is None:
                raise ConfigError(
                    "rule makes dead letters, and there is no `on_dead_letter`",
                    rule=rule.name,
                    hint="Pass `on_dead_letter`, a function that stores them, or use `on_error: halt`.",
                )

    def require_ready(self) -> None:
        """Refuse to start without the keys that rules need; else the first row would halt."""
        if self._plan is not None:
            self._plan.require_keys()

    def transform_stream(self, stream: Stream[P]) -> Stream[P]:
        """Return the stream transformed by the rules."""
        if self._plan is None:
            return stream
        from tailrace.transforms.transformed_stream import TransformedStream

        return TransformedStream(stream, self._plan, self._take_dead_letter)

    def transform_batches(self, batches: Sequence[ChangeBatch]) -> tuple[ChangeBatch, ...]:
        """Return the rows that the rules let through, each with its `_seq`."""
        return tuple(batches) if self._plan is None else self._plan.apply_all(batches, self._take_dead_letter)

    def _take_dead_letter(self, dead_letter: DeadLetter) -> None:
        assert self._on_letter is not None, "a rule makes dead letters only with it"
        table, rows = dead_letter.batch.schema.table, len(dead_letter.batch)
        try:
            self._on_letter(dead_letter)
        except TailraceError:
            raise
        except Exception as error:  # the caller's own code
            raise SinkError(
                "`on_dead_letter` failed on dead letters",
                rule=dead_letter.rule,
                table=table,
                rows=rows,
                hint="Fix `on_dead_letter`. For a failure that passes with time, raise `SinkUnready` in it.",
            ) from error
        self._notify(RowsDeadLettered(rule=dead_letter.rule, table=table, rows=rows, cause=dead_letter.cause))

    def report_unmatched(self) -> None:
        """Report the rules that matched nothing."""
        for idle in self._plan.unmatched_rules() if self._plan is not None else ():
            log.warning("rule never matched", extra={"rule": idle.rule, "why": idle.reason})
            self._notify(RuleUnmatched(rule=idle.rule, reason=idle.reason))


def _plan_for(rules: RulesInput | TransformPlan) -> TransformPlan | None:
    """Return the plan of the rules, or None. Only a runtime that has rules imports their code."""
    if not rules and isinstance(rules, Transforms | list | tuple | Mapping):
        return None
    from tailrace.transforms.transform_plan import TransformPlan

    return rules if isinstance(rules, TransformPlan) else TransformPlan(rules)


Transform: TypeAlias = Callable[[ChangeBatch], ChangeBatch]
_OWN = (change.OP, change.SEQ, change.TX, change.TX_INDEX, change.COMMITTED_AT)


def transform_window(window: AnyWindow, transform: Transform | None) -> AnyWindow:
    """Return the window with the function applied to each batch."""
    if transform is None:
        return window
    return replace(window, batches=tuple(_transformed(batch, transform) for batch in window.batches))


def _transformed(batch: ChangeBatch, transform: Transform) -> ChangeBatch:
    if is_system(batch.schema):
        return batch
    result = transform(batch)
    if not isinstance(result, ChangeBatch):
        raise ConfigError(
            "transform did not return a batch",
            table=batch.schema.table,
            found=type(result).__name__,
            hint="Return the batch with other values: `dataclasses.replace(rows, data=…)`.",
        )
    names = set(result.data.schema.names)
    missing = [column for column in result.schema.names if change.stored_name(column) not in names]
    if len(result) != len(batch) or missing or any(not _column_unchanged(batch, result, name) for name in _OWN):
        raise ConfigError(
            "transform added or removed rows, or changed metadata columns",
            table=batch.schema.table,
            hint="Change values and columns only, and name every column of `data` in `schema`.",
        )
    return result


def _column_unchanged(batch: ChangeBatch, result: ChangeBatch, name: str) -> bool:
    if name not in result.data.schema.names:
        return False
    mine, theirs = batch.data.column(name), result.data.column(name)
    return theirs is mine or bool(theirs.equals(mine))
