"""A capture beside a stream of Spark's: for those who give `format("cdc")` a database and no pipeline.

It is the capture of any pipeline, with no settings file and no lake tables: a child of the process that runs the
stream's source, which ends with it, however that ends. The log that it makes says that it is such a one; a pipeline's
log is refused, since its tables would be taken for ones that nobody wants any more. And it says which tables were
asked for so far: whoever captures into it next captures those too, so that several streams may take turns with one log.
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
"""In a log that was made by one of these; not part of the log's format. It has the tables, and the last start that they
were published for."""
CATCH_UP_SECONDS_MAX = 86_400.0
_LOOK_SECONDS, _REMOTE_LOOK_SECONDS = 0.02, 0.1
"""How often the log is looked at, and where each look is a request."""
_NOWHERE = "/nonexistent/tailrace-stream"
"""Settings name a file that they are from, and a folder of tables. Here there is neither."""
_MODULE = "tailrace.pipeline.capture.embedded_capture"
_ANEW = (
    'read the tables as a whole (`spark.read.format("cdc")` with `url`), and begin with a new checkpoint and a new '
    "place for the log. What the old log left at the source, slot and publications, is named `tailrace_…` after its "
    "id: drop it."
)
_ANEW_HINTS: Mapping[type[TailraceError], str] = {
    PositionLost: f"Changes after the log's last one are gone, or it was put back from an older copy: {_ANEW}",
    HistoryDiverged: "The log holds changes that never happened on this server. Let the option `url` name the one that "
    f"has them; if that is gone: {_ANEW}",
}
"""Others would be told to have their tables loaded anew; a stream has none."""


@dataclass(kw_only=True)
class EmbeddedCapture:
    """What to capture, and the process that does once it is started."""

    url: str = field(repr=False)
    log: str
    """A folder, or `s3://bucket/prefix`, of whose store the next two tell."""
    endpoint: str | None = None
    region: str | None = None
    tables: tuple[str, ...]
    _child: CaptureChild | None = field(default=None, repr=False)
    _horizon: Lsn = ZERO
    """What was committed before the start ends there at the latest."""

    def start(self) -> None:
        try:
            with connect(self.url) as connection:
                self._horizon = preflight.committed_until(connection)
        except TailraceError as error:
            raise with_stream_hint(error) from None
        start, log = uuid.uuid4().hex, self._place
        told = {
            "url": self.url,
            "log": self.log,
            "endpoint": self.endpoint,
            "region": self.region,
            "tables": self.tables,
            "start": start,
        }
        self._child = CaptureChild(log, [_MODULE, self.log], told=json.dumps(told).encode() + b"\n")
        try:
            # The log may be there from before, and the publication not be what it is to become.
            self._child.wait_for_log(threading.Event(), begun=lambda: _marked(log).get("start") == start)
        except TailraceError as error:
            self.stop()
            raise with_stream_hint(error) from None
        except BaseException:
            self.stop()
            raise

    def catch_up(self) -> None:
        deadline = time.monotonic() + CATCH_UP_SECONDS_MAX
        log = ChangeLog.open(self._place)
        pause = _REMOTE_LOOK_SECONDS if files.is_remote(log.path) else _LOOK_SECONDS
        while (last := log.last_header()) is None or last.end < self._horizon:
            self.check()
            if time.monotonic() > deadline:
                raise SourceSlow(
                    "the capture did not catch up in time",
                    seconds=CATCH_UP_SECONDS_MAX,
                    hint="What it has is kept: start the query again, and look at what the server is busy with.",
                )
            time.sleep(pause)

    def check(self) -> None:
        assert self._child is not None, "started before it is asked for"
        try:
            self._child.check()
        except TailraceError as error:
            raise with_stream_hint(error) from None

    def stop(self) -> None:
        if self._child is not None:
            self._child.stop()
            self._child = None

    @property
    def _place(self) -> LogPath:
        return files.parse_log_path(self.log, endpoint=self.endpoint, region=self.region)


def stream_settings(
    url: str, log: str, tables: tuple[str, ...], *, endpoint: str | None = None, region: str | None = None
) -> PipelineSettings:
    """The settings of a pipeline that has no tables."""
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
        found = error.errors()[0]
        said = found.get("ctx", {})
        raise ConfigError(
            f"the options cannot be used: {'.'.join(map(str, found['loc']))} {said.get('message', found['msg'])}",
            hint=said.get("hint", ""),
        ) from None


def claim_log(log: LogPath) -> tuple[str, ...]:
    """Mark the log as a stream's own before anything is in it; refuse one that is not. The tables that were asked for
    so far."""
    with files.explain_errors(log):
        if (log / MARK_FILE).exists():
            return tuple(_marked(log).get("tables", ()))
        if (log / "meta.json").exists():
            raise LogForeign(
                "the log is a pipeline's, which captures for itself",
                log=log,
                hint="Leave out `url`, and run the pipeline's capture beside the stream; or give `log` a new place.",
            )
        files.make_folder(log)
        files.replace_durably(log / MARK_FILE, b"{}\n")
    return ()


def _marked(log: LogPath) -> dict[str, Any]:
    path = log / MARK_FILE
    with files.explain_errors(path):
        text = path.read_bytes()
    try:
        found: dict[str, Any] = json.loads(text)
        return found
    except ValueError as error:
        raise LogCorrupt(
            "the log's list of tables cannot be read",
            path=path,
            hint="Put `{}` there: the tables of streams that do not run now are left out then until those start.",
        ) from error


class _StartMarker:
    """Told that the capture has begun, when publication and slot are as they should be, it marks that; nobody watches
    otherwise."""

    def __init__(self, log: LogPath, tables: tuple[str, ...], start: str) -> None:
        self._path = log / MARK_FILE
        self._mark = {"tables": tables, "start": start}

    def tick(self, status: PipelineStatus) -> None: ...

    def event(self, text: str, **fields: object) -> None:
        with files.explain_errors(self._path):
            files.replace_durably(self._path, json.dumps(self._mark).encode() + b"\n")


def with_stream_hint(error: TailraceError) -> TailraceError:
    """The same error, with what its reader can do: a stream has no command line."""
    if isinstance(error, (LogBusy, SlotBusy)):
        hint = (
            "Does another stream capture into this log? Leave out `url` in this one, and keep `log`: it reads what the "
            "other captures. Or give it a `log` of its own. If no such stream runs, end the process that is named here."
        )
        return type(error)(error.message, hint=hint, **error.fields)
    if type(error) in _ANEW_HINTS:
        return type(error)(error.message, hint=_ANEW_HINTS[type(error)], **error.fields)
    return as_option_error(error)


def main() -> int:
    """Capture until told to stop; what went wrong is the last line of the output."""
    from tailrace.pipeline import runner

    told = json.loads(sys.stdin.buffer.readline())
    try:
        store = {"endpoint": told["endpoint"], "region": told["region"]}
        path = stream_settings(told["url"], told["log"], tuple(told["tables"]), **store).log.path
        tables = tuple(dict.fromkeys([*claim_log(path), *told["tables"]]))
        settings = stream_settings(told["url"], told["log"], tables, **store)
        marking = _StartMarker(path, tables, told["start"])
        # It goes on after that: a child does. But what was there at the start is in the log without delay.
        runner.capture(settings, until_caught_up=True, observer=marking, child=True)
    except TailraceError as error:
        told_error = error_to_json(with_stream_hint(error))
        print(json.dumps({"error": told_error}), flush=True)  # noqa: T201 # for whoever started us
        return int(error.exit_code)
    return 0


if __name__ == "__main__":
    sys.exit(main())
