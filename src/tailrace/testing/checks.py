"""Suites of checks, each a sentence and a function; any test framework can run them.

A check receives a function that opens the object under test, always at one location that was empty before. A second
opening must find what the first one stored, as after a restart. An object with a `close` is closed in between.
"""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from tailrace.errors import ConfigError
from tailrace.validation import require_instance

_T = TypeVar("_T")


class ContractBroken(AssertionError):
    """The object under test does not keep a promise."""


@dataclass(frozen=True)
class Check(Generic[_T]):
    """One promise. `check(at)` raises ContractBroken if it is not kept."""

    promise: str
    act: Callable[[Callable[[], _T]], None]

    def __str__(self) -> str:
        return self.promise

    def __call__(self, at: Callable[[], _T]) -> None:
        _require_call(at, "the opening function")
        try:
            self.act(at)
        except ContractBroken as broken:
            raise ContractBroken(f"{self.promise}: {broken}") from broken


def suite(*checks: Callable[[Callable[[], _T]], None]) -> tuple[Check[_T], ...]:
    """Return functions as checks; each one's docstring is its promise."""
    return tuple(Check(" ".join((check.__doc__ or check.__name__).split()), check) for check in checks)


def require_checks(more: Iterable[object], known: str) -> None:
    """Refuse what is not a check."""
    for check in more:
        require_instance("more", check, Check, f"Give {known}, or some of them.")


def run(checks: tuple[Check[_T], ...], place: Callable[[], Callable[[], _T]]) -> None:
    """Run every check, each at a new location, and report all broken promises at once.

    An unexpected exception breaks the promise too; the first one is chained.
    """
    broken: list[str] = []
    raised: Exception | None = None
    for check in checks:
        try:
            check(opener_at(place))
        except ContractBroken as error:
            broken.append(str(error))
        except ConfigError:
            raise  # the suite itself is used wrongly
        except Exception as error:  # noqa: BLE001 # of the object under test: it is reported below
            raised = raised or error
            broken.append(f"{check}: it raised {type(error).__name__}")
    if broken:
        raise ContractBroken("\n".join(broken)) from raised


def opener_at(place: Callable[[], Callable[[], _T]]) -> Callable[[], _T]:
    """Return a function that opens the object under test at a new location."""
    _require_call(place, "the function for a new location")
    at = place()
    _require_call(at, "the opening function")
    return at


def _require_call(function: object, what: str) -> None:
    if not callable(function):
        raise ConfigError(
            f"{what} cannot be called",
            found=type(function).__name__,
            hint="Give a function that makes a new, empty location and returns a function that opens the object "
            "under test there: `lambda: (lambda path: lambda: MyStore(path))(new_path())`. A single check "
            "takes only the latter.",
        )


@contextmanager
def open_at(at: Callable[[], _T]) -> Iterator[_T]:
    """Open the object under test, and close it at the end if possible."""
    opened = at()
    try:
        yield opened
    finally:
        close = getattr(opened, "close", None)
        if callable(close):
            close()


def run_and_kill(act: Callable[[], object]) -> None:
    """Run the function in its own process, which is then killed without clean-up."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # about our threads, which the child neither has nor needs
        child = os.fork()
    if not child:
        try:
            act()
        except BaseException:  # noqa: BLE001 # of any kind: the exit status reports it
            os._exit(1)
        os.kill(os.getpid(), signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    require(os.WIFSIGNALED(status), "it failed in another process")


def require(kept: object, broken: str) -> None:
    """Raise ContractBroken if the condition is false."""
    if not kept:
        raise ContractBroken(broken)


def require_refused(act: Callable[[], object], error: type[Exception], broken: str) -> None:
    """Raise ContractBroken unless the call raises this error."""
    try:
        act()
    except error:
        return
    except Exception as other:  # any other error is not the promised one
        raise ContractBroken(f"{broken}: {type(other).__name__} instead of {error.__name__}") from other
    raise ContractBroken(broken)
