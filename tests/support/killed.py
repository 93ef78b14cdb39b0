"""Does a task in a process that dies at a named place; one such process after another, each quickly.

`python -m tests.support.killed HITS` reads lines `task name turn folder` and answers each with how the process ended:
0, or minus the signal. Everything is loaded once; each process is a fork of this one, which has no other threads.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType

import pyarrow as pa

from tailrace import failpoints
from tailrace.changelog.maintain.retention import RetentionPolicy, trim
from tailrace.changelog.maintain.seal_contents import SealLimits
from tailrace.changelog.maintain.sealer import Sealer
from tailrace.model.position import Lsn
from tailrace.model.schema import Column
from tailrace.state.checkpoint import Checkpoint
from tailrace.state.checkpoint_stores import FileCheckpointStore
from tailrace.state.schema_history import Retention
from tailrace.state.schema_history_stores import FileSchemaHistory
from tests.support.changes import SHOP

LIMITS = SealLimits(commits=2, merge_count=2)
LATER = 4e9
SAVES = 8


def put_in_order(folder: Path) -> None:
    """Seal, join, clean up and let go of all that nobody needs."""
    with Sealer(folder, limits=LIMITS) as sealer:
        sealer.seal()
        sealer.merge_seals()
        sealer.clean(0)
        trim(sealer, RetentionPolicy(age_seconds=0.0), now=LATER)
        sealer.clean(0)


def save(folder: Path) -> None:
    """Move a checkpoint on, forget it, and begin again; what is done is noted each time."""
    with FileCheckpointStore(folder / "state") as store, (folder / "done").open("a") as done:
        for turn in range(SAVES):
            if turn == SAVES // 2:
                store.delete("orders")
                print("none", file=done, flush=True)
            store.save("orders", Checkpoint(source_type="postgresql", position=Lsn(turn + 1)))
            print(turn + 1, file=done, flush=True)


def record(folder: Path) -> None:
    """Tell a history of ever wider tables, of which it keeps the last three."""
    with (
        FileSchemaHistory(folder / "state", retention=Retention(keep_last=3)) as history,
        (folder / "done").open("a") as done,
    ):
        for turn in range(SAVES):
            extra = tuple(Column(name=f"x{n}", source_type="int", type=pa.int32()) for n in range(turn))
            history.record(replace(SHOP, columns=(*SHOP.columns, *extra)))
            print(turn + 1, file=done, flush=True)


TASKS: dict[str, Callable[[Path], None]] = {"order": put_in_order, "save": save, "record": record}


class Killed:
    """The process that starts those that die."""

    def __init__(self, hits: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.killed", str(hits)],
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "TAILRACE_FAILPOINT_LOG": str(hits)},
        )

    def __enter__(self) -> Killed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate()

    def at(self, name: str, turn: int, folder: Path, task: str = "order") -> int:
        """Do the task until the n-th passing of the named place; how that ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{task} {name} {turn} {folder}\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())


def main() -> None:
    for line in sys.stdin:
        task, name, turn, folder = line.split(maxsplit=3)
        child = os.fork()
        if not child:
            os.setsid()  # a failpoint kills its whole process group
            os.environ["TAILRACE_FAILPOINT"] = f"{name}:{turn}"
            importlib.reload(failpoints)
            TASKS[task](Path(folder.strip()))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    main()
