"""Looks for inputs that reach new code, with atheris: `python -m tests.fuzz.guided TARGET FOLDER SECONDS`.

Coverage can be seen only in Python, so here the kernels are interpreted (`NUMBA_DISABLE_JIT=1`), where an index
beyond an array's end is an error too. Every input that is tried goes to a judge as well, whose kernels are compiled,
and both must give the same outcome: what one engine leaves to chance, an overflow or memory never written, shows as
a difference. So coverage comes from the one and memory safety is judged on the other.

The folder is what atheris starts from and where it keeps what is new.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from tests.fuzz.judge import Engine, Judge, interpret

INPUT_BYTES_MAX = 8192
SECONDS_MAX = 60
MEMORY_MB_MAX = 3072


def plain(data: bytes) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """No page is guarded here: an interpreter checks every index itself."""
    return np.frombuffer(data, np.uint8).copy()


def main(target: str, folder: str, seconds: str) -> None:
    """Look for so long; the process ends with an error if something was found."""
    assert os.environ.get("NUMBA_DISABLE_JIT") == "1"
    atheris: Any = importlib.import_module("atheris")
    # Only what is imported here is instrumented, so nothing above may import it.
    with atheris.instrument_imports(include=["tailrace.capture.postgres"]):
        targets = importlib.import_module("tests.fuzz.targets")
    interpret()
    run = targets.TARGETS[target]
    seeds = [path.read_bytes() for path in sorted(Path(folder).iterdir())]
    mutator = importlib.import_module("tests.fuzz.mutator").Mutator(target, seeds)

    with Judge(Engine.COMPILED) as judge:

        def one(data: bytes) -> None:
            found, judged = run(data, plain), judge.outcome(target, data)
            assert found == judged, (found, judged)

        options = [
            f"-max_total_time={seconds}",
            f"-max_len={INPUT_BYTES_MAX}",
            f"-timeout={SECONDS_MAX}",
            f"-rss_limit_mb={MEMORY_MB_MAX}",
            f"-artifact_prefix={folder}/../{target}-found-",
            "-print_final_stats=1",
            "-len_control=0",
            folder,
        ]
        atheris.Setup([sys.argv[0], *options], one, custom_mutator=mutator)
        atheris.Fuzz()


if __name__ == "__main__":
    main(*sys.argv[1:])
