"""Write sealed files: rows go in by commit, Parquet files per table come out.

A file holds rows of one table and one version of its schema, in `_seq` order, with zstd, statistics and page checksums.
A row group ends where a commit ends, unless one commit is larger than a group may be. Memory is bounded whatever the
input. No reader looks at these files until a seal names them.

On a disk this module also writes the glob `cold/<table>/*.parquet`: a folder of links that shows every sealed row of a
table once. A link is added where files were only added. Where some were removed, a new folder of links replaces the old
one atomically. No correctness depends on the links: the next sealer makes them agree with the seals.
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
    """Limits of the files, and of what is held in memory."""

    group_rows: int = 131_072
    group_bytes: int = 16 << 20
    """A row group is written at a commit's end past `group_rows` or this."""
    group_bytes_max: int = 32 << 20
    """Past this a row group is written in the middle of a commit."""
    pending_bytes_max: int = 96 << 20
    """Bytes pending for all tables; past it the largest table is written early.

    Within a commit it may be exceeded by a third.
    """
    file_bytes: int = 96 << 20
    """A file is closed at the first row group past this."""


SEAL_FILE_SIZES = SealFileSizes()


class SealWriter:
    """The files of one seal while they are written."""

    def __init__(self, log: LogPath, schema_of: SchemaLookup, sizes: SealFileSizes = SEAL_FILE_SIZES) -> None:
        self._log = log
        self._schema_of = schema_of
        self._sizes = sizes
        self._open: dict[int, _Writer] = {}
        self._finished: list[SealedFile] = []
        self._tables_of_commit: set[int] = set()
        self._pending_bytes = 0

    def add(self, table: int, schema: int, commit: int, batch: ChangeBatch) -> None:
        """Add a table's rows of a commit."""
        column = pa.repeat(pa.scalar(commit, pa.int64()), len(batch))
        data = _without_empty(batch.data).append_column(_COMMIT_FIELD, column)
        self._append(table, schema, data, (batch.moves, batch.truncates, batch.unfit))

    def copy(self, file: SealedFile) -> None:
        """Add the rows of a file that is merged with its neighbours."""
        path = self._log / file.file
        try:
            check_file(path, file.size, file.crc)
        except FileNotFoundError as error:  # only the sealer removes files
            raise sealed_file_error(path, "it is missing") from error
        counts = (file.moves, file.truncates, file.unfit)
        with pq.ParquetFile(files.arrow_source(path), memory_map=True) as parquet:
            for index in range(len(file.groups)):
                for data in parquet.read_row_group(index, use_threads=False).combine_chunks().to_batches():
                    self._append(file.table, file.schema, data, counts)
                    counts = (0, 0, 0)
        self.end_commit()

    def _append(self, table: int, schema: int, data: pa.RecordBatch, counts: tuple[int, int, int]) -> None:
        writer = self._open.get(table)
        if writer is not None and writer.schema != schema:
            self.end_file(table)
            writer = None
        if writer is None:
            writer = self._open[table] = _Writer(self._log, self._schema_of(table, schema))
        writer.add(data, counts)
        self._pending_bytes += data.nbytes
        self._tables_of_commit.add(table)
        if writer.pending_bytes >= self._sizes.group_bytes_max:
            self._write_group(writer)
        while self._pending_bytes > self._sizes.pending_bytes_max * 4 // 3:
            self._write_largest()

    def end_commit(self) -> None:
        """End a commit: a row group may end here."""
        for table in self._tables_of_commit:
            writer = self._open[table]
            if writer.pending_rows >= self._sizes.group_rows or writer.pending_bytes >= self._sizes.group_bytes:
                self._write_group(writer)
        self._tables_of_commit.clear()
        while self._pending_bytes > self._sizes.pending_bytes_max:
            self._write_largest()

    def _write_largest(self) -> None:
        self._write_group(max(self._open.values(), key=lambda writer: writer.pending_bytes))

    def _write_group(self, writer: _Writer) -> None:
        self._pending_bytes -= writer.pending_bytes
        self._finished += writer.write_group()
        if writer.file_bytes >= self._sizes.file_bytes:
            self._finished += writer.close()

    def end_file(self, table: int) -> None:
        """End the table's file: later rows go into another."""
        writer = self._open.get(table)
        if writer is not None:
            self._pending_bytes -= writer.pending_bytes
            self._finished += writer.close()
            del self._open[table]
        self._tables_of_commit.discard(table)

    def close(self) -> list[SealedFile]:
        """Return all files, durable and in order."""
        for table in list(self._open):
            self.end_file(table)
        folders = {(self._log / file.file).parent for file in self._finished}
        for folder in {*folders, self._log / "cold" / "files"}:
            with files.explain_errors(folder):
                files.sync_folder(folder)
        return sorted(self._finished, key=lambda file: (file.table, file.first_seq))

    def abandon(self) -> None:
        """Remove what was written: no seal will name it."""
        for writer in self._open.values():
            writer.abandon()
        for file in self._finished:
            files.remove(self._log / file.file)


class _Writer:
    """The open file of one table, and its rows that are not written yet."""

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
        self._temp: Path | None = None
        self._groups: list[RowGroup] = []
        self._first: tuple[int, int] = (0, 0)
        self._counts, self._pending_counts = [0, 0, 0], [0, 0, 0]
        """Moves, truncates and values that did not fit: in the file, and pending."""
        self.pending_rows = self.pending_bytes = self.file_bytes = 0

    @property
    def schema(self) -> int:
        return self._version.version

    def add(self, data: pa.RecordBatch, counts: tuple[int, int, int]) -> None:
        self._pending.append(data)
        self._pending_counts = [own + more for own, more in zip(self._pending_counts, counts, strict=True)]
        self.pending_rows += data.num_rows
        self.pending_bytes += data.nbytes

    def write_group(self) -> list[SealedFile]:
        """Write the pending rows.

        Return the file before, if that had to end because it lacks a column.
        """
        if not self._pending:
            return []
        needed = {name for data in self._pending for name in data.schema.names}
        ended = self.close_file() if self._parquet is not None and not needed <= set(self._names) else []
        names = needed | set(self._names)
        fields = [field for field in (*self._version.arrow_schema, _COMMIT_FIELD) if field.name in names]
        schema = pa.schema(fields)
        rows = pa.Table.from_batches([_fill(data, schema) for data in self._pending]).combine_chunks()
        with files.explain_errors(self._folder):
            if self._parquet is None:
                self._open_file(rows)
            assert self._parquet is not None, "just opened"
            assert self._sink is not None, "just opened"
            self._parquet.write_table(rows, row_group_size=rows.num_rows)
            self.file_bytes = self._sink.tell()
        commits, seqs = rows.column(change.COMMIT), rows.column(change.SEQ)
        self._counts = [own + more for own, more in zip(self._counts, self._pending_counts, strict=True)]
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
        self._temp = files.scratch_folder(self._folder) / f".{uuid.uuid4().hex}.tmp"
        self._sink = pa.OSFile(str(self._temp), "wb")
        seq_index = rows.schema.get_field_index(change.SEQ)
        self._parquet = pq.ParquetWriter(
            self._sink,
            rows.schema,
            compression="zstd",
            compression_level=1,
            use_dictionary=_repetitive(rows),
            write_page_checksum=True,
            sorting_columns=[pq.SortingColumn(seq_index)],
            column_encoding={change.SEQ: "DELTA_BINARY_PACKED", change.TX_INDEX: "DELTA_BINARY_PACKED"},
        )

    def close(self) -> list[SealedFile]:
        """Write what is left, and end the file."""
        ended = self.write_group()
        return ended + self.close_file()

    def close_file(self) -> list[SealedFile]:
        if self._parquet is None or self._sink is None or self._temp is None:
            return []
        with files.explain_errors(self._temp):
            self._parquet.close()
            self._sink.close()
            crc, size = checksum_of(self._temp)
            first, first_seq = self._first
            last = self._groups[-1]
            path = self._folder / f"{first_seq:020d}-{last.last_seq:020d}-{uuid.uuid4().hex[:12]}.parquet"
            files.put_file(self._temp, path)
        failpoints.hit("seal.file_written")
        moves, truncates, unfit = self._counts
        sealed = SealedFile(
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
        self._parquet = self._sink = self._temp = None
        self._groups, self._counts, self.file_bytes = [], [0, 0, 0], 0
        return [sealed]

    def abandon(self) -> None:
        if self._parquet is not None:
            # Arrow would otherwise try to end the file when it forgets the writer.
            self._parquet.is_open = False
        if self._sink is not None:
            with suppress(OSError):
                self._sink.close()
        if self._temp is not None:
            files.remove(self._temp)


def _without_empty(data: pa.RecordBatch) -> pa.RecordBatch:
    """Return the rows without the optional columns that are null throughout."""
    empty = [
        name for name in change.OPTIONAL if name in data.schema.names and data.column(name).null_count == data.num_rows
    ]
    return data.drop_columns(empty) if empty else data


def _fill(data: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    if data.schema.names == schema.names:
        return data
    names = set(data.schema.names)
    columns = [
        data.column(field.name) if field.name in names else pa.nulls(data.num_rows, field.type) for field in schema
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _repetitive(rows: pa.Table) -> list[str]:
    """Return the columns whose values repeat: for others a dictionary costs time and gains nothing."""
    sample = rows.slice(0, SAMPLE_ROWS)
    columns = list(_ALWAYS_DICTIONARY)
    for field in rows.schema:
        if field.name in change.RESERVED or pa.types.is_nested(field.type) or pa.types.is_boolean(field.type):
            continue
        if pc.count_distinct(sample.column(field.name)).as_py() * 8 <= max(sample.num_rows, 64):
            columns.append(field.name)
    return columns


def write_links(log: Path, table: int, files_by_name: dict[str, str]) -> None:
    """Make `cold/<table>` hold a link to each of these files and nothing else, atomically."""
    view = log / "cold" / str(table)
    links = set(os.listdir(view)) if view.is_dir() else set()
    if view.is_dir() and links <= set(files_by_name):
        for name in sorted(set(files_by_name) - links):
            os.symlink(os.path.relpath(log / files_by_name[name], view.resolve()), view / name)
        return
    folder = log / "cold" / "views" / f"{table}-{uuid.uuid4().hex[:12]}"
    old = os.readlink(view) if view.is_symlink() else None
    temp = files.temp_path(view)
    try:
        folder.mkdir(parents=True)
        for name, file in files_by_name.items():
            os.symlink(os.path.relpath(log / file, folder), folder / name)
        os.symlink(os.path.relpath(folder, view.parent), temp)
        failpoints.hit("seal.view_made")
        os.replace(temp, view)
    except BaseException:
        files.remove(temp)
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
