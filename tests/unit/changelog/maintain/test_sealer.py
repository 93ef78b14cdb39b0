"""Sealing writes the same rows into other files.

A reader before, during or after finds each row once and unchanged.
"""

from __future__ import annotations

import datetime as dt
import itertools
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from tailrace.changelog.format.commit_file import commit_path
from tailrace.changelog.format.seal import commits_path, seal_path
from tailrace.changelog.maintain.seal_contents import SealLimits
from tailrace.changelog.maintain.seal_writer import SealFileSizes
from tailrace.changelog.maintain.sealer import Sealer
from tailrace.changelog.read.reader import ChangeLog
from tailrace.changelog.write.writer import LogWriter
from tailrace.errors import LogBusy, LogCorrupt, LogUnusable
from tailrace.model import change
from tailrace.model.position import Lsn
from tailrace.storage.files import LogPath
from tests.support.changes import SHOP, insert, table_schema, update
from tests.support.logs import (
    KEYLESS_OTHER,
    OTHER,
    RETYPED,
    THIRD,
    WIDER,
    Diary,
    assert_nothing_left_over,
    glob_rows,
    in_order,
    inserts,
    mostly_on_disk,
    only_on_disk,
    read_all,
    rich,
    rows_of,
    seal,
    stored_files,
    write_everything,
)
from tests.support.windows import SOURCE

PLACES = ("disk", "store")

PAIRS = SealLimits(merge_count=2)
"""Every two seals become one."""


# --- the same rows, sealed or not --------------------------------------------------------------------------


def test_a_row_is_the_same_before_sealing_in_the_grace_period_and_after(diary: Diary) -> None:
    write_everything(diary)
    expected = diary.rows()
    assert read_all(diary.path) == expected
    seal(diary.path, grace_seconds=300)
    assert len(stored_files(diary.path, "hot/*")) == 9
    assert read_all(diary.path) == expected
    seal(diary.path)
    assert stored_files(diary.path, "hot/*") == {f"hot/{9:020d}.arrow"}
    assert read_all(diary.path) == expected
    assert_nothing_left_over(diary.path)


@pytest.mark.parametrize("commits", [1, 3, 100])
def test_each_row_has_the_schema_version_it_was_written_with(diary: Diary, commits: int) -> None:
    write_everything(diary)
    seal(diary.path, join=False, limits=SealLimits(commits=commits))
    found = in_order(rows_of(ChangeLog.open(diary.path).follow(table=str(SHOP.table))))
    assert found == diary.rows(schema=SHOP)
    assert [row.schema for row in found] == [SHOP] * 10 + [WIDER] * 3 + [RETYPED] * 3


@mostly_on_disk
@pytest.mark.parametrize("join", [False, True])
@pytest.mark.parametrize("commits", [1, 4])
def test_following_gives_the_same_tail_after_every_commit_sealed_or_not(diary: Diary, commits: int, join: bool) -> None:
    write_everything(diary)
    seal(diary.path, join=join, limits=replace(PAIRS, commits=commits))
    for after in range(diary.writer.commit + 1):
        assert read_all(diary.path, after) == diary.rows(after), after
        for schema in (SHOP, OTHER, KEYLESS_OTHER):
            assert read_all(diary.path, after, table=schema.table) == diary.rows(after, schema), after


def test_following_from_a_position_gives_the_same_tail_sealed_or_not(diary: Diary) -> None:
    write_everything(diary)
    ends = range(0, diary.writer.position.value + 150, 50)

    def tails() -> list[list[int]]:
        log = ChangeLog.open(diary.path)
        return [[row.seq for row in in_order(rows_of(log.follow(Lsn(end))))] for end in ends]

    hot = tails()
    assert hot == [[row.seq for row in diary.rows(end // 100)] for end in ends]
    seal(diary.path, limits=replace(PAIRS, commits=3))
    assert tails() == hot


def test_a_range_of_commits_can_be_read_from_sealed_files(diary: Diary) -> None:
    write_everything(diary)
    seal(diary.path, limits=replace(PAIRS, commits=3))
    log = ChangeLog.open(diary.path)
    last = diary.writer.commit
    for first in range(1, last + 1):
        for to in range(first, last + 1):
            expected = [item.row for item in diary.noted if first <= item.commit <= to]
            assert in_order(rows_of(log.read(first, to))) == expected
    seqs = [row.seq for row in diary.rows()]
    for after in seqs:
        found = rows_of(log.read(1, last, after_seq=after, to_seq=after + 4))
        assert [row.seq for row in in_order(found)] == [seq for seq in seqs if after < seq <= after + 4]


def test_rows_of_all_tables_are_read_commit_by_commit_from_sealed_files(diary: Diary) -> None:
    write_everything(diary)
    seal(diary.path)
    commit_of = {item.row.seq: item.commit for item in diary.noted}
    commits = [commit_of[row.seq] for row in rows_of(ChangeLog.open(diary.path).follow(0))]
    assert commits == sorted(commits)


EVERY_TYPE: dict[str, tuple[pa.DataType, Any]] = {
    "bool": (pa.bool_(), True),
    "binary": (pa.binary(), b"\x00\xff"),
    "int16": (pa.int16(), -5),
    "int32": (pa.int32(), 1 << 30),
    "int64": (pa.int64(), -(1 << 62)),
    "float32": (pa.float32(), 0.5),
    "float64": (pa.float64(), float("inf")),
    "text": (pa.string(), "né\x00"),
    "date": (pa.date32(), dt.date(1, 1, 1)),
    "time": (pa.time64("us"), dt.time(23, 59, 59, 999_999)),
    "naive": (pa.timestamp("us"), dt.datetime(9999, 12, 31, 23, 59, 59, 999_999)),
    "utc": (pa.timestamp("us", "UTC"), dt.datetime(1970, 1, 1, tzinfo=dt.UTC)),
    "decimal": (pa.decimal128(38, 10), Decimal("-1.5000000000")),
    "numbers": (pa.list_(pa.int32()), [1, None, 3]),
    "nothing": (pa.list_(pa.string()), []),
    "a.dotted name": (pa.string(), "x"),
    "_seq": (pa.string(), "not ours"),
    "_commit": (pa.int32(), 7),
    "_commit_": (pa.int32(), 8),
}


def test_values_of_every_type_and_columns_of_odd_names_are_read_back(diary: Diary) -> None:
    schema = table_schema({"id": pa.int64(), **{name: kind for name, (kind, _) in EVERY_TYPE.items()}})
    whole = {name: value for name, (_, value) in EVERY_TYPE.items()}
    diary.commit((schema, [insert({"id": 1, **whole}), insert(2), update(1, before={"id": 1, **whole})]))
    seal(diary.path)
    assert read_all(diary.path) == diary.rows()
    (row, nulls, _) = glob_rows(diary.path, 1)
    assert {name: row[change.stored_name(name)] for name in EVERY_TYPE} == whole
    assert all(nulls[change.stored_name(name)] is None for name in EVERY_TYPE)


# --- readers in flight ---------------------------------------------------------------------------------------


def write_a_little(diary: Diary) -> None:
    """Write a small log, for tests that write many."""
    diary.commit(rich(1), inserts(2, schema=OTHER))
    diary.commit()
    diary.commit(inserts(3, schema=OTHER), inserts(4), (WIDER, [insert(5, added=True)]))
    diary.commit((WIDER, [insert(6)]))
    diary.commit()


@mostly_on_disk
@pytest.mark.parametrize("table", [None, SHOP.table, "schema"])
@pytest.mark.parametrize("sealed_before", [False, True])
def test_a_reader_stopped_at_any_batch_gets_each_row_once_while_the_log_is_sealed_and_merged(
    quick: LogPath, table: Any, sealed_before: bool
) -> None:
    for paused in range(20):
        diary = Diary(quick / str(paused))
        write_a_little(diary)
        if sealed_before:
            seal(diary.path, join=False, limits=SealLimits(commits=2))
        reader = ChangeLog.open(diary.path).follow(0, table=table)
        found = list(itertools.islice(reader, paused))
        ended = len(found) < paused
        seal(diary.path, limits=PAIRS if sealed_before else replace(PAIRS, commits=2))
        diary.commit(rich(50), inserts(51, schema=THIRD))
        seal(diary.path)
        diary.commit(inserts(52))
        found += reader
        rows = in_order(rows_of(found))
        if table == "schema":
            shown = [(row.values["table"], row.values["version"]) for row in rows]
            assert shown == [(1, 1), (2, 1), (1, 2), (1, 3), (3, 1)][: 3 if ended else None]
        elif not ended:
            assert rows == diary.rows(schema=None if table is None else SHOP), paused
        diary.close()
        if ended:
            assert paused > 2
            return
    pytest.fail("the reader never ended")


def test_an_idle_reader_finds_commits_sealed_and_cleaned_meanwhile(diary: Diary) -> None:
    diary.commit(inserts(1))
    log = ChangeLog.open(diary.path)
    assert log.newest() == 1
    for key in range(2, 9):
        diary.commit(inserts(key))
    seal(diary.path)
    assert not commit_path(diary.path, 2).exists()
    assert log.newest() == 8
    diary.commit()
    assert log.newest() == 9
    assert rows_of(log.follow(1)) == diary.rows(1)


def test_a_writer_continues_after_everything_was_sealed(diary: Diary) -> None:
    write_everything(diary)
    before = (diary.writer.commit, diary.writer.position, diary.writer.next_seq)
    seal(diary.path)
    diary.reopen()
    assert (diary.writer.commit, diary.writer.position, diary.writer.next_seq) == before
    diary.commit(inserts(99), (WIDER, [insert(100, added=True)]))
    assert read_all(diary.path) == diary.rows()
    seal(diary.path)
    assert read_all(diary.path) == diary.rows()


# --- what a seal is ------------------------------------------------------------------------------------------


def test_a_seal_lists_only_the_last_of_a_run_of_commits_without_rows(diary: Diary) -> None:
    for given in ((), (), (inserts(1),), (), (), (), (inserts(2),), (inserts(3),), (), ()):
        diary.commit(*given)
    seal(diary.path)
    log = ChangeLog.open(diary.path)
    log.seal_index.refresh()
    (sealed,) = log.seal_index.seals
    listed = log.seal_index.commit_list(sealed)
    assert listed.commit.tolist() == [2, 3, 6, 7, 8, 10]
    assert listed.end.tolist() == [200, 300, 600, 700, 800, 1000]
    assert listed.next_seq.tolist() == [1, 2, 2, 3, 4, 4]
    assert (sealed.first, sealed.last, sealed.start, sealed.end) == (1, 10, Lsn(0), Lsn(1000))
    assert (sealed.rows, sealed.transactions, sealed.first_seq, sealed.next_seq) == (3, 3, 1, 4)


def test_commits_without_rows_alone_make_a_seal_without_files(diary: Diary) -> None:
    for _ in range(3):
        diary.commit()
    seal(diary.path)
    log = ChangeLog.open(diary.path)
    assert log.newest() == 3
    assert log.seal_index.seals[0].files == ()
    assert list(log.follow(0)) == []
    diary.commit(inserts(1))
    assert rows_of(log.follow(0)) == diary.rows()


def test_sealing_nothing_and_sealing_again_do_nothing(diary: Diary) -> None:
    with Sealer(diary.path) as sealer:
        assert sealer.seal().seals == 0
        diary.commit(inserts(1))
        calls: list[tuple[int, int]] = []
        done = sealer.seal(lambda done, of: calls.append((done, of)))
        assert (done.seals, done.commits, done.rows, calls) == (1, 1, 1, [(1, 1)])
        assert done.bytes > 0
        assert sealer.seal().seals == 0
        assert sealer.unsealed_range() == (2, 1)


def test_progress_is_reported_after_each_seal(diary: Diary) -> None:
    for key in range(5):
        diary.commit(inserts(key))
    calls: list[tuple[int, int]] = []
    with Sealer(diary.path, limits=SealLimits(commits=2)) as sealer:
        assert sealer.seal(lambda done, of: calls.append((done, of))).seals == 3
    assert calls == [(2, 5), (4, 5), (5, 5)]


def test_a_seal_ends_before_the_commit_that_would_make_it_too_large(diary: Diary) -> None:
    for key in range(4):
        diary.commit(inserts(key, big="x" * 10_000))
    seal(diary.path, join=False, limits=SealLimits(bytes=25_000))
    log = ChangeLog.open(diary.path)
    log.seal_index.refresh()
    assert [(found.first, found.last) for found in log.seal_index.seals] == [(1, 2), (3, 4)]


def test_a_second_sealer_is_refused(diary: Diary) -> None:
    with Sealer(diary.path), pytest.raises(LogBusy):
        Sealer(diary.path, wait_seconds=0)
    Sealer(diary.path, wait_seconds=0).close()


# --- when it goes wrong --------------------------------------------------------------------------------------


def test_a_damaged_commit_stops_sealing_and_leaves_nothing(diary: Diary) -> None:
    diary.commit(inserts(1, big="x" * 5000), inserts(2, schema=OTHER))
    diary.commit(inserts(3, big="y" * 5000))
    path = commit_path(diary.path, 2)
    content = bytearray(path.read_bytes())
    content[-2500] ^= 1
    path.write_bytes(content)
    with Sealer(diary.path, limits=SealLimits(file_sizes=SealFileSizes(group_rows=1))) as sealer:
        with pytest.raises(LogCorrupt):
            sealer.seal()
        assert stored_files(diary.path, "cold/*", "cold/files/*/*", "cold/files/*/.*") == set()
        content[-2500] ^= 1
        path.write_bytes(content)
        sealer.seal()
    assert read_all(diary.path) == diary.rows()


@only_on_disk
def test_a_seal_that_cannot_be_published_leaves_nothing(diary: Diary) -> None:
    write_everything(diary)
    in_the_way = commits_path(diary.path, f"{1:020d}-{9:020d}")
    with Sealer(diary.path) as sealer:
        in_the_way.mkdir()
        with pytest.raises(LogUnusable):
            sealer.seal()
        in_the_way.rmdir()
        assert stored_files(diary.path, "cold/files/*/*", "cold/files/*/.*") == set()
        sealer.seal()
    assert read_all(diary.path) == diary.rows()
    assert_nothing_left_over_but_hot(diary.path)


def assert_nothing_left_over_but_hot(path: LogPath) -> None:
    with Sealer(path) as sealer:
        sealer.clean(0)
    assert_nothing_left_over(path)


def test_rows_whose_seal_was_removed_by_hand_stay_until_it_is_restored(diary: Diary) -> None:
    for key in range(6):
        diary.commit(inserts(key))
        seal(diary.path, join=False)
    for stem in (f"{commit:020d}-{commit:020d}" for commit in (1, 3, 5)):
        path = seal_path(diary.path, stem)
        aside = path.read_bytes()
        path.unlink()
        for use in (seal, read_all):
            with pytest.raises(LogCorrupt):
                use(diary.path)
        path.write_bytes(aside)
        assert read_all(diary.path) == diary.rows()


@only_on_disk
def test_a_new_sealer_sweeps_what_a_dead_one_left(diary: Diary) -> None:
    write_everything(diary)
    seal(diary.path)
    for leftover in (
        "cold/.00000000000000000001-00000000000000000002.json.abc.tmp",
        "cold/.1.abc.tmp",
        "cold/00000000000000000010-00000000000000000011.commits.parquet",
        "cold/files/1/.abc.tmp",
        "cold/files/1/00000000000000000001-00000000000000000002-abc.parquet",
        "cold/views/1-abc/x.parquet",
    ):
        path = diary.path / leftover
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"leftover")
    seal(diary.path)
    assert_nothing_left_over(diary.path)
    assert read_all(diary.path) == diary.rows()


def test_a_log_older_than_sealing_is_sealed_too(filled: LogPath) -> None:
    seal(filled)
    assert [row.values["id"] for row in read_all(filled)] == [1, 2, 3, 4, 5]
    writer = LogWriter(filled, SOURCE)
    assert writer.commit == 3
    writer.close()
