"""Folding in tasks for every mode: however a range is distributed to buckets, the result is that of one fold."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.deadletters.store import DeadLetterStore
from tailrace.errors import BaseRowMissing, DeadLettersFull, ValueUnfit
from tailrace.model.schema import TableSchema
from tailrace.tables.fold.by_mode import fold_by_mode
from tailrace.tables.fold.folded_changes import FoldedChanges
from tailrace.tables.spec import TableMode, TableSpec
from tailrace.tasks import dead_letters, fold_files
from tailrace.tasks.apply import read_changes
from tailrace.tasks.dead_letters import ApplyStep, split_by_mode
from tailrace.tasks.fold_files import FoldedFiles, fold_range
from tailrace.tasks.fold_rejects import StoreRejectsWork, store_task_rejects
from tailrace.tasks.work import ApplyWork
from tests.support.changes import KEYLESS, SHOP, Change, Model, delete, insert, truncate, update
from tests.support.logs import quick_folder
from tests.support.quiet import THINGS, Quiet
from tests.unit.tasks.test_fold_files import BIG, STEPS, apply_work, in_commits, run_here

NAMED = (("big", "large"), ("id", "number"))
SPECS = [
    TableSpec(metadata=("_seq", "_op"), renamed_columns=NAMED),
    TableSpec(soft_delete=True, metadata=("_op", "_seq", "_committed_at")),
    TableSpec(mode=TableMode.HISTORY, metadata=("_op", "_committed_at"), renamed_columns=NAMED),
    TableSpec(mode=TableMode.APPEND, renamed_columns=NAMED),
]  # fmt: skip


def rows_of(folded_files: FoldedFiles) -> list[str]:
    pieces = [pq.ParquetFile(file).read() for file in folded_files.files]
    return sorted(str(row) for piece in pieces for row in piece.to_pylist())


def expected(work: ApplyWork, folded: FoldedChanges) -> list[str]:
    names = [
        name for name in folded.rows.column_names if name != "base" or work.location.spec.stored_schema(work.schema).key
    ]
    return sorted(map(str, folded.rows.select(names).to_pylist()))


@pytest.mark.slow
@pytest.mark.parametrize("spec", SPECS, ids=str)
@given(steps=STEPS, rows_max=st.integers(1, 5), times=st.lists(st.integers(0, 9), min_size=60, max_size=60))
@settings(max_examples=30, deadline=None)
def test_folding_in_buckets_gives_the_rows_of_one_fold_in_every_mode(
    spec: TableSpec, steps: list[tuple[Any, ...]], rows_max: int, times: list[int]
) -> None:
    model = Model()
    for number in range(3):
        model.step("insert", number, number, "begun", ())
    if not (commits := in_commits(model, steps)):
        return
    with tempfile.TemporaryDirectory() as other, quick_folder(Path(other)) as folder:
        work = apply_work(folder, model.schema, commits, spec, times)
        folded_files = fold_range(work, folder / "scratch", run_here, rows_max)
        folded_once = fold_by_mode(spec, model.schema, read_changes(work))
        assert rows_of(folded_files) == expected(work, folded_once)
    assert (folded_files.truncated, folded_files.ended, folded_files.clock) == (
        folded_once.truncated,
        folded_once.truncate_effect,
        folded_once.latest_time,
    )
    assert folded_files.changes == sum(map(len, commits))
    assert folded_files.only_adds == (
        folded_once.truncate_effect is None and not folded_files.deletes and not folded_once.partial
    )


def test_in_append_mode_every_change_of_a_keyless_table_is_a_row_and_none_is_distributed(tmp_path: Path) -> None:
    rows = [insert({"a": 1, "b": "x"}), delete({"a": 1, "b": "x"}), truncate(), insert({"a": 1, "b": "x"})]
    work = apply_work(tmp_path, KEYLESS, [rows, rows], TableSpec(mode=TableMode.APPEND))
    folded_files = fold_range(work, tmp_path / "scratch", run_here, 4)
    assert (folded_files.upserts, folded_files.deletes, folded_files.changes, len(folded_files.files)) == (8, 0, 8, 2)
    assert not list((tmp_path / "scratch").glob("*.arrow"))


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("rows_max", [1, 100])
def test_an_unfit_value_is_refused_in_every_mode(tmp_path: Path, spec: TableSpec, rows_max: int) -> None:
    work = apply_work(tmp_path, SHOP, [[insert(1), insert(2)], [update(1, unfit=("n",))]], spec)
    with pytest.raises(ValueUnfit) as refused:
        fold_range(work, tmp_path / "scratch", run_here, rows_max)
    assert refused.value.hint


@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.parametrize("rows_max", [1, 100])
def test_a_value_that_cannot_be_a_partition_is_refused_in_every_mode(
    tmp_path: Path, spec: TableSpec, rows_max: int
) -> None:
    spec = replace(spec, partition_by=("name",))
    work = apply_work(tmp_path, SHOP, [[insert(1, name="a"), insert(2)], [update(1, name="")], [delete(2)]], spec)
    with pytest.raises(ValueUnfit, match="cannot be a partition value") as refused:
        fold_range(work, tmp_path / "scratch", run_here, rows_max)
    assert refused.value.fields["column"] == "name"


def test_partition_values_in_the_key_are_listed_while_they_are_few(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = replace(SHOP, key=("id", "name"))
    rows = [insert({"id": key, "name": "ab"[key % 2]}) for key in range(6)]
    commits = [rows[:3], rows[3:], [delete({"id": 0, "name": "c"})]]
    work = apply_work(tmp_path, schema, commits, TableSpec(partition_by=("name",)))
    assert fold_range(work, tmp_path / "scratch", run_here, 3).partitions == {"name": frozenset("abc")}
    monkeypatch.setattr(fold_files, "PARTITIONS_MAX", 2)
    for rows_max in (3, 100):
        scratch = tmp_path / f"scratch-{rows_max}"
        scratch.mkdir()
        assert fold_range(work, scratch, run_here, rows_max).partitions == {"name": None}


# --- rejected changes --------------------------------------------------------------------------------------

BAD = ("n",)
CHANGE = st.tuples(
    st.sampled_from(["insert", "update", "update", "partial", "bad", "bad", "delete", "truncate"]), st.integers(1, 6)
)


def change(kind: str, key: int) -> Change:
    return {
        "insert": insert(key, n=1),
        "update": update(key, n=2),
        "partial": update(key, n=3, unchanged=BIG),
        "bad": update(key, unfit=BAD),
        "delete": delete(key),
        "truncate": truncate(),
    }[kind]


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec", ["soft_delete: true, metadata: [_seq]", "metadata: [_seq]", "mode: history", "mode: append"]
)
@given(steps=st.lists(CHANGE, min_size=4, max_size=30), rows_max=st.integers(1, 4))
@settings(max_examples=15, deadline=None)
def test_tasks_reject_the_changes_that_one_task_would_reject(spec: str, steps: list[Any], rows_max: int) -> None:
    with tempfile.TemporaryDirectory() as other, quick_folder(Path(other)) as folder:
        quiet = Quiet(folder, on_bad_row="dead-letter", spec=spec)
        quiet.load([{"id": key, "name": "n", "big": "x", "n": 0} for key in (1, 2, 3)])
        quiet.commit(update(1, unfit=BAD), update(2, unfit=BAD))
        assert quiet.apply()[-1].dead_letters == 2
        work = pending(quiet, [change(*step) for step in steps], rows_max)
        compare_with_one(work, folder / "scratch", rows_max, {1, 2})


@given(
    steps=st.lists(st.tuples(st.sampled_from(["in", "out", "bad", "gone", "worse", "better"]), st.integers(1, 3)),
                   min_size=4, max_size=30),
    rows_max=st.integers(1, 4),
)  # fmt: skip
@settings(max_examples=15, deadline=None)
def test_tasks_reject_the_keyless_rows_that_one_task_would_reject(steps: list[Any], rows_max: int) -> None:
    with tempfile.TemporaryDirectory() as other, quick_folder(Path(other)) as folder:
        quiet = Quiet(folder, on_bad_row="dead-letter")
        quiet.load([{"a": key, "b": "x"} for key in (1, 2, 3)], schema=KEYLESS)
        quiet.commit(insert({"a": 1}, unfit=("b",)), insert({"a": 2}, unfit=("b",)), schema=KEYLESS)
        assert quiet.apply()[-1].dead_letters == 2
        work = pending(quiet, [keyless_change(*step) for step in steps], rows_max, KEYLESS)
        compare_with_one(work, folder / "scratch", rows_max, {1, 2})


def keyless_change(kind: str, key: int) -> Change:
    good, bad = {"a": key, "b": "x"}, {"a": key, "b": None}
    return {
        "in": insert(good),
        "out": delete(good),
        "bad": insert(bad, unfit=("b",)),
        "gone": delete(bad, unfit=("b",)),
        "worse": update(bad, unfit=("b",), before=good),
        "better": update(good, unfit=("_before.b",), before=bad),
    }[kind]


def compare_with_one(work: ApplyWork, scratch: Path, rows_max: int, before: set[int]) -> None:
    """Assert that tasks fold and reject what one task with all changes would."""
    store, spec = DeadLetterStore(work.log, THINGS), work.location.spec
    step = ApplyStep(
        log=work.log,
        schema=work.schema,
        spec=spec,
        expected=work.expected,
        position_after=work.position_after,
        dead_letters_enabled=True,
    )
    split = split_by_mode(partial(work.location.open().keys_exist, work.schema), step, read_changes(work), store)
    folded_files = fold_range(work, scratch, run_here, rows_max, splits_rejects=True)
    folded = fold_by_mode(spec, work.schema, split.changes)
    assert rows_of(folded_files) == expected(work, folded)
    if folded_files.rejects:
        assert store_task_rejects(StoreRejectsWork(work=work, rejects=folded_files.rejects)) is None
    open_letters = store.read_open(work.position_after.seq)
    open_seqs = {*before, *split.dead_letters.column("_seq").to_pylist()} - set(split.cleared.tolist())
    assert {seq for bundle in open_letters for seq in bundle.seqs} == open_seqs
    assert store.superseded(work.position_after.seq) == frozenset(split.superseded.tolist())
    assert all(bundle.seqs == sorted(bundle.seqs) for bundle in open_letters)
    assert sum(len(item.causes) for item in folded_files.rejects) == split.dead_letters.num_rows


def pending(quiet: Quiet, changes: list[Change], size: int, schema: TableSchema = SHOP) -> ApplyWork:
    """Commit the changes, `size` per commit; return the work of applying them."""
    for start in range(0, len(changes), size):
        quiet.commit(*changes[start : start + size], schema=schema)
    registry = quiet.registry()
    managed = registry.add(THINGS)
    apply_range = registry.next_range(managed, registry.index.last_commit)
    assert apply_range is not None
    (quiet.file.parent / "scratch").mkdir()
    return ApplyWork(
        table=THINGS,
        log=quiet.settings.log.path,
        location=managed.location,
        slices=apply_range.slices,
        schema=schema,
        expected=quiet.applied_position,
        position_after=apply_range.position_after,
        dead_letters_enabled=True,
    )


@pytest.mark.slow
def test_too_many_dead_letters_of_all_tasks_together_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_letters, "DEAD_LETTERS_MAX", 3)
    quiet = Quiet(tmp_path, on_bad_row="dead-letter")
    quiet.load([{"id": key, "name": "n", "big": "x", "n": 0} for key in range(6)])
    work = pending(quiet, [update(key, unfit=BAD) for key in range(6)], 2)
    folded_files = fold_range(work, tmp_path / "scratch", run_here, 2, splits_rejects=True)
    refused = store_task_rejects(StoreRejectsWork(work=work, rejects=folded_files.rejects))
    assert isinstance(refused, DeadLettersFull)
    assert not DeadLetterStore(work.log, THINGS).has_any, "a refused step stores nothing"


def test_each_dead_letter_keeps_its_own_cause(tmp_path: Path) -> None:
    quiet = Quiet(tmp_path, on_bad_row="dead-letter")
    quiet.load([])
    work = pending(quiet, [update(key, unfit=BAD) if key % 2 else update(key, unchanged=BIG) for key in range(8)], 2)
    folded_files = fold_range(work, tmp_path / "scratch", run_here, 2, splits_rejects=True)
    assert store_task_rejects(StoreRejectsWork(work=work, rejects=folded_files.rejects)) is None
    (bundle,) = DeadLetterStore(work.log, THINGS).read_open(work.position_after.seq)
    codes = bundle.rows.column("_cause_code").to_pylist()
    assert codes == [BaseRowMissing.code, ValueUnfit.code] * 4
    assert bundle.changes.column("id").to_pylist() == list(range(8))
    assert pa.types.is_struct(bundle.changes.schema.field("_before").type)
