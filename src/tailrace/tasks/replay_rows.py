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
from tailrace.changelog.format.coverage import token
from tailrace.deadletters.keyed import REPLAY_HINT
from tailrace.deadletters.store import FOLDER, Bundle, Letters
from tailrace.errors import BaseRowMissing, TailraceError, TransformFailed, ValueUnfit, kind_of
from tailrace.model import change
from tailrace.model.position import ZERO, Lsn
from tailrace.model.schema import TableId, TableSchema
from tailrace.storage import files
from tailrace.storage.files import LogPath
from tailrace.tables.delta.key_lookup import answers_to
from tailrace.tables.fold.fold import key_ordinals
from tailrace.tables.fold.row_ids import key_numbers
from tailrace.tables.fold.whole_rows import rows_to_put
from tailrace.tables.limits import unholdable
from tailrace.tables.location import Place
from tailrace.tables.port import Cursor
from tailrace.tables.spec import TableMode
from tailrace.tasks.dead_letters import dead_keys
from tailrace.tasks.fold_files import FoldedFiles, write_folded
from tailrace.tasks.work import Outcome, as_ours, read_rows

NAME = "reread.rows"
_META = b"tailrace"
GONE_HINT = "If the source has no row of this key, drop the letter: `tailrace dead-letters FILE list TABLE --forget`."


@dataclass(frozen=True, kw_only=True)
class RereadWork:
    """Read the rows of a table's open letters again."""

    log: LogPath
    shape: TableSchema
    expected: Cursor
    reader: SnapshotReader
    partition_by: Mapping[str, str] = field(default_factory=dict)
    """What the lake table is partitioned by: columns' names at the source and in the lake."""


@dataclass(frozen=True, kw_only=True)
class DeliverWork:
    """Put the rows that were read into the table, which has passed what the reading saw."""

    log: LogPath
    place: Place
    shape: TableSchema
    expected: Cursor
    put: bool = True
    """Whether the rows are still to be put in."""


@dataclass(frozen=True, kw_only=True)
class StageWork:
    """Put the rows that may come in into a file, for Spark's connector to merge."""

    work: DeliverWork
    path: Path


@dataclass
class _Read:
    """What a reading came to."""

    rows: list[pa.Table] = field(default_factory=list)
    failed: dict[int, TailraceError] = field(default_factory=dict)
    """By the key's place."""
    seen: Lsn = ZERO


def reread_letters(work: RereadWork) -> Outcome:
    """Read, and keep what was read beside the letters; says what the table must pass."""
    table = work.shape.table
    try:
        bundles = Letters(work.log, table).keys(work.expected.seq, work.expected.load)
        dead = dead_keys(work.shape, bundles)
        names = [work.shape.columns[i].name for i in key_ordinals(work.shape)]
        numbers = key_numbers(dead.columns).numbers
        _, firsts, which = np.unique(numbers, return_index=True, return_inverse=True)
        keys = pa.Table.from_arrays([column.take(pa.array(firsts)) for column in dead.columns], names=names)
        read, transactions = _Read(), [tx for bundle in bundles for tx in bundle.changes.column(change.TX).to_pylist()]
        _read(work, keys, np.arange(keys.num_rows), sorted(set(transactions)), read)
        rows = pa.concat_tables([pa.schema(work.shape.row_fields()).empty_table(), *read.rows])
        answers = answers_to(keys, rows)
        _judge(work, rows, answers, read)
        whose = zip(dead.seqs.tolist(), which.tolist(), strict=True)
        causes = {seq: read.failed[key] for seq, key in whose if key in read.failed}
        good = [int(answers[key]) for key in range(keys.num_rows) if key not in read.failed]
        _keep(work, rows.take(pa.array(good, pa.int64())), dead.seqs.tolist(), causes)
    except Exception as error:  # the task's boundary
        return Outcome(table=table, error=as_ours(error))
    return Outcome(table=table, rows=len(good), seen=read.seen)


def _read(work: RereadWork, keys: pa.Table, some: Any, transactions: Sequence[int], into: _Read) -> None:
    """Read the rows of some keys; where one does not fit, each half by itself, until it is known which."""
    if not some.size:
        return
    try:
        rows, seen = read_rows(work.reader, work.shape, keys.take(pa.array(some)), transactions)
    except (ValueUnfit, TransformFailed) as error:
        if some.size == 1:
            into.failed[int(some[0])] = type(error)(error.message, hint=REPLAY_HINT, **error.fields)
            return
        half = some.size // 2
        _read(work, keys, some[:half], transactions, into)
        _read(work, keys, some[half:], transactions, into)
        return
    into.rows.append(rows)
    into.seen = max(into.seen, seen)


def _judge(work: RereadWork, rows: pa.Table, answers: Any, read: _Read) -> None:
    """Rows that are not there, or that the table cannot hold."""
    shape = work.shape
    unheld, _ = unholdable(shape, rows.columns, rows.num_rows, work.partition_by)
    for key, answer in enumerate(answers.tolist()):
        if key in read.failed:
            continue
        if answer < 0:
            read.failed[key] = BaseRowMissing("the source has no row of this key", table=shape.table, hint=GONE_HINT)
        elif unheld[answer]:
            read.failed[key] = ValueUnfit(
                "a value of the row cannot be held by the table", table=shape.table, hint=REPLAY_HINT
            )


def _path(log: LogPath, table: TableId) -> LogPath:
    return log / FOLDER / token(table) / NAME


def _keep(work: RereadWork, rows: pa.Table, seqs: list[int], causes: dict[int, TailraceError]) -> None:
    said = {
        str(seq): {
            "code": error.code,
            "message": error.message,
            "hint": error.hint,
            "fields": {name: str(value) for name, value in error.fields.items()},
        }
        for seq, error in causes.items()
    }
    meta = {"shape": work.shape.to_json(), "seqs": seqs, "causes": said, "load": work.expected.load}
    fields = rows.schema.with_metadata({_META: json.dumps(meta).encode()})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, fields) as writer:
        writer.write_table(rows.replace_schema_metadata(fields.metadata))
    path = _path(work.log, work.shape.table)
    with files.explained(path):
        files.replace(path, sink.getvalue().to_pybytes())


def deliver_letters(work: DeliverWork) -> Outcome:
    """One commit of the rows that may come in, then what became of the letters."""
    started, table = time.monotonic(), work.shape.table
    letters, path = Letters(work.log, table), _path(work.log, work.shape.table)
    try:
        rows, stored = _kept(path)
        letters.settle(work.expected.load)
        if stored["load"] != work.expected.load or not TableSchema.from_json(stored["shape"]).same_rows(work.shape):
            return Outcome(table=table, again=True)
        keys, read, version = letters.keys(work.expected.seq), set(stored["seqs"]), None
        ready = _ready(work.shape, rows, keys, read)
        if ready.rows.num_rows and work.put:
            version = work.place.open().put(work.shape, ready.rows, work.expected, ready.said).version
        failpoints.hit("letters.delivered")
        _settle(letters, work, ready, stored["causes"], version)
        path.unlink(missing_ok=True)
        left = letters.count(work.expected.seq)
    except Exception as error:  # the task's boundary
        return Outcome(table=table, error=as_ours(error))
    return Outcome(
        table=table,
        rows=len(ready.newest) + len(ready.earlier),
        seconds=time.monotonic() - started,
        letters=left,
        version=version,
        again=any(seq not in read for seq in dead_keys(work.shape, keys).seqs.tolist()),
    )


def stage_letters(asked: StageWork) -> FoldedFiles | TailraceError:
    """The rows that `deliver_letters` would put in, as a file."""
    work = asked.work
    try:
        rows, stored = _kept(_path(work.log, work.shape.table))
        if stored["load"] != work.expected.load or not TableSchema.from_json(stored["shape"]).same_rows(work.shape):
            return FoldedFiles()
        keys = Letters(work.log, work.shape.table).keys(work.expected.seq, work.expected.load)
        ready = _ready(work.shape, rows, keys, set(stored["seqs"]))
        form = work.place.form
        whole = rows_to_put(form, work.shape, ready.rows, work.expected, ready.said)
        return write_folded(asked.path, form.stored(work.shape), whole, form.partition_by)
    except Exception as error:  # the task's boundary
        return as_ours(error)


def _kept(path: LogPath) -> tuple[pa.Table, dict[str, Any]]:
    """What was read, and what was noted of it."""
    with files.mapped(path) as handle:
        rows = pa.ipc.open_file(handle).read_all()
    return rows, json.loads(rows.schema.metadata[_META])


@dataclass(frozen=True, kw_only=True)
class _Ready:
    """Rows of which no letter came after they were read."""

    rows: pa.Table
    said: pa.Table
    """What the newest letter of each row says of itself."""
    newest: list[int]
    """`_seq` of those letters, row by row,"""
    earlier: list[int]
    """and of the rows' other ones."""


def _ready(shape: TableSchema, rows: pa.Table, bundles: list[Bundle], read: set[int]) -> _Ready:
    dead = dead_keys(shape, bundles)
    names = [shape.columns[i].name for i in key_ordinals(shape)]
    answers = answers_to(pa.Table.from_arrays(dead.columns, names=names), rows.select(names))
    letters = dict[int, list[int]]()
    for seq, row in zip(dead.seqs.tolist(), answers.tolist(), strict=True):
        letters.setdefault(row, []).append(seq)
    whole = sorted(row for row, seqs in letters.items() if row >= 0 and read.issuperset(seqs))
    newest = [max(letters[row]) for row in whole]
    said = pa.concat_tables(
        [
            pa.schema(change.ALWAYS).empty_table(),
            *(bundle.changes.select([one.name for one in change.ALWAYS]) for bundle in bundles),
        ]
    )
    places = pc.index_in(pa.array(newest, pa.int64()), value_set=said.column(change.SEQ))
    return _Ready(
        rows=rows.take(pa.array(whole, pa.int64())).replace_schema_metadata(None),
        said=said.take(places),
        newest=newest,
        earlier=[seq for row in whole for seq in letters[row] if seq != max(letters[row])],
    )


def _settle(letters: Letters, work: DeliverWork, ready: _Ready, causes: dict[str, Any], version: int | None) -> None:
    """Clear what was delivered, in this version if it is known; what failed again has its new cause."""
    seq, empty = work.expected.seq, work.shape.change_schema().empty_table()
    every = work.place.form.mode is TableMode.HISTORY
    if ready.newest:
        cleared = ready.newest if every else [*ready.newest, *ready.earlier]
        passed = ready.earlier if every else []
        letters.write(work.shape, seq, empty, [], cleared, passed=passed, there=True, version=version)
    for bundle in letters.open(seq, only=set(map(int, causes))):
        said = [causes[str(number)] for number in bundle.seqs]
        errors = [kind_of(one["code"])(one["message"], hint=one["hint"], **one["fields"]) for one in said]
        letters.write(bundle.shape, seq, bundle.changes, errors, [], origin=bundle.origin)
    letters.tidy(seq)
