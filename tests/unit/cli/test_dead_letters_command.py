"""`tailrace dead-letters`: how it is called, what it says, and what it leaves in the log."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tailrace.changelog.write.log_lease import LogLease
from tailrace.cli.main import main
from tailrace.deadletters.store import DeadLetterStore
from tailrace.errors import ExitCode, ValueUnfit
from tailrace.model.batch import ChangeBatch
from tailrace.pipeline.status import APPLIER_LEASE, STATUS_FILE
from tests.support.changes import changes, insert, table_schema, update
from tests.support.quiet import THINGS, Quiet


@pytest.fixture
def quiet(tmp_path: Path) -> Quiet:
    made = Quiet(tmp_path, on_bad_row="dead-letter")
    made.load([{"id": 1, "n": 0}, {"id": 2, "n": 0}])
    made.commit(update(1, name="né", unfit=("n",)), update(2, unfit=("n",)))
    made.apply()
    return made


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], quiet: Quiet) -> Any:
    def called(*arguments: str) -> tuple[int, str, str]:
        code = main(["dead-letters", str(quiet.file), *arguments])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return called


def test_the_list_shows_no_values(call: Any) -> None:
    code, out, err = call("list")
    assert (code, err) == (ExitCode.OK, "")
    first, second = out.splitlines()
    assert first.startswith("public.things · seq 1 · update at 0/C8 · transaction 2 · 1970-01-01T")
    assert first.endswith("[value-unfit]")
    assert "seq 2" in second
    assert "SECRET" not in out


def test_the_list_shows_payloads_on_request(call: Any) -> None:
    (first, _) = json.loads(call("list", "public.things", "--payload", "--json")[1])["letters"]
    assert first["payload"] == {
        "values": {"id": 1, "name": "né", "big": None, "n": "SECRET"},
        "unfit": ["n"],
        "unchanged": [],
        "moved_from": None,
    }
    assert "SECRET" in call("list", "--payload")[1]


def test_a_date_that_pythons_calendar_does_not_have_is_shown_as_its_text(call: Any, quiet: Quiet) -> None:
    schema = table_schema({"id": pa.int64(), "day": pa.date32()})
    (data,) = changes(schema, insert(7), first=9).combine_chunks().to_batches()
    far = pa.array([3_700_000], pa.int32()).view(pa.date32())
    data = data.set_column(data.schema.get_field_index("day"), "day", far)
    rows = ChangeBatch(schema=schema, data=data).with_all_columns()
    cause = ValueUnfit("a value cannot be a partition value", table=THINGS, hint="Mend it.")
    DeadLetterStore(quiet.settings.log.path, THINGS).write(
        schema, quiet.applied_position.seq, pa.table(rows), [cause], [], already_applied=True
    )
    assert call("list")[0] == ExitCode.OK
    entry = json.loads(call("list", "--payload", "--json")[1])["letters"][-1]
    assert entry["payload"]["values"] == {"id": 7, "day": "12100-04-04"}


def test_as_json_a_dead_letter_has_all_its_fields(call: Any) -> None:
    (first, _) = json.loads(call("list", "--json")[1])["letters"]
    assert {name: first[name] for name in ("schema", "table", "seq", "position", "transaction", "code")} == {
        "schema": "public",
        "table": "things",
        "seq": 1,
        "position": "0/C8",
        "transaction": 2,
        "code": "value-unfit",
    }
    assert "payload" not in first


def test_a_replay_is_requested_and_the_process_that_does_it_is_named(call: Any, quiet: Quiet) -> None:
    code, out, _ = call("replay")
    assert (code, out.splitlines()) == (
        ExitCode.OK,
        [
            "public.things: 2 dead letters are replayed",
            f"no process applies now: the next `tailrace run {quiet.file}` or `tailrace apply {quiet.file}` does it",
        ],
    )
    assert DeadLetterStore(quiet.settings.log.path, THINGS).replay_requested_at is not None
    held = LogLease(quiet.settings.log.path, APPLIER_LEASE)
    try:
        assert f"process {os.getpid()} that applies now starts it" in call("replay", "public.things")[1]
    finally:
        held.release()


def test_a_replay_for_a_failed_table_reports_that_it_waits(call: Any, quiet: Quiet) -> None:
    call("list", "public.things", "--forget", "--seq", "2")
    held = LogLease(quiet.settings.log.path, APPLIER_LEASE)
    try:
        note = {"tables": [{"schema": "public", "table": "things", "state": "failed"}]}
        (quiet.settings.log.path / STATUS_FILE).write_text(json.dumps(note))
        text, result = call("replay")[1], json.loads(call("replay", "--json")[1])
    finally:
        held.release()
    assert text == (
        "public.things: 1 dead letter is replayed once the table, which is failed, runs again: "
        f"see `tailrace status {quiet.file}`\n"
    )
    assert result["replayed"] == [{"schema": "public", "table": "things", "letters": 1, "stopped": "failed"}]


def test_dead_letters_are_dropped_by_hand(call: Any) -> None:
    assert call("list", "public.things", "--forget", "--seq", "2")[1] == (
        "public.things: 1 dead letter dropped; the rows stay as they are\n"
    )
    assert [entry["seq"] for entry in json.loads(call("list", "--json")[1])["letters"]] == [1]
    forgotten = json.loads(call("list", "public.*", "--forget", "--json")[1])["forgotten"]
    assert forgotten == [{"schema": "public", "table": "things", "letters": 1}]
    assert call("list")[1] == "there are no dead letters\n"
    assert call("replay")[1] == "there are no dead letters\n"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "Give an action: list or replay."),
        (("mend",), "invalid choice: 'mend'"),
        (("list", "public.thing"), "Did you mean public.things?"),
        (("list", "--forget"), "no table given whose dead letters to drop"),
        (("list", "public.things", "--forget", "--seq", "99"), "no open dead letter has this number"),
        (("list", "--seq", "1"), "`--seq` goes with `--forget` only"),
        (("replay", "--payload"), "go with `list` only"),
        (("replay", "--forget"), "go with `list` only"),
    ],
)
def test_invalid_arguments_are_refused(call: Any, arguments: tuple[str, ...], text: str) -> None:
    code, out, err = call(*arguments)
    assert (code, out) == (ExitCode.CONFIG, "")
    assert text in err
    assert "hint: " in err


def test_a_pipeline_without_dead_letters_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = Quiet(tmp_path / "other")
    made.load()
    note = {"tables": [{"schema": "public", "table": "things", "state": "live"}]}
    (made.settings.log.path / STATUS_FILE).write_text(json.dumps(note))
    for arguments in (["list"], ["list", "public.things"], ["replay", "public.*"]):
        assert main(["dead-letters", str(made.file), *arguments]) == ExitCode.OK
        assert capsys.readouterr().out == "there are no dead letters\n"


def test_dead_letters_of_an_append_table_are_replayed_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = Quiet(tmp_path / "changes", on_bad_row="dead-letter", spec="mode: append")
    made.load([])
    made.commit(update(1, unfit=("n",)))
    made.apply()
    assert main(["dead-letters", str(made.file), "replay"]) == ExitCode.OK
    assert capsys.readouterr().out.startswith("public.things: 1 dead letter is replayed\n")
    assert DeadLetterStore(made.settings.log.path, THINGS).replay_requested_at is not None
    main(["dead-letters", str(made.file), "list", "--json"])
    (entry,) = json.loads(capsys.readouterr().out)["letters"]
    assert ("adds a new change" in entry["hint"], entry["passed"]) == (True, False)
    assert "dead-letters FILE replay TABLE" in entry["hint"]


def test_a_superseded_row_version_cannot_be_replayed_and_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = Quiet(tmp_path / "versions", on_bad_row="dead-letter", spec="mode: history")
    made.load([{"id": 1, "n": 0}])
    made.commit(update(1, unfit=("n",)), update(1, n=2))
    made.apply()
    assert main(["dead-letters", str(made.file), "replay"]) == ExitCode.OK
    text = capsys.readouterr().out
    assert text.startswith("public.things: 1 dead letter cannot be replayed, because the source no longer has the row")
    assert "list public.things --forget" in text
    assert DeadLetterStore(made.settings.log.path, THINGS).replay_requested_at is None, "no replay is requested"
    main(["dead-letters", str(made.file), "replay", "--json"])
    result = json.loads(capsys.readouterr().out)
    assert (result["replayed"], result["kept"]) == ([], [{"schema": "public", "table": "things", "letters": 1}])
