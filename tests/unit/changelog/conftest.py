"""A folder for a log, and a log that already holds something."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tailrace.changelog.writer import LogWriter
from tests.support.logs import Diary, quick_folder
from tests.support.windows import SOURCE, rows_window, window


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture
def writer(folder: Path) -> Iterator[LogWriter]:
    opened = LogWriter(folder, SOURCE)
    yield opened
    opened.close()


@pytest.fixture
def filled(folder: Path) -> Path:
    """A closed log of three commits: where it begins, then rows 1 to 3, then rows 4 and 5."""
    opened = LogWriter(folder, SOURCE)
    opened.append(window(0, 100))
    opened.append(rows_window(100, 200, 1, 2, 3))
    opened.append(rows_window(200, 300, 4, 5))
    opened.close()
    return folder


@pytest.fixture
def quick(tmp_path: Path) -> Iterator[Path]:
    """A folder for a log, in memory if there is such a place: for tests with very many commits."""
    with quick_folder(tmp_path) as found:
        yield found / "log"


@pytest.fixture
def diary(quick: Path) -> Iterator[Diary]:
    """A writer that notes what it wrote."""
    opened = Diary(quick)
    yield opened
    opened.close()
