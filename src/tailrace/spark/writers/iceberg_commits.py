"""Commits of an Iceberg table as a compare-and-swap on the snapshot that was read.

Iceberg's own operations start from the newest metadata, and try again on it when someone else was first. Most writers
want that, and we do not. So an operation is only used to compute what the table would be. The table's catalog then
commits this as the successor of the metadata that we know, and of nothing else. It refuses if the metadata has changed
since: by a file's number, by a row in a database, or by what the server knows of the branch.

A load may change the table's partitions. Snapshots that cannot be read any more are removed in the same commit
(`iceberg/schema_mapping.py`, `plan_partition_change`). Their files stay, for readers that still use them.

What Spark writes is *staged* first: a snapshot that is in the table's metadata and on no branch, so readers do not see
it. It is published as the newest if it follows the snapshot that was read.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession

from tailrace.tables.delta.commit_log import CommitFiles, fsync
from tailrace.tables.iceberg.catalogs import SPARK_CATALOG, Catalog, local_path
from tailrace.tables.iceberg.commit_log import TOKEN, IcebergMetadata
from tailrace.tables.iceberg.schema_mapping import (
    Field,
    PartitionChange,
    Spec,
    partition_json,
    plan_partition_change,
    schema_json,
)
from tailrace.tables.iceberg.table import DATA

_MAIN = "main"
_COUNTS = ("added-data-files", "deleted-data-files", "added-files-size")


class Overtaken(Exception):
    """Someone else has committed since the table was read."""


@dataclass(frozen=True, kw_only=True)
class NewFile:
    """A data file that is to become the table's."""

    path: Path
    partition: Mapping[str, pa.Scalar] = field(default_factory=dict)
    """The values that all its rows have."""


class IcebergCommits:
    """One table as Iceberg's own objects in Spark's Java process, opened again for each commit."""

    def __init__(self, session: SparkSession, catalog: Catalog, path: Path) -> None:
        self._session, self._catalog, self._path = session, catalog, path
        self._levels = catalog.levels(path)

    # Iceberg's objects.

    @property
    def _iceberg(self) -> Any:
        return self._session._jvm.org.apache.iceberg  # type: ignore[union-attr] # py4j's

    def _java_catalog(self) -> Any:
        # Spark looks for a catalog in the settings of the session that the thread used last.
        spark = self._session._jvm.org.apache.spark.sql  # type: ignore[union-attr] # py4j's
        spark.classic.SparkSession.setActiveSession(self._session._jsparkSession)
        return self._iceberg.spark.Spark3Util.loadIcebergCatalog(self._session._jsparkSession, SPARK_CATALOG)

    def _catalog_with_namespace(self) -> Any:
        """Return the catalog, with a namespace for the table."""
        catalog, namespace = self._java_catalog(), self._identifier().namespace()
        if self._catalog.kind != "hadoop" and not catalog.namespaceExists(namespace):
            catalog.createNamespace(namespace)
        return catalog

    @property
    def location(self) -> str:
        """The table's location, as its metadata names it."""
        return str(self._path) if self._catalog.kind == "hadoop" else f"file://{self._path}"

    def _string_array(self, values: Sequence[str]) -> Any:
        gateway = self._session.sparkContext._gateway
        array = gateway.new_array(gateway.jvm.java.lang.String, len(values))  # type: ignore[union-attr] # py4j's
        for i, value in enumerate(values):
            array[i] = value
        return array

    def _identifier(self) -> Any:
        return self._iceberg.catalog.TableIdentifier.of(self._string_array(self._levels))

    def _schema(self, fields: Sequence[Field]) -> Any:
        return self._iceberg.SchemaParser.fromJson(schema_json(fields))

    def _spec(self, schema: Any, partitions: PartitionChange) -> Any:
        return self._iceberg.PartitionSpecParser.fromJson(schema, json.dumps(partitions.spec))

    def _table(self) -> Any:
        return self._java_catalog().loadTable(self._identifier())

    # Commits.

    def create(
        self,
        fields: Sequence[Field],
        partition_by: Sequence[str],
        files: Sequence[NewFile],
        properties: Mapping[str, str],
        summary: Mapping[str, str],
    ) -> int:
        """Create the table with these files unless it exists. Return the number of its first snapshot."""
        catalog, identifier = self._catalog_with_namespace(), self._identifier()
        schema = self._schema(fields)
        builder = catalog.buildTable(identifier, schema)
        builder = builder.withPartitionSpec(self._spec(schema, plan_partition_change(fields, partition_by, (), ())))
        for name, value in properties.items():
            builder = builder.withProperty(name, value)
        if self._catalog.kind != "hadoop":
            builder = builder.withLocation(self.location)
        transaction = builder.createTransaction()
        append = transaction.newAppend()
        for file in files:
            append.appendFile(self._data_file(transaction.table(), file))
        _set_summary(append, summary)
        number: int = transaction.currentMetadata().currentSnapshot().snapshotId()
        self.sync(number, transaction.table())
        transaction.commitTransaction()
        self._sync_metadata(self._table().operations())
        return number

    def replace(
        self,
        seen: IcebergMetadata,
        fields: Sequence[Field],
        partition_by: Sequence[str],
        files: Sequence[NewFile],
        properties: Mapping[str, str],
        summary: Mapping[str, str],
    ) -> int:
        """Make these files all that the table holds, with these columns and partitions."""

        def overwrite(transaction: Any) -> None:
            change = transaction.newOverwrite().overwriteByRowFilter(self._iceberg.expressions.Expressions.alwaysTrue())
            for file in files:
                change.addFile(self._data_file(transaction.table(), file))
            _set_summary(change, summary)

        return self._change(
            seen, fields, properties, overwrite, plan_partition_change(fields, partition_by, seen.specs, seen.fields)
        )

    def commit_position(
        self,
        seen: IcebergMetadata,
        properties: Mapping[str, str],
        summary: Mapping[str, str],
        fields: Sequence[Field] | None = None,
    ) -> int:
        """Commit a snapshot without a change of rows, with another summary. It may change the columns."""
        return self._change(
            seen, fields, properties, lambda transaction: _set_summary(transaction.newFastAppend(), summary)
        )

    def _change(
        self,
        seen: IcebergMetadata,
        fields: Sequence[Field] | None,
        properties: Mapping[str, str],
        change: Callable[[Any], None],
        partitions: PartitionChange | None = None,
    ) -> int:
        table = self._table()
        operations, base = table.operations(), self._base(table, seen)
        builder = self._iceberg.TableMetadata.buildFrom(base).setProperties(dict(properties))
        if partitions is not None and partitions.drops_snapshots:
            # Before the columns change: Iceberg would bind the removed partitions to the new columns.
            self._forget_partitions(builder.removeSnapshots(base.snapshots()), seen.specs)
        if fields is not None:
            schema = self._schema(fields)
            builder = builder.setCurrentSchema(schema, max(base.lastColumnId(), schema.highestFieldId()))
            if partitions is not None:
                builder = builder.setDefaultPartitionSpec(self._spec(schema, partitions))
        transaction = self._iceberg.Transactions.replaceTableTransaction(table.name(), operations, builder.build())
        change(transaction)
        updated = transaction.currentMetadata()
        number: int = updated.currentSnapshot().snapshotId()
        self.sync(number, transaction.table())
        operations.commit(base, updated)
        self._sync_metadata(operations)
        return number

    def _forget_partitions(self, builder: Any, specs: Sequence[Spec]) -> None:
        """Remove all partition specs of the table.

        The spec with the highest number is removed last, after another has got a higher one. Iceberg takes a number
        that is used again for the spec that had it before.
        """
        last = max(specs, key=lambda spec: int(spec["spec-id"]))
        builder.setDefaultPartitionSpec(last["spec-id"])
        removed = self._iceberg.MetadataUpdate.RemovePartitionSpecs
        removed({spec["spec-id"] for spec in specs if spec is not last}).applyTo(builder)
        if last["fields"]:
            builder.setDefaultPartitionSpec(self._iceberg.PartitionSpec.unpartitioned())
            removed({last["spec-id"]}).applyTo(builder)

    def _base(self, table: Any, seen: IcebergMetadata) -> Any:
        """Return the newest metadata; raise `Overtaken` if it is not what was read."""
        base = table.operations().current()
        now = base.currentSnapshot()
        if (None if now is None else now.snapshotId()) != seen.snapshot:
            raise Overtaken
        if base.currentSchemaId() != seen.document["current-schema-id"]:
            raise Overtaken
        if base.defaultSpecId() != seen.document["default-spec-id"]:
            raise Overtaken
        return base

    def staged_snapshot(self, token: str) -> int:
        """Return the number of the snapshot that was staged with this token."""
        snapshots = _each(self._table().snapshots())
        matching = [item.snapshotId() for item in snapshots if item.summary().get(TOKEN) == token]
        if len(matching) != 1:
            raise Overtaken  # another writer has removed it
        number: int = matching[0]
        return number

    def publish(self, seen: IcebergMetadata, number: int, properties: Mapping[str, str]) -> None:
        """Make a staged snapshot the newest.

        It must follow the snapshot that was read, and that must still be the newest.
        """
        table = self._table()
        base = self._base(table, seen)
        if base.snapshot(number) is None or base.snapshot(number).parentId() != seen.snapshot:
            raise Overtaken
        builder = self._iceberg.TableMetadata.buildFrom(base).setProperties(dict(properties))
        builder = builder.setBranchSnapshot(number, _MAIN)
        orphans = [base.snapshot(stray) for stray in seen.orphan_snapshots() if base.snapshot(stray) is not None]
        if orphans:
            builder = builder.removeSnapshots(orphans)
        table.operations().commit(base, builder.build())
        self._sync_metadata(table.operations())

    # A table that was rebuilt in a folder of this one.

    def current(self) -> Any:
        """Return all that Iceberg knows of the table, in memory."""
        return self._table().operations().current()

    def take_over(self, seen: IcebergMetadata, rebuilt: Any) -> None:
        """Take over the snapshots of a table that began as this one's copy (`IcebergMetadata.copy_as_of`).

        Its newest snapshot becomes the newest here, after those that led to it. Partition specs that it no longer has
        are removed, as by `replace`.
        """
        table = self._table()
        base = self._base(table, seen)
        builder = self._iceberg.TableMetadata.buildFrom(base).setProperties(rebuilt.properties())
        spec_ids = {spec.specId() for spec in _each(rebuilt.specs())}
        if any(spec["spec-id"] not in spec_ids for spec in seen.specs):
            self._forget_partitions(builder.removeSnapshots(base.snapshots()), seen.specs)
        schemas = sorted(_each(rebuilt.schemas()), key=lambda schema: int(schema.schemaId()))
        for schema in schemas:
            builder.addSchema(schema)  # Iceberg adds no schema twice
        builder.setCurrentSchema(rebuilt.currentSchemaId())
        for spec in sorted(_each(rebuilt.specs()), key=lambda spec: int(spec.specId())):
            builder.addPartitionSpec(spec)
        builder.setDefaultPartitionSpec(rebuilt.defaultSpecId())
        new = [item for item in _each(rebuilt.snapshots()) if base.snapshot(item.snapshotId()) is None]
        for snapshot in sorted(new, key=lambda item: int(item.sequenceNumber())):
            builder.addSnapshot(snapshot)
        updated = builder.setBranchSnapshot(rebuilt.currentSnapshot().snapshotId(), _MAIN).build()
        # Snapshots refer to columns by number, so both tables must number them alike.
        numbered = updated.schemasById()
        is_same = all(numbered[schema.schemaId()].sameSchema(schema) for schema in schemas)
        if not is_same or not updated.spec().equals(rebuilt.spec()):
            raise Overtaken
        table.operations().commit(base, updated)
        self._sync_metadata(table.operations())

    def register(self, file: Path) -> None:
        """List a table that is not listed, with the metadata in this file."""
        catalog, identifier = self._catalog_with_namespace(), self._identifier()
        catalog.registerTable(identifier, f"file://{file}")
        self._sync_metadata(self._table().operations())

    def _data_file(self, table: Any, file: NewFile) -> Any:
        """Return the table's entry for a Parquet file, from its footer and its partition."""
        path, spec = file.path, table.spec()
        source = table.io().newInputFile(f"file://{path}" if self._catalog.kind != "hadoop" else str(path))
        config = self._iceberg.MetricsConfig.forTable(table)
        builder = self._iceberg.DataFiles.builder(spec).withPath(source.location()).withFormat("PARQUET")
        builder = builder.withFileSizeInBytes(path.stat().st_size)
        if file.partition:
            numbers = {part.name(): part.fieldId() for part in _each(spec.fields())}
            values = partition_json(file.partition, numbers)
            builder = builder.withPartition(self._iceberg.SingleValueParser.fromJson(spec.partitionType(), values))
        return builder.withMetrics(self._iceberg.parquet.ParquetUtil.fileMetrics(source, config)).build()

    # On disk.

    def sync(self, number: int, table: Any = None) -> CommitFiles:
        """Flush what a snapshot has written to the disk, before anyone may see it."""
        table = table or self._table()
        snapshot, io = table.snapshot(number), table.io()
        manifests = [item.path() for item in _each(snapshot.allManifests(io)) if item.snapshotId() == number]
        added = [item.location() for item in _each(snapshot.addedDataFiles(io))]
        added += [item.location() for item in _each(snapshot.addedDeleteFiles(io))]
        files = [local_path(name) for name in (*manifests, *added, snapshot.manifestListLocation())]
        # A new folder, as that of a partition may be, is an entry of its parent.
        around = {folder for file in files for folder in file.parents if folder.is_relative_to(self._path)}
        for path in (*files, *({file.parent for file in files} | around)):
            fsync(path)
        summary = snapshot.summary()
        return CommitFiles(*(int(summary.get(name) or 0) for name in _COUNTS))

    def _sync_metadata(self, operations: Any) -> None:
        location = operations.refresh().metadataFileLocation()
        if location:
            file = local_path(location)
            fsync(file)
            fsync(file.parent)

    # Upkeep.

    def compact_files(self, file_bytes: int, least: int) -> tuple[int, int, int]:
        """Rewrite small files as larger ones.

        Return the number of files read, the number of files written, and their bytes.
        """
        action = self._iceberg.spark.actions.SparkActions.get(self._session._jsparkSession)
        action = action.rewriteDataFiles(self._table())
        options = {"target-file-size-bytes": file_bytes, "min-input-files": least, "delete-file-threshold": least}
        for name, value in options.items():
            action = action.option(name, str(value))
        result = action.execute()
        return result.rewrittenDataFilesCount(), result.addedDataFilesCount(), result.rewrittenBytesCount()

    def expire_snapshots(self, older_than_ms: int) -> None:
        """Forget snapshots older than a time, and remove the files that only they have."""
        self._table().expireSnapshots().expireOlderThan(older_than_ms).retainLast(1).commit()


def _each(collection: Any) -> Iterator[Any]:
    """Yield the elements of a Java collection."""
    iterator = collection.iterator()
    while iterator.hasNext():
        yield iterator.next()


def _set_summary(change: Any, summary: Mapping[str, str]) -> None:
    for name, value in summary.items():
        change.set(name, value)
    change.commit()


def link_file(staged: Path, folder: Path) -> Path:
    """Link a staged file into the table's folder; return its new path. The staged one may then be removed."""
    data_folder = folder / DATA
    data_folder.mkdir(parents=True, exist_ok=True)
    file = data_folder / staged.name
    with contextlib.suppress(FileExistsError):  # by an earlier try
        os.link(staged, file)
    return file
