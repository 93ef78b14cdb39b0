"""What must change in a table so that it holds the rows that were staged, file by file.

A file in which no row goes is left alone; of the others the rows that stay are written again. Rows are streamed:
every staged one is read twice, every row of the table once, and those of files in which rows go once more. What is
held is 17 bytes per staged row, a byte per row of a file in which rows go, and 16 per row that comes or goes; with
a list of keys 16 bytes more per staged row and per key. Sorting these takes 24 bytes each for a moment.
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
from tailrace.tables.fold.fold import Flags, key_ordinals
from tailrace.tables.fold.row_hashes import RowHashes, RowHashSet, hash_images, hash_keys
from tailrace.tables.partitions import PartitionValues

READ_ROWS = 65_536


@dataclass(frozen=True, kw_only=True)
class RetirementRule:
    """How a table keeps rows that the source no longer has."""

    flag: str
    """The column that tells them,"""
    retired_value: bool
    """and what it says of one."""
    replaces: bool
    """Whether a row that comes takes the place of what the table has of its key; otherwise it stands beside it."""
    values: Mapping[str, pa.Scalar]
    """What is written into a row that the source no longer has."""
    least: Mapping[str, pa.Scalar] = field(default_factory=dict)
    """What rows that come have at least."""

    def is_retired(self, batch: pa.RecordBatch) -> Flags:
        flags: Flags = batch.column(self.flag).to_numpy(zero_copy_only=False).astype(np.bool_) == self.retired_value
        return flags

    def retire(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Rows that go, as they stay."""
        return _with(batch, {name: pa.repeat(value, batch.num_rows) for name, value in self.values.items()})

    def raise_to_minimums(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Rows that come, as they come."""
        return _with(batch, {name: clamp_to_minimum(batch.column(name), value) for name, value in self.least.items()})


def clamp_to_minimum(column: Any, least: pa.Scalar) -> Any:
    """The column with no value below another; null stays null."""
    return pc.if_else(pc.less(column, least), least, column)


def _with(batch: pa.RecordBatch, columns: Mapping[str, Any]) -> pa.RecordBatch:
    given = [columns.get(name, batch.column(name)) for name in batch.schema.names]
    return pa.RecordBatch.from_arrays(given, schema=batch.schema)


@dataclass(kw_only=True)
class TableDiff:
    """How a table's files differ from the rows that were staged; `compare` makes it, `rows` may be read once."""

    folder: Path
    schema: TableSchema
    stored: TableSchema
    """The same with the columns that only the table has: they stay with the rows that stay."""
    staged: Sequence[str]
    seed: int
    images: RowHashSet
    found_in_table: Flags
    """Per number in `images`, whether the table holds that row."""
    retirement_rule: RetirementRule | None = None
    parts: PartitionValues = field(default_factory=dict)
    retired: dict[str, Flags] = field(default_factory=dict)
    """Of the table's files in which rows go, those that go and are kept all the same."""
    staying: dict[str, Flags] = field(default_factory=dict)
    """The table's files in which rows go, and which of their rows stay."""
    removed_keys: list[RowHashes] = field(default_factory=list)
    """The keys of the rows that go."""
    added_keys: list[RowHashes] = field(default_factory=list)
    """The keys of the staged rows that come in; filled by `rows`."""

    @property
    def empty(self) -> bool:
        return not self.staying and bool(self.found_in_table.all())

    def rows(self) -> Iterator[pa.RecordBatch]:
        """What to write: the rows that stay in files that go, then the staged rows the table does not hold."""
        for name, stays in self.staying.items():
            for batch, flags in _beside(self._file(name), stays):
                yield batch.filter(pa.array(flags))
            if self.retirement_rule is not None and self.retired[name].any():
                for batch, flags in _beside(self._file(name), self.retired[name]):
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
        """How many rows came in, new or changed, and how many went and did not come back."""
        came, went = _joined(self.added_keys), _joined(self.removed_keys)
        return len(came), int(np.count_nonzero(RowHashSet(came).find(went) < 0))


def diff_files(
    folder: Path,
    schema: TableSchema,
    table: Iterable[str],
    staged: Sequence[str],
    keys: Sequence[str] | None,
    kept: Sequence[Column] = (),
    keeping: RetirementRule | None = None,
    parts: PartitionValues | None = None,
) -> TableDiff:
    """Compare the table's files with the staged ones; `keys` are files that hold the keys of all rows that may stay,
    and `kept` are columns that do not count. `parts` tells what columns of the other files are not in them."""
    seed, parts = secrets.randbits(128), parts or {}
    images, own = [], []
    for batch in all_rows(folder, staged, schema.columns, parts):
        images.append(hash_images(batch.columns, seed))
        if keys is not None or (keeping is not None and keeping.replaces):
            own.append(_keys(schema, batch, seed))
    there = RowHashSet(_joined(images))
    found = TableDiff(
        folder=folder,
        schema=schema,
        stored=replace(schema, columns=(*schema.columns, *kept)),
        staged=staged,
        seed=seed,
        images=there,
        found_in_table=np.zeros(len(there), np.bool_),
        retirement_rule=keeping,
        parts=parts,
    )
    came = RowHashSet(_joined(own))
    staying = None if keys is None else _Staying(folder, schema, came, keys, seed, parts)
    flag = [column for column in kept if keeping is not None and column.name == keeping.flag]
    for name in table:
        batches = all_rows(folder, [name], [*schema.columns, *flag], parts)
        flags = [_fates(found, batch, staying, came) for batch in batches]
        stays, retired = (np.concatenate([np.empty(0, np.bool_), *(pair[i] for pair in flags)]) for i in (0, 1))
        if not stays.all():
            found.staying[name], found.retired[name] = stays, retired
    return found


def _fates(found: TableDiff, batch: pa.RecordBatch, staying: _Staying | None, came: RowHashSet) -> tuple[Flags, Flags]:
    """Which rows of the table stay as they are, and which of the others are kept as of the past."""
    if found.retirement_rule is None:
        stays = _kept(found, batch, staying)
        return stays, np.zeros(stays.size, np.bool_)
    past = found.retirement_rule.is_retired(batch)
    if found.retirement_rule.replaces:
        again = came.find(_keys(found.schema, batch, found.seed)) >= 0
        settled, retires = past & ~again, ~past & ~again
    else:
        settled, retires = past, ~past
    stays = settled.copy()
    stays[~settled] = _kept(found, batch.filter(pa.array(~settled)), staying)
    return stays, retires & ~stays


class _Staying:
    """Which rows of the table stay although they are not among those staged: their key is listed, but not staged."""

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

    def __call__(self, prints: RowHashes) -> Flags:
        return (self._listed.find(prints) >= 0) & (self._staged.find(prints) < 0)


def _kept(found: TableDiff, batch: pa.RecordBatch, staying: _Staying | None) -> Flags:
    """Which rows of the table stay as they are: those staged as they are, each once, and those that may."""
    places = found.images.find(hash_images(batch.columns[: len(found.schema.columns)], found.seed))
    stays = np.zeros(batch.num_rows, np.bool_)
    held, first = np.unique(places[places >= 0], return_index=True)
    stays[np.flatnonzero(places >= 0)[first[~found.found_in_table[held]]]] = True
    found.found_in_table[held] = True
    others = np.flatnonzero(~stays)
    if others.size:
        prints = _keys(found.schema, batch.take(pa.array(others)), found.seed)
        if staying is not None:
            stays[others] = staying(prints)
        found.removed_keys.append(prints[~stays[others]])
    return stays


def read_rows(path: Path, columns: Sequence[Column], said: Mapping[str, pa.Scalar]) -> Iterator[pa.RecordBatch]:
    """A data file's rows as these columns, in the file's order; where it has no such column what is said of all its
    rows, or null."""
    fields = pa.schema([pa.field(column.name, column.type) for column in columns])
    with pq.ParquetFile(path, coerce_int96_timestamp_unit="us") as file:
        # A name with a dot in it would be taken for a path.
        some = None if any("." in name for name in fields.names) else fields.names
        # One group at a time: the reader would join them, however large their rows are.
        for group in range(file.num_row_groups):
            for batch in file.iter_batches(READ_ROWS, row_groups=[group], columns=some):
                yield pa.RecordBatch.from_arrays([_column(batch, column, said) for column in columns], schema=fields)


def _column(batch: pa.RecordBatch, column: Column, said: Mapping[str, pa.Scalar]) -> Any:
    if column.name in said:
        return pa.repeat(said[column.name].cast(column.type), batch.num_rows)
    place = batch.schema.get_field_index(column.name)
    return pa.nulls(batch.num_rows, column.type) if place < 0 else batch.column(place).cast(column.type)


def all_rows(
    folder: Path, files: Iterable[str], columns: Sequence[Column], parts: PartitionValues
) -> Iterator[pa.RecordBatch]:
    """The rows of several, one after the other."""
    for name in files:
        yield from read_rows(folder / name, columns, parts.get(name, {}))


def _beside(batches: Iterator[pa.RecordBatch], flags: Flags) -> Iterator[tuple[pa.RecordBatch, Flags]]:
    start = 0
    for batch in batches:
        yield batch, flags[start : start + batch.num_rows]
        start += batch.num_rows


def _keys(schema: TableSchema, batch: pa.RecordBatch, seed: int) -> RowHashes:
    return hash_keys([batch.column(i) for i in key_ordinals(schema)], seed)


def _joined(prints: list[RowHashes]) -> RowHashes:
    """All as one; the list is emptied, for there may be many."""
    whole = np.concatenate([np.empty((0, 2), np.uint64), *prints])
    prints.clear()
    return whole
