"""How a reader of the log waits for the next commit: by looking whether its file is there."""

from __future__ import annotations

import os
import time

from tailrace.changelog.format.commit_file import commit_path
from tailrace.storage import files
from tailrace.storage.files import LogPath

_POLL_SECONDS = 0.001
"""How often a follower looks for the next commit's file,"""


_LOOK_SECONDS = 0.02
"""and for what else may have become of that commit,"""


_LIVELY_SECONDS = 0.25
"""while the last one is so recent;"""


_IDLE_SECONDS = 0.1
"""and how often for either after that."""


_REMOTE_SECONDS, _REMOTE_LIVELY_SECONDS, _REMOTE_IDLE_SECONDS = 0.1, 2.0, 1.0
"""The same where every look is a request: how often while the last one is how recent, and after that."""


def wait_for_commit(log: LogPath, commit: int, quiet_seconds: float) -> None:
    """Wait a while for a commit: while it may come any moment by looking for its file, which costs little on a disk."""
    if files.is_remote(log):
        time.sleep(_REMOTE_SECONDS if quiet_seconds < _REMOTE_LIVELY_SECONDS else _REMOTE_IDLE_SECONDS)
        return
    if quiet_seconds >= _LIVELY_SECONDS:
        time.sleep(_IDLE_SECONDS)
        return
    path, until = str(commit_path(log, commit)), time.monotonic() + _LOOK_SECONDS
    while time.monotonic() < until and not os.path.exists(path):
        time.sleep(_POLL_SECONDS)
