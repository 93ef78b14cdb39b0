"""The state of a pipeline as one value, for the terminal, for `--json` and for any page.

It is put together from the log, from the tables' own commits and, if it answers, from the source. What a
running process knows beyond that (a load's progress, why a table failed) it leaves in `status/apply.json`;
nothing correct hangs on that file.
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
"""The lease of the one process that applies."""
STATUS_FILE = Path("status") / "apply.json"
_GONE_NOTE = "The source has no table of this name any more: it was dropped or renamed. The lake table stays as it is."
_UNPUBLISHED_NOTE = (
    "The publication does not have it, so its changes are not captured: ALTER PUBLICATION … ADD TABLE …; then "
    "`tailrace snapshot FILE TABLE`, for what was written meanwhile."
)
_LETTERS_NOTE = (
    "Dead letters: {count}. The table could not take these changes, and their rows stand as they were before; see "
    "`tailrace dead-letters FILE list`."
)


class SourceWatch:
    """Asks the source for its end now and then; an unreachable source is a fact, not a failure."""

    def __init__(self, source: PostgresCapture, every_seconds: float = 2.0) -> None:
        self._source = source
        self._every = every_seconds
        self._due = 0.0
        self._lag: Lag | None = None

    def lag(self) -> Lag | None:
        """How far the source is; None if it does not answer."""
        if time.monotonic() >= self._due:
            try:
                self._lag = self._source.lag()
            except TailraceError:
                self._lag = None
            self._due = time.monotonic() + self._every
        return self._lag


def measure(
    settings: PipelineSettings,
    lives: TableRegistry,
    source: PostgresCapture,
    lag: Lag | None,
    merging_share: float | None = None,
) -> PipelineStatus:
    """The pipeline now, from what is at hand."""
    log, index = lives.log, lives.index
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
        tables=tuple(_table(lives, life, end) for _, life in sorted(lives.tables.items())),
    )


def _table(lives: TableRegistry, life: ManagedTable, end: Lsn) -> TableStatus:
    pending = lives.pending(life, lives.index.last_commit)
    captured = sum(lives.index.rows_captured(number) for number in lives.log_numbers(life))
    cursor = life.applied_position
    # A table with nothing pending is as far as the log, wherever its own last commit lies.
    reached = None if cursor is None else (cursor.position if pending else max(cursor.position, lives.index.position))
    state, error = life.state, life.error  # in this order: what has failed has its error by then
    again = state is TableState.SEEDING and cursor is not None
    if again or (life.load_status is not None and state.is_applying):
        state = TableState.REFRESHING
    load = life.load_status
    if load is None and life.catch_up_load is not None:
        mode = life.last_load.mode if life.last_load else "replace"
        load = LoadStatus(stage="replaying", way="chunked", mode=mode, rows=life.rows_loaded)
    elif load is not None and load.stage == "waiting":
        load = replace(load, waiting_for=lives.waiting_for)
    letters = 0 if cursor is None else count_open_dead_letters(lives.log.path, life.table, cursor)
    notes = [life.reload_error or life.note, _LETTERS_NOTE.format(count=letters) if letters else None]
    return TableStatus(
        schema=life.table.schema,
        table=life.table.name,
        state=state,
        load=load,
        last_load=life.last_load,
        path=str(life.location.path),
        mode=str(life.location.spec),
        reason=error.code if error else None,
        detail=error.headline if error else None,
        hint=error.hint if error else None,
        note=" ".join(note for note in notes if note) or None,
        dead_letters=letters,
        rows_captured=captured,
        rows_applied=captured - sum(item.rows for item in pending) if cursor else 0,
        rows_loaded=life.rows_loaded,
        load_rows_estimated=life.rows_estimated,
        bytes_changed=life.bytes_changed,
        bytes_written=life.bytes_written,
        applied_commit=cursor.commit if cursor else None,
        applied_position=str(cursor.position) if cursor else None,
        lag_bytes=max(0, end - reached) if reached is not None else None,
        lag_seconds=max(0.0, time.time() - pending[0].committed_at / 1e6) if pending else (0.0 if cursor else None),
    )


def count_open_dead_letters(log: LogPath, table: TableId, cursor: AppliedPosition) -> int:
    """How many dead letters a table that stands there has; none where they cannot be read."""
    try:
        return DeadLetterStore(log, table).count(cursor.seq, cursor.load) if may_have_dead_letters(log, table) else 0
    except TailraceError:
        return 0


def write_status_file(path: LogPath, status: PipelineStatus) -> None:
    """For a `tailrace status` in another process."""
    note = {"tables": [table.to_json() for table in status.tables], "merging_share": status.merging_share}
    with suppress(OSError):
        files.replace(path / STATUS_FILE, json.dumps(note).encode())


def read_status_file(path: LogPath) -> dict[TableId, dict[str, Any]]:
    """What the applying process left last; nothing if it cannot be read."""
    try:
        stored = json.loads((path / STATUS_FILE).read_bytes())
        return {TableId.from_json(table): table for table in stored["tables"]}
    except (OSError, ValueError, KeyError):
        return {}


def _read_share(path: LogPath) -> float | None:
    """How much of the time merging took when the applying process last said so."""
    try:
        found = json.loads((path / STATUS_FILE).read_bytes()).get("merging_share")
    except (OSError, ValueError, AttributeError):
        return None
    return float(found) if isinstance(found, (int, float)) else None


def known_tables(log: ChangeLog) -> set[TableId]:
    """Every table that there is a word of: in the log, in what lake tables leave there, from whoever applies."""
    log.schemas.load()
    hinted = {hint.table for hint in consumers.read_table_progress(log.path)}
    return hinted | {version.schema.table for version in log.schemas.latest()} | set(read_status_file(log.path))


def read_status(settings: PipelineSettings) -> PipelineStatus:
    """The pipeline as seen from another process, running or not."""
    try:
        log = ChangeLog.open(settings.log.path)
    except LogUnusable:
        return _not_started(settings)
    source = open_source_for_log(settings, log)
    lives = TableRegistry(log, settings.tables.layout, settings.tables.policies_of, source.parse_value, tells=False)
    lives.refresh_index()
    lag = SourceWatch(source).lag()
    noted = read_status_file(log.path)
    known = source.tables() if lag is not None else []
    for table in known:
        lives.add(table.table, table, settings.load.mode_of(table.table))
    for name in _unpublished(settings, source, lives) if known else ():
        lives.tables[name].note = _UNPUBLISHED_NOTE
    wanted = [version.schema.table for version in log.schemas.latest()] + list(noted)
    for name in wanted:
        if name not in lives.tables and settings.has(name):
            lives.add(name).note = _GONE_NOTE if lag is not None else None
    for life in lives.tables.values():
        lives.next_range(life, lives.index.last_commit)  # says whether it is live, behind, or cannot go on
    status = measure(settings, lives, source, lag)
    return replace(
        status,
        merging_share=_read_share(log.path) if status.apply_pid is not None else None,
        log=replace(status.log, disk_bytes=disk_bytes(log.path)),
        tables=tuple(_with_note(table, noted, status) for table in status.tables),
    )


def _unpublished(settings: PipelineSettings, source: PostgresCapture, lives: TableRegistry) -> set[TableId]:
    """Loaded tables that a publication which is not ours to change does not have."""
    loaded = {life.table for life in lives.tables.values() if life.applied_position is not None and not life.load_only}
    return (
        loaded - source.publications_by_table().keys() if loaded and not settings.source.publication.create else set()
    )


def _with_note(table: TableStatus, noted: dict[TableId, dict[str, Any]], status: PipelineStatus) -> TableStatus:
    """What the applying process knows better: its state while it runs, and a failure after it stopped."""
    note = noted.get(TableId(table.schema, table.table))
    if note is None:
        return table
    table = replace(
        table,
        rows_loaded=note["rows_loaded"],
        load=LoadStatus(**note["load"]) if status.apply_pid is not None and note.get("load") else table.load,
        last_load=LoadResult(**note["last_load"]) if note.get("last_load") else None,
        load_rows_estimated=table.load_rows_estimated or note["load_rows_estimated"],
        bytes_changed=note.get("bytes_changed", 0),
        bytes_written=note.get("bytes_written", 0),
    )
    state = TableState(note["state"])
    if table.state is TableState.NEEDS_SNAPSHOT:
        return table  # the log itself says so, whatever stopped the table before
    if status.apply_pid is None and not state.is_blocked:
        return table
    return replace(table, state=state, reason=note["reason"], detail=note["detail"], hint=note["hint"])


def _not_started(settings: PipelineSettings) -> PipelineStatus:
    """Before the first start there is no log, so nothing but the settings is known."""
    source = SourceStatus(reachable=False, place=redacted_url(settings.source.url))
    with suppress(TailraceError):
        lag = open_source(settings, "none").lag()
        source = replace(source, reachable=True, position=str(lag.end))
    return PipelineStatus(name=settings.name, running=False, source=source, log=LogStatus(path=str(settings.log.path)))
