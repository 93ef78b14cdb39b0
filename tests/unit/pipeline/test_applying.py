"""What the apply side does in the background, and who may say what a table is, without Spark or a source."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tailrace.changelog.read.reader import ChangeLog
from tailrace.pipeline.apply.applier import Applier
from tailrace.pipeline.config.settings import load_settings
from tailrace.pipeline.report import TableState
from tailrace.pipeline.tables.managed_table import ManagedTable
from tailrace.tables.location import TableLocation
from tailrace.tasks.load_store import LoadHold
from tests.support.changes import SHOP
from tests.support.logs import Diary


def applying_in(folder: Path) -> Applier:
    Diary(folder / "log").close()
    file = folder / "tailrace.yaml"
    file.write_text(
        "name: shop\nsource: {url: postgresql://host/db, tables: ['public.*']}\n"
        f"log: {folder / 'log'}\ntables: {{path: ./lake}}\n"
    )
    source: Any = SimpleNamespace(parse_value=None, lag=None, tables=list, discovers_tables=False)
    return Applier(load_settings(file), ChangeLog.open(folder / "log"), source)


def test_threads_that_have_ended_are_not_kept(tmp_path: Path) -> None:
    applying, done = applying_in(tmp_path), threading.Event()

    def wait() -> None:
        done.wait(60.0)

    try:
        waiting = applying._in_background(wait)
        for _ in range(50):
            applying._in_background(lambda: None).join()
        assert applying._alive() == [waiting]
        assert len(applying._threads) <= 2
    finally:
        done.set()
        applying.stop()
    assert not waiting.is_alive(), "whoever stops waits for those that are at work"


def test_what_a_table_is_while_its_load_lands_only_the_landing_says(tmp_path: Path) -> None:
    applying = applying_in(tmp_path)
    try:
        applying.discover()
        life = ManagedTable(SHOP.table, TableLocation(path=tmp_path / "lake", log_id="log"), state=TableState.SEEDING)
        landing: Any = SimpleNamespace(managed=life, committing=True, reading={}, state_before=TableState.NEW)
        applying.registry.tables[life.table] = life
        loading = applying.load_scheduler
        loading._loads[life.table] = landing
        applying.registry.load_store.set_hold(life.table, LoadHold.PAUSED)
        loading._obey()
        assert life.state is TableState.SEEDING
        life.state = TableState.CATCHING_UP
        del loading._loads[life.table]
        for held in (LoadHold.PAUSED, None):
            applying.registry.load_store.set_hold(life.table, held)
            loading._obey()
            assert life.state is TableState.CATCHING_UP
        assert not loading._was, "nothing is kept of what it was"
    finally:
        applying.stop()
