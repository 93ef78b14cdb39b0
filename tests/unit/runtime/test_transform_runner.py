"""Rules in the runtime: equal for snapshot, stream and injected rows; a halt blocks what follows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.capture.memory.source import MemoryCapture, batch_of
from tailrace.capture.port import HasTimeline, Stream
from tailrace.errors import AckRefused, ConfigError, RuleInvalid, SinkError, SinkUnready, TransformFailed
from tailrace.model.batch import ChangeBatch
from tailrace.model.change import Operation
from tailrace.model.mirror import Mirror
from tailrace.model.position import Lsn
from tailrace.model.schema import TableSchema
from tailrace.runtime import observers, snapshots
from tailrace.runtime.intake import ReadAheadStream
from tailrace.runtime.loop import CdcRuntime
from tailrace.runtime.observers import Fact
from tailrace.runtime.output_batch import Batch, BatchKind, Limits, Transactions
from tailrace.runtime.sinks import MemorySink
from tailrace.state.checkpoint_stores import MemoryCheckpointStore
from tailrace.state.recorded_stream import RecordedStream
from tailrace.state.schema_history import MemorySchemaHistory
from tailrace.testing.changes import changes, insert, move, table
from tailrace.transforms.rules import (
    Cast,
    Compute,
    Encrypt,
    Filter,
    Mask,
    Outbox,
    Rename,
    Route,
    Rule,
    Sha256,
    Transforms,
    Unwrap,
)
from tailrace.transforms.transform_plan import DeadLetter
from tailrace.transforms.transformed_stream import TransformedStream
from tests.support.runtimes import keys_of, until
from tests.support.transforms import PEOPLE, person, plan_of

NUMBERS = Cast(name="numbers", columns=("mail",), to="int32")
LENIENT = NUMBERS.model_copy(update={"on_error": "dead-letter"})
GERMANS = Filter(name="germans", where="country == 'DE'")
TABLE = PEOPLE.table


def people(*given: tuple[int, str, str]) -> ChangeBatch:
    return batch_of(PEOPLE, *[(Operation.INSERT, person(key, mail, "1.00", land)) for key, mail, land in given])


def some(*keys: int, land: str = "DE") -> ChangeBatch:
    return people(*[(key, f"mail{key}@x", land) for key in keys])


@pytest.fixture
def source() -> MemoryCapture:
    return MemoryCapture(keep_tables=True, chunk_rows=10)


@pytest.fixture
def store() -> MemoryCheckpointStore:
    return MemoryCheckpointStore()


def started(source: MemoryCapture, store: MemoryCheckpointStore, *rules: Rule, **more: Any) -> CdcRuntime:
    made = CdcRuntime(source, store, transforms=plan_of(*rules), **more)
    made.start()
    return made


def take(runtime: CdcRuntime, polls: int = 40) -> list[Batch]:
    """Return all batches, each acknowledged."""
    found = []
    for _ in range(polls):
        batch = runtime.poll(0.0)
        if batch.rows:
            found.append(batch)
        runtime.commit(batch.ack)
    return found


def follow(runtime: CdcRuntime, seen: list[Batch]) -> None:
    """Acknowledge everything until no more rows are delivered."""
    while True:
        seen.append(runtime.poll())
        runtime.commit(seen[-1].ack)


def values(batches: Sequence[Batch], column: str) -> list[Any]:
    return [event.values[column] for batch in batches for event in batch.events()]


def tables(batches: Sequence[Batch]) -> set[str]:
    return {str(rows.schema.table) for batch in batches for rows in batch.batches}


# --- what rules make, whichever way a row comes -----------------------------------------------------------------


def test_lesson_8_snapshot_stream_and_injected_rows_pass_the_same_rules(
    source: MemoryCapture, store: MemoryCheckpointStore
) -> None:
    source.commit(some(1), some(2, land="FR"))
    rules = (GERMANS, Mask(columns=("mail",)), Rename(columns={"id": "number"}), Sha256(columns=("number",)))
    runtime = started(source, store, *rules, snapshot_tables=(TABLE,))
    source.commit(some(3), some(4, land="FR"))
    runtime.enqueue(some(5))
    runtime.enqueue(some(6, land="FR"))
    found = take(runtime)
    assert [batch.kind for batch in found] == [BatchKind.INJECTED, BatchKind.SNAPSHOT, BatchKind.STREAM]
    assert values(found, "mail") == ["*******"] * 3
    assert {batch.batches[0].schema for batch in found} == {plan_of(*rules).transformed_schema(PEOPLE)}
    assert len({tuple(batch.batches[0].data.schema.names) for batch in found}) == 1
    assert all(len(number) == 64 for number in values(found, "number"))
    assert (runtime.rows_committed, source.confirmed) == (2, source.end)
    runtime.stop()


def test_lesson_7_no_encrypted_value_is_delivered_in_plaintext(
    source: MemoryCapture, store: MemoryCheckpointStore
) -> None:
    source.commit(some(1, 2))
    runtime = started(source, store, Encrypt(columns=("mail", "country"), key="new"), snapshot_tables=(TABLE,))
    source.commit(some(3, 4))
    found = take(runtime)
    assert [key for batch in found for key in keys_of(batch)] == [1, 2, 3, 4]
    for value in values(found, "mail") + values(found, "country"):
        assert value[0:2] == b"\x02\x03", "the format and the length of the key's id"
        assert b"mail" not in value
    runtime.stop()


def test_rows_go_to_tables_of_other_names_from_snapshot_and_stream(
    source: MemoryCapture, store: MemoryCheckpointStore
) -> None:
    rules = (Route(to="abroad.{table}", when="country != 'DE'"), Route(to="lake.{table}"))
    source.commit(people((1, "a", "DE"), (2, "b", "FR"), (3, "c", "DE")))
    runtime = started(source, store, rules[0], snapshot_tables=(TABLE,))
    source.commit(people((4, "d", "FR"), (5, "e", "DE")))
    found = take(runtime)
    assert tables(found) == {"public.people", "abroad.people"}
    assert [key for batch in found for key in keys_of(batch)] == [1, 2, 3, 4, 5], "in the order of the source"
    assert [event.seq for batch in found for event in batch.events()] == list(range(5))
    runtime.stop()
    again = started(source, MemoryCheckpointStore(), rules[1])
    source.commit(some(6))
    assert tables(take(again)) == {"lake.people"}
    again.stop()


def test_an_outbox_and_plain_rows(source: MemoryCapture, store: MemoryCheckpointStore) -> None:
    outbox = Outbox(to="events.{type}", type_column="country", key_column="id")
    runtime = started(source, store, outbox)
    source.commit(people((1, "a", "orders"), (2, "b", "carts")))
    source.commit(batch_of(PEOPLE, (Operation.DELETE, person(1, None, None, None))))
    found = take(runtime)
    assert (tables(found), keys_of(found[0])) == ({"events.orders", "events.carts"}, [1, 2])
    assert len(found) == 1, "a deletion is no message"
    runtime.stop()
    plain = started(source, MemoryCheckpointStore(), Unwrap(deletes="mark", marker="gone"))
    source.commit(batch_of(PEOPLE, (Operation.DELETE, person(2, "b", None, "carts"))))
    assert values(take(plain), "gone")[-1] is True
    plain.stop()


def test_the_history_has_the_delivered_schema_and_the_source_remembers_its_own(store: MemoryCheckpointStore) -> None:
    class Told(MemoryCapture):
        schemas: Sequence[TableSchema] = ()

        def remember_schemas(self, schemas: Sequence[TableSchema]) -> None:
            self.shapes = schemas

    source, history = Told(), MemorySchemaHistory()
    rules = plan_of(Rename(columns={"mail": "address"}))
    source.commit(some(1))
    runtime = CdcRuntime(source, store, history, transforms=rules)
    runtime.start()
    take(runtime)
    runtime.stop()
    known = history.latest(TABLE)
    assert known is not None
    assert "address" in known.schema.names
    CdcRuntime(source, store, history, transforms=rules).start()
    assert [shape.names for shape in source.shapes] == [PEOPLE.names]


# --- acknowledging what rules have left ---------------------------------------------------------------------------


def test_a_snapshot_with_a_hashed_key_continues_after_the_acknowledged_rows(
    source: MemoryCapture, store: MemoryCheckpointStore
) -> None:
    source.commit(some(*range(25)))
    rules = (Rename(columns={"id": "number"}), Sha256(columns=("number",)))
    runtime = started(source, store, *rules, snapshot_tables=(TABLE,), limits=Limits(rows=4))
    batch = runtime.poll()
    runtime.commit(batch.ack, rows=3)
    runtime.force_stop()
    again = started(source, store, *rules, snapshot_tables=(TABLE,), limits=Limits(rows=4))
    assert values(take(again), "mail") == [f"mail{key}@x" for key in range(3, 25)]
    assert again.rows_committed == 25
    again.stop()


@pytest.mark.slow
@settings(max_examples=40)
@given(
    lands=st.lists(st.sampled_from(["DE", "FR", "XX"]), min_size=1, max_size=40), rows=st.integers(1, 9),
    prefixes=st.lists(st.integers(1, 9), min_size=1, max_size=6), crash=st.integers(1, 5), bulk=st.booleans(),
)  # fmt: skip
def test_each_row_of_a_snapshot_is_acknowledged_once_whatever_rules_drop(
    lands: list[str], rows: int, prefixes: list[int], crash: int, bulk: bool
) -> None:
    """Rules filter and route, batches are acknowledged in parts, and the program is killed now and then."""
    source, store = MemoryCapture(keep_tables=True, chunk_rows=7), MemoryCheckpointStore()
    source.commit(people(*[(key, "x", land) for key, land in enumerate(lands)]))
    rules = (Filter(where="country != 'XX'"), Route(to="abroad.people", when="country == 'FR'"))
    reported: dict[str, Any] = {"snapshot_tables": (TABLE,)} if bulk else {"incremental_snapshot": (TABLE,)}
    runtime = started(source, store, *rules, limits=Limits(rows=rows), **reported)
    received: list[object] = []
    for step in range(300):
        batch = runtime.poll(0.0)
        if batch.kind is BatchKind.SNAPSHOT:
            found = keys_of(batch)
            count = min(prefixes[step % len(prefixes)], len(found))
            runtime.commit(batch.ack, rows=count)
            received += found[:count]
        else:
            runtime.commit(batch.ack)
        if step % crash == 0 and step < 40:
            runtime.force_stop()
            scanning = (mark := store.load("default")) is not None and mark.metadata["snapshot"] is not None
            runtime = started(source, store, *rules, limits=Limits(rows=rows), **(reported if scanning else {}))
    assert received == [key for key, land in enumerate(lands) if land != "XX"]
    assert runtime.control.status().snapshot is None
    runtime.stop()


@pytest.mark.parametrize("how", ["snapshot_tables", "incremental_snapshot"])
def test_the_progress_of_a_snapshot_without_rows_left_is_saved_now_and_then(
    source: MemoryCapture, store: MemoryCheckpointStore, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(snapshots, "PROGRESS_SAVE_SECONDS", 0.0)
    source.commit(some(*range(35), land="FR"), some(99))
    runtime = started(source, store, GERMANS, **{how: (TABLE,)}, limits=Limits(rows=5))
    for _ in range(6):
        batch = runtime.poll(0.0)
        assert batch.kind is not BatchKind.SNAPSHOT
        runtime.commit(batch.ack)
    saved = store.load("default")
    assert saved is not None
    assert 0 <= saved.metadata["snapshot"]["cursor"]["after"][0] < 35
    runtime.force_stop()
    again = started(source, store, GERMANS, **{how: (TABLE,)})
    assert [keys_of(batch) for batch in take(again) if batch.kind is BatchKind.SNAPSHOT] == [[99]]
    again.force_stop()


def test_a_rule_that_does_not_fit_the_table_does_not_end_its_snapshot(
    source: MemoryCapture, store: MemoryCheckpointStore
) -> None:
    source.commit(some(1))
    strict = Mask(tables=(str(TABLE),), columns=("no_such_column",))
    runtime = started(source, store, strict, incremental_snapshot=(TABLE,))
    for _ in range(2):
        with pytest.raises(RuleInvalid):
            runtime.poll(0.0)
    assert runtime.control.status().snapshot is not None
    runtime.force_stop()


def test_rows_after_a_filter_are_numbered_without_a_gap_and_a_prefix_counts_them(
    source: MemoryCapture, store: MemoryCheckpointStore
) -> None:
    runtime = started(source, store, GERMANS)
    first = source.commit(people((1, "a", "DE"), (2, "b", "FR"), (3, "c", "DE")))
    source.commit(some(4))
    batch = runtime.poll()
    assert [(event.seq, event.values["id"]) for event in batch.events()] == [(0, 1), (1, 3), (2, 4)]
    runtime.commit(batch.ack, rows=2)
    batch = runtime.poll()
    assert (source.confirmed, [event.seq for event in batch.events()]) == (first, [2])
    runtime.commit(batch.ack)
    assert runtime.rows_committed == 3
    runtime.stop()


def test_a_rule_that_halts_every_poll_is_a_stall_until_rows_are_delivered(
    source: MemoryCapture, store: MemoryCheckpointStore
) -> None:
    runtime = started(source, store, NUMBERS)
    source.commit(some(1))
    for _ in range(2):
        with pytest.raises(TransformFailed) as halted:
            runtime.poll()
        health = runtime.health()
        assert (health.verdict, health.remedy) == (observers.Verdict.STALLED, halted.value.hint)
        assert "could not be applied" in health.reason
    runtime.enqueue(people((2, "7", "DE")))
    runtime.poll()
    assert runtime.health().verdict is observers.Verdict.HEALTHY
    runtime.force_stop()


# --- halting ------------------------------------------------------------------------------------------------------


def test_lesson_1_nothing_passes_a_window_that_a_rule_halts_at_and_earlier_rows_are_handed_out(
    source: MemoryCapture, store: MemoryCheckpointStore
) -> None:
    heard: list[Fact] = []
    first = source.commit(people((1, "1", "DE")))
    source.commit(people((2, "no number", "DE")))
    source.commit(people((3, "3", "DE")))
    runtime = started(source, store, NUMBERS, observers=(heard.append,))
    batch = runtime.poll()
    assert keys_of(batch) == [1]
    runtime.commit(batch.ack)
    for _ in range(3):
        with pytest.raises(TransformFailed):
            runtime.poll()
        with pytest.raises(AckRefused):
            runtime.commit(batch.ack)
        assert (runtime.position, source.confirmed) == (first, first)
    halted = [fact for fact in heard if isinstance(fact, observers.RuleHalted)]
    assert {(fact.rule, fact.table) for fact in halted} == {("numbers", "public.people")}
    runtime.force_stop()
    mended = started(source, store, LENIENT, on_dead_letter=lambda dead_letter: None)
    assert [(event.seq, event.values["mail"]) for batch in take(mended) for event in batch.events()] == [(1, 3)]
    mended.stop()


@pytest.mark.parametrize("how", ["snapshot_tables", "incremental_snapshot"])
def test_lesson_1_a_snapshot_that_a_rule_halts_at_is_neither_given_up_nor_passed(
    source: MemoryCapture, store: MemoryCheckpointStore, how: str
) -> None:
    source.commit(people((1, "1", "DE"), (2, "no number", "DE"), (3, "3", "DE")))
    runtime = started(source, store, NUMBERS, **{how: (TABLE,)}, limits=Limits(rows=1))
    seen: list[Batch] = []
    with pytest.raises(TransformFailed):
        follow(runtime, seen)
    with pytest.raises(TransformFailed):
        runtime.poll(0.0)
    assert [keys_of(batch) for batch in seen if batch.kind is BatchKind.SNAPSHOT] == [[1]]
    assert runtime.rows_committed == 1
    assert runtime.control.status().snapshot is not None
    runtime.force_stop()
    dead_letters: list[DeadLetter] = []
    mended = started(source, store, LENIENT, **{how: (TABLE,)}, on_dead_letter=dead_letters.append)
    found = [batch for batch in take(mended) if batch.kind is BatchKind.SNAPSHOT]
    assert (values(found, "mail"), [dead_letter.rule for dead_letter in dead_letters][:1]) == ([3], ["numbers"])
    mended.force_stop()


def test_a_part_of_a_transaction_that_a_rule_halts_at_leaves_the_numbers_right(store: MemoryCheckpointStore) -> None:
    source = MemoryCapture(part_rows_max=2)
    source.commit(people(*[(key, "x" if key == 5 else str(key), "DE") for key in range(6)]))
    runtime = started(source, store, NUMBERS, limits=Limits(rows=2, transactions=Transactions.SPLIT))
    seen: list[Batch] = []
    for _ in range(2):
        with pytest.raises(TransformFailed):
            follow(runtime, seen)
    seqs = [[event.seq for event in batch.events()] for batch in seen]
    assert seqs == [[0, 1], [2, 3]] * 2, "it begins again, with the numbers that it had"
    assert (runtime.rows_committed, runtime.progress.rows) == (0, 0)
    runtime.force_stop()


# --- setting aside ------------------------------------------------------------------------------------------------


def test_rows_of_snapshot_stream_and_injection_become_dead_letters_alike(
    source: MemoryCapture, store: MemoryCheckpointStore
) -> None:
    dead_letters: list[DeadLetter] = []
    heard: list[Fact] = []
    source.commit(people((1, "1", "DE"), (2, "bad", "DE")))
    runtime = started(
        source, store, LENIENT, snapshot_tables=(TABLE,), on_dead_letter=dead_letters.append, observers=(heard.append,)
    )
    source.commit(people((3, "bad", "DE"), (4, "4", "DE")))
    runtime.enqueue(people((5, "bad", "DE"), (6, "6", "DE")))
    assert values(take(runtime), "mail") == [6, 1, 4]
    assert [(one.rule, one.column, one.cause) for one in dead_letters] == [
        (dead_letters[0].rule, "mail", dead_letters[0].cause)
    ] * 3
    assert [one.batch.data.column("id").to_pylist() for one in dead_letters] == [[5], [2], [3]]
    assert dead_letters[2].positions == [str(source.end)]
    rejected = [fact for fact in heard if isinstance(fact, observers.RowsDeadLettered)]
    assert [(fact.rule, fact.table, fact.rows) for fact in rejected] == [("numbers", TABLE, 1)] * 3
    replayed = plan_of(Cast(columns=("mail",), to="string")).apply(dead_letters[2].batch)
    assert replayed.batches[0].data.column("mail").to_pylist() == ["bad"], "as it came, to be applied again"
    runtime.stop()


def test_dead_letters_without_on_letter_are_refused_before_anything_is_read(source: MemoryCapture) -> None:
    with pytest.raises(ConfigError, match="there is no `on_dead_letter`") as raised:
        CdcRuntime(source, MemoryCheckpointStore(), transforms=plan_of(LENIENT))
    assert raised.value.fields["rule"] == "numbers"


def test_a_dead_letter_that_on_letter_refuses_blocks_the_batch_and_is_repeated(
    source: MemoryCapture, store: MemoryCheckpointStore
) -> None:
    faults: list[Exception] = [SinkUnready("full", hint="Wait."), OSError("disk"), OSError("disk")]
    dead_letters: list[DeadLetter] = []

    def keep(dead_letter: DeadLetter) -> None:
        if faults:
            raise faults.pop()
        dead_letters.append(dead_letter)

    source.commit(people((1, "bad", "DE"), (2, "2", "DE")))
    runtime = started(source, store, LENIENT, on_dead_letter=keep)
    for _ in range(2):
        with pytest.raises(SinkError, match="`on_dead_letter` failed"):
            runtime.poll()
        assert source.confirmed == Lsn(0)
    sink = MemorySink()
    runtime.run(sink, until(lambda: sink.rows >= 1))
    assert ([event.values["mail"] for event in sink.events()], len(dead_letters)) == ([2], 1)


# --- what was injected --------------------------------------------------------------------------------------------


def test_injected_rows_that_a_rule_halts_at_wait_and_are_returned_by_a_stop(
    source: MemoryCapture, store: MemoryCheckpointStore
) -> None:
    source.commit(people((1, "1", "DE")))
    runtime = started(source, store, NUMBERS)
    runtime.enqueue(people((9, "bad", "DE")))
    for _ in range(2):
        with pytest.raises(TransformFailed):
            runtime.poll()
    assert [len(batch) for batch in runtime.force_stop().injected] == [1]


def test_a_rule_that_never_matched_is_reported_at_the_end(
    source: MemoryCapture, store: MemoryCheckpointStore, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[Fact] = []
    runtime = started(
        source,
        store,
        Mask(name="typo", tables=("public.peple",), columns=("mail",)),
        Filter(name="used", where="id > 0"),
        observers=(heard.append,),
    )
    source.commit(some(1))
    take(runtime)
    runtime.stop()
    assert [fact.rule for fact in heard if isinstance(fact, observers.RuleUnmatched)] == ["typo"]
    assert "rule never matched" in caplog.text


def test_declared_rules_can_be_passed_directly(source: MemoryCapture, store: MemoryCheckpointStore) -> None:
    declared = Transforms.model_validate({"rules": [{"do": "redact", "columns": ["mail"]}]})
    runtime = CdcRuntime(source, store, transforms=declared)
    runtime.start()
    source.commit(some(1))
    assert values(take(runtime), "mail") == ["[redacted]"]
    runtime.stop()


def test_a_stream_with_rules_still_has_its_held_bytes_and_timeline(source: MemoryCapture) -> None:
    class Timed(MemoryCapture):
        def live(self, after: Lsn) -> Stream:
            stream = super().live(after)
            stream.timeline = 7  # type: ignore[attr-defined] # as a server's
            return stream

    timed = Timed()
    timed.commit(some(1))
    plan = plan_of(GERMANS)
    for wrapped in (
        TransformedStream(timed.live(Lsn(0)), plan),
        RecordedStream(timed.live(Lsn(0)), MemorySchemaHistory()),
    ):
        assert isinstance(wrapped, ReadAheadStream)
        assert isinstance(wrapped, HasTimeline)
        assert (wrapped.timeline, wrapped.held_bytes > 0) == (7, True)
    assert not isinstance(TransformedStream(source.live(Lsn(0)), plan), HasTimeline)


ORDERS = table("public.orders", id=pa.int64(), status=pa.string(), note=pa.string())


def test_a_rejected_key_move_is_stored_with_the_row_it_takes_values_from_and_can_be_applied_later() -> None:
    source, store, rejected, mirror = MemoryCapture(), MemoryCheckpointStore(), list[DeadLetter](), Mirror()

    def deliver(rule: Rule, *injected: ChangeBatch) -> list[int]:
        runtime = CdcRuntime(source, store, transforms=[rule], on_dead_letter=rejected.append)
        runtime.start()
        for batch in injected:
            runtime.enqueue(batch)
        seqs = []
        while (given := runtime.poll(0.0)).rows:
            for event in given.events():
                mirror.apply(event.row_write())
                seqs.append(event.seq)
            runtime.commit(given.ack)
        runtime.stop()
        return seqs

    source.commit(changes(ORDERS, insert({"id": 1, "status": "1", "note": "large"}), insert({"id": 5, "status": "1"})))
    source.commit(
        changes(
            ORDERS,
            move({"id": 1}, {"id": 2, "status": "odd"}, unchanged=("note",)),
            move({"id": 5}, {"id": 6, "status": "odd", "note": "sent"}),
        )
    )
    assert deliver(Cast(columns=("status",), to="int32", on_error="dead-letter")) == [0, 1, 2], "without a gap"
    reported = [
        [(event.operation.value, event.values["id"]) for event in dead_letter.batch.events()]
        for dead_letter in rejected
    ]
    assert reported == [[("delete", 1), ("insert", 2), ("insert", 6)]], (
        "one whose values were all sent needs no old row"
    )
    assert [row["id"] for row in mirror.rows.values()] == [1]
    deliver(Compute(column="status", expression="replace(status, 'odd', '0')"), rejected[0].batch)
    assert [(row["id"], row["status"], row["note"]) for row in mirror.rows.values()] == [
        (2, "0", "large"),
        (6, "0", "sent"),
    ]
