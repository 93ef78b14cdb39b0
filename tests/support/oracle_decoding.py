"""What PostgreSQL's own `test_decoding` says of a stretch of the log, read from its text.

Nothing in here knows how Tailrace reads the log: it is the other opinion. The text is described in the server's
manual, https://www.postgresql.org/docs/current/test-decoding.html, and made by contrib/test_decoding/test_decoding.c:

    BEGIN 693
    table public.data: UPDATE: old-key: id[integer]:1 new-tuple: id[integer]:2 v[text]:unchanged-toast-datum
    table public.a, public.b: TRUNCATE: restart_seqs cascade
    COMMIT 693 (at 2024-05-10 07:51:46.161234+00)
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import psycopg

SLOT = "twin"


class Unsent:
    """A value that the server did not send again."""

    def __repr__(self) -> str:
        return "unsent"


UNSENT = Unsent()
Value = str | Unsent | None


@dataclass(frozen=True)
class Tuple:
    """A row: of each column its type and value, in the table's order."""

    values: dict[str, Value]
    types: dict[str, str]


@dataclass(frozen=True)
class Told:
    """One change as it was told."""

    verb: str
    tables: tuple[tuple[str, str], ...]
    """Schema and name; of a truncate there may be several."""
    new: Tuple | None = None
    old: Tuple | None = None
    prefix: str = ""
    content: str = ""
    transactional: bool = True


@dataclass
class ToldTransaction:
    """A transaction, or a message that belongs to none."""

    xid: int
    changes: list[Told] = field(default_factory=list)
    end: str = ""
    """The position of its end."""
    committed_at: datetime | None = None


def make_slot(connection: psycopg.Connection[Any]) -> None:
    connection.execute("select pg_create_logical_replication_slot(%s, 'test_decoding')", (SLOT,))


def read_slot(connection: psycopg.Connection[Any]) -> list[ToldTransaction]:
    """All transactions since the slot was made, in order. The session's settings decide how values are printed."""
    rows = connection.execute(
        "select lsn::text, data from pg_logical_slot_peek_changes(%s, null, null, 'include-xids', '1', "
        "'include-timestamp', '1')",
        (SLOT,),
    ).fetchall()
    return parse(rows)


_BEGIN = re.compile(r"BEGIN (\d+)")
_COMMIT = re.compile(r"COMMIT (\d+) \(at (.+)\)")
_NAME = r'(?:"(?:[^"]|"")+"|[a-z_][a-z0-9_$]*)'
_TABLE = re.compile(rf"({_NAME})\.({_NAME})")
_CHANGE = re.compile(
    rf"table ({_TABLE.pattern}(?:, {_TABLE.pattern})*): (INSERT|UPDATE|DELETE|TRUNCATE):(.*)", re.DOTALL
)
_CELL = re.compile(rf" ({_NAME})\[(.*?)\]:(B?'(?:[^']|'')*'|[^' ][^ ]*)", re.DOTALL)
_MESSAGE = re.compile(r"message: transactional: ([01]) prefix: (.*), sz: (\d+) content:(.*)", re.DOTALL)


def parse(rows: Iterable[tuple[str, str]]) -> list[ToldTransaction]:
    """Transactions from the lines, each with its position."""
    found: list[ToldTransaction] = []
    inside = False
    for position, line in rows:
        if begin := _BEGIN.fullmatch(line):
            assert not inside, line
            found.append(ToldTransaction(int(begin.group(1))))
            inside = True
        elif commit := _COMMIT.fullmatch(line):
            assert inside, line
            assert found[-1].xid == int(commit.group(1)), line
            found[-1].end, found[-1].committed_at = position, datetime.fromisoformat(commit.group(2))
            inside = False
        else:
            change = parse_change(line)
            assert inside == change.transactional, line
            if not inside:
                found.append(ToldTransaction(0, end=position))
            found[-1].changes.append(change)
    assert not inside
    return found


def parse_change(line: str) -> Told:
    if message := _MESSAGE.fullmatch(line):
        transactional, prefix, _, content = message.groups()
        return Told("MESSAGE", (), prefix=prefix, content=content, transactional=transactional == "1")
    change = _CHANGE.fullmatch(line)
    assert change, line
    tables = tuple((_plain(pair[0]), _plain(pair[1])) for pair in _TABLE.findall(change.group(1)))
    verb, rest = change.groups()[-2:]
    if verb == "TRUNCATE" or rest == " (no-tuple-data)":
        return Told(verb, tables)
    if verb == "DELETE":
        return Told(verb, tables, old=_tuple(rest))
    old = None
    if rest.startswith(" old-key:"):
        old, at = _cells(rest, len(" old-key:"))
        assert rest.startswith(" new-tuple:", at), line
        rest = rest[at + len(" new-tuple:") :]
    return Told(verb, tables, new=_tuple(rest), old=old)


def _tuple(text: str) -> Tuple:
    found, at = _cells(text, 0)
    assert at == len(text), text[at:]
    return found


def _cells(text: str, at: int) -> tuple[Tuple, int]:
    """The values from `at` on, and where they end."""
    values: dict[str, Value] = {}
    types: dict[str, str] = {}
    while (cell := _CELL.match(text, at)) is not None:
        name, kind, literal = cell.groups()
        values[_plain(name)], types[_plain(name)] = _value(literal, kind), kind
        at = cell.end()
    return Tuple(values, types), at


def _plain(name: str) -> str:
    return name[1:-1].replace('""', '"') if name.startswith('"') else name


def _value(literal: str, kind: str) -> Value:
    if literal == "null":
        return None
    if literal == "unchanged-toast-datum":
        return UNSENT
    if literal.startswith("B'"):
        return literal[2:-1]
    if literal.startswith("'"):
        return literal[1:-1].replace("''", "'")
    if kind == "boolean":
        return {"true": "t", "false": "f"}[literal]
    return literal
