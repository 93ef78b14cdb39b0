"""Money that moves between two tables while they are applied: at any one point all of it is there."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import psycopg

ACCOUNTS, MONEY = 20, 1000
TABLES = ("left_accounts", "right_accounts")
MADE = tuple(
    statement
    for table in TABLES
    for statement in (
        f"CREATE TABLE {table} (id int PRIMARY KEY, money int NOT NULL)",
        f"INSERT INTO {table} SELECT g, {MONEY} FROM generate_series(1, {ACCOUNTS}) g",
    )
)
ALL_MONEY = len(TABLES) * ACCOUNTS * MONEY


@contextmanager
def transfers(url: str, writers: int = 2) -> Iterator[threading.Event]:
    """Have money moved by some writers meanwhile; the event is set when they stop."""
    stopping = threading.Event()
    threads = [threading.Thread(target=_transfer, args=(url, stopping, seed)) for seed in range(writers)]
    for thread in threads:
        thread.start()
    try:
        yield stopping
    finally:
        stopping.set()
        for thread in threads:
            thread.join()


def _transfer(url: str, stopping: threading.Event, seed: int) -> None:
    chance = random.Random(seed)
    with psycopg.connect(url, autocommit=True) as connection:
        while not stopping.is_set():
            amount, one, other = chance.randint(1, 50), chance.randint(1, ACCOUNTS), chance.randint(1, ACCOUNTS)
            with connection.transaction():
                connection.execute("UPDATE left_accounts SET money = money - %s WHERE id = %s", (amount, one))
                connection.execute("UPDATE right_accounts SET money = money + %s WHERE id = %s", (amount, other))
