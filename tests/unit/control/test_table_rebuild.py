"""`tailrace rebuild`: its base, the changes it replays, and that a kill leaves the table whole.

The source of these pipelines never answers.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable

from tailrace.changelog.format.coverage import announce_tables, confirm_tables
from tailrace.changelog.format.gaps import Gap, record_gap
from tailrace.changelog.maintain.retention import RetentionPolicy, trim
from tailrace.changelog.maintain.seal_contents import SealLimits
from tailrace.changelog.maintain.sealer import Sealer
from tailrace.changelog.write.log_lease import LogLease
from tailrace.cli.main import main
from tailrace.deadletters.store import DeadLetterStore
from tailrace.errors import ExitCode, ForeignWrite
from tailrace.model.position import Lsn
from tailrace.pipeline.report import TableState
from tailrace.pipeline.status import APPLIER_LEASE, read_status, write_status_file
from tailrace.tasks.load_store import LoadStore
from tests.support.changes import KEYLESS, SHOP, delete, insert, move, update
from tests.support.logs import WIDER
from tests.support.quiet import FULL, NARROW, THINGS, Quiet

BIG = ("big",)


@pytest.fixture
def quiet(tmp_path: Path) -> Quiet:
    """A table loaded with three rows, and four commits of changes, each applied separately."""
    made = Quiet(tmp_path)
    made.load([{"id": key, "name": f"n{key}", "big": "x" * 50, "n": 0} for key in (1, 2, 3)])
    for rows in (
        [update(1, unchanged=BIG, n=1)],
        [insert(4, n=4), delete(2)],
        [*move(3, 5, unchanged=BIG, n=5)],
        [update(4, n=44)],
    ):
        made.commit(*rows)
        made.apply()
    return made


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], quiet: Quiet) -> Any:
    def called(*arguments: str) -> tuple[int, str, str]:
        code = main(["rebuild", str(quiet.file), *arguments])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return called


def rebuilt(call: Any, *arguments: str) -> dict[str, Any]:
    code, out, err = call("public.things", *arguments, "--json")
    assert (code, err) == (ExitCode.OK, "")
    found: dict[str, Any] = json.loads(out)
    return found


def wreck(quiet: Quiet) -> None:
    """Write to a mirror as a person might who takes it for an ordinary table."""
    DeltaTable(str(quiet.settings.tables.layout.path(THINGS))).delete("id = 1")
    with pytest.raises(ForeignWrite):
        quiet.table.applied_position()


def test_a_table_with_a_foreign_write_is_restored_and_continues(quiet: Quiet, call: Any) -> None:
    whole = quiet.rows()
    wreck(quiet)
    found = rebuilt(call)
    assert (found["base"], found["base_version"], found["changes"], found["rows"]) == ("version", 4, 0, 3)
    assert (quiet.rows(), quiet.applied_position.position) == (whole, quiet.diary.writer.position)
    quiet.commit(update(5, unchanged=BIG, n=6))
    assert quiet.apply()[-1].error is None
    assert (quiet.ns(), quiet.rows()[5]["big"]) == ({1: 1, 4: 44, 5: 6}, "x" * 50)


def test_the_failure_is_cleared_and_the_row_count_of_the_load_stays(
    quiet: Quiet, call: Any, caplog: pytest.LogCaptureFixture
) -> None:
    wreck(quiet)
    before = read_status(quiet.settings)
    failed = replace(before.tables[0], rows_loaded=3)
    assert (failed.state, failed.reason) == (TableState.FAILED, "foreign-write")
    write_status_file(quiet.settings.log.path, replace(before, tables=(failed,)))
    assert not caplog.records, "reading the status does not log the failure"
    rebuilt(call)
    (now,) = read_status(quiet.settings).tables
    assert (now.state, now.reason, now.rows_loaded) == (TableState.LIVE, None, 3)


def test_later_changes_of_the_log_are_replayed(quiet: Quiet, call: Any) -> None:
    quiet.commit(insert(9, n=9), delete(1))
    found = rebuilt(call, "--from-version", "0")
    assert (found["base_version"], found["base_rows"], found["changes"]) == (0, 3, 8)
    assert (quiet.ns(), quiet.apply()) == ({4: 44, 5: 5, 9: 9}, [])


@pytest.mark.parametrize("spec", ["mode: history", "mode: append", "soft_delete: true, metadata: [_seq, _tx]"])
def test_a_table_of_any_spec_has_its_rows_again(tmp_path: Path, capsys: pytest.CaptureFixture[str], spec: str) -> None:
    made = Quiet(tmp_path, spec=spec)
    made.load([{"id": key, "name": f"n{key}", "big": "x" * 50, "n": 0} for key in (1, 2, 3)])
    for rows in ([update(1, unchanged=BIG, n=1)], [insert(4, n=4), delete(2)], [*move(3, 5, unchanged=BIG, n=5)]):
        made.commit(*rows)
        made.apply()
    before = sorted(map(repr, made.content()))
    assert main(["rebuild", str(made.file), "public.things", "--from-version", "0"]) == ExitCode.OK
    assert "from version 0" in capsys.readouterr().out
    assert sorted(map(repr, made.content())) == before
    made.commit(delete(1))
    assert made.apply()[-1].error is None


def test_a_table_of_another_spec_is_refused_and_no_load_is_advised(quiet: Quiet, call: Any) -> None:
    quiet.file.write_text(quiet.file.read_text().replace("path: ./lake", "path: ./lake, soft_delete: true"))
    code, _, err = call("public.things")
    assert code == ExitCode.TABLE
    assert "the table was made with another table spec than the settings ask for" in err
    assert "made=mirror, asked=mirror, soft delete" in err
    assert "Restore the previous settings" in err, "a load would replace the past"
    code, _, err = call("public.things", "--from-version", "2")
    assert (code, "it was written as mirror" in err) == (ExitCode.CONFIG, True)


def test_the_result_is_printed_as_text(quiet: Quiet, call: Any) -> None:
    code, out, _ = call("public.things")
    assert code == ExitCode.OK
    assert out.startswith("public.things: rebuilt from version 4 (position ")
    assert "0 changes of the log; it is at " in out


def test_a_table_of_an_earlier_position_continues_from_there(quiet: Quiet, call: Any) -> None:
    position = quiet.diary.writer.position
    now = quiet.rows()
    found = rebuilt(call, "--to", str(Lsn(position.value - 100)))
    assert (found["base_version"], found["changes"], quiet.ns()) == (3, 0, {1: 1, 4: 4, 5: 5})
    assert quiet.applied_position.position == Lsn(position.value - 100)
    quiet.apply()
    assert quiet.rows() == now


def test_a_position_inside_a_commit_takes_the_transactions_up_to_it(quiet: Quiet, call: Any) -> None:
    first, second = quiet.commit_two([update(4, n=100)], [update(4, n=200), insert(8)])
    rebuilt(call, "--to", str(first))
    assert (quiet.ns(), quiet.applied_position.position) == ({1: 1, 4: 100, 5: 5}, first)
    quiet.apply()
    assert (quiet.ns(), quiet.applied_position.position) == ({1: 1, 4: 200, 5: 5, 8: None}, second)


def test_a_position_inside_a_sealed_file_is_exact(quiet: Quiet, call: Any) -> None:
    positions = [quiet.commit(update(1, n=1000 + n), insert(100 + n, n=n)) for n in range(6)]
    with Sealer(quiet.settings.log.path, limits=SealLimits(commits=2, merge_count=2)) as sealer:
        sealer.seal()
        sealer.merge_seals()
    found = rebuilt(call, "--to", str(positions[2]))
    expected = {1: 1002, 4: 44, 5: 5, 100: 0, 101: 1, 102: 2}
    assert (found["changes"], quiet.ns(), quiet.applied_position.position) == (6, expected, positions[2])
    quiet.apply()
    assert quiet.ns() == expected | {1: 1005, 103: 3, 104: 4, 105: 5}


def test_a_schema_change_that_needs_a_load_is_refused(quiet: Quiet, call: Any) -> None:
    quiet.commit(insert(7, added=True), schema=WIDER)  # the new column's default is unknown
    before = quiet.table.version()
    code, _, err = call("public.things")
    assert (code, quiet.table.version()) == (ExitCode.TABLE, before)
    assert "the log alone cannot carry the table over a schema change" in err
    assert "hint: Run `tailrace snapshot FILE TABLE`" in err


def refused_at(quiet: Quiet, call: Any, position: Lsn) -> bool:
    code, _, err = call("public.things", "--to", str(position))
    return bool(code == ExitCode.LOG and "changes after it were never captured" in err)


def test_a_position_before_a_gap_is_reached_and_one_after_it_is_refused(quiet: Quiet, call: Any) -> None:
    path, position = quiet.settings.log.path, quiet.diary.writer.position
    record_gap(path, Gap(commit=quiet.diary.writer.commit + 1, start=position, end=Lsn(position.value + 10)))
    quiet.commit(update(1, n=7))
    assert refused_at(quiet, call, quiet.diary.writer.position)
    assert refused_at(quiet, call, Lsn(position.value + 1))
    rebuilt(call, "--to", str(position))
    assert (quiet.ns(), quiet.applied_position.position) == ({1: 1, 4: 44, 5: 5}, position)


def test_a_table_that_was_unpublished_since_an_unknown_time_is_not_rebuilt(quiet: Quiet, call: Any) -> None:
    path, position, tables = quiet.settings.log.path, quiet.diary.writer.position, [(THINGS, SHOP.relation or 0)]
    confirm_tables(path, tables, Lsn(1))
    announce_tables(path, tables, Lsn(position.value + 150))
    quiet.diary.commit()
    quiet.commit(update(1, n=7))
    assert refused_at(quiet, call, quiet.diary.writer.position)
    assert refused_at(quiet, call, Lsn(position.value + 100)), "it may have been unpublished by then"


def test_a_table_without_a_key_is_rebuilt_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quiet = Quiet(tmp_path / "keyless")
    quiet.load([{"a": 1, "b": "x"}, {"a": 1, "b": "x"}, {"a": 2, "b": "y"}], schema=KEYLESS)
    quiet.commit(insert({"a": 3}, b="z"), delete({"a": 1}, b="x"), schema=KEYLESS)
    quiet.commit(update({"a": 5}, b="v", before={"a": 2, "b": "y"}), schema=KEYLESS)
    quiet.apply()
    path = quiet.settings.tables.layout.path(THINGS)
    DeltaTable(str(path)).delete("a = 1")
    code = main(["rebuild", str(quiet.file), "public.things", "--from-version", "0"])
    assert code == ExitCode.OK, capsys.readouterr()
    found = [row for file in quiet.table.files() for row in pq.read_table(path / file).to_pylist()]
    assert sorted((row["a"], row["b"]) for row in found) == [(1, "x"), (3, "z"), (5, "v")]


def test_earlier_versions_can_still_be_read(quiet: Quiet, call: Any) -> None:
    rebuilt(call, "--from-version", "1")
    rebuilt(call, "--from-version", "0")
    path = str(quiet.settings.tables.layout.path(THINGS))
    for version in range(7):
        assert DeltaTable(path, version=version).count() == 3
    assert not (Path(path) / "_rebuild").exists()


def commit_load(quiet: Quiet, passed: Lsn) -> None:
    """Commit a load without rows that is consistent once the log has passed this position."""
    load_store = LoadStore(quiet.settings.log.path)
    load_store.folder("abc").mkdir(parents=True)
    load_store.record_commit("abc", passed)
    schema = quiet.table.schema()
    assert schema is not None
    quiet.table.load(schema, [], replace(quiet.applied_position, load="abc"))


def test_a_load_that_is_not_caught_up_is_not_a_base(quiet: Quiet, call: Any) -> None:
    commit_load(quiet, Lsn(quiet.applied_position.position.value + 100))
    assert rebuilt(call)["base_version"] == 4
    code, _, err = call("public.things", "--from-version", "5")
    assert (code, "some of its rows are newer than others" in err) == (ExitCode.CONFIG, True)


def test_a_committed_load_is_named_as_the_base(quiet: Quiet, call: Any) -> None:
    commit_load(quiet, quiet.applied_position.position)
    found = rebuilt(call)
    assert (found["base"], found["base_version"], found["rows"]) == ("load", 5, 0)
    assert quiet.applied_position.load == "abc"


def test_without_the_changes_it_refuses_and_names_the_remedy(quiet: Quiet, call: Any) -> None:
    for _ in range(2):
        quiet.commit(update(1, n=7))
        quiet.apply()
    wreck(quiet)
    path = quiet.settings.tables.layout.path(THINGS)
    for version in range(1, 7):
        (path / "_delta_log" / f"{version:020d}.json").rename(path / f"{version}.hidden")
    for version in (7,):
        (path / "_delta_log" / f"{version:020d}.json").rename(path / "_delta_log" / f"{1:020d}.json")
    with Sealer(quiet.settings.log.path, limits=SealLimits(commits=2, merge_count=2)) as sealer:
        sealer.seal()
        trim(sealer, RetentionPolicy(age_seconds=0.0), now=4e9)
    code, _, err = call("public.things")
    assert code == ExitCode.LOG
    assert "the log no longer has the changes after it" in err
    assert "hint: Run `tailrace snapshot FILE TABLE`" in err


def test_removed_files_are_detected(quiet: Quiet, call: Any) -> None:
    path = quiet.settings.tables.layout.path(THINGS)
    for name in quiet.table.files():
        (path / name).unlink()
    code, _, err = call("public.things", "--from-version", "4")
    assert (code, "some of its files were removed" in err) == (ExitCode.CONFIG, True)


def test_an_unusable_version_before_the_position_is_reported_with_its_reason(quiet: Quiet, call: Any) -> None:
    path = quiet.settings.tables.layout.path(THINGS)
    for file in path.glob("*.parquet"):
        file.unlink()
    code, _, err = call("public.things", "--to", str(Lsn(quiet.diary.writer.position.value - 100)))
    assert (code, "version 3: some of its files were removed" in err) == (ExitCode.LOG, True), err


def test_versions_with_open_dead_letters_are_not_a_base(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quiet = Quiet(tmp_path / "lettered", on_bad_row="dead-letter")
    quiet.load([{"id": 1, "n": 0}])
    positions = []
    for rows in ([update(1, n=1)], [update(1, unfit=("n",))], [insert(2, n=2)], [update(1, n=4)], [insert(3, n=3)]):
        positions.append(quiet.commit(*rows))
        quiet.apply()

    def tried(*arguments: str) -> tuple[int, str]:
        code = main(["rebuild", str(quiet.file), "public.things", *arguments])
        return code, capsys.readouterr().err

    for version in ("2", "3"):
        code, err = tried("--from-version", version)
        assert (code, "dead letters" in err) == (ExitCode.CONFIG, True)
    for version in ("4", "5"):  # the rejected change had been superseded by then
        assert tried("--from-version", version)[0] == ExitCode.OK
        assert quiet.ns() == {1: 4, 2: 2, 3: 3}
    assert tried("--to", str(positions[0]))[0] == ExitCode.OK
    assert quiet.ns() == {1: 1}
    quiet.apply()
    assert quiet.ns() == {1: 4, 2: 2, 3: 3}


@pytest.fixture
def with_dead_letter(tmp_path: Path) -> Quiet:
    """A table that lacks a change of row 2, which is a dead letter."""
    made = Quiet(tmp_path / "lettered", on_bad_row="dead-letter")
    made.load([{"id": key, "n": 0} for key in (1, 2, 3)])
    made.commit(update(1, n=1), update(2, unfit=("n",)))
    made.apply()
    return made


REPAIRED = [{"id": 1, "n": 1}, {"id": 2, "n": 22}, {"id": 3, "n": 0}]


def test_a_load_that_cleared_dead_letters_is_a_base_at_once(with_dead_letter: Quiet) -> None:
    before = with_dead_letter.table.version()
    with_dead_letter.reload(REPAIRED, "anew")
    arguments = ["rebuild", str(with_dead_letter.file), "public.things"]
    assert main(arguments) == ExitCode.OK
    assert with_dead_letter.ns() == {1: 1, 2: 22, 3: 0}
    assert main([*arguments, "--from-version", str(before)]) == ExitCode.CONFIG, "it has the same `_seq`"
    with_dead_letter.commit(update(3, n=3))
    with_dead_letter.apply()
    assert main([*arguments, "--from-version", str(before)]) == ExitCode.CONFIG, (
        "also once the dead letters are removed"
    )
    assert main(arguments) == ExitCode.OK
    assert with_dead_letter.ns() == {1: 1, 2: 22, 3: 3}


def test_a_position_before_a_load_that_cleared_dead_letters_is_refused(with_dead_letter: Quiet) -> None:
    lacking = with_dead_letter.commit(update(3, n=3))
    with_dead_letter.apply()
    with_dead_letter.commit(update(1, n=1))
    with_dead_letter.reload([*REPAIRED[:2], {"id": 3, "n": 3}], "anew")
    with_dead_letter.commit(insert(9, n=9))
    with_dead_letter.apply()
    assert main(["rebuild", str(with_dead_letter.file), "public.things", "--to", str(lacking)]) == ExitCode.LOG
    assert with_dead_letter.ns() == {1: 1, 2: 22, 3: 3, 9: 9}


def test_the_version_before_a_replayed_dead_letter_is_not_a_base(with_dead_letter: Quiet) -> None:
    before, here = with_dead_letter.table.version(), with_dead_letter.applied_position
    dead_letters = DeadLetterStore(with_dead_letter.settings.log.path, THINGS)
    row = pa.Table.from_pylist([{"id": 2, "n": 22}], pa.schema(SHOP.row_fields()))
    put = with_dead_letter.table.upsert_rows(SHOP, row, here).version
    dead_letters.write(SHOP, here.seq, SHOP.change_schema().empty_table(), [], [2], already_applied=True, version=put)
    dead_letters.remove_closed(here.seq)
    arguments = ["rebuild", str(with_dead_letter.file), "public.things"]
    assert main([*arguments, "--from-version", str(before)]) == ExitCode.CONFIG, "it has the same `_seq`"
    assert main(arguments) == ExitCode.OK, "with the replayed row"
    assert with_dead_letter.ns() == {1: 1, 2: 22, 3: 0}
    with_dead_letter.commit(update(3, n=3))
    with_dead_letter.apply()
    assert main([*arguments, "--from-version", str(before)]) == ExitCode.CONFIG
    assert main(arguments) == ExitCode.OK
    assert with_dead_letter.ns() == {1: 1, 2: 22, 3: 3}


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("public.thing",), ExitCode.CONFIG, "Did you mean public.things?"),
        (("public.things", "--to", "nonsense"), ExitCode.CONFIG, "not a log sequence number"),
        (("public.things", "--to", "FF/0"), ExitCode.CONFIG, "the log does not reach this position"),
        (("public.things", "--to", "0/1"), ExitCode.LOG, "Give a position from 0/64 on, or leave `--to` out."),
        (("public.things", "--from-version", "99"), ExitCode.CONFIG, "no commit of this log made it"),
        (("public.things", "--from-version", "x"), ExitCode.CONFIG, "invalid int value"),
        ((), ExitCode.CONFIG, "TABLE"),
    ],
)
def test_invalid_arguments_are_refused(
    quiet: Quiet, call: Any, arguments: tuple[str, ...], code: ExitCode, text: str
) -> None:
    before = quiet.table.version()
    found, out, err = call(*arguments)
    assert (found, out) == (code, "")
    assert text in err
    assert "hint: " in err
    assert quiet.table.version() == before


def test_the_table_of_another_pipeline_is_left_alone_and_no_load_is_advised(
    quiet: Quiet, call: Any, tmp_path: Path
) -> None:
    other = Quiet(tmp_path / "other")
    other.load([{"id": 7, "n": 7}])
    lake = quiet.settings.tables.path
    shutil.rmtree(lake)
    other.settings.tables.path.rename(lake)
    before = sorted(path.name for path in lake.rglob("*"))
    code, out, err = call("public.things")
    assert (code, out) == (ExitCode.TABLE, "")
    assert "the folder holds a table that this change log did not make" in err
    assert "hint: Move it away" in err
    assert sorted(path.name for path in lake.rglob("*")) == before


def test_it_is_refused_while_another_process_applies(quiet: Quiet, call: Any) -> None:
    lease = LogLease(quiet.settings.log.path, APPLIER_LEASE)
    try:
        code, _, err = call("public.things")
    finally:
        lease.release()
    assert (code, "Stop that `tailrace run`" in err) == (ExitCode.BUSY, True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "failpoint", ["rebuild.replayed", "rebuild.linked", "table.before_commit:2", "table.after_commit:3"]
)
def test_a_kill_anywhere_leaves_the_table_whole(quiet: Quiet, call: Any, tmp_path: Path, failpoint: str) -> None:
    quiet.commit(insert(9, n=9))
    before, version = quiet.rows(), quiet.table.version()
    hits = tmp_path / "hits"
    done = subprocess.run(
        [sys.executable, "-m", "tailrace", "rebuild", str(quiet.file), "public.things", "--from-version", "0"],
        check=False,
        capture_output=True,
        start_new_session=True,
        env={**os.environ, "TAILRACE_FAILPOINT": failpoint, "TAILRACE_FAILPOINT_LOG": str(hits)},
    )
    assert (done.returncode, hits.exists()) == (-9, True), done.stderr
    swapped = quiet.table.version() != version
    assert quiet.rows() == (before | {9: quiet.rows()[9]} if swapped else before)
    quiet.apply()
    expected = before | {9: {"id": 9, "name": None, "big": None, "n": 9}}
    assert quiet.rows() == expected
    rebuilt(call, "--from-version", "0")
    assert quiet.rows() == expected
    left = [path.name for path in quiet.settings.tables.layout.path(THINGS).iterdir() if path.name == "_rebuild"]
    assert left == []


def test_a_load_only_table_keeps_its_position(quiet: Quiet, call: Any) -> None:
    quiet.commit(insert(9, n=9))
    before = quiet.rows(), quiet.applied_position
    settings = quiet.file.read_text()
    quiet.file.write_text(f"{settings}load: {{mode: initial_only}}\n")
    found = rebuilt(call)
    assert (found["changes"], quiet.rows(), quiet.applied_position) == (0, *before)
    quiet.file.write_text(settings)
    quiet.apply()
    assert 9 in quiet.ns(), "its position does not claim changes that it lacks"


def test_a_position_before_a_schema_change_has_the_earlier_schema(tmp_path: Path) -> None:
    quiet = Quiet(tmp_path / "reshaped", spec="evolution: {drop: apply}")
    quiet.load([{"id": key, "name": f"n{key}"} for key in (1, 2)], FULL)
    before = quiet.commit(update(1, name="kept", n=1), schema=FULL)
    quiet.apply()
    quiet.commit(update(2, n=2), schema=NARROW)
    quiet.apply()
    assert "name" not in quiet.rows()[1]
    newest = quiet.applied_position.position
    arguments = ["rebuild", str(quiet.file), "public.things", "--to"]
    assert main([*arguments, str(before)]) == ExitCode.OK
    assert {key: row["name"] for key, row in quiet.rows().items()} == {1: "kept", 2: "n2"}
    assert main([*arguments, str(newest)]) == ExitCode.OK
    assert ("name" in quiet.rows()[1], quiet.ns()) == (False, {1: 1, 2: 2})
