"""Places in the log: by commit, position and time, also inside of a commit that holds many transactions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pytest

from tailrace.changelog.places import Place, ending_place, starting_place
from tailrace.changelog.reader import ChangeLog
from tailrace.changelog.writer import LogWriter
from tailrace.errors import ConfigError
from tailrace.model import change
from tailrace.model.batch import ChangeBatch, Window
from tailrace.model.position import Lsn
from tests.support.changes import SHOP, insert
from tests.support.logs import OTHER, quick_folder, seal
from tests.support.windows import SOURCE, batch

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
TABLES = frozenset([1, 2])
# Commits of transactions, each with the position it ended at and the second it was committed.
COMMITS = [
    [(110, 10), (120, 11), (130, 12)],
    [],
    [(310, 20)],
    [(410, 30), (420, 29), (430, 40)],
]


def transactions(*found: tuple[int, int]) -> list[ChangeBatch]:
    """One row of each transaction in each of two tables, as a source hands them over."""
    made = []
    for turn, schema in enumerate((SHOP, OTHER)):
        rows = batch(schema, *(insert(key) for key in range(len(found))))
        columns = {
            change.SEQ: [2 * place + turn for place in range(len(found))],
            change.POSITION: [str(Lsn(position)) for position, _ in found],
            change.COMMITTED_AT: [second * 1_000_000 for _, second in found],
        }
        data = rows.data
        for name, values in columns.items():
            place = data.schema.get_field_index(name)
            data = data.set_column(place, data.schema.field(place), pa.array(values, data.schema.field(place).type))
        made.append(replace(rows, data=data))
    return made


@pytest.fixture(params=[False, True], ids=["hot", "sealed"])
def log(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[ChangeLog]:
    with quick_folder(tmp_path) as folder:
        writer = LogWriter(folder / "log", SOURCE)
        for number, found in enumerate(COMMITS, start=1):
            batches = transactions(*found) if found else []
            writer.append(Window(
                start=writer.position, end=Lsn(number * 100 + 50), batches=tuple(batches), transactions=len(found),
                rows=2 * len(found), last_committed_at=found[-1][1] * 1_000_000 if found else None,
            ))  # fmt: skip
        writer.close()
        if request.param:
            seal(writer.path)
        yield ChangeLog.open(writer.path)


def at(seconds: float) -> datetime:
    return EPOCH + timedelta(seconds=seconds)


@pytest.mark.parametrize(
    ("position", "place"),
    [
        (100, Place(0)), (110, Place(0, 2)), (119, Place(0, 2)), (120, Place(0, 4)), (130, Place(1)), (150, Place(1)),
        (309, Place(2)), (310, Place(3)), (409, Place(3)), (420, Place(3, 12)), (430, Place(4)), (450, Place(4)),
    ],
)  # fmt: skip
def test_what_ended_up_to_a_position_lies_before_it(log: ChangeLog, position: int, place: Place) -> None:
    assert starting_place(log, Lsn(position), TABLES) == place
    assert ending_place(log, Lsn(position), TABLES) == place


@pytest.mark.parametrize(
    ("second", "begin", "end"),
    [
        (9, Place(0), Place(0)), (10, Place(0), Place(0, 2)), (11, Place(0, 2), Place(0, 4)),
        (11.5, Place(0, 4), Place(0, 4)), (12, Place(0, 4), Place(2)), (20, Place(2), Place(3)),
        (25, Place(3), Place(3)), (30, Place(3), Place(3, 12)), (41, Place(4), Place(4)),
    ],
)  # fmt: skip
def test_a_time_is_that_of_the_first_transaction_then_or_later(
    log: ChangeLog, second: float, begin: Place, end: Place
) -> None:
    assert starting_place(log, at(second), TABLES) == begin
    assert ending_place(log, at(second), TABLES) == end


def test_a_commit_is_taken_with_everything_in_it(log: ChangeLog) -> None:
    assert (starting_place(log, 3, TABLES), ending_place(log, 3, TABLES)) == (Place(2), Place(3))
    assert starting_place(log, 5, TABLES) == starting_place(log, "latest", TABLES) == Place(4)
    assert (starting_place(log, "earliest", TABLES), ending_place(log, "earliest", TABLES)) == (Place(0), Place(0))


@pytest.mark.parametrize("point", [0, 6, Lsn(451)])
def test_what_the_log_does_not_have_yet_is_told(log: ChangeLog, point: int | Lsn) -> None:
    for place in (starting_place, ending_place):
        with pytest.raises(ConfigError) as caught:
            place(log, point, TABLES)
        assert caught.value.hint
