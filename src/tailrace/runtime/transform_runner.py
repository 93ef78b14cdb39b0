"""Declared rules at work in a runtime: on the stream, on what a snapshot reads, on what is injected.

All three go through one plan, so a row has the same values and types whichever way it comes. Where a rule halts,
nothing is handed out, and nothing behind it: the same rows are tried again. Rows that a rule sets aside are taken by
`on_letter` before the rows beside them are handed out; if it does not take them, it is as if the rule had halted.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tailrace.capture.port import Stream
from tailrace.errors import ConfigError, SinkError, TailraceError
from tailrace.model.batch import ChangeBatch
from tailrace.model.position_kinds import P
from tailrace.runtime.observers import ObserverList, RowsDeadLettered, RuleUnmatched
from tailrace.transforms.rules import RulesInput, Transforms

if TYPE_CHECKING:
    from tailrace.transforms.transform_plan import DeadLetter, OnDeadLetter, TransformPlan
from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

from tailrace.model import change
from tailrace.model.batch import AnyWindow
from tailrace.model.system_streams import is_system

log = logging.getLogger(__name__)


class TransformRunner:
    """The rules of a runtime; or none, which lets everything pass."""

    def __init__(
        self, rules: RulesInput | TransformPlan | None, on_letter: OnDeadLetter | None, tell: ObserverList
    ) -> None:
        self._plan = None if rules is None else _made_ready(rules)
        self._on_letter, self._tell = on_letter, tell
        for rule in self._plan.transforms.rules if self._plan is not None else ():
            if rule.on_error == "dead-letter" and on_letter is None:
                raise ConfigError(
                    "a rule sets rows aside, and nobody takes them",
                    rule=rule.name,
                    hint="Give the runtime `on_letter`, a function that stores them; or let the rule halt.",
                )

    def require_ready(self) -> None:
        """Refuse to start without what rules need, rather than halt at the first row."""
        if self._plan is not None:
            self._plan.require_keys()

    def transform_stream(self, stream: Stream[P]) -> Stream[P]:
        """The stream as the rules show it."""
        if self._plan is None:
            return stream
        from tailrace.transforms.transformed_stream import TransformedStream

        return TransformedStream(stream, self._plan, self._take)

    def transform_batches(self, batches: Sequence[ChangeBatch]) -> tuple[ChangeBatch, ...]:
        """The rows that the rules let through, each with the `_seq` it had."""
        return tuple(batches) if self._plan is None else self._plan.apply_all(batches, self._take)

    def _take(self, letter: DeadLetter) -> None:
        assert self._on_letter is not None, "no rule sets rows aside without it"
        table, rows = letter.batch.schema.table, len(letter.batch)
        try:
            self._on_letter(letter)
        except TailraceError:
            raise
        except Exception as error:  # of the caller's own
            raise SinkError(
                "rows that a rule has set aside were not taken",
                rule=letter.rule,
                table=table,
                rows=rows,
                hint="Mend what `on_letter` does; raise `SinkUnready` in it for what waiting mends.",
            ) from error
        self._tell(RowsDeadLettered(rule=letter.rule, table=table, rows=rows, cause=letter.cause))

    def report_unmatched(self) -> None:
        """Name the rules that have had nothing to do."""
        for idle in self._plan.unmatched_rules() if self._plan is not None else ():
            log.warning("rule never matched", extra={"rule": idle.rule, "why": idle.reason})
            self._tell(RuleUnmatched(rule=idle.rule, reason=idle.reason))


def _made_ready(rules: RulesInput | TransformPlan) -> TransformPlan | None:
    """Only a runtime that has rules loads what they are computed with."""
    if not rules and isinstance(rules, Transforms | list | tuple | Mapping):
        return None
    from tailrace.transforms.transform_plan import TransformPlan

    return rules if isinstance(rules, TransformPlan) else TransformPlan(rules)


Transform: TypeAlias = Callable[[ChangeBatch], ChangeBatch]
_OWN = (change.OP, change.SEQ, change.TX, change.TX_INDEX, change.COMMITTED_AT)


def transform_window(window: AnyWindow, transform: Transform | None) -> AnyWindow:
    """The window as the function makes it."""
    if transform is None:
        return window
    return replace(window, batches=tuple(_applied(batch, transform) for batch in window.batches))


def _applied(batch: ChangeBatch, transform: Transform) -> ChangeBatch:
    if is_system(batch.schema):
        return batch
    made = transform(batch)
    if not isinstance(made, ChangeBatch):
        raise ConfigError(
            "a transform gave no batch",
            table=batch.schema.table,
            found=type(made).__name__,
            hint="Return what it was given with other values: `dataclasses.replace(rows, data=…)`.",
        )
    names = set(made.data.schema.names)
    missing = [column for column in made.schema.names if change.stored_name(column) not in names]
    if len(made) != len(batch) or missing or any(not _same(batch, made, name) for name in _OWN):
        raise ConfigError(
            "a transform took or added rows, or changed what changes say of themselves",
            table=batch.schema.table,
            hint="It may change values and columns; `schema` names every column that `data` has.",
        )
    return made


def _same(batch: ChangeBatch, made: ChangeBatch, name: str) -> bool:
    if name not in made.data.schema.names:
        return False
    mine, theirs = batch.data.column(name), made.data.column(name)
    return theirs is mine or bool(theirs.equals(mine))
