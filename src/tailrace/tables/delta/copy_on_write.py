"""Plan a copy-on-write merge of folded rows into a Delta table.

Files that hold an affected row are rewritten, the others stay. There are two passes. The first reads only the key's
columns, of files whose bounds do not exclude every key, and decides what to do with each row. The second copies the
rows of files with affected rows. Memory holds the folded rows, the numbers of affected rows and a few row groups. Keys
are compared as in `row_ids`, like in the fold. Without a key, rows are compared by all their values. If rows are only
added, no file is read.
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
from tailrace.tables.fold.folded_changes import (
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
"""The fates of a table row. An amended row takes only the columns that the table spec adds."""


@dataclass(frozen=True, kw_only=True)
class _AffectedRows:
    """The rows of one file that change, in the file's order."""

    rows: Ints
    fates: npt.NDArray[np.int8]
    sources: Ints
    """The source row that each takes its values from."""

    def within(self, start: int, count: int) -> _AffectedRows | None:
        """Return those among `count` rows from `start`, counted from there."""
        low, high = np.searchsorted(self.rows, [start, start + count]).tolist()
        if low == high:
            return None
        return _AffectedRows(
            rows=self.rows[low:high] - start, fates=self.fates[low:high], sources=self.sources[low:high]
        )


@dataclass(frozen=True, kw_only=True)
class RewritePlan:
    """The changes to a table; made by `plan_rewrite`."""

    folder: Path
    stored: TableSchema
    """The table's columns, including retained ones, which stay with the rows that stay."""
    source: _FoldedSource
    files: Mapping[str, _AffectedRows]
    """The files to be rewritten, smallest first, with their affected rows."""
    removed_files: Sequence[str]
    """All files that the commit removes."""
    inserted_rows: Ints
    """The source's rows that are new."""
    partition_values: PartitionValues
    """Values that are not in the files because all rows of a partition share them."""

    def parts(self) -> Iterator[Iterator[pa.RecordBatch]]:
        """Yield what to write: the rows of each rewritten file, and new rows."""
        for number, (name, affected) in enumerate(self.files.items()):
            yield self._copied(name, affected, with_fresh=number == 0)
        if self.inserted_rows.size and not self.files:
            yield self._fresh()

    def _copied(self, name: str, affected: _AffectedRows, *, with_fresh: bool) -> Iterator[pa.RecordBatch]:
        start = 0
        for batch in read_rows(self.folder / name, self.stored.columns, self.partition_values.get(name, {})):
            part = affected.within(start, batch.num_rows)
            yield batch if part is None else self.source.put_into(batch, part)
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
    """The folded rows as they are written into a table."""

    own: pa.Table
    """The columns of the schema."""
    operations: npt.NDArray[np.int8]
    keeps: Mapping[int, Flags]
    """Flags, by ordinal, of rows for which the table's own row keeps its value."""
    added: frozenset[int]
    """Ordinals of the columns that an amended row takes."""
    ended: int | None
    """The source row for table rows that no other one concerns. Not a new row itself."""

    @classmethod
    def of(cls, spec: TableSpec, schema: TableSchema, table: DeltaTable, folded: FoldedChanges) -> _FoldedSource:
        history = spec.mode is TableMode.HISTORY
        rows, kept = merge_source(schema, table, folded.rows, only=CURRENT if history else None)
        rows = rows.combine_chunks()
        own = rows.select(range(len(schema.columns)))
        added = {VALID_TO, CURRENT} if history else {column.name for column in spec.added_columns}
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
        """Return rows that take no value from the table; refuse partial rows."""
        if folded.partial:
            raise base_row_missing(schema, folded.rows.column("absent").is_null().to_numpy())
        own = folded.rows.select(range(len(schema.columns))).combine_chunks()
        return cls(own=own, operations=operations(folded), keeps={}, added=frozenset(), ended=None)

    def put_into(self, batch: pa.RecordBatch, affected: _AffectedRows) -> pa.RecordBatch:
        """Return the rows of a file's batch after the merge."""
        remains = affected.fates != _GONE
        stays = np.ones(batch.num_rows, np.bool_)
        stays[affected.rows[~remains]] = False
        rows, sources = affected.rows[remains], affected.sources[remains]
        replaced = affected.fates[remains] == _REPLACED
        own = self.own.take(pa.array(sources))

        def value_indices(takes: Flags) -> Any:
            """Return the index of each row's value. It is in the batch or, after it, in the source rows."""
            found = np.arange(batch.num_rows)
            found[rows[takes]] = batch.num_rows + np.flatnonzero(takes)
            return pa.array(found[stays])

        usual, unchanged = value_indices(replaced), value_indices(np.zeros(rows.size, np.bool_))
        columns = []
        for ordinal, column in enumerate(batch.columns):
            if ordinal >= own.num_columns:
                columns.append(column.take(unchanged))
                continue
            indices = usual
            if ordinal in self.keeps or ordinal in self.added:
                takes = replaced | (ordinal in self.added)
                indices = value_indices(takes & ~self.keeps[ordinal][sources] if ordinal in self.keeps else takes)
            columns.append(pa.concat_arrays([column, *own.column(ordinal).chunks]).take(indices))
        return pa.RecordBatch.from_arrays(columns, schema=batch.schema)


def _ended_row(schema: TableSchema, fields: pa.Schema, ended: TruncateEffect) -> pa.Table:
    values = [
        pa.array([ended.values[column.name].as_py() if column.name in ended.values else None], column.type)
        for column in schema.columns
    ]
    return pa.Table.from_arrays(values, schema=fields)


def plan_rewrite(
    spec: TableSpec, schema: TableSchema, folder: Path, table: DeltaTable, folded: FoldedChanges
) -> RewritePlan:
    """Find the table rows that the folded rows affect.

    The folded rows have the table's own schema. The files are those of the version that was opened.
    """
    rules: _MirrorRules | _HistoryRules | _KeylessRules
    if folded.truncated or not schema.key:
        rules = _KeylessRules(schema, _FoldedSource.plain(schema, folded), folded)
    elif spec.mode is TableMode.HISTORY:
        rules = _HistoryRules(schema, _FoldedSource.of(spec, schema, table, folded), folded)
    else:
        rules = _MirrorRules(spec, schema, _FoldedSource.of(spec, schema, table, folded))
    adds = pa.table(table.get_add_actions(flatten=True)).sort_by("size_bytes")
    source, parts = rules.source, partition_values_of(table, adds)
    names = list(map(data_path, adds.column("path").to_pylist()))
    files = dict[str, _AffectedRows]()
    candidates = np.ones(adds.num_rows, np.bool_) if source.ended is not None else _may_hold(adds, rules.search)
    for name in itertools.compress(names, candidates):
        shared = parts.get(name, {})
        if rules.may_affect(shared) and (affected := _find_affected(folder / name, rules, shared)) is not None:
            files[name] = affected
    return RewritePlan(
        folder=folder,
        stored=replace(schema, columns=(*schema.columns, *retained_columns(table, schema)), facts=None),
        source=source,
        files=files,
        removed_files=names if folded.truncated else list(files),
        inserted_rows=rules.inserted(),
        partition_values=parts,
    )


def _find_affected(
    path: Path, rules: _MirrorRules | _HistoryRules | _KeylessRules, shared: Mapping[str, pa.Scalar]
) -> _AffectedRows | None:
    """Return the affected rows of one file; None without any."""
    found, start = list[tuple[Ints, Any, Ints]](), 0
    for piece in _pieces(read_rows(path, rules.columns, shared), rules.search.count):
        rows, fates, sources = rules.fates(piece, rules.search.find(piece))
        found.append((rows + start, fates, sources))
        start += piece.num_rows
    rows, fates, sources = (np.concatenate([part[i] for part in found] or [np.empty(0, np.int64)]) for i in range(3))
    return _AffectedRows(rows=rows, fates=fates.astype(np.int8), sources=sources) if rows.size else None


def _pieces(batches: Iterable[pa.RecordBatch], rows_wanted: int) -> Iterator[pa.Table]:
    """Join batches into pieces large enough to be matched efficiently."""
    pending, rows, size = list[pa.RecordBatch](), 0, 0
    for batch in batches:
        pending.append(batch)
        rows, size = rows + batch.num_rows, size + batch.nbytes
        if size >= CHUNK_BYTES_MAX and rows >= max(CHUNK_ROWS_MIN, rows_wanted):
            yield pa.Table.from_batches(pending)
            pending, rows, size = [], 0, 0
    if pending:
        yield pa.Table.from_batches(pending)


class _KeySearch:
    """Keys to find, each of one source row."""

    def __init__(self, schema: TableSchema, own: pa.Table, which: Ints) -> None:
        self.key = [schema.columns[i] for i in key_ordinals(schema)]
        self.values = [own.column(i).take(pa.array(which)) for i in key_ordinals(schema)]
        self.count = which.size
        self._which = which

    def find(self, piece: pa.Table) -> Ints:
        """Return for each row the source row with its key; -1 without one."""
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


class _ImageSearch:
    """Rows to find by all their values."""

    key: Sequence[Column] = ()

    def __init__(self, rows: pa.Table) -> None:
        self.count = rows.num_rows
        self.values = rows.columns

    def find(self, piece: pa.Table) -> Ints:
        """Return for each row the number of its image; -1 for another one."""
        numbered = image_numbers(
            [
                pa.chunked_array([*wanted.chunks, *rows_found.chunks], wanted.type)
                for wanted, rows_found in zip(self.values, piece.columns, strict=True)
            ]
        )
        image_of = np.full(numbered.limit, -1, np.int64)
        image_of[numbered.numbers[: self.count]] = np.arange(self.count)
        found: Ints = image_of[numbered.numbers[self.count :]]
        return found


class _MirrorRules:
    """Rules for a mirror: one row per key."""

    def __init__(self, spec: TableSpec, schema: TableSchema, source: _FoldedSource) -> None:
        self.search = _KeySearch(schema, source.own, np.arange(source.operations.size))
        self._deleted_column = spec.deleted_column if spec.soft_delete else None
        self.columns = [*self.search.key, *(c for c in schema.columns if c.name == self._deleted_column)]
        self.source = source
        self._matched = np.zeros(source.operations.size, np.bool_)
        self._schema = schema

    def may_affect(self, _shared: Mapping[str, pa.Scalar]) -> bool:
        """Return whether rows with these shared values may be affected."""
        return True

    def fates(self, piece: pa.Table, at: Ints) -> tuple[Ints, Any, Ints]:
        rows = np.flatnonzero(at >= 0)
        operations = self.source.operations[at[rows]]
        self._matched[at[rows]] = True
        fate_of = np.array([_REPLACED, _GONE, 0, _AMENDED], np.int8)
        fates, sources = fate_of[operations], at[rows]
        if self._deleted_column is None:
            return rows, fates, sources
        not_deleted = ~piece.column(self._deleted_column).to_numpy()
        counts = (operations != MARK_DELETED) | not_deleted[rows]
        rows, fates, sources = rows[counts], fates[counts], sources[counts]
        if (ended := self.source.ended) is None:
            return rows, fates, sources
        return _with_others(rows, fates, sources, np.flatnonzero(not_deleted & (at < 0)), _AMENDED, ended)

    def inserted(self) -> Ints:
        """Return the new source rows; refuse rows that keep values of a missing row."""
        size = self.source.operations.size
        partial = np.logical_or.reduce([flags[:size] for flags in self.source.keeps.values()], initial=False)
        if (lost := partial & ~self._matched).any():
            raise base_row_missing(self._schema, ~lost)
        return np.flatnonzero((self.source.operations == UPSERT) & ~self._matched)


class _HistoryRules:
    """Rules for a history: new versions are added to the existing ones.

    Of those, only current versions end. One made by the transaction that ends it is removed instead.
    """

    def __init__(self, schema: TableSchema, source: _FoldedSource, folded: FoldedChanges) -> None:
        self.search = _KeySearch(schema, source.own, np.flatnonzero(source.operations == END_VERSION))
        self.columns = [*self.search.key, *(c for c in schema.columns if c.name in (CURRENT, change.TX))]
        self.source, self._ended = source, folded.truncate_effect
        self._txs = source.own.column(schema.names.index(change.TX)).to_numpy()

    def may_affect(self, shared: Mapping[str, pa.Scalar]) -> bool:
        """Return whether rows with these shared values may be affected."""
        return CURRENT not in shared or bool(shared[CURRENT].as_py())

    def fates(self, piece: pa.Table, at: Ints) -> tuple[Ints, Any, Ints]:
        current, txs = piece.column(CURRENT).to_numpy(), piece.column(change.TX).to_numpy()
        rows = np.flatnonzero(current & (at >= 0))
        fates = np.where(txs[rows] == self._txs[at[rows]], _GONE, _AMENDED)
        if self._ended is None or self.source.ended is None:
            return rows, fates, at[rows]
        others = np.flatnonzero(current & (at < 0))
        last = np.where(txs[others] == self._ended.tx, _GONE, _AMENDED)
        return _with_others(rows, fates, at[rows], others, last, self.source.ended)

    def inserted(self) -> Ints:
        return np.flatnonzero(self.source.operations == UPSERT)


class _KeylessRules:
    """Rules for a keyless table. They remove the folded number of copies of each row, whichever they are.

    Also used for tables that rows are only added to.
    """

    def __init__(self, schema: TableSchema, source: _FoldedSource, folded: FoldedChanges) -> None:
        copies = folded.rows.column("copies").to_numpy()
        removes = (copies < 0) & (not folded.truncated)
        self.columns, self.source = schema.columns, source
        self.search = _ImageSearch(source.own.filter(pa.array(removes)))
        self._table, self._left, self._copies = schema.table, -copies[removes], copies

    def may_affect(self, _shared: Mapping[str, pa.Scalar]) -> bool:
        """Return whether rows with these shared values may be affected."""
        return bool(self._left.any())

    def fates(self, _piece: pa.Table, at: Ints) -> tuple[Ints, Any, Ints]:
        rows = np.flatnonzero(_first_copies(at, self._left))
        self._left = self._left - np.bincount(at[rows], minlength=self._left.size)
        return rows, np.full(rows.size, _GONE), at[rows]

    def inserted(self) -> Ints:
        """Return the new source rows; refuse removals of missing copies."""
        if self._left.any():
            raise BaseRowMissing(
                "rows to be removed are not in the table",
                table=self._table,
                rows=int(self._left.sum()),
                hint=RELOAD_TABLE_HINT,
            )
        is_upsert = self.source.operations == UPSERT
        return np.repeat(np.flatnonzero(is_upsert), self._copies[is_upsert])


def _first_copies(image: Ints, left: Ints) -> Flags:
    """Flag rows to remove: the first `left` of each image."""
    hits = np.flatnonzero(image >= 0)
    order = hits[np.argsort(image[hits], kind="stable")]
    sorted_images = image[order]
    starts = np.searchsorted(sorted_images, sorted_images, side="left")
    dropped = np.zeros(image.size, np.bool_)
    dropped[order[np.arange(order.size) - starts < left[sorted_images]]] = True
    return dropped


def _with_others(rows: Ints, fates: Any, sources: Ints, others: Ints, fate: Any, source: int) -> tuple[Ints, Any, Ints]:
    """Merge in other rows, which one source row applies to."""
    all_rows = np.concatenate([rows, others])
    order = np.argsort(all_rows, kind="stable")
    all_fates = np.concatenate([fates, np.broadcast_to(fate, others.shape)])
    all_sources = np.concatenate([sources, np.full(others.size, source)])
    return all_rows[order], all_fates[order], all_sources[order]


def _may_hold(adds: pa.Table, search: _KeySearch | _ImageSearch) -> Flags:
    """Flag files that may hold one of the keys.

    Decided by the partition values and the bounds of the first key column.
    """
    if not search.count or not search.key:
        return np.full(adds.num_rows, search.count > 0)
    candidates = np.ones(adds.num_rows, np.bool_)
    for key, values in zip(search.key, search.values, strict=True):
        if (shared := f"partition.{key.name}") in adds.column_names:
            partition_values = adds.column(shared).cast(key.type)
            candidates &= pc.is_in(partition_values, value_set=values.combine_chunks()).to_numpy()
    name, wanted_values = search.key[0].name, search.values[0]
    bounds = [f"{end}.{name}" for end in ("min", "max")]
    if not pa.types.is_integer(search.key[0].type) or not set(bounds) <= set(adds.column_names):
        return candidates
    values = integer_bits(wanted_values.combine_chunks())
    low, high = (adds.column(bound).combine_chunks() for bound in bounds)
    known = pc.and_(low.is_valid(), high.is_valid()).to_numpy(zero_copy_only=False)
    assert values is not None, "an integer"
    values = np.sort(values)
    lows, highs = (ends.fill_null(0).to_numpy(zero_copy_only=False) for ends in (low, high))
    overlaps: Flags = np.searchsorted(values, lows, side="left") < np.searchsorted(values, highs, side="right")
    candidates[known] &= overlaps[known]
    return candidates
