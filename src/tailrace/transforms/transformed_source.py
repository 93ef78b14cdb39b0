"""PostgreSQL seen through rules: its schemas, stream and snapshot rows, transformed.

In a pipeline rules meet the source only here and in `transformed_stream`. The log, a load and a lake
table get what the rules have made, under the names that rules give. The server is asked in its own terms: an output
schema keeps the schema at the source, and every output table belongs to one source table.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
from psycopg import sql

from tailrace.capture.port import SourceId, TimelineStream
from tailrace.capture.postgres.catalogue import SourceTable
from tailrace.capture.postgres.chunks import Chunk, ChunkKind, Plan
from tailrace.capture.postgres.config import PostgresSettings
from tailrace.capture.postgres.publications import PublishedTables
from tailrace.capture.postgres.snapshot import OPEN_SECONDS_MAX, ExactSnapshot, SnapshotReader
from tailrace.capture.postgres.source import PostgresCapture
from tailrace.capture.postgres.table_scan import PostgresScan
from tailrace.errors import RELOAD_TABLE_HINT, SourceRewritten, Unsupported
from tailrace.model.position import ZERO, Lsn
from tailrace.model.schema import Column, TableId, TableSchema
from tailrace.transforms.output_schema import is_changed_by_rule
from tailrace.transforms.output_tables import OutputTables, can_still_produce, matches_any, target_table
from tailrace.transforms.rules import Outbox, Transforms
from tailrace.transforms.steps.routes import TABLES_MAX
from tailrace.transforms.transform_plan import TransformPlan
from tailrace.transforms.transformed_stream import TransformedStream

TYPES_SECONDS = 600.0
"""Seconds between two queries for an outbox's types; later types arrive with the log."""


class TransformedCapture(PostgresCapture):
    """One PostgreSQL database seen through rules."""

    def __init__(self, settings: PostgresSettings, transforms: Transforms) -> None:
        super().__init__(settings)
        self._names = OutputTables(transforms.rules)
        self.rules = TransformPlan(transforms, names=self._names)
        self._messages: dict[TableId, frozenset[TableId]] = {}
        """The tables that each outbox's messages go to, as far as seen.

        The sets are replaced, never changed in place: another thread may be reading them.
        """
        self._asked_at_time: dict[TableId, float] = {}
        """Time at which each outbox was last asked for its types."""
        self.asks_types = True
        """True if outboxes are asked for their types, which reads all of them."""

    @property
    def on_publish(self) -> Callable[[PublishedTables], None]:
        """Called with every output table of a table that is or will be published."""
        return self._on_publish

    @on_publish.setter
    def on_publish(self, callback: Callable[[PublishedTables], None]) -> None:
        def publish(published: PublishedTables) -> None:
            output = tuple((output, number) for table, number in published.tables for output in self._outputs_of(table))
            callback(replace(published, tables=output))

        self._on_publish = publish

    def remember_schemas(self, schemas: Iterable[TableSchema]) -> None:
        """Remember the newest source schema of each table: several outputs may share one."""
        newest: dict[int, TableSchema] = {}
        for schema in (output.source_schema for output in schemas):
            known = newest.get(schema.relation)
            if known is None or _schema_position(schema) >= _schema_position(known):
                newest[schema.relation] = schema
        super().remember_schemas(newest.values())

    def learn_tables(self, schemas: Iterable[TableSchema]) -> None:
        for schema in schemas:
            source = schema.source_schema.table
            outbox = self._names.outbox_rule(source)
            if outbox is not None and schema.table != source and can_still_produce((outbox,), source, schema.table):
                self._messages[source] = self._messages.get(source, frozenset()) | {schema.table}

    def tables(self) -> list[SourceTable]:
        """Return the output tables of the selected source tables."""
        source_tables = super().tables()
        for source in source_tables:
            if self.asks_types and (outbox := self._names.outbox_rule(source.table)) is not None:
                self._ask_types(source.table, outbox)
        return [
            replace(source, table=output, origin=source.table if output != source.table else None)
            for source in source_tables
            for output in self._outputs_of(source.table)
        ]

    @property
    def discovers_tables(self) -> bool:
        return self._names.has_outboxes

    def _outputs_of(self, table: TableId) -> list[TableId]:
        """Return all output tables of a source table, as far as they are known."""
        messages = sorted(self._messages.get(table, ()))
        for made in messages:
            self._names.claim(made, table)
        return [*self._names.tables_for(table), *messages]

    def _ask_types(self, table: TableId, box: Outbox) -> None:
        """Ask an outbox for the types of its stored messages.

        Messages from before the capture may have tables that the log never names.
        """
        if time.monotonic() < self._asked_at_time.get(table, -TYPES_SECONDS) + TYPES_SECONDS:
            return
        column, name = sql.Identifier(box.type_column), sql.Identifier(table.schema, table.name)
        query = sql.SQL("SELECT DISTINCT {}::text FROM {} WHERE {}::text <> '' LIMIT {}").format(
            column, name, column, TABLES_MAX + 1
        )
        with self._connected() as connection:
            types = [type_ for (type_,) in connection.execute(query)]
        if len(types) > TABLES_MAX:
            raise Unsupported(
                f"outbox has messages of more than {TABLES_MAX:,} types",
                rule=box.name,
                table=table,
                hint="Name a column with fewer values in `type_column`: each type becomes a table.",
            )
        found = frozenset(target_table(box.to, table, type=type_) for type_ in types)
        self._messages[table] = self._messages.get(table, frozenset()) | found
        self._asked_at_time[table] = time.monotonic()

    def name_at_source(self, table: TableId) -> TableId:
        if (known := self._names.source_table(table)) is None:
            self.tables()
            known = self._names.source_table(table)
        return known or table

    def publications_by_table(self) -> dict[TableId, set[str]]:
        found = super().publications_by_table()
        made = [(table.table, table.origin or table.table) for table in self.tables()]
        return {table: found[source] for table, source in made if source in found}

    def definition_versions(self, tables: Sequence[TableId]) -> dict[TableId, str]:
        asked = {table: self.name_at_source(table) for table in tables}
        found = super().definition_versions(list(dict.fromkeys(asked.values())))
        return {table: found[source] for table, source in asked.items() if source in found}

    def describe(self, tables: Iterable[TableId], *, unpublished: bool = False) -> dict[TableId, TableSchema]:
        asked = {table: self.name_at_source(table) for table in tables}
        found = super().describe(dict.fromkeys(asked.values()), unpublished=unpublished)
        return {
            table: self.rules.transformed_schema(found[source], table)
            for table, source in asked.items()
            if source in found
        }

    def check_rules(self) -> None:
        """Refuse rules that cannot be used on the published tables."""
        for schema in super().describe(found.table for found in super().tables()).values():
            self.rules.table_plan(schema)

    def live(self, after: Lsn, origin: SourceId | None = None) -> TimelineStream:
        return TransformedStream(super().live(after, origin), self.rules)

    def scan(self, tables: Sequence[TableId], *, live: bool, where: str | None = None) -> PostgresScan:
        raise _no_scan()

    def resume_scan(self, record: Mapping[str, Any]) -> PostgresScan | None:
        raise _no_scan()

    def plan(self, table: TableId, cut: ChunkKind, chunk_bytes: int) -> Plan:
        plan = super().plan(self.name_at_source(table), cut, chunk_bytes)
        return replace(plan, schema=self.rules.transformed_schema(plan.schema, table))

    def is_unchanged(self, plan: Plan) -> bool:
        return super().is_unchanged(replace(plan, schema=plan.schema.source_schema))

    def parse_value(self, column: Column, text: str) -> pa.Scalar | None:
        """Return the value; None for a column that a rule changed.

        What its stored rows have is unknown: they are read again.
        """
        return None if is_changed_by_rule(column) else super().parse_value(column, text)

    def snapshot(self) -> ExactSnapshot:
        return _TransformedSnapshot(super().snapshot(), self.rules)

    def chunk_reader(self, seconds_max: float, at_least: Lsn) -> SnapshotReader:
        return TransformedReader(super().chunk_reader(seconds_max, at_least), self.rules)

    def row_reader(self, seconds_max: float) -> SnapshotReader:
        return TransformedReader(super().row_reader(seconds_max), self.rules)


def _schema_position(schema: TableSchema) -> Lsn:
    """Return the source's position when it was asked for the schema."""
    return schema.facts.position if schema.facts is not None else ZERO


def _no_scan() -> Unsupported:
    """Return the error for a scan through rules.

    A scan continues after keys of the source, which rules may have changed.
    """
    return Unsupported(
        "runtime cannot read tables through a source that has rules",
        hint="Pass it the plain source and the rules: `CdcRuntime(PostgresCapture(…), …, transforms=…)`.",
    )


class _TransformedSnapshot(ExactSnapshot):
    def __init__(self, snapshot: ExactSnapshot, rules: TransformPlan) -> None:
        self.__dict__.update(vars(snapshot))
        self._rules = rules

    def reader(self, seconds_max: float = OPEN_SECONDS_MAX) -> SnapshotReader:
        return TransformedReader(super().reader(seconds_max), self._rules)


class TransformedReader(SnapshotReader):
    """Reads what one snapshot sees, through rules. Plain data until it is entered."""

    def __init__(self, reader: SnapshotReader, rules: TransformPlan) -> None:
        self.__dict__.update(vars(reader))
        self._rules = rules

    def lock_chunk(self, schema: TableSchema, chunk: Chunk) -> Lsn:
        return super().lock_chunk(schema.source_schema, chunk)

    def lock_schema(self, schema: TableSchema) -> None:
        super().lock_schema(schema.source_schema)

    def rows(
        self,
        schema: TableSchema,
        chunk: Chunk | None = None,
        condition: str | None = None,
        *,
        ordered_by: Sequence[tuple[str, str]] = (),
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows that the rules let through. The condition is on the source's own columns."""
        source = self._source_of(schema)
        names = self._key_of(schema, source) if ordered_by else {}
        order = [(names.get(name, name), kind) for name, kind in ordered_by]
        for batch in super().rows(source, chunk, condition, ordered_by=order):
            yield self._rules.transform_rows(source, batch, schema.table).select(schema.names)

    def marked_rows(
        self, schema: TableSchema, chunk: Chunk, condition: str | None = None
    ) -> Iterator[tuple[pa.RecordBatch, pa.Array]]:
        """Yield the rows with unfit cells, including those that `on_error: dead-letter` rejected."""
        source = self._source_of(schema)
        for batch, unfit in super().marked_rows(source, chunk, condition):
            made, cells = self._rules.transform_marked_rows(source, batch, unfit, schema.table)
            yield made.select(schema.names), cells

    def rows_by_key(self, schema: TableSchema, keys: pa.Table) -> Iterator[pa.RecordBatch]:
        source = self._source_of(schema)
        names = self._key_of(schema, source)
        keys = keys.rename_columns([names[name] for name in keys.column_names])
        for batch in super().rows_by_key(source, keys):
            yield self._rules.transform_rows(source, batch, schema.table).select(schema.names)

    def _key_of(self, schema: TableSchema, source: TableSchema) -> dict[str, str]:
        """Return the source's names of the key columns. An outbox's messages have their own key."""
        outboxes = (rule for rule in self._rules.transforms.rules if isinstance(rule, Outbox))
        source_key = schema.key if any(matches_any(outbox.tables, source.table) for outbox in outboxes) else source.key
        changed = any(is_changed_by_rule(column) for column in schema.columns if column.name in schema.key)
        if changed or not set(source_key) <= set(source.names):
            raise Unsupported(
                "rows cannot be read by a key that a rule has changed", table=schema.table, hint=RELOAD_TABLE_HINT
            )
        return dict(zip(schema.key, source_key, strict=True))

    def _source_of(self, schema: TableSchema) -> TableSchema:
        """Return the source's schema; refuse if the rules no longer make this one of it."""
        source = schema.source_schema
        columns = self._rules.transformed_schema(source).columns
        made = can_still_produce(self._rules.transforms.rules, source.table, schema.table)
        if not made or not set(schema.columns) <= set(columns):
            raise SourceRewritten(
                "rules for the table changed while it was read",
                table=schema.table,
                hint="Wait: the load begins again automatically.",
            )
        return source
