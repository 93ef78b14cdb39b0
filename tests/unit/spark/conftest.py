"""A change log that tests write, for code that reads it as Spark does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.logs import Diary, quick_folder


@pytest.fixture
def diary(tmp_path: Path) -> Iterator[Diary]:
    with quick_folder(tmp_path) as folder:
        writer = Diary(folder / "log")
        yield writer
        writer.close()
