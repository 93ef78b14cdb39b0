"""Append to the log: data and source position in one atomic commit.

A commit is a compare-and-swap on its number. It starts at the position where the one before ended. So positions move
only through commits, `_seq` is dense, and two writers cannot both succeed. When `append` returns, the window is
durable: only then may the source discard its own.

When `append` raises, nothing was written, or it is unknown whether the written bytes are durable. In the second case
this writer accepts nothing more. The next process that opens the log finds the commit and makes it durable before it
continues from there.
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
_SEQ_INDEX = [field.name for field in change.REQUIRED].index(change.SEQ)
_ZEROS = bytes(commit_file.ALIGNMENT)


class LogWriter:
    """The one writer of a log.

    Opening it waits for the lease. Its first commit sweeps what a crash left behind.
    """

    def __init__(self, path: LogPath | str, source: SourceId, *, take_over: bool = False) -> None:
        path = files.parse_log_path(path)
        require_instance("source", source, SourceId, "Pass the source's identity: `source.identify()`.")
        self.path, self.commit = path, 0
        self._token = uuid.uuid4().hex if files.is_remote(path) else ""
        with files.explain_errors(path):
            exists = files.file_exists(path / "meta.json")
        if not exists:  # a log with meta.json has its folders; if one is missing, its content is lost too
            for name in _FOLDERS:
                files.make_folder(path / name)
        self._lease = LogLease(path, take_over=take_over) if take_over else LogLease(path)
        try:
            self.log_id = _identify(path, source)
            self._schemas = LogSchemas(path / "schemas")
            self._schemas.load()
            last = self._durable_newest()
        except BaseException:
            self._lease.release()
            raise
        self.commit = last.commit if last else 0
        self.position = last.end if last else ZERO
        self.next_seq = last.next_seq if last else 1
        self.timeline = last.timeline if last else source.timeline
        """The timeline of the source's history, as the newest commit has it.

        The next commit stores the value that this has by then.
        """
        self._announced = last.shapes if last else 0
        self._gaps = last.gaps if last else 0
        self._recorded_gaps = records.CachedRecord(path / gaps.GAPS_FILE, lambda: gaps.read_gaps(path))
        self._written_at = last.written_at if last else 0
        self._spill: Spill | None = None
        self._has_swept = self._durability_unknown = False

    def _durable_newest(self) -> commit_file.CommitHeader | None:
        """Return the newest commit, complete and durable.

        Its writer may have died, or failed, before it knew that it was.
        """
        log = ChangeLog.open(self.path)
        newest = log.newest()
        log.gaps()
        last = self._checked(log, newest) if newest else None
        if last is None:
            with files.explain_errors(self.path):
                files.make_durable(self.path / "meta.json")
                files.sync_folder(self.path.parent)
        else:
            self._make_durable(commit_path(self.path, last.commit))
        self._schemas.make_durable(last.shapes if last else 0)
        return last

    def _make_durable(self, path: LogPath) -> None:
        try:
            with files.explain_errors_but_missing(path):
                files.make_durable(path)
        except FileNotFoundError as error:  # swept by a writer that has the next number already
            raise self._fenced() from error

    def _checked(self, log: ChangeLog, newest: int) -> commit_file.CommitHeader:
        """Return the newest commit after a read of all its bytes.

        If it is damaged, the source may still have its changes.
        """
        try:
            last = log.header(newest)
            for body in last.bodies:
                log.batch(last, body)
            return last
        except LogCorrupt as error:
            if error.damaged_commit:
                error.hint += (
                    " If the machine has just crashed, its disk lost data that it had reported as durable. Then move "
                    f"the newest commit ({commit_path(self.path, newest).name}) away and start again: its changes are "
                    "captured again, or an error says that the source no longer has them."
                )
            raise

    def _sweep(self, header: commit_file.CommitHeader) -> None:
        """Remove temporary files that dead writers left. No process has read them.

        This must not happen before our first commit: until the number is ours, another writer may still commit what we
        would remove.
        """
        with suppress(OSError):
            for pattern in ("hot/.*.tmp", "schemas/*/.*.tmp", ".*.tmp") if isinstance(self.path, Path) else ():
                for leftover in self.path.glob(pattern):
                    leftover.unlink(missing_ok=True)
            big_transaction.sweep(self.path, header)
        self._has_swept = True

    def append(self, window: Window) -> commit_file.CommitHeader | None:
        """Make the window durable as the next commit, or as a piece of it.

        It is a piece if its last transaction has not ended. A piece moves nothing: until the commit that ends the
        transaction, the log reads as if the piece did not exist. After an error the pieces are removed, since they may
        have taken the missing room. The transaction is then read again.
        """
        if self._durability_unknown:
            raise LogUnusable(
                "it is not known whether the newest commit is durable",
                log=self.path,
                hint="Look at the disk and at the kernel's log, or at the store, then start again: nothing is lost.",
            )
        try:
            return self._append(window)
        except BaseException as error:
            self._durability_unknown = self._durability_unknown or isinstance(error.__cause__, local.DurabilityUnknown)
            self._discard_pieces()
            if isinstance(error, LogFull):
                self._make_room()
            raise

    def _make_room(self) -> None:
        """Make an empty commit, so that the pieces of a dead writer can be removed.

        They may be what fills the disk, and only the commit makes their number ours.
        """
        if self.commit and not self._has_swept:
            self._has_swept = True
            try:
                header = self.append(Window(start=self.position, end=self.position))
                assert header is not None, "a whole window"
                self._sweep(header)
            except LogError:
                self._has_swept = False

    def _append(self, window: Window) -> commit_file.CommitHeader | None:
        # The very first commit has none before it: it says where the log begins.
        pieces_lost = window.continues and self._spill is None  # discarded by an append that failed
        if pieces_lost or (window.start != self.position and self.commit):
            raise LogCorrupt(
                "a window does not start where the log ends",
                log=self.position,
                window=window.start,
                hint="This is a defect in Tailrace; nothing was written. Please report it.",
            )
        if not window.continues:
            self._discard_pieces()
        spill = self._spill or Spill(self.path, self.commit + 1, self._announced)
        bodies, parts, announced = self._encode(window, self.next_seq + spill.rows, spill.shapes)
        if window.open:
            self._spill = spill
            spill.write(bodies, parts, window.rows, announced)
            return None
        pieces = spill.pieces(window.continued_end) if window.continued_end is not None else ()
        # A clock that was set back must not make a later commit look older than an earlier one.
        self._written_at = max(self._written_at, time.time_ns() // 1000)
        rows = spill.rows + window.rows
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
            bodies=(*spill.bodies, *bodies),
            big=pieces,
            shapes=announced,
            timeline=self.timeline,
            gaps=self._gaps + passes,
            writer=self._token,
        )
        self._publish(header, [commit_file.encode_header(header), *parts])
        self.commit, self.position, self.next_seq = header.commit, header.end, header.next_seq
        self._announced, self._gaps = announced, header.gaps
        if not self._has_swept:
            self._sweep(header)
        return header

    def _publish(self, header: commit_file.CommitHeader, parts: Parts) -> None:
        path, started = commit_path(self.path, header.commit), time.monotonic()
        temp = files.temp_path(path)
        failpoints.hit("log.before_write")
        with files.explain_errors(path):
            files.write_temp(temp, parts)
        failpoints.hit("log.after_write")
        # Once the commit may exist, we must not remove the pieces that it names.
        spill, self._spill = self._spill, None
        try:
            with files.explain_errors_but_missing(path):
                files.publish(temp, path)
        except (FileExistsError, FileNotFoundError) as error:  # taken, or swept by the writer that has the number
            self._spill = spill
            raise self._fenced() from error
        failpoints.hit("log.after_link")
        if files.is_remote(path) and time.monotonic() - started > EXPIRY_SECONDS:
            # After so long another process may hold the log. A number is only a fence while its file exists, and the
            # file is removed once the other process has sealed it.
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
        """Return the bodies of the batches, their bytes, and how many schema versions are announced."""
        bodies: list[commit_file.CommitBody] = []
        parts: Parts = []
        unannounced: list[tuple[LogSchemaVersion, pa.RecordBatch]] = []
        offset = 0

        def add(version: LogSchemaVersion, batch: ChangeBatch) -> None:
            nonlocal offset
            data = batch.data
            encoded = data.serialize()
            first, last = batch.ends or _ends(data)
            size = encoded.size
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
                    _omitted_columns(data, version, window),
                    offset,
                    size,
                    zlib.crc32(encoded),
                    0,
                    first_seq,
                )
            )
            parts.append(encoded)
            if padding:
                parts.append(_ZEROS[:padding])
            offset += size + padding

        for batch in window.batches:
            version = self._record(batch.schema)
            add(version, batch)
            if version.ordinal > announced:
                unannounced.append((version, batch.data))
        if not unannounced:
            return tuple(bodies), parts, announced
        last_announced = max(version.ordinal for version, _ in unannounced)
        announced_rows = system_streams.announcement_rows(
            _announcements(unannounced, self._schemas, announced, last_announced)
        )
        add(
            self._record(system_streams.SCHEMA_STREAM),
            ChangeBatch(schema=system_streams.SCHEMA_STREAM, data=announced_rows),
        )
        return tuple(bodies), parts, last_announced

    def _record(self, schema: TableSchema) -> LogSchemaVersion:
        try:
            return self._schemas.record(schema)
        except FileExistsError as error:  # it did not exist when this log was opened
            raise self._fenced() from error

    def latest_schemas(self) -> list[TableSchema]:
        """Return the newest schema of every table."""
        return [version.schema for version in self._schemas.latest()]

    def close(self) -> None:
        """Let the next writer in."""
        self._discard_pieces()
        self._lease.release()

    def _discard_pieces(self) -> None:
        if self._spill is not None:
            self._spill.discard()
            self._spill = None


def _announcements(
    unannounced: Sequence[tuple[LogSchemaVersion, pa.RecordBatch]],
    schemas: LogSchemas,
    announced: int,
    last_announced: int,
) -> list[system_streams.SchemaAnnouncement]:
    """Return a record for every version counted so far and not announced yet.

    Each has the position of its first row. A writer may have recorded a version and died before any row had it: then it
    has the position of the first row of the next version.
    """
    first: dict[int, pa.RecordBatch] = {}
    for version, data in unannounced:
        first.setdefault(version.ordinal, data)
    announcements = []
    for version in schemas.versions_after(announced):
        if version.ordinal > last_announced:
            break
        row = first[min(ordinal for ordinal in first if ordinal >= version.ordinal)].slice(0, 1)
        position = row.column(change.POSITION)[0].as_py() if change.POSITION in row.schema.names else None
        announcements.append(
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
    return sorted(announcements, key=lambda item: item.seq)


def _ends(data: pa.RecordBatch) -> tuple[int, int]:
    seqs = data.column(_SEQ_INDEX).to_numpy()
    return int(seqs[0]), int(seqs[-1])


def _omitted_columns(data: pa.RecordBatch, version: LogSchemaVersion, window: Window) -> tuple[str, ...]:
    # Nearly every batch leaves out every optional column; asking for names is what costs.
    if not window.open and data.num_columns == version.required_column_count:
        return change.OPTIONAL
    names = set(data.schema.names)
    return tuple(name for name in (change.POSITION, *change.OPTIONAL) if name not in names)


def _identify(path: LogPath, source: SourceId) -> str:
    """Return the log's id, which is made on first use.

    Refuse a log that belongs to another source.
    """
    meta = path / "meta.json"
    with files.explain_errors(meta):
        exists = files.file_exists(meta)
    if not exists:
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
    known = log.source
    if (known.kind, known.system, known.database) != (source.kind, source.system, source.database):
        raise LogForeign(
            "the log belongs to another source",
            log=path,
            expected=f"{known.kind} {known.system}/{known.database}",
            found=f"{source.kind} {source.system}/{source.database}",
            hint="Point `source.url` at the database this log was made from, or set `log:` to a new folder.",
        ).with_option_hint("Point the option `url` at the database this log was made from, or give `log` a new folder.")
    return log.log_id
