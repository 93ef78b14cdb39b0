"""pg-stream: how fast a backlog of large transactions reaches the durable change log.

Ours reads 1,000,000 inserts of 8 columns (200 transactions of 5,000 rows) from a slot, decodes them into
typed columns and commits them to the change log. The peer is PostgreSQL's own `pg_recvlogical`, which
decodes nothing and writes the same bytes to /dev/null. Ours must be a tenth faster all the same. The server's
largest cost is to wake a client for every message. A client that is behind need not be woken: it reads what has
gathered.

For this to be fair:
- both read the same backlog with the same plug-in, options and transport (TCP on 127.0.0.1), each from a
  slot of its own that existed before the backlog was written;
- ours is timed from opening its connection until its last durable commit is confirmed to the server.
  Imports and loading compiled kernels happen before that, as they do once per capture process;
- the peer is timed from process start to exit, nothing subtracted. Its start-up (fork, exec, connect) is
  included and takes some 20 ms; `setup.peer_startup_seconds` holds what it took here;
- ours must have made exactly the written rows durable, and both slots must be at the backlog's end. The
  peer's rows are not counted: its slot's position is the evidence.
"""

from __future__ import annotations

from benchmarks import workloads
from benchmarks.postgres import PostgresBench
from benchmarks.recvlogical import PgRecvlogical

BENCH = PostgresBench(
    name="pg-stream",
    must_reach=1.1,
    unit="rows/s",
    workload=workloads.inserts,
    rows=1_000_000,
    peer=PgRecvlogical(),
    about=__doc__,
)
