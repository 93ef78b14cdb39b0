"""Where a table lies: `<root>/<schema>/<table>` or as a template says, names verbatim but for what a path cannot hold.

No folder leaves its root: `/`, `%`, control characters and a leading dot are percent-encoded, so `..` and `a/b` become
ordinary names and the encoding reads back. With the usual template two tables never share a folder; with another they
may (`meet`), and whoever opens them sees to that.
"""

from __future__ import annotations

import re
from pathlib import Path

from tailrace.errors import TableUnusable
from tailrace.model.schema import TableId

NAME_BYTES_MAX = 255
"""What ext4, XFS, APFS and NTFS allow for one name."""

TEMPLATE = "{schema}/{table}"
_LOG = "_delta_log"
_PLACE = re.compile(r"\{(schema|table|pipeline)\}")
UNUSABLE = re.compile(r"%[0-9A-Fa-f]{2}|[\[\]\\^|]")
"""What delta-rs cannot have in a path; `folder` finds a way for tables, but not for a whole lake."""
# C0 and C1 controls, DEL, and the two characters that carry meaning in an encoded path.
_ENCODED = re.compile(r"^\.|[/%\x00-\x1f\x7f-\x9f]")


def table_path(root: Path, table: TableId, template: str = TEMPLATE, pipeline: str = "") -> Path:
    """The folder of the lake table. A template is folders' names in which `{schema}`, `{table}` and `{pipeline}` stand
    for those."""
    if UNUSABLE.search(str(root)):
        raise TableUnusable(
            "delta-rs cannot use this path",
            path=root,
            hint=r"Choose a `tables.path` without [ ] \ ^ | and without a percent sign before two digits.",
        )
    said = {"schema": table.schema, "table": table.name, "pipeline": pipeline}
    encoded = {name: _encoded(value, table) for name, value in said.items()}
    parts = [_folder(_PLACE.sub(lambda found: encoded[found.group(1)], part), table) for part in template.split("/")]
    return root.joinpath(*parts)


def overlap(one: Path, other: Path) -> bool:
    """Whether tables in these folders would be in each other's way."""
    return one == other or one in other.parents or other in one.parents


def folder_taken(path: Path, other: TableId | None, table: TableId) -> TableUnusable:
    """Why a table cannot lie here."""
    return TableUnusable(
        "another table of the source has this folder, or one in it or around it",
        table=table,
        other=other,
        path=path,
        hint="Give one of them another name: `tables.names`, or `name:` in `tables.rules`.",
    )


def _encoded(name: str, table: TableId) -> str:
    try:
        return _ENCODED.sub(lambda found: _percent(found.group()), name)
    except UnicodeEncodeError as exc:
        raise TableUnusable("the name is not valid Unicode", table=table, hint=_RENAME) from exc


def _folder(folder: str, table: TableId) -> str:
    try:
        size = len(folder.encode())
    except UnicodeEncodeError as exc:
        raise TableUnusable("the name is not valid Unicode", table=table, hint=_RENAME) from exc
    if folder.lower() == _LOG:
        raise TableUnusable(
            "a folder of this name is Delta's own: the one around it would be a table",
            table=table,
            folder=folder,
            hint="Give the table another name in the lake: `tables.names`, or `name:` in `tables.rules`.",
        )
    if not folder:
        raise TableUnusable("a table or schema without a name has no folder", table=table, hint=_RENAME)
    if size > NAME_BYTES_MAX:
        raise TableUnusable(
            "the name is too long for a folder", table=table, bytes=size, limit=NAME_BYTES_MAX, hint=_RENAME
        )
    return folder


_RENAME = "Rename it at the source, or leave the table out with `exclude:`."


def _percent(character: str) -> str:
    return "".join(f"%{byte:02X}" for byte in character.encode())
