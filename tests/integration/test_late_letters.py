"""Changes that were dead letters, and come in late where no key can be asked for, on a real server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tailrace.deadletters.store import DeadLetterStore
from tailrace.model.schema import TableId
from tailrace.pipeline.report import TableState
from tests.support.loads import Local, Scene, managed_table, wait_for_state
from tests.support.pipelines import eventually, execute

THINGS = TableId("public", "things")
KEYED = "CREATE TABLE things (id int PRIMARY KEY, amount numeric(10, 2), note text)"
KEYLESS = (
    "CREATE TABLE things (id int, amount numeric(10, 2), note text)", "ALTER TABLE things REPLICA IDENTITY FULL"
)  # fmt: skip
ROWS = "INSERT INTO things SELECT g, g, 'n' || g FROM generate_series(1, 5) g"


@pytest.fixture
def scene(database: str, tmp_path: Path) -> Scene:
    made = Scene(tmp_path, database)
    made.pipeline.file.write_text(f"{made.pipeline.file.read_text()}  on_bad_row: dead-letter\n")
    return made


def content(applying: Local) -> list[dict[str, Any]]:
    table = managed_table(applying, "things").location
    return [row for file in table.open().files() for row in pq.read_table(table.path / file).to_pylist()]


def letters(scene: Scene) -> list[int]:
    done = scene.pipeline.ask("dead-letters", "list", "--json")
    assert done.returncode == 0, done.stderr
    return [letter["seq"] for letter in json.loads(done.stdout)["letters"]]


def replay(scene: Scene) -> None:
    done = scene.pipeline.ask("dead-letters", "replay")
    assert (done.returncode, "replayed" in done.stdout) == (0, True), done.stderr
    answered = DeadLetterStore(scene.settings.log.path, THINGS)
    assert eventually(lambda: answered.replay_requested_at is None)


def test_once_the_column_takes_the_value_every_change_is_a_row(scene: Scene) -> None:
    execute(scene.pipeline.url, KEYED, ROWS, "UPDATE things SET amount = 'NaN' WHERE id = 2")
    scene.read_settings().set_tables("mode: append")
    with scene, scene.loader() as applying:
        wait_for_state(applying, "things", TableState.LIVE)
        execute(
            scene.pipeline.url,
            "UPDATE things SET amount = 'NaN', note = 'bad' WHERE id = 3",
            "UPDATE things SET amount = 7 WHERE id = 3",
            "INSERT INTO things VALUES (9, 'NaN', 'new')",
        )
        assert scene.settled(applying)
        read, first, second = letters(scene)
        assert read < 0 < first < second
        replay(scene)
        assert letters(scene) == [read, first, second], "nothing was mended"

        before = managed_table(applying, "things").last_load
        execute(scene.pipeline.url, "ALTER TABLE things ALTER amount TYPE numeric")
        assert eventually(lambda: managed_table(applying, "things").last_load is not before)
        wait_for_state(applying, "things", TableState.LIVE)
        assert letters(scene) == [read, first, second], "a load adds rows, and is no change"
        execute(scene.pipeline.url, "UPDATE things SET amount = 8 WHERE id = 3")
        assert scene.settled(applying)
        replay(scene)
        replay_again = scene.pipeline.ask("dead-letters", "replay")
        assert (letters(scene), replay_again.stdout) == ([], "there are no dead letters\n")
        execute(scene.pipeline.url, "UPDATE things SET amount = 9 WHERE id = 3")
        assert scene.settled(applying)
        mine = sorted(
            (row for row in content(applying) if row["id"] == 3 and row["_op"] == "update"),
            key=lambda row: int(row["_seq"]),
        )
        assert [row["amount"] for row in mine] == ["NaN", "7.00", "8", "9"]
        assert [row["_seq"] for row in mine].count(first) == 1
        (new,) = [row for row in content(applying) if row["_op"] == "insert"]
        assert (new["id"], new["amount"], new["_seq"]) == (9, "NaN", second)
        late = sorted(row["_seq"] for row in content(applying) if row["id"] == 2 and row["_op"] == "read")
        assert len(late) == 2, "what the first load could not bring, and what the second did"
        assert late[0] < first < late[1]


def test_rows_without_a_key_that_fit_once_a_column_is_gone_come_in_as_many_as_there_are(scene: Scene) -> None:
    execute(scene.pipeline.url, *KEYLESS, ROWS)
    scene.read_settings().set_tables("evolution: {drop: apply}")
    with scene, scene.loader() as applying:
        wait_for_state(applying, "things", TableState.LIVE)
        execute(
            scene.pipeline.url,
            "INSERT INTO things VALUES (7, 'NaN', 'a'), (7, 'NaN', 'a'), (8, 'NaN', 'b')",
            "UPDATE things SET amount = 'NaN' WHERE id IN (1, 2)",
            "INSERT INTO things VALUES (7, 1, 'a')",
        )
        assert scene.settled(applying)
        assert len(letters(scene)) == 5
        load = managed_table(applying, "things").last_load
        execute(
            scene.pipeline.url,
            "ALTER TABLE things DROP amount",
            "DELETE FROM things WHERE id = 8",
            "UPDATE things SET note = 'c' WHERE id = 1",
        )
        assert scene.settled(applying)
        assert (managed_table(applying, "things").state, managed_table(applying, "things").last_load is load) == (
            TableState.LIVE,
            True,
        )
        assert len(letters(scene)) == 3, "rows that went took theirs"
        replay(scene)
        assert letters(scene) == []
        scene.assert_equal(applying, "things")
        execute(scene.pipeline.url, "DELETE FROM things WHERE id IN (2, 7)")
        scene.assert_equal(applying, "things")
