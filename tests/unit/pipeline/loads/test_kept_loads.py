"""Kept loads: a rebuild starts from one when the table's own folder has nothing left.

The source of these pipelines never answers.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from tailrace import failpoints
from tailrace.changelog.maintain.retention import RetentionPolicy, trim
from tailrace.changelog.maintain.seal_contents import SealLimits
from tailrace.changelog.maintain.sealer import Sealer
from tailrace.cli.main import main
from tailrace.errors import ExitCode
from tailrace.model.position import Lsn
from tailrace.tables.delta.load_snapshots import KeptLoad, KeptLoadStore
from tailrace.tasks.load_store import LoadStore
from tests.support.changes import KEYLESS, delete, insert, move, update
from tests.support.quiet import FULL, NARROW, THINGS, Quiet

BIG = ("big",)
ROWS = [{"id": key, "name": f"n{key}", "big": "x" * 50, "n": 0} for key in (1, 2, 3)]


class Died(BaseException):
    """Stands for the kill of a process."""


def loaded(folder: Path, spec: str = "") -> Quiet:
    """Return a table loaded with three rows, whose load is kept."""
    quiet = Quiet(folder, spec=spec)
    quiet.diary.commit()
    quiet.reload(ROWS, "first")
    quiet.keep("first")
    return quiet


def changed(quiet: Quiet) -> Quiet:
    for rows in ([update(1, unchanged=BIG, n=1)], [insert(4, n=4), delete(2)], [*move(3, 5, unchanged=BIG, n=5)]):
        quiet.commit(*rows)
        quiet.apply()
    return quiet


@pytest.fixture
def quiet(tmp_path: Path) -> Quiet:
    return changed(loaded(tmp_path))


def lake_table(quiet: Quiet) -> Path:
    return quiet.settings.tables.layout.path(THINGS)


def kept_loads(quiet: Quiet) -> list[KeptLoad]:
    return KeptLoadStore(quiet.settings.tables.path, quiet.registry().log.log_id).of(THINGS)


def rebuilt(quiet: Quiet, capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    code = main(["rebuild", str(quiet.file), "public.things", *arguments, "--json"])
    printed = capsys.readouterr()
    assert (code, printed.err) == (ExitCode.OK, "")
    answer: dict[str, Any] = json.loads(printed.out)
    return answer


def refused(quiet: Quiet, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["rebuild", str(quiet.file), "public.things", *arguments]) != ExitCode.OK
    return capsys.readouterr().err


@pytest.mark.parametrize(
    "spec",
    ["", "mode: history", "mode: append", "soft_delete: true, metadata: [_seq, _tx]", "partition_by: [name]",
     'rules: {"public.*": {columns: {n: count}}}'],
)  # fmt: skip
def test_a_table_whose_folder_is_gone_is_rebuilt_from_its_kept_load_and_applies_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], spec: str
) -> None:
    quiet = changed(loaded(tmp_path, spec))
    before, applied_position = sorted(map(repr, scanned(quiet))), quiet.applied_position
    shutil.rmtree(lake_table(quiet))
    found = rebuilt(quiet, capsys)
    assert (found["base"], found["base_version"], found["base_rows"], found["changes"]) == ("seed", None, 3, 5)
    assert (sorted(map(repr, scanned(quiet))), quiet.applied_position.load) == (before, "first")
    assert quiet.applied_position.covers(applied_position)
    quiet.commit(update(5, unchanged=BIG, n=6))
    assert [outcome.error for outcome in quiet.apply()] == [None]
    assert sorted(path.name for path in lake_table(quiet).iterdir() if path.name.startswith("_")) == ["_delta_log"]


def test_a_table_with_a_damaged_commit_log_is_rebuilt_as_the_hint_says(
    quiet: Quiet, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    before = sorted(map(repr, scanned(quiet)))
    (lake_table(quiet) / "_delta_log" / f"{1:020}.json").write_text('{"torn')
    assert "Then run `tailrace rebuild FILE TABLE`" in refused(quiet, capsys)
    error = quiet.registry().add(THINGS).error
    assert error is not None
    assert error.code == "table-unusable"
    assert error.hint
    lake_table(quiet).rename(tmp_path / "damaged")
    capsys.readouterr()  # discard what was logged
    assert rebuilt(quiet, capsys)["base"] == "seed"
    assert sorted(map(repr, scanned(quiet))) == before


def test_a_table_that_lacks_a_file_is_rebuilt_as_the_hint_says(
    quiet: Quiet, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in quiet.table.files():
        (lake_table(quiet) / file).unlink()
    quiet.commit(update(4, n=44))
    (outcome,) = quiet.apply()
    assert outcome.error is not None
    assert "run `tailrace rebuild FILE TABLE`" in outcome.error.hint
    rebuilt(quiet, capsys)
    assert quiet.ns() == {1: 1, 4: 44, 5: 5}


def scanned(quiet: Quiet) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pa.table(DeltaTable(str(lake_table(quiet))).scan()).to_pylist()
    return rows


def test_a_keyless_table_is_rebuilt_from_its_kept_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quiet = Quiet(tmp_path)
    quiet.diary.commit()
    quiet.reload([{"a": 1, "b": "x"}, {"a": 1, "b": "x"}, {"a": 2, "b": "y"}], "first", KEYLESS)
    quiet.keep("first")
    quiet.commit(delete({"a": 1}, b="x"), schema=KEYLESS)
    quiet.apply()
    shutil.rmtree(lake_table(quiet))
    assert rebuilt(quiet, capsys)["base"] == "seed"
    assert sorted((row["a"], row["b"]) for row in quiet.content()) == [(1, "x"), (2, "y")]


FEATURES = "engine: spark, deletion_vectors: true, column_mapping: true"


@pytest.mark.parametrize("lost", ["its folder", "nothing"])
def test_a_table_with_deletion_vectors_and_column_mapping_is_rebuilt_with_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], lost: str
) -> None:
    quiet = loaded(tmp_path, FEATURES)
    quiet.commit(update(1, unchanged=BIG, n=1), delete(2))
    if lost == "its folder":
        shutil.rmtree(lake_table(quiet))
    found = rebuilt(quiet, capsys)
    assert (found["base"], found["base_rows"], found["changes"], found["rows"]) == ("seed", 3, 2, 2)
    assert {row["id"]: (row["n"], row["big"]) for row in scanned(quiet)} == {1: (1, "x" * 50), 3: (0, "x" * 50)}
    features = DeltaTable(str(lake_table(quiet))).protocol().reader_features or ()
    assert {"deletionVectors", "columnMapping"} <= {*features}


def test_a_load_with_deletion_vectors_in_its_own_commit_is_not_kept(tmp_path: Path) -> None:
    quiet = Quiet(tmp_path, spec=FEATURES)
    quiet.diary.commit()
    quiet.reload(ROWS, "first")
    (commit,) = (lake_table(quiet) / "_delta_log").glob("*.json")
    gone = {"storageType": "i", "pathOrInlineDv": "x", "sizeInBytes": 1, "cardinality": 1}
    lines = [json.loads(line) for line in commit.read_text().splitlines()]
    for line in lines:
        line.get("add", {})["deletionVector"] = gone
    commit.write_text("\n".join(map(json.dumps, lines)))
    quiet.keep("first")
    assert kept_loads(quiet) == []


def test_a_rebuild_says_that_it_started_from_the_kept_load(quiet: Quiet, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(lake_table(quiet))
    assert main(["rebuild", str(quiet.file), "public.things"]) == ExitCode.OK
    assert "rebuilt from the kept files of its last load (position " in capsys.readouterr().out


def test_the_tables_own_versions_are_preferred_to_a_kept_load(quiet: Quiet, capsys: pytest.CaptureFixture[str]) -> None:
    assert rebuilt(quiet, capsys)["base"] == "version"
    assert rebuilt(quiet, capsys, "--from-version", "0")["base"] == "load"


def test_after_a_vacuum_of_all_files_the_kept_load_is_the_base(
    quiet: Quiet, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = quiet.rows()
    for file in lake_table(quiet).glob("part-*.parquet"):
        file.unlink()
    assert rebuilt(quiet, capsys)["base"] == "seed"
    assert quiet.rows() == whole


def test_a_rebuild_from_a_kept_load_can_end_at_an_earlier_position(
    quiet: Quiet, capsys: pytest.CaptureFixture[str]
) -> None:
    now = quiet.rows()
    shutil.rmtree(lake_table(quiet))
    rebuilt(quiet, capsys, "--to", str(Lsn(quiet.diary.writer.position.value - 100)))
    assert quiet.ns() == {1: 1, 3: 0, 4: 4}
    quiet.apply()
    assert quiet.rows() == now


def test_a_rebuild_from_a_kept_load_repeats_schema_changes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quiet = Quiet(tmp_path)
    quiet.diary.commit()
    quiet.reload([{"id": key, "name": f"n{key}"} for key in (1, 2)], "first", FULL)
    quiet.keep("first")
    quiet.commit(update(2, n=2), schema=NARROW)
    quiet.apply()
    before = quiet.rows()
    shutil.rmtree(lake_table(quiet))
    rebuilt(quiet, capsys)
    assert quiet.rows() == before
    assert before[1]["name"] == "n1", "a column that the source dropped is kept"


def test_a_kept_load_has_columns_that_the_source_dropped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quiet = Quiet(tmp_path)
    quiet.load([{"id": key, "name": f"n{key}"} for key in (1, 2)], FULL)
    quiet.commit(update(2, n=2), schema=NARROW)
    quiet.apply()
    store = quiet.registry().load_store
    store.folder("again").mkdir(parents=True)
    store.record_commit("again", quiet.applied_position.position)
    schema = quiet.table.schema()
    assert schema is not None
    applied = quiet.table.merge_load(schema, [], quiet.applied_position, replace(quiet.applied_position, load="again"))
    assert applied.committed
    quiet.keep("again")
    assert [kept.commit_record.applied_position.load for kept in kept_loads(quiet)] == ["again"]
    shutil.rmtree(lake_table(quiet))
    assert (rebuilt(quiet, capsys)["base_rows"], quiet.rows()) == (0, {})
    assert "name" in DeltaTable(str(lake_table(quiet))).schema().to_json()


def test_a_kept_load_shares_its_files_with_the_table(tmp_path: Path) -> None:
    quiet = loaded(tmp_path)
    (kept,) = kept_loads(quiet)
    store, theirs = (sorted(folder.glob("part-*")) for folder in (kept.folder, lake_table(quiet)))
    assert [file.stat().st_ino for file in store] == [file.stat().st_ino for file in theirs]


def test_a_newer_kept_load_replaces_the_older_one(quiet: Quiet, capsys: pytest.CaptureFixture[str]) -> None:
    quiet.reload([{"id": 7, "n": 7}], "second")
    quiet.keep("second")
    assert [kept.commit_record.applied_position.load for kept in kept_loads(quiet)] == ["second"]
    assert [folder.name for folder in kept_loads(quiet)[0].folder.parent.iterdir()] == ["second"]
    shutil.rmtree(lake_table(quiet))
    rebuilt(quiet, capsys)
    assert (quiet.ns(), quiet.applied_position.load) == ({7: 7}, "second")


def test_a_load_without_a_commit_leaves_the_earlier_kept_load(quiet: Quiet) -> None:
    quiet.keep("second")
    assert [kept.commit_record.applied_position.load for kept in kept_loads(quiet)] == ["first"]


def test_a_kept_load_killed_before_its_record_does_not_count_and_is_made_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    quiet = loaded(tmp_path)
    quiet.reload([*ROWS, {"id": 9, "n": 9}], "second")

    def die(name: str) -> None:
        if name == "seed.linked":
            raise Died

    with monkeypatch.context() as patched:
        patched.setattr(failpoints, "hit", die)
        patched.setattr(shutil, "rmtree", lambda *_, **__: None)  # a killed process cleans up nothing
        with pytest.raises(Died):
            quiet.keep("second")
    assert [kept.commit_record.applied_position.load for kept in kept_loads(quiet)] == ["first"]
    changed(quiet)  # the next process applies before it looks at leftovers
    quiet.keep("second")
    (kept,) = kept_loads(quiet)
    assert (kept.commit_record.applied_position.load, kept.is_intact) == ("second", True)
    before = quiet.rows()
    shutil.rmtree(lake_table(quiet))
    assert (rebuilt(quiet, capsys)["base_rows"], quiet.rows()) == (4, before)


def test_a_kept_load_that_the_log_was_trimmed_past_is_no_base_and_is_dropped(
    quiet: Quiet, capsys: pytest.CaptureFixture[str]
) -> None:
    quiet.load_keeper().run_if_due()
    assert len(kept_loads(quiet)) == 1
    with Sealer(quiet.settings.log.path, limits=SealLimits(commits=2, merge_count=2)) as sealer:
        sealer.seal()
        trim(sealer, RetentionPolicy(age_seconds=0.0), now=4e9)
    shutil.rmtree(lake_table(quiet))
    assert "the kept load: the log no longer has the changes after it" in refused(quiet, capsys)
    assert not lake_table(quiet).exists()
    quiet.load_keeper().run_if_due()
    assert kept_loads(quiet) == []
    assert "no kept load of it" in refused(quiet, capsys)


@pytest.mark.parametrize("damage", ["cut short", "removed"])
def test_a_damaged_kept_load_is_no_base(quiet: Quiet, capsys: pytest.CaptureFixture[str], damage: str) -> None:
    shutil.rmtree(lake_table(quiet))
    file = next(kept_loads(quiet)[0].folder.glob("part-*"))
    if damage == "removed":
        file.unlink()
    else:
        os.truncate(file, 10)
    assert "some of its files are missing or changed" in refused(quiet, capsys)


def test_without_the_setting_no_load_is_kept_and_earlier_ones_are_dropped(quiet: Quiet) -> None:
    quiet.file.write_text(quiet.file.read_text().replace("path: ./lake", "path: ./lake, keep_seed: false"))
    quiet.load_keeper().run_if_due()
    assert kept_loads(quiet) == []
    quiet.reload(ROWS, "second")
    quiet.keep("second")
    assert kept_loads(quiet) == []


def no_links(*_: object, **__: object) -> None:
    raise OSError(errno.EPERM, "Operation not permitted")


def test_without_hard_links_a_load_is_only_copied_if_the_setting_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    quiet = Quiet(tmp_path)
    quiet.diary.commit()
    quiet.reload(ROWS, "first")
    monkeypatch.setattr(os, "link", no_links)
    with caplog.at_level(logging.WARNING, "tailrace.pipeline.loads.kept_loads"):
        quiet.keep("first")
    assert (kept_loads(quiet), [record.message for record in caplog.records]) == ([], ["load not kept for rebuilds"])
    quiet.file.write_text(quiet.file.read_text().replace("path: ./lake", "path: ./lake, keep_seed: copy"))
    quiet.keep("first")
    (kept,) = kept_loads(quiet)
    assert (kept.is_intact, next(kept.folder.glob("part-*")).stat().st_nlink) == (True, 1)


def test_files_without_statistics_are_kept_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As Spark writes them if a user has turned statistics off."""
    quiet = Quiet(tmp_path)
    quiet.diary.commit()
    quiet.reload(ROWS, "first")
    commit = lake_table(quiet) / "_delta_log" / f"{0:020d}.json"
    actions = [json.loads(line) for line in commit.read_text().splitlines()]
    for action in actions:
        action.get("add", {}).pop("stats", None)
    commit.write_text("\n".join(map(json.dumps, actions)))
    quiet.keep("first")
    quiet.commit(insert(4, n=4))
    shutil.rmtree(lake_table(quiet))
    assert (rebuilt(quiet, capsys)["base_rows"], len(quiet.rows())) == (3, 4)


def test_a_failure_to_keep_a_load_is_only_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    quiet = Quiet(tmp_path)
    quiet.diary.commit()
    quiet.reload(ROWS, "first")

    def damaged(*_: object) -> None:
        raise pa.ArrowInvalid("not a Parquet file")

    monkeypatch.setattr(os, "link", damaged)
    with caplog.at_level(logging.WARNING, "tailrace.pipeline.loads.kept_loads"):
        quiet.keep("first")
    assert (kept_loads(quiet), [record.message for record in caplog.records]) == ([], ["load not kept for rebuilds"])


def test_the_record_of_a_kept_load_is_not_removed(quiet: Quiet) -> None:
    store = LoadStore(quiet.settings.log.path)
    old = quiet.settings.log.path / "seed" / "landed" / "first.json"
    os.utime(str(old), (0.0, 0.0))
    store.remove_leftovers(quiet.load_keeper().loads_in_use)
    store.remove_leftovers()
    assert store.ahead_ranges("first") is not None, "it was in use until now"
    os.utime(str(old), (0.0, 0.0))
    store.remove_leftovers()
    assert store.ahead_ranges("first") is None


def chunked(folder: Path) -> Quiet:
    """Return a table loaded in chunks at different positions: row 2 already has the first change of the log."""
    quiet = Quiet(folder)
    quiet.diary.commit()
    rows = [ROWS[0], ROWS[1] | {"n": 2}, ROWS[2]]
    quiet.reload(rows, "first", ahead_until=Lsn(quiet.diary.writer.position.value + 200))
    quiet.keep("first")
    quiet.commit(update(2, unchanged=BIG, n=1), update(1, n=1))
    return quiet


def test_a_kept_chunked_load_is_brought_to_one_position_by_the_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quiet = chunked(tmp_path)
    middle = quiet.diary.writer.position
    quiet.commit(update(2, unchanged=BIG, n=2))
    shutil.rmtree(lake_table(quiet))
    assert "some of its rows are newer than others, up to" in refused(quiet, capsys, "--to", str(middle))
    assert rebuilt(quiet, capsys)["base"] == "seed"
    assert (quiet.ns(), quiet.rows()[2]["big"]) == ({1: 1, 2: 2, 3: 0}, "x" * 50)


def test_a_rebuild_refuses_unsent_values_that_only_the_source_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quiet = chunked(tmp_path)
    # The loaded row of key 3 may not be the row that moves: a rebuild cannot know.
    quiet.commit(*move(3, 5, unchanged=BIG, n=5), insert(3, big="other"))
    shutil.rmtree(lake_table(quiet))
    assert "a rebuild cannot read the source" in refused(quiet, capsys)
    assert not lake_table(quiet).exists()
