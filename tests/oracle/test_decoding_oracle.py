"""Our log against `test_decoding`, PostgreSQL's own reading of the same write-ahead log.

Every transaction, row, column and value must be the same, in the same order, however our windows are cut and however
often our reader is closed, loses a window or is killed in between.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psycopg
import pytest
from hypothesis import given, note, seed
from hypothesis import strategies as st

from tailrace.capture.postgres import stream
from tailrace.capture.postgres.connect import SESSION
from tailrace.demo.server import EmbeddedPostgres
from tests.oracle import conftest
from tests.support import oracle, oracle_decoding
from tests.support.logs import quick_folder
from tests.support.oracle import Capture, differences, expect, our_rows
from tests.support.workload import Player, Script, scripts
from tests.support.workload_tables import EXTENDED, EXTENSIONS, SECOND_SCHEMA, TABLES, TYPES, quoted

ALL = (*TABLES, EXTENDED)
PART_BYTES = (None, 200, 2_000, 20_000)
"""A transaction larger than this comes in parts. None: as in earnest, so never here."""
WORTHWHILE = {
    "insert", "update", "delete", "truncate", "unchanged", "before", "moved_from", "unfit", "commit", "rollback",
    "prepare", "settled", "parts", "lost windows", "windows", "message",
}  # fmt: skip
"""What must have happened, or the scripts have grown tame."""
_EMPTY = (
    "select pg_terminate_backend(active_pid) from pg_replication_slots where active",
    "select pg_drop_replication_slot(slot_name) from pg_replication_slots",
    f"drop publication if exists {oracle.SLOT}, {oracle.SLOT}_inserts",
    f"drop schema if exists public, {quoted(SECOND_SCHEMA)} cascade",
    "create schema public",
)


@pytest.fixture(scope="module")
def server(decoding_server: EmbeddedPostgres) -> EmbeddedPostgres:
    """The types stay; each script makes its own tables."""
    with decoding_server.connect() as connection:
        connection.execute("create schema kinds; alter database postgres set search_path = public, kinds")
        connection.execute("set search_path = kinds")
        for text in (*TYPES, *EXTENSIONS):
            connection.execute(text.encode())
    return decoding_server


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with quick_folder(tmp_path_factory.mktemp("oracle")) as found:
        yield found


def empty(server: EmbeddedPostgres) -> None:
    """A script meets nothing of the one before."""
    with server.connect() as connection:
        for text in _EMPTY:
            connection.execute(text.encode())


def told(url: str) -> list[oracle_decoding.ToldTransaction]:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(SESSION)
        return oracle_decoding.read_slot(connection)


@pytest.mark.timeout(7200)
def test_our_log_and_the_servers_own_reading_agree_on_every_row_and_value(
    server: EmbeddedPostgres, folder: Path
) -> None:
    seen: Counter[str] = Counter()

    @seed(conftest.seed())
    @conftest.examples(30)
    @given(script=scripts(ALL, ddl=True, rare=True, looks=True, messages=True), part=st.sampled_from(PART_BYTES))
    def agree(script: Script, part: int | None) -> None:
        with pytest.MonkeyPatch.context() as patch:
            if part is not None:
                patch.setattr(stream, "BIG_BYTES", part)
                patch.setattr(stream, "DRAIN_BYTES", max(part // 8, 64))
            found, said = disagreement(server, folder / "log", script, seen)
        if found:
            note("\n".join(said))
        assert not found, "\n".join(found)

    agree()
    missing = WORTHWHILE - seen.keys()
    assert not missing, seen
    assert seen["refused"] < seen["done"] / 4, seen


def disagreement(
    server: EmbeddedPostgres, path: Path, script: Script, seen: Counter[str]
) -> tuple[list[str], list[str]]:
    """How the two readings of a script differ, and what was done; `seen` counts what there was to read."""
    empty(server)
    shutil.rmtree(path, ignore_errors=True)
    with closing(Player(server.url())) as player:
        player.make(script)
        with closing(Capture(server.url(), path)) as capture:
            with server.connect() as connection:
                oracle_decoding.make_slot(connection)
            player.play(script, capture.look)
            capture.catch_up()
        ours, theirs = our_rows(path), expect(told(server.url()), script.tables)
        seen.update(player.done)
        seen.update(capture.counts)
        for row in theirs:
            seen.update([row.op, f"rows of {row.table[1]}", *(["unchanged"] if row.unchanged else [])])
            seen.update(name for name in ("before", "moved_from") if getattr(row, name) is not None)
        seen.update("unfit" for row in ours if row.unfit)
        return differences(ours, theirs), player.said
