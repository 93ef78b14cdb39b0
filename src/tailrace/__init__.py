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
    from tailrace.model.batch import ChangeBatch, Event, Window
    from tailrace.model.change import Operation
    from tailrace.model.position import Lsn
    from tailrace.model.schema import Column, Identity, TableId, TableSchema
    from tailrace.pipeline.points import tables_at
    from tailrace.runtime.loop import CdcRuntime
    from tailrace.spark.read import CdcSource

_HOMES = {
    "Capabilities": "capture.base",
    "CdcRuntime": "runtime.loop",
    "CdcSource": "spark.read",
    "ChangeBatch": "model.batch",
    "ChangeCapture": "capture.base",
    "ChangeLog": "changelog.reader",
    "Column": "model.schema",
    "Event": "model.batch",
    "ExitCode": "errors",
    "Identity": "model.schema",
    "Lag": "capture.base",
    "LogWriter": "changelog.writer",
    "Lsn": "model.position",
    "MemoryCapture": "capture.memory",
    "Operation": "model.change",
    "PostgresCapture": "capture.postgres.source",
    "PostgresSettings": "capture.postgres.settings",
    "Remedy": "errors",
    "SourceId": "capture.base",
    "Stream": "capture.base",
    "TableId": "model.schema",
    "TableSchema": "model.schema",
    "TailraceError": "errors",
    "Window": "model.batch",
    "tables_at": "pipeline.points",
}

__all__ = [
    "Capabilities",
    "CdcRuntime",
    "CdcSource",
    "ChangeBatch",
    "ChangeCapture",
    "ChangeLog",
    "Column",
    "Event",
    "ExitCode",
    "Identity",
    "Lag",
    "LogWriter",
    "Lsn",
    "MemoryCapture",
    "Operation",
    "PostgresCapture",
    "PostgresSettings",
    "Remedy",
    "SourceId",
    "Stream",
    "TableId",
    "TableSchema",
    "TailraceError",
    "Window",
    "tables_at",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'tailrace' has no attribute {name!r}")
    return getattr(importlib.import_module(f"tailrace.{_HOMES[name]}"), name)
