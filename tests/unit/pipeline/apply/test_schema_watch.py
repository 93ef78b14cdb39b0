"""The schema watch: gaps in publication, with and without a concurrent apply."""

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
    made.reload([{"id": 1, "n": 1}], "first")
    return made


def watched(quiet: Quiet) -> tuple[TableRegistry, ManagedTable, SchemaWatch]:
    registry = quiet.registry()
    managed = registry.add(SHOP.table)
    watch = SchemaWatch(cast(PostgresCapture, Unaltered()), registry)
    watch.run_if_due()
    return registry, managed, watch


def publish_again(quiet: Quiet) -> None:
    """The table was not published for a while."""
    path, tables = quiet.settings.log.path, [(SHOP.table, SHOP.relation or 0)]
    confirm_tables(path, tables, Lsn(1))
    announce_tables(path, tables, Lsn(quiet.applied_position.position.value + 50))


def test_a_table_that_was_not_published_for_a_while_is_reloaded(quiet: Quiet) -> None:
    _, managed, watch = watched(quiet)
    publish_again(quiet)
    watch.run_if_due()
    assert (managed.state, managed.reload_reason) == (
        TableState.REFRESHING,
        "its changes were not published for a while",
    )


def test_a_table_with_a_gap_is_reloaded_even_during_an_apply(quiet: Quiet) -> None:
    """The apply sets the table to live at its end; a reload requested before that would be lost."""
    registry, managed, watch = watched(quiet)
    publish_again(quiet)
    with managed.lock:
        watch.run_if_due()
        assert (registry.next_range(managed, registry.index.last_commit), managed.state) == (None, TableState.LIVE)
        assert managed.reload_reason is None, "left to the next check"
    watch.run_if_due()
    assert managed.state is TableState.REFRESHING
    registry.next_range(managed, registry.index.last_commit)
    assert managed.state is TableState.REFRESHING


def test_changes_after_a_gap_are_not_applied_before_the_reload(quiet: Quiet) -> None:
    """If the process ended before the next check, the missing changes would otherwise be forgotten."""
    registry, managed, _ = watched(quiet)
    publish_again(quiet)
    quiet.commit(update(1, n=2))
    assert registry.next_range(managed, registry.refresh_index()) is None
    assert (managed.state, managed.reload_reason) == (
        TableState.REFRESHING,
        "its changes were not published for a while",
    )


def test_a_table_that_lost_its_identity_stops_instead_of_reloading(quiet: Quiet) -> None:
    """The watch has not run since."""
    registry, managed, _ = watched(quiet)
    publish_again(quiet)
    quiet.commit(insert(9, n=9), schema=replace(SHOP, identity=Identity.NONE))
    assert registry.next_range(managed, registry.refresh_index()) is None
    assert managed.error is not None
    assert (managed.state, managed.error.code) == (TableState.FAILED, "schema-changed")


@pytest.mark.parametrize(("identity", "state"), [("none", TableState.REFRESHING), ("key", TableState.CATCHING_UP)])
def test_an_insert_only_table_is_reloaded_unless_it_has_lost_its_identity(
    quiet: Quiet, identity: str, state: TableState
) -> None:
    _, managed, watch = watched(quiet)
    managed.insert_only, managed.schema = True, replace(SHOP, identity=Identity(identity))
    publish_again(quiet)
    watch.run_if_due()
    assert managed.state is state
