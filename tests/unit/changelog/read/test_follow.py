"""Following: every row once, in order, at the reader's own pace.

A reader that is too late gets an error.
"""

from __future__ import annotations

import itertools
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tailrace.changelog.maintain.retention import RetentionPolicy, trim
from tailrace.changelog.maintain.seal_contents import SealLimits
from tailrace.changelog.maintain.sealer import Sealer
from tailrace.changelog.read.consumers import TableProgress, write_table_progress
from tailrace.changelog.read.index import LogIndex
from tailrace.changelog.read.reader import ChangeLog
from tailrace.errors import ConfigError, LogCorrupt, LogTrimmed
from tailrace.model.position import Lsn
from tailrace.model.schema import TableId, TableSchema
from tailrace.storage.files import LogPath
from tests.support.changes import SHOP
from tests.support.logs import OTHER, STEP, THIRD, Diary, in_order, inserts, only_on_disk, read_all, rows_of, seal
from tests.support.windows import named

PLACES = ("disk", "store")

LET_GO = RetentionPolicy(age_seconds=0.0)
LATER = 4e9


def trim_all(path: LogPath) -> None:
    """Trim every sealed row that no reader needs."""
    with Sealer(path) as sealer:
        trim(sealer, LET_GO, now=LATER)


def hold(path: LogPath, schema: TableSchema, number: int, commit: int = 0, seq: int = 0) -> None:
    """Report that a lake table has covered no more than this."""
    write_table_progress(path, [TableProgress(table=schema.table, numbers=(number,), commit=commit, seq=seq)])


def seqs(batches: Any) -> list[int]:
    return [row.seq for row in in_order(rows_of(batches))]


# --- which table ---------------------------------------------------------------------------------------------


def test_a_table_is_selected_by_its_text_its_name_or_its_number(diary: Diary) -> None:
    diary.commit(inserts(1), inserts(2, schema=OTHER))
    for _ in range(2):
        log = ChangeLog.open(diary.path)
        for table in ("public.other", TableId("public", "other"), 2):
            assert rows_of(log.follow(table=table)) == diary.rows(schema=OTHER)
        seal(diary.path)


def test_a_table_that_the_log_does_not_have_is_an_error_with_a_remedy(diary: Diary) -> None:
    diary.commit(inserts(1))
    for table in ("public.Things", TableId("public", "nothing"), 9):
        with pytest.raises(ConfigError, match="the log has no") as caught:
            list(ChangeLog.open(diary.path).follow(table=table))
        assert "tailrace log FILE show" in caught.value.hint


@pytest.mark.parametrize("sealed", [False, True])
def test_a_recreated_table_is_still_followed_by_its_name(diary: Diary, sealed: bool) -> None:
    again = named("public", "things", SHOP.relation + 1)
    diary.commit(inserts(1))
    follower = ChangeLog.open(diary.path).follow(table="public.things", wait_seconds=0.02)
    first = next(follower)
    diary.commit(inserts(2, schema=again), inserts(3, schema=OTHER))
    if sealed:
        seal(diary.path)
    assert [row.values["id"] for row in rows_of([first, *follower])] == [1, 2]
    assert [row.values["id"] for row in read_all(diary.path, table="public.things")] == [1, 2]


# --- at the reader's own pace --------------------------------------------------------------------------------


def test_a_slow_reader_gets_each_row_once_while_the_log_is_written_sealed_and_merged(diary: Diary) -> None:
    diary.commit(inserts(0))
    found: dict[str | None, list[Any]] = {None: [], "public.things": []}

    def read(table: str | None) -> None:
        for batch in ChangeLog.open(diary.path).follow(0, table=table, wait_seconds=240):
            time.sleep(0.001)
            found[table].append(batch)
            if batch.data.column("id")[-1].as_py() == 999:
                return

    readers = [threading.Thread(target=read, args=(table,)) for table in found]
    for reader in readers:
        reader.start()
    index = LogIndex(ChangeLog.open(diary.path))
    for key in range(1, 60):
        diary.commit(inserts(key), inserts(key, schema=OTHER))
        if key % 3 == 0:
            seal(diary.path, limits=SealLimits(merge_count=2))
        index.grow()
        assert index.rows == len(diary.noted)
    diary.commit(inserts(999))
    for reader in readers:
        reader.join(240)
        assert not reader.is_alive()
    assert in_order(rows_of(found[None])) == diary.rows()
    assert rows_of(found["public.things"]) == diary.rows(schema=SHOP)


def test_nothing_is_read_before_it_is_requested(diary: Diary) -> None:
    for key in range(3):
        diary.commit(inserts(key))
    log = ChangeLog.open(diary.path)
    follower = log.follow(0)
    next(follower)
    damaged = diary.path / "hot" / f"{3:020d}.arrow"
    damaged.write_bytes(b"")
    assert len(next(follower)) == 1


def test_waiting_ends_after_the_given_seconds_without_a_row(diary: Diary) -> None:
    diary.commit(inserts(1))
    began = time.monotonic()
    follower = ChangeLog.open(diary.path).follow(0, table="public.things", wait_seconds=0.2)
    next(follower)
    diary.commit(inserts(1, schema=OTHER))
    assert list(follower) == []
    assert time.monotonic() - began >= 0.2


def mapped(log: ChangeLog) -> list[str]:
    """Return the sealed files of the log that this process has mapped."""
    files = {str(path) for path in [*log.files(1), *log.files(2)]}
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if line.rpartition(" ")[2] in files]


@only_on_disk
def test_an_abandoned_follower_leaves_no_file_open(diary: Diary) -> None:
    diary.commit(inserts(1), inserts(2, schema=OTHER))
    seal(diary.path)
    log = ChangeLog.open(diary.path)
    follower = log.follow(0, wait_seconds=None)
    next(follower)
    assert mapped(log), "a sealed file is read"
    follower.close()  # type: ignore[attr-defined] # it is a generator
    assert not mapped(log)


@only_on_disk
@pytest.mark.parametrize("reads", [1, 2])
def test_a_damaged_sealed_file_is_named_even_after_it_was_read_once(diary: Diary, reads: int) -> None:
    diary.commit(inserts(*range(50)))
    seal(diary.path)
    log = ChangeLog.open(diary.path)
    for _ in range(reads - 1):
        assert rows_of(log.follow(0)) == diary.rows()
    (path,) = log.files("public.things")
    content = bytearray(path.read_bytes())
    content[len(content) // 8] ^= 1
    path.write_bytes(content)
    with pytest.raises(LogCorrupt) as caught:
        list(log.follow(0))
    assert path.name in str(caught.value)


# --- trimmed rows --------------------------------------------------------------------------------------------


def test_a_late_reader_gets_an_error_for_every_trimmed_commit(diary: Diary) -> None:
    for key in range(4):
        diary.commit(inserts(key), inserts(key, schema=OTHER))
    seal(diary.path)
    trim_all(diary.path)
    diary.commit(inserts(5))
    log = ChangeLog.open(diary.path)
    for after in range(4):
        for table in (None, "public.things", "public.other", 1):
            with pytest.raises(LogTrimmed) as caught:
                list(log.follow(after, table=table))
            assert caught.value.code == "log-trimmed"
    assert rows_of(log.follow(4)) == diary.rows(4)
    assert rows_of(log.follow()) == diary.rows(4)


def test_a_trimmed_position_is_an_error(diary: Diary) -> None:
    for key in range(4):
        diary.commit(inserts(key))
    seal(diary.path)
    trim_all(diary.path)
    diary.commit(inserts(5))
    log = ChangeLog.open(diary.path)
    for position in (0, 1, STEP, 4 * STEP - 1):
        with pytest.raises(LogTrimmed):
            list(log.follow(Lsn(position)))
    assert rows_of(log.follow(Lsn(4 * STEP))) == diary.rows(4)


def test_a_follower_overtaken_by_trimming_gets_an_error_and_skips_nothing(diary: Diary) -> None:
    diary.commit(inserts(1))
    log = ChangeLog.open(diary.path)
    followers = {table: log.follow(0, table=table, wait_seconds=5.0) for table in (None, "public.things", 1)}
    for follower in followers.values():
        assert seqs([next(follower)]) == [1]
    for key in range(2, 6):
        diary.commit(inserts(key))
    seal(diary.path)
    trim_all(diary.path)
    diary.commit(inserts(9))
    for follower in followers.values():
        with pytest.raises(LogTrimmed):
            next(follower)


@pytest.mark.parametrize("paused", range(7))
def test_a_reader_gets_no_gap_when_its_table_is_trimmed_between_two_batches(diary: Diary, paused: int) -> None:
    for key in range(6):
        diary.commit(inserts(key), inserts(key, schema=OTHER))
        seal(diary.path, join=False)
    reader = ChangeLog.open(diary.path).read(1, 6, tables=[1])
    found = list(itertools.islice(reader, paused))
    # Rows that another table still needs keep the seals: only the files of this table are removed.
    hold(diary.path, OTHER, 2)
    trim_all(diary.path)
    gone = ChangeLog.open(diary.path).trimmed()
    assert (gone.commit, set(gone.tables)) == (0, {0, 1})
    with pytest.raises(LogTrimmed) if paused < 6 else nullcontext():
        found.extend(reader)
    expected = [row.seq for row in diary.rows(schema=SHOP)]
    assert seqs(found) == expected[:paused]


def test_a_reader_that_covered_the_trimmed_rows_continues(diary: Diary) -> None:
    for key in range(3):
        diary.commit(inserts(key))
    log = ChangeLog.open(diary.path)
    follower = log.follow(0, wait_seconds=5.0)
    assert [seqs([next(follower)]) for _ in range(3)] == [[1], [2], [3]]
    seal(diary.path)
    trim_all(diary.path)
    diary.commit(inserts(4))
    assert seqs([next(follower)]) == [4]
    assert seqs(log.read(1, 4, after_seq=3)) == [4]


def test_an_idle_reader_gets_an_error_for_commits_trimmed_meanwhile(diary: Diary) -> None:
    diary.commit(inserts(1))
    log = ChangeLog.open(diary.path)
    assert log.newest() == 1
    for key in range(2, 9):
        diary.commit(inserts(key))
    seal(diary.path)
    trim_all(diary.path)
    seal(diary.path)
    assert log.newest() == 8
    diary.commit(inserts(9))
    assert log.newest() == 9
    assert seqs(log.follow()) == [9]


def test_reading_without_a_start_begins_with_the_oldest_kept_row(diary: Diary) -> None:
    diary.commit(inserts(1), inserts(1, schema=OTHER))
    diary.commit(inserts(2), inserts(2, schema=THIRD))
    seal(diary.path)
    diary.commit(inserts(3))
    log = ChangeLog.open(diary.path)
    hold(diary.path, THIRD, 3)
    trim_all(diary.path)
    kept = [row for row in diary.rows() if row.schema == THIRD or row.seq == 5]
    assert in_order(rows_of(log.follow())) == kept
    assert rows_of(log.follow(table="public.things")) == kept[1:]
    for after in (0, 1):
        with pytest.raises(LogTrimmed):
            list(log.follow(after))


def test_a_trimmed_schema_stream_is_no_loss_to_a_reader_of_tables(diary: Diary) -> None:
    diary.commit(inserts(1))
    diary.commit(inserts(2))
    seal(diary.path)
    log = ChangeLog.open(diary.path)
    hold(diary.path, SHOP, 1)
    trim_all(diary.path)
    assert set(log.trimmed().tables) == {0}
    assert rows_of(log.follow(0)) == diary.rows()
    with pytest.raises(LogTrimmed):
        list(log.follow(0, table="schema"))
