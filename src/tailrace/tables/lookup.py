"""Rows that already stand in a Delta table, found by key or by image.

A row that must be there and is not is an error here, before anything is committed. Sameness is what
`identity` says, as in the fold. Scans stream: memory holds what was asked for, not the table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable

from tailrace.errors import BaseRowMissing
from tailrace.model.schema import TableSchema
from tailrace.tables.fold import key_ordinals
from tailrace.tables.identity import Ints, image_numbers, key_numbers

CHUNK_ROWS_MIN = 65_536
CHUNK_BYTES_MAX = 64 << 20


def merge_source(schema: TableSchema, table: DeltaTable, rows: pa.Table) -> tuple[pa.Table, set[int]]:
    """The folded rows as a merge takes them: `c0…cN`, `op`, and a flag `k<i>` for each column in the returned
    set, true where the table's own row keeps its value. Values of rows that moved are fetched."""
    plain = rows.select([*(f"c{i}" for i in range(len(schema.columns))), "op"])
    absent = rows.column("absent").combine_chunks()
    if absent.null_count == len(absent):
        return plain, set()
    partial = np.flatnonzero(absent.is_valid().to_numpy(zero_copy_only=False))
    own = [rows.column(f"c{i}").take(pa.array(partial)) for i in key_ordinals(schema)]
    base = rows.column("base").combine_chunks().take(pa.array(partial))
    bases = [pc.struct_field(base, [i]) for i in range(len(own))]
    stays = np.zeros(rows.num_rows, np.bool_)
    stays[partial] = _same(own, bases)
    row_of, ordinal_of = pc.list_parent_indices(absent).to_numpy(), absent.flatten().to_numpy()
    still = pa.array(stays[partial])
    find_rows(schema, table, [column.filter(still) for column in bases], [])
    moves = ~stays[row_of]
    moved = partial[~stays[partial]]
    if moved.size:
        wanted = [column.filter(pc.invert(still)) for column in bases]
        plain = _fetch(schema, table, plain, moved, wanted, row_of[moves], ordinal_of[moves])
    kept = set(np.unique(ordinal_of[~moves]).tolist())
    for ordinal in sorted(kept):
        flags = np.zeros(rows.num_rows, np.bool_)
        flags[row_of[(ordinal_of == ordinal) & ~moves]] = True
        plain = plain.append_column(f"k{ordinal}", pa.array(flags))
    return plain, kept


def _fetch(
    schema: TableSchema, table: DeltaTable, plain: pa.Table, moved: Ints, wanted: Sequence[Any],
    row_of: Ints, ordinal_of: Ints,
) -> pa.Table:  # fmt: skip
    """Put the values of the old rows into the rows that moved."""
    ordinals = np.unique(ordinal_of).tolist()
    found = find_rows(schema, table, wanted, ordinals)
    for ordinal in ordinals:
        values = plain.column(ordinal)
        places = np.arange(plain.num_rows)
        into = row_of[ordinal_of == ordinal]
        places[into] = plain.num_rows + np.searchsorted(moved, into)
        both = pa.chunked_array([*values.chunks, *found.column(ordinals.index(ordinal)).chunks], values.type)
        plain = plain.set_column(ordinal, plain.schema.field(ordinal), both.take(pa.array(places)))
    return plain


def find_rows(schema: TableSchema, table: DeltaTable, wanted: Sequence[Any], ordinals: list[int]) -> pa.Table:
    """The named columns of the rows with these keys, in the keys' order. Each key is asked for once."""
    count = len(wanted[0])
    found = np.full(count, -1, np.int64)
    keys = [schema.columns[i] for i in key_ordinals(schema)]
    columns = [schema.columns[i] for i in ordinals]
    pieces, total = [pa.schema([(column.name, column.type) for column in columns]).empty_table()], 0
    names = [column.name for column in [*keys, *columns]]
    for chunk in _chunks(table, schema, names, count) if count else ():
        pairs = zip(wanted, keys, strict=True)
        numbered = key_numbers([_joined(value, chunk.column(key.name)) for value, key in pairs])
        place = np.full(numbered.limit, -1, np.int64)
        place[numbered.numbers[:count]] = np.arange(count)
        asked = place[numbered.numbers[count:]]
        hits = np.flatnonzero(asked >= 0)
        found[asked[hits]] = total + np.arange(hits.size)
        pieces.append(chunk.select([column.name for column in columns]).take(pa.array(hits)))
        total += hits.size
    if (found < 0).any():
        raise BaseRowMissing(
            "a partial change arrived for a row that the table does not hold",
            table=schema.table, rows=int(np.count_nonzero(found < 0)), hint=_RELOAD,
        )  # fmt: skip
    return pa.concat_tables(pieces).take(pa.array(found))


def without(schema: TableSchema, table: DeltaTable, removals: pa.Table) -> Iterator[pa.RecordBatch]:
    """The table's rows less `-copies` of each image in `removals`; too few of one is an error, at the end."""
    left = -removals.column("copies").to_numpy()
    images = [removals.column(f"c{i}") for i in range(len(schema.columns))]
    for chunk in _chunks(table, schema, schema.names, left.size):
        both = [_joined(image, column) for image, column in zip(images, chunk.columns, strict=True)]
        numbered = image_numbers(both)
        image_of = np.full(numbered.limit, -1, np.int64)
        image_of[numbered.numbers[: left.size]] = np.arange(left.size)
        image = image_of[numbered.numbers[left.size :]]
        dropped = _first_copies(image, left)
        left = left - np.bincount(image[dropped], minlength=left.size)
        yield from (chunk.filter(pa.array(~dropped)) if dropped.any() else chunk).to_batches()
    if left.any():
        raise BaseRowMissing(
            "rows to be removed are not in the table", table=schema.table, rows=int(left.sum()), hint=_RELOAD
        )


_RELOAD = "Delete or move the table's folder; the next `tailrace run` loads it again."


def _first_copies(image: Ints, left: Ints) -> Any:
    """Which rows go: of each image the first `left`."""
    hits = np.flatnonzero(image >= 0)
    order = hits[np.argsort(image[hits], kind="stable")]
    sorted_images = image[order]
    starts = np.searchsorted(sorted_images, sorted_images, side="left")
    dropped = np.zeros(image.size, np.bool_)
    dropped[order[np.arange(order.size) - starts < left[sorted_images]]] = True
    return dropped


def _same(left: Sequence[Any], right: Sequence[Any]) -> Any:
    numbers = key_numbers([_joined(a, b) for a, b in zip(left, right, strict=True)]).numbers
    return numbers[: len(left[0])] == numbers[len(left[0]) :]


def _joined(first: Any, second: Any) -> Any:
    """The values of one after those of the other; either may be an array or a chunked one."""
    parts = [part.chunks if isinstance(part, pa.ChunkedArray) else [part] for part in (first, second)]
    return pa.chunked_array([*parts[0], *parts[1]], first.type)


def _chunks(table: DeltaTable, schema: TableSchema, names: list[str], rows_wanted: int) -> Iterator[pa.Table]:
    """A scan in pieces large enough that looking for the wanted rows in each costs little more than reading it."""
    types = {column.name: column.type for column in schema.columns}
    fields = pa.schema([(name, types[name]) for name in names])
    pending: list[pa.Table] = []
    rows = size = 0
    for batch in pa.RecordBatchReader.from_stream(table.scan(columns=names)):
        plain = [batch.column(name).cast(types[name]) for name in names]
        pending.append(pa.Table.from_arrays(plain, schema=fields))
        rows, size = rows + batch.num_rows, size + pending[-1].nbytes
        if rows >= max(CHUNK_ROWS_MIN, rows_wanted) or size >= CHUNK_BYTES_MAX:
            yield pa.concat_tables(pending)
            pending, rows, size = [], 0, 0
    if pending:
        yield pa.concat_tables(pending)
