"""Fixtures: a folder for a log, and logs with rows.

A module that says `PLACES = ("disk", "store")` has its tests run in a folder, and in an object store in memory. Tests
of what only a disk has are marked `only_on_disk` there.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tailrace.changelog.write.writer import LogWriter
from tailrace.storage.files import LogPath
from tailrace.storage.objects import ObjectPath
from tests.support.logs import Diary, quick_folder
from tests.support.windows import SOURCE, rows_window, window


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    places = getattr(metafunc.module, "PLACES", ())
    marked = [mark for mark in metafunc.definition.iter_markers("parametrize") if mark.args[0] == "where"]
    if places and not marked and "where" in metafunc.fixturenames:
        metafunc.parametrize("where", places)


@pytest.fixture
def where() -> str:
    return "disk"


def in_store() -> ObjectPath:
    return ObjectPath.parse(f"memory://{uuid.uuid4().hex}/log")


@pytest.fixture
def folder(tmp_path: Path, where: str) -> LogPath:
    return tmp_path / "log" if where == "disk" else in_store()


@pytest.fixture
def writer(folder: LogPath) -> Iterator[LogWriter]:
    opened = LogWriter(folder, SOURCE)
    yield opened
    opened.close()


@pytest.fixture
def filled(folder: LogPath) -> LogPath:
    """A closed log of three commits: no rows, rows 1 to 3, rows 4 and 5."""
    opened = LogWriter(folder, SOURCE)
    opened.append(window(0, 100))
    opened.append(rows_window(100, 200, 1, 2, 3))
    opened.append(rows_window(200, 300, 4, 5))
    opened.close()
    return folder


@pytest.fixture
def quick(tmp_path: Path, where: str) -> Iterator[LogPath]:
    """A folder for a log with very many commits, in memory if possible."""
    if where == "store":
        yield in_store()
        return
    with quick_folder(tmp_path) as found:
        yield found / "log"


@pytest.fixture
def diary(quick: LogPath) -> Iterator[Diary]:
    """A writer that records what it wrote."""
    opened = Diary(quick)
    yield opened
    opened.close()
