"""Reading in order, from any offset, until no row arrives; and the index."""

from __future__ import annotations

import threading
import time

import pytest

from tailrace.changelog.read.index import LogIndex
from tailrace.changelog.read.reader import ChangeLog
from tailrace.changelog.write.writer import LogWriter
from tailrace.errors import LogCorrupt
from tailrace.model.batch import ChangeBatch, Window
from tailrace.model.position import ZERO, Lsn
from tailrace.storage.files import LogPath
from tests.support.changes import SHOP, insert
from tests.support.windows import SOURCE, batch, ids, named, rows_window, window

PLACES = ("disk", "store")

OTHER = named("public", "other", 2)


def test_following_begins_after_the_given_commit(filled: LogPath) -> None:
    log = ChangeLog.open(filled)
    assert ids(list(log.follow(2))) == [(4, 4), (5, 5)]
    assert list(log.follow(3)) == []


def test_following_can_be_limited_to_one_table(writer: LogWriter, folder: LogPath) -> None:
    writer.append(window(0, 100, batch(SHOP, insert(1)), batch(OTHER, insert(2), first=1)))
    log = ChangeLog.open(folder)
    assert ids(list(log.follow(0, table=2))) == [(2, 2)]


def test_following_sees_what_another_thread_commits_later(writer: LogWriter, folder: LogPath) -> None:
    writer.append(rows_window(0, 100, 1))
    found: list[ChangeBatch] = []

    def follow() -> None:
        for came in ChangeLog.open(folder).follow(0, wait_seconds=240):
            found.append(came)
            if ids([came])[-1][1] == 99:
                return

    reader = threading.Thread(target=follow)
    reader.start()
    for n in range(1, 20):
        writer.append(rows_window(n * 100, n * 100 + 100, n + 1))
        time.sleep(0.005)
    writer.append(rows_window(2000, 2100, 99))
    reader.join(240)
    assert not reader.is_alive()
    assert ids(found) == [(n, n) for n in range(1, 21)] + [(21, 99)]


def test_following_ends_when_no_row_arrives_in_time(filled: LogPath) -> None:
    began = time.monotonic()
    assert len(list(ChangeLog.open(filled).follow(0, wait_seconds=0.3))) == 2
    assert time.monotonic() - began >= 0.3


def test_a_reader_finds_schemas_written_after_it_was_opened(writer: LogWriter, folder: LogPath) -> None:
    log = ChangeLog.open(folder)
    writer.append(rows_window(0, 100, 1))
    assert len(list(log.follow(0))) == 1
    writer.append(rows_window(100, 200, 2, schema=OTHER))
    assert [found.schema for found in log.follow(1)] == [OTHER]


def test_a_new_commit_seen_by_two_threads_counts_once(
    writer: LogWriter, folder: LogPath, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer.append(Window(start=ZERO, end=Lsn(10)))
    log = ChangeLog.open(folder)
    assert log.newest() == 1
    writer.append(Window(start=Lsn(10), end=Lsn(20)))
    looks = ChangeLog._commit_exists
    others: list[int] = []

    def another_looks_too(mine: ChangeLog, commit: int) -> bool:
        found = looks(mine, commit)
        if found and not others:
            others.append(0)  # only once
            others.append(mine.newest())
        return found

    monkeypatch.setattr(ChangeLog, "_commit_exists", another_looks_too)
    assert log.newest() == 2
    assert others == [0, 2]
    assert log.newest() == 2


def test_the_newest_commit_is_found_again_as_the_log_grows(writer: LogWriter, folder: LogPath) -> None:
    log = ChangeLog.open(folder)
    assert log.newest() == 0
    for n in range(3):
        writer.append(window(n, n + 1))
        assert log.newest() == n + 1


# --- schemas -----------------------------------------------------------------------------------------------


def test_a_schema_is_written_once_and_a_new_one_gets_a_new_version(writer: LogWriter, folder: LogPath) -> None:
    wider = named("public", "things", SHOP.relation, like=SHOP)
    renamed = named("public", "renamed", SHOP.relation)
    writer.append(rows_window(0, 100, 1))
    writer.append(rows_window(100, 200, 2, schema=wider))
    writer.append(rows_window(200, 300, 3, schema=renamed))
    bodies = [body for header in ChangeLog.open(folder).headers(0) for body in header.bodies if body.table]
    assert [(body.table, body.schema) for body in bodies] == [(1, 1), (1, 1), (1, 2)]
    assert [found.schema for found in ChangeLog.open(folder).follow(0)] == [SHOP, SHOP, renamed]


def test_a_recreated_table_is_another_table(writer: LogWriter, folder: LogPath) -> None:
    writer.append(rows_window(0, 100, 1))
    writer.append(rows_window(100, 200, 2, schema=named("public", "things", SHOP.relation + 1)))
    assert [body.table for header in ChangeLog.open(folder).headers(0) for body in header.bodies if body.table] == [
        1,
        2,
    ]


def test_a_table_keeps_its_number_over_a_restart(filled: LogPath) -> None:
    writer = LogWriter(filled, SOURCE)
    header = writer.append(window(300, 400, batch(OTHER, insert(6)), batch(SHOP, insert(7), first=1)))
    assert header is not None
    writer.close()
    assert [(body.table, body.schema) for body in header.bodies if body.table] == [(2, 1), (1, 1)]
    log = ChangeLog.open(filled)
    log.schemas.load()
    assert [version.schema for version in log.schemas.latest()] == [SHOP, OTHER]


# --- the index ---------------------------------------------------------------------------------------------


@pytest.fixture
def index(writer: LogWriter, folder: LogPath) -> LogIndex:
    """Five commits: 1 and 4 are empty.

    Commit 2 has rows 1 and 2 of table 1, commit 3 row 3 of table 1 and row 4 of table 2, commit 5 row 5 of table 1.
    """
    writer.append(window(0, 100))
    writer.append(rows_window(100, 200, 1, 2))
    writer.append(window(200, 300, batch(SHOP, insert(3)), batch(OTHER, insert(4), first=1)))
    writer.append(window(300, 400))
    writer.append(rows_window(400, 500, 5))
    return LogIndex(ChangeLog.open(folder))


def test_an_empty_index_has_positions(index: LogIndex) -> None:
    assert (index.last_commit, index.position, index.rows, index.rows_captured(1)) == (0, ZERO, 0, 0)
    assert index.next_seq(0) == 1
    assert index.pending(1, 0, 99) == []
    assert index.commit_at(Lsn(1000)) == 0


def test_an_index_grows_to_a_number_and_then_further(index: LogIndex) -> None:
    index.grow(3)
    assert (index.last_commit, index.position, index.rows, index.transactions) == (3, Lsn(300), 4, 2)
    assert (index.rows_captured(1), index.rows_captured(2)) == (3, 1)
    index.grow()
    index.grow()
    assert (index.last_commit, index.position, index.rows, index.transactions) == (5, Lsn(500), 5, 3)
    assert (index.rows_captured(1), index.rows_captured(2), index.rows_captured(3)) == (4, 1, 0)
    assert [index.next_seq(commit) for commit in range(6)] == [1, 1, 3, 5, 5, 6]
    assert index.end_of(2) == Lsn(200)
    assert index.bytes > 0


@pytest.mark.parametrize(
    ("position", "commit"),
    [(0, 0), (99, 0), (100, 1), (150, 1), (200, 2), (399, 3), (400, 4), (499, 4), (500, 5), (9999, 5)],
)
def test_a_position_is_after_the_commits_that_end_at_or_before_it(index: LogIndex, position: int, commit: int) -> None:
    index.grow()
    assert index.commit_at(Lsn(position)) == commit


@pytest.mark.parametrize(
    ("table", "seq", "to", "commits"),
    [
        (1, 0, 5, [2, 3, 5]),
        (1, 1, 5, [2, 3, 5]),  # the first commit holds rows 1 and 2
        (1, 2, 5, [3, 5]),
        (1, 3, 5, [5]),
        (1, 5, 5, []),
        (1, 0, 4, [2, 3]),
        (1, 0, 1, []),
        (2, 0, 5, [3]),
        (2, 4, 5, []),
        (9, 0, 5, []),
    ],
)
def test_pending_slices_are_those_with_rows_after_the_tables_seq(
    index: LogIndex, table: int, seq: int, to: int, commits: list[int]
) -> None:
    index.grow()
    assert [found.last for found in index.pending(table, seq, to)] == commits


def test_a_slice_names_the_commits_of_its_rows(index: LogIndex, folder: LogPath) -> None:
    index.grow()
    (found,) = index.pending(2, 0, 5)
    assert (found.first, found.last, found.schema, found.rows, found.last_seq) == (3, 3, 1, 1, 4)
    log = ChangeLog.open(folder)
    assert ids(list(log.read(found.first, found.last, tables=[2]))) == [(4, 4)]


def test_an_index_does_not_grow_over_a_gap(index: LogIndex, folder: LogPath) -> None:
    (folder / "hot" / f"{3:020d}.arrow").unlink()
    with pytest.raises(LogCorrupt, match="missing"):
        index.grow()
    assert (index.last_commit, index.rows_captured(1)) == (2, 2)
