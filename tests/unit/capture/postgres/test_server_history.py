"""The history file of a timeline, as PostgreSQL writes it."""

from __future__ import annotations

from tailrace.capture.postgres.server_history import branch_points
from tailrace.model.position import Lsn


def test_each_line_has_where_a_timeline_was_left() -> None:
    text = "1\t0/14A3FD8\tno recovery target specified\n\n2\t1/A0\tbefore 2000-01-01 00:00:00+00\n"
    assert branch_points(text) == {1: Lsn(0x14A3FD8), 2: Lsn((1 << 32) + 0xA0)}


def test_comments_empty_lines_and_reasons_are_ignored() -> None:
    assert branch_points("# 7\t0/1\tnot this\n\n   \n3\t0/20\n") == {3: Lsn(0x20)}
    assert branch_points("") == {}
