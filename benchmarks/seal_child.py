"""The process that `seal.py` measures: seal one log on one core, then print what it took as a line of JSON.

usage: python -m benchmarks.seal_child LOG

The core is chosen before anything is imported that makes threads, so that none of them can run elsewhere.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path


def main() -> int:
    """Seal under the clock, then count what became cold."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    import pyarrow.parquet as pq

    from tailrace.changelog.maintain.sealer import Sealer
    from tailrace.changelog.read.reader import ChangeLog
    from tailrace.storage.files import size_of

    path = Path(sys.argv[1])
    cpu, wall = time.process_time(), time.perf_counter()
    with Sealer(path) as sealer:
        sealer.seal()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    log = ChangeLog.open(path)
    log.schemas.load()
    files = [file for version in log.schemas.latest() for file in log.files(version.table)]
    report = {
        "rows": sum(pq.read_metadata(file).num_rows for file in files),
        "wall_seconds": wall,
        "cpu_seconds": cpu,
        "files": len(files),
        "bytes": sum(map(size_of, files)),
    }
    print(json.dumps(report), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
