"""Reading the log: commits in order, with nothing skipped and nothing delivered unchecked.

Readers never lock and never wait for the writer: a commit exists when its file does, numbers are dense, and
each starts where the one before ended.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

from tailrace.capture.base import SourceId
from tailrace.changelog import files, format
from tailrace.changelog.format import Body, Header, corrupt
from tailrace.changelog.schemas import Schemas, Version
from tailrace.errors import LogCorrupt, LogUnusable
from tailrace.model.batch import ChangeBatch

FIRST_COMMIT = 1
_COMMIT_NAME = re.compile(r"[0-9]{20}\.arrow")
_POLL_SECONDS = 0.005
_POLL_SECONDS_MAX = 0.1


def commit_path(log: Path, commit: int) -> Path:
    """Where a commit's file stands."""
    return log / "hot" / f"{commit:020d}.arrow"


class ChangeLog:
    """A log, open for reading."""

    def __init__(self, path: Path, log_id: str, source: SourceId) -> None:
        self.path = path
        self.log_id = log_id
        self.source = source
        self.schemas = Schemas(path / "schemas")
        self._newest = 0

    @classmethod
    def open(cls, path: Path | str) -> ChangeLog:
        """Open an existing log; a log that cannot be read is an error, never an empty log."""
        path = Path(path)
        meta = path / "meta.json"
        with files.explained(meta):
            found = files.is_there(meta)
        if not found:
            raise LogUnusable(
                "there is no log here",
                path=path,
                hint="Start `tailrace run` or `tailrace capture` first; they make it.",
            )
        with files.explained(meta):
            text = meta.read_bytes()
        try:
            stored = json.loads(text)
            known = stored["format"] == format.FORMAT
            source, log_id = SourceId(**stored["source"]), stored["log"]
        except (ValueError, KeyError, TypeError) as error:
            raise LogCorrupt(
                "the log's meta.json cannot be read",
                path=meta,
                hint="Restore it from a copy of the log, or set `log:` to a new folder.",
            ) from error
        if not known:
            raise LogCorrupt(
                "the log has a format this version does not know",
                path=meta,
                hint="Use the version of Tailrace that wrote it, or a newer one.",
            )
        return cls(path, log_id, source)

    def newest(self) -> int:
        """The number of the newest commit; 0 if there is none yet. Cheap when asked again."""
        if not self._newest:
            self._newest = max(self._numbers(), default=0)
        while commit_path(self.path, self._newest + 1).exists():
            self._newest += 1
        return self._newest

    def _numbers(self) -> list[int]:
        folder = self.path / "hot"
        try:
            with files.explained(folder):
                names = os.listdir(folder)
        except LogUnusable as error:
            if folder.exists():
                raise
            raise LogCorrupt(
                "the log's commits are missing",
                path=folder,
                hint="Restore the folder from a copy of the log, or start a new log.",
            ) from error
        return [int(name[:20]) for name in names if _COMMIT_NAME.fullmatch(name)]

    def last_header(self) -> Header | None:
        newest = self.newest()
        return self.header(newest) if newest else None

    def header(self, commit: int) -> Header:
        """What a commit holds."""
        path = commit_path(self.path, commit)
        try:
            found = format.read_header(path)
        except FileNotFoundError as error:
            raise LogCorrupt(
                "a commit of the log is missing",
                path=path,
                hint="Restore the file from a copy of the log, or start a new log.",
            ) from error
        except OSError as error:
            raise LogUnusable(
                f"a commit cannot be read: {error.strerror}",
                path=path,
                hint="Look at the disk and the folder's permissions.",
            ) from error
        if found.commit != commit or found.log != self.log_id:
            raise corrupt(path, "it belongs to another place")
        return found

    def headers(self, after: int, to: int | None = None) -> Iterator[Header]:
        """The commits after a number, in order, each starting where the one before ended."""
        previous: Header | None = None
        for commit in range(after + 1, (self.newest() if to is None else to) + 1):
            found = self.header(commit)
            if previous is not None and found.start != previous.end:
                raise corrupt(commit_path(self.path, commit), "it does not start where the one before ended")
            yield found
            previous = found

    def batch(self, header: Header, body: Body) -> ChangeBatch:
        """One table's rows of a commit, with every optional column in place."""
        version = self.schemas.get(body.table, body.schema)
        path = commit_path(self.path, header.commit)
        with files.explained(path), path.open("rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        begin = header.bodies_at + body.at
        view = memoryview(mapped)[begin : begin + body.size]
        if len(view) != body.size or zlib.crc32(view) != body.crc:
            raise corrupt(path, f"the rows of table {body.table} do not match their checksum")
        stored = pa.schema([field for field in version.arrow if field.name not in body.without])
        data = pa.ipc.read_record_batch(pa.py_buffer(view), stored)
        return ChangeBatch(
            schema=version.schema,
            data=_complete(data, version),
            moves=body.moves,
            truncates=body.truncates,
            unfit=body.unfit,
        )

    def follow(
        self, after: int, *, table: int | None = None, wait_seconds: float = 0.0
    ) -> Iterator[ChangeBatch]:
        """The batches after a commit, in order, then whatever comes, until nothing came for `wait_seconds`."""
        pause, deadline = _POLL_SECONDS, time.monotonic() + wait_seconds
        while True:
            newest = self.newest()
            for header in self.headers(after, newest):
                for body in header.bodies:
                    if table is None or body.table == table:
                        yield self.batch(header, body)
            if newest > after:
                after, pause, deadline = newest, _POLL_SECONDS, time.monotonic() + wait_seconds
            elif time.monotonic() >= deadline:
                return
            time.sleep(pause)
            pause = min(pause * 2, _POLL_SECONDS_MAX)


def _complete(data: pa.RecordBatch, version: Version) -> pa.RecordBatch:
    """The batch with the optional columns that were left out put back as nulls."""
    columns = [
        data.column(field.name) if field.name in data.schema.names else pa.nulls(data.num_rows, field.type)
        for field in version.arrow
    ]
    return pa.RecordBatch.from_arrays(columns, schema=version.arrow)
