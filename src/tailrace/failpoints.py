"""Named points where a test may kill the process; nothing happens unless one is armed.

`TAILRACE_FAILPOINT=name:n` kills the whole process group at the n-th passing of `name`. It first writes the name to the
file `TAILRACE_FAILPOINT_LOG`. To the disk, killing the group looks like a machine that loses power.
`TAILRACE_FAILPOINT_SCOPE=process` kills only this process, after lingering long enough for other threads to report to
the source what they should not.
"""

from __future__ import annotations

import os
import signal
import time

NAMES = (
    "capture.window_read",
    "capture.piece_read",
    "capture.before_confirm",
    "capture.after_confirm",
    "runtime.sink_written",
    "runtime.sink_flushed",
    "runtime.scan_saved",
    "runtime.prefix_saved",
    "log.before_write",
    "log.after_write",
    "log.after_link",
    "log.schema_recorded",
    "log.piece_written",
    "seal.file_written",
    "seal.before_publish",
    "seal.after_publish",
    "seal.view_made",
    "clean.removed",
    "trim.recorded",
    "trim.removed",
    "load.planned",
    "load.snapshot_open",
    "load.before_record",
    "load.after_record",
    "load.landed",
    "seed.linked",
    "apply.before_table",
    "apply.batch_done",
    "table.before_commit",
    "table.after_commit",
    "iceberg.staged",
    "letters.written",
    "letters.tidied",
    "letters.promised",
    "letters.delivered",
    "rebuild.replayed",
    "rebuild.linked",
    "state.written",
    "state.replaced",
    "state.saved",
    "state.created",
    "state.removed",
)
"""All failpoints; the crash test hits each."""

LINGER_SECONDS = 0.5

_armed, _left = "", 1


def arm(setting: str) -> None:
    """Arm a failpoint as `name:n`; an empty text disarms. The environment arms one at the start."""
    global _armed, _left
    _armed, _, count = setting.partition(":")
    _left = int(count or 1)


arm(os.environ.get("TAILRACE_FAILPOINT", ""))


def hit(name: str) -> None:
    """Pass the failpoint; die there if it is armed and its count is reached."""
    global _left
    if name != _armed:
        return
    _left -= 1
    if _left > 0:
        return
    with open(os.environ["TAILRACE_FAILPOINT_LOG"], "a", encoding="utf-8") as log:
        log.write(name + "\n")
        log.flush()
        os.fsync(log.fileno())
    if os.environ.get("TAILRACE_FAILPOINT_SCOPE") == "process":
        time.sleep(LINGER_SECONDS)
        os.kill(os.getpid(), signal.SIGKILL)
    os.killpg(0, signal.SIGKILL)
