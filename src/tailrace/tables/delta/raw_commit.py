"""Make Delta commits without delta-rs and Spark, for tables that delta-rs must not write.

These commits add load files, compact files, and change columns without changing files. Such tables have deletion
vectors or column mapping, or files whose names delta-rs would write differently from the log.

Each commit is one file, linked to the number after the version that was read. That fails if the number is taken: a
compare-and-swap. Each commit states the position. It names removed files exactly as the log does, with the deletion
vector, because readers take another name or vector for another file. In this module files have their names on disk.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError
from deltalake.transaction import AddAction

from tailrace.model.schema import Column, TableSchema
from tailrace.storage import files
from tailrace.tables.compaction_plan import RETENTION_PROPERTY, retention_interval
from tailrace.tables.delta.commit_log import (
    METADATA_KEY,
    CommitRecord,
    actions_of,
    app_id,
    data_path,
    has_commits,
    vector_file,
)
from tailrace.tables.delta.diff import read_rows
from tailrace.tables.delta.features import (
    Features,
    features_of,
    fields_of,
    loaded_fields,
    metadata_of,
    physical_names,
    protocol_of,
    recast_fields,
)
from tailrace.tables.delta.schema_mapping import partition_values_of
from tailrace.tables.evolve.recast_columns import RecastColumns
from tailrace.tables.fold.folded_changes import Flags
from tailrace.tables.partitions import PartitionValues

Action = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class RawDeltaCommit:
    """A table at one version that delta-rs must not write."""

    folder: Path
    table: DeltaTable | None
    """The opened table; None if it does not exist yet."""

    @property
    def next_version(self) -> int:
        """The version that a commit makes."""
        return 0 if self.table is None else self.table.version() + 1

    def commit_load(
        self, features: Features, schema: TableSchema, adds: Sequence[AddAction], record: CommitRecord
    ) -> None:
        """Replace all files of the table by these, with these columns and features."""
        partition_by, fields = record.spec.partition_by, loaded_fields(self.table, features, schema)
        removed = () if self.table is None else live_files(self.folder, self.table.version()).values()
        self._commit(
            "WRITE",
            record,
            [
                {"protocol": protocol_of(features, schema.columns)},
                {"metaData": metadata_of(self.table, features, fields, _now(), partition_by)},
                *_removes(removed, changes_rows=True),
                *map(_add, adds),
            ],
        )

    def set_columns(self, schema: TableSchema, plan: RecastColumns, record: CommitRecord) -> None:
        """Give the table these columns; its files stay as they are."""
        table = self._opened()
        features = features_of(table)
        fields = recast_fields(table, plan, schema)
        self._commit(
            "CHANGE COLUMNS",
            record,
            [
                {"protocol": protocol_of(features, _all_columns(table, schema))},
                {"metaData": metadata_of(table, features, fields, _now())},
            ],
        )

    def sizes(self) -> dict[str, int]:
        """Return the size of each file, scaled to the rows that the table still has.

        A file with many deleted rows is thus worth compacting.
        """
        rows = pa.table(self._opened().get_add_actions(flatten=True))
        names = map(data_path, rows.column("path").to_pylist())
        counts = dict(zip(names, rows.column("num_records").to_pylist(), strict=True))
        sizes = {}
        for name, add in live_files(self.folder, self._opened().version()).items():
            deleted = (add.get("deletionVector") or {}).get("cardinality", 0)
            sizes[name] = add["size"] * max(counts[name] - deleted, 0) // max(counts[name], 1)
        return sizes

    def exchange(
        self, removed: Iterable[str], adds: Sequence[AddAction], record: CommitRecord, *, changes_rows: bool
    ) -> None:
        """Replace files by others, with the same rows or not."""
        live = live_files(self.folder, self._opened().version())
        removes = _removes([live[name] for name in removed], changes_rows=changes_rows)
        added = (_add(replace(add, data_change=changes_rows)) for add in adds)
        self._commit("WRITE" if changes_rows else "OPTIMIZE", record, [*removes, *added])

    def parts(self) -> PartitionValues:
        """Return the partition values of each file, by the columns' names in the files."""
        names = physical_names(self._opened())
        return {
            file: {names[name]: value for name, value in values.items()}
            for file, values in partition_values_of(self._opened()).items()
        }

    def rows_of(
        self, names: Sequence[str], columns: Sequence[Column], parts: PartitionValues
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows of these files that the table still has, under file column names."""
        kept_rows = _kept_rows(self._opened(), set(names))
        for name in names:
            kept, start = kept_rows.get(name, np.empty(0, np.bool_)), 0
            for batch in read_rows(self.folder / name, columns, parts.get(name, {})):
                flags = kept[start : start + batch.num_rows]
                # A vector ends with the last deleted row.
                rest = np.ones(batch.num_rows - flags.size, np.bool_)
                yield batch.filter(pa.array(np.append(flags, rest))) if flags.size else batch
                start += batch.num_rows

    def in_files(self, schema: TableSchema) -> TableSchema:
        """Return the schema with the columns' names in the table's files."""
        names = physical_names(self._opened())
        columns = tuple(replace(column, name=names[column.name]) for column in schema.columns)
        return replace(schema, columns=columns, key=self.names_in_files(schema.key), facts=None)

    def names_in_files(self, columns: Iterable[str]) -> tuple[str, ...]:
        """Return the columns' names in the table's files."""
        names = physical_names(self._opened())
        return tuple(names[name] for name in columns)

    def keep_removed_files(self, after_seconds: float, record: CommitRecord) -> None:
        """Set how long the log keeps the names of removed files, unless already set."""
        table, interval = self._opened(), retention_interval(after_seconds)
        if table.metadata().configuration.get(RETENTION_PROPERTY) == interval:
            return
        settings = {RETENTION_PROPERTY: interval}
        metadata = metadata_of(table, features_of(table), fields_of(table), _now(), **settings)
        self._commit("SET TBLPROPERTIES", record, [{"metaData": metadata}])

    def remove(self, after_seconds: float) -> int:
        """Remove files and deletion vectors that are too old; return their number."""
        table = self._opened()
        live = live_files(self.folder, table.version()).values()
        needed = {name for add in live for name in _file_names(add)} | self._files_named_since(
            time.time() - after_seconds
        )
        removable = set(table.vacuum(0, dry_run=True, enforce_retention_duration=False))
        oldest = time.time() - after_seconds
        removable |= {
            str(path.relative_to(self.folder))
            for path in self.folder.glob("**/deletion_vector_*.bin")
            if path.stat().st_mtime < oldest
        }
        paths = [self.folder / name for name in sorted(removable - needed) if (self.folder / name).exists()]
        for path in paths:
            path.unlink(missing_ok=True)
        return len(paths)

    def _files_named_since(self, moment: float) -> set[str]:
        """Return the files that commits since then have added or removed."""
        found = set[str]()
        for entry in (self.folder / "_delta_log").glob("*.json"):
            if entry.stem.isdigit() and entry.stat().st_mtime >= moment:
                for action in actions_of(self.folder, int(entry.stem)):
                    for kind in ("add", "remove"):
                        found.update(_file_names(action[kind]) if kind in action else ())
        return found

    def _opened(self) -> DeltaTable:
        assert self.table is not None, "the caller has opened it"
        return self.table

    def _commit(self, operation: str, record: CommitRecord, actions: Iterable[Action]) -> None:
        if self.table is None and has_commits(self.folder):
            raise CommitFailedError("another process has made a table here")
        now = _now()
        info = {"timestamp": now, "operation": operation, "operationParameters": {}, METADATA_KEY: record.text()}
        transaction = {"appId": app_id(record.log), "version": record.applied_position.seq, "lastUpdated": now}
        lines = [json.dumps(action) for action in ({"commitInfo": info}, {"txn": transaction}, *actions)]
        path = self.folder / "_delta_log" / f"{self.next_version:020d}.json"
        path.parent.mkdir(exist_ok=True)
        try:
            files.create(path, ("\n".join(lines) + "\n").encode())
        except FileExistsError as exc:
            raise CommitFailedError("another commit has made this version") from exc


def live_files(folder: Path, version: int) -> dict[str, Action]:
    """Return the files of a version by name, with their deletion vectors."""
    begin, found = _checkpoint(folder, version)
    for number in range(begin + 1, version + 1):
        actions = actions_of(folder, number)
        for action in actions:
            if "remove" in action:
                found.pop(data_path(action["remove"]["path"]), None)
        found |= {data_path(action["add"]["path"]): action["add"] for action in actions if "add" in action}
    return found


def removed_rows(folder: Path, version: int) -> int:
    """Return how many rows of a version's files are deleted."""
    return sum((add.get("deletionVector") or {}).get("cardinality", 0) for add in live_files(folder, version).values())


def is_readable_without_log(folder: Path, table: DeltaTable) -> bool:
    """Return whether the opened version's files have exactly its rows, under its column names.

    That is so for everything that a load has committed, whatever features the table has.
    """
    return all(name == own for name, own in physical_names(table).items()) and not removed_rows(folder, table.version())


_CHECKPOINT = re.compile(r"(\d{20})\.checkpoint(\.\d{10}\.(\d{10}))?\.parquet")


def _checkpoint(folder: Path, version: int) -> tuple[int, dict[str, Action]]:
    """Return the newest checkpoint up to a version, with its number; -1 without one."""
    parts: dict[int, list[Path]] = {}
    whole: dict[int, int] = {}
    for path in (folder / "_delta_log").iterdir():
        if (name := _CHECKPOINT.fullmatch(path.name)) and int(name[1]) <= version:
            parts.setdefault(int(name[1]), []).append(path)
            whole[int(name[1])] = int(name[3] or 1)
    last = max((number for number, paths in parts.items() if len(paths) == whole[number]), default=None)
    if last is None:
        return -1, {}
    found: dict[str, Action] = {}
    for path in parts[last]:
        with pq.ParquetFile(path) as file:
            table = file.read(columns=["add.path", "add.size", "add.deletionVector", "add.partitionValues"])
        adds = (add for add in table.column("add").to_pylist() if add and add["path"])
        found |= {data_path(add["path"]): {**add, "partitionValues": dict(add["partitionValues"])} for add in adds}
    return last, found


def _kept_rows(table: DeltaTable, names: Collection[str]) -> Mapping[str, Flags]:
    """Return flags of the rows that the table still has, for files with a vector."""
    kept: dict[str, Flags] = {}
    for batch in pa.RecordBatchReader.from_stream(table.deletion_vectors()):
        paths, flags = batch.column("filepath"), batch.column("selection_vector")
        for i, uri in enumerate(paths.to_pylist()):
            name = next((name for name in names if data_path(uri).endswith(f"/{name}")), None)
            if name is not None:
                kept[name] = flags[i].values.to_numpy(zero_copy_only=False)
    return kept


def _file_names(action: Action) -> Iterator[str]:
    """Yield the files that an action names."""
    yield data_path(action["path"])
    if (vector := vector_file(action.get("deletionVector"))) is not None:
        yield vector


def _all_columns(table: DeltaTable, schema: TableSchema) -> list[Column]:
    """Return the new columns and the old.

    A feature that a table was once allowed stays allowed.
    """
    old_columns = [
        Column(name=field.name, source_type="", type=field.type) for field in pa.schema(table.schema().to_arrow())
    ]
    return [*schema.columns, *old_columns]


def _add(add: AddAction) -> Action:
    return {
        "add": {
            "path": quote(add.path, safe="/="),
            "partitionValues": dict(add.partition_values),
            "size": add.size,
            "modificationTime": add.modification_time,
            "dataChange": add.data_change,
            "stats": add.stats,
        }
    }


def _removes(adds: Iterable[Action], *, changes_rows: bool) -> Iterator[Action]:
    for add in adds:
        vector = add.get("deletionVector")
        yield {
            "remove": {
                "path": add["path"],
                "deletionTimestamp": _now(),
                "dataChange": changes_rows,
                "extendedFileMetadata": True,
                "partitionValues": add["partitionValues"],
                "size": add["size"],
                **({"deletionVector": vector} if vector else {}),
            }
        }


def _now() -> int:
    return time.time_ns() // 1_000_000
