from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from tailrace.cli import log_lines


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """The command sets up logging and remembers secrets for a whole process; a test is not one."""
    root, ours = logging.getLogger(), logging.getLogger("tailrace")
    handlers, level = list(root.handlers), ours.level
    yield
    root.handlers[:] = handlers
    ours.setLevel(level)
    log_lines._secrets.clear()
