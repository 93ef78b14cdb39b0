"""Which lines of the capture inputs reach, and the few inputs that reach them all.

Runs interpreted, in a process of its own: `python -m tests.fuzz.reach TARGET FOLDER …` prints the files worth keeping.
Those of the first folder are all kept; of the others each that goes from one line to another as none before it
did, the smallest first.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from tests.fuzz.guided import plain
from tests.fuzz.judge import interpret
from tests.fuzz.targets import TARGETS, Target

SOURCE = str(Path(__file__).parents[2] / "src" / "tailrace" / "capture" / "postgres")
Step = tuple[CodeType, int, int]


def steps_of(run: Target, data: bytes) -> set[Step]:
    """Every step from one line of the capture to the next."""
    found: set[Step] = set()

    def enter(frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(SOURCE):
            return None
        last = 0

        def step(frame: FrameType, event: str, argument: Any) -> Any:
            nonlocal last
            if event == "line":
                found.add((frame.f_code, last, frame.f_lineno))
                last = frame.f_lineno
            return step

        return step

    sys.settrace(enter)
    try:
        run(data, plain)
    finally:
        sys.settrace(None)
    return found


def main(target: str, *folders: str) -> None:
    """Print the files worth keeping."""
    assert os.environ.get("NUMBA_DISABLE_JIT") == "1"
    interpret()
    run, reached = TARGETS[target], set[Step]()
    first, *others = [sorted(Path(folder).iterdir()) for folder in folders]
    for path in first:
        reached |= steps_of(run, path.read_bytes())
        print(path)
    for path in sorted((path for some in others for path in some), key=lambda path: path.stat().st_size):
        steps = steps_of(run, path.read_bytes())
        if steps - reached:
            reached |= steps
            print(path)


if __name__ == "__main__":
    main(*sys.argv[1:])
