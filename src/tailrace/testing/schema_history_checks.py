"""What every schema history promises, as checks for one of your own.

```python
@pytest.mark.parametrize("check", SCHEMA_HISTORY, ids=str)
def test_my_history(check, tmp_path):
    check(lambda: MyHistory(tmp_path / "schemas", retention=Retention(keep_last=8)))
```

The history under test is to keep the last 8 versions of each table. `DURABLE` is for one whose versions outlive the
process: it kills a process of its own (`os.fork`) once a version was told.
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


def _shape(columns: int, *, table: TableId = ORDERS, relation: int = 1) -> TableSchema:
    """A table with so many columns beside its key."""
    named = [Column(name="id", source_type="bigint", type=pa.int64())]
    named += [Column(name=f"c{n}", source_type="text", type=pa.string()) for n in range(columns)]
    return TableSchema(table=table, relation=relation, columns=tuple(named), key=("id",), identity=Identity.KEY)


def _minute(n: int) -> datetime:
    return _NOON + timedelta(minutes=n)


def _numbers(versions: tuple[SchemaVersion, ...]) -> list[int]:
    return [version.version for version in versions]


def _begins_empty(at: Open) -> None:
    """a new history knows no table, and says so without an error"""
    with open_at(at) as history:
        require(history.tables() == () and history.versions(ORDERS) == (), "it knows a table")
        require(history.latest(ORDERS) is None and history.at_time(ORDERS, _NOON) is None, "it knows a version")
        require(history.drop(ORDERS) is None, "it dropped what was never there")
        require_refused(lambda: history.at_version(ORDERS, 1), ConfigError, "it has a version of no table")


def _gives_back(at: Open) -> None:
    """what was told is found as it was: shape, time, position, statement and what changed"""
    with open_at(at) as history:
        history.record(_shape(1), time=_minute(1), position=Lsn(7))
        made = history.record(_shape(2), time=_minute(2), position=Lsn(9), ddl="ALTER TABLE orders ADD c1 text")
        require(
            (made.version, made.event, made.ddl) == (2, SchemaEvent.ALTER, "ALTER TABLE orders ADD c1 text"),
            "another version was made",
        )
        changes = made.evolution.changes if made.evolution else ()
        require(
            [(item.kind, item.column) for item in changes] == [(SchemaChangeKind.ADD, "c1")], "what changed is not told"
        )
        found = history.latest(ORDERS)
        require(found == made and found is not None and found.schema == _shape(2), "the newest version is another one")
        require((made.time, made.position) == (_minute(2), Lsn(9)), "time or position is another one")


def _survives(at: Open) -> None:
    """what was told is there after it was opened again, and numbers go on"""
    with open_at(at) as history:
        history.record(_shape(1), time=_minute(1))
        history.record(_shape(2), time=_minute(2), position=Lsn(5), ddl="x")
        kept = history.versions(ORDERS)
    with open_at(at) as history:
        require(history.versions(ORDERS) == kept and len(kept) == 2, "other versions are there now")
        require(history.record(_shape(2)).version == 2, "the shape it has was taken for a new one")
        require(history.record(_shape(3)).version == 3, "the next one has another number")


def _tells_once(at: Open) -> None:
    """the shape that a table has already adds nothing"""
    with open_at(at) as history:
        first = history.record(_shape(1), time=_minute(1), position=Lsn(5))
        require(history.record(_shape(1), time=_minute(9), position=Lsn(8)) == first, "it is another version")
        require(_numbers(history.versions(ORDERS)) == [1], "it was added")


def _comes_back(at: Open) -> None:
    """a shape that the table had before is a version of its own"""
    with open_at(at) as history:
        made = [history.record(_shape(columns), time=_minute(n)) for n, columns in enumerate((1, 2, 1))]
        require([version.version for version in made] == [1, 2, 3], "it was taken for the version before")
        require(made[-1].event is SchemaEvent.ALTER and history.latest(ORDERS) == made[-1], "the newest is another")


def _by_number_and_time(at: Open) -> None:
    """a version is found by its number, and by any time at which it was in force"""
    with open_at(at) as history:
        made = [history.record(_shape(n), time=_minute(n)) for n in (1, 2, 3)]
        for version in made:
            require(history.at_version(ORDERS, version.version) == version, "another one has its number")
        require(history.at_time(ORDERS, _minute(0)) is None, "there was one before the first")
        require(history.at_time(ORDERS, _minute(2)) == made[1], "it is not in force from its own time on")
        later = _minute(2) + timedelta(seconds=59)
        require(history.at_time(ORDERS, later) == made[1], "it is not in force until the next one")
        require(history.at_time(ORDERS, _minute(60)) == made[2], "the last one is not in force for ever")
        require_refused(lambda: history.at_version(ORDERS, 4), ConfigError, "it has a version that was never made")


def _tables_apart(at: Open) -> None:
    """tables do not touch each other, also where their names read alike"""
    one, other = TableId("a.b", "c"), TableId("a", "b.c")
    with open_at(at) as history:
        history.record(_shape(1, table=one, relation=1))
        history.record(_shape(2, table=other, relation=2))
        history.record(_shape(3, table=one, relation=1))
        require(history.tables() == tuple(sorted((one, other))), "other tables are known")
        require(_numbers(history.versions(one)) == [1, 2] and _numbers(history.versions(other)) == [1], "they met")


def _drops(at: Open) -> None:
    """a dropped table stays known with its last shape, once; made again, it is a new one"""
    with open_at(at) as history:
        history.record(_shape(1), time=_minute(1))
        gone = history.drop(ORDERS, time=_minute(2), ddl="DROP TABLE orders")
        require(gone is not None and (gone.event, gone.version) == (SchemaEvent.DROP, 2), "its drop is no version")
        require(gone is not None and gone.schema == _shape(1) and gone.ddl is not None, "its drop lost its last shape")
        require(history.drop(ORDERS, time=_minute(3)) == gone, "it was dropped twice")
        require(history.at_time(ORDERS, _minute(9)) == gone, "it is there after it went")
        again = history.record(_shape(1), time=_minute(4))
        require((again.event, again.version) == (SchemaEvent.CREATE, 3), "one that is made again is not new")


def _made_anew(at: Open) -> None:
    """one with the same name and another number at the source was dropped and made anew"""
    with open_at(at) as history:
        history.record(_shape(1, relation=1))
        history.record(_shape(1, relation=2))
        events = [version.event for version in history.versions(ORDERS)]
        require(events == [SchemaEvent.CREATE, SchemaEvent.DROP, SchemaEvent.CREATE], "it was taken for the same one")


def _renamed(at: Open) -> None:
    """one with another name and the same number at the source was renamed"""
    sold = TableId("public", "sold")
    with open_at(at) as history:
        history.record(_shape(1))
        new = history.record(replace(_shape(1), table=sold))
        old = history.latest(ORDERS)
        require(new.event is SchemaEvent.ALTER and new.evolution is not None, "the new name is not told as a change")
        require(old is not None and old.event is SchemaEvent.DROP, "the old name is still there")
    with open_at(at) as history:
        require(history.record(replace(_shape(1), table=sold)) == new, "it was told twice")
        require(_numbers(history.versions(ORDERS)) == [1, 2], "the old name came back")


def _lets_go(at: Open) -> None:
    """of more versions than are kept the oldest go, and asking for one of those is an error"""
    with open_at(at) as history:
        for n in range(1, KEEP_LAST + 4):
            history.record(_shape(n), time=_minute(n))
        expected = list(range(4, KEEP_LAST + 4))
        require(_numbers(history.versions(ORDERS)) == expected, "others were kept")
    with open_at(at) as history:
        require(_numbers(history.versions(ORDERS)) == expected, "others are there after a restart")
        require_refused(lambda: history.at_version(ORDERS, 1), StateTrimmed, "it gave one that is gone")
        require_refused(lambda: history.at_time(ORDERS, _minute(1)), StateTrimmed, "what is gone was never there")


def _outlives_a_kill(at: Open) -> None:
    """what was told is there after the process was killed"""

    def act() -> None:
        history = at()
        history.record(_shape(1), time=_minute(1))
        history.record(_shape(2), time=_minute(2))
        history.drop(ORDERS, time=_minute(3))

    run_and_kill(act)
    with open_at(at) as history:
        events = [version.event for version in history.versions(ORDERS)]
        require(events == [SchemaEvent.CREATE, SchemaEvent.ALTER, SchemaEvent.DROP], "what was told is not there")


SCHEMA_HISTORY: tuple[Check[SchemaHistory], ...] = suite(
    _begins_empty,
    _gives_back,
    _survives,
    _tells_once,
    _comes_back,
    _by_number_and_time,
    _tables_apart,
    _drops,
    _made_anew,
    _renamed,
    _lets_go,
)
DURABLE: tuple[Check[SchemaHistory], ...] = suite(_outlives_a_kill)


def check_schema_history(place: Callable[[], Open], *more: Check[SchemaHistory]) -> None:
    """Run all checks, and others. `place` gives, for each, a way to open a history where there is none yet."""
    require_checks(more, "`*DURABLE`")
    run((*SCHEMA_HISTORY, *more), place)
