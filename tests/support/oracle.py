"""Our reading of a server's log, held against `test_decoding`'s, row by row and value by value.

`Capture` reads as a pipeline does, into a real change log, and can be cut off at any time. `expect` says which rows
the other reading makes: the rules of docs/ written down once more (a key that moves is two rows, a value that was not
sent is named, ...). `compare` finds the first difference.
"""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa

from tailrace.capture.port import Stream
from tailrace.capture.postgres.config import PostgresSettings
from tailrace.capture.postgres.source import PostgresCapture, identify
from tailrace.changelog.read.reader import ChangeLog
from tailrace.changelog.write.writer import LogWriter
from tailrace.errors import SlotBusy
from tailrace.model import change
from tailrace.model.batch import Window
from tailrace.model.position import ZERO, Lsn
from tailrace.model.system_streams import MESSAGE_STREAM
from tests.support.oracle_decoding import UNSENT, Told, ToldTransaction, Tuple, Value
from tests.support.oracle_values import Unfit, expected, plain, same
from tests.support.runtimes import LogLoop
from tests.support.workload import RENAMED, Look
from tests.support.workload_tables import Table

SLOT = "ours"
WAIT_SECONDS = 0.02
OPEN_SECONDS_MAX = 240.0
MESSAGE = (MESSAGE_STREAM.table.schema, MESSAGE_STREAM.table.name)
_MODIFIER = re.compile(r"\(-?\d+(,-?\d+)?\)")


class Capture:
    """Our reader of one database."""

    def __init__(self, url: str, folder: Path) -> None:
        self.capture = PostgresCapture(
            PostgresSettings(
                url=url, wanted=lambda table: True, messages=lambda prefix: True, slot=SLOT, publication=SLOT
            )
        )
        self._source, self._folder = identify(url), folder
        begin = self.capture.prepare(None)
        assert begin is not None
        self._log = LogWriter(folder, self._source)
        self._log.append(Window(start=ZERO, end=begin))
        self._stream: Stream | None = None
        self._watch = LockWatch(url)
        self.counts: Counter[str] = Counter()

    def look(self, look: Look) -> None:
        """Take some windows, then be cut off as told. What was not appended must come again."""
        stream = self._stream = self._stream or self._open()
        window: Window | None = None
        for _ in range(look.windows):
            window = stream.read(self._log.position, WAIT_SECONDS)
            if window is None:
                break
            self.counts.update(["windows", *(["parts"] if window.open else [])])
            if look.then == "lose the last window":
                continue  # read on without keeping it, as long as it is asked for: it is given again
            self._log.append(window)
            if not window.open and look.then != "confirm nothing":
                stream.confirm(window.end)
        if look.then == "lose the last window" and window is not None:
            self.counts["lost windows"] += 1
        if look.then != "go on":
            self._close_stream()
        if look.then == "reopen the log":
            self._log._lease.release()  # as a process that is killed lets go of it
            self._log = LogWriter(self._folder, self._source)

    def _open(self) -> Stream:
        """The server may still hold the slot for the connection that was closed."""
        deadline = time.monotonic() + OPEN_SECONDS_MAX
        while True:
            try:
                return self.capture.live(self._log.position)
            except SlotBusy:
                assert time.monotonic() < deadline
                time.sleep(WAIT_SECONDS)

    def catch_up(self) -> None:
        """Read everything that is committed by now, with the loop that a pipeline runs."""
        self._close_stream()
        runtime = LogLoop(self.capture.live, self._log, target=self.capture.committed_until())
        runtime.run(lambda: runtime.caught_up or self._watch.waited)
        assert not self._watch.waited, "the capture waited for a lock that an open transaction holds"

    def close(self) -> None:
        self._watch.close()
        self._close_stream()
        self._log.close()

    def _close_stream(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()


class LockWatch:
    """Sees whether a session of ours waits for somebody's lock, and ends the wait: it could last for ever.

    An application's transaction may stay open for as long as it likes; what reads the log has no business with it.
    """

    _WAITING = """
        select pg_terminate_backend(pid) from pg_stat_activity
        where application_name = 'tailrace' and wait_event_type = 'Lock' and now() - state_change > interval '20 s'
    """

    def __init__(self, url: str) -> None:
        self.waited = False
        self._ending = threading.Event()
        self._connection = psycopg.connect(url, autocommit=True)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._ending.wait(0.5):
            self.waited |= bool(self._connection.execute(self._WAITING).fetchall())

    def close(self) -> None:
        self._ending.set()
        self._thread.join()
        self._connection.close()


# --- our rows ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Row:
    """A change as it stands in our log, or as it should."""

    op: str
    table: tuple[str, str]
    values: dict[str, Any]
    unchanged: tuple[str, ...] = ()
    before: dict[str, Any] | None = None
    moved_from: dict[str, Any] | None = None
    types: dict[str, str] = field(default_factory=dict)
    """Of each column the server's type, in the table's order; empty where nobody says."""
    kinds: dict[str, pa.DataType] = field(default_factory=dict)
    unfit: dict[str, str] = field(default_factory=dict)
    tx: int = 0
    index: int = 0
    position: str = ""
    committed_at: int | None = None
    """Of a message outside of a transaction nobody knows."""


def our_rows(folder: Path) -> list[Row]:
    """Every row of the log, in order of `_seq`."""
    log = ChangeLog.open(folder)
    found: list[tuple[int, Row]] = []
    for tables in (None, log.table_numbers(MESSAGE_STREAM.table.name)):
        for batch in log.read(1, log.newest(), tables=tables):
            found += _rows_of(batch.schema, batch.with_all_columns())
    found.sort(key=lambda pair: pair[0])
    assert [seq for seq, _ in found] == list(range(1, len(found) + 1)), "`_seq` has a gap"
    return [row for _, row in found]


def _rows_of(schema: Any, data: pa.RecordBatch) -> Iterator[tuple[int, Row]]:
    columns = {field.name: plain(column) for field, column in zip(data.schema, data.columns, strict=True)}
    stored = {column.name: change.stored_name(column.name) for column in schema.columns}
    types = {column.name: _MODIFIER.sub("", column.source_type) for column in schema.columns}
    kinds = {column.name: column.type for column in schema.columns}

    def renamed(row: dict[str, Any] | None) -> dict[str, Any] | None:
        return None if row is None else {name: row[at] for name, at in stored.items() if at in row}

    for n in range(data.num_rows):
        unfit = {item["column"]: item["text"] for item in columns[change.UNFIT][n] or ()}
        yield (
            columns[change.SEQ][n],
            Row(
                op=columns[change.OP][n],
                table=(schema.table.schema, schema.table.name),
                values={name: columns[at][n] for name, at in stored.items()},
                unchanged=tuple(columns[change.UNCHANGED][n] or ()),
                before=renamed(columns[change.BEFORE][n]),
                moved_from=renamed(columns[change.MOVED_FROM][n]),
                types=types,
                kinds=kinds,
                unfit=unfit,
                tx=columns[change.TX][n],
                index=columns[change.TX_INDEX][n],
                position=columns[change.POSITION][n],
                committed_at=columns[change.COMMITTED_AT][n],
            ),
        )


# --- the rows that should be there -------------------------------------------------------------------------


class Tables:
    """What is known of the workload's tables by name."""

    def __init__(self, tables: Sequence[Table]) -> None:
        self._by_name = {(table.schema, table.name): table for table in tables}
        self._root = {(table.schema, leaf): table for table in tables for leaf in table.leaves}

    def find(self, name: tuple[str, str]) -> tuple[Table | None, bool]:
        """The table that a change of this one is told of, if any, and whether this is a part of it."""
        root = self._root.get(name)
        if root is not None:
            return root, True
        found = self._by_name.get((name[0], name[1].removesuffix(RENAMED)))
        return found or self._by_name.get(("public", name[1])), False  # or it is away in another schema


def expect(told: Sequence[ToldTransaction], tables: Sequence[Table]) -> list[Row]:
    """The rows that our log should have, from the other reading of the server's log."""
    known = Tables(tables)
    rows: list[Row] = []
    for transaction in told:
        made: list[Row] = []
        for item in transaction.changes:
            made += _rows_of_change(item, known)
        rows += [_in_transaction(row, transaction, index) for index, row in enumerate(made)]
    return rows


def _in_transaction(row: Row, transaction: ToldTransaction, index: int) -> Row:
    position, when = str(Lsn.parse(transaction.end)), transaction.committed_at
    return replace(
        row, tx=transaction.xid, index=index, position=position, committed_at=_microseconds(when) if when else None
    )


def _microseconds(when: datetime) -> int:
    since = when - datetime(1970, 1, 1, tzinfo=UTC)
    return (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds


def _rows_of_change(told: Told, known: Tables) -> list[Row]:
    if told.verb == "MESSAGE":
        said = {"prefix": told.prefix, "content": told.content.encode(), "transactional": told.transactional}
        return [Row(op="message", table=MESSAGE, values=said)]
    if told.verb == "TRUNCATE":
        found = [known.find(name) for name in told.tables]
        whole = [(table, name) for (table, part), name in zip(found, told.tables, strict=True) if table and not part]
        return [Row(op="truncate", table=name, values={}) for table, name in whole if table.logged]
    (name,) = told.tables
    table, part = known.find(name)
    if table is None or not table.logged or (table.inserts_only and told.verb != "INSERT"):
        return []
    about: dict[str, Any] = {"table": (table.schema, table.name) if part else name}
    new = _without(told.new, table.hidden)
    old = _without(told.old, table.hidden)
    if new is not None and not part:
        about["types"] = new.types
    if told.verb == "INSERT":
        assert new is not None
        return [Row(op="insert", values=new.values, **about)]
    if told.verb == "DELETE":
        assert old is not None
        return [Row(op="delete", values=old.values, **about)]
    assert new is not None
    return _rows_of_update(table, new, old, about)


def _rows_of_update(table: Table, new: Tuple, old: Tuple | None, about: dict[str, Any]) -> list[Row]:
    if old is None:
        return [Row(op="update", values=new.values, unchanged=_unsent(new.values), **about)]
    full = "rest" in old.values if table.full is None else table.full
    key = table.whole_key if full else tuple(old.values)
    filled: dict[str, Value] = {
        name: old.values.get(name, UNSENT) if value is UNSENT else value for name, value in new.values.items()
    }
    before = {name: old.values.get(name) for name in new.values} if full else None
    if all(new.values[name] is UNSENT or new.values[name] == old.values.get(name) for name in key):
        return [Row(op="update", values=filled, unchanged=_unsent(filled), before=before, **about)]
    gone = Row(op="delete", values=old.values, **{**about, "types": {}})
    moved_from = {name: old.values[name] for name in key}
    return [
        gone,
        Row(op="insert", values=filled, unchanged=_unsent(filled), before=before, moved_from=moved_from, **about),
    ]


def _without(row: Tuple | None, names: Sequence[str]) -> Tuple | None:
    if row is None or not names:
        return row
    return Tuple(
        {name: value for name, value in row.values.items() if name not in names},
        {name: kind for name, kind in row.types.items() if name not in names},
    )


def _unsent(values: dict[str, Value]) -> tuple[str, ...]:
    return tuple(name for name, value in values.items() if value is UNSENT)


# --- the comparison ----------------------------------------------------------------------------------------


def differences(ours: Sequence[Row], theirs: Sequence[Row]) -> list[str]:
    """What is not as it should be, of the first row that differs; empty if all is well."""
    for place, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
        found = list(_row_differences(mine, other))
        if found:
            return [f"row {place}, {other.op} of {other.table}, transaction {other.tx}:", *found]
    if len(ours) != len(theirs):
        more = (ours if len(ours) > len(theirs) else theirs)[min(len(ours), len(theirs))]
        return [f"{len(ours)} rows instead of {len(theirs)}; the next would be {more.op} of {more.table}"]
    return []


def _row_differences(mine: Row, other: Row) -> Iterator[str]:
    if (mine.op, mine.table) != (other.op, other.table):
        yield f"it is {mine.op} of {mine.table}, transaction {mine.tx}"
        return
    for name in ("index", "position", "committed_at"):
        wanted = getattr(other, name)
        if getattr(mine, name) != wanted and wanted is not None:
            yield f"{name}: {getattr(mine, name)!r} instead of {wanted!r}"
    if mine.tx & 0xFFFFFFFF != other.tx:
        yield f"transaction {mine.tx} instead of {other.tx}"
    if other.types and list(mine.types.items()) != list(other.types.items()):
        yield f"columns {mine.types} instead of {other.types}"
        return
    if set(mine.unchanged) != set(other.unchanged):
        yield f"unchanged: {mine.unchanged} instead of {other.unchanged}"
    if mine.op == "message":
        if mine.values != other.values:
            yield f"it says {mine.values} instead of {other.values}"
        return
    texts = {name: None if value is UNSENT else value for name, value in other.values.items()}
    yield from _value_differences(mine, mine.values, texts, "")
    for name, prefix in (("before", change.BEFORE), ("moved_from", change.MOVED_FROM)):
        got, wanted = getattr(mine, name), getattr(other, name)
        if got is None or wanted is None:
            if got is not wanted:
                yield f"{name}: {got!r} instead of {wanted!r}"
        elif name == "moved_from" and set(got) != set(wanted):
            yield f"{name} names {sorted(got)} instead of {sorted(wanted)}"
        else:
            yield from _value_differences(mine, got, wanted, f"{prefix}.")
    unheard = mine.unfit.keys() - {
        prefix + name for prefix in ("", f"{change.BEFORE}.", f"{change.MOVED_FROM}.") for name in mine.values
    }
    if unheard:
        yield f"unfit names {sorted(unheard)}"


def _value_differences(mine: Row, got: dict[str, Any], texts: dict[str, str | None], prefix: str) -> Iterator[str]:
    if not texts.keys() <= got.keys():
        yield f"{prefix}: columns {sorted(got)} instead of {sorted(texts)}"
        return
    for name, value in got.items():
        text, unfit = texts.get(name), mine.unfit.get(prefix + name)
        try:
            wanted = None if text is None else expected(text, mine.kinds[name])
        except Unfit:
            if value is not None or unfit != text:
                yield f"{prefix}{name}: {value!r} and unfit {unfit!r} instead of null and unfit {text!r}"
            continue
        if unfit is not None:
            yield f"{prefix}{name}: {text!r} fits, and is told to be unfit"
        elif not same(value, wanted):
            yield f"{prefix}{name}: {value!r} instead of {wanted!r}"
