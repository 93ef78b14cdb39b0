"""Work delivered again, too early, overlapping, or cut by a crash: a table is what the source was at the point it
states.

Work is what a pipeline hands out: a stretch of a real log, done by the engine under test in its own way. What a table
of each mode must hold after each transaction is told by an account that knows neither folds nor engines.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from tailrace import failpoints
from tailrace.changelog.read.index import LogIndex
from tailrace.changelog.read.reader import ChangeLog
from tailrace.errors import ForeignWrite
from tailrace.model import change
from tailrace.model.position import ZERO
from tailrace.model.schema import TableSchema
from tailrace.tables.port import AppliedPosition
from tailrace.tables.spec import PLAIN_MIRROR, LoadOrigin, TableMode, TableSpec
from tailrace.tasks.apply import advance_table
from tailrace.tasks.work import ApplyWork, Outcome
from tests.support.changes import COMPOSITE, KEYLESS, KeylessModel, record_batches
from tests.support.engines import IS_ICEBERG, IS_SPARK, commits_of, open_table, place_of, rows_of, spark_engine
from tests.support.forms import READ_AT, Account, Tx, ordered, steps_with, story
from tests.support.logs import Diary, quick_folder

PLACES = ("apply.before_table", "table.before_commit", *["iceberg.staged"] * IS_ICEBERG, "table.after_commit")
"""Where whoever applies may die; the others that a table's work passes are those of dead letters."""
BATCHES_MAX = 3 if IS_SPARK else 6
EXAMPLES = (3 if IS_SPARK else 16) * (5 if os.environ.get("TAILRACE_THOROUGH") else 1)
"""Of each kind of table."""
BEGIN = AppliedPosition(seq=0, commit=0, position=ZERO)
ORIGIN = LoadOrigin(seq=BEGIN.seq, position=str(ZERO), read_at=READ_AT * 1_000_000)
APPEND = TableSpec(mode=TableMode.APPEND)
TABLES: dict[str, tuple[TableSchema, TableSpec]] = {
    "mirror": (COMPOSITE, PLAIN_MIRROR),
    "soft delete": (COMPOSITE, TableSpec(soft_delete=True, metadata=("_op", "_seq", "_tx"))),
    "history": (COMPOSITE, TableSpec(mode=TableMode.HISTORY, metadata=("_op",))),
    "append": (COMPOSITE, APPEND),
    "keyless": (KEYLESS, PLAIN_MIRROR),
    "keyless append": (KEYLESS, APPEND),
}

Row = dict[str, Any]


class Died(BaseException):
    """What a crash is to whoever is called: nothing is caught, nothing is put right."""


class Delivery:
    """A log of these transactions, and a table that stands after some of them."""

    def __init__(self, folder: Path, table: str, begun: Sequence[Row], transactions: Sequence[Tx]) -> None:
        self._schema, self._form = TABLES[table]
        self._folder, diary, cursors = folder / "t", Diary(folder / "log"), [BEGIN]
        for transaction in transactions:
            number = diary.commit((self._schema, transaction.changes), at=transaction.time * 1_000_000)
            cursors.append(
                AppliedPosition(seq=diary.writer.next_seq - 1, commit=number, position=diary.writer.position)
            )
        diary.close()
        commits = [[item.row.values for item in diary.noted if item.commit == at.commit] for at in cursors[1:]]
        # Work ends where a micro-batch does, which is after some of the transactions.
        ends = sorted({*range(0, len(transactions), -(-len(transactions) // BATCHES_MAX)), len(transactions)})
        held = truths(self._schema, self._form, begun, commits)
        self._cursors, self._truths = [cursors[end] for end in ends], [held[end] for end in ends]
        log = ChangeLog.open(diary.path)
        self._path, self._log_id, self._index = diary.path, log.log_id, LogIndex(log)
        self._index.grow()
        self.last, self.here = len(ends) - 1, 0
        made = open_table(self._folder, self._log_id, self._form)
        made.load(self._schema, record_batches(self._schema, begun), BEGIN, origin=ORIGIN)

    def deliver(self, first: int, last: int, dies: str | None, patch: pytest.MonkeyPatch) -> None:
        """Work between two of the points. It is done if it begins where the table stands, passed over if the table has
        it all, and refused otherwise."""

        def hit(place: str) -> None:
            if place == dies:
                raise Died

        patch.setattr(failpoints, "hit", hit)
        before = commits_of(self._folder)
        try:
            done = self._do(first, last)
            assert dies is None or (dies != PLACES[0] and first != self.here), "nobody died"
            if last > self.here and first != self.here:
                assert isinstance(done.error, ForeignWrite), done
            else:
                assert done.error is None, done
                self.here = max(self.here, last)
                assert (done.version is not None) == (commits_of(self._folder) > before)
        except Died:
            assert dies == PLACES[0] or first == self.here, "there was something to commit"
            self.here = last if dies == PLACES[-1] else self.here
        assert self._rows() == ordered(self._truths[self.here])

    def _do(self, first: int, last: int) -> Outcome:
        begin, end = self._cursors[first], self._cursors[last]
        work = ApplyWork(
            table=self._schema.table,
            log=self._path,
            schema=self._schema,
            expected=begin,
            position_after=end,
            slices=tuple(self._index.pending(1, begin.seq, end.commit)),
            location=place_of(self._folder, self._log_id, self._form),
        )
        (done,) = spark_engine().run(advance_table, [work]) if IS_SPARK else [advance_table(work)]
        return done

    def _rows(self) -> list[Row]:
        assert open_table(self._folder, self._log_id, self._form).applied_position() == self._cursors[self.here]
        names = said(self._schema) if self._form is APPEND else None
        return ordered({name: row[name] for name in names or row} for row in rows_of(self._folder).to_pylist())


# --- what must come of it ----------------------------------------------------------------------------------


def truths(schema: TableSchema, form: TableSpec, begun: Sequence[Row], commits: list[list[Row]]) -> list[list[Row]]:
    """What the table must hold to begin with, and after each of the commits."""
    if form.mode is TableMode.APPEND:
        read = {change.OP: "read", change.SEQ: ORIGIN.seq, change.POSITION: ORIGIN.position}
        told = [[dict.fromkeys(said(schema)) | row | read for row in begun]]
        told += [[{name: row[name] for name in said(schema)} for row in rows] for rows in commits]
        return [[row for some in told[: end + 1] for row in some] for end in range(len(told))]
    account = Account(schema) if schema.key else Copies()
    account.load(begun, ORIGIN.seq)
    found = [held(account, form)]
    for rows in commits:
        account.transact(rows)
        found.append(held(account, form))
    return found


def held(account: Account | Copies, form: TableSpec) -> list[Row]:
    if isinstance(account, Copies):
        return list(account.rows)
    if form.mode is TableMode.HISTORY:
        return [dict(row) for row in account.versions]
    return [dict(row) for row in (account.marked if form.soft_delete else account.live).values()]


def said(schema: TableSchema) -> tuple[str, ...]:
    """The columns of a table of changes."""
    return (
        *schema.names,
        change.OP,
        change.SEQ,
        change.TX,
        change.TX_INDEX,
        change.POSITION,
        change.COMMITTED_AT,
        change.UNCHANGED,
    )


class Copies:
    """The account of a table without a key."""

    def __init__(self) -> None:
        self.rows: list[Row] = []

    def load(self, rows: Sequence[Row], _seq: int) -> None:
        self.rows += rows

    def transact(self, rows: list[Row]) -> None:
        for row in rows:
            op, own = row[change.OP], {name: row[name] for name in KEYLESS.names}
            if op == "truncate":
                self.rows.clear()
            if op in ("delete", "update"):
                self.rows.remove(row[change.BEFORE] if op == "update" else own)
            if op in ("insert", "update"):
                self.rows.append(own)


# --- any delivery ------------------------------------------------------------------------------------------

STEPS = steps_with(st.sampled_from([None, "", "x", "y"]), least=8, most=20)
IMAGE = st.tuples(st.sampled_from([None, 0]), st.sampled_from([None, "x"]))
COPIES = st.lists(
    st.tuples(st.sampled_from(["insert"] * 4 + ["update", "delete", "delete", "truncate"]), IMAGE, IMAGE),
    min_size=8,
    max_size=20,
)
DELIVERIES = st.lists(
    st.tuples(st.sampled_from([0, 0, 0, -2, -1, 1]), st.integers(1, 2), st.sampled_from([None, *PLACES])),
    min_size=3,
    max_size=BATCHES_MAX + 3,
)
"""How far ahead of the table work begins, how long it is, and where whoever does it dies."""


def keyless_story(steps: Sequence[tuple[Any, ...]]) -> tuple[list[Row], list[Tx]]:
    model, begun = KeylessModel(), [{"a": 0, "b": "x"}] * 2
    model.rows[(0, "x")] = len(begun)
    return begun, [Tx(1000, tuple(told)) for step in steps if (told := model.step(*step))]


CHANGED = [
    ("insert", 2, 0, "x", (), True, 1000), ("update", 0, 1, "y", ("big",), True, 1001),
    ("move", 1, 3, "x", ("name", "big"), True, 1002), ("delete", 2, 0, None, (), True, 1003),
    ("insert", 2, 3, "y", (), True, 1004), ("update", 3, 0, None, (), True, 1005),
]  # fmt: skip
COPIED = [
    ("insert", (0, "x"), (0, "x")), ("delete", (0, "x"), (0, "x")), ("update", (None, "x"), (0, "x")),
    ("insert", (None, None), (0, "x")), ("insert", (0, "x"), (0, "x")), ("delete", (0, "x"), (None, "x")),
]  # fmt: skip


@pytest.mark.parametrize("table", TABLES)
@example(keyed=CHANGED, keyless=COPIED, deliveries=[(0, 1, place) for place in PLACES])
@given(keyed=STEPS, keyless=COPIES, deliveries=DELIVERIES)
@settings(max_examples=EXAMPLES, deadline=None)
def test_whatever_the_delivery_the_table_is_what_the_source_was(
    table: str, keyed: list[Any], keyless: list[Any], deliveries: list[tuple[int, int, str | None]]
) -> None:
    begun, transactions = story(keyed) if TABLES[table][0].key else keyless_story(keyless)
    assume(transactions)
    with (
        tempfile.TemporaryDirectory() as other,
        quick_folder(Path(other)) as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        delivery = Delivery(folder, table, begun, transactions)
        for ahead, length, dies in deliveries:
            first = min(max(delivery.here + ahead, 0), delivery.last - 1)
            delivery.deliver(first, min(first + length, delivery.last), dies, patch)
        for first in range(delivery.last):  # all of it once more, from the beginning
            delivery.deliver(first, first + 1, None, patch)
        assert delivery.here == delivery.last
