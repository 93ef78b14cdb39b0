"""A recording of a real server's bytes: it takes nothing from the slot, and is decoded again without the server."""

from __future__ import annotations

from pathlib import Path

import psycopg
import pytest

from tailrace.errors import ConfigError
from tailrace.testing.recorded_wire import load, record


def test_what_a_slot_holds_is_recorded_and_stays_there(database: str, tmp_path: Path) -> None:
    with psycopg.connect(database, autocommit=True) as session:
        session.execute("create table orders (id int8 primary key, note text)")
        session.execute("create publication mine for all tables")
        with pytest.raises(ConfigError, match="the slot does not exist"):
            record(database, slot="mine", publications=["mine"])
        session.execute("select pg_create_logical_replication_slot('mine', 'pgoutput')")
        with pytest.raises(ConfigError, match="nothing to record"):
            record(database, slot="mine", publications=["mine"])
        session.execute("insert into orders values (1, 'a'), (2, 'b')")
        session.execute("update orders set id = 3 where id = 2")
        for _ in range(2):
            record(database, slot="mine", publications=["mine"]).save(tmp_path / "orders.json")
        session.execute("select pg_drop_replication_slot('mine')")
    recording = load(tmp_path / "orders.json")
    recording.check()
    window = recording.replay()
    assert [event.values["id"] for batch in window.batches for event in batch.events()] == [1, 2, 2, 3]
    assert window.transactions == 2
