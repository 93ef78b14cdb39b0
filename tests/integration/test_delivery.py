"""Batches delivered again, too early, or cut by a crash: the table is what the source was at the point it states."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace import failpoints
from tailrace.errors import ForeignWrite
from tailrace.tables.fold import fold
from tests.integration.test_delta_table import STEPS
from tests.support.changes import Change, Model, changes
from tests.support.engines import IS_SPARK, examples, open_table
from tests.support.mirrors import LOG, at, content

BATCHES_MAX = 3 if IS_SPARK else 6
PLACES = ("table.before_commit", "table.after_commit")
DELIVERIES = st.lists(
    st.tuples(st.integers(0, BATCHES_MAX - 1), st.sampled_from([None, *PLACES])), min_size=2, max_size=BATCHES_MAX + 2
)


class Died(BaseException):
    """What a crash is to whoever is called: nothing is caught, nothing is put right."""


class Delivery:
    """Batch after batch into one table, by an applier that may die in the middle of each."""

    def __init__(self, folder: Path, model: Model, batches: list[list[Change]]) -> None:
        self._folder, self._schema = folder, model.schema
        self._folded = [fold(model.schema, changes(model.schema, *rows)) for rows in batches]
        self.here = 0
        open_table(folder, LOG).load(model.schema, [], at(0))

    def deliver(self, number: int, dies: str | None, patch: pytest.MonkeyPatch) -> None:
        """One batch; it comes in if it is the next, is passed over if it was before, and refused if it is later."""

        def hit(place: str) -> None:
            if place == dies:
                raise Died

        patch.setattr(failpoints, "hit", hit)
        table = open_table(self._folder, LOG)
        try:
            done = table.apply(
                self._schema, self._folded[number], at(number * 10), at(number * 10 + 10), touch=True
            )
            assert (number <= self.here, done.committed) == (True, number == self.here)
            self.here = max(self.here, number + 1)
        except ForeignWrite:
            assert number > self.here, "only what comes too early"
        except Died:
            assert number == self.here, "there was something to commit"
            self.here += dies == PLACES[1]

    def rows(self) -> list[str]:
        found = open_table(self._folder, LOG).cursor()
        assert found == at(self.here * 10)
        return sorted(map(str, content(self._folder, self._schema)))


@given(STEPS, DELIVERIES)
@settings(max_examples=examples(24), deadline=None)
def test_whatever_the_delivery_the_table_is_what_the_source_was(
    steps: list[tuple[Any, ...]], deliveries: list[tuple[int, str | None]]
) -> None:
    model, batches, truth = Model(), list[list[Change]](), [list[str]()]
    size = -(-len(steps) // BATCHES_MAX)
    for start in range(0, len(steps), size):
        batches.append([row for *step, _ in steps[start : start + size] for row in model.step(*step)])
        truth.append(sorted(map(str, model.table().values())))
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        delivery = Delivery(Path(folder) / "t", model, batches)
        for number, dies in deliveries:
            delivery.deliver(number % len(batches), dies, patch)
            assert delivery.rows() == truth[delivery.here]
        for number in range(len(batches)):
            delivery.deliver(number, None, patch)
        assert delivery.here == len(batches)
        assert delivery.rows() == truth[-1]
