"""Named readers: the log saves each reader's offset, so that it continues without a gap."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tailrace.changelog.maintain.retention import RetentionPolicy, hold_usages, trim
from tailrace.changelog.maintain.sealer import Sealer
from tailrace.changelog.read import consumers
from tailrace.changelog.read.consumers import EXPIRE_SECONDS, TableProgress, read_holds, write_table_progress
from tailrace.changelog.read.reader import ChangeLog
from tailrace.errors import ConfigError, LogTrimmed
from tailrace.model.schema import TableId
from tests.support.changes import SHOP
from tests.support.logs import OTHER, THIRD, Diary, in_order, inserts, read_all, rows_of, seal
from tests.support.windows import named


def seqs(batches: Any) -> list[int]:
    return [row.seq for row in in_order(rows_of(batches))]


def stored(path: Path, name: str = "reader") -> dict[str, Any]:
    found: dict[str, Any] = json.loads((path / "consumers" / f"{name}.json").read_text())
    return found


def read_and_die(path: Path, batches: int, **how: Any) -> list[int]:
    """A reader that fails while it works on its last batch."""
    follower = ChangeLog.open(path).follow(consumer="reader", **how)
    found = list(itertools.islice(follower, batches))
    del follower
    return seqs(found)


# --- the offset ----------------------------------------------------------------------------------------------


def test_a_reader_continues_where_it_stopped(diary: Diary) -> None:
    log = ChangeLog.open(diary.path)
    for commit in range(1, 4):
        diary.commit(inserts(commit), inserts(commit, schema=OTHER))
        assert in_order(rows_of(log.follow(consumer="reader"))) == diary.rows(commit - 1)
        assert list(log.follow(consumer="reader")) == []
        seal(diary.path)
    assert (stored(diary.path)["commit"], stored(diary.path)["table"]) == (3, None)


def test_readers_of_different_names_are_independent(diary: Diary) -> None:
    diary.commit(inserts(1))
    log = ChangeLog.open(diary.path)
    assert seqs(log.follow(consumer="one")) == [1]
    diary.commit(inserts(2))
    assert seqs(log.follow(consumer="two")) == [1, 2]
    assert seqs(log.follow(consumer="one")) == [2]


def test_an_explicit_start_is_saved_even_if_no_row_arrives(diary: Diary) -> None:
    log = ChangeLog.open(diary.path)
    for key in range(3):
        diary.commit(inserts(key))
    assert read_and_die(diary.path, 1) == [1]
    assert list(log.follow(3, consumer="reader")) == []
    diary.commit(inserts(3))
    assert seqs(log.follow(consumer="reader")) == [4]


@pytest.mark.parametrize("sealed", [False, True])
def test_a_batch_counts_as_read_when_the_next_one_is_requested(diary: Diary, sealed: bool) -> None:
    for key in range(4):
        diary.commit(inserts(key), inserts(key, schema=OTHER))
        if sealed:
            seal(diary.path, join=False)
    expected = [row.seq for row in diary.rows(schema=SHOP)]
    for index in range(4):
        assert read_and_die(diary.path, 2 if index else 1, table="public.things") == (
            expected[index - 1 : index + 1] if index else expected[:1]
        )
    assert seqs(ChangeLog.open(diary.path).follow(table="public.things", consumer="reader")) == expected[3:]


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize("batches", [1, 2, 3, 4, 5, 6])
def test_a_reader_of_all_tables_that_failed_repeats_at_most_the_commit_it_was_in(
    diary: Diary, sealed: bool, batches: int
) -> None:
    for key in range(3):
        diary.commit(inserts(key), inserts(key, schema=OTHER))
    if sealed:
        seal(diary.path)
    assert len(read_and_die(diary.path, batches)) == batches
    whole = (batches - 1) // 2
    assert in_order(rows_of(ChangeLog.open(diary.path).follow(consumer="reader"))) == diary.rows(whole)


def test_a_reader_of_all_tables_repeats_at_most_one_batch_where_only_one_table_has_rows(diary: Diary) -> None:
    for _ in range(3):
        for key in range(4):
            diary.commit(inserts(key))
        seal(diary.path, join=False)
    assert read_and_die(diary.path, 2) == list(range(1, 9))
    assert seqs(ChangeLog.open(diary.path).follow(consumer="reader")) == list(range(5, 13))


def test_a_commit_of_one_table_in_many_batches_is_resumed_in_the_middle(diary: Diary) -> None:
    for begin in range(0, 12, 3):
        diary.piece(inserts(*range(begin, begin + 3)))
    diary.finish(inserts(12))
    assert read_and_die(diary.path, 3, table="public.things") == list(range(1, 10))
    assert seqs(ChangeLog.open(diary.path).follow(table="public.things", consumer="reader")) == list(range(7, 14))


KILLED = """
import sys, time
from tailrace.changelog.read.reader import ChangeLog
for batch in ChangeLog.open(sys.argv[1]).follow(table="public.things", consumer="reader", wait_seconds=30):
    print(batch.data.column("_seq")[-1].as_py(), flush=True)
    time.sleep(0.05)
"""


def test_a_reader_that_is_killed_repeats_what_it_read_in_its_last_second_and_skips_nothing(diary: Diary) -> None:
    for key in range(100):
        diary.commit(inserts(key))
    with subprocess.Popen([sys.executable, "-c", KILLED, str(diary.path)], stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None
        read = 0
        while read < 30:
            read = int(reader.stdout.readline())
        reader.send_signal(signal.SIGKILL)
        read = max([read, *(int(line) for line in reader.stdout)])
    found = seqs(ChangeLog.open(diary.path).follow(table="public.things", consumer="reader"))
    assert found == list(range(found[0], 101))
    assert 1 < found[0] <= read


def test_reading_again_from_a_commit_moves_the_saved_offset(diary: Diary) -> None:
    for key in range(4):
        diary.commit(inserts(key))
    log = ChangeLog.open(diary.path)
    assert len(list(log.follow(consumer="reader"))) == 4
    follower = log.follow(1, consumer="reader")
    assert seqs([next(follower), next(follower)]) == [2, 3]
    follower.close()  # type: ignore[attr-defined] # it is a generator
    assert stored(diary.path)["commit"] == 2
    assert seqs(log.follow(consumer="reader")) == [3, 4]


def test_an_offset_is_saved_from_the_moment_a_reader_gives_its_name(diary: Diary) -> None:
    diary.commit(inserts(1))
    follower = ChangeLog.open(diary.path).follow(consumer="reader", expires_seconds=60.0)
    next(follower)
    (hold,) = read_holds(diary.path)
    follower.close()  # type: ignore[attr-defined] # it is a generator
    assert (hold.name, hold.kind, hold.tables, hold.commit, hold.seq) == ("reader", "consumer", None, 0, 0)
    assert hold.expires_seconds == 60.0
    assert abs(hold.seen_at - time.time()) < 30


def test_a_new_reader_of_a_trimmed_log_begins_where_no_row_is_missing(diary: Diary) -> None:
    diary.commit(inserts(1), inserts(1, schema=OTHER), inserts(1, schema=THIRD))
    seal(diary.path)
    diary.commit(inserts(2), inserts(2, schema=OTHER))
    seal(diary.path)
    diary.commit(inserts(3), inserts(3, schema=OTHER))
    write_table_progress(diary.path, [TableProgress(table=THIRD.table, numbers=(3,), commit=0, seq=0)])
    write_table_progress(
        diary.path,
        [
            TableProgress(table=THIRD.table, numbers=(3,), commit=0, seq=0),
            TableProgress(table=OTHER.table, numbers=(2,), commit=1, seq=3),
        ],
    )
    with Sealer(diary.path) as sealer:
        trim(sealer, RetentionPolicy(age_seconds=0.0), now=time.time() + 1)
    log = ChangeLog.open(diary.path)
    gone = log.trimmed()
    assert (gone.commit, {n: table.commit for n, table in gone.tables.items()}) == (0, {0: 1, 1: 2, 2: 1})
    for table, first in (("public.things", 2), ("public.other", 1), ("sales.third", 0), (None, 2)):
        follower = log.follow(table=table, consumer=f"reader-of-{table or 'all'}")
        schema = {str(schema.table): schema for schema in (SHOP, OTHER, THIRD)}.get(table or "")
        assert in_order(rows_of(follower)) == diary.rows(first, schema)
    assert {item.state for item in hold_usages(log)} == {"live"}


def test_a_reader_that_lost_rows_gets_an_error_until_it_gives_a_start(diary: Diary) -> None:
    diary.commit(inserts(1))
    next(ChangeLog.open(diary.path).follow(consumer="reader"))
    seal(diary.path)
    diary.commit(inserts(2))
    with Sealer(diary.path) as sealer:
        trim(sealer, RetentionPolicy(age_seconds=0.0), now=time.time() + EXPIRE_SECONDS + 60)
    log = ChangeLog.open(diary.path)
    for _ in range(2):
        with pytest.raises(LogTrimmed):
            list(log.follow(consumer="reader"))
    assert seqs(log.follow(1, consumer="reader")) == [2]
    assert list(log.follow(consumer="reader")) == []


# --- names and tables ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../x", "a/b", "/etc/x", "-x", ".hidden", "a\n", "a\0b", "x" * 64, "@tables", "é", "a b", "~"],
)
def test_a_name_that_could_lead_elsewhere_is_refused_and_writes_nothing(diary: Diary, name: str) -> None:
    diary.commit(inserts(1))
    before = set(os.listdir(diary.path / "consumers"))
    for use in (
        lambda: list(ChangeLog.open(diary.path).follow(consumer=name)),
        lambda: consumers.forget_consumer(diary.path, name),
    ):
        with pytest.raises(ConfigError, match="consumer's name") as caught:
            use()
        assert "nightly-export" in caught.value.hint
    assert set(os.listdir(diary.path / "consumers")) == before


@pytest.mark.parametrize("name", ["a", "nightly-export", "A_1.b", "0", "x" * 63])
def test_a_valid_name_is_accepted(diary: Diary, name: str) -> None:
    diary.commit(inserts(1))
    assert seqs(ChangeLog.open(diary.path).follow(consumer=name)) == [1]
    assert [hold.name for hold in read_holds(diary.path)] == [name]


def test_a_consumer_name_belongs_to_one_table(diary: Diary) -> None:
    diary.commit(inserts(1), inserts(2, schema=OTHER))
    log = ChangeLog.open(diary.path)
    list(log.follow(table="public.things", consumer="reader"))
    for other in (None, "public.other", 2):
        with pytest.raises(ConfigError, match="reads another table") as caught:
            list(log.follow(table=other, consumer="reader"))
        assert "--forget reader" in caught.value.hint
    for table in ("public.things", TableId("public", "things"), 1):
        assert list(log.follow(table=table, consumer="reader")) == []


def test_a_reader_follows_its_table_when_that_is_made_again(diary: Diary) -> None:
    diary.commit(inserts(1))
    log = ChangeLog.open(diary.path)
    assert seqs(log.follow(table="public.things", consumer="reader")) == [1]
    diary.commit(inserts(2, schema=named("public", "things", SHOP.relation + 1)))
    assert seqs(log.follow(table="public.things", consumer="reader")) == [2]
    assert read_holds(diary.path)[0].tables == (1, 2)


def test_a_forgotten_reader_begins_again(diary: Diary) -> None:
    diary.commit(inserts(1))
    log = ChangeLog.open(diary.path)
    list(log.follow(consumer="reader"))
    consumers.forget_consumer(diary.path, "reader")
    assert read_holds(diary.path) == []
    assert seqs(log.follow(table="public.things", consumer="reader")) == [1]


def test_forgetting_a_missing_consumer_names_the_existing_ones(diary: Diary) -> None:
    diary.commit(inserts(1))
    with pytest.raises(ConfigError, match="no such consumer") as caught:
        consumers.forget_consumer(diary.path, "reader")
    assert "no named consumers" in caught.value.hint
    list(ChangeLog.open(diary.path).follow(consumer="mine"))
    with pytest.raises(ConfigError) as caught:
        consumers.forget_consumer(diary.path, "reader")
    assert "mine" in caught.value.hint


# --- damage --------------------------------------------------------------------------------------------------

DAMAGED = [
    b"",
    b"\x00" * 100,
    b"[]",
    b"{}",
    b'{"name": "reader"}',
    b'{"name":"reader","table":null,"tables":3,"commit":1,"seq":0,"seen_at":9e9,"expires_seconds":1}',
    b'{"name":"reader","table":null,"tables":["x"],"commit":1,"seq":0,"seen_at":9e9,"expires_seconds":1}',
    b'{"name":"reader","table":null,"tables":null,"commit":"1","seq":0,"seen_at":9e9,"expires_seconds":1}',
    b'{"name":"reader","table":null,"tables":null,"commit":1,"seq":null,"seen_at":9e9,"expires_seconds":1}',
    b'{"name":"reader","table":null,"tables":null,"commit":1,"seq":0,"seen_at":"then","expires_seconds":1}',
    b'{"name":"reader","table":null,"tables":null,"commit":1,"seq":0,"seen_at":9e9,"expires_seconds":"x"}',
    b'{"name":7,"table":null,"tables":null,"commit":1,"seq":0,"seen_at":9e9,"expires_seconds":1}',
]


def test_a_flipped_bit_in_a_saved_offset_never_moves_a_reader(diary: Diary) -> None:
    for key in range(12):
        diary.commit(inserts(key))
    log = ChangeLog.open(diary.path)
    follower = log.follow(consumer="reader")
    assert seqs(itertools.islice(follower, 3)) == [1, 2, 3]
    del follower
    path = diary.path / "consumers" / "reader.json"
    content = path.read_bytes()
    for bit in range(0, len(content) * 8, 9):
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        assert seqs([next(log.follow(consumer="reader"))]) in ([1], [3]), bytes(changed)


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_offset_holds_nothing_and_its_reader_begins_again(diary: Diary, content: bytes) -> None:
    diary.commit(inserts(1))
    seal(diary.path)
    diary.commit(inserts(2))
    log = ChangeLog.open(diary.path)
    (diary.path / "consumers" / "reader.json").write_bytes(content)
    assert read_holds(diary.path) == []
    assert hold_usages(log) == []
    assert seqs(log.follow(consumer="reader")) == [1, 2]
    (diary.path / "consumers" / "reader.json").write_bytes(content)
    with Sealer(diary.path) as sealer:
        trim(sealer, RetentionPolicy(age_seconds=0.0), now=4e9)
    assert read_all(diary.path, 1) == diary.rows(1)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b'{"at": 1.0, "tables": 7}',
        b'{"at": 1.0, "tables": [{}]}',
        b'{"at": "x", "tables": []}',
        b'{"at": 1.0, "tables": [{"schema": "a", "table": "b", "numbers": 1, "commit": 1, "seq": 1}]}',
        b'{"at": 1.0, "tables": [{"schema": "a", "table": "b", "numbers": [1], "commit": null, "seq": 1}]}',
    ],
)
def test_damaged_table_progress_holds_nothing(diary: Diary, content: bytes) -> None:
    diary.commit(inserts(1))
    (diary.path / "consumers" / "@tables.json").write_bytes(content)
    assert read_holds(diary.path) == []
    assert consumers.read_table_progress(diary.path) == []


def test_table_progress_is_read_back_and_replaced_by_the_next_report(diary: Diary) -> None:
    mine = TableProgress(table=TableId("a.b", 'c"d'), numbers=(1, 4), commit=7, seq=9)
    yours = TableProgress(table=TableId("x", "y"), numbers=(), commit=0, seq=0)
    write_table_progress(diary.path, [mine, yours])
    assert consumers.read_table_progress(diary.path) == [mine, yours]
    assert [(hold.name, hold.kind, hold.tables, hold.commit, hold.seq) for hold in read_holds(diary.path)] == [
        ('a.b.c"d', "table", (1, 4), 7, 9),
        ("x.y", "table", (), 0, 0),
    ]
    assert not any(hold.is_expired(now=1e12) for hold in read_holds(diary.path))
    write_table_progress(diary.path, [yours])
    assert consumers.read_table_progress(diary.path) == [yours]
