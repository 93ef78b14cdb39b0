"""`tailrace rebuild` beside a real server that goes on: the table comes back from its own versions and the log, and
from what is kept of its load when its folder is gone."""

from __future__ import annotations

import shutil
from pathlib import Path

from deltalake import DeltaTable

from tailrace.pipeline.report import TableState
from tests.support.loads import Scene, managed_table, wait_for_state
from tests.support.pipelines import execute

FILL = (
    "CREATE TABLE things (id int PRIMARY KEY, x int, large text)",
    "ALTER TABLE things ALTER large SET STORAGE EXTERNAL",
    "INSERT INTO things SELECT g, g, repeat('x', 4000) FROM generate_series(1, 200) g",
)


def test_a_wrecked_table_is_rebuilt_over_a_change_of_its_shape(database: str, tmp_path: Path) -> None:
    execute(database, *FILL)
    with Scene(tmp_path, database) as scene:
        with scene.loader() as applying:
            wait_for_state(applying, "things", TableState.LIVE)
            execute(database, "UPDATE things SET x = 0 WHERE id < 50", "UPDATE things SET id = 1000 WHERE id = 7")
            scene.assert_equal(applying, "things")
            path = managed_table(applying, "things").location.path
        execute(
            database,
            "ALTER TABLE things ADD COLUMN added int DEFAULT 5",
            "INSERT INTO things VALUES (2000, 1, 'y', 6)",
            "DELETE FROM things WHERE id = 8",
            "UPDATE things SET x = -1 WHERE id = 1000",
        )
        scene.wait_for_capture()
        DeltaTable(str(path)).delete("id > 100")
        done = scene.pipeline.ask("rebuild", "public.things")
        assert done.returncode == 0, done.stderr
        assert "of the log; it is at " in done.stdout
        scene.pipeline.assert_equal("things")  # nothing of it was read from the source
        with scene.loader() as applying:
            wait_for_state(applying, "things", TableState.LIVE)
            execute(database, "UPDATE things SET x = 3 WHERE id = 1000")
            scene.assert_equal(applying, "things")
        shutil.rmtree(path)
        done = scene.pipeline.ask("rebuild", "public.things")
        assert done.returncode == 0, done.stderr
        assert "rebuilt from the kept files of its last load" in done.stdout
        scene.pipeline.assert_equal("things")
        with scene.loader() as applying:
            wait_for_state(applying, "things", TableState.LIVE)
            execute(database, "UPDATE things SET x = 4 WHERE id = 1000")
            scene.assert_equal(applying, "things")
