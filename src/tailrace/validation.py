"""What a caller gives, looked at where it is given: nonsense is refused there, with what to write instead.

Nothing is guessed. A text that reads like a number, or like a table, is none, and what would only fail in the middle of
things, or be passed over in silence, is told before anything begins.
"""

from __future__ import annotations

import math
import operator
import os
from pathlib import Path

from tailrace.errors import ConfigError


def require_integer(what: str, value: object, *, least: int) -> int:
    """The value, if it is a whole number from the least on."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ConfigError(f"`{what}` is not a whole number", found=type(value).__name__, hint=f"Give {least} or more.")
    found = operator.index(value)
    if found < least:
        raise ConfigError(f"`{what}` is too small", found=found, hint=f"Give {least} or more.")
    return found


def require_seconds(what: str, value: object, *, endless: bool = False) -> float:
    """The value, if it is a time that can be waited, or none; for ever only where that makes sense."""
    hint = "Give seconds: 0 or more, for example 2.5."
    if isinstance(value, bool) or not (hasattr(value, "__float__") or hasattr(value, "__index__")):
        raise ConfigError(f"`{what}` is not a number", found=type(value).__name__, hint=hint)
    found = float(value)  # type: ignore[arg-type] # it has that
    if math.isnan(found) or found < 0 or (math.isinf(found) and not endless):
        raise ConfigError(f"`{what}` is no time to wait", found=found, hint=hint)
    return found


def require_instance(what: str, value: object, kind: type, hint: str) -> None:
    """Refuse what is not of this kind."""
    if not isinstance(value, kind):
        raise ConfigError(f"`{what}` is not a `{kind.__name__}`", found=type(value).__name__, hint=hint)


def require_methods(what: str, value: object, methods: tuple[str, ...], hint: str) -> None:
    """Refuse what cannot be one because it lacks what one is called for; whose class it is does not matter."""
    lacking = [name for name in methods if not callable(getattr(value, name, None))]
    if lacking or isinstance(value, type):
        raise ConfigError(
            f"`{what}` cannot be used as one",
            found=getattr(value, "__name__", type(value).__name__),
            lacks=", ".join(lacking) or "to be made: it is a class",
            hint=hint,
        )


def require_callable(what: str, value: object, hint: str) -> None:
    """Refuse what cannot be called."""
    if not callable(value):
        raise ConfigError(f"`{what}` cannot be called", found=type(value).__name__, hint=hint)


def require_folder(given: str | os.PathLike[str], what: str) -> Path:
    """The folder, if one is named. An empty text would be the one that the program happens to run in."""
    if not isinstance(given, str | os.PathLike) or not os.fspath(given):
        raise ConfigError(
            f"no folder is named for {what}",
            found=type(given).__name__,
            hint='Give its path: `"state/shop"`; `"."` for the one that the program runs in.',
        )
    return Path(given)
