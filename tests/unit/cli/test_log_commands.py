"""`tailrace log` and `tailrace consumers`, on real logs."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tailrace
from tailrace.changelog.format.commit_file import commit_path
from tailrace.changelog.maintain.sealer import Sealer
from tailrace.changelog.read.consumers import TableProgress, write_table_progress
from tailrace.changelog.read.reader import ChangeLog
from tailrace.cli import log_view
from tailrace.cli.main import main
from tailrace.control import log_actions
from tailrace.errors import ExitCode
from tailrace.model.schema import TableId
from tailrace.pipeline.report import LogReaderStatus
from tests.support.logs import OTHER, WIDER, Diary, inserts

SETTINGS = """\
name: shop
source:
  url: postgresql://app:s3cret-word@nowhere.invalid:5432/shop
  tables: ["public.*"]
log: {path: ./log, grace: 0}
tables: {format: delta, path: ./lake}
"""


@pytest.fixture
def diary(tmp_path: Path) -> Iterator[Diary]:
    """A log of three commits and five rows, whose source cannot be reached."""
    diary = Diary(tmp_path / "log")
    diary.commit(inserts(1, 2))
    diary.commit(inserts(3), inserts(4, 5, schema=OTHER))
    diary.commit()
    yield diary
    diary.close()


@pytest.fixture
def file(diary: Diary) -> str:
    path = diary.path.parent / "tailrace.yaml"
    path.write_text(SETTINGS)
    return str(path)


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], file: str) -> Any:
    """Run a command on the settings file; return its exit code, stdout and stderr."""

    def called(command: str, *arguments: str) -> tuple[int, str, str]:
        code = main([command, file, *arguments])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return called


# --- show --------------------------------------------------------------------------------------------------


def test_show_prints_commits_rows_bytes_and_tables_without_a_source(call: Any, diary: Diary) -> None:
    list(ChangeLog.open(diary.path).follow(consumer="nightly"))
    code, out, err = call("log", "show")
    assert (code, err) == (0, "")
    assert "commits 1 to 3, none sealed · 5 rows in 2 transactions" in out
    assert "positions 0/0 to 0/12C" in out
    assert "kept for 0 lake tables and 1 consumer" in out
    table = next(line.split() for line in out.splitlines() if "public.other" in line)
    assert table[:4] == ["2", "public.other", "1", "2"]
    assert "s3cret-word" not in out


def test_show_with_json_is_one_object(call: Any) -> None:
    code, out, _ = call("log", "show", "--json")
    shown = json.loads(out)
    assert (code, shown["first_commit"], shown["last_commit"], shown["rows"]) == (0, 1, 3, 5)
    assert [table["table"] for table in shown["tables"]] == ["schema", "things", "other"]
    assert {"hot_bytes", "big_bytes", "cold_bytes", "bytes", "written_from", "written_to"} <= set(shown)


def test_a_missing_log_is_reported_with_the_command_that_makes_it(call: Any, tmp_path: Path) -> None:
    (tmp_path / "tailrace.yaml").write_text(SETTINGS.replace("./log", "./elsewhere"))
    for command in (("log", "show"), ("log", "verify"), ("log", "seal"), ("log", "trim"), ("consumers",)):
        code, out, err = call(*command)
        assert (code, out) == (ExitCode.LOG, "")
        assert "there is no log here" in err
        assert "hint: Start `tailrace run`" in err
    assert not (tmp_path / "elsewhere").exists()


# --- verify ------------------------------------------------------------------------------------------------


def test_schemas_prints_every_version_and_what_changed(call: Any, diary: Diary) -> None:
    diary.commit(inserts(6, schema=WIDER))
    code, out, _ = call("log", "schemas")
    assert code == ExitCode.OK
    assert "add added bool (older rows: unknown)" in " ".join(out.split())
    code, out, _ = call("log", "schemas", "--json")
    found = json.loads(out)["versions"]
    assert [(item["number"], item["version"]) for item in found] == [(1, 1), (1, 2), (2, 1)]
    assert found[1]["definition"]["changes"][0]["column"] == "added"
    assert found[1]["position"] == str(ChangeLog.open(diary.path).header(4).end)


def test_verify_of_a_whole_log_says_ok_and_exits_0(call: Any) -> None:
    code, out, err = call("log", "verify")
    assert (code, err) == (0, "")
    assert ": ok · 3 commits, 5 rows, " in out


def test_verify_prints_every_problem_with_its_file_and_hint_and_exits_4(call: Any, diary: Diary) -> None:
    damaged = [commit_path(diary.path, 1), commit_path(diary.path, 2)]
    for path in damaged:
        path.write_bytes(path.read_bytes()[:40])
    code, out, err = call("log", "verify")
    assert code == ExitCode.LOG
    assert "2 problems" in out
    first, hint, second, _ = err.splitlines()
    assert first.startswith(f"error: {damaged[0]}: ")
    assert second.startswith(f"error: {damaged[1]}: ")
    assert hint.startswith("hint: Restore the file from a copy of the log.")


def test_verify_with_json_gives_the_problems_as_data(call: Any, diary: Diary) -> None:
    commit_path(diary.path, 2).unlink()
    code, out, err = call("log", "verify", "--json")
    found = json.loads(out)
    assert (code, err, found["ok"]) == (ExitCode.LOG, "", False)
    (problem,) = found["problems"]
    assert problem["path"] == str(commit_path(diary.path, 2))
    assert problem["message"] == "a commit of the log is missing"


def test_a_terminal_gets_a_bar_that_is_gone_at_the_end(file: str) -> None:
    parent, child = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(Path(tailrace.__path__[0]).parent), "TERM": "xterm"}
    command = [sys.executable, "-m", "tailrace", "log", file, "verify"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=child, env=environment, text=True) as process:
        os.close(child)
        assert process.stdout is not None
        out = process.stdout.read()
        shown = b""
        while True:
            try:
                shown += os.read(parent, 65536)
            except OSError:
                break
    os.close(parent)
    assert process.returncode == 0
    assert ": ok · 3 commits" in out
    assert b"verifying" in shown
    assert b"\x1b[2K" in shown


# --- seal and trim -----------------------------------------------------------------------------------------


def test_seal_prints_its_result(call: Any, diary: Diary) -> None:
    code, out, err = call("log", "seal")
    assert (code, err) == (0, "")
    assert out.startswith("sealed 3 commits (5 rows) into ")
    assert "removed 2 replaced files" in out
    assert call("log", "seal")[1].startswith("nothing to seal")
    diary.commit(inserts(6))
    assert json.loads(call("log", "seal", "--json")[1])["commits"] == 1


def test_trim_prints_its_result_and_the_readers_that_hold_the_rest(call: Any, diary: Diary) -> None:
    table = TableProgress(table=TableId("public", "things"), numbers=(1,), commit=1, seq=2)
    write_table_progress(diary.path, [table])
    assert "3 commits not sealed yet can be trimmed only after `tailrace log " in call("log", "trim")[1]
    call("log", "seal")
    assert call("log", "trim")[1].startswith("nothing to trim"), "a week is kept"
    code, out, err = call("log", "trim", "--older-than", "0s")
    assert (code, err) == (0, "")
    assert out.startswith("trimmed ")
    assert "table public.things holds " in out
    assert call("log", "trim", "--older-than", "0s", "--json")[1].count('"public.things"') == 2
    assert ChangeLog.open(diary.path).files("public.things")
    assert not ChangeLog.open(diary.path).files("public.other")


def test_another_process_that_seals_is_named(call: Any, diary: Diary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_actions, "WAIT_SECONDS", 0.1)
    with Sealer(diary.path):
        code, out, err = call("log", "seal")
    assert (code, out) == (ExitCode.BUSY, "")
    assert "another process is sealing or trimming this log" in err
    assert f"pid={os.getpid()}" in err


@pytest.mark.parametrize(
    ("arguments", "error", "hint"),
    [
        (["log"], "required: ACTION", "`tailrace log --help`"),
        (["log", "shwo"], "invalid choice: 'shwo'", "`tailrace log --help`"),
        (["log", "trim", "--older-than", "5m"], "`--older-than` is not a length of time", "s, min, h and d"),
        (["log", "show", "--older-than", "5d"], "`--older-than` goes with `trim` only", "trim --older-than 2d"),
        (["consumers", "--forget", "nobody"], "there is no such consumer", "no named consumers"),
        (["consumers", "--forget", "../x"], "a consumer's name is", "nightly-export"),
    ],
)
def test_a_wrong_call_is_reported_and_exits_2(call: Any, arguments: list[str], error: str, hint: str) -> None:
    code, out, err = call(*arguments)
    assert (code, out) == (ExitCode.CONFIG, "")
    first, second = err.splitlines()
    assert error in first
    assert hint in second


# --- consumers ---------------------------------------------------------------------------------------------


def test_consumers_lists_tables_and_readers_and_forgets_one(call: Any, diary: Diary) -> None:
    assert call("consumers")[1] == "no lake table or consumer reads this log yet\n"
    write_table_progress(diary.path, [TableProgress(table=TableId("public", "things"), numbers=(1,), commit=1, seq=2)])
    next(ChangeLog.open(diary.path).follow(table="public.other", consumer="nightly"))
    code, out, _ = call("consumers")
    rows = [line.split() for line in out.splitlines() if "public" in line]
    assert code == 0
    assert [row[:3] for row in rows] == [["table", "public.things", "live"], ["consumer", "nightly", "live"]]
    assert "1 row, 2 commits" in out
    found = json.loads(call("consumers", "--json")[1])["consumers"]
    assert [(item["kind"], item["commit"], item["behind_rows"]) for item in found] == [
        ("table", 1, 1),
        ("consumer", found[1]["commit"], found[1]["behind_rows"]),
    ]
    assert call("consumers", "--forget", "nightly")[1] == "forgot consumer nightly\n"
    assert call("consumers", "--forget", "nightly")[0] == ExitCode.CONFIG
    assert len(json.loads(call("consumers", "--json")[1])["consumers"]) == 1


def reader(**more: Any) -> LogReaderStatus:
    fields: dict[str, Any] = {
        "kind": "consumer",
        "name": "nightly",
        "tables": None,
        "state": "live",
        "commit": 4,
        "seq": 9,
        "position": "0/9",
        "behind_commits": 3,
        "behind_rows": 7,
        "held_bytes": 2048,
        "seen_at": "2026-01-31T12:00:00.000Z",
        "expires_at": None,
    }
    return LogReaderStatus(**(fields | more))


def test_a_narrow_screen_omits_the_least_needed_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tailrace.cli.status_view.PIPED_COLUMNS", 80)
    narrow = log_view.readers_text([reader(name="x" * 60, state="detached")])
    assert max(map(len, narrow.splitlines())) <= 80
    assert "detached" in narrow
    assert "expires" not in narrow
    monkeypatch.setattr("tailrace.cli.status_view.PIPED_COLUMNS", 250)
    assert "never" in log_view.readers_text([reader()])


def test_a_readers_name_cannot_control_the_terminal() -> None:
    assert "\x1b" not in log_view.readers_text([reader(name="\x1b[2J[bold]x", tables=("a\nb",))])
