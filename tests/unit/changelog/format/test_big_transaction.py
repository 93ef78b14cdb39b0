"""A transaction too large for memory is written as it arrives and read in pieces.

It leaves nothing if it never ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from tailrace.changelog.format.commit_file import commit_path
from tailrace.changelog.maintain.sealer import Sealer
from tailrace.changelog.read.reader import ChangeLog
from tailrace.changelog.write.writer import LogWriter
from tailrace.errors import LogCorrupt
from tailrace.model import change
from tailrace.model.position import Lsn
from tailrace.storage.files import LogPath
from tests.support.changes import SHOP, delete, insert, move, update
from tests.support.logs import (
    OTHER,
    STEP,
    Diary,
    assert_nothing_left_over,
    in_order,
    inserts,
    only_on_disk,
    read_all,
    rows_of,
    seal,
    stored_files,
)
from tests.support.windows import SOURCE, batch, finishing_window, named, open_window, rows_window

PLACES = ("disk", "store")

RENAMED = named("public", "renamed", SHOP.relation)


def announced(path: LogPath) -> list[tuple[int, int, int]]:
    """`_seq`, table and version of every record of the schema stream."""
    found = rows_of(ChangeLog.open(path).follow(table="schema"))
    return [(row.seq, row.values["table"], row.values["version"]) for row in found]


def test_no_row_of_an_open_transaction_is_visible(diary: Diary) -> None:
    diary.commit(inserts(1))
    log = ChangeLog.open(diary.path)
    diary.piece(inserts(2, 3), inserts(4, schema=OTHER))
    diary.piece(inserts(5))
    assert (diary.writer.commit, diary.writer.position, diary.writer.next_seq) == (1, Lsn(STEP), 2)
    for found in (log, ChangeLog.open(diary.path)):
        assert found.newest() == 1
        assert rows_of(found.follow(0)) == diary.rows()
    assert len(stored_files(diary.path, "big/*/*")) == 2


def test_a_large_transaction_is_one_commit_read_in_pieces_with_its_positions(diary: Diary) -> None:
    diary.commit(inserts(1))
    diary.piece(inserts(2, 3), inserts(4, schema=OTHER))
    diary.piece((OTHER, [insert(5), *move(5, 6, unchanged=("big",)), delete(6)]))
    diary.piece((SHOP, [update(2, before={"id": 2, "name": "was"}), insert(7, unfit=("n",))]))
    diary.finish(inserts(8), inserts(9, schema=OTHER), more=50)
    diary.commit(inserts(10))
    assert read_all(diary.path) == diary.rows()
    batches = list(ChangeLog.open(diary.path).follow(1))
    assert [len(found) for found in batches] == [2, 1, 4, 2, 1, 1, 1]
    positions = {row.values[change.POSITION] for row in rows_of(batches[:6])}
    assert positions == {str(Lsn(2 * STEP))}
    header = ChangeLog.open(diary.path).header(2)
    assert (header.rows, header.transactions, header.start, header.end) == (11, 1, Lsn(100), Lsn(250))
    assert [body.piece for body in header.bodies if body.table] == [1, 1, 2, 3, 0, 0]
    indexes = [row.values[change.TX_INDEX] for row in in_order(rows_of(batches[:6]))]
    assert indexes == list(range(11))


def test_whole_transactions_that_follow_the_large_one_keep_their_own_positions(quick: LogPath) -> None:
    writer = LogWriter(quick, SOURCE)
    writer.append(rows_window(0, 100, 1))
    writer.append(open_window(100, batch(SHOP, insert(2))))
    later = batch(SHOP, insert(3), insert(4))
    assert later.data.column(change.POSITION).to_pylist() == ["0/0", "0/1"]
    index = later.data.schema.get_field_index(change.TX_INDEX)
    indexes = pa.array([1, 0], pa.int32())
    counted = replace(later, data=later.data.set_column(index, later.data.schema.field(index), indexes))
    writer.append(finishing_window(100, 300, counted, continued_end=200, transactions=2))
    writer.close()
    rows = rows_of(ChangeLog.open(quick).follow(1))
    assert [row.values[change.POSITION] for row in rows] == [str(Lsn(200)), "0/0", "0/1"]


def test_the_finishing_window_may_be_without_rows(diary: Diary) -> None:
    diary.piece(inserts(1, 2))
    diary.finish()
    diary.commit(inserts(3))
    assert read_all(diary.path) == diary.rows()
    assert [row.seq for row in diary.rows()] == [1, 2, 3]


def test_many_pieces_are_read_one_at_a_time(diary: Diary) -> None:
    for begin in range(0, 100, 5):
        diary.piece(inserts(*range(begin, begin + 5)))
    diary.finish(inserts(100))
    sizes = [len(found) for found in ChangeLog.open(diary.path).follow(0)]
    assert sizes == [5] * 20 + [1]
    assert read_all(diary.path) == diary.rows()


def test_pieces_are_discarded_when_the_stream_begins_again(diary: Diary) -> None:
    diary.commit(inserts(1))
    diary.piece(inserts(2), inserts(3, schema=OTHER))
    diary.piece(inserts(4))
    diary.piece(inserts(20), continues=False)
    assert len(stored_files(diary.path, "big/*/*")) == 1
    diary.finish(inserts(21))
    diary.piece(inserts(30))
    diary.commit(inserts(31))
    assert [row.values["id"] for row in read_all(diary.path)] == [1, 20, 21, 31]
    assert read_all(diary.path) == diary.rows()
    seal(diary.path)
    assert read_all(diary.path) == diary.rows()
    assert_nothing_left_over(diary.path)


def test_a_continuation_without_its_beginning_is_refused_and_writes_nothing(diary: Diary) -> None:
    diary.commit(inserts(1))
    with pytest.raises(LogCorrupt):
        diary.piece(inserts(2), continues=True)
    with pytest.raises(LogCorrupt):
        diary.finish(inserts(2))
    assert stored_files(diary.path, "big/*/*") == set()
    diary.piece(inserts(3))
    diary.reopen()
    with pytest.raises(LogCorrupt):
        diary.finish(inserts(4))
    diary.commit(inserts(5))
    assert [row.values["id"] for row in read_all(diary.path)] == [1, 5]


def test_closing_in_the_middle_leaves_nothing(diary: Diary) -> None:
    diary.commit(inserts(1))
    diary.piece(inserts(2))
    diary.close()
    assert stored_files(diary.path, "big/*/*") == set()
    diary.writer = LogWriter(diary.path, SOURCE)
    assert read_all(diary.path) == diary.rows()


def test_the_next_commit_removes_pieces_of_a_writer_that_died(diary: Diary) -> None:
    diary.commit(inserts(1))
    diary.piece(inserts(2))
    diary.piece(inserts(3))
    diary.reopen()
    assert read_all(diary.path) == diary.rows()
    diary.commit(inserts(4))
    assert read_all(diary.path) == diary.rows()
    assert stored_files(diary.path, "big/*/*") == set()


def test_an_unfinished_transaction_is_swept_and_a_finished_one_is_not(diary: Diary) -> None:
    diary.piece(inserts(1))
    diary.finish()
    kept = stored_files(diary.path, "big/*/*")
    (diary.path / "big" / f"{1:020d}" / "deadbeef0000-1.arrow").write_bytes(b"x")
    diary.reopen()
    diary.commit(inserts(2))
    assert stored_files(diary.path, "big/*/*") == kept
    assert read_all(diary.path) == diary.rows()


CHILD = """
import sys
from pathlib import Path
from tests.support.logs import Diary, inserts
diary = Diary(Path(sys.argv[1]))
diary.piece(inserts(2, 3))
diary.piece(inserts(4))
diary.finish(inserts(5))
"""


@only_on_disk
@pytest.mark.parametrize("turn", [1, 2])
def test_a_process_killed_between_two_pieces_leaves_nothing(diary: Diary, turn: int, tmp_path: Path) -> None:
    diary.commit(inserts(1))
    diary.close()
    armed = {"TAILRACE_FAILPOINT": f"log.piece_written:{turn}", "TAILRACE_FAILPOINT_LOG": str(tmp_path / "hits")}
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(diary.path)],
        env={**os.environ, **armed, "PYTHONPATH": os.getcwd()},
        start_new_session=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    assert len(stored_files(diary.path, "big/*/*")) == turn
    assert read_all(diary.path) == diary.rows()
    diary.writer = LogWriter(diary.path, SOURCE)
    diary.piece(inserts(2, 3))
    diary.finish(inserts(4))
    assert read_all(diary.path) == diary.rows()
    seal(diary.path)
    assert read_all(diary.path) == diary.rows()


# --- schemas -------------------------------------------------------------------------------------------------


def test_schemas_new_in_a_piece_are_announced_at_their_first_row(diary: Diary) -> None:
    diary.commit(inserts(1))
    diary.piece(inserts(2), inserts(3, 4, schema=OTHER))
    diary.piece((RENAMED, [insert(5)]))
    diary.finish(inserts(6, schema=RENAMED), inserts(7, schema=named("public", "late", 8)))
    assert announced(diary.path) == [(1, 1, 1), (3, 2, 1), (5, 1, 2), (7, 3, 1)]
    positions = [row.values[change.POSITION] for row in rows_of(ChangeLog.open(diary.path).follow(table="schema"))]
    assert positions == [str(Lsn(100)), *[str(Lsn(200))] * 3]
    seal(diary.path)
    assert announced(diary.path) == [(1, 1, 1), (3, 2, 1), (5, 1, 2), (7, 3, 1)]
    assert read_all(diary.path) == diary.rows()


@pytest.mark.parametrize("how", ["stream", "writer"])
def test_schemas_announced_in_discarded_pieces_are_announced_again(diary: Diary, how: str) -> None:
    diary.commit(inserts(1))
    diary.piece(inserts(2), inserts(3, schema=OTHER))
    if how == "writer":
        diary.reopen()
    diary.commit(inserts(2))
    assert announced(diary.path) == [(1, 1, 1)]
    diary.commit(inserts(3, schema=OTHER))
    assert announced(diary.path) == [(1, 1, 1), (3, 2, 1)]
    assert read_all(diary.path) == diary.rows()


# --- sealing -------------------------------------------------------------------------------------------------


def test_a_large_transaction_is_sealed_and_its_files_removed_after_the_grace_period(diary: Diary) -> None:
    for begin in (0, 100):
        for key in range(begin, begin + 3):
            diary.piece(inserts(key), inserts(key, key + 50, schema=OTHER))
        diary.finish(inserts(begin + 90))
    with Sealer(diary.path) as sealer:
        sealer.seal()
        assert read_all(diary.path) == diary.rows()
        sealer.clean(300)
        assert len(stored_files(diary.path, "big/*/*")) == 6
        sealer.clean(0)
        assert {name.split("/")[1] for name in stored_files(diary.path, "big/*/*")} == {f"{2:020d}"}
        assert not (diary.path / "big" / f"{1:020d}").exists()
        assert read_all(diary.path) == diary.rows()
        diary.commit()
        sealer.seal()
        sealer.clean(0)
    assert list((diary.path / "big").iterdir()) == []
    assert read_all(diary.path) == diary.rows()
    assert_nothing_left_over(diary.path)


def test_a_reader_in_a_large_transaction_finds_the_rest_in_sealed_files(quick: LogPath) -> None:
    for paused in range(1, 6):
        diary = Diary(quick / str(paused))
        for key in range(4):
            diary.piece(inserts(key, key + 50))
        diary.finish(inserts(9))
        reader = ChangeLog.open(diary.path).follow(0)
        found = [next(reader) for _ in range(paused)]
        diary.commit(inserts(10))
        seal(diary.path)
        assert not commit_path(diary.path, 1).exists()
        found += reader
        assert rows_of(found) == diary.rows()
        diary.close()


def test_a_damaged_piece_is_found_before_its_rows_are_delivered(diary: Diary) -> None:
    diary.piece(inserts(1, big="x" * 1000))
    diary.piece(inserts(2, big="x" * 1000))
    diary.finish()
    path = next(iter((diary.path / "big" / f"{1:020d}").glob("*-2.arrow")))
    content = bytearray(path.read_bytes())
    content[-500] ^= 4
    path.write_bytes(content)
    reader = ChangeLog.open(diary.path).follow(0)
    assert len(next(reader)) == 1
    with pytest.raises(LogCorrupt) as caught:
        next(reader)
    assert path.name in str(caught.value)
    path.unlink()
    with pytest.raises(LogCorrupt):
        list(ChangeLog.open(diary.path).follow(0))
