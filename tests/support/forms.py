"""Tables of every form: changes in transactions, and the plainest possible account of what must come of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
from hypothesis import strategies as st

from tailrace.model import change
from tailrace.model.position import Lsn
from tailrace.model.schema import TableSchema
from tailrace.tables.fold.by_mode import fold_by_mode, with_added_columns
from tailrace.tables.port import AppliedPosition, LakeTable, WriteResult
from tailrace.tables.spec import LoadOrigin, TableSpec
from tailrace.tables.staging import stage
from tests.support import engines
from tests.support.changes import SHOP, Change, Model, changes, record_batches

OpenTable = Callable[[Path, TableSpec], LakeTable]
Row = dict[str, Any]
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
READ_AT = 1000
"""When rows were loaded, in seconds since 1970; they are loaded at `_seq` 99."""
LOADED_SEQ = 99


def second(number: int) -> datetime:
    return EPOCH + timedelta(seconds=number)


@dataclass(frozen=True)
class Tx:
    """A transaction: when it was committed, in seconds, and its changes."""

    time: int
    changes: tuple[Change, ...]


def tx(time: int, *given: Change | tuple[Change, ...]) -> Tx:
    flat = [item for some in given for item in (some if isinstance(some, tuple) else (some,))]
    return Tx(time, tuple(flat))


def stored(schema: TableSchema, transactions: Sequence[Tx], first: int = 100, number: int = 1) -> pa.Table:
    """The changes as the log holds them, numbered from `first`; the transactions from `number`."""
    rows = [row for given in transactions for row in given.changes]
    table = changes(schema, *rows, first=first)
    spread = [(number + n, at, given.time) for n, given in enumerate(transactions) for at in range(len(given.changes))]
    for name, values, kind in (
        (change.TX, [item[0] for item in spread], pa.int64()),
        (change.TX_INDEX, [item[1] for item in spread], pa.int32()),
        (change.POSITION, [str(Lsn(item[0] * 16)) for item in spread], pa.string()),
        (change.COMMITTED_AT, [item[2] * 1_000_000 for item in spread], pa.int64()),
    ):
        at = table.schema.get_field_index(name)
        array = pa.array(values, kind)
        table = table.set_column(at, table.schema.field(name), array.cast(table.schema.field(name).type))
    return table


@dataclass
class Formed:
    """A table under test. Changes are numbered and grouped as the log would."""

    table: LakeTable
    form: TableSpec
    folder: Path
    schema: TableSchema = SHOP
    rows: Iterable[Row] = ()
    seq: int = LOADED_SEQ
    transactions: int = 0
    given: list[pa.Table] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.form = engines.form_here(self.form)
        origin = LoadOrigin(seq=self.seq, position="0/0", read_at=READ_AT * 1_000_000)
        self.table.load(self.schema, record_batches(self.schema, self.rows), self.cursor(self.seq), origin=origin)

    @staticmethod
    def cursor(seq: int) -> AppliedPosition:
        return AppliedPosition(seq=seq, commit=seq, position=Lsn(seq))

    def apply(self, *transactions: Tx) -> WriteResult:
        """In one batch."""
        batch = stored(self.schema, transactions, self.seq + 1, self.transactions + 1)
        self.transactions += len(transactions)
        return self.take(batch)

    def take(self, batch: pa.Table) -> WriteResult:
        self.given.append(batch)
        here, self.seq = self.seq, self.seq + batch.num_rows
        folded = fold_by_mode(self.form, self.schema, batch)
        return self.table.apply(self.schema, folded, self.cursor(here), self.cursor(self.seq))

    def content(self, *names: str) -> list[Row]:
        """All rows, or these columns of them, in the order of their values."""
        rows = engines.rows_of(self.folder).to_pylist()
        return ordered({name: row[name] for name in names or row} for row in rows)

    def tuples(self, *names: str) -> list[tuple[Any, ...]]:
        return sorted((tuple(row.values()) for row in self.content(*names)), key=_comparable)


def ordered(rows: Iterable[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: _comparable([row[name] for name in sorted(row)]))


def _comparable(values: Iterable[Any]) -> list[tuple[bool, str]]:
    return [(value is not None, str(value)) for value in values]


def again(table: Formed, rows: list[dict[str, Any]], name: str, read_at: int) -> None:
    """What a load does that finds the table there."""
    origin = LoadOrigin(seq=table.seq + 1, position="0/FF", read_at=read_at * 1_000_000)
    batches = with_added_columns(table.form, table.schema, record_batches(table.schema, rows), origin)
    staging = engines.staging(table.folder)
    files = stage(
        staging,
        name,
        table.form.stored_schema(table.schema),
        batches,
        table.form.partition_by,
        numbered=engines.IS_ICEBERG,
    )
    here, table.seq = table.seq, table.seq + 1
    for _ in range(2):  # a task may be run twice
        table.table.merge_load(table.schema, files, table.cursor(here), table.cursor(table.seq), origin=origin)
        assert table.table.applied_position() == table.cursor(table.seq)


def steps_with(texts: st.SearchStrategy[str | None], *, least: int = 1, most: int = 12) -> st.SearchStrategy[list[Any]]:
    """Steps for `story`, with these texts among their values."""
    step = st.tuples(
        st.sampled_from(["insert", "insert", "update", "update", "delete", "move", "truncate"]),
        st.integers(0, 3),
        st.integers(0, 3),
        texts,
        st.sampled_from([(), ("big",), ("name", "big")]),
        st.booleans(),
        st.integers(900, 1100),
    )
    return st.lists(step, min_size=least, max_size=most)


def story(steps: list[Any]) -> tuple[list[dict[str, Any]], list[Tx]]:
    """Rows to begin with, and transactions over them."""
    model, transactions = Model(), list[Tx]()
    for number in (0, 1):
        model.step("insert", number, number, "begun", ())
    begun = list(model.table().values())
    for kind, at, to, value, unchanged, ends, time in steps:
        told = model.step(kind, at, to, value, unchanged)
        if transactions and not ends:
            transactions[-1] = replace(transactions[-1], changes=(*transactions[-1].changes, *told))
        else:
            transactions.append(Tx(time, tuple(told)))
    return begun, [given for given in transactions if given.changes]


def pieces(batch: pa.Table, cuts: set[int]) -> Iterator[pa.Table]:
    """The batch, cut between some of its rows; the two rows of a move stay together, as they do in the log."""
    moved = batch.column("_moved_from").to_pylist() if "_moved_from" in batch.column_names else []
    joined = {at for at, row in enumerate(moved) if row is not None}
    ends = sorted({cut for cut in cuts if 0 < cut < batch.num_rows and cut not in joined})
    for start, end in zip([0, *ends], [*ends, batch.num_rows], strict=True):
        yield batch.slice(start, end - start)


# --- what must come of it ----------------------------------------------------------------------------------


@dataclass
class Account:
    """What a table of each form must hold, told one change after the other and without any cleverness."""

    schema: TableSchema
    live: dict[Any, Row] = field(default_factory=dict)
    marked: dict[Any, Row] = field(default_factory=dict)
    """A mirror with soft deletes, by key."""
    versions: list[Row] = field(default_factory=list)
    clock: int = READ_AT * 1_000_000

    @classmethod
    def of(cls, schema: TableSchema, begun: Iterable[Row], batch: pa.Table) -> Account:
        """After rows were loaded, and changes came."""
        account = cls(schema)
        account.load(begun)
        account.take(batch)
        return account

    def load(self, rows: Iterable[Row], seq: int = LOADED_SEQ) -> None:
        said = {"_op": "read", "_seq": seq, "_tx": None}
        for row in rows:
            key = self._key(row)
            self.live[key] = row
            self.marked[key] = {**row, "_deleted": False, **said}
            self.versions.append({**row, "_valid_from": second(READ_AT), "_valid_to": None, "_current": True, **said})

    def _key(self, row: Row) -> Any:
        return tuple(row[name] for name in self.schema.names if name in self.schema.key)

    def take(self, batch: pa.Table) -> None:
        """Whole transactions."""
        rows = batch.to_pylist()
        for number in dict.fromkeys(row[change.TX] for row in rows):
            self.transact([row for row in rows if row[change.TX] == number])

    def transact(self, rows: list[Row]) -> None:
        """The changes of one transaction."""
        before, touched = dict(self.live), dict[Any, Row]()
        gone: Row = {}
        for row in rows:
            op, own = row[change.OP], {name: row[name] for name in self.schema.names}
            said = {"_op": op, "_seq": row[change.SEQ], "_tx": row[change.TX]}
            self.clock = max(self.clock, int(row[change.COMMITTED_AT].timestamp() * 1_000_000))
            if op == "truncate":
                for key in self.live:
                    self.marked[key] |= {"_deleted": True, **said}
                    touched[key] = said
                self.live.clear()
                continue
            key = self._key(own)
            if op == "delete":
                if key in self.live:
                    gone = self.live.pop(key)
                    self.marked[key] |= {"_deleted": True, **said}
                    touched[key] = said
                continue
            base = gone if op == "insert" else self.live.get(key, {})
            whole = {
                name: base[name] if name in (row.get(change.UNCHANGED) or ()) else value for name, value in own.items()
            }
            self.live[key] = whole
            self.marked[key] = {**whole, "_deleted": False, **said}
            touched[key] = said
        self._end(before, touched)

    def _end(self, before: dict[Any, Row], touched: dict[Any, Row]) -> None:
        now = EPOCH + timedelta(microseconds=self.clock)
        for key, said in touched.items():
            if key in before:
                (version,) = [row for row in self.versions if row["_current"] and self._key(row) == key]
                version |= {"_valid_to": now, "_current": False}
            if key in self.live:
                begun = {"_valid_from": now, "_valid_to": None, "_current": True}
                self.versions.append({**self.live[key], **begun, **said})
