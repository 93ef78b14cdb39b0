"""The log's own shapes as a schema history: nothing is kept twice.

The log writes every version before its first row, and never lets one go (`changelog.schemas`). So it is the history of
its pipeline; here it is told anew, in the order it came, to one in memory.
"""

from __future__ import annotations

from typing import Any

from tailrace.changelog.read.reader import ChangeLog
from tailrace.model import change
from tailrace.model.evolution import Evolution
from tailrace.model.position import Lsn
from tailrace.model.system_streams import SCHEMA_STREAM
from tailrace.state.schema_history import MemorySchemaHistory

_WHERE = ["table", "version", change.POSITION, change.COMMITTED_AT]


def first_rows_of_versions(log: ChangeLog) -> dict[tuple[int, int], dict[str, Any]]:
    """By table and version: where and when its first row came, as long as the log keeps that record."""
    return {
        (row["table"], row["version"]): row
        for batch in log.follow(table=SCHEMA_STREAM.table.name)
        for row in batch.data.select(_WHERE).to_pylist()
    }


def schema_history(log: ChangeLog) -> MemorySchemaHistory:
    """Every version of every table of the source that the log knows now."""
    told = first_rows_of_versions(log)
    log.schemas.load()
    history = MemorySchemaHistory(retention=None)
    for version in log.schemas.versions_after(0):
        row = told.get((version.table, version.version), {})
        history.import_version(
            version.schema,
            time=row.get(change.COMMITTED_AT),
            position=Lsn.parse(row[change.POSITION]) if row else None,
            evolution=Evolution.from_json(version.definition) if "rewritten" in version.definition else None,
        )
    return history
