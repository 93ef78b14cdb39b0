"""One server for the tests that only need a database of their own on it."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator

import pytest

from tailrace.demo.server import EmbeddedPostgres


def server_version() -> int:
    """`make matrix` runs the same tests on other servers."""
    return int(os.environ.get("TAILRACE_TEST_PG", "16"))


@pytest.fixture(scope="session")
def server() -> Iterator[EmbeddedPostgres]:
    with EmbeddedPostgres(version=server_version()) as running:
        yield running


@pytest.fixture
def database(server: EmbeddedPostgres) -> Iterator[str]:
    """The URL of an empty database; its slots go with it."""
    name = f"test_{uuid.uuid4().hex[:12]}"
    with server.connect() as connection:
        connection.execute(f"CREATE DATABASE {name}")
    yield server.url(name)
    with server.connect() as connection:
        gone = "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE database = %s"
        connection.execute(gone, (name,))
        connection.execute(f"DROP DATABASE {name} WITH (FORCE)")
