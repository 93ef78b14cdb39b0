"""Rows that already stand in a Delta table, found by key or by image.

A row that must be there and is not is an error here, before anything is committed. Sameness is what
`identity` says, as in the fold. Scans stream: memory holds what was asked for, not the table.
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
from tailrace.tables.fold.fold import DELETE, MARK_DELETED, Codes, Flags, as_type, key_ordinals
from tailrace.tables.fold.row_ids import Ints, key_numbers

CHUNK_ROWS_MIN = 65_536
CHUNK_BYTES_MAX = 64 << 20
LEFT_OUT = -1


@dataclass(frozen=True, kw_only=True)
class RowsWithoutBase:
    """Folded rows that take values from rows which the table does not have."""

    keys: pa.Table
    """What to ask the source for: the keys that the rows have after the batch."""
    _schema: TableSchema
    _rows: pa.Table
    _asked: Ints

    def fill_from(self, given: pa.Table, *, marks: str | None = None) -> pa.Table:
        """All folded rows, these ones whole as they were given, or left out if they were not; but what stands under the
        key of one that has no base goes, for it is an earlier row.

        With `marks`, a flag among the columns, a row that has it and is not given is not left out: whatever of it
        stands in the table is marked."""
        answers = match_answers(self.keys, given)
        gone = self._asked[answers < 0]
        instead = np.full(self._rows.num_rows, LEFT_OUT, np.int8)
        base = self._rows.column("base").take(pa.array(gone))
        instead[gone[base.is_null().to_numpy()]] = DELETE
        if marks is not None:
            flags = self._rows.column(self._schema.names.index(marks)).take(pa.array(gone))
            instead[gone[flags.to_numpy()]] = MARK_DELETED
        return _replaced(self._schema, self._rows, self._asked, given, answers, instead)


def find_rows_without_base(schema: TableSchema, table: DeltaTable, rows: pa.Table) -> RowsWithoutBase | None:
    """Which of the folded rows take values from rows that the table does not have; None if none does. Costs a scan of
    the key's columns."""
    partial = _Partial.of(schema, rows)
    if partial is None:
        return None
    # Of a row that moved nothing in the table can be trusted: it may have been read after the move, when another
    # row already had the old key. A row that kept its key is brought up to date by the changes still to come. A base
    # that is null is found nowhere.
    wanted = partial.moved | (_locate(schema, table, partial.bases, []).found < 0)
    if not wanted.any():
        return None
    names = [schema.columns[i].name for i in key_ordinals(schema)]
    keys = pa.Table.from_arrays([column.filter(pa.array(wanted)) for column in partial.own], names=names)
    return RowsWithoutBase(keys=keys, _schema=schema, _rows=rows, _asked=partial.rows[wanted])


def match_answers(keys: pa.Table, given: pa.Table) -> Ints:
    """Per key the row that was given for it; -1 if none was."""
    both = [_joined(keys.column(name), as_type(given.column(name), kind)) for name, kind in _types(keys)]
    numbered = key_numbers(both)
    answer_of = np.full(numbered.limit, -1, np.int64)
    answer_of[numbered.numbers[keys.num_rows :]] = np.arange(given.num_rows)
    answers: Ints = answer_of[numbered.numbers[: keys.num_rows]]
    return answers


def _types(table: pa.Table) -> list[tuple[str, pa.DataType]]:
    return [(field.name, field.type) for field in table.schema]


def _replaced(
    schema: TableSchema, rows: pa.Table, asked: Ints, given: pa.Table, answers: Ints, instead: Codes
) -> pa.Table:
    """The rows, those asked for as they were given; of those that were not given what is done instead."""
    places, other = np.arange(rows.num_rows), instead != LEFT_OUT
    places[asked] = np.where(answers >= 0, rows.num_rows + answers, np.where(other[asked], asked, -1))
    kept = np.flatnonzero(places >= 0)
    result = rows.take(pa.array(kept))
    for ordinal, column in enumerate(schema.columns):
        if column.name not in given.column_names:
            continue  # of the change that asks for the row
        both = _joined(rows.column(ordinal), as_type(given.column(column.name), column.type))
        result = result.set_column(ordinal, rows.schema.field(ordinal), both.take(pa.array(places[kept])))
    operations = np.where(other, instead, rows.column("op").to_numpy()).astype(np.int8)[kept]
    result = result.set_column(rows.schema.get_field_index("op"), rows.schema.field("op"), pa.array(operations))
    whole = pa.array((places[kept] >= rows.num_rows) | other[kept])
    for name in ("absent", "base"):
        field = rows.schema.field(name)
        values = pc.if_else(whole, pa.scalar(None, field.type), result.column(name))
        result = result.set_column(rows.schema.get_field_index(name), field, values)
    return result


def merge_source(
    schema: TableSchema, table: DeltaTable, rows: pa.Table, *, only: str | None = None
) -> tuple[pa.Table, set[int]]:
    """The folded rows as a merge takes them: `c0…cN`, `op`, and a flag `k<i>` for each column in the returned set, true
    where the table's own row keeps its value; that there is one is for whoever puts it there to see. Values of rows
    that moved are fetched. With `only`, a flag among the columns, the table's rows count only where it is set, and rows
    that come stand beside them: then all values are fetched."""
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
    """The folded rows that take values from the table: their places, their keys, and the keys of their bases."""

    rows: Ints
    own: list[Any]
    bases: list[Any]
    still: Flags
    """Whether both are one key."""
    moved: Flags
    """Whether the row had another key in between."""

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
    """Put the values of the old rows into the rows that moved."""
    ordinals = np.unique(ordinal_of).tolist()
    found = find_rows(schema, table, wanted, ordinals, only=only)
    for ordinal in ordinals:
        values = plain.column(ordinal)
        places = np.arange(plain.num_rows)
        into = row_of[ordinal_of == ordinal]
        places[into] = plain.num_rows + np.searchsorted(moved, into)
        both = pa.chunked_array([*values.chunks, *found.column(ordinals.index(ordinal)).chunks], values.type)
        plain = plain.set_column(ordinal, plain.schema.field(ordinal), both.take(pa.array(places)))
    return plain


def find_rows(
    schema: TableSchema, table: DeltaTable, wanted: Sequence[Any], ordinals: list[int], *, only: str | None = None
) -> pa.Table:
    """The named columns of the rows with these keys, in the keys' order."""
    located = _locate(schema, table, wanted, ordinals, only)
    if (located.found < 0).any():
        raise base_row_missing(schema, located.found >= 0)
    return located.rows.take(pa.array(located.found))


def base_row_missing(schema: TableSchema, there: Flags) -> BaseRowMissing:
    return BaseRowMissing(
        "a partial change arrived for a row that the table does not hold",
        table=schema.table,
        rows=int(np.count_nonzero(~there)),
        hint=RELOAD_TABLE_HINT,
    )


@dataclass(frozen=True, kw_only=True)
class _Located:
    """The rows that were found, in the order of the scan, and for each key that was asked for which it is; or -1."""

    rows: pa.Table
    found: Ints


def _locate(
    schema: TableSchema, table: DeltaTable, wanted: Sequence[Any], ordinals: list[int], only: str | None = None
) -> _Located:
    asked_for = key_numbers(wanted).numbers if len(wanted[0]) else np.empty(0, np.int64)
    _, once, which = np.unique(asked_for, return_index=True, return_inverse=True)
    count = once.size
    found = np.full(count, -1, np.int64)
    sought = [column.take(pa.array(once)) for column in wanted]
    keys = [schema.columns[i] for i in key_ordinals(schema)]
    columns = [schema.columns[i] for i in ordinals]
    pieces, total = [pa.schema([(column.name, column.type) for column in columns]).empty_table()], 0
    names = [column.name for column in [*keys, *columns]]
    for chunk in _chunks(table, schema, names, count, only) if count else ():
        pairs = zip(sought, keys, strict=True)
        numbered = key_numbers([_joined(value, chunk.column(key.name)) for value, key in pairs])
        place = np.full(numbered.limit, -1, np.int64)
        place[numbered.numbers[:count]] = np.arange(count)
        asked = place[numbered.numbers[count:]]
        hits = np.flatnonzero(asked >= 0)
        found[asked[hits]] = total + np.arange(hits.size)
        pieces.append(chunk.select([column.name for column in columns]).take(pa.array(hits)))
        total += hits.size
    return _Located(rows=pa.concat_tables(pieces), found=found[which])


def keys_exist(schema: TableSchema, table: DeltaTable, keys: pa.Table, only: str | None = None) -> Flags:
    """Which of these keys, the key's columns by their own names, the table holds; with `only`, in rows of which that
    column is true. Each is asked for once."""
    columns = [as_type(keys.column(schema.columns[i].name), schema.columns[i].type) for i in key_ordinals(schema)]
    found: Flags = _locate(schema, table, columns, [], only).found >= 0
    return found


def _same(left: Sequence[Any], right: Sequence[Any]) -> Any:
    numbers = key_numbers([_joined(a, b) for a, b in zip(left, right, strict=True)]).numbers
    return numbers[: len(left[0])] == numbers[len(left[0]) :]


def _joined(first: Any, second: Any) -> Any:
    """The values of one after those of the other; either may be an array or a chunked one."""
    parts = [part.chunks if isinstance(part, pa.ChunkedArray) else [part] for part in (first, second)]
    return pa.chunked_array([*parts[0], *parts[1]], first.type)


def _chunks(
    table: DeltaTable, schema: TableSchema, names: list[str], rows_wanted: int, only: str | None = None
) -> Iterator[pa.Table]:
    """A scan in pieces large enough that looking for the wanted rows in each costs little more than reading it."""
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
