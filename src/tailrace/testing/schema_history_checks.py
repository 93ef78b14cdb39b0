"""The promises of every schema history, as checks for your own implementation.

```python
@pytest.mark.parametrize("check", SCHEMA_HISTORY, ids=str)
def test_my_history(check, tmp_path):
    check(lambda: MyHistory(tmp_path / "schemas", retention=Retention(keep_last=8)))
```

Configure the history under test to keep the last 8 versions of each table. `DURABLE` is for a history whose versions
outlive the process: it kills a process of its own (`os.fork`) once a version was recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pyarrow as pa

from tailrace.errors import ConfigError, StateTrimmed
from tailrace.model.evolution import SchemaChangeKind
from tailrace.model.position import Lsn
from tailrace.model.schema import Column, Identity, TableId, TableSchema
from tailrace.state.schema_history import SchemaEvent, SchemaHistory, SchemaVersion
from tailrace.testing.checks import Check, open_at, require, require_checks, require_refused, run, run_and_kill, suite

Open = Callable[[], SchemaHistory]

KEEP_LAST = 8
ORDERS = TableId("public", "orders")
_NOON = datetime(2026, 11, 16, 12, tzinfo=UTC)


def _schema(columns: int, *, table: TableId = ORDERS, relation: int = 1) -> TableSchema:
    """Return a table with that many columns besides its key."""
    named = [Column(name="id", source_type="bigint", type=pa.int64())]
    named += [Column(name=f"c{n}", source_type="text", type=pa.string()) for n in range(columns)]
    return TableSchema(table=table, relation=relation, columns=tuple(named), key=("id",), identity=Identity.KEY)


def _minute(n: int) -> datetime:
    return _NOON + timedelta(minutes=n)


def _numbers(versions: tuple[SchemaVersion, ...]) -> list[int]:
    return [version.version for version in versions]


def _begins_empty(at: Open) -> None:
    """a new history knows no table, and returns that without an error"""
    with open_at(at) as history:
        require(history.tables() == () and history.versions(ORDERS) == (), "it knows a table")
        require(history.latest(ORDERS) is None and history.at_time(ORDERS, _NOON) is None, "it knows a version")
        require(history.drop(ORDERS) is None, "it dropped what was never there")
        require_refused(lambda: history.at_version(ORDERS, 1), ConfigError, "it has a version of an unknown table")


def _returns_what_was_recorded(at: Open) -> None:
    """a recorded version is found as it was: schema, time, position, statement and changes"""
    with open_at(at) as history:
        history.record(_schema(1), time=_minute(1), position=Lsn(7))
        recorded = history.record(_schema(2), time=_minute(2), position=Lsn(9), ddl="ALTER TABLE orders ADD c1 text")
        require(
            (recorded.version, recorded.event, recorded.ddl)
            == (2, SchemaEvent.ALTER, "ALTER TABLE orders ADD c1 text"),
            "another version was recorded",
        )
        changes = recorded.evolution.changes if recorded.evolution else ()
        require(
            [(item.kind, item.column) for item in changes] == [(SchemaChangeKind.ADD, "c1")],
            "the changes were not recorded",
        )
        latest = history.latest(ORDERS)
        require(
            latest == recorded and latest is not None and latest.schema == _schema(2),
            "the newest version is another one",
        )
        require((recorded.time, recorded.position) == (_minute(2), Lsn(9)), "time or position is another one")


def _survives_reopening(at: Open) -> None:
    """recorded versions survive a reopening, and the numbers continue"""
    with open_at(at) as history:
        history.record(_schema(1), time=_minute(1))
        history.record(_schema(2), time=_minute(2), position=Lsn(5), ddl="x")
        kept = history.versions(ORDERS)
    with open_at(at) as history:
        require(history.versions(ORDERS) == kept and len(kept) == 2, "other versions are there now")
        require(history.record(_schema(2)).version == 2, "the current schema was taken for a new one")
        require(history.record(_schema(3)).version == 3, "the next one has another number")


def _records_once(at: Open) -> None:
    """recording a table's current schema again adds nothing"""
    with open_at(at) as history:
        first = history.record(_schema(1), time=_minute(1), position=Lsn(5))
        require(history.record(_schema(1), time=_minute(9), position=Lsn(8)) == first, "it is another version")
        require(_numbers(history.versions(ORDERS)) == [1], "it was added")


def _returns_to_an_old_schema(at: Open) -> None:
    """a schema that the table had before is a version of its own"""
    with open_at(at) as history:
        recorded = [history.record(_schema(columns), time=_minute(n)) for n, columns in enumerate((1, 2, 1))]
        require([version.version for version in recorded] == [1, 2, 3], "it was taken for the version before")
        require(
            recorded[-1].event is SchemaEvent.ALTER and history.latest(ORDERS) == recorded[-1], "the newest is another"
        )


def _by_number_and_time(at: Open) -> None:
    """a version is found by its number, and by any time at which it was in force"""
    with open_at(at) as history:
        recorded = [history.record(_schema(n), time=_minute(n)) for n in (1, 2, 3)]
        for version in recorded:
            require(history.at_version(ORDERS, version.version) == version, "another one has its number")
        require(history.at_time(ORDERS, _minute(0)) is None, "there was one before the first")
        require(history.at_time(ORDERS, _minute(2)) == recorded[1], "it is not in force from its own time on")
        later = _minute(2) + timedelta(seconds=59)
        require(history.at_time(ORDERS, later) == recorded[1], "it is not in force until the next one")
        require(history.at_time(ORDERS, _minute(60)) == recorded[2], "the last one is not in force for ever")
        require_refused(lambda: history.at_version(ORDERS, 4), ConfigError, "it has a version that was never recorded")


def _keeps_tables_separate(at: Open) -> None:
    """tables are independent, also where their names read alike"""
    one, other = TableId("a.b", "c"), TableId("a", "b.c")
    with open_at(at) as history:
        history.record(_schema(1, table=one, relation=1))
        history.record(_schema(2, table=other, relation=2))
        history.record(_schema(3, table=one, relation=1))
        require(history.tables() == tuple(sorted((one, other))), "other tables are known")
        require(
            _numbers(history.versions(one)) == [1, 2] and _numbers(history.versions(other)) == [1], "they were mixed up"
        )


def _drops(at: Open) -> None:
    """a dropped table stays known with its last schema, once; recreated, it is a new one"""
    with open_at(at) as history:
        history.record(_schema(1), time=_minute(1))
        dropped = history.drop(ORDERS, time=_minute(2), ddl="DROP TABLE orders")
        require(
            dropped is not None and (dropped.event, dropped.version) == (SchemaEvent.DROP, 2), "its drop is no version"
        )
        require(
            dropped is not None and dropped.schema == _schema(1) and dropped.ddl is not None,
            "its drop lost its last schema",
        )
        require(history.drop(ORDERS, time=_minute(3)) == dropped, "it was dropped twice")
        require(history.at_time(ORDERS, _minute(9)) == dropped, "it still exists after its drop")
        recreated = history.record(_schema(1), time=_minute(4))
        require((recreated.event, recreated.version) == (SchemaEvent.CREATE, 3), "a recreated table is not new")


def _recreated(at: Open) -> None:
    """a table with the same name and another number at the source was dropped and recreated"""
    with open_at(at) as history:
        history.record(_schema(1, relation=1))
        history.record(_schema(1, relation=2))
        events = [version.event for version in history.versions(ORDERS)]
        require(events == [SchemaEvent.CREATE, SchemaEvent.DROP, SchemaEvent.CREATE], "it was taken for the same one")


def _renamed(at: Open) -> None:
    """a table with another name and the same number at the source was renamed"""
    sold = TableId("public", "sold")
    with open_at(at) as history:
        history.record(_schema(1))
        new = history.record(replace(_schema(1), table=sold))
        old = history.latest(ORDERS)
        require(
            new.event is SchemaEvent.ALTER and new.evolution is not None, "the new name is not recorded as a change"
        )
        require(old is not None and old.event is SchemaEvent.DROP, "the old name still exists")
    with open_at(at) as history:
        require(history.record(replace(_schema(1), table=sold)) == new, "it was recorded twice")
        require(_numbers(history.versions(ORDERS)) == [1, 2], "the old name came back")


def _removes_the_oldest(at: Open) -> None:
    """the oldest versions beyond the limit are removed, and a request for one of them is an error"""
    with open_at(at) as history:
        for n in range(1, KEEP_LAST + 4):
            history.record(_schema(n), time=_minute(n))
        expected = list(range(4, KEEP_LAST + 4))
        require(_numbers(history.versions(ORDERS)) == expected, "others were kept")
    with open_at(at) as history:
        require(_numbers(history.versions(ORDERS)) == expected, "others are there after a restart")
        require_refused(lambda: history.at_version(ORDERS, 1), StateTrimmed, "it returned a removed version")
        require_refused(
            lambda: history.at_time(ORDERS, _minute(1)), StateTrimmed, "a removed version counts as one that never was"
        )


def _outlives_a_kill(at: Open) -> None:
    """what was recorded exists after the process was killed"""

    def act() -> None:
        history = at()
        history.record(_schema(1), time=_minute(1))
        history.record(_schema(2), time=_minute(2))
        history.drop(ORDERS, time=_minute(3))

    run_and_kill(act)
    with open_at(at) as history:
        events = [version.event for version in history.versions(ORDERS)]
        require(events == [SchemaEvent.CREATE, SchemaEvent.ALTER, SchemaEvent.DROP], "what was recorded does not exist")


SCHEMA_HISTORY: tuple[Check[SchemaHistory], ...] = suite(
    _begins_empty,
    _returns_what_was_recorded,
    _survives_reopening,
    _records_once,
    _returns_to_an_old_schema,
    _by_number_and_time,
    _keeps_tables_separate,
    _drops,
    _recreated,
    _renamed,
    _removes_the_oldest,
)
DURABLE: tuple[Check[SchemaHistory], ...] = suite(_outlives_a_kill)


def check_schema_history(place: Callable[[], Open], *more: Check[SchemaHistory]) -> None:
    """Run all checks, and others. `place` returns a function that opens a history at an empty location."""
    require_checks(more, "`*DURABLE`")
    run((*SCHEMA_HISTORY, *more), place)
