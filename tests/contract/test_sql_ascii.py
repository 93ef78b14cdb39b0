"""A database without an encoding: texts that are not UTF-8 are refused with their location, or replaced."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import psycopg
import pyarrow as pa
import pytest

from tailrace.capture.postgres.config import PostgresSettings
from tailrace.capture.postgres.source import PostgresCapture
from tailrace.demo.server import EmbeddedPostgres
from tailrace.errors import ProtocolViolation, Unsupported, ValueUnfit
from tailrace.model.batch import ChangeBatch
from tailrace.model.position import Lsn
from tailrace.model.schema import TableId
from tests.support.benches import Streams, take
from tests.support.databases import database

DATABASE = "plain_bytes"
TABLE = TableId("public", "notes")


class Scene:
    def __init__(self, server: EmbeddedPostgres) -> None:
        self.server = server
        # What psycopg sends is bytes as they are: the server has no encoding to check them by.
        self.connection = psycopg.connect(server.url(DATABASE), autocommit=True, client_encoding="SQL_ASCII")
        self.connection.execute(
            "create table notes (id int primary key, t text, a text[]); alter table notes replica identity full"
        )
        self.settings = PostgresSettings(
            url=server.url(DATABASE), wanted=lambda _: True, messages=lambda _: True, slot="plain", publication="plain"
        )
        self.begin = Lsn(0)

    def run(self, statement: bytes) -> None:
        self.connection.execute(statement)

    def capture(self, *, replaced: bool) -> PostgresCapture:
        return PostgresCapture(replace(self.settings, invalid_text_replaced=replaced))

    def start(self) -> None:
        begin = self.capture(replaced=False).prepare(None)
        assert begin is not None
        self.begin = begin

    def streamed(self, rows: int, *, replaced: bool) -> list[ChangeBatch]:
        streams = Streams(self.capture(replaced=replaced))
        try:
            windows = take(streams.open(self.begin), self.begin, rows)
        finally:
            streams.close_all()
        return [batch for window in windows for batch in window.batches]

    def loaded(self, *, replaced: bool) -> list[dict[str, Any]]:
        with self.capture(replaced=replaced).snapshot() as snapshot, snapshot.reader() as reader:
            batches = list(reader.rows(reader.describe(TABLE)))
        for batch in batches:
            batch.validate(full=True)
        return [row for batch in batches for row in batch.to_pylist()]


@pytest.fixture
def scene(server: EmbeddedPostgres) -> Iterator[Scene]:
    with database(server, DATABASE, "encoding 'SQL_ASCII' template template0 locale 'C'"):
        made = Scene(server)
        yield made
        made.capture(replaced=False).drop()
        made.connection.close()


def test_what_is_utf8_arrives_as_it_is(scene: Scene) -> None:
    scene.start()
    scene.run("insert into notes values (1, 'né ✓', '{ß,NULL}')".encode())
    (batch,) = scene.streamed(1, replaced=False)
    (row,) = batch.data.to_pylist()
    assert (row["t"], row["a"]) == ("né ✓", ["ß", None])
    assert "_unfit" not in batch.data.schema.names
    assert scene.loaded(replaced=False) == [{"id": 1, "t": "né ✓", "a": ["ß", None]}]


def test_other_bytes_do_not_fit_and_the_row_is_kept_with_them(scene: Scene) -> None:
    scene.start()
    # In one transaction, so that both are in one window.
    scene.run(b"insert into notes values (1, 'good', '{x}'), (2, 'caf\xe9', '{\"\xff\",y}')")
    (batch,) = scene.streamed(2, replaced=False)
    batch.data.validate(full=True)
    good, bad = batch.data.to_pylist()
    assert (good["t"], good["_unfit"]) == ("good", None)
    assert (bad["t"], bad["a"]) == (None, None)
    assert bad["_unfit"] == [{"column": "t", "text": "caf\\xe9"}, {"column": "a", "text": "{\\xff,y}"}]
    assert batch.unfit == 2


def test_old_rows_are_checked_too(scene: Scene) -> None:
    scene.run(b"insert into notes values (1, 'caf\xe9')")
    scene.start()
    scene.run(b"update notes set t = 'cafe'")
    (batch,) = scene.streamed(1, replaced=False)
    batch.data.validate(full=True)
    (row,) = batch.data.to_pylist()
    assert (row["t"], row["_before"]["t"]) == ("cafe", None)
    assert row["_unfit"] == [{"column": "_before.t", "text": "caf\\xe9"}]


def test_by_setting_unreadable_bytes_are_replaced_by_a_character(scene: Scene) -> None:
    scene.start()
    scene.run(b"insert into notes values (1, 'caf\xe9', '{\"\xff\",y}')")
    (batch,) = scene.streamed(1, replaced=True)
    (row,) = batch.data.to_pylist()
    assert (row["t"], row["a"]) == ("caf�", ["�", "y"])
    assert scene.loaded(replaced=True) == [{"id": 1, "t": "caf�", "a": ["�", "y"]}]


def test_a_load_is_refused_with_the_location_of_the_row(scene: Scene) -> None:
    scene.start()
    scene.run(b"insert into notes select n, 'good' from generate_series(1, 50) n")
    scene.run(b"update notes set t = 'caf\xe9' where id = 33")
    with pytest.raises(ValueUnfit, match="does not fit") as refused:
        scene.loaded(replaced=False)
    assert refused.value.fields["column"] == "t"
    found = scene.connection.execute(f"select id from notes where ctid = '{refused.value.fields['ctid']}'".encode())
    assert found.fetchone() == (33,)
    assert "invalid_text" in refused.value.hint


def test_json_is_text_like_any_other(scene: Scene) -> None:
    scene.run(b"alter table notes add j json")
    scene.start()
    scene.run(rb"""insert into notes values (1, 'x', null, '{"nul": "\u0000", "e": "\u00e9"}')""")
    (batch,) = scene.streamed(1, replaced=False)
    (row,) = batch.data.to_pylist()
    assert json.loads(row["j"]) == {"nul": "\0", "e": "é"}
    assert row["j"] == scene.loaded(replaced=False)[0]["j"]


def test_the_prefix_of_a_message_is_text_and_its_content_is_bytes(scene: Scene) -> None:
    scene.start()
    scene.run(b"select pg_logical_emit_message(true, 'pr\xe9fix', 'cont\xe9nt')")
    (batch,) = scene.streamed(1, replaced=False)
    batch.data.validate(full=True)
    (row,) = batch.data.to_pylist()
    assert (row["prefix"], row["content"]) == ("pr�fix", b"cont\xe9nt")
    assert batch.data.schema.field("content").type == pa.binary()


def test_a_table_whose_name_is_not_text_is_left_out_with_a_warning(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    scene.run(b'create table "caf\xe9" (id int primary key)')
    scene.start()
    assert [table.table for table in scene.capture(replaced=False).tables()] == [TABLE]
    (warning,) = [record for record in caplog.records if "not UTF-8" in record.message]
    assert vars(warning)["table"] == "public.caf\\xe9"
    assert "Rename" in vars(warning)["hint"]


def test_a_column_whose_name_is_not_text_is_refused_with_a_hint(scene: Scene) -> None:
    scene.start()
    scene.run(b'alter table notes add "caf\xe9" int')
    scene.run(b"insert into notes values (1)")
    with pytest.raises(ProtocolViolation, match="not UTF-8") as refused:
        scene.streamed(1, replaced=False)
    assert "Rename" in refused.value.hint
    with pytest.raises(Unsupported, match="not UTF-8") as again:
        scene.loaded(replaced=False)
    assert "Rename" in again.value.hint


def test_a_default_that_is_not_text_causes_no_error(scene: Scene) -> None:
    scene.run(b"insert into notes values (1, 'x')")
    scene.run(b"alter table notes alter t set default 'caf\xe9', add x text default 'th\xe9'")
    scene.start()
    scene.run(b"insert into notes (id, t, x) values (2, 'y', 'z')")
    (batch,) = scene.streamed(1, replaced=False)
    assert batch.schema.facts is not None
    assert [column.fast_default for column in batch.schema.facts.columns] == [None, None, None, "th\\xe9"]
    assert batch.schema.facts.columns[1].default == "'caf\\xe9'::text"
