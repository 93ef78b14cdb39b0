"""The sources that the contract suite runs on."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tailrace.demo.server import EmbeddedPostgres
from tests.support.benches import Bench, MemoryBench, PostgresBench, Streams
from tests.support.tables import Scene

KEEPALIVE_SECONDS = 6
"""The server cuts a connection that does not answer for that long; at half of it, it requests an answer."""
HELD_BACK_SECONDS = 1.5 * KEEPALIVE_SECONDS


@pytest.fixture(scope="session")
def server() -> Iterator[EmbeddedPostgres]:
    version = int(os.environ.get("TAILRACE_TEST_PG", "16"))
    settings = {"fsync": "off", "max_prepared_transactions": "10"}
    with EmbeddedPostgres(version=version, settings=settings) as running:
        yield running


@pytest.fixture
def impatient(server: EmbeddedPostgres) -> Iterator[None]:
    """Shorten the time-out only where it is the point: a busy machine may well pause for half of it."""
    with server.connect() as connection:
        connection.execute(f"alter role current_user set wal_sender_timeout = '{KEEPALIVE_SECONDS}s'")
        yield
        connection.execute("alter role current_user reset wal_sender_timeout")


@pytest.fixture(params=["memory", "postgresql"])
def bench(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    if request.param == "memory":
        yield MemoryBench()
        return
    made = PostgresBench(request.getfixturevalue("server"), monkeypatch)
    yield made
    made.close()


@pytest.fixture
def postgres(server: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch) -> Iterator[PostgresBench]:
    made = PostgresBench(server, monkeypatch)
    yield made
    made.close()


@pytest.fixture
def streams(bench: Bench) -> Iterator[Streams]:
    opened = Streams(bench.capture)
    yield opened
    opened.close_all()


@pytest.fixture
def postgres_streams(postgres: PostgresBench) -> Iterator[Streams]:
    opened = Streams(postgres.capture)
    yield opened
    opened.close_all()


@pytest.fixture
def scene(server: EmbeddedPostgres) -> Iterator[Scene]:
    made = Scene(server)
    yield made
    made.close()
