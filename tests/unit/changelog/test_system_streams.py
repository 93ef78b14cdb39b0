"""The streams `schema` and `message` are read, kept and sealed like tables.

They never disturb the tables.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tailrace.changelog.read.index import LogIndex
from tailrace.changelog.read.reader import ChangeLog
from tailrace.changelog.write.writer import LogWriter
from tailrace.errors import ConfigError
from tailrace.model import change
from tailrace.model.change import Operation
from tailrace.model.schema import Column, TableSchema
from tailrace.model.system_streams import MESSAGE_STREAM, SCHEMA_STREAM_NUMBER
from tests.support.changes import SHOP, Change, insert
from tests.support.logs import OTHER, Diary, Given, glob_rows, in_order, inserts, read_all, rows_of, seal
from tests.support.windows import SOURCE, named

WIDER = replace(SHOP, columns=(*SHOP.columns, Column(name="added", source_type="bool", type=pa.bool_())))


def messages_of(*messages: tuple[str, bytes], transactional: bool = True) -> Given:
    """Return messages as a source sends them."""
    return MESSAGE_STREAM, [
        Change(
            op=Operation.MESSAGE.value, values={"prefix": prefix, "content": content, "transactional": transactional}
        )
        for prefix, content in messages
    ]


def announced(path: Path) -> list[tuple[int, int, int, str]]:
    found = rows_of(ChangeLog.open(path).follow(table="schema"))
    assert {row.values[change.OP] for row in found} <= {"schema"}
    return [(row.seq, row.values["table"], row.values["version"], row.values["table_name"]) for row in found]


# --- schema --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sealed", [False, True])
def test_each_version_is_announced_once_at_its_first_row(diary: Diary, sealed: bool) -> None:
    diary.commit(inserts(1))
    diary.commit(inserts(2), inserts(3, schema=OTHER), (WIDER, [insert(4), insert(5)]))
    diary.commit((WIDER, [insert(6)]), inserts(7, schema=OTHER))
    diary.commit((SHOP, [insert(8)]))
    diary.commit(inserts(9))
    if sealed:
        seal(diary.path)
    assert announced(diary.path) == [(1, 1, 1, "things"), (3, 2, 1, "other"), (4, 1, 2, "things"), (8, 1, 3, "things")]
    assert read_all(diary.path) == diary.rows()


def test_a_record_has_the_offset_and_the_definition_of_its_schema(diary: Diary) -> None:
    diary.commit()
    diary.commit(inserts(1, schema=OTHER), (WIDER, [insert(2, added=True)]))
    (_, row) = rows_of(ChangeLog.open(diary.path).follow(table="schema"))
    mine = diary.rows()[1].values
    for name in (change.POSITION, change.TX, change.TX_INDEX, change.COMMITTED_AT):
        assert row.values[name] == mine[name]
    assert (row.values["schema_name"], row.values["table_name"]) == ("public", "things")
    assert TableSchema.from_json(json.loads(row.values["definition"])) == WIDER


def test_the_schema_stream_is_followed_from_a_commit_and_by_name(diary: Diary) -> None:
    diary.commit(inserts(1))
    diary.commit(inserts(2, schema=OTHER))
    seal(diary.path)
    diary.commit((WIDER, [insert(3)]))
    log = ChangeLog.open(diary.path)
    assert [[row.seq for row in rows_of(log.follow(after, table="schema"))] for after in range(4)] == [
        [1, 2, 3],
        [2, 3],
        [3],
        [],
    ]
    assert [row.seq for row in rows_of(log.follow(table="schema", consumer="schemas"))] == [1, 2, 3]
    assert list(log.follow(table="schema", consumer="schemas")) == []
    assert [row["table"] for row in glob_rows(diary.path, SCHEMA_STREAM_NUMBER)] == [1, 2]


def test_schema_records_use_no_row_numbers_and_are_not_among_the_rows(diary: Diary) -> None:
    diary.commit(inserts(1), inserts(2, schema=OTHER))
    seal(diary.path)
    diary.commit((WIDER, [insert(3)]))
    log = ChangeLog.open(diary.path)
    assert [row.seq for row in in_order(rows_of(log.follow(0)))] == [1, 2, 3]
    index = LogIndex(log)
    index.grow()
    assert (index.rows, index.rows_captured(1), index.rows_captured(2)) == (3, 2, 1)
    log.schemas.load()
    assert [version.schema for version in log.schemas.latest()] == [WIDER, OTHER]


CHILD = """
import sys
from pathlib import Path
from tests.support.logs import Diary, OTHER, inserts
diary = Diary(Path(sys.argv[1]))
diary.commit(inserts(2), inserts(3, schema=OTHER))
"""


@pytest.mark.parametrize("failpoint", ["log.schema_recorded", "log.before_write", "log.after_link"])
def test_a_version_is_announced_once_when_its_writer_died_around_its_commit(
    diary: Diary, failpoint: str, tmp_path: Path
) -> None:
    diary.commit(inserts(1))
    diary.close()
    armed = {"TAILRACE_FAILPOINT": failpoint, "TAILRACE_FAILPOINT_LOG": str(tmp_path / "hits")}
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(diary.path)],
        env={**os.environ, **armed, "PYTHONPATH": os.getcwd()},
        start_new_session=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    diary.writer = LogWriter(diary.path, SOURCE)
    if diary.writer.commit == 1:
        diary.commit(inserts(2), inserts(3, schema=OTHER))
    diary.commit(inserts(4, schema=OTHER), inserts(5, schema=named("public", "new", 77)))
    assert announced(diary.path) == [(1, 1, 1, "things"), (3, 2, 1, "other"), (5, 3, 1, "new")]
    seal(diary.path)
    assert len(announced(diary.path)) == 3


def test_a_version_without_rows_is_announced_with_the_next(diary: Diary) -> None:
    """A writer recorded it for a transaction that never arrived, and died."""
    diary.commit(inserts(1))
    diary.writer._schemas.record(OTHER)
    diary.reopen()
    diary.commit(inserts(2))
    assert announced(diary.path) == [(1, 1, 1, "things")]
    diary.commit(inserts(3), (WIDER, [insert(4)]))
    assert announced(diary.path) == [(1, 1, 1, "things"), (4, 2, 1, "other"), (4, 1, 2, "things")]
    diary.commit(inserts(5, schema=OTHER))
    assert len(announced(diary.path)) == 3
    seal(diary.path)
    assert len(announced(diary.path)) == 3
    assert [row.seq for row in rows_of(ChangeLog.open(diary.path).follow(table="schema", consumer="s"))] == [1, 4, 4]


# --- message -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sealed", [False, True])
def test_messages_are_kept_in_order_and_are_not_among_the_rows_of_tables(diary: Diary, sealed: bool) -> None:
    diary.commit(inserts(1))
    diary.commit(messages_of(("app", b"\x00\xff"), ("", b"")), inserts(2))
    diary.commit(messages_of(("late", b"x"), transactional=False))
    diary.commit(inserts(3))
    if sealed:
        seal(diary.path)
    log = ChangeLog.open(diary.path)
    found = rows_of(log.follow(table="message"))
    assert found == diary.rows(schema=MESSAGE_STREAM)
    assert [(row.seq, row.values["prefix"], row.values["content"], row.values["transactional"]) for row in found] == [
        (2, "app", b"\x00\xff", True),
        (3, "", b"", True),
        (5, "late", b"x", False),
    ]
    tables = [row for row in diary.rows() if row.schema == SHOP]
    assert in_order(rows_of(log.follow(0))) == tables
    assert [entry[1] for entry in announced(diary.path)] == [1]
    log.schemas.load()
    assert [version.schema for version in log.schemas.latest()] == [SHOP]


def test_messages_have_positions_in_pieces_too(diary: Diary) -> None:
    diary.piece(messages_of(("a", b"1")), inserts(1))
    diary.finish(messages_of(("b", b"2")))
    seal(diary.path)
    assert rows_of(ChangeLog.open(diary.path).follow(table="message")) == diary.rows(schema=MESSAGE_STREAM)


def test_a_new_writer_finds_the_streams(diary: Diary) -> None:
    diary.commit(messages_of(("a", b"1")), inserts(1))
    diary.reopen()
    diary.commit(messages_of(("b", b"2")), (WIDER, [insert(2)]))
    assert rows_of(ChangeLog.open(diary.path).follow(table="message")) == diary.rows(schema=MESSAGE_STREAM)
    assert sorted(path.name for path in (diary.path / "schemas").iterdir()) == ["0", "1", "2"]


def test_an_empty_stream_can_be_followed(diary: Diary) -> None:
    diary.commit(inserts(1))
    log = ChangeLog.open(diary.path)
    assert list(log.follow(table="message")) == []
    following = log.follow(table="message", wait_seconds=None, consumer="listener")
    diary.commit(messages_of(("a", b"1")))
    assert rows_of([next(following)]) == diary.rows(schema=MESSAGE_STREAM)
    del following
    with pytest.raises(ConfigError, match="no rows of this table"):
        list(log.follow(table="messages"))


def test_tables_of_the_source_named_like_the_streams_are_tables(diary: Diary) -> None:
    mine: list[Any] = [named("public", "schema", 7), named("public", "message", 8)]
    diary.commit(*(inserts(n, schema=schema) for n, schema in enumerate(mine)), messages_of(("a", b"b")))
    seal(diary.path)
    log = ChangeLog.open(diary.path)
    for schema in mine:
        assert rows_of(log.follow(table=str(schema.table))) == diary.rows(schema=schema)
    assert rows_of(log.follow(table="message")) == diary.rows(schema=MESSAGE_STREAM)
    assert len(announced(diary.path)) == 2
