"""Reads tables for a runtime, chunk after chunk. Planner and barrier are those of a load by Spark.

Bulk: first a plan, then one exported snapshot in which all chunks are read; the stream begins at its position. Resumed,
or live during a stream: each chunk has a snapshot of its own, taken after every open transaction has ended. Only a
snapshot that sees everything delivered before is used.

The rows of a table arrive in the order of its key, partition after partition. So the last key of the partition under
way records what was acknowledged, and a resumed scan requests what is after it. A keyless table has no such order: it
can only be read in one snapshot, and a scan of it cannot be resumed.
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
"""Times that a table may be altered between its plan and the snapshot."""


@dataclass(frozen=True, kw_only=True)
class ScanProgress:
    """The acknowledged part: tables before `table_index`, and a part of that table.

    Of that table it is the partitions before `leaf`, and in `leaf` all keys up to `after_key`.
    """

    tables: tuple[TableId, ...]
    incremental: bool
    where: str | None
    table_index: int = 0
    files: tuple[tuple[int, int], ...] = ()
    """The files that held the rows of the table under way."""
    leaf: int | None = None
    key: tuple[str, ...] = ()
    """The columns that the partition's rows are ordered by."""
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
    """Waits, in the background, for all transactions that are open now; the stream continues meanwhile."""

    def __init__(self, source: PostgresCapture) -> None:
        self._source = source
        self._given_up = threading.Event()
        self._snapshot: BarrierSnapshot | None = None
        self._failure: TailraceError | None = None
        self._thread = threading.Thread(target=self._wait, name="tailrace-barrier", daemon=True)
        self._thread.start()

    def _wait(self) -> None:
        try:
            self._snapshot = self._source.wait_for_writers(self._given_up.is_set)
        except TailraceError as error:
            self._failure = error
        except Exception as error:  # the thread's boundary: the caller would wait for ever
            self._failure = SourceError(
                f"the wait for open transactions failed: {type(error).__name__}",
                hint="Read the tables again; if it happens again, report it.",
            )

    def result(self) -> BarrierSnapshot | None:
        """Return the snapshot that chunks are compared with; None while it waits."""
        if self._thread.is_alive():
            return None
        if self._failure is not None:
            raise self._failure
        return self._snapshot

    def close(self) -> None:
        self._given_up.set()
        self._thread.join()


class PostgresScan:
    """A scan of tables of one database, for one caller."""

    def __init__(self, source: PostgresCapture, progress: ScanProgress, *, fresh: bool) -> None:
        self._source, self._progress = source, progress
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
        """The position where the stream begins after a bulk scan."""
        require_published(source, progress.tables[progress.table_index :])
        try:
            if fresh and not progress.incremental:
                self._open_exact()
            else:
                self._barrier = Barrier(source)
            self._enter_table()
        except BaseException:
            self.close()
            raise

    def _open_exact(self) -> None:
        """Plan first, so that the files show whether a table was rewritten before the snapshot."""
        for _ in range(ALTERED_MAX):
            plans = {table: self._planned(table) for table in self._progress.tables}
            # Owned at once, and so closed whatever the query returns: it holds back the server's clean-up until then.
            exact = self._exact = self._source.snapshot().__enter__()
            now = self._source.describe(plans)
            if all(table in now and same_version(plan.schema, now[table]) for table, plan in plans.items()):
                self._plans, self.start = plans, exact.position
                return
            self._exact = None
            exact.__exit__()
        raise SourceRewritten("a table is altered again and again", hint="Read it at a time when it is not altered.")

    def _planned(self, table: TableId) -> Plan:
        plan = self._source.plan(table, ChunkKind.KEY, self._source.scan_chunk_bytes)
        if self._progress.incremental and not plan.schema.key:
            raise Unsupported(
                "a keyless table cannot be read while the stream runs",
                table=table,
                hint="Name it in `snapshot_tables`, or give it a primary key.",
            )
        return plan

    def _enter_table(self) -> None:
        """Plan the table under way, if there is one, and drop the chunks already acknowledged."""
        progress = self._progress
        if progress.table_index >= len(progress.tables):
            self._todo.clear()
            return
        table = progress.tables[progress.table_index]
        plan = self._plans.get(table) or self._planned(table)
        if progress.where is not None:
            self._source.require_valid_condition(
                plan.schema, progress.where
            )  # also for a resumed scan, which must not get stuck on it
        files = tuple((leaf.oid, leaf.file) for leaf in plan.leaves)
        # A partition that has grown may be cut by now, and then its rows are in the order of the index.
        keys = {chunk.leaf.oid: _names(plan, chunk) for chunk in plan.chunks}
        if progress.after_key is not None and (files != progress.files or keys.get(progress.leaf or 0) != progress.key):
            log.warning("a table was changed while it was read: it is read again", extra={"table": str(table)})
            progress = replace(progress, leaf=None, key=(), after_key=None)
        self._plan, self._progress = plan, replace(progress, files=files)
        first_leaf = progress.leaf if progress.leaf is not None else -1
        self._todo = deque(chunk for chunk in plan.chunks if chunk.leaf.oid >= first_leaf)
        if not self._todo:
            self._leave_table()

    def _leave_table(self) -> None:
        self._progress = replace(
            self._progress, table_index=self._progress.table_index + 1, files=(), leaf=None, key=(), after_key=None
        )
        self._enter_table()

    # The runtime calls the methods below.

    def record(self) -> Mapping[str, Any]:
        return self._progress.to_json()

    @property
    def done(self) -> bool:
        return self._chunk is None and not self._todo

    def begin(self, delivered: Collection[int]) -> bool:
        if self._chunk is not None:
            return True
        barrier_snapshot = self._barrier.result() if self._barrier is not None else None
        if self._barrier is not None and barrier_snapshot is None:
            return False
        chunk, plan = self._todo[0], self._plan
        assert plan is not None, "a chunk belongs to a plan"
        seconds = self._source.scan_seconds_max
        if self._exact is not None:
            reader = self._exact.reader(seconds)
        else:
            reader = self._source.chunk_reader(seconds, barrier_snapshot.ceiling if barrier_snapshot else ZERO)
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
        progress = self._progress
        parts = [f"({progress.where}\n)"] if progress.where is not None else []
        if progress.after_key is not None and chunk.leaf.oid == progress.leaf:
            key = _key(plan, chunk)
            names = sql.SQL(", ").join(sql.Identifier(name) for name, _ in key)
            values = sql.SQL(", ").join(
                sql.Literal(text) + sql.SQL(f"::{kind}")
                for text, (_, kind) in zip(progress.after_key, key, strict=True)
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
        progress, names = self._progress, _names(plan, chunk)
        if progress.leaf != chunk.leaf.oid:
            progress = replace(progress, leaf=chunk.leaf.oid, key=names, after_key=None)
        following = replace(progress, table_index=progress.table_index + 1, files=(), leaf=None, key=(), after_key=None)

        def record(rows: int) -> Mapping[str, Any]:
            if last and rows >= len(data):
                return following.to_json()
            if not names or not rows:
                return progress.to_json()
            after = tuple(_text(data.column(name)[rows - 1]) for name in names)
            return replace(progress, after_key=after).to_json()

        if names:
            self._progress = replace(progress, after_key=tuple(_text(data.column(name)[-1]) for name in names))
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
    """Resume a scan with a snapshot per chunk. None if a table that is not done has no key."""
    progress = ScanProgress.from_json(record)
    remaining = progress.tables[progress.table_index :]
    schemas = source.describe(remaining)
    if any(not schema.key for schema in schemas.values()):
        return None
    return PostgresScan(source, progress, fresh=False)


def require_published(source: PostgresCapture, tables: Sequence[TableId]) -> None:
    """Refuse tables that the stream does not publish. What is written during the scan would be lost."""
    published = source.publications_by_table() if tables else {}
    for table in tables:
        if not published.get(table):
            raise TableUnpublished(
                "the source does not publish the table's changes",
                table=table,
                hint="Include it in the tables that the source's settings want, or add it to your publication; then "
                "start again.",
            )


def _key(plan: Plan, chunk: Chunk) -> tuple[tuple[str, str], ...]:
    """Return names and types of the columns that the chunk's rows are ordered by."""
    types = {column.name: column.source_type for column in plan.schema.columns}
    return chunk.key or tuple((name, types[name]) for name in plan.schema.key)


def _names(plan: Plan, chunk: Chunk) -> tuple[str, ...]:
    return tuple(name for name, _ in _key(plan, chunk))


def _text(scalar: pa.Scalar) -> str:
    """Return the text that the server reads as the value. It is the least one, if there are several.

    Then rows between the two are rather read twice than never.
    """
    return key_texts(scalar)[0]
