"""Policies for a table's schema changes, as a person decides them."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class EvolutionPolicy(enum.Enum):
    """The action for one kind of change."""

    APPLY = "apply"
    """Do the same to the lake table."""
    KEEP_NULL = "keep-null"
    """For a dropped column: keep it with its values; new rows have null in it."""
    STOP = "stop"
    """Stop the table, and wait for a person."""
    REFRESH = "refresh"
    """Reload the table."""


@dataclass(frozen=True, kw_only=True)
class EvolutionPolicies:
    """The action for each kind of change."""

    add: EvolutionPolicy = EvolutionPolicy.APPLY
    drop: EvolutionPolicy = EvolutionPolicy.KEEP_NULL
    rename: EvolutionPolicy = EvolutionPolicy.APPLY
    widen: EvolutionPolicy = EvolutionPolicy.APPLY
    """The new type holds all old values, and the source did not rewrite its rows."""
    narrow: EvolutionPolicy | None = None
    """The new type is of the same kind and holds fewer values; None: see `narrow_policy`."""
    retype: EvolutionPolicy = EvolutionPolicy.REFRESH
    """Any other change of type."""
    rewrite: EvolutionPolicy = EvolutionPolicy.REFRESH
    """The source rewrote its rows, perhaps with other values, or their state is unknown."""
    key: EvolutionPolicy = EvolutionPolicy.REFRESH
    recreate: EvolutionPolicy = EvolutionPolicy.REFRESH
    """The table was dropped, and another one of its name created."""
    partition: EvolutionPolicy = EvolutionPolicy.REFRESH
    """A partition was attached or detached with its rows, or truncated alone."""

    @property
    def narrow_policy(self) -> tuple[str, EvolutionPolicy]:
        """Return what to do about a narrower type, and the kind whose policy decides it.

        Without a policy for `narrow`, a `stop` for other types (`retype`) or wider ones (`widen`) applies to it as
        well.
        """
        if self.narrow is not None:
            return "narrow", self.narrow
        stopping = (
            kind for kind, policy in (("retype", self.retype), ("widen", self.widen)) if policy is EvolutionPolicy.STOP
        )
        kind = next(stopping, None)
        return ("narrow", EvolutionPolicy.REFRESH) if kind is None else (kind, EvolutionPolicy.STOP)


DEFAULT_POLICIES = EvolutionPolicies()
"""The policies without any settings: nothing is lost, and nothing is wrong."""
