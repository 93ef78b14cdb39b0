"""Why a rule could not be applied to some rows, in words that tell nothing of them.

What Arrow or a function says of a failure may hold the value that it failed at, so none of their words are passed on:
only the kind of an exception, and what is known without looking at the row. A function's own exception is chained to
the error, where the one who wrote the function finds it, and stands in no text of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Mask = npt.NDArray[np.bool_]
T = TypeVar("T")

UNSENT_REASON = "a value that it needs was not sent"
UNFIT_REASON = "a value that it needs does not fit its column's type"
ARROW_ERRORS = (pa.ArrowException, OverflowError, ValueError)
"""What Arrow raises for a value that it cannot work on."""


class RuleValueError(ValueError):
    """Work that has failed, in words that hold no value; and the exception of whoever's own work it was."""

    def __init__(self, why: str, error: Exception | None = None) -> None:
        super().__init__(why)
        self.reason, self.error = why, error


@dataclass(frozen=True, kw_only=True)
class RowFault:
    """Rows that something failed at, and why."""

    reason: str
    rows: Mask
    error: Exception | None = None


RowFaults = tuple[RowFault, ...]


def faulty_rows(faults: RowFaults, rows: int) -> Mask:
    """The rows that any of them is of."""
    found = np.zeros(rows, np.bool_)
    for one in faults:
        found |= one.rows
    return found


def restrict_faults(faults: RowFaults, rows: Mask) -> RowFaults:
    """What they say of these rows."""
    return tuple(replace(one, rows=one.rows & rows) for one in faults)


def find_faults_by_halves(
    work: Callable[[int, int], T], begin: int, size: int, none: Callable[[int], T], said: Callable[[Exception], str]
) -> tuple[list[T], RowFaults]:
    """Work on the rows from `begin` on that may fail for some of them: those are found by halves, and `none` stands
    for what it would have made. Failing is rare."""
    try:
        return [work(begin, size)], ()
    except ARROW_ERRORS as error:
        if size <= 1:
            why, own = (error.reason, error.error) if isinstance(error, RuleValueError) else (said(error), None)
            return [none(size)], (RowFault(reason=why, rows=np.ones(size, np.bool_), error=own),)
    half = size // 2
    left, first = find_faults_by_halves(work, begin, half, none, said)
    right, second = find_faults_by_halves(work, begin + half, size - half, none, said)
    before, behind = np.zeros(half, np.bool_), np.zeros(size - half, np.bool_)
    placed = [replace(one, rows=np.concatenate([one.rows, behind])) for one in first]
    placed += [replace(one, rows=np.concatenate([before, one.rows])) for one in second]
    return [*left, *right], _together(placed)


def _together(faults: Sequence[RowFault]) -> RowFaults:
    """One for each reason; a row has one."""
    found: dict[str, RowFault] = {}
    for one in faults:
        known = found.get(one.reason)
        found[one.reason] = one if known is None else replace(known, rows=known.rows | one.rows)
    return tuple(found.values())


def expression_error_text(error: Exception) -> str:
    """Why an expression cannot be computed of a row."""
    match str(error).lower():
        case "divide by zero":
            return "it divides by zero"
        case "overflow":
            return "its result is too large a number"
    return f"it cannot be computed of the row ({type(error).__name__})"
