"""Trim rows that are old enough, or too many, and that no reader needs.

Rows are trimmed by sealed file, the oldest of a table first, so what is missing of a table is always its beginning. A
reader or a lake table holds only files with rows of its own tables that it has not covered. One that has already lost
rows holds nothing more. The record of trimmed rows is durable before a file is removed.

To enforce `max_bytes`, the reader or table that holds the most loses its hold: one broken table never stops capture for
the others.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from tailrace import failpoints
from tailrace.changelog.format.seal import Seal, SealedFile
from tailrace.changelog.format.trimmed import TRIMMED_FILE, TrimmedTable, TrimRecord, write_trimmed
from tailrace.changelog.maintain.sealer import Sealer
from tailrace.changelog.read import consumers
from tailrace.changelog.read.consumers import RetentionHold
from tailrace.changelog.read.reader import ChangeLog
from tailrace.storage import files
from tailrace.storage.files import FileStamp, LogPath
from tailrace.storage.objects import ObjectPath

log = logging.getLogger(__name__)

ROOM_RATIO = 0.9
"""Share of `max_bytes` at which room is made, before it is needed."""


@dataclass(frozen=True, kw_only=True)
class RetentionPolicy:
    """Limits for the rows that no reader needs any more, and for the whole log."""

    age_seconds: float | None = 7 * 86_400.0
    """Rows younger than this are kept, needed or not; None keeps rows for ever."""
    bytes: int | None = None
    """Rows beyond this many bytes are trimmed, whatever their age."""
    max_bytes: int | None = None
    """Size below which trimming keeps the log: the reader that holds the most loses its hold.

    Commits that are not sealed yet may exceed it for a while.
    """


@dataclass(frozen=True, kw_only=True)
class TrimResult:
    """The rows and files that were trimmed."""

    commits: int = 0
    files: int = 0
    rows: int = 0
    bytes: int = 0
    detached: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class HoldUsage:
    """One reader or lake table, and how much the log keeps for it."""

    hold: RetentionHold
    state: str
    """`live`, `expired` or `detached`; only a live one holds rows.

    Expired: no sign of it for too long. Detached: it has lost rows.
    """
    files: int
    rows: int
    bytes: int


@dataclass(frozen=True)
class _KeptFile:
    """A sealed file that still exists."""

    seal: Seal
    file: SealedFile


def hold_usages(change_log: ChangeLog, now: float | None = None) -> list[HoldUsage]:
    """Return every hold, and how much the log keeps for it."""
    now = time.time() if now is None else now
    change_log.seal_index.refresh()
    trimmed = change_log.trimmed()
    kept = _kept(change_log, trimmed)
    usages = []
    for hold in _holds(change_log):
        state = _state(change_log, hold, trimmed, now)
        held = [item.file for item in kept if state == "live" and _needs(hold, item.file)]
        usages.append(
            HoldUsage(
                hold=hold,
                state=state,
                files=len(held),
                rows=sum(file.rows for file in held),
                bytes=sum(file.size for file in held),
            )
        )
    return usages


def disk_bytes(path: LogPath) -> int:
    """Return the bytes of the log, or of a folder of it, without `status/`.

    Processes report their state there, and no trim makes room in it.
    """
    if isinstance(path, ObjectPath):
        with files.explain_errors(path):
            return sum(_log_sizes(path).values())
    size = 0
    for folder, below, names in os.walk(path):
        if Path(folder) == path and "status" in below:
            below.remove("status")
        for name in names:
            with suppress(FileNotFoundError):  # a temporary file, or sealed or trimmed meanwhile
                size += os.lstat(os.path.join(folder, name)).st_size
    return size


def _log_sizes(path: LogPath) -> dict[LogPath, int]:
    status = f"{path}/status/"
    return {file: size for file, size in files.file_sizes(path).items() if not str(file).startswith(status)}


def _bytes_of(sizes: dict[LogPath, int], paths: Iterable[LogPath]) -> int:
    """Return the bytes of files and folders, from sizes looked up once for all."""
    chosen = set(paths)
    return sum(size for file, size in sizes.items() if file in chosen or file.parent in chosen)


def trim(sealer: Sealer, policy: RetentionPolicy, now: float | None = None) -> TrimResult:
    """Trim what the policy says; `sealer` proves that the caller has the sealer's lease."""
    now = time.time() if now is None else now
    change_log = sealer.log
    change_log.seal_index.refresh()
    with files.explain_errors(change_log.path):
        stamp = files.read_stamp(change_log.path / TRIMMED_FILE)
    trimmed = change_log.trimmed()
    kept = _kept(change_log, trimmed)
    live = [hold for hold in _holds(change_log) if _state(change_log, hold, trimmed, now) == "live"]
    to_trim = _old_enough(kept, live, policy.age_seconds, now)
    detached: list[RetentionHold] = []
    limits = [limit for limit in (policy.bytes, policy.max_bytes and int(policy.max_bytes * ROOM_RATIO)) if limit]
    if limits:
        # Files that seals have replaced are removed anyway, and a copy of rows is no reason to trim them.
        removable, kept_replaced = set(sealer.removable_files()), sealer.replaced_files_kept()
        with files.explain_errors(change_log.path):
            sizes = _log_sizes(change_log.path)
            unsealed = _bytes_of(sizes, sealer.unsealed_files({*removable, *kept_replaced}))
        total = sum(sizes.values()) - _bytes_of(sizes, removable)
        kept_replaced_bytes = _bytes_of(sizes, kept_replaced)
        to_trim += _oldest_unneeded(kept, live, to_trim, total - _size(to_trim) - min(limits))
        while policy.max_bytes and (excess := total - _size(to_trim) - int(policy.max_bytes * ROOM_RATIO)) > 0:
            largest = _largest_hold(kept, live, to_trim)
            remaining = _size(kept) - _size(to_trim)
            if largest is None or excess <= unsealed or remaining < excess <= unsealed + kept_replaced_bytes:
                break  # the excess is not sealed yet or is removed anyway: to detach a reader would not help
            live.remove(largest)
            detached.append(largest)
            to_trim += _oldest_unneeded(kept, live, to_trim, excess)
    return _trim_files(sealer, trimmed, stamp, to_trim, detached)


def _holds(change_log: ChangeLog) -> list[RetentionHold]:
    change_log.schemas.load()
    return consumers.read_holds(change_log.path, change_log.schemas.numbers_named)


def _kept(change_log: ChangeLog, trimmed: TrimRecord) -> list[_KeptFile]:
    """Return the sealed files that exist, oldest rows first."""
    files_kept = [
        _KeptFile(seal, file)
        for seal in change_log.seal_index.seals
        for file in seal.files
        if not trimmed.is_trimmed(file.table, file.last_seq)
    ]
    return sorted(files_kept, key=lambda item: item.file.last_seq)


def _state(change_log: ChangeLog, hold: RetentionHold, trimmed: TrimRecord, now: float) -> str:
    if hold.is_expired(now):
        return "expired"
    trimmed_tables = change_log.trimmed_tables(trimmed, hold.tables).values()
    needed = any(table.last_seq > hold.seq and table.commit > hold.commit for table in trimmed_tables)
    return "detached" if needed else "live"


def _needs(hold: RetentionHold, file: SealedFile) -> bool:
    return hold.needs(file.table, file.last_seq, file.last)


def _needed(file: SealedFile, live: Iterable[RetentionHold]) -> bool:
    return any(_needs(hold, file) for hold in live)


def _size(items: Iterable[_KeptFile]) -> int:
    return sum(item.file.size for item in items)


def _old_enough(
    kept: list[_KeptFile], live: list[RetentionHold], age_seconds: float | None, now: float
) -> list[_KeptFile]:
    """Return the files that no reader needs and that are older than the policy keeps.

    A clock that jumps back only keeps more.
    """
    if age_seconds is None:
        return []
    before = (now - age_seconds) * 1e6
    return [item for item in kept if item.seal.written_to <= before and not _needed(item.file, live)]


def _oldest_unneeded(
    kept: list[_KeptFile], live: list[RetentionHold], to_trim: list[_KeptFile], excess: int
) -> list[_KeptFile]:
    """Return the oldest files that no reader needs, up to so many bytes."""
    chosen: list[_KeptFile] = []
    already = {id(item) for item in to_trim}
    for item in kept:
        if excess <= 0:
            break
        if id(item) not in already and not _needed(item.file, live):
            chosen.append(item)
            excess -= item.file.size
    return chosen


def _largest_hold(kept: list[_KeptFile], live: list[RetentionHold], to_trim: list[_KeptFile]) -> RetentionHold | None:
    """Return the hold with the most bytes that could otherwise be trimmed."""
    already = {id(item) for item in to_trim}
    sizes = [
        (sum(item.file.size for item in kept if id(item) not in already and _needs(hold, item.file)), hold)
        for hold in live
    ]
    size, hold = max(sizes, key=lambda pair: pair[0], default=(0, None))
    return hold if size else None


def _trim_files(
    sealer: Sealer, before: TrimRecord, stamp: FileStamp | None, to_trim: list[_KeptFile], detached: list[RetentionHold]
) -> TrimResult:
    after = _record(sealer.log, before, to_trim, detached)
    if after == before:
        return TrimResult()
    for hold in detached:
        log.error(
            "detached from the log, which was about to exceed log.max_bytes: its tables must be read again as a whole",
            extra={"kind": hold.kind, "who": hold.name},
        )
    write_trimmed(sealer.path, after, stamp)
    failpoints.hit("trim.recorded")
    removed = sealer.remove_trimmed(after)
    return TrimResult(
        commits=after.commit - before.commit,
        files=len(to_trim),
        rows=sum(item.file.rows for item in to_trim),
        bytes=removed,
        detached=tuple(hold.name for hold in detached),
    )


def _record(
    change_log: ChangeLog, trimmed: TrimRecord, to_trim: list[_KeptFile], detached: list[RetentionHold]
) -> TrimRecord:
    """Return the new trim record.

    It has these files, and every seal at the beginning of the log that has no file left.
    """
    tables = dict(trimmed.tables)
    for item in to_trim:
        file, before = item.file, tables.get(item.file.table)
        was_held = any(_needs(hold, file) for hold in detached)
        tables[file.table] = TrimmedTable(
            last_seq=file.last_seq,
            commit=file.last,
            rows=file.rows + (before.rows if before else 0),
            bytes=file.size + (before.bytes if before else 0),
            why="detached" if was_held else "retention",
        )
    after = replace(trimmed, tables=tables)
    if not to_trim:
        return after
    newest_gone = max(item.seal.last for item in to_trim)
    for seal in change_log.seal_index.seals:
        if seal.last <= trimmed.commit:
            continue  # counted already: its removal failed or was interrupted
        if seal.last > newest_gone or not all(after.is_trimmed(file.table, file.last_seq) for file in seal.files):
            break
        after = replace(
            after,
            commit=seal.last,
            position=seal.end,
            next_seq=seal.next_seq,
            transactions=after.transactions + seal.transactions,
            rows=after.rows + seal.rows,
        )
    return after
