"""Whether a table can go on from where its own commit says it stands."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tailrace.capture.postgres.catalogue import SourceTable
from tailrace.changelog.read.reader import ChangeLog
from tailrace.errors import SchemaChanged, TableAhead
from tailrace.model.policies import EvolutionPolicies, EvolutionPolicy
from tailrace.model.schema import Identity
from tailrace.tables.table_errors import IDENTITY_HINT

if TYPE_CHECKING:
    from tailrace.pipeline.tables.registry import ManagedTable


def has_lost_identity(life: ManagedTable) -> bool:
    """Whether the source publishes only inserts of it by now. Then it stops, and is not loaded."""
    return life.insert_only and life.schema is not None and life.schema.identity is not Identity.NONE


def refuse_lost_identity(life: ManagedTable, source: SourceTable | None) -> None:
    """A mirror that was fed by updates cannot go on without them as if nothing had happened."""
    if source is None or source.identity is not Identity.NONE or life.schema is None:
        return
    if life.schema.identity is not Identity.NONE:
        raise SchemaChanged("the source table lost its replica identity", table=life.table, hint=IDENTITY_HINT)


def refuse_ahead(life: ManagedTable, change_log: ChangeLog) -> None:
    """A table that has applied commits this log does not have was fed by another past of it."""
    newest = change_log.newest()
    if life.applied_position is not None and life.applied_position.commit > newest:
        raise TableAhead(
            "the table has applied more than the log holds",
            table=life.table,
            applied=life.applied_position.commit,
            newest=newest,
            hint="Was the log restored from a copy? Put back the newer one, or run `tailrace snapshot FILE TABLE`: the "
            "table is loaded anew.",
        )


def has_missed_updates(life: ManagedTable, source: SourceTable | None) -> bool:
    """Whether updates went unseen until now, because the table had no replica identity; it is loaded anew."""
    before = life.schema is not None and life.schema.identity is Identity.NONE
    return before and source is not None and source.identity is not Identity.NONE


def stops_at_recreated(life: ManagedTable, oid: int, policies: EvolutionPolicies) -> bool:
    """Whether the source has another table of its name by now, and the table is to stop at that one's first row. It
    lacks nothing of the one before: that was published until it was dropped."""
    return (
        policies.recreate is EvolutionPolicy.STOP
        and life.schema is not None
        and life.schema.source_schema.relation != oid
    )
