"""The promises of every sink, as checks for your own implementation.

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

`SINK` is for all sinks. `EXACTLY_ONCE` is for a sink that stores `_seq` with its rows and so applies a batch once,
however often it arrives. `DURABLE` is for a sink whose rows outlive the process: it kills a process of its own
(`os.fork`) once a flush has returned. `MIRROR` is for a sink that keeps the last state of a table's rows: give `rows`
instead of `kept`.
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
SECRET = "a value that no reason may contain"


_LOOK_HINT = (
    "Give `kept`, a function that returns the `_seq` of every stored row. For a mirror give `rows`, a function "
    "that returns the rows of a schema."
)


@dataclass
class SinkAt:
    """A sink, and functions that read what it holds durably."""

    sink: Sink
    kept: Callable[[], Sequence[int]] | None = None
    """Returns `_seq` of every stored row, in the order of a reader. Unflushed rows may be left out."""
    rows: Callable[[TableSchema], Sequence[dict[str, Any]]] | None = None
    """Returns a table's current rows, in any order; for `MIRROR`."""

    def __post_init__(self) -> None:
        require_sink("sink", self.sink)
        for name in ("kept", "rows"):
            if (function := getattr(self, name)) is not None:
                require_callable(name, function, _LOOK_HINT)
        if self.kept is None and self.rows is None:
            raise ConfigError("the sink has no function that reads its rows", hint=_LOOK_HINT)

    def seqs(self) -> list[int]:
        """Return `_seq` of every stored row."""
        if self.kept is None:
            raise ConfigError("the sink has no function that reads the numbers of its rows", hint=_LOOK_HINT)
        return list(self.kept())

    def close(self) -> None:
        close = getattr(self.sink, "close", None)
        if callable(close):
            close()


Open = Callable[[], SinkAt]


@contextmanager
def _opened(at: Open) -> Iterator[SinkAt]:
    with open_at(at) as opened:
        require_instance("place", opened, SinkAt, "Return `SinkAt(sink, kept=…)` from the opening function.")
        yield opened


def batches(*transactions: Sequence[ChangeBatch]) -> list[Batch]:
    """Return each transaction as a runtime delivers it, in a batch of its own."""
    source = MemoryCapture()
    for transaction in transactions:
        source.commit(*transaction)
    return _delivered(CdcRuntime(source, MemoryCheckpointStore(), limits=Limits(rows=1)))


def _delivered(runtime: CdcRuntime[Any], *injected: ChangeBatch) -> list[Batch]:
    runtime.start()
    for change in injected:
        runtime.enqueue(change)
    delivered = []
    while (batch := runtime.poll(0.0)).rows:
        delivered.append(batch)
        runtime.commit(batch.ack)
    runtime.stop()
    return delivered


def _snapshots(before: ChangeBatch, after: ChangeBatch) -> list[Batch]:
    """Return a snapshot's rows, and again with a later change. The stream delivers that change afterwards."""
    source = MemoryCapture(keep_tables=True)
    source.commit(before)
    runtime = CdcRuntime(source, MemoryCheckpointStore(), snapshot_tables=[before.schema.table], limits=Limits(rows=2))
    read = _delivered(runtime)
    source.commit(after)
    runtime.control.snapshot(before.schema.table)
    return [*read, *_delivered(runtime)]


def _every_origin() -> list[Batch]:
    """Return batches of each origin. A snapshot, a split transaction, and injected rows with numbers below zero."""
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
    return _delivered(runtime, *_orders(90, 91))


def _orders(*ids: int) -> tuple[ChangeBatch]:
    return (changes(ORDERS, *(insert({"id": n, "status": "new", "note": SECRET}) for n in ids)),)


def _seqs(*delivered: Batch) -> list[int]:
    return [event.seq for batch in delivered for event in batch.events()]


def _put(at: SinkAt, *delivered: Batch) -> list[Rejected]:
    rejected = [item for batch in delivered for item in require_rejected(at.sink.write(batch))]
    at.sink.flush(True)
    return rejected


def _begins_empty(at: Open) -> None:
    """a new sink holds nothing, and a flush of nothing does no harm"""
    with _opened(at) as opened:
        opened.sink.flush(False)
        opened.sink.flush(True)
        require(opened.seqs() == [], "it holds rows that were never written")


def _keeps_what_was_flushed(at: Open) -> None:
    """once a flush has returned, every written row is stored, in order, whether more is waiting or not"""
    first, second, third = batches(_orders(1, 2), _orders(3), _orders(4, 5))
    with _opened(at) as opened:
        require(not opened.sink.write(first), "it does not take plain rows")
        opened.sink.flush(False)
        require(opened.seqs() == _seqs(first), "a flush while more is waiting made other rows durable")
        opened.sink.write(second)
        opened.sink.write(third)
        opened.sink.flush(True)
        require(opened.seqs() == _seqs(first, second, third), "two batches of one flush are not both stored")


def _survives_reopening(at: Open) -> None:
    """flushed rows survive a reopening, and further rows follow them"""
    first, second = batches(_orders(1, 2), _orders(3))
    with _opened(at) as opened:
        _put(opened, first)
    with _opened(at) as opened:
        require(opened.seqs() == _seqs(first), "other rows exist after a restart")
        _put(opened, second)
        require(opened.seqs() == _seqs(first, second), "later rows do not follow those from before the restart")


def _flushes_twice(at: Open) -> None:
    """a second flush changes nothing"""
    (only,) = batches(_orders(1, 2))
    with _opened(at) as opened:
        _put(opened, only)
        opened.sink.flush(True)
        require(opened.seqs() == _seqs(only), "the rows were written twice")


def _replaces_itself(at: Open) -> None:
    """a batch that arrives again before its flush is stored once: another sink failed, not this one"""
    first, second = batches(_orders(1, 2), _orders(3))
    with _opened(at) as opened:
        opened.sink.write(first)
        opened.sink.write(second)
        _put(opened, second)
        require(opened.seqs() == _seqs(first, second), "the repeated batch is stored twice, or replaced others")


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
    """every kind of change is stored, or rejected by its number and with a reason; nothing is silently left out"""
    delivered = _every_kind()
    with _opened(at) as opened:
        rejected = _put(opened, *delivered)
        kept, rejected_seqs = opened.seqs(), [item.seq for item in rejected]
        require(sorted(kept + rejected_seqs) == _seqs(*delivered), "rows are neither stored nor rejected, or both")
        reasons = [item.reason for item in rejected]
        require(all(reason and SECRET not in reason for reason in reasons), "a reason is empty, or contains a value")


def _takes_every_origin(at: Open) -> None:
    """rows are stored whatever their origin: a snapshot, a part of a transaction, or injected, with numbers below
    zero"""
    delivered = _every_origin()
    with _opened(at) as opened:
        for batch in delivered:
            rejected = _put(opened, batch)
            kept = set(opened.seqs()) | {item.seq for item in rejected}
            origin = f"{batch.kind.value}{', in part' if batch.partial else ''}"
            require(set(_seqs(batch)) <= kept, f"rows are neither stored nor rejected ({origin})")
        require(len(opened.seqs()) == len(set(opened.seqs())), "a row is stored twice")


def _outlives_a_kill(at: Open) -> None:
    """flushed rows exist after the process was killed"""
    first, second, unflushed = batches(_orders(1, 2), _orders(3), _orders(4))

    def act() -> None:
        opened = at()
        opened.sink.write(first)
        opened.sink.flush(False)
        opened.sink.write(second)
        opened.sink.flush(True)
        opened.sink.write(unflushed)

    run_and_kill(act)
    with _opened(at) as opened:
        require(opened.seqs()[:3] == _seqs(first, second), "flushed rows do not exist")
        _put(opened, unflushed)
        require(set(opened.seqs()) == set(_seqs(first, second, unflushed)), "later rows do not exist")


def _repeats_a_batch(at: Open, *, reopened: bool) -> None:
    first, second = batches(_orders(1, 2), _orders(3))
    with _opened(at) as opened:
        _put(opened, first)
        if not reopened:
            _put(opened, first, second)
            require(opened.seqs() == _seqs(first, second), "a repeated batch is stored twice")
            return
    with _opened(at) as opened:
        _put(opened, first, second)
        require(opened.seqs() == _seqs(first, second), "a repeated batch is stored twice")


def _once(at: Open) -> None:
    """a batch that arrives again after its flush is stored once"""
    _repeats_a_batch(at, reopened=False)


def _once_after_a_restart(at: Open) -> None:
    """a batch that arrives again after a restart is stored once"""
    _repeats_a_batch(at, reopened=True)


def _mirrors(at: Open, *transactions: Sequence[ChangeBatch]) -> None:
    """Compare the sink with `Mirror` after each transaction, and again after repeating the last one."""
    _mirrors_batches(at, batches(*transactions))


def _mirrors_batches(at: Open, delivered: list[Batch]) -> None:
    expected: dict[TableSchema, Mirror] = {}
    with _opened(at) as opened:
        if opened.rows is None:
            raise ConfigError("the sink has no function that reads a mirror's rows", hint="Give `rows` to `SinkAt`.")
        for batch in [*delivered, delivered[-1]]:
            _put(opened, batch)
            for event in batch.events():
                expected.setdefault(event.schema, Mirror()).apply(event.row_write())
            for schema, mirror in expected.items():
                stored, wanted = _sorted(schema, opened.rows(schema)), _sorted(schema, mirror.rows.values())
                require(stored == wanted, f"{schema.table} is {stored}, not {wanted}")


def _sorted(schema: TableSchema, rows: Iterable[Mapping[str, Any]]) -> list[str]:
    return sorted(repr({name: row.get(name) for name in schema.names}) for row in rows)


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
    """rows read by a snapshot are stored as they were read, also those that existed before"""
    rows = [insert({"id": n, "status": "new", "note": "large"}) for n in (1, 2, 3)]
    change = update({"id": 1, "status": "paid"}, unchanged=("note",))
    _mirrors_batches(at, _snapshots(changes(ORDERS, *rows), changes(ORDERS, change, delete({"id": 3}))))


def _unsent_is_not_null(at: Open) -> None:
    """an unsent value stays as it is; null is null"""
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
    """a key that changes takes unsent values along, also twice in one batch"""
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
    """a truncate removes the rows of its table, and of no other"""
    _mirrors(
        at,
        (changes(ORDERS, insert({"id": 1})), changes(PARTS, insert({"code": "a", "shop": 1}))),
        (changes(ORDERS, truncate(), insert({"id": 9})),),
    )


SINK: tuple[Check[SinkAt], ...] = suite(
    _begins_empty,
    _keeps_what_was_flushed,
    _survives_reopening,
    _flushes_twice,
    _replaces_itself,
    _takes_every_kind,
    _takes_every_origin,
)
EXACTLY_ONCE: tuple[Check[SinkAt], ...] = suite(_once, _once_after_a_restart)
DURABLE: tuple[Check[SinkAt], ...] = suite(_outlives_a_kill)
MIRROR: tuple[Check[SinkAt], ...] = suite(
    _last_state, _takes_a_snapshot, _unsent_is_not_null, _no_old_row, _moves_large_values, _truncates
)


def check_sink(place: Callable[[], Open], *more: Check[SinkAt]) -> None:
    """Run all checks of `SINK`, and others.

    `place` returns a function that opens a sink at an empty location. For a mirror without `kept` only the others are
    run, or `MIRROR`.
    """
    require_checks(more, "`*EXACTLY_ONCE`, `*DURABLE`, `*MIRROR`")
    with _opened(opener_at(place)) as opened:
        numbered = opened.kept is not None
    run((*SINK, *more) if numbered else (more or MIRROR), place)
