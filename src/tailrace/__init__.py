"""Tailrace: change data capture on Spark, in Python.

The public names are imported when they are first used: `import tailrace` costs nothing. Names that need Spark, or a
lake format, are left out of `__all__`, so a program that has neither can still import everything else.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tailrace.capture.memory.source import MemoryCapture, batch_of
    from tailrace.capture.port import Capabilities, ChangeCapture, Lag, SourceId, Stream
    from tailrace.capture.postgres.config import PostgresSettings
    from tailrace.capture.postgres.source import PostgresCapture
    from tailrace.changelog.read.reader import ChangeLog
    from tailrace.changelog.write.writer import LogWriter
    from tailrace.control.point_in_time import tables_at as tables_at
    from tailrace.errors import ExitCode, Remedy, TailraceError
    from tailrace.model.batch import ChangeBatch, Window
    from tailrace.model.change import Operation
    from tailrace.model.event import Delete, Event, Merge, Nothing, Replace, Truncate
    from tailrace.model.event_json import to_debezium, to_json
    from tailrace.model.position import Lsn
    from tailrace.model.position_kinds import (
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
    from tailrace.runtime.handle import Control
    from tailrace.runtime.loop import CdcRuntime
    from tailrace.runtime.observers import (
        Committed,
        Delivered,
        Fact,
        Failed,
        Health,
        Lost,
        Paused,
        PollFailed,
        Resumed,
        RowsDeadLettered,
        RowsRejected,
        RuleHalted,
        RuleUnmatched,
        SchemaSeen,
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
    from tailrace.runtime.output_batch import Ack, Batch, BatchKind, Limits, Transactions
    from tailrace.runtime.position_store import LogSink
    from tailrace.runtime.runtime_state import Drained, State
    from tailrace.runtime.sinks import FanOut, JsonlSink, MemorySink, Rejected, Sink, StreamSink, TableRouter
    from tailrace.state.checkpoint import Checkpoint, CheckpointStore, check_key, seed_checkpoint
    from tailrace.state.checkpoint_stores import FileCheckpointStore, MemoryCheckpointStore
    from tailrace.state.recorded_stream import RecordedStream
    from tailrace.state.schema_history import MemorySchemaHistory, Retention, SchemaEvent, SchemaHistory, SchemaVersion
    from tailrace.state.schema_history_stores import FileSchemaHistory
    from tailrace.transforms import rules
    from tailrace.transforms.rules import KeySource, Rule, Transforms
    from tailrace.transforms.transform_plan import DeadLetter, TransformPlan, TransformResult, UnmatchedRule
    from tailrace.transforms.transformed_stream import TransformedStream

_HOMES = {
    "Ack": "runtime.output_batch",
    "Batch": "runtime.output_batch",
    "BatchKind": "runtime.output_batch",
    "BinlogPosition": "model.position_kinds",
    "Capabilities": "capture.port",
    "CdcRuntime": "runtime.loop",
    "CdcSource": "pipeline.datasource",
    "ChangeBatch": "model.batch",
    "ChangeCapture": "capture.port",
    "ChangeLog": "changelog.read.reader",
    "Checkpoint": "state.checkpoint",
    "CheckpointStore": "state.checkpoint",
    "Column": "model.schema",
    "Committed": "runtime.observers",
    "Control": "runtime.handle",
    "CustomPosition": "model.position_kinds",
    "DeadLetter": "transforms.transform_plan",
    "Delete": "model.event",
    "Delivered": "runtime.observers",
    "Drained": "runtime.runtime_state",
    "Event": "model.event",
    "ExitCode": "errors",
    "Fact": "runtime.observers",
    "Failed": "runtime.observers",
    "FanOut": "runtime.sinks",
    "FileCheckpointStore": "state.checkpoint_stores",
    "FileSchemaHistory": "state.schema_history_stores",
    "Health": "runtime.observers",
    "Identity": "model.schema",
    "JsonlSink": "runtime.sinks",
    "KeySource": "transforms.rules",
    "Lag": "capture.port",
    "Limits": "runtime.output_batch",
    "LogSink": "runtime.position_store",
    "LogWriter": "changelog.write.writer",
    "Lost": "runtime.observers",
    "Lsn": "model.position",
    "MariadbGtidSet": "model.position_kinds",
    "MemoryCapture": "capture.memory.source",
    "MemoryCheckpointStore": "state.checkpoint_stores",
    "MemorySchemaHistory": "state.schema_history",
    "MemorySink": "runtime.sinks",
    "Merge": "model.event",
    "MysqlGtidSet": "model.position_kinds",
    "Nothing": "model.event",
    "Operation": "model.change",
    "Paused": "runtime.observers",
    "PollFailed": "runtime.observers",
    "PositionType": "model.position_kinds",
    "PostgresCapture": "capture.postgres.source",
    "PostgresSettings": "capture.postgres.config",
    "RecordedStream": "state.recorded_stream",
    "Rejected": "runtime.sinks",
    "Remedy": "errors",
    "Replace": "model.event",
    "Resumed": "runtime.observers",
    "Retention": "state.schema_history",
    "RowsDeadLettered": "runtime.observers",
    "RowsRejected": "runtime.observers",
    "Rule": "transforms.rules",
    "RuleHalted": "runtime.observers",
    "RuleUnmatched": "runtime.observers",
    "SchemaEvent": "state.schema_history",
    "SchemaHistory": "state.schema_history",
    "SchemaSeen": "runtime.observers",
    "SchemaVersion": "state.schema_history",
    "Sink": "runtime.sinks",
    "SnapshotBegun": "runtime.observers",
    "SnapshotEnded": "runtime.observers",
    "SourceId": "capture.port",
    "SqlServerLsn": "model.position_kinds",
    "StartFailed": "runtime.observers",
    "Started": "runtime.observers",
    "State": "runtime.runtime_state",
    "Status": "runtime.observers",
    "Stopped": "runtime.observers",
    "Stream": "capture.port",
    "StreamOpened": "runtime.observers",
    "StreamSink": "runtime.sinks",
    "TableId": "model.schema",
    "TableRead": "runtime.observers",
    "TableRouter": "runtime.sinks",
    "TableSchema": "model.schema",
    "TailraceError": "errors",
    "Transactions": "runtime.output_batch",
    "TransformPlan": "transforms.transform_plan",
    "TransformResult": "transforms.transform_plan",
    "TransformedStream": "transforms.transformed_stream",
    "Transforms": "transforms.rules",
    "Truncate": "model.event",
    "UnmatchedRule": "transforms.transform_plan",
    "Verdict": "runtime.observers",
    "Window": "model.batch",
    "batch_of": "capture.memory.source",
    "check_key": "state.checkpoint",
    "register": "pipeline.datasource",
    "seed_checkpoint": "state.checkpoint",
    "tables_at": "control.point_in_time",
    "to_debezium": "model.event_json",
    "to_json": "model.event_json",
}

__all__ = [
    "Ack",
    "Batch",
    "BatchKind",
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
    "DeadLetter",
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
    "Lag",
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
    "RowsDeadLettered",
    "RowsRejected",
    "Rule",
    "RuleHalted",
    "RuleUnmatched",
    "SchemaEvent",
    "SchemaHistory",
    "SchemaSeen",
    "SchemaVersion",
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
    "TransformResult",
    "TransformedStream",
    "Transforms",
    "Truncate",
    "UnmatchedRule",
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
    if name == "rules":  # a module: its names are everyday words
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
            f"`tailrace.{name}` needs the package `{missing}`, which is not installed: `pip install tailrace` "
            "installs all that pipelines need",
            name=missing,
        ) from error
    return getattr(home, name)
