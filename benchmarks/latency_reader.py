"""The reader of `pg_latency.py`: follows a log and notes how old each change is when it arrives.

usage: python -m benchmarks.latency_reader LOG ROWS

It begins after the newest commit and ends when it has received so many rows, or when nothing has come for a
while. A batch's rows count as received when the log's reader hands the batch over.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np

from tailrace.changelog.read.reader import ChangeLog
from tailrace.model import change

WAIT_SECONDS = 15.0


def main() -> int:
    """Read, then give the percentiles."""
    path, rows_wanted = sys.argv[1], int(sys.argv[2])
    log = ChangeLog.open(path)
    newest = log.newest()
    print("ready", flush=True)
    ages: list[np.ndarray] = []
    rows = 0
    for batch in log.follow(newest, wait_seconds=WAIT_SECONDS):
        now = time.time_ns() // 1000
        committed = batch.data.column(change.COMMITTED_AT).cast("int64").to_numpy()
        ages.append(now - committed)
        rows += len(batch)
        if rows >= rows_wanted:
            break
    if rows != rows_wanted:
        print(f"the log gave {rows} of {rows_wanted} rows", file=sys.stderr, flush=True)
        return 1
    milliseconds = np.concatenate(ages) / 1000
    p50, p90, p99 = np.percentile(milliseconds, [50, 90, 99]).tolist()
    print(json.dumps({"p50": p50, "p90": p90, "p99": p99, "max": milliseconds.max()}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
