"""The folder a Delta table really lies in, and what else may stand there.

delta-rs 1.6 decodes `%2F` in a path once too often (it writes the data in one folder and looks for the log in
another) and panics at five other characters. A table with such a name in its path lies under `.tailrace/`, beside the
first folder of that path which has one, and its own path is a relative link there, which every reader follows. No
source table can claim that folder: a leading dot is encoded. Nothing that is not ours is ever overwritten or taken for
a table.
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
"""Below a table's folder, while it is worked on; readers and Delta's own upkeep pass over names that begin so."""
REBUILT = "_rebuild"
"""Where a table is made anew, in its own folder. Readers and writers of Delta pass over a name that begins so."""

_OURS = re.compile(rf"\..*|_delta_log|{REBUILT}|part-.*\.parquet")
"""What a load or a rebuild that died leaves behind, and the hidden files that systems add."""


def find_folder(path: Path) -> Path | None:
    """Where the table lies; None if there is no table yet. Refuses a place that cannot hold one."""
    try:
        folder = _real(path)
        if folder is None or not folder.exists():
            return None
        if not folder.is_dir():
            raise TableUnusable("a file stands in the table's place", path=path, hint=AWAY_HINT)
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
    """Refuse to make a table in the folder of another one, whoever's that is: its upkeep, and readers that go by
    folders, would take the new one's files for its own. Below `rebuilt` it is the table itself that is made anew."""
    for below, around in zip((path, *path.parents), path.parents, strict=False):
        if below.name == rebuilt:
            continue
        if has_commits(around) or any((around / "metadata").glob("*.metadata.json*")):
            raise TableUnusable(
                "the folder lies inside another table",
                path=path,
                other=around,
                hint="Choose another `tables.path` or `tables.names`, or give the table another `name:` in "
                "`tables.rules`.",
            )


def _strays(folder: Path) -> Iterator[str]:
    """What is not ours; the files of a partition lie in folders of their own."""
    for entry in folder.iterdir():
        if is_partition(entry.name) and entry.is_dir():
            yield from _strays(entry)
        elif not _OURS.fullmatch(entry.name):
            yield entry.name


def is_partition(name: str) -> bool:
    """Whether a folder of this name may be that of a partition."""
    return "=" in name


def existing_folder(path: Path) -> Path | None:
    """The folder, whether or not it holds a table yet."""
    folder = _real(path)
    return folder if folder is not None and folder.is_dir() else None


def make_folder(path: Path) -> Path:
    """The folder for a new table, made if need be. Many may ask at once: all get the same."""
    try:
        if _needs_link(path) and not path.is_symlink():
            around = next(folder for folder in path.parents if not UNUSABLE.search(str(folder)))
            aside = around / LINK_TARGETS / uuid.uuid4().hex
            aside.mkdir(parents=True)
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                path.symlink_to(os.path.relpath(aside, path.parent), target_is_directory=True)
            except FileExistsError:
                aside.rmdir()
                if not path.is_symlink():
                    raise
        folder = _real(path) or path
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise unreadable(path, exc) from exc
    return folder


_SYSTEM_HINT = "Check that the path is a lake table or free, that this user may write there, and the disk's room."
_GONE_HINT = (
    "If a file of the table was removed, run `tailrace rebuild FILE TABLE`, which does without it where it can, or "
    "`tailrace snapshot FILE TABLE`: the table is loaded anew."
)
_DAMAGED_HINT = (
    "It is no lake table, or is damaged. Move the folder away; then `tailrace rebuild FILE TABLE` makes the table from "
    "what is kept of its load, and otherwise the next start loads it."
)


def unreadable(path: Path, exc: BaseException) -> TableUnusable:
    """The table cannot be read or written, for the reason the system gave."""
    # Only the system's own words: another message of the engine's could quote a row.
    said = re.search(r"([A-Z][^\n\x1b]*)\(os error \d+\)", str(exc))
    reason = os.strerror(exc.errno) if isinstance(exc, OSError) and exc.errno else None
    reason = reason or (said.group(1).strip() if said else None)
    hint = _DAMAGED_HINT if reason is None else _GONE_HINT if reason == os.strerror(errno.ENOENT) else _SYSTEM_HINT
    return TableUnusable("the table's folder cannot be used", path=path, reason=reason or type(exc).__name__, hint=hint)


def _real(path: Path) -> Path | None:
    if not _needs_link(path):
        return path
    try:
        found = path.lstat()  # looked at once: another may make the link meanwhile
    except FileNotFoundError:
        return None
    if stat.S_ISLNK(found.st_mode):
        return path.resolve()
    raise TableUnusable("delta-rs cannot use a folder with this name", path=path, hint=AWAY_HINT)


def _needs_link(path: Path) -> bool:
    return UNUSABLE.search(str(path)) is not None


AWAY_HINT = "Move it away, or choose another `tables.path`."
