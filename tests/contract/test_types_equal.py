"""Every type with its extreme values: equal by snapshot, insert, update, old row, delete and old key.

The values are what the server prints, whatever settings the role or the database has for printing.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psycopg
import pyarrow as pa
import pytest

from tailrace.capture.postgres.config import PostgresSettings
from tailrace.capture.postgres.connect import command, connect, connect_replication
from tailrace.capture.postgres.copy_binary import KINDS
from tailrace.capture.postgres.source import PostgresCapture
from tailrace.capture.postgres.types import is_known
from tailrace.demo.server import EmbeddedPostgres
from tailrace.errors import ValueUnfit
from tailrace.model import change
from tailrace.model.batch import ChangeBatch
from tailrace.model.position import Lsn
from tailrace.model.schema import TableId, TableSchema
from tests.support import typecases
from tests.support.benches import take
from tests.support.databases import database
from tests.support.typecases import UNFIT, meaning, plain, quoted

COLUMNS_PER_TABLE = 80
KEYS_PER_TABLE = 30
COPIES = 10_000
"""Added to a row's id where the values are from an update."""
WAYS = ("snapshot", "insert", "update", "touched", "before", "delete")
LOOKS = ("plain", "role", "database")
"""The role or database whose settings a capture starts from."""

HOSTILE = {
    "datestyle": "'SQL, DMY'", "intervalstyle": "'iso_8601'", "timezone": "'Asia/Kathmandu'",
    "extra_float_digits": "-15", "bytea_output": "'escape'", "xmlbinary": "'hex'", "xmloption": "'document'",
    "search_path": "odd, public", "quote_all_identifiers": "on", "client_encoding": "'LATIN1'",
    "standard_conforming_strings": "off", "array_nulls": "off", "lc_monetary": "'C.utf8'",
    "default_transaction_isolation": "'serializable'",
}  # fmt: skip
LIMITS = (
    "statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout", "idle_session_timeout",
    "transaction_timeout",
)  # fmt: skip
"""Settings that could end a long read."""
PROBES = {
    "datestyle": "'2026-01-02'::date", "intervalstyle": "'1 day'::interval", "timezone": "'2026-01-02'::timestamptz",
    "extra_float_digits": "'0.1'::float8 + '0.2'::float8", "bytea_output": "'abc'::bytea",
    "search_path": "'odd.mood'::regtype", "quote_all_identifiers": "'pg_class'::regclass",
    "client_encoding": "chr(233)",
}  # fmt: skip
"""A value that prints differently under each setting that can change how a value prints."""


@dataclass(frozen=True)
class Table:
    """One of the tables that the values are distributed over."""

    name: str
    types: list[str]
    values: list[list[str]]
    """By column, SQL."""

    @property
    def columns(self) -> list[str]:
        return [f"c{n}" for n in range(len(self.types))]

    @property
    def rows(self) -> int:
        return max(map(len, self.values))

    def create(self, key: str) -> str:
        columns = ", ".join(f"{name} {kind}" for name, kind in zip(self.columns, self.types, strict=True))
        return f"create table {self.name} (id int, mark int, {columns}, primary key ({key}))"

    def inserts(self, *, cycle: bool = False) -> Iterator[str]:
        """A statement per row; a column with fewer values is null, or repeats them."""
        for row in range(self.rows):
            cells = [
                f"({values[row % len(values)]})::{kind}" if cycle or row < len(values) else "null"
                for kind, values in zip(self.types, self.values, strict=True)
            ]
            yield f"insert into {self.name} values ({row + 1}, 0, {', '.join(cells)})"


@dataclass
class World:
    """The database's content, and the values that arrived by each way."""

    database: str
    tables: list[Table]
    keyed: list[Table]
    printed: dict[str, list[list[str | None]]] = field(default_factory=dict)
    """By table and column, row by row: what the server prints."""
    schemas: dict[tuple[str, str, str], TableSchema] = field(default_factory=dict)
    """By look, way (stream or snapshot) and table."""
    found: dict[tuple[str, str, str], list[pa.Array]] = field(default_factory=dict)
    """By look, way and table: the columns, in order of the rows."""
    unfit: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """By table: the changes of those whose values do not fit."""
    refused: dict[str, ValueUnfit] = field(default_factory=dict)
    """By table: the error of its load."""
    known: dict[str, bool] = field(default_factory=dict)
    type_numbers: set[int] = field(default_factory=set)


def cases(connection: psycopg.Connection, version: int) -> dict[str, list[str]]:
    """Return every type that this server can have, with its values and arrays of them."""
    found = {**typecases.BUILT_IN, **typecases.MADE}
    for since, more in typecases.NEWER.items():
        if version >= since:
            found |= {kind: found[kind] + values for kind, values in more.items()}
    try:
        connection.execute("select '<a/>'::xml")
        found["xml"] = typecases.XML
    except psycopg.errors.FeatureNotSupported:
        found["xml"] = ["null"]
    available = {name for (name,) in connection.execute("select name from pg_available_extensions")}
    for extension in available & set(typecases.EXTENSIONS):
        connection.execute(f"create extension {extension} schema odd")
        found |= {f"odd.{kind}": values for kind, values in typecases.EXTENSIONS[extension].items()}
    arrays = {}
    for kind, values in found.items():
        query = "select typarray <> 0 from pg_type where oid = %s::regtype"
        if connection.execute(query, (kind,)).fetchone() == (True,):
            elements = ", ".join(f"({value})::{kind}" for value in values)
            arrays[f"{kind}[]"] = [f"array[{elements}, null]", "'{}'", "array[null]", f"array[({values[0]})::{kind}]"]
    for kind, values in typecases.SHAPES.items():
        arrays[kind] = arrays.get(kind, []) + values
    return found | arrays


def spread(name: str, types: dict[str, list[str]], size: int) -> list[Table]:
    items = list(types.items())
    return [
        Table(f"{name}{at // size}", [kind for kind, _ in part], [values for _, values in part])
        for at in range(0, len(items), size)
        for part in [items[at : at + size]]
    ]


def keyable(connection: psycopg.Connection, types: dict[str, list[str]]) -> dict[str, list[str]]:
    """Return the types that a primary key can have, with the values that fit into an index entry."""
    found = {}
    for kind, values in types.items():
        try:
            connection.execute(f"create temp table probe (v {kind} primary key); drop table probe")
        except psycopg.errors.UndefinedObject:
            continue
        sizes = [f"pg_column_size(({value})::{kind}) < 60" for value in values]
        (fits,) = connection.execute(f"select array[{', '.join(sizes)}]").fetchone() or ([],)
        if small := [value for value, fit in zip(values, fits, strict=True) if fit]:
            found[kind] = small[:6]
    return found


@pytest.fixture(scope="module")
def world(server: EmbeddedPostgres) -> Iterator[World]:
    name = f"types_{uuid.uuid4().hex[:12]}"
    with server.connect() as admin:
        admin.execute(f"create role {name} superuser replication login")
        try:
            with database(server, name), server.connect(name) as connection:
                yield fill(server, connection, name)
        finally:
            admin.execute(f"drop role {name}")


def fill(server: EmbeddedPostgres, connection: psycopg.Connection, name: str) -> World:
    connection.execute(typecases.SETUP)
    types = cases(connection, server.version)
    made = World(name, spread("t", types, COLUMNS_PER_TABLE), spread("k", keyable(connection, types), KEYS_PER_TABLE))
    for table in made.tables:
        connection.execute(table.create("id"))
        connection.execute(f"alter table {table.name} replica identity full")
    for table in made.keyed:
        connection.execute(table.create(", ".join(["id", *table.columns])))
    for n, (kind, _) in enumerate(typecases.TOO_MUCH):
        connection.execute(f"create table u{n} (id int primary key, mark int, v {kind})")
        connection.execute(f"alter table u{n} replica identity full")
        connection.execute(f"create table w{n} (id int, v {kind}, primary key (id, v))")
    captures = {look: capture(server, name, look) for look in LOOKS}
    begins = {look: captures[look].prepare(None) for look in LOOKS}
    write_rows(connection, made)
    read_printed(server, connection, made, name)
    for look in LOOKS:
        with hostile(connection, name, look):
            load(captures[look], made, look)
    change_all(connection, made)
    # The update of a key is two rows.
    rows = sum(5 * table.rows for table in made.tables) + sum(3 * table.rows for table in made.keyed)
    for look in LOOKS:
        with hostile(connection, name, look):
            stream(captures[look], begins[look], made, look, rows + 5 * len(typecases.TOO_MUCH))
    return made


def capture(server: EmbeddedPostgres, name: str, look: str) -> PostgresCapture:
    user, slot = name if look == "role" else "postgres", f"{name}_{look}"
    return PostgresCapture(
        PostgresSettings(
            url=server.url(name, user), wanted=lambda table: table.schema == "public", slot=slot, publication=slot
        )
    )


@contextmanager
def hostile(connection: psycopg.Connection, name: str, look: str) -> Iterator[None]:
    """Set hostile settings for the role or the database while this is open."""
    if look == "plain":
        yield
        return
    for setting, value in HOSTILE.items():
        connection.execute(f"alter {look} {name} set {setting} = {value}")
    yield
    connection.execute(f"alter {look} {name} reset all")


def write_rows(connection: psycopg.Connection, made: World) -> None:
    """Write every row by an insert, and again by an update of a row of nulls."""
    with connection.transaction():
        for table in made.tables:
            for statement in table.inserts():
                connection.execute(statement.encode())
            connection.execute(f"insert into {table.name} (id, mark) select id + {COPIES}, 0 from {table.name}")
            values = ", ".join(f"{column} = s.{column}" for column in table.columns)
            connection.execute(f"update {table.name} t set {values} from {table.name} s where t.id = s.id + {COPIES}")
        for table in made.keyed:
            for statement in table.inserts(cycle=True):
                connection.execute(statement.encode())
        for n, (kind, text) in enumerate(typecases.TOO_MUCH):
            value = f"({quoted(text)[0]})::{kind}"
            connection.execute(f"insert into u{n} values (1, 0, {value}); insert into w{n} values (1, {value})")


def change_all(connection: psycopg.Connection, made: World) -> None:
    with connection.transaction():
        for table in made.tables:
            connection.execute(f"update {table.name} set mark = 1 where id < {COPIES}")
            connection.execute(f"delete from {table.name} where id < {COPIES}")
        for table in made.keyed:
            connection.execute(f"update {table.name} set id = id + {COPIES}")
        for n in range(len(typecases.TOO_MUCH)):
            connection.execute(f"update u{n} set mark = 1; update w{n} set id = 2")


def read_printed(server: EmbeddedPostgres, connection: psycopg.Connection, made: World, name: str) -> None:
    """Read what the server prints, in a session with our settings, as bare bytes."""
    with connect(server.url(name)) as session:
        for table in [*made.tables, *made.keyed]:
            query = f"select {', '.join(table.columns)} from public.{table.name} where id < {COPIES} order by id"
            result = session.pgconn.exec_(query.encode())
            made.printed[table.name] = [
                [_decoded(result.get_value(row, column)) for row in range(result.ntuples)]
                for column in range(result.nfields)
            ]
    query = """
        select distinct t.oid::int8, format_type(t.oid, -1), coalesce(e.typtype, t.typtype)::text
        from pg_attribute a join pg_type t on t.oid = a.atttypid
        left join pg_type e on e.oid = t.typelem and t.typcategory = 'A'
        where attrelid in (select oid from pg_class where relname ~ '^t[0-9]+$') and attnum > 0"""
    for oid, kind, letter in connection.execute(query).fetchall():
        made.type_numbers.add(oid)
        made.known[kind] = is_known(oid, letter)


def _decoded(cell: bytes | None) -> str | None:
    return None if cell is None else cell.decode()


def load(source: PostgresCapture, made: World, look: str) -> None:
    with source.snapshot() as snapshot, snapshot.reader() as reader:
        for table in made.tables:
            schema = reader.describe(TableId("public", table.name))
            rows = pa.Table.from_batches(reader.rows(schema)).sort_by("id")
            ids = rows.column("id").to_pylist()
            made.schemas[look, "snapshot", table.name] = schema
            made.found[look, "snapshot", table.name] = _columns(table, rows.slice(0, table.rows))
            made.found[look, "snapshot of the copies", table.name] = _columns(table, rows.slice(table.rows))
            assert ids == [*range(1, table.rows + 1), *range(COPIES + 1, COPIES + table.rows + 1)]
    if look == "plain":
        for n in range(len(typecases.TOO_MUCH)):
            with source.snapshot() as snapshot, snapshot.reader() as reader:
                with pytest.raises(ValueUnfit) as caught:
                    list(reader.rows(reader.describe(TableId("public", f"u{n}"))))
                made.refused[f"u{n}"] = caught.value


def _columns(table: Table, rows: pa.Table) -> list[pa.Array]:
    return [rows.column(name).combine_chunks() for name in table.columns]


def stream(source: PostgresCapture, begin: Lsn | None, made: World, look: str, rows: int) -> None:
    assert begin is not None
    opened = source.live(begin)
    try:
        windows = take(opened, begin, rows)
    finally:
        opened.close()
    batches: dict[str, list[ChangeBatch]] = {}
    for window in windows:
        for batch in window.batches:
            batches.setdefault(batch.schema.table.name, []).append(batch)
    for table in made.tables:
        made.schemas[look, "stream", table.name] = batches[table.name][0].schema
        _collect(made, look, table, batches[table.name])
    for table in made.keyed:
        moved = [row for row in _rows(batches[table.name]) if _struct(row, change.MOVED_FROM) is not None]
        _add(made, look, "moved from", table, [_struct(row, change.MOVED_FROM) for row in moved])
    for n in range(len(typecases.TOO_MUCH)):
        for name in (f"u{n}", f"w{n}"):
            made.unfit[name] = [row.to_pylist()[0] for row in _rows(batches[name])]


def _rows(batches: list[ChangeBatch]) -> list[pa.RecordBatch]:
    return [batch.data.slice(row, 1) for batch in batches for row in range(batch.data.num_rows)]


def _struct(row: pa.RecordBatch, name: str) -> pa.RecordBatch | None:
    if name not in row.schema.names or row.column(name).null_count:
        return None
    return pa.RecordBatch.from_struct_array(row.column(name))


def _collect(made: World, look: str, table: Table, batches: list[ChangeBatch]) -> None:
    by_way: dict[str, list[pa.RecordBatch | None]] = {way: [] for way in WAYS if way != "snapshot"}
    for row in _rows(batches):
        op, n = row.column(change.OP)[0].as_py(), row.column("id")[0].as_py()
        if n > COPIES and op == "update":
            by_way["update"].append(row)
        elif n < COPIES:
            by_way["touched" if op == "update" else op].append(row)
            if op == "update":
                by_way["before"].append(_struct(row, change.BEFORE))
        assert change.UNFIT not in row.schema.names or row.column(change.UNFIT).null_count
    for way, rows in by_way.items():
        _add(made, look, way, table, rows)


def _add(made: World, look: str, way: str, table: Table, rows: list[pa.RecordBatch | None]) -> None:
    assert len(rows) == table.rows
    assert None not in rows, "a row arrived without its old row"
    narrow = [row.select(["id", *table.columns]) for row in rows if row is not None]
    made.found[look, way, table.name] = _columns(table, pa.Table.from_batches(narrow).sort_by("id"))


def _expected(table: Table, made: World, kinds: list[pa.DataType]) -> dict[str, list[Any]]:
    """Return the values that the server's texts mean, by column."""
    return {
        f"{column} {source}": [None if text is None else meaning(kind, text) for text in texts]
        for column, source, kind, texts in zip(table.columns, table.types, kinds, made.printed[table.name], strict=True)
    }


def _plain(table: Table, columns: list[pa.Array]) -> dict[str, list[Any]]:
    return {
        f"{name} {kind}": plain(column) for name, kind, column in zip(table.columns, table.types, columns, strict=True)
    }


@pytest.mark.parametrize("way", WAYS)
def test_a_value_is_what_the_server_prints_however_it_arrives(world: World, way: str) -> None:
    for table in world.tables:
        columns = world.found["plain", way, table.name]
        wanted = _expected(table, world, [column.type for column in columns])
        found = _plain(table, columns)
        for name, values in wanted.items():
            assert UNFIT not in values, name
            assert found[name] == values, name


def test_an_updated_row_loads_like_an_inserted_one(world: World) -> None:
    for table in world.tables:
        inserted, updated = (world.found["plain", way, table.name] for way in ("snapshot", "snapshot of the copies"))
        assert _plain(table, inserted) == _plain(table, updated)


def test_an_old_key_is_what_the_server_printed(world: World) -> None:
    assert sum(len(table.types) for table in world.keyed) > 100
    for table in world.keyed:
        columns = world.found["plain", "moved from", table.name]
        assert _plain(table, columns) == _expected(table, world, [column.type for column in columns])


def test_a_column_has_one_type_however_it_arrives(world: World) -> None:
    for table in world.tables:
        schema = world.schemas["plain", "stream", table.name]
        assert schema == world.schemas["plain", "snapshot", table.name]
        kinds = [column.type for column in schema.columns[2:]]
        for way in WAYS:
            assert [column.type for column in world.found["plain", way, table.name]] == kinds, way


@pytest.mark.parametrize("look", ["role", "database"])
def test_no_setting_of_the_role_or_the_database_changes_a_value(world: World, look: str) -> None:
    for table in world.tables:
        for way in ("stream", "snapshot"):
            assert world.schemas[look, way, table.name] == world.schemas["plain", way, table.name]
        for way in WAYS:
            theirs, ours = (_plain(table, world.found[of, way, table.name]) for of in (look, "plain"))
            assert theirs == ours, way


@pytest.mark.parametrize("setting", PROBES)
def test_each_of_these_settings_would_have_changed_a_value(
    server: EmbeddedPostgres, world: World, setting: str
) -> None:
    query = f"select {PROBES[setting]}".encode()
    with connect(server.url(world.database)) as session:
        ours = _raw(session, query)
        assert ours is not None
        session.execute(f"set {setting} = {HOSTILE[setting]}")
        assert _raw(session, query) != ours


def test_no_limit_of_the_role_ends_a_long_read(server: EmbeddedPostgres, world: World) -> None:
    role, url = world.database, server.url(world.database, world.database)
    with server.connect() as admin:
        query = "select name from pg_settings where name = any(%s)"
        limits = [name for (name,) in admin.execute(query, (list(LIMITS),)).fetchall()]
        for name in limits:
            admin.execute(f"alter role {role} set {name} = '1min'")
    session, replication = connect(url), connect_replication(url)
    try:
        for name in limits:
            assert session.execute(f"show {name}").fetchone() == ("0",)
            assert command(replication, f"SHOW {name}") == ["0"]
    finally:
        session.close()
        replication.finish()
    assert len(limits) >= 4


def _raw(session: psycopg.Connection, query: bytes) -> bytes | None:
    return session.pgconn.exec_(query).get_value(0, 0)


@pytest.mark.parametrize("n", range(len(typecases.TOO_MUCH)), ids=lambda n: " ".join(typecases.TOO_MUCH[n]))
def test_the_text_of_an_unfit_value_is_delivered_with_its_row(world: World, n: int) -> None:
    text = typecases.TOO_MUCH[n][1]
    inserted, updated = world.unfit[f"u{n}"]
    assert inserted["v"] is None
    assert inserted[change.UNFIT] == [{"column": "v", "text": text}]
    assert updated["v"] is None
    assert updated[change.BEFORE]["v"] is None
    assert sorted(updated[change.UNFIT], key=str) == [
        {"column": "_before.v", "text": text},
        {"column": "v", "text": text},
    ]


@pytest.mark.parametrize("n", range(len(typecases.TOO_MUCH)), ids=lambda n: " ".join(typecases.TOO_MUCH[n]))
def test_the_text_of_an_unfit_key_is_delivered_with_its_row(world: World, n: int) -> None:
    text = typecases.TOO_MUCH[n][1]
    inserted, gone, came = world.unfit[f"w{n}"]
    for row in (inserted, gone):
        assert row["v"] is None
        assert row[change.UNFIT] == [{"column": "v", "text": text}]
    assert came[change.MOVED_FROM] == {"id": 1, "v": None}
    assert sorted(came[change.UNFIT], key=str) == [
        {"column": "_moved_from.v", "text": text},
        {"column": "v", "text": text},
    ]


@pytest.mark.parametrize("n", range(len(typecases.TOO_MUCH)), ids=lambda n: " ".join(typecases.TOO_MUCH[n]))
def test_an_unfit_value_ends_the_load_and_names_the_column(world: World, n: int) -> None:
    said = str(world.refused[f"u{n}"])
    assert f"public.u{n}" in said
    assert "column=v" in said
    assert typecases.TOO_MUCH[n][1] not in said, "a row's value must not be in a log"


def test_every_built_in_type_is_tried_and_has_a_rule(server: EmbeddedPostgres, world: World) -> None:
    query = """
        select t.oid::int8, format_type(t.oid, -1), coalesce(e.typtype, t.typtype)::text from pg_type t
        left join pg_type e on e.oid = t.typelem and t.typcategory = 'A'
        where t.typtype in ('b', 'r', 'm') and coalesce(e.typtype, 'b') in ('b', 'r', 'm') and t.oid < 16384"""
    with server.connect() as connection:
        types = connection.execute(query).fetchall()
    assert len(types) > 150
    assert [name for oid, name, _ in types if oid not in world.type_numbers] == []
    assert [name for oid, name, _ in types if not is_known(oid)] == []


def test_every_type_with_a_binary_kernel_is_tried(world: World) -> None:
    assert set(KINDS) <= world.type_numbers


def test_a_type_that_is_not_built_in_is_unknown(world: World) -> None:
    foreign = {name for name, known in world.known.items() if not known}
    assert {"odd.shout", "odd.shout[]"} <= foreign
    brought = {f"odd.{kind}" for kinds in typecases.EXTENSIONS.values() for kind in kinds} | {"odd.shout"}
    assert {name.removesuffix("[]") for name in foreign} <= brought
