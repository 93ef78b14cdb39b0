"""What a DataFrame over a change log looks like: worked out once, when it is made, and kept with it.

Whoever plans and whoever reads goes by what stands here, and not by what the log knows by then.
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
    """One DataFrame: what was asked for, and the columns it has."""

    options: LogOptions
    schema: TableSchema | None
    """Of the one table, as a view over every version that was known; None for an envelope."""
    fields: pa.Schema


def resolve_frame(options: LogOptions) -> LogFrame:
    """The columns of what is asked for."""
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
    shape = merged_schema(versions)
    if options.row_format is RowFormat.TYPED:
        fields = typed_fields(shape, with_row=options.with_envelope)
    else:
        refuse_partial(versions[-1])
        fields = feed_fields(shape)
    _refuse_twins(fields, options)
    return LogFrame(options=options, schema=shape, fields=fields)


def _versions(options: LogOptions) -> list[TableSchema]:
    """Every shape of the table that is known, oldest first: those in the log and, where there is one, the source's.
    Of a table that never changed it is the one that the capture has seen."""
    found = [] if options.url is not None and not _is_there(options.log_path) else _logged(options)
    if options.url is not None:
        found.append(_described(options))
    if not found:
        log = _opened(options)
        assert options.table is not None, "one is asked for"
        quiet = known_table(log.path, options.table)
        if quiet is None:
            raise _unknown(log, options.table)
        found.append(quiet)
    return found


def _is_there(path: LogPath) -> bool:
    try:
        ChangeLog.open(path)
    except LogUnreachable:
        raise  # what is in it is not known
    except LogUnusable:
        return False
    return True


def _opened(options: LogOptions) -> ChangeLog:
    log = ChangeLog.open(options.log_path)
    log.schemas.load()
    return log


def _logged(options: LogOptions) -> list[TableSchema]:
    log = _opened(options)
    found = [
        version
        for number in log.schemas.numbers_matching(options.matches)
        for version in log.schemas.versions_of(number)
        if options.matches(version.schema.table)
    ]
    return [version.schema for version in sorted(found, key=lambda version: version.ordinal)]


def _described(options: LogOptions) -> TableSchema:
    assert options.table is not None, "asked only then"
    (found,) = _at_source(options, [options.table])
    return found


def _at_source(options: LogOptions, tables: Iterable[TableId]) -> list[TableSchema]:
    """The shapes of tables, as the source has them."""
    from tailrace.capture.postgres.catalogue import Catalogue  # tasks have no use for what comes with it
    from tailrace.capture.postgres.connect import connect

    assert options.url is not None, "asked only then"
    found = []
    with connect(options.url) as connection:
        for table in tables:
            try:
                found.append(Catalogue(connection).describe(table, None))
            except SourceTableMissing:
                raise SourceTableMissing(
                    "the table is not there",
                    table=table,
                    hint='Names are taken as they are, case included. One with a dot in it is quoted: "a.b"."c".',
                ) from None
    return found


def _refuse_unknown(options: LogOptions) -> None:
    """A name that is no pattern is a table that is there."""
    log = _opened(options)
    for table in _named(options):
        if not log.schemas.numbers_named(table) and table not in {shape.table for shape in known_tables(log.path)}:
            raise _unknown(log, table)


def _refuse_missing(options: LogOptions) -> None:
    """The same where the log is captured by the stream itself, which goes by the source."""
    log = _opened(options) if _is_there(options.log_path) else None
    if new := [table for table in _named(options) if log is None or not log.schemas.numbers_named(table)]:
        _at_source(options, new)


def _named(options: LogOptions) -> list[TableId]:
    if options.table is not None:
        return [options.table]
    return [pattern.table for pattern in options.tables if pattern.table is not None]


def _unknown(log: ChangeLog, table: TableId) -> ConfigError:
    shapes = [*(version.schema for version in log.schemas.latest()), *known_tables(log.path)]
    names = sorted({format_table_name(shape.table) for shape in shapes})
    alike = difflib.get_close_matches(format_table_name(table).lower(), {name.lower() for name in names}, n=3)
    close = sorted((n for n in names if n.lower() in alike), key=lambda n: alike.index(n.lower())) or names[:5]
    having = f"It has {', '.join(close)}{' and others' if len(close) < len(names) else ''}. " if names else ""
    return ConfigError(
        "the log knows no such table",
        table=table,
        hint=f"{having}A table is known once its capture runs: is it among `source.tables`, and spelled as at the "
        "source? `tables` takes patterns, and what comes later.",
    )


def _refuse_twins(fields: pa.Schema, options: LogOptions) -> None:
    """Spark does not tell upper case from lower."""
    twins = [name for name, times in Counter(name.lower() for name in fields.names).items() if times > 1]
    if twins:
        raise Unsupported(
            "two columns would have the same name",
            table=options.table,
            column=twins[0],
            hint="Read it with `shape` `envelope`, which keeps names apart.",
        )
