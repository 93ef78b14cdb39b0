"""`tailrace snapshot`: its arguments, its output, and its records in the log."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tailrace
from tailrace.changelog.write.log_lease import LogLease
from tailrace.cli import log_lines
from tailrace.cli.main import main
from tailrace.errors import ExitCode
from tailrace.model.schema import TableId
from tailrace.pipeline.status import APPLIER_LEASE
from tailrace.tasks.load_store import LoadHold, LoadMode, LoadStore
from tests.support.logs import OTHER, Diary, inserts

SETTINGS = """\
name: shop
source:
  url: postgresql://app:s3cret-word@127.0.0.1:1/shop
  tables: ["public.*"]
log: {path: ./log}
tables: {format: delta, path: ./lake}
load: {standby: "postgresql://app:0ther-word@127.0.0.1:1/shop"}
"""
THINGS, OTHERS = TableId("public", "things"), TableId("public", "other")


@pytest.fixture
def file(tmp_path: Path) -> str:
    """A pipeline whose log knows two tables, and whose source does not answer."""
    diary = Diary(tmp_path / "log")
    diary.commit(inserts(1, 2), inserts(3, schema=OTHER))
    diary.close()
    (tmp_path / "tailrace.yaml").write_text(SETTINGS)
    return str(tmp_path / "tailrace.yaml")


@pytest.fixture
def load_store(file: str) -> LoadStore:
    return LoadStore(Path(file).parent / "log")


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], file: str) -> Any:
    def called(*arguments: str) -> tuple[int, str, str]:
        code = main(["snapshot", file, *arguments])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return called


def test_a_load_is_requested_and_the_process_that_does_it_is_named(call: Any, load_store: LoadStore, file: str) -> None:
    code, out, err = call("public.things", "--mode", "refresh")
    assert (code, err) == (ExitCode.OK, "")
    first, note, last = out.splitlines()
    assert first == "public.things: it is reloaded", "an unloaded table has no changed rows"
    assert note.startswith("note: the source could not be asked for its tables: the server cannot be reached")
    assert last == f"no process applies now: the next `tailrace run {file}` or `tailrace apply {file}` does it"
    (request,) = load_store.requests()
    assert (request.table, request.mode, request.where) == (THINGS, LoadMode.REFRESH, None)


def test_a_process_that_applies_now_is_named(call: Any, load_store: LoadStore, file: str) -> None:
    lease = LogLease(Path(file).parent / "log", APPLIER_LEASE)
    try:
        out = call("public.*")[1]
    finally:
        lease.release()
    assert f"process {os.getpid()} that applies now starts it within a second" in out
    assert {request.table for request in load_store.requests()} == {THINGS, OTHERS}


def test_tables_may_be_before_and_after_flags(call: Any, load_store: LoadStore) -> None:
    code, out, _ = call("public.things", "--pause", "public.other", "--json")
    assert code == ExitCode.OK
    assert load_store.holds() == {THINGS: LoadHold.PAUSED, OTHERS: LoadHold.PAUSED}
    result = json.loads(out)
    assert (result["action"], result["apply_pid"], result["name"]) == ("pause", None, "shop")
    assert [(table["schema"], table["table"], table["done"]) for table in result["tables"]] == [
        ("public", "other", "paused"),
        ("public", "things", "paused"),
    ]


def test_pause_resume_and_stop_without_a_table_mean_all(call: Any, load_store: LoadStore) -> None:
    call("--pause")
    assert set(load_store.holds()) == {THINGS, OTHERS}
    assert "public.other: it is loaded" in call("--resume")[1]
    assert load_store.holds() == {}
    call("--stop")
    assert set(load_store.holds().values()) == {LoadHold.STOPPED}
    _, out, _ = call("--stop", "--json")
    assert {table["done"] for table in json.loads(out)["tables"]} == {"stopped"}


def test_without_a_request_no_process_is_named(call: Any) -> None:
    assert "does it" not in call("--resume")[1]


@pytest.mark.parametrize(
    ("arguments", "error", "hint"),
    [
        ([], "no table given to reload", "tailrace snapshot FILE public.orders"),
        (["--where", "id > 5"], "no table given to reload", "tailrace snapshot FILE"),
        (["public.thing"], "`public.thing` matches no table of this pipeline", "Did you mean public.things?"),
        (["public.things", "--pause", "--stop"], "not allowed with argument --pause", "`tailrace snapshot --help`"),
        (["public.things", "--mode", "some"], "invalid choice: 'some'", "`tailrace snapshot --help`"),
        (["public.things", "--stop", "--where", "x"], "cannot be combined with `--pause`", "one or the other"),
        (
            ["public.things", "--resume", "--mode", "refresh"],
            "`--where` and `--mode` cannot be combined",
            "one or the other",
        ),
        (["public.things", "--bogus"], "unrecognized arguments: --bogus", "--help`"),
    ],
)
def test_a_wrong_call_is_reported_with_its_remedy_and_writes_nothing(
    call: Any, load_store: LoadStore, arguments: list[str], error: str, hint: str
) -> None:
    code, out, err = call(*arguments)
    assert (code, out) == (ExitCode.CONFIG, "")
    first, second = err.splitlines()
    assert error in first
    assert hint in second
    assert (load_store.requests(), load_store.holds()) == ([], {})


def test_a_condition_needs_a_source_that_answers(call: Any, load_store: LoadStore) -> None:
    code, _, err = call("public.things", "--where", "id > 5", "--json")
    assert code == ExitCode.SOURCE
    assert "the server cannot be reached" in err
    assert load_store.requests() == []


def test_without_a_log_the_hint_names_the_command_that_makes_one(call: Any, tmp_path: Path, file: str) -> None:
    Path(file).write_text(SETTINGS.replace("./log", "./elsewhere"))
    code, out, err = call("public.things")
    assert (code, out) == (ExitCode.LOG, "")
    assert "there is no log here" in err
    assert "hint: Start `tailrace run`" in err


def test_the_passwords_of_source_and_standby_are_hidden(call: Any) -> None:
    call("public.things")
    assert log_lines.redact("s3cret-word and 0ther-word") == "*** and ***"


def test_it_loads_no_spark(file: str) -> None:
    code = "import sys, tailrace.cli.table_commands; sys.exit('pyspark' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(Path(tailrace.__path__[0]).parent)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, timeout=240, check=False)
    assert done.returncode == 0
