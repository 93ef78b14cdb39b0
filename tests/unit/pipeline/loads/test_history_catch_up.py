"""A table that keeps the past is brought to a load's point by the log, also where that lies inside a commit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from tailrace.changelog.read.reader import ChangeLog
from tailrace.model import change
from tailrace.model.catalogue_facts import CatalogueFacts, ColumnFacts, StorageFacts
from tailrace.model.position import Lsn
from tailrace.pipeline.loads.history_catch_up import next_range_to
from tailrace.pipeline.report import TableState
from tailrace.pipeline.tables.managed_table import ManagedTable
from tailrace.pipeline.tables.registry import TableRegistry
from tailrace.tables.location import LakeLayout, TableLocation
from tailrace.tables.spec import TableMode, TableSpec
from tailrace.tasks.apply import apply_changes
from tailrace.tasks.work import ApplyWork
from tests.support.changes import SHOP, insert
from tests.support.logs import WIDER, Diary, inserts
from tests.support.windows import window

NUMBERED = ColumnFacts(number=1, nullable=True, default=None, fast_default=None, definition_version=1)
OF_SHOP = CatalogueFacts(
    columns=tuple(replace(NUMBERED, number=i + 1) for i in range(len(SHOP.columns))),
    columns_ever=len(SHOP.columns),
    storage=(StorageFacts(relation=SHOP.relation or 0, name="public.things", file=5, attached=False),),
)
OLD = replace(SHOP, facts=OF_SHOP)
NEW = replace(
    WIDER,
    facts=replace(
        OF_SHOP, columns=(*OF_SHOP.columns, replace(NUMBERED, number=9, definition_version=2)), columns_ever=9
    ),
)
"""The same table after a column was added."""


def write_log_of_two_shapes(folder: Path) -> tuple[Lsn, Lsn]:
    """A commit, and one of two transactions with a change of the shape in the first of them; where these end."""
    diary = Diary(folder)
    diary.commit((OLD, [insert(1)]))
    begin = diary.writer.position.value
    middle, end = Lsn(begin + 50), Lsn(begin + 100)
    batches = diary._batches([(OLD, [insert(2)]), (NEW, [insert(3), insert(4)])], str(end))
    ends = [[middle], [middle, end]]
    for i, made in enumerate(batches):
        place = made.data.schema.get_field_index(change.POSITION)
        texts = pa.array([str(at) for at in ends[i]])
        batches[i] = replace(made, data=made.data.set_column(place, made.data.schema.field(place), texts))
    diary.writer.append(window(begin, end.value, *batches, transactions=2))
    diary.close()
    return middle, end


def write_log(folder: Path) -> tuple[Lsn, Lsn]:
    """A commit, and one of two transactions; the end of the first of these, and the log's."""
    diary = Diary(folder)
    diary.commit(inserts(1))
    begin = diary.writer.position.value
    middle, end = Lsn(begin + 50), Lsn(begin + 100)
    (batch,) = diary._batches([inserts(2, 3)], str(end))
    place = batch.data.schema.get_field_index(change.POSITION)
    positions = pa.array([str(middle), str(end)])
    data = batch.data.set_column(place, batch.data.schema.field(place), positions)
    diary.writer.append(window(begin, end.value, replace(batch, data=data), transactions=2))
    diary.close()
    return middle, end


@pytest.mark.parametrize("mode", [TableMode.APPEND, TableMode.HISTORY])
def test_what_lies_before_the_point_in_its_commit_is_applied(tmp_path: Path, mode: TableMode) -> None:
    middle, end = write_log(tmp_path / "log")
    log = ChangeLog.open(tmp_path / "log")
    registry = TableRegistry(log, LakeLayout(root=tmp_path / "lake"))
    registry.refresh_index()
    place = TableLocation(path=tmp_path / "lake" / "t", log_id=log.log_id, spec=TableSpec(mode=mode))
    start = registry.applied_position_at(registry.index.end_of(1))
    place.open().load(SHOP, [], start)
    managed = ManagedTable(
        SHOP.table, place, state=TableState.LIVE, applied_position=place.open().applied_position(), schema=SHOP
    )
    managed.apply_suspended = True
    for point, rows in ((middle, 1), (end, 2)):
        turns = 0
        while (stretch := next_range_to(registry, managed, point)) is not None:
            turns += 1
            assert turns <= 2, "it comes no further"
            assert managed.applied_position is not None
            outcome = apply_changes(
                ApplyWork(
                    table=managed.table,
                    log=log.path,
                    location=place,
                    slices=stretch.slices,
                    schema=SHOP,
                    expected=managed.applied_position,
                    position_after=stretch.position_after,
                    until=stretch.until,
                )
            )
            assert outcome.error is None
            assert outcome.applied_position is not None
            assert outcome.schema is not None
            managed.record_commit(outcome.applied_position, outcome.schema, outcome.version)
        cursor = place.open().applied_position()
        assert cursor is not None
        assert (cursor.position, place.open().rows()) == (point, rows)


@pytest.mark.parametrize("mode", [TableMode.APPEND, TableMode.HISTORY])
def test_rows_of_each_shape_in_the_commit_of_the_point_are_applied(tmp_path: Path, mode: TableMode) -> None:
    middle, end = write_log_of_two_shapes(tmp_path / "log")
    log = ChangeLog.open(tmp_path / "log")
    registry = TableRegistry(log, LakeLayout(root=tmp_path / "lake"))
    registry.refresh_index()
    place = TableLocation(path=tmp_path / "lake" / "t", log_id=log.log_id, spec=TableSpec(mode=mode))
    place.open().load(OLD, [], registry.applied_position_at(registry.index.end_of(1)))
    managed = ManagedTable(
        SHOP.table, place, state=TableState.LIVE, applied_position=place.open().applied_position(), schema=OLD
    )
    managed.apply_suspended = True
    for point, rows in ((middle, 2), (end, 3)):
        turns = 0
        while (stretch := next_range_to(registry, managed, point)) is not None:
            turns += 1
            assert turns <= 3, "it comes no further"
            assert managed.applied_position is not None
            assert managed.schema is not None
            if stretch.recast is not None:
                place.open().evolve(stretch.recast, managed.applied_position)
                managed.record_commit(managed.applied_position, stretch.recast.schema)
                continue
            outcome = apply_changes(
                ApplyWork(
                    table=managed.table,
                    log=log.path,
                    location=place,
                    slices=stretch.slices,
                    schema=managed.schema,
                    expected=managed.applied_position,
                    position_after=stretch.position_after,
                    until=stretch.until,
                )
            )
            assert outcome.error is None
            assert outcome.applied_position is not None
            managed.record_commit(outcome.applied_position, managed.schema, outcome.version)
        cursor = place.open().applied_position()
        assert cursor is not None
        assert (cursor.position, place.open().rows()) == (point, rows)
