"""Changes on their way through the rules: each row as it is, as it was, and its old key, side by side.

All three are *images* of the row and go through the same rules, or what is hidden in one would stand in another. What
the server did not send is absent, which is not null: it stays absent, under whatever name. A value that its type could
not hold is known only as text; a rule that would have to look at it fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from tailrace.model import change
from tailrace.model.batch import ChangeBatch
from tailrace.model.change import Operation
from tailrace.model.schema import TableSchema
from tailrace.transforms.transform_errors import UNFIT_REASON, UNSENT_REASON, RowFault, RowFaults

Mask = npt.NDArray[np.bool_]
AFTER = ""
_CODES = np.full(256, -1, np.int8)
_CODES[[ord(operation.value[0]) for operation in Operation]] = [operation.code for operation in Operation]
"""By the first letter, of which no two have the same."""
_ABOUT = frozenset(field.name for field in change.REQUIRED)
SLICED_PART = 4
"""Where a column holds one value throughout, and no less than one of so many rows stay, nothing of it is copied."""


@dataclass
class Image:
    """The columns of one image by name; `valid` tells the rows that have it, None: all."""

    which: str
    columns: dict[str, pa.Array]
    valid: Mask | None = None


@dataclass(frozen=True, kw_only=True)
class RuleFailure:
    """Rows that a rule could not be applied to, and why in words that tell nothing of them."""

    rule: str
    column: str
    reason: str
    rows: Mask
    error: Exception | None = None
    """Of a function of the user's: what it raised."""


@dataclass
class RowImages:
    """Changes of one table. Rules work on it in place."""

    count: int
    metadata: dict[str, pa.Array]
    """What every change has: `_op`, `_seq` and so on."""
    images: list[Image]
    """The row as it is comes first."""
    unsent: dict[str, Mask] = field(default_factory=dict)
    """By column, the rows whose value was not sent."""
    unfit: dict[tuple[str, str], dict[int, str]] = field(default_factory=dict)
    """By image and column, the rows whose value did not fit, and its text. Rare."""
    failures: list[RuleFailure] = field(default_factory=list)
    _source: npt.NDArray[np.int64] | None = None
    """Which row of the batch each was, where some are gone: that none is, is known without numbering them."""
    _codes: tuple[pa.Array, npt.NDArray[np.int8]] | None = None
    """The operations, and what they are by number."""

    @property
    def after(self) -> Image:
        return self.images[0]

    @property
    def source_rows(self) -> npt.NDArray[np.int64]:
        """Which row of the batch each was."""
        return np.arange(self.count) if self._source is None else self._source

    def image(self, which: str) -> Image | None:
        return next((image for image in self.images if image.which == which), None)

    def is_op(self, operation: Operation) -> Mask:
        """The rows of this operation."""
        given = self.metadata[change.OP]
        if self._codes is None or self._codes[0] is not given:
            self._codes = (given, _codes_of(given))
        found: Mask = self._codes[1] == operation.code
        return found

    def unknown_rows(self, image: Image, columns: tuple[str, ...]) -> RowFaults:
        """The rows of which some of these columns were not sent, or did not fit."""
        absent = [self.unsent[column] for column in columns if image.which == AFTER and column in self.unsent]
        odd = []
        for column in columns:
            if texts := self.unfit.get((image.which, column)):
                mask = np.zeros(self.count, np.bool_)
                mask[list(texts)] = True
                odd.append(mask)
        found = ((UNSENT_REASON, absent), (UNFIT_REASON, odd))
        return tuple(RowFault(reason=why, rows=np.logical_or.reduce(masks)) for why, masks in found if masks)

    def fail(self, rule: str, column: str, *faults: RowFault) -> None:
        for fault in faults:
            if fault.rows.any():
                failure = RuleFailure(rule=rule, column=column, reason=fault.reason, rows=fault.rows, error=fault.error)
                self.failures.append(failure)

    @property
    def failed_rows(self) -> Mask:
        """The rows that some rule has failed at."""
        found = np.zeros(self.count, np.bool_)
        for one in self.failures:
            found |= one.rows
        return found

    def rename(self, names: dict[str, str]) -> None:
        for image in self.images:
            image.columns = {names.get(name, name): values for name, values in image.columns.items()}
        self.unsent = {names.get(name, name): rows for name, rows in self.unsent.items()}
        self.unfit = {(which, names.get(name, name)): texts for (which, name), texts in self.unfit.items()}

    def drop(self, column: str) -> None:
        for image in self.images:
            image.columns.pop(column, None)
        self.clear_marks(column)

    def clear_marks(self, column: str) -> None:
        """What a column was is not known by another way any more: it has a value now, in every image."""
        self.unsent.pop(column, None)
        for image in self.images:
            self.unfit.pop((image.which, column), None)

    def take(self, keep: Mask) -> None:
        """Only these rows."""
        if keep.all():
            return
        kept_at = np.flatnonzero(keep)
        chosen = pa.array(kept_at)  # Arrow takes texts by their places twice as fast as by a mask
        known = self._codes if self._codes is not None and self._codes[0] is self.metadata[change.OP] else None
        # Of a few rows that are left, a slice would hold the memory of all.
        most = kept_at.size * SLICED_PART >= self.count
        self.metadata = {
            name: values.slice(0, kept_at.size) if most and is_constant(values) else values.take(chosen)
            for name, values in self.metadata.items()
        }
        self._codes = None if known is None else (self.metadata[change.OP], known[1][kept_at])
        for image in self.images:
            image.columns = {name: values.take(chosen) for name, values in image.columns.items()}
            image.valid = None if image.valid is None else image.valid[keep]
        self.unsent = {name: rows[keep] for name, rows in self.unsent.items() if rows[keep].any()}
        places = np.cumsum(keep) - 1 if self.unfit else keep
        self.unfit = {
            where: kept
            for where, texts in self.unfit.items()
            if (kept := {int(places[row]): text for row, text in texts.items() if keep[row]})
        }
        self.failures = [replace(one, rows=kept_rows) for one in self.failures if (kept_rows := one.rows[keep]).any()]
        self._source = kept_at if self._source is None else self._source[kept_at]
        self.count = kept_at.size

    def copy(self) -> RowImages:
        """The same rows, to be worked on apart."""
        images = [Image(image.which, dict(image.columns), image.valid) for image in self.images]
        unfit = {where: dict(texts) for where, texts in self.unfit.items()}
        return RowImages(
            self.count, dict(self.metadata), images, dict(self.unsent), unfit, list(self.failures), self._source
        )


def is_constant(values: pa.Array) -> bool:
    """Whether all values are the same, as what is told about the rows of one transaction mostly is. Texts, and types
    whose values are all of one size; of a value that is missing nothing is said."""
    last = len(values) - 1
    if last < 0 or values.null_count or values[0] != values[last]:
        return False
    buffers, begin = values.buffers(), values.offset
    if not pa.types.is_string(values.type):
        width = values.type.bit_width // 8
        return _repeats(buffers[1], begin * width, width, last)
    places = np.frombuffer(buffers[1], np.int32)[begin : begin + last + 2]
    size = int(places[1] - places[0])
    return bool((np.diff(places) == size).all()) and (not size or _repeats(buffers[2], int(places[0]), size, last))


def _repeats(buffer: pa.Buffer, begin: int, size: int, times: int) -> bool:
    """Whether so many bytes come as often again behind them: then each is as the one before it."""
    found: bool = buffer.slice(begin, size * times).equals(buffer.slice(begin + size, size * times))
    return found


def _codes_of(operations: pa.Array) -> npt.NDArray[np.int8]:
    """The operations by number, told by their first letters: to compare whole texts is most of what a filter costs."""
    if not len(operations):
        return np.zeros(0, np.int8)
    if is_constant(operations):
        return np.full(len(operations), Operation(operations[0].as_py()).code, np.int8)
    _, offsets, letters = operations.buffers()
    starts = np.frombuffer(offsets, np.int32)[operations.offset : operations.offset + len(operations)]
    return _CODES[np.frombuffer(letters, np.uint8)[starts]]


def open_batch(batch: ChangeBatch) -> RowImages:
    """A batch, taken apart."""
    data, schema = batch.data, batch.schema
    names = set(data.schema.names)
    count = data.num_rows
    columns = {name: data.column(change.stored_name(name)) for name in schema.names}
    images = [Image(AFTER, columns)]
    old = [which for which in (change.BEFORE, change.MOVED_FROM) if which in names]
    images += [_old(which, data.column(which), schema) for which in old]
    rows = RowImages(count, {name: data.column(name) for name in data.schema.names if name in _ABOUT}, images)
    if change.UNCHANGED in names:
        rows.unsent = _absent(data.column(change.UNCHANGED), count)
    if change.UNFIT in names:
        rows.unfit = _unfit(data.column(change.UNFIT))
    return rows


def open_snapshot_rows(schema: TableSchema, data: pa.RecordBatch, unfit: pa.Array | None = None) -> RowImages:
    """Rows that a snapshot has read, as if each was a change; `unfit` is what of them does not fit."""
    count = data.num_rows
    about = {change.OP: pa.array([Operation.READ.value]).take(pa.array(np.zeros(count, np.int64)))}
    columns = {name: data.column(at) for at, name in enumerate(schema.names)}
    rows = RowImages(count, about, [Image(AFTER, columns)])
    if unfit is not None:
        rows.unfit = _unfit(unfit)
    return rows


def _old(which: str, structs: pa.StructArray, schema: TableSchema) -> Image:
    verbatim = {change.stored_name(name): name for name in schema.names}
    valid = np.asarray(pc.is_valid(structs).to_numpy(zero_copy_only=False), np.bool_)
    children = structs.flatten()  # with the struct's own nulls
    names = [verbatim[structs.type.field(at).name] for at in range(structs.type.num_fields)]
    return Image(which, dict(zip(names, children, strict=True)), valid)


def _absent(lists: pa.ListArray, count: int) -> dict[str, Mask]:
    names, parents = lists.flatten(), pc.list_parent_indices(lists).to_numpy()
    found: dict[str, Mask] = {}
    for name in pc.unique(names).to_pylist():
        mask = np.zeros(count, np.bool_)
        mask[parents[pc.equal(names, name).to_numpy(zero_copy_only=False)]] = True
        found[name] = mask
    return found


def _unfit(cells: pa.ListArray) -> dict[tuple[str, str], dict[int, str]]:
    found: dict[tuple[str, str], dict[int, str]] = {}
    for row in np.flatnonzero(pc.is_valid(cells).to_numpy(zero_copy_only=False)).tolist():
        for cell in cells[row].as_py():
            found.setdefault(_whose(cell["column"]), {})[row] = cell["text"]
    return found


def _whose(column: str) -> tuple[str, str]:
    """The image and the column that a cell of `_unfit` speaks of."""
    for which in (change.BEFORE, change.MOVED_FROM):
        if column.startswith(f"{which}."):
            return which, column.removeprefix(f"{which}.")
    return AFTER, column


def to_batch(rows: RowImages, schema: TableSchema) -> ChangeBatch:
    """The rows as a batch of the shape that the rules made."""
    fields = schema.change_schema()
    columns: dict[str, Any] = dict(rows.metadata)
    for name in schema.names:
        columns[change.stored_name(name)] = rows.after.columns[name]
    moves = 0
    for image in rows.images[1:]:
        valid = np.ones(rows.count, np.bool_) if image.valid is None else image.valid
        if valid.any():
            columns[image.which] = _struct(image, fields.field(image.which).type, valid, schema)
            moves = int(valid.sum()) if image.which == change.MOVED_FROM else moves
    if (unchanged := _unchanged(rows, schema)) is not None:
        columns[change.UNCHANGED] = unchanged
    cells = dict(_cells(rows, schema))
    if cells:
        columns[change.UNFIT] = pa.array([cells.get(row) for row in range(rows.count)], change.UNFIT_TYPE)
    kept = [one for one in fields if one.name in columns]
    data = pa.RecordBatch.from_arrays([columns[one.name] for one in kept], schema=pa.schema(kept))
    return ChangeBatch(
        schema=schema,
        data=data,
        moves=moves,
        truncates=int(rows.is_op(Operation.TRUNCATE).sum()),
        unfit=sum(map(len, cells.values())),
    )


def _struct(image: Image, kind: pa.DataType, valid: Mask, schema: TableSchema) -> pa.Array:
    verbatim = {change.stored_name(name): name for name in schema.names}
    fields = [kind.field(at) for at in range(kind.num_fields)]
    children = [image.columns[verbatim[one.name]] for one in fields]
    return pa.StructArray.from_arrays(children, fields=fields, mask=pa.array(~valid))


def _unchanged(rows: RowImages, schema: TableSchema) -> pa.Array | None:
    names = [name for name in schema.names if name in rows.unsent and rows.unsent[name].any()]
    if not names:
        return None
    table = np.stack([rows.unsent[name] for name in names], axis=1)
    counts = table.sum(axis=1)
    offsets = np.concatenate([np.zeros(1, np.int32), np.cumsum(counts, dtype=np.int32)])
    which = np.nonzero(table)[1]
    listed = pa.array(names, pa.string()).take(pa.array(which))
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), listed, mask=pa.array(counts == 0))


def _cells(rows: RowImages, schema: TableSchema) -> Iterator[tuple[int, list[dict[str, str]]]]:
    known = set(schema.names)
    found: dict[int, list[dict[str, str]]] = {}
    for (which, column), texts in rows.unfit.items():
        if column in known and rows.image(which) is not None:
            for row, text in texts.items():
                found.setdefault(row, []).append({"column": f"{which}.{column}" if which else column, "text": text})
    yield from found.items()


def renumber(batches: tuple[ChangeBatch, ...]) -> tuple[ChangeBatch, ...]:
    """The batches with `_seq` counting from zero without a gap, in the order it had."""
    if not batches:
        return ()
    seqs = [batch.data.column(change.SEQ).to_numpy() for batch in batches]
    every = np.concatenate(seqs)
    numbers = np.empty(every.size, np.int64)
    numbers[np.argsort(every, kind="stable")] = np.arange(every.size)
    found, begin = [], 0
    for batch, mine in zip(batches, seqs, strict=True):
        now = numbers[begin : begin + mine.size]
        begin += mine.size
        place = batch.data.schema.get_field_index(change.SEQ)
        data = batch.data
        if not np.array_equal(now, mine):
            data = data.set_column(place, data.schema.field(place), pa.array(now))
        found.append(replace(batch, data=data, ends=(int(now[0]), int(now[-1]))))
    return tuple(found)
