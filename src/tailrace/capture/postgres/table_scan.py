"""Tables read for a runtime, chunk after chunk, with the planner, the barrier and the judgement of a load by Spark.

Bulk: planned, then one exported snapshot that all chunks are read in; the stream begins at its point. Resumed, or live
beside a stream: each chunk in a snapshot of its own, after every transaction that was open has ended, and only in one
that sees all that was delivered before.

The rows of a table come in the order of its key, partition after partition. So what was acknowledged is told by the
last key of the partition under way, and a scan that is resumed asks for what lies behind it. A table without a key
has no such order: it can only be read in one snapshot, and not be resumed.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from psycopg import sql

from tailrace.capture.port import ScanPiece
from tailrace.capture.postgres.chunks import Chunk, ChunkKind, Plan, key_texts
from tailrace.capture.postgres.snapshot import BarrierSnapshot, ExactSnapshot, SnapshotReader
from tailrace.errors import SourceError, SourceRewritten, TableUnpublished, TailraceError, Unsupported
from tailrace.model.evolution import same_version
from tailrace.model.position import ZERO
from tailrace.model.schema import TableId

if TYPE_CHECKING:
    from tailrace.capture.postgres.source import PostgresCapture

log = logging.getLogger(__name__)

ALTERED_MAX = 20
"""Times that a table was altered between its plan and the snapshot."""


@dataclass(frozen=True, kw_only=True)
class ScanProgress:
    """What was acknowledged: tables before `at`; of that one partitions before `leaf`, and of it keys up to `after`."""

    tables: tuple[TableId, ...]
    incremental: bool
    where: str | None
    table_index: int = 0
    files: tuple[tuple[int, int], ...] = ()
    """Where the rows of the table under way lay."""
    leaf: int | None = None
    key: tuple[str, ...] = ()
    """The columns that the rows of the partition came in the order of."""
    after_key: tuple[str, ...] | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "tables": [[table.schema, table.name] for table in self.tables],
            "live": self.incremental,
            "where": self.where,
            "at": self.table_index,
            "files": [list(pair) for pair in self.files],
            "leaf": self.leaf,
            "key": list(self.key),
            "after": None if self.after_key is None else list(self.after_key),
        }

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> ScanProgress:
        after = stored["after"]
        return cls(
            tables=tuple(TableId(*names) for names in stored["tables"]),
            incremental=stored["live"],
            where=stored["where"],
            table_index=stored["at"],
            files=tuple((oid, file) for oid, file in stored["files"]),
            leaf=stored["leaf"],
            key=tuple(stored["key"]),
            after_key=None if after is None else tuple(after),
        )


class Barrier:
    """Waits, in the background, for all transactions that are open now; the stream goes on meanwhile."""

    def __init__(self, source: PostgresCapture) -> None:
        self._source = source
        self._given_up = threading.Event()
        self._noted: BarrierSnapshot | None = None
        self._failure: TailraceError | None = None
        self._thread = threading.Thread(target=self._wait, name="tailrace-barrier", daemon=True)
        self._thread.start()

    def _wait(self) -> None:
        try:
            self._noted = self._source.wait_for_writers(self._given_up.is_set)
        except TailraceError as error:
            self._failure = error
        except Exception as error:  # the thread's boundary: whoever asks would wait for ever
            self._failure = SourceError(
                f"the wait for open transactions failed: {type(error).__name__}",
                hint="Read the tables again; if it comes back, report it.",
            )

    def result(self) -> BarrierSnapshot | None:
        """What chunks are compared with; None while it waits."""
        if self._thread.is_alive():
            return None
        if self._failure is not None:
            raise self._failure
        return self._noted

    def close(self) -> None:
        self._given_up.set()
        self._thread.join()


class PostgresScan:
    """Tables of one database, for one caller."""

    def __init__(self, source: PostgresCapture, cursor: ScanProgress, *, fresh: bool) -> None:
        self._source, self._cursor = source, cursor
        self._exact: ExactSnapshot | None = None
        self._barrier: Barrier | None = None
        self._reader: SnapshotReader | None = None
        self._rows: Iterator[pa.RecordBatch] = iter(())
        self._ahead: pa.RecordBatch | None = None
        self._chunk: Chunk | None = None
        self._seen = ZERO
        self._todo: deque[Chunk] = deque()
        self._plan: Plan | None = None
        self._plans: dict[TableId, Plan] = {}
        self.start = ZERO
        """Where the stream begins that comes after a bulk scan."""
        require_published(source, cursor.tables[cursor.table_index :])
        try:
            if fresh and not cursor.incremental:
                self._open_exact()
            else:
                self._barrier = Barrier(source)
            self._enter_table()
        except BaseException:
            self.close()
            raise

    def _open_exact(self) -> None:
        """Plan first, so that a table that is rewritten before the snapshot is told by its files."""
        for _ in range(ALTERED_MAX):
            plans = {table: self._planned(table) for table in self._cursor.tables}
            # Ours at once: it holds back the server's clean-up until it is closed, whatever comes of the question.
            exact = self._exact = self._source.snapshot().__enter__()
            now = self._source.describe(plans)
            if all(table in now and same_version(plan.schema, now[table]) for table, plan in plans.items()):
                self._plans, self.start = plans, exact.position
                return
            self._exact = None
            exact.__exit__()
        raise SourceRewritten("a table is altered again and again", hint="Read it when nobody alters it.")

    def _planned(self, table: TableId) -> Plan:
        plan = self._source.plan(table, ChunkKind.KEY, self._source.scan_chunk_bytes)
        if self._cursor.incremental and not plan.schema.key:
            raise Unsupported(
                "a table without a key cannot be read beside the stream",
                table=table,
                hint="Name it in `snapshot_tables`, or give it a primary key.",
            )
        return plan

    def _enter_table(self) -> None:
        """Plan the table under way, if there is one, and drop what was acknowledged of it."""
        cursor = self._cursor
        if cursor.table_index >= len(cursor.tables):
            self._todo.clear()
            return
        table = cursor.tables[cursor.table_index]
        plan = self._plans.get(table) or self._planned(table)
        if cursor.where is not None:
            self._source.require_valid_condition(
                plan.schema, cursor.where
            )  # also where it is resumed: nothing gets it stuck
        files = tuple((leaf.oid, leaf.file) for leaf in plan.leaves)
        # A partition that has grown may be cut by now, and then its rows come in the order of the index.
        keys = {chunk.leaf.oid: _names(plan, chunk) for chunk in plan.chunks}
        if cursor.after_key is not None and (files != cursor.files or keys.get(cursor.leaf or 0) != cursor.key):
            log.warning("a table was changed while it was read: it is read again", extra={"table": str(table)})
            cursor = replace(cursor, leaf=None, key=(), after_key=None)
        self._plan, self._cursor = plan, replace(cursor, files=files)
        begun = cursor.leaf if cursor.leaf is not None else -1
        self._todo = deque(chunk for chunk in plan.chunks if chunk.leaf.oid >= begun)
        if not self._todo:
            self._leave_table()

    def _leave_table(self) -> None:
        self._cursor = replace(
            self._cursor, table_index=self._cursor.table_index + 1, files=(), leaf=None, key=(), after_key=None
        )
        self._enter_table()

    # What the runtime calls.

    def record(self) -> Mapping[str, Any]:
        return self._cursor.to_json()

    @property
    def done(self) -> bool:
        return self._chunk is None and not self._todo

    def begin(self, delivered: Collection[int]) -> bool:
        if self._chunk is not None:
            return True
        noted = self._barrier.result() if self._barrier is not None else None
        if self._barrier is not None and noted is None:
            return False
        chunk, plan = self._todo[0], self._plan
        assert plan is not None, "a chunk is of a plan"
        seconds = self._source.scan_seconds_max
        if self._exact is not None:
            reader = self._exact.reader(seconds)
        else:
            reader = self._source.chunk_reader(seconds, noted.ceiling if noted else ZERO)
        self._reader = reader.__enter__()
        self._seen = reader.lock_chunk(plan.schema, chunk)
        if delivered and not reader.sees_all(delivered):
            self._leave_reader()
            return False
        self._todo.popleft()
        self._chunk = chunk
        self._rows = reader.rows(plan.schema, chunk, self._condition(plan, chunk), ordered_by=_key(plan, chunk))
        self._ahead = next(self._rows, None)
        return True

    def _condition(self, plan: Plan, chunk: Chunk) -> str | None:
        cursor = self._cursor
        parts = [f"({cursor.where}\n)"] if cursor.where is not None else []
        if cursor.after_key is not None and chunk.leaf.oid == cursor.leaf:
            key = _key(plan, chunk)
            names = sql.SQL(", ").join(sql.Identifier(name) for name, _ in key)
            values = sql.SQL(", ").join(
                sql.Literal(text) + sql.SQL(f"::{kind}") for text, (_, kind) in zip(cursor.after_key, key, strict=True)
            )
            parts.append(sql.SQL("({}) > ({})").format(names, values).as_string())
        return " and ".join(parts) or None

    def next(self, rows_max: int) -> ScanPiece | None:
        plan, chunk = self._plan, self._chunk
        if chunk is None or plan is None:
            return None
        while self._ahead is not None and not len(self._ahead):
            self._ahead = next(self._rows, None)
        batch = self._ahead
        if batch is None:
            self._leave_chunk()
            return None
        if len(batch) > rows_max:
            data, self._ahead = batch.slice(0, rows_max), batch.slice(rows_max)
        else:
            data, self._ahead = batch, next(self._rows, None)
        last = self._ahead is None and not self._todo
        cursor, names = self._cursor, _names(plan, chunk)
        if cursor.leaf != chunk.leaf.oid:
            cursor = replace(cursor, leaf=chunk.leaf.oid, key=names, after_key=None)
        following = replace(cursor, table_index=cursor.table_index + 1, files=(), leaf=None, key=(), after_key=None)

        def record(rows: int) -> Mapping[str, Any]:
            if last and rows >= len(data):
                return following.to_json()
            if not names or not rows:
                return cursor.to_json()
            after = tuple(_text(data.column(name)[rows - 1]) for name in names)
            return replace(cursor, after_key=after).to_json()

        if names:
            self._cursor = replace(cursor, after_key=tuple(_text(data.column(name)[-1]) for name in names))
        return ScanPiece(schema=plan.schema, data=data, position=self._seen, table_done=last, record=record)

    def _leave_chunk(self) -> None:
        self._chunk = None
        self._leave_reader()
        if not self._todo:
            self._leave_table()

    def _leave_reader(self) -> None:
        reader, self._reader = self._reader, None
        self._rows, self._ahead = iter(()), None
        if reader is not None:
            reader.__exit__()

    def close(self) -> None:
        self._leave_reader()
        if self._barrier is not None:
            self._barrier.close()
        exact, self._exact = self._exact, None
        if exact is not None:
            exact.__exit__()


def resume_scan(source: PostgresCapture, record: Mapping[str, Any]) -> PostgresScan | None:
    """Go on with a scan in snapshots of their own; None if a table that is not done has no key to go by."""
    cursor = ScanProgress.from_json(record)
    left = cursor.tables[cursor.table_index :]
    shapes = source.describe(left)
    if any(not shape.key for shape in shapes.values()):
        return None
    return PostgresScan(source, cursor, fresh=False)


def require_published(source: PostgresCapture, tables: Sequence[TableId]) -> None:
    """Refuse tables whose changes the stream would not bring: what is written while they are read would be lost."""
    published = source.publications_by_table() if tables else {}
    for table in tables:
        if not published.get(table):
            raise TableUnpublished(
                "the source does not publish the table's changes",
                table=table,
                hint="Have the source's settings want it, or add it to your publication; then start again.",
            )


def _key(plan: Plan, chunk: Chunk) -> tuple[tuple[str, str], ...]:
    """Names and types of what the chunk's rows are ordered by."""
    types = {column.name: column.source_type for column in plan.schema.columns}
    return chunk.key or tuple((name, types[name]) for name in plan.schema.key)


def _names(plan: Plan, chunk: Chunk) -> tuple[str, ...]:
    return tuple(name for name, _ in _key(plan, chunk))


def _text(scalar: pa.Scalar) -> str:
    """What the server reads as the value; of what it may stand for the least: what is between the two rather comes
    twice than never."""
    return key_texts(scalar)[0]
