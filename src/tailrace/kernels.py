"""How compiled code is built: numba, without the interpreter's lock, kept in the user's cache folder.

Import `kernel` from here and nowhere else, so that every kernel is cached in one known place: the folder is
decided before numba is imported, because numba reads it only then.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar


def cache_folder() -> Path:
    """Where compiled kernels are kept between runs."""
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(os.environ.get("TAILRACE_CACHE", home)) / "tailrace" / "kernels"


os.environ.setdefault("NUMBA_CACHE_DIR", str(cache_folder()))

import numba  # noqa: E402 - the cache folder must be known first

Function = TypeVar("Function", bound=Callable[..., Any])

if TYPE_CHECKING:

    def kernel(function: Function) -> Function:
        """Compile the function on first use, keep the result, run it without the interpreter's lock."""
        return function

else:
    kernel = numba.njit(cache=True, nogil=True, boundscheck=False)
