"""`tailrace rebuild` of an Iceberg table: from which snapshot, what is replayed, and that the table is not touched
until one commit swaps the new one in. The source of these pipelines never answers.

What does not depend on the format, such as which versions are no base, is asked in `tests/unit/pipeline`.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tailrace import failpoints
from tailrace.control.rebuild import RebuildResult, rebuild
from tailrace.errors import (
    BaseRowMissing,
    ConfigError,
    ExitCode,
    ForeignWrite,
    LogTrimmed,
    SchemaChanged,
    TableUnusable,
)
from tailrace.model.position import Lsn
from tailrace.tables.compaction_plan import UpkeepPlan
from tailrace.tables.delta.load_snapshots import KeptLoadStore
from tailrace.tasks.load_store import LoadStore
from tests.support.changes import KEYLESS, delete, insert, move, update
from tests.support.engines import history_of, iceberg_table, metadata_of, only_iceberg, session
from tests.support.logs import WIDER
from tests.support.quiet import FULL, NARROW, THINGS, Quiet
from tests.support.rest_catalog import rest_catalog

pytestmark = only_iceberg

BIG = ("big",)
ROWS = [{"id": key, "name": f"n{key}", "big": "x" * 50, "n": 0} for key in (1, 2, 3)]
STEPS = ([update(1, unchanged=BIG, n=1)], [insert(4, name="n4", n=4), delete(2)], [*move(3, 5, unchanged=BIG, n=5)])


def loaded(folder: Path, form: str = "") -> Quiet:
    """A table that a load of three rows made, of which a seed is kept."""
    made = Quiet(folder, spec=form, table_format="iceberg")
    made.diary.commit()
    made.reload(ROWS, "first")
    made.keep("first")
    return made


def changed(quiet: Quiet) -> Quiet:
    for rows in STEPS:
        quiet.commit(*rows)
        (outcome,) = quiet.apply()
        assert outcome.error is None
    return quiet


def place(quiet: Quiet) -> Path:
    return quiet.settings.tables.layout.path(THINGS).absolute()


def versions(quiet: Quiet) -> list[int]:
    return history_of(metadata_of(place(quiet)))


def rebuilt(quiet: Quiet, *, to: Lsn | None = None, version: int | None = None) -> RebuildResult:
    return rebuild(
        quiet.settings,
        "public.things",
        to=None if to is None else str(to),
        from_version=version,
        progress=lambda *_: None,
        spark=session(),
    )


def run_sql(quiet: Quiet, *statements: str) -> None:
    """What somebody else does to the table."""
    spark = session().newSession()
    spark.conf.set("spark.sql.catalog.other", "org.apache.iceberg.spark.SparkCatalog")
    spark.conf.set("spark.sql.catalog.other.type", "hadoop")
    spark.conf.set("spark.sql.catalog.other.warehouse", str(quiet.settings.tables.path.absolute()))
    for statement in statements:
        spark.sql(statement.replace("THINGS", "other.public.things"))


def sorted_rows(quiet: Quiet) -> list[str]:
    return sorted(map(repr, quiet.content()))


WRECKED = {
    "a delete": "DELETE FROM THINGS WHERE id = 1",
    "all rows written over": "INSERT OVERWRITE THINGS SELECT 9, 'other', 'b', 9",
    "another column": "ALTER TABLE THINGS ADD COLUMN more int",
    "another partitioning": "ALTER TABLE THINGS ADD PARTITION FIELD bucket(2, id)",
}


@pytest.mark.parametrize("what", WRECKED)
def test_a_table_that_others_changed_is_as_it_was_and_goes_on(tmp_path: Path, what: str) -> None:
    quiet = changed(loaded(tmp_path))
    whole, newest = quiet.rows(), versions(quiet)[-1]
    run_sql(quiet, WRECKED[what])
    with pytest.raises((ForeignWrite, TableUnusable)):
        quiet.applied_position  # noqa: B018 - asking for it is the question
    found = rebuilt(quiet)
    assert (found.base, found.base_version, found.changes, found.rows) == ("version", newest, 0, 3)
    assert (quiet.rows(), quiet.applied_position.position) == (whole, quiet.diary.writer.position)
    quiet.commit(update(5, unchanged=BIG, n=6))
    assert [outcome.error for outcome in quiet.apply()] == [None]
    assert (quiet.ns(), quiet.rows()[5]["big"]) == ({1: 1, 4: 4, 5: 6}, "x" * 50)


@pytest.mark.parametrize(
    "form",
    ["", "mode: history", "mode: append", "soft_delete: true, metadata: [_seq, _tx]", "partition_by: [name]",
     'rules: {"public.*": {columns: {n: count}}}'],
)  # fmt: skip
def test_a_table_of_any_form_is_what_it_was_and_goes_on(tmp_path: Path, form: str) -> None:
    quiet = changed(loaded(tmp_path, form))
    before, first = sorted_rows(quiet), versions(quiet)[0]
    found = rebuilt(quiet, version=first)
    assert (found.base_version, found.base_rows, found.changes) == (first, 3, 5)
    assert sorted_rows(quiet) == before
    quiet.commit(delete(1), insert(9, name="n9", n=9))
    assert [outcome.error for outcome in quiet.apply()] == [None]
    again = sorted_rows(quiet)
    rebuilt(quiet, version=first)
    assert sorted_rows(quiet) == again


def test_what_the_log_has_since_comes_too_and_versions_of_before_can_still_be_read(tmp_path: Path) -> None:
    quiet = changed(loaded(tmp_path))
    before = versions(quiet)
    quiet.commit(insert(9, n=9), delete(1))
    found = rebuilt(quiet, version=before[1])
    assert (found.base, found.changes, quiet.ns(), quiet.apply()) == ("version", 6, {4: 4, 5: 5, 9: 9}, [])
    assert versions(quiet)[:2] == before[:2]
    held = {item["snapshot-id"] for item in metadata_of(place(quiet)).document["snapshots"]}
    assert held >= {*before}
    assert rebuilt(quiet).base_version == found.version, "the newest is the one that the rebuild made"
    upkeep = UpkeepPlan(file_bytes=1 << 20, remove_after_seconds=0.0)
    iceberg_table(quiet.location).compact(upkeep, quiet.applied_position)
    assert (versions(quiet)[:1] == before[:1], quiet.ns()) == (False, {4: 4, 5: 5, 9: 9}), "old snapshots can go"


def test_a_table_that_somebody_made_one_of_format_version_3_is_rebuilt_as_that(tmp_path: Path) -> None:
    quiet = loaded(tmp_path)
    first = versions(quiet)[0]
    run_sql(quiet, "ALTER TABLE THINGS SET TBLPROPERTIES ('format-version' = '3')")
    whole = changed(quiet).rows()
    assert rebuilt(quiet, version=first).changes == 5
    assert (quiet.rows(), metadata_of(place(quiet)).document["format-version"]) == (whole, 3)


def test_a_table_of_an_earlier_position_goes_on_from_there(tmp_path: Path) -> None:
    quiet = changed(loaded(tmp_path))
    first, second = quiet.commit_two([update(4, n=100)], [update(4, n=200), insert(8)])
    quiet.apply()
    whole, newest = quiet.rows(), versions(quiet)[-1]
    found = rebuilt(quiet, to=first)
    assert (found.base_version != newest, found.changes) == (True, 1)
    assert (quiet.ns(), quiet.applied_position.position) == ({1: 1, 4: 100, 5: 5}, first)
    quiet.apply()
    assert (quiet.rows(), quiet.applied_position.position) == (whole, second)


def test_a_change_of_shape_is_made_again_and_one_that_only_a_load_brings_is_refused(tmp_path: Path) -> None:
    quiet = Quiet(tmp_path, table_format="iceberg")
    quiet.load([{"id": key, "name": f"n{key}"} for key in (1, 2)], FULL)
    quiet.commit(update(2, n=2), schema=NARROW)
    quiet.apply()
    before = quiet.rows()
    rebuilt(quiet, version=versions(quiet)[0])
    assert (quiet.rows(), before[1]["name"]) == (before, "n1"), "what the source dropped is kept"
    quiet.commit(insert(7, added=True), schema=WIDER)  # nothing is known of the new column's default
    files, newest = sorted(place(quiet).rglob("*")), versions(quiet)[-1]
    with pytest.raises(SchemaChanged, match="the log alone cannot carry the table over a schema change"):
        rebuilt(quiet)
    assert (versions(quiet)[-1], sorted(place(quiet).rglob("*"))) == (newest, files), "nothing was touched, or left"


def test_a_table_without_a_key_is_rebuilt_too(tmp_path: Path) -> None:
    quiet = Quiet(tmp_path, table_format="iceberg")
    quiet.load([{"a": 1, "b": "x"}, {"a": 1, "b": "x"}, {"a": 2, "b": "y"}], schema=KEYLESS)
    quiet.commit(insert({"a": 3}, b="z"), delete({"a": 1}, b="x"), schema=KEYLESS)
    quiet.apply()
    run_sql(quiet, "DELETE FROM THINGS WHERE a = 1")
    rebuilt(quiet, version=versions(quiet)[0])
    assert sorted((row["a"], row["b"]) for row in quiet.content()) == [(1, "x"), (2, "y"), (3, "z")]


def test_expired_snapshots_are_no_base_and_without_one_the_remedy_is_named(tmp_path: Path) -> None:
    quiet = Quiet(tmp_path, table_format="iceberg")
    quiet.load(ROWS)
    first = versions(quiet)[0]
    quiet.commit(update(1, n=1))
    quiet.apply()
    whole = quiet.rows()
    run_sql(quiet, "CALL other.system.expire_snapshots('public.things', TIMESTAMP '2100-01-01 00:00:00', 1)")
    with pytest.raises(ConfigError, match="cannot be rebuilt from this version"):
        rebuilt(quiet, version=first)
    assert (rebuilt(quiet).base, quiet.rows()) == ("version", whole)
    run_sql(
        quiet,
        "DELETE FROM THINGS WHERE id = 1",
        "CALL other.system.expire_snapshots('public.things', TIMESTAMP '2100-01-01 00:00:00', 1)",
    )
    with pytest.raises(LogTrimmed, match="the table has no version of this log") as refused:
        rebuilt(quiet)
    assert "tailrace snapshot FILE TABLE" in refused.value.hint


def test_removed_files_are_noticed_and_the_seed_is_the_base(tmp_path: Path) -> None:
    quiet = changed(loaded(tmp_path))
    whole = quiet.rows()
    for file in (place(quiet) / "data").rglob("*.parquet"):
        file.unlink()
    with pytest.raises(ConfigError, match="some of its files were removed"):
        rebuilt(quiet, version=versions(quiet)[-1])
    found = rebuilt(quiet)
    assert (found.base, found.base_version, found.base_rows, found.changes) == ("seed", None, 3, 5)
    assert quiet.rows() == whole
    quiet.commit(update(5, unchanged=BIG, n=6))
    assert [outcome.error for outcome in quiet.apply()] == [None]


@pytest.mark.parametrize("form", ["", "mode: history", "mode: append", "partition_by: [name]"])
def test_a_table_whose_folder_is_gone_is_what_it_was_and_goes_on(tmp_path: Path, form: str) -> None:
    quiet = changed(loaded(tmp_path, form))
    before, cursor = sorted_rows(quiet), quiet.applied_position
    shutil.rmtree(place(quiet))
    found = rebuilt(quiet)
    assert (found.base, found.base_version, found.base_rows, found.changes) == ("seed", None, 3, 5)
    assert (sorted_rows(quiet), quiet.applied_position.load) == (before, "first")
    assert quiet.applied_position.covers(cursor)
    quiet.commit(delete(1), insert(9, name="n9", n=9))
    assert [outcome.error for outcome in quiet.apply()] == [None]
    assert rebuilt(quiet).base == "version"


def test_a_seed_of_a_chunked_load_is_brought_to_one_moment_and_no_value_is_made_up(tmp_path: Path) -> None:
    """Row 2 was read later than the others: it has seen a change of the log already."""
    quiet = Quiet(tmp_path, table_format="iceberg")
    quiet.diary.commit()
    rows = [ROWS[0], ROWS[1] | {"n": 2}, ROWS[2]]
    quiet.reload(rows, "first", ahead_until=Lsn(quiet.diary.writer.position.value + 300))
    quiet.keep("first")
    shutil.rmtree(place(quiet))
    middle = quiet.commit(update(2, unchanged=BIG, n=1), update(1, n=1))
    quiet.commit(update(2, unchanged=BIG, n=2))
    last = quiet.commit(insert(4, n=4))
    with pytest.raises(LogTrimmed, match="some of its rows are newer than others, up to"):
        rebuilt(quiet, to=middle)
    assert rebuilt(quiet).position == str(last)
    assert (quiet.ns(), quiet.rows()[2]["big"]) == ({1: 1, 2: 2, 3: 0, 4: 4}, "x" * 50)


def test_values_that_only_the_source_could_tell_are_refused_and_nothing_is_left(tmp_path: Path) -> None:
    quiet = Quiet(tmp_path, table_format="iceberg")
    quiet.diary.commit()
    quiet.reload(ROWS, "first", ahead_until=Lsn(quiet.diary.writer.position.value + 100))
    quiet.keep("first")
    shutil.rmtree(place(quiet))
    # The row of key 3 that was read may be another than the one that moves: a rebuild cannot tell.
    quiet.commit(*move(3, 5, unchanged=BIG, n=5), insert(3, big="other"))
    with pytest.raises(BaseRowMissing, match="a rebuild cannot read the source"):
        rebuilt(quiet)
    assert not place(quiet).exists()


def test_where_nothing_is_kept_a_missing_table_is_refused(tmp_path: Path) -> None:
    quiet = Quiet(tmp_path, table_format="iceberg")
    quiet.load(ROWS)
    quiet.commit(update(1, n=1))
    shutil.rmtree(place(quiet))
    with pytest.raises(LogTrimmed, match="no lake table, and no kept load of it") as refused:
        rebuilt(quiet)
    assert "Run `tailrace run FILE`" in refused.value.hint
    assert not place(quiet).exists()


def test_a_load_that_writes_only_what_differs_leaves_the_seed_of_before(tmp_path: Path) -> None:
    quiet = loaded(tmp_path, "soft_delete: true")
    shape = quiet.location.open_for_reading().schema()
    assert shape is not None
    seeds = LoadStore(quiet.settings.log.path)
    seeds.folder("second").mkdir(parents=True)
    seeds.record_commit("second", quiet.applied_position.position)
    iceberg_table(quiet.location).merge_load(
        shape, [], quiet.applied_position, replace(quiet.applied_position, load="second")
    )
    quiet.keep("second")
    (kept,) = KeptLoadStore(quiet.settings.tables.path, quiet.registry().log.log_id).of(THINGS)
    assert kept.commit_record.applied_position.load == "first"


def test_where_the_disk_knows_no_links_a_seed_is_copied_if_that_is_wished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    quiet = Quiet(tmp_path, table_format="iceberg")
    quiet.diary.commit()
    quiet.reload(ROWS, "first")
    kept = KeptLoadStore(quiet.settings.tables.path, quiet.registry().log.log_id)
    with monkeypatch.context() as patch:
        patch.setattr(os, "link", no_links)
        quiet.keep("first")
        assert kept.of(THINGS) == []
        quiet.file.write_text(quiet.file.read_text().replace("path: ./lake", "path: ./lake, keep_seed: copy"))
        quiet.keep("first")
    assert [seed.is_intact for seed in kept.of(THINGS)] == [True]
    changed(quiet)
    whole = sorted_rows(quiet)
    shutil.rmtree(place(quiet))
    assert (rebuilt(quiet).base, sorted_rows(quiet)) == ("seed", whole)


@pytest.mark.parametrize("kind", ["jdbc", "rest"])
def test_a_table_that_was_dropped_from_its_catalog_is_listed_again(tmp_path: Path, kind: str) -> None:
    with rest_catalog(session(), tmp_path / "rest.db") as uri:
        said = f"type: rest, uri: {uri}" if kind == "rest" else f"type: jdbc, uri: jdbc:sqlite:{tmp_path / 'list.db'}"
        quiet = changed(loaded(tmp_path, f"catalog: {{{said}}}"))
        table = iceberg_table(quiet.location)
        whole = read(table)
        table.session.sql(f"DELETE FROM {table._name} WHERE id = 1")
        found = rebuilt(quiet)
        assert (found.base, read(table)) == ("version", whole)
        table.session.sql(f"DROP TABLE {table._name}")
        assert quiet.location.open_for_reading().applied_position() is None
        found = rebuilt(quiet)
        assert (found.base, read(table)) == ("seed", whole)
        quiet.commit(update(5, unchanged=BIG, n=6))
        assert [outcome.error for outcome in quiet.apply()] == [None]
        assert read(table) == {1: 1, 4: 4, 5: 6}


def read(table: Any) -> dict[int, Any]:
    return {row["id"]: row["n"] for row in table.session.sql(f"SELECT id, n FROM {table._name}").collect()}


def called(quiet: Quiet, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command, in a process of its own, which starts Spark."""
    return subprocess.run(
        [sys.executable, "-m", "tailrace", "rebuild", str(quiet.file), "public.things"],
        check=False,
        text=True,
        env={**os.environ, **environment},
        capture_output=True,
        start_new_session=True,
    )


@pytest.mark.parametrize("point", ["rebuild.replayed", "rebuild.linked"])
def test_killed_before_the_swap_the_table_is_as_it_was(tmp_path: Path, point: str) -> None:
    quiet = changed(loaded(tmp_path))
    run_sql(quiet, "DELETE FROM THINGS WHERE id = 1")
    wrecked, newest = sorted_rows(quiet), versions(quiet)[-1]
    killed = called(quiet, TAILRACE_FAILPOINT=point, TAILRACE_FAILPOINT_LOG=str(tmp_path / "hits"))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert (sorted_rows(quiet), versions(quiet)[-1]) == (wrecked, newest)
    done = called(quiet)
    assert (done.returncode, done.stderr) == (ExitCode.OK, "")
    assert "public.things: rebuilt from version " in done.stdout
    assert quiet.ns() == {1: 1, 4: 4, 5: 5}


def test_whoever_commits_meanwhile_is_not_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = changed(loaded(tmp_path))
    files = {file for file in place(quiet).rglob("*") if file.is_dir()}
    real = failpoints.hit

    def overtake(name: str) -> None:
        if name == "rebuild.linked":
            run_sql(quiet, "DELETE FROM THINGS WHERE id = 1")
        real(name)

    monkeypatch.setattr(failpoints, "hit", overtake)
    with pytest.raises(ForeignWrite, match="at the same time"):
        rebuilt(quiet)
    assert sorted(quiet.ns()) == [4, 5]
    assert {file for file in place(quiet).rglob("*") if file.is_dir()} == files, "nothing is left of the new table"
