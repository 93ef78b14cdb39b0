"""Resolve the columns of a DataFrame over a change log, once, when it is created.

The planner and the tasks use what is kept here, and not what the log knows by then.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import pyarrow as pa

from tailrace.changelog.format.schemas import known_table, known_tables
from tailrace.changelog.read.merged_schema import merged_schema
from tailrace.changelog.read.reader import ChangeLog
from tailrace.errors import ConfigError, LogUnreachable, LogUnusable, SourceTableMissing, Unsupported
from tailrace.model.schema import TableId, TableSchema
from tailrace.spark.datasource.log.change_feed import feed_fields, refuse_partial
from tailrace.spark.datasource.log.log_options import LogOptions, RowFormat
from tailrace.spark.datasource.log.typed_rows import envelope_fields, typed_fields
from tailrace.spark.datasource.table_patterns import format_table_name
from tailrace.storage.files import LogPath


@dataclass(frozen=True, kw_only=True)
class LogFrame:
    """One DataFrame: its options and its columns."""

    options: LogOptions
    schema: TableSchema | None
    """The one table's schema, merged from every version that was known; None for an envelope."""
    fields: pa.Schema


def resolve_frame(options: LogOptions) -> LogFrame:
    """Resolve the columns for these options."""
    if options.row_format is RowFormat.ENVELOPE:
        if options.url is None:
            _refuse_unknown(options)
        else:
            _refuse_missing(options)
        return LogFrame(options=options, schema=None, fields=envelope_fields())
    versions = _versions(options)
    if not versions[-1].columns:
        raise Unsupported(
            "the table has no columns", table=options.table, hint="There is nothing to read: name another `table`."
        )
    schema = merged_schema(versions)
    if options.row_format is RowFormat.TYPED:
        fields = typed_fields(schema, with_row=options.with_envelope)
    else:
        refuse_partial(versions[-1])
        fields = feed_fields(schema)
    _refuse_twins(fields, options)
    return LogFrame(options=options, schema=schema, fields=fields)


def _versions(options: LogOptions) -> list[TableSchema]:
    """Return every known schema of the table, oldest first. Includes the log's and, with `url`, the source's.

    For a table that never changed it is the schema that the capture has seen.
    """
    versions = [] if options.url is not None and not _has_log(options.log_path) else _logged_schemas(options)
    if options.url is not None:
        versions.append(_source_schema(options))
    if not versions:
        log = _open_log(options)
        assert options.table is not None, "one table is requested"
        unchanged = known_table(log.path, options.table)
        if unchanged is None:
            raise _unknown(log, options.table)
        versions.append(unchanged)
    return versions


def _has_log(path: LogPath) -> bool:
    try:
        ChangeLog.open(path)
    except LogUnreachable:
        raise  # what is in it is not known
    except LogUnusable:
        return False
    return True


def _open_log(options: LogOptions) -> ChangeLog:
    log = ChangeLog.open(options.log_path)
    log.schemas.load()
    return log


def _logged_schemas(options: LogOptions) -> list[TableSchema]:
    log = _open_log(options)
    versions = [
        version
        for number in log.schemas.numbers_matching(options.matches)
        for version in log.schemas.versions_of(number)
        if options.matches(version.schema.table)
    ]
    return [version.schema for version in sorted(versions, key=lambda version: version.ordinal)]


def _source_schema(options: LogOptions) -> TableSchema:
    assert options.table is not None, "called only then"
    (schema,) = _source_schemas(options, [options.table])
    return schema


def _source_schemas(options: LogOptions, tables: Iterable[TableId]) -> list[TableSchema]:
    """Return the schemas of tables, as the source has them."""
    from tailrace.capture.postgres.catalogue import Catalogue  # tasks have no use for what it imports
    from tailrace.capture.postgres.connect import connect

    assert options.url is not None, "called only then"
    schemas = []
    with connect(options.url) as connection:
        for table in tables:
            try:
                schemas.append(Catalogue(connection).describe(table, None))
            except SourceTableMissing:
                raise SourceTableMissing(
                    "the table is not there",
                    table=table,
                    hint='Write names as they are, case included. Quote one with a dot in it: "a.b"."c".',
                ) from None
    return schemas


def _refuse_unknown(options: LogOptions) -> None:
    """Refuse a literal name that is not a table of the log."""
    log = _open_log(options)
    for table in _named_tables(options):
        if not log.schemas.numbers_named(table) and table not in {schema.table for schema in known_tables(log.path)}:
            raise _unknown(log, table)


def _refuse_missing(options: LogOptions) -> None:
    """Refuse a literal name that neither log nor source has. Only where the stream itself captures."""
    log = _open_log(options) if _has_log(options.log_path) else None
    if new := [table for table in _named_tables(options) if log is None or not log.schemas.numbers_named(table)]:
        _source_schemas(options, new)


def _named_tables(options: LogOptions) -> list[TableId]:
    if options.table is not None:
        return [options.table]
    return [pattern.table for pattern in options.tables if pattern.table is not None]


def _unknown(log: ChangeLog, table: TableId) -> ConfigError:
    schemas = [*(version.schema for version in log.schemas.latest()), *known_tables(log.path)]
    names = sorted({format_table_name(schema.table) for schema in schemas})
    alike = difflib.get_close_matches(format_table_name(table).lower(), {name.lower() for name in names}, n=3)
    close = sorted((n for n in names if n.lower() in alike), key=lambda n: alike.index(n.lower())) or names[:5]
    known = f"It has {', '.join(close)}{' and others' if len(close) < len(names) else ''}. " if names else ""
    return ConfigError(
        "the log knows no such table",
        table=table,
        hint=f"{known}A table is known once its capture runs: check that it is among `source.tables`, and spelled as "
        "at the source. Or use `tables`, which takes patterns and later tables.",
    )


def _refuse_twins(fields: pa.Schema, options: LogOptions) -> None:
    """Refuse column names that differ only in case, which Spark does not distinguish."""
    twins = [name for name, count in Counter(name.lower() for name in fields.names).items() if count > 1]
    if twins:
        raise Unsupported(
            "two columns would have the same name",
            table=options.table,
            column=twins[0],
            hint="Read the table with `shape` `envelope`, which distinguishes such names.",
        )
