"""Read a log of one table with an `id` from its beginning, and print what it holds as a line of JSON.

usage: python -m benchmarks.read_back LOG

One piece is in memory at a time, as any reader would. `dense` says whether every `_seq` was the one after the last.
"""

from __future__ import annotations

import json
import sys

import numpy as np

from tailrace.changelog.read.reader import ChangeLog
from tailrace.model import change


def main() -> int:
    """Read and count."""
    rows = id_sum = piece_bytes = last_seq = 0
    first_seq: int | None = None
    dense = True
    for batch in ChangeLog.open(sys.argv[1]).follow(0):
        seqs = batch.data.column(change.SEQ).to_numpy()
        first_seq = int(seqs[0]) if first_seq is None else first_seq
        dense = dense and (not rows or int(seqs[0]) == last_seq + 1) and bool((np.diff(seqs) == 1).all())
        last_seq = int(seqs[-1])
        rows += len(batch)
        id_sum += int(batch.data.column("id").to_numpy().sum())
        piece_bytes = max(piece_bytes, batch.data.nbytes)
    found = {
        "rows": rows,
        "first_seq": first_seq,
        "last_seq": last_seq,
        "dense": dense,
        "id_sum": id_sum,
        "piece_bytes": piece_bytes,
    }
    print(json.dumps(found), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
