"""Read and write seals: runs of commits that became Parquet files.

A *seal* replaces the commits from its first to its last. `cold/<first>-<last>.json` says what they held, where the rows
are now, and the checksum of every file. Seals may overlap: a wider one replaces narrower ones, which are removed after
a grace period. Each alone is complete, so a reader takes any that covers its commits and may look them up again at any
time. A file has rows of one table and one version of its schema, in `_seq` order.
"""

from __future__ import annotations

import bisect
import dataclasses
import os
import re
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from tailrace.errors import NEW_LOG_HINT, LogCorrupt
from tailrace.model.position import Lsn
from tailrace.storage import files, records
from tailrace.storage.files import LogPath
from tailrace.storage.objects import ObjectPath

FORMAT = 1
_NAME = re.compile(r"([0-9]{20})-([0-9]{20})\.json")
CRC_STEP = 8 << 20
_GRAIN_NS = 100_000_000
_LOOKS_MAX = 20
_LISTS_MAX = 4
_Stems = list[tuple[int, int, str]]

COMMIT_COLUMNS = pa.schema([
    pa.field(name, pa.int64(), nullable=name == "committed_at")
    for name in ("commit", "end", "next_seq", "transactions", "rows", "written_at", "committed_at")
])  # fmt: skip
"""The columns of `<first>-<last>.commits.parquet`.

In a run of commits without rows only the last is listed.
"""


@dataclass(frozen=True, kw_only=True)
class RowGroup:
    """One row group of a file.

    It ends where a commit ends, unless that commit has more rows than fit.
    """

    rows: int
    first: int
    last: int
    """`first` and `last` are the commits of its rows."""
    last_seq: int
    committed_at: int
    """The commit time of its last row."""


@dataclass(frozen=True, kw_only=True)
class SealedFile:
    """Rows of one table and one version of its schema, from a run of commits."""

    table: int
    schema: int
    rows: int
    first: int
    last: int
    first_seq: int
    last_seq: int
    moves: int
    truncates: int
    unfit: int
    file: str
    """The path below the log's folder."""
    size: int
    crc: int
    groups: tuple[RowGroup, ...]


@dataclass(frozen=True, kw_only=True)
class Seal:
    """A run of commits, and the files with their rows."""

    log: str
    first: int
    last: int
    start: Lsn
    end: Lsn
    first_seq: int
    next_seq: int
    transactions: int
    rows: int
    shapes: int
    timeline: int
    written_from: int
    written_to: int
    committed_at: int | None
    sealed_at: int
    level: int
    """0 for commits sealed for the first time; each merge of seals adds one."""
    commits_size: int
    commits_crc: int
    files: tuple[SealedFile, ...]

    @property
    def stem(self) -> str:
        return f"{self.first:020d}-{self.last:020d}"

    @property
    def bytes(self) -> int:
        return sum(file.size for file in self.files) + self.commits_size


@dataclass(frozen=True)
class CommitList:
    """The commits of a seal, as columns."""

    commit: npt.NDArray[np.int64]
    end: npt.NDArray[np.int64]
    next_seq: npt.NDArray[np.int64]
    committed_at: npt.NDArray[np.int64]
    """The newest commit time of its transactions; -1 if it has none."""

    def index_of(self, commit: int) -> int:
        """Return the index of a commit.

        A commit in a run without rows has the index of the one listed for that run.
        """
        return int(np.searchsorted(self.commit, commit))


@overload
def seal_path(log: Path, stem: str) -> Path: ...
@overload
def seal_path(log: ObjectPath, stem: str) -> ObjectPath: ...
def seal_path(log: LogPath, stem: str) -> LogPath:
    return log / "cold" / f"{stem}.json"


@overload
def commits_path(log: Path, stem: str) -> Path: ...
@overload
def commits_path(log: ObjectPath, stem: str) -> ObjectPath: ...
def commits_path(log: LogPath, stem: str) -> LogPath:
    return log / "cold" / f"{stem}.commits.parquet"


def seal_stems(log: LogPath) -> list[tuple[int, int, str]]:
    """Return first commit, last commit and name of every seal there is."""
    folder = log / "cold"
    with files.explain_errors(folder):
        names = files.list_names(folder) if files.is_remote(folder) or folder.is_dir() else []
    matches = [match for name in names if (match := _NAME.fullmatch(name))]
    return sorted((int(match[1]), int(match[2]), match[0][:-5]) for match in matches)


def encode_seal(seal: Seal) -> bytes:
    stored = dataclasses.asdict(seal)
    stored |= {"format": FORMAT, "start": str(seal.start), "end": str(seal.end)}
    return records.encode(stored)


def read_seal(log: LogPath, stem: str) -> Seal:
    """Return a checked seal.

    Raise FileNotFoundError if it has been replaced or trimmed meanwhile.
    """
    path = seal_path(log, stem)
    try:
        with files.explain_errors_but_missing(path):
            text = path.read_bytes()
        seal = _seal(records.decode(text, FORMAT))
        if seal.stem != stem:
            raise ValueError("it belongs to another file name")
        return seal
    except (ValueError, KeyError, TypeError) as error:
        raise sealed_file_error(path, str(error)) from error


def _seal(stored: dict[str, Any]) -> Seal:
    names = [field.name for field in dataclasses.fields(Seal)]
    known = {name: stored[name] for name in names}
    known |= {"start": Lsn.parse(stored["start"]), "end": Lsn.parse(stored["end"])}
    known["files"] = tuple(
        SealedFile(
            **{**_only(file, SealedFile), "groups": tuple(RowGroup(**_only(g, RowGroup)) for g in file["groups"])}
        )
        for file in stored["files"]
    )
    return Seal(**known)


def _only(stored: dict[str, Any], kind: type[Any]) -> dict[str, Any]:
    return {field.name: stored[field.name] for field in dataclasses.fields(kind)}


def read_commit_list(log: LogPath, seal: Seal) -> CommitList:
    """Return the checked commits of a seal.

    Raise FileNotFoundError if it has been replaced meanwhile.
    """
    table = commits_table(log, seal)
    names = ("commit", "end", "next_seq", "committed_at")
    return CommitList(*(table.column(name).fill_null(-1).to_numpy() for name in names))


def commits_table(log: LogPath, seal: Seal) -> pa.Table:
    """Return the checked commits of a seal with every column."""
    path = commits_path(log, seal.stem)
    try:
        check_file(path, seal.commits_size, seal.commits_crc)
        return pq.read_table(files.arrow_source(path), use_threads=False)
    except FileNotFoundError as error:
        # When a seal is replaced, the seal is removed first, then its list.
        with files.explain_store_errors(path):
            seal_exists = files.file_exists(seal_path(log, seal.stem))
        if seal_exists:
            raise sealed_file_error(path, "it is missing") from error
        raise


def check_file(path: LogPath, size: int, crc: int) -> None:
    """Refuse a file that is not, byte for byte, what was written."""
    checksum, length = checksum_of(path)
    if length != size or checksum != crc:
        raise sealed_file_error(path, "it does not match its checksum")


def checksum_of(path: LogPath) -> tuple[int, int]:
    """Return CRC-32 and length of a file; raise FileNotFoundError if it is gone."""
    crc = length = 0
    if isinstance(path, ObjectPath):
        with files.explain_errors_but_missing(path):
            content = files.cached_view(path)
        return zlib.crc32(content), len(content)
    with files.explain_errors_but_missing(path), path.open("rb", buffering=0) as file:
        while chunk := file.read(CRC_STEP):
            crc = zlib.crc32(chunk, crc)
            length += len(chunk)
    return crc, length


def sealed_file_error(path: LogPath, why: str) -> LogCorrupt:
    """Return the error for a sealed file that is not what was written."""
    return LogCorrupt(
        f"a sealed file of the log is damaged: {why}",
        path=path,
        hint=f"Restore the file from a copy of the log. Without one: {NEW_LOG_HINT}",
    )


_Seen = tuple[tuple[int, int] | _Stems, float, tuple[Seal, ...]]
"""One look: the folder's stamp or listing, the time, and the seals found.

They are one value, so that every thread sees all of one look.
"""


class SealIndex:
    """The seals that together cover a log, oldest first; any thread may use it."""

    def __init__(self, log: LogPath, log_id: str | None = None) -> None:
        self._log = log
        self._log_id = log_id
        self._seals_by_stem: dict[str, Seal] = {}
        self._lists: dict[str, CommitList] = {}
        """Neither dict is changed in its current object: another thread may be reading it."""
        self._seen: _Seen = ((-1, -1), 0, ())

    @property
    def seals(self) -> tuple[Seal, ...]:
        """The seals of the last look."""
        return self._seen[2]

    @property
    def last_commit(self) -> int:
        """The last sealed commit; 0 if nothing is sealed."""
        seals = self.seals
        return seals[-1].last if seals else 0

    def refresh(self, within: float = 0.0) -> bool:
        """Load what was sealed, merged or trimmed since; return true if something may have changed.

        Where a look costs a request, one `within` so many seconds will do.
        """
        if files.is_remote(self._log):
            return self._refresh_remote(within)
        try:
            status = os.stat(str(self._log / "cold"))
        except FileNotFoundError:
            return False
        stamp = (status.st_mtime_ns, status.st_ino)
        known, looked_at, _ = self._seen
        # A folder's time has the kernel clock's resolution: two changes may have the same time.
        if stamp == known and looked_at > status.st_mtime_ns + _GRAIN_NS:
            return False
        looked_at = time.time_ns()
        self._seen = stamp, looked_at, self._load(seal_stems(self._log))[1]
        return True

    def _refresh_remote(self, within: float) -> bool:
        known, listed_at, seals = self._seen
        if within and time.monotonic() < listed_at + within:
            return False
        listed_at, stems = time.monotonic(), seal_stems(self._log)
        changed = stems != known
        if changed:
            stems, seals = self._load(stems)
        self._seen = stems, listed_at, seals
        return changed

    def _load(self, stems: _Stems) -> tuple[_Stems, tuple[Seal, ...]]:
        """Return the listing and the seals of its chain.

        If files vanish meanwhile, it is listed again.
        """
        for _ in range(_LOOKS_MAX):
            try:
                seals = tuple(self._seals_by_stem.get(stem) or self._read_seal(stem) for stem in _chain(stems))
                break
            except FileNotFoundError:
                stems = seal_stems(self._log)  # replaced between listing and reading: the wider one is there now
        else:
            raise sealed_file_error(self._log / "cold", "its files keep changing")
        self._seals_by_stem = read = {seal.stem: seal for seal in seals}
        self._lists = {stem: known for stem, known in self._lists.items() if stem in read}
        return stems, seals

    def _read_seal(self, stem: str) -> Seal:
        seal = read_seal(self._log, stem)
        if self._log_id not in (None, seal.log):
            raise sealed_file_error(seal_path(self._log, stem), "it belongs to another log")
        return seal

    def covering(self, commit: int) -> Seal | None:
        """Return the seal that holds a commit; None if no seal does."""
        seals = self.seals
        index = bisect.bisect_left(seals, commit, key=lambda seal: seal.last)
        seal = seals[index] if index < len(seals) else None
        return seal if seal is not None and seal.first <= commit else None

    def commit_list(self, seal: Seal) -> CommitList:
        """Return the commits of a seal; the lists used last are cached."""
        known = self._lists.get(seal.stem)
        if known is None:
            known = read_commit_list(self._log, seal)
            self._lists = dict([*self._lists.items(), (seal.stem, known)][-_LISTS_MAX:])
        return known

    def commit_list_near(self, seal: Seal) -> CommitList:
        """Return the commits of a seal, or of the seal that replaced it.

        For a trimmed one only its end is left.
        """
        try:
            return self.commit_list(seal)
        except FileNotFoundError:
            self.refresh()
            wider = self.covering(seal.last)
            if wider is not None and wider.stem != seal.stem:
                return self.commit_list_near(wider)
            newest = -1 if seal.committed_at is None else seal.committed_at
            return CommitList(*(np.array([value]) for value in (seal.last, seal.end.value, seal.next_seq, newest)))


def _chain(stems: list[tuple[int, int, str]]) -> list[str]:
    """Return the names of the seals that cover the log, in order.

    At each step it takes the seal that reaches furthest, which replaces those inside it. Where the log was trimmed the
    first does not begin at commit 1. A gap after it ends the chain.
    """
    chain: list[str] = []
    covered_to = stems[0][0] - 1 if stems else 0
    index = 0
    while True:
        best: tuple[int, int, str] | None = None
        while index < len(stems) and stems[index][0] <= covered_to + 1:
            if best is None or stems[index][1] > best[1]:
                best = stems[index]
            index += 1
        if best is None:
            return chain
        if best[1] > covered_to:
            chain.append(best[2])
            covered_to = best[1]
