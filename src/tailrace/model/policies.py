"""What is to be done about changes to a table's shape, as a person decides it."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Policy(enum.Enum):
    """What to do about one kind of change."""

    APPLY = "apply"
    """Do the same to the lake table."""
    KEEP_NULL = "keep-null"
    """Of a column that is dropped: keep it with what it has; rows that come have null in it."""
    STOP = "stop"
    """Stop the table, and wait for a person."""
    REFRESH = "refresh"
    """Load the table anew."""


@dataclass(frozen=True, kw_only=True)
class Policies:
    """What to do about each kind of change."""

    add: Policy = Policy.APPLY
    drop: Policy = Policy.KEEP_NULL
    rename: Policy = Policy.APPLY
    widen: Policy = Policy.APPLY
    """A type that holds all that the one before did, where the source did not write its rows anew."""
    narrow: Policy | None = None
    """A type of the same kind that does not hold all that the one before did; None: see `narrowing`."""
    retype: Policy = Policy.REFRESH
    """Any other type."""
    rewrite: Policy = Policy.REFRESH
    """The source wrote its rows anew, perhaps with other values, or it is not known what became of them."""
    key: Policy = Policy.REFRESH
    recreate: Policy = Policy.REFRESH
    """The table was dropped, and another of its name made."""
    partition: Policy = Policy.REFRESH
    """A partition came or went with its rows, or was truncated by itself."""

    @property
    def narrowing(self) -> tuple[str, Policy]:
        """What to do where a type holds less, and the kind whose policy says so.

        Where nobody has decided, whoever wants to be asked about other types, or about wider ones, is asked.
        """
        if self.narrow is not None:
            return "narrow", self.narrow
        asked = (kind for kind, policy in (("retype", self.retype), ("widen", self.widen)) if policy is Policy.STOP)
        kind = next(asked, None)
        return ("narrow", Policy.REFRESH) if kind is None else (kind, Policy.STOP)


POLICIES = Policies()
"""Where nobody has decided: nothing is lost, and nothing is wrong."""
