"""What a stream has given, held to what streams promise.

A source may be anyone's own. A window that says less than it holds would be passed over, and one that begins behind the
place it was asked for would leave something out, each without a word; rows that are not numbered one after the other
would share their numbers with others. So each window is looked at before anything is made of it.
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
    """Refuse what `live` gave if it is no stream."""
    hint = "`live(after)` returns an object with `read(after, wait_seconds)`, `confirm(position)` and `close()`."
    require_methods("live(…)", stream, ("read", "confirm", "close"), hint)


def require_window(window: AnyWindow, after: Position) -> None:
    """Refuse what is no window behind this position."""
    require_instance("read(…)", window, Window, "Return a `Window`, or None if nothing came in time.")
    require_position_type(window.end, after)
    if not reaches(after, window.start):
        raise ConfigError(
            "a window begins behind the place that it was asked for: something is left out",
            start=window.start,
            after=after,
            hint="It begins where the one before has ended: `start=after`.",
        )
    rows = 0
    numbers: list[int] = []
    for batch in window.batches:
        require_batch(batch, placed=not window.open)
        if not len(batch):
            raise ConfigError("a batch of a window has no rows", table=batch.schema.table, hint="Leave it out.")
        seqs = batch.data.column(change.SEQ)
        rows += len(seqs)
        numbers += (seqs[0].as_py(), seqs[-1].as_py())
    if rows != window.rows:
        raise ConfigError(
            "a window does not have the rows that it says it has",
            says=window.rows,
            has=rows,
            hint="Give it `rows=`, how many all its batches have together, and `transactions=`.",
        )
    if numbers and max(numbers) - min(numbers) != rows - 1:
        raise ConfigError(
            "the rows of a window are not numbered one after the other",
            first=min(numbers),
            last=max(numbers),
            rows=rows,
            hint="`_seq` counts from 0 through all batches of a window, in the order of the changes.",
        )


def require_batch(batch: ChangeBatch, *, placed: bool) -> None:
    """Refuse rows that lack what changes have. `placed`: whether it is known where their transactions ended."""
    require_instance("batches", batch, ChangeBatch, "Give `ChangeBatch(schema=…, data=…)` for each table.")
    require_instance("schema", batch.schema, TableSchema, "A batch has the shape of its table.")
    require_instance("data", batch.data, pa.RecordBatch, "A batch has its rows as a `pyarrow.RecordBatch`.")
    there = set(batch.data.schema.names)
    needed = (*_ALWAYS, *map(change.stored_name, batch.schema.names))
    lacking = [name for name in needed if name not in there and (placed or name != change.POSITION)]
    if lacking:
        raise ConfigError(
            "rows lack what their shape says they have",
            table=batch.schema.table,
            columns=", ".join(lacking),
            hint="`schema.change_schema()` has all: what every change has, and the table's own columns. `batch_of(…)` "
            "makes such a batch.",
        )
