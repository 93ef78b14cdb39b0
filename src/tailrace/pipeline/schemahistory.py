"""What became of the shapes of a pipeline's tables. The source is not asked; it works beside a running capture."""

from __future__ import annotations

import difflib

from tailrace.changelog.files import LogPath
from tailrace.changelog.history import schema_history
from tailrace.changelog.reader import ChangeLog
from tailrace.errors import ConfigError
from tailrace.state.history import SchemaVersion


def read_history(log: LogPath, table: str | None) -> list[tuple[SchemaVersion, ...]]:
    """The versions of every table, or of those of one name: oldest first."""
    history = schema_history(ChangeLog.open(log))
    known = history.tables()
    wanted = [item for item in known if table is None or str(item) == table]
    if table is not None and not wanted:
        close = difflib.get_close_matches(table, map(str, known), n=1)
        raise ConfigError(
            "the log knows no table of this name", table=table,
            hint=f"Did you mean `{close[0]}`?" if close else "`tailrace schema-history FILE` shows all it knows.",
        )  # fmt: skip
    return [history.versions(item) for item in wanted]
