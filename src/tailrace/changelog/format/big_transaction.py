"""Write a transaction too large for memory into the log as its rows arrive.

The files are in `big/<commit>/`, under the number of the commit that will name them. Until that commit exists no reader
looks for them. What a crash left is swept by the next writer's first commit. Each writer's files have a token of their
own, so a writer that was overtaken cannot touch its successor's.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from pathlib import Path

from tailrace import failpoints
from tailrace.changelog.format.commit_file import BigTransactionFile, CommitBody, CommitHeader, commit_path, read_header
from tailrace.model.position import Lsn
from tailrace.storage import files
from tailrace.storage.files import LogPath


class Spill:
    """The rows of one open transaction that are on disk already."""

    def __init__(self, log: LogPath, commit: int, announced: int) -> None:
        self._log, self._commit = log, commit
        self._files: list[LogPath] = []
        self.bodies: list[CommitBody] = []
        self.rows = 0
        self.shapes = announced
        """Number of schema versions that the log and these pieces announce."""

    def write(
        self, bodies: Sequence[CommitBody], parts: Sequence[bytes | memoryview], rows: int, announced: int
    ) -> None:
        """Make one piece of the transaction durable."""
        if not self._files:
            self._folder = self._log / "big" / f"{self._commit:020d}"
            self._token = uuid.uuid4().hex[:12]
            files.make_folder(self._folder)
        path = self._folder / f"{self._token}-{len(self._files) + 1}.arrow"
        with files.explain_errors(path):
            files.write_new(path, parts)
        self._files.append(path)
        self.bodies += [body._replace(piece=len(self._files)) for body in bodies]
        self.rows, self.shapes = self.rows + rows, announced
        failpoints.hit("log.piece_written")

    def pieces(self, position: Lsn) -> tuple[BigTransactionFile, ...]:
        """Return the entries of the commit's header for these files.

        Call it once the end of the transaction is known.
        """
        with files.explain_errors(self._folder):
            files.sync_folder(self._folder)
            files.sync_folder(self._folder.parent)
        return tuple(
            BigTransactionFile(file=files.relative_name(self._log, path), position=position) for path in self._files
        )

    def discard(self) -> None:
        """Remove what was written: the transaction will be read again from its beginning."""
        for path in self._files:
            files.remove(path)


def sweep(log: LogPath, newest: CommitHeader) -> None:
    """Remove the files of transactions that never became a commit.

    `newest` is the newest commit, which is ours.
    """
    folder = log / "big"
    for below in folder.iterdir() if folder.is_dir() else []:
        if below.name.isdigit():
            named_files = _named_by(log, int(below.name), newest)
            for path in below.iterdir():
                if path not in named_files:
                    path.unlink()
            if not named_files and isinstance(below, Path):
                below.rmdir()


def _named_by(log: LogPath, commit: int, newest: CommitHeader) -> set[LogPath]:
    """Return the files that a commit names.

    There are none if the commit does not exist, or is sealed and removed.
    """
    try:
        header = newest if commit == newest.commit else read_header(commit_path(log, commit))
    except FileNotFoundError:
        return set()
    return {log / piece.file for piece in header.big}
