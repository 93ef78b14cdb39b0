"""PostgreSQL seen through rules: its shapes, its stream and the rows of its snapshots, transformed.

Here and in `stream` rules meet the source, and nothing behind them knows of rules: what the log, a load and a lake
table get is what the rules have made, by the names that rules give. Questions to the server are asked in its own terms:
a transformed shape remembers the one at the source, and every table that is made is made of one there.
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
from tailrace.capture.postgres.preflight import PublishedTables
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
"""Between two questions for the types that an outbox has: whatever comes, its log tells."""


class TransformedCapture(PostgresCapture):
    """One PostgreSQL database as the rules show it."""

    def __init__(self, settings: PostgresSettings, transforms: Transforms) -> None:
        super().__init__(settings)
        self._names = OutputTables(transforms.rules)
        self.rules = TransformPlan(transforms, names=self._names)
        self._messages: dict[TableId, frozenset[TableId]] = {}
        """Where messages of each outbox were seen to go. Never changed in place: others may be looking at it."""
        self._asked: dict[TableId, float] = {}
        """When each outbox was last asked which types it has."""
        self.asks_types = True
        """Whether it is: that reads all of it."""

    @property
    def on_publish(self) -> Callable[[PublishedTables], None]:
        """Hears of every table that is made of one that is about to be published, or is by now."""
        return self._hears

    @on_publish.setter
    def on_publish(self, hears: Callable[[PublishedTables], None]) -> None:
        def hear(told: PublishedTables) -> None:
            made = tuple((made, number) for table, number in told.tables for made in self._made_of(table))
            hears(replace(told, tables=made))

        self._hears = hear

    def remember_schemas(self, shapes: Iterable[TableSchema]) -> None:
        """Of one table at the source several may be made, and one of them has seen its last shape."""
        newest: dict[int, TableSchema] = {}
        for shape in (made.source_schema for made in shapes):
            known = newest.get(shape.relation)
            if known is None or _asked_at(shape) >= _asked_at(known):
                newest[shape.relation] = shape
        super().remember_schemas(newest.values())

    def learn_tables(self, shapes: Iterable[TableSchema]) -> None:
        for made in shapes:
            source = made.source_schema.table
            box = self._names.outbox_rule(source)
            if box is not None and made.table != source and can_still_produce((box,), source, made.table):
                self._messages[source] = self._messages.get(source, frozenset()) | {made.table}

    def tables(self) -> list[SourceTable]:
        """The tables that are made of those that are wanted."""
        there = super().tables()
        for found in there:
            if self.asks_types and (box := self._names.outbox_rule(found.table)) is not None:
                self._ask_types(found.table, box)
        return [
            replace(found, table=made, origin=found.table if made != found.table else None)
            for found in there
            for made in self._made_of(found.table)
        ]

    @property
    def discovers_tables(self) -> bool:
        return self._names.has_outboxes

    def _made_of(self, table: TableId) -> list[TableId]:
        """All tables that are made of one, as far as they are known."""
        messages = sorted(self._messages.get(table, ()))
        for made in messages:
            self._names.claim(made, table)
        return [*self._names.tables_for(table), *messages]

    def _ask_types(self, table: TableId, box: Outbox) -> None:
        """Messages that were there before anything was captured go to tables that the log may never tell of."""
        if time.monotonic() < self._asked.get(table, -TYPES_SECONDS) + TYPES_SECONDS:
            return
        column, name = sql.Identifier(box.type_column), sql.Identifier(table.schema, table.name)
        query = sql.SQL("SELECT DISTINCT {}::text FROM {} WHERE {}::text <> '' LIMIT {}").format(
            column, name, column, TABLES_MAX + 1
        )
        with self._connected() as connection:
            kinds = [kind for (kind,) in connection.execute(query)]
        if len(kinds) > TABLES_MAX:
            raise Unsupported(
                f"an outbox has messages of more than {TABLES_MAX:,} types",
                rule=box.name,
                table=table,
                hint="Each would be a table. Name a column with fewer values in `type_column`.",
            )
        found = frozenset(target_table(box.to, table, type=kind) for kind in kinds)
        self._messages[table] = self._messages.get(table, frozenset()) | found
        self._asked[table] = time.monotonic()

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
        """Refuse rules that cannot be used on the tables as they are published."""
        for shape in super().describe(found.table for found in super().tables()).values():
            self.rules.table_plan(shape)

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
        """Of a column that a rule has worked on nobody knows what rows at rest have: they are read again."""
        return None if is_changed_by_rule(column) else super().parse_value(column, text)

    def snapshot(self) -> ExactSnapshot:
        return _TransformedSnapshot(super().snapshot(), self.rules)

    def chunk_reader(self, seconds_max: float, at_least: Lsn) -> SnapshotReader:
        return TransformedReader(super().chunk_reader(seconds_max, at_least), self.rules)

    def row_reader(self, seconds_max: float) -> SnapshotReader:
        return TransformedReader(super().row_reader(seconds_max), self.rules)


def _asked_at(shape: TableSchema) -> Lsn:
    """Where the source was when it was asked for the shape."""
    return shape.facts.position if shape.facts is not None else ZERO


def _no_scan() -> Unsupported:
    """A scan goes on behind keys of the source, which rules may have changed."""
    return Unsupported(
        "a runtime cannot read tables through a source that has rules",
        hint="Give it the plain source and the rules: `CdcRuntime(PostgresCapture(…), …, transforms=…)`.",
    )


class _TransformedSnapshot(ExactSnapshot):
    def __init__(self, snapshot: ExactSnapshot, rules: TransformPlan) -> None:
        self.__dict__.update(vars(snapshot))
        self._rules = rules

    def reader(self, seconds_max: float = OPEN_SECONDS_MAX) -> SnapshotReader:
        return TransformedReader(super().reader(seconds_max), self._rules)


class TransformedReader(SnapshotReader):
    """Reads what one snapshot sees, as the rules show it. Plain data until it is entered."""

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
        """The rows that the rules let through. Which ones fulfil the condition, the source says of its own columns."""
        source = self._source_of(schema)
        names = self._key_of(schema, source) if ordered_by else {}
        order = [(names.get(name, name), kind) for name, kind in ordered_by]
        for batch in super().rows(source, chunk, condition, ordered_by=order):
            yield self._rules.transform_rows(source, batch, schema.table).select(schema.names)

    def marked_rows(
        self, schema: TableSchema, chunk: Chunk, condition: str | None = None
    ) -> Iterator[tuple[pa.RecordBatch, pa.Array]]:
        """The same with rows that do not fit, or that a rule with `on_error: dead-letter` fails at."""
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
        """What the source calls the columns of the key. Messages have one of their own, whatever the source's is."""
        boxes = (rule for rule in self._rules.transforms.rules if isinstance(rule, Outbox))
        own = schema.key if any(matches_any(box.tables, source.table) for box in boxes) else source.key
        touched = any(is_changed_by_rule(column) for column in schema.columns if column.name in schema.key)
        if touched or not set(own) <= set(source.names):
            raise Unsupported(
                "rows cannot be asked for by a key that a rule has changed", table=schema.table, hint=RELOAD_TABLE_HINT
            )
        return dict(zip(schema.key, own, strict=True))

    def _source_of(self, schema: TableSchema) -> TableSchema:
        """The shape at the source, if the rules still make this one of it."""
        source = schema.source_schema
        columns = self._rules.transformed_schema(source).columns
        made = can_still_produce(self._rules.transforms.rules, source.table, schema.table)
        if not made or not set(schema.columns) <= set(columns):
            raise SourceRewritten(
                "the rules for the table were changed while it was read",
                table=schema.table,
                hint="Nothing to do: it is loaded again from the beginning.",
            )
        return source
