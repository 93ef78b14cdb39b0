"""Checks of what a stream returned against the promises of the port.

A source may be written by anyone. A window that declares fewer rows than it holds would be skipped. A window that
begins after the requested position would lose changes. Rows not numbered consecutively would share numbers with other
rows. All of this would be silent, so each window is checked before it is used.
"""

from __future__ import annotations

import pyarrow as pa

from tailrace.capture.port import require_position_type
from tailrace.errors import ConfigError
from tailrace.model import change
from tailrace.model.batch import AnyWindow, ChangeBatch, Window
from tailrace.model.position_kinds import Position, reaches
from tailrace.model.schema import TableSchema
from tailrace.validation import require_instance, require_methods

_ALWAYS = tuple(field.name for field in change.REQUIRED)


def require_stream(stream: object) -> None:
    """Refuse what `live` returned if it is not a stream."""
    hint = "Return an object with `read(after, wait_seconds)`, `confirm(position)` and `close()` from `live(after)`."
    require_methods("live(…)", stream, ("read", "confirm", "close"), hint)


def require_window(window: AnyWindow, after: Position) -> None:
    """Refuse what is not a window after this position."""
    require_instance("read(…)", window, Window, "Return a `Window`, or None if nothing arrived in time.")
    require_position_type(window.end, after)
    if not reaches(after, window.start):
        raise ConfigError(
            "a window begins after the requested position: changes are missing",
            start=window.start,
            after=after,
            hint="Begin a window where the one before ended: `start=after`.",
        )
    rows = 0
    numbers: list[int] = []
    for batch in window.batches:
        require_batch(batch, placed=not window.open)
        if not len(batch):
            raise ConfigError(
                "a window has a batch without rows", table=batch.schema.table, hint="Leave the batch out."
            )
        seqs = batch.data.column(change.SEQ)
        rows += len(seqs)
        numbers += (seqs[0].as_py(), seqs[-1].as_py())
    if rows != window.rows:
        raise ConfigError(
            "a window does not have the number of rows that it declares",
            says=window.rows,
            has=rows,
            hint="Set `rows=` to the rows of all its batches together, and `transactions=`.",
        )
    if numbers and max(numbers) - min(numbers) != rows - 1:
        raise ConfigError(
            "the rows of a window are not numbered consecutively",
            first=min(numbers),
            last=max(numbers),
            rows=rows,
            hint="Count `_seq` from 0 through all batches of a window, in the order of the changes.",
        )


def require_batch(batch: ChangeBatch, *, placed: bool) -> None:
    """Refuse rows that lack columns of a change. `placed`: the end of their transactions is known."""
    require_instance("batches", batch, ChangeBatch, "Give `ChangeBatch(schema=…, data=…)` for each table.")
    require_instance("schema", batch.schema, TableSchema, "Give the batch the `TableSchema` of its table.")
    require_instance("data", batch.data, pa.RecordBatch, "Give the rows as a `pyarrow.RecordBatch`.")
    present = set(batch.data.schema.names)
    required = (*_ALWAYS, *map(change.stored_name, batch.schema.names))
    missing = [name for name in required if name not in present and (placed or name != change.POSITION)]
    if missing:
        raise ConfigError(
            "rows lack columns of their schema",
            table=batch.schema.table,
            columns=", ".join(missing),
            hint="`schema.change_schema()` has all: what every change has, and the table's own columns. Create such "
            "a batch with `batch_of(…)`.",
        )
