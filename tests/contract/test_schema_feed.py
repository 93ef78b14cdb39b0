"""Every source's schemas are in the history before their first row is delivered."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tailrace.capture.port import Stream
from tailrace.model.batch import Window
from tailrace.model.evolution import ExistingValue, SchemaChangeKind
from tailrace.model.position import Lsn
from tailrace.model.schema import TableId
from tailrace.state.recorded_stream import RecordedStream
from tailrace.state.schema_history import SchemaEvent
from tailrace.state.schema_history_stores import FileSchemaHistory
from tests.support.benches import Bench, PostgresBench
from tests.support.runtimes import LogLoop


class Sink:
    """Requires each row's schema in the durable history when the row arrives."""

    def __init__(self, begin: Lsn, folder: Path) -> None:
        self.position, self.rows = begin, 0
        self._folder = folder

    def append(self, window: Window) -> None:
        durable = FileSchemaHistory(self._folder, read_only=True)
        for batch in window.batches:
            kept = durable.versions(batch.schema.table)
            assert batch.schema in [version.schema for version in kept]
        self.rows += window.rows
        self.position = window.end


class Fed:
    """The loop over a source with a history in files, until that many rows have arrived."""

    def __init__(self, bench: Bench, folder: Path) -> None:
        self._bench = bench
        self.history = FileSchemaHistory(folder)
        self.sink = Sink(bench.begin, folder)

    def catch_up(self, rows: int) -> None:
        def opened(after: Lsn) -> Stream:
            return RecordedStream(self._bench.capture.live(after), self.history)

        runtime = LogLoop(opened, self.sink, retry_seconds_max=240)
        runtime.run(lambda: self.sink.rows >= rows)
        assert self.sink.rows == rows


@pytest.fixture
def fed(bench: Bench, tmp_path: Path) -> Iterator[Fed]:
    made = Fed(bench, tmp_path / "schemas")
    yield made
    made.history.close()


def test_a_schema_is_durable_before_its_first_row_is_delivered(bench: Bench, fed: Fed) -> None:
    bench.write(("items", 1), ("others", 1))
    bench.write(("items", 2))
    fed.catch_up(3)
    bench.write(("items", 3))
    fed.catch_up(4)
    found = {table.name: fed.history.versions(table) for table in fed.history.tables()}
    assert {name: [version.event for version in kept] for name, kept in found.items()} == {
        "items": [SchemaEvent.CREATE],
        "others": [SchemaEvent.CREATE],
    }
    assert found["items"][0].position is not None
    assert found["items"][0].position > bench.begin  # type: ignore[operator] # both sources count in LSNs
    assert found["items"][0].time is not None


def test_the_history_has_the_schema_changes_of_a_database(postgres: PostgresBench, tmp_path: Path) -> None:
    table = TableId(postgres.schema, "items")
    fed = Fed(postgres, tmp_path / "schemas")
    with fed.history:
        postgres.write(("items", 1))
        postgres.execute(f"alter table {table} add note text default 'x'")
        postgres.execute(f"insert into {table} values (2)")
        fed.catch_up(2)
        postgres.execute(f"alter table {table} rename note to remark")
        postgres.execute(f"insert into {table} values (3)")
        fed.catch_up(3)
        postgres.execute(f"drop table {table}")
        postgres.execute(f"create table {table} (id int8 primary key)")
        postgres.execute(f"alter publication {postgres.schema} add table {table}")
        postgres.execute(f"insert into {table} values (4)")
        fed.catch_up(4)
        kept = fed.history.versions(table)
    assert [version.event.value for version in kept] == ["create", "alter", "alter", "drop", "create"]
    changes = [version.evolution.changes if version.evolution else () for version in kept]
    assert [[(change.kind, change.column) for change in found] for found in changes] == [
        [],
        [(SchemaChangeKind.ADD, "note")],
        [(SchemaChangeKind.RENAME, "remark")],
        [],
        [],
    ]
    assert (changes[1][0].existing_value, changes[1][0].constant) in {
        (ExistingValue.CONSTANT, "x"),
        (ExistingValue.UNKNOWN, None),
    }
    assert [version.ddl for version in kept] == [None] * 5, "PostgreSQL does not report the statement"
    positions = [version.position for version in kept if isinstance(version.position, Lsn)]
    assert len(positions) == 5
    assert positions == sorted(positions)
