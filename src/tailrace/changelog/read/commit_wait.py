"""Wait for the next commit by a look at its file."""

from __future__ import annotations

import os
import time

from tailrace.changelog.format.commit_file import commit_path
from tailrace.storage import files
from tailrace.storage.files import LogPath

_POLL_SECONDS = 0.001
"""Pause between two looks for the next commit's file, while the log is busy."""


_LOOK_SECONDS = 0.02
"""Time of polling after which the caller looks for other changes to that commit."""


_LIVELY_SECONDS = 0.25
"""The log is busy while its last commit is more recent than this."""


_IDLE_SECONDS = 0.1
"""Pause between two looks while the log is not busy."""


_REMOTE_SECONDS, _REMOTE_LIVELY_SECONDS, _REMOTE_IDLE_SECONDS = 0.1, 2.0, 1.0
"""The same where every look is a request.

They are the pause while busy, the limit of busy, and the pause after it.
"""


def wait_for_commit(log: LogPath, commit: int, quiet_seconds: float) -> None:
    """Wait a while for a commit.

    While it may arrive at any moment, poll for its file, which costs little on a disk.
    """
    if files.is_remote(log):
        time.sleep(_REMOTE_SECONDS if quiet_seconds < _REMOTE_LIVELY_SECONDS else _REMOTE_IDLE_SECONDS)
        return
    if quiet_seconds >= _LIVELY_SECONDS:
        time.sleep(_IDLE_SECONDS)
        return
    path, deadline = str(commit_path(log, commit)), time.monotonic() + _LOOK_SECONDS
    while time.monotonic() < deadline and not os.path.exists(path):
        time.sleep(_POLL_SECONDS)
