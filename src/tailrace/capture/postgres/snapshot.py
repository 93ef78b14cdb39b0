"""Reading tables as of one position, or chunk by chunk, each as of its own.

Exact: a temporary slot is made after the table is in the publication, waits for every open writer, and names the
point: what committed before is in its exported snapshot, what commits after is in the stream, nothing is in both.
It holds back the server's clean-up while it is open, so it has a time limit.

Chunked: `begin_chunks` waits for every transaction that was open, then notes one snapshot. What that one does not
see is in the stream, and every later snapshot sees more. So whoever replays the stream from the first transaction
that the noted snapshot did not see, over chunks read in any order at any time after it, misses nothing.
"""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import psycopg
import pyarrow as pa
from psycopg import sql

from tailrace.capture.postgres.catalogue import Catalogue
from tailrace.capture.postgres.chunks import FILE, Chunk, key_texts
from tailrace.capture.postgres.connect import command, connect, connect_replication, map_error
from tailrace.capture.postgres.copy import copy_rows, copy_rows_marking_unfit
from tailrace.capture.postgres.copy_binary import CTID
from tailrace.capture.postgres.preflight import committed_until
from tailrace.capture.postgres.relation_facts import TEXT_AS_BYTES_SQL
from tailrace.errors import SnapshotGone, SourceError, SourceRewritten, SourceSlow, ValueUnfit
from tailrace.model.position import ZERO, Lsn
from tailrace.model.schema import TableId, TableSchema

OPEN_SECONDS_MAX = 3600.0
LOCK_SECONDS_MAX = 60
_TIMEOUT_MS_MAX = 2**31 - 1
"""The server takes no longer one; 0 would mean none."""
_PAUSE_SECONDS = 0.2
_REWRITTEN_HINT = "Nothing to do: it is loaded again from the beginning."
_GONE = ("42P01", "42703", "3F000")
"""There is no such table, column or schema."""

# No parallel workers: how many connections a load may use is settled. A range of the key is read by the index, also
# where the server would rather read the whole table for each chunk.
_POLITE = (
    "set local max_parallel_workers_per_gather = 0; set local jit = off; set local enable_seqscan = {seqscan}; "
    f"set local lock_timeout = '{LOCK_SECONDS_MAX}s'; set local statement_timeout = {{timeout_ms}}"
)

# Names are looked up as they are now, whatever the snapshot sees; and so are they here. Types are those of the rows.
_SAME_COLUMNS = """
select count(*) from unnest(%(names)s::text[], %(types)s::text[], %(numbers)s::int[]) wanted(name, kind, number)
join pg_attribute a on a.attrelid = %(table)s and a.attnum = number and format_type(a.atttypid, a.atttypmod) = kind
where (pg_identify_object_as_address('pg_class'::regclass, a.attrelid, number)).object_names[3] = name
"""


class ExactSnapshot:
    """One exported snapshot and the position it stands for. Use it in a `with` block."""

    position: Lsn
    name: str
    """What a reader in another process imports."""

    def __init__(self, url: str, publications: tuple[str, ...], *, invalid_text_replaced: bool = False) -> None:
        self._url = url
        self._publications = publications
        self._invalid_text_replaced = invalid_text_replaced

    def __enter__(self) -> ExactSnapshot:
        self._session = connect_replication(self._url)
        try:
            slot = f"tailrace_load_{uuid.uuid4().hex[:16]}"
            made = f"CREATE_REPLICATION_SLOT {slot} TEMPORARY LOGICAL pgoutput (SNAPSHOT 'export')"
            row = command(self._session, made)
        except BaseException:
            self._session.finish()
            raise
        self.position, self.name = Lsn.parse(row[1] or ""), row[2] or ""
        return self

    def __exit__(self, *_: object) -> None:
        self._session.finish()

    def reader(self, seconds_max: float = OPEN_SECONDS_MAX) -> SnapshotReader:
        """A reader of this snapshot, here or, pickled, in another process."""
        return SnapshotReader(
            self._url,
            self.name,
            self._publications,
            self._invalid_text_replaced,
            point=self.position,
            seconds_max=seconds_max,
        )


@dataclass(frozen=True, kw_only=True)
class BarrierSnapshot:
    """A snapshot to which chunks that are read later are compared."""

    floor: Lsn
    """Everything that committed up to here is seen by it."""
    ceiling: Lsn
    """Nothing that committed after here is."""
    xmin: int
    xmax: int
    running: tuple[int, ...]
    standby: bool

    def sees(self, transaction: int) -> bool:
        """Whether it sees a transaction that has committed. A standby does not say which were running."""
        if self.standby:
            return transaction < self.xmin
        return transaction < self.xmax and transaction not in self.running

    def to_json(self) -> dict[str, Any]:
        return {
            "floor": str(self.floor),
            "upto": str(self.ceiling),
            "xmin": self.xmin,
            "xmax": self.xmax,
            "running": list(self.running),
            "standby": self.standby,
        }

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> BarrierSnapshot:
        return cls(
            floor=Lsn.parse(stored["floor"]),
            ceiling=Lsn.parse(stored["upto"]),
            xmin=stored["xmin"],
            xmax=stored["xmax"],
            running=tuple(stored["running"]),
            standby=stored["standby"],
        )


_WRITERS = "locktype = 'transactionid' and mode = 'ExclusiveLock' and granted"
_OPEN = f"select transactionid::text::int8 from pg_locks where {_WRITERS}"
# Only for people. A role that may not see others' sessions is told no name, no state and no age.
_WHOSE = f"""
select pid, {TEXT_AS_BYTES_SQL.format(text="coalesce(p.gid, a.application_name)")}, a.state,
  extract(epoch from clock_timestamp() - coalesce(p.prepared, a.xact_start))::float8
from (select transactionid, pid from pg_locks where {_WRITERS}) l left join pg_stat_activity a using (pid)
  left join pg_prepared_xacts p on p.transaction = l.transactionid
order by 4 desc nulls last
"""


def open_transactions(url: str) -> str | None:
    """How many transactions that write are open, and whose the oldest is, in words; None if there is none."""
    try:
        with connect(url) as connection:
            found = connection.execute(_WHOSE, prepare=False).fetchall()
    except psycopg.Error as error:
        raise map_error(error, url) from error
    if not found:
        return None
    pid, name, state, seconds = found[0]
    which = f"pid {pid}" if pid else "prepared"
    said = [which + (f' "{name.decode(errors="replace")}"' if name else ""), *([state] if state else [])]
    if seconds is not None:
        said.append(f"for {round(seconds)} s")
    if len(found) == 1:
        return f"1 open transaction: {' '.join(said)}"
    one = "one of them" if seconds is None else "the oldest"
    return f"{len(found)} open transactions, {one}: {' '.join(said)}"


def wait_for_writers(
    url: str, standby: str | None, stopping: Callable[[], bool] = lambda: False
) -> BarrierSnapshot | None:
    """Wait until every transaction that is open now has ended, then note what is seen; None if told to give up.

    A commit that waits for a synchronous standby is open: it is in the server's log already, and no snapshot sees it.
    """
    try:
        return _wait_for_writers(url, standby, stopping)
    except psycopg.Error as error:
        raise map_error(error, url) from error


def _wait_for_writers(url: str, standby: str | None, stopping: Callable[[], bool]) -> BarrierSnapshot | None:
    with connect(url) as primary:
        floor = _position(primary)
        held = {row[0] for row in primary.execute(_OPEN, prepare=False)}
        while held := held & {row[0] for row in primary.execute(_OPEN, prepare=False)}:
            if stopping():
                return None
            time.sleep(_PAUSE_SECONDS)
        if standby is None:
            return _take_barrier_snapshot(primary, floor)
        passed = _position(primary)
    with connect(standby) as replica:
        while _position(replica) < passed:
            if stopping():
                return None
            time.sleep(_PAUSE_SECONDS)
        return _take_barrier_snapshot(replica, floor)


def _take_barrier_snapshot(connection: psycopg.Connection, floor: Lsn) -> BarrierSnapshot:
    row = connection.execute(
        "select pg_snapshot_xmin(s)::text::int8, pg_snapshot_xmax(s)::text::int8, "
        "array(select pg_snapshot_xip(s)::text::int8), pg_is_in_recovery() from pg_current_snapshot() s",
        prepare=False,
    ).fetchone()
    assert row is not None, "an aggregate"
    xmin, xmax, running, standby = row
    upto = max(floor, _sent_position(connection))
    return BarrierSnapshot(floor=floor, ceiling=upto, xmin=xmin, xmax=xmax, running=tuple(running), standby=standby)


def _sent_position(connection: psycopg.Connection) -> Lsn:
    """The same, but one that the stream will reach: what is not flushed is never sent."""
    row = connection.execute("select pg_is_in_recovery()", prepare=False).fetchone()
    return _position(connection) if row and row[0] else committed_until(connection)


def _position(connection: psycopg.Connection) -> Lsn:
    """Everything this server can show has ended at or before this."""
    row = connection.execute(
        "select case when pg_is_in_recovery() then pg_last_wal_replay_lsn() else pg_current_wal_insert_lsn() end::text",
        prepare=False,
    ).fetchone()
    return Lsn.parse(row[0]) if row and row[0] else ZERO


class SnapshotReader:
    """Reads what one snapshot sees: an exported one, or one of its own. Plain data until it is entered."""

    def __init__(
        self,
        url: str,
        name: str | None,
        publications: tuple[str, ...] | None,
        invalid_text_replaced: bool = False,
        *,
        point: Lsn | None = None,
        at_least: Lsn = ZERO,
        seconds_max: float = OPEN_SECONDS_MAX,
    ) -> None:
        self._url = url
        self._name = name
        self._publications = publications
        self._invalid_text_replaced = invalid_text_replaced
        self._point = point
        self._at_least = at_least
        self._seconds_max = seconds_max

    def __enter__(self) -> SnapshotReader:
        self._connection = connect(self._url)
        try:
            self._connection.execute("begin isolation level repeatable read read only")
            if self._name is not None:
                self._connection.execute(sql.SQL("set transaction snapshot {}").format(self._name))
        except (psycopg.errors.UndefinedObject, psycopg.errors.InvalidParameterValue) as error:
            self._connection.close()
            raise SnapshotGone("the snapshot is gone", hint="The load goes on without it.") from error
        except psycopg.Error as error:
            self._connection.close()
            raise map_error(error, self._url) from error
        self._deadline = time.monotonic() + self._seconds_max
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def describe(self, table: TableId) -> TableSchema:
        return Catalogue(self._connection).describe(table, self._publications)

    def lock_chunk(self, schema: TableSchema, chunk: Chunk) -> Lsn:
        """Keep the chunk's table as the plan knows it until we leave, and refuse if it is not.

        Returns a position that everything seen by this reader ended at or before. Must be the first question asked:
        a snapshot of our own is taken here, under the lock.
        """
        run = self._connection.execute
        try:
            self._lock(chunk.leaf.rows_sql, seqscan="off" if chunk.key else "on")
            row = run(f"select {FILE} from pg_class c where c.oid = %s", (chunk.leaf.oid,)).fetchone()
            same = self._has_columns(schema)
            seen = self._point or _position(self._connection)
        except psycopg.Error as error:
            if (error.sqlstate or "") in _GONE:
                raise _rewritten(schema) from error
            raise map_error(error, self._url) from error
        if row is None or row[0] != chunk.leaf.file or not same:
            raise _rewritten(schema)
        if seen < self._at_least:
            raise SourceSlow(
                "the server that is read from is behind",
                behind_bytes=self._at_least - seen,
                hint="It is tried again. Does the standby follow the source?",
            )
        return seen

    def lock_schema(self, schema: TableSchema) -> None:
        """Keep the table's columns as they are until we leave, and refuse if they are others: a name may be another
        column's by now. Must be the first question asked, as above."""
        try:
            self._lock(sql.SQL("only {}").format(sql.Identifier(schema.table.schema, schema.table.name)))
            same = self._has_columns(schema)
        except psycopg.Error as error:
            if (error.sqlstate or "") in _GONE:
                raise _rewritten(schema) from error
            raise map_error(error, self._url) from error
        if not same:
            raise _rewritten(schema)

    def _lock(self, rows: sql.Composable, *, seqscan: str = "on") -> None:
        timeout_ms = min(max(1, round(self._seconds_max * 1000)), _TIMEOUT_MS_MAX)
        self._connection.execute(_POLITE.format(seqscan=seqscan, timeout_ms=timeout_ms))
        self._connection.execute(sql.SQL("lock table {} in access share mode").format(rows))

    def _has_columns(self, schema: TableSchema) -> bool:
        numbers = schema.facts.numbers if schema.facts else ()
        types = [column.source_type for column in schema.columns]
        found = self._connection.execute(
            _SAME_COLUMNS,
            {
                "names": schema.names[: len(numbers)],
                "types": types[: len(numbers)],
                "numbers": list(numbers),
                "table": schema.relation,
            },
        ).fetchone()
        return found == (len(numbers),)

    def position(self) -> Lsn:
        """Everything seen until now ended at or before this, and the stream will reach it."""
        return self._point or _sent_position(self._connection)

    def rows(
        self,
        schema: TableSchema,
        chunk: Chunk | None = None,
        condition: str | None = None,
        *,
        ordered_by: Sequence[tuple[str, str]] = (),
    ) -> Iterator[pa.RecordBatch]:
        """The table's rows, or those of a chunk, that fulfil the condition, which is SQL; a chunk's in order, if asked
        for, of these columns."""
        try:
            yield from self._copied(schema, chunk, condition, ordered_by)
        except ValueUnfit:
            # Read again to say where the row is: asking for its place from the start would cost every load.
            placed = replace(schema, columns=(CTID, *schema.columns))
            again = SnapshotReader(self._url, self._name, self._publications, self._invalid_text_replaced)
            with suppress(SourceError), again:
                for _ in again._copied(placed, chunk, condition):
                    pass
            raise
        except SourceError as error:
            if chunk is not None and self._is_changed(error, schema, chunk, condition):
                raise _rewritten(schema) from error
            raise

    def _is_changed(self, error: SourceError, schema: TableSchema, chunk: Chunk, condition: str | None) -> bool:
        """Whether what the server does not find was the table's. A condition may name what never was there: so where
        there is one, the table itself is asked."""
        if error.fields.get("sqlstate") not in _GONE:
            return False
        if condition is None:
            return True
        try:
            with SnapshotReader(self._url, None, self._publications, seconds_max=self._seconds_max) as now:
                now.lock_chunk(schema, chunk)
        except SourceRewritten:
            return True
        return False

    def marked_rows(
        self, schema: TableSchema, chunk: Chunk, condition: str | None = None
    ) -> Iterator[tuple[pa.RecordBatch, pa.Array]]:
        """A chunk's rows, those with values that do not fit too: what these are is told beside the rows, as `_unfit`
        has it. In a session of its own, after `rows` has failed in this one; in the same snapshot if it has a name."""
        source = self._from(schema, chunk, condition)
        try:
            yield from copy_rows_marking_unfit(
                self._connection,
                schema,
                source,
                deadline=self._deadline,
                invalid_text_replaced=self._invalid_text_replaced,
            )
        except SourceError as error:
            if self._is_changed(error, schema, chunk, condition):
                raise _rewritten(schema) from error
            raise

    def sees_all(self, transactions: Iterable[int]) -> bool:
        """Whether all these transactions, which have committed, are seen. A commit may wait for a synchronous standby:
        it is in the stream by then, and in no snapshot."""
        noted = _take_barrier_snapshot(self._connection, ZERO)
        return all(noted.sees(transaction) for transaction in transactions)

    def rows_by_key(self, schema: TableSchema, keys: pa.Table) -> Iterator[pa.RecordBatch]:
        """The rows with these keys, as far as they are there."""
        types = {column.name: column.source_type for column in schema.columns}
        names, numbers = keys.schema.names, range(keys.num_columns)
        asked = [texts for key in zip(*keys.columns, strict=True) for texts in itertools.product(*map(key_texts, key))]
        # As arrays, however many there are: of a list of as many conditions the server's stack would overflow.
        wanted = sql.SQL("({}) in (select {} from unnest({}) as asked({}))").format(
            sql.SQL(", ").join(map(sql.Identifier, names)),
            sql.SQL(", ").join(sql.SQL(f"asked.k{n}::{types[name]}") for n, name in enumerate(names)),
            sql.SQL(", ").join(sql.Literal([texts[n] for texts in asked]) + sql.SQL("::text[]") for n in numbers),
            sql.SQL(", ").join(sql.SQL(f"k{n}") for n in numbers),
        )
        yield from self._copied(schema, None, wanted.as_string(self._connection))

    def _copied(
        self,
        schema: TableSchema,
        chunk: Chunk | None,
        condition: str | None,
        ordered_by: Sequence[tuple[str, str]] = (),
    ) -> Iterator[pa.RecordBatch]:
        source = self._from(schema, chunk, condition)
        if chunk is not None and ordered_by:
            leaf = chunk.leaf
            # Qualified, or the order would be that of the texts.
            names = [sql.Identifier(leaf.schema, leaf.name, name) for name, _ in ordered_by]
            source += sql.SQL(" order by {}").format(sql.SQL(", ").join(names))
        return copy_rows(
            self._connection, schema, source, deadline=self._deadline, invalid_text_replaced=self._invalid_text_replaced
        )

    def _from(self, schema: TableSchema, chunk: Chunk | None, condition: str | None) -> sql.Composed:
        """The rows of the table that the stream speaks of."""
        conditions: list[sql.Composable] = []
        if self._publications is not None:
            picked = Catalogue(self._connection).row_filter(schema.table, self._publications)
            # The server's own text, every name in it qualified.
            conditions += [sql.SQL(f"({picked})")] if picked else []
        if condition is not None:
            conditions.append(sql.SQL(f"({condition}\n)"))  # it may end with a comment
        source: sql.Composable
        if chunk is not None:
            source, conditions = chunk.leaf.rows_sql, [*chunk.conditions_sql(), *conditions]
        else:
            source, unlogged = self._table(schema)
            conditions += [sql.SQL("tableoid <> all ({}::oid[])").format(unlogged)] if unlogged else []
        query = sql.SQL("from {}").format(source)
        return sql.SQL(" where ").join([query, sql.SQL(" and ").join(conditions)]) if conditions else query

    def _table(self, schema: TableSchema) -> tuple[sql.Composable, list[int]]:
        """The table as a whole, and the partitions of it whose changes are never in the server's log."""
        query = """
          select c.relkind = 'p', array(
            select l.oid::int8 from pg_partition_tree(c.oid) t join pg_class l on l.oid = t.relid
            where t.isleaf and (l.relpersistence <> 'p' or l.relkind = 'f'))
          from pg_class c where c.oid = %s::oid
        """
        name = sql.Identifier(schema.table.schema, schema.table.name)
        row = self._connection.execute(query, (schema.relation,)).fetchone()
        # The children of an inheritance parent are tables of their own; those of a partitioned one are not.
        return (name if row and row[0] else sql.SQL("only {}").format(name)), (row[1] if row else [])


def _rewritten(schema: TableSchema) -> SourceRewritten:
    return SourceRewritten("the table was changed while it was read", table=schema.table, hint=_REWRITTEN_HINT)
