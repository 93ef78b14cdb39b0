"""A process that appends to a log as fast as it can, until it has won often enough or is refused.

`python -m tests.support.rival FOLDER NAME WINS [take-over] [return]`: each commit it wins is a line `commit key`
on stdout. Refused, it tells the error's code and ends with its exit code; with `return` it opens the log again.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tailrace.errors import TailraceError
from tailrace.pipeline.capture.log_capture import LeasedLogWriter
from tests.support.windows import SOURCE, rows_window

PLACES = 1_000_000
"""Keys of one process: its name times this, and on."""


def main(folder: Path, name: int, wins_max: int, flags: set[str]) -> int:
    key, wins = name * PLACES, 0
    while True:
        try:
            log = LeasedLogWriter.open(folder, SOURCE, take_over="take-over" in flags)
            while wins < wins_max:
                begin = log.position.value
                header = log.append(rows_window(begin, begin + 10, key))
                assert header is not None
                print(header.commit, key, flush=True)
                key, wins = key + 1, wins + 1
            log.close()
            return 0
        except TailraceError as error:
            if "return" not in flags or error.code != "log-fenced":
                print(error.code, flush=True)
                return int(error.exit_code)
            key += 1  # a key that was refused is never used again: found in the log, it would show
            log.close()


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), set(sys.argv[4:])))
