"""Compare a table's files with staged rows, to find the changes in each file.

A file in which no row is removed stays as it is. Of other files the remaining rows are rewritten. Rows are streamed:
staged rows are read twice, the table's rows once, and those of files with removed rows once more. Memory holds 17 bytes
per staged row, a byte per row of files with removed rows, and 16 per added or removed row. A list of keys adds 16 bytes
per staged row and per key. Sorting these takes 24 bytes each for a moment.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tailrace.model.schema import Column, TableSchema
from tailrace.tables.fold.folded_changes import Flags, key_ordinals
from tailrace.tables.fold.row_hashes import RowHashes, RowHashSet, hash_images, hash_keys
from tailrace.tables.partitions import PartitionValues

READ_ROWS = 65_536


@dataclass(frozen=True, kw_only=True)
class RetirementRule:
    """The rule for keeping rows that the source no longer has."""

    flag: str
    """The column that marks such rows."""
    retired_value: bool
    """The flag's value for such rows."""
    replaces: bool
    """True if a new row replaces the table's row of its key; else it is added to it."""
    values: Mapping[str, pa.Scalar]
    """New values for a row that the source no longer has."""
    least: Mapping[str, pa.Scalar] = field(default_factory=dict)
    """Minimum values for new rows, by column."""

    def is_retired(self, batch: pa.RecordBatch) -> Flags:
        flags: Flags = batch.column(self.flag).to_numpy(zero_copy_only=False).astype(np.bool_) == self.retired_value
        return flags

    def retire(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return removed rows as they are kept."""
        return _with(batch, {name: pa.repeat(value, batch.num_rows) for name, value in self.values.items()})

    def raise_to_minimums(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return new rows with their minimum values applied."""
        return _with(batch, {name: clamp_to_minimum(batch.column(name), value) for name, value in self.least.items()})


def clamp_to_minimum(column: Any, least: pa.Scalar) -> Any:
    """Return the column with no value below a minimum; null stays null."""
    return pc.if_else(pc.less(column, least), least, column)


def _with(batch: pa.RecordBatch, columns: Mapping[str, Any]) -> pa.RecordBatch:
    arrays = [columns.get(name, batch.column(name)) for name in batch.schema.names]
    return pa.RecordBatch.from_arrays(arrays, schema=batch.schema)


@dataclass(kw_only=True)
class TableDiff:
    """The differences between a table's files and staged rows.

    Made by `diff_files`. Read `rows` only once.
    """

    folder: Path
    schema: TableSchema
    stored: TableSchema
    """The schema with the lake-only columns, which stay with the rows that stay."""
    staged: Sequence[str]
    seed: int
    images: RowHashSet
    found_in_table: Flags
    """Rows that the table already holds: flags per number in `images`."""
    retirement_rule: RetirementRule | None = None
    parts: PartitionValues = field(default_factory=dict)
    retired: dict[str, Flags] = field(default_factory=dict)
    """Rows to retire: flags per file with removed rows."""
    staying: dict[str, Flags] = field(default_factory=dict)
    """Rows that stay: flags per file with removed rows."""
    removed_keys: list[RowHashes] = field(default_factory=list)
    """The keys of the removed rows."""
    added_keys: list[RowHashes] = field(default_factory=list)
    """The keys of the staged rows that are new; filled by `rows`."""

    @property
    def empty(self) -> bool:
        return not self.staying and bool(self.found_in_table.all())

    def rows(self) -> Iterator[pa.RecordBatch]:
        """Yield what to write: rows that stay in removed files, then new staged rows."""
        for name, stays in self.staying.items():
            for batch, flags in _with_flags(self._file(name), stays):
                yield batch.filter(pa.array(flags))
            if self.retirement_rule is not None and self.retired[name].any():
                for batch, flags in _with_flags(self._file(name), self.retired[name]):
                    yield self.retirement_rule.retire(batch.filter(pa.array(flags)))
        for batch in all_rows(self.folder, self.staged, self.stored.columns, self.parts):
            own = batch.columns[: len(self.schema.columns)]
            found = self.images.find(hash_images(own, self.seed))
            new = batch.filter(pa.array(~self.found_in_table[found]))
            self.added_keys.append(_keys(self.schema, new, self.seed))
            yield new if self.retirement_rule is None else self.retirement_rule.raise_to_minimums(new)

    def _file(self, name: str) -> Iterator[pa.RecordBatch]:
        return all_rows(self.folder, [name], self.stored.columns, self.parts)

    def counts(self) -> tuple[int, int]:
        """Return how many rows were added or changed, and how many were removed for good."""
        added, removed = _joined(self.added_keys), _joined(self.removed_keys)
        return len(added), int(np.count_nonzero(RowHashSet(added).find(removed) < 0))


def diff_files(
    folder: Path,
    schema: TableSchema,
    table: Iterable[str],
    staged: Sequence[str],
    keys: Sequence[str] | None,
    lake_only_columns: Sequence[Column] = (),
    retirement_rule: RetirementRule | None = None,
    parts: PartitionValues | None = None,
) -> TableDiff:
    """Compare the table's files with the staged ones.

    `keys` are files with the keys of all rows that may stay. `lake_only_columns` are not compared. `parts` has the
    values of columns that are not in the files.
    """
    seed, parts = secrets.randbits(128), parts or {}
    images, own = [], []
    for batch in all_rows(folder, staged, schema.columns, parts):
        images.append(hash_images(batch.columns, seed))
        if keys is not None or (retirement_rule is not None and retirement_rule.replaces):
            own.append(_keys(schema, batch, seed))
    staged_images = RowHashSet(_joined(images))
    diff = TableDiff(
        folder=folder,
        schema=schema,
        stored=replace(schema, columns=(*schema.columns, *lake_only_columns)),
        staged=staged,
        seed=seed,
        images=staged_images,
        found_in_table=np.zeros(len(staged_images), np.bool_),
        retirement_rule=retirement_rule,
        parts=parts,
    )
    staged_keys = RowHashSet(_joined(own))
    unstaged_keys = None if keys is None else _UnstagedKeys(folder, schema, staged_keys, keys, seed, parts)
    flag = [
        column for column in lake_only_columns if retirement_rule is not None and column.name == retirement_rule.flag
    ]
    for name in table:
        batches = all_rows(folder, [name], [*schema.columns, *flag], parts)
        flags = [_fates(diff, batch, unstaged_keys, staged_keys) for batch in batches]
        stays, retired = (np.concatenate([np.empty(0, np.bool_), *(pair[i] for pair in flags)]) for i in (0, 1))
        if not stays.all():
            diff.staying[name], diff.retired[name] = stays, retired
    return diff


def _fates(
    diff: TableDiff, batch: pa.RecordBatch, unstaged_keys: _UnstagedKeys | None, staged_keys: RowHashSet
) -> tuple[Flags, Flags]:
    """Flag the table's rows that stay unchanged, and others that are retired."""
    if diff.retirement_rule is None:
        stays = _kept(diff, batch, unstaged_keys)
        return stays, np.zeros(stays.size, np.bool_)
    retired = diff.retirement_rule.is_retired(batch)
    if diff.retirement_rule.replaces:
        is_staged = staged_keys.find(_keys(diff.schema, batch, diff.seed)) >= 0
        settled, retires = retired & ~is_staged, ~retired & ~is_staged
    else:
        settled, retires = retired, ~retired
    stays = settled.copy()
    stays[~settled] = _kept(diff, batch.filter(pa.array(~settled)), unstaged_keys)
    return stays, retires & ~stays


class _UnstagedKeys:
    """Test for rows that stay although not staged: their key is listed but not staged."""

    def __init__(
        self,
        folder: Path,
        schema: TableSchema,
        staged: RowHashSet,
        keys: Sequence[str],
        seed: int,
        parts: PartitionValues,
    ) -> None:
        columns = [schema.columns[i] for i in key_ordinals(schema)]
        self._staged = staged
        listed = [hash_keys(batch.columns, seed) for batch in all_rows(folder, keys, columns, parts)]
        self._listed = RowHashSet(_joined(listed))

    def __call__(self, hashes: RowHashes) -> Flags:
        return (self._listed.find(hashes) >= 0) & (self._staged.find(hashes) < 0)


def _kept(diff: TableDiff, batch: pa.RecordBatch, unstaged_keys: _UnstagedKeys | None) -> Flags:
    """Flag the table's rows that are staged unchanged, each once, or have unstaged keys."""
    indices = diff.images.find(hash_images(batch.columns[: len(diff.schema.columns)], diff.seed))
    stays = np.zeros(batch.num_rows, np.bool_)
    matched, first = np.unique(indices[indices >= 0], return_index=True)
    stays[np.flatnonzero(indices >= 0)[first[~diff.found_in_table[matched]]]] = True
    diff.found_in_table[matched] = True
    others = np.flatnonzero(~stays)
    if others.size:
        hashes = _keys(diff.schema, batch.take(pa.array(others)), diff.seed)
        if unstaged_keys is not None:
            stays[others] = unstaged_keys(hashes)
        diff.removed_keys.append(hashes[~stays[others]])
    return stays


def read_rows(path: Path, columns: Sequence[Column], shared: Mapping[str, pa.Scalar]) -> Iterator[pa.RecordBatch]:
    """Yield a data file's rows as these columns, in the file's order.

    A column that the file does not have gets the value shared by all its rows, or null.
    """
    fields = pa.schema([pa.field(column.name, column.type) for column in columns])
    with pq.ParquetFile(path, coerce_int96_timestamp_unit="us") as file:
        # A name with a dot would be taken for a path.
        selected = None if any("." in name for name in fields.names) else fields.names
        # One group at a time, because the reader would combine groups of any size.
        for group in range(file.num_row_groups):
            for batch in file.iter_batches(READ_ROWS, row_groups=[group], columns=selected):
                yield pa.RecordBatch.from_arrays([_column(batch, column, shared) for column in columns], schema=fields)


def _column(batch: pa.RecordBatch, column: Column, shared: Mapping[str, pa.Scalar]) -> Any:
    if column.name in shared:
        return pa.repeat(shared[column.name].cast(column.type), batch.num_rows)
    index = batch.schema.get_field_index(column.name)
    return pa.nulls(batch.num_rows, column.type) if index < 0 else batch.column(index).cast(column.type)


def all_rows(
    folder: Path, files: Iterable[str], columns: Sequence[Column], parts: PartitionValues
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of several files, one after the other."""
    for name in files:
        yield from read_rows(folder / name, columns, parts.get(name, {}))


def _with_flags(batches: Iterator[pa.RecordBatch], flags: Flags) -> Iterator[tuple[pa.RecordBatch, Flags]]:
    start = 0
    for batch in batches:
        yield batch, flags[start : start + batch.num_rows]
        start += batch.num_rows


def _keys(schema: TableSchema, batch: pa.RecordBatch, seed: int) -> RowHashes:
    return hash_keys([batch.column(i) for i in key_ordinals(schema)], seed)


def _joined(hashes: list[RowHashes]) -> RowHashes:
    """Return all hashes as one array, and empty the list to free memory."""
    whole = np.concatenate([np.empty((0, 2), np.uint64), *hashes])
    hashes.clear()
    return whole
