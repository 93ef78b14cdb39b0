"""The shapes of rows that are handed out: each is in the schema history before its first row is anyone's."""

from __future__ import annotations

from tailrace.model.batch import AnyWindow
from tailrace.model.schema import TableId, TableSchema
from tailrace.model.system_streams import is_system
from tailrace.runtime.observers import ObserverList, SchemaSeen
from tailrace.state.recorded_stream import SchemaRecorder
from tailrace.state.schema_history import SchemaHistory


class WindowSchemaRecorder:
    """Tells the history, and observers."""

    def __init__(self, history: SchemaHistory | None, tell: ObserverList) -> None:
        self._history, self._tell = history, tell
        self._feed = SchemaRecorder(history) if history is not None else None
        self._seen: dict[TableId, TableSchema] = {}

    def restart(self) -> None:
        """Rows come again, and with them shapes of before."""
        if self._history is not None:
            self._feed = SchemaRecorder(self._history)

    def record_schemas(self, window: AnyWindow) -> None:
        """To be called before anyone is given the window."""
        if self._feed is not None:
            self._feed.record_window(window)
        if not self._tell:
            return
        for batch in window.batches:
            shape = batch.schema
            known = self._seen.get(shape.table)
            if known is not shape:
                self._seen[shape.table] = shape
                if known != shape and not is_system(shape):
                    self._tell(SchemaSeen(table=shape.table, columns=len(shape.columns)))
