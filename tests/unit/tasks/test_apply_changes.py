"""Apply tasks over a log that is sealed meanwhile."""

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
"""Pool that lives as long as the module: objects that outlive a test free into it, and Arrow does not hold it."""


@pytest.fixture
def memory() -> Iterator[pa.MemoryPool]:
    """Memory pool of this test, which knows the peak."""
    before = pa.default_memory_pool()
    pa.set_memory_pool(POOL)
    yield POOL
    pa.set_memory_pool(before)


def test_slices_sealed_after_they_were_listed_are_read_at_once(tmp_path: Path, memory: pa.MemoryPool) -> None:
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


def test_an_outcome_has_the_bytes_of_changes_and_of_written_files(tmp_path: Path) -> None:
    diary = Diary(tmp_path / "log")
    diary.commit(inserts(1, 2, 3, big="words " * 9))
    log = ChangeLog.open(diary.path)
    diary.close()
    start, location = (
        AppliedPosition(seq=0, commit=0, position=ZERO),
        TableLocation(path=tmp_path / "lake", log_id=log.log_id),
    )
    location.open().load(SHOP, [], start)
    slices = tuple(pending(log, after_seq=0))
    applied = replace(start, seq=slices[-1].last_seq, commit=1)
    outcome = apply_changes(
        ApplyWork(
            table=SHOP.table,
            log=diary.path,
            location=location,
            slices=slices,
            schema=SHOP,
            expected=start,
            position_after=applied,
        )
    )
    assert 0 < outcome.bytes_changed < outcome.bytes_written, "a file also has a header and a footer"
    wider = replace(SHOP, columns=tuple(replace(c, type=pa.int64()) if c.name == "n" else c for c in SHOP.columns))
    recast = Recast(schema=wider)
    evolved = advance_table(EvolveWork(table=SHOP.table, location=location, recast=recast, expected=applied))
    (file,) = location.open().files()
    assert (evolved.error, evolved.bytes_written) == (None, (tmp_path / "lake" / file).stat().st_size)
    assert evolved.bytes_changed == 0, "a recast applies no change"


def write(diary: Diary, keys: range) -> None:
    """Write one commit per row, with large rows."""
    for key in keys:
        diary.commit(inserts(key, big=f"{key}," * (BIG // (len(str(key)) + 1))))


def pending(log: ChangeLog, *, after_seq: int) -> list[Slice]:
    index = LogIndex(log)
    index.grow()
    return index.pending(1, after_seq, index.last_commit)
