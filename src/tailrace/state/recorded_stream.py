"""What makes a history complete: every shape is told before its first row is delivered.

A stream that was broken off is opened again from where its rows were last durable, so rows come again, and with them
shapes that are in the history already, also older ones. Those are found there, in their order, and not told anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Generic

from tailrace.capture.port import HasTimeline, Stream
from tailrace.capture.stream_checks import require_stream
from tailrace.model import change
from tailrace.model.batch import AnyWindow, ChangeBatch, Window
from tailrace.model.evolution import same_version
from tailrace.model.position_kinds import P, Position, parse_position, position_type_of, reaches
from tailrace.model.schema import TableId, TableSchema
from tailrace.model.system_streams import is_system
from tailrace.state.schema_history import SchemaEvent, SchemaHistory, SchemaVersion
from tailrace.validation import require_methods


class SchemaRecorder:
    """Tells a history of the shapes in windows. One for each opening of a stream; one thread uses it."""

    def __init__(self, history: SchemaHistory) -> None:
        self._history = history
        self._shapes: dict[TableId, TableSchema] = {}
        """What rows of each table had last; a stream gives the same object again and again."""
        self._at: dict[TableId, SchemaVersion] = {}

    def record_window(self, window: AnyWindow) -> None:
        """Have every shape of the window in the history. To be called before anyone is given the window."""
        for batch in window.batches:
            if self._shapes.get(batch.schema.table) is not batch.schema and not is_system(batch.schema):
                self._tell(batch, window.start)
                self._shapes[batch.schema.table] = batch.schema

    def _tell(self, batch: ChangeBatch, start: Position) -> None:
        shape = batch.schema
        chain = self._history.versions(shape.table)
        known = self._at.get(shape.table)
        begin = _place(chain, start) if known is None else _index(chain, known)
        # The newest one is told again: it adds nothing, but the history hears what is known of the table now.
        for version in chain[begin:-1]:
            if version.event is not SchemaEvent.DROP and same_version(version.schema, shape):
                self._at[shape.table] = version
                return
        time, position = _first_row(batch, start)
        self._at[shape.table] = self._history.record(shape, time=time, position=position)


def _place(chain: Sequence[SchemaVersion], start: Position) -> int:
    """The version that rows after `start` begin with: the newest, unless they are rows that came before.

    Where it began is not known of one that came in a part of a transaction. It counts as begun: then a version may be
    told twice, but none is ever left out.
    """
    begun = [at for at, version in enumerate(chain) if version.position is None or reaches(start, version.position)]
    return max(begun, default=0)


def _index(chain: Sequence[SchemaVersion], known: SchemaVersion) -> int:
    first = chain[0].version if chain else known.version
    return max(known.version - first, 0)


def _first_row(batch: ChangeBatch, start: Position) -> tuple[datetime, Position | None]:
    """When the transaction of the batch's first row was committed, and where it ends, if that is known already."""
    time: datetime = batch.data.column(change.COMMITTED_AT)[0].as_py()
    if change.POSITION not in batch.data.schema.names:
        return time, None
    return time, parse_position(position_type_of(start), batch.data.column(change.POSITION)[0].as_py())


class RecordedStream(Generic[P]):
    """A stream whose shapes are in the history before its rows are anyone's. Otherwise it is the one it was given."""

    def __init__(self, stream: Stream[P], history: SchemaHistory) -> None:
        require_stream(stream)
        require_methods("history", history, ("record", "latest"), 'Give `FileSchemaHistory("state/shapes")`.')
        self._stream, self._feed = stream, SchemaRecorder(history)
        self._untold: Window[P] | None = None
        """Read, and not in the history yet: a stream may give it only once."""
        if isinstance(stream, HasTimeline):
            self.timeline = stream.timeline

    @property
    def held_bytes(self) -> int:
        """What the stream has read ahead, if it does."""
        return getattr(self._stream, "held_bytes", 0)

    def read(self, after: P, wait_seconds: float) -> Window[P] | None:
        if self._untold is None:
            self._untold = self._stream.read(after, wait_seconds)
        window = self._untold
        if window is not None:
            self._feed.record_window(window)
        self._untold = None
        return window

    def confirm(self, position: P) -> None:
        self._stream.confirm(position)

    def close(self) -> None:
        self._stream.close()
