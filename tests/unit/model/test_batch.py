"""A window is whole transactions or a part of one; nothing in between can be created."""

from __future__ import annotations

from typing import Any

import pytest

from tailrace.model.batch import Window
from tailrace.model.position import Lsn
from tests.support.changes import SHOP, insert
from tests.support.windows import batch

BATCHES = (batch(SHOP, insert(1)),)


def window(**fields: Any) -> Window:
    usual: dict[str, Any] = {"start": Lsn(5), "end": Lsn(9), "batches": BATCHES, "rows": 1, "transactions": 1}
    return Window(**usual | fields)


def test_a_transaction_arrives_as_open_windows_and_one_that_finishes_it() -> None:
    come = [
        window(open=True, end=Lsn(5), transactions=0),
        window(open=True, continues=True, end=Lsn(5), transactions=0),
        window(continues=True, continued_end=Lsn(9)),
        window(continues=True, continued_end=Lsn(7), transactions=2),
    ]
    assert not any(one.is_empty for one in come)


@pytest.mark.parametrize(
    "fields",
    [
        {"open": True, "transactions": 0},
        {"open": True, "end": Lsn(5)},
        {"open": True, "end": Lsn(5), "transactions": 0, "batches": ()},
        {"open": True, "end": Lsn(5), "transactions": 0, "continues": True, "continued_end": Lsn(7)},
        {"continues": True},
        {"continued_end": Lsn(7)},
        {"continues": True, "continued_end": Lsn(5)},
        {"continues": True, "continued_end": Lsn(10)},
        {"continues": True, "continued_end": Lsn(9), "transactions": 0},
    ],
)
def test_a_contradictory_window_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"window|transaction"):
        window(**fields)


def test_a_window_that_finishes_a_transaction_is_not_empty_even_if_no_row_is_left() -> None:
    assert not window(continues=True, continued_end=Lsn(9), batches=(), rows=0).is_empty
    assert window(batches=(), rows=0, transactions=0).is_empty
