"""Read schema histories: a pipeline's from its log, or a program's from its folder.

The source is not asked and nothing is written, so this works while capture runs. The log writes every version before
its first row and never trims one. So it is the schema history of its pipeline, and nothing is stored twice.
"""

from __future__ import annotations

import difflib
import os
from typing import Any

from tailrace.changelog.read.reader import ChangeLog
from tailrace.errors import ConfigError
from tailrace.model import change
from tailrace.model.evolution import Evolution
from tailrace.model.position import Lsn
from tailrace.model.system_streams import SCHEMA_STREAM
from tailrace.state.schema_history import MemorySchemaHistory, SchemaHistory, SchemaVersion
from tailrace.state.schema_history_stores import FileSchemaHistory
from tailrace.storage.files import LogPath

_HINTS = {
    "change log": "Give the settings file of its pipeline instead.",
    "checkpoint store": "See `tailrace checkpoints FOLDER list` for its contents; a schema history has its own folder.",
    "": "Give the settings file of a pipeline, or the folder of a `FileSchemaHistory`.",
}


def open_log_history(log: LogPath) -> SchemaHistory:
    """Return the schema history of a pipeline's log."""
    return schema_history(ChangeLog.open(log))


def open_folder_history(folder: str) -> SchemaHistory:
    """Return the history that a program keeps in a folder; refuse other folders."""
    history = FileSchemaHistory(folder, read_only=True)
    names = set(os.listdir(folder))
    owned = any(name.startswith(".owner") for name in names)
    others = {name for name in names if not name.startswith(".")}
    if not history.tables() and (others or not owned):
        kind = "change log" if "meta.json" in others else "checkpoint store" if owned else ""
        raise ConfigError(
            f"the folder is a {kind}, not a schema history" if kind else "there is no schema history in the folder",
            folder=folder,
            hint=_HINTS[kind],
        )
    return history


def read_history(history: SchemaHistory, table: str | None) -> list[tuple[SchemaVersion, ...]]:
    """Return the versions of every table, or of those with this name: oldest first."""
    known = history.tables()
    wanted = [item for item in known if table is None or str(item) == table]
    if table is not None and not wanted:
        close = difflib.get_close_matches(table, map(str, known), n=1)
        raise ConfigError(
            "the history has no table of this name",
            table=table,
            hint=f"Did you mean `{close[0]}`?" if close else "See `tailrace schema-history FILE` for its tables.",
        )
    return [tuple(history.versions(item)) for item in wanted]


_COLUMNS = ["table", "version", change.POSITION, change.COMMITTED_AT]


def first_rows_of_versions(log: ChangeLog) -> dict[tuple[int, int], dict[str, Any]]:
    """Return the first row of each version, by table number and version.

    A version has one as long as the log keeps that record.
    """
    return {
        (row["table"], row["version"]): row
        for batch in log.follow(table=SCHEMA_STREAM.table.name)
        for row in batch.data.select(_COLUMNS).to_pylist()
    }


def schema_history(log: ChangeLog) -> MemorySchemaHistory:
    """Return every schema version that the log knows, as a history in memory."""
    first_rows = first_rows_of_versions(log)
    log.schemas.load()
    history = MemorySchemaHistory(retention=None)
    for version in log.schemas.versions_after(0):
        row = first_rows.get((version.table, version.version), {})
        history.import_version(
            version.schema,
            time=row.get(change.COMMITTED_AT),
            position=Lsn.parse(row[change.POSITION]) if row else None,
            evolution=Evolution.from_json(version.definition) if "rewritten" in version.definition else None,
        )
    return history
