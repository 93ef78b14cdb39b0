"""Writing sealed files: rows of many tables go in, commit by commit; Parquet files per table come out.

A file holds rows of one table and one version of its shape, in `_seq` order, zstd, with statistics and page
checksums. A row group ends where a commit ends, unless one commit is larger than a group may be. Memory is
bounded whatever comes in. Nothing that is written here is looked at until a seal names it.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from tailrace import failpoints
from tailrace.changelog.format.schemas import LogSchemaVersion
from tailrace.changelog.format.seal import RowGroup, SealedFile, check_file, checksum_of, sealed_file_error
from tailrace.model import change
from tailrace.model.batch import ChangeBatch
from tailrace.storage import files
from tailrace.storage.files import LogPath

SAMPLE_ROWS = 4_096
_ALWAYS_DICTIONARY = (change.OP, change.POSITION)
_COMMIT_FIELD = pa.field(change.COMMIT, pa.int64(), nullable=False)

SchemaLookup = Callable[[int, int], LogSchemaVersion]


@dataclass(frozen=True, kw_only=True)
class SealFileSizes:
    """How large files and what is held in memory become."""

    group_rows: int = 131_072
    group_bytes: int = 16 << 20
    """A row group is written at the first end of a commit past either,"""
    group_bytes_max: int = 32 << 20
    """and in the middle of one past this."""
    pending_bytes_max: int = 96 << 20
    """Of all tables together; past it the largest is written out early, within a commit past a third more."""
    file_bytes: int = 96 << 20
    """A file is closed at the first row group past this."""


SEAL_FILE_SIZES = SealFileSizes()


class SealWriter:
    """The files of one seal, while they are written."""

    def __init__(self, log: LogPath, shape: SchemaLookup, sizes: SealFileSizes = SEAL_FILE_SIZES) -> None:
        self._log = log
        self._shape = shape
        self._sizes = sizes
        self._open: dict[int, _Writer] = {}
        self._done: list[SealedFile] = []
        self._grown: set[int] = set()
        self._pending_bytes = 0

    def add(self, table: int, schema: int, commit: int, batch: ChangeBatch) -> None:
        """Rows of a commit."""
        column = pa.repeat(pa.scalar(commit, pa.int64()), len(batch))
        data = _without_empty(batch.data).append_column(_COMMIT_FIELD, column)
        self._append(table, schema, data, (batch.moves, batch.truncates, batch.unfit))

    def copy(self, file: SealedFile) -> None:
        """The rows of a file that is to be one with its neighbours."""
        path = self._log / file.file
        try:
            check_file(path, file.size, file.crc)
        except FileNotFoundError as error:  # nobody but us removes any
            raise sealed_file_error(path, "it is missing") from error
        counts = (file.moves, file.truncates, file.unfit)
        with pq.ParquetFile(files.arrow_source(path), memory_map=True) as parquet:
            for place in range(len(file.groups)):
                for data in parquet.read_row_group(place, use_threads=False).combine_chunks().to_batches():
                    self._append(file.table, file.schema, data, counts)
                    counts = (0, 0, 0)
        self.end_commit()

    def _append(self, table: int, schema: int, data: pa.RecordBatch, counts: tuple[int, int, int]) -> None:
        writer = self._open.get(table)
        if writer is not None and writer.schema != schema:
            self.end_file(table)
            writer = None
        if writer is None:
            writer = self._open[table] = _Writer(self._log, self._shape(table, schema))
        writer.add(data, counts)
        self._pending_bytes += data.nbytes
        self._grown.add(table)
        if writer.pending_bytes >= self._sizes.group_bytes_max:
            self._write_group(writer)
        while self._pending_bytes > self._sizes.pending_bytes_max * 4 // 3:
            self._write_largest()

    def end_commit(self) -> None:
        """A commit ends here: row groups may."""
        for table in self._grown:
            writer = self._open[table]
            if writer.pending_rows >= self._sizes.group_rows or writer.pending_bytes >= self._sizes.group_bytes:
                self._write_group(writer)
        self._grown.clear()
        while self._pending_bytes > self._sizes.pending_bytes_max:
            self._write_largest()

    def _write_largest(self) -> None:
        self._write_group(max(self._open.values(), key=lambda writer: writer.pending_bytes))

    def _write_group(self, writer: _Writer) -> None:
        self._pending_bytes -= writer.pending_bytes
        self._done += writer.write_group()
        if writer.file_bytes >= self._sizes.file_bytes:
            self._done += writer.close()

    def end_file(self, table: int) -> None:
        """End the table's file: what comes next goes into another."""
        writer = self._open.get(table)
        if writer is not None:
            self._pending_bytes -= writer.pending_bytes
            self._done += writer.close()
            del self._open[table]
        self._grown.discard(table)

    def close(self) -> list[SealedFile]:
        """All files, durable, in order."""
        for table in list(self._open):
            self.end_file(table)
        folders = {(self._log / file.file).parent for file in self._done}
        for folder in {*folders, self._log / "cold" / "files"}:
            with files.explain_errors(folder):
                files.sync_folder(folder)
        return sorted(self._done, key=lambda file: (file.table, file.first_seq))

    def abandon(self) -> None:
        """Take back what was written: no seal will name it."""
        for writer in self._open.values():
            writer.abandon()
        for file in self._done:
            files.remove(self._log / file.file)


class _Writer:
    """The file of one table that is being written, and its rows that are not in it yet."""

    def __init__(self, log: LogPath, version: LogSchemaVersion) -> None:
        self._log = log
        self._version = version
        self._folder = log / "cold" / "files" / str(version.table)
        with files.explain_errors(self._folder):
            files.make_folder(self._folder)
        self._pending: list[pa.RecordBatch] = []
        self._names: tuple[str, ...] = ()
        self._sink: pa.NativeFile | None = None
        self._parquet: pq.ParquetWriter | None = None
        self._aside: Path | None = None
        self._groups: list[RowGroup] = []
        self._first: tuple[int, int] = (0, 0)
        self._counts, self._pending_counts = [0, 0, 0], [0, 0, 0]
        """Moves, truncates and values that did not fit: in the file, and in what is pending."""
        self.pending_rows = self.pending_bytes = self.file_bytes = 0

    @property
    def schema(self) -> int:
        return self._version.version

    def add(self, data: pa.RecordBatch, counts: tuple[int, int, int]) -> None:
        self._pending.append(data)
        self._pending_counts = [mine + more for mine, more in zip(self._pending_counts, counts, strict=True)]
        self.pending_rows += data.num_rows
        self.pending_bytes += data.nbytes

    def write_group(self) -> list[SealedFile]:
        """Write what is pending; the file before it, if that had to end because it lacks a column."""
        if not self._pending:
            return []
        wanted = {name for data in self._pending for name in data.schema.names}
        ended = self.close_file() if self._parquet is not None and not wanted <= set(self._names) else []
        names = wanted | set(self._names)
        fields = [field for field in (*self._version.arrow_schema, _COMMIT_FIELD) if field.name in names]
        shape = pa.schema(fields)
        rows = pa.Table.from_batches([_fill(data, shape) for data in self._pending]).combine_chunks()
        with files.explain_errors(self._folder):
            if self._parquet is None:
                self._open_file(rows)
            assert self._parquet is not None, "just opened"
            assert self._sink is not None, "just opened"
            self._parquet.write_table(rows, row_group_size=rows.num_rows)
            self.file_bytes = self._sink.tell()
        commits, seqs = rows.column(change.COMMIT), rows.column(change.SEQ)
        self._counts = [mine + more for mine, more in zip(self._counts, self._pending_counts, strict=True)]
        self._pending_counts = [0, 0, 0]
        self._groups.append(
            RowGroup(
                rows=rows.num_rows,
                first=commits[0].as_py(),
                last=commits[-1].as_py(),
                last_seq=seqs[-1].as_py(),
                committed_at=rows.column(change.COMMITTED_AT)[-1].value,
            )
        )
        if len(self._groups) == 1:
            self._first = (commits[0].as_py(), seqs[0].as_py())
        self._pending, self.pending_rows, self.pending_bytes = [], 0, 0
        return ended

    def _open_file(self, rows: pa.Table) -> None:
        self._names = tuple(rows.schema.names)
        self._aside = files.scratch_folder(self._folder) / f".{uuid.uuid4().hex}.tmp"
        self._sink = pa.OSFile(str(self._aside), "wb")
        place = rows.schema.get_field_index(change.SEQ)
        self._parquet = pq.ParquetWriter(
            self._sink,
            rows.schema,
            compression="zstd",
            compression_level=1,
            use_dictionary=_repetitive(rows),
            write_page_checksum=True,
            sorting_columns=[pq.SortingColumn(place)],
            column_encoding={change.SEQ: "DELTA_BINARY_PACKED", change.TX_INDEX: "DELTA_BINARY_PACKED"},
        )

    def close(self) -> list[SealedFile]:
        """Write what is left, and end the file."""
        ended = self.write_group()
        return ended + self.close_file()

    def close_file(self) -> list[SealedFile]:
        if self._parquet is None or self._sink is None or self._aside is None:
            return []
        with files.explain_errors(self._aside):
            self._parquet.close()
            self._sink.close()
            crc, size = checksum_of(self._aside)
            first, first_seq = self._first
            last = self._groups[-1]
            path = self._folder / f"{first_seq:020d}-{last.last_seq:020d}-{uuid.uuid4().hex[:12]}.parquet"
            files.put_file(self._aside, path)
        failpoints.hit("seal.file_written")
        moves, truncates, unfit = self._counts
        done = SealedFile(
            table=self._version.table,
            schema=self._version.version,
            rows=sum(group.rows for group in self._groups),
            first=first,
            last=last.last,
            first_seq=first_seq,
            last_seq=last.last_seq,
            moves=moves,
            truncates=truncates,
            unfit=unfit,
            file=files.relative_name(self._log, path),
            size=size,
            crc=crc,
            groups=tuple(self._groups),
        )
        self._parquet = self._sink = self._aside = None
        self._groups, self._counts, self.file_bytes = [], [0, 0, 0], 0
        return [done]

    def abandon(self) -> None:
        if self._parquet is not None:
            # Arrow would otherwise try to end the file when it forgets the writer.
            self._parquet.is_open = False
        if self._sink is not None:
            with suppress(OSError):
                self._sink.close()
        if self._aside is not None:
            files.remove(self._aside)


def _without_empty(data: pa.RecordBatch) -> pa.RecordBatch:
    """The rows without the optional columns that are null throughout."""
    empty = [
        name for name in change.OPTIONAL if name in data.schema.names and data.column(name).null_count == data.num_rows
    ]
    return data.drop_columns(empty) if empty else data


def _fill(data: pa.RecordBatch, shape: pa.Schema) -> pa.RecordBatch:
    if data.schema.names == shape.names:
        return data
    names = set(data.schema.names)
    columns = [
        data.column(field.name) if field.name in names else pa.nulls(data.num_rows, field.type) for field in shape
    ]
    return pa.RecordBatch.from_arrays(columns, schema=shape)


def _repetitive(rows: pa.Table) -> list[str]:
    """The columns whose values come again and again: a dictionary of the others would cost time for nothing."""
    sample = rows.slice(0, SAMPLE_ROWS)
    found = list(_ALWAYS_DICTIONARY)
    for field in rows.schema:
        if field.name in change.RESERVED or pa.types.is_nested(field.type) or pa.types.is_boolean(field.type):
            continue
        if pc.count_distinct(sample.column(field.name)).as_py() * 8 <= max(sample.num_rows, 64):
            found.append(field.name)
    return found


def write_links(log: Path, table: int, wanted: dict[str, str]) -> None:
    """Make `cold/<table>` hold a link to each of these files and nothing else, at one stroke."""
    view = log / "cold" / str(table)
    shown = set(os.listdir(view)) if view.is_dir() else set()
    if view.is_dir() and shown <= set(wanted):
        for name in sorted(set(wanted) - shown):
            os.symlink(os.path.relpath(log / wanted[name], view.resolve()), view / name)
        return
    folder = log / "cold" / "views" / f"{table}-{uuid.uuid4().hex[:12]}"
    old = os.readlink(view) if view.is_symlink() else None
    aside = files.temp_path(view)
    try:
        folder.mkdir(parents=True)
        for name, file in wanted.items():
            os.symlink(os.path.relpath(log / file, folder), folder / name)
        os.symlink(os.path.relpath(folder, view.parent), aside)
        failpoints.hit("seal.view_made")
        os.replace(aside, view)
    except BaseException:
        files.remove(aside)
        shutil.rmtree(folder, ignore_errors=True)
        raise
    if old is not None:
        shutil.rmtree(view.parent / old, ignore_errors=True)


def remove_stale_links(log: Path) -> None:
    """Remove folders of links that never got a table's name, or have lost it."""
    folder = log / "cold"
    named = {os.readlink(view) for view in folder.iterdir() if view.is_symlink()}
    for view in (folder / "views").glob("*"):
        if view.relative_to(folder).as_posix() not in named:
            shutil.rmtree(view)
