"""List, replay and drop dead letters on request.

Nothing here writes to a lake table. A request is a stored record; the applying process takes it, now or when it starts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from tailrace.changelog.read.reader import ChangeLog
from tailrace.changelog.write import log_lease
from tailrace.control.load_requests import suggest_tables
from tailrace.deadletters.step_file import CAUSE, CAUSE_CODE, CAUSE_FIELDS, HINT, REJECTED_AT, DeadLetterBatch
from tailrace.deadletters.store import DeadLetterStore, tables_with_dead_letters
from tailrace.errors import ConfigError, TailraceError
from tailrace.model import change
from tailrace.model.event import python_values
from tailrace.model.schema import TableId
from tailrace.pipeline.config.settings import PipelineSettings
from tailrace.pipeline.config.source_settings import matches
from tailrace.pipeline.report import TableState
from tailrace.pipeline.status import APPLIER_LEASE, known_tables, read_status_file

SEQ_MAX = (1 << 63) - 1


@dataclass(frozen=True, kw_only=True)
class DeadLetterEntry:
    """One change that its lake table could not take."""

    schema: str
    table: str
    seq: int
    position: str
    transaction: int
    committed_at: str
    operation: str
    code: str
    cause: str
    hint: str
    set_aside_at: str
    passed: bool = False
    """True if a later change of the row was applied.

    The change's own values can then no longer reach the table.
    """
    payload: dict[str, Any] | None = None
    """The values as the log has them; only on request."""

    @property
    def name(self) -> str:
        return f"{self.schema}.{self.table}"

    def to_json(self) -> dict[str, Any]:
        entry = dataclasses.asdict(self)
        if self.payload is None:
            del entry["payload"]
        return entry


@dataclass(frozen=True, kw_only=True)
class DeadLetterRequestResult:
    """The dead letters per table that are replayed or were dropped, and by which process."""

    tables: dict[TableId, int]
    apply_pid: int | None
    """The process that applies now; None: the next one that starts does it."""
    stopped: dict[TableId, str] = field(default_factory=dict)
    """Tables that this process has stopped, with the state of each."""
    unreplayable: dict[TableId, int] = field(default_factory=dict)
    """By table, the number of dead letters that cannot be replayed.

    The source no longer has what they hold.
    """


def list_dead_letters(
    settings: PipelineSettings, patterns: Sequence[str], *, payload: bool = False
) -> list[DeadLetterEntry]:
    """Return the open dead letters of matching tables, or of all: by table, oldest first."""
    log = ChangeLog.open(settings.log.path)
    return [
        entry
        for table in _matching(settings, log, patterns)
        for batches, passed in [_open(settings, log, table)]
        for batch in batches
        for entry in _shown(table, batch, passed, payload=payload)
    ]


def request_replay(settings: PipelineSettings, patterns: Sequence[str]) -> DeadLetterRequestResult:
    """Request a replay of dead letters."""
    log = ChangeLog.open(settings.log.path)
    tables, unreplayable = dict[TableId, int](), dict[TableId, int]()
    for table in _matching(settings, log, patterns):
        batches, passed = _open(settings, log, table)
        seqs = [seq for batch in batches for seq in batch.seqs]
        if count := sum(seq not in passed for seq in seqs):
            DeadLetterStore(log.path, table).request_replay()
            tables[table] = count
        if count < len(seqs):
            unreplayable[table] = len(seqs) - count
    pid = log_lease.live_holder_pid(log.path, APPLIER_LEASE)
    stored = read_status_file(log.path) if pid is not None else {}
    states = {table: TableState(stored[table]["state"]) for table in tables if table in stored}
    stopped = {table: state.value for table, state in states.items() if state.is_blocked}
    return DeadLetterRequestResult(tables=tables, apply_pid=pid, stopped=stopped, unreplayable=unreplayable)


def forget_dead_letters(
    settings: PipelineSettings, patterns: Sequence[str], seqs: Sequence[int] = ()
) -> DeadLetterRequestResult:
    """Drop dead letters of the matching tables for good, all or some by `_seq`."""
    if not patterns:
        raise ConfigError(
            "no table given whose dead letters to drop",
            hint="Name the table: `tailrace dead-letters FILE list public.orders --forget`.",
        )
    log = ChangeLog.open(settings.log.path)
    seqs_by_table = {
        table: [seq for batch in _open(settings, log, table)[0] for seq in batch.seqs]
        for table in _matching(settings, log, patterns)
    }
    known = {seq for table_seqs in seqs_by_table.values() for seq in table_seqs}
    if unknown := sorted(set(seqs) - known):
        raise ConfigError(
            "no open dead letter has this number",
            seq=unknown[0],
            hint="See `tailrace dead-letters FILE list` for their numbers.",
        )
    dropped = {
        table: [seq for seq in table_seqs if not seqs or seq in seqs] for table, table_seqs in seqs_by_table.items()
    }
    for table, table_seqs in dropped.items():
        if table_seqs:
            DeadLetterStore(log.path, table).forget(table_seqs)
    return DeadLetterRequestResult(
        tables={table: len(table_seqs) for table, table_seqs in dropped.items() if table_seqs},
        apply_pid=log_lease.live_holder_pid(log.path, APPLIER_LEASE),
    )


def _matching(settings: PipelineSettings, log: ChangeLog, patterns: Sequence[str]) -> list[TableId]:
    """Return the matching tables that have dead letters."""
    tables = set(tables_with_dead_letters(log.path))
    if not patterns:
        return sorted(tables)
    known = tables | known_tables(log)
    matching: set[TableId] = set()
    for pattern in patterns:
        only = settings.source.model_copy(update={"tables": (pattern,), "exclude": ()})
        matched = {table for table in known if matches(only, table) or str(table) == pattern}
        if not matched:
            raise ConfigError(f"`{pattern}` matches no table of this pipeline", hint=suggest_tables(pattern, known))
        matching |= matched & tables
    return sorted(matching)


def _open(settings: PipelineSettings, log: ChangeLog, table: TableId) -> tuple[list[DeadLetterBatch], frozenset[int]]:
    """Return the open dead letters of a table, and the `_seq`s of superseded ones.

    They depend on the table's applied position; without one, all are returned.
    """
    store, applied = DeadLetterStore(log.path, table), None
    with suppress(TailraceError):  # `tailrace status` reports problems of the table
        applied = settings.tables.layout.location(table, log.log_id).open_for_reading().applied_position()
    position = (SEQ_MAX, None) if applied is None else (applied.seq, applied.load)
    return store.read_open(*position), store.superseded(*position)


def _shown(table: TableId, batch: DeadLetterBatch, passed: frozenset[int], *, payload: bool) -> list[DeadLetterEntry]:
    causes = batch.rows.select(range(len(CAUSE_FIELDS))).to_pylist()
    changes = batch.changes.combine_chunks().to_batches()
    rows = [row for arrow_batch in changes for row in python_values(arrow_batch.to_struct_array())]
    return [
        DeadLetterEntry(
            schema=table.schema,
            table=table.name,
            seq=row[change.SEQ],
            position=row[change.POSITION],
            transaction=row[change.TX],
            committed_at=row[change.COMMITTED_AT].isoformat(),
            operation=row[change.OP],
            code=cause[CAUSE_CODE],
            cause=cause[CAUSE],
            hint=cause[HINT],
            set_aside_at=cause[REJECTED_AT].isoformat(),
            passed=row[change.SEQ] in passed,
            payload=_payload(batch, row) if payload else None,
        )
        for cause, row in zip(causes, rows, strict=True)
    ]


def _payload(batch: DeadLetterBatch, row: dict[str, Any]) -> dict[str, Any]:
    """Return the values by column name; unfit values as the source's text."""
    unfit = {entry["column"]: entry["text"] for entry in row[change.UNFIT] or ()}
    unsent = set(row[change.UNCHANGED] or ())
    values = {name: unfit.get(name, row[change.stored_name(name)]) for name in batch.schema.names if name not in unsent}
    payload = {
        "values": values,
        "unfit": sorted(unfit),
        "unchanged": sorted(unsent),
        "moved_from": row[change.MOVED_FROM],
    }
    return {name: _plain(value) for name, value in payload.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, bytes):
        return value.hex()
    return value if value is None or isinstance(value, (str, int, float, bool)) else str(value)
