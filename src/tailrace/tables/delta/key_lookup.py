"""Find rows of a Delta table by key or by image.

A required row that is missing is an error before anything is committed. Rows are compared as in `row_ids`, like in the
fold. Scans stream: memory holds the rows that were asked for, not the table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from tailrace.errors import RELOAD_TABLE_HINT, BaseRowMissing
from tailrace.model.schema import TableSchema
from tailrace.tables.fold.fold import as_type
from tailrace.tables.fold.folded_changes import DELETE, MARK_DELETED, Codes, Flags, key_ordinals
from tailrace.tables.fold.row_ids import Ints, key_numbers

CHUNK_ROWS_MIN = 65_536
CHUNK_BYTES_MAX = 64 << 20
OMITTED = -1


@dataclass(frozen=True, kw_only=True)
class RowsWithoutBase:
    """Folded rows that take values from rows which the table does not have."""

    keys: pa.Table
    """The keys to refetch: those that the rows have after the batch."""
    _schema: TableSchema
    _rows: pa.Table
    _indices: Ints

    def fill_from(self, answer_rows: pa.Table, *, deleted_column: str | None = None) -> pa.Table:
        """Return all folded rows, with these replaced by the refetched ones.

        A row that the source no longer has is left out. But if it has no base at all, the table's row under its key is
        removed, because that is an earlier row. With `deleted_column`, a row with that flag is not left out: the
        table's row, if any, is marked as deleted.
        """
        answers = match_answers(self.keys, answer_rows)
        unanswered = self._indices[answers < 0]
        operations = np.full(self._rows.num_rows, OMITTED, np.int8)
        base = self._rows.column("base").take(pa.array(unanswered))
        operations[unanswered[base.is_null().to_numpy()]] = DELETE
        if deleted_column is not None:
            flags = self._rows.column(self._schema.names.index(deleted_column)).take(pa.array(unanswered))
            operations[unanswered[flags.to_numpy()]] = MARK_DELETED
        return _replaced(self._schema, self._rows, self._indices, answer_rows, answers, operations)


def find_rows_without_base(schema: TableSchema, table: DeltaTable, rows: pa.Table) -> RowsWithoutBase | None:
    """Find folded rows that take values from rows missing in the table; None without any.

    Costs a scan of the key's columns.
    """
    partial = _Partial.of(schema, rows)
    if partial is None:
        return None
    # For a moved row the table cannot be trusted: it may have been read after the move, when another row already had
    # the old key. A row that kept its key is completed by later changes. A null base is never found.
    wanted = partial.moved | (_locate(schema, table, partial.bases, []).found < 0)
    if not wanted.any():
        return None
    names = [schema.columns[i].name for i in key_ordinals(schema)]
    keys = pa.Table.from_arrays([column.filter(pa.array(wanted)) for column in partial.own], names=names)
    return RowsWithoutBase(keys=keys, _schema=schema, _rows=rows, _indices=partial.rows[wanted])


def match_answers(keys: pa.Table, answer_rows: pa.Table) -> Ints:
    """Return per key the index of its refetched row; -1 without one."""
    both = [_joined(keys.column(name), as_type(answer_rows.column(name), kind)) for name, kind in _types(keys)]
    numbered = key_numbers(both)
    answer_of = np.full(numbered.limit, -1, np.int64)
    answer_of[numbered.numbers[keys.num_rows :]] = np.arange(answer_rows.num_rows)
    answers: Ints = answer_of[numbered.numbers[: keys.num_rows]]
    return answers


def _types(table: pa.Table) -> list[tuple[str, pa.DataType]]:
    return [(field.name, field.type) for field in table.schema]


def _replaced(
    schema: TableSchema, rows: pa.Table, indices: Ints, answer_rows: pa.Table, answers: Ints, operations: Codes
) -> pa.Table:
    """Return the rows with refetched ones filled in, left out or given another `op`."""
    row_indices, is_replaced = np.arange(rows.num_rows), operations != OMITTED
    row_indices[indices] = np.where(answers >= 0, rows.num_rows + answers, np.where(is_replaced[indices], indices, -1))
    kept = np.flatnonzero(row_indices >= 0)
    result = rows.take(pa.array(kept))
    for ordinal, column in enumerate(schema.columns):
        if column.name not in answer_rows.column_names:
            continue  # keeps the value from the change itself
        both = _joined(rows.column(ordinal), as_type(answer_rows.column(column.name), column.type))
        result = result.set_column(ordinal, rows.schema.field(ordinal), both.take(pa.array(row_indices[kept])))
    operations = np.where(is_replaced, operations, rows.column("op").to_numpy()).astype(np.int8)[kept]
    result = result.set_column(rows.schema.get_field_index("op"), rows.schema.field("op"), pa.array(operations))
    whole = pa.array((row_indices[kept] >= rows.num_rows) | is_replaced[kept])
    for name in ("absent", "base"):
        field = rows.schema.field(name)
        values = pc.if_else(whole, pa.scalar(None, field.type), result.column(name))
        result = result.set_column(rows.schema.get_field_index(name), field, values)
    return result


def merge_source(
    schema: TableSchema, table: DeltaTable, rows: pa.Table, *, only: str | None = None
) -> tuple[pa.Table, set[int]]:
    """Return the folded rows as a merge takes them: `c0…cN`, `op`, and flags `k<i>`.

    There is a flag column for each ordinal in the returned set, true where the table's own row keeps its value. The
    caller must check that this row exists. Values of moved rows are fetched. With `only`, a flag column, the table's
    rows count only where it is set, and new rows are added to them: then all values are fetched.
    """
    plain = rows.select([*(f"c{i}" for i in range(len(schema.columns))), "op"])
    partial = _Partial.of(schema, rows)
    if partial is None:
        return plain, set()
    absent = rows.column("absent").combine_chunks()
    still = partial.still if only is None else np.zeros(partial.rows.size, np.bool_)
    stays = np.zeros(rows.num_rows, np.bool_)
    stays[partial.rows] = still
    row_of, ordinal_of = pc.list_parent_indices(absent).to_numpy(), absent.flatten().to_numpy()
    moves = ~stays[row_of]
    moved = partial.rows[~still]
    if moved.size:
        wanted = [column.filter(pa.array(~still)) for column in partial.bases]
        plain = _fetch(schema, table, plain, moved, wanted, row_of[moves], ordinal_of[moves], only)
    kept = set(np.unique(ordinal_of[~moves]).tolist())
    for ordinal in sorted(kept):
        flags = np.zeros(rows.num_rows, np.bool_)
        flags[row_of[(ordinal_of == ordinal) & ~moves]] = True
        plain = plain.append_column(f"k{ordinal}", pa.array(flags))
    return plain, kept


@dataclass(frozen=True, kw_only=True)
class _Partial:
    """Folded rows that take values from the table: their indices, keys and bases' keys."""

    rows: Ints
    own: list[Any]
    bases: list[Any]
    still: Flags
    """Flags of rows whose key equals their base's key."""
    moved: Flags
    """Flags of rows that had another key in between."""

    @classmethod
    def of(cls, schema: TableSchema, folded: pa.Table) -> _Partial | None:
        absent = folded.column("absent").combine_chunks()
        if absent.null_count == len(absent):
            return None
        rows = np.flatnonzero(absent.is_valid().to_numpy(zero_copy_only=False))
        own = [folded.column(f"c{i}").take(pa.array(rows)) for i in key_ordinals(schema)]
        base = folded.column("base").combine_chunks().take(pa.array(rows))
        bases = [pc.struct_field(base, [i]) for i in range(len(own))]
        moved = folded.column("moved").to_numpy()[rows]
        return cls(rows=rows, own=own, bases=bases, still=_same(own, bases), moved=moved)


def _fetch(
    schema: TableSchema,
    table: DeltaTable,
    plain: pa.Table,
    moved: Ints,
    wanted: Sequence[Any],
    row_of: Ints,
    ordinal_of: Ints,
    only: str | None,
) -> pa.Table:
    """Fill the values of the old rows into the rows that moved."""
    ordinals = np.unique(ordinal_of).tolist()
    values_found = find_rows(schema, table, wanted, ordinals, only=only)
    for ordinal in ordinals:
        values = plain.column(ordinal)
        row_indices = np.arange(plain.num_rows)
        into = row_of[ordinal_of == ordinal]
        row_indices[into] = plain.num_rows + np.searchsorted(moved, into)
        both = pa.chunked_array([*values.chunks, *values_found.column(ordinals.index(ordinal)).chunks], values.type)
        plain = plain.set_column(ordinal, plain.schema.field(ordinal), both.take(pa.array(row_indices)))
    return plain


def find_rows(
    schema: TableSchema, table: DeltaTable, wanted: Sequence[Any], ordinals: list[int], *, only: str | None = None
) -> pa.Table:
    """Return the given columns of the rows with these keys, in the keys' order."""
    located = _locate(schema, table, wanted, ordinals, only)
    if (located.found < 0).any():
        raise base_row_missing(schema, located.found >= 0)
    return located.rows.take(pa.array(located.found))


def base_row_missing(schema: TableSchema, found: Flags) -> BaseRowMissing:
    return BaseRowMissing(
        "a partial change arrived for a row that the table does not hold",
        table=schema.table,
        rows=int(np.count_nonzero(~found)),
        hint=RELOAD_TABLE_HINT,
    )


@dataclass(frozen=True, kw_only=True)
class _Located:
    """The found rows in scan order, and per requested key the row's index or -1."""

    rows: pa.Table
    found: Ints


def _locate(
    schema: TableSchema, table: DeltaTable, wanted: Sequence[Any], ordinals: list[int], only: str | None = None
) -> _Located:
    numbers = key_numbers(wanted).numbers if len(wanted[0]) else np.empty(0, np.int64)
    _, first, inverse = np.unique(numbers, return_index=True, return_inverse=True)
    count = first.size
    found = np.full(count, -1, np.int64)
    sought = [column.take(pa.array(first)) for column in wanted]
    keys = [schema.columns[i] for i in key_ordinals(schema)]
    columns = [schema.columns[i] for i in ordinals]
    pieces, total = [pa.schema([(column.name, column.type) for column in columns]).empty_table()], 0
    names = [column.name for column in [*keys, *columns]]
    for chunk in _chunks(table, schema, names, count, only) if count else ():
        pairs = zip(sought, keys, strict=True)
        numbered = key_numbers([_joined(value, chunk.column(key.name)) for value, key in pairs])
        index_of = np.full(numbered.limit, -1, np.int64)
        index_of[numbered.numbers[:count]] = np.arange(count)
        key_indices = index_of[numbered.numbers[count:]]
        hits = np.flatnonzero(key_indices >= 0)
        found[key_indices[hits]] = total + np.arange(hits.size)
        pieces.append(chunk.select([column.name for column in columns]).take(pa.array(hits)))
        total += hits.size
    return _Located(rows=pa.concat_tables(pieces), found=found[inverse])


def keys_exist(schema: TableSchema, table: DeltaTable, keys: pa.Table, only: str | None = None) -> Flags:
    """Flag the keys that the table holds.

    The keys are distinct, and given as the key's columns under their own names. With `only`, only rows count in which
    that column is true.
    """
    columns = [as_type(keys.column(schema.columns[i].name), schema.columns[i].type) for i in key_ordinals(schema)]
    found: Flags = _locate(schema, table, columns, [], only).found >= 0
    return found


def _same(left: Sequence[Any], right: Sequence[Any]) -> Any:
    numbers = key_numbers([_joined(a, b) for a, b in zip(left, right, strict=True)]).numbers
    return numbers[: len(left[0])] == numbers[len(left[0]) :]


def _joined(first: Any, second: Any) -> Any:
    """Concatenate two columns; each may be an array or a chunked array."""
    parts = [part.chunks if isinstance(part, pa.ChunkedArray) else [part] for part in (first, second)]
    return pa.chunked_array([*parts[0], *parts[1]], first.type)


def _chunks(
    table: DeltaTable, schema: TableSchema, names: list[str], rows_wanted: int, only: str | None = None
) -> Iterator[pa.Table]:
    """Scan in pieces large enough to be matched efficiently."""
    types = {column.name: column.type for column in schema.columns}
    fields = pa.schema([(name, types[name]) for name in names])
    pending: list[pa.Table] = []
    rows = size = 0
    scanned = names if only is None else list(dict.fromkeys([*names, only]))
    for batch in pa.RecordBatchReader.from_stream(table.scan(columns=scanned)):
        plain = [batch.column(name).cast(types[name]) for name in names]
        piece = pa.Table.from_arrays(plain, schema=fields)
        pending.append(piece if only is None else piece.filter(batch.column(only)))
        rows, size = rows + batch.num_rows, size + pending[-1].nbytes
        if rows >= max(CHUNK_ROWS_MIN, rows_wanted) or size >= CHUNK_BYTES_MAX:
            yield pa.concat_tables(pending)
            pending, rows, size = [], 0, 0
    if pending:
        yield pa.concat_tables(pending)
