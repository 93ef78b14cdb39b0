"""Sealing: the same rows in another place. Whoever reads before, during or after finds each once and unchanged."""

from __future__ import annotations

import datetime as dt
import itertools
import os
import shutil
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tailrace.changelog.cold import commits_path, seal_path
from tailrace.changelog.coldread import ColdReader, Span
from tailrace.changelog.coldwrite import Sizes
from tailrace.changelog.format import commit_path
from tailrace.changelog.reader import ChangeLog
from tailrace.changelog.sealing import Limits, Sealer
from tailrace.changelog.writer import LogWriter
from tailrace.errors import LogBusy, LogCorrupt, LogUnusable
from tailrace.model import change
from tailrace.model.position import Lsn
from tailrace.model.schema import Column
from tests.support.changes import KEYLESS, SHOP, delete, insert, move, table_schema, truncate, update
from tests.support.logs import (
    OTHER,
    THIRD,
    Diary,
    Given,
    assert_nothing_left_over,
    glob_rows,
    in_order,
    inserts,
    read_all,
    rows_of,
    seal,
    stored_files,
)
from tests.support.windows import SOURCE, named

WIDER = replace(SHOP, columns=(*SHOP.columns, Column(name="added", source_type="bool", type=pa.bool_())))
RETYPED = replace(SHOP, columns=(*SHOP.columns[:-1], Column(name="n", source_type="int8", type=pa.int64())))
KEYLESS_OTHER = named("public", "keyless", 9, like=KEYLESS)
PAIRS = Limits(join_count=2)
"""Every two seals become one."""


def rich(key: int) -> Given:
    """Rows with everything a row can have."""
    return SHOP, [
        insert(key, name="né", big=None, n=-key),
        update(key, unchanged=("big", "name"), before={"id": key, "name": "old", "big": "B" * 20, "n": None}),
        *move(key, key + 1000, unchanged=("big",), n=3),
        insert(key + 2000, unfit=("n", "name")),
        delete(key + 2000),
        truncate(),
    ]


def write_everything(diary: Diary) -> None:
    """Commits with rows of several tables and versions, plain and rich ones, and empty ones between."""
    diary.commit()
    diary.commit(rich(1))
    diary.commit(inserts(2, 3), (KEYLESS_OTHER, [insert({"a": 1}, b="x"), delete({"a": 1}, b="x")]))
    diary.commit()
    diary.commit()
    diary.commit(inserts(4, schema=OTHER), inserts(5), (WIDER, [insert(6, added=True), insert(7)]))
    diary.commit((WIDER, [insert(8, added=False)]), inserts(9, schema=OTHER))
    diary.commit(
        (RETYPED, [insert(10, n=1 << 40), *move(10, 11)]), (KEYLESS_OTHER, [insert({"a": None}, b=None)])
    )
    diary.commit()


# --- the same rows, wherever they lie ------------------------------------------------------------------------


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
def test_each_row_comes_with_the_version_of_its_shape_it_was_written_with(diary: Diary, commits: int) -> None:
    write_everything(diary)
    seal(diary.path, join=False, limits=Limits(commits=commits))
    found = in_order(rows_of(ChangeLog.open(diary.path).follow(table=str(SHOP.table))))
    assert found == diary.rows(schema=SHOP)
    assert [row.schema for row in found] == [SHOP] * 10 + [WIDER] * 3 + [RETYPED] * 3


@pytest.mark.parametrize("join", [False, True])
@pytest.mark.parametrize("commits", [1, 4])
def test_following_gives_the_same_tail_after_every_commit_hot_or_cold(
    diary: Diary, commits: int, join: bool
) -> None:
    write_everything(diary)
    seal(diary.path, join=join, limits=replace(PAIRS, commits=commits))
    for after in range(diary.writer.commit + 1):
        assert read_all(diary.path, after) == diary.rows(after), after
        for schema in (SHOP, OTHER, KEYLESS_OTHER):
            assert read_all(diary.path, after, table=schema.table) == diary.rows(after, schema), after


def test_following_from_a_position_gives_the_same_tail_hot_or_cold(diary: Diary) -> None:
    write_everything(diary)
    ends = range(0, diary.writer.position.value + 150, 50)

    def tails() -> list[list[int]]:
        log = ChangeLog.open(diary.path)
        return [[row.seq for row in in_order(rows_of(log.follow(Lsn(end))))] for end in ends]

    hot = tails()
    assert hot == [[row.seq for row in diary.rows(end // 100)] for end in ends]
    seal(diary.path, limits=replace(PAIRS, commits=3))
    assert tails() == hot


def test_the_commits_of_a_part_of_the_log_can_be_read_from_sealed_ones(diary: Diary) -> None:
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


def test_rows_of_all_tables_come_commit_by_commit_from_sealed_files(diary: Diary) -> None:
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


def test_values_of_every_type_and_columns_of_odd_names_survive(diary: Diary) -> None:
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
    """As above, but for tests that write many logs."""
    diary.commit(rich(1), inserts(2, schema=OTHER))
    diary.commit()
    diary.commit(inserts(3, schema=OTHER), inserts(4), (WIDER, [insert(5, added=True)]))
    diary.commit((WIDER, [insert(6)]))
    diary.commit()


@pytest.mark.parametrize("table", [None, SHOP.table, "schema"])
@pytest.mark.parametrize("sealed_before", [False, True])
def test_a_reader_that_stops_at_any_batch_while_the_log_is_sealed_joined_and_cleaned_gets_each_row_once(
    quick: Path, table: Any, sealed_before: bool
) -> None:
    for paused in range(20):
        diary = Diary(quick / str(paused))
        write_a_little(diary)
        if sealed_before:
            seal(diary.path, join=False, limits=Limits(commits=2))
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


def test_an_idle_reader_learns_of_commits_that_were_sealed_and_cleaned_away_meanwhile(diary: Diary) -> None:
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


def test_a_writer_goes_on_after_everything_was_sealed(diary: Diary) -> None:
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


def test_of_a_run_of_commits_without_rows_a_seal_lists_only_the_last(diary: Diary) -> None:
    for given in ((), (), (inserts(1),), (), (), (), (inserts(2),), (inserts(3),), (), ()):
        diary.commit(*given)
    seal(diary.path)
    log = ChangeLog.open(diary.path)
    log.cold.refresh()
    (sealed,) = log.cold.seals
    listed = log.cold.commits(sealed)
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
    assert log.cold.seals[0].files == ()
    assert list(log.follow(0)) == []
    diary.commit(inserts(1))
    assert rows_of(log.follow(0)) == diary.rows()


def test_sealing_nothing_and_sealing_again_do_nothing(diary: Diary) -> None:
    with Sealer(diary.path) as sealer:
        assert sealer.seal().seals == 0
        diary.commit(inserts(1))
        told: list[tuple[int, int]] = []
        done = sealer.seal(lambda done, of: told.append((done, of)))
        assert (done.seals, done.commits, done.rows, told) == (1, 1, 1, [(1, 1)])
        assert done.bytes > 0
        assert sealer.seal().seals == 0
        assert sealer.unsealed() == (2, 1)


def test_progress_is_told_seal_by_seal(diary: Diary) -> None:
    for key in range(5):
        diary.commit(inserts(key))
    told: list[tuple[int, int]] = []
    with Sealer(diary.path, limits=Limits(commits=2)) as sealer:
        assert sealer.seal(lambda done, of: told.append((done, of))).seals == 3
    assert told == [(2, 5), (4, 5), (5, 5)]


def test_a_seal_ends_before_the_commit_that_would_make_it_too_large(diary: Diary) -> None:
    for key in range(4):
        diary.commit(inserts(key, big="x" * 10_000))
    seal(diary.path, join=False, limits=Limits(bytes=25_000))
    log = ChangeLog.open(diary.path)
    log.cold.refresh()
    assert [(found.first, found.last) for found in log.cold.seals] == [(1, 2), (3, 4)]


def test_two_who_seal_at_once_are_told_apart(diary: Diary) -> None:
    with Sealer(diary.path), pytest.raises(LogBusy):
        Sealer(diary.path, wait_seconds=0)
    Sealer(diary.path, wait_seconds=0).close()


# --- the files -----------------------------------------------------------------------------------------------


def only_file(path: Path, table: int = 1) -> pq.ParquetFile:
    (file,) = (path / "cold" / str(table)).glob("*.parquet")
    return pq.ParquetFile(file, page_checksum_verification=True)


def test_row_groups_end_where_commits_end(diary: Diary) -> None:
    for commit in range(7):
        diary.commit(inserts(*range(commit * 10, commit * 10 + 3)), inserts(commit, schema=OTHER))
    seal(diary.path, limits=Limits(sizes=Sizes(group_rows=5)))
    with only_file(diary.path) as file:
        commits = [
            file.read_row_group(place).column(change.COMMIT).to_pylist()
            for place in range(file.num_row_groups)
        ]
    assert [sorted(set(found)) for found in commits] == [[1, 2], [3, 4], [5, 6], [7]]
    with only_file(diary.path, 2) as file:
        assert file.num_row_groups == 2
    assert read_all(diary.path) == diary.rows()


def test_files_end_at_their_size_and_hold_every_row_once(diary: Diary) -> None:
    for commit in range(12):
        diary.commit((SHOP, [insert(commit, big=os.urandom(2000).hex())]))
    seal(diary.path, limits=Limits(sizes=Sizes(group_rows=1, file_bytes=10_000)))
    files = ChangeLog.open(diary.path).files(SHOP.table)
    assert len(files) > 2
    assert all(file.stat().st_size > 10_000 for file in files[:-1])
    assert [row["id"] for row in glob_rows(diary.path, 1)] == list(range(12))
    assert read_all(diary.path) == diary.rows()


def test_a_commit_larger_than_a_row_group_is_split_and_read_in_pieces(diary: Diary) -> None:
    for begin in range(0, 40, 10):
        diary.piece((SHOP, [insert(begin + n, big="x" * 1000) for n in range(10)]))
    diary.finish(inserts(40))
    diary.commit(inserts(41))
    sizes = Sizes(group_bytes=10_000, group_bytes_max=15_000, file_bytes=1)
    seal(diary.path, limits=Limits(sizes=sizes))
    log = ChangeLog.open(diary.path)
    log.cold.refresh()
    groups = [group for file in log.cold.seals[0].files if file.table for group in file.groups]
    assert [(group.first, group.last, group.rows) for group in groups] == [(1, 1, 20), (1, 1, 20), (1, 2, 2)]
    batches = list(log.follow(0))
    assert [len(batch) for batch in batches] == [20, 20, 2]
    assert rows_of(batches) == diary.rows()


def test_a_file_can_be_read_a_few_rows_at_a_time(diary: Diary) -> None:
    for commit in range(5):
        diary.commit(inserts(*range(commit * 10, commit * 10 + 7)))
    seal(diary.path, limits=Limits(sizes=Sizes(group_rows=14)))
    log = ChangeLog.open(diary.path)
    log.cold.refresh()
    (file,) = (file for file in log.cold.seals[0].files if file.table)
    reader = ColdReader(diary.path, log.schemas.get, set())
    found = list(reader.batches(file, Span(2, 4, 9, 30), rows_max=4))
    assert [len(batch) for _, _, batch in found] == [3, 2, 4, 4, 4, 2]
    assert [row.seq for row in rows_of(batch for _, _, batch in found)] == list(range(10, 29))


def test_what_waits_for_its_row_group_is_bounded_whatever_a_commit_holds(
    diary: Diary, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables = [named("public", f"t{n}", 100 + n) for n in range(20)]
    for _ in range(3):
        diary.piece(*((table, [insert(1, big="x" * 10_000)]) for table in tables))
    diary.finish(*((table, [insert(2, big="x" * 10_000)]) for table in tables))
    peaks: list[int] = []
    sizes = Sizes(pending_bytes_max=50_000, group_bytes_max=40_000)
    with Sealer(diary.path, limits=Limits(sizes=sizes)) as sealer:
        assert len(list(sealer.log.follow(0))) == 80  # what is made ready once, per version, is ready now
        before = pa.total_allocated_bytes()
        given = sealer.log.batch

        def watched(*arguments: Any) -> Any:
            peaks.append(pa.total_allocated_bytes() - before)
            found = given(*arguments)
            # A copy, for what lies in a mapped file does not count as memory.
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
    seal(diary.path, limits=Limits(sizes=Sizes(group_rows=10)))
    with only_file(diary.path) as file:
        found = []
        for place in range(file.num_row_groups):
            group = file.metadata.row_group(place)
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
    seal(diary.path, limits=Limits(sizes=Sizes(group_rows=2)))
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


def test_every_file_is_durable_before_the_seal_that_names_it(
    diary: Diary, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    log.cold.refresh()
    (sealed,) = log.cold.seals
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
        seal(diary.path, join=False, limits=Limits(commits=2))
        tables = ((1, SHOP), (2, KEYLESS_OTHER), (3, OTHER))
        for number, schema in tables:
            assert shown(diary.path, number) == sealed_rows(diary, schema.relation)
        with Sealer(diary.path, limits=PAIRS) as sealer:
            assert sealer.join().joined
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


def test_the_glob_works_where_the_log_was_copied_to(diary: Diary, tmp_path: Path) -> None:
    write_everything(diary)
    seal(diary.path, limits=replace(PAIRS, commits=2))
    moved = tmp_path / "elsewhere" / "copy"
    moved.parent.mkdir()
    shutil.copytree(diary.path, moved, symlinks=True)
    assert shown(moved, 1) == sealed_rows(diary, SHOP.relation)
    assert all(not os.path.isabs(os.readlink(link)) for link in moved.glob("cold/[0-9]*/*.parquet"))


# --- when it goes wrong --------------------------------------------------------------------------------------


def test_a_damaged_commit_stops_sealing_and_leaves_nothing(diary: Diary) -> None:
    diary.commit(inserts(1, big="x" * 5000), inserts(2, schema=OTHER))
    diary.commit(inserts(3, big="y" * 5000))
    path = commit_path(diary.path, 2)
    content = bytearray(path.read_bytes())
    content[-2500] ^= 1
    path.write_bytes(content)
    with Sealer(diary.path, limits=Limits(sizes=Sizes(group_rows=1))) as sealer:
        with pytest.raises(LogCorrupt):
            sealer.seal()
        assert stored_files(diary.path, "cold/*", "cold/files/*/*", "cold/files/*/.*") == set()
        content[-2500] ^= 1
        path.write_bytes(content)
        sealer.seal()
    assert read_all(diary.path) == diary.rows()


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


def assert_nothing_left_over_but_hot(path: Path) -> None:
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


def test_opening_a_log_to_seal_sweeps_what_one_who_died_left(diary: Diary) -> None:
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


def test_a_log_of_before_sealing_is_sealed_too(filled: Path) -> None:
    seal(filled)
    assert [row.values["id"] for row in read_all(filled)] == [1, 2, 3, 4, 5]
    writer = LogWriter(filled, SOURCE)
    assert writer.commit == 3
    writer.close()
