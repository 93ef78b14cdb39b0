"""Records of loads: what is written is read back equal, and what cannot be read is not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tailrace.capture.postgres.chunks import Chunk, Cut, Leaf, Plan
from tailrace.capture.postgres.snapshot import Noted
from tailrace.model.position import ZERO, Lsn
from tailrace.model.schema import TableId
from tailrace.tables.staging import StagedFile
from tailrace.tasks import load_store as seeds_module
from tailrace.tasks.load_store import FOLDER, Hold, LoadMode, Seed, Seeds, StagedChunk, Wish
from tests.support.changes import SHOP

ORDERS, DOTTED = TableId("public", "orders"), TableId("a.b", "c")
LEAF = Leaf(oid=16384, schema="public", name='the "things"', file=5, pages=100, bytes=819_200)
PLAN = Plan(
    schema=SHOP,
    leaves=(LEAF,),
    cut=Cut.KEY,
    chunks=(
        Chunk(number=0, leaf=LEAF, bytes=409_600, to_key=("5", "ü"), key=(("id", "integer"), ("name", "text"))),
        Chunk(number=1, leaf=LEAF, bytes=409_600, from_key=("5", "ü"), key=(("id", "integer"), ("name", "text"))),
        Chunk(number=2, leaf=LEAF, bytes=1, pages=(7, None)),
        Chunk(number=3, leaf=LEAF, bytes=1),
    ),
)
NOTED = Noted(floor=Lsn(10), upto=Lsn(20), xmin=5, xmax=9, running=(5, 7), standby=False)
FILE = StagedFile(path="part-x-000.parquet", size=5, rows=2, stats='{"numRecords": 2}')


@pytest.fixture
def seeds(tmp_path: Path) -> Seeds:
    return Seeds(tmp_path)


@pytest.mark.parametrize(
    "seed",
    [
        Seed(plan=PLAN, point=Lsn(0x1_0000_0001)),
        Seed(plan=PLAN, point=None, noted=NOTED),
        Seed(plan=PLAN, point=Lsn(5), wish=Wish(table=SHOP.table, mode=LoadMode.REFRESH, where="a = 'ü' -- x\n")),
    ],
    ids=["exact", "chunked", "wished for"],
)
def test_a_load_comes_back_as_it_was_begun(seeds: Seeds, seed: Seed) -> None:
    seeds.begin(seed)
    assert seeds.all() == [seed]
    assert seeds.all()[0].floor == (seed.point or NOTED.floor)
    seeds.end(seed)
    assert seeds.all() == []


def test_loads_come_oldest_first(seeds: Seeds) -> None:
    young, old = (Seed(plan=PLAN, point=Lsn(1), made_at=made_at) for made_at in (20.0, 10.0))
    seeds.begin(young)
    seeds.begin(old)
    assert seeds.all() == [old, young]


def test_chunks_that_are_in_are_known_by_their_number(seeds: Seeds) -> None:
    seed = Seed(plan=PLAN, point=Lsn(1))
    seeds.begin(seed)
    chunks = {
        number: StagedChunk(chunk=number, files=(FILE,), keys=keys, rows=2, bytes=5, seconds=0.5, seen=Lsn(9))
        for number, keys in ((3, ()), (0, (FILE,)))
    }
    for staged in chunks.values():
        seeds.stage(seed.id, staged)
    assert seeds.staged(seed.id) == chunks
    seeds.stage(seed.id, chunks[0])  # a task that is run twice
    assert seeds.staged(seed.id) == chunks


def test_a_load_is_passed_where_its_last_row_was_read(seeds: Seeds) -> None:
    seed = Seed(plan=PLAN, point=None, noted=NOTED)
    seeds.begin(seed)
    seeds.reread(seed.id, Lsn(20), Lsn(50))
    assert seeds.passed(seed.id) is None, "it is not about to land"
    seeds.land(seed.id, Lsn(30))
    assert seeds.passed(seed.id) == Lsn(50)
    seeds.reread(seed.id, Lsn(30), Lsn(40))
    seeds.reread(seed.id, Lsn(30), Lsn(70))
    assert seeds.passed(seed.id) == Lsn(70)


def test_the_sources_time_of_a_load_is_remembered_whatever_is_read_again_and_older_records_have_none(
    seeds: Seeds,
) -> None:
    seed = Seed(plan=PLAN, point=Lsn(1), id="timed")
    seeds.begin(seed)
    seeds.land("timed", Lsn(30), 5_000_000)
    seeds.reread("timed", Lsn(30), Lsn(70))
    seeds.end(seed)
    landed = seeds.landed("timed")
    assert landed is not None
    assert (landed.time, landed.mixed_until(Lsn(40))) == (5_000_000, Lsn(70))
    (seeds.folder("landed") / "older.json").write_text('{"passed": "0/1E", "spans": []}')
    older = seeds.landed("older")
    assert older is not None
    assert (older.time, older.mixed_until(Lsn(1))) == (None, Lsn(30))


def test_a_load_without_its_plan_is_over_and_swept_away(seeds: Seeds) -> None:
    over, other, wish = Seed(plan=PLAN, point=Lsn(1)), Seed(plan=PLAN, point=Lsn(1)), Wish(table=ORDERS)
    for seed in (over, other):
        seeds.begin(seed)
        seeds.land(seed.id, Lsn(30))
    seeds.wish(wish)
    seeds.hold(ORDERS, Hold.PAUSED)
    (seeds.folder(over.id) / "plan.json").unlink()  # killed in the middle of ending it
    assert seeds.all() == [other]
    seeds.sweep()
    assert not seeds.folder(over.id).exists()
    assert (seeds.all(), seeds.wishes(), seeds.held()) == ([other], [wish], {ORDERS: Hold.PAUSED})


def test_wishes_come_oldest_first_until_they_are_fulfilled(seeds: Seeds) -> None:
    wishes = [Wish(table=DOTTED, made_at=2.0), Wish(table=ORDERS, made_at=1.0, mode=LoadMode.REFRESH, where="x > 5")]
    for wish in wishes:
        seeds.wish(wish)
    assert seeds.wishes() == wishes[::-1]
    seeds.fulfil(wishes[1])
    seeds.fulfil(wishes[1])  # by two
    assert seeds.wishes() == wishes[:1]


def test_holds_are_of_tables_and_not_of_names(seeds: Seeds) -> None:
    seeds.hold(DOTTED, Hold.PAUSED)
    seeds.hold(TableId("a", "b.c"), Hold.STOPPED)
    assert seeds.held() == {DOTTED: Hold.PAUSED, TableId("a", "b.c"): Hold.STOPPED}
    seeds.hold(DOTTED, Hold.STOPPED)
    assert seeds.held()[DOTTED] is Hold.STOPPED
    seeds.hold(DOTTED, None)
    seeds.hold(DOTTED, None)
    assert set(seeds.held()) == {TableId("a", "b.c")}


def test_a_log_without_loads_has_no_records(seeds: Seeds) -> None:
    assert (seeds.all(), seeds.wishes(), seeds.held(), seeds.staged("x"), seeds.passed("x")) == ([], [], {}, {}, None)


def test_a_record_that_is_cut_off_is_none(seeds: Seeds, tmp_path: Path) -> None:
    seed, wish = Seed(plan=PLAN, point=Lsn(1)), Wish(table=ORDERS)
    seeds.begin(seed)
    seeds.wish(wish)
    for path in (tmp_path / FOLDER).rglob("*.json"):
        path.write_bytes(path.read_bytes()[:20])
    assert (seeds.all(), seeds.wishes()) == ([], [])


def test_a_row_that_was_read_again_says_nothing_of_versions_before_it(seeds: Seeds) -> None:
    seeds.remember("load", Lsn(30))
    for since, seen in ((50, 60), (55, 70), (90, 95)):
        seeds.reread("load", Lsn(since), Lsn(seen))
    assert seeds.mixed("load") == [(ZERO, Lsn(30)), (Lsn(50), Lsn(70)), (Lsn(90), Lsn(95))]
    until = {at: seeds.mixed_until("load", Lsn(at)) for at in (29, 30, 49, 50, 69, 70, 92, 95)}
    assert until == {29: Lsn(30), 30: None, 49: None, 50: Lsn(70), 69: Lsn(70), 70: None, 92: Lsn(95), 95: None}
    assert seeds.mixed("other") is None


def test_what_is_on_record_does_not_grow_for_ever(seeds: Seeds, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seeds_module, "SPANS_MAX", 2)
    for since in (10, 20, 30, 40):
        seeds.remember("load", Lsn(since + 1), since=Lsn(since))
    assert seeds.mixed("load") == [(Lsn(10), Lsn(31)), (Lsn(40), Lsn(41))], "rather too much than too little"


def test_a_record_of_before_counts_from_the_beginning(seeds: Seeds, tmp_path: Path) -> None:
    seeds.remember("load", Lsn(30))
    (record,) = tmp_path.rglob("load.json")
    record.write_text('{"passed": "0/1E"}')
    assert (seeds.mixed_until("load", Lsn(29)), seeds.mixed_until("load", Lsn(30))) == (Lsn(30), None)
