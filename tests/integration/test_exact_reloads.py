"""Tables that keep every change or version, and are loaded again: nothing is missing, and nothing comes twice."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tailrace.pipeline.report import TableState
from tailrace.tasks.work import ChunkWork
from tests.integration.test_modes import EVERY, make, rows
from tests.support.loads import Local, Scene, managed_table, wait_for_state
from tests.support.pipelines import eventually, execute

NAMES = ("h", "a")
CHANGES = (
    "UPDATE {} SET x = 100 WHERE id = 2",
    "UPDATE {} SET x = 101 WHERE id = 2",
    "DELETE FROM {} WHERE id = 3",
    "INSERT INTO {} VALUES (7, 7, 'n')",
    "DELETE FROM {} WHERE id = 7",
)
READ = [("read", 1, 1), ("read", 2, 2), ("read", 3, 3)]
CHANGED = [("delete", 3, None), ("delete", 7, None), ("insert", 7, 7), ("update", 2, 100), ("update", 2, 101)]
VERSIONS = [
    (1, 1, True), (2, 2, False), (2, 100, False), (2, 101, True), (3, 3, False), (7, 7, False),
]  # fmt: skip


def change(database: str, name: str) -> None:
    for statement in CHANGES:
        execute(database, statement.format(name))


def content(applying: Local) -> tuple[list[tuple[Any, ...]], Counter[tuple[Any, ...]]]:
    return rows(applying, "h", "id, x, _current"), Counter(rows(applying, "a", "_op, id, x"))


def test_what_comes_while_a_table_is_read_again_is_there_once(database: str, tmp_path: Path) -> None:
    """Changes before the snapshot's point and after it, with the reader in between."""
    make(database, *NAMES)
    armed, done = threading.Event(), set[str]()

    def before(work: ChunkWork) -> None:
        name = work.schema.table.name
        if armed.is_set() and name not in done:
            done.add(name)
            change(database, name)
            scene.wait_for_capture()

    with Scene(tmp_path, database).set_tables(*EVERY) as scene, scene.loader(before=before) as applying:
        assert scene.settled(applying)
        loads = {name: managed_table(applying, name).last_load for name in NAMES}
        armed.set()
        scene.pipeline.ask("snapshot", *(f"public.{name}" for name in NAMES))
        assert eventually(lambda: all(managed_table(applying, name).last_load is not loads[name] for name in NAMES))
        assert scene.settled(applying)
        versions, changes = content(applying)
        assert versions == VERSIONS
        # What was read is what was there before the changes.
        assert changes == Counter([*READ, *READ, *CHANGED])


def test_what_the_log_has_when_a_table_is_read_again_is_not_passed_over(database: str, tmp_path: Path) -> None:
    make(database, *NAMES)
    with Scene(tmp_path, database).set_tables(*EVERY) as scene:
        with scene.loader() as applying:
            assert scene.settled(applying)
        for name in NAMES:
            change(database, name)
        scene.wait_for_capture()
        scene.pipeline.ask("snapshot", *(f"public.{name}" for name in NAMES))
        with scene.loader() as applying:
            assert eventually(lambda: all(managed_table(applying, name).last_load for name in NAMES))
            assert scene.settled(applying)
            versions, changes = content(applying)
            assert versions == VERSIONS
            assert changes == Counter([*READ, *CHANGED, ("read", 1, 1), ("read", 2, 101)])


def test_what_was_written_after_a_rewrite_is_not_passed_over(database: str, tmp_path: Path) -> None:
    """A rewrite makes the table be loaded anew by itself; the log has what was written before that."""
    make(database, *NAMES)
    with Scene(tmp_path, database).set_tables(*EVERY) as scene:
        with scene.loader() as applying:
            assert scene.settled(applying)
        for name in NAMES:
            execute(database, f"ALTER TABLE {name} ALTER x TYPE int USING x + 1000")
            change(database, name)
        scene.wait_for_capture()
        with scene.loader() as applying:
            assert eventually(lambda: all(managed_table(applying, name).last_load for name in NAMES))
            assert scene.settled(applying)
            versions, changes = content(applying)
            assert [row for row in versions if row[0] == 7] == [(7, 7, False)]
            assert [row for row in versions if row[2]] == [(1, 1001, True), (2, 101, True)]
            assert [row for row in versions if row[0] == 2][:3] == [(2, 2, False), (2, 100, False), (2, 101, True)]
            assert changes == Counter([*READ, *CHANGED, ("read", 1, 1001), ("read", 2, 101)])


@pytest.mark.parametrize("stopped", [True, False], ids=["stopped", "not yet"])
def test_what_the_log_has_after_a_stop_is_not_passed_over(database: str, tmp_path: Path, stopped: bool) -> None:
    """A policy stops the table, or is about to; changes of the new shape follow, and a person has it loaded."""
    make(database, *NAMES)
    with Scene(tmp_path, database).set_tables(*EVERY, "evolution: {retype: stop, rewrite: stop}") as scene:
        with scene.loader() as applying:
            assert scene.settled(applying)
        for name in NAMES:
            execute(database, f"ALTER TABLE {name} ALTER x TYPE bigint")
            change(database, name)
        scene.wait_for_capture()
        if not stopped:
            scene.pipeline.ask("snapshot", *(f"public.{name}" for name in NAMES))
        with scene.loader() as applying:
            for name in NAMES if stopped else ():
                wait_for_state(applying, name, TableState.FAILED)
                scene.pipeline.ask("snapshot", f"public.{name}")
            assert eventually(lambda: all(managed_table(applying, name).last_load for name in NAMES))
            assert scene.settled(applying)
            versions, changes = content(applying)
            assert versions == VERSIONS
            assert changes == Counter([*READ, *CHANGED, ("read", 1, 1), ("read", 2, 101)])
