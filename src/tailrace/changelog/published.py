"""Since when a table's changes are in the log without a gap, in `<log>/published/<id>.json`.

Written before a table comes into the publication, whether it is new or was out of it for a while. What was written to
it until then is not in the log, so a mirror that stands before this lacks it.
"""

from __future__ import annotations

import hashlib
import json

from tailrace.changelog import files
from tailrace.changelog.files import LogPath
from tailrace.model.position import Lsn
from tailrace.model.schema import TableId

FOLDER = "published"


def publish(log: LogPath, table: TableId, since: Lsn) -> None:
    """The table is about to be published."""
    path = log / FOLDER / f"{token(table)}.json"
    record = {"schema": table.schema, "table": table.name, "since": str(since)}
    files.make_folder(path.parent)
    with files.explained(path):
        files.replace_durably(path, json.dumps(record).encode())


def published_since(log: LogPath, table: TableId) -> Lsn | None:
    """A position that nothing of the table is missing after; None: nothing is missing at all."""
    path = log / FOLDER / f"{token(table)}.json"
    with files.explained(path):
        try:
            return Lsn.parse(json.loads(path.read_bytes())["since"])
        except FileNotFoundError:
            return None


def token(table: TableId) -> str:
    """A name for a table that is a file's too."""
    return hashlib.sha256(f"{len(table.schema)}.{table.schema}.{table.name}".encode()).hexdigest()[:16]
