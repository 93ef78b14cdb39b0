"""Dead letters tried again: their rows are read from the source, and put into the table once it may have them.

What must stay true: a row is put in as it is at the table's position, though it was read at another. That is so when
the table has passed all that the reading saw, and the reading saw every letter of the row: whatever happened to the
row since its first letter is a letter itself, for a whole change or a delete would have cleared it. A row that has got
another letter meanwhile is read again, and so are all of them if the table has been loaded anew.

In a table of versions such a row is the version that its newest letter made. The letters before that one are of
versions that nobody can bring any more: they stay, and have passed.
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
from tailrace.deadletters.store import FOLDER, DeadLetterBatch, DeadLetterStore
from tailrace.errors import BaseRowMissing, TailraceError, TransformFailed, ValueUnfit, error_class
from tailrace.model import change
from tailrace.model.position import ZERO, Lsn
from tailrace.model.schema import TableId, TableSchema, table_token
from tailrace.storage import files
from tailrace.storage.files import LogPath
from tailrace.tables.delta.key_lookup import match_answers
from tailrace.tables.fold.fold import key_ordinals
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
    "If the source has no row of this key, drop the letter: `tailrace dead-letters FILE list TABLE --forget`."
)


@dataclass(frozen=True, kw_only=True)
class RefetchWork:
    """Read the rows of a table's open letters again."""

    log: LogPath
    schema: TableSchema
    expected: AppliedPosition
    reader: SnapshotReader
    partition_by: Mapping[str, str] = field(default_factory=dict)
    """What the lake table is partitioned by: columns' names at the source and in the lake."""


@dataclass(frozen=True, kw_only=True)
class ReplayRowsWork:
    """Put the rows that were read into the table, which has passed what the reading saw."""

    log: LogPath
    location: TableLocation
    schema: TableSchema
    expected: AppliedPosition
    writes_rows: bool = True
    """Whether the rows are still to be put in."""


@dataclass(frozen=True, kw_only=True)
class StageReplayRowsWork:
    """Put the rows that may come in into a file, for Spark's connector to merge."""

    work: ReplayRowsWork
    path: Path


@dataclass
class _RefetchResult:
    """What a reading came to."""

    rows: list[pa.Table] = field(default_factory=list)
    failed: dict[int, TailraceError] = field(default_factory=dict)
    """By the key's place."""
    seen_until: Lsn = ZERO


def refetch_dead_letters(work: RefetchWork) -> Outcome:
    """Read, and keep what was read beside the letters; says what the table must pass."""
    table = work.schema.table
    try:
        bundles = DeadLetterStore(work.log, table).read_open_keys(work.expected.seq, work.expected.load)
        dead = keys_of_dead_letters(work.schema, bundles)
        names = [work.schema.columns[i].name for i in key_ordinals(work.schema)]
        numbers = key_numbers(dead.columns).numbers
        _, firsts, which = np.unique(numbers, return_index=True, return_inverse=True)
        keys = pa.Table.from_arrays([column.take(pa.array(firsts)) for column in dead.columns], names=names)
        read, transactions = (
            _RefetchResult(),
            [tx for bundle in bundles for tx in bundle.changes.column(change.TX).to_pylist()],
        )
        _read(work, keys, np.arange(keys.num_rows), sorted(set(transactions)), read)
        rows = pa.concat_tables([pa.schema(work.schema.row_fields()).empty_table(), *read.rows])
        answers = match_answers(keys, rows)
        _find_failures(work, rows, answers, read)
        whose = zip(dead.seqs.tolist(), which.tolist(), strict=True)
        causes = {seq: read.failed[key] for seq, key in whose if key in read.failed}
        good = [int(answers[key]) for key in range(keys.num_rows) if key not in read.failed]
        _store_refetched(work, rows.take(pa.array(good, pa.int64())), dead.seqs.tolist(), causes)
    except Exception as error:  # the task's boundary
        return Outcome(table=table, error=as_tailrace_error(error))
    return Outcome(table=table, rows=len(good), seen_until=read.seen_until)


def _read(work: RefetchWork, keys: pa.Table, some: Any, transactions: Sequence[int], into: _RefetchResult) -> None:
    """Read the rows of some keys; where one does not fit, each half by itself, until it is known which."""
    if not some.size:
        return
    try:
        rows, seen = fetch_rows(work.reader, work.schema, keys.take(pa.array(some)), transactions)
    except (ValueUnfit, TransformFailed) as error:
        if some.size == 1:
            into.failed[int(some[0])] = type(error)(error.message, hint=REPLAY_HINT, **error.fields)
            return
        half = some.size // 2
        _read(work, keys, some[:half], transactions, into)
        _read(work, keys, some[half:], transactions, into)
        return
    into.rows.append(rows)
    into.seen_until = max(into.seen_until, seen)


def _find_failures(work: RefetchWork, rows: pa.Table, answers: Any, read: _RefetchResult) -> None:
    """Rows that are not there, or that the table cannot hold."""
    shape = work.schema
    unheld, _ = find_unstorable_rows(shape, rows.columns, rows.num_rows, work.partition_by)
    for key, answer in enumerate(answers.tolist()):
        if key in read.failed:
            continue
        if answer < 0:
            read.failed[key] = BaseRowMissing(
                "the source has no row of this key", table=shape.table, hint=MISSING_AT_SOURCE_HINT
            )
        elif unheld[answer]:
            read.failed[key] = ValueUnfit(
                "a value of the row cannot be held by the table", table=shape.table, hint=REPLAY_HINT
            )


def _path(log: LogPath, table: TableId) -> LogPath:
    return log / FOLDER / table_token(table) / REFETCHED_FILE


def _store_refetched(work: RefetchWork, rows: pa.Table, seqs: list[int], causes: dict[int, TailraceError]) -> None:
    said = {
        str(seq): {
            "code": error.code,
            "message": error.message,
            "hint": error.hint,
            "fields": {name: str(value) for name, value in error.fields.items()},
        }
        for seq, error in causes.items()
    }
    meta = {"shape": work.schema.to_json(), "seqs": seqs, "causes": said, "load": work.expected.load}
    fields = rows.schema.with_metadata({_META: json.dumps(meta).encode()})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, fields) as writer:
        writer.write_table(rows.replace_schema_metadata(fields.metadata))
    path = _path(work.log, work.schema.table)
    with files.explain_errors(path):
        files.replace(path, sink.getvalue().to_pybytes())


def replay_rows(work: ReplayRowsWork) -> Outcome:
    """One commit of the rows that may come in, then what became of the letters."""
    started, table = time.monotonic(), work.schema.table
    letters, path = DeadLetterStore(work.log, table), _path(work.log, work.schema.table)
    try:
        rows, stored = _load_refetched(path)
        letters.recover(work.expected.load)
        if stored["load"] != work.expected.load or not TableSchema.from_json(stored["shape"]).same_rows(work.schema):
            return Outcome(table=table, needs_refetch=True)
        keys, read, version = letters.read_open_keys(work.expected.seq), set(stored["seqs"]), None
        ready = _replayable_rows(work.schema, rows, keys, read)
        if ready.rows.num_rows and work.writes_rows:
            version = (
                work.location.open().upsert_rows(work.schema, ready.rows, work.expected, ready.change_metadata).version
            )
        failpoints.hit("letters.delivered")
        _record_results(letters, work, ready, stored["causes"], version)
        path.unlink(missing_ok=True)
        left = letters.count(work.expected.seq)
    except Exception as error:  # the task's boundary
        return Outcome(table=table, error=as_tailrace_error(error))
    return Outcome(
        table=table,
        rows=len(ready.newest_seqs) + len(ready.earlier_seqs),
        seconds=time.monotonic() - started,
        dead_letters=left,
        version=version,
        needs_refetch=any(seq not in read for seq in keys_of_dead_letters(work.schema, keys).seqs.tolist()),
    )


def stage_replay_rows(asked: StageReplayRowsWork) -> FoldedFiles | TailraceError:
    """The rows that `deliver_letters` would put in, as a file."""
    work = asked.work
    try:
        rows, stored = _load_refetched(_path(work.log, work.schema.table))
        if stored["load"] != work.expected.load or not TableSchema.from_json(stored["shape"]).same_rows(work.schema):
            return FoldedFiles()
        keys = DeadLetterStore(work.log, work.schema.table).read_open_keys(work.expected.seq, work.expected.load)
        ready = _replayable_rows(work.schema, rows, keys, set(stored["seqs"]))
        form = work.location.spec
        whole = fold_for_upsert(form, work.schema, ready.rows, work.expected, ready.change_metadata)
        return write_folded(asked.path, form.stored_schema(work.schema), whole, form.partition_by)
    except Exception as error:  # the task's boundary
        return as_tailrace_error(error)


def _load_refetched(path: LogPath) -> tuple[pa.Table, dict[str, Any]]:
    """What was read, and what was noted of it."""
    with files.arrow_file(path) as handle:
        rows = pa.ipc.open_file(handle).read_all()
    return rows, json.loads(rows.schema.metadata[_META])


@dataclass(frozen=True, kw_only=True)
class _ReplayableRows:
    """Rows of which no letter came after they were read."""

    rows: pa.Table
    change_metadata: pa.Table
    """What the newest letter of each row says of itself."""
    newest_seqs: list[int]
    """`_seq` of those letters, row by row,"""
    earlier_seqs: list[int]
    """and of the rows' other ones."""


def _replayable_rows(
    shape: TableSchema, rows: pa.Table, bundles: list[DeadLetterBatch], read: set[int]
) -> _ReplayableRows:
    dead = keys_of_dead_letters(shape, bundles)
    names = [shape.columns[i].name for i in key_ordinals(shape)]
    answers = match_answers(pa.Table.from_arrays(dead.columns, names=names), rows.select(names))
    letters = dict[int, list[int]]()
    for seq, row in zip(dead.seqs.tolist(), answers.tolist(), strict=True):
        letters.setdefault(row, []).append(seq)
    whole = sorted(row for row, seqs in letters.items() if row >= 0 and read.issuperset(seqs))
    newest = [max(letters[row]) for row in whole]
    said = pa.concat_tables(
        [
            pa.schema(change.REQUIRED).empty_table(),
            *(bundle.changes.select([one.name for one in change.REQUIRED]) for bundle in bundles),
        ]
    )
    places = pc.index_in(pa.array(newest, pa.int64()), value_set=said.column(change.SEQ))
    return _ReplayableRows(
        rows=rows.take(pa.array(whole, pa.int64())).replace_schema_metadata(None),
        change_metadata=said.take(places),
        newest_seqs=newest,
        earlier_seqs=[seq for row in whole for seq in letters[row] if seq != max(letters[row])],
    )


def _record_results(
    letters: DeadLetterStore, work: ReplayRowsWork, ready: _ReplayableRows, causes: dict[str, Any], version: int | None
) -> None:
    """Clear what was delivered, in this version if it is known; what failed again has its new cause."""
    seq, empty = work.expected.seq, work.schema.change_schema().empty_table()
    every = work.location.spec.mode is TableMode.HISTORY
    if ready.newest_seqs:
        cleared = ready.newest_seqs if every else [*ready.newest_seqs, *ready.earlier_seqs]
        passed = ready.earlier_seqs if every else []
        letters.write(work.schema, seq, empty, [], cleared, passed=passed, there=True, version=version)
    for bundle in letters.read_open(seq, only=set(map(int, causes))):
        said = [causes[str(number)] for number in bundle.seqs]
        errors = [error_class(one["code"])(one["message"], hint=one["hint"], **one["fields"]) for one in said]
        letters.write(bundle.schema, seq, bundle.changes, errors, [], origin=bundle.origin)
    letters.remove_closed(seq)
