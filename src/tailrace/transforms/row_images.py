"""Changes on their way through the rules, as columns of row images.

The *images* of a change are its row, its old row and its old key. All three pass the same rules; else a value hidden in
one would be visible in another. An unsent value is not null: it stays unsent, under whatever name. A value that did not
fit its type is known only as text; a rule that needs the value fails.
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
"""Operation codes by first character; no two operations share one."""
_METADATA = frozenset(field.name for field in change.REQUIRED)
SLICED_PART = 4
"""A constant column is sliced if at least one row in so many is kept.

A slice of fewer rows would hold the memory of all.
"""


@dataclass
class Image:
    """The columns of one image by name. `valid` marks the rows that have it; None means all."""

    which: str
    columns: dict[str, pa.Array]
    valid: Mask | None = None


@dataclass(frozen=True, kw_only=True)
class RuleFailure:
    """Rows that a rule failed at, and why, in words that reveal nothing of them."""

    rule: str
    column: str
    reason: str
    rows: Mask
    error: Exception | None = None
    """The exception of a user function."""


@dataclass
class RowImages:
    """Changes of one table. Rules change it in place."""

    count: int
    metadata: dict[str, pa.Array]
    """Metadata columns of the changes: `_op`, `_seq` and so on."""
    images: list[Image]
    """The images; the current row is the first."""
    unsent: dict[str, Mask] = field(default_factory=dict)
    """By column, the rows with an unsent value."""
    unfit: dict[tuple[str, str], dict[int, str]] = field(default_factory=dict)
    """By image and column, the texts of values that did not fit, by row. Rare."""
    failures: list[RuleFailure] = field(default_factory=list)
    _source: npt.NDArray[np.int64] | None = None
    """For each row, its row in the batch; None while no row was removed."""
    _codes: tuple[pa.Array, npt.NDArray[np.int8]] | None = None
    """The operations, and their codes."""

    @property
    def after(self) -> Image:
        return self.images[0]

    @property
    def source_rows(self) -> npt.NDArray[np.int64]:
        """For each row, its row in the batch."""
        return np.arange(self.count) if self._source is None else self._source

    def image(self, which: str) -> Image | None:
        return next((image for image in self.images if image.which == which), None)

    def is_op(self, operation: Operation) -> Mask:
        """Return the rows of this operation."""
        operations = self.metadata[change.OP]
        if self._codes is None or self._codes[0] is not operations:
            self._codes = (operations, _operation_codes(operations))
        mask: Mask = self._codes[1] == operation.code
        return mask

    def unknown_rows(self, image: Image, columns: tuple[str, ...]) -> RowFaults:
        """Return the rows with unsent or unfit values in these columns, as faults."""
        unsent = [self.unsent[column] for column in columns if image.which == AFTER and column in self.unsent]
        unfit = []
        for column in columns:
            if texts := self.unfit.get((image.which, column)):
                mask = np.zeros(self.count, np.bool_)
                mask[list(texts)] = True
                unfit.append(mask)
        reasons = ((UNSENT_REASON, unsent), (UNFIT_REASON, unfit))
        return tuple(RowFault(reason=reason, rows=np.logical_or.reduce(masks)) for reason, masks in reasons if masks)

    def fail(self, rule: str, column: str, *faults: RowFault) -> None:
        for fault in faults:
            if fault.rows.any():
                failure = RuleFailure(rule=rule, column=column, reason=fault.reason, rows=fault.rows, error=fault.error)
                self.failures.append(failure)

    @property
    def failed_rows(self) -> Mask:
        """The rows that some rule failed at."""
        failed = np.zeros(self.count, np.bool_)
        for failure in self.failures:
            failed |= failure.rows
        return failed

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
        """Forget unsent and unfit values of a column.

        The column has a value now, in every image.
        """
        self.unsent.pop(column, None)
        for image in self.images:
            self.unfit.pop((image.which, column), None)

    def take(self, keep: Mask) -> None:
        """Keep only these rows."""
        if keep.all():
            return
        kept_at = np.flatnonzero(keep)
        chosen = pa.array(kept_at)  # Arrow takes strings by index twice as fast as by mask
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
        new_rows = np.cumsum(keep) - 1 if self.unfit else keep
        self.unfit = {
            column_key: kept
            for column_key, texts in self.unfit.items()
            if (kept := {int(new_rows[row]): text for row, text in texts.items() if keep[row]})
        }
        self.failures = [
            replace(failure, rows=kept_rows) for failure in self.failures if (kept_rows := failure.rows[keep]).any()
        ]
        self._source = kept_at if self._source is None else self._source[kept_at]
        self.count = kept_at.size

    def copy(self) -> RowImages:
        """Return an independent copy."""
        images = [Image(image.which, dict(image.columns), image.valid) for image in self.images]
        unfit = {column_key: dict(texts) for column_key, texts in self.unfit.items()}
        return RowImages(
            self.count, dict(self.metadata), images, dict(self.unsent), unfit, list(self.failures), self._source
        )


def is_constant(values: pa.Array) -> bool:
    """Return whether all values are equal and none is missing.

    Metadata of one transaction's rows mostly is. It works for strings and for types of fixed width.
    """
    last = len(values) - 1
    if last < 0 or values.null_count or values[0] != values[last]:
        return False
    buffers, begin = values.buffers(), values.offset
    if not pa.types.is_string(values.type):
        width = values.type.bit_width // 8
        return _repeats(buffers[1], begin * width, width, last)
    offsets = np.frombuffer(buffers[1], np.int32)[begin : begin + last + 2]
    size = int(offsets[1] - offsets[0])
    return bool((np.diff(offsets) == size).all()) and (not size or _repeats(buffers[2], int(offsets[0]), size, last))


def _repeats(buffer: pa.Buffer, begin: int, size: int, times: int) -> bool:
    """Return whether `size` bytes are repeated `times` times: each equals the one before it."""
    equal: bool = buffer.slice(begin, size * times).equals(buffer.slice(begin + size, size * times))
    return equal


def _operation_codes(operations: pa.Array) -> npt.NDArray[np.int8]:
    """Return the operations' codes, read from first characters.

    Comparing whole strings would be most of a filter's cost.
    """
    if not len(operations):
        return np.zeros(0, np.int8)
    if is_constant(operations):
        return np.full(len(operations), Operation(operations[0].as_py()).code, np.int8)
    _, offsets, characters = operations.buffers()
    starts = np.frombuffer(offsets, np.int32)[operations.offset : operations.offset + len(operations)]
    return _CODES[np.frombuffer(characters, np.uint8)[starts]]


def open_batch(batch: ChangeBatch) -> RowImages:
    """Take a batch apart into images."""
    data, schema = batch.data, batch.schema
    names = set(data.schema.names)
    count = data.num_rows
    columns = {name: data.column(change.stored_name(name)) for name in schema.names}
    images = [Image(AFTER, columns)]
    old_images = [which for which in (change.BEFORE, change.MOVED_FROM) if which in names]
    images += [_old_image(which, data.column(which), schema) for which in old_images]
    rows = RowImages(count, {name: data.column(name) for name in data.schema.names if name in _METADATA}, images)
    if change.UNCHANGED in names:
        rows.unsent = _unsent_masks(data.column(change.UNCHANGED), count)
    if change.UNFIT in names:
        rows.unfit = _unfit_texts(data.column(change.UNFIT))
    return rows


def open_snapshot_rows(schema: TableSchema, data: pa.RecordBatch, unfit: pa.Array | None = None) -> RowImages:
    """Make images of rows that a snapshot has read, as if each were a change.

    `unfit` has the values that do not fit.
    """
    count = data.num_rows
    metadata = {change.OP: pa.array([Operation.READ.value]).take(pa.array(np.zeros(count, np.int64)))}
    columns = {name: data.column(at) for at, name in enumerate(schema.names)}
    rows = RowImages(count, metadata, [Image(AFTER, columns)])
    if unfit is not None:
        rows.unfit = _unfit_texts(unfit)
    return rows


def _old_image(which: str, structs: pa.StructArray, schema: TableSchema) -> Image:
    verbatim = {change.stored_name(name): name for name in schema.names}
    valid = np.asarray(pc.is_valid(structs).to_numpy(zero_copy_only=False), np.bool_)
    children = structs.flatten()  # with the struct's own nulls
    names = [verbatim[structs.type.field(at).name] for at in range(structs.type.num_fields)]
    return Image(which, dict(zip(names, children, strict=True)), valid)


def _unsent_masks(lists: pa.ListArray, count: int) -> dict[str, Mask]:
    names, parents = lists.flatten(), pc.list_parent_indices(lists).to_numpy()
    masks: dict[str, Mask] = {}
    for name in pc.unique(names).to_pylist():
        mask = np.zeros(count, np.bool_)
        mask[parents[pc.equal(names, name).to_numpy(zero_copy_only=False)]] = True
        masks[name] = mask
    return masks


def _unfit_texts(cells: pa.ListArray) -> dict[tuple[str, str], dict[int, str]]:
    texts: dict[tuple[str, str], dict[int, str]] = {}
    for row in np.flatnonzero(pc.is_valid(cells).to_numpy(zero_copy_only=False)).tolist():
        for cell in cells[row].as_py():
            texts.setdefault(_image_and_column(cell["column"]), {})[row] = cell["text"]
    return texts


def _image_and_column(column: str) -> tuple[str, str]:
    """Return the image and column that a cell of `_unfit` is about."""
    for which in (change.BEFORE, change.MOVED_FROM):
        if column.startswith(f"{which}."):
            return which, column.removeprefix(f"{which}.")
    return AFTER, column


def to_batch(rows: RowImages, schema: TableSchema) -> ChangeBatch:
    """Return the rows as a batch of the output schema."""
    fields = schema.change_schema()
    columns: dict[str, Any] = dict(rows.metadata)
    for name in schema.names:
        columns[change.stored_name(name)] = rows.after.columns[name]
    moves = 0
    for image in rows.images[1:]:
        valid = np.ones(rows.count, np.bool_) if image.valid is None else image.valid
        if valid.any():
            columns[image.which] = _image_struct(image, fields.field(image.which).type, valid, schema)
            moves = int(valid.sum()) if image.which == change.MOVED_FROM else moves
    if (unchanged := _unsent_lists(rows, schema)) is not None:
        columns[change.UNCHANGED] = unchanged
    cells = dict(_unfit_cells(rows, schema))
    if cells:
        columns[change.UNFIT] = pa.array([cells.get(row) for row in range(rows.count)], change.UNFIT_TYPE)
    kept_fields = [field for field in fields if field.name in columns]
    data = pa.RecordBatch.from_arrays([columns[field.name] for field in kept_fields], schema=pa.schema(kept_fields))
    return ChangeBatch(
        schema=schema,
        data=data,
        moves=moves,
        truncates=int(rows.is_op(Operation.TRUNCATE).sum()),
        unfit=sum(map(len, cells.values())),
    )


def _image_struct(image: Image, kind: pa.DataType, valid: Mask, schema: TableSchema) -> pa.Array:
    verbatim = {change.stored_name(name): name for name in schema.names}
    fields = [kind.field(at) for at in range(kind.num_fields)]
    children = [image.columns[verbatim[one.name]] for one in fields]
    return pa.StructArray.from_arrays(children, fields=fields, mask=pa.array(~valid))


def _unsent_lists(rows: RowImages, schema: TableSchema) -> pa.Array | None:
    names = [name for name in schema.names if name in rows.unsent and rows.unsent[name].any()]
    if not names:
        return None
    table = np.stack([rows.unsent[name] for name in names], axis=1)
    counts = table.sum(axis=1)
    offsets = np.concatenate([np.zeros(1, np.int32), np.cumsum(counts, dtype=np.int32)])
    which = np.nonzero(table)[1]
    listed = pa.array(names, pa.string()).take(pa.array(which))
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), listed, mask=pa.array(counts == 0))


def _unfit_cells(rows: RowImages, schema: TableSchema) -> Iterator[tuple[int, list[dict[str, str]]]]:
    known = set(schema.names)
    found: dict[int, list[dict[str, str]]] = {}
    for (which, column), texts in rows.unfit.items():
        if column in known and rows.image(which) is not None:
            for row, text in texts.items():
                found.setdefault(row, []).append({"column": f"{which}.{column}" if which else column, "text": text})
    yield from found.items()


def renumber(batches: tuple[ChangeBatch, ...]) -> tuple[ChangeBatch, ...]:
    """Return the batches with `_seq` counted from zero without a gap, in the same order.

    Rows that rules have left are numbered like those of any window.
    """
    if not batches:
        return ()
    seqs = [batch.data.column(change.SEQ).to_numpy() for batch in batches]
    all_seqs = np.concatenate(seqs)
    numbers = np.empty(all_seqs.size, np.int64)
    numbers[np.argsort(all_seqs, kind="stable")] = np.arange(all_seqs.size)
    renumbered, begin = [], 0
    for batch, old_seqs in zip(batches, seqs, strict=True):
        new_seqs = numbers[begin : begin + old_seqs.size]
        begin += old_seqs.size
        index = batch.data.schema.get_field_index(change.SEQ)
        data = batch.data
        if not np.array_equal(new_seqs, old_seqs):
            data = data.set_column(index, data.schema.field(index), pa.array(new_seqs))
        renumbered.append(replace(batch, data=data, ends=(int(new_seqs[0]), int(new_seqs[-1]))))
    return tuple(renumbered)
