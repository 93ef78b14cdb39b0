"""What became of the shapes of tables: a pipeline's, from its log, or a program's, from the folder of its history.

The source is not asked, and nothing is written: it works beside whoever captures.
"""

from __future__ import annotations

import difflib

from tailrace.changelog.files import LogPath
from tailrace.changelog.history import schema_history
from tailrace.changelog.reader import ChangeLog
from tailrace.errors import ConfigError
from tailrace.state.histories import FileSchemaHistory
from tailrace.state.history import SchemaHistory, SchemaVersion


def of_log(log: LogPath) -> SchemaHistory:
    """The history that a pipeline's log is."""
    return schema_history(ChangeLog.open(log))


def of_folder(folder: str) -> SchemaHistory:
    """The history that a program keeps in a folder."""
    return FileSchemaHistory(folder, read_only=True)


def read_history(history: SchemaHistory, table: str | None) -> list[tuple[SchemaVersion, ...]]:
    """The versions of every table, or of those of one name: oldest first."""
    known = history.tables()
    wanted = [item for item in known if table is None or str(item) == table]
    if table is not None and not wanted:
        close = difflib.get_close_matches(table, map(str, known), n=1)
        raise ConfigError(
            "the history knows no table of this name", table=table,
            hint=f"Did you mean `{close[0]}`?" if close else "`tailrace schema-history FILE` shows all it knows.",
        )  # fmt: skip
    return [tuple(history.versions(item)) for item in wanted]
