"""What the apply side does in the background, without Spark or a source."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tailrace.changelog.reader import ChangeLog
from tailrace.pipeline.applying import Applying
from tailrace.pipeline.settings import load_settings
from tests.support.logs import Diary


def applying_in(folder: Path) -> Applying:
    Diary(folder / "log").close()
    file = folder / "tailrace.yaml"
    file.write_text(
        "name: shop\nsource: {url: postgresql://host/db, tables: ['public.*']}\n"
        f"log: {folder / 'log'}\ntables: {{path: ./lake}}\n"
    )
    source: Any = SimpleNamespace(value_of=None)
    return Applying(load_settings(file), ChangeLog.open(folder / "log"), source)


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
