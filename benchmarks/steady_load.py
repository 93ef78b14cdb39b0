"""The load of `end_to_end.py` and, in a process of its own, the reader that detects when it is visible.

usage: python -m benchmarks.steady_load URL LAKE TABLES ROWS RATE SECONDS LATE_SECONDS_MAX

Transaction n is due at the n-th tick and changes 100 rows of table n modulo their number: 50 rows inserted, 40 updated,
10 deleted. Each table has a connection of its own, so its transactions are committed in order. Of the rows that are
updated or deleted two fifths are among the newest tenth of the keys, and with the inserts seven tenths of all changes
are; the others are anywhere before. If the last transaction is more than a twentieth late, the pace was not kept and
the load says so by failing. The last line printed is JSON.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from queue import Queue

import numpy as np
import psycopg

from benchmarks.pipelines import FreshReader

INSERTS, UPDATES, DELETES = 50, 40, 10
CHANGES_PER_TRANSACTION = INSERTS + UPDATES + DELETES
NEWEST_OF_OLD = 0.4
"""Of what is updated or deleted: with the inserts, 70 % of all changes are among the newest keys."""
NEWEST_SHARE = 0.1
KEPT = 10 * INSERTS
"""The newest keys, which are not deleted."""
LATE_MAX = 0.05
LOOK_SECONDS = 0.02
INSERT = b"""
    insert into {table} select g, g %% 10000, 'status-' || (g %% 7), (g %% 100000) / 100.0,
    'some note text number ' || g, now(), g %% 2 = 0, g * 1.5 from generate_series(%s::bigint, %s::bigint) g
"""
UPDATE = b"update {table} set status = 'changed', amount = amount + 1, created_at = now() where id = any(%s)"
DELETE = b"delete from {table} where id = any(%s)"


@dataclass(frozen=True, kw_only=True)
class Sent:
    """One transaction: when it was sent, and the newest key it inserted."""

    table: int
    at: float
    key: int


class Keys:
    """Which keys of one table there are: every statement hits exactly the rows it names."""

    def __init__(self, rows: int, inserts_to_come: int, random: np.random.Generator) -> None:
        self._there = np.ones(rows + inserts_to_come + 1, np.bool_)
        self._random = random
        self.newest = rows

    def old(self) -> list[int]:
        """So many keys as are updated and deleted, none twice."""
        border = int(self.newest * (1 - NEWEST_SHARE))
        count = UPDATES + DELETES
        newest = round(count * NEWEST_OF_OLD)
        return [*self._some(border, self.newest - KEPT, newest), *self._some(0, border, count - newest)]

    def _some(self, after: int, to: int, count: int) -> list[int]:
        found: list[int] = []
        while len(found) < count:
            tried = np.unique(self._random.integers(after + 1, to + 1, 2 * count))
            found = self._random.permutation(tried[self._there[tried]])[:count].tolist()
        return found

    def insert(self) -> tuple[int, int]:
        """The first and the last of new ones."""
        self.newest += INSERTS
        return self.newest - INSERTS + 1, self.newest

    def delete(self, keys: list[int]) -> None:
        self._there[keys] = False


def main() -> int:
    """Load, let the other process look, then say how long the changes took."""
    url, lake, *numbers = sys.argv[1:]
    tables, rows, rate, seconds = map(int, numbers[:-1])
    late_seconds_max = float(numbers[-1])
    transactions = rate // CHANGES_PER_TRANSACTION * seconds
    newest = rows + -(-transactions // tables) * INSERTS
    context = multiprocessing.get_context("spawn")
    seen: multiprocessing.Queue[tuple[int, float, int]] = context.Queue()
    done = context.Event()
    reader = context.Process(target=look, args=(Path(lake), tables, seen, done), daemon=True)
    reader.start()
    seen.get()  # it is ready
    sent, began, lasted = _load(url, tables, rows, transactions, seconds, newest)
    sightings: list[tuple[int, float, int]] = []
    last = {item.table: item.key for item in sent}
    deadline = time.monotonic() + late_seconds_max
    while time.monotonic() < deadline and any(
        max((key for table, _, key in sightings if table == which), default=0) < key for which, key in last.items()
    ):
        while not seen.empty():
            sightings.append(seen.get())
        time.sleep(LOOK_SECONDS)
    done.set()
    reader.join(5)
    if len(sent) != transactions or lasted > seconds * (1 + LATE_MAX):
        print(f"the load made {len(sent)} of {transactions} transactions in {lasted:.1f} s", file=sys.stderr)
        return 1
    print(json.dumps(_report(sent, sightings, began)), flush=True)
    return 0


def look(lake: Path, tables: int, seen: multiprocessing.Queue[tuple[int, float, int]], done: threading.Event) -> None:
    """Open each table again whenever it has a new version, and report its newest key."""
    readers = [FreshReader(lake / f"t{table}") for table in range(tables)]
    for reader in readers:
        reader.newest_key()
    seen.put((0, 0.0, 0))
    while not done.is_set():
        for table, reader in enumerate(readers):
            if (key := reader.newest_key()) is not None:
                seen.put((table, time.time(), key))
        time.sleep(LOOK_SECONDS)


def _load(
    url: str, tables: int, rows: int, transactions: int, seconds: int, newest: int
) -> tuple[list[Sent], float, float]:
    """What was sent, when it began, and how long it took."""
    opened = [psycopg.connect(url, autocommit=True) for _ in range(tables)]
    sent: Queue[Sent] = Queue()
    begin = time.time() + 0.5
    work = [
        threading.Thread(
            target=_load_table,
            args=(
                connection,
                table,
                tables,
                Keys(rows, newest - rows, np.random.default_rng(table)),
                begin,
                transactions,
                seconds,
                sent,
            ),
        )
        for table, connection in enumerate(opened)
    ]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()
    lasted = time.time() - begin
    for connection in opened:
        connection.close()
    return list(sent.queue), begin, lasted


def _load_table(
    connection: psycopg.Connection[tuple[object, ...]],
    table: int,
    step: int,
    keys: Keys,
    begin: float,
    transactions: int,
    seconds: int,
    sent: Queue[Sent],
) -> None:
    insert, update, delete = (statement.replace(b"{table}", b"t%d" % table) for statement in (INSERT, UPDATE, DELETE))
    for number in range(table, transactions, step):
        old = keys.old()
        first, last = keys.insert()
        # Those that go are taken from both parts alike.
        gone, changed = old[:: len(old) // DELETES], [key for n, key in enumerate(old) if n % (len(old) // DELETES)]
        keys.delete(gone)
        if (ahead := begin + number * seconds / transactions - time.time()) > 0:
            time.sleep(ahead)
        at = time.time()
        with connection.pipeline(), connection.transaction():
            connection.execute(insert, [first, last])
            connection.execute(update, [changed])
            connection.execute(delete, [gone])
        sent.put(Sent(table=table, at=at, key=last))


def _report(sent: list[Sent], sightings: list[tuple[int, float, int]], began: float) -> dict[str, float]:
    """Each transaction has as many changes, so a part of them is the same part of the changes."""
    latencies: list[float] = []
    seen_last = began
    for table in {item.table for item in sent}:
        mine = [item for item in sent if item.table == table]
        seen = [(at, key) for which, at, key in sightings if which == table]
        keys = np.maximum.accumulate([key for _, key in seen]) if seen else np.empty(0, np.int64)
        places = np.searchsorted(keys, [item.key for item in mine])
        found = [(item, seen[place][0]) for item, place in zip(mine, places.tolist(), strict=True) if place < len(seen)]
        latencies += [at - item.at for item, at in found]
        seen_last = max([seen_last, *(at for _, at in found)])
    unseen = len(sent) - len(latencies)
    # What was never seen was not seen until now.
    latencies += [time.time() - began] * unseen
    p50, p90, p99 = np.percentile(latencies, [50, 90, 99]).tolist()
    return {
        "p50": p50,
        "p90": p90,
        "p99": p99,
        "max": max(latencies),
        "unseen": unseen,
        "rate": (len(sent) - unseen) * CHANGES_PER_TRANSACTION / max(seen_last - began, 1e-3),
        "versions": len(sightings),
    }


if __name__ == "__main__":
    sys.exit(main())
