"""Tailrace: change data capture on Spark, in Python.

The public names, imported when they are first used: `import tailrace` costs nothing. Those that need Spark, or a lake
format, are left out of `__all__`: a program that has neither can still take everything else.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tailrace.capture.base import Capabilities, ChangeCapture, Lag, SourceId, Stream
    from tailrace.capture.memory import MemoryCapture, batch_of
    from tailrace.capture.postgres.settings import PostgresSettings
    from tailrace.capture.postgres.source import PostgresCapture
    from tailrace.changelog.read.reader import ChangeLog
    from tailrace.changelog.write.writer import LogWriter
    from tailrace.control.point_in_time import tables_at as tables_at
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
    from tailrace.pipeline.datasource import CdcSource as CdcSource
    from tailrace.pipeline.datasource import register as register
    from tailrace.runtime.batch import Ack, Batch, Kind, Limits, Transactions
    from tailrace.runtime.control import Control
    from tailrace.runtime.keeping import LogSink
    from tailrace.runtime.loop import CdcRuntime
    from tailrace.runtime.observing import (
        Committed,
        Delivered,
        Fact,
        Failed,
        Health,
        Lost,
        Paused,
        PollFailed,
        Resumed,
        RowsRejected,
        RuleHalted,
        RuleUnmatched,
        SetAside,
        ShapeSeen,
        SnapshotBegun,
        SnapshotEnded,
        Started,
        StartFailed,
        Status,
        Stopped,
        StreamOpened,
        TableRead,
        Verdict,
    )
    from tailrace.runtime.sinks import FanOut, JsonlSink, MemorySink, Rejected, Sink, StreamSink, TableRouter
    from tailrace.runtime.states import Drained, State
    from tailrace.state.checkpoint import Checkpoint, CheckpointStore, check_key, seed_checkpoint
    from tailrace.state.checkpoints import FileCheckpointStore, MemoryCheckpointStore
    from tailrace.state.feeding import RecordedStream
    from tailrace.state.histories import FileSchemaHistory
    from tailrace.state.history import MemorySchemaHistory, Retention, SchemaEvent, SchemaHistory, SchemaVersion
    from tailrace.transforms import rules
    from tailrace.transforms.plan import Applied, Letter, TransformPlan, Unmatched
    from tailrace.transforms.rules import KeySource, Rule, Transforms
    from tailrace.transforms.stream import TransformedStream

_HOMES = {
    "Ack": "runtime.batch",
    "Applied": "transforms.plan",
    "Batch": "runtime.batch",
    "BinlogPosition": "model.positions",
    "Capabilities": "capture.base",
    "CdcRuntime": "runtime.loop",
    "CdcSource": "pipeline.datasource",
    "ChangeBatch": "model.batch",
    "ChangeCapture": "capture.base",
    "ChangeLog": "changelog.read.reader",
    "Checkpoint": "state.checkpoint",
    "CheckpointStore": "state.checkpoint",
    "Column": "model.schema",
    "Committed": "runtime.observing",
    "Control": "runtime.control",
    "CustomPosition": "model.positions",
    "Delete": "model.event",
    "Delivered": "runtime.observing",
    "Drained": "runtime.states",
    "Event": "model.event",
    "ExitCode": "errors",
    "Fact": "runtime.observing",
    "Failed": "runtime.observing",
    "FanOut": "runtime.sinks",
    "FileCheckpointStore": "state.checkpoints",
    "FileSchemaHistory": "state.histories",
    "Health": "runtime.observing",
    "Identity": "model.schema",
    "JsonlSink": "runtime.sinks",
    "KeySource": "transforms.rules",
    "Kind": "runtime.batch",
    "Lag": "capture.base",
    "Letter": "transforms.plan",
    "Limits": "runtime.batch",
    "LogSink": "runtime.keeping",
    "LogWriter": "changelog.write.writer",
    "Lost": "runtime.observing",
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
    "Paused": "runtime.observing",
    "PollFailed": "runtime.observing",
    "PositionType": "model.positions",
    "PostgresCapture": "capture.postgres.source",
    "PostgresSettings": "capture.postgres.settings",
    "RecordedStream": "state.feeding",
    "Rejected": "runtime.sinks",
    "Remedy": "errors",
    "Replace": "model.event",
    "Resumed": "runtime.observing",
    "Retention": "state.history",
    "RowsRejected": "runtime.observing",
    "Rule": "transforms.rules",
    "RuleHalted": "runtime.observing",
    "RuleUnmatched": "runtime.observing",
    "SchemaEvent": "state.history",
    "SchemaHistory": "state.history",
    "SchemaVersion": "state.history",
    "SetAside": "runtime.observing",
    "ShapeSeen": "runtime.observing",
    "Sink": "runtime.sinks",
    "SnapshotBegun": "runtime.observing",
    "SnapshotEnded": "runtime.observing",
    "SourceId": "capture.base",
    "SqlServerLsn": "model.positions",
    "StartFailed": "runtime.observing",
    "Started": "runtime.observing",
    "State": "runtime.states",
    "Status": "runtime.observing",
    "Stopped": "runtime.observing",
    "Stream": "capture.base",
    "StreamOpened": "runtime.observing",
    "StreamSink": "runtime.sinks",
    "TableId": "model.schema",
    "TableRead": "runtime.observing",
    "TableRouter": "runtime.sinks",
    "TableSchema": "model.schema",
    "TailraceError": "errors",
    "Transactions": "runtime.batch",
    "TransformPlan": "transforms.plan",
    "TransformedStream": "transforms.stream",
    "Transforms": "transforms.rules",
    "Truncate": "model.event",
    "Unmatched": "transforms.plan",
    "Verdict": "runtime.observing",
    "Window": "model.batch",
    "batch_of": "capture.memory",
    "check_key": "state.checkpoint",
    "register": "pipeline.datasource",
    "seed_checkpoint": "state.checkpoint",
    "tables_at": "control.point_in_time",
    "to_debezium": "model.encode",
    "to_json": "model.encode",
}

__all__ = [
    "Ack",
    "Applied",
    "Batch",
    "BinlogPosition",
    "Capabilities",
    "CdcRuntime",
    "ChangeBatch",
    "ChangeCapture",
    "ChangeLog",
    "Checkpoint",
    "CheckpointStore",
    "Column",
    "Committed",
    "Control",
    "CustomPosition",
    "Delete",
    "Delivered",
    "Drained",
    "Event",
    "ExitCode",
    "Fact",
    "Failed",
    "FanOut",
    "FileCheckpointStore",
    "FileSchemaHistory",
    "Health",
    "Identity",
    "JsonlSink",
    "KeySource",
    "Kind",
    "Lag",
    "Letter",
    "Limits",
    "LogSink",
    "LogWriter",
    "Lost",
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
    "Paused",
    "PollFailed",
    "PositionType",
    "PostgresCapture",
    "PostgresSettings",
    "RecordedStream",
    "Rejected",
    "Remedy",
    "Replace",
    "Resumed",
    "Retention",
    "RowsRejected",
    "Rule",
    "RuleHalted",
    "RuleUnmatched",
    "SchemaEvent",
    "SchemaHistory",
    "SchemaVersion",
    "SetAside",
    "ShapeSeen",
    "Sink",
    "SnapshotBegun",
    "SnapshotEnded",
    "SourceId",
    "SqlServerLsn",
    "StartFailed",
    "Started",
    "State",
    "Status",
    "Stopped",
    "Stream",
    "StreamOpened",
    "StreamSink",
    "TableId",
    "TableRead",
    "TableRouter",
    "TableSchema",
    "TailraceError",
    "Transactions",
    "TransformPlan",
    "TransformedStream",
    "Transforms",
    "Truncate",
    "Unmatched",
    "Verdict",
    "Window",
    "batch_of",
    "check_key",
    "rules",
    "seed_checkpoint",
    "to_debezium",
    "to_json",
]


def __getattr__(name: str) -> Any:
    if name == "rules":  # a module: its names are words of every day
        return importlib.import_module("tailrace.transforms.rules")
    if name not in _HOMES:
        raise AttributeError(f"module 'tailrace' has no attribute {name!r}")
    try:
        home = importlib.import_module(f"tailrace.{_HOMES[name]}")
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing in ("", __name__):
            raise
        raise ImportError(
            f"`tailrace.{name}` needs the package `{missing}`, which is not installed: `pip install tailrace` brings "
            "all that pipelines need",
            name=missing,
        ) from error
    return getattr(home, name)
