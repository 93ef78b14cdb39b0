"""Appending to the log: data and source position in one atomic commit.

A commit is a compare-and-swap on its number. It starts at the position where the one before ended, so
positions move only through commits, `_seq` is dense, and two writers cannot both succeed. When `append`
returns, the window is durable: only then may the source be told.
"""

from __future__ import annotations

import json
import time
import uuid
import zlib
from dataclasses import asdict
from pathlib import Path

import pyarrow as pa

from tailrace import failpoints
from tailrace.capture.base import SourceId
from tailrace.changelog import files, format
from tailrace.changelog.lease import Lease
from tailrace.changelog.reader import ChangeLog, commit_path
from tailrace.changelog.schemas import Schemas
from tailrace.errors import LogCorrupt, LogFenced, LogForeign
from tailrace.model import change
from tailrace.model.batch import ChangeBatch, Window
from tailrace.model.position import ZERO

_FOLDERS = ("hot", "schemas", "status")


class LogWriter:
    """The one writer of a log. Opening it waits for the lease and sweeps what a crash left behind."""

    def __init__(self, path: Path, source: SourceId) -> None:
        self.path = path
        with files.explained(path):
            begun = files.is_there(path / "meta.json")
        if not begun:  # a log that was begun has its folders; one that is gone took its content along
            for name in _FOLDERS:
                files.make_folder(path / name)
        self._lease = Lease(path)
        try:
            self.log_id = _identify(path, source)
            self._sweep()
            self._schemas = Schemas(path / "schemas")
            self._schemas.load()
            last = ChangeLog.open(path).last_header()
        except BaseException:
            self._lease.release()
            raise
        self.commit = last.commit if last else 0
        self.position = last.end if last else ZERO
        self.next_seq = last.next_seq if last else 1

    def _sweep(self) -> None:
        """Remove what a writer left that died before giving a file its name. Nobody ever read it."""
        with files.explained(self.path):
            for leftover in self.path.glob("**/.*.tmp"):
                leftover.unlink(missing_ok=True)

    def append(self, window: Window) -> format.Header:
        """Make the window durable as the next commit."""
        # The very first commit has nothing before it: it states where the log begins.
        if window.start != self.position and self.commit:
            raise LogCorrupt(
                "a window does not start where the log ends",
                log=self.position,
                window=window.start,
                hint="This is a defect in Tailrace; nothing was written. Please report it.",
            )
        bodies, parts = self._encode(window)
        header = format.Header(
            log=self.log_id, commit=self.commit + 1, start=window.start, end=window.end,
            transactions=window.transactions, rows=window.rows, next_seq=self.next_seq + window.rows,
            written_at=time.time_ns() // 1000, committed_at=window.last_committed_at, bodies=bodies,
        )  # fmt: skip
        self._publish(header, [format.encode_header(header), *parts])
        self.commit, self.position, self.next_seq = header.commit, header.end, header.next_seq
        return header

    def _publish(self, header: format.Header, parts: list[bytes | memoryview]) -> None:
        path = commit_path(self.path, header.commit)
        aside = files.aside_of(path)
        failpoints.hit("log.before_write")
        try:
            with files.explained(path):
                files.write_aside(aside, parts)
                failpoints.hit("log.after_write")
                files.publish(aside, path)
        except FileExistsError as error:
            raise self._fenced() from error
        failpoints.hit("log.after_link")

    def _fenced(self) -> LogFenced:
        return LogFenced(
            "another writer has taken our commit number",
            commit=self.commit + 1,
            log=self.path,
            hint="Stop one of the two writers of this log, then start again.",
        )

    def _encode(self, window: Window) -> tuple[tuple[format.Body, ...], list[bytes | memoryview]]:
        bodies: list[format.Body] = []
        parts: list[bytes | memoryview] = []
        at = 0
        for batch in window.batches:
            try:
                version = self._schemas.record(batch.schema)
            except FileExistsError as error:  # it was not there when this log was opened
                raise self._fenced() from error
            data = _rebase(batch, self.next_seq)
            message = data.serialize()
            view = memoryview(message)
            seqs = data.column(change.SEQ)
            bodies.append(format.Body(
                table=version.table, schema=version.version, rows=len(batch),
                first_seq=seqs[0].as_py(), last_seq=seqs[-1].as_py(),
                moves=batch.moves, truncates=batch.truncates, unfit=batch.unfit,
                without=tuple(name for name in change.OPTIONAL if name not in data.schema.names),
                at=at, size=len(view), crc=zlib.crc32(view),
            ))  # fmt: skip
            padding = format.align(len(view)) - len(view)
            parts += [view, bytes(padding)]
            at += len(view) + padding
        return tuple(bodies), parts

    def close(self) -> None:
        """Let the next writer in."""
        self._lease.release()


def _rebase(batch: ChangeBatch, first_seq: int) -> pa.RecordBatch:
    """The batch with `_seq` counted in the log instead of in the window."""
    place = batch.data.schema.get_field_index(change.SEQ)
    seqs = batch.data.column(place).to_numpy() + first_seq
    return batch.data.set_column(place, batch.data.schema.field(place), pa.array(seqs))


def _identify(path: Path, source: SourceId) -> str:
    """The log's id: made on first use, and refused if the log belongs to another source."""
    meta = path / "meta.json"
    with files.explained(meta):
        begun = files.is_there(meta)
    if not begun:
        stored = {"format": format.FORMAT, "log": uuid.uuid4().hex, "source": asdict(source)}
        with files.explained(meta):
            files.create(meta, json.dumps(stored, indent=1).encode())
        files.sync_folder(path.parent)
    log = ChangeLog.open(path)
    mine = log.source
    if (mine.kind, mine.system, mine.database) != (source.kind, source.system, source.database):
        raise LogForeign(
            "the log belongs to another source",
            log=path,
            expected=f"{mine.kind} {mine.system}/{mine.database}",
            found=f"{source.kind} {source.system}/{source.database}",
            hint="Point `source.url` at the database this log was made from, or set `log:` to a new folder.",
        )
    return log.log_id
