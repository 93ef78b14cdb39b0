"""Appending to the log: data and source position in one atomic commit.

A commit is a compare-and-swap on its number. It starts at the position where the one before ended, so
positions move only through commits, `_seq` is dense, and two writers cannot both succeed. When `append`
returns, the window is durable: only then may the source be told.

When `append` raises, nothing was written, or it is not known whether what was written is durable. Then this writer
takes nothing more, and whoever opens the log next finds the commit and makes it durable before going on from it.
"""

from __future__ import annotations

import time
import uuid
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import pyarrow as pa

from tailrace import failpoints
from tailrace.capture.port import SourceId
from tailrace.changelog.format import big_transaction, commit_file, gaps
from tailrace.changelog.format.big_transaction import Spill
from tailrace.changelog.format.commit_file import commit_path
from tailrace.changelog.format.schemas import LogSchemas, LogSchemaVersion
from tailrace.changelog.read.reader import ChangeLog
from tailrace.changelog.write.log_lease import EXPIRY_SECONDS, LogLease
from tailrace.errors import LogCorrupt, LogError, LogFenced, LogForeign, LogFull, LogUnusable
from tailrace.model import change, system_streams
from tailrace.model.batch import ChangeBatch, Window
from tailrace.model.position import ZERO
from tailrace.model.schema import TableSchema
from tailrace.storage import files, local, records
from tailrace.storage.files import LogPath
from tailrace.validation import require_instance

_FOLDERS = ("hot", "big", "cold", "schemas", "consumers", "status")
Parts = list[bytes | pa.Buffer]
_SEQ_PLACE = [field.name for field in change.REQUIRED].index(change.SEQ)
_ZEROS = bytes(commit_file.ALIGNMENT)


class LogWriter:
    """The one writer of a log. Opening it waits for the lease; its first commit sweeps what a crash left behind."""

    def __init__(self, path: LogPath | str, source: SourceId, *, take_over: bool = False) -> None:
        path = files.parse_log_path(path)
        require_instance("source", source, SourceId, "Give what the source is: `source.identify()`.")
        self.path, self.commit = path, 0
        self._token = uuid.uuid4().hex if files.is_remote(path) else ""
        with files.explain_errors(path):
            begun = files.file_exists(path / "meta.json")
        if not begun:  # a log that was begun has its folders; one that is gone took its content along
            for name in _FOLDERS:
                files.make_folder(path / name)
        self._lease = LogLease(path, take_over=take_over) if take_over else LogLease(path)
        try:
            self.log_id = _identify(path, source)
            self._schemas = LogSchemas(path / "schemas")
            self._schemas.load()
            last = self._found_durable()
        except BaseException:
            self._lease.release()
            raise
        self.commit = last.commit if last else 0
        self.position = last.end if last else ZERO
        self.next_seq = last.next_seq if last else 1
        self.timeline = last.timeline if last else source.timeline
        """Of the source's history, as the newest commit has it; the next one says what this says then."""
        self._announced = last.shapes if last else 0
        self._gaps = last.gaps if last else 0
        self._recorded_gaps = records.CachedRecord(path / gaps.GAPS_FILE, lambda: gaps.read_gaps(path))
        self._written_at = last.written_at if last else 0
        self._spill: Spill | None = None
        self._swept = self._doubtful = False

    def _found_durable(self) -> commit_file.CommitHeader | None:
        """The newest commit, whole and durable: its writer may have died, or failed, before it knew that it was."""
        log = ChangeLog.open(self.path)
        newest = log.newest()
        log.gaps()
        last = self._checked(log, newest) if newest else None
        if last is None:
            with files.explain_errors(self.path):
                files.make_durable(self.path / "meta.json")
                files.sync_folder(self.path.parent)
        else:
            self._renew(commit_path(self.path, last.commit))
        self._schemas.make_durable(last.shapes if last else 0)
        return last

    def _renew(self, path: LogPath) -> None:
        try:
            with files.explain_errors_but_missing(path):
                files.make_durable(path)
        except FileNotFoundError as error:  # swept away by one who has the next number already
            raise self._fenced() from error

    def _checked(self, log: ChangeLog, newest: int) -> commit_file.CommitHeader:
        """The newest commit, once every byte of it was read: the source may still have what is damaged in it."""
        try:
            last = log.header(newest)
            for body in last.bodies:
                log.batch(last, body)
            return last
        except commit_file.CommitCorrupt as error:
            error.hint += (
                " If the machine has just crashed, its disk lost what it had promised to keep. Then move the "
                f"newest commit ({commit_path(self.path, newest).name}) away and start again: what it held is "
                "captured again, or an error says that the source no longer has it."
            )
            raise

    def _sweep(self, header: commit_file.CommitHeader) -> None:
        """Remove what writers left that died before giving a file its name. Nobody ever read it.

        Not before our first commit: until the number is ours, another writer may still commit what we would remove.
        """
        with suppress(OSError):
            for pattern in ("hot/.*.tmp", "schemas/*/.*.tmp", ".*.tmp") if isinstance(self.path, Path) else ():
                for leftover in self.path.glob(pattern):
                    leftover.unlink(missing_ok=True)
            big_transaction.sweep(self.path, header)
        self._swept = True

    def append(self, window: Window) -> commit_file.CommitHeader | None:
        """Make the window durable as the next commit, or as a piece of it if its transaction has not ended.

        A piece moves nothing: until the commit that finishes the transaction, the log is as if it were not there.
        After an error the pieces are gone, for they may have taken the room that lacked: the transaction comes again.
        """
        if self._doubtful:
            raise LogUnusable(
                "it is not known whether the newest commit is durable",
                log=self.path,
                hint="Look at the disk and at the kernel's log, or at the store, then start again: nothing is lost.",
            )
        try:
            return self._append(window)
        except BaseException as error:
            self._doubtful = self._doubtful or isinstance(error.__cause__, local.DurabilityUnknown)
            self._forget_pieces()
            if isinstance(error, LogFull):
                self._make_room()
            raise

    def _make_room(self) -> None:
        """A dead writer's pieces may be what fills the disk: a commit of nothing makes the number ours, and they go."""
        if self.commit and not self._swept:
            self._swept = True
            try:
                header = self.append(Window(start=self.position, end=self.position))
                assert header is not None, "a whole window"
                self._sweep(header)
            except LogError:
                self._swept = False

    def _append(self, window: Window) -> commit_file.CommitHeader | None:
        # The very first commit has nothing before it: it states where the log begins.
        lost = window.continues and self._spill is None  # forgotten by an append that failed
        if lost or (window.start != self.position and self.commit):
            raise LogCorrupt(
                "a window does not start where the log ends",
                log=self.position,
                window=window.start,
                hint="This is a defect in Tailrace; nothing was written. Please report it.",
            )
        if not window.continues:
            self._forget_pieces()
        spilled = self._spill or Spill(self.path, self.commit + 1, self._announced)
        bodies, parts, shapes = self._encode(window, self.next_seq + spilled.rows, spilled.shapes)
        if window.open:
            self._spill = spilled
            spilled.write(bodies, parts, window.rows, shapes)
            return None
        pieces = spilled.pieces(window.continued_end) if window.continued_end is not None else ()
        # A clock that was set back must not make a later commit look older than an earlier one.
        self._written_at = max(self._written_at, time.time_ns() // 1000)
        rows = spilled.rows + window.rows
        number = self.commit + 1
        passes = window.is_empty and any(
            gap.commit == number and not gap.is_unconfirmed for gap in self._recorded_gaps.get()
        )
        header = commit_file.CommitHeader(
            log=self.log_id,
            commit=number,
            start=window.start,
            end=window.end,
            transactions=window.transactions,
            rows=rows,
            next_seq=self.next_seq + rows,
            written_at=self._written_at,
            committed_at=window.last_committed_at,
            bodies=(*spilled.bodies, *bodies),
            big=pieces,
            shapes=shapes,
            timeline=self.timeline,
            gaps=self._gaps + passes,
            writer=self._token,
        )
        self._publish(header, [commit_file.encode_header(header), *parts])
        self.commit, self.position, self.next_seq = header.commit, header.end, header.next_seq
        self._announced, self._gaps = shapes, header.gaps
        if not self._swept:
            self._sweep(header)
        return header

    def _publish(self, header: commit_file.CommitHeader, parts: Parts) -> None:
        path, begun = commit_path(self.path, header.commit), time.monotonic()
        aside = files.temp_path(path)
        failpoints.hit("log.before_write")
        with files.explain_errors(path):
            files.write_temp(aside, parts)
        failpoints.hit("log.after_write")
        # Once the commit may exist, the pieces it names are not ours to remove.
        spilled, self._spill = self._spill, None
        try:
            with files.explain_errors_but_missing(path):
                files.publish(aside, path)
        except (FileExistsError, FileNotFoundError) as error:  # taken; or swept by one who has the number
            self._spill = spilled
            raise self._fenced() from error
        failpoints.hit("log.after_link")
        if files.is_remote(path) and time.monotonic() - begun > EXPIRY_SECONDS:
            # So long that the log may be another's by now. A number is only a fence while its file is there, and once
            # another has sealed it, it goes.
            self._lease.check()

    def _fenced(self) -> LogFenced:
        return LogFenced(
            "another writer has taken our commit number",
            commit=self.commit + 1,
            log=self.path,
            hint="Stop one of the two writers of this log, then start again.",
        )

    def _encode(
        self, window: Window, first_seq: int, announced: int
    ) -> tuple[tuple[commit_file.CommitBody, ...], Parts, int]:
        """Where each batch will lie, its bytes, and how many shapes have been announced with it."""
        bodies: list[commit_file.CommitBody] = []
        parts: Parts = []
        fresh: list[tuple[LogSchemaVersion, pa.RecordBatch]] = []
        at = 0

        def add(version: LogSchemaVersion, batch: ChangeBatch) -> None:
            nonlocal at
            data = batch.data
            laid = data.serialize()
            first, last = batch.ends or _ends(data)
            size = laid.size
            padding = -size % commit_file.ALIGNMENT
            bodies.append(
                commit_file.CommitBody(
                    version.table,
                    version.version,
                    data.num_rows,
                    first_seq + first,
                    first_seq + last,
                    batch.moves,
                    batch.truncates,
                    batch.unfit,
                    _left_out(data, version, window),
                    at,
                    size,
                    zlib.crc32(laid),
                    0,
                    first_seq,
                )
            )
            parts.append(laid)
            if padding:
                parts.append(_ZEROS[:padding])
            at += size + padding

        for batch in window.batches:
            version = self._record(batch.schema)
            add(version, batch)
            if version.ordinal > announced:
                fresh.append((version, batch.data))
        if not fresh:
            return tuple(bodies), parts, announced
        shapes = max(version.ordinal for version, _ in fresh)
        announced_rows = system_streams.announcement_rows(_announcements(fresh, self._schemas, announced, shapes))
        add(
            self._record(system_streams.SCHEMA_STREAM),
            ChangeBatch(schema=system_streams.SCHEMA_STREAM, data=announced_rows),
        )
        return tuple(bodies), parts, shapes

    def _record(self, schema: TableSchema) -> LogSchemaVersion:
        try:
            return self._schemas.record(schema)
        except FileExistsError as error:  # it was not there when this log was opened
            raise self._fenced() from error

    def latest_schemas(self) -> list[TableSchema]:
        """The newest shape of every table."""
        return [version.schema for version in self._schemas.latest()]

    def close(self) -> None:
        """Let the next writer in."""
        self._forget_pieces()
        self._lease.release()

    def _forget_pieces(self) -> None:
        if self._spill is not None:
            self._spill.discard()
            self._spill = None


def _announcements(
    fresh: Sequence[tuple[LogSchemaVersion, pa.RecordBatch]], schemas: LogSchemas, announced: int, shapes: int
) -> list[system_streams.SchemaAnnouncement]:
    """A record for every version counted so far and not announced yet.

    Each stands at its first row. A version that a writer recorded before it died, and that no row has, stands at
    the first row of the next one.
    """
    first: dict[int, pa.RecordBatch] = {}
    for version, data in fresh:
        first.setdefault(version.ordinal, data)
    found = []
    for version in schemas.versions_after(announced):
        if version.ordinal > shapes:
            break
        row = first[min(ordinal for ordinal in first if ordinal >= version.ordinal)].slice(0, 1)
        position = row.column(change.POSITION)[0].as_py() if change.POSITION in row.schema.names else None
        found.append(
            system_streams.SchemaAnnouncement(
                table=version.table,
                version=version.version,
                schema=version.schema,
                definition=version.definition,
                position=position,
                seq=row.column(change.SEQ)[0].as_py(),
                tx=row.column(change.TX)[0].as_py(),
                tx_index=row.column(change.TX_INDEX)[0].as_py(),
                committed_at=row.column(change.COMMITTED_AT)[0].value,
            )
        )
    return sorted(found, key=lambda item: item.seq)


def _ends(data: pa.RecordBatch) -> tuple[int, int]:
    seqs = data.column(_SEQ_PLACE).to_numpy()
    return int(seqs[0]), int(seqs[-1])


def _left_out(data: pa.RecordBatch, version: LogSchemaVersion, window: Window) -> tuple[str, ...]:
    # Nearly every batch leaves out every optional column; asking for names is what costs.
    if not window.open and data.num_columns == version.required_column_count:
        return change.OPTIONAL
    names = set(data.schema.names)
    return tuple(name for name in (change.POSITION, *change.OPTIONAL) if name not in names)


def _identify(path: LogPath, source: SourceId) -> str:
    """The log's id: made on first use, and refused if the log belongs to another source."""
    meta = path / "meta.json"
    with files.explain_errors(meta):
        begun = files.file_exists(meta)
    if not begun:
        with files.explain_errors(path):
            orphans = any(name.endswith(".arrow") for name in files.list_names(path / "hot"))
        if orphans:
            raise LogCorrupt(
                "the log's meta.json is missing",
                path=meta,
                hint="Restore it from a copy of the log, or set `log:` to a new folder.",
            ).with_option_hint("Restore it from a copy of the log, or give the option `log` a new folder.")
        stored = {"format": commit_file.FORMAT, "log": uuid.uuid4().hex, "source": asdict(source)}
        with files.explain_errors(meta):
            files.create(meta, records.encode(stored))
    log = ChangeLog.open(path)
    mine = log.source
    if (mine.kind, mine.system, mine.database) != (source.kind, source.system, source.database):
        raise LogForeign(
            "the log belongs to another source",
            log=path,
            expected=f"{mine.kind} {mine.system}/{mine.database}",
            found=f"{source.kind} {source.system}/{source.database}",
            hint="Point `source.url` at the database this log was made from, or set `log:` to a new folder.",
        ).with_option_hint("Point the option `url` at the database this log was made from, or give `log` a new folder.")
    return log.log_id
