"""Folded rows put into a Delta table: the files that hold a row concerned are written anew, the others stay.

Two passes. The first reads the key's columns alone, of those files whose bounds do not exclude every key, and finds
what becomes of which row; the second copies the rows of the files where there is any such. Memory holds the folded
rows, the numbers of the rows concerned and a few row groups. Sameness of keys is what `identity` says, as in the fold.
Without a key rows are told apart by all they hold; where every row comes in besides no file is read.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from tailrace.errors import RELOAD_TABLE_HINT, BaseRowMissing
from tailrace.model import change
from tailrace.model.schema import Column, TableSchema
from tailrace.tables.delta.commit_log import data_path
from tailrace.tables.delta.diff import READ_ROWS, read_rows
from tailrace.tables.delta.key_lookup import CHUNK_BYTES_MAX, CHUNK_ROWS_MIN, base_row_missing, merge_source
from tailrace.tables.delta.schema_mapping import partition_values_of
from tailrace.tables.evolve.recast_columns import retained_columns
from tailrace.tables.fold.fold import (
    END_VERSION,
    MARK_DELETED,
    UPSERT,
    Flags,
    FoldedChanges,
    TruncateEffect,
    key_ordinals,
)
from tailrace.tables.fold.row_ids import Ints, image_numbers, integer_bits, key_numbers
from tailrace.tables.fold.whole_rows import operations
from tailrace.tables.partitions import PartitionValues
from tailrace.tables.spec import CURRENT, VALID_TO, TableMode, TableSpec

_REPLACED, _AMENDED, _GONE = 0, 1, 2
"""What becomes of a row of the table; one that is amended takes only the columns that its form adds."""


@dataclass(frozen=True, kw_only=True)
class _Concerned:
    """The rows of one file that do not stay as they are, in the file's order."""

    rows: Ints
    fates: npt.NDArray[np.int8]
    sources: Ints
    """The row of the source that each takes its values from."""

    def within(self, start: int, count: int) -> _Concerned | None:
        """Those among so many rows, counted from the first of them."""
        low, high = np.searchsorted(self.rows, [start, start + count]).tolist()
        if low == high:
            return None
        return _Concerned(rows=self.rows[low:high] - start, fates=self.fates[low:high], sources=self.sources[low:high])


@dataclass(frozen=True, kw_only=True)
class RewritePlan:
    """What becomes of a table; `plan` makes it."""

    folder: Path
    stored: TableSchema
    """The columns of the table, those included that only it has: they stay with the rows that stay."""
    source: _FoldedSource
    files: Mapping[str, _Concerned]
    """Those to be written anew, smallest first,"""
    removed_files: Sequence[str]
    """all that the table then holds no more,"""
    inserted_rows: Ints
    """and the source's rows that come in besides."""
    partition_values: PartitionValues
    """What is not in the files, because all rows of a partition have it."""

    def parts(self) -> Iterator[Iterator[pa.RecordBatch]]:
        """What to write: the rows of each file, and with the first those that come in."""
        for number, (name, concerned) in enumerate(self.files.items()):
            yield self._copied(name, concerned, with_fresh=number == 0)
        if self.inserted_rows.size and not self.files:
            yield self._fresh()

    def _copied(self, name: str, concerned: _Concerned, *, with_fresh: bool) -> Iterator[pa.RecordBatch]:
        start = 0
        for batch in read_rows(self.folder / name, self.stored.columns, self.partition_values.get(name, {})):
            here = concerned.within(start, batch.num_rows)
            yield batch if here is None else self.source.put_into(batch, here)
            start += batch.num_rows
        if with_fresh:
            yield from self._fresh()

    def _fresh(self) -> Iterator[pa.RecordBatch]:
        fields = pa.schema(self.stored.row_fields())
        own = self.source.own
        for start in range(0, self.inserted_rows.size, READ_ROWS):
            for batch in own.take(pa.array(self.inserted_rows[start : start + READ_ROWS])).to_batches():
                others = [pa.nulls(batch.num_rows, kind) for kind in fields.types[own.num_columns :]]
                yield pa.RecordBatch.from_arrays([*batch.columns, *others], schema=fields)


@dataclass(frozen=True, kw_only=True)
class _FoldedSource:
    """The folded rows as they are put into a table."""

    own: pa.Table
    """The columns of the shape,"""
    operations: npt.NDArray[np.int8]
    keeps: Mapping[int, Flags]
    """of those whose value the table's own row may keep where it does,"""
    added: frozenset[int]
    """and those that an amended row takes."""
    ended: int | None
    """The row that every row is amended with which no other is about; no row of its own."""

    @classmethod
    def of(cls, form: TableSpec, schema: TableSchema, table: DeltaTable, folded: FoldedChanges) -> _FoldedSource:
        history = form.mode is TableMode.HISTORY
        rows, kept = merge_source(schema, table, folded.rows, only=CURRENT if history else None)
        rows = rows.combine_chunks()
        own = rows.select(range(len(schema.columns)))
        added = {VALID_TO, CURRENT} if history else {column.name for column in form.added_columns}
        return cls(
            own=own
            if folded.truncate_effect is None
            else pa.concat_tables([own, _ended_row(schema, own.schema, folded.truncate_effect)]),
            operations=rows.column("op").to_numpy(),
            keeps={i: np.append(rows.column(f"k{i}").to_numpy(), False) for i in kept},
            added=frozenset(i for i, name in enumerate(schema.names) if name in added),
            ended=None if folded.truncate_effect is None else rows.num_rows,
        )

    @classmethod
    def plain(cls, schema: TableSchema, folded: FoldedChanges) -> _FoldedSource:
        """Rows that take no value from the table; one that lacks some is an error."""
        if folded.partial:
            raise base_row_missing(schema, folded.rows.column("absent").is_null().to_numpy())
        own = folded.rows.select(range(len(schema.columns))).combine_chunks()
        return cls(own=own, operations=operations(folded), keeps={}, added=frozenset(), ended=None)

    def put_into(self, batch: pa.RecordBatch, concerned: _Concerned) -> pa.RecordBatch:
        """The rows of a file's batch as they are to be."""
        lives = concerned.fates != _GONE
        stays = np.ones(batch.num_rows, np.bool_)
        stays[concerned.rows[~lives]] = False
        rows, sources = concerned.rows[lives], concerned.sources[lives]
        replaced = concerned.fates[lives] == _REPLACED
        own = self.own.take(pa.array(sources))

        def places(takes: Flags) -> Any:
            """Where each row's value stands: among the batch's own or, after them, among those that come."""
            found = np.arange(batch.num_rows)
            found[rows[takes]] = batch.num_rows + np.flatnonzero(takes)
            return pa.array(found[stays])

        usual, unchanged = places(replaced), places(np.zeros(rows.size, np.bool_))
        columns = []
        for ordinal, column in enumerate(batch.columns):
            if ordinal >= own.num_columns:
                columns.append(column.take(unchanged))
                continue
            at = usual
            if ordinal in self.keeps or ordinal in self.added:
                takes = replaced | (ordinal in self.added)
                at = places(takes & ~self.keeps[ordinal][sources] if ordinal in self.keeps else takes)
            columns.append(pa.concat_arrays([column, *own.column(ordinal).chunks]).take(at))
        return pa.RecordBatch.from_arrays(columns, schema=batch.schema)


def _ended_row(schema: TableSchema, fields: pa.Schema, ended: TruncateEffect) -> pa.Table:
    values = [
        pa.array([ended.values[column.name].as_py() if column.name in ended.values else None], column.type)
        for column in schema.columns
    ]
    return pa.Table.from_arrays(values, schema=fields)


def plan_rewrite(
    form: TableSpec, schema: TableSchema, folder: Path, table: DeltaTable, folded: FoldedChanges
) -> RewritePlan:
    """Find the rows that rows of the table's own shape concern. The files are as the table was opened."""
    rules: _MirrorRules | _HistoryRules | _KeylessRules
    if folded.truncated or not schema.key:
        rules = _KeylessRules(schema, _FoldedSource.plain(schema, folded), folded)
    elif form.mode is TableMode.HISTORY:
        rules = _HistoryRules(schema, _FoldedSource.of(form, schema, table, folded), folded)
    else:
        rules = _MirrorRules(form, schema, _FoldedSource.of(form, schema, table, folded))
    adds = pa.table(table.get_add_actions(flatten=True)).sort_by("size_bytes")
    source, parts = rules.source, partition_values_of(table, adds)
    names = list(map(data_path, adds.column("path").to_pylist()))
    files = dict[str, _Concerned]()
    maybe = np.ones(adds.num_rows, np.bool_) if source.ended is not None else _may_hold(adds, rules.sought)
    for name in itertools.compress(names, maybe):
        shared = parts.get(name, {})
        if rules.may_concern(shared) and (concerned := _look_at(folder / name, rules, shared)) is not None:
            files[name] = concerned
    return RewritePlan(
        folder=folder,
        stored=replace(schema, columns=(*schema.columns, *retained_columns(table, schema)), facts=None),
        source=source,
        files=files,
        removed_files=names if folded.truncated else list(files),
        inserted_rows=rules.fresh(),
        partition_values=parts,
    )


def _look_at(
    path: Path, rules: _MirrorRules | _HistoryRules | _KeylessRules, said: Mapping[str, pa.Scalar]
) -> _Concerned | None:
    """The rows of one file that are concerned; None if there are none."""
    found, start = list[tuple[Ints, Any, Ints]](), 0
    for piece in _pieces(read_rows(path, rules.columns, said), rules.sought.count):
        rows, fates, sources = rules.fates(piece, rules.sought.find(piece))
        found.append((rows + start, fates, sources))
        start += piece.num_rows
    rows, fates, sources = (np.concatenate([part[i] for part in found] or [np.empty(0, np.int64)]) for i in range(3))
    return _Concerned(rows=rows, fates=fates.astype(np.int8), sources=sources) if rows.size else None


def _pieces(batches: Iterable[pa.RecordBatch], rows_wanted: int) -> Iterator[pa.Table]:
    """Rows in pieces large enough that looking for the wanted ones in each costs little more than reading it."""
    pending, rows, size = list[pa.RecordBatch](), 0, 0
    for batch in batches:
        pending.append(batch)
        rows, size = rows + batch.num_rows, size + batch.nbytes
        if size >= CHUNK_BYTES_MAX and rows >= max(CHUNK_ROWS_MIN, rows_wanted):
            yield pa.Table.from_batches(pending)
            pending, rows, size = [], 0, 0
    if pending:
        yield pa.Table.from_batches(pending)


class _Sought:
    """Keys to be found, each the key of one row of the source."""

    def __init__(self, schema: TableSchema, own: pa.Table, which: Ints) -> None:
        self.key = [schema.columns[i] for i in key_ordinals(schema)]
        self.values = [own.column(i).take(pa.array(which)) for i in key_ordinals(schema)]
        self.count = which.size
        self._which = which

    def find(self, piece: pa.Table) -> Ints:
        """For each row the source's row with its key; -1 if there is none."""
        if not self.count:
            return np.full(piece.num_rows, -1, np.int64)
        pairs = zip(self.values, self.key, strict=True)
        numbered = key_numbers(
            [pa.chunked_array([*wanted.chunks, *piece.column(key.name).chunks], key.type) for wanted, key in pairs]
        )
        row_of = np.full(numbered.limit, -1, np.int64)
        row_of[numbered.numbers[: self.count]] = self._which
        found: Ints = row_of[numbered.numbers[self.count :]]
        return found


class _Images:
    """Rows to be found by all that they hold."""

    key: Sequence[Column] = ()

    def __init__(self, rows: pa.Table) -> None:
        self.count = rows.num_rows
        self.values = rows.columns

    def find(self, piece: pa.Table) -> Ints:
        """For each row the number of the image that it is; -1 if it is none."""
        numbered = image_numbers(
            [
                pa.chunked_array([*wanted.chunks, *there.chunks], wanted.type)
                for wanted, there in zip(self.values, piece.columns, strict=True)
            ]
        )
        image_of = np.full(numbered.limit, -1, np.int64)
        image_of[numbered.numbers[: self.count]] = np.arange(self.count)
        found: Ints = image_of[numbered.numbers[self.count :]]
        return found


class _MirrorRules:
    """A mirror: one row for each key."""

    def __init__(self, form: TableSpec, schema: TableSchema, source: _FoldedSource) -> None:
        self.sought = _Sought(schema, source.own, np.arange(source.operations.size))
        self._mark = form.deleted_column if form.soft_delete else None
        self.columns = [*self.sought.key, *(c for c in schema.columns if c.name == self._mark)]
        self.source = source
        self._seen = np.zeros(source.operations.size, np.bool_)
        self._schema = schema

    def may_concern(self, _shared: Mapping[str, pa.Scalar]) -> bool:
        """Whether rows with these values in common may be concerned."""
        return True

    def fates(self, piece: pa.Table, at: Ints) -> tuple[Ints, Any, Ints]:
        rows = np.flatnonzero(at >= 0)
        operations = self.source.operations[at[rows]]
        self._seen[at[rows]] = True
        fate_of = np.array([_REPLACED, _GONE, 0, _AMENDED], np.int8)
        fates, sources = fate_of[operations], at[rows]
        if self._mark is None:
            return rows, fates, sources
        there = ~piece.column(self._mark).to_numpy()
        counts = (operations != MARK_DELETED) | there[rows]
        rows, fates, sources = rows[counts], fates[counts], sources[counts]
        if (ended := self.source.ended) is None:
            return rows, fates, sources
        return _also(rows, fates, sources, np.flatnonzero(there & (at < 0)), _AMENDED, ended)

    def fresh(self) -> Ints:
        """A row that keeps values of one that is not there is an error."""
        size = self.source.operations.size
        partial = np.logical_or.reduce([flags[:size] for flags in self.source.keeps.values()], initial=False)
        if (lost := partial & ~self._seen).any():
            raise base_row_missing(self._schema, ~lost)
        return np.flatnonzero((self.source.operations == UPSERT) & ~self._seen)


class _HistoryRules:
    """A history: what comes in stands beside what is there. Of that only current versions end, or go if what ends them
    is the transaction that they are from."""

    def __init__(self, schema: TableSchema, source: _FoldedSource, folded: FoldedChanges) -> None:
        self.sought = _Sought(schema, source.own, np.flatnonzero(source.operations == END_VERSION))
        self.columns = [*self.sought.key, *(c for c in schema.columns if c.name in (CURRENT, change.TX))]
        self.source, self._ended = source, folded.truncate_effect
        self._txs = source.own.column(schema.names.index(change.TX)).to_numpy()

    def may_concern(self, shared: Mapping[str, pa.Scalar]) -> bool:
        """Whether rows with these values in common may be concerned."""
        return CURRENT not in shared or bool(shared[CURRENT].as_py())

    def fates(self, piece: pa.Table, at: Ints) -> tuple[Ints, Any, Ints]:
        current, txs = piece.column(CURRENT).to_numpy(), piece.column(change.TX).to_numpy()
        rows = np.flatnonzero(current & (at >= 0))
        fates = np.where(txs[rows] == self._txs[at[rows]], _GONE, _AMENDED)
        if self._ended is None or self.source.ended is None:
            return rows, fates, at[rows]
        others = np.flatnonzero(current & (at < 0))
        last = np.where(txs[others] == self._ended.tx, _GONE, _AMENDED)
        return _also(rows, fates, at[rows], others, last, self.source.ended)

    def fresh(self) -> Ints:
        return np.flatnonzero(self.source.operations == UPSERT)


class _KeylessRules:
    """A table without a key: so many copies of a row go, whichever. Or one that rows come into, and nothing else."""

    def __init__(self, schema: TableSchema, source: _FoldedSource, folded: FoldedChanges) -> None:
        copies = folded.rows.column("copies").to_numpy()
        goes = (copies < 0) & (not folded.truncated)
        self.columns, self.source = schema.columns, source
        self.sought = _Images(source.own.filter(pa.array(goes)))
        self._table, self._left, self._copies = schema.table, -copies[goes], copies

    def may_concern(self, _shared: Mapping[str, pa.Scalar]) -> bool:
        """Whether rows with these values in common may be concerned."""
        return bool(self._left.any())

    def fates(self, _piece: pa.Table, at: Ints) -> tuple[Ints, Any, Ints]:
        rows = np.flatnonzero(_first_copies(at, self._left))
        self._left = self._left - np.bincount(at[rows], minlength=self._left.size)
        return rows, np.full(rows.size, _GONE), at[rows]

    def fresh(self) -> Ints:
        """Too few copies of what goes is an error."""
        if self._left.any():
            raise BaseRowMissing(
                "rows to be removed are not in the table",
                table=self._table,
                rows=int(self._left.sum()),
                hint=RELOAD_TABLE_HINT,
            )
        comes = self.source.operations == UPSERT
        return np.repeat(np.flatnonzero(comes), self._copies[comes])


def _first_copies(image: Ints, left: Ints) -> Flags:
    """Which rows go: of each image the first `left`."""
    hits = np.flatnonzero(image >= 0)
    order = hits[np.argsort(image[hits], kind="stable")]
    sorted_images = image[order]
    starts = np.searchsorted(sorted_images, sorted_images, side="left")
    dropped = np.zeros(image.size, np.bool_)
    dropped[order[np.arange(order.size) - starts < left[sorted_images]]] = True
    return dropped


def _also(rows: Ints, fates: Any, sources: Ints, others: Ints, fate: Any, source: int) -> tuple[Ints, Any, Ints]:
    """The same with other rows among them, which one row of the source is about."""
    all_rows = np.concatenate([rows, others])
    order = np.argsort(all_rows, kind="stable")
    all_fates = np.concatenate([fates, np.broadcast_to(fate, others.shape)])
    all_sources = np.concatenate([sources, np.full(others.size, source)])
    return all_rows[order], all_fates[order], all_sources[order]


def _may_hold(adds: pa.Table, sought: _Sought | _Images) -> Flags:
    """Which files may hold one of the keys, as the bounds of the key's first column tell, and the partitions."""
    if not sought.count or not sought.key:
        return np.full(adds.num_rows, sought.count > 0)
    maybe = np.ones(adds.num_rows, np.bool_)
    for key, values in zip(sought.key, sought.values, strict=True):
        if (shared := f"partition.{key.name}") in adds.column_names:
            there = adds.column(shared).cast(key.type)
            maybe &= pc.is_in(there, value_set=values.combine_chunks()).to_numpy()
    name, wanted = sought.key[0].name, sought.values[0]
    bounds = [f"{end}.{name}" for end in ("min", "max")]
    if not pa.types.is_integer(sought.key[0].type) or not set(bounds) <= set(adds.column_names):
        return maybe
    values = integer_bits(wanted.combine_chunks())
    low, high = (adds.column(bound).combine_chunks() for bound in bounds)
    known = pc.and_(low.is_valid(), high.is_valid()).to_numpy(zero_copy_only=False)
    assert values is not None, "an integer"
    values = np.sort(values)
    lows, highs = (ends.fill_null(0).to_numpy(zero_copy_only=False) for ends in (low, high))
    some: Flags = np.searchsorted(values, lows, side="left") < np.searchsorted(values, highs, side="right")
    maybe[known] &= some[known]
    return maybe
