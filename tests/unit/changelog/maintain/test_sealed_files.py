"""Sealed files: Parquet for any reader, bounded in size and memory, shown by the glob."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tailrace.changelog.format.seal import commits_path, seal_path
from tailrace.changelog.maintain.seal_contents import SealLimits
from tailrace.changelog.maintain.seal_writer import SealFileSizes
from tailrace.changelog.maintain.sealer import Sealer
from tailrace.changelog.read.reader import ChangeLog
from tailrace.changelog.read.sealed_rows import RowSpan, SealedFileReader
from tailrace.model import change
from tailrace.model.mirror import Mirror
from tailrace.storage.files import size_of
from tests.support.changes import SHOP, delete, insert, move
from tests.support.logs import (
    KEYLESS_OTHER,
    OTHER,
    Diary,
    glob_rows,
    inserts,
    read_all,
    rich,
    rows_of,
    seal,
    write_everything,
)
from tests.support.windows import named

PAIRS = SealLimits(merge_count=2)
"""Every two seals become one."""


# --- the files -----------------------------------------------------------------------------------------------


def only_file(path: Path, table: int = 1) -> pq.ParquetFile:
    (file,) = (path / "cold" / str(table)).glob("*.parquet")
    return pq.ParquetFile(file, page_checksum_verification=True)


def test_row_groups_end_where_commits_end(diary: Diary) -> None:
    for commit in range(7):
        diary.commit(inserts(*range(commit * 10, commit * 10 + 3)), inserts(commit, schema=OTHER))
    seal(diary.path, limits=SealLimits(file_sizes=SealFileSizes(group_rows=5)))
    with only_file(diary.path) as file:
        commits = [file.read_row_group(index).column(change.COMMIT).to_pylist() for index in range(file.num_row_groups)]
    assert [sorted(set(found)) for found in commits] == [[1, 2], [3, 4], [5, 6], [7]]
    with only_file(diary.path, 2) as file:
        assert file.num_row_groups == 2
    assert read_all(diary.path) == diary.rows()


def test_files_end_at_their_size_and_hold_every_row_once(diary: Diary) -> None:
    for commit in range(12):
        diary.commit((SHOP, [insert(commit, big=os.urandom(2000).hex())]))
    seal(diary.path, limits=SealLimits(file_sizes=SealFileSizes(group_rows=1, file_bytes=10_000)))
    files = ChangeLog.open(diary.path).files(SHOP.table)
    assert len(files) > 2
    assert all(size_of(file) > 10_000 for file in files[:-1])
    assert [row["id"] for row in glob_rows(diary.path, 1)] == list(range(12))
    assert read_all(diary.path) == diary.rows()


def test_a_commit_larger_than_a_row_group_is_split_and_read_in_pieces(diary: Diary) -> None:
    for begin in range(0, 40, 10):
        diary.piece((SHOP, [insert(begin + n, big="x" * 1000) for n in range(10)]))
    diary.finish(inserts(40))
    diary.commit(inserts(41))
    sizes = SealFileSizes(group_bytes=10_000, group_bytes_max=15_000, file_bytes=1)
    seal(diary.path, limits=SealLimits(file_sizes=sizes))
    log = ChangeLog.open(diary.path)
    log.seal_index.refresh()
    groups = [group for file in log.seal_index.seals[0].files if file.table for group in file.groups]
    assert [(group.first, group.last, group.rows) for group in groups] == [(1, 1, 20), (1, 1, 20), (1, 2, 2)]
    batches = list(log.follow(0))
    assert [len(batch) for batch in batches] == [20, 20, 2]
    assert rows_of(batches) == diary.rows()


def test_a_file_can_be_read_a_few_rows_at_a_time(diary: Diary) -> None:
    for commit in range(5):
        diary.commit(inserts(*range(commit * 10, commit * 10 + 7)))
    seal(diary.path, limits=SealLimits(file_sizes=SealFileSizes(group_rows=14)))
    log = ChangeLog.open(diary.path)
    log.seal_index.refresh()
    (file,) = (file for file in log.seal_index.seals[0].files if file.table)
    reader = SealedFileReader(diary.path, log.schemas.get, set())
    found = list(reader.batches(file, RowSpan(2, 4, 9, 30), rows_max=4))
    assert [len(batch) for _, _, batch in found] == [3, 2, 4, 4, 4, 2]
    assert [row.seq for row in rows_of(batch for _, _, batch in found)] == list(range(10, 29))


@pytest.mark.parametrize("rows_max", [1, 2, 3, 4])
def test_lesson_21_both_rows_of_a_key_that_changed_are_read_together(rows_max: int, diary: Diary) -> None:
    moves = [move(n, n + 1, name="x", n=n, unchanged=("big",)) for n in range(1, 6)]
    diary.commit((SHOP, [insert(1, big="large"), *(row for pair in moves for row in pair), delete(7)]))
    seal(diary.path)
    log = ChangeLog.open(diary.path)
    log.seal_index.refresh()
    (file,) = (file for file in log.seal_index.seals[0].files if file.table)
    reader, mirror = SealedFileReader(diary.path, log.schemas.get, set()), Mirror()
    found = [batch for _, _, batch in reader.batches(file, RowSpan(1, 1, 0, 1000), rows_max=rows_max)]
    for event in (event for batch in found for event in batch.events()):
        mirror.apply(event.row_write())
    assert [row["big"] for row in mirror.rows.values()] == ["large"]
    assert max(map(len, found)) <= rows_max + 1
    assert rows_of(found) == diary.rows()


def test_rows_pending_for_a_row_group_are_bounded_for_any_commit(diary: Diary, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = [named("public", f"t{n}", 100 + n) for n in range(20)]
    for _ in range(3):
        diary.piece(*((table, [insert(1, big="x" * 10_000)]) for table in tables))
    diary.finish(*((table, [insert(2, big="x" * 10_000)]) for table in tables))
    peaks: list[int] = []
    sizes = SealFileSizes(pending_bytes_max=50_000, group_bytes_max=40_000)
    with Sealer(diary.path, limits=SealLimits(file_sizes=sizes)) as sealer:
        assert len(list(sealer.log.follow(0))) == 80  # what is prepared once per version is prepared now
        before = pa.total_allocated_bytes()
        given = sealer.log.batch

        def watched(*arguments: Any) -> Any:
            peaks.append(pa.total_allocated_bytes() - before)
            found = given(*arguments)
            # A copy, because bytes of a mapped file do not count as memory.
            return replace(found, data=found.data.take(pa.array(range(len(found)))))

        monkeypatch.setattr(sealer.log, "batch", watched)
        sealer.seal()
    assert len(peaks) > 80
    # Without a bound all 80 rows of 10,000 bytes would be held at once.
    assert max(peaks) < 400_000, max(peaks)
    assert read_all(diary.path) == diary.rows()


def test_files_are_zstd_with_statistics_and_page_checksums(diary: Diary) -> None:
    for commit in range(4):
        diary.commit(inserts(*range(commit * 10, commit * 10 + 5)))
    seal(diary.path, limits=SealLimits(file_sizes=SealFileSizes(group_rows=10)))
    with only_file(diary.path) as file:
        found = []
        for index in range(file.num_row_groups):
            group = file.metadata.row_group(index)
            columns = {group.column(n).path_in_schema: group.column(n) for n in range(group.num_columns)}
            assert {column.compression for column in columns.values()} == {"ZSTD"}
            seqs, commits = columns[change.SEQ].statistics, columns[change.COMMIT].statistics
            found.append((seqs.min, seqs.max, commits.min, commits.max))
            assert columns["id"].statistics.has_min_max
            (sorting,) = group.sorting_columns
            assert file.schema.column(sorting.column_index).name == change.SEQ
        assert found == [(1, 10, 1, 2), (11, 20, 3, 4)]
        file.read()
        name_at = file.metadata.row_group(0).column(file.schema_arrow.names.index("name")).data_page_offset
    (path,) = (diary.path / "cold" / "1").glob("*.parquet")
    content = bytearray(path.read_bytes())
    content[name_at + 60] ^= 1
    Path(path.resolve()).write_bytes(content)
    with only_file(diary.path) as file, pytest.raises(OSError, match=r"crc|checksum"):
        file.read()


def test_columns_that_are_null_throughout_are_not_in_the_file_until_a_row_has_one(diary: Diary) -> None:
    diary.commit(inserts(1))
    diary.commit(inserts(2))
    diary.commit((SHOP, [*move(2, 3)]))
    diary.commit(inserts(4))
    seal(diary.path, limits=SealLimits(file_sizes=SealFileSizes(group_rows=2)))
    files = ChangeLog.open(diary.path).files(SHOP.table)
    present = [set(change.OPTIONAL) & set(pq.read_schema(file).names) for file in files]
    assert present == [set(), {change.MOVED_FROM}]
    assert read_all(diary.path) == diary.rows()


def test_a_row_group_has_every_column_that_any_of_its_rows_has(diary: Diary) -> None:
    diary.commit(inserts(1))
    diary.commit(rich(2))
    diary.commit(inserts(3))
    seal(diary.path)
    assert len(ChangeLog.open(diary.path).files(SHOP.table)) == 1
    assert read_all(diary.path) == diary.rows()


def test_every_file_is_durable_before_the_seal_that_names_it(diary: Diary, monkeypatch: pytest.MonkeyPatch) -> None:
    write_everything(diary)
    synced: list[str] = []
    fsync, link = os.fsync, os.link

    def noting(handle: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{handle}"))
        fsync(handle)

    def linking(aside: Any, path: Any) -> None:
        synced.append(f"link {path}")
        link(aside, path)

    monkeypatch.setattr(os, "fsync", noting)
    monkeypatch.setattr(os, "link", linking)
    seal(diary.path, grace_seconds=None)
    log = ChangeLog.open(diary.path)
    log.seal_index.refresh()
    (sealed,) = log.seal_index.seals
    before = synced[: synced.index(f"link {seal_path(diary.path, sealed.stem)}")]
    real = diary.path.resolve()
    folders = {f"{real}/{file.file}".rpartition("/")[0] for file in sealed.files}
    assert folders | {f"{real}/cold/files", f"{real}/cold"} <= set(before)
    # The files were made durable under the names they had while they were written.
    written = [path for path in before if path.endswith(".tmp") and "/cold/files/" in path]
    assert len(written) == len(sealed.files)
    assert any(commits_path(real, sealed.stem).name in path for path in before)


# --- the glob ------------------------------------------------------------------------------------------------


def sealed_rows(diary: Diary, relation: int) -> list[tuple[int, int, str]]:
    return [
        (item.row.seq, item.commit, item.row.values[change.POSITION])
        for item in diary.noted
        if item.row.schema.relation == relation
    ]


def shown(path: Path, table: int) -> list[tuple[int, int, str]]:
    return [(row[change.SEQ], row[change.COMMIT], row[change.POSITION]) for row in glob_rows(path, table)]


def test_the_glob_shows_every_sealed_row_once_with_its_commit(diary: Diary) -> None:
    for _ in range(2):
        write_everything(diary)
        seal(diary.path, join=False, limits=SealLimits(commits=2))
        tables = ((1, SHOP), (2, KEYLESS_OTHER), (3, OTHER))
        for number, schema in tables:
            assert shown(diary.path, number) == sealed_rows(diary, schema.relation)
        with Sealer(diary.path, limits=PAIRS) as sealer:
            assert sealer.merge_seals().merged
            for number, schema in tables:
                assert shown(diary.path, number) == sealed_rows(diary, schema.relation)
            sealer.clean(0)
        for number, schema in tables:
            assert shown(diary.path, number) == sealed_rows(diary, schema.relation)


def test_the_glob_is_read_by_duckdb(diary: Diary) -> None:
    duckdb = pytest.importorskip("duckdb", reason="SKIPPED LOUDLY: duckdb is not installed")
    write_everything(diary)
    seal(diary.path, limits=replace(PAIRS, commits=2))
    with duckdb.connect() as connection:
        found = connection.execute(
            f"SELECT _seq, _commit, _position, id, added FROM read_parquet('{diary.path}/cold/1/*.parquet', "
            "union_by_name=true) ORDER BY _seq"
        ).fetchall()
    assert [row[:3] for row in found] == sealed_rows(diary, SHOP.relation)
    assert [row[3] for row in found] == [row.values["id"] for row in diary.rows(schema=SHOP)]
    assert [row[4] for row in found] == [row.values.get("added") for row in diary.rows(schema=SHOP)]


def test_the_glob_works_in_a_copy_of_the_log(diary: Diary, tmp_path: Path) -> None:
    write_everything(diary)
    seal(diary.path, limits=replace(PAIRS, commits=2))
    moved = tmp_path / "elsewhere" / "copy"
    moved.parent.mkdir()
    shutil.copytree(diary.path, moved, symlinks=True)
    assert shown(moved, 1) == sealed_rows(diary, SHOP.relation)
    assert all(not os.path.isabs(os.readlink(link)) for link in moved.glob("cold/[0-9]*/*.parquet"))
