"""One server for the tests that only need a database of their own on it."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator

import pytest

from tailrace.demo.server import EmbeddedPostgres
from tests.support.databases import database as new_database


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
    with new_database(server, f"test_{uuid.uuid4().hex[:12]}") as name:
        yield server.url(name)
