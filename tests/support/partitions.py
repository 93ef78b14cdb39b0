"""What a partitioned table says of itself, and where its files lie."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
from deltalake import DeltaTable

from tailrace.tables.delta.commit_log import file_names
from tests.support import engines
from tests.support.engines import FEATURES, IS_ICEBERG
from tests.support.forms import Formed


def assert_partitioned(table: Formed) -> None:
    """The table says what it is partitioned by, and every file lies where its rows belong."""
    if IS_ICEBERG:
        by = list(table.form.partition_by)
        assert engines.metadata_of(table.folder).partition_by == by
        for path, values in engines.partitions_of(table.folder).items():
            rows = pq.read_table(path, columns=by).to_pylist()
            assert rows
            assert all(row == values for row in rows)
        return
    delta = DeltaTable(str(table.folder))
    assert delta.metadata().partition_columns == list(table.form.partition_by)
    for name in file_names(delta):
        if not FEATURES.column_mapping:
            assert [part.split("=")[0] for part in name.split("/")[:-1]] == list(table.form.partition_by)
        assert not set(own_columns(table.folder / name, *table.form.partition_by)) & set(table.form.partition_by)


def own_columns(path: Path, *by: str) -> tuple[str, ...]:
    """The columns of a file. Delta's connector writes those of its partition too, last, and nobody reads them there."""
    schema = pq.read_schema(path)
    by_spark = b"org.apache.spark.version" in (schema.metadata or {})
    return tuple(name for name in schema.names if not (by_spark and name in by))


def files_of(table: Formed) -> list[Path]:
    """All that its newest version has rows in."""
    if IS_ICEBERG:
        return [*engines.partitions_of(table.folder)]
    return [table.folder / name for name in file_names(DeltaTable(str(table.folder)))]
