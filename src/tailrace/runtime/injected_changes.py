"""Changes of the caller's own, on their way to the next batches.

They pass the same rules as everything else, in the order of their coming, and one that a rule halts at is passed by
nothing. They carry no position, whatever they had, and are not kept, so they are not counted among the rows that are:
their `_seq` is a number below zero, which no change of the source has. It grows, and stays the same when a sink is
given them again.
Both rows of a key that changed come in one batch, or not at all.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace

import numpy as np
import pyarrow as pa

from tailrace.capture.stream_checks import require_batch
from tailrace.errors import ConfigError, RuntimeRefused
from tailrace.model import change
from tailrace.model.batch import ChangeBatch
from tailrace.model.change import Operation
from tailrace.model.event import Event
from tailrace.model.schema import TableSchema, unknown_column_error, wrong_type_error
from tailrace.runtime.transform_runner import TransformRunner
from tailrace.transforms.row_images import renumber
from tailrace.validation import require_instance

INJECTED_MAX = 10_000
FIRST_SEQ = -(1 << 63)
"""To which the time is added, in nanoseconds: a program that is started again does not repeat a number."""


class InjectedChanges:
    """What waits to be handed out. Any thread may ask how much that is."""

    def __init__(self, rules: TransformRunner, *, as_they_come: bool) -> None:
        self._rules, self._as_they_come = rules, as_they_come
        self._waiting: deque[ChangeBatch] = deque()
        self._last: ChangeBatch | None = None
        self._next_seq = FIRST_SEQ

    def add(self, changes: ChangeBatch | Event) -> None:
        if len(self._waiting) >= INJECTED_MAX:
            raise RuntimeRefused("too much was injected and not polled", hint="Poll before injecting more.")
        if isinstance(changes, Event):
            _require_whole(changes)
        elif not isinstance(changes, ChangeBatch):
            raise ConfigError(
                "neither a batch of a table nor an event was injected",
                found=type(changes).__name__,
                hint="Give an `Event`, what `batch_of(…)` makes, or one by one what `batch.batches` has.",
            )
        batch = batch_of_event(changes) if isinstance(changes, Event) else changes
        require_batch(batch, placed=True)
        _require_pairs(batch)
        if len(batch):
            self._waiting.append(self._numbered(batch))

    def _numbered(self, batch: ChangeBatch) -> ChangeBatch:
        if self._as_they_come:  # a log counts from zero, and adds its own number
            first = 0
        else:
            first = max(self._next_seq, FIRST_SEQ + time.time_ns())
            self._next_seq = first + len(batch)
        data = _with(batch.data, change.SEQ, pa.array(np.arange(first, first + len(batch))))
        if not self._as_they_come:
            data = _with(data, change.POSITION, pa.repeat(pa.scalar("", pa.string()), len(batch)))
        return replace(batch, data=data, ends=(first, first + len(batch) - 1))

    def next(self) -> tuple[ChangeBatch, ...]:
        """The rows that are handed out next, as the rules show them; none if there are none."""
        while self._waiting:
            first = self._waiting[0]
            made = self._rules.transform_batches((first,))
            self._last = first  # only now: nothing passes what a rule halts at
            self._waiting.popleft()
            if made:
                return renumber(made) if self._as_they_come else made
        return ()

    def confirm_taken(self) -> None:
        """What was handed out last was taken."""
        self._last = None

    def put_back(self) -> None:
        """What was handed out last was not taken: it comes again."""
        if self._last is not None:
            if not self._waiting or self._waiting[0] is not self._last:
                self._waiting.appendleft(self._last)
            self._last = None

    def drain(self) -> tuple[ChangeBatch, ...]:
        drained = tuple(self._waiting)
        self._waiting.clear()
        return drained

    def __bool__(self) -> bool:
        return bool(self._waiting)

    @property
    def rows(self) -> int:
        return sum(map(len, tuple(self._waiting)))


def _with(data: pa.RecordBatch, name: str, column: pa.Array) -> pa.RecordBatch:
    """The rows with other values in a column, if they have it."""
    place = data.schema.get_field_index(name)
    return data if place < 0 else data.set_column(place, data.schema.field(place), column)


def _require_whole(event: Event) -> None:
    """What the server did not send of a row that moved is taken from the old row, which only a batch of both keeps."""
    if event.kept_for is not None or (event.moved_from is not None and event.unchanged):
        raise _half(event)


def _require_pairs(batch: ChangeBatch) -> None:
    """The same of a batch."""
    if not {change.MOVED_FROM, change.UNCHANGED} <= set(batch.data.schema.names):
        return
    kept = False
    for event in batch.events():
        if event.moved_from is not None and event.unchanged and not event.unfit and not kept:
            raise _half(event)
        kept = event.kept_for is not None


def _half(event: Event) -> ConfigError:
    return ConfigError(
        "half of a change of key was injected",
        table=event.table,
        columns=", ".join(event.unchanged),
        hint="Inject the batch (`batch.batches`) that holds the delete of the old key and the row behind it: one "
        "by one the values that the server did not send are lost.",
    )


def batch_of_event(event: Event) -> ChangeBatch:
    """One change as a batch."""
    schema = event.schema
    require_instance("schema", schema, TableSchema, "An event has the shape of its table.")
    require_instance("operation", event.operation, Operation, "Give `Operation.INSERT`, or another of them.")
    if unknown := [str(name) for name in event.values if name not in schema.names]:
        raise unknown_column_error(schema, unknown)
    row: dict[str, object] = {
        change.OP: event.operation.value,
        change.SEQ: event.seq,
        change.POSITION: event.position or "",
        change.TX: event.transaction,
        change.TX_INDEX: event.tx_index,
        change.COMMITTED_AT: event.committed_at or 0,
        change.UNCHANGED: list(event.unchanged) or None,
        change.BEFORE: _stored(_old_row(event)),
        change.MOVED_FROM: _stored(event.moved_from),
        change.UNFIT: [{"column": name, "text": text} for name, text in event.unfit.items()] or None,
        **{change.stored_name(name): event.values.get(name) for name in schema.names},
    }
    fields = [one for one in schema.change_schema() if one.name not in change.OPTIONAL or row[one.name] is not None]
    try:
        data = pa.RecordBatch.from_pylist([row], pa.schema(fields))
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        raise wrong_type_error(schema) from error
    return ChangeBatch(
        schema=schema,
        data=data,
        moves=int(event.moved_from is not None),
        truncates=int(event.operation is Operation.TRUNCATE),
        unfit=len(event.unfit),
    )


def _old_row(event: Event) -> dict[str, object] | None:
    """What stands beside the row. A delete is the old row itself: what it lacks there would be taken for null."""
    old = event.before
    itself = old is not None and event.operation is Operation.DELETE and old.items() <= event.values.items()
    return None if itself else old


def _stored(values: dict[str, object] | None) -> dict[str, object] | None:
    return None if values is None else {change.stored_name(name): value for name, value in values.items()}
