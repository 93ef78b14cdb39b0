"""What every sink promises, as checks for one of your own.

```python
def place(tmp_path):
    def at():
        sink = MySink(tmp_path / "out")
        return SinkAt(sink, kept=lambda: my_reader(tmp_path / "out"))   # `_seq` of every row that is there
    return at

@pytest.mark.parametrize("check", SINK, ids=str)
def test_my_sink(check, tmp_path):
    check(place(tmp_path))
```

`SINK` is for all of them. `EXACTLY_ONCE` is for one that stores `_seq` beside its rows and so takes a batch once,
however often it comes. `DURABLE` is for one whose rows outlive the process: it kills a process of its own (`os.fork`)
once a flush has returned. `MIRROR` is for one that keeps the last state of a table's rows: give `rows` instead of
`kept`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from tailrace.capture.memory.source import MemoryCapture
from tailrace.errors import ConfigError
from tailrace.model.batch import ChangeBatch
from tailrace.model.mirror import Mirror
from tailrace.model.schema import TableSchema
from tailrace.runtime.loop import CdcRuntime
from tailrace.runtime.output_batch import Batch, Limits, Transactions
from tailrace.runtime.sinks import Rejected, Sink, require_rejected, require_sink
from tailrace.state.checkpoint_stores import MemoryCheckpointStore
from tailrace.testing.changes import changes, delete, insert, move, table, truncate, update
from tailrace.testing.checks import Check, open_at, opener_at, require, require_checks, run, run_and_kill, suite
from tailrace.validation import require_callable, require_instance

ORDERS = table("public.orders", id=pa.int64(), status=pa.string(), note=pa.string())
PARTS = table("public.parts", key=("shop", "code"), code=pa.string(), shop=pa.int32(), note=pa.string())
LOOSE = table("public.loose", key=(), a=pa.int64(), b=pa.string())
SECRET = "a value that no reason may tell"


_LOOK_HINT = (
    "Give `kept`, a function that tells the `_seq` of every row that is there; or for a mirror `rows`, one of a shape "
    "that tells its rows."
)


@dataclass
class SinkAt:
    """A sink, and a look at what it holds durably."""

    sink: Sink
    kept: Callable[[], Sequence[int]] | None = None
    """`_seq` of every row that is there, in the order of a reader; what is written and not flushed may be left out."""
    rows: Callable[[TableSchema], Sequence[dict[str, Any]]] | None = None
    """A table's rows as they are now, in any order; for `MIRROR`."""

    def __post_init__(self) -> None:
        require_sink("sink", self.sink)
        for what in ("kept", "rows"):
            if (look := getattr(self, what)) is not None:
                require_callable(what, look, _LOOK_HINT)
        if self.kept is None and self.rows is None:
            raise ConfigError("what the sink holds cannot be looked at", hint=_LOOK_HINT)

    def seqs(self) -> list[int]:
        """`_seq` of every row that is there."""
        if self.kept is None:
            raise ConfigError("the numbers of a sink's rows cannot be looked at", hint=_LOOK_HINT)
        return list(self.kept())

    def close(self) -> None:
        close = getattr(self.sink, "close", None)
        if callable(close):
            close()


Open = Callable[[], SinkAt]


@contextmanager
def _opened(at: Open) -> Iterator[SinkAt]:
    with open_at(at) as found:
        require_instance("place", found, SinkAt, "Have it open `SinkAt(sink, kept=…)`.")
        yield found


def batches(*transactions: Sequence[ChangeBatch]) -> list[Batch]:
    """Each transaction as a runtime hands it out, in a batch of its own."""
    source = MemoryCapture()
    for transaction in transactions:
        source.commit(*transaction)
    return _handed_out(CdcRuntime(source, MemoryCheckpointStore(), limits=Limits(rows=1)))


def _handed_out(runtime: CdcRuntime[Any], *injected: ChangeBatch) -> list[Batch]:
    runtime.start()
    for changed in injected:
        runtime.enqueue(changed)
    found = []
    while (batch := runtime.poll(0.0)).rows:
        found.append(batch)
        runtime.commit(batch.ack)
    runtime.stop()
    return found


def _snapshots(given: ChangeBatch, then: ChangeBatch) -> list[Batch]:
    """Rows that a snapshot reads; and once more, with what was changed then, before the stream tells of it."""
    source = MemoryCapture(keep_tables=True)
    source.commit(given)
    runtime = CdcRuntime(source, MemoryCheckpointStore(), snapshot_tables=[given.schema.table], limits=Limits(rows=2))
    read = _handed_out(runtime)
    source.commit(then)
    runtime.control.snapshot(given.schema.table)
    return [*read, *_handed_out(runtime)]


def _every_way() -> list[Batch]:
    """A snapshot's rows, a transaction in parts, and what was injected, which counts below zero."""
    source = MemoryCapture(keep_tables=True, part_rows_max=2)
    source.commit(*_orders(1, 2, 3))
    runtime = CdcRuntime(
        source,
        MemoryCheckpointStore(),
        snapshot_tables=[ORDERS.table],
        limits=Limits(rows=2, transactions=Transactions.SPLIT),
    )
    runtime.start()
    source.commit(*_orders(4, 5, 6, 7, 8))
    runtime.force_stop()
    return _handed_out(runtime, *_orders(90, 91))


def _orders(*ids: int) -> tuple[ChangeBatch]:
    return (changes(ORDERS, *(insert({"id": n, "status": "new", "note": SECRET}) for n in ids)),)


def _seqs(*given: Batch) -> list[int]:
    return [event.seq for batch in given for event in batch.events()]


def _put(at: SinkAt, *given: Batch) -> list[Rejected]:
    rejected = [item for batch in given for item in require_rejected(at.sink.write(batch))]
    at.sink.flush(True)
    return rejected


def _begins_empty(at: Open) -> None:
    """a new sink holds nothing, and a flush of nothing does no harm"""
    with _opened(at) as found:
        found.sink.flush(False)
        found.sink.flush(True)
        require(found.seqs() == [], "it holds rows that nobody wrote")


def _keeps_what_was_flushed(at: Open) -> None:
    """once a flush has returned every row that was written is there, in order, whether more is waiting or not"""
    first, second, third = batches(_orders(1, 2), _orders(3), _orders(4, 5))
    with _opened(at) as found:
        require(not found.sink.write(first), "it does not take plain rows")
        found.sink.flush(False)
        require(found.seqs() == _seqs(first), "a flush while more is waiting made other rows durable")
        found.sink.write(second)
        found.sink.write(third)
        found.sink.flush(True)
        require(found.seqs() == _seqs(first, second, third), "two batches of one flush are not both there")


def _survives(at: Open) -> None:
    """what was flushed is there after it was opened again, and more comes behind it"""
    first, second = batches(_orders(1, 2), _orders(3))
    with _opened(at) as found:
        _put(found, first)
    with _opened(at) as found:
        require(found.seqs() == _seqs(first), "other rows are there after a restart")
        _put(found, second)
        require(found.seqs() == _seqs(first, second), "what came after a restart is not behind it")


def _flushes_twice(at: Open) -> None:
    """a second flush changes nothing"""
    (only,) = batches(_orders(1, 2))
    with _opened(at) as found:
        _put(found, only)
        found.sink.flush(True)
        require(found.seqs() == _seqs(only), "the rows were written twice")


def _replaces_itself(at: Open) -> None:
    """a batch that comes again before it was flushed is there once: somebody else failed, not this sink"""
    first, second = batches(_orders(1, 2), _orders(3))
    with _opened(at) as found:
        found.sink.write(first)
        found.sink.write(second)
        _put(found, second)
        require(found.seqs() == _seqs(first, second), "what came again stands there twice, or drove out others")


def _every_kind() -> list[Batch]:
    return batches(
        (
            changes(ORDERS, insert({"id": 1, "status": "new", "note": SECRET}), insert({"id": 2})),
            changes(LOOSE, insert({"a": 1, "b": SECRET})),
        ),
        (
            changes(
                ORDERS,
                update({"id": 1, "status": "paid"}, unchanged=("note",)),
                move({"id": 1}, {"id": 3, "status": "paid"}, unchanged=("note",)),
                delete({"id": 2}),
            ),
            changes(LOOSE, update({"a": 2, "b": "y"}, before={"a": 1, "b": SECRET}), delete({"a": 2, "b": "y"})),
        ),
        (changes(ORDERS, truncate()),),
    )


def _takes_every_kind(at: Open) -> None:
    """every kind of change is taken, or rejected by its number and with a reason; nothing is silently left out"""
    given = _every_kind()
    with _opened(at) as found:
        rejected = _put(found, *given)
        kept, refused = found.seqs(), [item.seq for item in rejected]
        require(sorted(kept + refused) == _seqs(*given), "rows are neither there nor rejected, or both")
        told = [item.reason for item in rejected]
        require(all(reason and SECRET not in reason for reason in told), "a reason is empty, or tells a value")


def _takes_every_way(at: Open) -> None:
    """rows are taken whichever way they come: read by a snapshot, in a part of a transaction, or injected, which have
    numbers below zero"""
    given = _every_way()
    with _opened(at) as found:
        for batch in given:
            rejected = _put(found, batch)
            kept = set(found.seqs()) | {item.seq for item in rejected}
            ways = f"{batch.kind.value}{', in part' if batch.partial else ''}"
            require(set(_seqs(batch)) <= kept, f"rows are neither there nor rejected ({ways})")
        require(len(found.seqs()) == len(set(found.seqs())), "a row is there twice")


def _outlives_a_kill(at: Open) -> None:
    """what was flushed is there after the process was killed"""
    first, second, unflushed = batches(_orders(1, 2), _orders(3), _orders(4))

    def act() -> None:
        found = at()
        found.sink.write(first)
        found.sink.flush(False)
        found.sink.write(second)
        found.sink.flush(True)
        found.sink.write(unflushed)

    run_and_kill(act)
    with _opened(at) as found:
        require(found.seqs()[:3] == _seqs(first, second), "what was flushed is not there")
        _put(found, unflushed)
        require(set(found.seqs()) == set(_seqs(first, second, unflushed)), "what came behind it is not there")


def _comes_again(at: Open, *, reopened: bool) -> None:
    first, second = batches(_orders(1, 2), _orders(3))
    with _opened(at) as found:
        _put(found, first)
        if not reopened:
            _put(found, first, second)
            require(found.seqs() == _seqs(first, second), "a batch that came again is there twice")
            return
    with _opened(at) as found:
        _put(found, first, second)
        require(found.seqs() == _seqs(first, second), "a batch that came again is there twice")


def _once(at: Open) -> None:
    """a batch that comes again after its flush is there once"""
    _comes_again(at, reopened=False)


def _once_after_a_restart(at: Open) -> None:
    """a batch that comes again after a restart is there once"""
    _comes_again(at, reopened=True)


def _mirrors(at: Open, *transactions: Sequence[ChangeBatch]) -> None:
    """Hold the sink against `Mirror` after each transaction, and once more after the last one has come again."""
    _mirrors_batches(at, batches(*transactions))


def _mirrors_batches(at: Open, given: list[Batch]) -> None:
    expected: dict[TableSchema, Mirror] = {}
    with _opened(at) as found:
        if found.rows is None:
            raise ConfigError("a mirror's rows cannot be looked at", hint="Give `rows` to `SinkAt`.")
        for batch in [*given, given[-1]]:
            _put(found, batch)
            for event in batch.events():
                expected.setdefault(event.schema, Mirror()).apply(event.row_write())
            for shape, mirror in expected.items():
                have, want = _sorted(shape, found.rows(shape)), _sorted(shape, mirror.rows.values())
                require(have == want, f"{shape.table} is {have}, not {want}")


def _sorted(shape: TableSchema, rows: Iterable[Mapping[str, Any]]) -> list[str]:
    return sorted(repr({name: row.get(name) for name in shape.names}) for row in rows)


def _last_state(at: Open) -> None:
    """rows are inserted, changed and deleted by their key, also one of several columns"""
    _mirrors(
        at,
        (changes(ORDERS, insert({"id": 1, "status": "new"}), insert({"id": 2}), update({"id": 1, "status": None})),),
        (
            changes(PARTS, insert({"code": "a", "shop": 1}), insert({"code": "a", "shop": 2})),
            changes(ORDERS, delete({"id": 2})),
        ),
        (
            changes(PARTS, delete({"code": "a", "shop": 1})),
            changes(ORDERS, delete({"id": 1}), insert({"id": 1, "status": "again"})),
        ),
    )


def _takes_a_snapshot(at: Open) -> None:
    """rows that a snapshot has read are there as it has read them, also those that were there before"""
    rows = [insert({"id": n, "status": "new", "note": "large"}) for n in (1, 2, 3)]
    then = update({"id": 1, "status": "paid"}, unchanged=("note",))
    _mirrors_batches(at, _snapshots(changes(ORDERS, *rows), changes(ORDERS, then, delete({"id": 3}))))


def _absent_is_not_null(at: Open) -> None:
    """a value that was not sent stays as it is; null is null"""
    _mirrors(
        at,
        (changes(ORDERS, insert({"id": 1, "status": "new", "note": "large"})),),
        (changes(ORDERS, update({"id": 1, "status": None}, unchanged=("note",))),),
    )


def _no_old_row(at: Open) -> None:
    """a key that changes leaves no old row behind"""
    _mirrors(
        at,
        (changes(ORDERS, insert({"id": 1, "note": "x"})), changes(PARTS, insert({"code": "a", "shop": 1}))),
        (
            changes(ORDERS, move({"id": 1}, {"id": 2, "note": "x"})),
            changes(PARTS, move({"code": "a", "shop": 1}, {"code": "b", "shop": 1})),
        ),
    )


def _moves_large_values(at: Open) -> None:
    """a key that changes takes values along that were not sent, also twice in one batch"""
    _mirrors(
        at,
        (
            changes(ORDERS, insert({"id": 1, "note": "large"}), insert({"id": 5, "note": "other"})),
            changes(PARTS, insert({"code": "a", "shop": 1, "note": "large"})),
        ),
        (
            changes(
                ORDERS,
                move({"id": 1}, {"id": 2}, unchanged=("note",)),
                move({"id": 2}, {"id": 3}, unchanged=("note",)),
                insert({"id": 1, "note": "new"}),
            ),
            changes(PARTS, move({"code": "a", "shop": 1}, {"code": "b", "shop": 2}, unchanged=("note",))),
        ),
    )


def _truncates(at: Open) -> None:
    """a truncate takes the rows of its table, and of no other"""
    _mirrors(
        at,
        (changes(ORDERS, insert({"id": 1})), changes(PARTS, insert({"code": "a", "shop": 1}))),
        (changes(ORDERS, truncate(), insert({"id": 9})),),
    )


SINK: tuple[Check[SinkAt], ...] = suite(
    _begins_empty,
    _keeps_what_was_flushed,
    _survives,
    _flushes_twice,
    _replaces_itself,
    _takes_every_kind,
    _takes_every_way,
)
EXACTLY_ONCE: tuple[Check[SinkAt], ...] = suite(_once, _once_after_a_restart)
DURABLE: tuple[Check[SinkAt], ...] = suite(_outlives_a_kill)
MIRROR: tuple[Check[SinkAt], ...] = suite(
    _last_state, _takes_a_snapshot, _absent_is_not_null, _no_old_row, _moves_large_values, _truncates
)


def check_sink(place: Callable[[], Open], *more: Check[SinkAt]) -> None:
    """Run all checks of `SINK`, and others. `place` gives, for each, a way to open a sink where there is none yet. Of a
    mirror that keeps no numbers only the others are run, or `MIRROR`."""
    require_checks(more, "`*EXACTLY_ONCE`, `*DURABLE`, `*MIRROR`")
    with _opened(opener_at(place)) as found:
        numbered = found.kept is not None
    run((*SINK, *more) if numbered else (more or MIRROR), place)
