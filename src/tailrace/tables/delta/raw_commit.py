"""Commits to tables that delta-rs must not write, and that need no Spark: landing files, joining them, and changing
columns where no file changes. These are tables with deletion vectors or column mapping, and those with files whose
names delta-rs would write otherwise than they stand in the log.

Each is one file that is linked to the number after the version that was looked at, which fails if that is taken: a
compare-and-swap. It states the position. What it removes it names as the log does, to the letter, with the deletion
vector: a reader takes a file with another name or vector for another file. Here files are called as on disk.
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
from tailrace.tables.fold.fold import Flags
from tailrace.tables.partitions import PartitionValues

Action = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class RawDeltaCommit:
    """A table, as it stood at one version, that delta-rs must not write."""

    folder: Path
    table: DeltaTable | None
    """None: there is none yet."""

    @property
    def next_version(self) -> int:
        """The version that a commit makes."""
        return 0 if self.table is None else self.table.version() + 1

    def commit_load(
        self, features: Features, schema: TableSchema, adds: Sequence[AddAction], position: CommitRecord
    ) -> None:
        """Make these files all that the table holds, with these columns and features."""
        by, fields = position.spec.partition_by, loaded_fields(self.table, features, schema)
        gone = () if self.table is None else live_files(self.folder, self.table.version()).values()
        self._commit(
            "WRITE",
            position,
            [
                {"protocol": protocol_of(features, schema.columns)},
                {"metaData": metadata_of(self.table, features, fields, _now(), by)},
                *_removes(gone, changes_rows=True),
                *map(_add, adds),
            ],
        )

    def set_columns(self, schema: TableSchema, laid: RecastColumns, position: CommitRecord) -> None:
        """Give the table these columns; its files stay as they are."""
        table = self._there()
        features = features_of(table)
        fields = recast_fields(table, laid, schema)
        self._commit(
            "CHANGE COLUMNS",
            position,
            [
                {"protocol": protocol_of(features, _naive_stays(table, schema))},
                {"metaData": metadata_of(table, features, fields, _now())},
            ],
        )

    def sizes(self) -> dict[str, int]:
        """Of the table's files, as far as rows of theirs are still the table's: with many gone it is worth joining."""
        rows = pa.table(self._there().get_add_actions(flatten=True))
        names = map(data_path, rows.column("path").to_pylist())
        counts = dict(zip(names, rows.column("num_records").to_pylist(), strict=True))
        found = {}
        for name, add in live_files(self.folder, self._there().version()).items():
            gone = (add.get("deletionVector") or {}).get("cardinality", 0)
            found[name] = add["size"] * max(counts[name] - gone, 0) // max(counts[name], 1)
        return found

    def exchange(
        self, gone: Iterable[str], adds: Sequence[AddAction], position: CommitRecord, *, changes_rows: bool
    ) -> None:
        """Swap files for others, with the same rows or not."""
        live = live_files(self.folder, self._there().version())
        removes = _removes([live[name] for name in gone], changes_rows=changes_rows)
        came = (_add(replace(add, data_change=changes_rows)) for add in adds)
        self._commit("WRITE" if changes_rows else "OPTIMIZE", position, [*removes, *came])

    def parts(self) -> PartitionValues:
        """As `parts_of`, by the names of columns in the files."""
        names = physical_names(self._there())
        return {
            file: {names[name]: value for name, value in said.items()}
            for file, said in partition_values_of(self._there()).items()
        }

    def rows_of(
        self, names: Sequence[str], columns: Sequence[Column], parts: PartitionValues
    ) -> Iterator[pa.RecordBatch]:
        """The rows that the table still has of these files, in columns that are called as they are there."""
        stays = _staying(self._there(), set(names))
        for name in names:
            kept, start = stays.get(name, np.empty(0, np.bool_)), 0
            for batch in read_rows(self.folder / name, columns, parts.get(name, {})):
                flags = kept[start : start + batch.num_rows]
                # A vector ends with the last row that is gone.
                rest = np.ones(batch.num_rows - flags.size, np.bool_)
                yield batch.filter(pa.array(np.append(flags, rest))) if flags.size else batch
                start += batch.num_rows

    def in_files(self, schema: TableSchema) -> TableSchema:
        """The columns as they are called in the table's files."""
        names = physical_names(self._there())
        columns = tuple(replace(column, name=names[column.name]) for column in schema.columns)
        return replace(schema, columns=columns, key=self.names_in_files(schema.key), facts=None)

    def names_in_files(self, columns: Iterable[str]) -> tuple[str, ...]:
        """What these are called there."""
        names = physical_names(self._there())
        return tuple(names[name] for name in columns)

    def keep_removed_files(self, after_seconds: float, position: CommitRecord) -> None:
        """Have the table keep in mind which files it no longer needs, unless it does already."""
        table, wanted = self._there(), retention_interval(after_seconds)
        if table.metadata().configuration.get(RETENTION_PROPERTY) == wanted:
            return
        settings = {RETENTION_PROPERTY: wanted}
        metadata = metadata_of(table, features_of(table), fields_of(table), _now(), **settings)
        self._commit("SET TBLPROPERTIES", position, [{"metaData": metadata}])

    def remove(self, after_seconds: float) -> int:
        """Remove files, and deletion vectors, that no version of the last so many seconds has."""
        table = self._there()
        live = live_files(self.folder, table.version()).values()
        needed = {name for add in live for name in _names(add)} | self._named_since(time.time() - after_seconds)
        gone = set(table.vacuum(0, dry_run=True, enforce_retention_duration=False))
        old = time.time() - after_seconds
        gone |= {
            str(path.relative_to(self.folder))
            for path in self.folder.glob("**/deletion_vector_*.bin")
            if path.stat().st_mtime < old
        }
        there = [self.folder / name for name in sorted(gone - needed) if (self.folder / name).exists()]
        for path in there:
            path.unlink(missing_ok=True)
        return len(there)

    def _named_since(self, moment: float) -> set[str]:
        """What commits since then have added or removed: some version of that time has it."""
        found = set[str]()
        for entry in (self.folder / "_delta_log").glob("*.json"):
            if entry.stem.isdigit() and entry.stat().st_mtime >= moment:
                for action in actions_of(self.folder, int(entry.stem)):
                    for kind in ("add", "remove"):
                        found.update(_names(action[kind]) if kind in action else ())
        return found

    def _there(self) -> DeltaTable:
        assert self.table is not None, "whoever calls has opened it"
        return self.table

    def _commit(self, operation: str, position: CommitRecord, actions: Iterable[Action]) -> None:
        if self.table is None and has_commits(self.folder):
            raise CommitFailedError("a table was made here meanwhile")
        now = _now()
        said = {"timestamp": now, "operation": operation, "operationParameters": {}, METADATA_KEY: position.text()}
        seen = {"appId": app_id(position.log), "version": position.applied_position.seq, "lastUpdated": now}
        lines = [json.dumps(action) for action in ({"commitInfo": said}, {"txn": seen}, *actions)]
        path = self.folder / "_delta_log" / f"{self.next_version:020d}.json"
        path.parent.mkdir(exist_ok=True)
        try:
            files.create(path, ("\n".join(lines) + "\n").encode())
        except FileExistsError as exc:
            raise CommitFailedError("someone else has made this version") from exc


def live_files(folder: Path, version: int) -> dict[str, Action]:
    """The files of a version by name, each with its deletion vector, as the table's log tells of them."""
    begin, found = _checkpoint(folder, version)
    for number in range(begin + 1, version + 1):
        actions = actions_of(folder, number)
        for action in actions:
            if "remove" in action:
                found.pop(data_path(action["remove"]["path"]), None)
        found |= {data_path(action["add"]["path"]): action["add"] for action in actions if "add" in action}
    return found


def removed_rows(folder: Path, version: int) -> int:
    """How many rows of a version's files the table no longer has."""
    return sum((add.get("deletionVector") or {}).get("cardinality", 0) for add in live_files(folder, version).values())


def is_readable_without_log(folder: Path, table: DeltaTable) -> bool:
    """Whether the files of the version that was opened have its rows and no others, under the names of its columns: so
    it is with all that a load has landed, whatever features the table has."""
    return all(name == own for name, own in physical_names(table).items()) and not removed_rows(folder, table.version())


_CHECKPOINT = re.compile(r"(\d{20})\.checkpoint(\.\d{10}\.(\d{10}))?\.parquet")


def _checkpoint(folder: Path, version: int) -> tuple[int, dict[str, Action]]:
    """The newest list of files up to a version, and which version's it is; -1 if there is none."""
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


def _staying(table: DeltaTable, names: Collection[str]) -> Mapping[str, Flags]:
    """Of files that have a vector, which rows the table still has."""
    found: dict[str, Flags] = {}
    for batch in pa.RecordBatchReader.from_stream(table.deletion_vectors()):
        paths, flags = batch.column("filepath"), batch.column("selection_vector")
        for i, uri in enumerate(paths.to_pylist()):
            name = next((name for name in names if data_path(uri).endswith(f"/{name}")), None)
            if name is not None:
                found[name] = flags[i].values.to_numpy(zero_copy_only=False)
    return found


def _names(action: Action) -> Iterator[str]:
    """The files that an action speaks of."""
    yield data_path(action["path"])
    if (vector := vector_file(action.get("deletionVector"))) is not None:
        yield vector


def _naive_stays(table: DeltaTable, schema: TableSchema) -> list[Column]:
    """The new columns and the old: what a table was allowed once it stays allowed."""
    held = [Column(name=field.name, source_type="", type=field.type) for field in pa.schema(table.schema().to_arrow())]
    return [*schema.columns, *held]


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
