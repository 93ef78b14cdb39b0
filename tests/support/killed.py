"""Puts a log in order in a process that dies at a named place; one such process after another, each quickly.

`python -m tests.support.killed HITS` reads lines `name turn folder` and answers each with how the process ended: 0, or
minus the signal. Everything is loaded once; each process is a fork of this one, which has no other threads.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType

from tailrace import failpoints
from tailrace.changelog.retention import Policy, trim
from tailrace.changelog.sealing import Limits, Sealer

LIMITS = Limits(commits=2, join_count=2)
LATER = 4e9


def put_in_order(folder: Path) -> None:
    """Seal, join, clean up and let go of all that nobody needs."""
    with Sealer(folder, limits=LIMITS) as sealer:
        sealer.seal()
        sealer.join()
        sealer.clean(0)
        trim(sealer, Policy(age_seconds=0.0), now=LATER)
        sealer.clean(0)


class Killed:
    """The process that starts those that die."""

    def __init__(self, hits: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.killed", str(hits)], text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, env={**os.environ, "TAILRACE_FAILPOINT_LOG": str(hits)},
        )  # fmt: skip

    def __enter__(self) -> Killed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate()

    def at(self, name: str, turn: int, folder: Path) -> int:
        """Put the log in order until the n-th passing of the named place; how that ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{name} {turn} {folder}\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


def main() -> None:
    for line in sys.stdin:
        name, turn, folder = line.split(maxsplit=2)
        child = os.fork()
        if not child:
            os.setsid()  # a failpoint kills its whole process group
            os.environ["TAILRACE_FAILPOINT"] = f"{name}:{turn}"
            importlib.reload(failpoints)
            put_in_order(Path(folder.strip()))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
