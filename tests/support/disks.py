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


def fill(disk: Path, leave: int = 0) -> Path:
    """Leave not a byte free, or only so many."""
    (disk / "spared").write_bytes(bytes(leave))
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        size = 1 << 16
        while size:
            try:
                file.write(bytes(size))
            except OSError:
                size //= 2
    (disk / "spared").unlink()
    return filler
