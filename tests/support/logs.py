"""A log and, beside it, a diary of every row that went in: what a reader must find, however the rows lie now."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tailrace.changelog.maintain.sealer import Sealer
from tailrace.changelog.read.reader import ChangeLog
from tailrace.changelog.write.writer import LogWriter
from tailrace.model import change
from tailrace.model.batch import ChangeBatch
from tailrace.model.position import Lsn
from tailrace.model.schema import Column, TableSchema
from tailrace.storage.files import LogPath, arrow_source, relative_name
from tests.support.changes import KEYLESS, SHOP, Change, delete, insert, move, truncate, update
from tests.support.windows import SOURCE, batch, finishing_window, named, open_window, window

OTHER = named("public", "other", 2)
THIRD = named("sales", "third", 3)
WIDER = replace(SHOP, columns=(*SHOP.columns, Column(name="added", source_type="bool", type=pa.bool_())))
RETYPED = replace(SHOP, columns=(*SHOP.columns[:-1], Column(name="n", source_type="int8", type=pa.int64())))
KEYLESS_OTHER = named("public", "keyless", 9, like=KEYLESS)
STEP = 100
"""Positions between two commits of a diary."""

only_on_disk = pytest.mark.parametrize("where", ["disk"])
"""For a test of a module that otherwise runs in an object store too."""
OFTEN = ("disk", "store") if os.environ.get("TAILRACE_THOROUGH") else ("disk",)
mostly_on_disk = pytest.mark.parametrize("where", OFTEN)
"""For one that takes long; in a store it runs where there is time."""

Given = tuple[TableSchema, Sequence[Change]]


class Row(NamedTuple):
    """A row as a reader gets it."""

    seq: int
    schema: TableSchema
    values: dict[str, Any]


@dataclass(frozen=True)
class Noted:
    """A row that went in, and the commit it is in."""

    commit: int
    row: Row


@contextmanager
def quick_folder(other: Path) -> Iterator[Path]:
    """A folder in memory, where making a file durable costs nothing; the other one where there is no such."""
    memory = Path("/dev/shm")
    if not (memory.is_dir() and os.access(memory, os.W_OK)):
        yield other
        return
    with tempfile.TemporaryDirectory(dir=memory, prefix="tailrace-test-") as folder:
        yield Path(folder)


def inserts(*keys: int, schema: TableSchema = SHOP, **values: Any) -> Given:
    """Rows of a table for `Diary.commit`."""
    return schema, [insert(key, **{"name": f"n{key}", **values}) for key in keys]


class Diary:
    """The writer of a log that notes what it wrote."""

    def __init__(self, path: LogPath) -> None:
        self.path: Any = path  # each test takes of it what the place that it runs in has
        self.noted: list[Noted] = []
        self._pieces: list[Row] = []
        self.writer = LogWriter(path, SOURCE)

    def reopen(self) -> None:
        """End as a process that is killed ends, as far as the log goes, and begin again."""
        self.writer._lease.release()
        self._pieces = []
        self.writer = LogWriter(self.path, SOURCE)

    def close(self) -> None:
        self.writer.close()

    def commit(self, *rows: Given, transactions: int = 1, at: int = 0) -> int:
        """One commit, made at this time (µs since 1970); without rows it only moves the position."""
        begin, end = self.writer.position.value, self.writer.position.value + STEP
        self._pieces = []
        batches = self._batches(rows, str(Lsn(end)), at)
        given = window(begin, end, *batches, transactions=transactions)
        header = self.writer.append(replace(given, last_committed_at=at) if at else given)
        assert header is not None
        self._note(header.commit, batches)
        return header.commit

    def piece(self, *given: Given, continues: bool | None = None) -> None:
        """A part of a transaction that goes on."""
        begin = self.writer.position.value
        goes_on = bool(self._pieces) if continues is None else continues
        if not goes_on:
            self._pieces = []
        batches = self._batches(given, "")
        assert self.writer.append(open_window(begin, *batches, continues=goes_on)) is None
        self._pieces += _rows(batches, self.writer.next_seq + len(self._pieces))

    def finish(self, *given: Given, more: int = 0) -> int:
        """The rest of that transaction, and so many positions after it in the same window."""
        begin = self.writer.position.value
        ended = str(Lsn(begin + STEP))
        batches = self._batches(given, ended)
        first = self.writer.next_seq
        header = self.writer.append(finishing_window(begin, begin + STEP + more, *batches, continued_end=begin + STEP))
        assert header is not None
        for row in self._pieces:
            row.values[change.POSITION] = ended
        rows = [*self._pieces, *_rows(batches, first + len(self._pieces))]
        self.noted += [Noted(header.commit, row) for row in rows]
        self._pieces = []
        return header.commit

    def _batches(self, given: Sequence[Given], position: str, at: int = 0) -> list[ChangeBatch]:
        """One transaction's rows, as a source hands them over; the pieces before it are counted."""
        made, first = [], 0
        for schema, rows in given:
            found = batch(schema, *rows, first=first)
            begin = len(self._pieces) + first
            data = found.data
            for name, values in (
                (change.POSITION, [position] * len(rows)),
                (change.TX, [self.writer.commit + 1] * len(rows)),
                (change.TX_INDEX, list(range(begin, begin + len(rows)))),
                (change.COMMITTED_AT, [at] * len(rows)),
            ):
                place = data.schema.get_field_index(name)
                field = data.schema.field(place)
                data = data.set_column(place, field, pa.array(values, field.type))
            made.append(replace(found, data=data))
            first += len(rows)
        return made

    def _note(self, commit: int, batches: Sequence[ChangeBatch]) -> None:
        first = self.writer.next_seq - sum(map(len, batches))
        self.noted += [Noted(commit, row) for row in _rows(batches, first)]

    def rows(self, after: int = 0, schema: TableSchema | None = None) -> list[Row]:
        """What was written after a commit, of one table or of all."""
        return [
            item.row
            for item in self.noted
            if item.commit > after and (schema is None or item.row.schema.relation == schema.relation)
        ]


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
    diary.commit((RETYPED, [insert(10, n=1 << 40), *move(10, 11)]), (KEYLESS_OTHER, [insert({"a": None}, b=None)]))
    diary.commit()


def _rows(batches: Sequence[ChangeBatch], first: int) -> list[Row]:
    found = []
    for made in batches:
        for values in made.data.to_pylist():
            whole = {field.name: values.get(field.name) for field in made.schema.change_schema()}
            whole[change.SEQ] += first
            found.append(Row(whole[change.SEQ], made.schema, whole))
    return found


def rows_of(batches: Iterable[ChangeBatch]) -> list[Row]:
    """The rows of batches in the order they came, which must be that of `_seq` in each table."""
    found: list[Row] = []
    for got in batches:
        assert len(got), "a batch without rows"
        data = got.with_all_columns()
        assert set(got.schema.change_schema().names) - set(got.data.schema.names) <= set(change.OPTIONAL)
        rows = [Row(values[change.SEQ], got.schema, values) for values in data.to_pylist()]
        assert (got.moves, got.truncates, got.unfit) == _counts(rows)
        found += rows
    for relation in {row.schema.relation for row in found}:
        seqs = [row.seq for row in found if row.schema.relation == relation]
        assert seqs == sorted(seqs), f"out of order: {seqs}"
    return found


def _counts(rows: Sequence[Row]) -> tuple[int, int, int]:
    return (
        sum(row.values[change.MOVED_FROM] is not None for row in rows),
        sum(row.values[change.OP] == "truncate" for row in rows),
        sum(len(row.values[change.UNFIT] or ()) for row in rows),
    )


def in_order(rows: Iterable[Row]) -> list[Row]:
    """Rows of all tables come commit by commit, table by table within; this is their order in the log."""
    return sorted(rows, key=lambda row: row.seq)


def read_all(path: LogPath, after: int = 0, **how: Any) -> list[Row]:
    """What a reader that comes now finds."""
    return in_order(rows_of(ChangeLog.open(path).follow(after, **how)))


def seal(path: LogPath, *, join: bool = True, grace_seconds: float | None = 0.0, **how: Any) -> None:
    """Seal everything, join what can be joined, and remove what was replaced unless that is not wanted."""
    with Sealer(path, **how) as sealer:
        sealer.seal()
        if join:
            sealer.merge_seals()
        if grace_seconds is not None:
            sealer.clean(grace_seconds)


def glob_rows(path: LogPath, table: int) -> list[dict[str, Any]]:
    """Every row that the documented glob of a table shows, in the order of its files' names; in a store, where there
    is no glob, that its files hold."""
    found: list[dict[str, Any]] = []
    for file in sorted(_shown(path, table), key=lambda file: file.name):
        found += pq.read_table(arrow_source(file), use_threads=False).to_pylist()
    return found


def _shown(path: LogPath, table: int) -> list[LogPath]:
    if isinstance(path, Path):
        return list((path / "cold" / str(table)).glob("*.parquet"))
    log = ChangeLog.open(path)
    log.seal_index.refresh()
    return log.files(table) if any(file.table == table for seal in log.seal_index.seals for file in seal.files) else []


def stored_files(path: LogPath, *patterns: str) -> set[str]:
    """The files below the log's folder that match, by their path."""
    return {
        relative_name(path, found)
        for pattern in patterns
        for found in path.glob(pattern)
        if not found.is_dir() or found.is_symlink()
    }


def assert_nothing_left_over(path: LogPath) -> None:
    """Every file in the log is named by something that is in force."""
    log = ChangeLog.open(path)
    newest = log.newest()
    log.seal_index.refresh()
    gone = log.trimmed()
    names = {f"cold/{seal.stem}{end}" for seal in log.seal_index.seals for end in (".json", ".commits.parquet")}
    files = {
        file.file
        for seal in log.seal_index.seals
        for file in seal.files
        if not gone.is_trimmed(file.table, file.last_seq)
    }
    assert stored_files(path, "cold/*.json", "cold/*.parquet") == names
    assert stored_files(path, "cold/files/*/*", "cold/files/*/.*") == files
    hot = {f"hot/{commit:020d}.arrow" for commit in range(max(log.seal_index.last_commit, gone.commit) + 1, newest + 1)}
    if newest:
        hot.add(f"hot/{newest:020d}.arrow")
    assert stored_files(path, "hot/*", "hot/.*") == hot
    big = {piece.file for commit in sorted(hot) for piece in log.header(int(Path(commit).name[:20])).big}
    assert stored_files(path, "big/*/*") == big
    assert stored_files(path, ".*.tmp", "cold/.*", "schemas/**/.*.tmp") == set()
    if not isinstance(path, Path):
        return
    views = [os.readlink(view) for view in (path / "cold").iterdir() if view.is_symlink()]
    folders = (path / "cold" / "views").iterdir() if (path / "cold" / "views").is_dir() else ()
    assert sorted(f"views/{folder.name}" for folder in folders) == sorted(views)
    shown = {os.path.relpath(link.resolve(), path.resolve()) for link in (path / "cold").glob("[0-9]*/*.parquet")}
    assert shown == files
