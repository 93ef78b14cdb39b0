"""Bytes that lie against a page nobody may read: a kernel that looks outside its buffer ends the process.

Kernels are compiled without bounds checks, so a wrong index is a wrong value at best. What is run on these
buffers must therefore run in a process of its own: `run_guarded("tests.support.…:function")`.
"""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt

_PROT_NONE = 0
_REPOSITORY = Path(__file__).parents[2]


class Guarded:
    """Room for bytes between two pages that may not be touched; one buffer at a time."""

    def __init__(self, room: int = 1 << 20) -> None:
        page = mmap.PAGESIZE
        self._room = -(-room // page) * page
        self._map = mmap.mmap(-1, self._room + 2 * page)
        self._all = np.frombuffer(self._map, np.uint8)[page : page + self._room]
        begin = self._all.ctypes.data
        libc = ctypes.CDLL(None, use_errno=True)
        for at in (begin - page, begin + self._room):
            if libc.mprotect(ctypes.c_void_p(at), ctypes.c_size_t(page), _PROT_NONE) != 0:
                raise OSError(ctypes.get_errno(), "mprotect")

    def at_end(self, data: bytes) -> npt.NDArray[np.uint8]:
        """The bytes, with the forbidden page right behind them."""
        room = self._all[self._room - len(data) :]
        room[:] = np.frombuffer(data, np.uint8)
        return room

    def at_start(self, data: bytes) -> npt.NDArray[np.uint8]:
        """The bytes, with the forbidden page right before them."""
        room = self._all[: len(data)]
        room[:] = np.frombuffer(data, np.uint8)
        return room


def run_guarded(target: str, *arguments: str, seconds: float = 600.0) -> subprocess.CompletedProcess[str]:
    """Call `module:function` in a process of its own; a crash is a return code below zero."""
    module, _, function = target.partition(":")
    code = f"import sys; from {module} import {function} as run; run(*sys.argv[1:])"
    return subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", code, *arguments],
        capture_output=True,
        text=True,
        cwd=_REPOSITORY,
        timeout=seconds,
        check=False,
    )
