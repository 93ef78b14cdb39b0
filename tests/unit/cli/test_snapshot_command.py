"""`tailrace snapshot`: how it is called, what it says, and what it leaves in the log."""

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
def seeds(file: str) -> LoadStore:
    return LoadStore(Path(file).parent / "log")


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], file: str) -> Any:
    def called(*arguments: str) -> tuple[int, str, str]:
        code = main(["snapshot", file, *arguments])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return called


def test_a_load_is_asked_for_and_who_will_do_it_is_said(call: Any, seeds: LoadStore, file: str) -> None:
    code, out, err = call("public.things", "--mode", "refresh")
    assert (code, err) == (ExitCode.OK, "")
    first, note, last = out.splitlines()
    assert first == "public.things: it is read again", "there is nothing yet that it could differ from"
    assert note.startswith("note: the source was not asked which tables there are: the server cannot be reached")
    assert last == f"nothing applies now: the next `tailrace run {file}` or `tailrace apply {file}` does it"
    (wish,) = seeds.requests()
    assert (wish.table, wish.mode, wish.where) == (THINGS, LoadMode.REFRESH, None)


def test_a_process_that_applies_now_is_named(call: Any, seeds: LoadStore, file: str) -> None:
    held = LogLease(Path(file).parent / "log", APPLIER_LEASE)
    try:
        out = call("public.*")[1]
    finally:
        held.release()
    assert f"process {os.getpid()} that applies now takes it up within a second" in out
    assert {wish.table for wish in seeds.requests()} == {THINGS, OTHERS}


def test_tables_may_stand_before_and_behind_flags(call: Any, seeds: LoadStore) -> None:
    code, out, _ = call("public.things", "--pause", "public.other", "--json")
    assert code == ExitCode.OK
    assert seeds.holds() == {THINGS: LoadHold.PAUSED, OTHERS: LoadHold.PAUSED}
    told = json.loads(out)
    assert (told["action"], told["apply_pid"], told["name"]) == ("pause", None, "shop")
    assert [(table["schema"], table["table"], table["done"]) for table in told["tables"]] == [
        ("public", "other", "paused"),
        ("public", "things", "paused"),
    ]


def test_pause_resume_and_stop_without_a_table_mean_all(call: Any, seeds: LoadStore) -> None:
    call("--pause")
    assert set(seeds.holds()) == {THINGS, OTHERS}
    assert "public.other: it is loaded" in call("--resume")[1]
    assert seeds.holds() == {}
    call("--stop")
    assert set(seeds.holds().values()) == {LoadHold.STOPPED}
    _, out, _ = call("--stop", "--json")
    assert {table["done"] for table in json.loads(out)["tables"]} == {"stopped"}


def test_where_nothing_was_done_nobody_is_said_to_do_it(call: Any) -> None:
    assert "does it" not in call("--resume")[1]


@pytest.mark.parametrize(
    ("arguments", "error", "hint"),
    [
        ([], "which tables are to be loaded again is not said", "tailrace snapshot FILE public.orders"),
        (["--where", "id > 5"], "which tables are to be loaded again is not said", "tailrace snapshot FILE"),
        (["public.thing"], "`public.thing` matches no table of this pipeline", "Did you mean public.things?"),
        (["public.things", "--pause", "--stop"], "not allowed with argument --pause", "`tailrace snapshot --help`"),
        (["public.things", "--mode", "some"], "invalid choice: 'some'", "`tailrace snapshot --help`"),
        (["public.things", "--stop", "--where", "x"], "ask for a load, and `--pause`", "one or the other"),
        (["public.things", "--resume", "--mode", "refresh"], "ask for a load", "one or the other"),
        (["public.things", "--bogus"], "unrecognized arguments: --bogus", "--help`"),
    ],
)
def test_a_wrong_question_is_told_with_its_remedy_and_writes_nothing(
    call: Any, seeds: LoadStore, arguments: list[str], error: str, hint: str
) -> None:
    code, out, err = call(*arguments)
    assert (code, out) == (ExitCode.CONFIG, "")
    first, second = err.splitlines()
    assert error in first
    assert hint in second
    assert (seeds.requests(), seeds.holds()) == ([], {})


def test_a_condition_needs_a_source_that_answers(call: Any, seeds: LoadStore) -> None:
    code, _, err = call("public.things", "--where", "id > 5", "--json")
    assert code == ExitCode.SOURCE
    assert "the server cannot be reached" in err
    assert seeds.requests() == []


def test_without_a_log_it_says_what_makes_one(call: Any, tmp_path: Path, file: str) -> None:
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
