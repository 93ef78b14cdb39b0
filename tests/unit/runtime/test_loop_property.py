"""Property: every row is acknowledged once, in order.

It holds for any mix of transactions, parts, limits, prefixes, losses and crashes.
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.capture.memory.source import MemoryCapture
from tailrace.errors import SourceUnreachable
from tailrace.model.position import ZERO
from tailrace.runtime import intake
from tailrace.runtime.loop import CdcRuntime
from tailrace.runtime.output_batch import Limits, Transactions
from tailrace.state.checkpoint_stores import MemoryCheckpointStore
from tests.support.runtimes import inserts
from tests.support.windows import named

OTHER = named("public", "others", 20)
STEPS_MAX = 400

TRANSACTIONS = st.lists(
    st.lists(st.tuples(st.booleans(), st.integers(1, 5)), min_size=1, max_size=3), min_size=1, max_size=8
)
"""For each transaction the tables it writes to, in order, and the rows for each."""
ACTIONS = st.lists(st.sampled_from(["ack", "prefix", "again", "lose", "crash"]), min_size=1, max_size=12)


@settings(max_examples=80)
@given(
    transactions=TRANSACTIONS, actions=ACTIONS, data=st.data(), rows=st.integers(1, 9), whole=st.booleans(),
    together=st.integers(1, 3), part_rows=st.none() | st.integers(1, 6),
)  # fmt: skip
def test_every_row_is_acknowledged_once_and_the_position_ends_a_transaction(
    transactions: list[list[tuple[bool, int]]],
    actions: list[str],
    data: st.DataObject,
    rows: int,
    whole: bool,
    together: int,
    part_rows: int | None,
) -> None:
    intake.RETRY_SECONDS_FIRST, was = 0.0, intake.RETRY_SECONDS_FIRST
    try:
        source = MemoryCapture(window_transactions_max=together, part_rows_max=part_rows)
        ends, written = {ZERO: 0}, 0
        for parts in transactions:
            batches = []
            for other, count in parts:
                keys = range(written, written + count)
                batches.append(inserts(*keys, schema=OTHER) if other else inserts(*keys))
                written += count
            ends[source.commit(*batches)] = written
        store = MemoryCheckpointStore()
        policy = Transactions.WHOLE if whole else Transactions.SPLIT
        runtime = CdcRuntime(source, store, limits=Limits(rows=rows, transactions=policy))
        runtime.start()
        received: list[int] = []
        """Acknowledged, and not taken back by a transaction that begins again."""
        for step in range(STEPS_MAX):
            action = actions[step % len(actions)] if step < 3 * len(actions) else "ack"
            batch = runtime.poll(0.0)
            events = list(batch.events())
            if events:
                del received[events[0].seq :]  # what comes again has the number that it had
            assert [event.values["id"] for event in events] == [event.seq for event in events]
            assert [event.seq for event in events] == list(range(len(received), len(received) + len(events)))
            if action == "again":
                assert runtime.poll(0.0) is batch or not events
            elif action == "lose":
                source.break_next_read(SourceUnreachable("gone", hint="Wait."))
            elif action == "crash":
                runtime.force_stop()
                runtime = CdcRuntime(source, store, limits=Limits(rows=rows, transactions=policy))
                runtime.start()
            elif events:
                count = data.draw(st.integers(1, len(events))) if action == "prefix" else len(events)
                runtime.commit(batch.ack, rows=count)
                received += [event.seq for event in events[:count]]
            assert ends[runtime.position] == runtime.rows_committed <= max(written, len(received))
            assert source.confirmed <= runtime.position
            if runtime.rows_committed == written:
                break
        assert received == list(range(written))
        for _ in range(STEPS_MAX):  # a source that was away when it was acknowledged is told when it is back
            if source.confirmed < source.end:
                runtime.poll(0.0)
        assert source.confirmed == source.end
        runtime.stop()
    finally:
        intake.RETRY_SECONDS_FIRST = was
