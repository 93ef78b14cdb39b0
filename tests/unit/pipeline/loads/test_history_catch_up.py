"""The log is applied up to a load point, even if the point is inside a commit."""

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
    """Write a commit, and one of two transactions, the first with a schema change; return where these end."""
    diary = Diary(folder)
    diary.commit((OLD, [insert(1)]))
    begin = diary.writer.position.value
    middle, end = Lsn(begin + 50), Lsn(begin + 100)
    batches = diary._batches([(OLD, [insert(2)]), (NEW, [insert(3), insert(4)])], str(end))
    ends = [[middle], [middle, end]]
    for i, batch in enumerate(batches):
        index = batch.data.schema.get_field_index(change.POSITION)
        texts = pa.array([str(at) for at in ends[i]])
        batches[i] = replace(batch, data=batch.data.set_column(index, batch.data.schema.field(index), texts))
    diary.writer.append(window(begin, end.value, *batches, transactions=2))
    diary.close()
    return middle, end


def write_log(folder: Path) -> tuple[Lsn, Lsn]:
    """Write a commit, and one of two transactions; return the end of the first, and the log's end."""
    diary = Diary(folder)
    diary.commit(inserts(1))
    begin = diary.writer.position.value
    middle, end = Lsn(begin + 50), Lsn(begin + 100)
    (batch,) = diary._batches([inserts(2, 3)], str(end))
    index = batch.data.schema.get_field_index(change.POSITION)
    positions = pa.array([str(middle), str(end)])
    data = batch.data.set_column(index, batch.data.schema.field(index), positions)
    diary.writer.append(window(begin, end.value, replace(batch, data=data), transactions=2))
    diary.close()
    return middle, end


@pytest.mark.parametrize("mode", [TableMode.APPEND, TableMode.HISTORY])
def test_rows_before_a_load_point_inside_a_commit_are_applied(tmp_path: Path, mode: TableMode) -> None:
    middle, end = write_log(tmp_path / "log")
    log = ChangeLog.open(tmp_path / "log")
    registry = TableRegistry(log, LakeLayout(root=tmp_path / "lake"))
    registry.refresh_index()
    location = TableLocation(path=tmp_path / "lake" / "t", log_id=log.log_id, spec=TableSpec(mode=mode))
    start = registry.applied_position_at(registry.index.end_of(1))
    location.open().load(SHOP, [], start)
    managed = ManagedTable(
        SHOP.table, location, state=TableState.LIVE, applied_position=location.open().applied_position(), schema=SHOP
    )
    managed.apply_suspended = True
    for point, rows in ((middle, 1), (end, 2)):
        rounds = 0
        while (apply_range := next_range_to(registry, managed, point)) is not None:
            rounds += 1
            assert rounds <= 2, "it makes no progress"
            assert managed.applied_position is not None
            outcome = apply_changes(
                ApplyWork(
                    table=managed.table,
                    log=log.path,
                    location=location,
                    slices=apply_range.slices,
                    schema=SHOP,
                    expected=managed.applied_position,
                    position_after=apply_range.position_after,
                    until=apply_range.until,
                )
            )
            assert outcome.error is None
            assert outcome.applied_position is not None
            assert outcome.schema is not None
            managed.record_commit(outcome.applied_position, outcome.schema, outcome.version)
        applied_position = location.open().applied_position()
        assert applied_position is not None
        assert (applied_position.position, location.open().rows()) == (point, rows)


@pytest.mark.parametrize("mode", [TableMode.APPEND, TableMode.HISTORY])
def test_rows_of_each_schema_in_the_commit_of_the_load_point_are_applied(tmp_path: Path, mode: TableMode) -> None:
    middle, end = write_log_of_two_shapes(tmp_path / "log")
    log = ChangeLog.open(tmp_path / "log")
    registry = TableRegistry(log, LakeLayout(root=tmp_path / "lake"))
    registry.refresh_index()
    location = TableLocation(path=tmp_path / "lake" / "t", log_id=log.log_id, spec=TableSpec(mode=mode))
    location.open().load(OLD, [], registry.applied_position_at(registry.index.end_of(1)))
    managed = ManagedTable(
        SHOP.table, location, state=TableState.LIVE, applied_position=location.open().applied_position(), schema=OLD
    )
    managed.apply_suspended = True
    for point, rows in ((middle, 2), (end, 3)):
        rounds = 0
        while (apply_range := next_range_to(registry, managed, point)) is not None:
            rounds += 1
            assert rounds <= 3, "it makes no progress"
            assert managed.applied_position is not None
            assert managed.schema is not None
            if apply_range.recast is not None:
                location.open().evolve(apply_range.recast, managed.applied_position)
                managed.record_commit(managed.applied_position, apply_range.recast.schema)
                continue
            outcome = apply_changes(
                ApplyWork(
                    table=managed.table,
                    log=log.path,
                    location=location,
                    slices=apply_range.slices,
                    schema=managed.schema,
                    expected=managed.applied_position,
                    position_after=apply_range.position_after,
                    until=apply_range.until,
                )
            )
            assert outcome.error is None
            assert outcome.applied_position is not None
            managed.record_commit(outcome.applied_position, managed.schema, outcome.version)
        applied_position = location.open().applied_position()
        assert applied_position is not None
        assert (applied_position.position, location.open().rows()) == (point, rows)
