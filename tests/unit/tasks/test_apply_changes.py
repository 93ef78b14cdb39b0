"""Tasks beside a log that is put in order under them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from tailrace.changelog.read.index import LogIndex, Slice
from tailrace.changelog.read.reader import ChangeLog
from tailrace.model.position import ZERO
from tailrace.tables.delta.table import DeltaRsTable
from tailrace.tables.evolve.schema_plan import Recast
from tailrace.tables.location import TableLocation
from tailrace.tables.port import AppliedPosition
from tailrace.tasks.apply import advance_table, apply_changes
from tailrace.tasks.work import ApplyWork, EvolveWork
from tests.support.changes import SHOP
from tests.support.logs import Diary, inserts, seal

COMMITS = 150
BIG = 100_000
POOL = pa.proxy_memory_pool(pa.default_memory_pool())
"""Never let go of: what outlives the test gives its memory back to it, and Arrow does not keep it alive for that."""


@pytest.fixture
def memory() -> Iterator[pa.MemoryPool]:
    """Where Arrow's memory of this test comes from; it knows the peak."""
    before = pa.default_memory_pool()
    pa.set_memory_pool(POOL)
    yield POOL
    pa.set_memory_pool(before)


def test_slices_that_were_sealed_since_are_read_at_once(tmp_path: Path, memory: pa.MemoryPool) -> None:
    diary = Diary(tmp_path / "log")
    write(diary, range(COMMITS))
    log = ChangeLog.open(diary.path)
    before = pending(log, after_seq=0)
    seal(diary.path)
    write(diary, range(COMMITS, COMMITS + 5))
    diary.close()
    slices = (*before, *pending(log, after_seq=before[-1].last_seq))
    assert len(slices) == COMMITS + 5  # as many as there were files when they were listed
    start = AppliedPosition(seq=0, commit=0, position=ZERO)
    table = DeltaRsTable(tmp_path / "lake", log.log_id)
    table.load(SHOP, [], start)

    outcome = apply_changes(
        ApplyWork(
            table=SHOP.table,
            log=diary.path,
            location=TableLocation(path=tmp_path / "lake", log_id=log.log_id),
            slices=slices,
            schema=SHOP,
            expected=start,
            position_after=replace(start, seq=slices[-1].last_seq, commit=slices[-1].last),
        )
    )

    assert outcome.error is None
    assert (outcome.rows, table.rows()) == (COMMITS + 5, COMMITS + 5)
    assert memory.max_memory() < 8 * COMMITS * BIG


def test_a_new_shape_says_what_its_rows_took_to_write_and_changes_what_they_weigh(tmp_path: Path) -> None:
    diary = Diary(tmp_path / "log")
    diary.commit(inserts(1, 2, 3, big="words " * 9))
    log = ChangeLog.open(diary.path)
    diary.close()
    start, place = (
        AppliedPosition(seq=0, commit=0, position=ZERO),
        TableLocation(path=tmp_path / "lake", log_id=log.log_id),
    )
    place.open().load(SHOP, [], start)
    slices = tuple(pending(log, after_seq=0))
    there = replace(start, seq=slices[-1].last_seq, commit=1)
    done = apply_changes(
        ApplyWork(
            table=SHOP.table,
            log=diary.path,
            location=place,
            slices=slices,
            schema=SHOP,
            expected=start,
            position_after=there,
        )
    )
    assert 0 < done.bytes_changed < done.bytes_written, "a file has a head and a foot besides"
    wider = replace(SHOP, columns=tuple(replace(c, type=pa.int64()) if c.name == "n" else c for c in SHOP.columns))
    recast = Recast(schema=wider)
    evolved = advance_table(EvolveWork(table=SHOP.table, location=place, recast=recast, expected=there))
    (file,) = place.open().files()
    assert (evolved.error, evolved.bytes_written) == (None, (tmp_path / "lake" / file).stat().st_size)
    assert evolved.bytes_changed == 0, "no change asked for it"


def write(diary: Diary, keys: range) -> None:
    """A commit for each row, and each row large."""
    for key in keys:
        diary.commit(inserts(key, big=f"{key}," * (BIG // (len(str(key)) + 1))))


def pending(log: ChangeLog, *, after_seq: int) -> list[Slice]:
    index = LogIndex(log)
    index.grow()
    return index.pending(1, after_seq, index.last_commit)
