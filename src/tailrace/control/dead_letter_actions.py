"""What a person does with dead letters: look at them, have them tried again, drop them.

Nothing here writes to a lake table. Asking writes a record, which whoever applies takes up, now or when it is started.
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
from tailrace.deadletters.store import (
    CAUSE,
    CAUSE_CODE,
    CAUSE_FIELDS,
    HINT,
    REJECTED_AT,
    DeadLetterBatch,
    DeadLetterStore,
    tables_with_dead_letters,
)
from tailrace.errors import ConfigError, TailraceError
from tailrace.model import change
from tailrace.model.event import python_values
from tailrace.model.schema import TableId
from tailrace.pipeline.config.settings import PipelineSettings, matches
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
    """Whether its row has gone on without it: what it held can no longer come into the table."""
    payload: dict[str, Any] | None = None
    """The values as the log had them; only where they were asked for."""

    @property
    def name(self) -> str:
        return f"{self.schema}.{self.table}"

    def to_json(self) -> dict[str, Any]:
        found = dataclasses.asdict(self)
        if self.payload is None:
            del found["payload"]
        return found


@dataclass(frozen=True, kw_only=True)
class DeadLetterRequestResult:
    """How many letters of each table are to be tried again, or were dropped, and who does it."""

    tables: dict[TableId, int]
    apply_pid: int | None
    """The process that applies now; None: the next one that is started does it."""
    stopped: dict[TableId, str] = field(default_factory=dict)
    """Those of the tables that this process does not go on with, and the state that each is in."""
    unreplayable: dict[TableId, int] = field(default_factory=dict)
    """How many letters of tables cannot be tried again, for the source no longer has what they hold."""


def list_dead_letters(
    settings: PipelineSettings, patterns: Sequence[str], *, payload: bool = False
) -> list[DeadLetterEntry]:
    """The open letters of the tables that match, or of all; oldest first, table by table."""
    log = ChangeLog.open(settings.log.path)
    return [
        letter
        for table in _matching(settings, log, patterns)
        for bundles, passed in [_open(settings, log, table)]
        for bundle in bundles
        for letter in _shown(table, bundle, passed, payload=payload)
    ]


def request_replay(settings: PipelineSettings, patterns: Sequence[str]) -> DeadLetterRequestResult:
    """Have letters tried again."""
    log = ChangeLog.open(settings.log.path)
    tables, kept = dict[TableId, int](), dict[TableId, int]()
    for table in _matching(settings, log, patterns):
        bundles, passed = _open(settings, log, table)
        seqs = [seq for bundle in bundles for seq in bundle.seqs]
        if count := sum(seq not in passed for seq in seqs):
            DeadLetterStore(log.path, table).request_replay()
            tables[table] = count
        if count < len(seqs):
            kept[table] = len(seqs) - count
    pid = log_lease.live_holder_pid(log.path, APPLIER_LEASE)
    noted = read_status_file(log.path) if pid is not None else {}
    states = {table: TableState(noted[table]["state"]) for table in tables if table in noted}
    stopped = {table: state.value for table, state in states.items() if state.is_blocked}
    return DeadLetterRequestResult(tables=tables, apply_pid=pid, stopped=stopped, unreplayable=kept)


def forget_dead_letters(
    settings: PipelineSettings, patterns: Sequence[str], seqs: Sequence[int] = ()
) -> DeadLetterRequestResult:
    """Drop letters for good: those of the tables that match, or some of them by their `_seq`."""
    if not patterns:
        raise ConfigError(
            "which letters are to be dropped is not said",
            hint="Name the table: `tailrace dead-letters FILE list public.orders --forget`.",
        )
    log = ChangeLog.open(settings.log.path)
    found = {
        table: [seq for bundle in _open(settings, log, table)[0] for seq in bundle.seqs]
        for table in _matching(settings, log, patterns)
    }
    known = {seq for numbers in found.values() for seq in numbers}
    if wrong := sorted(set(seqs) - known):
        raise ConfigError(
            "there is no such open letter", seq=wrong[0], hint="`tailrace dead-letters FILE list` shows them all."
        )
    dropped = {table: [seq for seq in numbers if not seqs or seq in seqs] for table, numbers in found.items()}
    for table, numbers in dropped.items():
        if numbers:
            DeadLetterStore(log.path, table).forget(numbers)
    return DeadLetterRequestResult(
        tables={table: len(numbers) for table, numbers in dropped.items() if numbers},
        apply_pid=log_lease.live_holder_pid(log.path, APPLIER_LEASE),
    )


def _matching(settings: PipelineSettings, log: ChangeLog, patterns: Sequence[str]) -> list[TableId]:
    """The tables with letters that match."""
    tables = set(tables_with_dead_letters(log.path))
    if not patterns:
        return sorted(tables)
    known = tables | known_tables(log)
    found: set[TableId] = set()
    for pattern in patterns:
        only = settings.source.model_copy(update={"tables": (pattern,), "exclude": ()})
        some = {table for table in known if matches(only, table) or str(table) == pattern}
        if not some:
            raise ConfigError(f"`{pattern}` matches no table of this pipeline", hint=suggest_tables(pattern, known))
        found |= some & tables
    return sorted(found)


def _open(settings: PipelineSettings, log: ChangeLog, table: TableId) -> tuple[list[DeadLetterBatch], frozenset[int]]:
    """As the table itself says how far it is; where it does not, all there are. And which of them have passed."""
    letters, cursor = DeadLetterStore(log.path, table), None
    with suppress(TailraceError):  # what is wrong with the table `tailrace status` says
        cursor = settings.tables.layout.location(table, log.log_id).open_for_reading().applied_position()
    here = (SEQ_MAX, None) if cursor is None else (cursor.seq, cursor.load)
    return letters.read_open(*here), letters.superseded(*here)


def _shown(table: TableId, bundle: DeadLetterBatch, passed: frozenset[int], *, payload: bool) -> list[DeadLetterEntry]:
    causes = bundle.rows.select(range(len(CAUSE_FIELDS))).to_pylist()
    changes = bundle.changes.combine_chunks().to_batches()
    rows = [row for batch in changes for row in python_values(batch.to_struct_array())]
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
            payload=_payload(bundle, row) if payload else None,
        )
        for cause, row in zip(causes, rows, strict=True)
    ]


def _payload(bundle: DeadLetterBatch, row: dict[str, Any]) -> dict[str, Any]:
    """The values under their own names; what did not fit as the text that the source sent."""
    unfit = {entry["column"]: entry["text"] for entry in row[change.UNFIT] or ()}
    absent = set(row[change.UNCHANGED] or ())
    values = {
        name: unfit.get(name, row[change.stored_name(name)]) for name in bundle.schema.names if name not in absent
    }
    said = {"values": values, "unfit": sorted(unfit), "unchanged": sorted(absent), "moved_from": row[change.MOVED_FROM]}
    return {name: _plain(value) for name, value in said.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, bytes):
        return value.hex()
    return value if value is None or isinstance(value, (str, int, float, bool)) else str(value)
