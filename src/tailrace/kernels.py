"""Build settings of compiled code: numba, without the interpreter's lock, cached per user.

Import `kernel` from here and nowhere else, so that every kernel is cached in one known folder. The folder is chosen
before numba is imported, because numba reads it only then.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar


def cache_folder() -> Path:
    """Return the folder that keeps compiled kernels between runs.

    A folder for temporary files, if the home folder cannot be written.
    """
    home = os.environ.get("TAILRACE_CACHE") or os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = Path(os.path.expanduser(home)) / "tailrace" / "kernels"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return Path(tempfile.gettempdir()) / f"tailrace-{os.getuid()}" / "kernels"
    return folder


os.environ.setdefault("NUMBA_CACHE_DIR", str(cache_folder()))

import numba  # noqa: E402 - the cache folder must be known first
from numba.core import cgutils, types  # noqa: E402
from numba.extending import intrinsic  # noqa: E402

Function = TypeVar("Function", bound=Callable[..., Any])

if TYPE_CHECKING:

    def copy_bytes(target: int, source: int, size: int) -> None:
        """Copy bytes from one address to another, as `memcpy` does; for use inside kernels only."""

    def kernel(function: Function) -> Function:
        """Compile the function on first use, keep the result, run it without the interpreter's lock."""
        return function

else:
    kernel = numba.njit(cache=True, nogil=True, boundscheck=False)

    @intrinsic
    def copy_bytes(typing, target, source, size):
        signature = types.void(types.int64, types.int64, types.int64)

        def build(context, builder, sig, args):
            to, start = (builder.inttoptr(address, cgutils.voidptr_t) for address in args[:2])
            cgutils.raw_memcpy(builder, to, start, args[2], 1)
            return context.get_dummy_value()

        return signature, build
