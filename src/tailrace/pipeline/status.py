"""Report the state of a pipeline as one value, for every kind of output.

It is computed from the log, from the tables' own commits and, if it answers, from the source. A running process knows
more: a load's progress, or why a table failed. It writes that to `status/apply.json`; nothing depends on that file for
correctness.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from tailrace.capture.port import Lag
from tailrace.capture.postgres.connect import redacted_url
from tailrace.capture.postgres.source import PostgresCapture
from tailrace.changelog.maintain.retention import disk_bytes
from tailrace.changelog.read import consumers
from tailrace.changelog.read.reader import ChangeLog
from tailrace.changelog.write import log_lease
from tailrace.deadletters.store import DeadLetterStore, may_have_dead_letters
from tailrace.errors import LogUnusable, TailraceError
from tailrace.model.position import Lsn
from tailrace.model.schema import TableId
from tailrace.pipeline.capture.source_factory import open_source, open_source_for_log
from tailrace.pipeline.config.settings import PipelineSettings
from tailrace.pipeline.report import (
    LoadResult,
    LoadStatus,
    LogStatus,
    PipelineStatus,
    SourceStatus,
    TableState,
    TableStatus,
)
from tailrace.pipeline.tables.managed_table import ManagedTable
from tailrace.pipeline.tables.registry import TableRegistry
from tailrace.storage import files
from tailrace.storage.files import LogPath
from tailrace.tables.port import AppliedPosition

APPLIER_LEASE = "applier"
"""Name of the lease of the one process that applies."""
STATUS_FILE = Path("status") / "apply.json"
_GONE_NOTE = "The source no longer has this table: it was dropped or renamed. The lake table stays as it is."
_UNPUBLISHED_NOTE = (
    "The publication lacks this table, so its changes are not captured. Run ALTER PUBLICATION … ADD TABLE …; then "
    "`tailrace snapshot FILE TABLE`, for rows written in between."
)
_DEAD_LETTERS_NOTE = (
    "Dead letters: {count}. The table could not take these changes, and their rows are as before them; see "
    "`tailrace dead-letters FILE list`."
)


class SourceWatch:
    """Asks the source for its end from time to time.

    An unreachable source is not a failure.
    """

    def __init__(self, source: PostgresCapture, every_seconds: float = 2.0) -> None:
        self._source = source
        self._every = every_seconds
        self._due = 0.0
        self._lag: Lag | None = None

    def lag(self) -> Lag | None:
        """Return the source's lag; None if the source does not answer."""
        if time.monotonic() >= self._due:
            try:
                self._lag = self._source.lag()
            except TailraceError:
                self._lag = None
            self._due = time.monotonic() + self._every
        return self._lag


def measure(
    settings: PipelineSettings,
    registry: TableRegistry,
    source: PostgresCapture,
    lag: Lag | None,
    merging_share: float | None = None,
) -> PipelineStatus:
    """Return the pipeline's current status."""
    log, index = registry.log, registry.index
    apply_pid, capture_pid = log_lease.live_holder_pid(log.path, APPLIER_LEASE), log_lease.live_holder_pid(log.path)
    end = max(lag.end, index.position) if lag else index.position
    return PipelineStatus(
        name=settings.name,
        running=bool(apply_pid or capture_pid),
        capture_pid=capture_pid,
        apply_pid=apply_pid,
        merging_share=merging_share,
        source=SourceStatus(
            reachable=lag is not None,
            place=redacted_url(settings.source.url),
            slot=source.settings.slot,
            slot_active=capture_pid is not None,
            retained_bytes=lag.retained_bytes if lag else None,
            position=str(lag.end) if lag else None,
        ),
        log=LogStatus(
            path=str(log.path),
            id=log.log_id,
            commits=index.last_commit,
            first_commit=index.first_commit if index.last_commit else None,
            last_commit=index.last_commit or None,
            position=str(index.position) if index.last_commit else None,
            bytes=index.bytes,
            last_seq=index.next_seq(index.last_commit) - 1,
        ),
        tables=tuple(_table(registry, managed, end) for _, managed in sorted(registry.tables.items())),
    )


def _table(registry: TableRegistry, managed: ManagedTable, end: Lsn) -> TableStatus:
    pending = registry.pending(managed, registry.index.last_commit)
    captured = sum(registry.index.rows_captured(number) for number in registry.log_numbers(managed))
    applied = managed.applied_position
    # A table with nothing pending has reached the end of the log, whatever its own last commit says.
    reached = (
        None if applied is None else (applied.position if pending else max(applied.position, registry.index.position))
    )
    state, error = managed.state, managed.error  # in this order: a failed table has its error by then
    is_reload = state is TableState.SEEDING and applied is not None
    if is_reload or (managed.load_status is not None and state.is_applying):
        state = TableState.REFRESHING
    load = managed.load_status
    if load is None and managed.catch_up_load is not None:
        mode = managed.last_load.mode if managed.last_load else "replace"
        load = LoadStatus(stage="replaying", way="chunked", mode=mode, rows=managed.rows_loaded)
    elif load is not None and load.stage == "waiting":
        load = replace(load, waiting_for=registry.waiting_for)
    dead_letters = 0 if applied is None else count_open_dead_letters(registry.log.path, managed.table, applied)
    notes = [
        managed.reload_error or managed.note,
        _DEAD_LETTERS_NOTE.format(count=dead_letters) if dead_letters else None,
    ]
    return TableStatus(
        schema=managed.table.schema,
        table=managed.table.name,
        state=state,
        load=load,
        last_load=managed.last_load,
        path=str(managed.location.path),
        mode=str(managed.location.spec),
        reason=error.code if error else None,
        detail=error.headline if error else None,
        hint=error.hint if error else None,
        note=" ".join(note for note in notes if note) or None,
        dead_letters=dead_letters,
        rows_captured=captured,
        rows_applied=captured - sum(item.rows for item in pending) if applied else 0,
        rows_loaded=managed.rows_loaded,
        load_rows_estimated=managed.rows_estimated,
        bytes_changed=managed.bytes_changed,
        bytes_written=managed.bytes_written,
        applied_commit=applied.commit if applied else None,
        applied_position=str(applied.position) if applied else None,
        lag_bytes=max(0, end - reached) if reached is not None else None,
        lag_seconds=max(0.0, time.time() - pending[0].committed_at / 1e6) if pending else (0.0 if applied else None),
    )


def count_open_dead_letters(log: LogPath, table: TableId, applied: AppliedPosition) -> int:
    """Return the number of open dead letters at an applied position.

    Return 0 where they cannot be read.
    """
    try:
        return DeadLetterStore(log, table).count(applied.seq, applied.load) if may_have_dead_letters(log, table) else 0
    except TailraceError:
        return 0


def write_status_file(path: LogPath, status: PipelineStatus) -> None:
    """Write the status for a `tailrace status` in another process."""
    document = {"tables": [table.to_json() for table in status.tables], "merging_share": status.merging_share}
    with suppress(OSError):
        files.replace(path / STATUS_FILE, json.dumps(document).encode())


def read_status_file(path: LogPath) -> dict[TableId, dict[str, Any]]:
    """Return what the applying process last wrote; empty if it cannot be read."""
    try:
        stored = json.loads((path / STATUS_FILE).read_bytes())
        return {TableId.from_json(table): table for table in stored["tables"]}
    except (OSError, ValueError, KeyError):
        return {}


def _read_share(path: LogPath) -> float | None:
    """Return the merging share that the applying process last wrote."""
    try:
        share = json.loads((path / STATUS_FILE).read_bytes()).get("merging_share")
    except (OSError, ValueError, AttributeError):
        return None
    return float(share) if isinstance(share, (int, float)) else None


def known_tables(log: ChangeLog) -> set[TableId]:
    """Return every table named in the log, by lake tables, or by the applying process."""
    log.schemas.load()
    reported = {hint.table for hint in consumers.read_table_progress(log.path)}
    return reported | {version.schema.table for version in log.schemas.latest()} | set(read_status_file(log.path))


def read_status(settings: PipelineSettings) -> PipelineStatus:
    """Return the status as seen from another process, whether the pipeline runs or not."""
    try:
        log = ChangeLog.open(settings.log.path)
    except LogUnusable:
        return _not_started(settings)
    source = open_source_for_log(settings, log)
    registry = TableRegistry(
        log, settings.tables.layout, settings.tables.policies_of, source.parse_value, logs_changes=False
    )
    registry.refresh_index()
    lag = SourceWatch(source).lag()
    stored = read_status_file(log.path)
    known = source.tables() if lag is not None else []
    for table in known:
        registry.add(table.table, table, settings.load.mode_of(table.table))
    for name in _unpublished(settings, source, registry) if known else ():
        registry.tables[name].note = _UNPUBLISHED_NOTE
    wanted = [version.schema.table for version in log.schemas.latest()] + list(stored)
    for name in wanted:
        if name not in registry.tables and settings.has(name):
            registry.add(name).note = _GONE_NOTE if lag is not None else None
    for managed in registry.tables.values():
        registry.next_range(managed, registry.index.last_commit)  # sets the state: live, behind or blocked
    status = measure(settings, registry, source, lag)
    return replace(
        status,
        merging_share=_read_share(log.path) if status.apply_pid is not None else None,
        log=replace(status.log, disk_bytes=disk_bytes(log.path)),
        tables=tuple(_with_stored_status(table, stored, status) for table in status.tables),
    )


def _unpublished(settings: PipelineSettings, source: PostgresCapture, registry: TableRegistry) -> set[TableId]:
    """Return loaded tables that are missing from a publication we may not change."""
    loaded = {
        managed.table
        for managed in registry.tables.values()
        if managed.applied_position is not None and not managed.load_only
    }
    return (
        loaded - source.publications_by_table().keys() if loaded and not settings.source.publication.create else set()
    )


def _with_stored_status(
    table: TableStatus, stored: dict[TableId, dict[str, Any]], status: PipelineStatus
) -> TableStatus:
    """Add what the applying process knows better.

    That is the state while it runs, and a failure after it stopped.
    """
    entry = stored.get(TableId(table.schema, table.table))
    if entry is None:
        return table
    table = replace(
        table,
        rows_loaded=entry["rows_loaded"],
        load=LoadStatus(**entry["load"]) if status.apply_pid is not None and entry.get("load") else table.load,
        last_load=LoadResult(**entry["last_load"]) if entry.get("last_load") else None,
        load_rows_estimated=table.load_rows_estimated or entry["load_rows_estimated"],
        bytes_changed=entry.get("bytes_changed", 0),
        bytes_written=entry.get("bytes_written", 0),
    )
    state = TableState(entry["state"])
    if table.state is TableState.NEEDS_SNAPSHOT:
        return table  # the log itself shows it, whatever stopped the table before
    if status.apply_pid is None and not state.is_blocked:
        return table
    return replace(table, state=state, reason=entry["reason"], detail=entry["detail"], hint=entry["hint"])


def _not_started(settings: PipelineSettings) -> PipelineStatus:
    """Return the status before the first start: there is no log, only the settings."""
    source = SourceStatus(reachable=False, place=redacted_url(settings.source.url))
    with suppress(TailraceError):
        lag = open_source(settings, "none").lag()
        source = replace(source, reachable=True, position=str(lag.end))
    return PipelineStatus(name=settings.name, running=False, source=source, log=LogStatus(path=str(settings.log.path)))
