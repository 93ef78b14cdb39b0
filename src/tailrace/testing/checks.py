"""A suite is a list of checks, each a sentence and a function; any test framework can run them.

A check is given a way to open what is under test, always at one place that was empty before. What it opens a second
time must hold what was kept the first time, as after a restart; what has a `close` is closed in between.
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
    """What was tested does not keep a promise."""


@dataclass(frozen=True)
class Check(Generic[_T]):
    """One promise. `check(at)` raises ContractBroken if it is not kept."""

    promise: str
    act: Callable[[Callable[[], _T]], None]

    def __str__(self) -> str:
        return self.promise

    def __call__(self, at: Callable[[], _T]) -> None:
        _require_call(at, "what opens it")
        try:
            self.act(at)
        except ContractBroken as broken:
            raise ContractBroken(f"{self.promise}: {broken}") from broken


def suite(*checks: Callable[[Callable[[], _T]], None]) -> tuple[Check[_T], ...]:
    """Functions as checks; what each promises is its docstring."""
    return tuple(Check(" ".join((check.__doc__ or check.__name__).split()), check) for check in checks)


def require_checks(more: Iterable[object], known: str) -> None:
    """Refuse what is no check."""
    for check in more:
        require_instance("more", check, Check, f"Give {known}, or some of them.")


def run(checks: tuple[Check[_T], ...], place: Callable[[], Callable[[], _T]]) -> None:
    """Run every check, each at a new place; all that is not kept is told at once. What is raised where nothing should
    be breaks the promise too; the first of it is chained."""
    broken: list[str] = []
    raised: Exception | None = None
    for check in checks:
        try:
            check(opener_at(place))
        except ContractBroken as error:
            broken.append(str(error))
        except ConfigError:
            raise  # it is the suite that is used wrongly
        except Exception as error:  # noqa: BLE001 # of what is tested: it is told below
            raised = raised or error
            broken.append(f"{check}: it raised {type(error).__name__}")
    if broken:
        raise ContractBroken("\n".join(broken)) from raised


def opener_at(place: Callable[[], Callable[[], _T]]) -> Callable[[], _T]:
    """A way to open what is tested at a new place."""
    _require_call(place, "what makes a new place")
    at = place()
    _require_call(at, "what opens it")
    return at


def _require_call(given: object, what: str) -> None:
    if not callable(given):
        raise ConfigError(
            f"{what} cannot be called",
            found=type(given).__name__,
            hint="Give a function that makes a new, empty place and returns a function that opens what is tested "
            "there: `lambda: (lambda path: lambda: MyStore(path))(new_path())`. A single check is given the latter.",
        )


@contextmanager
def open_at(at: Callable[[], _T]) -> Iterator[_T]:
    """What is under test, closed at the end if it can be."""
    found = at()
    try:
        yield found
    finally:
        close = getattr(found, "close", None)
        if callable(close):
            close()


def run_and_kill(act: Callable[[], object]) -> None:
    """Do it in a process of its own, which is killed then and cleans up nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads of ours, which it neither has nor needs
        child = os.fork()
    if not child:
        try:
            act()
        except BaseException:  # noqa: BLE001 # whatever it is: that it did not come to its end is told by how it ended
            os._exit(1)
        os.kill(os.getpid(), signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    require(os.WIFSIGNALED(status), "it failed in another process")


def require(kept: object, broken: str) -> None:
    """Raise ContractBroken unless it is so."""
    if not kept:
        raise ContractBroken(broken)


def require_refused(act: Callable[[], object], error: type[Exception], broken: str) -> None:
    """Raise ContractBroken unless the call raises this error."""
    try:
        act()
    except error:
        return
    except Exception as other:  # whatever it is, it is not the one that was promised
        raise ContractBroken(f"{broken}: {type(other).__name__} instead of {error.__name__}") from other
    raise ContractBroken(broken)
