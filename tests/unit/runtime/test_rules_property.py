"""Property: rows that pass the rules are acknowledged once, in order.

It holds for any mix of rules, transactions, parts, limits, prefixes, losses and crashes.
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tailrace.capture.memory.source import MemoryCapture, batch_of
from tailrace.errors import SourceUnreachable
from tailrace.model.change import Operation
from tailrace.model.position import ZERO
from tailrace.runtime import intake
from tailrace.runtime.loop import CdcRuntime
from tailrace.runtime.output_batch import Limits, Transactions
from tailrace.state.checkpoint_stores import MemoryCheckpointStore
from tailrace.transforms.rules import Cast, Filter, Route
from tests.support.transforms import PEOPLE, person, plan_of

STEPS_MAX = 300
KINDS = ("kept", "gone", "sent", "bad")
RULES = plan_of(
    Filter(where="country != 'gone'"),
    Route(to="abroad.people", when="country == 'sent'"),
    Cast(columns=("mail",), to="int32", on_error="dead-letter"),
)
TRANSACTIONS = st.lists(st.lists(st.sampled_from(KINDS), min_size=1, max_size=9), min_size=1, max_size=7)
ACTIONS = st.lists(st.sampled_from(["ack", "prefix", "again", "lose", "crash"]), min_size=1, max_size=12)


@settings(max_examples=60)
@given(
    transactions=TRANSACTIONS, actions=ACTIONS, data=st.data(), rows=st.integers(1, 9), whole=st.booleans(),
    together=st.integers(1, 3), part_rows=st.none() | st.integers(1, 6),
)  # fmt: skip
def test_rows_that_pass_rules_are_acknowledged_once_and_rejected_rows_are_never_lost(
    transactions: list[list[str]],
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
        left: list[int] = []
        bad: set[int] = set()
        ends, number = {ZERO: 0}, 0
        for kinds in transactions:
            people = []
            for kind in kinds:
                number += 1
                mail = "no number" if kind == "bad" else "1"
                people.append((Operation.INSERT, person(number, mail, None, kind)))
                left += [number] if kind in ("kept", "sent") else []
                bad |= {number} if kind == "bad" else set()
            ends[source.commit(batch_of(PEOPLE, *people))] = len(left)
        store, rejected = MemoryCheckpointStore(), set[int]()
        policy = Transactions.WHOLE if whole else Transactions.SPLIT

        def started() -> CdcRuntime:
            made = CdcRuntime(
                source,
                store,
                transforms=RULES,
                limits=Limits(rows=rows, transactions=policy),
                on_dead_letter=lambda dead_letter: rejected.update(dead_letter.batch.data.column("id").to_pylist()),
            )
            made.start()
            return made

        runtime, received = started(), list[int]()
        for step in range(STEPS_MAX):
            action = actions[step % len(actions)] if step < 3 * len(actions) else "ack"
            batch = runtime.poll(0.0)
            events = list(batch.events())
            if events:
                del received[events[0].seq :]  # what comes again has the number that it had
            assert [event.seq for event in events] == list(range(len(received), len(received) + len(events)))
            assert [event.values["id"] for event in events] == left[len(received) : len(received) + len(events)]
            if action == "lose":
                source.break_next_read(SourceUnreachable("gone", hint="Wait."))
            elif action == "crash":
                runtime.force_stop()
                runtime = started()
            elif events and action != "again":
                count = data.draw(st.integers(1, len(events))) if action == "prefix" else len(events)
                runtime.commit(batch.ack, rows=count)
                received += [event.values["id"] for event in events[:count]]
            assert ends[runtime.position] == runtime.rows_committed
            assert source.confirmed <= runtime.position
            if (received, rejected, runtime.rows_committed) == (left, bad, len(left)):
                break
        assert received == left
        assert rejected == bad
        runtime.force_stop()
    finally:
        intake.RETRY_SECONDS_FIRST = was
