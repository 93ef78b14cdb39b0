"""Changes that the caller injects, on their way to the next batches.

They pass the same rules as all changes, in the order of injection. A change that a rule halts at blocks the ones behind
it. Injected changes lose their position and are not stored. They do not count among the stored rows, so their `_seq` is
below zero, where no change of the source has its number. It grows, and stays the same when a sink gets the rows again.
Both rows of a key move are in one batch, or refused.
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
"""Most injected batches that may wait."""
FIRST_SEQ = -(1 << 63)
"""Base of `_seq`. The time in nanoseconds is added, so a restarted program repeats no number."""


class InjectedChanges:
    """Injected changes that wait to be handed out. Any thread may ask for their number."""

    def __init__(self, rules: TransformRunner, *, as_they_come: bool) -> None:
        self._rules, self._as_they_come = rules, as_they_come
        self._waiting: deque[ChangeBatch] = deque()
        self._last: ChangeBatch | None = None
        self._next_seq = FIRST_SEQ

    def add(self, changes: ChangeBatch | Event) -> None:
        if len(self._waiting) >= INJECTED_MAX:
            raise RuntimeRefused("too many injected batches are waiting", hint="Poll before you inject more.")
        if isinstance(changes, Event):
            _require_whole(changes)
        elif not isinstance(changes, ChangeBatch):
            raise ConfigError(
                "injected value is neither a change batch nor an event",
                found=type(changes).__name__,
                hint="Pass an `Event`, the result of `batch_of(…)`, or the items of `batch.batches` one by one.",
            )
        batch = batch_of_event(changes) if isinstance(changes, Event) else changes
        require_batch(batch, placed=True)
        _require_pairs(batch)
        if len(batch):
            self._waiting.append(self._numbered(batch))

    def _numbered(self, batch: ChangeBatch) -> ChangeBatch:
        if self._as_they_come:  # a log counts from zero and adds its own number
            first = 0
        else:
            first = max(self._next_seq, FIRST_SEQ + time.time_ns())
            self._next_seq = first + len(batch)
        data = _with_column(batch.data, change.SEQ, pa.array(np.arange(first, first + len(batch))))
        if not self._as_they_come:
            data = _with_column(data, change.POSITION, pa.repeat(pa.scalar("", pa.string()), len(batch)))
        return replace(batch, data=data, ends=(first, first + len(batch) - 1))

    def next(self) -> tuple[ChangeBatch, ...]:
        """Return the next rows, transformed by the rules; empty if there are none."""
        while self._waiting:
            first = self._waiting[0]
            transformed = self._rules.transform_batches((first,))
            self._last = first  # after the rules: a halted batch stays first in line
            self._waiting.popleft()
            if transformed:
                return renumber(transformed) if self._as_they_come else transformed
        return ()

    def confirm_taken(self) -> None:
        """Forget the rows handed out last: they were accepted."""
        self._last = None

    def put_back(self) -> None:
        """Put back the rows handed out last: they were not accepted."""
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


def _with_column(data: pa.RecordBatch, name: str, column: pa.Array) -> pa.RecordBatch:
    """Return the rows with a column's values replaced, if they have the column."""
    index = data.schema.get_field_index(name)
    return data if index < 0 else data.set_column(index, data.schema.field(index), column)


def _require_whole(event: Event) -> None:
    """Refuse an event that needs the old row of its key move.

    A key move takes values that the server did not send from the old row. Only a batch with both rows has them.
    """
    if event.kept_for is not None or (event.moved_from is not None and event.unchanged):
        raise _half_move_error(event)


def _require_pairs(batch: ChangeBatch) -> None:
    """Refuse a batch with half of such a key move."""
    if not {change.MOVED_FROM, change.UNCHANGED} <= set(batch.data.schema.names):
        return
    has_old_row = False
    for event in batch.events():
        if event.moved_from is not None and event.unchanged and not event.unfit and not has_old_row:
            raise _half_move_error(event)
        has_old_row = event.kept_for is not None


def _half_move_error(event: Event) -> ConfigError:
    return ConfigError(
        "half of a key move was injected",
        table=event.table,
        columns=", ".join(event.unchanged),
        hint="Inject the batch (`batch.batches`) that has the delete of the old key and the row after it. Injected one "
        "by one, they lose the values that the server did not send.",
    )


def batch_of_event(event: Event) -> ChangeBatch:
    """Return one change as a batch."""
    schema = event.schema
    require_instance("schema", schema, TableSchema, "Pass the schema of the event's table.")
    require_instance("operation", event.operation, Operation, "Pass `Operation.INSERT`, or another operation.")
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
    fields = [
        field for field in schema.change_schema() if field.name not in change.OPTIONAL or row[field.name] is not None
    ]
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
    """Return the old row to store with the change, or None.

    A delete's own values are the old row already. A value missing there would read as null.
    """
    old = event.before
    itself = old is not None and event.operation is Operation.DELETE and old.items() <= event.values.items()
    return None if itself else old


def _stored(values: dict[str, object] | None) -> dict[str, object] | None:
    return None if values is None else {change.stored_name(name): value for name, value in values.items()}
