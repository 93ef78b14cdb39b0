"""Reading the log: commits in order, with nothing skipped, nothing twice and nothing delivered unchecked.

Readers never lock and never wait for the writer: a commit exists when its file does, numbers are dense, and
each starts where the one before ended. Where a commit's rows lie, in a file of its own or in sealed ones, is
looked up when they are read. What was trimmed, or what the source had discarded unread, is an error to whoever
follows, never passed over.
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
"""In a store, a look at the seals and at what was trimmed that is not older counts: nothing that is read hangs on it,
for whatever is missing is looked up anew."""
_MISSES_MAX = 3
"""Of one file, looked up again each time, before it counts as missing."""
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
        self._published = records.CachedRecord(path / PUBLISHED, lambda: read_coverage(path))
        self._mapped: tuple[tuple[int, int], memoryview] = ((0, 0), memoryview(b""))

    @classmethod
    def open(cls, path: LogPath | str) -> ChangeLog:
        """Open an existing log, by its folder or by its URL (`s3://bucket/prefix`); a log that cannot be read is an
        error, never an empty log."""
        path = files.parse_log_path(path)
        meta = path / "meta.json"
        with files.explain_errors(meta):
            found = files.file_exists(meta)
        if not found:
            hint = "Start `tailrace run` or `tailrace capture` first; they make it."
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

    # What there is.

    def newest(self) -> int:
        """The number of the newest commit; 0 if there is none yet. Cheap when asked again."""
        return self._newest_seen(0.0)

    def _newest_seen(self, within: float) -> int:
        """The same, by a look at seals and at what was trimmed that may be so old where it costs a request."""
        newest = self._newest or max(self._numbers(), default=0)
        while True:
            while self._is_there(newest + 1):
                newest += 1
            # Whoever looks seldom may find that the next commits are sealed and their own files gone.
            self.seal_index.refresh(within)
            known = max(self.seal_index.last_commit, self._trimmed.get(within).commit)
            if known <= newest:
                self._newest = newest  # counted apart: another thread may have seen the same commit come
                return newest
            newest = known

    def _is_there(self, commit: int) -> bool:
        path = commit_path(self.path, commit)
        if not files.is_remote(path):
            return path.exists()
        with files.explain_errors(path):
            return files.file_exists(path)

    def _numbers(self) -> list[int]:
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
        """What the newest commit holds. Its own file stays when it is sealed, so that there always is one."""
        newest = self.newest()
        return self.header(newest) if newest else None

    def header(self, commit: int) -> CommitHeader:
        """What a commit holds that is not sealed yet, or only just."""
        try:
            return self._hot_header(commit)
        except FileNotFoundError as error:
            raise self._missing(commit, error) from error

    def _hot_header(self, commit: int) -> CommitHeader:
        path = commit_path(self.path, commit)
        try:
            found, content = commit_file.read_commit(path)
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
        if found.commit != commit or found.log != self.log_id:
            raise corrupt_commit_error(path, "it belongs to another place")
        if content:
            self._mapped = ((commit, 0), memoryview(content))
        return found

    def _missing(self, commit: int, error: FileNotFoundError) -> LogError:
        gone = self.trimmed()
        if commit <= gone.commit:
            return LogTrimmed(
                "the log no longer holds this commit", commit=commit, first=gone.commit + 1, hint=TRIMMED_HINT
            )
        return LogCorrupt(
            "a commit of the log is missing",
            path=files.log_file_named(self.path, error.filename) if error.filename else commit_path(self.path, commit),
            hint="Compare the folder with a copy of the log and restore what it lacks: this file, the seal in `cold` "
            f"that stands for it, or `trimmed.json`. Without a copy: {NEW_LOG_HINT}",
        )

    def headers(self, after: int, to: int | None = None) -> Iterator[CommitHeader]:
        """The commits after a number that are not sealed yet, in order, each starting where the one before ended."""
        previous: CommitHeader | None = None
        for commit in range(after + 1, (self.newest() if to is None else to) + 1):
            found = self.header(commit)
            if previous is not None and found.start != previous.end:
                raise corrupt_commit_error(
                    commit_path(self.path, commit), "it does not start where the one before ended"
                )
            yield found
            previous = found

    def trimmed(self) -> TrimRecord:
        """What is no longer kept. Cheap when nothing changed."""
        return self._trimmed.get()

    def gaps(self) -> tuple[Gap, ...]:
        """Where changes are missing, oldest first. Cheap when nothing changed."""
        return self._gaps.get()

    def coverage(self) -> Coverage:
        """When tables came into the publication. Cheap when nothing changed."""
        return self._published.get()

    def files(self, table: TableId | str | int) -> list[LogPath]:
        """The sealed files of a table now, in order: Parquet, for any reader. What is not sealed is not in them."""
        self.seal_index.refresh()
        numbers = set(self.table_numbers(table))
        gone = self.trimmed()
        return [
            self.path / file.file
            for seal in self.seal_index.seals
            for file in seal.files
            if file.table in numbers and not gone.is_trimmed(file.table, file.last_seq)
        ]

    def table_numbers(self, table: TableId | str | int) -> list[int]:
        """The log's numbers for a table: several, if it was dropped and made again."""
        return sorted(TableSelector(self.schemas, table).numbers)

    # Reading rows.

    def batch(self, header: CommitHeader, body: CommitBody) -> ChangeBatch:
        """One table's rows of a commit that is not sealed; optional columns that were left out stay so."""
        try:
            return self._hot_batch(header, body)
        except FileNotFoundError as error:
            raise self._missing(header.commit, error) from error

    def _hot_batch(self, header: CommitHeader, body: CommitBody) -> ChangeBatch:
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
        """A file's bytes; the last file is kept at hand, for a commit has many bodies."""
        which = (header.commit, piece)
        known = self._mapped
        if known[0] != which:
            path = self._file_of(header, piece)
            with files.explain_errors_but_missing(path):
                known = self._mapped = (which, files.read_view(path))
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
        """The rows of commits from `first` to `last`, in order, sealed or not, each once.

        Of one table they come in `_seq` order; of all tables (`None`: those of the source) commit by commit. Where
        rows lie is looked up when they are read, so the log may be sealed and joined meanwhile.
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
        """Each batch, and the commit up to which everything had been delivered before it.

        `covered` has the last row of tables that is not asked for.
        """
        delivered = dict(covered)
        commit, gone = first, NOTHING_TRIMMED
        misses, end = 0, None
        while commit <= last:
            # A file that is missing may be so because what we saw a moment ago is no longer true.
            within = 0.0 if misses else RECHECK_SECONDS
            self.seal_index.refresh(within)
            # What is gone can only have become more, and what we need of it only less.
            latest = self._trimmed.get(within)
            if latest is not gone:
                gone = latest
                self._refuse_trimmed(gone, commit, tables, after_seq, delivered)
            if commit <= gone.commit:
                commit, end = gone.commit + 1, None
                continue
            seal = self.seal_index.covering(commit)
            span = RowSpan(commit, last, after_seq, to_seq)
            try:
                held = seal or self._hot_header(commit)
                found = (
                    self._of_seal(held, span, tables, gone)
                    if isinstance(held, Seal)
                    else self._of_commit(held, span, tables)
                )
                # A seal may begin before the commit that is wanted: it was made since the last one was read.
                if end is not None and held.start != end and (seal is None or seal.first == commit):
                    where = cold.seal_path(self.path, seal.stem) if seal else commit_path(self.path, commit)
                    raise corrupt_commit_error(where, "it does not start where the one before ended")
                for done, number, batch in found:
                    fresh = rows_between(batch, max(after_seq, delivered.get(number, 0)), to_seq)
                    if len(fresh):
                        misses = 0
                        delivered[number] = fresh.data.column(change.SEQ)[-1].as_py()
                        yield done, fresh
            except FileNotFoundError as error:
                # It was sealed, joined or trimmed between looking it up and reading it; or it is not there at all.
                misses += 1
                if misses > _MISSES_MAX:
                    raise self._missing_file(commit, error) from error
                continue
            end = held.end
            commit = commit + 1 if seal is None else seal.last + 1

    def _of_commit(
        self, header: CommitHeader, span: RowSpan, tables: Collection[int] | TableSelector | None
    ) -> Iterator[tuple[int, int, ChangeBatch]]:
        for body in header.bodies:
            outside = body.last_seq <= span.after_seq or body.first_seq > span.to_seq
            if not outside and self._is_wanted(body.table, body.schema, tables):
                yield header.commit - 1, body.table, self._hot_batch(header, body)

    def _of_seal(
        self, seal: Seal, span: RowSpan, tables: Collection[int] | TableSelector | None, gone: TrimRecord
    ) -> Iterator[tuple[int, int, ChangeBatch]]:
        wanted = [
            file
            for file in seal.files
            if self._is_wanted(file.table, file.schema, tables) and not gone.is_trimmed(file.table, file.last_seq)
        ]
        reader = SealedFileReader(self.path, self.schemas.get, self._checked)
        if len({file.table for file in wanted}) > 1:
            return reader.batches_by_commit(wanted, self.seal_index.commit_list(seal), span)
        return itertools.chain.from_iterable(reader.batches(file, span) for file in wanted)

    def _is_wanted(self, table: int, schema: int, tables: Collection[int] | TableSelector | None) -> bool:
        if isinstance(tables, TableSelector):
            return tables.matches(table, schema)
        if tables is not None:
            return table in tables
        return not is_system(self.schemas.get(table, schema).schema)

    def trimmed_tables(
        self, gone: TrimRecord, tables: Collection[int] | TableSelector | None
    ) -> dict[int, TrimmedTable]:
        """What is gone of the tables that are asked for."""
        found = {}
        for number, table in gone.tables.items():
            self.schemas.get(number, 1)  # a shape that is missing is damage, not a wrong question
            if self._is_wanted(number, self.schemas.latest_of(number).version, tables):
                found[number] = table
        return found

    def _refuse_trimmed(
        self,
        gone: TrimRecord,
        first: int,
        tables: Collection[int] | TableSelector | None,
        after_seq: int,
        delivered: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        """Rows that are gone are never passed over in silence."""
        for number, table in self.trimmed_tables(gone, tables).items():
            if first <= table.commit and table.last_seq > max(after_seq, delivered.get(number, 0)):
                raise LogTrimmed(
                    "the log no longer holds all that was asked for",
                    table=number,
                    commit=first,
                    gone_to=table.commit,
                    hint=TRIMMED_HINT,
                )

    def _missing_file(self, commit: int, error: FileNotFoundError) -> LogError:
        seal = self.seal_index.covering(commit)
        if seal is None:
            return self._missing(commit, error)
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
        """The batches after a commit, in order, then whatever comes, until nothing came for `wait_seconds`.

        `after` is a commit's number or a position of the source; without it reading begins with the oldest row that
        is kept. `wait_seconds=None` waits for ever. Nothing is read ahead: a slow reader costs no memory, only the
        log's room. Each row comes with the version of its table's shape that it was written with; with `merged`, in
        one shape over all versions (`changelog/read/merged_schema.py` has the rules).

        With `consumer`, the log remembers under that name how far the reader is and keeps what it has not read. A
        batch counts as read when the next one is asked for, and without `after` reading goes on there; with it the
        reader's place is moved there. One that is not heard of for `expires_seconds` holds nothing any more.
        """
        wanted = None if table is None else TableSelector(self.schemas, table)
        position = after if isinstance(after, Lsn) else None
        begin = self.commit_at(after) if isinstance(after, Lsn) else after
        gone, place, covered = self.trimmed(), None, dict[int, int]()
        start = (begin, 0) if begin is not None else self._whole_from(gone, wanted)
        if consumer is not None:
            place = Consumer.open(self.path, consumer, wanted=wanted, start=start, expires_seconds=expires_seconds)
            start = (place.commit, place.seq) if after is None else start
        elif after is None:
            start = (gone.commit, 0)
            covered = {number: table.last_seq for number, table in gone.tables.items()}
        self._refuse_trimmed(gone, start[0] + 1, wanted, start[1], covered)
        if place is not None and after is not None:
            place.jump_to(*start)
        reached = ReadProgress(start, place)
        try:
            for batch in self._follow(reached, wanted, wait_seconds, covered):
                if position is not None:
                    batch = rows_after_position(batch, position)
                if len(batch):
                    yield self._conformed(batch) if merged else batch
        finally:
            reached.save()

    def _whole_from(self, gone: TrimRecord, wanted: TableSelector | None) -> tuple[int, int]:
        """The first commit and `_seq` after which nothing that is asked for is gone."""
        lost = self.trimmed_tables(gone, wanted)
        if wanted is not None and len(wanted.numbers) == 1:
            return gone.commit, max((table.last_seq for table in lost.values()), default=0)
        return max([gone.commit, *(table.commit for table in lost.values())]), 0

    def _conformed(self, batch: ChangeBatch) -> ChangeBatch:
        """The batch in one shape over all versions of its table that are known by now."""
        view = merged_schema(self.schemas.schemas_of(batch.schema))
        return conform_to_schema(
            batch, replace(view, identity=batch.schema.identity)
        )  # what was told of old rows was told so

    def commit_at(self, position: Lsn) -> int:
        """The last commit that ends at or before a position of the source; 0 if none does."""
        low, high = self.trimmed().commit, self.newest()
        if position < self.trimmed().position:
            return 0
        seals = self.seal_index.seals
        if seals and position < seals[-1].end:
            for seal in seals:
                if position < seal.end:
                    commits = self.seal_index.commit_list_near(seal)
                    place = int(commits.end.searchsorted(position.value, side="right"))
                    return int(commits.commit[place - 1]) if place else seal.first - 1
        low = max(low, self.seal_index.last_commit)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.header(middle).end <= position else (low, middle - 1)
        return low

    def _follow(
        self,
        reached: ReadProgress,
        wanted: TableSelector | None,
        wait_seconds: float | None,
        covered: Mapping[int, int],
    ) -> Iterator[ChangeBatch]:
        heard = time.monotonic()
        while True:
            newest, before = self._newest_seen(RECHECK_SECONDS), reached.commit
            lossless = wanted is not None and wanted.numbers == {SCHEMA_STREAM_NUMBER}  # shapes come with the next row
            passed = (gap for gap in self.gaps() if before < gap.commit <= newest)
            gap = None if lossless else next(passed, None)
            newest = gap.commit - 1 if gap is not None else newest
            for done, batch in self._read(before + 1, newest, wanted, reached.seq, covered=covered):
                reached.advance_to(done, reached.seq)
                yield batch
                # Of several tables a commit comes table by table, so only whole commits count as read.
                one = wanted is not None and len(wanted.numbers) == 1
                reached.advance_to(done, batch.data.column(change.SEQ)[-1].as_py() if one else reached.seq)
            if newest > before:
                reached.advance_to(newest, reached.seq)
                heard = time.monotonic()
            if gap is not None:
                raise gap.error
            if newest > before:
                continue  # the next may have come meanwhile
            if wait_seconds is not None and time.monotonic() >= heard + wait_seconds:
                return
            wait_for_commit(self.path, newest + 1, time.monotonic() - heard)
