"""`tailrace schema-history` and `tailrace checkpoints`, on real logs and stores."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tailrace.cli.main import main
from tailrace.errors import ExitCode
from tailrace.model.position import Lsn
from tailrace.model.schema import TableId
from tailrace.state.checkpoint import Checkpoint
from tailrace.state.checkpoint_stores import FileCheckpointStore
from tailrace.state.schema_history_stores import FileSchemaHistory
from tests.support.changes import SHOP
from tests.support.logs import OTHER, WIDER, Diary, inserts

SETTINGS = """\
name: shop
source:
  url: postgresql://app:s3cret-word@nowhere.invalid:5432/shop
  tables: ["public.*"]
log: {path: ./log, grace: 0}
tables: {format: delta, path: ./lake}
"""
SOLD = TableId("public", "sold")


@pytest.fixture
def diary(tmp_path: Path) -> Iterator[Diary]:
    """A log of a table that grew, was renamed and recreated, and of another; its source is unreachable."""
    (tmp_path / "tailrace.yaml").write_text(SETTINGS)
    diary = Diary(tmp_path / "log")
    diary.commit(inserts(1, 2))
    diary.commit(inserts(3, schema=WIDER), inserts(4, 5, schema=OTHER))
    diary.commit(inserts(6, schema=replace(WIDER, table=SOLD)))
    diary.commit(inserts(7, schema=replace(SHOP, relation=77)))
    diary.commit(inserts(8, schema=replace(SHOP, relation=78)))
    yield diary
    diary.close()


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Any:
    """Run a command; return its exit code, stdout and stderr."""

    def called(*arguments: object) -> tuple[int, str, str]:
        code = main([str(item) for item in arguments])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return called


# --- schema-history ----------------------------------------------------------------------------------------


def test_every_version_is_shown_with_its_schema_change(call: Any, diary: Diary, tmp_path: Path) -> None:
    code, out, err = call("schema-history", tmp_path / "tailrace.yaml")
    assert (code, err) == (0, "")
    text = " ".join(out.split())
    assert "4 columns, key id" in text
    assert "add added bool (older rows: unknown)" in text
    assert "renamed to public.sold" in text
    assert "rename the table from public.things" in text
    assert " dropped " in text
    assert "s3cret-word" not in out


def test_with_json_it_is_one_object_and_may_be_of_one_table(call: Any, diary: Diary, tmp_path: Path) -> None:
    code, out, _ = call("schema-history", tmp_path / "tailrace.yaml", "public.things", "--json")
    assert code == 0
    (table,) = json.loads(out)["tables"]
    assert (table["schema"], table["table"]) == ("public", "things")
    assert [(item["version"], item["event"]) for item in table["versions"]] == [
        (1, "create"),
        (2, "alter"),
        (3, "drop"),
        (4, "create"),
        (5, "drop"),
        (6, "create"),
    ]
    grown = table["versions"][1]
    assert grown["evolution"]["changes"][0]["column"] == "added"
    assert [column["name"] for column in grown["shape"]["columns"]] == WIDER.names
    assert (grown["position_type"], grown["position"]) == ("postgresql-lsn", str(Lsn(200)))
    code, out, _ = call("schema-history", tmp_path / "tailrace.yaml", "--json")
    assert [item["table"] for item in json.loads(out)["tables"]] == ["other", "sold", "things"]


def test_an_unknown_table_is_reported_with_a_similar_one(call: Any, diary: Diary, tmp_path: Path) -> None:
    code, out, err = call("schema-history", tmp_path / "tailrace.yaml", "public.thing")
    assert (code, out) == (ExitCode.CONFIG, "")
    assert "hint: Did you mean `public.things`?" in err


def test_a_missing_log_is_reported_with_the_command_that_makes_it(call: Any, tmp_path: Path) -> None:
    (tmp_path / "tailrace.yaml").write_text(SETTINGS)
    code, _, err = call("schema-history", tmp_path / "tailrace.yaml")
    assert code == ExitCode.LOG
    assert "hint: Start `tailrace run`" in err


def test_the_history_of_a_running_program_can_be_shown(call: Any, tmp_path: Path) -> None:
    with FileSchemaHistory(tmp_path / "shapes") as history:
        history.record(SHOP)
        history.record(WIDER)
        code, out, err = call("schema-history", tmp_path / "shapes")
        assert (code, err) == (0, "")
        assert "add added bool" in " ".join(out.split())
        code, out, _ = call("schema-history", tmp_path / "shapes", str(SHOP.table), "--json")
        assert [item["version"] for item in json.loads(out)["tables"][0]["versions"]] == [1, 2]


def test_a_folder_that_is_not_a_history_is_refused_and_an_empty_history_is_not(
    call: Any, diary: Diary, tmp_path: Path
) -> None:
    FileSchemaHistory(tmp_path / "new").close()
    assert call("schema-history", tmp_path / "new")[:2] == (0, "no tables yet\n")
    with FileCheckpointStore(tmp_path / "store") as store:
        store.save("orders", Checkpoint(source_type="postgresql", position=Lsn(1)))
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("x")
    for folder, text, hint in (
        (diary.path, "is a change log", "settings file"),
        ("store", "is a checkpoint store", "tailrace checkpoints"),
        ("empty", "there is no schema history", "settings file"),
        ("other", "there is no schema history", "folder of"),
    ):
        code, out, err = call("schema-history", tmp_path / folder)
        assert (code, out) == (ExitCode.CONFIG, "")
        assert text in err
        assert hint in err


# --- checkpoints -------------------------------------------------------------------------------------------

SEED = ("--source", "mysql", "--type", "mysql-binlog", "--position", "mysql-bin.000042:1547")


def test_a_checkpoint_is_set_listed_and_deleted_by_hand(call: Any, tmp_path: Path) -> None:
    folder = tmp_path / "state"
    assert call("checkpoints", folder, "seed", "orders", *SEED)[:2] == (0, "seeded orders at mysql-bin.000042:1547\n")
    code, out, _ = call("checkpoints", folder, "list")
    assert code == 0
    assert "mysql-bin.000042:1547" in out
    code, out, _ = call("checkpoints", folder, "list", "--json")
    (found,) = json.loads(out)["checkpoints"]
    assert (found["key"], found["source_type"], found["position_type"]) == ("orders", "mysql", "mysql-binlog")
    assert call("checkpoints", folder, "delete", "orders")[:2] == (0, "deleted orders\n")
    assert call("checkpoints", folder, "list")[1] == "there are no checkpoints\n"


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("seed", "orders", *SEED), ExitCode.LOG, "key has a checkpoint already"),
        (("seed", "new", *SEED[:-1], "42"), ExitCode.CONFIG, "not a binary log position"),
        (("seed", "../new", *SEED), ExitCode.CONFIG, "has a path separator in it"),
        (("seed", "new", *SEED[:4]), ExitCode.CONFIG, "`seed` needs"),
        (("seed", *SEED), ExitCode.CONFIG, "need one"),
        (("delete", "nobody"), ExitCode.CONFIG, "there is no checkpoint with this key"),
        (("delete",), ExitCode.CONFIG, "need one"),
        (("list", "orders"), ExitCode.CONFIG, "takes no key"),
        (("list", "--source", "mysql"), ExitCode.CONFIG, "do not take them"),
    ],
)
def test_a_refused_action_is_reported_with_a_remedy(
    call: Any, tmp_path: Path, arguments: tuple[str, ...], code: ExitCode, text: str
) -> None:
    with FileCheckpointStore(tmp_path) as store:
        store.save("orders", Checkpoint(source_type="postgresql", position=Lsn(7)))
    found, out, err = call("checkpoints", tmp_path, *arguments)
    assert (found, out) == (code, "")
    error, hint = err.splitlines()
    assert text in error
    assert hint.startswith("hint: ")


def test_while_the_owner_runs_the_store_can_be_listed_but_not_changed(call: Any, tmp_path: Path) -> None:
    with FileCheckpointStore(tmp_path) as store:
        store.save("orders", Checkpoint(source_type="postgresql", position=Lsn(7)))
        assert call("checkpoints", tmp_path, "list")[0] == 0
        code, _, err = call("checkpoints", tmp_path, "delete", "orders")
        assert code == ExitCode.BUSY
        assert "another process owns the checkpoint store" in err


def test_listing_does_not_create_a_missing_folder(call: Any, tmp_path: Path) -> None:
    assert call("checkpoints", tmp_path / "nowhere", "list")[0] == ExitCode.LOG
    assert call("checkpoints", tmp_path / "nowhere", "delete", "orders")[0] == ExitCode.CONFIG
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize(
    "action",
    [
        ("list",),
        ("delete", "orders"),
        ("seed", "orders", "--source", "postgresql", "--type", "postgresql-lsn", "--position", "0/7"),
    ],
    ids=lambda action: action[0],
)
def test_a_folder_of_another_kind_is_neither_read_nor_written(
    call: Any, diary: Diary, tmp_path: Path, action: tuple[str, ...]
) -> None:
    with FileSchemaHistory(tmp_path / "shapes") as history:
        history.record(SHOP)
    for folder, kind in ((tmp_path / "shapes", "schema history"), (tmp_path / "log", "change log")):
        before = sorted(path.name for path in folder.iterdir())
        code, _, text = call("checkpoints", folder, *action)
        assert (code, f"the folder is a {kind}, not a checkpoint store" in text) == (ExitCode.CONFIG, True)
        assert sorted(path.name for path in folder.iterdir()) == before
