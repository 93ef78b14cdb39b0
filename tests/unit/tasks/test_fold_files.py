"""An apply range folded in tasks: however it is distributed to buckets, the result is that of one fold.

`test_fold_files_by_mode.py` tests specs other than a plain mirror.
"""

from __future__ import annotations

import gc
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.capture.postgres.snapshot import SnapshotReader
from tailrace.changelog.read.index import LogIndex
from tailrace.changelog.read.reader import ChangeLog
from tailrace.errors import BaseRowMissing
from tailrace.model.position import ZERO
from tailrace.model.schema import TableSchema
from tailrace.tables.fold.folded_changes import DELETE, UPSERT, FoldedChanges, folded_schema
from tailrace.tables.location import TableLocation
from tailrace.tables.port import AppliedPosition
from tailrace.tables.spec import PLAIN_MIRROR, TableSpec
from tailrace.tasks import fold_files
from tailrace.tasks.fold_files import FoldedFiles, fold_range
from tailrace.tasks.work import ApplyWork
from tests.support.changes import (
    KEYLESS,
    SHOP,
    Change,
    KeylessModel,
    Model,
    apply_in_memory,
    arrival,
    delete,
    insert,
    move,
    truncate,
    update,
)
from tests.support.logs import Diary, quick_folder

START = AppliedPosition(seq=-1, commit=0, position=ZERO)
BIG = ("big",)


def run_here(task: Any, works: Sequence[Any]) -> list[Any]:
    """Run the tasks one after another, in this process."""
    return [task(work) for work in works]


def folded(
    folder: Path, schema: TableSchema, commits: Sequence[Sequence[Change]], rows_max: int
) -> tuple[FoldedFiles, pa.Table]:
    """Return the folded files of these commits, and their rows."""
    folded_files = fold_range(apply_work(folder, schema, commits), folder / "scratch", run_here, rows_max)
    tables = [pq.ParquetFile(file).read() for file in folded_files.files]
    rows = [row for piece in tables for row in piece.to_pylist()]
    return folded_files, pa.Table.from_pylist(rows, schema=folded_schema(schema))


def apply_work(
    folder: Path,
    schema: TableSchema,
    commits: Sequence[Sequence[Change]],
    spec: TableSpec = PLAIN_MIRROR,
    times: Sequence[int] = (),
) -> ApplyWork:
    """Return the work of applying a log of these commits; make the scratch folder for it."""
    diary = Diary(folder / "log")
    for number, rows in enumerate(commits):
        diary.commit((schema, rows), at=times[number] if times else 0)
    diary.close()
    log = ChangeLog.open(diary.path)
    index = LogIndex(log)
    index.grow()
    slices = tuple(index.pending(1, -1, index.last_commit))
    (folder / "scratch").mkdir()
    return ApplyWork(
        table=schema.table,
        log=diary.path,
        slices=slices,
        location=TableLocation(path=folder / "t", log_id=log.log_id, spec=spec),
        schema=schema,
        expected=START,
        position_after=replace(START, seq=slices[-1].last_seq, commit=slices[-1].last),
    )


@contextmanager
def in_pieces_of(rows: int) -> Iterator[None]:
    """Distribute this many changes at a time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fold_files, "BATCH_ROWS_MAX", rows)
        yield


STEP = st.tuples(
    st.sampled_from(["insert"] * 5 + ["update"] * 4 + ["move"] * 6 + ["delete"] * 2 + ["truncate"]),
    st.integers(0, 6),
    st.integers(0, 6),
    st.sampled_from(["a", "b", None]),
    st.sampled_from([(), BIG, BIG, ("name", "big")]),
    st.integers(0, 3).map(lambda n: n == 0),
)
WRITTEN_THEN_MOVED = st.tuples(st.sampled_from(["insert", "update"]), STEP).map(
    lambda drawn: [(drawn[0], drawn[1][1], 0, "c", (), False), ("move", *drawn[1][1:])]
)
"""A row whose large value is set, followed by a key move without it; rare if every step is drawn alone."""
STEPS = st.lists(
    st.one_of(STEP.map(lambda step: [step]), STEP.map(lambda step: [step]), WRITTEN_THEN_MOVED), min_size=5, max_size=40
).map(lambda drawn: [step for some in drawn for step in some])


def in_commits(model: Model, steps: list[tuple[Any, ...]]) -> list[list[Change]]:
    """Apply the steps to the model; return their changes, cut into commits where the steps say so."""
    commits = [list[Change]()]
    for *step, cut in steps:
        commits[-1] += model.step(*step)
        if cut and commits[-1]:
            commits.append([])
    return [rows for rows in commits if rows]


@pytest.mark.slow
@given(STEPS, STEPS, st.integers(1, 5), st.integers(1, 4))
@settings(max_examples=80, deadline=None)
def test_any_history_folded_in_buckets_ends_in_the_rows_of_the_source(
    before: list[tuple[Any, ...]], steps: list[tuple[Any, ...]], rows_max: int, piece: int
) -> None:
    model = Model()
    for *step, _ in before:
        model.step(*step)
    table, commits = model.table(), in_commits(model, steps)
    if not commits:
        return
    with tempfile.TemporaryDirectory() as other, quick_folder(Path(other)) as folder, in_pieces_of(piece):
        folded_files, rows = folded(folder, model.schema, commits, rows_max)
    assert folded_files.changes == sum(map(len, commits))
    assert (
        apply_in_memory(model.schema, table, FoldedChanges(truncated=folded_files.truncated, rows=rows))
        == model.table()
    )


@pytest.mark.parametrize("piece", [1, 2, 3, 4])
def test_no_piece_ends_between_the_halves_of_a_key_move(tmp_path: Path, piece: int) -> None:
    """Alone in a piece, the delete of the old key would be the last change of that key.

    The row's earlier value would be lost: the row of the new key would take its large value from the table.
    """
    table = {(1,): {"id": 1, "name": "a", "big": "old", "n": 0}}
    rows = [update(1, name="a", big="new", n=0), *move(1, 2, unchanged=BIG, name="a", n=0), insert(3)]
    with in_pieces_of(piece):
        folded_files, distributed = folded(tmp_path, SHOP, [[insert(8), insert(9), *rows]], 2)
    assert folded_files.changes == 6
    assert apply_in_memory(SHOP, table, FoldedChanges(truncated=False, rows=distributed))[(2,)]["big"] == "new"


IMAGE = st.tuples(st.sampled_from([None, 0, 1]), st.sampled_from([None, "x"]))


@given(
    st.lists(
        st.tuples(st.sampled_from(["insert"] * 4 + ["update", "update", "delete", "truncate"]), IMAGE, IMAGE),
        min_size=5,
        max_size=30,
    ),
    st.integers(1, 4),
)
@settings(max_examples=30, deadline=None)
def test_any_keyless_history_folded_in_buckets_has_the_same_copies(steps: list[Any], rows_max: int) -> None:
    model = KeylessModel()
    commits = [rows for step in steps if (rows := model.step(*step))]
    if not commits:
        return
    with tempfile.TemporaryDirectory() as other, quick_folder(Path(other)) as folder:
        _, rows = folded(folder, KEYLESS, commits, rows_max)
    copies: Counter[Any] = Counter()
    for row in rows.to_pylist():
        copies[(row["c0"], row["c1"])] += row["copies"]
    assert {image: n for image, n in copies.items() if n} == {image: n for image, n in model.rows.items() if n}


def test_a_transaction_larger_than_a_task_folds_is_distributed_to_buckets(tmp_path: Path) -> None:
    rows = [insert(i, big=f"value {i}") for i in range(5_000)]
    folded_files, table = folded(tmp_path, SHOP, [rows], 700)
    assert (folded_files.upserts, folded_files.deletes, folded_files.changes, len(folded_files.files)) == (
        5_000,
        0,
        5_000,
        8,
    )
    assert sorted(table.column("c0").to_pylist()) == list(range(5_000))
    sizes = [pq.ParquetFile(file).metadata.num_rows for file in folded_files.files]
    assert max(sizes) < 2 * 700  # no task folds many more than it should


@pytest.mark.slow
def test_memory_does_not_grow_with_the_transaction(tmp_path: Path) -> None:
    wide = "x" * 1_000
    peaks = []
    for number, rows in enumerate((4_000, 32_000)):
        before = pa.default_memory_pool()
        pool = pa.proxy_memory_pool(before)
        folder = tmp_path / str(number)
        folder.mkdir()
        work = apply_work(folder, SHOP, [[insert(i, big=f"{i}{wide}") for i in range(rows)]])
        pa.set_memory_pool(pool)
        try:
            assert fold_range(work, folder / "scratch", run_here, 2_000).upserts == rows
            gc.collect()  # what came from this pool must not outlive it
        finally:
            pa.set_memory_pool(before)
        peaks.append(pool.max_memory())
    assert peaks[1] < 2 * peaks[0], peaks


def test_a_row_that_changes_often_does_not_fill_its_bucket(tmp_path: Path) -> None:
    folded_files, table = folded(tmp_path, SHOP, [[update(1, big=str(i), name="n") for i in range(3_000)]], 100)
    files = [file.read_bytes() for file in (tmp_path / "scratch").glob("*.arrow")]
    distributed = sum(pa.ipc.open_stream(file).read_all().num_rows for file in files)
    assert (folded_files.upserts, table.column("c2").to_pylist()) == (1, ["2999"])
    assert distributed < 100


def test_changes_before_a_truncate_are_not_distributed(tmp_path: Path) -> None:
    folded_files, table = folded(
        tmp_path, SHOP, [[insert(i) for i in range(50)], [truncate(), insert(7, big="after")]], 10
    )
    assert (folded_files.truncated, table.column("c0").to_pylist()) == (True, [7])


@pytest.mark.parametrize("rows_max", [1, 100])
def test_with_a_reader_no_change_is_refused_because_its_base_row_is_missing(tmp_path: Path, rows_max: int) -> None:
    commits = [
        [update(1, big="stale"), delete(1)],
        [update(1, unchanged=BIG), arrival(2, unchanged=BIG)],
        [*move(2, 3, unchanged=BIG), insert(4)],
    ]
    work = replace(apply_work(tmp_path, SHOP, commits), reader=SnapshotReader("", None, None))
    folded_files = fold_range(work, tmp_path / "scratch", run_here, rows_max)
    rows = [row for file in folded_files.files for row in pq.ParquetFile(file).read().to_pylist()]
    assert sorted((row["c0"], row["op"], row["absent"], row["base"]) for row in rows) == [
        (1, UPSERT, [2], None),
        (2, DELETE, None, None),
        (3, UPSERT, [2], None),
        (4, UPSERT, None, None),
    ]
    assert folded_files.unsent == {2}


@pytest.mark.parametrize("rows_max", [1, 100])
def test_with_dead_letters_enabled_a_change_without_its_base_row_is_refused(tmp_path: Path, rows_max: int) -> None:
    reads = replace(
        apply_work(tmp_path, SHOP, [[arrival(2, unchanged=BIG)] * 2]), reader=SnapshotReader("", None, None)
    )
    with pytest.raises(BaseRowMissing):
        fold_range(replace(reads, dead_letters_enabled=True), tmp_path / "scratch", run_here, rows_max)


@pytest.mark.parametrize("rows_max", [1, 100])
def test_an_error_of_one_task_is_raised(tmp_path: Path, rows_max: int) -> None:
    rows = [truncate(), insert(1), update(2, unchanged=BIG)]
    with pytest.raises(BaseRowMissing) as refused:
        folded(tmp_path, SHOP, [rows], rows_max)
    assert refused.value.hint
