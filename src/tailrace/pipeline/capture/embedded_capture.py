"""Capture for a Spark stream that has a database and no pipeline.

It is the capture of any pipeline, with no settings file and no lake tables. It runs as a child of the process that runs
the stream's source, and ends with it, however that ends. Its log is marked as a stream's own. A pipeline's log is
refused, because capture would treat the pipeline's tables as unwanted. The mark also lists the tables that streams have
asked for so far, and the next capture into the log captures those too. So several streams may take turns with one log.
"""

from __future__ import annotations

import json
import sys
import threading
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from tailrace.capture.postgres import preflight
from tailrace.capture.postgres.connect import connect
from tailrace.changelog.read.reader import ChangeLog
from tailrace.errors import (
    ConfigError,
    HistoryDiverged,
    LogBusy,
    LogCorrupt,
    LogForeign,
    PositionLost,
    SlotBusy,
    SourceSlow,
    TailraceError,
)
from tailrace.model.position import ZERO, Lsn
from tailrace.pipeline.capture.capture_process import CaptureChild
from tailrace.pipeline.config.settings import PipelineSettings
from tailrace.pipeline.report import PipelineStatus, error_to_json
from tailrace.spark.datasource.option_values import as_option_error
from tailrace.storage import files
from tailrace.storage.files import LogPath

MARK_FILE = "stream.json"
"""File that marks a stream's log; not part of the log format.

It holds the tables, and the id of the last start for which they were published.
"""
CATCH_UP_SECONDS_MAX = 86_400.0
_LOOK_SECONDS, _REMOTE_LOOK_SECONDS = 0.02, 0.1
"""Seconds between two looks at the log; longer where each look is a request."""
_NOWHERE = "/nonexistent/tailrace-stream"
"""Path for the settings file and the table folder. Both must be named; neither exists."""
_MODULE = "tailrace.pipeline.capture.embedded_capture"
_READ_AGAIN = (
    'read the tables as a whole (`spark.read.format("cdc")` with `url`), and begin with a new checkpoint and a new '
    "path for the log. Then drop the old log's slot and publications at the source: they are named `tailrace_…` after "
    "its id."
)
_STREAM_HINTS: Mapping[type[TailraceError], str] = {
    PositionLost: f"Changes after the log's last one are gone, or the log is an older copy: {_READ_AGAIN}",
    HistoryDiverged: "The log holds changes that never happened on this server. Set the option `url` to the server "
    f"that has them; if it is gone: {_READ_AGAIN}",
}
"""Hints for a stream; the usual ones advise reloading tables, and a stream has none."""


@dataclass(kw_only=True)
class EmbeddedCapture:
    """A capture for a stream, and its process once it is started."""

    url: str = field(repr=False)
    log: str
    """A folder, or `s3://bucket/prefix` with the store's endpoint and region below."""
    endpoint: str | None = None
    region: str | None = None
    tables: tuple[str, ...]
    _child: CaptureChild | None = field(default=None, repr=False)
    _horizon: Lsn = ZERO
    """Upper bound of what the source had committed before the start."""

    def start(self) -> None:
        try:
            with connect(self.url) as connection:
                self._horizon = preflight.committed_until(connection)
        except TailraceError as error:
            raise with_stream_hint(error) from None
        start, log = uuid.uuid4().hex, self._log_path
        request = {
            "url": self.url,
            "log": self.log,
            "endpoint": self.endpoint,
            "region": self.region,
            "tables": self.tables,
            "start": start,
        }
        self._child = CaptureChild(log, [_MODULE, self.log], stdin=json.dumps(request).encode() + b"\n")
        try:
            # The log may be an old one, and its publication not yet updated.
            self._child.wait_for_log(threading.Event(), begun=lambda: _read_mark(log).get("start") == start)
        except TailraceError as error:
            self.stop()
            raise with_stream_hint(error) from None
        except BaseException:
            self.stop()
            raise

    def catch_up(self) -> None:
        deadline = time.monotonic() + CATCH_UP_SECONDS_MAX
        log = ChangeLog.open(self._log_path)
        pause = _REMOTE_LOOK_SECONDS if files.is_remote(log.path) else _LOOK_SECONDS
        while (last := log.last_header()) is None or last.end < self._horizon:
            self.check()
            if time.monotonic() > deadline:
                raise SourceSlow(
                    "the capture did not catch up in time",
                    seconds=CATCH_UP_SECONDS_MAX,
                    hint="Start the query again, and check what the server is busy with. What was captured is kept.",
                )
            time.sleep(pause)

    def check(self) -> None:
        assert self._child is not None, "start() is called first"
        try:
            self._child.check()
        except TailraceError as error:
            raise with_stream_hint(error) from None

    def stop(self) -> None:
        if self._child is not None:
            self._child.stop()
            self._child = None

    @property
    def _log_path(self) -> LogPath:
        return files.parse_log_path(self.log, endpoint=self.endpoint, region=self.region)


def stream_settings(
    url: str, log: str, tables: tuple[str, ...], *, endpoint: str | None = None, region: str | None = None
) -> PipelineSettings:
    """Return the settings of a pipeline without lake tables."""
    try:
        return PipelineSettings.model_validate(
            {
                "name": "stream",
                "file": f"{_NOWHERE}.yaml",
                "tables": {"path": f"{_NOWHERE}.tables"},
                "log": {"path": log, "endpoint": endpoint, "region": region},
                "source": {"url": url, "tables": tables, "messages": []},
            }
        )
    except ValidationError as error:
        first = error.errors()[0]
        context = first.get("ctx", {})
        raise ConfigError(
            f"the options cannot be used: {'.'.join(map(str, first['loc']))} {context.get('message', first['msg'])}",
            hint=context.get("hint", ""),
        ) from None


def claim_log(log: LogPath) -> tuple[str, ...]:
    """Mark an empty log as a stream's own, or refuse a pipeline's.

    Return the tables that streams have asked for so far.
    """
    with files.explain_errors(log):
        if (log / MARK_FILE).exists():
            return tuple(_read_mark(log).get("tables", ()))
        if (log / "meta.json").exists():
            raise LogForeign(
                "the log belongs to a pipeline, which has its own capture",
                log=log,
                hint="Leave out `url`, and run the pipeline's capture; or set `log` to a new path.",
            )
        files.make_folder(log)
        files.replace_durably(log / MARK_FILE, b"{}\n")
    return ()


def _read_mark(log: LogPath) -> dict[str, Any]:
    path = log / MARK_FILE
    with files.explain_errors(path):
        text = path.read_bytes()
    try:
        mark: dict[str, Any] = json.loads(text)
        return mark
    except ValueError as error:
        raise LogCorrupt(
            "the log's list of tables cannot be read",
            path=path,
            hint="Write `{}` to the file. Tables of other streams are captured again when those start.",
        ) from error


class _StartMarker:
    """An observer that marks the log once publication and slot are ready.

    This capture has no other observer.
    """

    def __init__(self, log: LogPath, tables: tuple[str, ...], start: str) -> None:
        self._path = log / MARK_FILE
        self._mark = {"tables": tables, "start": start}

    def tick(self, status: PipelineStatus) -> None: ...

    def event(self, text: str, **fields: object) -> None:
        with files.explain_errors(self._path):
            files.replace_durably(self._path, json.dumps(self._mark).encode() + b"\n")


def with_stream_hint(error: TailraceError) -> TailraceError:
    """Return the error with a hint for a stream's user, who has no command line."""
    if isinstance(error, (LogBusy, SlotBusy)):
        hint = (
            "Does another stream capture into this log? Leave out `url` in this one, and keep `log`: it reads what the "
            "other captures. Or give it its own `log`. If no such stream runs, end the process named in this error."
        )
        return type(error)(error.message, hint=hint, **error.fields)
    if type(error) in _STREAM_HINTS:
        return type(error)(error.message, hint=_STREAM_HINTS[type(error)], **error.fields)
    return as_option_error(error)


def main() -> int:
    """Capture until asked to stop; an error is the last line of the output."""
    from tailrace.pipeline import runner

    request = json.loads(sys.stdin.buffer.readline())
    try:
        store = {"endpoint": request["endpoint"], "region": request["region"]}
        path = stream_settings(request["url"], request["log"], tuple(request["tables"]), **store).log.path
        tables = tuple(dict.fromkeys([*claim_log(path), *request["tables"]]))
        settings = stream_settings(request["url"], request["log"], tables, **store)
        marker = _StartMarker(path, tables, request["start"])
        # As a child it continues after it has caught up; until then it reads without idle delays.
        runner.capture(settings, until_caught_up=True, observer=marker, child=True)
    except TailraceError as error:
        error_json = error_to_json(with_stream_hint(error))
        print(json.dumps({"error": error_json}), flush=True)  # noqa: T201 # the parent reads it
        return int(error.exit_code)
    return 0


if __name__ == "__main__":
    sys.exit(main())
