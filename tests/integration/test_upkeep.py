"""Small files are joined, old ones removed, and nothing else changes: no row, no position, nobody's staged files."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable

from tailrace import failpoints
from tailrace.errors import ForeignWrite
from tailrace.pipeline.apply import compaction
from tailrace.pipeline.report import TableState
from tailrace.tables.compaction_plan import FILES_MIN, UpkeepPlan, UpkeepResult
from tailrace.tables.delta.commit_log import commit_record_of
from tests.support.changes import insert, table_schema
from tests.support.loads import Scene, managed_table
from tests.support.mirrors import BIG, LOG, ROWS, Mirror, at, by_id
from tests.support.pipelines import eventually, execute

AIM = 128 << 20
KEEP = UpkeepPlan(file_bytes=AIM, remove_after_seconds=None)


def test_small_files_become_one_and_no_row_changes(tmp_path: Path) -> None:
    mirror = Mirror(tmp_path / "t", rows=ROWS)
    for number in range(10, 20):
        mirror.apply(insert(number, name="x", big=f"large {number}", n=1))
    before, rows, cursor, shape = (
        mirror.version,
        by_id(mirror.content()),
        mirror.table.applied_position(),
        mirror.table.schema(),
    )
    files = mirror.table.files()
    assert len(files) > FILES_MIN
    assert cursor is not None
    done = mirror.table.compact(KEEP, cursor)
    assert (done.files_compacted, done.files_written, done.files_removed) == (len(files), 1, 0)
    assert done.bytes == (mirror.folder / mirror.table.files()[0]).stat().st_size
    assert (mirror.version, by_id(mirror.content())) == (before + 1, rows)
    assert (mirror.table.applied_position(), mirror.table.schema()) == (cursor, shape)
    commit = (mirror.folder / "_delta_log" / f"{mirror.version:020d}.json").read_text()
    assert commit_record_of(mirror.folder, mirror.version, LOG).applied_position == cursor
    assert '"tailrace"' in commit, "every commit of ours states the position"
    assert mirror.table.compact(KEEP, cursor) == UpkeepResult(), "there is nothing more to join"
    assert mirror.version == before + 1
    mirror.apply(insert(99, name="x", big="after", n=1))
    assert by_id(mirror.content())[99] == "after"


def test_old_files_are_removed_only_if_wished_and_staged_ones_never(tmp_path: Path) -> None:
    mirror = Mirror(tmp_path / "t", rows=ROWS)
    for number in range(10, 20):
        mirror.apply(insert(number, name="x", big="b", n=1))
    staged = mirror.folder / "part-somebody-is-loading.parquet"
    staged.write_bytes(b"staged")
    cursor = mirror.table.applied_position()
    assert cursor is not None
    there = set(mirror.folder.glob("*.parquet"))
    mirror.table.compact(KEEP, cursor)
    assert there < set(mirror.folder.glob("*.parquet")), "nothing is removed unasked"
    for log in sorted((mirror.folder / "_delta_log").glob("*.json")):  # as if two hours had passed
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        for line in lines:
            if "remove" in line:
                line["remove"]["deletionTimestamp"] -= 2 * 3600 * 1000
        log.write_text("\n".join(map(json.dumps, lines)))
    done = mirror.table.compact(UpkeepPlan(file_bytes=AIM, remove_after_seconds=3600), cursor)
    assert done.files_removed == len(there) - 1
    assert staged.exists()
    assert set(mirror.folder.glob("*.parquet")) == {staged, *(mirror.folder / name for name in mirror.table.files())}
    assert (len(mirror.content()), mirror.table.applied_position()) == (len(ROWS) + 10, cursor)
    settings = DeltaTable(str(mirror.folder)).metadata().configuration
    assert settings["delta.deletedFileRetentionDuration"] == "interval 8 days", "a checkpoint must not forget them"
    version = mirror.version
    again = mirror.table.compact(UpkeepPlan(file_bytes=AIM, remove_after_seconds=3600), cursor)
    assert (again, mirror.version) == (UpkeepResult(), version), "what is gone is not removed again"


def test_removing_files_gives_a_table_no_feature_and_takes_nothing_that_others_said_of_it(tmp_path: Path) -> None:
    naive = table_schema({"id": pa.int64(), "at": pa.timestamp("us")})
    now = datetime(2026, 11, 19, 12)
    mirror = Mirror(tmp_path / "t", naive, [{"id": 1, "at": now}])
    cursor = mirror.table.applied_position()
    assert cursor is not None
    DeltaTable(str(mirror.folder)).alter.set_table_description("Ours.", commit_properties=_said(mirror))
    mirror.table.compact(UpkeepPlan(file_bytes=AIM, remove_after_seconds=3600), cursor)
    table = DeltaTable(str(mirror.folder))
    assert table.protocol().reader_features == ["timestampNtz"]
    assert "delta.deletedFileRetentionDuration" in table.metadata().configuration
    assert table.metadata().description == "Ours."
    mirror.apply(insert(2, at=now))
    assert {row["id"] for row in mirror.content()} == {1, 2}


def test_a_table_that_delta_rs_has_given_a_feature_of_no_column_goes_on(tmp_path: Path) -> None:
    naive = table_schema({"id": pa.int64(), "at": pa.timestamp("us")})
    mirror = Mirror(tmp_path / "t", naive, [{"id": 1}])
    DeltaTable(str(mirror.folder)).alter.set_table_properties(
        {"delta.logRetentionDuration": "interval 9 days"}, commit_properties=_said(mirror)
    )
    assert "variantType" in (DeltaTable(str(mirror.folder)).protocol().reader_features or ())
    mirror.apply(insert(2))
    assert {row["id"] for row in mirror.content()} == {1, 2}


def _said(mirror: Mirror) -> CommitProperties:
    """What a commit of ours says of the table."""
    return commit_record_of(mirror.folder, mirror.version, LOG).properties()


def test_a_table_that_somebody_else_moved_is_not_tended(tmp_path: Path) -> None:
    mirror = Mirror(tmp_path / "t", rows=ROWS)
    mirror.apply(insert(7, name="x", big="b", n=1))
    with pytest.raises(ForeignWrite):
        mirror.table.compact(KEEP, at(0))


def test_killed_before_or_after_its_commit_joining_changes_nothing(tmp_path: Path) -> None:
    class Killed(BaseException):
        pass

    def kill(*_: object) -> None:
        raise Killed

    mirror = Mirror(tmp_path / "t", rows=ROWS)
    for number in range(10, 20):
        mirror.apply(insert(number, name="x", big=BIG[0], n=1))
    rows, cursor = by_id(mirror.content()), mirror.table.applied_position()
    assert cursor is not None
    for name in ("table.before_commit", "table.after_commit"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(failpoints, "hit", lambda hit, name=name: kill() if hit == name else None)
            with pytest.raises(Killed):
                mirror.table.compact(KEEP, cursor)
        assert (by_id(mirror.content()), mirror.table.applied_position()) == (rows, cursor)
    mirror.apply(insert(99, name="x", big="after", n=1))


def test_a_pipeline_tends_its_tables_beside_their_changes(
    database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compaction, "LOOK_SECONDS", 0.1)
    execute(database, "CREATE TABLE t (id int PRIMARY KEY, a text)")
    with Scene(tmp_path, database) as scene, scene.loader() as applying:
        scene.assert_equal(applying, "t")
        applying.start_compaction()
        for number in range(30):
            execute(database, f"INSERT INTO t VALUES ({number}, 'x')")
            assert scene.settled(applying)

        folder = tmp_path / "lake" / "public" / "t"
        assert eventually(lambda: any("exchange" in path.name for path in folder.glob("*.parquet")))
        scene.assert_equal(applying, "t")
        table = managed_table(applying, "t")
        assert table.state is TableState.LIVE
        assert 0 < table.bytes_changed < table.bytes_written


def test_what_a_killed_process_was_writing_is_removed_when_the_next_begins(database: str, tmp_path: Path) -> None:
    execute(database, "CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    with Scene(tmp_path, database) as scene:
        with scene.loader() as applying:
            assert scene.settled(applying)
            folder = managed_table(applying, "t").location.path
            execute(database, "UPDATE t SET id = 2")
            assert scene.settled(applying)
        strays = [folder / f"part-{name}-0123-0-000.parquet" for name in ("exchange", "recast")]
        for stray in strays:
            stray.write_bytes(b"half")
        with scene.loader() as applying:
            assert not any(stray.exists() for stray in strays)
            assert scene.settled(applying)
            scene.assert_equal(applying, "t")
