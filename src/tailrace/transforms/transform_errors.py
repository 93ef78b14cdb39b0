"""Reasons why a rule failed at rows, in words that reveal nothing of the rows.

A message of Arrow or of a function may contain the value that it failed at, so no such message is passed on. A reason
has only the exception's type, and what is known without looking at the row. A function's own exception is chained to
the error, where its author finds it, and is in no text of ours.
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
"""Exceptions of Arrow for a value that it cannot process."""


class RuleValueError(ValueError):
    """A failure described without values, with the exception of the caller's own code."""

    def __init__(self, why: str, error: Exception | None = None) -> None:
        super().__init__(why)
        self.reason, self.error = why, error


@dataclass(frozen=True, kw_only=True)
class RowFault:
    """Rows that something failed at, and the reason."""

    reason: str
    rows: Mask
    error: Exception | None = None


RowFaults = tuple[RowFault, ...]


def faulty_rows(faults: RowFaults, rows: int) -> Mask:
    """Return the rows that have any of the faults."""
    rows_with_fault = np.zeros(rows, np.bool_)
    for fault in faults:
        rows_with_fault |= fault.rows
    return rows_with_fault


def restrict_faults(faults: RowFaults, rows: Mask) -> RowFaults:
    """Return the faults limited to these rows."""
    return tuple(replace(fault, rows=fault.rows & rows) for fault in faults)


def find_faults_by_halves(
    work: Callable[[int, int], T], begin: int, size: int, none: Callable[[int], T], explain: Callable[[Exception], str]
) -> tuple[list[T], RowFaults]:
    """Run work that may fail for some rows; return its results and the faulty rows.

    Failures are rare. A failing part is split in halves until the faulty rows are alone. `none` makes the result for a
    faulty row, and `explain` makes the reason of Arrow's exception.
    """
    try:
        return [work(begin, size)], ()
    except ARROW_ERRORS as error:
        if size <= 1:
            reason, cause = (error.reason, error.error) if isinstance(error, RuleValueError) else (explain(error), None)
            return [none(size)], (RowFault(reason=reason, rows=np.ones(size, np.bool_), error=cause),)
    half = size // 2
    left, first = find_faults_by_halves(work, begin, half, none, explain)
    right, second = find_faults_by_halves(work, begin + half, size - half, none, explain)
    before, after = np.zeros(half, np.bool_), np.zeros(size - half, np.bool_)
    faults = [replace(fault, rows=np.concatenate([fault.rows, after])) for fault in first]
    faults += [replace(fault, rows=np.concatenate([before, fault.rows])) for fault in second]
    return [*left, *right], _merge_faults(faults)


def _merge_faults(faults: Sequence[RowFault]) -> RowFaults:
    """Return one fault for each reason. A row has one fault."""
    merged: dict[str, RowFault] = {}
    for fault in faults:
        known = merged.get(fault.reason)
        merged[fault.reason] = fault if known is None else replace(known, rows=known.rows | fault.rows)
    return tuple(merged.values())


def expression_error_text(error: Exception) -> str:
    """Return why an expression cannot be computed for a row."""
    match str(error).lower():
        case "divide by zero":
            return "it divides by zero"
        case "overflow":
            return "its result is too large a number"
    return f"it cannot be computed for the row ({type(error).__name__})"
