"""Keyed replay: rows of dead letters that were refetched, and how they are written into the table."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa

from tailrace.capture.postgres.snapshot import SnapshotReader
from tailrace.deadletters.step_file import DeadLetterBatch, DeadLetterOrigin
from tailrace.deadletters.store import DeadLetterStore
from tailrace.errors import ValueUnfit
from tailrace.model import change
from tailrace.model.position import ZERO
from tailrace.tables.spec import LoadOrigin, TableMode, TableSpec
from tailrace.tasks.keyed_replay import RefetchWork, ReplayRowsWork, _store_refetched, replay_rows
from tailrace.tasks.load_dead_letters import LoadRejects
from tests.support.changes import SHOP, record_batches, update
from tests.support.quiet import THINGS, Quiet

NOWHERE = SnapshotReader("postgresql://127.0.0.1:1/x", None, None)


def with_dead_letter(folder: Path, spec: str = "") -> Quiet:
    """Return a table with a dead letter for row 2, which has been refetched for a replay."""
    quiet = Quiet(folder, on_bad_row="dead-letter", spec=spec)
    quiet.load([{"id": key, "n": 0} for key in (1, 2)])
    quiet.commit(update(2, unfit=("n",)))
    quiet.apply()
    read(quiet, [1])
    return quiet


def read(quiet: Quiet, seqs: list[int]) -> None:
    """Store row 2 as a refetch that saw these dead letters does."""
    work = RefetchWork(log=quiet.settings.log.path, schema=SHOP, expected=quiet.applied_position, reader=NOWHERE)
    _store_refetched(work, pa.Table.from_pylist([{"id": 2, "n": 7}], pa.schema(SHOP.row_fields())), seqs, {})


def replay_work(quiet: Quiet) -> ReplayRowsWork:
    location = quiet.registry().add(THINGS).location
    return ReplayRowsWork(log=quiet.settings.log.path, location=location, schema=SHOP, expected=quiet.applied_position)


def test_refetched_rows_are_written(tmp_path: Path) -> None:
    quiet = with_dead_letter(tmp_path)
    outcome = replay_rows(replay_work(quiet))
    assert (outcome.error, outcome.rows, outcome.dead_letters, quiet.ns()) == (None, 1, 0, {1: 0, 2: 7})


def test_rows_refetched_before_a_reload_are_refetched(tmp_path: Path) -> None:
    quiet = with_dead_letter(tmp_path)
    quiet.reload([{"id": 1, "n": 0}, {"id": 2, "n": 8}], "anew")
    outcome = replay_rows(replay_work(quiet))
    assert (outcome.error, outcome.needs_refetch, quiet.ns()) == (None, True, {1: 0, 2: 8})
    assert DeadLetterStore(quiet.settings.log.path, THINGS).has_any is False, (
        "the dead letter that the load cleared is removed"
    )


def test_in_history_mode_a_refetched_row_is_the_version_of_its_newest_dead_letter(tmp_path: Path) -> None:
    quiet = with_dead_letter(tmp_path, "mode: history")
    quiet.commit(update(2, unchanged=("big",), n=7))
    quiet.apply()
    read(quiet, [1, 2])
    for _ in range(2):  # the second time as after a kill before the dead letters were cleared
        rows = pa.Table.from_pylist([{"id": 2, "n": 7}], pa.schema(SHOP.row_fields()))
        (bundle,) = DeadLetterStore(quiet.settings.log.path, THINGS).read_open(quiet.applied_position.seq, only=[2])
        quiet.table.upsert_rows(SHOP, rows, quiet.applied_position, bundle.changes)
    outcome = replay_rows(replay_work(quiet))
    assert (outcome.error, outcome.rows, outcome.dead_letters, outcome.needs_refetch) == (None, 2, 1, False)
    versions = sorted((row["_seq"], row["n"], row["_current"]) for row in quiet.content() if row["id"] == 2)
    assert versions == [(0, 0, False), (2, 7, True)]
    first, last = sorted((row for row in quiet.content() if row["id"] == 2), key=lambda row: int(row["_seq"]))
    assert first["_valid_from"] <= first["_valid_to"] == last["_valid_from"], "times never go back"
    assert last["_valid_to"] is None
    store = DeadLetterStore(quiet.settings.log.path, THINGS)
    assert ([seq for item in store.read_open(2) for seq in item.seqs], store.superseded(2)) == ([1], frozenset([1]))
    quiet.commit(update(2, unchanged=("big",), n=8))
    assert quiet.apply()[-1].dead_letters == 0, "later changes build on it"


def test_in_history_mode_a_row_that_a_load_rejected_is_written_once(tmp_path: Path) -> None:
    quiet = Quiet(tmp_path, on_bad_row="dead-letter", spec="mode: history")
    quiet.diary.commit()
    origin = LoadOrigin(seq=0, position="0/0", read_at=1_700_000_000_000_000)
    rejects = LoadRejects(SHOP, TableSpec(mode=TableMode.HISTORY), origin, ZERO)
    (batch,) = record_batches(SHOP, [{"id": 2}])
    unfit = pa.array([[{"column": "n", "text": "NaN"}]], change.UNFIT_TYPE)
    assert [item.num_rows for item in rejects.without_rejects([(batch, unfit)])] == [0]
    quiet.reload([{"id": 1, "n": 0}], "first", dead_letters=[DeadLetterBatch(schema=SHOP, rows=rejects.dead_letters)])
    read(quiet, [-1])
    for _ in range(2):  # the second time as after a kill before the dead letters were cleared
        rows = pa.Table.from_pylist([{"id": 2, "n": 7}], pa.schema(SHOP.row_fields()))
        (bundle,) = DeadLetterStore(quiet.settings.log.path, THINGS).read_open(quiet.applied_position.seq, "first")
        quiet.table.upsert_rows(SHOP, rows, quiet.applied_position, bundle.changes)
    assert (replay_rows(replay_work(quiet)).dead_letters, DeadLetterStore(quiet.settings.log.path, THINGS).has_any) == (
        0,
        False,
    )
    (row,) = [row for row in quiet.content() if row["id"] == 2]
    assert (row["n"], row["_seq"], row["_current"], row["_tx"] < 0) == (7, quiet.applied_position.seq, True, True)


def test_a_dead_letter_that_fails_again_keeps_its_origin(tmp_path: Path) -> None:
    quiet = with_dead_letter(tmp_path)
    store, origin = DeadLetterStore(quiet.settings.log.path, THINGS), DeadLetterOrigin(seq=4, position="0/4")
    (before,) = store.read_open(quiet.applied_position.seq)
    store.write(SHOP, quiet.applied_position.seq, before.changes, [ValueUnfit("it is no number")], [], origin=origin)
    work = RefetchWork(log=quiet.settings.log.path, schema=SHOP, expected=quiet.applied_position, reader=NOWHERE)
    _store_refetched(work, pa.schema(SHOP.row_fields()).empty_table(), [], {1: ValueUnfit("it is still unfit")})
    assert replay_rows(replay_work(quiet)).dead_letters == 1
    (after,) = store.read_open(quiet.applied_position.seq)
    assert (after.rows.column("_cause").to_pylist(), after.origin) == (["it is still unfit"], origin)
