"""Looks at every byte the log answers for: each checksum, each count, and that nothing is missing in between.

It only reads, goes on after a flaw, and tells them all. It may run beside those who write, seal and trim: a file that
goes while it is looked at is a flaw only if something still names it. Memory is bounded by one body or one row group.
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
"""Kept one by one; further ones are counted."""
LINK_LOOKS = 5
LINK_PAUSE_SECONDS = 0.3
"""Links follow the seals they show a moment later; only a difference that stays is a flaw."""
_RESTORE = f"Restore the file from a copy of the log. Without one: {NEW_LOG_HINT}"
_LINKS = "`tailrace log FILE seal` makes the links anew; the rows themselves are not in question."
_UNREADABLE = (LogError, ValueError, KeyError, TypeError, IndexError, OSError, pa.ArrowException)
"""What a file that is not what was written may raise on the way to its rows."""

_TROUBLE = (LogUnreachable, *files.STORE_ERRORS)
"""A store that does not answer says nothing of its files: the look ends."""

Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class Flaw:
    """One thing that is not as it was written."""

    path: LogPath
    message: str
    hint: str


@dataclass(frozen=True, kw_only=True)
class LogVerification:
    """What was looked at, and what was found."""

    commits: int
    rows: int
    files: int
    bytes: int
    flaws: tuple[Flaw, ...]
    flaws_total: int


@dataclass(frozen=True)
class _PreviousCommit:
    """Where the commit before ended."""

    commit: int
    end: Lsn | None
    next_seq: int


def verify(path: LogPath | str, progress: Progress = lambda done, of: None) -> LogVerification:
    """Look at the whole log; `progress` hears how many bytes of how many."""
    path = files.parse_log_path(path)
    with files.explain_store_errors(path):
        return _Verifier(path, progress).run()


class _Verifier:
    """One look at one log."""

    def __init__(self, path: LogPath, progress: Progress) -> None:
        self._path = path
        self._progress = progress
        self._flaws: dict[tuple[LogPath, str], Flaw] = {}
        self._flaws_total = 0
        self._commits = self._rows = self._files = self._bytes = 0
        self._of = sum(disk_bytes(path / name) for name in ("hot", "big", "cold/files"))
        self._seals: dict[str, Seal] = {}
        self._bad_seals: dict[str, tuple[int, int]] = {}
        self._read_files: dict[tuple[str, int], SeqDigest] = {}
        self._seen_hot: set[int] = set()
        self._seen_seals: set[str] = set()
        self._gone: TrimRecord | None = None
        self._before: _PreviousCommit | None = None

    def run(self) -> LogVerification:
        log = self._open()
        if log is not None:
            self._log = log
            self._check_trimmed()
            with self._noting(self._path):
                log.gaps()
            self._check_shapes()
            self._look()
            self._walk()
            self._check_leftovers()
            self._check_links()
        for path in consumers.unreadable_files(self._path):
            said = "a reader's place cannot be read, so the log keeps nothing for it"
            self._note(path, said, "Remove the file; its reader begins anew.")
        return LogVerification(
            commits=self._commits,
            rows=self._rows,
            files=self._files,
            bytes=self._bytes,
            flaws=tuple(self._flaws.values()),
            flaws_total=self._flaws_total,
        )

    # Flaws.

    def _note(self, path: LogPath, message: str, hint: str = _RESTORE) -> None:
        if (path, message) in self._flaws:
            return
        self._flaws_total += 1
        if len(self._flaws) < FLAWS_MAX:
            self._flaws[path, message] = Flaw(path=path, message=message, hint=hint)

    def _note_error(self, path: LogPath, error: BaseException) -> None:
        if isinstance(error, _TROUBLE):
            raise error
        if isinstance(error, TailraceError):
            named = error.fields.get("path")
            self._note(files.log_file_named(self._path, str(named)) if named else path, error.message, error.hint)
        else:
            self._note(path, f"it cannot be read: {type(error).__name__}")

    @contextmanager
    def _noting(self, path: LogPath) -> Iterator[None]:
        """What cannot be read is a flaw; what is not there is for the caller to judge."""
        try:
            yield
        except FileNotFoundError:
            raise
        except _UNREADABLE as error:
            self._note_error(path, error)

    def _count(self, size: int) -> None:
        self._files += 1
        self._bytes += size
        self._progress(min(self._bytes, self._of), self._of)

    # What stands for itself.

    def _open(self) -> ChangeLog | None:
        """The log; one whose meta.json is damaged, by the id that its own commits give it."""
        meta = self._path / "meta.json"
        try:
            log = ChangeLog.open(self._path)
            self._count(files.size_of(meta))
            return log
        except LogCorrupt as error:
            self._note_error(meta, error)
        for number in sorted(self._hot_numbers(), reverse=True):
            with suppress(*_UNREADABLE):
                found = commit_file.read_header(commit_path(self._path, number))
                return ChangeLog(self._path, found.log, SourceId(kind="", system="", database="", timeline=0))
        return None

    def _check_trimmed(self) -> None:
        with self._noting(self._path):
            gone = self._gone = self._log.trimmed()
            self._before = _PreviousCommit(gone.commit, gone.position if gone.commit else None, gone.next_seq)

    def _gone_now(self) -> TrimRecord:
        """What is trimmed by now; nothing, if the record was damaged to begin with."""
        return self._log.trimmed() if self._gone is not None else NOTHING_TRIMMED

    def _check_shapes(self) -> None:
        versions: dict[int, set[int]] = {}
        for path in files.matching_files(self._path / "schemas", "*/*.json"):
            if not (path.parent.name.isdigit() and path.stem.isdigit()):
                continue
            table, version = int(path.parent.name), int(path.stem)
            versions.setdefault(table, set()).add(version)
            with self._noting(path):
                self._log.schemas.get(table, version)
            self._count(files.size_of(path))
        for table, found in versions.items():
            for version in sorted(set(range(1, max(found) + 1)) - found):
                path = self._path / "schemas" / str(table) / f"{version}.json"
                self._note(path, "a table's shape is missing")

    # The commits, in order.

    def _hot_numbers(self) -> set[int]:
        folder = self._path / "hot"
        try:
            names = files.list_names(folder)
        except OSError as error:
            self._note(folder, f"the log's commits cannot be listed: {error.strerror or error.args[0]}")
            return set()
        return {int(name[:20]) for name in names if name[20:] == ".arrow" and name[:20].isdigit()}

    def _look(self) -> None:
        """Take in the seals that are there now."""
        found = {}
        for first, last, stem in cold.seal_stems(self._path):
            if stem in self._bad_seals:
                continue
            try:
                found[stem] = self._seals.get(stem) or cold.read_seal(self._path, stem)
            except FileNotFoundError:
                continue  # replaced meanwhile
            except _UNREADABLE as error:
                self._note_error(seal_path(self._path, stem), error)
                self._bad_seals[stem] = (first, last)
        self._seals = found

    def _covering(self, commit: int) -> Seal | None:
        """The seal that reaches furthest among those that hold a commit."""
        found = [seal for seal in self._seals.values() if seal.first <= commit <= seal.last]
        return max(found, key=lambda seal: seal.last, default=None)

    def _walk(self) -> None:
        """Every commit from the oldest that is kept to the newest there is now."""
        hot = self._hot_numbers()
        newest = max(hot | {seal.last for seal in self._seals.values()}, default=0)
        oldest = min(hot | {seal.first for seal in self._seals.values()}, default=1)
        commit = self._gone.commit + 1 if self._gone is not None else oldest
        while commit <= newest:
            commit = self._step(commit, newest, hot)
        if newest not in hot and newest > max(self._hot_numbers(), default=0):
            self._note(commit_path(self._path, newest), "the newest commit has no file of its own")

    def _step(self, commit: int, newest: int, hot: set[int]) -> int:
        """Look at what holds a commit; the first commit after that."""
        for tries_left in (1, 0):
            seal = self._covering(commit)
            try:
                if seal is not None:
                    self._check_seal(seal)
                    return seal.last + 1
                self._check_commit(commit)
                return commit + 1
            except FileNotFoundError as error:
                # Sealed, joined or trimmed since we looked; or it is not there at all.
                self._look()
                gone = self._gone_now()
                if commit <= gone.commit:
                    self._before = None
                    return gone.commit + 1
                if not tries_left:
                    self._before = None
                    return self._miss(commit, newest, hot, seal, error)
        raise AssertionError("unreachable")

    def _miss(self, commit: int, newest: int, hot: set[int], seal: Seal | None, error: FileNotFoundError) -> int:
        """Something that should be there is not; the next commit that something holds."""
        if seal is not None:
            path = (
                files.log_file_named(self._path, error.filename) if error.filename else seal_path(self._path, seal.stem)
            )
            self._note(path, "a sealed file of the log is missing")
            return seal.last + 1
        later = {number for number in hot if number > commit} | {newest + 1}
        later |= {seal.first for seal in self._seals.values() if seal.first > commit}
        damaged_to = [last for first, last in self._bad_seals.values() if first <= commit <= last]
        if damaged_to:  # what they held is told as damaged, not as missing
            return min(*later, max(damaged_to) + 1)
        last = min(later) - 1
        some = "a commit of the log is missing" if last == commit else f"commits {commit} to {last} are missing"
        self._note(commit_path(self._path, commit), some)
        return last + 1

    def _follows(self, path: LogPath, first: int, start: Lsn, first_seq: int) -> None:
        """Whether it goes on where the one before ended."""
        before = self._before
        if before is None or before.commit != first - 1:
            return  # what was before is flawed, or it was sealed again while we looked
        if before.end is not None and start != before.end:
            self._note(path, "it does not start where the one before ended")
        if first_seq != before.next_seq:
            self._note(path, "its rows are not numbered on from those before")

    # A commit's own file.

    def _check_commit(self, commit: int) -> None:
        path = commit_path(self._path, commit)
        header = self._read_commit(commit, path)
        if header is None:
            self._before = None
            return
        self._follows(path, commit, header.start, header.next_seq - header.rows)
        self._before = _PreviousCommit(commit, header.end, header.next_seq)
        self._commits += 1
        self._rows += header.rows

    def _read_commit(self, commit: int, path: LogPath) -> CommitHeader | None:
        """A commit's header, after a look at every row; None if it cannot be read."""
        size = files.size_of(path)
        try:
            header = self._log.header(commit)
        except _UNREADABLE as error:
            files.size_of(path)  # sealed and removed meanwhile: that is no flaw
            self._note_error(path, error)
            header = None
        if header is not None:
            self._check_bodies(header, path)
        self._seen_hot.add(commit)
        self._count(size)
        return header

    def _check_bodies(self, header: CommitHeader, path: LogPath) -> None:
        numbers, whole = SeqDigest(), True
        pieces = [self._path / piece.file for piece in header.big]
        missing = {place for place, piece in enumerate(pieces, 1) if not files.file_exists(piece)}
        if missing:
            self._refuse_replaced(header.commit, path)
        for body in header.bodies:
            if body.piece in missing:
                self._note(pieces[body.piece - 1], "rows of a large transaction are missing")
                whole = False
                continue
            try:
                seqs = self._log.batch(header, body).data.column(change.SEQ).to_numpy()
            except _UNREADABLE as error:
                files.size_of(path)
                if body.piece and not files.file_exists(pieces[body.piece - 1]):
                    self._refuse_replaced(header.commit, path)
                self._note_error(path, error)
                whole = False
                continue
            if not is_run(seqs, body.rows, body.first_seq, body.last_seq, body.table):
                said = f"the rows of table {body.table} are not the ones its header names"
                self._note_error(path, corrupt_commit_error(path, said))
            if body.table != SCHEMA_STREAM_NUMBER:
                numbers += SeqDigest.of(seqs)
        if whole and numbers != SeqDigest.of_range(header.next_seq - header.rows, header.next_seq):
            self._note_error(path, corrupt_commit_error(path, "its rows are not numbered one after another"))
        for piece in pieces:
            with suppress(FileNotFoundError):
                self._count(files.size_of(piece))

    def _refuse_replaced(self, commit: int, path: LogPath) -> None:
        """Raise FileNotFoundError if the commit was sealed or trimmed since we looked; its pieces go before its own
        file."""
        files.size_of(path)
        self._look()
        if self._covering(commit) is not None or commit <= self._gone_now().commit:
            raise FileNotFoundError(path)

    # Seals.

    def _check_seal(self, seal: Seal) -> None:
        path = seal_path(self._path, seal.stem)
        if seal.log != self._log.log_id:
            self._note_error(path, sealed_file_error(path, "it belongs to another log"))
        with self._noting(path):
            check_commit_list(self._path, seal)
        found = self._check_files(seal, path)
        self._follows(path, seal.first, seal.start, seal.first_seq)
        self._before = _PreviousCommit(seal.last, seal.end, seal.next_seq)
        self._commits += seal.last - seal.first + 1
        self._rows += found
        self._seen_seals.add(seal.stem)
        self._count(files.size_of(path))

    def _check_files(self, seal: Seal, path: LogPath) -> int:
        """Its files, and that together they hold its rows: all of them, unless some are trimmed."""
        numbers, whole = SeqDigest(), True
        for file in seal.files:
            try:
                found = self._check_file(file)
            except FileNotFoundError:
                if self._gone_now().is_trimmed(file.table, file.last_seq):
                    continue
                raise
            except _UNREADABLE as error:
                self._note_error(self._path / file.file, error)
                whole = False
                continue
            if file.table != SCHEMA_STREAM_NUMBER:
                numbers += found
        lost = max((gone.last_seq for gone in self._gone_now().tables.values()), default=0)
        if lost >= seal.first_seq:
            if numbers.count > seal.rows:
                self._note_error(path, sealed_file_error(path, "its files hold more rows than its commits did"))
        elif whole and numbers != SeqDigest.of_range(seal.first_seq, seal.next_seq):
            self._note_error(path, sealed_file_error(path, "its files do not hold the rows of its commits, each once"))
        return numbers.count

    def _check_file(self, file: SealedFile) -> SeqDigest:
        """A sealed file; those that several seals name are looked at once."""
        if (file.file, file.crc) not in self._read_files:
            found = check_sealed_file(self._path, file, self._log.schemas.get)
            self._read_files[file.file, file.crc] = found
            self._count(file.size)
        return self._read_files[file.file, file.crc]

    # What is there besides.

    def _check_leftovers(self) -> None:
        """What something else stands for by now: it may go at any time, but until then it is read."""
        commits, rows = self._commits, self._rows
        for number in sorted(self._hot_numbers() - self._seen_hot):
            if self._covering(number) is not None or number <= self._gone_now().commit:
                with suppress(FileNotFoundError):
                    self._read_commit(number, commit_path(self._path, number))
        self._look()
        for stem in sorted(set(self._seals) - self._seen_seals):
            self._before = None
            with suppress(FileNotFoundError):
                self._check_seal(self._seals[stem])
        self._commits, self._rows = commits, rows

    def _check_links(self) -> None:
        """The links of the glob, where there are links: together they show every sealed row once."""
        if files.is_remote(self._path):
            return
        for look in range(LINK_LOOKS):
            try:
                wrong = self._wrong_links()
            except (*_UNREADABLE, TailraceError):
                return  # what is wrong with the seals is told already
            if not wrong:
                return
            if look < LINK_LOOKS - 1:
                time.sleep(LINK_PAUSE_SECONDS)
        for path, said in wrong:
            self._note(path, said, _LINKS)

    def _wrong_links(self) -> list[tuple[LogPath, str]]:
        log, folder = ChangeLog(self._path, self._log.log_id, self._log.source), self._path / "cold"
        log.seal_index.refresh()
        tables = {file.table for seal in log.seal_index.seals for file in seal.files}
        found = []
        for table in sorted(tables):
            wanted = {path.name for path in log.files(table)}
            view = folder / str(table)
            shown = set(files.list_names(view)) if view.is_dir() else set()
            found += [(view / name, "a link of the glob leads to what is no longer there") for name in shown - wanted]
            found += [(view / name, "a link of the glob is missing") for name in wanted - shown]
        return sorted(found)
