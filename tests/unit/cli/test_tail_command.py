"""`tailrace tail`: the log's changes in order, for people and for pipes."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tailrace.changelog.maintain.retention import RetentionPolicy, trim
from tailrace.changelog.maintain.sealer import Sealer
from tailrace.cli.main import main
from tailrace.errors import ExitCode
from tailrace.model.schema import Identity, TableId
from tests.support.changes import KEYLESS, SHOP, delete, move, update
from tests.support.logs import OTHER, Diary, inserts, seal

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
    (tmp_path / "tailrace.yaml").write_text(SETTINGS)
    made = Diary(tmp_path / "log")
    made.commit(inserts(1, 2))
    seal(made.path, join=False)
    changed = [update(1, name="a\x1b[31m", unchanged=("big",)), *move(2, 3), delete(1)]
    made.commit((SHOP, changed), inserts(9, schema=OTHER))
    yield made
    made.close()


def printed(capsys: pytest.CaptureFixture[str], diary: Diary, *flags: str) -> list[str]:
    file = diary.path.parent / "tailrace.yaml"
    assert main(["tail", str(file), "--until-caught-up", *flags]) == 0
    return capsys.readouterr().out.splitlines()


def test_every_change_is_a_line_in_the_order_of_the_log(capsys: pytest.CaptureFixture[str], diary: Diary) -> None:
    lines = printed(capsys, diary, "--from-start")
    words = [line.split()[1:3] for line in lines]
    assert words == [
        ["insert", "public.things"],
        ["insert", "public.things"],
        ["update", "public.things"],
        ["delete", "public.things"],
        ["insert", "public.things"],
        ["delete", "public.things"],
        ["insert", "public.other"],
    ]
    assert "(unchanged: big)" in lines[2]
    assert 'name="a\\u001b[31m"' in lines[2], "no row can control the terminal"
    assert "(was id=2)" in lines[4]


def test_with_json_each_line_is_an_object(capsys: pytest.CaptureFixture[str], diary: Diary) -> None:
    found = [json.loads(line) for line in printed(capsys, diary, "--from-start", "--json")]
    assert [item["seq"] for item in found] == list(range(1, 8))
    assert found[2]["unchanged"] == ["big"]
    assert "big" not in found[2]["after"]
    found = [json.loads(line) for line in printed(capsys, diary, "--from-start", "--debezium")]
    assert [item["op"] for item in found] == ["c", "c", "u", "d", "c", "d", "c"]


def test_a_delete_is_printed_with_everything_the_source_sent(capsys: pytest.CaptureFixture[str], diary: Diary) -> None:
    keyless = replace(KEYLESS, table=TableId("public", "nk"), relation=77)
    keyed = replace(SHOP, table=TableId("public", "full"), relation=78, identity=Identity.FULL)
    diary.commit((keyless, [delete({}, a=5, b="x")]), (keyed, [delete(1, name="a", n=3)]))
    flags = "--from-start", "public.nk", "public.full"
    old = [{"a": 5, "b": "x"}, {"id": 1, "name": "a", "big": None, "n": 3}]
    for output_format in ("--json", "--debezium"):
        assert [json.loads(line)["before"] for line in printed(capsys, diary, *flags, output_format)] == old
    lines = printed(capsys, diary, *flags)
    assert [line.split(maxsplit=3)[3] for line in lines] == ['a=5 b="x"', 'id=1 name="a" big=null n=3']


def test_tables_can_be_named_and_older_changes_need_from_start(
    capsys: pytest.CaptureFixture[str], diary: Diary
) -> None:
    assert len(printed(capsys, diary, "--from-start", "public.other")) == 1
    assert len(printed(capsys, diary, "public.o*", "--from-start")) == 1
    assert printed(capsys, diary) == []


def test_a_name_without_a_schema_is_refused(capsys: pytest.CaptureFixture[str], diary: Diary) -> None:
    assert main(["tail", str(diary.path.parent / "tailrace.yaml"), "things"]) == ExitCode.CONFIG
    stderr = capsys.readouterr().err
    assert "the table name lacks its schema" in stderr
    assert "public.things" in stderr


def test_an_unknown_table_is_warned_of(capsys: pytest.CaptureFixture[str], diary: Diary) -> None:
    file = str(diary.path.parent / "tailrace.yaml")
    assert main(["tail", file, "--until-caught-up", "--from-start", "public.thigns", "public.other"]) == ExitCode.OK
    found = capsys.readouterr()
    assert len(found.out.splitlines()) == 1
    assert "no rows of this table yet" in found.err
    assert "public.thigns" in found.err
    assert "public.other" not in found.err


def test_it_ends_without_a_reader_even_if_no_change_arrives(diary: Diary) -> None:
    file = str(diary.path.parent / "tailrace.yaml")
    running = subprocess.Popen(
        [sys.executable, "-m", "tailrace", "tail", file, "--from-start", "--json"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert running.stdout is not None
        assert json.loads(running.stdout.readline())["seq"] == 1
        assert [json.loads(running.stdout.readline())["seq"] for _ in range(6)][-1] == 7
        assert running.poll() is None, "it has a reader, so it waits for more"
        running.stdout.close()
        assert running.wait(timeout=240) == 0
    finally:
        running.kill()
        running.wait()


@pytest.mark.slow
def test_commits_trimmed_before_they_were_printed_are_reported_on_stderr(diary: Diary) -> None:
    diary.commit(inserts(*range(1000, 6000)))  # more than a pipe holds
    missing = [diary.commit(inserts(11)), diary.commit(inserts(12))]
    file = str(diary.path.parent / "tailrace.yaml")
    running = subprocess.Popen(
        [sys.executable, "-m", "tailrace", "tail", file, "--from-start", "--until-caught-up", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert running.stdout is not None
        assert running.stderr is not None
        lines = [running.stdout.readline() for _ in range(10)]  # it waits in the middle of the large commit
        seal(diary.path)
        with Sealer(diary.path) as sealer:
            trim(sealer, RetentionPolicy(age_seconds=0.0), now=4e9)
        with running.stdout as out, running.stderr as err:
            lines += out.readlines()
            stderr = err.read()
        running.wait(timeout=240)
    finally:
        running.kill()
        running.wait()
    found = [json.loads(line)["after"]["id"] for line in lines if '"insert"' in line]
    assert set(range(1000, 6000)) <= set(found)
    assert not {11, 12} & set(found)
    assert running.returncode == 0
    assert f"commits were trimmed before they were printed first={missing[0]} last={missing[1]} " in stderr


def test_ctrl_c_ends_it_silently(diary: Diary) -> None:
    file = str(diary.path.parent / "tailrace.yaml")
    # A shell that starts a job in the background has it ignore Ctrl-C, and a child inherits that.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with subprocess.Popen(
        [sys.executable, "-m", "tailrace", "tail", file, "--from-start", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        signal.signal(signal.SIGINT, before)
        try:
            assert running.stdout is not None
            assert json.loads(running.stdout.readline())["seq"] == 1
            running.send_signal(signal.SIGINT)
            rest, stderr = running.communicate(timeout=20)
        finally:
            running.kill()
    assert (running.returncode, stderr) == (0, "")
    assert all(json.loads(one) for one in rest.splitlines()), "no line was torn"


def test_it_ends_without_stdout(monkeypatch: pytest.MonkeyPatch, diary: Diary) -> None:
    file = str(diary.path.parent / "tailrace.yaml")
    with monkeypatch.context() as closed:
        closed.setattr(sys, "stdout", None)  # as Python has it after `>&-`
        assert main(["tail", file, "--from-start"]) == 0


def test_an_error_is_never_printed_as_data(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with monkeypatch.context() as closed:
        closed.setattr(sys, "stderr", None)
        assert main(["tail", str(tmp_path / "nowhere.yaml")]) == ExitCode.CONFIG
    assert capsys.readouterr().out == ""


def test_changes_are_printed_as_they_arrive_and_it_ends_without_a_reader(diary: Diary) -> None:
    file = str(diary.path.parent / "tailrace.yaml")
    running = subprocess.Popen(
        [sys.executable, "-m", "tailrace", "tail", file, "--json"], stdout=subprocess.PIPE, text=True
    )
    stop = threading.Event()

    def write() -> None:
        number = 100
        while not stop.wait(0.1):
            number += 1
            diary.commit(inserts(number))

    writer = threading.Thread(target=write)
    writer.start()
    try:
        assert running.stdout is not None
        first = json.loads(running.stdout.readline())
        assert first["after"]["id"] > 100
        running.stdout.close()
        assert running.wait(timeout=240) == 0
    finally:
        stop.set()
        writer.join()
        running.kill()
        running.wait()


def test_json_and_debezium_cannot_be_combined(capsys: pytest.CaptureFixture[str], diary: Diary) -> None:
    file = diary.path.parent / "tailrace.yaml"
    assert main(["tail", str(file), "--until-caught-up", "--json", "--debezium"]) == ExitCode.CONFIG
    assert "cannot be combined" in capsys.readouterr().err
