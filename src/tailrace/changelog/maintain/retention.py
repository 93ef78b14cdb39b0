"""What the log lets go of: rows that are old enough, or too many, and that nobody needs.

Rows go by sealed file, the oldest of a table first, so what is gone of a table is always a beginning. A reader or a
lake table holds only files with rows of its own tables that it has not covered; one that has already lost rows
holds nothing more. The record of what is gone is durable before a file is removed.

`max_bytes` is kept by taking from whoever holds the most: one broken table never stops capture for the others.
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
"""Of `max_bytes`: room is made before it is needed."""


@dataclass(frozen=True, kw_only=True)
class RetentionPolicy:
    """How long and how much the log keeps of what nobody needs any more, and how much at all."""

    age_seconds: float | None = 7 * 86_400.0
    """Rows younger than this are kept, needed or not; None keeps them for ever."""
    bytes: int | None = None
    """Older rows than this many bytes hold are let go, whatever their age."""
    max_bytes: int | None = None
    """The log never takes more: who holds the most of it loses what it holds."""


@dataclass(frozen=True, kw_only=True)
class TrimResult:
    """What was let go."""

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
    """`live`; `expired`: not heard of for too long; `detached`: it has lost rows. Only a live one holds."""
    files: int
    rows: int
    bytes: int


@dataclass(frozen=True)
class _KeptFile:
    """A sealed file that is still there."""

    seal: Seal
    file: SealedFile


def hold_usages(change_log: ChangeLog, now: float | None = None) -> list[HoldUsage]:
    """Everyone who said what they need, and what that makes the log keep."""
    now = time.time() if now is None else now
    change_log.seal_index.refresh()
    gone = change_log.trimmed()
    kept = _kept(change_log, gone)
    found = []
    for hold in _holds(change_log):
        state = _state(change_log, hold, gone, now)
        mine = [item.file for item in kept if state == "live" and _needs(hold, item.file)]
        found.append(
            HoldUsage(
                hold=hold,
                state=state,
                files=len(mine),
                rows=sum(file.rows for file in mine),
                bytes=sum(file.size for file in mine),
            )
        )
    return found


def disk_bytes(path: LogPath) -> int:
    """What the log, or a folder of it, takes, but for what processes say in `status/`: letting go of rows makes no room
    there."""
    if isinstance(path, ObjectPath):
        with files.explain_errors(path):
            return sum(_log_sizes(path).values())
    size = 0
    for folder, below, names in os.walk(path):
        if Path(folder) == path and "status" in below:
            below.remove("status")
        for name in names:
            with suppress(FileNotFoundError):  # written aside, sealed or trimmed meanwhile
                size += os.lstat(os.path.join(folder, name)).st_size
    return size


def _log_sizes(path: LogPath) -> dict[LogPath, int]:
    status = f"{path}/status/"
    return {file: size for file, size in files.file_sizes(path).items() if not str(file).startswith(status)}


def _taken(sizes: dict[LogPath, int], paths: Iterable[LogPath]) -> int:
    """What files and folders take, as it was looked up once for all of them."""
    wanted = set(paths)
    return sum(size for file, size in sizes.items() if file in wanted or file.parent in wanted)


def trim(sealer: Sealer, policy: RetentionPolicy, now: float | None = None) -> TrimResult:
    """Let go of what the policy says; needs the lock of those who seal, as `sealer` does."""
    now = time.time() if now is None else now
    change_log = sealer.log
    change_log.seal_index.refresh()
    with files.explain_errors(change_log.path):
        stamp = files.read_stamp(change_log.path / TRIMMED_FILE)
    gone = change_log.trimmed()
    kept = _kept(change_log, gone)
    live = [hold for hold in _holds(change_log) if _state(change_log, hold, gone, now) == "live"]
    going = _old_enough(kept, live, policy.age_seconds, now)
    detached: list[RetentionHold] = []
    limits = [limit for limit in (policy.bytes, policy.max_bytes and int(policy.max_bytes * ROOM_RATIO)) if limit]
    if limits:
        # What seals have replaced goes by itself, and twice the room is not a reason to let go of rows.
        leaving, staying = set(sealer.removable_files()), sealer.replaced_files_kept()
        with files.explain_errors(change_log.path):
            sizes = _log_sizes(change_log.path)
            unsealed = _taken(sizes, sealer.unsealed_files({*leaving, *staying}))
        total = sum(sizes.values()) - _taken(sizes, leaving)
        twice = _taken(sizes, staying)
        going += _free(kept, live, going, total - _size(going) - min(limits))
        while policy.max_bytes and (over := total - _size(going) - int(policy.max_bytes * ROOM_RATIO)) > 0:
            worst = _worst(kept, live, going)
            left = _size(kept) - _size(going)
            if worst is None or over <= unsealed or left < over <= unsealed + twice:
                break  # what is too much is not sealed yet, or goes by itself, and nobody is detached in vain
            live.remove(worst)
            detached.append(worst)
            going += _free(kept, live, going, over)
    return _let_go(sealer, gone, stamp, going, detached)


def _holds(change_log: ChangeLog) -> list[RetentionHold]:
    change_log.schemas.load()
    return consumers.read_holds(change_log.path, change_log.schemas.numbers_named)


def _kept(change_log: ChangeLog, gone: TrimRecord) -> list[_KeptFile]:
    """The sealed files that are there, oldest rows first."""
    found = [
        _KeptFile(seal, file)
        for seal in change_log.seal_index.seals
        for file in seal.files
        if not gone.is_trimmed(file.table, file.last_seq)
    ]
    return sorted(found, key=lambda item: item.file.last_seq)


def _state(change_log: ChangeLog, hold: RetentionHold, gone: TrimRecord, now: float) -> str:
    if hold.is_expired(now):
        return "expired"
    lost = change_log.trimmed_tables(gone, hold.tables).values()
    needed = any(table.last_seq > hold.seq and table.commit > hold.commit for table in lost)
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
    """What nobody needs and is older than the policy keeps. A clock that jumps back only keeps more."""
    if age_seconds is None:
        return []
    before = (now - age_seconds) * 1e6
    return [item for item in kept if item.seal.written_to <= before and not _needed(item.file, live)]


def _free(kept: list[_KeptFile], live: list[RetentionHold], going: list[_KeptFile], over: int) -> list[_KeptFile]:
    """The oldest files that nobody needs, as many as make up so many bytes."""
    found: list[_KeptFile] = []
    already = {id(item) for item in going}
    for item in kept:
        if over <= 0:
            break
        if id(item) not in already and not _needed(item.file, live):
            found.append(item)
            over -= item.file.size
    return found


def _worst(kept: list[_KeptFile], live: list[RetentionHold], going: list[_KeptFile]) -> RetentionHold | None:
    """Who holds the most of what could otherwise go."""
    already = {id(item) for item in going}
    sizes = [
        (sum(item.file.size for item in kept if id(item) not in already and _needs(hold, item.file)), hold)
        for hold in live
    ]
    size, hold = max(sizes, key=lambda pair: pair[0], default=(0, None))
    return hold if size else None


def _let_go(
    sealer: Sealer, gone: TrimRecord, stamp: FileStamp | None, going: list[_KeptFile], detached: list[RetentionHold]
) -> TrimResult:
    after = _record(sealer.log, gone, going, detached)
    if after == gone:
        return TrimResult()
    for hold in detached:
        log.error(
            "detached from the log, which was about to grow past log.max_bytes: it must be read anew as a whole",
            extra={"kind": hold.kind, "who": hold.name},
        )
    write_trimmed(sealer.path, after, stamp)
    failpoints.hit("trim.recorded")
    removed = sealer.remove_trimmed(after)
    return TrimResult(
        commits=after.commit - gone.commit,
        files=len(going),
        rows=sum(item.file.rows for item in going),
        bytes=removed,
        detached=tuple(hold.name for hold in detached),
    )


def _record(
    change_log: ChangeLog, gone: TrimRecord, going: list[_KeptFile], detached: list[RetentionHold]
) -> TrimRecord:
    """What will be gone: these files, and every seal at the beginning that has none left."""
    tables = dict(gone.tables)
    for item in going:
        file, before = item.file, tables.get(item.file.table)
        taken = any(_needs(hold, file) for hold in detached)
        tables[file.table] = TrimmedTable(
            last_seq=file.last_seq,
            commit=file.last,
            rows=file.rows + (before.rows if before else 0),
            bytes=file.size + (before.bytes if before else 0),
            why="detached" if taken else "retention",
        )
    after = replace(gone, tables=tables)
    if not going:
        return after
    newest_gone = max(item.seal.last for item in going)
    for seal in change_log.seal_index.seals:
        if seal.last <= gone.commit:
            continue  # counted already: its removal failed or was cut short
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
