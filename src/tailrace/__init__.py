"""Tailrace: change data capture on Spark, in Python.

The public names, imported when they are first used: `import tailrace` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tailrace.capture.base import Capabilities, ChangeCapture, Lag, SourceId, Stream
    from tailrace.capture.memory import MemoryCapture
    from tailrace.capture.postgres.settings import PostgresSettings
    from tailrace.capture.postgres.source import PostgresCapture
    from tailrace.changelog.reader import ChangeLog
    from tailrace.changelog.writer import LogWriter
    from tailrace.errors import ExitCode, Remedy, TailraceError
    from tailrace.model.batch import ChangeBatch, Window
    from tailrace.model.change import Operation
    from tailrace.model.encode import to_debezium, to_json
    from tailrace.model.event import Delete, Event, Merge, Nothing, Replace, Truncate
    from tailrace.model.position import Lsn
    from tailrace.model.positions import (
        BinlogPosition,
        CustomPosition,
        MariadbGtidSet,
        MysqlGtidSet,
        PositionType,
        SqlServerLsn,
    )
    from tailrace.model.schema import Column, Identity, TableId, TableSchema
    from tailrace.pipeline.datasource import CdcSource, register
    from tailrace.pipeline.points import tables_at
    from tailrace.runtime.batch import Ack, Batch, Limits, Transactions
    from tailrace.runtime.control import Control
    from tailrace.runtime.keeping import LogSink
    from tailrace.runtime.loop import CdcRuntime
    from tailrace.runtime.observing import Fact, Health, Status, Verdict
    from tailrace.runtime.sinks import FanOut, JsonlSink, MemorySink, Rejected, Sink, StreamSink, TableRouter
    from tailrace.runtime.states import Drained
    from tailrace.state.checkpoint import Checkpoint, CheckpointStore, check_key, seed_checkpoint
    from tailrace.state.checkpoints import FileCheckpointStore, MemoryCheckpointStore
    from tailrace.state.feeding import RecordedStream
    from tailrace.state.histories import FileSchemaHistory
    from tailrace.state.history import (
        MemorySchemaHistory,
        Retention,
        SchemaEvent,
        SchemaHistory,
        SchemaVersion,
    )

_HOMES = {
    "Ack": "runtime.batch",
    "Batch": "runtime.batch",
    "BinlogPosition": "model.positions",
    "Capabilities": "capture.base",
    "CdcRuntime": "runtime.loop",
    "CdcSource": "pipeline.datasource",
    "ChangeBatch": "model.batch",
    "ChangeCapture": "capture.base",
    "ChangeLog": "changelog.reader",
    "Checkpoint": "state.checkpoint",
    "CheckpointStore": "state.checkpoint",
    "Column": "model.schema",
    "Control": "runtime.control",
    "CustomPosition": "model.positions",
    "Delete": "model.event",
    "Drained": "runtime.states",
    "Event": "model.event",
    "ExitCode": "errors",
    "Fact": "runtime.observing",
    "FanOut": "runtime.sinks",
    "FileCheckpointStore": "state.checkpoints",
    "FileSchemaHistory": "state.histories",
    "Health": "runtime.observing",
    "Identity": "model.schema",
    "JsonlSink": "runtime.sinks",
    "Lag": "capture.base",
    "Limits": "runtime.batch",
    "LogSink": "runtime.keeping",
    "LogWriter": "changelog.writer",
    "Lsn": "model.position",
    "MariadbGtidSet": "model.positions",
    "MemoryCapture": "capture.memory",
    "MemoryCheckpointStore": "state.checkpoints",
    "MemorySchemaHistory": "state.history",
    "MemorySink": "runtime.sinks",
    "Merge": "model.event",
    "MysqlGtidSet": "model.positions",
    "Nothing": "model.event",
    "Operation": "model.change",
    "PositionType": "model.positions",
    "PostgresCapture": "capture.postgres.source",
    "PostgresSettings": "capture.postgres.settings",
    "RecordedStream": "state.feeding",
    "Rejected": "runtime.sinks",
    "Remedy": "errors",
    "Replace": "model.event",
    "Retention": "state.history",
    "SchemaEvent": "state.history",
    "SchemaHistory": "state.history",
    "SchemaVersion": "state.history",
    "Sink": "runtime.sinks",
    "SourceId": "capture.base",
    "SqlServerLsn": "model.positions",
    "Status": "runtime.observing",
    "Stream": "capture.base",
    "StreamSink": "runtime.sinks",
    "TableId": "model.schema",
    "TableRouter": "runtime.sinks",
    "TableSchema": "model.schema",
    "TailraceError": "errors",
    "Transactions": "runtime.batch",
    "Truncate": "model.event",
    "Verdict": "runtime.observing",
    "Window": "model.batch",
    "check_key": "state.checkpoint",
    "register": "pipeline.datasource",
    "seed_checkpoint": "state.checkpoint",
    "tables_at": "pipeline.points",
    "to_debezium": "model.encode",
    "to_json": "model.encode",
}

__all__ = [
    "Ack",
    "Batch",
    "BinlogPosition",
    "Capabilities",
    "CdcRuntime",
    "CdcSource",
    "ChangeBatch",
    "ChangeCapture",
    "ChangeLog",
    "Checkpoint",
    "CheckpointStore",
    "Column",
    "Control",
    "CustomPosition",
    "Delete",
    "Drained",
    "Event",
    "ExitCode",
    "Fact",
    "FanOut",
    "FileCheckpointStore",
    "FileSchemaHistory",
    "Health",
    "Identity",
    "JsonlSink",
    "Lag",
    "Limits",
    "LogSink",
    "LogWriter",
    "Lsn",
    "MariadbGtidSet",
    "MemoryCapture",
    "MemoryCheckpointStore",
    "MemorySchemaHistory",
    "MemorySink",
    "Merge",
    "MysqlGtidSet",
    "Nothing",
    "Operation",
    "PositionType",
    "PostgresCapture",
    "PostgresSettings",
    "RecordedStream",
    "Rejected",
    "Remedy",
    "Replace",
    "Retention",
    "SchemaEvent",
    "SchemaHistory",
    "SchemaVersion",
    "Sink",
    "SourceId",
    "SqlServerLsn",
    "Status",
    "Stream",
    "StreamSink",
    "TableId",
    "TableRouter",
    "TableSchema",
    "TailraceError",
    "Transactions",
    "Truncate",
    "Verdict",
    "Window",
    "check_key",
    "register",
    "seed_checkpoint",
    "tables_at",
    "to_debezium",
    "to_json",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tailrace' has no attribute {name!r}")
    return getattr(importlib.import_module(f"tailrace.{_HOMES[name]}"), name)
