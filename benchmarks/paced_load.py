"""The load of `pg_latency.py`: one-row transactions at a steady pace, over a few connections.

usage: python -m benchmarks.paced_load URL TABLES RATE SECONDS CONNECTIONS

Transaction n is due at the n-th tick of the whole load and goes to connection n modulo their number, so a
slow one delays its own successors only. What fell behind is made up for without a pause. If the last one is
more than a twentieth late, the pace was not kept and the load says so by failing.
"""

from __future__ import annotations

import json
import statistics
import sys
import threading
import time

import psycopg

LATE_MAX = 0.05


def main() -> int:
    """Load, then say how long a transaction took the client."""
    url, *numbers = sys.argv[1:]
    tables, rate, seconds, connections = map(int, numbers)
    opened = [psycopg.connect(url, autocommit=True) for _ in range(connections)]
    print("ready", flush=True)
    begin = time.monotonic() + 0.5
    took: list[float] = []
    work = [
        threading.Thread(target=_load, args=(connection, place, connections, tables, rate, seconds, begin, took))
        for place, connection in enumerate(opened)
    ]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()
    lasted = time.monotonic() - begin
    if len(took) != rate * seconds or lasted > seconds * (1 + LATE_MAX):
        print(f"the load made {len(took)} transactions in {lasted:.1f} s", file=sys.stderr, flush=True)
        return 1
    print(json.dumps({"rate": len(took) / lasted, "client_ms": 1000 * statistics.median(took)}), flush=True)
    return 0


def _load(
    connection: psycopg.Connection[tuple[object, ...]],
    place: int,
    step: int,
    tables: int,
    rate: int,
    seconds: int,
    begin: float,
    took: list[float],
) -> None:
    for number in range(place, rate * seconds, step):
        ahead = begin + number / rate - time.monotonic()
        if ahead > 0:
            time.sleep(ahead)
        started = time.monotonic()
        connection.execute(
            f"insert into t{number % tables} values (%s, %s, 'open', %s, now())".encode(),
            [number, number % 1000, number / 100],
        )
        took.append(time.monotonic() - started)


if __name__ == "__main__":
    sys.exit(main())
