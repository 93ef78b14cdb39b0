"""Changes that were themselves replicated to the server: captured like any other, or left out by choice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from tailrace.capture.postgres.source import PostgresCapture
from tailrace.errors import SourceNotReady
from tests.support.benches import PostgresBench, Streams, keys, take


@pytest.fixture
def written(postgres: PostgresBench) -> Iterator[PostgresBench]:
    """Row 1 was written here, row 2 elsewhere, row 3 here."""
    name = postgres.schema
    postgres.write(("items", 1))
    postgres.execute(
        f"select pg_replication_origin_create('{name}'); select pg_replication_origin_session_setup('{name}')"
    )
    postgres.write(("items", 2))
    postgres.execute("select pg_replication_origin_session_reset()")
    postgres.write(("items", 3))
    yield postgres
    postgres.execute(f"select pg_replication_origin_drop('{name}')")


def only_local(bench: PostgresBench) -> Streams:
    return Streams(PostgresCapture(replace(bench.capture.settings, origins=False)))


def test_replicated_changes_are_captured(written: PostgresBench, postgres_streams: Streams) -> None:
    assert keys(*take(postgres_streams.open(written.begin), written.begin, 3)) == [1, 2, 3]


def test_replicated_changes_can_be_left_out(written: PostgresBench) -> None:
    if written.connection.info.server_version < 160000:
        pytest.skip("needs PostgreSQL 16: older servers cannot leave it out")
    streams = only_local(written)
    try:
        assert keys(*take(streams.open(written.begin), written.begin, 2)) == [1, 3]
    finally:
        streams.close_all()


def test_a_server_too_old_to_leave_them_out_is_refused_with_a_hint(written: PostgresBench) -> None:
    if written.connection.info.server_version >= 160000:
        pytest.skip("newer servers can")
    with pytest.raises(SourceNotReady, match="cannot leave out") as refused:
        PostgresCapture(replace(written.capture.settings, origins=False)).prepare(written.begin)
    assert "source.origin" in refused.value.hint
