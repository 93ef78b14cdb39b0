"""Tables with deletion vectors or column mapping: work that needs no Spark."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, TableFeatures

from tailrace.errors import ForeignWrite, TableUnusable
from tailrace.tables.compaction_plan import UpkeepPlan
from tailrace.tables.delta.commit_log import vector_file
from tailrace.tables.delta.features import Features
from tailrace.tables.delta.raw_commit import live_files
from tailrace.tables.delta.table import DeltaRsTable
from tailrace.tables.fold.fold import fold
from tailrace.tables.staging import StagedFile, stage
from tests.support.changes import SHOP, changes, record_batches, table_schema, update
from tests.support.mirrors import LOG, ROWS, at, by_id, content

VECTORS, MAPPING = Features(deletion_vectors=True), Features(column_mapping=True)
BOTH = Features(deletion_vectors=True, column_mapping=True)
COMPACT = UpkeepPlan(file_bytes=1 << 20, remove_after_seconds=None)


def features(path: Path) -> set[str]:
    return set(DeltaTable(str(path)).protocol().reader_features or ())


@pytest.mark.parametrize(
    ("features_set", "names"),
    [(VECTORS, {"deletionVectors"}), (MAPPING, {"columnMapping"}), (BOTH, {"deletionVectors", "columnMapping"})],
)
def test_a_table_with_features_is_loaded_and_refused_by_delta_rs(
    tmp_path: Path, features_set: Features, names: set[str]
) -> None:
    table = DeltaRsTable(tmp_path, LOG, features=features_set)
    assert table.load(SHOP, record_batches(SHOP, ROWS), at(0)) == 5
    assert features(tmp_path) == names
    assert (table.applied_position(), table.schema(), table.rows(), table.version()) == (at(0), SHOP, 5, 0)
    assert by_id(content(tmp_path, SHOP)) == {row["id"]: row["big"] for row in ROWS}
    plain = DeltaRsTable(tmp_path, LOG)
    with pytest.raises(TableUnusable, match="does not write") as refused:
        plain.applied_position()
    assert all(name in str(refused.value) for name in names)
    assert "Set `tables.engine: spark`" in refused.value.hint
    assert "tailrace snapshot FILE TABLE" in refused.value.hint
    with pytest.raises(TableUnusable, match="does not write"):
        plain.apply(SHOP, fold(SHOP, changes(SHOP, update(1, n=1))), at(0), at(10))


def test_a_reload_without_features_removes_them(tmp_path: Path) -> None:
    DeltaRsTable(tmp_path, LOG, features=BOTH).load(SHOP, record_batches(SHOP, ROWS), at(0))
    plain = DeltaRsTable(tmp_path, LOG)
    plain.load(SHOP, record_batches(SHOP, ROWS[:2]), at(10))
    assert features(tmp_path) == set()
    assert not [name for name in DeltaTable(str(tmp_path)).metadata().configuration if "column" in name.lower()]
    plain.apply(SHOP, fold(SHOP, changes(SHOP, update(1, name="x", big="y", n=1))), at(10), at(20))
    assert by_id(content(tmp_path, SHOP)) == {1: "y", 2: "large 2"}
    assert (plain.applied_position(), plain.rows()) == (at(20), 2)


def test_a_feature_that_someone_turned_on_is_named(tmp_path: Path) -> None:
    plain = DeltaRsTable(tmp_path, LOG)
    plain.load(SHOP, record_batches(SHOP, ROWS), at(0))
    DeltaTable(str(tmp_path)).alter.add_feature(TableFeatures.DeletionVectors, allow_protocol_versions_increase=True)
    with pytest.raises(TableUnusable, match="deletionVectors") as refused:
        plain.applied_position()
    assert refused.value.hint.startswith("Run `tailrace snapshot"), "the other engine could not continue with it either"
    with pytest.raises(ForeignWrite):
        DeltaRsTable(tmp_path, LOG, features=VECTORS).applied_position()
    plain.load(SHOP, record_batches(SHOP, ROWS), at(10))
    assert (plain.applied_position(), features(tmp_path)) == (at(10), set())


def test_of_two_loads_from_one_version_only_one_commits(tmp_path: Path) -> None:
    path = tmp_path / "t"
    tables = [DeltaRsTable(path, LOG, features=BOTH) for _ in range(2)]
    tables[0].load(SHOP, record_batches(SHOP, ROWS), at(0))
    opened = tables[1]._own_table(SHOP.table)
    files = [stage(path, name, SHOP, record_batches(SHOP, ROWS)) for name in ("a", "b")]
    tables[0].commit_load(SHOP, files[0], at(10))
    with pytest.raises(ForeignWrite, match="at the same time"):
        tables[1]._commit_files(opened, SHOP, files[1], at(20), None)
    assert tables[0].applied_position() == at(10)
    assert tables[0].commit_load(SHOP, files[0], at(10)) == 5, "repeated: the files are in the table already"
    assert tables[0].version() == 1


def test_small_files_are_compacted_under_their_column_names_in_files(tmp_path: Path) -> None:
    files = list[StagedFile]()
    for number in range(10):
        files += stage(tmp_path, f"load-{number}", SHOP, record_batches(SHOP, [{"id": number, "big": str(number)}]))
    table = DeltaRsTable(tmp_path, LOG, features=BOTH)
    table.commit_load(SHOP, files, at(0))
    result = table.compact(COMPACT, at(0))
    assert (result.files_compacted, result.files_written, len(table.files()), table.applied_position()) == (
        10,
        1,
        1,
        at(0),
    )
    assert by_id(content(tmp_path, SHOP)) == {number: str(number) for number in range(10)}
    # Nothing is old enough, and then everything is.
    assert table.compact(UpkeepPlan(file_bytes=None, remove_after_seconds=3600.0), at(0)).files_removed == 0
    assert features(tmp_path) == {"deletionVectors", "columnMapping"}
    assert table.compact(UpkeepPlan(file_bytes=None, remove_after_seconds=0.0), at(0)).files_removed == 10
    assert by_id(content(tmp_path, SHOP)) == {number: str(number) for number in range(10)}


def test_files_are_known_from_a_checkpoint_too(tmp_path: Path) -> None:
    table = DeltaRsTable(tmp_path, LOG, features=BOTH)
    table.load(SHOP, record_batches(SHOP, ROWS), at(0))
    before = live_files(tmp_path, 0)
    DeltaTable(str(tmp_path)).create_checkpoint()
    assert (tmp_path / "_delta_log" / f"{0:020d}.checkpoint.parquet").exists()
    assert set(live_files(tmp_path, 0)) == set(before) == set(table.files())
    table.load(SHOP, record_batches(SHOP, ROWS[:1]), at(10))
    assert (set(live_files(tmp_path, 1)), table.rows()) == (set(table.files()), 1)


def test_a_table_with_unknown_features_is_not_written(tmp_path: Path) -> None:
    table = DeltaRsTable(tmp_path, LOG, features=BOTH)
    table.load(SHOP, record_batches(SHOP, ROWS), at(0))
    DeltaTable(str(tmp_path)).alter.add_feature(TableFeatures.RowTracking, allow_protocol_versions_increase=True)
    with pytest.raises(TableUnusable, match="rowTracking") as refused:
        table.load(SHOP, record_batches(SHOP, ROWS), at(10))
    assert "Move the table's folder away" in refused.value.hint
    assert table.version() == 1


def test_a_timestamp_without_a_zone_is_one_more_feature(tmp_path: Path) -> None:
    timed = table_schema({"id": pa.int64(), "at": pa.timestamp("us")})
    DeltaRsTable(tmp_path, LOG, features=MAPPING).load(timed, record_batches(timed, [{"id": 1}]), at(0))
    assert features(tmp_path) == {"columnMapping", "timestampNtz"}
    DeltaRsTable(tmp_path, LOG).load(timed, record_batches(timed, [{"id": 1}]), at(10))
    assert features(tmp_path) == {"timestampNtz"}


def test_a_vector_s_file_name_is_decoded() -> None:
    vector = json.loads('{"storageType": "u", "pathOrInlineDv": "ab^-aqEH.-t@S}K{vb[*k^", "sizeInBytes": 1}')
    assert vector_file(vector) == "ab/deletion_vector_d2c639aa-8816-431a-aaf6-d3fe2512ff61.bin"
    assert vector_file({"storageType": "i", "pathOrInlineDv": "x"}) is None
    assert vector_file(None) is None
