"""Retention: the log trims by age, by bytes and by need.

A late reader gets an error, never a gap.
"""

from __future__ import annotations

import json
import logging
import os
import time
from typing import Any

import pytest

from tailrace.changelog.format.trimmed import NOTHING_TRIMMED, TrimRecord, read_trimmed, write_trimmed
from tailrace.changelog.maintain.retention import RetentionPolicy, TrimResult, disk_bytes, hold_usages, trim
from tailrace.changelog.maintain.seal_contents import SealLimits
from tailrace.changelog.maintain.sealer import Sealer
from tailrace.changelog.read import consumers
from tailrace.changelog.read.consumers import TableProgress, write_table_progress
from tailrace.changelog.read.index import LogIndex
from tailrace.changelog.read.reader import ChangeLog
from tailrace.errors import LogCorrupt, LogTrimmed
from tailrace.model.position import Lsn
from tailrace.model.schema import TableSchema
from tailrace.storage.files import LogPath
from tests.support.changes import SHOP, insert
from tests.support.logs import (
    OFTEN,
    OTHER,
    THIRD,
    Diary,
    Given,
    assert_nothing_left_over,
    glob_rows,
    in_order,
    inserts,
    only_on_disk,
    read_all,
    rows_of,
    seal,
    stored_files,
)

PLACES = OFTEN

DAY = 86_400.0
NUMBERS = {SHOP: 1, OTHER: 2, THIRD: 3}


def trim_later(path: LogPath, *, days: float = 1.0, **policy: Any) -> TrimResult:
    """Trim so many days later.

    By default all that no reader needs is old enough then.
    """
    with Sealer(path) as sealer:
        return trim(sealer, RetentionPolicy(**{"age_seconds": 0.0, **policy}), now=time.time() + days * DAY)


def tables_hold(path: LogPath, *hints: tuple[TableSchema, int, int]) -> None:
    """Report that lake tables have covered no more than a commit and a `_seq`."""
    write_table_progress(
        path,
        [
            TableProgress(table=schema.table, numbers=(NUMBERS[schema],), commit=commit, seq=seq)
            for schema, commit, seq in hints
        ],
    )


def heavy(key: int, schema: TableSchema = SHOP, size: int = 20_000) -> Given:
    """A row that compression does not make smaller."""
    return schema, [insert(key, big=os.urandom(size).hex())]


def write_sealed(diary: Diary, *commits: tuple[Given, ...]) -> None:
    """Write commits in seals of their own; only the newest keeps its own file."""
    for given in commits:
        diary.commit(*given)
        seal(diary.path, join=False)


def numbers_kept(path: LogPath) -> dict[int, list[int]]:
    """Return, by table, the keys that the glob still shows."""
    tables = (1, 2, 3)
    return {table: [row["id"] for row in glob_rows(path, table)] for table in tables if glob_rows(path, table)}


# --- by age --------------------------------------------------------------------------------------------------


def test_rows_younger_than_the_policy_are_kept_and_older_ones_trimmed(diary: Diary) -> None:
    write_sealed(diary, (inserts(1),), (inserts(2),))
    assert trim_later(diary.path, days=6.9, age_seconds=7 * DAY) == TrimResult()
    assert read_all(diary.path) == diary.rows()
    done = trim_later(diary.path, days=7.1, age_seconds=7 * DAY)
    # One file and one row are the schema stream's.
    assert (done.commits, done.files, done.rows, done.detached) == (2, 3, 3, ())
    assert done.bytes > 0
    assert read_all(diary.path, 2) == []
    assert_nothing_left_over(diary.path)


def test_without_an_age_everything_is_kept_for_ever(diary: Diary) -> None:
    write_sealed(diary, (inserts(1),))
    assert trim_later(diary.path, days=40_000, age_seconds=None) == TrimResult()


def test_unsealed_rows_are_never_trimmed(diary: Diary) -> None:
    write_sealed(diary, (inserts(1),))
    diary.commit(inserts(2))
    trim_later(diary.path, days=1000)
    assert read_all(diary.path, 1) == diary.rows(1)
    diary.commit(inserts(3))
    assert read_all(diary.path, 1) == diary.rows(1)


def test_the_newest_commit_remains_when_all_rows_are_trimmed(diary: Diary) -> None:
    write_sealed(diary, (inserts(1),), (), (inserts(2),))
    trim_later(diary.path)
    seal(diary.path)
    assert stored_files(diary.path, "hot/*") == {f"hot/{3:020d}.arrow"}
    diary.reopen()
    assert (diary.writer.commit, diary.writer.position, diary.writer.next_seq) == (3, Lsn(300), 3)
    diary.commit(inserts(3))
    assert read_all(diary.path, 3) == diary.rows(3)
    seal(diary.path)
    assert read_all(diary.path, 3) == diary.rows(3)
    assert_nothing_left_over(diary.path)


def test_trimmed_commits_leave_no_files_of_any_kind(diary: Diary) -> None:
    diary.piece(inserts(1, 2))
    diary.finish(inserts(3))
    diary.commit(inserts(4))
    with Sealer(diary.path) as sealer:
        sealer.seal()
        trim(sealer, RetentionPolicy(age_seconds=0.0), now=4e9)
    diary.commit(inserts(5))
    seal(diary.path, grace_seconds=300)
    assert_nothing_left_over_of(diary.path, 2)


def assert_nothing_left_over_of(path: LogPath, commit: int) -> None:
    for number in range(1, commit + 1):
        assert not stored_files(path, f"hot/{number:020d}*", f"big/{number:020d}/*", f"cold/{number:020d}*")


@pytest.mark.parametrize("jump_days", [-10_000.0, -1.0])
def test_a_clock_that_jumped_back_only_keeps_more(diary: Diary, jump_days: float) -> None:
    write_sealed(diary, (inserts(1),))
    list(ChangeLog.open(diary.path).follow(0, consumer="reader"))
    assert trim_later(diary.path, days=jump_days) == TrimResult()
    assert [found.state for found in hold_usages(ChangeLog.open(diary.path), now=0.0)] == ["live"]


def test_the_age_of_rows_counts_from_their_commit_and_not_from_their_seal(diary: Diary) -> None:
    diary.commit(inserts(1))
    later = time.time()
    seal(diary.path)
    with Sealer(diary.path) as sealer:
        assert trim(sealer, RetentionPolicy(age_seconds=3600.0), now=later + 3500).rows == 0
        assert trim(sealer, RetentionPolicy(age_seconds=3600.0), now=later + 3601).rows == 2


def test_a_clock_that_jumped_forward_trims_nothing_a_lake_table_needs(diary: Diary) -> None:
    write_sealed(diary, (inserts(1),))
    tables_hold(diary.path, (SHOP, 0, 0))
    trim_later(diary.path, days=10_000)
    assert read_all(diary.path) == diary.rows()


# --- by need -------------------------------------------------------------------------------------------------


def test_a_table_holds_only_files_with_rows_of_its_own_that_it_has_not_covered(diary: Diary) -> None:
    write_sealed(diary, (inserts(1), inserts(10, schema=OTHER)), (inserts(2),), (inserts(20, schema=OTHER),))
    tables_hold(diary.path, (SHOP, 1, 1), (OTHER, 2, 2))
    trim_later(diary.path)
    assert numbers_kept(diary.path) == {1: [2], 2: [20]}
    assert read_trimmed(diary.path).commit == 1
    log = ChangeLog.open(diary.path)
    assert rows_of(log.follow(1, table="public.things")) == diary.rows(1, SHOP)
    assert rows_of(log.follow(2, table="public.other")) == diary.rows(2, OTHER)
    assert_nothing_left_over(diary.path)


def test_a_quiet_table_holds_nothing_at_any_age_of_its_progress(diary: Diary) -> None:
    write_sealed(diary, (inserts(1), inserts(10, schema=OTHER)), (inserts(2),), (inserts(3),), (inserts(4),))
    tables_hold(diary.path, (OTHER, 1, 2), (SHOP, 4, 5))
    trim_later(diary.path)
    assert numbers_kept(diary.path) == {}
    assert [found.state for found in hold_usages(ChangeLog.open(diary.path))] == ["live", "live"]
    # It has lost nothing: it continues to read.
    diary.commit(inserts(11, schema=OTHER))
    assert rows_of(ChangeLog.open(diary.path).follow(1, table="public.other")) == diary.rows(4, OTHER)


def test_a_table_that_covered_rows_up_to_a_row_within_a_commit_holds_the_rest(diary: Diary) -> None:
    write_sealed(diary, (inserts(1, 2, 3),), (inserts(4),))
    tables_hold(diary.path, (SHOP, 0, 2))
    trim_later(diary.path)
    assert numbers_kept(diary.path) == {1: [1, 2, 3, 4]}
    tables_hold(diary.path, (SHOP, 0, 3))
    trim_later(diary.path)
    assert numbers_kept(diary.path) == {1: [4]}
    assert [row.seq for row in rows_of(ChangeLog.open(diary.path).read(1, 2, tables=[1], after_seq=3))] == [4]


def test_a_reader_of_one_table_does_not_hold_another(diary: Diary) -> None:
    write_sealed(diary, (inserts(1), inserts(10, schema=OTHER)))
    follower = ChangeLog.open(diary.path).follow(table="public.other", consumer="reader")
    next(follower)
    trim_later(diary.path)
    assert numbers_kept(diary.path) == {2: [10]}
    assert list(follower) == []
    trim_later(diary.path)
    assert numbers_kept(diary.path) == {}


def test_a_reader_of_all_tables_holds_all_of_them(diary: Diary) -> None:
    write_sealed(diary, (inserts(1), inserts(10, schema=OTHER)), (inserts(2),))
    follower = ChangeLog.open(diary.path).follow(consumer="reader")
    next(follower)
    trim_later(diary.path)
    assert read_all(diary.path) == diary.rows()
    assert len(list(follower)) == 2
    trim_later(diary.path)
    assert numbers_kept(diary.path) == {}


def test_a_reader_of_all_tables_has_lost_nothing_when_only_the_schema_stream_is_trimmed(diary: Diary) -> None:
    write_sealed(diary, (inserts(1),), (inserts(2),))
    tables_hold(diary.path, (SHOP, 0, 0))
    trim_later(diary.path)
    assert set(read_trimmed(diary.path).tables) == {0}
    follower = ChangeLog.open(diary.path).follow(consumer="reader")
    next(follower)
    tables_hold(diary.path)
    assert [found.state for found in hold_usages(ChangeLog.open(diary.path))] == ["live"]
    trim_later(diary.path)
    assert read_all(diary.path) == diary.rows()
    assert len(list(follower)) == 1, "the second row is still kept for it"


def test_an_expired_reader_holds_nothing_and_gets_an_error(diary: Diary) -> None:
    write_sealed(diary, (inserts(1),))
    log = ChangeLog.open(diary.path)
    next(log.follow(consumer="reader", expires_seconds=3 * DAY))
    trim_later(diary.path, days=2.9)
    assert [found.state for found in hold_usages(log, now=time.time() + 2.9 * DAY)] == ["live"]
    assert numbers_kept(diary.path) == {1: [1]}
    trim_later(diary.path, days=3.1)
    assert [found.state for found in hold_usages(log, now=time.time() + 3.1 * DAY)] == ["expired"]
    assert numbers_kept(diary.path) == {}
    with pytest.raises(LogTrimmed):
        list(log.follow(consumer="reader"))


def test_a_reader_that_never_expires_holds_its_rows(diary: Diary) -> None:
    write_sealed(diary, (inserts(1),))
    next(ChangeLog.open(diary.path).follow(consumer="patient", expires_seconds=None))
    trim_later(diary.path, days=10_000)
    assert numbers_kept(diary.path) == {1: [1]}


def test_rows_of_a_forgotten_reader_are_trimmed(diary: Diary) -> None:
    write_sealed(diary, (inserts(1),))
    next(ChangeLog.open(diary.path).follow(consumer="reader"))
    trim_later(diary.path)
    consumers.forget_consumer(diary.path, "reader")
    trim_later(diary.path)
    assert numbers_kept(diary.path) == {}


def test_hold_usages_report_every_hold(diary: Diary) -> None:
    write_sealed(diary, (inserts(1), inserts(10, 11, schema=OTHER)), (inserts(2),))
    next(ChangeLog.open(diary.path).follow(consumer="reader"))
    tables_hold(diary.path, (SHOP, 1, 1), (THIRD, 0, 0))
    found = {item.hold.name: item for item in hold_usages(ChangeLog.open(diary.path))}
    assert {name: (item.state, item.rows) for name, item in found.items()} == {
        "reader": ("live", 6),
        "public.things": ("live", 1),
        "sales.third": ("live", 0),
    }
    assert found["sales.third"].bytes == 0 < found["public.things"].bytes < found["reader"].bytes


# --- by bytes ------------------------------------------------------------------------------------------------


def test_the_oldest_unneeded_rows_are_trimmed_until_the_rest_fits(diary: Diary) -> None:
    write_sealed(diary, *((heavy(key),) for key in range(6)))
    size = disk_bytes(diary.path)
    done = trim_later(diary.path, age_seconds=None, bytes=size - 50_000)
    assert (done.files, done.detached) == (3, ())  # one of them is the schema stream's
    assert numbers_kept(diary.path) == {1: [2, 3, 4, 5]}
    assert disk_bytes(diary.path) <= size - 50_000 + 10_000  # the record of it takes room too
    assert trim_later(diary.path, age_seconds=None, bytes=size - 50_000) == TrimResult()


def test_the_byte_limit_trims_no_needed_rows(diary: Diary) -> None:
    write_sealed(diary, *((heavy(key), heavy(key, OTHER)) for key in range(3)))
    tables_hold(diary.path, (SHOP, 0, 0))
    trim_later(diary.path, age_seconds=None, bytes=1)
    assert numbers_kept(diary.path) == {1: [0, 1, 2]}


def test_room_is_counted_with_everything_that_takes_room(diary: Diary) -> None:
    diary.commit(heavy(1))
    diary.piece(heavy(2))
    hot = disk_bytes(diary.path)
    assert hot > 80_000
    diary.finish()
    seal(diary.path, grace_seconds=300)
    assert disk_bytes(diary.path) > hot * 1.5
    seal(diary.path)
    assert disk_bytes(diary.path) < hot * 1.5


# --- at most so many bytes -----------------------------------------------------------------------------------


def test_only_the_largest_hold_is_detached(diary: Diary, caplog: pytest.LogCaptureFixture) -> None:
    write_sealed(diary, *((heavy(key), heavy(key, OTHER, 5_000), heavy(key, THIRD, 5_000)) for key in range(4)))
    tables_hold(diary.path, (SHOP, 0, 0), (OTHER, 0, 0), (THIRD, 0, 0))
    size = disk_bytes(diary.path)
    with caplog.at_level(logging.ERROR):
        done = trim_later(diary.path, age_seconds=None, max_bytes=int((size - 50_000) / 0.9))
    assert done.detached == ("public.things",)
    assert [(record.levelname, record.who) for record in caplog.records] == [("ERROR", "public.things")]  # type: ignore[attr-defined] # an extra
    log = ChangeLog.open(diary.path)
    states = {item.hold.name: item.state for item in hold_usages(log)}
    assert states == {"public.things": "detached", "public.other": "live", "sales.third": "live"}
    assert log.trimmed().tables[1].why == "detached"
    assert numbers_kept(diary.path)[2] == numbers_kept(diary.path)[3] == [0, 1, 2, 3]
    assert disk_bytes(diary.path) <= size - 50_000
    with pytest.raises(LogTrimmed):
        list(log.follow(0, table="public.things"))
    assert rows_of(log.follow(0, table="public.other")) == diary.rows(schema=OTHER)


def test_a_detached_reader_holds_nothing_and_is_not_detached_again(diary: Diary) -> None:
    write_sealed(diary, *((heavy(key), heavy(key, OTHER, 5_000)) for key in range(4)))
    tables_hold(diary.path, (SHOP, 0, 0), (OTHER, 0, 0))
    size = disk_bytes(diary.path)
    assert trim_later(diary.path, age_seconds=None, max_bytes=int((size - 50_000) / 0.9)).detached
    done = trim_later(diary.path)
    assert done.detached == ()
    assert numbers_kept(diary.path) == {2: [0, 1, 2, 3]}


def test_unneeded_rows_are_trimmed_before_a_reader_is_detached(diary: Diary) -> None:
    write_sealed(diary, *((heavy(key), heavy(key, OTHER)) for key in range(4)))
    tables_hold(diary.path, (SHOP, 0, 0))
    size = disk_bytes(diary.path)
    done = trim_later(diary.path, age_seconds=None, max_bytes=int((size - 100_000) / 0.9))
    assert done.detached == ()
    assert numbers_kept(diary.path)[1] == [0, 1, 2, 3]


def test_all_holds_that_lose_rows_are_named_and_no_others(diary: Diary) -> None:
    write_sealed(diary, *((heavy(key), heavy(key, OTHER, 5_000)) for key in range(4)))
    log = ChangeLog.open(diary.path)
    for name, table in (("all", None), ("one", "public.things"), ("two", "public.things"), ("other", "public.other")):
        next(log.follow(table=table, consumer=name))
    done = trim_later(diary.path, age_seconds=None, max_bytes=int((disk_bytes(diary.path) - 50_000) / 0.9))
    lost = {item.hold.name for item in hold_usages(log) if item.state == "detached"}
    assert set(done.detached) == lost == {"all", "one", "two"}
    assert rows_of(log.follow(table="public.other", consumer="other")) == diary.rows(schema=OTHER)


def test_below_the_limit_no_hold_is_detached(diary: Diary) -> None:
    write_sealed(diary, (heavy(1),))
    tables_hold(diary.path, (SHOP, 0, 0))
    assert trim_later(diary.path, age_seconds=None, max_bytes=disk_bytes(diary.path) * 2) == TrimResult()


def test_unsealed_rows_are_not_taken_from_a_hold(diary: Diary) -> None:
    diary.commit(heavy(1))
    tables_hold(diary.path, (SHOP, 0, 0))
    assert trim_later(diary.path, age_seconds=None, max_bytes=1000) == TrimResult()
    assert read_all(diary.path) == diary.rows()


# --- the record ----------------------------------------------------------------------------------------------


def test_no_hold_is_detached_for_room_that_only_sealing_can_make(diary: Diary) -> None:
    write_sealed(diary, (inserts(1),))
    diary.commit(heavy(2, OTHER))
    tables_hold(diary.path, (SHOP, 0, 0), (OTHER, 0, 0))
    over = int((disk_bytes(diary.path) - 20_000) / 0.9)
    assert trim_later(diary.path, age_seconds=None, max_bytes=over).detached == ()
    assert numbers_kept(diary.path) == {1: [1]}
    seal(diary.path)
    over = int((disk_bytes(diary.path) - 20_000) / 0.9)
    assert trim_later(diary.path, age_seconds=None, max_bytes=over).detached == (str(OTHER.table),)


def test_no_hold_is_detached_for_room_that_the_newest_commit_takes_twice(diary: Diary) -> None:
    write_sealed(diary, (heavy(1), inserts(2, schema=OTHER)))
    tables_hold(diary.path, (SHOP, 0, 0), (OTHER, 0, 0))
    assert trim_later(diary.path, age_seconds=None, max_bytes=30_000).detached == (str(SHOP.table),)


def test_the_trim_record_counts_trimmed_rows(diary: Diary) -> None:
    diary.commit()
    write_sealed(diary, (inserts(1, 2), inserts(10, schema=OTHER)), (inserts(3),))
    tables_hold(diary.path, (SHOP, 2, 2))
    trim_later(diary.path)
    first = read_trimmed(diary.path)
    assert (first.commit, first.position, first.next_seq) == (2, Lsn(200), 4)
    assert (first.transactions, first.rows) == (1, 3)
    assert {number: (table.last_seq, table.commit, table.rows) for number, table in first.tables.items()} == {
        0: (3, 2, 2),
        1: (2, 2, 2),
        2: (3, 2, 1),
    }
    tables_hold(diary.path)
    trim_later(diary.path)
    then = read_trimmed(diary.path)
    assert (then.commit, then.rows, then.transactions, then.tables[1].rows) == (3, 4, 2, 3)
    assert then.tables[2] == first.tables[2]


def test_an_index_counts_trimmed_rows_as_captured(diary: Diary) -> None:
    write_sealed(diary, (inserts(1, 2), inserts(10, schema=OTHER)), (inserts(3),))
    index = LogIndex(ChangeLog.open(diary.path))
    index.grow()
    before = (index.rows, index.transactions, index.rows_captured(1), index.rows_captured(2), index.last_commit)
    tables_hold(diary.path, (OTHER, 0, 0))
    trim_later(diary.path)
    for found in (index, LogIndex(ChangeLog.open(diary.path))):
        found.grow()
        after = (found.rows, found.transactions, found.rows_captured(1), found.rows_captured(2), found.last_commit)
        assert after == before
        assert found.trimmed_after(1, 0) is not None
        assert found.trimmed_after(1, 4) is found.trimmed_after(2, 0) is None
        assert found.pending(1, 0, 99) == []
        assert [item.rows for item in found.pending(2, 0, 99)] == [1]


@only_on_disk
def test_the_trim_record_survives_and_a_damaged_one_is_an_error(quick: LogPath) -> None:
    quick.mkdir(parents=True)
    assert read_trimmed(quick) == NOTHING_TRIMMED
    trimmed = TrimRecord(commit=7, position=Lsn(99), next_seq=5, transactions=2, rows=4)
    write_trimmed(quick, trimmed)
    assert read_trimmed(quick) == trimmed
    path = quick / "trimmed.json"
    stored = json.loads(path.read_text())
    path.write_text(json.dumps(stored | {"commit": 6}))
    with pytest.raises(LogCorrupt, match="trimmed"):
        read_trimmed(quick)


def test_trimmed_narrow_seals_in_their_grace_period_do_not_reappear(diary: Diary) -> None:
    for key in range(8):
        diary.commit(inserts(key))
        seal(diary.path, join=False)
    seal(diary.path, grace_seconds=300)
    assert len(stored_files(diary.path, "cold/*.json")) == 9
    diary.commit(inserts(9))
    trim_later(diary.path)
    assert stored_files(diary.path, "cold/*.json", "cold/files/*/*") == set()
    assert read_all(diary.path, 8) == diary.rows(8)
    with pytest.raises(LogTrimmed):
        read_all(diary.path, 7)


def test_repeated_trimming_and_sealing_count_nothing_twice(diary: Diary) -> None:
    for round_ in range(3):
        for key in range(3):
            diary.commit(inserts(round_ * 10 + key), inserts(key, schema=OTHER))
            seal(diary.path, limits=SealLimits(merge_count=2))
        tables_hold(diary.path, (OTHER, diary.writer.commit - 1, 0))
        trim_later(diary.path)
        index = LogIndex(ChangeLog.open(diary.path))
        index.grow()
        assert (index.rows, index.rows_captured(1), index.rows_captured(2)) == (
            len(diary.noted),
            len(diary.rows(schema=SHOP)),
            len(diary.rows(schema=OTHER)),
        )
        kept = [row for row in diary.rows(diary.writer.commit - 1) if row.schema == OTHER]
        found = in_order(rows_of(ChangeLog.open(diary.path).follow()))
        assert found[-1:] == kept
