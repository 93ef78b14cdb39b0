"""Break one lesson at a time in a copy of the product, run the demo on it, and see that the verdict turns red.

usage: python tools/break_lessons.py [LESSON …]

A check that cannot fail proves nothing, so this tries the demo's own verdict. The tree itself is not touched.
Each break is one edit that a person could make by mistake; the unbroken copy must come out green first.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SECONDS = "20"
DEMO_SECONDS_MAX = 420


@dataclass(frozen=True)
class Break:
    """One edit: in `file`, `right` becomes `wrong`."""

    lesson: str
    what: str
    file: str
    right: str
    wrong: str


BREAKS = (
    Break("none", "nothing is broken", "runtime/loop.py", "", ""),
    Break(
        "5",
        "a window is confirmed to the server before it is durable",
        "runtime/loop.py",
        "        rejected = require_rejected(sink.write(batch))\n",
        "        self._intake.confirm(batch.end)\n        rejected = require_rejected(sink.write(batch))\n",
    ),
    Break(
        "6",
        "the first of two quick updates of a row wins",
        "tables/fold/fold.py",
        "    last[keys.own] = rows\n",
        "    last[keys.own[::-1]] = rows[::-1]\n",
    ),
    Break(
        "10",
        "a value that was not sent counts as null",
        "tables/fold/fold.py",
        "        unchanged = batch.optional(change.UNCHANGED)\n        if unchanged is None:\n",
        "        unchanged = batch.optional(change.UNCHANGED)\n        if True:\n",
    ),
    Break(
        "17",
        "a changed key does not delete the old one",
        "capture/postgres/decode.py",
        "            if kind == 85 and old >= 0 and _key_moved(",
        "            if kind < 0 and old >= 0 and _key_moved(",
    ),
    Break(
        "21",
        "a moved row forgets which key it came from",
        "capture/postgres/batches.py",
        "    if moved.any():\n",
        "    if moved.any() and False:\n",
    ),
)


def main() -> int:
    """Try each break; 0 if the verdict was right every time."""
    wanted = set(sys.argv[1:]) or {item.lesson for item in BREAKS}
    wrong = 0
    for item in BREAKS:
        if item.lesson in wanted:
            code, last = try_break(item)
            right = (code == 0) == (item.lesson == "none")
            wrong += not right
            print(f"lesson {item.lesson}: {item.what}: exit {code}, {'as it should' if right else 'WRONG'}: {last}")
    return 1 if wrong else 0


def try_break(item: Break) -> tuple[int, str]:
    """Run the demo on a copy with the edit made; its exit code and what it said last of the matter."""
    with tempfile.TemporaryDirectory(prefix="tailrace-break-") as folder:
        shutil.copytree(ROOT / "src", Path(folder) / "src", ignore=shutil.ignore_patterns("__pycache__"))
        file = Path(folder) / "src" / "tailrace" / item.file
        text = file.read_text()
        assert item.right in text, f"{item.file} has changed: mend this list"
        file.write_text(text.replace(item.right, item.wrong) if item.right else text)
        done = subprocess.run(
            [sys.executable, "-m", "tailrace.demo", "--seconds", SECONDS, "--folder", f"{folder}/demo"],
            env={**os.environ, "PYTHONPATH": f"{folder}/src", "TAILRACE_CACHE": f"{folder}/cache"},
            capture_output=True,
            text=True,
            timeout=DEMO_SECONDS_MAX,
            check=False,
        )
    lines = [line.strip() for line in (done.stderr + done.stdout).splitlines()]
    told = [
        line
        for line in lines
        if "DIFFERENT" in line or "failed" in line or line.startswith("error:") or "equals its source" in line
    ]
    return done.returncode, told[-1] if told else ""


if __name__ == "__main__":
    sys.exit(main())
