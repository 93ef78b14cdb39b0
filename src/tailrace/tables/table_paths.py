"""Compute a table's folder from a template, by default `<root>/<schema>/<table>`.

Names are used verbatim except for what a path cannot hold. No folder leaves its root: `/`, `%`, control characters and
a leading dot are percent-encoded. So `..` and `a/b` become ordinary names, and the encoding can be reversed. With the
default template two tables never share a folder. With another template they may (`overlap`), and the code that opens
them checks it.
"""

from __future__ import annotations

import re
from pathlib import Path

from tailrace.errors import TableUnusable
from tailrace.model.schema import TableId

NAME_BYTES_MAX = 255
"""The longest file name that ext4, XFS, APFS and NTFS allow."""

TEMPLATE = "{schema}/{table}"
_LOG = "_delta_log"
_VARIABLE = re.compile(r"\{(schema|table|pipeline)\}")
UNUSABLE = re.compile(r"%[0-9A-Fa-f]{2}|[\[\]\\^|]")
"""Characters that delta-rs cannot handle in a path. `make_folder` links such a table elsewhere, but not a whole
lake."""
# C0 and C1 controls, DEL, and the two characters that carry meaning in an encoded path.
_ENCODED = re.compile(r"^\.|[/%\x00-\x1f\x7f-\x9f]")


def table_path(root: Path, table: TableId, template: str = TEMPLATE, pipeline: str = "") -> Path:
    """Return the folder of a lake table. `{schema}`, `{table}` and `{pipeline}` in the template are replaced."""
    if UNUSABLE.search(str(root)):
        raise TableUnusable(
            "delta-rs cannot use this path",
            path=root,
            hint=r"Choose a `tables.path` without [ ] \ ^ | and without a percent sign before two digits.",
        )
    values = {"schema": table.schema, "table": table.name, "pipeline": pipeline}
    encoded = {name: _encoded(value, table) for name, value in values.items()}
    parts = [_folder(_VARIABLE.sub(lambda match: encoded[match.group(1)], part), table) for part in template.split("/")]
    return root.joinpath(*parts)


def overlap(one: Path, other: Path) -> bool:
    """Return whether one of these folders is, or contains, the other."""
    return one == other or one in other.parents or other in one.parents


def folder_taken(path: Path, other: TableId | None, table: TableId) -> TableUnusable:
    """Return the error for a table whose folder overlaps another table's."""
    return TableUnusable(
        "the folder overlaps that of another source table",
        table=table,
        other=other,
        path=path,
        hint="Give one of them another name: `tables.names`, or `name:` in `tables.rules`.",
    )


def _encoded(name: str, table: TableId) -> str:
    try:
        return _ENCODED.sub(lambda match: _percent(match.group()), name)
    except UnicodeEncodeError as exc:
        raise TableUnusable("the name is not valid Unicode", table=table, hint=_RENAME) from exc


def _folder(folder: str, table: TableId) -> str:
    try:
        size = len(folder.encode())
    except UnicodeEncodeError as exc:
        raise TableUnusable("the name is not valid Unicode", table=table, hint=_RENAME) from exc
    if folder.lower() == _LOG:
        raise TableUnusable(
            "a table's folder cannot have the name of Delta's log folder",
            table=table,
            folder=folder,
            hint="Give the table another name in the lake: `tables.names`, or `name:` in `tables.rules`.",
        )
    if not folder:
        raise TableUnusable("the table's folder has an empty name", table=table, hint=_RENAME)
    if size > NAME_BYTES_MAX:
        raise TableUnusable(
            "the name is too long for a folder", table=table, bytes=size, limit=NAME_BYTES_MAX, hint=_RENAME
        )
    return folder


_RENAME = "Rename it at the source, or exclude the table with `exclude:`."


def _percent(character: str) -> str:
    return "".join(f"%{byte:02X}" for byte in character.encode())
