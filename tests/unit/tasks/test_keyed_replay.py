"""Rows of dead letters that were read again, and what they meet when they come into the table."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from tailrace.capture.postgres.snapshot import SnapshotReader
from tailrace.deadletters.store import DeadLetterBatch, DeadLetterStore
from tailrace.deadletters.store import DeadLetterOrigin as LetterOrigin
from tailrace.errors import ValueUnfit
from tailrace.model import change
from tailrace.model.position import ZERO
from tailrace.tables.spec import LoadOrigin, TableMode, TableSpec
from tailrace.tasks.keyed_replay import RefetchWork, ReplayRowsWork, _store_refetched, replay_rows
from tailrace.tasks.load_dead_letters import LoadRejects
from tests.support.changes import SHOP, record_batches, update
from tests.support.quiet import THINGS, Quiet

NOWHERE = SnapshotReader("postgresql://127.0.0.1:1/x", None, None)


def lettered(folder: Path, form: str = "") -> Quiet:
    """A table of which a change of row 2 is a dead letter, and the row as it was read for a replay."""
    made = Quiet(folder, on_bad_row="dead-letter", spec=form)
    made.load([{"id": key, "n": 0} for key in (1, 2)])
    made.commit(update(2, unfit=("n",)))
    made.apply()
    read(made, [1])
    return made


def read(made: Quiet, seqs: list[int]) -> None:
    """What a reading leaves that saw these letters."""
    work = RefetchWork(log=made.settings.log.path, schema=SHOP, expected=made.applied_position, reader=NOWHERE)
    _store_refetched(work, pa.Table.from_pylist([{"id": 2, "n": 7}], pa.schema(SHOP.row_fields())), seqs, {})


def delivery(quiet: Quiet) -> ReplayRowsWork:
    place = quiet.registry().add(THINGS).location
    return ReplayRowsWork(log=quiet.settings.log.path, location=place, schema=SHOP, expected=quiet.applied_position)


def test_what_was_read_comes_in(tmp_path: Path) -> None:
    quiet = lettered(tmp_path)
    done = replay_rows(delivery(quiet))
    assert (done.error, done.rows, done.dead_letters, quiet.ns()) == (None, 1, 0, {1: 0, 2: 7})


def test_what_was_read_before_the_table_was_loaded_anew_is_read_again(tmp_path: Path) -> None:
    quiet = lettered(tmp_path)
    quiet.reload([{"id": 1, "n": 0}, {"id": 2, "n": 8}], "anew")
    done = replay_rows(delivery(quiet))
    assert (done.error, done.needs_refetch, quiet.ns()) == (None, True, {1: 0, 2: 8})
    assert DeadLetterStore(quiet.settings.log.path, THINGS).has_any is False, "what the load has cleared is gone"


def test_a_version_that_was_read_comes_in_as_that_of_its_newest_letter_and_the_older_ones_stay(tmp_path: Path) -> None:
    quiet = lettered(tmp_path, "mode: history")
    quiet.commit(update(2, unchanged=("big",), n=7))
    quiet.apply()
    read(quiet, [1, 2])
    for _ in range(2):  # also where it died before the letters were cleared
        whole = pa.Table.from_pylist([{"id": 2, "n": 7}], pa.schema(SHOP.row_fields()))
        (bundle,) = DeadLetterStore(quiet.settings.log.path, THINGS).read_open(quiet.applied_position.seq, only=[2])
        quiet.table.upsert_rows(SHOP, whole, quiet.applied_position, bundle.changes)
    done = replay_rows(delivery(quiet))
    assert (done.error, done.rows, done.dead_letters, done.needs_refetch) == (None, 2, 1, False)
    found = sorted((row["_seq"], row["n"], row["_current"]) for row in quiet.content() if row["id"] == 2)
    assert found == [(0, 0, False), (2, 7, True)]
    first, last = sorted((row for row in quiet.content() if row["id"] == 2), key=lambda row: int(row["_seq"]))
    assert first["_valid_from"] <= first["_valid_to"] == last["_valid_from"], "times never go back"
    assert last["_valid_to"] is None
    mine = DeadLetterStore(quiet.settings.log.path, THINGS)
    assert ([seq for one in mine.read_open(2) for seq in one.seqs], mine.superseded(2)) == ([1], frozenset([1]))
    quiet.commit(update(2, unchanged=("big",), n=8))
    assert quiet.apply()[-1].dead_letters == 0, "what comes builds on it"


def test_a_version_that_a_load_could_not_bring_has_the_table_s_number_and_comes_in_once(tmp_path: Path) -> None:
    quiet = Quiet(tmp_path, on_bad_row="dead-letter", spec="mode: history")
    quiet.diary.commit()
    origin = LoadOrigin(seq=0, position="0/0", read_at=1_700_000_000_000_000)
    kept = LoadRejects(SHOP, TableSpec(mode=TableMode.HISTORY), origin, ZERO)
    (batch,) = record_batches(SHOP, [{"id": 2}])
    unfit = pa.array([[{"column": "n", "text": "NaN"}]], change.UNFIT_TYPE)
    assert [one.num_rows for one in kept.without_rejects([(batch, unfit)])] == [0]
    quiet.reload([{"id": 1, "n": 0}], "first", dead_letters=[DeadLetterBatch(schema=SHOP, rows=kept.dead_letters)])
    read(quiet, [-1])
    for _ in range(2):  # also where it died before the letters were cleared
        whole = pa.Table.from_pylist([{"id": 2, "n": 7}], pa.schema(SHOP.row_fields()))
        (bundle,) = DeadLetterStore(quiet.settings.log.path, THINGS).read_open(quiet.applied_position.seq, "first")
        quiet.table.upsert_rows(SHOP, whole, quiet.applied_position, bundle.changes)
    assert (replay_rows(delivery(quiet)).dead_letters, DeadLetterStore(quiet.settings.log.path, THINGS).has_any) == (
        0,
        False,
    )
    (row,) = [row for row in quiet.content() if row["id"] == 2]
    assert (row["n"], row["_seq"], row["_current"], row["_tx"] < 0) == (7, quiet.applied_position.seq, True, True)


def test_a_letter_that_fails_again_says_where_it_came_from(tmp_path: Path) -> None:
    quiet = lettered(tmp_path)
    mine, origin = DeadLetterStore(quiet.settings.log.path, THINGS), LetterOrigin(seq=4, position="0/4")
    (before,) = mine.read_open(quiet.applied_position.seq)
    mine.write(SHOP, quiet.applied_position.seq, before.changes, [ValueUnfit("it is no number")], [], origin=origin)
    work = RefetchWork(log=quiet.settings.log.path, schema=SHOP, expected=quiet.applied_position, reader=NOWHERE)
    _store_refetched(work, pa.schema(SHOP.row_fields()).empty_table(), [], {1: ValueUnfit("it still is none")})
    assert replay_rows(delivery(quiet)).dead_letters == 1
    (after,) = mine.read_open(quiet.applied_position.seq)
    assert (after.rows.column("_cause").to_pylist(), after.origin) == (["it still is none"], origin)
