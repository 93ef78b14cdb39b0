"""Random SQL over tables of every kind: hypothesis draws a `Script`, a `Player` plays it on a server.

A script holds together when parts of it are taken away, so that a failing one shrinks: a statement finds the rows it
speaks of or changes nothing, and one that the server refuses ends its transaction there and then, like any
application's. What a failure prints is SQL that a person can run.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import psycopg
from hypothesis import strategies as st

from tests.support.workload_tables import SECOND_SCHEMA, Column, Table, quoted

LOCK_MILLISECONDS = 30
"""Two transactions beside one another may want the same row; one of them is then refused."""
BULK_ROWS = (3, 40, 400)
STATEMENTS_MAX, TABLES_MAX, FILLED_ROWS = 6, 6, 3
ORIGIN = "oracle"
RENAMED = " 2"
"""At the end of a table's name while it has another one."""


@dataclass(frozen=True)
class Statement:
    """SQL, and what is copied in after it if it is a COPY."""

    sql: str
    data: str | None = None
    tables: tuple[Table, ...] = ()
    """What it needs to be there."""

    def __str__(self) -> str:
        return f"{self.sql};" if self.data is None else f"{self.sql};\n{self.data}\\."


@dataclass(frozen=True)
class Transaction:
    """Statements that end together: `commit`, `rollback`, or `prepare` and how that ends later."""

    statements: tuple[Statement, ...]
    end: str = "commit"
    beside: bool = False
    """Begins before the one before it ends, in another session, and ends first."""
    origin: bool = False
    """Replayed from elsewhere, as the server is told."""

    def __str__(self) -> str:
        return "\n".join(["begin;", *map(str, self.statements), f"{self.end};"])


@dataclass(frozen=True)
class Settle:
    """The transactions that are prepared end here."""

    commit: bool

    def __str__(self) -> str:
        return f"-- {'commit' if self.commit else 'rollback'} prepared, each"


@dataclass(frozen=True)
class Look:
    """Whoever reads the log takes up to so many windows now, and then goes on, or is cut off in some way."""

    windows: int
    then: str

    def __str__(self) -> str:
        return f"-- read {self.windows} windows, then {self.then}"


Step = Transaction | Settle | Look
CUTS = ("go on", "close", "lose the last window", "reopen the log", "confirm nothing")


@dataclass(frozen=True)
class Script:
    """Tables, and what is done to them."""

    tables: tuple[Table, ...]
    steps: tuple[Step, ...]

    def make(self) -> list[str]:
        return [text for table in self.tables for text in table.make]

    def __repr__(self) -> str:
        lines = [*(f"{text};" for text in self.make()), *map(str, self.steps)]
        return "\n" + "\n".join(lines) + "\n"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """How hypothesis prints it."""
        printer.text(repr(self))


# --- scripts -----------------------------------------------------------------------------------------------


@st.composite
def scripts(
    draw: st.DrawFn,
    tables: Sequence[Table],
    *,
    ddl: bool = False,
    rare: bool = False,
    looks: bool = False,
    messages: bool = False,
    told_only: bool = False,
    bursts_min: int = 1,
) -> Script:
    """Scripts over some of the tables, with changes of their shape, values that fit nowhere and looks of a reader in
    between, as asked; and, if only what is told is wanted, without changes that a table cannot tell of."""
    often = [*tables, *(table for table in tables if table.often)]
    few = st.lists(st.sampled_from(often), min_size=1, max_size=TABLES_MAX, unique=True)
    how = Wanted(ddl=ddl, rare=rare, messages=messages, told_only=told_only)
    step = st.one_of(
        *[transactions(draw(few), how)] * 5,
        st.builds(Settle, commit=st.sampled_from([True, True, False])),
        *([_looks()] * 2 if looks else []),
    )
    # Lists of lists, since hypothesis keeps a list short, however long it may be.
    bursts = draw(st.lists(st.lists(step, min_size=1, max_size=8), min_size=bursts_min, max_size=8))
    steps = list(itertools.chain.from_iterable(bursts))
    needed = _needed(tables, steps)
    if draw(st.sampled_from([False, True, True, True])):
        steps.insert(0, filling(needed))
    return Script(needed, tuple(steps))


def _needed(tables: Sequence[Table], steps: Sequence[Step]) -> tuple[Table, ...]:
    """Only tables that are spoken of, and those that belong to them: a failure prints no others."""
    spoken_of = [
        table
        for step in steps
        if isinstance(step, Transaction)
        for statement in step.statements
        for table in statement.tables
    ]
    names = {table.with_table for table in spoken_of}
    found = tuple(table for table in tables if table in spoken_of or table.name in names)
    return found or tuple(tables[:1])


def filling(tables: Sequence[Table]) -> Transaction:
    """Some rows to begin with."""
    return Transaction(
        tuple(
            Statement(f"insert into {table.sql} {_selected(_numbered_row(table, number, rare=False))}")
            for table in tables
            for number in range(FILLED_ROWS)
        )
    )


def _numbered_row(table: Table, number: int, *, rare: bool) -> dict[str, str]:
    """Columns and values of a row: one number chooses them all."""
    row = {each.sql: each.values[number % len(each.values)] for each in table.key}
    for place, each in enumerate(table.columns):
        values = _values(each, rare)
        row[each.sql] = values[(number * (place % 3 + 1)) % len(values)]
    return row


def _looks() -> st.SearchStrategy[Look]:
    return st.builds(Look, st.integers(1, 6), st.sampled_from(CUTS))


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a script may hold."""

    ddl: bool
    rare: bool
    messages: bool
    told_only: bool


@st.composite
def transactions(draw: st.DrawFn, tables: Sequence[Table], how: Wanted) -> Transaction:
    table = st.sampled_from(tables)
    body: list[Statement] = []
    open_savepoints: list[str] = []
    for number in range(draw(st.integers(1, STATEMENTS_MAX))):
        what = draw(st.integers(0, 19))
        if what == 19:
            name = f"s{number}"
            body.append(Statement(f"savepoint {name}"))
            open_savepoints.append(name)
        elif what == 18 and open_savepoints:
            verb = draw(st.sampled_from(["rollback to", "release"]))
            body.append(Statement(f"{verb} {open_savepoints.pop()}"))
        elif what == 17 and how.ddl:
            one = draw(table)
            body += _about(one, draw(_shape_changes(one)))
        elif what == 16:
            body.append(draw(_truncates(tables, how.told_only)))
        elif what == 15 and how.messages:
            body.append(draw(_messages()))
        else:
            one = draw(table)
            body += _about(one, draw(_changes(one, how)))
    if draw(st.booleans()) and open_savepoints:
        body.append(Statement(f"rollback to {open_savepoints[0]}"))
    end = draw(st.sampled_from(["commit"] * 6 + ["rollback", "prepare"]))
    return Transaction(tuple(body), end, beside=draw(st.integers(0, 4)) == 4, origin=draw(st.integers(0, 7)) == 7)


def _about(table: Table, statements: Sequence[Statement]) -> list[Statement]:
    return [replace(statement, tables=(table,)) for statement in statements]


@st.composite
def _shape_changes(draw: st.DrawFn, table: Table) -> list[Statement]:
    if not table.ddl:
        return [Statement(f"alter table {table.sql} alter column {table.columns[0].sql} drop default")]
    what = draw(st.integers(0, 11))
    if what == 11:
        return [Statement(f"drop table {table.sql} cascade")]
    if what > 7 and table.schema == "public" and not table.leaves:
        return _away_and_back(table, _selected(draw(_row(table, rare=False))), move=what == 10)
    return [Statement(f"alter table {table.sql} {draw(st.sampled_from(table.ddl))}")]


def _away_and_back(table: Table, row: str, *, move: bool) -> list[Statement]:
    """Another name, or another schema, for one row."""
    if move:
        schema = quoted(SECOND_SCHEMA)
        there, away, back = f"set schema {schema}", f"{schema}.{table.sql}", "set schema public"
        texts = [f"create schema if not exists {schema}"]
    else:
        away = quoted(table.name + RENAMED)
        there, back, texts = f"rename to {away}", f"rename to {table.sql}", []
    texts += [f"alter table {table.sql} {there}", f"insert into {away} {row}", f"alter table {away} {back}"]
    return [Statement(text) for text in texts]


@st.composite
def _truncates(draw: st.DrawFn, tables: Sequence[Table], told_only: bool) -> Statement:
    """Of a partition that is truncated alone the server does not tell, where its root is published."""
    chosen = draw(st.lists(st.sampled_from(tables), min_size=1, max_size=3, unique=True))
    flags = draw(st.sampled_from(["", " restart identity", " cascade", " restart identity cascade"]))
    if any(table.with_table == "child" for table in chosen) and "cascade" not in flags:
        flags += " cascade"
    names = [table.sql for table in chosen]
    if not told_only and chosen[0].leaves and draw(st.booleans()):
        names[0] = chosen[0].leaves[0]
    return Statement(f"truncate {', '.join(names)}{flags}", tables=tuple(chosen))


@st.composite
def _messages(draw: st.DrawFn) -> Statement:
    prefix, text = draw(st.sampled_from(["app", "ä ''q''", ""])), draw(st.sampled_from(["hello", "", "ä\n", "x, y"]))
    inside = draw(st.sampled_from(["true", "false"]))
    return Statement(f"select pg_logical_emit_message({inside}, '{prefix}', '{text}')")


@st.composite
def _changes(draw: st.DrawFn, table: Table, how: Wanted) -> list[Statement]:
    """Changes of one table's rows. The plain ones come most often."""
    name = draw(st.sampled_from(_INSERTS if table.inserts_only and how.told_only else _OPERATIONS))
    return _MAKERS[name](draw, table, how.rare)


def _values(each: Column, rare: bool) -> tuple[str, ...]:
    return each.values + each.rare if rare else each.values


@st.composite
def _row(draw: st.DrawFn, table: Table, rare: bool, key: str | None = None) -> dict[str, str]:
    """Columns and values of a row; `key` stands in for the first of its key."""
    row = _numbered_row(table, draw(st.integers(0, 11)), rare=rare)
    row |= {each.sql: draw(st.sampled_from(each.values)) for each in table.key}
    if key is not None:
        row[table.key[0].sql] = key
    return {name: value for name, value in row.items() if value != "default"}


def _selected(row: dict[str, str]) -> str:
    return f"({', '.join(row)}) select {', '.join(row.values())}"


@st.composite
def _where(draw: st.DrawFn, table: Table) -> str:
    """Most often one row; else more, or all."""
    if draw(st.integers(0, 9)) == 9:
        return "true"
    first = table.key[0]
    if len(table.key) > 1 and draw(st.integers(0, 3)) == 3:
        return f"{first.sql} = {draw(st.sampled_from(first.values))}"
    pairs = [(each.sql, draw(st.sampled_from([v for v in each.values if v != "default"]))) for each in table.key]
    return " and ".join(f"{name} = {value}" for name, value in pairs)


def _insert(draw: st.DrawFn, table: Table, rare: bool) -> list[Statement]:
    row = draw(_row(table, rare))
    keys = [each.sql for each in table.key]
    how = draw(st.sampled_from(["nothing", "plain", "plain", "upsert"]))
    if not table.unique or not row.keys() >= set(keys):
        end = ""
    elif how == "plain":
        found = " and ".join(f"u.{name} = {row[name]}" for name in keys)
        end = f" where not exists (select from {table.sql} u where {found})"
    elif how == "upsert" and not table.inserts_only:
        name = draw(st.sampled_from(table.columns)).sql
        # `where true`: without it the parser takes ON for a join's.
        end = f" where true on conflict ({', '.join(keys)}) do update set {name} = excluded.{name}"
    else:
        end = " where true on conflict do nothing"
    return [Statement(f"insert into {table.sql} {_selected(row)}{end}")]


def _update(draw: st.DrawFn, table: Table, rare: bool) -> list[Statement]:
    chosen = draw(st.lists(st.sampled_from(table.columns), min_size=1, max_size=3, unique_by=lambda c: c.name))
    sets = ", ".join(f"{each.sql} = {draw(st.sampled_from(_values(each, rare)))}" for each in chosen)
    return [Statement(f"update {table.sql} set {sets} where {draw(_where(table))}")]


def _touch(draw: st.DrawFn, table: Table, rare: bool) -> list[Statement]:
    """An update that changes nothing large: what is stored out of line is not sent again."""
    each = next((c for c in table.columns if c.name in ("n", "v", "name")), table.columns[-1])
    return [Statement(f"update {table.sql} set {each.sql} = {each.sql} where {draw(_where(table))}")]


def _move(draw: st.DrawFn, table: Table, rare: bool) -> list[Statement]:
    """Another key for a row; a large value it has stays as it is. Refused if that key is taken."""
    each = draw(st.sampled_from(table.key))
    to = draw(st.sampled_from([value for value in each.values if value != "default"]))
    more = f", {table.columns[0].sql} = {draw(st.sampled_from(table.columns[0].values))}"
    also = more if draw(st.integers(0, 3)) == 3 else ""
    others = [key.sql for key in table.key if key is not each]
    same = "".join(f" and u.{name} = t.{name}" for name in others)
    free = f" and not exists (select from {table.sql} u where u.{each.sql} = {to}{same})" if table.unique else ""
    return [Statement(f"update {table.sql} t set {each.sql} = {to}{also} where {draw(_where(table))}{free}")]


def _swap(draw: st.DrawFn, table: Table, rare: bool) -> list[Statement]:
    """Two rows take one another's key, by way of a third."""
    each = table.key[0]
    values = [value for value in each.values if value != "default"][:4]
    one, two = values[0], draw(st.sampled_from(values[1:]))
    aside = "'aside'" if one.startswith("'") or "repeat" in one else "-99"
    return [
        Statement(f"update {table.sql} set {each.sql} = {to} where {each.sql} = {of}")
        for of, to in ((one, aside), (two, one), (aside, two))
    ]


def _delete(draw: st.DrawFn, table: Table, rare: bool) -> list[Statement]:
    return [Statement(f"delete from {table.sql} where {draw(_where(table))}")]


def _again(draw: st.DrawFn, table: Table, rare: bool) -> list[Statement]:
    """Deleted and inserted anew, in one statement."""
    names = ", ".join(each.sql for each in (*table.key, *table.columns))
    gone = f"delete from {table.sql} where {draw(_where(table))} returning {names}"
    return [Statement(f"with gone as ({gone}) insert into {table.sql} ({names}) select {names} from gone")]


def _bulk(draw: st.DrawFn, table: Table, rare: bool) -> list[Statement]:
    """Many rows at once: the log may get them in parts."""
    if not table.key[0].values[0].isdigit():
        return _insert(draw, table, rare)
    rows = draw(st.sampled_from(BULK_ROWS))
    row = _selected(draw(_row(table, rare, key="g")))
    how = " on conflict do nothing" if table.unique else ""
    return [Statement(f"insert into {table.sql} {row} from generate_series(100, {99 + rows}) g{how}")]


def _bulk_delete(draw: st.DrawFn, table: Table, rare: bool) -> list[Statement]:
    first = table.key[0]
    if not first.values[0].isdigit():
        return _delete(draw, table, rare)
    what = draw(st.sampled_from(["delete", "shift", "touch"]))
    if what == "delete":
        return [Statement(f"delete from {table.sql} where {first.sql} >= 100")]
    target = first.sql if what == "shift" else table.columns[0].sql
    value = f"{first.sql} + 1000" if what == "shift" else table.columns[0].sql
    return [Statement(f"update {table.sql} set {target} = {value} where {first.sql} between 100 and 999")]


def _copy(draw: st.DrawFn, table: Table, rare: bool) -> list[Statement]:
    """Several rows in one record of the server's log. Only numbers and short text, as COPY reads them."""
    plain = [each for each in table.columns if each.type in ("int", "int4", "int8", "text", "int2")]
    keys = [each for each in table.key if each.type in ("int", "int4", "int8", "text")]
    if len(keys) < len(table.key) or table.name == "child":
        return _insert(draw, table, rare)
    start, rows = draw(st.integers(20, 60)), draw(st.integers(1, 5))
    lines = []
    for n in range(start, start + rows):
        cells = [str(n) if each.type != "text" else _copied_key(each, n) for each in keys]
        cells += ["\\N" if n % 3 == 0 else str(n) if each.type != "text" else f"t\\t{n}" for each in plain]
        lines.append("\t".join(cells) + "\n")
    names = ", ".join(each.sql for each in (*keys, *plain))
    return [Statement(f"copy {table.sql} ({names}) from stdin", "".join(lines))]


def _copied_key(each: Column, n: int) -> str:
    return "eu" if each.name == "region" else f"k{n}"


def _merge(draw: st.DrawFn, table: Table, rare: bool) -> list[Statement]:
    """Insert or update, whichever it takes."""
    row = draw(_row(table, rare))
    keys = [each.sql for each in table.key]
    if not table.unique or not row.keys() >= set(keys):
        return _insert(draw, table, rare)
    each = draw(st.sampled_from(table.columns))
    using = ", ".join(f"{row[name]} as {name}" for name in keys)
    on = " and ".join(f"t.{name} = s.{name}" for name in keys)
    return [
        Statement(
            f"merge into {table.sql} t using (select {using}) s on {on} "
            f"when matched then update set {each.sql} = {draw(st.sampled_from(_values(each, rare)))} "
            f"when not matched then insert ({', '.join(row)}) values ({', '.join(row.values())})"
        )
    ]


def _leaf(draw: st.DrawFn, table: Table, rare: bool) -> list[Statement]:
    """A change that names a partition and not its root."""
    if not table.leaves:
        return _update(draw, table, rare)
    leaf = replace(table, name=draw(st.sampled_from(table.leaves)), leaves=())
    return draw(st.sampled_from([_insert, _update, _delete, _move]))(draw, leaf, rare)


def _caught(draw: st.DrawFn, table: Table, rare: bool) -> list[Statement]:
    """A subtransaction that fails after it has changed something, inside the server."""
    done = "; ".join(statement.sql for statement in _update(draw, table, rare))
    lost = "; ".join(statement.sql for statement in _delete(draw, table, rare))
    return [
        Statement(
            f"do $do$ begin {done}; begin {lost}; perform 1 / 0; "
            "exception when division_by_zero then null; end; end $do$"
        )
    ]


def _subtransactions(draw: st.DrawFn, table: Table, rare: bool) -> list[Statement]:
    """More subtransactions than a session keeps at hand, every other one undone."""
    change = "; ".join(statement.sql for statement in _touch(draw, table, rare))
    return [
        Statement(
            f"do $do$ begin for i in 1 .. 80 loop begin {change}; if i % 2 = 0 then perform 1 / 0; end if; "
            "exception when division_by_zero then null; end; end loop; end $do$"
        )
    ]


_MAKERS: dict[str, Callable[[st.DrawFn, Table, bool], list[Statement]]] = {
    "insert": _insert, "update": _update, "touch": _touch, "move": _move, "swap": _swap, "delete": _delete,
    "again": _again, "bulk": _bulk, "bulk delete": _bulk_delete, "copy": _copy, "caught": _caught, "merge": _merge,
    "leaf": _leaf, "subtransactions": _subtransactions,
}  # fmt: skip
_OPERATIONS = [
    *["insert"] * 8, *["update"] * 4, *["touch"] * 3, *["move"] * 4, *["delete"] * 3, "swap", "again", "bulk",
    "bulk delete", "copy", "caught", "merge", "leaf", "subtransactions",
]  # fmt: skip
_INSERTS = ["insert", "insert", "bulk", "copy"]


# --- playing -----------------------------------------------------------------------------------------------


class Player:
    """Plays scripts on one database, in two sessions."""

    def __init__(self, url: str) -> None:
        self._sessions = [psycopg.connect(url, autocommit=True) for _ in range(2)]
        self.done: Counter[str] = Counter()
        """How statements and transactions ended."""
        self.said: list[str] = []
        """What was done, as SQL, with the server's refusals."""
        self._prepared = 0
        for number, session in enumerate(self._sessions):
            session.execute(f"set lock_timeout = {LOCK_MILLISECONDS}".encode())
            session.execute("set client_min_messages = error")
            with suppress(psycopg.errors.UniqueViolation):
                session.execute("select pg_replication_origin_create(%s)", (f"{ORIGIN}{number}",))

    def close(self) -> None:
        for session in self._sessions:
            session.close()

    def make(self, script: Script) -> None:
        for text in script.make():
            self._sessions[0].execute(text.encode())

    def play(self, script: Script, look: Callable[[Look], None] = lambda look: None) -> None:
        """All steps in order; what is still prepared at the end is committed."""
        steps = list(script.steps)
        while steps:
            step = steps.pop(0)
            if isinstance(step, Look):
                look(step)
            elif isinstance(step, Settle):
                self._settle(commit=step.commit)
            elif steps and isinstance(steps[0], Transaction) and steps[0].beside:
                beside = steps.pop(0)
                assert isinstance(beside, Transaction)
                self._play_both(step, beside)
            else:
                self._play(step)
        self._settle(commit=True)

    def truncate(self, tables: Sequence[Table]) -> None:
        """Begin anew: a script that fails can then be repeated on its own. Whoever reads the tables is waited for."""
        self._sessions[0].execute("set lock_timeout = 0")
        self._run(0, f"truncate {', '.join(table.sql for table in tables)} restart identity cascade")
        self._sessions[0].execute(f"set lock_timeout = {LOCK_MILLISECONDS}".encode())

    def _play(self, transaction: Transaction) -> None:
        self._begin(0, transaction)
        all(self._execute(0, statement) for statement in transaction.statements)
        self._end(0, transaction)

    def _play_both(self, one: Transaction, two: Transaction) -> None:
        pairs = (one, two)
        going = [True, True]
        for session, transaction in enumerate(pairs):
            self._begin(session, transaction)
        for turn in range(max(len(one.statements), len(two.statements))):
            for session, transaction in enumerate(pairs):
                if going[session] and turn < len(transaction.statements):
                    going[session] = self._execute(session, transaction.statements[turn])
        for session in (1, 0):
            self._end(session, pairs[session])

    def _begin(self, session: int, transaction: Transaction) -> None:
        if transaction.origin:
            self._run(session, f"select pg_replication_origin_session_setup('{ORIGIN}{session}')")
        self._run(session, "begin")

    def _execute(self, session: int, statement: Statement) -> bool:
        """Whether it was done; if not, the transaction can only end."""
        try:
            if statement.data is None:
                self._run(session, statement.sql)
            else:
                self._note(session, str(statement))
                with self._sessions[session].cursor().copy(statement.sql.encode()) as copy:
                    copy.write(statement.data)
        except psycopg.Error as error:
            self.said[-1] += f"  -- refused: {str(error).splitlines()[0]}"
            self.done.update(["refused", f"refused: {type(error).__name__}"])
            return False
        self.done["done"] += 1
        return True

    def _end(self, session: int, transaction: Transaction) -> None:
        end = transaction.end
        if end == "prepare":
            self._prepared += 1
            end = f"prepare transaction 'p{self._prepared}'"
        try:
            self._run(session, end)
            self.done[transaction.end] += 1
        except psycopg.Error as error:
            self.done[f"refused {transaction.end}: {type(error).__name__}"] += 1
            self._run(session, "rollback")
        if transaction.origin:
            self._run(session, "select pg_replication_origin_session_reset()")

    def _settle(self, *, commit: bool) -> None:
        query = "select gid from pg_prepared_xacts where database = current_database() order by prepared"
        for (gid,) in self._sessions[0].execute(query).fetchall():
            self._run(0, f"{'commit' if commit else 'rollback'} prepared '{gid}'")
            self.done["settled"] += 1

    def _run(self, session: int, text: str) -> None:
        self._note(session, f"{text};")
        self._sessions[session].execute(text.encode())

    def _note(self, session: int, text: str) -> None:
        self.said.append(text if session == 0 else f"/* second */ {text}")
