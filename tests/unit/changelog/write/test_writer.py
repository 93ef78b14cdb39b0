"""Appending: data and position in one commit, dense numbers, dense `_seq`, no half commit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tailrace.changelog.format.commit_file import commit_path
from tailrace.changelog.read.reader import ChangeLog
from tailrace.changelog.write.writer import LogWriter
from tailrace.errors import ConfigError, LogCorrupt, LogForeign, LogUnusable
from tailrace.model import change
from tailrace.model.batch import ChangeBatch
from tailrace.model.position import ZERO, Lsn
from tailrace.storage.files import LogPath
from tests.support.changes import SHOP, delete, insert, move, table_schema, truncate, update
from tests.support.windows import SOURCE, batch, ids, named, rows_window, window

PLACES = ("disk", "store")


def everything(folder: LogPath) -> list[tuple[int, object]]:
    return ids(list(ChangeLog.open(folder).follow(0)))


def with_seqs(given: ChangeBatch, *seqs: int) -> ChangeBatch:
    index = given.data.schema.get_field_index(change.SEQ)
    column = pa.array(seqs, pa.int64())
    return replace(given, data=given.data.set_column(index, given.data.schema.field(index), column))


def test_a_new_log_is_empty_and_has_an_id(writer: LogWriter, folder: LogPath) -> None:
    log = ChangeLog.open(folder)
    assert (writer.commit, writer.position, writer.next_seq) == (0, ZERO, 1)
    assert (log.newest(), log.last_header()) == (0, None)
    assert (log.log_id, log.source) == (writer.log_id, SOURCE)
    assert len(writer.log_id) == 32


def test_the_first_commit_has_the_position_where_the_log_begins(writer: LogWriter, folder: LogPath) -> None:
    header = writer.append(window(0x500, 0x600))
    assert header is not None
    assert (header.commit, header.start, header.end) == (1, Lsn(0x500), Lsn(0x600))
    read = ChangeLog.open(folder).header(1)
    assert replace(read, bodies_at=0) == header
    assert writer.position == Lsn(0x600)


def test_an_empty_commit_moves_the_position_and_nothing_else(filled: LogPath) -> None:
    writer = LogWriter(filled, SOURCE)
    header = writer.append(window(300, 900))
    assert header is not None
    writer.close()
    assert (header.commit, header.rows, header.bodies, header.next_seq) == (4, 0, (), 6)
    assert ChangeLog.open(filled).last_header() is not None
    assert everything(filled) == [(1, 1), (2, 2), (3, 3), (4, 4), (5, 5)]


def test_numbers_and_seq_are_dense_over_commits_and_restarts(filled: LogPath) -> None:
    for start, key in ((300, 6), (400, 7)):
        writer = LogWriter(filled, SOURCE)
        writer.append(rows_window(start, start + 100, key))
        writer.close()
    assert [header.commit for header in ChangeLog.open(filled).headers(0)] == [1, 2, 3, 4, 5]
    assert [seq for seq, _ in everything(filled)] == list(range(1, 8))
    positions = [(header.start.value, header.end.value) for header in ChangeLog.open(filled).headers(0)]
    assert positions == [(0, 100), (100, 200), (200, 300), (300, 400), (400, 500)]


def test_seq_is_rebased_in_every_batch_of_a_window(writer: LogWriter, folder: LogPath) -> None:
    other = named("public", "other", 2)
    writer.append(rows_window(0, 100, 1, 2))
    # Rows of two tables that alternate: 0 and 2 here, 1 and 3 there.
    mine = with_seqs(batch(SHOP, insert(3), insert(5)), 0, 2)
    yours = with_seqs(batch(other, insert(4), insert(6)), 1, 3)
    header = writer.append(window(100, 200, mine, yours))
    assert header is not None
    assert [(body.first_seq, body.last_seq, body.rows) for body in header.bodies if body.table] == [
        (3, 5, 2),
        (4, 6, 2),
    ]
    assert header.next_seq == 7
    assert everything(folder) == [(1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (6, 6)]


def test_a_commit_header_describes_its_rows(writer: LogWriter, folder: LogPath) -> None:
    writer.append(
        window(
            0,
            100,
            batch(SHOP, insert(1, unfit=("n",)), *move(1, 2), truncate(), update(2, unchanged=("big",))),
            transactions=3,
        )
    )
    (header,) = ChangeLog.open(folder).headers(0)
    body, announced = header.bodies
    assert (header.transactions, header.rows, header.committed_at) == (3, 5, 1_000_000)
    assert (announced.table, announced.rows, header.shapes) == (0, 1, 1)
    assert (body.moves, body.truncates, body.unfit, body.rows) == (1, 1, 1, 5)
    assert body.without == ("_before",)
    assert header.log == writer.log_id


def test_optional_columns_without_a_value_are_not_stored(writer: LogWriter, folder: LogPath) -> None:
    writer.append(window(0, 100, batch(SHOP, insert(1, name="a"), update(1, name="b"))))
    (header,) = ChangeLog.open(folder).headers(0)
    assert header.bodies[0].without == change.OPTIONAL
    (found,) = ChangeLog.open(folder).follow(0)
    assert not set(change.OPTIONAL) & set(found.data.schema.names)
    whole = found.with_all_columns()
    assert whole.schema.equals(SHOP.change_schema())
    for name in change.OPTIONAL:
        assert whole.column(name).null_count == 2
    whole.validate(full=True)


def test_every_value_of_a_row_is_read_back(writer: LogWriter, folder: LogPath) -> None:
    given = batch(
        SHOP,
        insert(1, name="né", big=None, n=-5),
        update(1, unchanged=("big", "name"), before={"id": 1, "n": 4}),
        *move(1, 2, unchanged=("big",)),
        delete(2),
        insert(3, unfit=("n",)),
    )
    writer.append(window(0, 100, given))
    (found,) = ChangeLog.open(folder).follow(0)
    expected = given.data.to_pylist()
    for row in expected:
        row["_seq"] += 1
    assert found.data.to_pylist() == expected
    assert found.schema == SHOP
    assert (found.moves, found.truncates, found.unfit) == (given.moves, given.truncates, given.unfit)


def test_columns_named_like_metadata_columns_are_read_back(writer: LogWriter, folder: LogPath) -> None:
    odd = table_schema({"_op": pa.string(), "_op_": pa.string(), "_seq": pa.int64(), "_commit": pa.int32()}, ("_seq",))
    values = {"_op": "mine", "_op_": "too", "_seq": 99, "_commit": 7}
    writer.append(window(0, 100, batch(odd, insert(values), *move({"_seq": 99}, values))))
    (found,) = ChangeLog.open(folder).follow(0)
    events = list(found.events())
    assert [event.operation.value for event in events] == ["insert", "delete", "insert"]
    assert [event.seq for event in events] == [1, 2, 3]
    assert events[0].values == values
    assert events[2].moved_from == {"_seq": 99}, "the column's own name"


def test_tables_with_similar_names_are_kept_apart(writer: LogWriter, folder: LogPath) -> None:
    names = [("a.b", "c"), ("a", "b.c"), ("A", "b.c"), ("a", "B.C"), ("a", "x" * 300), ("a", "../../x"), ("", "")]
    tables = [named(schema, name, n + 1) for n, (schema, name) in enumerate(names)]
    for n, table in enumerate(tables):
        writer.append(rows_window(n * 10, n * 10 + 10, n, schema=table))
    log = ChangeLog.open(folder)
    found = {(b.schema.table.schema, b.schema.table.name): ids([b])[0][1] for b in log.follow(0)}
    assert found == {name: n for n, name in enumerate(names)}
    assert [body.table for header in log.headers(0) for body in header.bodies if body.table] == [1, 2, 3, 4, 5, 6, 7]


def test_a_window_that_does_not_start_where_the_log_ends_is_refused(filled: LogPath) -> None:
    writer = LogWriter(filled, SOURCE)
    for start in (299, 301, 0):
        with pytest.raises(LogCorrupt, match="does not start where the log ends"):
            writer.append(rows_window(start, 400, 9))
    writer.append(rows_window(300, 400, 6))
    writer.close()
    assert everything(filled)[-1] == (6, 6)


def test_a_commit_exists_as_a_whole_or_not_at_all(writer: LogWriter, folder: LogPath) -> None:
    writer.append(rows_window(0, 100, 1))
    assert sorted(path.name for path in (folder / "hot").iterdir()) == [commit_path(folder, 1).name]


def test_a_wide_commit_has_a_header_larger_than_one_read(writer: LogWriter, folder: LogPath) -> None:
    tables = [named("public", f"t{n}", n + 1) for n in range(80)]
    batches = [batch(table, insert(n), first=n) for n, table in enumerate(tables)]
    writer.append(window(0, 100, *batches))
    assert [key for _, key in everything(folder)] == list(range(80))


def test_the_log_of_another_source_is_refused(filled: LogPath) -> None:
    for source in (replace(SOURCE, system="two"), replace(SOURCE, database="x"), replace(SOURCE, kind="postgresql")):
        with pytest.raises(LogForeign) as caught:
            LogWriter(filled, source)
        assert "`source.url`" in caught.value.hint
    LogWriter(filled, SOURCE).close()


def test_a_refused_source_releases_the_lease(filled: LogPath) -> None:
    with pytest.raises(LogForeign):
        LogWriter(filled, replace(SOURCE, system="two"))
    LogWriter(filled, SOURCE).close()


def test_a_missing_log_is_an_error_and_not_an_empty_log(tmp_path: Path) -> None:
    with pytest.raises(LogUnusable, match="no log here") as caught:
        ChangeLog.open(tmp_path / "nothing")
    assert "tailrace run" in caught.value.hint


@pytest.mark.parametrize(("path", "source"), [("", SOURCE), (3, SOURCE), (None, SOURCE), ("log", 3), ("log", None)])
def test_wrong_arguments_are_refused_before_a_file_is_written(
    path: Any, source: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as raised:
        LogWriter(path, source)
    assert raised.value.hint
    assert list(tmp_path.iterdir()) == []
