"""Verify every byte of the log: each checksum, each count, and that nothing is missing.

It only reads, continues after a flaw, and reports all of them. It may run while other processes write, seal and trim: a
file that is removed meanwhile is a flaw only if something still names it. Memory is bounded by one body or one row
group.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import pyarrow as pa

from tailrace.capture.port import SourceId
from tailrace.changelog.format import commit_file
from tailrace.changelog.format import seal as cold
from tailrace.changelog.format.commit_file import CommitHeader, commit_path, corrupt_commit_error
from tailrace.changelog.format.seal import Seal, SealedFile, seal_path, sealed_file_error
from tailrace.changelog.format.trimmed import NOTHING_TRIMMED, TrimRecord
from tailrace.changelog.maintain.retention import disk_bytes
from tailrace.changelog.maintain.verify_files import SeqDigest, check_commit_list, check_sealed_file, is_run
from tailrace.changelog.read import consumers
from tailrace.changelog.read.reader import ChangeLog
from tailrace.errors import NEW_LOG_HINT, LogCorrupt, LogError, LogUnreachable, TailraceError
from tailrace.model import change
from tailrace.model.position import Lsn
from tailrace.model.system_streams import SCHEMA_STREAM_NUMBER
from tailrace.storage import files
from tailrace.storage.files import LogPath

FLAWS_MAX = 10_000
"""Flaws kept one by one; further ones are only counted."""
LINK_LOOKS = 5
LINK_PAUSE_SECONDS = 0.3
"""Pause between looks at the links.

Links follow the seals a moment later, so only a difference that stays is a flaw.
"""
_RESTORE = f"Restore the file from a copy of the log. Without one: {NEW_LOG_HINT}"
_LINKS = "Run `tailrace log FILE seal` to make the links again; the rows themselves are not affected."
_UNREADABLE = (LogError, ValueError, KeyError, TypeError, IndexError, OSError, pa.ArrowException)
"""Errors that a damaged file may raise on the way to its rows."""

_STORE_TROUBLE = (LogUnreachable, *files.STORE_ERRORS)
"""Errors of a store that does not answer. They say nothing of its files and end the check."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class Flaw:
    """One thing that is not as it was written."""

    path: LogPath
    message: str
    hint: str


@dataclass(frozen=True, kw_only=True)
class LogVerification:
    """The counts of what was checked, and the flaws found."""

    commits: int
    rows: int
    files: int
    bytes: int
    flaws: tuple[Flaw, ...]
    flaws_total: int


@dataclass(frozen=True)
class _PreviousCommit:
    """The end of the commit before."""

    commit: int
    end: Lsn | None
    next_seq: int


def verify(path: LogPath | str, progress: Progress = lambda done, of: None) -> LogVerification:
    """Check the whole log; `progress` gets how many bytes of how many."""
    path = files.parse_log_path(path)
    with files.explain_store_errors(path):
        return _Verifier(path, progress).run()


class _Verifier:
    """One check of one log."""

    def __init__(self, path: LogPath, progress: Progress) -> None:
        self._path = path
        self._progress = progress
        self._flaws: dict[tuple[LogPath, str], Flaw] = {}
        self._flaws_total = 0
        self._commits = self._rows = self._files = self._bytes = 0
        self._total_bytes = sum(disk_bytes(path / name) for name in ("hot", "big", "cold/files"))
        self._seals: dict[str, Seal] = {}
        self._bad_seals: dict[str, tuple[int, int]] = {}
        self._read_files: dict[tuple[str, int], SeqDigest] = {}
        self._seen_commits: set[int] = set()
        self._seen_seals: set[str] = set()
        self._trimmed: TrimRecord | None = None
        self._previous: _PreviousCommit | None = None

    def run(self) -> LogVerification:
        log = self._open()
        if log is not None:
            self._log = log
            self._check_trimmed()
            with self._recording_errors(self._path):
                log.gaps()
            self._check_schemas()
            self._load_seals()
            self._check_commits()
            self._check_leftovers()
            self._check_links()
        for path in consumers.unreadable_files(self._path):
            message = "a reader's offset cannot be read, so the log keeps nothing for it"
            self._record(path, message, "Remove the file; its reader begins again.")
        return LogVerification(
            commits=self._commits,
            rows=self._rows,
            files=self._files,
            bytes=self._bytes,
            flaws=tuple(self._flaws.values()),
            flaws_total=self._flaws_total,
        )

    # Flaws.

    def _record(self, path: LogPath, message: str, hint: str = _RESTORE) -> None:
        if (path, message) in self._flaws:
            return
        self._flaws_total += 1
        if len(self._flaws) < FLAWS_MAX:
            self._flaws[path, message] = Flaw(path=path, message=message, hint=hint)

    def _record_error(self, path: LogPath, error: BaseException) -> None:
        if isinstance(error, _STORE_TROUBLE):
            raise error
        if isinstance(error, TailraceError):
            file = error.fields.get("path")
            self._record(files.log_file_named(self._path, str(file)) if file else path, error.message, error.hint)
        else:
            self._record(path, f"it cannot be read: {type(error).__name__}")

    @contextmanager
    def _recording_errors(self, path: LogPath) -> Iterator[None]:
        """Record what cannot be read as a flaw.

        The caller judges what is missing.
        """
        try:
            yield
        except FileNotFoundError:
            raise
        except _UNREADABLE as error:
            self._record_error(path, error)

    def _count(self, size: int) -> None:
        self._files += 1
        self._bytes += size
        self._progress(min(self._bytes, self._total_bytes), self._total_bytes)

    # Files that need no other.

    def _open(self) -> ChangeLog | None:
        """Open the log; with a damaged meta.json, by the id in its own commits."""
        meta = self._path / "meta.json"
        try:
            log = ChangeLog.open(self._path)
            self._count(files.size_of(meta))
            return log
        except LogCorrupt as error:
            self._record_error(meta, error)
        for number in sorted(self._unsealed_numbers(), reverse=True):
            with suppress(*_UNREADABLE):
                header = commit_file.read_header(commit_path(self._path, number))
                return ChangeLog(self._path, header.log, SourceId(kind="", system="", database="", timeline=0))
        return None

    def _check_trimmed(self) -> None:
        with self._recording_errors(self._path):
            trimmed = self._trimmed = self._log.trimmed()
            self._previous = _PreviousCommit(
                trimmed.commit, trimmed.position if trimmed.commit else None, trimmed.next_seq
            )

    def _trimmed_now(self) -> TrimRecord:
        """Return what is trimmed by now; nothing, if the record was damaged to begin with."""
        return self._log.trimmed() if self._trimmed is not None else NOTHING_TRIMMED

    def _check_schemas(self) -> None:
        versions: dict[int, set[int]] = {}
        for path in files.matching_files(self._path / "schemas", "*/*.json"):
            if not (path.parent.name.isdigit() and path.stem.isdigit()):
                continue
            table, version = int(path.parent.name), int(path.stem)
            versions.setdefault(table, set()).add(version)
            with self._recording_errors(path):
                self._log.schemas.get(table, version)
            self._count(files.size_of(path))
        for table, present in versions.items():
            for version in sorted(set(range(1, max(present) + 1)) - present):
                path = self._path / "schemas" / str(table) / f"{version}.json"
                self._record(path, "a table's schema is missing")

    # The commits, in order.

    def _unsealed_numbers(self) -> set[int]:
        folder = self._path / "hot"
        try:
            names = files.list_names(folder)
        except OSError as error:
            self._record(folder, f"the log's commits cannot be listed: {error.strerror or error.args[0]}")
            return set()
        return {int(name[:20]) for name in names if name[20:] == ".arrow" and name[:20].isdigit()}

    def _load_seals(self) -> None:
        """Load the seals that exist now."""
        seals = {}
        for first, last, stem in cold.seal_stems(self._path):
            if stem in self._bad_seals:
                continue
            try:
                seals[stem] = self._seals.get(stem) or cold.read_seal(self._path, stem)
            except FileNotFoundError:
                continue  # replaced meanwhile
            except _UNREADABLE as error:
                self._record_error(seal_path(self._path, stem), error)
                self._bad_seals[stem] = (first, last)
        self._seals = seals

    def _covering(self, commit: int) -> Seal | None:
        """Return the seal that reaches furthest among those with a commit."""
        seals = [seal for seal in self._seals.values() if seal.first <= commit <= seal.last]
        return max(seals, key=lambda seal: seal.last, default=None)

    def _check_commits(self) -> None:
        """Check every commit from the oldest kept to the newest there is now."""
        hot = self._unsealed_numbers()
        newest = max(hot | {seal.last for seal in self._seals.values()}, default=0)
        oldest = min(hot | {seal.first for seal in self._seals.values()}, default=1)
        commit = self._trimmed.commit + 1 if self._trimmed is not None else oldest
        while commit <= newest:
            commit = self._check_next(commit, newest, hot)
        if newest not in hot and newest > max(self._unsealed_numbers(), default=0):
            self._record(commit_path(self._path, newest), "the newest commit has no file of its own")

    def _check_next(self, commit: int, newest: int, hot: set[int]) -> int:
        """Check what holds a commit; return the first commit after that."""
        for tries_left in (1, 0):
            seal = self._covering(commit)
            try:
                if seal is not None:
                    self._check_seal(seal)
                    return seal.last + 1
                self._check_commit(commit)
                return commit + 1
            except FileNotFoundError as error:
                # Sealed, merged or trimmed since we looked, or missing.
                self._load_seals()
                trimmed = self._trimmed_now()
                if commit <= trimmed.commit:
                    self._previous = None
                    return trimmed.commit + 1
                if not tries_left:
                    self._previous = None
                    return self._record_missing(commit, newest, hot, seal, error)
        raise AssertionError("unreachable")

    def _record_missing(
        self, commit: int, newest: int, hot: set[int], seal: Seal | None, error: FileNotFoundError
    ) -> int:
        """Record something missing; return the next commit that something holds."""
        if seal is not None:
            path = (
                files.log_file_named(self._path, error.filename) if error.filename else seal_path(self._path, seal.stem)
            )
            self._record(path, "a sealed file of the log is missing")
            return seal.last + 1
        later = {number for number in hot if number > commit} | {newest + 1}
        later |= {seal.first for seal in self._seals.values() if seal.first > commit}
        damaged_to = [last for first, last in self._bad_seals.values() if first <= commit <= last]
        if damaged_to:  # what they held is reported as damaged, not as missing
            return min(*later, max(damaged_to) + 1)
        last = min(later) - 1
        message = "a commit of the log is missing" if last == commit else f"commits {commit} to {last} are missing"
        self._record(commit_path(self._path, commit), message)
        return last + 1

    def _check_follows(self, path: LogPath, first: int, start: Lsn, first_seq: int) -> None:
        """Record a flaw if it does not continue where the one before ended."""
        before = self._previous
        if before is None or before.commit != first - 1:
            return  # the one before is flawed, or was sealed again meanwhile
        if before.end is not None and start != before.end:
            self._record(path, "it does not start where the one before ended")
        if first_seq != before.next_seq:
            self._record(path, "its row numbers do not continue those before")

    # A commit's own file.

    def _check_commit(self, commit: int) -> None:
        path = commit_path(self._path, commit)
        header = self._read_commit(commit, path)
        if header is None:
            self._previous = None
            return
        self._check_follows(path, commit, header.start, header.next_seq - header.rows)
        self._previous = _PreviousCommit(commit, header.end, header.next_seq)
        self._commits += 1
        self._rows += header.rows

    def _read_commit(self, commit: int, path: LogPath) -> CommitHeader | None:
        """Return a commit's header after a check of every row; None if it is unreadable."""
        size = files.size_of(path)
        try:
            header = self._log.header(commit)
        except _UNREADABLE as error:
            files.size_of(path)  # raises if it was sealed and removed meanwhile, which is no flaw
            self._record_error(path, error)
            header = None
        if header is not None:
            self._check_bodies(header, path)
        self._seen_commits.add(commit)
        self._count(size)
        return header

    def _check_bodies(self, header: CommitHeader, path: LogPath) -> None:
        numbers, complete = SeqDigest(), True
        pieces = [self._path / piece.file for piece in header.big]
        missing = {index for index, piece in enumerate(pieces, 1) if not files.file_exists(piece)}
        if missing:
            self._refuse_replaced(header.commit, path)
        for body in header.bodies:
            if body.piece in missing:
                self._record(pieces[body.piece - 1], "rows of a large transaction are missing")
                complete = False
                continue
            try:
                seqs = self._log.batch(header, body).data.column(change.SEQ).to_numpy()
            except _UNREADABLE as error:
                files.size_of(path)
                if body.piece and not files.file_exists(pieces[body.piece - 1]):
                    self._refuse_replaced(header.commit, path)
                self._record_error(path, error)
                complete = False
                continue
            if not is_run(seqs, body.rows, body.first_seq, body.last_seq, body.table):
                reason = f"the rows of table {body.table} are not the ones its header names"
                self._record_error(path, corrupt_commit_error(path, reason))
            if body.table != SCHEMA_STREAM_NUMBER:
                numbers += SeqDigest.of(seqs)
        if complete and numbers != SeqDigest.of_range(header.next_seq - header.rows, header.next_seq):
            self._record_error(path, corrupt_commit_error(path, "its rows are not numbered one after another"))
        for piece in pieces:
            with suppress(FileNotFoundError):
                self._count(files.size_of(piece))

    def _refuse_replaced(self, commit: int, path: LogPath) -> None:
        """Raise FileNotFoundError if the commit was sealed or trimmed since we looked.

        Its pieces are removed before its own file.
        """
        files.size_of(path)
        self._load_seals()
        if self._covering(commit) is not None or commit <= self._trimmed_now().commit:
            raise FileNotFoundError(path)

    # Seals.

    def _check_seal(self, seal: Seal) -> None:
        path = seal_path(self._path, seal.stem)
        if seal.log != self._log.log_id:
            self._record_error(path, sealed_file_error(path, "it belongs to another log"))
        with self._recording_errors(path):
            check_commit_list(self._path, seal)
        rows = self._check_files(seal, path)
        self._check_follows(path, seal.first, seal.start, seal.first_seq)
        self._previous = _PreviousCommit(seal.last, seal.end, seal.next_seq)
        self._commits += seal.last - seal.first + 1
        self._rows += rows
        self._seen_seals.add(seal.stem)
        self._count(files.size_of(path))

    def _check_files(self, seal: Seal, path: LogPath) -> int:
        """Check a seal's files, and that together they hold all its rows.

        Only trimmed rows may be missing.
        """
        numbers, complete = SeqDigest(), True
        for file in seal.files:
            try:
                digest = self._check_file(file)
            except FileNotFoundError:
                if self._trimmed_now().is_trimmed(file.table, file.last_seq):
                    continue
                raise
            except _UNREADABLE as error:
                self._record_error(self._path / file.file, error)
                complete = False
                continue
            if file.table != SCHEMA_STREAM_NUMBER:
                numbers += digest
        trimmed_to = max((table.last_seq for table in self._trimmed_now().tables.values()), default=0)
        if trimmed_to >= seal.first_seq:
            if numbers.count > seal.rows:
                self._record_error(path, sealed_file_error(path, "its files hold more rows than its commits did"))
        elif complete and numbers != SeqDigest.of_range(seal.first_seq, seal.next_seq):
            self._record_error(
                path, sealed_file_error(path, "its files do not hold the rows of its commits, each once")
            )
        return numbers.count

    def _check_file(self, file: SealedFile) -> SeqDigest:
        """Check a sealed file; one that several seals name is checked once."""
        if (file.file, file.crc) not in self._read_files:
            digest = check_sealed_file(self._path, file, self._log.schemas.get)
            self._read_files[file.file, file.crc] = digest
            self._count(file.size)
        return self._read_files[file.file, file.crc]

    # Leftovers and links.

    def _check_leftovers(self) -> None:
        """Check what was replaced and may be removed at any time.

        Until it is removed, it is read.
        """
        commits, rows = self._commits, self._rows
        for number in sorted(self._unsealed_numbers() - self._seen_commits):
            if self._covering(number) is not None or number <= self._trimmed_now().commit:
                with suppress(FileNotFoundError):
                    self._read_commit(number, commit_path(self._path, number))
        self._load_seals()
        for stem in sorted(set(self._seals) - self._seen_seals):
            self._previous = None
            with suppress(FileNotFoundError):
                self._check_seal(self._seals[stem])
        self._commits, self._rows = commits, rows

    def _check_links(self) -> None:
        """Check that the glob's links, where there are links, show every sealed row once."""
        if files.is_remote(self._path):
            return
        for look in range(LINK_LOOKS):
            try:
                wrong = self._wrong_links()
            except (*_UNREADABLE, TailraceError):
                return  # flaws of the seals are reported already
            if not wrong:
                return
            if look < LINK_LOOKS - 1:
                time.sleep(LINK_PAUSE_SECONDS)
        for path, message in wrong:
            self._record(path, message, _LINKS)

    def _wrong_links(self) -> list[tuple[LogPath, str]]:
        log, folder = ChangeLog(self._path, self._log.log_id, self._log.source), self._path / "cold"
        log.seal_index.refresh()
        tables = {file.table for seal in log.seal_index.seals for file in seal.files}
        wrong = []
        for table in sorted(tables):
            wanted = {path.name for path in log.files(table)}
            view = folder / str(table)
            shown = set(files.list_names(view)) if view.is_dir() else set()
            wrong += [(view / name, "a link of the glob leads to a missing file") for name in shown - wanted]
            wrong += [(view / name, "a link of the glob is missing") for name in wanted - shown]
        return sorted(wrong)
