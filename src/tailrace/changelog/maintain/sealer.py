"""Seal commits into Parquet files per table, and merge small seals into larger ones.

Sealing never changes what the log holds; it only writes the same rows again in other files. The order makes that safe.
Every file is durable before the seal that names it. The seal is published before any commit's own file is removed.
Those files are removed only after a grace period, so that a reader that looked them up can still read them. After a
crash at any point, the next sealer sweeps what no seal names. One process seals at a time (`sealer.lock`); two at once
would still both be right, because a seal is complete in itself.

The glob `cold/<table>/*.parquet` shows every row once: it is a folder of links, replaced as a whole when files are
merged. In an object store there are no links, and no such glob.

In a store a lease does not end with its holder's power to write: a sealer that counted as dead may wake up and publish
a seal. So files that no seal names are kept until they are older than the making of any seal takes. Before it
publishes, a sealer checks that the lease is still its own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from tailrace import failpoints
from tailrace.changelog.format import seal as cold
from tailrace.changelog.format.commit_file import CommitHeader, commit_path
from tailrace.changelog.format.seal import Seal, SealedFile, checksum_of, commits_path, seal_path
from tailrace.changelog.format.trimmed import NOTHING_TRIMMED, TrimRecord
from tailrace.changelog.format.trimmed import TRIMMED_FILE as TRIMMED
from tailrace.changelog.maintain.seal_contents import (
    SEAL_LIMITS,
    SealLimits,
    coalesced_commits,
    commit_rows,
    seal_of_commits,
)
from tailrace.changelog.maintain.seal_writer import SealWriter, remove_stale_links, write_links
from tailrace.changelog.read.reader import ChangeLog
from tailrace.changelog.write.log_lease import LogLease
from tailrace.errors import LogFull
from tailrace.storage import files, local
from tailrace.storage.files import LogPath
from tailrace.storage.objects import ObjectPath

SEALER_LEASE = "sealer"
GRACE_SECONDS = 300.0
ORPHAN_SECONDS = 3600.0
"""Age from which a store's file that no seal names counts as left over.

A younger one may be about to be named.
"""


@dataclass(frozen=True, kw_only=True)
class SealResult:
    """The result of one round of work."""

    seals: int = 0
    commits: int = 0
    rows: int = 0
    bytes: int = 0
    merged: int = 0
    removed: int = 0

    def __add__(self, other: SealResult) -> SealResult:
        return SealResult(**{name: value + getattr(other, name) for name, value in vars(self).items()})


class Sealer:
    """Seals one log, as a context that holds the sealer's lease.

    It first sweeps what a dead sealer left. Pass `log`, opened by a sealer that has done that, to skip it.
    """

    def __init__(
        self,
        path: LogPath | str,
        *,
        wait_seconds: float = 30.0,
        log: ChangeLog | None = None,
        limits: SealLimits = SEAL_LIMITS,
    ) -> None:
        self.log = log or ChangeLog.open(path)
        self.path = self.log.path
        self._limits = limits
        files.make_folder(self.path / "cold" / "files")
        self._lease = LogLease(self.path, SEALER_LEASE, wait_seconds)
        try:
            self._refuse_gaps()
            if log is None:
                self._sweep()
        except BaseException:
            self._lease.release()
            raise

    def __enter__(self) -> Sealer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Let another process seal."""
        self._lease.release()

    def _refuse_gaps(self) -> None:
        """Refuse to work where a commit is missing: it may be put back.

        Nothing may then be sealed, trimmed or swept.
        """
        self.log.seal_index.refresh()
        newest, first, seals = self.log.newest(), self.log.trimmed().commit + 1, self.log.seal_index.seals
        with files.explain_errors(self.path / "hot"):
            names = set(files.list_names(self.path / "hot"))
        unsealed = range(max(first, self.log.seal_index.last_commit + 1), newest + 1)
        for commit in (*range(first, seals[0].first if seals else first), *unsealed):
            if commit_path(self.path, commit).name not in names:
                self.log.header(commit)  # raises: the commit is missing

    # Sealing.

    def unsealed_range(self) -> tuple[int, int]:
        """Return the first and the last unsealed commit; an empty range if all are sealed."""
        newest = self.log.newest()
        return self._first_unsealed(), newest

    def unsealed_files(self, replaced: Collection[LogPath]) -> Iterator[LogPath]:
        """Yield the files of unsealed commits, and of one that is being written.

        `replaced` are the files that seals have replaced.
        """
        for folder in (self.path / "hot", self.path / "big"):
            with suppress(FileNotFoundError):  # a log may exist before its folders
                paths = files.deletable_parts(folder) if files.is_remote(folder) else folder.iterdir()
                yield from (path for path in paths if path not in replaced and path.parent not in replaced)

    def _first_unsealed(self) -> int:
        self.log.seal_index.refresh()
        return max(self.log.seal_index.last_commit, self.log.trimmed().commit) + 1

    def seal(self, progress: Callable[[int, int], None] = lambda result, of: None) -> SealResult:
        """Seal every commit there is now; `progress` gets how many of how many."""
        first, last = self.unsealed_range()
        result = SealResult()
        while (begin := self._first_unsealed()) <= last:
            sealed = self._seal_next(begin, last)
            result += SealResult(seals=1, commits=sealed.last - sealed.first + 1, rows=sealed.rows, bytes=sealed.bytes)
            progress(sealed.last - first + 1, last - first + 1)
        return result

    def _seal_next(self, first: int, last: int) -> Seal:
        """Make one seal from the first commit on, with as much as one holds."""
        tables = SealWriter(self.path, self.log.schemas.get, self._limits.file_sizes)
        try:
            headers: list[CommitHeader] = []
            size = 0
            for header in self.log.headers(first - 1, min(last, first + self._limits.commits - 1)):
                size += sum(body.size for body in header.bodies)
                if headers and size > self._limits.bytes:
                    break
                headers.append(header)
                for body in header.bodies:
                    tables.add(body.table, body.schema, header.commit, self.log.batch(header, body))
                tables.end_commit()
            sealed_files = tables.close()
        except BaseException:
            tables.abandon()
            raise
        return self._publish(replace(seal_of_commits(headers), files=tuple(sealed_files)), tables, commit_rows(headers))

    def _publish(self, seal: Seal, tables: SealWriter, commits: pa.Table) -> Seal:
        """Publish a seal: files first, then the seal that names them, then the glob's links."""
        path, target = commits_path(self.path, seal.stem), seal_path(self.path, seal.stem)
        temp = files.temp_path(files.scratch_folder(path.parent) / path.name)
        try:
            with files.explain_errors(path):
                pq.write_table(coalesced_commits(commits), temp, compression="zstd")
                crc, size = checksum_of(temp)
                files.put_file(temp, path)
                files.sync_folder(path.parent)
            if files.is_remote(path):
                self._lease.check()
            seal = replace(seal, commits_size=size, commits_crc=crc, sealed_at=time.time_ns() // 1000)
            failpoints.hit("seal.before_publish")
            with files.explain_errors(target):
                files.create(target, cold.encode_seal(seal))
        except BaseException as error:
            files.remove(temp)
            # A seal with its name is read, durable or not. The next sweep makes it durable.
            if not isinstance(error.__cause__, local.DurabilityUnknown) and not _may_exist(target):
                files.remove(path)
                tables.abandon()
            raise
        failpoints.hit("seal.after_publish")
        self.log.seal_index.refresh()
        self.update_links({file.table for file in seal.files})
        return seal

    # Merging.

    def merge_seals(self) -> SealResult:
        """Merge runs of small neighbour seals until there are none left to merge."""
        result = SealResult()
        while run := self._mergeable():
            self._merge(run)
            result += SealResult(merged=len(run))
        return result

    def _mergeable(self) -> list[Seal]:
        """Return the oldest run of neighbours of one level that may become one seal."""
        self.log.seal_index.refresh()
        limits = self._limits
        run: list[Seal] = []
        for seal in self.log.seal_index.seals:
            if run and seal.level != run[-1].level:
                run = []
            run = [*run, seal][-limits.merge_count :]
            size = sum(item.bytes for item in run)
            seconds = (run[-1].written_to - run[0].written_from) / 1e6
            if len(run) == limits.merge_count and size <= limits.merge_bytes and seconds <= limits.merge_seconds:
                return run
        return []

    def _merge(self, run: list[Seal]) -> Seal:
        tables = SealWriter(self.path, self.log.schemas.get, self._limits.file_sizes)
        try:
            kept: list[SealedFile] = []
            for file in self._kept_files(run):
                if file.size >= self._limits.small_bytes:
                    tables.end_file(file.table)
                    kept.append(file)
                else:
                    tables.copy(file)
            kept += tables.close()
            kept.sort(key=lambda file: (file.table, file.first_seq))
            commits = pa.concat_tables(cold.commits_table(self.path, seal) for seal in run)
        except BaseException:
            tables.abandon()
            raise
        first, last = run[0], run[-1]
        merged = replace(
            last,
            first=first.first,
            start=first.start,
            first_seq=first.first_seq,
            written_from=first.written_from,
            transactions=sum(seal.transactions for seal in run),
            rows=sum(seal.rows for seal in run),
            committed_at=max((seal.committed_at for seal in run if seal.committed_at is not None), default=None),
            level=last.level + 1,
            files=tuple(kept),
        )
        return self._publish(merged, tables, commits)

    def _kept_files(self, run: list[Seal]) -> list[SealedFile]:
        """Return the files of seals that are not trimmed, table by table, in order."""
        trimmed = self.log.trimmed()
        kept = [file for seal in run for file in seal.files if not trimmed.is_trimmed(file.table, file.last_seq)]
        return sorted(kept, key=lambda file: (file.table, file.first_seq))

    # Cleaning up.

    def clean(self, grace_seconds: float = GRACE_SECONDS) -> SealResult:
        """Remove what seals replaced longer ago than the grace period."""
        self.log.seal_index.refresh()
        before = time.time() - grace_seconds
        removed = 0
        if files.is_remote(self.path):  # many in one request
            replaced = list(self._own_files_of_sealed(before))
            with files.explain_errors(self.path):
                files.delete_all(replaced)
            removed = len(replaced)
        removed += sum(_remove(path) for path in self._replaced(before))
        return SealResult(removed=removed)

    def removable_files(self) -> list[LogPath]:
        """Return what seals have replaced and the next cleanings will remove."""
        return list(self._replaced(time.time() + 1.0))

    def replaced_files_kept(self) -> list[LogPath]:
        """Return replaced files that remain until there is a newer commit."""
        newest = self.log.newest()
        sealed = self.log.seal_index.covering(newest) is not None
        return [self.path / "big" / f"{newest:020d}", commit_path(self.path, newest)] if sealed else []

    def _replaced(self, before: float) -> Iterator[LogPath]:
        """Yield files that no reader will look up again, replaced before the time `before`."""
        yield from self._own_files_of_sealed(before)
        chain = {seal.stem for seal in self.log.seal_index.seals}
        replaced, freed = False, set[LogPath]()
        for _, last, stem in cold.seal_stems(self.path):
            wider = self.log.seal_index.covering(last) if stem not in chain else None
            if wider is not None and self._sealed_at(wider) <= before:
                replaced = True
                if files.is_remote(self.path):
                    freed |= {self.path / file.file for file in _files_of(self.path, stem)}
                yield seal_path(self.path, stem)
                yield commits_path(self.path, stem)
        if replaced:
            yield from self._unnamed(freed)

    def _sealed_at(self, seal: Seal) -> float:
        """Return when a seal was published.

        In a store a look would cost a request for each, so the seal's own time is used.
        """
        return seal.sealed_at / 1e6 if files.is_remote(self.path) else _written_at(seal_path(self.path, seal.stem))

    def _own_files_of_sealed(self, before: float) -> Iterator[LogPath]:
        """Yield the own files of commits that are sealed or trimmed, except the newest commit's.

        That file says how far the log is.
        """
        newest, trimmed_to = self.log.newest(), self.log.trimmed().commit
        ages = {seal.stem: self._sealed_at(seal) for seal in self.log.seal_index.seals}
        with files.explain_errors(self.path):
            names, big_names = sorted(files.list_names(self.path / "hot")), set[str]()
            with suppress(FileNotFoundError):
                big_names = set(files.list_names(self.path / "big"))
        for name in names:
            number = int(name[:20]) if name[:20].isdigit() else newest
            seal = self.log.seal_index.covering(number) if number < newest else None
            if number < newest and (number <= trimmed_to or (seal is not None and ages[seal.stem] <= before)):
                # In this order: only the commit's own file leads to its files in `big`.
                if (big_folder := self.path / "big" / f"{number:020d}").name in big_names:
                    yield from files.deletable_parts(big_folder)
                yield commit_path(self.path, number)

    def _unnamed(self, freed: Collection[LogPath] = ()) -> Iterator[LogPath]:
        """Yield files of rows or commits that no seal names.

        A seal replaced them, or a dead sealer left them.
        """
        if isinstance(self.path, ObjectPath):
            before = (time.time() - ORPHAN_SECONDS) * 1e9
            old = {path for path, meta in (self.path / "cold").walk() if meta.modified_ns < before}
            yield from (path for path in self._all_unnamed() if path in freed or path in old)
        else:
            yield from self._all_unnamed()

    def _all_unnamed(self) -> Iterator[LogPath]:
        stems = {stem for _, _, stem in cold.seal_stems(self.path)}
        others = [_files_of(self.path, stem) for stem in stems - {seal.stem for seal in self.log.seal_index.seals}]
        file_lists = [*(seal.files for seal in self.log.seal_index.seals), *others]
        named = {self.path / file.file for some in file_lists for file in some}
        folder = self.path / "cold"
        yield from (path for path in (folder / "files").glob("*/*") if path not in named)
        for path in folder.glob("*.commits.parquet"):
            if path.name.partition(".")[0] not in stems:
                yield path

    def _sweep(self) -> None:
        """Remove what an earlier sealer had not finished.

        We hold the lease, so no process is still working on it.
        """
        with files.explain_errors(self.path):
            for leftover in self._leftovers():
                leftover.unlink(missing_ok=True)
            self.log.seal_index.refresh()
            self._make_records_durable()
            files.delete_all(list(self._unnamed()))
            self.update_links({file.table for seal in self.log.seal_index.seals for file in seal.files})
            if isinstance(self.path, Path):
                remove_stale_links(self.path)
            self.remove_trimmed(self.log.trimmed())

    def _leftovers(self) -> Iterator[Path]:
        if isinstance(self.path, Path):
            for pattern in ("cold/.*.tmp", "cold/files/*/.*.tmp"):
                yield from self.path.glob(pattern)
        else:
            folders = {self.path / "cold", *(self.path / "cold" / "files").iterdir()}
            yield from (path for folder in folders for path in files.scratch_folder(folder).glob(".*.tmp"))

    def _make_records_durable(self) -> None:
        """Make durable the records on which a removal relies.

        Their writer may have died, or failed, before they were.
        """
        if files.is_remote(self.path):
            return
        seals = [seal_path(self.path, seal.stem) for seal in self.log.seal_index.seals]
        relied_on = [max(seals, key=_written_at)] if seals else []
        if self.log.trimmed() != NOTHING_TRIMMED:
            relied_on.append(self.path / TRIMMED)
        for path in relied_on:
            files.make_durable(path)

    def remove_trimmed(self, trimmed: TrimRecord) -> int:
        """Remove the files of trimmed rows and return their bytes.

        That includes files left by a process that died after it recorded them.
        """
        self.log.seal_index.refresh()
        seals = [*self.log.seal_index.seals, *self._replaced_seals()]
        covered = [file for seal in seals for file in seal.files if trimmed.is_trimmed(file.table, file.last_seq)]
        # On a full disk there is no room for other links either, until something is removed.
        with suppress(LogFull):
            self.update_links({file.table for file in covered})
        size = 0
        with files.explain_errors(self.path):
            for seal in seals:
                if seal.last <= trimmed.commit:
                    seal_path(self.path, seal.stem).unlink(missing_ok=True)
                    commits_path(self.path, seal.stem).unlink(missing_ok=True)
            for file in covered:
                path = self.path / file.file
                if files.file_exists(path):
                    path.unlink()
                    failpoints.hit("trim.removed")
                    size += file.size
        self.update_links({file.table for file in covered})
        return size

    def _replaced_seals(self) -> Iterator[Seal]:
        """Yield the seals that a wider one has replaced, as long as they exist."""
        chain = {seal.stem for seal in self.log.seal_index.seals}
        for _, _, stem in cold.seal_stems(self.path):
            if stem not in chain:
                with suppress(FileNotFoundError):
                    yield cold.read_seal(self.path, stem)

    # The glob.

    def update_links(self, tables: Iterable[int]) -> None:
        """Make the links of these tables' folders agree with the seals."""
        if isinstance(self.path, Path):
            with files.explain_errors(self.path / "cold"):
                self._write_links(self.path, tables)

    def _write_links(self, log: Path, tables: Iterable[int]) -> None:
        trimmed = self.log.trimmed()
        wanted: dict[int, dict[str, str]] = {table: {} for table in tables}
        for file in (file for seal in self.log.seal_index.seals for file in seal.files):
            if file.table in wanted and not trimmed.is_trimmed(file.table, file.last_seq):
                wanted[file.table][Path(file.file).name] = file.file
        for table, files_by_name in wanted.items():
            write_links(log, table, files_by_name)


def _files_of(log: LogPath, stem: str) -> tuple[SealedFile, ...]:
    try:
        return cold.read_seal(log, stem).files
    except FileNotFoundError:
        return ()


def _may_exist(path: LogPath) -> bool:
    """Return true if the name is taken, or may be.

    A store that does not answer has not said no.
    """
    try:
        return files.file_exists(path) if files.is_remote(path) else os.path.lexists(str(path))
    except OSError:
        return True


def _written_at(path: LogPath) -> float:
    """Return when a file was written.

    A missing file counts as new, so that nothing relies on it.
    """
    try:
        return files.modified_at(path)
    except FileNotFoundError:
        return time.time()


def _remove(path: LogPath) -> int:
    with files.explain_errors(path):
        files.delete_all([path])
    failpoints.hit("clean.removed")
    return 1
