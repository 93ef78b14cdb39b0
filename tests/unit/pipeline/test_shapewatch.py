"""What is noticed at the source without a row that tells of it, beside whoever is applying."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from tailrace.capture.postgres.source import PostgresCapture
from tailrace.changelog.format.coverage import announce_tables, confirm_tables
from tailrace.model.position import Lsn
from tailrace.model.schema import Identity, TableId, TableSchema
from tailrace.pipeline.apply import schema_watch
from tailrace.pipeline.apply.schema_watch import SchemaWatch
from tailrace.pipeline.report import TableState
from tailrace.pipeline.tables.managed_table import ManagedTable
from tailrace.pipeline.tables.registry import TableRegistry
from tests.support.changes import SHOP, insert, update
from tests.support.quiet import Quiet


class Unaltered:
    """A source whose catalogue shows nothing new."""

    def definition_versions(self, tables: Sequence[TableId]) -> dict[TableId, str]:
        return {}

    def describe(self, tables: Iterable[TableId]) -> dict[TableId, TableSchema]:
        return dict.fromkeys(tables, SHOP)


@pytest.fixture
def quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Quiet:
    monkeypatch.setattr(schema_watch, "LOOK_SECONDS", 0.0)
    made = Quiet(tmp_path)
    made.diary.commit()
    made.load_anew([{"id": 1, "n": 1}], "first")
    return made


def watched(quiet: Quiet) -> tuple[TableRegistry, ManagedTable, SchemaWatch]:
    lives = quiet.lives()
    life = lives.add(SHOP.table)
    watch = SchemaWatch(cast(PostgresCapture, Unaltered()), lives)
    watch.run_if_due()
    return lives, life, watch


def come_in_again(quiet: Quiet) -> None:
    """The table was not published for a while."""
    path, tables = quiet.settings.log.path, [(SHOP.table, SHOP.relation or 0)]
    confirm_tables(path, tables, Lsn(1))
    announce_tables(path, tables, Lsn(quiet.cursor.position.value + 50))


def test_a_table_that_was_not_published_for_a_while_is_loaded_anew(quiet: Quiet) -> None:
    _, life, watch = watched(quiet)
    come_in_again(quiet)
    watch.run_if_due()
    assert (life.state, life.reload_reason) == (TableState.REFRESHING, "its changes were not published for a while")


def test_so_it_is_though_somebody_is_applying_to_it_at_that_moment(quiet: Quiet) -> None:
    """Who applies says at the end that the table is live: it was so for ever, and never loaded."""
    lives, life, watch = watched(quiet)
    come_in_again(quiet)
    with life.lock:
        watch.run_if_due()
        assert (lives.next_range(life, lives.index.last_commit), life.state) == (None, TableState.LIVE)
        assert life.reload_reason is None, "left to the next look"
    watch.run_if_due()
    assert life.state is TableState.REFRESHING
    lives.next_range(life, lives.index.last_commit)
    assert life.state is TableState.REFRESHING


def test_what_comes_once_it_is_published_again_is_not_taken_before_it_is_loaded(quiet: Quiet) -> None:
    """Nobody would remember, if the process ended before the next look, that the table lacks what came before."""
    lives, life, _ = watched(quiet)
    come_in_again(quiet)
    quiet.commit(update(1, n=2))
    assert lives.next_range(life, lives.refresh_index()) is None
    assert (life.state, life.reload_reason) == (TableState.REFRESHING, "its changes were not published for a while")


def test_a_table_that_lost_its_identity_is_not_loaded_for_it_but_stops(quiet: Quiet) -> None:
    """Nobody has looked at the source since."""
    lives, life, _ = watched(quiet)
    come_in_again(quiet)
    quiet.commit(insert(9, n=9), schema=replace(SHOP, identity=Identity.NONE))
    assert lives.next_range(life, lives.refresh_index()) is None
    assert life.error is not None
    assert (life.state, life.error.code) == (TableState.FAILED, "schema-changed")


@pytest.mark.parametrize(("identity", "state"), [("none", TableState.REFRESHING), ("key", TableState.CATCHING_UP)])
def test_one_that_publishes_inserts_alone_is_loaded_too_but_not_one_that_has_come_to_that(
    quiet: Quiet, identity: str, state: TableState
) -> None:
    _, life, watch = watched(quiet)
    life.insert_only, life.schema = True, replace(SHOP, identity=Identity(identity))
    come_in_again(quiet)
    watch.run_if_due()
    assert life.state is state
