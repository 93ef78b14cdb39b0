"""Load records are read back as they were written, and unreadable ones are skipped."""

from __future__ import annotations

from pathlib import Path

import pytest

from tailrace.capture.postgres.chunks import Chunk, ChunkKind, Leaf, Plan
from tailrace.capture.postgres.snapshot import BarrierSnapshot
from tailrace.model.position import ZERO, Lsn
from tailrace.model.schema import TableId
from tailrace.tables.staging import StagedFile
from tailrace.tasks import load_store as load_store_module
from tailrace.tasks.load_store import FOLDER, LoadHold, LoadMode, LoadRecord, LoadRequest, LoadStore, StagedChunk
from tests.support.changes import SHOP

ORDERS, DOTTED = TableId("public", "orders"), TableId("a.b", "c")
LEAF = Leaf(oid=16384, schema="public", name='the "things"', file=5, pages=100, bytes=819_200)
PLAN = Plan(
    schema=SHOP,
    leaves=(LEAF,),
    cut=ChunkKind.KEY,
    chunks=(
        Chunk(number=0, leaf=LEAF, bytes=409_600, to_key=("5", "ü"), key=(("id", "integer"), ("name", "text"))),
        Chunk(number=1, leaf=LEAF, bytes=409_600, from_key=("5", "ü"), key=(("id", "integer"), ("name", "text"))),
        Chunk(number=2, leaf=LEAF, bytes=1, pages=(7, None)),
        Chunk(number=3, leaf=LEAF, bytes=1),
    ),
)
BARRIER = BarrierSnapshot(floor=Lsn(10), ceiling=Lsn(20), xmin=5, xmax=9, running=(5, 7), standby=False)
FILE = StagedFile(path="part-x-000.parquet", size=5, rows=2, stats='{"numRecords": 2}')


@pytest.fixture
def store(tmp_path: Path) -> LoadStore:
    return LoadStore(tmp_path)


@pytest.mark.parametrize(
    "record",
    [
        LoadRecord(plan=PLAN, snapshot_position=Lsn(0x1_0000_0001)),
        LoadRecord(plan=PLAN, snapshot_position=None, barrier=BARRIER),
        LoadRecord(
            plan=PLAN,
            snapshot_position=Lsn(5),
            request=LoadRequest(table=SHOP.table, mode=LoadMode.REFRESH, where="a = 'ü' -- x\n"),
        ),
    ],
    ids=["exact", "chunked", "requested"],
)
def test_a_load_record_is_read_back(store: LoadStore, record: LoadRecord) -> None:
    store.begin(record)
    assert store.unfinished_loads() == [record]
    assert store.unfinished_loads()[0].log_needed_after == (record.snapshot_position or BARRIER.floor)
    store.end(record)
    assert store.unfinished_loads() == []


def test_unfinished_loads_are_listed_oldest_first(store: LoadStore) -> None:
    young, old = (LoadRecord(plan=PLAN, snapshot_position=Lsn(1), begun_at=begun_at) for begun_at in (20.0, 10.0))
    store.begin(young)
    store.begin(old)
    assert store.unfinished_loads() == [old, young]


def test_staged_chunks_are_listed_by_number(store: LoadStore) -> None:
    record = LoadRecord(plan=PLAN, snapshot_position=Lsn(1))
    store.begin(record)
    chunks = {
        number: StagedChunk(chunk=number, files=(FILE,), keys=keys, rows=2, bytes=5, seconds=0.5, seen_until=Lsn(9))
        for number, keys in ((3, ()), (0, (FILE,)))
    }
    for staged in chunks.values():
        store.record_chunk(record.id, staged)
    assert store.staged_chunks(record.id) == chunks
    store.record_chunk(record.id, chunks[0])  # a task that runs twice
    assert store.staged_chunks(record.id) == chunks


def test_the_catch_up_must_pass_the_last_read_of_any_row(store: LoadStore) -> None:
    record = LoadRecord(plan=PLAN, snapshot_position=None, barrier=BARRIER)
    store.begin(record)
    store.record_refetch(record.id, Lsn(20), Lsn(50))
    assert store.catch_up_until(record.id) is None, "its commit is not recorded yet"
    store.record_commit(record.id, Lsn(30))
    assert store.catch_up_until(record.id) == Lsn(50)
    store.record_refetch(record.id, Lsn(30), Lsn(40))
    store.record_refetch(record.id, Lsn(30), Lsn(70))
    assert store.catch_up_until(record.id) == Lsn(70)


def test_the_source_time_of_a_load_survives_refetches_and_older_records_have_none(store: LoadStore) -> None:
    record = LoadRecord(plan=PLAN, snapshot_position=Lsn(1), id="timed")
    store.begin(record)
    store.record_commit("timed", Lsn(30), 5_000_000)
    store.record_refetch("timed", Lsn(30), Lsn(70))
    store.end(record)
    committed = store.committed_load("timed")
    assert committed is not None
    assert (committed.source_time, committed.ahead_until(Lsn(40))) == (5_000_000, Lsn(70))
    (store.folder("landed") / "older.json").write_text('{"passed": "0/1E", "spans": []}')
    older = store.committed_load("older")
    assert older is not None
    assert (older.source_time, older.ahead_until(Lsn(1))) == (None, Lsn(30))


def test_a_load_without_its_plan_has_ended_and_is_removed(store: LoadStore) -> None:
    ended, other, request = (
        LoadRecord(plan=PLAN, snapshot_position=Lsn(1)),
        LoadRecord(plan=PLAN, snapshot_position=Lsn(1)),
        LoadRequest(table=ORDERS),
    )
    for record in (ended, other):
        store.begin(record)
        store.record_commit(record.id, Lsn(30))
    store.add_request(request)
    store.set_hold(ORDERS, LoadHold.PAUSED)
    (store.folder(ended.id) / "plan.json").unlink()  # killed while it was being ended
    assert store.unfinished_loads() == [other]
    store.remove_leftovers()
    assert not store.folder(ended.id).exists()
    assert (store.unfinished_loads(), store.requests(), store.holds()) == (
        [other],
        [request],
        {ORDERS: LoadHold.PAUSED},
    )


def test_load_requests_are_listed_oldest_first_until_completed(store: LoadStore) -> None:
    requests = [
        LoadRequest(table=DOTTED, requested_at=2.0),
        LoadRequest(table=ORDERS, requested_at=1.0, mode=LoadMode.REFRESH, where="x > 5"),
    ]
    for request in requests:
        store.add_request(request)
    assert store.requests() == requests[::-1]
    store.complete_request(requests[1])
    store.complete_request(requests[1])  # by two processes
    assert store.requests() == requests[:1]


def test_tables_with_the_same_dotted_name_have_separate_holds(store: LoadStore) -> None:
    store.set_hold(DOTTED, LoadHold.PAUSED)
    store.set_hold(TableId("a", "b.c"), LoadHold.STOPPED)
    assert store.holds() == {DOTTED: LoadHold.PAUSED, TableId("a", "b.c"): LoadHold.STOPPED}
    store.set_hold(DOTTED, LoadHold.STOPPED)
    assert store.holds()[DOTTED] is LoadHold.STOPPED
    store.set_hold(DOTTED, None)
    store.set_hold(DOTTED, None)
    assert set(store.holds()) == {TableId("a", "b.c")}


def test_a_log_without_loads_has_no_records(store: LoadStore) -> None:
    assert (
        store.unfinished_loads(),
        store.requests(),
        store.holds(),
        store.staged_chunks("x"),
        store.catch_up_until("x"),
    ) == ([], [], {}, {}, None)


def test_a_torn_record_is_skipped(store: LoadStore, tmp_path: Path) -> None:
    record, request = LoadRecord(plan=PLAN, snapshot_position=Lsn(1)), LoadRequest(table=ORDERS)
    store.begin(record)
    store.add_request(request)
    for path in (tmp_path / FOLDER).rglob("*.json"):
        path.write_bytes(path.read_bytes()[:20])
    assert (store.unfinished_loads(), store.requests()) == ([], [])


def test_a_refetch_adds_a_range_that_leaves_earlier_versions_alone(store: LoadStore) -> None:
    store.record_ahead_range("load", Lsn(30))
    for since, seen_until in ((50, 60), (55, 70), (90, 95)):
        store.record_refetch("load", Lsn(since), Lsn(seen_until))
    assert store.ahead_ranges("load") == [(ZERO, Lsn(30)), (Lsn(50), Lsn(70)), (Lsn(90), Lsn(95))]
    until = {at: store.ahead_until("load", Lsn(at)) for at in (29, 30, 49, 50, 69, 70, 92, 95)}
    assert until == {29: Lsn(30), 30: None, 49: None, 50: Lsn(70), 69: Lsn(70), 70: None, 92: Lsn(95), 95: None}
    assert store.ahead_ranges("other") is None


def test_the_number_of_ranges_per_load_is_limited(store: LoadStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_store_module, "AHEAD_RANGES_MAX", 2)
    for since in (10, 20, 30, 40):
        store.record_ahead_range("load", Lsn(since + 1), since=Lsn(since))
    assert store.ahead_ranges("load") == [(Lsn(10), Lsn(31)), (Lsn(40), Lsn(41))], (
        "a merged range may be too large, never too small"
    )


def test_a_record_of_an_older_release_is_one_range_from_the_start(store: LoadStore, tmp_path: Path) -> None:
    store.record_ahead_range("load", Lsn(30))
    (record,) = tmp_path.rglob("load.json")
    record.write_text('{"passed": "0/1E"}')
    assert (store.ahead_until("load", Lsn(29)), store.ahead_until("load", Lsn(30))) == (Lsn(30), None)
