"""Disks of a test's own: small, read-only or failing, mounted for as long as they are needed."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def mounted(folder: Path, *what: str) -> Iterator[Path]:
    """The file system, as long as it is needed."""
    folder.mkdir(exist_ok=True)
    made = subprocess.run(["mount", *what, str(folder)], capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"SKIPPED LOUDLY: not tried, for mounting is not allowed here: {made.stderr}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)
