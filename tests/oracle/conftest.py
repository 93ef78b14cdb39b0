"""Servers for the two oracles, and how long they ask."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, settings

from tailrace.demo.server import EmbeddedPostgres
from tailrace.demo.server_binaries import ServerFailed

DECODING_VERSION = 15
"""Debian's, which comes with contrib; the wheel's servers have none."""
SETTINGS = {"fsync": "off", "max_prepared_transactions": "20", "logical_decoding_work_mem": "64kB"}
"""With so little memory the server writes large transactions aside while it decodes them, as it does in earnest."""


def server_version() -> int:
    """`make matrix` runs the same tests on other servers."""
    return int(os.environ.get("TAILRACE_TEST_PG", "16"))


def examples(few: int) -> settings:
    """How many scripts to try: few, unless TAILRACE_ORACLE_EXAMPLES asks for more. `seed` says which."""
    asked = os.environ.get("TAILRACE_ORACLE_EXAMPLES")
    return settings(
        max_examples=int(asked) if asked else few,
        deadline=None,
        database=None,
        print_blob=False,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )


def seed() -> int:
    """Always the same scripts, unless TAILRACE_SEED asks for others."""
    return int(os.environ.get("TAILRACE_SEED", "0"))


def _has_decoding(server: EmbeddedPostgres) -> bool:
    library = "test_decoding.so"
    folder = server.bin.parent
    return (folder / "lib" / library).exists() or (folder / "lib" / "postgresql" / library).exists()


@pytest.fixture(scope="session")
def decoding_server() -> Iterator[EmbeddedPostgres]:
    """A server that has `test_decoding`: of the version asked for, else Debian's."""
    for version in dict.fromkeys([server_version(), DECODING_VERSION]):
        server = EmbeddedPostgres(version=version, settings=SETTINGS)
        try:
            found = _has_decoding(server)
        except ServerFailed:
            continue
        if found:
            with server:
                yield server
            return
    pytest.skip(
        "NOT TESTED against test_decoding: no server here has it. Install PostgreSQL's contrib "
        f"(on Debian: `apt-get install postgresql-{DECODING_VERSION}`, or `make setup` as root)"
    )
