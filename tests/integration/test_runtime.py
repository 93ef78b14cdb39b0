"""The runtime on a real server: snapshots while others write, on demand and resumed; a pause that is survived."""

from __future__ import annotations

import hashlib
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tailrace.capture.postgres.chunks import ChunkKind
from tailrace.capture.postgres.config import PostgresSettings
from tailrace.capture.postgres.source import PostgresCapture
from tailrace.errors import (
    ConfigError,
    Remedy,
    SourceError,
    SourceNotReady,
    SourceRewritten,
    TableUnpublished,
    Unsupported,
)
from tailrace.model.position import ZERO
from tailrace.model.schema import TableId
from tailrace.runtime.loop import CdcRuntime
from tailrace.runtime.observers import Fact, Lost, SnapshotBegun, SnapshotEnded
from tailrace.runtime.output_batch import Batch, BatchKind, Limits, Transactions
from tailrace.runtime.position_store import SEQS_SKIPPED
from tailrace.runtime.runtime_state import State
from tailrace.state.checkpoint_stores import MemoryCheckpointStore
from tailrace.state.schema_history import MemorySchemaHistory
from tailrace.transforms.rules import Encrypt, Filter, Mask, Rename, Sha256, Transforms
from tailrace.transforms.transformed_source import TransformedCapture
from tests.support.served import Mirror, drive, reached, rows_of, sql
from tests.support.transforms import plan_of

ITEMS, PAIRS, LOOSE = TableId("public", "items"), TableId("public", "pairs"), TableId("public", "loose")
TABLES = """
create table items (id int8 primary key, name text, n int4);
create table pairs (b text collate "C", a int4, at timestamptz, name text, primary key (a, b, at));
create table loose (v int4);
create table apart (id int8 primary key);
"""


KEEPALIVE_SECONDS = 6
"""A busy machine may stand still for half of it: by then the server asks, and it gives up at its end."""


@pytest.fixture
def source(database: str, request: pytest.FixtureRequest) -> Iterator[PostgresCapture]:
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute(TABLES)
    made = PostgresCapture(
        PostgresSettings(
            url=database, wanted=lambda table: table in (ITEMS, PAIRS, LOOSE), slot="library", publication="library"
        )
    )
    made.scan_chunk_bytes = 16_384
    yield made
    if not request.session.testsfailed:  # a runtime that was left running holds the slot
        made.drop()


@pytest.fixture
def store() -> MemoryCheckpointStore:
    return MemoryCheckpointStore()


@contextmanager
def writing(source: PostgresCapture) -> Iterator[None]:
    """Somebody updates, inserts, deletes and moves rows all the time."""
    stop = threading.Event()

    def write() -> None:
        with psycopg.connect(source.settings.url, autocommit=True) as connection:
            number = 100_000
            while not stop.wait(0.005):
                number += 1
                connection.execute("update items set n = n + 1 where id = %s", (number % 3000,))
                connection.execute("insert into items values (%s, 'late', 0)", (number,))
                connection.execute("delete from items where id = %s", (number - 7,))
                connection.execute("update items set id = -id where id = %s", ((number * 13) % 3000,))

    writer = threading.Thread(target=write)
    writer.start()
    try:
        yield
    finally:
        stop.set()
        writer.join()


def ended(facts: list[Fact]) -> list[SnapshotEnded]:
    return [fact for fact in facts if isinstance(fact, SnapshotEnded)]


def kinds(batches: list[Batch]) -> set[BatchKind]:
    return {batch.kind for batch in batches}


def test_a_snapshot_and_the_stream_make_a_mirror_while_others_write(
    source: PostgresCapture, store: MemoryCheckpointStore
) -> None:
    """Bulk, killed in the middle and resumed in snapshots of its own; then incremental beside the writer."""
    sql(
        source,
        "insert into items select i, repeat('x', 100) || i, 0 from generate_series(1, 3000) i",
        "insert into pairs select chr(97 + i % 26), i / 26, '2020-01-01Z'::timestamptz + i * interval '1 us', 'p' || i "
        "from generate_series(1, 500) i",
    )
    mirror, history = Mirror(), MemorySchemaHistory()
    limits = Limits(rows=200)
    first = CdcRuntime(source, store, history, snapshot_tables=(PAIRS, ITEMS), limits=limits)
    with writing(source):
        first.start()
        assert kinds(drive(first, mirror, lambda: first.rows_committed > 1000)) == {BatchKind.SNAPSHOT}
        first.force_stop()
        acknowledged = mirror.rows
        heard: list[Fact] = []
        second = CdcRuntime(
            source, store, history, snapshot_tables=(PAIRS, ITEMS), limits=limits, observers=(heard.append,)
        )
        second.start()
        again = drive(second, mirror, lambda: bool(ended(heard)))
        seen = {
            (event.table, *(event.key or {}).values())
            for batch in again
            if batch.kind is BatchKind.SNAPSHOT
            for event in batch.events()
        }
        assert seen, "there was a rest"
        assert not seen & acknowledged.keys(), "nothing acknowledged is read again"
        mirror.forget()
        wanted = {second.control.snapshot(PAIRS), second.control.snapshot(ITEMS)}
        found = drive(second, mirror, lambda: wanted <= {fact.id for fact in ended(heard)})
        assert kinds(found) == {BatchKind.SNAPSHOT, BatchKind.STREAM}
    drive(second, mirror, reached(second, source))
    assert mirror.of(ITEMS) == rows_of(source, ITEMS)
    assert mirror.of(PAIRS) == rows_of(source, PAIRS)
    assert history.latest(ITEMS) is not None
    second.stop()


def test_a_snapshot_whose_key_a_rule_hides_goes_on_behind_it_and_the_stream_is_hidden_too(
    source: PostgresCapture, store: MemoryCheckpointStore
) -> None:
    """Lessons 7 and 8, of this part: nothing comes out in plain, and nothing acknowledged comes again."""
    sql(source, "insert into items select i, 'plain ' || i, i % 2 from generate_series(1, 400) i")
    rules = plan_of(
        Filter(where="n == 0"),
        Rename(columns={"id": "number"}),
        Sha256(columns=("number",)),
        Encrypt(columns=("name",), key="new"),
    )
    seen: list[Batch] = []
    for rows in (60, 200):
        runtime = CdcRuntime(source, store, snapshot_tables=(ITEMS,), transforms=rules, limits=Limits(rows=25))
        runtime.start()
        seen += drive(runtime, Mirror(), lambda r=runtime, n=rows: r.rows_committed >= n)  # type: ignore[misc] # bound
        runtime.force_stop()
    runtime = CdcRuntime(source, store, snapshot_tables=(ITEMS,), transforms=rules)
    runtime.start()
    sql(source, "insert into items values (1000, 'plain', 0), (1001, 'plain', 1)")
    seen += drive(runtime, Mirror(), lambda: runtime.rows_committed == 201)
    runtime.stop()
    events = [event for batch in seen for event in batch.events()]
    wanted = [hashlib.sha256(str(key).encode()).hexdigest() for key in [*range(2, 401, 2), 1000]]
    assert [event.values["number"] for event in events] == wanted
    seqs = [event.seq for event in events]
    assert seqs == sorted(seqs)
    assert [seq % SEQS_SKIPPED for seq in seqs] == list(range(201)), "where it went on, numbers were passed over"
    assert all(event.values["name"][:5] == b"\x02\x03new" and b"plain" not in event.values["name"] for event in events)


def test_a_source_that_has_rules_streams_nothing_in_plain_and_is_not_scanned(
    source: PostgresCapture, store: MemoryCheckpointStore
) -> None:
    ruled = TransformedCapture(source.settings, Transforms(rules=(Mask(columns=("name",)),)))
    with pytest.raises(Unsupported, match="through a source that has rules"):
        CdcRuntime(ruled, store, snapshot_tables=(ITEMS,)).start()
    runtime = CdcRuntime(ruled, store)
    runtime.start()
    sql(source, "insert into items values (1, 'plain', 0)")
    found = drive(runtime, Mirror(), lambda: runtime.rows_committed == 1)
    assert [event.values["name"] for batch in found for event in batch.events()] == ["*****"]
    runtime.stop()


def test_lesson_21_a_key_update_of_a_row_with_a_large_value_keeps_the_value(
    source: PostgresCapture, store: MemoryCheckpointStore
) -> None:
    """Twice in one transaction, in batches of one row, and after a snapshot that has read the row."""
    sql(
        source,
        "alter table items alter name set storage external",
        "insert into items select i, repeat(i::text, 9000), 0 from generate_series(1, 3) i",
    )
    limits = Limits(rows=1, transactions=Transactions.SPLIT)
    runtime, mirror = CdcRuntime(source, store, snapshot_tables=(ITEMS,), limits=limits), Mirror()
    runtime.start()
    drive(runtime, mirror, lambda: len(mirror.rows) == 3)
    sql(
        source,
        "begin; update items set id = 12 where id = 2; update items set id = 22, n = 5 where id = 12; commit",
        "insert into items values (2, 'another', 0)",
        "update items set id = 23 where id = 3",
    )
    found = drive(runtime, mirror, reached(runtime, source))
    unsent = [event.unchanged for batch in found for event in batch.events() if event.moved_from]
    assert unsent == [("name",)] * 3, "the server leaves it out"
    assert mirror.of(ITEMS) == rows_of(source, ITEMS)
    runtime.stop()


def test_a_snapshot_goes_on_behind_a_key_of_any_year(source: PostgresCapture, store: MemoryCheckpointStore) -> None:
    """Python's calendar has the years from 1 to 9999; the server has more."""
    days = ["4000-02-03 BC", "0044-03-15 BC", "0001-01-02", "2020-02-29", "12345-06-07", "5874897-12-31"]
    sql(
        source,
        "create table ages (day date, at timestamptz, primary key (day, at))",
        "insert into ages select d::date, t::timestamptz "
        f"from unnest(array{days}) d, unnest(array['0100-01-01 BC', '2020-01-01', '200000-01-01']) t",
    )
    ages = TableId("public", "ages")
    source.settings = replace(source.settings, wanted=lambda table: table == ages)
    seen: list[tuple[object, ...]] = []
    while len(seen) < 18:
        runtime = CdcRuntime(source, store, snapshot_tables=(ages,), limits=Limits(rows=5))
        runtime.start()
        batch = runtime.poll(5.0)
        while not batch.rows:
            batch = runtime.poll(5.0)
        assert batch.kind is BatchKind.SNAPSHOT
        seen += [tuple(event.values.values()) for event in batch.events()]
        runtime.commit(batch.ack)
        runtime.force_stop()
    assert len(set(seen)) == len(seen) == 18
    assert [str(day) for day, _ in seen[::3]] == [
        "-3999-02-03",
        "-043-03-15",
        "0001-01-02",
        "2020-02-29",
        "12345-06-07",
        "5874897-12-31",
    ]


def test_a_snapshot_on_demand_can_be_filtered(source: PostgresCapture, store: MemoryCheckpointStore) -> None:
    sql(source, "insert into items select i, 'x', i % 10 from generate_series(1, 100) i")
    heard: list[Fact] = []
    runtime, mirror = CdcRuntime(source, store, observers=(heard.append,)), Mirror()
    runtime.start()
    runtime.control.snapshot(ITEMS, where="n = 3 -- and no more")
    found = drive(runtime, mirror, lambda: bool(ended(heard)))
    assert len(mirror.rows) == 10
    assert {event.values["n"] for batch in found for event in batch.events()} == {3}
    runtime.stop()


def test_a_condition_that_makes_no_sense_ends_its_snapshot_and_the_stream_goes_on(
    source: PostgresCapture, store: MemoryCheckpointStore
) -> None:
    sql(source, "insert into items select i, 'x', i % 10 from generate_series(1, 100) i")
    heard: list[Fact] = []
    runtime, mirror = CdcRuntime(source, store, observers=(heard.append,)), Mirror()
    runtime.start()
    wrong = {
        "nmae = 'x'": 'column "nmae" does not exist',
        "id in (select id from public.itmes)": "does not exist",
        "name = 5": "operator does not exist",
        "true) or (true": "must be one complete expression",
        "": "it is empty",
    }
    for number, (where, words) in enumerate(wrong.items()):
        runtime.control.snapshot(ITEMS, where=where)
        sql(source, f"insert into items values ({1000 + number}, 'late', 0)")
        drive(runtime, mirror, lambda n=number: len(ended(heard)) > n)  # type: ignore[misc] # bound
        drive(runtime, mirror, reached(runtime, source))
        error = ended(heard)[-1].error
        assert isinstance(error, ConfigError)
        assert words in error.message
    assert sorted(row["id"] for row in mirror.of(ITEMS)) == list(range(1000, 1000 + len(wrong)))
    assert runtime.progress.reconnects == 0
    assert not [fact for fact in heard if isinstance(fact, (Lost, SnapshotBegun))], "none of them was begun"
    runtime.stop()


def test_a_condition_that_no_longer_makes_sense_ends_its_snapshot_and_nothing_is_stuck_after_a_restart(
    source: PostgresCapture, store: MemoryCheckpointStore
) -> None:
    """What it names went away while it was read; the table itself is as it was."""
    sql(
        source,
        "create table apart_too (id int8)",
        "insert into apart_too select generate_series(1, 300)",
        "insert into items select i, repeat('x', 100), 0 from generate_series(1, 300) i",
    )
    heard: list[Fact] = []
    for restarted in (False, True):
        runtime = CdcRuntime(source, store, observers=(heard.append,), limits=Limits(rows=20))
        runtime.start()
        if not restarted:
            runtime.control.snapshot(ITEMS, where="id in (select id from public.apart_too)")
            drive(runtime, Mirror(), lambda r=runtime: r.rows_committed >= 20)  # type: ignore[misc] # bound
            runtime.force_stop()
            assert not ended(heard)
            sql(source, "drop table apart_too")
    assert [fact.error.code for fact in ended(heard) if fact.error] == ["config-invalid"]
    sql(source, "insert into items values (1000, 'late', 0)")
    mirror = Mirror()
    drive(runtime, mirror, reached(runtime, source))
    assert [row["id"] for row in mirror.of(ITEMS)] == [1000]
    runtime.stop()


@pytest.mark.parametrize("altered", [False, True])
def test_what_a_condition_does_not_find_is_the_tables_only_if_the_table_was_changed(
    source: PostgresCapture, altered: bool
) -> None:
    sql(source, "insert into items values (1, 'x', 0)")
    source.prepare(None)
    plan = source.plan(ITEMS, ChunkKind.KEY, source.scan_chunk_bytes)
    reader = source.chunk_reader(60.0, ZERO)
    if altered:
        sql(source, "alter table items rename n to m")
    with reader, pytest.raises(SourceError) as failed:
        list(reader.rows(plan.schema, plan.chunks[0], "nmae = 'x'"))
    assert isinstance(failed.value, SourceRewritten) == altered
    assert altered or failed.value.remedy is Remedy.OPERATOR


def test_lesson_2_an_open_writer_is_waited_for_and_the_stream_goes_on_meanwhile(
    source: PostgresCapture, store: MemoryCheckpointStore
) -> None:
    """What it has written is in the snapshot or in the stream."""
    runtime, mirror = CdcRuntime(source, store), Mirror()
    runtime.start()
    with psycopg.connect(source.settings.url) as writer:
        writer.execute("insert into items values (1, 'open', 0)")
        runtime.control.snapshot(ITEMS)
        drive(runtime, mirror, lambda: runtime.control.status().snapshot is not None)
        sql(source, "insert into items values (2, 'other', 0)")
        drive(runtime, mirror, lambda: len(mirror.rows) == 1)
        assert runtime.control.status().snapshot is not None, "it waits"
        writer.commit()
    drive(runtime, mirror, reached(runtime, source))
    assert mirror.of(ITEMS) == rows_of(source, ITEMS)
    runtime.stop()


def test_a_table_without_a_key_is_read_in_one_snapshot_or_not_at_all(
    source: PostgresCapture, store: MemoryCheckpointStore, caplog: pytest.LogCaptureFixture
) -> None:
    sql(source, "insert into loose select generate_series(1, 50)")
    with pytest.raises(Unsupported):
        CdcRuntime(source, store, incremental_snapshot=(LOOSE,)).start()
    first = CdcRuntime(source, store, snapshot_tables=(LOOSE,), limits=Limits(rows=20))
    first.start()
    first.commit(first.poll().ack)
    first.force_stop()
    sql(source, "insert into loose values (51)")
    again = CdcRuntime(source, store, snapshot_tables=(LOOSE,), limits=Limits(rows=20))
    again.start()
    assert any("begins again" in record.message for record in caplog.records)
    found: list[int] = []
    while len(found) < 51:
        batch = again.poll()
        found += [event.values["v"] for event in batch.events()]
        again.commit(batch.ack)
    assert sorted(found) == list(range(1, 52))
    again.force_stop()


def test_a_snapshot_of_which_nothing_is_left_is_over_for_the_next_start_too(
    source: PostgresCapture, store: MemoryCheckpointStore
) -> None:
    """With its last acknowledgement; and where a table without rows comes last, with the poll that finds nothing."""
    sql(source, "insert into items select i, repeat('x', 100) || i, 0 from generate_series(1, 300) i")
    for key, tables in (("rows last", (LOOSE, ITEMS)), ("nothing last", (ITEMS, LOOSE))):
        runtime = CdcRuntime(source, store, key=key, snapshot_tables=tables)
        runtime.start()
        while (batch := runtime.poll()).kind is not BatchKind.EMPTY:
            runtime.commit(batch.ack)
            if tables[-1] == ITEMS and runtime.rows_committed == 300:
                break
        runtime.stop()
        again = CdcRuntime(source, store, key=key)
        again.start()
        assert again.rows_committed == 300
        again.stop()
        source.drop()


def test_a_slot_that_no_checkpoint_tells_of_is_not_touched_unless_told(
    source: PostgresCapture, store: MemoryCheckpointStore
) -> None:
    runtime = CdcRuntime(source, store)
    runtime.start()
    runtime.stop()
    slots = "select slot_name, confirmed_flush_lsn from pg_replication_slots"
    before = sql(source, slots)
    with pytest.raises(SourceNotReady, match="no checkpoint") as refused:
        CdcRuntime(source, store, key="mistyped").start()
    assert "pg_drop_replication_slot('library')" in refused.value.hint
    assert sql(source, slots) == before
    told = CdcRuntime(PostgresCapture(replace(source.settings, recreate_slot=True)), store, key="other")
    told.start()
    told.stop()
    assert sql(source, slots) != before


def test_a_table_that_is_not_published_is_not_read(source: PostgresCapture, store: MemoryCheckpointStore) -> None:
    runtime = CdcRuntime(source, store, snapshot_tables=(TableId("public", "apart"),))
    with pytest.raises(TableUnpublished):
        runtime.start()
    assert runtime.state is State.IDLE


def test_the_guides_code_for_a_server_runs(
    source: PostgresCapture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sql(source, "create table orders (id int8 primary key)", "insert into orders values (1), (2)")
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "guides" / "library.md").read_text()
    (block,) = [found for found in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "PostgresCapture" in found]
    names: dict[str, Any] = {}
    exec(block.replace("postgresql://app:secret@localhost/shop", source.settings.url), names)
    runtime = names["runtime"]
    assert [event.key for event in runtime.poll().events()] == [{"id": 1}, {"id": 2}]
    runtime.force_stop()
    names["store"].close()
    names["history"].close()
    names["source"].drop()


def test_lesson_9_a_paused_runtime_still_answers_the_server(
    source: PostgresCapture, store: MemoryCheckpointStore
) -> None:
    """The server ends a session that does not answer for `wal_sender_timeout`; a longer pause is survived."""
    sql(source, f"alter role current_user set wal_sender_timeout = '{KEEPALIVE_SECONDS}s'")
    try:
        runtime, mirror = CdcRuntime(source, store), Mirror()
        runtime.start()
        sql(source, "insert into items values (1, 'x', 0)")
        drive(runtime, mirror, lambda: len(mirror.rows) == 1)
        runtime.control.pause()
        sql(source, "insert into items values (2, 'x', 0)")
        until = time.monotonic() + 1.5 * KEEPALIVE_SECONDS
        while time.monotonic() < until:
            assert runtime.poll().kind is BatchKind.EMPTY
        runtime.control.resume()
        drive(runtime, mirror, lambda: len(mirror.rows) == 2)
        assert runtime.progress.reconnects == 0
        runtime.stop()
    finally:
        sql(source, "alter role current_user reset wal_sender_timeout")
