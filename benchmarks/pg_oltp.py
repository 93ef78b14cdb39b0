"""pg-oltp: how fast a backlog of tiny transactions reaches the durable change log.

Ours reads 200,000 transactions of one row each, over 20 tables, into the change log; the peer is
`pg_recvlogical` to /dev/null. Each row takes three messages here (Begin, change, Commit). Work that is done
per transaction or per table shows: a reader that is quick on pg-stream can be slow on this one.

For this to be fair the rules of pg-stream hold, and the transactions must really be single: the backlog is
written with a COMMIT after every row. `synchronous_commit` is off during that. This changes how long the writing
takes, but not what the slots deliver.
"""

from __future__ import annotations

from benchmarks import workloads
from benchmarks.postgres import PostgresBench
from benchmarks.recvlogical import PgRecvlogical

BENCH = PostgresBench(
    name="pg-oltp",
    must_reach=0.9,
    unit="transactions/s",
    workload=workloads.oltp,
    rows=200_000,
    peer=PgRecvlogical(),
    about=__doc__,
)
