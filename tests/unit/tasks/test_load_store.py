"""Records of loads: what is written is read back equal, and what cannot be read is not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tailrace.capture.postgres.chunks import Chunk, ChunkKind, Leaf, Plan
from tailrace.capture.postgres.snapshot import BarrierSnapshot
from tailrace.model.position import ZERO, Lsn
from tailrace.model.schema import TableId
from tailrace.tables.staging import StagedFile
from tailrace.tasks import load_store as seeds_module
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
NOTED = BarrierSnapshot(floor=Lsn(10), ceiling=Lsn(20), xmin=5, xmax=9, running=(5, 7), standby=False)
FILE = StagedFile(path="part-x-000.parquet", size=5, rows=2, stats='{"numRecords": 2}')


@pytest.fixture
def seeds(tmp_path: Path) -> LoadStore:
    return LoadStore(tmp_path)


@pytest.mark.parametrize(
    "seed",
    [
        LoadRecord(plan=PLAN, snapshot_position=Lsn(0x1_0000_0001)),
        LoadRecord(plan=PLAN, snapshot_position=None, barrier=NOTED),
        LoadRecord(
            plan=PLAN,
            snapshot_position=Lsn(5),
            request=LoadRequest(table=SHOP.table, mode=LoadMode.REFRESH, where="a = 'ü' -- x\n"),
        ),
    ],
    ids=["exact", "chunked", "wished for"],
)
def test_a_load_comes_back_as_it_was_begun(seeds: LoadStore, seed: LoadRecord) -> None:
    seeds.begin(seed)
    assert seeds.unfinished_loads() == [seed]
    assert seeds.unfinished_loads()[0].log_needed_after == (seed.snapshot_position or NOTED.floor)
    seeds.end(seed)
    assert seeds.unfinished_loads() == []


def test_loads_come_oldest_first(seeds: LoadStore) -> None:
    young, old = (LoadRecord(plan=PLAN, snapshot_position=Lsn(1), begun_at=made_at) for made_at in (20.0, 10.0))
    seeds.begin(young)
    seeds.begin(old)
    assert seeds.unfinished_loads() == [old, young]


def test_chunks_that_are_in_are_known_by_their_number(seeds: LoadStore) -> None:
    seed = LoadRecord(plan=PLAN, snapshot_position=Lsn(1))
    seeds.begin(seed)
    chunks = {
        number: StagedChunk(chunk=number, files=(FILE,), keys=keys, rows=2, bytes=5, seconds=0.5, seen_until=Lsn(9))
        for number, keys in ((3, ()), (0, (FILE,)))
    }
    for staged in chunks.values():
        seeds.record_chunk(seed.id, staged)
    assert seeds.staged_chunks(seed.id) == chunks
    seeds.record_chunk(seed.id, chunks[0])  # a task that is run twice
    assert seeds.staged_chunks(seed.id) == chunks


def test_a_load_is_passed_where_its_last_row_was_read(seeds: LoadStore) -> None:
    seed = LoadRecord(plan=PLAN, snapshot_position=None, barrier=NOTED)
    seeds.begin(seed)
    seeds.record_refetch(seed.id, Lsn(20), Lsn(50))
    assert seeds.catch_up_until(seed.id) is None, "it is not about to land"
    seeds.record_commit(seed.id, Lsn(30))
    assert seeds.catch_up_until(seed.id) == Lsn(50)
    seeds.record_refetch(seed.id, Lsn(30), Lsn(40))
    seeds.record_refetch(seed.id, Lsn(30), Lsn(70))
    assert seeds.catch_up_until(seed.id) == Lsn(70)


def test_the_sources_time_of_a_load_is_remembered_whatever_is_read_again_and_older_records_have_none(
    seeds: LoadStore,
) -> None:
    seed = LoadRecord(plan=PLAN, snapshot_position=Lsn(1), id="timed")
    seeds.begin(seed)
    seeds.record_commit("timed", Lsn(30), 5_000_000)
    seeds.record_refetch("timed", Lsn(30), Lsn(70))
    seeds.end(seed)
    landed = seeds.committed_load("timed")
    assert landed is not None
    assert (landed.source_time, landed.ahead_until(Lsn(40))) == (5_000_000, Lsn(70))
    (seeds.folder("landed") / "older.json").write_text('{"passed": "0/1E", "spans": []}')
    older = seeds.committed_load("older")
    assert older is not None
    assert (older.source_time, older.ahead_until(Lsn(1))) == (None, Lsn(30))


def test_a_load_without_its_plan_is_over_and_swept_away(seeds: LoadStore) -> None:
    over, other, wish = (
        LoadRecord(plan=PLAN, snapshot_position=Lsn(1)),
        LoadRecord(plan=PLAN, snapshot_position=Lsn(1)),
        LoadRequest(table=ORDERS),
    )
    for seed in (over, other):
        seeds.begin(seed)
        seeds.record_commit(seed.id, Lsn(30))
    seeds.add_request(wish)
    seeds.set_hold(ORDERS, LoadHold.PAUSED)
    (seeds.folder(over.id) / "plan.json").unlink()  # killed in the middle of ending it
    assert seeds.unfinished_loads() == [other]
    seeds.remove_leftovers()
    assert not seeds.folder(over.id).exists()
    assert (seeds.unfinished_loads(), seeds.requests(), seeds.holds()) == ([other], [wish], {ORDERS: LoadHold.PAUSED})


def test_wishes_come_oldest_first_until_they_are_fulfilled(seeds: LoadStore) -> None:
    wishes = [
        LoadRequest(table=DOTTED, requested_at=2.0),
        LoadRequest(table=ORDERS, requested_at=1.0, mode=LoadMode.REFRESH, where="x > 5"),
    ]
    for wish in wishes:
        seeds.add_request(wish)
    assert seeds.requests() == wishes[::-1]
    seeds.complete_request(wishes[1])
    seeds.complete_request(wishes[1])  # by two
    assert seeds.requests() == wishes[:1]


def test_holds_are_of_tables_and_not_of_names(seeds: LoadStore) -> None:
    seeds.set_hold(DOTTED, LoadHold.PAUSED)
    seeds.set_hold(TableId("a", "b.c"), LoadHold.STOPPED)
    assert seeds.holds() == {DOTTED: LoadHold.PAUSED, TableId("a", "b.c"): LoadHold.STOPPED}
    seeds.set_hold(DOTTED, LoadHold.STOPPED)
    assert seeds.holds()[DOTTED] is LoadHold.STOPPED
    seeds.set_hold(DOTTED, None)
    seeds.set_hold(DOTTED, None)
    assert set(seeds.holds()) == {TableId("a", "b.c")}


def test_a_log_without_loads_has_no_records(seeds: LoadStore) -> None:
    assert (
        seeds.unfinished_loads(),
        seeds.requests(),
        seeds.holds(),
        seeds.staged_chunks("x"),
        seeds.catch_up_until("x"),
    ) == ([], [], {}, {}, None)


def test_a_record_that_is_cut_off_is_none(seeds: LoadStore, tmp_path: Path) -> None:
    seed, wish = LoadRecord(plan=PLAN, snapshot_position=Lsn(1)), LoadRequest(table=ORDERS)
    seeds.begin(seed)
    seeds.add_request(wish)
    for path in (tmp_path / FOLDER).rglob("*.json"):
        path.write_bytes(path.read_bytes()[:20])
    assert (seeds.unfinished_loads(), seeds.requests()) == ([], [])


def test_a_row_that_was_read_again_says_nothing_of_versions_before_it(seeds: LoadStore) -> None:
    seeds.record_ahead_range("load", Lsn(30))
    for since, seen in ((50, 60), (55, 70), (90, 95)):
        seeds.record_refetch("load", Lsn(since), Lsn(seen))
    assert seeds.ahead_ranges("load") == [(ZERO, Lsn(30)), (Lsn(50), Lsn(70)), (Lsn(90), Lsn(95))]
    until = {at: seeds.ahead_until("load", Lsn(at)) for at in (29, 30, 49, 50, 69, 70, 92, 95)}
    assert until == {29: Lsn(30), 30: None, 49: None, 50: Lsn(70), 69: Lsn(70), 70: None, 92: Lsn(95), 95: None}
    assert seeds.ahead_ranges("other") is None


def test_what_is_on_record_does_not_grow_for_ever(seeds: LoadStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seeds_module, "AHEAD_RANGES_MAX", 2)
    for since in (10, 20, 30, 40):
        seeds.record_ahead_range("load", Lsn(since + 1), since=Lsn(since))
    assert seeds.ahead_ranges("load") == [(Lsn(10), Lsn(31)), (Lsn(40), Lsn(41))], "rather too much than too little"


def test_a_record_of_before_counts_from_the_beginning(seeds: LoadStore, tmp_path: Path) -> None:
    seeds.record_ahead_range("load", Lsn(30))
    (record,) = tmp_path.rglob("load.json")
    record.write_text('{"passed": "0/1E"}')
    assert (seeds.ahead_until("load", Lsn(29)), seeds.ahead_until("load", Lsn(30))) == (Lsn(30), None)
