"""The apply side's threads and table states, without Spark or a source."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tailrace.changelog.read.reader import ChangeLog
from tailrace.pipeline.apply.applier import Applier
from tailrace.pipeline.config.settings_file import load_settings
from tailrace.pipeline.report import TableState
from tailrace.pipeline.tables.managed_table import ManagedTable
from tailrace.tables.location import TableLocation
from tailrace.tasks.load_store import LoadHold
from tests.support.changes import SHOP
from tests.support.logs import Diary


def applier_in(folder: Path) -> Applier:
    Diary(folder / "log").close()
    file = folder / "tailrace.yaml"
    file.write_text(
        "name: shop\nsource: {url: postgresql://host/db, tables: ['public.*']}\n"
        f"log: {folder / 'log'}\ntables: {{path: ./lake}}\n"
    )
    source: Any = SimpleNamespace(parse_value=None, lag=None, tables=list, discovers_tables=False)
    return Applier(load_settings(file), ChangeLog.open(folder / "log"), source)


def test_threads_that_have_ended_are_not_kept(tmp_path: Path) -> None:
    applier, done = applier_in(tmp_path), threading.Event()

    def wait() -> None:
        done.wait(60.0)

    try:
        waiting = applier._in_background(wait)
        for _ in range(50):
            applier._in_background(lambda: None).join()
        assert applier._alive() == [waiting]
        assert len(applier._threads) <= 2
    finally:
        done.set()
        applier.stop()
    assert not waiting.is_alive(), "stop() waits for the threads that work"


def test_holds_do_not_change_a_table_state_while_its_load_commits(tmp_path: Path) -> None:
    applier = applier_in(tmp_path)
    try:
        applier.discover()
        managed = ManagedTable(
            SHOP.table, TableLocation(path=tmp_path / "lake", log_id="log"), state=TableState.SEEDING
        )
        committing_load: Any = SimpleNamespace(
            managed=managed, committing=True, reading={}, state_before=TableState.NEW
        )
        applier.registry.tables[managed.table] = managed
        scheduler = applier.load_scheduler
        scheduler._loads[managed.table] = committing_load
        applier.registry.load_store.set_hold(managed.table, LoadHold.PAUSED)
        scheduler._apply_holds()
        assert managed.state is TableState.SEEDING
        managed.state = TableState.CATCHING_UP
        del scheduler._loads[managed.table]
        for hold in (LoadHold.PAUSED, None):
            applier.registry.load_store.set_hold(managed.table, hold)
            scheduler._apply_holds()
            assert managed.state is TableState.CATCHING_UP
        assert not scheduler._state_before_hold, "the state before the hold is dropped"
    finally:
        applier.stop()
