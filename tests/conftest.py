"""Random order, but for the longest test: started last, it would run alone beside an idle worker."""

from __future__ import annotations

import pytest

LONGEST = "test_killed_at_every_named_place"


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.name.startswith(LONGEST))
