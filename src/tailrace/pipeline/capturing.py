"""The capture side of a pipeline: no Spark, no Java, a process of its own.

The order of a first start is the log's meta.json, publication, slot, first commit; after any crash in between
the next start finds its place. A later start refuses to go on unless the slot can still give everything after
the log's position.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from tailrace.capture.postgres.source import PostgresCapture, identify
from tailrace.changelog.writer import LogWriter
from tailrace.model.batch import Window
from tailrace.model.position import ZERO
from tailrace.pipeline.settings import PipelineSettings
from tailrace.pipeline.wiring import open_source
from tailrace.runtime.loop import CdcRuntime


class Capturing:
    """A capture that is ready to run: the log is ours, publication and slot are there."""

    def __init__(self, settings: PipelineSettings, *, until_caught_up: bool) -> None:
        identity = identify(settings.source.url)
        self.log = LogWriter(settings.log.path, identity)
        try:
            self.source: PostgresCapture = open_source(settings, self.log.log_id)
            begin = self.source.prepare(self.log.position if self.log.commit else None)
            if begin is not None:
                self.log.append(Window(start=ZERO, end=begin))
            target = self.source.horizon() if until_caught_up else None
        except BaseException:
            self.log.close()
            raise
        self.runtime = CdcRuntime(self.source.live, self.log, target=target)
        self.started = time.monotonic()

    def run(self, stopping: Callable[[], bool]) -> None:
        """Capture until told to stop, then let go of slot and log."""
        try:
            self.runtime.run(stopping)
        finally:
            self.log.close()
