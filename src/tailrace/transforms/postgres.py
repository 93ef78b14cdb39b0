"""PostgreSQL seen through rules: its shapes, its stream and the rows of its snapshots, transformed.

Here and in `stream` rules meet the source, and nothing behind them knows of rules: what the log, a load and a lake
table get is what the rules have made. Questions to the server are asked in its own terms: a transformed shape
remembers the one at the source.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from tailrace.capture.base import SourceId, StreamOfTimeline
from tailrace.capture.postgres.chunks import Chunk, Cut, Plan
from tailrace.capture.postgres.scan import PostgresScan
from tailrace.capture.postgres.settings import PostgresSettings
from tailrace.capture.postgres.snapshot import OPEN_SECONDS_MAX, ExactSnapshot, SnapshotReader
from tailrace.capture.postgres.source import PostgresCapture
from tailrace.errors import LOAD_ANEW_HINT, SourceRewritten, Unsupported
from tailrace.model.position import Lsn
from tailrace.model.schema import Column, TableId, TableSchema
from tailrace.transforms.plan import TransformPlan
from tailrace.transforms.shape import is_touched
from tailrace.transforms.stream import TransformedStream


class TransformedCapture(PostgresCapture):
    """One PostgreSQL database as the rules show it."""

    def __init__(self, settings: PostgresSettings, rules: TransformPlan) -> None:
        super().__init__(settings)
        self.rules = rules

    def remember(self, shapes: Iterable[TableSchema]) -> None:
        super().remember(shape.at_source for shape in shapes)

    def describe(self, tables: Iterable[TableId]) -> dict[TableId, TableSchema]:
        found = super().describe(tables)
        return {table: self.rules.transformed_schema(schema) for table, schema in found.items()}

    def live(self, after: Lsn, origin: SourceId | None = None) -> StreamOfTimeline:
        return TransformedStream(super().live(after, origin), self.rules)

    def scan(self, tables: Sequence[TableId], *, live: bool, where: str | None = None) -> PostgresScan:
        raise _no_scan()

    def resume_scan(self, record: Mapping[str, Any]) -> PostgresScan | None:
        raise _no_scan()

    def plan(self, table: TableId, cut: Cut, chunk_bytes: int) -> Plan:
        plan = super().plan(table, cut, chunk_bytes)
        return replace(plan, schema=self.rules.transformed_schema(plan.schema))

    def value_of(self, column: Column, text: str) -> pa.Scalar | None:
        """Of a column that a rule has worked on nobody knows what rows at rest have: they are read again."""
        return None if is_touched(column) else super().value_of(column, text)

    def snapshot(self) -> ExactSnapshot:
        return _Snapshot(super().snapshot(), self.rules)

    def chunk_reader(self, seconds_max: float, at_least: Lsn) -> SnapshotReader:
        return TransformedReader(super().chunk_reader(seconds_max, at_least), self.rules)

    def row_reader(self, seconds_max: float) -> SnapshotReader:
        return TransformedReader(super().row_reader(seconds_max), self.rules)


def _no_scan() -> Unsupported:
    """A scan goes on behind keys of the source, which rules may have changed."""
    return Unsupported(
        "a runtime cannot read tables through a source that has rules",
        hint="Give it the plain source and the rules: `CdcRuntime(PostgresCapture(…), …, transforms=…)`.",
    )


class _Snapshot(ExactSnapshot):
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

    def describe(self, table: TableId) -> TableSchema:
        return self._rules.transformed_schema(super().describe(table))

    def hold(self, schema: TableSchema, chunk: Chunk) -> Lsn:
        return super().hold(schema.at_source, chunk)

    def rows(
        self, schema: TableSchema, chunk: Chunk | None = None, condition: str | None = None, *,
        ordered_by: Sequence[tuple[str, str]] = (),
    ) -> Iterator[pa.RecordBatch]:  # fmt: skip
        """The rows that the rules let through. Which ones fulfil the condition, the source says of its own columns."""
        source = self._source_of(schema)
        names = dict(zip(schema.key, source.key, strict=True))
        order = [(names.get(name, name), kind) for name, kind in ordered_by]
        for batch in super().rows(source, chunk, condition, ordered_by=order):
            yield self._rules.rows(source, batch).select(schema.names)

    def marked_rows(
        self, schema: TableSchema, chunk: Chunk, condition: str | None = None
    ) -> Iterator[tuple[pa.RecordBatch, pa.Array]]:
        """The same with rows that do not fit, or that a rule with `on_error: dead-letter` fails at."""
        source = self._source_of(schema)
        for batch, unfit in super().marked_rows(source, chunk, condition):
            made, cells = self._rules.marked_rows(source, batch, unfit)
            yield made.select(schema.names), cells

    def rows_of(self, schema: TableSchema, keys: pa.Table) -> Iterator[pa.RecordBatch]:
        source = self._source_of(schema)
        names = dict(zip(schema.key, source.key, strict=True))
        if any(is_touched(column) for column in schema.columns if column.name in names):
            raise Unsupported(
                "rows cannot be asked for by a key that a rule has changed", table=schema.table, hint=LOAD_ANEW_HINT
            )
        keys = keys.rename_columns([names[name] for name in keys.column_names])
        for batch in super().rows_of(source, keys):
            yield self._rules.rows(source, batch).select(schema.names)

    def _source_of(self, schema: TableSchema) -> TableSchema:
        """The shape at the source, if the rules still make this one of it."""
        source = schema.at_source
        if not set(schema.columns) <= set(self._rules.transformed_schema(source).columns):
            raise SourceRewritten(
                "the rules for the table were changed while it was read", table=schema.table,
                hint="Nothing to do: it is loaded again from the beginning.",
            )  # fmt: skip
        return source
