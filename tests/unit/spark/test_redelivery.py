"""Rows of dead letters that were read again, and what they meet when they come into the table."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from tailrace.capture.postgres.snapshot import SnapshotReader
from tailrace.changelog.letters import Letters
from tailrace.spark.redelivery import DeliverWork, RereadWork, _keep, deliver_letters
from tests.support.changes import SHOP, update
from tests.support.quiet import THINGS, Quiet


def lettered(folder: Path) -> Quiet:
    """A table of which a change of row 2 is a dead letter, and the row as it was read for a replay."""
    made = Quiet(folder, on_bad_row="dead-letter")
    made.load([{"id": key, "n": 0} for key in (1, 2)])
    made.commit(update(2, unfit=("n",)))
    made.apply()
    nowhere = SnapshotReader("postgresql://127.0.0.1:1/x", None, None)
    work = RereadWork(log=made.settings.log.path, shape=SHOP, expected=made.cursor, reader=nowhere)
    _keep(work, pa.Table.from_pylist([{"id": 2, "n": 7}], pa.schema(SHOP.row_fields())), [1], {})
    return made


def delivery(quiet: Quiet) -> DeliverWork:
    place = quiet.lives().add(THINGS).place
    return DeliverWork(log=quiet.settings.log.path, place=place, shape=SHOP, expected=quiet.cursor)


def test_what_was_read_comes_in(tmp_path: Path) -> None:
    quiet = lettered(tmp_path)
    done = deliver_letters(delivery(quiet))
    assert (done.error, done.rows, done.letters, quiet.ns()) == (None, 1, 0, {1: 0, 2: 7})


def test_what_was_read_before_the_table_was_loaded_anew_is_read_again(tmp_path: Path) -> None:
    quiet = lettered(tmp_path)
    quiet.load_anew([{"id": 1, "n": 0}, {"id": 2, "n": 8}], "anew")
    done = deliver_letters(delivery(quiet))
    assert (done.error, done.again, quiet.ns()) == (None, True, {1: 0, 2: 8})
    assert Letters(quiet.settings.log.path, THINGS).any is False, "what the load has cleared is gone"
