"""What tables look like that are captured and have not changed yet, in `<log>/expected/<id>.json`.

The log knows a table's shape from its first row on (`changelog/format/schemas.py`), and goes by nothing else. Until
then there is this, for whoever asks for the columns of a quiet table: as the capture last saw it, when it started or
when the table was made. It may be altered since; the first row tells."""

from __future__ import annotations

from contextlib import suppress

from tailrace.changelog.format.coverage import table_token
from tailrace.model.schema import TableId, TableSchema
from tailrace.storage import files, records
from tailrace.storage.files import LogPath

FOLDER = "expected"
FORMAT = 1


def record_known_table(log: LogPath, schema: TableSchema) -> None:
    """Rows of this shape may come."""
    path = log / FOLDER / f"{table_token(schema.table)}.json"
    text = records.encode({"format": FORMAT, **schema.to_json()})
    files.make_folder(path.parent)
    with files.explain_errors(path):
        with suppress(FileNotFoundError):
            if path.read_bytes() == text:
                return
        files.replace_durably(path, text)


def known_tables(log: LogPath) -> list[TableSchema]:
    """All that was noted, by name; also of tables that have rows by now. What is not what was written counts for
    nothing."""
    with files.explain_errors(log / FOLDER):
        found = [_read(path) for path in files.matching_files(log / FOLDER, "*.json")]
    return sorted((shape for shape in found if shape is not None), key=lambda shape: shape.table)


def known_table(log: LogPath, table: TableId) -> TableSchema | None:
    """The shape that the first row of a table is expected to have, as far as anybody knows."""
    path = log / FOLDER / f"{table_token(table)}.json"
    with files.explain_errors(path):
        return _read(path)


def _read(path: LogPath) -> TableSchema | None:
    try:
        return TableSchema.from_json(records.decode(path.read_bytes(), FORMAT))
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return None
