"""What is to be done about changes to a table's shape, as a person decides it."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class EvolutionPolicy(enum.Enum):
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
class EvolutionPolicies:
    """What to do about each kind of change."""

    add: EvolutionPolicy = EvolutionPolicy.APPLY
    drop: EvolutionPolicy = EvolutionPolicy.KEEP_NULL
    rename: EvolutionPolicy = EvolutionPolicy.APPLY
    widen: EvolutionPolicy = EvolutionPolicy.APPLY
    """A type that holds all that the one before did, where the source did not write its rows anew."""
    narrow: EvolutionPolicy | None = None
    """A type of the same kind that does not hold all that the one before did; None: see `narrowing`."""
    retype: EvolutionPolicy = EvolutionPolicy.REFRESH
    """Any other type."""
    rewrite: EvolutionPolicy = EvolutionPolicy.REFRESH
    """The source wrote its rows anew, perhaps with other values, or it is not known what became of them."""
    key: EvolutionPolicy = EvolutionPolicy.REFRESH
    recreate: EvolutionPolicy = EvolutionPolicy.REFRESH
    """The table was dropped, and another of its name made."""
    partition: EvolutionPolicy = EvolutionPolicy.REFRESH
    """A partition came or went with its rows, or was truncated by itself."""

    @property
    def narrow_policy(self) -> tuple[str, EvolutionPolicy]:
        """What to do where a type holds less, and the kind whose policy says so.

        Where nobody has decided, whoever wants to be asked about other types, or about wider ones, is asked.
        """
        if self.narrow is not None:
            return "narrow", self.narrow
        asked = (
            kind for kind, policy in (("retype", self.retype), ("widen", self.widen)) if policy is EvolutionPolicy.STOP
        )
        kind = next(asked, None)
        return ("narrow", EvolutionPolicy.REFRESH) if kind is None else (kind, EvolutionPolicy.STOP)


DEFAULT_POLICIES = EvolutionPolicies()
"""Where nobody has decided: nothing is lost, and nothing is wrong."""
