"""What others did to lake tables that nobody writes to at the source: it is told, and not called live."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tailrace.pipeline.points.consistent_point import build_point
from tailrace.pipeline.report import TableState
from tests.support.engines import IS_ICEBERG
from tests.support.loads import Local, Scene, managed_table, wait_for_state
from tests.support.others import MAINTENANCE, append, restore
from tests.support.pipelines import execute


@contextmanager
def quiet(database: str, folder: Path) -> Iterator[tuple[Scene, Local, Path]]:
    """A table that is live, has a version behind it, and is left alone by its source."""
    execute(database, "CREATE TABLE t (id int PRIMARY KEY, x int)", "INSERT INTO t VALUES (1, 1)")
    with Scene(folder, database) as scene, scene.loader() as applying:
        scene.assert_equal(applying, "t")
        execute(database, "UPDATE t SET x = 2")
        scene.assert_equal(applying, "t")
        yield scene, applying, folder / "lake" / "public" / "t"


def looked(applying: Local) -> tuple[TableState, str | None]:
    """What the table is, and why it stands still, once it has been looked at."""
    applying._foreign_write_watch._due = 0.0
    applying._foreign_write_watch.run_if_due()
    now = managed_table(applying, "t")
    return now.state, None if now.error is None else now.error.code


def test_a_quiet_table_that_others_wrote_to_is_not_live_and_part_of_no_point(database: str, tmp_path: Path) -> None:
    with quiet(database, tmp_path) as (scene, applying, lake):
        for maintain in MAINTENANCE:
            maintain(lake)
            assert looked(applying) == (TableState.LIVE, None)
        managed_table(applying, "t").lake_version = None  # as after a start, or after its files were joined
        append(lake)
        assert build_point(applying.registry, applying.registry.refresh_index()) is None
        assert looked(applying) == (TableState.FAILED, "foreign-write")
        (told,) = json.loads(scene.pipeline.ask("evolve", "--dry-run", "--json").stdout)["tables"]
        assert (told["action"], told["why"].partition(" (")[0]) == ("stop", "someone else changed the table")


@pytest.mark.skipif(IS_ICEBERG, reason="a catalog still names what lay there, and who sets a table back says it")
def test_a_quiet_table_that_was_moved_or_put_back_says_so_and_goes_on(database: str, tmp_path: Path) -> None:
    with quiet(database, tmp_path) as (scene, applying, lake):
        shutil.copytree(lake, tmp_path / "copy")
        execute(database, "UPDATE t SET x = 3", "INSERT INTO t VALUES (2, 2)")
        scene.assert_equal(applying, "t")
        lake.rename(tmp_path / "away")
        assert looked(applying) == (TableState.FAILED, "table-unusable")
        assert "tailrace retry FILE TABLE" in str(managed_table(applying, "t").error.hint)  # type: ignore[union-attr] # it failed
        (tmp_path / "away").rename(lake)
        retried(scene, applying)
        shutil.rmtree(lake)
        (tmp_path / "copy").rename(lake)
        assert looked(applying) == (TableState.FAILED, "foreign-write"), "it is older than it was"
        retried(scene, applying)
        assert len(applying.chunks) == 1, "the log has all that it lacked"
        restore(lake)
        assert looked(applying) == (TableState.FAILED, "foreign-write")


def retried(scene: Scene, applying: Local) -> None:
    """Have the table tried again, and see that it is what the source is."""
    applying.registry.load_store.request_retry(managed_table(applying, "t").table)
    wait_for_state(applying, "t", TableState.LIVE)
    scene.assert_equal(applying, "t")
