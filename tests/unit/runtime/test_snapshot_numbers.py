"""No number is ever handed out with two different rows.

So a sink that inserts missing numbers ends equal to the source. It holds for any mix of snapshots, writes, prefixes,
losses and crashes.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.capture.memory.source import MemoryCapture, batch_of
from tailrace.capture.port import SourceId
from tailrace.errors import SourceUnreachable
from tailrace.model.change import Operation
from tailrace.model.event import Event
from tailrace.model.mirror import Mirror
from tailrace.runtime import intake
from tailrace.runtime.loop import CdcRuntime
from tailrace.runtime.output_batch import Batch, BatchKind, Limits, Transactions
from tailrace.runtime.position_store import SEQS_SKIPPED
from tailrace.state.checkpoint_stores import FileCheckpointStore, MemoryCheckpointStore
from tests.support.changes import SHOP
from tests.support.runtimes import inserts, keys_of

FIXTURE = Path(__file__).parents[2] / "fixtures" / "runtime-format-1" / "default.json"
ROWS = 9
STEPS_MAX = 400
ACTIONS = st.lists(
    st.sampled_from(["ack", "prefix", "lose", "crash", "ask", "insert", "update", "delete"]), min_size=1, max_size=14
)
SPLIT = Limits(rows=2, transactions=Transactions.SPLIT)


class InsertIfAbsent:
    """The content of a table with `_seq` as its key after `INSERT … ON CONFLICT DO NOTHING`."""

    def __init__(self) -> None:
        self.kept: dict[int, Event] = {}

    def take(self, batch: Batch) -> None:
        for event in batch.events():
            kept = self.kept.setdefault(event.seq, event)
            assert (kept.operation, kept.values) == (event.operation, event.values), "another row under its number"

    def rows(self) -> dict[tuple[object, ...], dict[str, object]]:
        """The table that the rows make, applied in the order of their numbers."""
        mirror = Mirror()
        for seq in sorted(self.kept):
            mirror.apply(self.kept[seq].row_write())
        return mirror.rows


def write(source: MemoryCapture, action: str, key: int, turn: int) -> None:
    """Commit a transaction of several rows, which the source sends in parts."""
    if action == "delete":
        source.commit(batch_of(SHOP, (Operation.DELETE, {"id": key})))
        return
    written = range(key, key + 5)
    rows = [(Operation.INSERT, {"id": n, "name": f"at {turn}"}) for n in written]
    source.commit(batch_of(SHOP, *rows))


@settings(max_examples=120)
@given(actions=ACTIONS, data=st.data(), bulk=st.booleans(), whole=st.booleans(), rows=st.integers(1, 6))
def test_a_sink_that_inserts_missing_numbers_ends_equal_to_the_source(
    actions: list[str], data: st.DataObject, bulk: bool, whole: bool, rows: int
) -> None:
    intake.RETRY_SECONDS_FIRST, was = 0.0, intake.RETRY_SECONDS_FIRST
    try:
        source = MemoryCapture(keep_tables=True, chunk_rows=4, part_rows_max=2)
        source.commit(inserts(*range(ROWS)))
        store, sink = MemoryCheckpointStore(), InsertIfAbsent()
        policy = Transactions.WHOLE if whole else Transactions.SPLIT

        def started() -> CdcRuntime:
            tables = {"snapshot_tables" if bulk else "incremental_snapshot": (SHOP.table,)}
            made = CdcRuntime(source, store, limits=Limits(rows=rows, transactions=policy), **tables)  # type: ignore[arg-type] # one of the two
            made.start()
            return made

        runtime = started()
        for step in range(STEPS_MAX):
            action = actions[step] if step < len(actions) else "ack"
            batch = runtime.poll(0.0)
            sink.take(batch)
            if action in ("insert", "update", "delete"):
                write(source, action, step * 10 if action == "insert" else data.draw(st.integers(0, ROWS)), step)
            elif action == "lose":
                source.break_next_read(SourceUnreachable("gone", hint="Wait."))
            elif action == "ask":
                runtime.control.snapshot(SHOP.table)
            elif action == "crash":
                runtime.force_stop()
                runtime = started()
            elif batch.rows:
                count = data.draw(st.integers(1, batch.rows)) if action == "prefix" else batch.rows
                runtime.commit(batch.ack, rows=count)
            elif step > len(actions) and runtime.position == source.end and runtime.control.status().snapshot is None:
                break
        assert sink.rows() == source._view()[0].get(SHOP.table).mirror.rows
        runtime.stop()
    finally:
        intake.RETRY_SECONDS_FIRST = was


@pytest.fixture
def source() -> MemoryCapture:
    made = MemoryCapture(keep_tables=True, chunk_rows=4)
    made.commit(inserts(*range(ROWS)))
    return made


@pytest.fixture
def store() -> MemoryCheckpointStore:
    return MemoryCheckpointStore()


def seqs(batch: Batch) -> list[int]:
    return [event.seq for event in batch.events()]


def test_a_resumed_snapshot_skips_numbers_that_may_have_been_handed_out(
    source: MemoryCapture, store: MemoryCheckpointStore
) -> None:
    first = CdcRuntime(source, store, snapshot_tables=(SHOP.table,), limits=Limits(rows=2))
    first.start()
    first.commit(first.poll().ack)
    assert seqs(first.poll()) == [2, 3], "and here it dies"
    source.commit(batch_of(SHOP, (Operation.DELETE, {"id": 2})))
    again = CdcRuntime(source, store, snapshot_tables=(SHOP.table,), limits=Limits(rows=2))
    again.start()
    batch = again.poll()
    assert (keys_of(batch), seqs(batch)) == ([3, 4], [SEQS_SKIPPED + 2, SEQS_SKIPPED + 3])
    assert again.rows_committed == 2, "a number that was passed over is no row"
    again.force_stop()


def test_a_snapshot_requested_after_a_crash_uses_no_number_of_the_stream(
    source: MemoryCapture, store: MemoryCheckpointStore
) -> None:
    first = CdcRuntime(source, store)
    first.start()
    assert seqs(first.poll()) == list(range(ROWS)), "and here it dies"
    again = CdcRuntime(source, store)
    again.start()
    again.control.snapshot(SHOP.table)
    batch = again.poll()
    assert (batch.kind, seqs(batch)[0]) == (BatchKind.SNAPSHOT, SEQS_SKIPPED)
    again.force_stop()


def test_no_chunk_uses_the_numbers_of_a_repeated_transaction(store: MemoryCheckpointStore) -> None:
    source = MemoryCapture(keep_tables=True, chunk_rows=4, part_rows_max=2)
    runtime = CdcRuntime(source, store, limits=SPLIT)
    runtime.start()
    source.commit(inserts(*range(6)))
    part = runtime.poll()
    runtime.commit(part.ack)
    assert (part.partial, seqs(part)) == (True, [0, 1])
    source.break_next_read(SourceUnreachable("gone", hint="Wait."))
    runtime.control.snapshot(SHOP.table)
    while not (batch := runtime.poll()).rows:
        pass
    assert (batch.kind, batch.restarts, seqs(batch)) == (BatchKind.STREAM, True, [0, 1])
    found = []
    while batch.kind is not BatchKind.SNAPSHOT:
        found += keys_of(batch) if batch.rows else []
        runtime.commit(batch.ack)
        batch = runtime.poll()
    assert (found, keys_of(batch)) == (list(range(6)), [0, 1]), "then the chunk comes"
    runtime.force_stop()


def test_numbers_continue_without_a_gap_when_no_snapshot_is_under_way(
    source: MemoryCapture, store: MemoryCheckpointStore
) -> None:
    for expected in (list(range(ROWS)), [ROWS]):
        runtime = CdcRuntime(source, store)
        runtime.start()
        batch = runtime.poll()
        assert seqs(batch) == expected
        runtime.commit(batch.ack)
        runtime.stop()
        source.commit(inserts(500))


def test_a_checkpoint_of_format_1_is_read_and_continued(source: MemoryCapture, tmp_path: Path) -> None:
    """The fixture is from the middle of a snapshot, when no numbers were skipped yet."""
    shutil.copy(FIXTURE, tmp_path)
    store = FileCheckpointStore(tmp_path)
    old = store.load("default")
    assert old is not None
    source.identity = SourceId(**old.metadata["source"])
    source.quiet(1000)
    runtime = CdcRuntime(source, store, snapshot_tables=(SHOP.table,))
    runtime.start()
    batch = runtime.poll()
    assert (keys_of(batch), seqs(batch)[0]) == ([4, 5, 6, 7], SEQS_SKIPPED + 4)
    runtime.commit(batch.ack)
    saved = store.load("default")
    assert saved is not None
    assert {name: saved.metadata[name] for name in ("runtime", "rows", "passed")} == {
        "runtime": 2,
        "rows": 8,
        "passed": SEQS_SKIPPED,
    }
    runtime.force_stop()
    store.close()
