"""A database of a test's own, on a server that it shares with others."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from tailrace.demo.server import EmbeddedPostgres

GONE_SECONDS_MAX = 120.0
_IN_USE = "select from pg_replication_slots where database = %s and (temporary or active)"
_DROP_SLOTS = "select pg_drop_replication_slot(slot_name) from pg_replication_slots where database = %s"


@contextmanager
def database(server: EmbeddedPostgres, name: str, options: str = "") -> Iterator[str]:
    """The name of a new database; it goes with its slots."""
    with server.connect() as admin:
        admin.execute(f"create database {name} {options}")
        try:
            yield name
        finally:
            # A session that is closed at our end is ended by the server in its own time.
            deadline = time.monotonic() + GONE_SECONDS_MAX
            while admin.execute(_IN_USE, (name,)).fetchone() is not None and time.monotonic() < deadline:
                time.sleep(0.02)
            admin.execute(_DROP_SLOTS, (name,))
            admin.execute(f"drop database {name} with (force)")
