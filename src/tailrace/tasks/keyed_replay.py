"""Replay dead letters by key. Refetch their rows from the source, and write them once the table has passed the read.

Invariant: a row is written as it is at the table's position, although it was read at another. That holds under two
conditions. The table has passed everything that the read saw, and the read saw every dead letter of the row. Every
change of the row since its first dead letter is a dead letter itself, because a whole change or a delete would have
cleared it. A row with a newer dead letter is refetched, and so are all rows after a reload of the table.

In `history` mode such a row is the version that its newest dead letter made. Earlier dead letters of the row are about
versions that no source has any more: they stay stored, marked as superseded.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tailrace import failpoints
from tailrace.capture.postgres.snapshot import SnapshotReader
from tailrace.deadletters.keyed import REPLAY_HINT
from tailrace.deadletters.step_file import DeadLetterBatch
from tailrace.deadletters.store import FOLDER, DeadLetterStore
from tailrace.errors import BaseRowMissing, TailraceError, TransformFailed, ValueUnfit, error_class
from tailrace.model import change
from tailrace.model.position import ZERO, Lsn
from tailrace.model.schema import TableId, TableSchema, table_token
from tailrace.storage import files
from tailrace.storage.files import LogPath
from tailrace.tables.delta.key_lookup import match_answers
from tailrace.tables.fold.folded_changes import key_ordinals
from tailrace.tables.fold.row_ids import key_numbers
from tailrace.tables.fold.whole_rows import fold_for_upsert
from tailrace.tables.limits import find_unstorable_rows
from tailrace.tables.location import TableLocation
from tailrace.tables.port import AppliedPosition
from tailrace.tables.spec import TableMode
from tailrace.tasks.dead_letters import keys_of_dead_letters
from tailrace.tasks.fold_files import FoldedFiles, write_folded
from tailrace.tasks.source_rows import fetch_rows
from tailrace.tasks.work import Outcome, as_tailrace_error

REFETCHED_FILE = "reread.rows"
_META = b"tailrace"
MISSING_AT_SOURCE_HINT = (
    "Check that the source has no row with this key, then drop the dead letter: `tailrace dead-letters FILE list TABLE "
    "--forget`."
)


@dataclass(frozen=True, kw_only=True)
class RefetchWork:
    """Refetch the rows of a table's open dead letters."""

    log: LogPath
    schema: TableSchema
    expected: AppliedPosition
    reader: SnapshotReader
    partition_by: Mapping[str, str] = field(default_factory=dict)
    """Partition columns of the lake table: name at the source to name in the lake."""


@dataclass(frozen=True, kw_only=True)
class ReplayRowsWork:
    """Write the refetched rows into the table, which has passed what the read saw."""

    log: LogPath
    location: TableLocation
    schema: TableSchema
    expected: AppliedPosition
    writes_rows: bool = True
    """False if Spark's connector has written the rows already."""


@dataclass(frozen=True, kw_only=True)
class StageReplayRowsWork:
    """Write the replayable rows to a file, for Spark's connector to merge."""

    work: ReplayRowsWork
    path: Path


@dataclass
class _RefetchResult:
    """Rows that a refetch returned, and errors of keys that failed."""

    rows: list[pa.Table] = field(default_factory=list)
    failed: dict[int, TailraceError] = field(default_factory=dict)
    """Error by the index of the key."""
    seen_until: Lsn = ZERO


def refetch_dead_letters(work: RefetchWork) -> Outcome:
    """Refetch the rows and store them with the dead letters. The outcome has the position that the table must pass."""
    table = work.schema.table
    try:
        bundles = DeadLetterStore(work.log, table).read_open_keys(work.expected.seq, work.expected.load)
        dead = keys_of_dead_letters(work.schema, bundles)
        names = [work.schema.columns[i].name for i in key_ordinals(work.schema)]
        numbers = key_numbers(dead.columns).numbers
        _, firsts, key_of_dead_letter = np.unique(numbers, return_index=True, return_inverse=True)
        keys = pa.Table.from_arrays([column.take(pa.array(firsts)) for column in dead.columns], names=names)
        fetched, transactions = (
            _RefetchResult(),
            [tx for bundle in bundles for tx in bundle.changes.column(change.TX).to_pylist()],
        )
        _read(work, keys, np.arange(keys.num_rows), sorted(set(transactions)), fetched)
        rows = pa.concat_tables([pa.schema(work.schema.row_fields()).empty_table(), *fetched.rows])
        answers = match_answers(keys, rows)
        _find_failures(work, rows, answers, fetched)
        keys_by_seq = zip(dead.seqs.tolist(), key_of_dead_letter.tolist(), strict=True)
        causes = {seq: fetched.failed[key] for seq, key in keys_by_seq if key in fetched.failed}
        found_rows = [int(answers[key]) for key in range(keys.num_rows) if key not in fetched.failed]
        _store_refetched(work, rows.take(pa.array(found_rows, pa.int64())), dead.seqs.tolist(), causes)
    except Exception as error:  # the task's boundary
        return Outcome(table=table, error=as_tailrace_error(error))
    return Outcome(table=table, rows=len(found_rows), seen_until=fetched.seen_until)


def _read(
    work: RefetchWork, keys: pa.Table, key_rows: Any, transactions: Sequence[int], result: _RefetchResult
) -> None:
    """Read the rows of some keys. If a row does not fit, read each half, down to the single key."""
    if not key_rows.size:
        return
    try:
        rows, seen_until = fetch_rows(work.reader, work.schema, keys.take(pa.array(key_rows)), transactions)
    except (ValueUnfit, TransformFailed) as error:
        if key_rows.size == 1:
            result.failed[int(key_rows[0])] = type(error)(error.message, hint=REPLAY_HINT, **error.fields)
            return
        half = key_rows.size // 2
        _read(work, keys, key_rows[:half], transactions, result)
        _read(work, keys, key_rows[half:], transactions, result)
        return
    result.rows.append(rows)
    result.seen_until = max(result.seen_until, seen_until)


def _find_failures(work: RefetchWork, rows: pa.Table, row_of_key: Any, fetched: _RefetchResult) -> None:
    """Record an error for each key without a row, and for each unstorable row."""
    schema = work.schema
    unstorable, _ = find_unstorable_rows(schema, rows.columns, rows.num_rows, work.partition_by)
    for key, row in enumerate(row_of_key.tolist()):
        if key in fetched.failed:
            continue
        if row < 0:
            fetched.failed[key] = BaseRowMissing(
                "the source has no row with this key", table=schema.table, hint=MISSING_AT_SOURCE_HINT
            )
        elif unstorable[row]:
            fetched.failed[key] = ValueUnfit(
                "a value of the row does not fit the table", table=schema.table, hint=REPLAY_HINT
            )


def _path(log: LogPath, table: TableId) -> LogPath:
    return log / FOLDER / table_token(table) / REFETCHED_FILE


def _store_refetched(work: RefetchWork, rows: pa.Table, seqs: list[int], causes: dict[int, TailraceError]) -> None:
    stored_causes = {
        str(seq): {
            "code": error.code,
            "message": error.message,
            "hint": error.hint,
            "fields": {name: str(value) for name, value in error.fields.items()},
        }
        for seq, error in causes.items()
    }
    meta = {"shape": work.schema.to_json(), "seqs": seqs, "causes": stored_causes, "load": work.expected.load}
    fields = rows.schema.with_metadata({_META: json.dumps(meta).encode()})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, fields) as writer:
        writer.write_table(rows.replace_schema_metadata(fields.metadata))
    path = _path(work.log, work.schema.table)
    with files.explain_errors(path):
        files.replace(path, sink.getvalue().to_pybytes())


def replay_rows(work: ReplayRowsWork) -> Outcome:
    """Write the replayable rows in one commit, then record the result for each dead letter."""
    started, table = time.monotonic(), work.schema.table
    store, path = DeadLetterStore(work.log, table), _path(work.log, work.schema.table)
    try:
        rows, meta = _load_refetched(path)
        store.recover(work.expected.load)
        if meta["load"] != work.expected.load or not TableSchema.from_json(meta["shape"]).same_rows(work.schema):
            return Outcome(table=table, needs_refetch=True)
        keys, read_seqs, version = store.read_open_keys(work.expected.seq), set(meta["seqs"]), None
        replayable = _replayable_rows(work.schema, rows, keys, read_seqs)
        if replayable.rows.num_rows and work.writes_rows:
            version = (
                work.location.open()
                .upsert_rows(work.schema, replayable.rows, work.expected, replayable.change_metadata)
                .version
            )
        failpoints.hit("letters.delivered")
        _record_results(store, work, replayable, meta["causes"], version)
        path.unlink(missing_ok=True)
        still_open = store.count(work.expected.seq)
    except Exception as error:  # the task's boundary
        return Outcome(table=table, error=as_tailrace_error(error))
    return Outcome(
        table=table,
        rows=len(replayable.newest_seqs) + len(replayable.earlier_seqs),
        seconds=time.monotonic() - started,
        dead_letters=still_open,
        version=version,
        needs_refetch=any(seq not in read_seqs for seq in keys_of_dead_letters(work.schema, keys).seqs.tolist()),
    )


def stage_replay_rows(stage_work: StageReplayRowsWork) -> FoldedFiles | TailraceError:
    """Write the rows that `replay_rows` would write to a file."""
    work = stage_work.work
    try:
        rows, meta = _load_refetched(_path(work.log, work.schema.table))
        if meta["load"] != work.expected.load or not TableSchema.from_json(meta["shape"]).same_rows(work.schema):
            return FoldedFiles()
        keys = DeadLetterStore(work.log, work.schema.table).read_open_keys(work.expected.seq, work.expected.load)
        replayable = _replayable_rows(work.schema, rows, keys, set(meta["seqs"]))
        spec = work.location.spec
        folded = fold_for_upsert(spec, work.schema, replayable.rows, work.expected, replayable.change_metadata)
        return write_folded(stage_work.path, spec.stored_schema(work.schema), folded, spec.partition_by)
    except Exception as error:  # the task's boundary
        return as_tailrace_error(error)


def _load_refetched(path: LogPath) -> tuple[pa.Table, dict[str, Any]]:
    """Return the refetched rows and their stored metadata."""
    with files.arrow_file(path) as file:
        rows = pa.ipc.open_file(file).read_all()
    return rows, json.loads(rows.schema.metadata[_META])


@dataclass(frozen=True, kw_only=True)
class _ReplayableRows:
    """Refetched rows that got no dead letter after the read."""

    rows: pa.Table
    change_metadata: pa.Table
    """Metadata columns of the newest dead letter of each row."""
    newest_seqs: list[int]
    """`_seq` of the newest dead letter of each row."""
    earlier_seqs: list[int]
    """`_seq` of the rows' other dead letters."""


def _replayable_rows(
    schema: TableSchema, rows: pa.Table, bundles: list[DeadLetterBatch], read_seqs: set[int]
) -> _ReplayableRows:
    dead = keys_of_dead_letters(schema, bundles)
    names = [schema.columns[i].name for i in key_ordinals(schema)]
    row_of_key = match_answers(pa.Table.from_arrays(dead.columns, names=names), rows.select(names))
    seqs_by_row = dict[int, list[int]]()
    for seq, row in zip(dead.seqs.tolist(), row_of_key.tolist(), strict=True):
        seqs_by_row.setdefault(row, []).append(seq)
    complete = sorted(row for row, seqs in seqs_by_row.items() if row >= 0 and read_seqs.issuperset(seqs))
    newest = [max(seqs_by_row[row]) for row in complete]
    metadata = pa.concat_tables(
        [
            pa.schema(change.REQUIRED).empty_table(),
            *(bundle.changes.select([one.name for one in change.REQUIRED]) for bundle in bundles),
        ]
    )
    indexes = pc.index_in(pa.array(newest, pa.int64()), value_set=metadata.column(change.SEQ))
    return _ReplayableRows(
        rows=rows.take(pa.array(complete, pa.int64())).replace_schema_metadata(None),
        change_metadata=metadata.take(indexes),
        newest_seqs=newest,
        earlier_seqs=[seq for row in complete for seq in seqs_by_row[row] if seq != max(seqs_by_row[row])],
    )


def _record_results(
    store: DeadLetterStore,
    work: ReplayRowsWork,
    replayable: _ReplayableRows,
    causes: dict[str, Any],
    version: int | None,
) -> None:
    """Clear the replayed dead letters, with the table version if known. Store the new cause of each that failed."""
    seq, empty = work.expected.seq, work.schema.change_schema().empty_table()
    keeps_versions = work.location.spec.mode is TableMode.HISTORY
    if replayable.newest_seqs:
        cleared = replayable.newest_seqs if keeps_versions else [*replayable.newest_seqs, *replayable.earlier_seqs]
        passed = replayable.earlier_seqs if keeps_versions else []
        store.write(work.schema, seq, empty, [], cleared, superseded=passed, already_applied=True, version=version)
    for bundle in store.read_open(seq, only=set(map(int, causes))):
        stored = [causes[str(number)] for number in bundle.seqs]
        errors = [
            error_class(entry["code"])(entry["message"], hint=entry["hint"], **entry["fields"]) for entry in stored
        ]
        store.write(bundle.schema, seq, bundle.changes, errors, [], origin=bundle.origin)
    store.remove_closed(seq)
