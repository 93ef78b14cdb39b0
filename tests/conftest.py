"""Random order, but for two kinds.

A test that holds the product to a time (`alone`) has the machine to itself: it waits for the tests under way, and
those to come wait for it. So it comes first, while there is little to wait for. The longest test comes next: started
last, it would run beside an idle worker. Markers for what tests use are set here, too (`tests.support.marks`).
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support.marks import mark

# How long an example takes says something of the machine, and nothing of the product.
settings.register_profile("noisy", deadline=None)
settings.load_profile("noisy")

LONGEST = "test_killed_at_every_named_place"
# Workers are processes of their own, so they meet at two files that are there anyway.
DOOR, ROOM = Path(__file__), Path(__file__).parent / "support" / "__init__.py"


@pytest.hookimpl(tryfirst=True, specname="pytest_collection_modifyitems")
def pytest_mark_items(items: list[pytest.Item]) -> None:
    """Before pytest chooses by them."""
    for item in items:
        mark(item)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: 0 if item.get_closest_marker("alone") else 1 if item.name.startswith(LONGEST) else 2)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    how = fcntl.LOCK_EX if item.get_closest_marker("alone") else fcntl.LOCK_SH
    with DOOR.open() as door, _held(ROOM, door.fileno(), how):
        return (yield)


@contextmanager
def _held(room: Path, door: int, how: int) -> Iterator[None]:
    """In the room with others, or alone. Who waits to be alone keeps the door, so that nobody enters before."""
    with room.open() as inside:
        fcntl.flock(door, how)
        fcntl.flock(inside, how)
        fcntl.flock(door, fcntl.LOCK_UN)
        yield
