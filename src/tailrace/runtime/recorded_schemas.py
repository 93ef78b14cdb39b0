"""The shapes of rows that are handed out: each is in the schema history before its first row is anyone's."""

from __future__ import annotations

from tailrace.model.batch import AnyWindow
from tailrace.model.schema import TableId, TableSchema
from tailrace.model.system_streams import is_system
from tailrace.runtime.observers import ShapeSeen, Telling
from tailrace.state.recorded_stream import SchemaFeed
from tailrace.state.schema_history import SchemaHistory


class Shapes:
    """Tells the history, and observers."""

    def __init__(self, history: SchemaHistory | None, tell: Telling) -> None:
        self._history, self._tell = history, tell
        self._feed = SchemaFeed(history) if history is not None else None
        self._seen: dict[TableId, TableSchema] = {}

    def reopened(self) -> None:
        """Rows come again, and with them shapes of before."""
        if self._history is not None:
            self._feed = SchemaFeed(self._history)

    def see(self, window: AnyWindow) -> None:
        """To be called before anyone is given the window."""
        if self._feed is not None:
            self._feed.take(window)
        if not self._tell:
            return
        for batch in window.batches:
            shape = batch.schema
            known = self._seen.get(shape.table)
            if known is not shape:
                self._seen[shape.table] = shape
                if known != shape and not is_system(shape):
                    self._tell(ShapeSeen(table=shape.table, columns=len(shape.columns)))
