"""Merging: many small seals become a larger one, and are removed after a grace period."""

from __future__ import annotations

import itertools
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pyarrow.parquet as pq
import pytest

from tailrace.changelog.format import seal as cold
from tailrace.changelog.format.seal import Seal, SealIndex, commits_path
from tailrace.changelog.maintain.retention import RetentionPolicy, trim
from tailrace.changelog.maintain.seal_contents import SealLimits
from tailrace.changelog.maintain.seal_writer import SealFileSizes
from tailrace.changelog.maintain.sealer import Sealer
from tailrace.changelog.read.reader import ChangeLog
from tailrace.errors import LogCorrupt
from tailrace.model import change
from tailrace.storage.files import LogPath
from tests.support.changes import SHOP, insert, move, truncate
from tests.support.logs import (
    OTHER,
    Diary,
    assert_nothing_left_over,
    glob_rows,
    inserts,
    only_on_disk,
    read_all,
    seal,
    stored_files,
)
from tests.support.windows import named

PLACES = ("disk", "store")

WIDER = named("public", "renamed", SHOP.relation)
PAIRS = SealLimits(merge_count=2)


def seals(path: LogPath) -> tuple[Seal, ...]:
    index = SealIndex(path)
    index.refresh()
    return index.seals


def runs(path: LogPath) -> list[tuple[int, int, int]]:
    return [(found.first, found.last, found.level) for found in seals(path)]


def write_sealed(diary: Diary, commits: int, first: int = 0) -> None:
    """Write commits, each sealed on its own."""
    for key in range(first, first + commits):
        diary.commit(inserts(key), inserts(key, key + 1000, schema=OTHER))
        seal(diary.path, join=False, grace_seconds=None)


def test_eight_neighbours_of_one_level_become_one_of_the_next(diary: Diary) -> None:
    write_sealed(diary, 17)
    with Sealer(diary.path) as sealer:
        assert sealer.merge_seals().merged == 16
    assert runs(diary.path) == [(1, 8, 1), (9, 16, 1), (17, 17, 0)]
    assert read_all(diary.path) == diary.rows()


def test_levels_grow_like_the_digits_of_a_number(diary: Diary) -> None:
    for commit in range(1, 12):
        write_sealed(diary, 1, first=commit)
        seal(diary.path, limits=SealLimits(merge_count=3))
    assert runs(diary.path) == [(1, 9, 2), (10, 10, 0), (11, 11, 0)]
    assert read_all(diary.path) == diary.rows()
    assert_nothing_left_over(diary.path)


def test_a_merged_seal_adds_up_its_parts(diary: Diary) -> None:
    diary.commit()
    diary.commit((SHOP, [*move(1, 2), insert(3, unfit=("n",)), truncate()]), transactions=3)
    seal(diary.path, join=False)
    diary.commit()
    diary.commit((SHOP, [insert(4, unfit=("n", "name")), *move(4, 5)]), inserts(6, schema=OTHER))
    seal(diary.path, join=False)
    before = seals(diary.path)
    seal(diary.path, limits=PAIRS)
    (merged,) = seals(diary.path)
    assert (merged.first, merged.last, merged.start, merged.end) == (1, 4, before[0].start, before[1].end)
    assert (merged.first_seq, merged.next_seq) == (before[0].first_seq, before[1].next_seq)
    assert (merged.rows, merged.transactions) == (8, sum(part.transactions for part in before))
    assert (merged.written_from, merged.written_to) == (before[0].written_from, before[1].written_to)
    assert (merged.shapes, merged.timeline) == (before[1].shapes, before[1].timeline)
    (file,) = (file for file in merged.files if file.table == 1)
    assert (file.moves, file.truncates, file.unfit) == (2, 1, 3)
    assert (file.first, file.last, file.rows) == (2, 4, 7)
    index = SealIndex(diary.path)
    index.refresh()
    assert index.commit_list(merged).commit.tolist() == [1, 2, 3, 4]


def test_counts_of_a_file_are_added_once_for_any_number_of_row_groups(diary: Diary) -> None:
    for part in range(2):
        for commit in range(3):
            key = part * 10 + commit
            diary.commit((SHOP, [*move(key, -key), insert(key, unfit=("n",)), truncate()]))
        seal(diary.path, join=False, limits=SealLimits(file_sizes=SealFileSizes(group_rows=1)))
    assert [len(file.groups) for found in seals(diary.path) for file in found.files if file.table] == [3, 3]
    seal(diary.path, limits=PAIRS)
    (file,) = (file for found in seals(diary.path) for file in found.files if file.table)
    assert (file.moves, file.truncates, file.unfit) == (6, 6, 6)
    assert read_all(diary.path) == diary.rows()


def test_commits_without_rows_at_the_border_of_two_seals_become_one_in_the_list(diary: Diary) -> None:
    for given in ((), (inserts(1),), (), ()):
        diary.commit(*given)
    seal(diary.path, join=False)
    for given in ((), (inserts(2),)):
        diary.commit(*given)
    seal(diary.path, limits=PAIRS)
    index = SealIndex(diary.path)
    index.refresh()
    assert index.commit_list(index.seals[0]).commit.tolist() == [1, 2, 5, 6]
    assert [read_all(diary.path, after) for after in range(7)] == [diary.rows(after) for after in range(7)]


@only_on_disk
def test_lists_of_commits_are_looked_up_by_several_threads_at_once(
    diary: Diary, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_sealed(diary, 6)
    index = SealIndex(diary.path)
    index.refresh()
    found, until = index.seals, time.monotonic() + 1.0
    lists = {known.stem: index.commit_list(known) for known in found}
    monkeypatch.setattr(cold, "read_commit_list", lambda _, known: lists[known.stem])

    def look(first: int) -> None:
        for turn in itertools.count(first):
            wanted = found[turn % len(found)]
            assert index.commit_list(wanted).commit.tolist() == [wanted.first]
            if time.monotonic() >= until:
                return

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as threads:
            list(threads.map(look, range(4)))
    finally:
        sys.setswitchinterval(before)


def test_small_files_are_written_again_as_one_and_large_ones_are_kept(diary: Diary) -> None:
    write_sealed(diary, 2)
    diary.commit((SHOP, [insert(50, big=os.urandom(20_000).hex())]))
    seal(diary.path, join=False)
    write_sealed(diary, 2, first=100)
    before = {file.file for found in seals(diary.path) for file in found.files if file.size >= 20_000}
    seal(diary.path, limits=SealLimits(merge_count=5, small_bytes=20_000))
    (merged,) = seals(diary.path)
    mine = [file for file in merged.files if file.table == 1]
    assert [(file.first, file.last) for file in mine] == [(1, 2), (3, 3), (4, 5)]
    assert {mine[1].file} == before
    assert [(file.first, file.last) for file in merged.files if file.table == 2] == [(1, 5)]
    assert read_all(diary.path) == diary.rows()
    assert_nothing_left_over(diary.path)


def test_schema_versions_stay_in_files_of_their_own(diary: Diary) -> None:
    for schema in (SHOP, SHOP, WIDER, WIDER, SHOP):
        diary.commit(inserts(diary.writer.commit, schema=schema))
        seal(diary.path, join=False)
    seal(diary.path, limits=SealLimits(merge_count=5))
    (merged,) = seals(diary.path)
    assert [(file.schema, file.rows) for file in merged.files if file.table] == [(1, 2), (2, 2), (3, 1)]
    assert read_all(diary.path) == diary.rows()


@only_on_disk
def test_row_groups_of_merged_files_end_where_commits_end(diary: Diary) -> None:
    for commit in range(9):
        diary.commit(inserts(*range(commit * 10, commit * 10 + 3)))
        seal(diary.path, join=False)
    seal(diary.path, limits=SealLimits(merge_count=9, file_sizes=SealFileSizes(group_rows=7)))
    (file,) = (diary.path / "cold" / "1").glob("*.parquet")
    with pq.ParquetFile(file) as parquet:
        commits = [
            set(parquet.read_row_group(index).column(change.COMMIT).to_pylist())
            for index in range(parquet.num_row_groups)
        ]
    assert commits == [{1, 2, 3}, {4, 5, 6}, {7, 8, 9}]


def test_merging_makes_no_file_larger_than_the_limit(diary: Diary) -> None:
    for commit in range(8):
        diary.commit((SHOP, [insert(commit, big=os.urandom(4000).hex())]))
        seal(diary.path, join=False)
    seal(diary.path, limits=SealLimits(file_sizes=SealFileSizes(group_rows=1, file_bytes=12_000)))
    (merged,) = seals(diary.path)
    sizes = [file.size for file in merged.files if file.table]
    assert len(sizes) > 2
    assert max(sizes) < 24_000
    assert read_all(diary.path) == diary.rows()


@pytest.mark.parametrize("limits", [SealLimits(merge_bytes=1), SealLimits(merge_seconds=-1.0)])
def test_seals_that_would_be_too_large_or_span_too_long_are_not_merged(diary: Diary, limits: SealLimits) -> None:
    write_sealed(diary, 9)
    with Sealer(diary.path, limits=limits) as sealer:
        assert sealer.merge_seals().merged == 0
    assert len(runs(diary.path)) == 9


def test_merged_files_stay_readable_until_the_grace_period_is_over(diary: Diary) -> None:
    write_sealed(diary, 8)
    planned = [file for found in seals(diary.path) for file in found.files]
    seal(diary.path, grace_seconds=300)
    assert all((diary.path / file.file).exists() for file in planned)
    assert len(stored_files(diary.path, "cold/*.json")) == 9
    assert runs(diary.path) == [(1, 8, 1)]
    seal(diary.path)
    assert not any((diary.path / file.file).exists() for file in planned)
    assert_nothing_left_over(diary.path)


@only_on_disk
def test_the_glob_replaces_parts_by_the_merged_file_atomically(diary: Diary) -> None:
    write_sealed(diary, 8)
    expected = glob_rows(diary.path, 2)
    assert len(expected) == 16
    view = (diary.path / "cold" / "2").resolve()
    seal(diary.path, grace_seconds=300)
    assert (diary.path / "cold" / "2").resolve() != view
    assert glob_rows(diary.path, 2) == expected
    assert len(list((diary.path / "cold" / "2").iterdir())) == 1


def test_trimmed_files_do_not_reappear_when_their_seal_is_merged(diary: Diary) -> None:
    write_sealed(diary, 1)
    diary.commit(inserts(5, schema=OTHER))
    seal(diary.path, join=False)
    with Sealer(diary.path) as sealer:
        trim(sealer, RetentionPolicy(age_seconds=0.0), now=4e9)
    diary.commit(inserts(6))
    seal(diary.path, limits=PAIRS)
    write_sealed(diary, 1, first=20)
    seal(diary.path, limits=PAIRS)
    assert runs(diary.path) == [(3, 4, 1)]
    assert read_all(diary.path, 2) == diary.rows(2)
    assert_nothing_left_over(diary.path)


def test_a_damaged_file_or_commit_list_is_never_merged(diary: Diary) -> None:
    write_sealed(diary, 8)
    third = seals(diary.path)[2]
    for path in (diary.path / third.files[1].file, commits_path(diary.path, third.stem)):
        content = path.read_bytes()
        path.write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])
        with Sealer(diary.path) as sealer, pytest.raises(LogCorrupt):
            sealer.merge_seals()
        path.write_bytes(content)
        assert len(runs(diary.path)) == 8
    seal(diary.path)
    assert read_all(diary.path) == diary.rows()
    assert_nothing_left_over(diary.path)


def test_merged_seals_are_merged_again_until_none_are_left_to_merge(diary: Diary) -> None:
    write_sealed(diary, 8)
    with Sealer(diary.path, limits=PAIRS) as sealer:
        assert sealer.merge_seals().merged == 8 + 4 + 2
    assert runs(diary.path) == [(1, 8, 3)]
    assert [read_all(diary.path, after) for after in range(9)] == [diary.rows(after) for after in range(9)]
    assert len(ChangeLog.open(diary.path).files(OTHER.table)) == 1
