"""Whether a table can go on from where its own commit says it stands."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tailrace.capture.postgres.catalogue import SourceTable
from tailrace.changelog.read.reader import ChangeLog
from tailrace.errors import SchemaChanged, TableAhead
from tailrace.model.policies import Policies, Policy
from tailrace.model.schema import Identity
from tailrace.tables.schema_errors import IDENTITY_HINT

if TYPE_CHECKING:
    from tailrace.pipeline.tables.registry import TableLife


def lost_identity(life: TableLife) -> bool:
    """Whether the source publishes only inserts of it by now. Then it stops, and is not loaded."""
    return life.insert_only and life.shape is not None and life.shape.identity is not Identity.NONE


def refuse_lost_identity(life: TableLife, source: SourceTable | None) -> None:
    """A mirror that was fed by updates cannot go on without them as if nothing had happened."""
    if source is None or source.identity is not Identity.NONE or life.shape is None:
        return
    if life.shape.identity is not Identity.NONE:
        raise SchemaChanged("the source table lost its replica identity", table=life.table, hint=IDENTITY_HINT)


def refuse_ahead(life: TableLife, change_log: ChangeLog) -> None:
    """A table that has applied commits this log does not have was fed by another past of it."""
    newest = change_log.newest()
    if life.cursor is not None and life.cursor.commit > newest:
        raise TableAhead(
            "the table has applied more than the log holds",
            table=life.table,
            applied=life.cursor.commit,
            newest=newest,
            hint="Was the log restored from a copy? Put back the newer one, or run `tailrace snapshot FILE TABLE`: the "
            "table is loaded anew.",
        )


def saw_too_little(life: TableLife, source: SourceTable | None) -> bool:
    """Whether updates went unseen until now, because the table had no replica identity; it is loaded anew."""
    before = life.shape is not None and life.shape.identity is Identity.NONE
    return before and source is not None and source.identity is not Identity.NONE


def stops_at_another(life: TableLife, oid: int, policies: Policies) -> bool:
    """Whether the source has another table of its name by now, and the table is to stop at that one's first row. It
    lacks nothing of the one before: that was published until it was dropped."""
    return policies.recreate is Policy.STOP and life.shape is not None and life.shape.at_source.relation != oid
