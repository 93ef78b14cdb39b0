"""Checks of a caller's arguments. Invalid ones are refused at once, with what to write instead.

Nothing is guessed. A text that reads like a number, or like a table, is not one. A mistake that would only fail later,
or be ignored silently, is reported before anything begins.
"""

from __future__ import annotations

import math
import operator
import os
from pathlib import Path

from tailrace.errors import ConfigError


def require_integer(what: str, value: object, *, least: int) -> int:
    """Return the value if it is a whole number of at least `least`."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ConfigError(f"`{what}` is not a whole number", found=type(value).__name__, hint=f"Give {least} or more.")
    found = operator.index(value)
    if found < least:
        raise ConfigError(f"`{what}` is too small", found=found, hint=f"Give {least} or more.")
    return found


def require_seconds(what: str, value: object, *, endless: bool = False) -> float:
    """Return the value as seconds if it is a time to wait. Infinity is allowed only with `endless`."""
    hint = "Give seconds: 0 or more, for example 2.5."
    if isinstance(value, bool) or not (hasattr(value, "__float__") or hasattr(value, "__index__")):
        raise ConfigError(f"`{what}` is not a number", found=type(value).__name__, hint=hint)
    found = float(value)  # type: ignore[arg-type] # it has one of the two
    if math.isnan(found) or found < 0 or (math.isinf(found) and not endless):
        raise ConfigError(f"`{what}` must be seconds >= 0", found=found, hint=hint)
    return found


def require_instance(what: str, value: object, kind: type, hint: str) -> None:
    """Refuse a value that is not of this class."""
    if not isinstance(value, kind):
        raise ConfigError(f"`{what}` is not a `{kind.__name__}`", found=type(value).__name__, hint=hint)


def require_methods(what: str, value: object, methods: tuple[str, ...], hint: str) -> None:
    """Refuse an object that lacks one of these methods; its class does not matter."""
    lacking = [name for name in methods if not callable(getattr(value, name, None))]
    if lacking or isinstance(value, type):
        raise ConfigError(
            f"`{what}` cannot be used as one",
            found=getattr(value, "__name__", type(value).__name__),
            lacks=", ".join(lacking) or "an instance: it is a class",
            hint=hint,
        )


def require_callable(what: str, value: object, hint: str) -> None:
    """Refuse a value that cannot be called."""
    if not callable(value):
        raise ConfigError(f"`{what}` cannot be called", found=type(value).__name__, hint=hint)


def require_folder(path: str | os.PathLike[str], what: str) -> Path:
    """Return the path of a named folder. Refuse an empty text, which would mean the working folder."""
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise ConfigError(
            f"no folder is given for {what}",
            found=type(path).__name__,
            hint='Give its path: `"state/shop"`; `"."` for the working folder.',
        )
    return Path(path)
