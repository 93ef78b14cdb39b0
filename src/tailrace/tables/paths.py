"""Where a table lies: `<root>/<schema>/<table>`, names verbatim but for what a path cannot hold.

Two tables never share a folder and no folder leaves its root: `/`, `%`, control characters and a leading dot
are percent-encoded, so `..` and `a/b` become ordinary names and the encoding reads back.
"""

from __future__ import annotations

import re
from pathlib import Path

from tailrace.errors import TableUnusable
from tailrace.model.schema import TableId

NAME_BYTES_MAX = 255
"""What ext4, XFS, APFS and NTFS allow for one name."""

# C0 and C1 controls, DEL, and the two characters that carry meaning in an encoded path.
_ENCODED = re.compile(r"^\.|[/%\x00-\x1f\x7f-\x9f]")


def table_path(root: Path, table: TableId) -> Path:
    """The folder of the table's mirror."""
    return root / _folder(table.schema, table) / _folder(table.name, table)


def _folder(name: str, table: TableId) -> str:
    try:
        folder = _ENCODED.sub(lambda found: _percent(found.group()), name)
        size = len(folder.encode())
    except UnicodeEncodeError as exc:
        raise TableUnusable("the name is not valid Unicode", table=table, hint=_RENAME) from exc
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
