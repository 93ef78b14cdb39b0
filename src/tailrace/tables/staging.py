"""Stage rows. Write data files into a table's folder that are not part of the table yet.

A load may be shared among many tasks. Each stages its rows as files of its own, and one commit adds them all
(`LakeTable.commit_load`). Until then no reader sees them, and files of a dead load are strays that are removed by their
names. A staged file is complete and on disk when its name is returned. A failed write leaves no file behind. In a
partitioned table each file holds rows of one partition.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError

from tailrace.model.schema import TableSchema
from tailrace.tables.delta.commit_log import file_names, files_named_since, newest_commit_ns, sync_folders
from tailrace.tables.iceberg.schema_mapping import file_fields
from tailrace.tables.limits import own_batches, refuse_names
from tailrace.tables.partitions import (
    Partition,
    PartitionTexts,
    folder_of,
    refuse_unusable_values,
    schema_in_files,
    split_by_partition,
)
from tailrace.tables.statistics import FloatBounds, delta_stats, footer_columns
from tailrace.tables.table_folder import existing_folder, find_folder, is_partition, make_folder, unreadable

FILE_BYTES = 128 << 20
"""Default target size of a data file."""
GROUP_ROWS_MAX = 1 << 20
GROUP_BYTES_MIN, GROUP_BYTES_MAX = 1 << 20, 32 << 20
"""Limits for a row group's size in memory; small files have small ones."""

WAITING_BYTES_MAX = 64 << 20
"""Size of rows of many partitions that wait in memory to be written."""
OPEN_FILES_MAX = 32
"""Partitions with an open file at once; the least recently used one is closed."""

COMPRESSION = "snappy"
SAMPLE_ROWS = 8192
DISTINCT_SHARE_MAX = 0.5
WRITE_BYTES = 1 << 20

_TOKEN = re.compile(r"[A-Za-z0-9_.-]+")


@dataclass(frozen=True, kw_only=True)
class StagedFile:
    """One data file, as the commit that adds it will describe it."""

    path: str
    """Its path in the table's folder."""
    size: int
    rows: int
    stats: str
    """Delta's statistics, as JSON."""
    values: PartitionTexts = field(default_factory=dict)
    """The partition that its rows are in."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> StagedFile:
        return cls(**stored)


def stage(
    path: Path,
    name: str,
    schema: TableSchema,
    batches: Iterable[pa.RecordBatch],
    partition_by: Sequence[str] = (),
    *,
    numbered: bool = False,
    file_bytes: int = FILE_BYTES,
) -> tuple[StagedFile, ...]:
    """Write rows, with the table's own columns, to files in its folder.

    Without rows it writes no file.

    `name` must be new for every load, part of a load and attempt: an existing file is never overwritten. Memory holds
    two row groups, because one is written while the next is read. For a partitioned table it also holds waiting rows.
    An exception out of `batches` is raised unchanged, and all files written are removed.

    With `numbered` the columns have field ids in the files, by which Iceberg knows them. Then the files of a partition
    hold the partition columns too. A file that has passed `file_bytes` gets no further row group.
    """
    refuse_names(schema)
    _refuse_token(name)
    find_folder(path)  # refuses a folder that holds something else
    fields = file_fields(schema) if numbered else None
    parts: _Parts | _Partitions = _Parts(path, name, schema, file_bytes, fields=fields)
    if partition_by:
        parts = _Partitions(path, name, schema, file_bytes, partition_by, fields)
    try:
        _write_behind(parts, _groups(own_batches(schema, batches), _group_bytes(file_bytes)))
        return parts.close()
    except BaseException:
        parts.abandon()
        raise


def discard(path: Path, prefix: str, *, last: bool = False) -> int:
    """Remove staged files by name or name prefix; return how many.

    Removes files staged under `prefix`, or under a name that starts with it and a dash. With `last`, removes only those
    written after the newest commit: what was left of the commit that was to follow it. A file stays if the table holds
    it, or if a commit made since it was written has added it.
    """
    _refuse_token(prefix)
    try:
        folder = existing_folder(path)
        found = {} if folder is None else _written(folder, prefix)
        if folder is not None and last:
            newest = newest_commit_ns(folder)
            found = {name: at for name, at in found.items() if at > newest}
        if folder is None or not found:
            return 0
        kept = files_named_since(folder, min(found.values()))
        if find_folder(path) is not None:
            kept |= set(file_names(DeltaTable(str(folder))))
        strays = [name for name in found if name not in kept]
        for name in strays:
            (folder / name).unlink(missing_ok=True)
    except (DeltaError, OSError) as exc:
        raise unreadable(path, exc) from exc
    return len(strays)


def is_staged_as(name: str, prefix: str) -> bool:
    """Return whether a file was staged under this prefix, alone or followed by a dash."""
    return name.startswith(f"part-{prefix}-") and name.endswith(".parquet")


def _written(folder: Path, prefix: str, inside: str = "") -> dict[str, int]:
    """Map the staged files that exist to the times of their last writes."""
    found, inner = {}, []
    with os.scandir(folder / inside) as entries:
        for entry in entries:
            if is_staged_as(entry.name, prefix):
                found[inside + entry.name] = entry.stat().st_mtime_ns
            elif is_partition(entry.name) and entry.is_dir():
                inner.append(f"{inside}{entry.name}/")
    for name in inner:
        found |= _written(folder, prefix, name)
    return found


def _refuse_token(token: str) -> None:
    if not _TOKEN.fullmatch(token):
        raise ValueError("a staged file's name may only have letters, digits, dots, dashes and underscores")


def _write_behind(parts: _Parts | _Partitions, groups: Iterator[pa.Table]) -> None:
    with ThreadPoolExecutor(max_workers=1) as writer:
        writing: Future[None] | None = None
        for group in groups:
            if writing is not None:
                writing.result()
            writing = writer.submit(parts.add, group)
        if writing is not None:
            writing.result()


def _group_bytes(file_bytes: int) -> int:
    return min(max(file_bytes, GROUP_BYTES_MIN), GROUP_BYTES_MAX)


def _groups(batches: Iterable[pa.RecordBatch], bytes_max: int) -> Iterator[pa.Table]:
    """Split the rows into pieces that each make one row group."""
    pending: list[pa.RecordBatch] = []
    rows = size = 0
    for piece in (piece for batch in batches for piece in _pieces(batch, bytes_max)):
        if pending and (rows + piece.num_rows > GROUP_ROWS_MAX or size + piece.nbytes > bytes_max):
            yield pa.Table.from_batches(pending)
            pending, rows, size = [], 0, 0
        pending.append(piece)
        rows, size = rows + piece.num_rows, size + piece.nbytes
    if pending:
        yield pa.Table.from_batches(pending)


def dictionary_columns(group: pa.Table) -> list[str]:
    """Return the paths of columns whose values repeat, judged by a sample.

    For other columns a dictionary would hold nearly every value, and cost more than the rest of the write.
    """
    rows = pa.array(np.linspace(0, group.num_rows - 1, min(group.num_rows, SAMPLE_ROWS), dtype=np.int64))
    sample, repeating = group.take(rows), []
    for name in group.schema.names:
        path, values = name, sample.column(name).combine_chunks()
        while pa.types.is_list(values.type):
            path, values = f"{path}.list.element", values.flatten()
        if pa.types.is_nested(values.type) or len(values.unique()) <= DISTINCT_SHARE_MAX * len(values):
            repeating.append(path)
    return repeating


def _pieces(batch: pa.RecordBatch, bytes_max: int) -> Iterator[pa.RecordBatch]:
    parts = max(math.ceil(batch.num_rows / GROUP_ROWS_MAX), math.ceil(batch.nbytes / bytes_max), 1)
    step = math.ceil(batch.num_rows / parts)
    for start in range(0, batch.num_rows, max(step, 1)):
        yield batch.slice(start, step)


class _Parts:
    """The files of one name, written in sequence, in their partition's folder unless numbered."""

    def __init__(
        self,
        path: Path,
        name: str,
        schema: TableSchema,
        file_bytes: int,
        values: PartitionTexts | None = None,
        fields: pa.Schema | None = None,
    ) -> None:
        self._path, self._name, self._schema, self._file_bytes = path, name, schema, file_bytes
        self._values = values or {}
        self._inside = folder_of(self._values) + "/" if values and fields is None else ""
        self._folder = path
        self._fields = fields or pa.schema(schema.row_fields())
        self._floats = self._new_float_bounds()
        self._made: list[Path] = []
        self._done: list[StagedFile] = []
        self._handle: BinaryIO | None = None
        self._writer: pq.ParquetWriter | None = None

    def add(self, group: pa.Table) -> None:
        try:
            handle, writer = self._opened(group)
            writer.write_table(group, row_group_size=group.num_rows)
            for name, bounds in self._floats.items():
                bounds.see(group.column(name))
            if handle.tell() >= self._file_bytes:
                self._finish()
        except OSError as exc:
            raise unreadable(self._path, exc) from exc

    def close(self) -> tuple[StagedFile, ...]:
        """Close the last file. When this returns, the names of all files are on disk too."""
        try:
            done = self.end()
            if self._made:
                sync_folders(self._folder, [file.path for file in done])
        except OSError as exc:
            raise unreadable(self._path, exc) from exc
        return done

    def end(self) -> tuple[StagedFile, ...]:
        """Close the last file, without making the files' names durable."""
        self._finish()
        return tuple(self._done)

    def abandon(self) -> None:
        with contextlib.suppress(OSError):
            if self._handle is not None:
                self._handle.close()
            for path in self._made:
                path.unlink(missing_ok=True)

    def _opened(self, group: pa.Table) -> tuple[BinaryIO, pq.ParquetWriter]:
        if self._handle is None or self._writer is None:
            self._folder = make_folder(self._path)
            path = self._folder / f"{self._inside}part-{self._name}-{len(self._made):03d}.parquet"
            if self._inside:
                path.parent.mkdir(parents=True, exist_ok=True)
            self._handle = path.open("xb", buffering=WRITE_BYTES)
            self._made.append(path)
            # As delta-rs writes them: no INT96, small decimals as integers, no types that only Arrow knows.
            self._writer = pq.ParquetWriter(
                self._handle,
                self._fields,
                version="2.6",
                compression=COMPRESSION,
                store_schema=False,
                write_statistics=footer_columns(self._schema),
                use_dictionary=dictionary_columns(group),
                store_decimal_as_integer=True,
                use_deprecated_int96_timestamps=False,
            )
        return self._handle, self._writer

    def _new_float_bounds(self) -> dict[str, FloatBounds]:
        return {column.name: FloatBounds() for column in self._schema.columns if pa.types.is_floating(column.type)}

    def _finish(self) -> None:
        if self._handle is None or self._writer is None:
            return
        self._writer.close()
        footer = self._writer.writer.metadata
        self._handle.flush()
        os.fsync(self._handle.fileno())
        size = self._handle.tell()
        self._handle.close()
        self._handle = self._writer = None
        stats = delta_stats(self._schema, footer, self._floats)
        self._floats = self._new_float_bounds()
        name = self._inside + self._made[-1].name
        self._done.append(StagedFile(path=name, size=size, rows=footer.num_rows, stats=stats, values=self._values))


class _Partitions:
    """Write the files of one name, each with rows of one partition.

    Rows wait until there are so many that all must be written. So rows of few partitions make large files, in whatever
    order they arrive. Memory and open files are bounded for any number of partitions.
    """

    def __init__(
        self,
        path: Path,
        name: str,
        schema: TableSchema,
        file_bytes: int,
        partition_by: Sequence[str],
        fields: pa.Schema | None,
    ) -> None:
        self._path, self._name, self._schema, self._by = path, name, schema, partition_by
        self._file_bytes, self._fields = file_bytes, fields
        self._inside = schema_in_files(schema, partition_by) if fields is None else schema
        self._waiting: dict[str, list[Partition]] = {}
        self._bytes = 0
        self._open: dict[str, _Parts] = {}
        """By folder, the most recently written last."""
        self._all: list[_Parts] = []
        self._done: list[StagedFile] = []

    def add(self, group: pa.Table) -> None:
        refuse_unusable_values(self._schema, self._by, group)
        for partition in split_by_partition(group, self._by, whole=self._fields is not None):
            self._waiting.setdefault(partition.folder, []).append(partition)
        self._bytes += group.nbytes
        if self._bytes >= WAITING_BYTES_MAX:
            self._write()

    def _write(self) -> None:
        for folder, pieces in self._waiting.items():
            parts = self._opened(folder, pieces[0].values)
            rows = (batch for partition in pieces for batch in partition.rows.to_batches())
            for group in _groups(rows, _group_bytes(self._file_bytes)):
                parts.add(group)
        self._waiting, self._bytes = {}, 0

    def _opened(self, folder: str, values: PartitionTexts) -> _Parts:
        parts = self._open.pop(folder, None)
        if parts is None:
            name = f"{self._name}-{len(self._all):06d}"
            parts = _Parts(self._path, name, self._inside, self._file_bytes, values, self._fields)
            self._all.append(parts)
        self._open[folder] = parts
        if len(self._open) > OPEN_FILES_MAX:
            self._end(next(iter(self._open)))
        return parts

    def _end(self, folder: str) -> None:
        try:
            self._done += self._open.pop(folder).end()
        except OSError as exc:
            raise unreadable(self._path, exc) from exc

    def close(self) -> tuple[StagedFile, ...]:
        self._write()
        for folder in list(self._open):
            self._end(folder)
        try:
            if self._done:
                sync_folders(make_folder(self._path), [file.path for file in self._done])
        except OSError as exc:
            raise unreadable(self._path, exc) from exc
        return tuple(self._done)

    def abandon(self) -> None:
        for parts in self._all:
            parts.abandon()
