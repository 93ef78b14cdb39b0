"""Tasks beside a log that is put in order under them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from tailrace.changelog.index import LogIndex, Slice
from tailrace.changelog.reader import ChangeLog
from tailrace.model.position import ZERO
from tailrace.spark.tasks import ApplyWork, apply_changes
from tailrace.tables.base import Cursor
from tailrace.tables.delta import DeltaRsTable
from tailrace.tables.layout import Place
from tests.support.changes import SHOP
from tests.support.logs import Diary, inserts, seal

COMMITS = 150
BIG = 100_000


@pytest.fixture
def memory() -> Iterator[pa.MemoryPool]:
    """Where Arrow's memory of this test comes from; it knows the peak."""
    before = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(before)
    pa.set_memory_pool(pool)
    yield pool
    gc.collect()  # what came from this pool must not outlive it
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
    start = Cursor(seq=0, commit=0, position=ZERO)
    table = DeltaRsTable(tmp_path / "lake", log.log_id)
    table.load(SHOP, [], start)

    outcome = apply_changes(ApplyWork(
        table=SHOP.table, log=diary.path, place=Place(path=tmp_path / "lake", log_id=log.log_id),
        slices=slices, shape=SHOP, expected=start,
        cursor=replace(start, seq=slices[-1].last_seq, commit=slices[-1].last),
    ))  # fmt: skip

    assert outcome.error is None
    assert (outcome.rows, table.rows()) == (COMMITS + 5, COMMITS + 5)
    assert memory.max_memory() < 8 * COMMITS * BIG


def write(diary: Diary, keys: range) -> None:
    """A commit for each row, and each row large."""
    for key in keys:
        diary.commit(inserts(key, big=f"{key}," * (BIG // (len(str(key)) + 1))))


def pending(log: ChangeLog, *, after_seq: int) -> list[Slice]:
    index = LogIndex(log)
    index.grow()
    return index.pending(1, after_seq, index.commit)
