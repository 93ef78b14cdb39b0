"""Read the log: commits in order, nothing skipped, nothing twice, nothing unchecked.

Readers never lock and never wait for the writer. A commit exists when its file does, numbers are dense, and each commit
starts where the one before ended. The reader looks up at read time whether a commit's rows are in its own file or in
sealed ones. A follower gets an error for what was trimmed, and for what the source had discarded unread; neither is
skipped.
"""

from __future__ import annotations

import itertools
import json
import re
import time
import zlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType

import pyarrow as pa

from tailrace.capture.port import SourceId
from tailrace.changelog.format import commit_file
from tailrace.changelog.format import seal as cold
from tailrace.changelog.format.commit_file import CommitBody, CommitHeader, commit_path, corrupt_commit_error
from tailrace.changelog.format.coverage import COVERAGE_FILE as PUBLISHED
from tailrace.changelog.format.coverage import Coverage, read_coverage
from tailrace.changelog.format.gaps import GAPS_FILE as GAPS
from tailrace.changelog.format.gaps import Gap, confirmed_gaps
from tailrace.changelog.format.schemas import LogSchemas, TableSelector
from tailrace.changelog.format.seal import Seal, SealIndex
from tailrace.changelog.format.trimmed import NOTHING_TRIMMED, TrimmedTable, TrimRecord, read_trimmed
from tailrace.changelog.format.trimmed import TRIMMED_FILE as TRIMMED
from tailrace.changelog.read.commit_wait import wait_for_commit
from tailrace.changelog.read.consumers import EXPIRE_SECONDS, Consumer, ReadProgress
from tailrace.changelog.read.merged_schema import conform_to_schema, merged_schema
from tailrace.changelog.read.row_steps import restore_rows, rows_after_position, rows_between
from tailrace.changelog.read.sealed_rows import RowSpan, SealedFileReader
from tailrace.errors import NEW_LOG_HINT, LogCorrupt, LogError, LogTrimmed, LogUnusable
from tailrace.model import change
from tailrace.model.batch import ChangeBatch
from tailrace.model.position import Lsn
from tailrace.model.schema import TableId
from tailrace.model.system_streams import SCHEMA_STREAM_NUMBER, is_system
from tailrace.storage import files, records
from tailrace.storage.files import LogPath

FIRST_COMMIT = 1
_COMMIT_NAME = re.compile(r"[0-9]{20}\.arrow")
RECHECK_SECONDS = 1.0
"""In a store, a look at seals and the trim record is reused this long.

Nothing read depends on it: whatever is missing is looked up again.
"""
_MISSES_MAX = 3
"""Lookups of one file before it counts as missing."""
SEQ_MAX = (1 << 63) - 1
TRIMMED_HINT = (
    "Those changes are gone: read the table as a whole again, and register a consumer (`follow(consumer=...)`) so "
    "that the log waits for you."
)


class ChangeLog:
    """A log, open for reading."""

    def __init__(self, path: LogPath, log_id: str, source: SourceId) -> None:
        self.path = path
        self.log_id = log_id
        self.source = source
        self.schemas = LogSchemas(path / "schemas")
        self.seal_index = SealIndex(path, log_id)
        self._checked: set[tuple[str, int]] = set()
        self._newest = 0
        self._trimmed = records.CachedRecord(path / TRIMMED, lambda: read_trimmed(path))
        self._gaps = records.CachedRecord(path / GAPS, lambda: confirmed_gaps(path, self.newest()))
        self._coverage = records.CachedRecord(path / PUBLISHED, lambda: read_coverage(path))
        self._mapped: tuple[tuple[int, int], memoryview] = ((0, 0), memoryview(b""))

    @classmethod
    def open(cls, path: LogPath | str) -> ChangeLog:
        """Open an existing log, by its folder or by its URL (`s3://bucket/prefix`).

        A log that cannot be read is an error, never an empty log.
        """
        path = files.parse_log_path(path)
        meta = path / "meta.json"
        with files.explain_errors(meta):
            exists = files.file_exists(meta)
        if not exists:
            hint = "Start `tailrace run` or `tailrace capture` first: they create it."
            raise LogUnusable("there is no log here", path=path, hint=hint)
        with files.explain_errors(meta):
            text = meta.read_bytes()
        try:
            stored = json.loads(text)
            known = stored["format"] == commit_file.FORMAT
            if known and "crc" in stored:  # the first logs had none
                records.decode(text, commit_file.FORMAT)
            source, log_id = SourceId(**stored["source"]), stored["log"]
        except (ValueError, KeyError, TypeError) as error:
            raise LogCorrupt(
                "the log's meta.json cannot be read",
                path=meta,
                hint="Restore it from a copy of the log, or set `log:` to a new folder.",
            ).with_option_hint("Restore it from a copy of the log, or give the option `log` a new folder.") from error
        if not known:
            raise LogCorrupt(
                "the log has a format this version does not know",
                path=meta,
                hint="Use the version of Tailrace that wrote it, or a newer one.",
            )
        return cls(path, log_id, source)

    # Commits and records.

    def newest(self) -> int:
        """Return the number of the newest commit, or 0 without one. A repeated call is cheap."""
        return self._newest_within(0.0)

    def _newest_within(self, within: float) -> int:
        """Return the number of the newest commit.

        Where a look at seals and the trim record costs a request, one `within` so many seconds will do.
        """
        newest = self._newest or max(self._unsealed_numbers(), default=0)
        while True:
            while self._commit_exists(newest + 1):
                newest += 1
            # After a long pause the next commits may be sealed and their own files removed.
            self.seal_index.refresh(within)
            known = max(self.seal_index.last_commit, self._trimmed.get(within).commit)
            if known <= newest:
                self._newest = newest  # in a local: another thread may count the same new commit
                return newest
            newest = known

    def _commit_exists(self, commit: int) -> bool:
        path = commit_path(self.path, commit)
        if not files.is_remote(path):
            return path.exists()
        with files.explain_errors(path):
            return files.file_exists(path)

    def _unsealed_numbers(self) -> list[int]:
        folder = self.path / "hot"
        try:
            with files.explain_errors(folder):
                names = files.list_names(folder)
        except LogUnusable as error:
            if folder.exists():
                raise
            raise LogCorrupt(
                "the log's commits are missing",
                path=folder,
                hint="Restore the folder from a copy of the log, or start a new log.",
            ) from error
        return [int(name[:20]) for name in names if _COMMIT_NAME.fullmatch(name)]

    def last_header(self) -> CommitHeader | None:
        """Return the header of the newest commit.

        Its own file stays when it is sealed, so there always is one.
        """
        newest = self.newest()
        return self.header(newest) if newest else None

    def header(self, commit: int) -> CommitHeader:
        """Return the header of a commit that is not sealed yet, or only just."""
        try:
            return self._unsealed_header(commit)
        except FileNotFoundError as error:
            raise self._missing_commit(commit, error) from error

    def _unsealed_header(self, commit: int) -> CommitHeader:
        path = commit_path(self.path, commit)
        try:
            header, content = commit_file.read_commit(path)
        except FileNotFoundError:
            raise
        except OSError as error:
            if files.is_remote(path):
                raise files.explained_error(error, path) from error
            raise LogUnusable(
                f"a commit cannot be read: {error.strerror}",
                path=path,
                hint="Look at the disk and the folder's permissions.",
            ) from error
        if header.commit != commit or header.log != self.log_id:
            raise corrupt_commit_error(path, "it belongs to another commit or log")
        if content:
            self._mapped = ((commit, 0), memoryview(content))
        return header

    def _missing_commit(self, commit: int, error: FileNotFoundError) -> LogError:
        trimmed = self.trimmed()
        if commit <= trimmed.commit:
            return LogTrimmed(
                "the log no longer holds this commit", commit=commit, first=trimmed.commit + 1, hint=TRIMMED_HINT
            )
        return LogCorrupt(
            "a commit of the log is missing",
            path=files.log_file_named(self.path, error.filename) if error.filename else commit_path(self.path, commit),
            hint="Compare the folder with a copy of the log and restore what it lacks: this file, the seal in `cold` "
            f"that replaced it, or `trimmed.json`. Without a copy: {NEW_LOG_HINT}",
        )

    def headers(self, after: int, to: int | None = None) -> Iterator[CommitHeader]:
        """Yield the unsealed commits after a number, in order.

        Each must start where the one before ended.
        """
        previous: CommitHeader | None = None
        for commit in range(after + 1, (self.newest() if to is None else to) + 1):
            header = self.header(commit)
            if previous is not None and header.start != previous.end:
                raise corrupt_commit_error(
                    commit_path(self.path, commit), "it does not start where the one before ended"
                )
            yield header
            previous = header

    def trimmed(self) -> TrimRecord:
        """Return what is no longer kept. It is cheap when nothing changed."""
        return self._trimmed.get()

    def gaps(self) -> tuple[Gap, ...]:
        """Return the gaps, oldest first. It is cheap when nothing changed."""
        return self._gaps.get()

    def coverage(self) -> Coverage:
        """Return when tables entered the publication. It is cheap when nothing changed."""
        return self._coverage.get()

    def files(self, table: TableId | str | int) -> list[LogPath]:
        """Return the sealed files of a table now, in order: Parquet, for any reader.

        They lack what is not sealed.
        """
        self.seal_index.refresh()
        numbers = set(self.table_numbers(table))
        trimmed = self.trimmed()
        return [
            self.path / file.file
            for seal in self.seal_index.seals
            for file in seal.files
            if file.table in numbers and not trimmed.is_trimmed(file.table, file.last_seq)
        ]

    def table_numbers(self, table: TableId | str | int) -> list[int]:
        """Return the log's numbers for a table: several, if it was dropped and made again."""
        return sorted(TableSelector(self.schemas, table).numbers)

    # Reading rows.

    def batch(self, header: CommitHeader, body: CommitBody) -> ChangeBatch:
        """Return one table's rows of an unsealed commit.

        Optional columns that were left out stay so.
        """
        try:
            return self._unsealed_batch(header, body)
        except FileNotFoundError as error:
            raise self._missing_commit(header.commit, error) from error

    def _unsealed_batch(self, header: CommitHeader, body: CommitBody) -> ChangeBatch:
        version = self.schemas.get(body.table, body.schema)
        piece = header.big[body.piece - 1] if body.piece else None
        begin = body.at if piece else header.bodies_at + body.at
        view = self._bytes_of(header, body.piece)[begin : begin + body.size]
        if len(view) != body.size or zlib.crc32(view) != body.crc:
            why = f"the rows of table {body.table} do not match their checksum"
            raise corrupt_commit_error(self._file_of(header, body.piece), why)
        data = pa.ipc.read_record_batch(pa.py_buffer(view), version.stored_schema(body.without))
        return ChangeBatch(
            schema=version.schema,
            data=restore_rows(data, version, body, str(piece.position) if piece else None),
            moves=body.moves,
            truncates=body.truncates,
            unfit=body.unfit,
        )

    def _file_of(self, header: CommitHeader, piece: int) -> LogPath:
        return self.path / header.big[piece - 1].file if piece else commit_path(self.path, header.commit)

    def _bytes_of(self, header: CommitHeader, piece: int) -> memoryview:
        """Return a file's bytes; the last file is cached, because a commit has many bodies."""
        key = (header.commit, piece)
        known = self._mapped
        if known[0] != key:
            path = self._file_of(header, piece)
            with files.explain_errors_but_missing(path):
                known = self._mapped = (key, files.read_view(path))
        return known[1]

    def read(
        self,
        first: int,
        last: int,
        *,
        tables: Collection[int] | TableSelector | None = None,
        after_seq: int = 0,
        to_seq: int = SEQ_MAX,
    ) -> Iterator[ChangeBatch]:
        """Yield the rows of commits from `first` to `last`, in order, each once.

        They may be sealed or not. Rows of one table are in `_seq` order; rows of many tables (`None`: all of the
        source) are yielded commit by commit. The files with the rows are looked up at read time, so the log may be
        sealed and merged meanwhile.
        """
        for _, batch in self._read(first, last, tables, after_seq, to_seq):
            yield batch

    def _read(
        self,
        first: int,
        last: int,
        tables: Collection[int] | TableSelector | None,
        after_seq: int,
        to_seq: int = SEQ_MAX,
        covered: Mapping[int, int] = MappingProxyType({}),
    ) -> Iterator[tuple[int, ChangeBatch]]:
        """Yield each batch with the commit up to which everything was delivered before it.

        `covered` has the last row per table that is not requested.
        """
        delivered = dict(covered)
        commit, trimmed = first, NOTHING_TRIMMED
        misses, end = 0, None
        while commit <= last:
            # A file that is missing may be so because what we saw a moment ago is no longer true.
            within = 0.0 if misses else RECHECK_SECONDS
            self.seal_index.refresh(within)
            # Meanwhile more may have been trimmed, and we can only need less of it.
            latest = self._trimmed.get(within)
            if latest is not trimmed:
                trimmed = latest
                self._refuse_trimmed(trimmed, commit, tables, after_seq, delivered)
            if commit <= trimmed.commit:
                commit, end = trimmed.commit + 1, None
                continue
            seal = self.seal_index.covering(commit)
            span = RowSpan(commit, last, after_seq, to_seq)
            try:
                source = seal or self._unsealed_header(commit)
                batches = (
                    self._of_seal(source, span, tables, trimmed)
                    if isinstance(source, Seal)
                    else self._of_commit(source, span, tables)
                )
                # A seal may begin before this commit: it was made since the last one was read.
                if end is not None and source.start != end and (seal is None or seal.first == commit):
                    where = cold.seal_path(self.path, seal.stem) if seal else commit_path(self.path, commit)
                    raise corrupt_commit_error(where, "it does not start where the one before ended")
                for done, number, batch in batches:
                    fresh = rows_between(batch, max(after_seq, delivered.get(number, 0)), to_seq)
                    if len(fresh):
                        misses = 0
                        delivered[number] = fresh.data.column(change.SEQ)[-1].as_py()
                        yield done, fresh
            except FileNotFoundError as error:
                # It was sealed, merged or trimmed between lookup and read, or it is missing.
                misses += 1
                if misses > _MISSES_MAX:
                    raise self._missing_file(commit, error) from error
                continue
            end = source.end
            commit = commit + 1 if seal is None else seal.last + 1

    def _of_commit(
        self, header: CommitHeader, span: RowSpan, tables: Collection[int] | TableSelector | None
    ) -> Iterator[tuple[int, int, ChangeBatch]]:
        for body in header.bodies:
            not_in_span = body.last_seq <= span.after_seq or body.first_seq > span.to_seq
            if not not_in_span and self._is_wanted(body.table, body.schema, tables):
                yield header.commit - 1, body.table, self._unsealed_batch(header, body)

    def _of_seal(
        self, seal: Seal, span: RowSpan, tables: Collection[int] | TableSelector | None, trimmed: TrimRecord
    ) -> Iterator[tuple[int, int, ChangeBatch]]:
        selected = [
            file
            for file in seal.files
            if self._is_wanted(file.table, file.schema, tables) and not trimmed.is_trimmed(file.table, file.last_seq)
        ]
        reader = SealedFileReader(self.path, self.schemas.get, self._checked)
        if len({file.table for file in selected}) > 1:
            return reader.batches_by_commit(selected, self.seal_index.commit_list(seal), span)
        return itertools.chain.from_iterable(reader.batches(file, span) for file in selected)

    def _is_wanted(self, table: int, schema: int, tables: Collection[int] | TableSelector | None) -> bool:
        if isinstance(tables, TableSelector):
            return tables.matches(table, schema)
        if tables is not None:
            return table in tables
        return not is_system(self.schemas.get(table, schema).schema)

    def trimmed_tables(
        self, record: TrimRecord, tables: Collection[int] | TableSelector | None
    ) -> dict[int, TrimmedTable]:
        """Return what is trimmed of the requested tables."""
        trimmed = {}
        for number, table in record.tables.items():
            self.schemas.get(number, 1)  # a missing schema is damage, not a wrong request
            if self._is_wanted(number, self.schemas.latest_of(number).version, tables):
                trimmed[number] = table
        return trimmed

    def _refuse_trimmed(
        self,
        trimmed: TrimRecord,
        first: int,
        tables: Collection[int] | TableSelector | None,
        after_seq: int,
        delivered: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        """Refuse a read that would skip trimmed rows silently."""
        for number, table in self.trimmed_tables(trimmed, tables).items():
            if first <= table.commit and table.last_seq > max(after_seq, delivered.get(number, 0)):
                raise LogTrimmed(
                    "the log no longer holds all requested rows",
                    table=number,
                    commit=first,
                    gone_to=table.commit,
                    hint=TRIMMED_HINT,
                )

    def _missing_file(self, commit: int, error: FileNotFoundError) -> LogError:
        seal = self.seal_index.covering(commit)
        if seal is None:
            return self._missing_commit(commit, error)
        path = cold.seal_path(self.path, seal.stem)
        return cold.sealed_file_error(
            files.log_file_named(self.path, error.filename) if error.filename else path, "it is missing"
        )

    def follow(
        self,
        after: int | Lsn | None = None,
        *,
        table: TableId | str | int | None = None,
        wait_seconds: float | None = 0.0,
        consumer: str | None = None,
        expires_seconds: float | None = EXPIRE_SECONDS,
        merged: bool = False,
    ) -> Iterator[ChangeBatch]:
        """Yield the batches after a commit, in order, then new ones as they arrive.

        `after` is a commit's number or a position of the source. Without it reading begins with the oldest kept row. It
        ends when nothing arrived for `wait_seconds`; None waits for ever. Nothing is read ahead: a slow reader costs no
        memory, only the log's room. Each row has the schema version with which it was written. With `merged`, all rows
        have one schema over all versions (`changelog/read/merged_schema.py` has the rules).

        With `consumer`, the log remembers the reader's progress under that name and keeps what it has not read. A batch
        counts as read when the next one is requested. Without `after` reading continues there; with `after` the
        reader's progress moves to it. A consumer without a sign for `expires_seconds` holds nothing any more.
        """
        selector = None if table is None else TableSelector(self.schemas, table)
        position = after if isinstance(after, Lsn) else None
        begin = self.commit_at(after) if isinstance(after, Lsn) else after
        trimmed, named_reader, covered = self.trimmed(), None, dict[int, int]()
        start = (begin, 0) if begin is not None else self._untrimmed_start(trimmed, selector)
        if consumer is not None:
            named_reader = Consumer.open(
                self.path, consumer, wanted=selector, start=start, expires_seconds=expires_seconds
            )
            start = (named_reader.commit, named_reader.seq) if after is None else start
        elif after is None:
            start = (trimmed.commit, 0)
            covered = {number: table.last_seq for number, table in trimmed.tables.items()}
        self._refuse_trimmed(trimmed, start[0] + 1, selector, start[1], covered)
        if named_reader is not None and after is not None:
            named_reader.jump_to(*start)
        progress = ReadProgress(start, named_reader)
        try:
            for batch in self._follow(progress, selector, wait_seconds, covered):
                if position is not None:
                    batch = rows_after_position(batch, position)
                if len(batch):
                    yield self._conformed(batch) if merged else batch
        finally:
            progress.save()

    def _untrimmed_start(self, trimmed: TrimRecord, selector: TableSelector | None) -> tuple[int, int]:
        """Return the first commit and `_seq` after which no requested row is trimmed."""
        missing = self.trimmed_tables(trimmed, selector)
        if selector is not None and len(selector.numbers) == 1:
            return trimmed.commit, max((table.last_seq for table in missing.values()), default=0)
        return max([trimmed.commit, *(table.commit for table in missing.values())]), 0

    def _conformed(self, batch: ChangeBatch) -> ChangeBatch:
        """Return the batch in one schema over all known versions of its table."""
        view = merged_schema(self.schemas.schemas_of(batch.schema))
        return conform_to_schema(
            batch, replace(view, identity=batch.schema.identity)
        )  # old rows were sent under their own replica identity

    def commit_at(self, position: Lsn) -> int:
        """Return the last commit that ends at or before a source position; 0 without one."""
        low, high = self.trimmed().commit, self.newest()
        if position < self.trimmed().position:
            return 0
        seals = self.seal_index.seals
        if seals and position < seals[-1].end:
            for seal in seals:
                if position < seal.end:
                    commits = self.seal_index.commit_list_near(seal)
                    index = int(commits.end.searchsorted(position.value, side="right"))
                    return int(commits.commit[index - 1]) if index else seal.first - 1
        low = max(low, self.seal_index.last_commit)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.header(middle).end <= position else (low, middle - 1)
        return low

    def _follow(
        self,
        progress: ReadProgress,
        selector: TableSelector | None,
        wait_seconds: float | None,
        covered: Mapping[int, int],
    ) -> Iterator[ChangeBatch]:
        last_arrival = time.monotonic()
        while True:
            newest, before = self._newest_within(RECHECK_SECONDS), progress.commit
            no_gaps = selector is not None and selector.numbers == {
                SCHEMA_STREAM_NUMBER
            }  # a schema version is announced with the next row
            passed = (gap for gap in self.gaps() if before < gap.commit <= newest)
            gap = None if no_gaps else next(passed, None)
            newest = gap.commit - 1 if gap is not None else newest
            for done, batch in self._read(before + 1, newest, selector, progress.seq, covered=covered):
                progress.advance_to(done, progress.seq)
                yield batch
                # With several tables a commit is delivered table by table, so only whole commits count as read.
                one = selector is not None and len(selector.numbers) == 1
                progress.advance_to(done, batch.data.column(change.SEQ)[-1].as_py() if one else progress.seq)
            if newest > before:
                progress.advance_to(newest, progress.seq)
                last_arrival = time.monotonic()
            if gap is not None:
                raise gap.error
            if newest > before:
                continue  # the next may have arrived meanwhile
            if wait_seconds is not None and time.monotonic() >= last_arrival + wait_seconds:
                return
            wait_for_commit(self.path, newest + 1, time.monotonic() - last_arrival)
