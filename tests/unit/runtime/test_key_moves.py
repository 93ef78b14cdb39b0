"""A mirror that follows `row_write` equals the source, wherever batches end or are cut."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.capture.memory.source import MemoryCapture
from tailrace.model.mirror import Mirror
from tailrace.runtime.loop import CdcRuntime
from tailrace.runtime.output_batch import Limits, Transactions
from tailrace.state.checkpoint_stores import MemoryCheckpointStore
from tests.support.changes import COMPOSITE, SHOP, Change, Model, insert, move
from tests.support.windows import batch

POLLS_MAX = 400
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["insert", "update", "move", "move", "delete", "truncate"]),
        st.integers(0, 3),
        st.integers(0, 3),
        st.sampled_from(["x", "y"]),
        st.sampled_from([(), ("big",), ("big", "name")]),
    ),
    min_size=1,
    max_size=25,
)


@settings(max_examples=80)
@given(
    steps=STEPS, data=st.data(), rows=st.integers(1, 5), split=st.booleans(), part_rows=st.none() | st.integers(1, 4)
)
def test_lesson_21_no_large_value_is_lost_wherever_a_batch_ends(
    steps: list[tuple[str, int, int, str, tuple[str, ...]]],
    data: st.DataObject,
    rows: int,
    split: bool,
    part_rows: int | None,
) -> None:
    model, source = Model(), MemoryCapture(part_rows_max=part_rows, keep_tables=True)
    changes: list[Change] = []
    for step in steps:
        changes += model.step(*step)
        ended: bool = data.draw(st.booleans())
        if changes and ended:
            source.commit(batch(COMPOSITE, *changes))
            changes = []
    if changes:
        source.commit(batch(COMPOSITE, *changes))
    policy = Transactions.SPLIT if split else Transactions.WHOLE
    runtime = CdcRuntime(source, MemoryCheckpointStore(), limits=Limits(rows=rows, transactions=policy))
    runtime.start()
    mirror = Mirror()
    for _ in range(POLLS_MAX):
        polled = runtime.poll(0.0)
        events = list(polled.events())
        received = data.draw(st.integers(1, len(events))) if events else 0
        for event in events[:received]:
            mirror.apply(event.row_write())
        runtime.commit(polled.ack, rows=received)
        if runtime.position == source.end:
            break
    assert sorted(map(str, mirror.rows.values())) == sorted(map(str, model.table().values()))
    if source.end.value:
        kept_rows = source._view()[0].get(COMPOSITE.table).mirror
        assert kept_rows.rows == mirror.rows, "the source in memory has the same rows"
    runtime.force_stop()


def rows_after(*changes: Change) -> list[dict[str, object]]:
    mirror = Mirror()
    for event in batch(SHOP, *changes).events():
        mirror.apply(event.row_write())
    return list(mirror.rows.values())


def test_lesson_21_twice_in_one_batch() -> None:
    twice = (*move(1, 2, name="a", n=1, unchanged=("big",)), *move(2, 3, name="b", n=2, unchanged=("big",)))
    (row,) = rows_after(insert(1, name="a", big="large", n=0), *twice)
    assert row == {"id": 3, "name": "b", "big": "large", "n": 2}


def test_a_repeated_key_move_keeps_the_value_and_makes_no_half_row() -> None:
    """It holds also if the old key belongs to another row by then."""
    whole = (
        insert(1, name="a", big="large", n=0),
        *move(1, 2, name="a", n=1, unchanged=("big",)),
        *move(2, 3, name="a", n=2, unchanged=("big",)),
        insert(1, name="b", big="other", n=0),
    )
    assert rows_after(*whole, *whole[1:]) == rows_after(*whole)


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
@pytest.mark.parametrize("part_rows", [None, 1, 2, 3])
def test_no_batch_ends_between_the_two_rows_of_a_key_move(rows: int, part_rows: int | None) -> None:
    source = MemoryCapture(part_rows_max=part_rows)
    source.commit(batch(SHOP, insert(1), *move(1, 2, unchanged=("big",)), *move(2, 3, unchanged=("big",)), insert(4)))
    limits = Limits(rows=rows, transactions=Transactions.SPLIT)
    runtime = CdcRuntime(source, MemoryCheckpointStore(), limits=limits)
    runtime.start()
    seqs: list[int] = []
    while (polled := runtime.poll(0.0)).rows:
        assert polled.rows <= max(rows, 2)
        found = list(polled.events())
        assert found[0].moved_from is None, "the delete of its old key was in the batch before"
        seqs += [event.seq for event in found]
        runtime.commit(polled.ack)
    assert seqs == list(range(6))
    runtime.force_stop()
