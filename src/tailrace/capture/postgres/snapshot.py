"""Reads tables as of one position, or chunk by chunk with a position each.

Exact: a temporary slot is created after the table is in the publication. It waits for every open transaction, and names
the position. What committed before is in its exported snapshot, what commits after is in the stream, and nothing is in
both. It holds back the server's clean-up while it is open, so it has a time limit.

Chunked: `wait_for_writers` waits for every transaction that was open, then records one snapshot. What that snapshot
does not see is in the stream, and every later snapshot sees more. So chunks may be read in any order at any later time:
replaying the stream over them, from the first transaction that the recorded snapshot did not see, misses nothing.
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
"""The longest that the server accepts; 0 would mean no limit."""
_PAUSE_SECONDS = 0.2
_REWRITTEN_HINT = "Nothing to do: the table is loaded again from the beginning."
_GONE = ("42P01", "42703", "3F000")
"""SQLSTATEs: there is no such table, column or schema."""

# No parallel workers: the number of a load's connections is configured. A key range is read through the index, even
# where the server would rather read the whole table for each chunk.
_POLITE = (
    "set local max_parallel_workers_per_gather = 0; set local jit = off; set local enable_seqscan = {seqscan}; "
    f"set local lock_timeout = '{LOCK_SECONDS_MAX}s'; set local statement_timeout = {{timeout_ms}}"
)

# The server looks names up as they are now, whatever the snapshot sees, and so does this query. Types are those of the
# rows.
_SAME_COLUMNS = """
select count(*) from unnest(%(names)s::text[], %(types)s::text[], %(numbers)s::int[]) wanted(name, kind, number)
join pg_attribute a on a.attrelid = %(table)s and a.attnum = number and format_type(a.atttypid, a.atttypmod) = kind
where (pg_identify_object_as_address('pg_class'::regclass, a.attrelid, number)).object_names[3] = name
"""


class ExactSnapshot:
    """One exported snapshot and its position. Use it in a `with` block."""

    position: Lsn
    name: str
    """The snapshot's name, which a reader in another process imports."""

    def __init__(self, url: str, publications: tuple[str, ...], *, invalid_text_replaced: bool = False) -> None:
        self._url = url
        self._publications = publications
        self._invalid_text_replaced = invalid_text_replaced

    def __enter__(self) -> ExactSnapshot:
        self._session = connect_replication(self._url)
        try:
            slot = f"tailrace_load_{uuid.uuid4().hex[:16]}"
            create_slot = f"CREATE_REPLICATION_SLOT {slot} TEMPORARY LOGICAL pgoutput (SNAPSHOT 'export')"
            row = command(self._session, create_slot)
        except BaseException:
            self._session.finish()
            raise
        self.position, self.name = Lsn.parse(row[1] or ""), row[2] or ""
        return self

    def __exit__(self, *_: object) -> None:
        self._session.finish()

    def reader(self, seconds_max: float = OPEN_SECONDS_MAX) -> SnapshotReader:
        """Return a reader of this snapshot, for this process or, pickled, for another one."""
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
    """The snapshot that the barrier recorded; chunks that are read later are compared with it."""

    floor: Lsn
    """It sees everything that committed up to here."""
    ceiling: Lsn
    """It sees nothing that committed after here."""
    xmin: int
    xmax: int
    running: tuple[int, ...]
    standby: bool

    def sees(self, transaction: int) -> bool:
        """Return whether it sees a committed transaction. A standby does not list those that were running."""
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
# Only for people. A role that may not see other sessions gets no name, no state and no age.
_WHOSE = f"""
select pid, {TEXT_AS_BYTES_SQL.format(text="coalesce(p.gid, a.application_name)")}, a.state,
  extract(epoch from clock_timestamp() - coalesce(p.prepared, a.xact_start))::float8
from (select transactionid, pid from pg_locks where {_WRITERS}) l left join pg_stat_activity a using (pid)
  left join pg_prepared_xacts p on p.transaction = l.transactionid
order by 4 desc nulls last
"""


def open_transactions(url: str) -> str | None:
    """Return the number of open transactions that write, and the oldest one, as text. None without any."""
    try:
        with connect(url) as connection:
            rows = connection.execute(_WHOSE, prepare=False).fetchall()
    except psycopg.Error as error:
        raise map_error(error, url) from error
    if not rows:
        return None
    pid, name, state, seconds = rows[0]
    which = f"pid {pid}" if pid else "prepared"
    parts = [which + (f' "{name.decode(errors="replace")}"' if name else ""), *([state] if state else [])]
    if seconds is not None:
        parts.append(f"for {round(seconds)} s")
    if len(rows) == 1:
        return f"1 open transaction: {' '.join(parts)}"
    which_of_them = "one of them" if seconds is None else "the oldest"
    return f"{len(rows)} open transactions, {which_of_them}: {' '.join(parts)}"


def wait_for_writers(
    url: str, standby: str | None, stopping: Callable[[], bool] = lambda: False
) -> BarrierSnapshot | None:
    """Wait until all transactions that are open now have ended, then record a snapshot. None if `stopping`.

    A commit that waits for a synchronous standby is open: it is in the server's log already, and no snapshot sees it.
    """
    try:
        return _wait_for_writers(url, standby, stopping)
    except psycopg.Error as error:
        raise map_error(error, url) from error


def _wait_for_writers(url: str, standby: str | None, stopping: Callable[[], bool]) -> BarrierSnapshot | None:
    with connect(url) as primary:
        floor = _position(primary)
        still_open = {row[0] for row in primary.execute(_OPEN, prepare=False)}
        while still_open := still_open & {row[0] for row in primary.execute(_OPEN, prepare=False)}:
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
    assert row is not None, "an aggregate has a row"
    xmin, xmax, running, standby = row
    ceiling = max(floor, _sent_position(connection))
    return BarrierSnapshot(floor=floor, ceiling=ceiling, xmin=xmin, xmax=xmax, running=tuple(running), standby=standby)


def _sent_position(connection: psycopg.Connection) -> Lsn:
    """Return a flushed position at or after all that is visible. The stream reaches no other."""
    row = connection.execute("select pg_is_in_recovery()", prepare=False).fetchone()
    return _position(connection) if row and row[0] else committed_until(connection)


def _position(connection: psycopg.Connection) -> Lsn:
    """Return a position at or after the end of everything that this server can show."""
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
            raise SnapshotGone(
                "the snapshot no longer exists", hint="Nothing to do: the load continues without it."
            ) from error
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
        """Lock the chunk's table while this reader is open. Refuse it if it is not as the plan knows it.

        Returns a position at or after the end of everything that this reader sees. Must be the first query: a snapshot
        of our own is taken here, under the lock.
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
                "the server that chunks are read from is behind",
                behind_bytes=self._at_least - seen,
                hint="It is retried. Check that the standby follows the source.",
            )
        return seen

    def lock_schema(self, schema: TableSchema) -> None:
        """Lock the table's columns while this reader is open; refuse it if they have changed.

        A name may be another column's by now. Must be the first query, as in `lock_chunk`.
        """
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
        matching = self._connection.execute(
            _SAME_COLUMNS,
            {
                "names": schema.names[: len(numbers)],
                "types": types[: len(numbers)],
                "numbers": list(numbers),
                "table": schema.relation,
            },
        ).fetchone()
        return matching == (len(numbers),)

    def position(self) -> Lsn:
        """Return a position at or after everything seen until now. The stream will reach it."""
        return self._point or _sent_position(self._connection)

    def rows(
        self,
        schema: TableSchema,
        chunk: Chunk | None = None,
        condition: str | None = None,
        *,
        ordered_by: Sequence[tuple[str, str]] = (),
    ) -> Iterator[pa.RecordBatch]:
        """Yield the table's or a chunk's rows that fulfil the SQL condition.

        A chunk's rows are in the order of these columns, if `ordered_by` has any.
        """
        try:
            yield from self._copied(schema, chunk, condition, ordered_by)
        except ValueUnfit:
            # Read again to report where the row is: to select `ctid` from the start would slow down every load.
            with_ctid = replace(schema, columns=(CTID, *schema.columns))
            again = SnapshotReader(self._url, self._name, self._publications, self._invalid_text_replaced)
            with suppress(SourceError), again:
                for _ in again._copied(with_ctid, chunk, condition):
                    pass
            raise
        except SourceError as error:
            if chunk is not None and self._is_changed(error, schema, chunk, condition):
                raise _rewritten(schema) from error
            raise

    def _is_changed(self, error: SourceError, schema: TableSchema, chunk: Chunk, condition: str | None) -> bool:
        """Return whether what the server did not find belonged to the table.

        A condition may name what never existed: so where there is one, the table itself is checked.
        """
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
        """Yield a chunk's rows with their `_unfit` column, including rows with unfit values.

        In a session of its own, after `rows` has failed in this one; in the same snapshot if it has a name.
        """
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
        """Return whether all these transactions, which have committed, are visible.

        A commit may wait for a synchronous standby: then it is in the stream, and in no snapshot.
        """
        snapshot = _take_barrier_snapshot(self._connection, ZERO)
        return all(snapshot.sees(transaction) for transaction in transactions)

    def rows_by_key(self, schema: TableSchema, keys: pa.Table) -> Iterator[pa.RecordBatch]:
        """Yield the rows with these keys, as far as they exist."""
        types = {column.name: column.source_type for column in schema.columns}
        names, numbers = keys.schema.names, range(keys.num_columns)
        key_values = [
            texts for key in zip(*keys.columns, strict=True) for texts in itertools.product(*map(key_texts, key))
        ]
        # As arrays, whatever their number: a list of that many conditions would overflow the server's stack.
        wanted = sql.SQL("({}) in (select {} from unnest({}) as asked({}))").format(
            sql.SQL(", ").join(map(sql.Identifier, names)),
            sql.SQL(", ").join(sql.SQL(f"asked.k{n}::{types[name]}") for n, name in enumerate(names)),
            sql.SQL(", ").join(sql.Literal([texts[n] for texts in key_values]) + sql.SQL("::text[]") for n in numbers),
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
        """Return the SQL for the rows of the table that the stream publishes."""
        conditions: list[sql.Composable] = []
        if self._publications is not None:
            row_filter = Catalogue(self._connection).row_filter(schema.table, self._publications)
            # The server's own text, every name in it qualified.
            conditions += [sql.SQL(f"({row_filter})")] if row_filter else []
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
        """Return the table as a whole, and its partitions that the server does not log."""
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
