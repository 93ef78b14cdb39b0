"""Find or make the folder that a Delta table is in, and refuse other contents.

delta-rs 1.6 decodes `%2F` in a path once too often: it writes the data in one folder and looks for the log in another.
It also panics at five other characters. A table with such a name in its path is therefore stored under `.tailrace/`,
next to the first folder of that path with such a name. The table's own path is a relative link to it, which every
reader follows. No source table can use that folder's name, because a leading dot is encoded. Nothing that is not ours
is ever overwritten or taken for a table.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path

from tailrace.errors import TableUnusable
from tailrace.tables.delta.commit_log import has_commits
from tailrace.tables.table_paths import UNUSABLE

LINK_TARGETS = ".tailrace"
SCRATCH = "_tailrace"
"""Folder in a table's folder for files of work in progress. Readers and Delta's own upkeep ignore names that start
so."""
REBUILT = "_rebuild"
"""Folder in a table's own folder in which it is rebuilt. Readers and writers of Delta ignore a name that starts so."""

_OURS = re.compile(rf"\..*|_delta_log|{REBUILT}|part-.*\.parquet")
"""Leftovers of a dead load or rebuild, and the hidden files that operating systems add."""


def find_folder(path: Path) -> Path | None:
    """Return the folder that the table is in; None if there is no table. Refuses other contents."""
    try:
        folder = _real(path)
        if folder is None or not folder.exists():
            return None
        if not folder.is_dir():
            raise TableUnusable("the table's path is a file", path=path, hint=AWAY_HINT)
        if has_commits(folder):
            return folder
        strays = sorted(_strays(folder))
    except OSError as exc:
        raise unreadable(path, exc) from exc
    if strays:
        raise TableUnusable(
            "the folder holds something that is not a Delta table", path=path, found=strays[0], hint=AWAY_HINT
        )
    return None


def refuse_inside(path: Path, rebuilt: str = REBUILT) -> None:
    """Refuse to make a table inside the folder of another one, of any owner.

    The other table's upkeep, and readers that go by folders, would take the new table's files for its own. Inside the
    folder `rebuilt` it is the table itself that is rebuilt.
    """
    for below, outer in zip((path, *path.parents), path.parents, strict=False):
        if below.name == rebuilt:
            continue
        if has_commits(outer) or any((outer / "metadata").glob("*.metadata.json*")):
            raise TableUnusable(
                "the folder is inside another table",
                path=path,
                other=outer,
                hint="Choose another `tables.path` or `tables.names`, or another `name:` for the table in "
                "`tables.rules`.",
            )


def _strays(folder: Path) -> Iterator[str]:
    """Yield the names of entries that are not ours; partition folders are searched too."""
    for entry in folder.iterdir():
        if is_partition(entry.name) and entry.is_dir():
            yield from _strays(entry)
        elif not _OURS.fullmatch(entry.name):
            yield entry.name


def is_partition(name: str) -> bool:
    """Return whether a folder of this name may be a partition's."""
    return "=" in name


def existing_folder(path: Path) -> Path | None:
    """Return the folder if it exists, with or without a table in it."""
    folder = _real(path)
    return folder if folder is not None and folder.is_dir() else None


def make_folder(path: Path) -> Path:
    """Return the folder for a new table, made if necessary.

    Concurrent callers all get the same folder.
    """
    try:
        if _needs_link(path) and not path.is_symlink():
            outer = next(folder for folder in path.parents if not UNUSABLE.search(str(folder)))
            link_target = outer / LINK_TARGETS / uuid.uuid4().hex
            link_target.mkdir(parents=True)
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                path.symlink_to(os.path.relpath(link_target, path.parent), target_is_directory=True)
            except FileExistsError:
                link_target.rmdir()
                if not path.is_symlink():
                    raise
        folder = _real(path) or path
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise unreadable(path, exc) from exc
    return folder


_SYSTEM_HINT = (
    "Check that the path is a lake table or unused, that this user may write there, and that the disk has room."
)
_GONE_HINT = (
    "If a file of the table was removed, run `tailrace rebuild FILE TABLE`, which can often restore the table without "
    "it. Or run `tailrace snapshot FILE TABLE` to reload the table."
)
_DAMAGED_HINT = (
    "It is not a lake table, or it is damaged. Move the folder away. Then run `tailrace rebuild FILE TABLE` to make "
    "the table from its kept load. Without a kept load, the next start loads it."
)


def unreadable(path: Path, exc: BaseException) -> TableUnusable:
    """Return the error, with the system's reason, for a table that cannot be used."""
    # Only the system's own words: another message of the engine's could quote a row.
    match = re.search(r"([A-Z][^\n\x1b]*)\(os error \d+\)", str(exc))
    reason = os.strerror(exc.errno) if isinstance(exc, OSError) and exc.errno else None
    reason = reason or (match.group(1).strip() if match else None)
    hint = _DAMAGED_HINT if reason is None else _GONE_HINT if reason == os.strerror(errno.ENOENT) else _SYSTEM_HINT
    return TableUnusable("the table's folder cannot be used", path=path, reason=reason or type(exc).__name__, hint=hint)


def _real(path: Path) -> Path | None:
    if not _needs_link(path):
        return path
    try:
        found = path.lstat()  # looked up only once: another process may make the link meanwhile
    except FileNotFoundError:
        return None
    if stat.S_ISLNK(found.st_mode):
        return path.resolve()
    raise TableUnusable("delta-rs cannot use a folder with this name", path=path, hint=AWAY_HINT)


def _needs_link(path: Path) -> bool:
    return UNUSABLE.search(str(path)) is not None


AWAY_HINT = "Move it away, or choose another `tables.path`."
