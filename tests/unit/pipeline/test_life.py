"""Where tables stand beside the log."""

from __future__ import annotations

from pathlib import Path

import pytest

from tailrace.changelog.reader import ChangeLog
from tailrace.pipeline import life as life_module
from tailrace.pipeline.life import Ahead, Lives
from tailrace.tables.layout import Layout
from tests.support.logs import Diary, inserts


def test_a_micro_batch_is_limited_only_if_more_was_waiting_when_it_was_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(life_module, "ROWS_PER_BATCH_MAX", 2)
    diary = Diary(tmp_path / "log")
    for number in range(3):
        diary.commit(inserts(number))
    found = Lives(ChangeLog.open(diary.path), Layout(root=tmp_path / "lake"))
    assert found.ahead(0) == Ahead(end=2, limited=True)
    assert found.ahead(2) == Ahead(end=3, limited=False)
    assert found.ahead(3) == Ahead(end=3, limited=False)
    diary.commit(inserts(9))
    diary.close()
    assert found.ahead(2) == Ahead(end=4, limited=False), "what comes later is planned later"
