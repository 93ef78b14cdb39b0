"""A database in another encoding than UTF-8: names and values arrive as UTF-8 by load and stream.

One without an encoding is asked for its bytes.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pytest

from tailrace.capture.postgres.config import PostgresSettings
from tailrace.capture.postgres.connect import command, connect, connect_replication, unchecked_text
from tailrace.capture.postgres.source import PostgresCapture
from tailrace.demo.server import EmbeddedPostgres
from tailrace.model import change
from tailrace.model.position import Lsn
from tailrace.model.schema import TableId
from tests.support.benches import take
from tests.support.databases import database

LETTERS = "".join(map(chr, range(0xA0, 0x100)))
"""All letters that LATIN1 has beyond ASCII."""
TABLE = TableId("schéma", "prénom ß")
SETUP = """
create schema "schéma";
create type "schéma"."humör" as enum ('süß', 'böse');
create type "schéma"."paar" as ("größe" int, "äh" text);
create table "schéma"."prénom ß" (
  "clé" text primary key, "größe" text, "liste" text[], "laune" "schéma"."humör", "paar" "schéma"."paar",
  j json, jb jsonb, n name, c char(3), v varchar(200)
);
"""
ROW: dict[str, Any] = {
    "clé": "é", "größe": LETTERS, "liste": ["ß", None, "a,é"], "laune": "süß", "paar": '(1,"é ß")',
    "j": '{"é": "\\u0000 \\u00e9"}', "jb": '{"ß": "é"}', "n": "ñame", "c": "é  ", "v": LETTERS,
}  # fmt: skip
INSERT = f"""insert into "schéma"."prénom ß" values (
  'é', '{LETTERS}', array['ß', null, 'a,é'], 'süß', row(1, 'é ß'), '{{"é": "\\u0000 \\u00e9"}}', '{{"ß": "é"}}', 'ñame',
  'é', '{LETTERS}')"""


@dataclass(frozen=True)
class Latin:
    """A database in LATIN1 and a connection to it."""

    capture: PostgresCapture
    begin: Lsn


@pytest.fixture
def latin(server: EmbeddedPostgres) -> Iterator[Latin]:
    name = f"latin_{uuid.uuid4().hex[:12]}"
    with database(server, name, "encoding 'LATIN1' template template0 locale 'C'"), server.connect(name) as connection:
        connection.execute(SETUP)
        source = PostgresCapture(
            PostgresSettings(url=server.url(name), wanted=lambda table: True, slot=name, publication=name)
        )
        begin = source.prepare(None)
        assert begin is not None
        connection.execute(INSERT.encode("latin1"))
        yield Latin(source, begin)


def test_names_and_values_of_a_latin_database_are_loaded_as_utf_8(latin: Latin) -> None:
    with latin.capture.snapshot() as snapshot, snapshot.reader() as reader:
        schema = reader.describe(TABLE)
        rows = pa.Table.from_batches(reader.rows(schema))
    rows.validate(full=True)
    assert rows.to_pylist() == [ROW]
    assert schema.key == ("clé",)
    assert schema.columns[3].source_type == '"schéma"."humör"'


def test_names_and_values_of_a_latin_database_are_streamed_as_utf_8(latin: Latin) -> None:
    stream = latin.capture.live(latin.begin)
    try:
        (window,) = take(stream, latin.begin, 1)
    finally:
        stream.close()
    (batch,) = window.batches
    batch.data.validate(full=True)
    assert batch.schema.table == TABLE
    (row,) = batch.data.to_pylist()
    assert {name: row[name] for name in ROW} == ROW
    assert row[change.OP] == "insert"


def test_a_database_without_an_encoding_sends_its_bytes(server: EmbeddedPostgres) -> None:
    name, query = f"ascii_{uuid.uuid4().hex[:12]}", b"select convert_from('\\xe9', 'SQL_ASCII')"
    with database(server, name, "encoding 'SQL_ASCII' template template0 locale 'C'"):
        replication = connect_replication(server.url(name))
        try:
            assert replication.exec_(query).get_value(0, 0) == b"\xe9"
        finally:
            replication.finish()
        with connect(server.url(name)) as session:
            with unchecked_text(session.pgconn):
                assert session.pgconn.exec_(query).get_value(0, 0) == b"\xe9"
            assert session.pgconn.exec_(query).get_value(0, 0) is None, "asked for UTF-8, it refuses"
            assert session.execute("select 'é'").fetchone() == ("é",)


def test_a_database_with_an_encoding_converts_its_text(server: EmbeddedPostgres, latin: Latin) -> None:
    replication = connect_replication(latin.capture.settings.url)
    try:
        with unchecked_text(replication):
            assert command(replication, "SELECT 'é'") == ["é"]
            assert command(replication, "SHOW client_encoding") == ["UTF8"]
    finally:
        replication.finish()
