"""A stretch of the log folded in tasks: however it is dealt out, it comes to what one fold of it comes to.

Tables of other forms than a plain mirror: `test_fold_files_by_mode.py`.
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
from tailrace.tables.fold.fold import DELETE, UPSERT, FoldedChanges, folded_schema
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


def here(task: Any, works: Sequence[Any]) -> list[Any]:
    """Tasks, one after the other."""
    return [task(work) for work in works]


def folded(
    folder: Path, schema: TableSchema, commits: Sequence[Sequence[Change]], rows_max: int
) -> tuple[FoldedFiles, pa.Table]:
    """What comes of these commits, and the rows in the files."""
    found = fold_range(apply_work(folder, schema, commits), folder / "scratch", here, rows_max)
    pieces = [pq.ParquetFile(file).read() for file in found.files]
    rows = [row for piece in pieces for row in piece.to_pylist()]
    return found, pa.Table.from_pylist(rows, schema=folded_schema(schema))


def apply_work(
    folder: Path,
    schema: TableSchema,
    commits: Sequence[Sequence[Change]],
    form: TableSpec = PLAIN_MIRROR,
    times: Sequence[int] = (),
) -> ApplyWork:
    """A log of these commits, to be applied from its beginning; and a folder for what comes of them."""
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
        location=TableLocation(path=folder / "t", log_id=log.log_id, spec=form),
        schema=schema,
        expected=START,
        position_after=replace(START, seq=slices[-1].last_seq, commit=slices[-1].last),
    )


@contextmanager
def in_pieces_of(rows: int) -> Iterator[None]:
    """Changes are dealt out so few at a time."""
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
"""A row whose large value is set, and that moves without it: rare where every step is drawn by itself."""
STEPS = st.lists(
    st.one_of(STEP.map(lambda step: [step]), STEP.map(lambda step: [step]), WRITTEN_THEN_MOVED), min_size=5, max_size=40
).map(lambda drawn: [step for some in drawn for step in some])


def in_commits(model: Model, steps: list[tuple[Any, ...]]) -> list[list[Change]]:
    """What the steps do to the model, cut where they say so."""
    commits = [list[Change]()]
    for *step, cut in steps:
        commits[-1] += model.step(*step)
        if cut and commits[-1]:
            commits.append([])
    return [rows for rows in commits if rows]


@given(STEPS, STEPS, st.integers(1, 5), st.integers(1, 4))
@settings(max_examples=80, deadline=None)
def test_any_history_dealt_out_ends_in_the_source_s_rows(
    before: list[tuple[Any, ...]], steps: list[tuple[Any, ...]], rows_max: int, piece: int
) -> None:
    model = Model()
    for *step, _ in before:
        model.step(*step)
    table, commits = model.table(), in_commits(model, steps)
    if not commits:
        return
    with tempfile.TemporaryDirectory() as other, quick_folder(Path(other)) as folder, in_pieces_of(piece):
        found, rows = folded(folder, model.schema, commits, rows_max)
    assert found.changes == sum(map(len, commits))
    assert apply_in_memory(model.schema, table, FoldedChanges(truncated=found.truncated, rows=rows)) == model.table()


@pytest.mark.parametrize("piece", [1, 2, 3, 4])
def test_no_piece_ends_between_the_halves_of_a_move(tmp_path: Path, piece: int) -> None:
    """By itself the delete of the old key would be the last that counts of it, and what the row had before would be
    lost: the row that arrives would take its large value from the table."""
    table = {(1,): {"id": 1, "name": "a", "big": "old", "n": 0}}
    rows = [update(1, name="a", big="new", n=0), *move(1, 2, unchanged=BIG, name="a", n=0), insert(3)]
    with in_pieces_of(piece):
        found, dealt = folded(tmp_path, SHOP, [[insert(8), insert(9), *rows]], 2)
    assert found.changes == 6
    assert apply_in_memory(SHOP, table, FoldedChanges(truncated=False, rows=dealt))[(2,)]["big"] == "new"


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
def test_any_keyless_history_dealt_out_comes_to_the_same_copies(steps: list[Any], rows_max: int) -> None:
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


def test_a_transaction_larger_than_a_task_holds_is_dealt_out(tmp_path: Path) -> None:
    rows = [insert(i, big=f"value {i}") for i in range(5_000)]
    found, table = folded(tmp_path, SHOP, [rows], 700)
    assert (found.upserts, found.deletes, found.changes, len(found.files)) == (5_000, 0, 5_000, 8)
    assert sorted(table.column("c0").to_pylist()) == list(range(5_000))
    sizes = [pq.ParquetFile(file).metadata.num_rows for file in found.files]
    assert max(sizes) < 2 * 700  # no task folds many more than it should


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
            assert fold_range(work, folder / "scratch", here, 2_000).upserts == rows
            gc.collect()  # what came from this pool must not outlive it
        finally:
            pa.set_memory_pool(before)
        peaks.append(pool.max_memory())
    assert peaks[1] < 2 * peaks[0], peaks


def test_a_row_that_changes_again_and_again_does_not_fill_its_bucket(tmp_path: Path) -> None:
    found, table = folded(tmp_path, SHOP, [[update(1, big=str(i), name="n") for i in range(3_000)]], 100)
    files = [file.read_bytes() for file in (tmp_path / "scratch").glob("*.arrow")]
    dealt = sum(pa.ipc.open_stream(file).read_all().num_rows for file in files)
    assert (found.upserts, table.column("c2").to_pylist()) == (1, ["2999"])
    assert dealt < 100


def test_what_came_before_a_truncate_is_not_dealt_out(tmp_path: Path) -> None:
    found, table = folded(tmp_path, SHOP, [[insert(i) for i in range(50)], [truncate(), insert(7, big="after")]], 10)
    assert (found.truncated, table.column("c0").to_pylist()) == (True, [7])


@pytest.mark.parametrize("rows_max", [1, 100])
def test_where_rows_can_be_read_again_nothing_is_refused_for_want_of_a_base(tmp_path: Path, rows_max: int) -> None:
    commits = [
        [update(1, big="stale"), delete(1)],
        [update(1, unchanged=BIG), arrival(2, unchanged=BIG)],
        [*move(2, 3, unchanged=BIG), insert(4)],
    ]
    work = replace(apply_work(tmp_path, SHOP, commits), reader=SnapshotReader("", None, None))
    found = fold_range(work, tmp_path / "scratch", here, rows_max)
    rows = [row for file in found.files for row in pq.ParquetFile(file).read().to_pylist()]
    assert sorted((row["c0"], row["op"], row["absent"], row["base"]) for row in rows) == [
        (1, UPSERT, [2], None),
        (2, DELETE, None, None),
        (3, UPSERT, [2], None),
        (4, UPSERT, None, None),
    ]
    assert found.unsent == {2}


@pytest.mark.parametrize("rows_max", [1, 100])
def test_where_letters_are_kept_a_row_without_a_base_is_refused(tmp_path: Path, rows_max: int) -> None:
    reads = replace(
        apply_work(tmp_path, SHOP, [[arrival(2, unchanged=BIG)] * 2]), reader=SnapshotReader("", None, None)
    )
    with pytest.raises(BaseRowMissing):
        fold_range(replace(reads, dead_letters_enabled=True), tmp_path / "scratch", here, rows_max)


@pytest.mark.parametrize("rows_max", [1, 100])
def test_what_one_task_refuses_is_refused(tmp_path: Path, rows_max: int) -> None:
    rows = [truncate(), insert(1), update(2, unchanged=BIG)]
    with pytest.raises(BaseRowMissing) as refused:
        folded(tmp_path, SHOP, [rows], rows_max)
    assert refused.value.hint
