"""pg-mixed: how fast updates and deletes with large and unsent values reach the change log.

Ours reads 170,000 updates and 30,000 deletes over four tables into the change log; the peer is
`pg_recvlogical` to /dev/null. Two tables have 4 kB texts in the TOAST table. Most updates leave these
unchanged, so the server does not send them. Two tables have REPLICA IDENTITY FULL, so every change carries
its old row, for one of them with the large text in it. The peer copies most of its bytes without
looking at them, while ours must decode every one.

For this to be fair the rules of pg-stream hold. And the large texts must really be out of line (EXTERNAL
storage, no compression), or the server would send them with every update.
"""

from __future__ import annotations

from benchmarks import workloads
from benchmarks.postgres import PostgresBench
from benchmarks.recvlogical import PgRecvlogical

BENCH = PostgresBench(
    name="pg-mixed",
    must_reach=0.8,
    unit="changes/s",
    workload=workloads.mixed,
    rows=200_000,
    peer=PgRecvlogical(),
    about=__doc__,
)
