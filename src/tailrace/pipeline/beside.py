"""A capture beside a stream of Spark's: for those who give `format("cdc")` a database and no pipeline.

It is the capture of any pipeline, with no settings file and no lake tables: a child of the process that runs the
stream's source, which ends with it, however that ends. The log that it makes says that it is such a one; a pipeline's
log is refused, since its tables would be taken for ones that nobody wants any more.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from dataclasses import dataclass, field

from pydantic import ValidationError

from tailrace.capture.postgres import preflight
from tailrace.capture.postgres.connect import connect
from tailrace.changelog import files
from tailrace.changelog.files import LogPath
from tailrace.changelog.reader import ChangeLog
from tailrace.errors import ConfigError, LogForeign, SourceSlow, TailraceError
from tailrace.model.position import ZERO, Lsn
from tailrace.pipeline.child import CaptureChild
from tailrace.pipeline.report import PipelineStatus, error_to_json
from tailrace.pipeline.settings import PipelineSettings

MARK = "stream.json"
"""In a log that was made by one of these; not part of the log's format."""
CATCH_UP_SECONDS_MAX = 86_400.0
_LOOK_SECONDS = 0.02
_MODULE = "tailrace.pipeline.beside"


@dataclass(kw_only=True)
class Beside:
    """What to capture, and the process that does once it is started."""

    url: str = field(repr=False)
    log: str
    tables: tuple[str, ...]
    _child: CaptureChild | None = field(default=None, repr=False)
    _horizon: Lsn = ZERO
    """What was committed before the start ends there at the latest."""

    def start(self) -> None:
        with connect(self.url) as connection:
            self._horizon = preflight.horizon(connection)
        told = json.dumps({"url": self.url, "log": self.log, "tables": self.tables}).encode() + b"\n"
        self._child = CaptureChild(files.place(self.log), [_MODULE, self.log], told=told)
        try:
            self._child.wait_for_log(threading.Event())
        except BaseException:
            self.stop()
            raise

    def catch_up(self) -> None:
        deadline = time.monotonic() + CATCH_UP_SECONDS_MAX
        log = ChangeLog.open(self.log)
        while (last := log.last_header()) is None or last.end < self._horizon:
            self.check()
            if time.monotonic() > deadline:
                raise SourceSlow("the capture did not catch up in time", seconds=CATCH_UP_SECONDS_MAX)
            time.sleep(_LOOK_SECONDS)

    def check(self) -> None:
        assert self._child is not None, "started before it is asked for"
        self._child.check()

    def stop(self) -> None:
        if self._child is not None:
            self._child.stop()
            self._child = None


def settings_of(url: str, log: str, tables: tuple[str, ...]) -> PipelineSettings:
    """The settings of a pipeline that has no tables."""
    try:
        return PipelineSettings.model_validate({
            "name": "stream", "file": f"{log}.yaml", "log": log, "tables": {"path": f"{log}.tables"},
            "source": {"url": url, "tables": tables, "messages": []},
        })  # fmt: skip
    except ValidationError as error:
        found = error.errors()[0]
        said = found.get("ctx", {})
        raise ConfigError(
            f"the options cannot be used: {'.'.join(map(str, found['loc']))} {said.get('message', found['msg'])}",
            hint=said.get("hint", ""),
        ) from None


def claim(log: LogPath) -> None:
    """Mark the log as a stream's own before anything is in it; refuse one that is not."""
    if (log / MARK).exists():
        return
    if (log / "meta.json").exists():
        raise LogForeign(
            "the log is a pipeline's, which captures for itself", log=log,
            hint="Leave out `url`, and run the pipeline's capture beside the stream; or give `log` a new folder.",
        )  # fmt: skip
    with files.explained(log):
        files.make_folder(log)
        files.replace_durably(log / MARK, b"{}\n")


class _Silent:
    """Nobody watches."""

    def tick(self, status: PipelineStatus) -> None: ...

    def event(self, text: str, **fields: object) -> None: ...


def main() -> int:
    """Capture until told to stop; what went wrong is the last line of the output."""
    from tailrace.pipeline import runner

    told = json.loads(sys.stdin.buffer.readline())
    try:
        settings = settings_of(told["url"], told["log"], tuple(told["tables"]))
        claim(settings.log.path)
        # It goes on after that: a child does. But what was there at the start is in the log without delay.
        runner.capture(settings, until_caught_up=True, observer=_Silent(), child=True)
    except TailraceError as error:
        print(json.dumps({"error": error_to_json(error)}), flush=True)  # noqa: T201 # for whoever started us
        return int(error.exit_code)
    return 0


if __name__ == "__main__":
    sys.exit(main())
