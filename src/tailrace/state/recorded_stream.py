"""Record every schema of a stream before its first row is delivered.

A stream that broke is opened again at the position where its rows were last durable. Rows then repeat, and with them
schemas that the history has already, also older ones. Those are found in the history, in their order, and not recorded
again.
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
    """Records the schemas of windows in a history. One per opening of a stream; one thread uses it."""

    def __init__(self, history: SchemaHistory) -> None:
        self._history = history
        self._schemas: dict[TableId, TableSchema] = {}
        """The last schema of each table's rows. A stream passes the same object again and again."""
        self._at: dict[TableId, SchemaVersion] = {}

    def record_window(self, window: AnyWindow) -> None:
        """Record every schema of the window. Call it before the window is handed to anyone."""
        for batch in window.batches:
            if self._schemas.get(batch.schema.table) is not batch.schema and not is_system(batch.schema):
                self._record(batch, window.start)
                self._schemas[batch.schema.table] = batch.schema

    def _record(self, batch: ChangeBatch, start: Position) -> None:
        schema = batch.schema
        chain = self._history.versions(schema.table)
        known = self._at.get(schema.table)
        begin = _first_index(chain, start) if known is None else _index_of(chain, known)
        # The newest one is recorded again: that adds no version, but the history learns the current catalogue facts.
        for version in chain[begin:-1]:
            if version.event is not SchemaEvent.DROP and same_version(version.schema, schema):
                self._at[schema.table] = version
                return
        time, position = _first_row(batch, start)
        self._at[schema.table] = self._history.record(schema, time=time, position=position)


def _first_index(chain: Sequence[SchemaVersion], start: Position) -> int:
    """Return the index of the version that rows after `start` begin with.

    That is the newest, unless the rows repeat. The position is unknown for a version that began in a part of a
    transaction. Such a version counts as begun: then one may be recorded twice, but none is ever left out.
    """
    begun = [
        index for index, version in enumerate(chain) if version.position is None or reaches(start, version.position)
    ]
    return max(begun, default=0)


def _index_of(chain: Sequence[SchemaVersion], known: SchemaVersion) -> int:
    first = chain[0].version if chain else known.version
    return max(known.version - first, 0)


def _first_row(batch: ChangeBatch, start: Position) -> tuple[datetime, Position | None]:
    """Return the first row's commit time, and its position if that is known.

    The position is where the row's transaction ends.
    """
    time: datetime = batch.data.column(change.COMMITTED_AT)[0].as_py()
    if change.POSITION not in batch.data.schema.names:
        return time, None
    return time, parse_position(position_type_of(start), batch.data.column(change.POSITION)[0].as_py())


class RecordedStream(Generic[P]):
    """A stream whose schemas are in the history before its rows are returned."""

    def __init__(self, stream: Stream[P], history: SchemaHistory) -> None:
        require_stream(stream)
        require_methods("history", history, ("record", "latest"), 'Give `FileSchemaHistory("state/schemas")`.')
        self._stream, self._recorder = stream, SchemaRecorder(history)
        self._unrecorded: Window[P] | None = None
        """A window that is not in the history yet. A stream may return it only once."""
        if isinstance(stream, HasTimeline):
            self.timeline = stream.timeline

    @property
    def held_bytes(self) -> int:
        """Bytes that the stream has read ahead, if it does."""
        return getattr(self._stream, "held_bytes", 0)

    def read(self, after: P, wait_seconds: float) -> Window[P] | None:
        if self._unrecorded is None:
            self._unrecorded = self._stream.read(after, wait_seconds)
        window = self._unrecorded
        if window is not None:
            self._recorder.record_window(window)
        self._unrecorded = None
        return window

    def confirm(self, position: P) -> None:
        self._stream.confirm(position)

    def close(self) -> None:
        self._stream.close()
