"""Show, verify, seal and trim a log by hand, and list its readers.

Nothing here asks the source or starts Spark, and all of it works while capture runs. It does at once what the capture
process does automatically. It never removes rows that a table or reader still needs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from tailrace.changelog.format.commit_file import CommitHeader
from tailrace.changelog.format.trimmed import TrimRecord
from tailrace.changelog.maintain import retention
from tailrace.changelog.maintain.retention import ROOM_RATIO, HoldUsage, RetentionPolicy
from tailrace.changelog.maintain.sealer import SEALER_LEASE, Sealer
from tailrace.changelog.maintain.verify import verify as verify_log
from tailrace.changelog.read import consumers
from tailrace.changelog.read.index import LogIndex
from tailrace.changelog.read.reader import ChangeLog
from tailrace.changelog.write.log_lease import read_holder
from tailrace.control.schema_history_view import first_rows_of_versions
from tailrace.errors import ConfigError, LogBusy, LogError
from tailrace.model import change
from tailrace.model.system_streams import SCHEMA_STREAM_NUMBER
from tailrace.pipeline.report import (
    LoggedSchemaVersion,
    LoggedTable,
    LogOverview,
    LogProblem,
    LogReaderStatus,
    LogSealResult,
    LogTrimResult,
    LogVerifyResult,
)
from tailrace.storage.files import LogPath

WAIT_SECONDS = 30.0
"""Seconds to wait for another process that seals."""
LOOKS_MAX = 20
"""Tries to read a log that is sealed and trimmed at the same time."""

Progress = Callable[[int, int], None]


# ---- show ------------------------------------------------------------------------------------------------


def read_overview(path: LogPath) -> LogOverview:
    """Return what the log holds now."""
    log = ChangeLog.open(path)
    for _ in range(LOOKS_MAX):
        try:
            return _show(log)
        except LogError:
            # The log may have been sealed or trimmed while we counted; otherwise the error is real.
            if not log.seal_index.refresh():
                raise
    return _show(log)


@dataclass
class _Tally:
    """The counts of one table."""

    rows: int = 0
    bytes: int = 0
    files: int = 0
    first: int | None = None
    last: int | None = None

    def add(self, rows: int, size: int, first: int, last: int) -> None:
        self.rows += rows
        self.bytes += size
        self.first = first if self.first is None else min(self.first, first)
        self.last = last if self.last is None else max(self.last, last)


def _show(log: ChangeLog) -> LogOverview:
    newest = log.newest()
    trimmed, seals = log.trimmed(), log.seal_index.seals
    kept = [seal for seal in seals if seal.last > trimmed.commit]
    sealed = max(log.seal_index.last_commit, trimmed.commit)
    tallies: dict[int, _Tally] = {}
    for seal in kept:
        for file in seal.files:
            if not trimmed.is_trimmed(file.table, file.last_seq):
                tally = tallies.setdefault(file.table, _Tally())
                tally.add(file.rows, file.size, file.first, file.last)
                tally.files += 1
    begin = (kept[0].start, kept[0].written_from) if kept else None
    transactions = sum(seal.transactions for seal in kept)
    for header in log.headers(sealed, newest):
        begin = begin or (header.start, header.written_at)
        transactions += header.transactions
        for body in header.bodies:
            tally = tallies.setdefault(body.table, _Tally())
            tally.add(body.rows, body.size, header.commit, header.commit)
    last = log.last_header()
    holds = consumers.read_holds(log.path)
    source = log.source
    return LogOverview(
        path=str(log.path),
        id=log.log_id,
        source=f"{source.kind} {source.system}/{source.database}",
        first_commit=trimmed.commit + 1 if newest > trimmed.commit else None,
        last_commit=newest or None,
        sealed_commit=sealed or None,
        transactions=transactions,
        rows=sum(tally.rows for number, tally in tallies.items() if number != SCHEMA_STREAM_NUMBER),
        rows_trimmed=sum(table.rows for number, table in trimmed.tables.items() if number != SCHEMA_STREAM_NUMBER),
        start_position=str(begin[0] if begin else trimmed.position) if newest else None,
        end_position=str(last.end) if last else None,
        written_from=_time(begin[1]) if begin else None,
        written_to=_time(last.written_at) if last else None,
        committed_to=_committed_to(log, last),
        bytes=retention.disk_bytes(log.path),
        hot_bytes=retention.disk_bytes(log.path / "hot"),
        big_bytes=retention.disk_bytes(log.path / "big"),
        cold_bytes=retention.disk_bytes(log.path / "cold"),
        lake_tables=sum(hold.kind == "table" for hold in holds),
        consumers=sum(hold.kind == "consumer" for hold in holds),
        gaps=tuple(gap.commit for gap in log.gaps() if trimmed.commit < gap.commit <= newest),
        tables=_tables(log, trimmed, tallies),
    )


def _committed_to(log: ChangeLog, last: CommitHeader | None) -> str | None:
    """Return the source's commit time of the last transaction, if it is known."""
    if last is None:
        return None
    for commit in range(last.commit, max(log.seal_index.last_commit, last.commit - 100), -1):
        if (committed_at := log.header(commit).committed_at) is not None:
            return _time(committed_at)
    known = [seal.committed_at for seal in log.seal_index.seals if seal.committed_at is not None]
    return _time(known[-1]) if known else None


def _tables(log: ChangeLog, trimmed: TrimRecord, tallies: dict[int, _Tally]) -> tuple[LoggedTable, ...]:
    log.schemas.load()
    numbers = sorted(
        {SCHEMA_STREAM_NUMBER, *(version.table for version in log.schemas.latest()), *tallies, *trimmed.tables}
    )
    tables = []
    for number in numbers:
        tally = tallies.get(number, _Tally())
        trimmed_rows = trimmed.tables.get(number)
        if number == SCHEMA_STREAM_NUMBER and not tally.rows and trimmed_rows is None:
            continue  # no schema is recorded yet
        newest = log.schemas.latest_of(number)
        table = newest.schema.table
        tables.append(
            LoggedTable(
                number=number,
                schema=table.schema,
                table=table.name,
                versions=newest.version,
                rows=tally.rows,
                bytes=tally.bytes,
                files=tally.files,
                first_commit=tally.first,
                last_commit=tally.last,
                rows_trimmed=trimmed_rows.rows if trimmed_rows else 0,
            )
        )
    return tuple(tables)


def _time(microseconds: float) -> str:
    return datetime.fromtimestamp(microseconds / 1e6, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


# ---- schemas ---------------------------------------------------------------------------------------------


def read_schema_versions(path: LogPath) -> list[LoggedSchemaVersion]:
    """Return every version of every table's schema, by table."""
    log = ChangeLog.open(path)
    first_rows = first_rows_of_versions(log)
    log.schemas.load()
    versions = []
    for version in sorted(log.schemas.versions_after(0), key=lambda version: (version.table, version.version)):
        row, table = first_rows.get((version.table, version.version)), version.schema.table
        versions.append(
            LoggedSchemaVersion(
                number=version.table,
                schema=table.schema,
                table=table.name,
                version=version.version,
                position=row[change.POSITION] if row else None,
                committed_at=_time(row[change.COMMITTED_AT].timestamp() * 1e6) if row else None,
                definition=version.definition,
            )
        )
    return versions


# ---- verify ----------------------------------------------------------------------------------------------


def verify(path: LogPath, progress: Progress) -> LogVerifyResult:
    """Check every byte of the log; `progress` gets the bytes done and the total."""
    started = time.monotonic()
    result = verify_log(path, progress)
    return LogVerifyResult(
        path=str(path),
        ok=not result.flaws_total,
        commits=result.commits,
        rows=result.rows,
        files=result.files,
        bytes=result.bytes,
        seconds=time.monotonic() - started,
        problems_total=result.flaws_total,
        problems=tuple(LogProblem(path=str(flaw.path), message=flaw.message, hint=flaw.hint) for flaw in result.flaws),
    )


# ---- seal and trim ---------------------------------------------------------------------------------------


@contextmanager
def _sealer(path: LogPath) -> Iterator[Sealer]:
    """Yield a sealer once no other process seals.

    Capture seals too: every few seconds for a moment, and longer while there is much to seal.
    """
    try:
        sealer = Sealer(path, wait_seconds=WAIT_SECONDS)
    except LogBusy as error:
        raise LogBusy(
            "another process is sealing or trimming this log",
            path=path,
            **read_holder(path, SEALER_LEASE),
            hint="Wait until it is done, then try again. The capture process seals and trims automatically.",
        ) from error
    with sealer:
        yield sealer


def seal(path: LogPath, *, grace_seconds: float, progress: Progress) -> LogSealResult:
    """Seal every commit that exists now, then merge small seals.

    `progress` gets the commits done and the total.
    """
    started = time.monotonic()
    with _sealer(path) as sealer:
        done = sealer.seal(progress) + sealer.merge_seals() + sealer.clean(grace_seconds)
        return LogSealResult(
            commits=done.commits,
            rows=done.rows,
            bytes=done.bytes,
            seals=done.seals,
            joined=done.merged,
            removed=done.removed,
            sealed_commit=sealer.log.seal_index.last_commit or None,
            seconds=time.monotonic() - started,
        )


def trim(path: LogPath, policy: RetentionPolicy, *, older_than_seconds: float | None = None) -> LogTrimResult:
    """Remove what the policy allows and no reader needs.

    The log's size limit counts too, but not so far that a reader is detached. That is left to the capture process,
    which knows when there is no other way.
    """
    limits = [limit for limit in (policy.bytes, policy.max_bytes and int(policy.max_bytes * ROOM_RATIO)) if limit]
    gentle = replace(policy, bytes=min(limits, default=None), max_bytes=None)
    if older_than_seconds is not None:
        gentle = replace(gentle, age_seconds=older_than_seconds)
    with _sealer(path) as sealer:
        done = retention.trim(sealer, gentle)
        sealer.log.seal_index.refresh()
        newest, trimmed = sealer.log.newest(), sealer.log.trimmed()
        return LogTrimResult(
            commits=done.commits,
            files=done.files,
            rows=done.rows,
            bytes=done.bytes,
            first_commit=trimmed.commit + 1 if newest > trimmed.commit else None,
            unsealed_commits=newest - max(sealer.log.seal_index.last_commit, trimmed.commit),
            readers=_readers(sealer.log),
        )


# ---- readers ---------------------------------------------------------------------------------------------


def readers(path: LogPath) -> tuple[LogReaderStatus, ...]:
    """Return the lake tables and named consumers with their progress."""
    return _readers(ChangeLog.open(path))


def _readers(log: ChangeLog) -> tuple[LogReaderStatus, ...]:
    index = LogIndex(log)
    index.grow()
    log.schemas.load()
    names = {version.table: str(version.schema.table) for version in log.schemas.latest()}
    statuses = [_reader(index, names, item) for item in retention.hold_usages(log)]
    return tuple(sorted(statuses, key=lambda reader: (reader.kind == "consumer", reader.name)))


def _reader(index: LogIndex, names: dict[int, str], item: HoldUsage) -> LogReaderStatus:
    hold = item.hold
    numbers = tuple(names) if hold.tables is None else hold.tables
    pending = [
        entry
        for number in numbers
        for entry in index.pending(number, hold.seq, index.last_commit)
        if entry.last > hold.commit
    ]
    known = index.first_commit - 1 <= hold.commit <= index.last_commit
    return LogReaderStatus(
        kind=hold.kind,
        name=hold.name,
        state=item.state,
        commit=hold.commit,
        seq=hold.seq,
        tables=None if hold.tables is None else tuple(sorted({names.get(number, str(number)) for number in numbers})),
        position=str(index.end_of(hold.commit)) if known and hold.commit else None,
        behind_commits=max(0, index.last_commit - hold.commit),
        behind_rows=sum(entry.rows for entry in pending),
        held_bytes=item.bytes,
        seen_at=_time(hold.seen_at * 1e6),
        expires_at=None if hold.expires_seconds is None else _time((hold.seen_at + hold.expires_seconds) * 1e6),
    )


def forget_consumer(path: LogPath, name: str) -> None:
    """Release what the log keeps for a named consumer."""
    log = ChangeLog.open(path)
    held = {(hold.kind, hold.name) for hold in consumers.read_holds(log.path)}
    if ("table", name) in held and ("consumer", name) not in held:
        raise ConfigError(
            "this is a lake table, not a consumer",
            name=name,
            hint="The log keeps what the table has not applied yet. Exclude the table in the settings file and start "
            "again, or see `tailrace status FILE` for why it does not advance.",
        )
    consumers.forget_consumer(log.path, name)
