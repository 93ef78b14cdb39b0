"""Each edit with which tools/break_lessons.py breaks a copy of the product changes a line that is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.break_lessons import BREAKS, Break

SRC = Path(__file__).parents[2] / "src" / "tailrace"


@pytest.mark.parametrize("lesson", BREAKS, ids=lambda lesson: lesson.lesson)
def test_the_line_that_is_broken_exists_once(lesson: Break) -> None:
    text = (SRC / lesson.file).read_text()
    assert not lesson.right or text.count(lesson.right) == 1
    assert lesson.lesson == "none" or lesson.right != lesson.wrong
