"""Rejected changes of an Iceberg table: tasks that cannot ask the table store them, and a job corrects them.

`tests/unit/tasks/test_apply_with_dead_letters.py` asks what is the same for every table; `make engines` runs it for
Iceberg too.
"""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from tailrace.capture.postgres.snapshot import SnapshotReader
from tailrace.tasks import keyed_replay
from tailrace.tasks.apply import advance_table
from tailrace.tasks.keyed_replay import RefetchWork, ReplayRowsWork, replay_rows
from tests.support.changes import SHOP, insert, move, update
from tests.support.engines import only_iceberg, spark_engine
from tests.support.quiet import Quiet
from tests.unit.tasks.test_fold_files_by_mode import pending

pytestmark = only_iceberg

BIG = ("big",)


def test_what_cannot_be_taken_is_set_aside_and_put_right_by_spark(tmp_path: Path) -> None:
    form = "soft_delete: true, partition_by: [name], rules: {public.things: {columns: {id: key}}}"
    quiet = Quiet(tmp_path, on_bad_row="dead-letter", spec=form, table_format="iceberg")
    quiet.load([{"id": key, "name": "n", "big": "x", "n": 0} for key in (1, 2, 3)])
    changes = [
        update(1, unfit=("n",)),
        update(2, n=2),
        *move(3, 4, n=3, unchanged=BIG),
        update(7, n=7, unchanged=BIG),
        insert(8, name="", n=8),
        update(7, n=8, unchanged=BIG),
    ]
    work = pending(quiet, changes, 3)
    (outcome,) = spark_engine().run(advance_table, [work])
    assert (outcome.error, outcome.dead_letters) == (None, 4)
    assert numbers(quiet) == {1: 0, 2: 2, 3: 0, 4: 3}
    asked = RefetchWork(
        log=work.log, schema=SHOP, expected=quiet.applied_position, reader=SnapshotReader("", None, None)
    )
    now = pa.Table.from_pylist([{"id": 1, "name": "now", "big": "y", "n": 7}], pa.schema(SHOP.row_fields()))
    keyed_replay._store_refetched(asked, now, [1], {})
    deliver = ReplayRowsWork(log=work.log, location=work.location, schema=SHOP, expected=quiet.applied_position)
    (done,) = spark_engine().run(replay_rows, [deliver])
    assert (done.error, done.rows, done.dead_letters) == (None, 1, 3)
    assert done.version == work.location.open_for_reading().version()
    assert numbers(quiet) == {1: 7, 2: 2, 3: 0, 4: 3}


def numbers(quiet: Quiet) -> dict[int, int]:
    return {row["key"]: row["n"] for row in quiet.content()}
