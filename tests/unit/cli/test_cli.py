"""The command line: every message, every exit code, and what each command may import."""

from __future__ import annotations

import io
import json
import logging
import os
import pty
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import tailrace
from tailrace.cli import log_lines, output, status_view
from tailrace.cli.arguments import COMMANDS
from tailrace.cli.main import main
from tailrace.errors import ExitCode, LogBusy, SchemaChanged, SourceRefused, TailraceError
from tailrace.pipeline.config.settings import PipelineSettings
from tailrace.pipeline.report import (
    LogStatus,
    Observer,
    PipelineStatus,
    SourceStatus,
    Summary,
    TableState,
    TableStatus,
    error_from_json,
    error_to_json,
    tables_exit_code,
)

GOOD = """\
name: shop
source:
  url: postgresql://app:s3cret-word@localhost:5432/shop
  tables: ["public.*"]
log: ./shop/changes
tables: {format: delta, path: ./shop/lake}
"""

SQL = 'ALTER TABLE public."no  key" REPLICA IDENTITY FULL;'


def table(name: str, state: TableState = TableState.LIVE, **more: Any) -> TableStatus:
    return TableStatus(schema="public", table=name, state=state, path=f"/lake/public/{name}", **more)


FAILED = table("orders", TableState.FAILED, reason="schema-changed", detail="a column was added", hint="Reload it.")


def status_of(*tables: TableStatus, **more: Any) -> PipelineStatus:
    return PipelineStatus(
        name="shop",
        running=True,
        capture_pid=12,
        source=SourceStatus(reachable=True, place="localhost:5432/shop", position="0/20", retained_bytes=2048),
        log=LogStatus(path="/log", id="abc", commits=1, bytes=5 << 20, position="0/10"),
        tables=tables,
        **more,
    )


@dataclass
class FakeEngine:
    """Records its calls, and returns or raises what the test sets."""

    tables: tuple[TableStatus, ...] = (table("customers"),)
    raises: BaseException | None = None
    exit_code: ExitCode = ExitCode.OK
    asked: list[tuple[Any, ...]] = field(default_factory=list)
    events: tuple[str, ...] = ()

    def _answer(self, command: str, observer: Observer, *flags: object) -> Summary:
        self.asked.append((command, *flags))
        for event in self.events:
            observer.event(event, table="public.a b")
        observer.tick(status_of(*self.tables))
        if self.raises:
            raise self.raises
        return Summary(
            name="shop",
            command=command,
            seconds=1.5,
            transactions=2,
            rows_captured=1234,
            tables=self.tables,
            exit_code=self.exit_code,
            message="caught up",
        )

    def run(self, settings: PipelineSettings, *, until_caught_up: bool, observer: Observer, take_over: bool) -> Summary:
        return self._answer("run", observer, until_caught_up, *["take over"] * take_over)

    def capture(
        self, settings: PipelineSettings, *, until_caught_up: bool, observer: Observer, take_over: bool, child: bool
    ) -> Summary:
        return self._answer("capture", observer, until_caught_up, child, *["take over"] * take_over)

    def apply(
        self, settings: PipelineSettings, *, until_caught_up: bool, observer: Observer, take_over: bool
    ) -> Summary:
        return self._answer("apply", observer, until_caught_up, *["take over"] * take_over)

    def drop(self, settings: PipelineSettings) -> list[str]:
        self.asked.append(("drop",))
        if self.raises:
            raise self.raises
        return ["slot tailrace_1", "publication tailrace_1"]

    def read_status(self, settings: PipelineSettings) -> PipelineStatus:
        if self.raises:
            raise self.raises
        return status_of(*self.tables)


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "tailrace.yaml"
    path.write_text(GOOD)
    return str(path)


def lines(text: str) -> list[str]:
    return text.splitlines()


def tailrace_process(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    source = str(Path(tailrace.__path__[0]).parent)
    environment = {**os.environ, "PYTHONPATH": source, "PYTHONWARNINGS": "error"}
    return subprocess.run(
        [sys.executable, "-m", "tailrace", *arguments],
        env=environment,
        text=True,
        capture_output=True,
        timeout=240,
        check=False,
        **options,
    )


# ---- arguments


@pytest.mark.parametrize(
    ("arguments", "error", "hint"),
    [
        ([], "the following arguments are required: COMMAND", "`tailrace --help`"),
        (["check"], "the following arguments are required: FILE", "`tailrace check --help`"),
        (["rnu", "x"], "`rnu` is not a command", "Did you mean `tailrace run`?"),
        (
            ["zzz"],
            "`zzz` is not a command",
            "dead-letters, rebuild, evolve, at, tail, log, schema-history, checkpoints, consumers, check, drop.",
        ),
        (["check", "x", "--bogus"], "unrecognized arguments: --bogus", "`tailrace check --help`"),
        (["run", "x", "--until"], "unrecognized arguments: --until", "`tailrace run --help`"),
        (["rebuild", "x", "a.b", "a.c"], "unrecognized arguments: a.c", "`tailrace rebuild --help`"),
        (["dead-letters", "x"], "the following arguments are required: ACTION\n", "Give an action: list or replay."),
        (["checkpoints", "x"], "required: ACTION\n", "Give an action: list or seed or delete."),
        (["tail"], "the following arguments are required: FILE\n", "`tailrace tail --help`"),
        (["status", "x", "--log-level", "loud"], "invalid choice: 'loud'", "`tailrace status --help`"),
    ],
)
def test_a_wrong_call_prints_error_and_hint_and_exits_2(
    arguments: list[str], error: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == ExitCode.CONFIG
    printed = capsys.readouterr()
    first, second = lines(printed.err)
    assert printed.out == ""
    assert first.startswith("error: ")
    assert error in f"{first}\n"
    assert second.startswith("hint: ")
    assert hint in second


def test_help_and_version_exit_0_on_stdout() -> None:
    helped = tailrace_process("--help")
    assert helped.returncode == 0
    assert all(command in helped.stdout for command in COMMANDS)
    capture = tailrace_process("capture", "--help")
    assert "--until-caught-up" in capture.stdout
    assert "--child" not in capture.stdout
    version = tailrace_process("--version")
    assert (version.returncode, version.stderr) == (0, "")
    assert version.stdout.startswith("tailrace ")


@pytest.mark.parametrize("arguments", [["--help"], ["check", "FILE"], ["rnu"]])
def test_nothing_heavy_is_imported_to_answer_at_once(arguments: list[str], file: str) -> None:
    code = (
        "import sys\n"
        "from tailrace.cli.main import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "names = {'pyspark', 'numba', 'numpy', 'pyarrow', 'deltalake', 'psycopg', 'rich'}\n"
        "heavy = names & set(sys.modules)\n"
        "sys.exit(f'imported: {heavy}' if heavy else 0)\n"
    )
    words = [file if argument == "FILE" else argument for argument in arguments]
    environment = {**os.environ, "PYTHONPATH": str(Path(tailrace.__path__[0]).parent)}
    command = [sys.executable, "-c", code, *words]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr


def test_capture_loads_no_spark() -> None:
    code = "import sys, tailrace.pipeline.runner; sys.exit('pyspark' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(Path(tailrace.__path__[0]).parent)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, timeout=240, check=False).returncode == 0


# ---- check


def test_check_says_ok_for_a_good_file(file: str) -> None:
    done = tailrace_process("check", file)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{file}: ok\n", "")


def test_check_prints_every_problem_with_its_line_and_hint_and_exits_2(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(GOOD.replace("name: shop", "nam: shop").replace("delta", "csv"))
    done = tailrace_process("check", str(path))
    assert (done.returncode, done.stdout) == (2, "")
    assert lines(done.stderr) == [
        f"error: {path}:1:1: `name` is missing",
        "hint: For example: `name: shop`.",
        f"error: {path}:1:1: `nam` is not a known key",
        "hint: Did you mean `name`?",
        f"error: {path}:6:18: `tables.format` names `csv`, which is not a table format",
        "hint: Use `format: delta`, or `format: iceberg`.",
    ]


def test_check_reports_a_missing_file_without_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "/no/such.yaml"]) == ExitCode.CONFIG
    assert lines(capsys.readouterr().err) == ["error: /no/such.yaml: the file does not exist", "hint: Check the path."]


def test_check_with_json_gives_the_problems_as_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(GOOD.replace("name: shop", "name: 5"))
    assert main(["check", str(path), "--json"]) == ExitCode.CONFIG
    printed = capsys.readouterr()
    assert printed.err == ""
    assert json.loads(printed.out) == {
        "file": str(path),
        "ok": False,
        "problems": [
            {"line": 1, "column": 7, "where": "name", "message": "must be text", "hint": "For example: `name: shop`."}
        ],
    }


def test_check_with_json_gives_an_empty_list_for_a_good_file(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--json", file]) == ExitCode.OK
    assert json.loads(capsys.readouterr().out) == {"file": file, "ok": True, "problems": []}


# ---- run, capture, apply


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [
        (["run"], ("run", False)),
        (["run", "--until-caught-up"], ("run", True)),
        (["apply", "--until-caught-up"], ("apply", True)),
        (["run", "--take-over"], ("run", False, "take over")),
        (["apply", "--take-over"], ("apply", False, "take over")),
        (["capture", "--take-over"], ("capture", False, False, "take over")),
        (["capture"], ("capture", False, False)),
        (["capture", "--until-caught-up", "--child"], ("capture", True, True)),
    ],
)
def test_a_command_calls_the_pipeline_with_its_flags(
    arguments: list[str], asked: tuple[object, ...], file: str
) -> None:
    engine = FakeEngine()
    assert main([*arguments, file], engine=engine) == ExitCode.OK
    assert engine.asked == [asked]


def test_a_run_shows_progress_on_stderr_and_its_summary_on_stdout(
    file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", file], engine=FakeEngine(events=("load begun",))) == ExitCode.OK
    printed = capsys.readouterr()
    assert printed.out == "shop: caught up · 1.5 s · 2 transactions · 1,234 rows captured · 1 table live\n"
    assert lines(printed.err) == [
        "load begun table=public.a b",
        "public.customers: found → live",
        "shop: 1 live · captured 0 rows · applied 0 rows",
    ]


def test_a_quiet_run_prints_nothing(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", file, "--quiet"], engine=FakeEngine(events=("load begun",))) == ExitCode.OK
    assert capsys.readouterr() == ("", "")


def test_a_run_with_json_ends_with_one_object_on_stdout(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", file, "--json", "--quiet"], engine=FakeEngine()) == ExitCode.OK
    printed = json.loads(capsys.readouterr().out)
    assert printed["command"] == "run"
    assert printed["exit_code"] == 0
    assert printed["rows_captured"] == 1234
    assert printed["tables"][0]["state"] == "live"


@pytest.mark.parametrize("command", ["run", "apply"])
@pytest.mark.parametrize("broken", [FAILED, table("orders", TableState.NEEDS_SNAPSHOT)])
def test_a_table_that_cannot_catch_up_ends_the_wait_with_exit_code_5(
    command: str, broken: TableStatus, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = FakeEngine(tables=(table("customers"), broken))
    assert main([command, file, "--until-caught-up", "--json"], engine=engine) == 5
    printed = capsys.readouterr()
    assert json.loads(printed.out)["exit_code"] == 5
    assert "error: public.orders is " + broken.state.value in printed.err
    assert "hint: " in printed.err


def test_a_failed_table_is_reported_with_its_reason_and_remedy(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", file, "--quiet"], engine=FakeEngine(tables=(FAILED,))) == ExitCode.OK
    assert lines(capsys.readouterr().err) == [
        "error: public.orders is failed: a column was added [schema-changed]",
        "hint: Reload it.",
    ]


def test_the_command_ends_with_the_exit_code_of_the_pipeline(file: str) -> None:
    assert main(["run", file, "--quiet"], engine=FakeEngine(exit_code=ExitCode.LOG)) == ExitCode.LOG


# ---- status and drop


def test_status_prints_table_reason_hint_and_note(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine(tables=(FAILED, table("no  key", rows_captured=12345, lag_seconds=0.44, note=SQL)))
    assert main(["status", file], engine=engine) == ExitCode.OK
    printed = capsys.readouterr()
    assert printed.err == ""
    head, *rest = lines(printed.out)
    assert head == (
        "shop: running (capture pid 12) · source localhost:5432/shop at 0/20"
        " · log 5.0 MiB in 1 commit up to 0/10"
        " · kept at the source 2.0 KiB"
    )
    assert [line.split() for line in rest if "12,345" in line] == [
        ["public.no", "key", "live", "0", "12,345", "0", "?", "0.4", "s"]
    ]
    assert rest[-3:] == [
        "public.orders is failed [schema-changed]: a column was added",
        "hint for public.orders: Reload it.",
        f"note on public.no  key: {SQL}",
    ]


def test_status_with_json_is_the_status_object(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", file, "--json"], engine=FakeEngine(tables=(FAILED,))) == ExitCode.OK
    assert json.loads(capsys.readouterr().out) == status_of(FAILED).to_json()


def test_the_headline_of_a_trimmed_log_has_its_first_commit_and_its_size_on_disk() -> None:
    log = LogStatus(path="/log", commits=100, first_commit=81, last_commit=100, bytes=5, disk_bytes=3 << 20)
    assert "log 3.0 MiB in 20 commits from 81 on" in status_view.headline(replace(status_of(), log=log))


def test_status_of_a_pipeline_without_tables_says_so(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", file], engine=FakeEngine(tables=())) == ExitCode.OK
    assert lines(capsys.readouterr().out)[-1] == "no tables yet"


def test_drop_with_yes_removes_and_says_what(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine()
    assert main(["drop", file, "--yes"], engine=engine) == ExitCode.OK
    assert engine.asked == [("drop",)]
    assert capsys.readouterr().out == "removed slot tailrace_1\nremoved publication tailrace_1\n"


def test_drop_with_json_lists_what_was_removed(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["drop", file, "--yes", "--json"], engine=FakeEngine()) == ExitCode.OK
    assert json.loads(capsys.readouterr().out)["removed"] == ["slot tailrace_1", "publication tailrace_1"]


def test_drop_without_a_terminal_asks_for_yes(
    file: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    engine = FakeEngine()
    assert main(["drop", file], engine=engine) == ExitCode.CONFIG
    assert engine.asked == []
    assert "hint: Add `--yes`" in capsys.readouterr().err


class Terminal(io.StringIO):
    """A terminal on which a person types this."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("typed", "dropped"), [("y\n", True), ("YES\n", True), ("n\n", False), ("\n", False), ("", False)]
)
def test_drop_removes_only_after_a_yes(
    typed: str, dropped: bool, file: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", Terminal(typed))
    engine = FakeEngine()
    code = main(["drop", file], engine=engine)
    printed = capsys.readouterr()
    assert "pipeline `shop` made at localhost:5432/shop?" in printed.err
    assert "s3cret" not in printed.err
    assert (code, engine.asked) == ((ExitCode.OK, [("drop",)]) if dropped else (ExitCode.INTERRUPTED, []))


# ---- failures


@pytest.mark.parametrize("command", ["run", "capture", "apply", "status", "snapshot", "retry", "drop"])
def test_every_command_reports_a_broken_settings_file(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "/no/such.yaml"]) == ExitCode.CONFIG
    assert lines(capsys.readouterr().err) == ["error: /no/such.yaml: the file does not exist", "hint: Check the path."]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SourceRefused("the server refused the login", hint="Check it.", source="h"), ExitCode.SOURCE),
        (LogBusy("another process writes the log", hint="Stop it.", pid=7), ExitCode.BUSY),
        (SchemaChanged("changed"), ExitCode.TABLE),
    ],
)
def test_an_error_prints_two_lines_and_its_exit_code(
    error: TailraceError, code: ExitCode, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", file, "--quiet"], engine=FakeEngine(raises=error)) == code
    assert lines(capsys.readouterr().err) == [
        f"error: {error.headline}",
        f"hint: {error.hint or 'Run again with `--log-level debug` for more.'}",
    ]


def test_a_child_reports_its_error_to_its_parent_only(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    error = LogBusy("another process writes the log", hint="Stop it.", pid=7, path=Path("/log"))
    assert main(["capture", file, "--child"], engine=FakeEngine(raises=error)) == ExitCode.BUSY
    printed = capsys.readouterr()
    assert printed.err == ""
    report = json.loads(printed.out)
    assert report["exit_code"] == ExitCode.BUSY
    back = error_from_json(report["error"])
    assert isinstance(back, LogBusy)
    assert str(back) == str(error)


def test_an_unexpected_error_is_reported_with_its_location_but_not_its_text(
    file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = FakeEngine(raises=KeyError("a row's value"))
    assert main(["run", file, "--quiet"], engine=engine) == ExitCode.INTERNAL
    first, second = lines(capsys.readouterr().err)
    assert first.startswith("error: unexpected KeyError at cli/main.py:")
    assert "value" not in first
    assert "`--log-level debug`" in second


@pytest.mark.parametrize("arguments", [["--log-level", "debug", "run"], ["run", "--log-level", "debug"]])
def test_debug_shows_the_traceback_without_the_password(
    arguments: list[str], file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    error = ValueError(
        "could not connect with postgresql://app:s3cret-word@h/db or password=s3cret-word, that is s3cret-word"
    )
    assert main([*arguments, file, "--quiet"], engine=FakeEngine(raises=error)) == ExitCode.INTERNAL
    printed = capsys.readouterr().err
    assert "Traceback" in printed
    assert "postgresql://app:***@h/db or password=***" in printed
    assert "s3cret-word" not in printed


def test_an_interrupt_ends_quietly_with_130(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine(raises=KeyboardInterrupt())
    assert main(["run", file, "--quiet"], engine=engine) == 130
    assert capsys.readouterr() == ("", "")


def test_a_reader_that_leaves_is_not_an_error(file: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    environment = {**os.environ, "PYTHONPATH": str(Path(tailrace.__path__[0]).parent)}
    done = subprocess.run(
        [sys.executable, "-m", "tailrace", "check", file],
        env=environment,
        stdout=writing,
        stderr=subprocess.PIPE,
        timeout=240,
        check=False,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_character_that_the_terminal_cannot_show_is_printed_as_its_code(tmp_path: Path) -> None:
    path = tmp_path / "säge.yaml"
    path.write_text(GOOD)
    environment = {**os.environ, "PYTHONPATH": str(Path(tailrace.__path__[0]).parent), "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-m", "tailrace", "check", str(path)],
        env=environment,
        capture_output=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0
    assert rb"s\xe4ge.yaml: ok" in done.stdout


# ---- rendering


@pytest.mark.parametrize(
    ("count", "text"),
    [(None, "?"), (0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (5 << 20, "5.0 MiB"), (3 << 30, "3.0 GiB"),
     (7 << 40, "7.0 TiB"), (9 << 50, "9216.0 TiB")],
)  # fmt: skip
def test_bytes_are_shown_in_units_of_1024(count: int | None, text: str) -> None:
    assert output.human_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "?"), (0.0, "0.0 s"), (-1.0, "0.0 s"), (0.44, "0.4 s"), (12.3, "12 s"), (59.7, "1 min 0 s"),
     (185, "3 min 5 s"), (7800, "2 h 10 min"), (273600, "3 d 4 h")],
)  # fmt: skip
def test_seconds_are_shown_in_two_units_at_most(seconds: float | None, text: str) -> None:
    assert output.human_seconds(seconds) == text


def screen(**options: Any) -> status_view.PatientConsole:
    return status_view.PatientConsole(file=io.StringIO(), width=120, height=20, highlight=False, **options)


def shown(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_first_load_has_a_bar_that_is_full_only_at_its_end() -> None:
    half = table("a", TableState.SEEDING, rows_loaded=500, load_rows_estimated=1000)
    over = table("b", TableState.SEEDING, rows_loaded=2000, load_rows_estimated=1000)
    unknown = table("c", TableState.SEEDING, rows_loaded=7)
    done = table("d", rows_loaded=1000, load_rows_estimated=1000)
    console = screen()
    console.print(status_view.tables_view([half, over, unknown, done]))
    text = shown(console)
    assert "50% 500" in text
    assert "99% 2,000" in text
    assert "100%" not in text
    assert "━" in text
    assert "7 …" in text


def test_written_bytes_are_shown_with_the_write_amplification() -> None:
    busy, quiet = table("a", bytes_changed=2 << 20, bytes_written=9 << 20), table("b")
    console = screen()
    console.print(status_view.tables_view([busy, quiet]))
    assert "9.0 MiB (4.5×)" in shown(console)
    data = status_of(busy, quiet).to_json()["tables"]
    assert [found["write_amplification"] for found in data] == [4.5, None]
    assert replace(busy, bytes_written=1 << 20).write_amplification == 0.5, "it follows from the two sizes"
    without = screen()
    without.print(status_view.tables_view([quiet]))
    assert "written" not in shown(without), "there is no column before the first change"
    closing = status_view.summary_text(Summary(name="shop", command="run", seconds=1.0, tables=(busy, quiet)))
    assert closing.endswith("9.0 MiB written for 2.0 MiB of changes (4.5×)")


def test_every_state_can_be_shown() -> None:
    console = screen()
    console.print(status_view.tables_view([table(state.value, state, reason="x") for state in TableState]))
    assert all(f" {state.value} " in shown(console) for state in TableState)


def test_of_too_many_tables_the_failed_ones_are_shown_first() -> None:
    tables = [table(f"t{n}", lag_bytes=n) for n in range(50)] + [FAILED]
    console = screen()
    console.print(status_view.live_view(status_of(*tables), rows_fit=20))
    text = shown(console)
    assert len(lines(text)) < 20
    assert "public.orders" in text
    assert "public.t49" in text
    assert "public.t0 " not in text
    assert "more" in text
    assert "Reload it." in text


def test_a_name_cannot_style_or_control_the_terminal() -> None:
    console = screen(force_terminal=True)
    evil = table("[red]x[/red]\x1b[2J\n", TableState.FAILED, reason="x", detail="\x1b]0;owned\x07")
    status_view.print_status(status_of(evil), console)
    text = shown(console)
    assert "[red]x[/red]\\x1b[2J" in text
    assert "\x1b[2J" not in text
    assert "\x1b]0" not in text


def test_the_live_table_is_redrawn_and_events_pass_above_it() -> None:
    console = screen(force_terminal=True)
    with status_view.LiveObserver(console) as observer:
        observer.tick(status_of(table("a", TableState.SEEDING, rows_loaded=1, load_rows_estimated=10)))
        observer.event("load ended", table="public.a")
        observer.tick(status_of(table("a", rows_applied=77, lag_bytes=2048, lag_seconds=1.0)))
    text = shown(console)
    assert "seeding" in text
    assert "load ended table=public.a" in text
    assert "77" in text
    assert "2.0 KiB" in text
    assert "\x1b[?25h" in text, "the terminal's cursor is shown again"


def test_progress_without_a_terminal_is_a_line_every_few_seconds_and_one_per_change() -> None:
    console, now = screen(), [0.0]
    observer = status_view.PlainObserver(console, clock=lambda: now[0])
    for second in range(12):
        now[0] = second / 2
        state = TableState.SEEDING if second < 3 else TableState.LIVE
        observer.tick(status_of(table("a", state, rows_loaded=5, rows_captured=2, lag_bytes=10, lag_seconds=1.0)))
    observer.tick(status_of(FAILED))
    assert lines(shown(console)) == [
        "public.a: found → seeding",
        "shop: 1 seeding · captured 2 rows · applied 0 rows · loading 5 rows · behind 10 B · lag 1.0 s",
        "public.a: seeding → live",
        "shop: 1 live · captured 2 rows · applied 0 rows · behind 10 B · lag 1.0 s",
        "public.orders: found → failed",
        "public.orders is failed [schema-changed]: a column was added",
        "hint for public.orders: Reload it.",
    ]


class Broken(io.StringIO):
    """A terminal or a reader that has gone."""

    def __init__(self, gone: OSError) -> None:
        super().__init__()
        self.gone = gone

    def write(self, text: str) -> int:
        raise self.gone


@pytest.mark.parametrize("gone", [BrokenPipeError(), OSError(5, "input/output error")])
@pytest.mark.parametrize("make", [status_view.LiveObserver, status_view.PlainObserver])
def test_an_observer_never_stops_the_pipeline(
    make: Callable[[status_view.PatientConsole], status_view.LiveObserver | status_view.PlainObserver], gone: OSError
) -> None:
    console = status_view.PatientConsole(file=io.StringIO(), force_terminal=True, width=100)
    with make(console) as observer:
        console.file = Broken(gone)
        observer.event("still here")
        observer.tick(status_of(table("a")))
        console.file = io.StringIO()
        observer.event("dropped")
    assert shown(console) == ""


def test_observers_may_be_called_from_many_threads() -> None:
    console = screen(force_terminal=True)
    with status_view.LiveObserver(console) as observer:

        def watch() -> None:
            for _ in range(20):
                observer.tick(status_of(table("a")))

        threads = [threading.Thread(target=watch) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert "public.a" in shown(console)


def test_a_real_terminal_gets_the_live_table(tmp_path: Path, file: str) -> None:
    script = tmp_path / "show.py"
    script.write_text(
        "from test_cli import *\n"
        "import sys\n"
        f"sys.exit(main(['run', {file!r}], engine=FakeEngine(events=('load begun',))))\n"
    )
    ours, theirs = pty.openpty()
    path = os.pathsep.join([str(Path(__file__).parent), str(Path(tailrace.__path__[0]).parent)])
    environment = {**os.environ, "PYTHONPATH": path, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"}
    with subprocess.Popen([sys.executable, str(script)], env=environment, stderr=theirs, stdout=subprocess.PIPE) as run:
        os.close(theirs)
        seen = b""
        while True:
            try:
                piece = os.read(ours, 65536)
            except OSError:  # Linux raises when the other side has closed.
                break
            if not piece:
                break
            seen += piece
        assert run.stdout is not None
        assert run.stdout.read().decode().startswith("shop: caught up")
    os.close(ours)
    assert run.returncode == 0, seen
    assert b"public.customers" in seen
    assert b"load begun" in seen


# ---- logs


def test_a_log_line_is_a_fragment_and_its_fields(capsys: pytest.CaptureFixture[str]) -> None:
    log_lines.set_up("info")
    logging.getLogger("tailrace.x").info("window applied", extra={"changes": 5, "table": "a b", "none": ""})
    logging.getLogger("tailrace.x").debug("not shown")
    logging.getLogger("another.package").info("not shown")
    (line,) = lines(capsys.readouterr().err)
    when, rest = line.split(" ", 1)
    assert when.endswith("Z")
    assert rest == 'info window applied changes=5 table="a b" none=""'


def test_a_log_line_holds_no_secret_and_no_second_line(capsys: pytest.CaptureFixture[str]) -> None:
    log_lines.set_up("info")
    log_lines.hide_passwords_of("postgresql://app:p%40ss-word@h/db")
    fields = {"url": "postgres://u:other@h/db", "bare": "p@ss-word", "setting": "password='x y'"}
    logging.getLogger("tailrace").error("failed with p%40ss-word\nand more", extra=fields)
    (line,) = lines(capsys.readouterr().err)
    assert line.endswith('error failed with *** and more url=postgres://u:***@h/db bare=*** setting="password=***"')


def test_a_password_that_is_a_plain_name_leaves_messages_readable() -> None:
    log_lines.hide_passwords_of("postgresql://tailrace:tailrace@h/shop")
    assert log_lines.redact("run `tailrace check`: postgresql://tailrace:tailrace@h") == (
        "run `tailrace check`: postgresql://tailrace:***@h"
    )


@pytest.mark.parametrize(("level", "traced"), [("info", False), ("debug", True)])
def test_an_exception_is_traced_at_level_debug_only(
    level: str, traced: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    log_lines.set_up(level)
    try:
        raise ValueError("a row's value")
    except ValueError:
        logging.getLogger("tailrace").exception("window failed")
    printed = capsys.readouterr().err
    assert "exception=ValueError" in printed
    assert ("Traceback" in printed) is traced
    assert ("a row's value" in printed) is traced


def test_setting_up_twice_prints_once(capsys: pytest.CaptureFixture[str]) -> None:
    log_lines.set_up("info")
    log_lines.set_up("info")
    logging.getLogger("tailrace").info("once")
    assert len(lines(capsys.readouterr().err)) == 1


# ---- the values


def test_a_failed_table_must_have_a_reason() -> None:
    with pytest.raises(ValueError, match="has no `reason`"):
        table("a", TableState.FAILED)


def test_only_blocked_tables_change_the_exit_code() -> None:
    well = [table(state.value, state) for state in TableState if not state.is_blocked]
    assert tables_exit_code(well) is ExitCode.OK
    assert tables_exit_code([*well, table("x", TableState.NEEDS_SNAPSHOT)]) is ExitCode.TABLE


def test_the_status_is_plain_json_all_the_way_down() -> None:
    data = status_of(FAILED).to_json()
    assert json.loads(json.dumps(data)) == data
    assert data["tables"][0]["state"] == "failed"
    assert data["log"]["bytes"] == 5 << 20
    assert list(data) == ["name", "running", "source", "log", "tables", "capture_pid", "apply_pid", "merging_share"]


def test_the_headline_shows_the_merging_share_while_a_process_applies() -> None:
    merging = status_of(merging_share=0.4721)
    assert status_view.headline(merging).endswith("merging 47% of the time")
    assert merging.to_json()["merging_share"] == 0.472
    assert "merging" not in status_view.headline(status_of())


def test_an_error_with_an_unknown_code_is_restored_as_the_root_class() -> None:
    stored = {**error_to_json(LogBusy("m", hint="h")), "code": "from-the-future"}
    back = error_from_json(stored)
    assert type(back) is TailraceError
    assert back.message == "m"
