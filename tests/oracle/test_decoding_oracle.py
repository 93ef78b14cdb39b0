"""Our log against `test_decoding`, PostgreSQL's own reading of the same write-ahead log.

Every transaction, row, column and value must be the same, in the same order, however our windows are cut and however
often our reader is closed, loses a window or is killed in between.
"""

from __future__ import annotations

import shutil
import signal
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
from tailrace.changelog.read.reader import ChangeLog
from tailrace.demo.server import EmbeddedPostgres
from tests.oracle import conftest
from tests.support import oracle, oracle_decoding
from tests.support.logs import quick_folder
from tests.support.oracle import Capture, differences, expect, our_rows
from tests.support.pipelines import Pipeline, eventually
from tests.support.workload import Player, Script, scripts
from tests.support.workload_tables import EXTENDED, EXTENSIONS, SECOND_SCHEMA, TABLES, TYPES, quoted

ALL = (*TABLES, EXTENDED)
PART_BYTES = (None, 200, 2_000, 20_000)
"""A transaction larger than this comes in parts. None: as in earnest, so never here."""
WINDOW_BYTES = (None, 500, 5_000)
"""A window closes at this size."""
WORTHWHILE = {
    "insert", "update", "delete", "truncate", "unchanged", "before", "moved_from", "unfit", "commit", "rollback",
    "prepare", "settled", "parts", "lost windows", "windows", "message",
}  # fmt: skip
"""What must have happened, or the scripts have grown tame."""
WAYS_TO_DIE = ("capture.before_confirm:1", "", "capture.window_read:1", "log.after_link:1")
"""Places where a capture ends its process group with SIGKILL; without one we do."""
_EMPTY = (
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
        active = "select pg_terminate_backend(active_pid) from pg_replication_slots where active"
        assert eventually(lambda: not connection.execute(active).fetchall(), pause=0.02)
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
    @conftest.examples(22)
    @given(
        script=scripts(ALL, ddl=True, rare=True, looks=True, messages=True),
        part=st.sampled_from(PART_BYTES),
        window=st.sampled_from(WINDOW_BYTES),
    )
    def agree(script: Script, part: int | None, window: int | None) -> None:
        with pytest.MonkeyPatch.context() as patch:
            if window is not None:
                patch.setattr(stream, "WINDOW_BYTES", window)
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


@pytest.mark.timeout(7200)
def test_a_capture_that_is_killed_while_it_reads_neither_loses_nor_repeats_a_row(
    server: EmbeddedPostgres, tmp_path: Path
) -> None:
    """The log is read once, in the end: there is nothing to shrink to."""
    empty(server)
    pipeline = Pipeline(tmp_path / "pipeline", server.url(), tables=f'["public.*", "{SECOND_SCHEMA}.*"]')
    with closing(Player(server.url())) as player:
        player.make(Script(ALL, ()))
        catch_up(pipeline)
        with server.connect() as connection:
            oracle_decoding.make_slot(connection)
        for number, place in enumerate(WAYS_TO_DIE):
            play_some(player, conftest.seed() * 100 + number)
            kill_at_work(pipeline, place)
        play_some(player, conftest.seed() * 100 + len(WAYS_TO_DIE))
        catch_up(pipeline)
        found = differences(our_rows(pipeline.log), expect(told(server.url()), ALL))
        assert not found, "\n".join([*found, *player.said])


def play_some(player: Player, number: int) -> None:
    @seed(number)
    @conftest.examples(4)
    @given(script=scripts(ALL, ddl=True, rare=True, messages=True))
    def play(script: Script) -> None:
        player.play(script)

    play()


def catch_up(pipeline: Pipeline) -> None:
    done = pipeline.call("capture", "--until-caught-up")
    assert done.returncode == 0, done.stderr


def kill_at_work(pipeline: Pipeline, place: str) -> None:
    """Have a capture die at a named place, or kill it once its log has grown."""
    before = ChangeLog.open(pipeline.log).newest()
    armed = {"TAILRACE_FAILPOINT": place, "TAILRACE_FAILPOINT_LOG": str(pipeline.folder / "hits")}
    running = pipeline.start("capture", environment=armed if place else {})
    try:
        if place:
            assert running.wait() == -signal.SIGKILL, running.said()
        else:
            assert eventually(lambda: ChangeLog.open(pipeline.log).newest() > before, pause=0.01), running.said()
    finally:
        running.end()


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
