"""The glob `cold/<table>/*.parquet`, on a disk: a folder of links that shows every sealed row of a table once.

A link is added where files only came; where some went, a new folder of links takes the place of the old one at one
stroke. Nothing of the log hangs on it: whoever seals brings it in line with the seals.
"""

from __future__ import annotations

import os
import shutil
import uuid
from pathlib import Path

from tailrace import failpoints
from tailrace.storage import files


def write_links(log: Path, table: int, wanted: dict[str, str]) -> None:
    """Make `cold/<table>` hold a link to each of these files and nothing else, at one stroke."""
    view = log / "cold" / str(table)
    shown = set(os.listdir(view)) if view.is_dir() else set()
    if view.is_dir() and shown <= set(wanted):
        for name in sorted(set(wanted) - shown):
            os.symlink(os.path.relpath(log / wanted[name], view.resolve()), view / name)
        return
    folder = log / "cold" / "views" / f"{table}-{uuid.uuid4().hex[:12]}"
    old = os.readlink(view) if view.is_symlink() else None
    aside = files.temp_path(view)
    try:
        folder.mkdir(parents=True)
        for name, file in wanted.items():
            os.symlink(os.path.relpath(log / file, folder), folder / name)
        os.symlink(os.path.relpath(folder, view.parent), aside)
        failpoints.hit("seal.view_made")
        os.replace(aside, view)
    except BaseException:
        files.remove(aside)
        shutil.rmtree(folder, ignore_errors=True)
        raise
    if old is not None:
        shutil.rmtree(view.parent / old, ignore_errors=True)


def remove_stale_links(log: Path) -> None:
    """Remove folders of links that never got a table's name, or have lost it."""
    folder = log / "cold"
    named = {os.readlink(view) for view in folder.iterdir() if view.is_symlink()}
    for view in (folder / "views").glob("*"):
        if view.relative_to(folder).as_posix() not in named:
            shutil.rmtree(view)
