"""Checks whether the lake equals the source, without any of Tailrace's own code.

What must stay true:

- Nothing here imports the rest of Tailrace: the check must not repeat a mistake in the product's decoding. Where
  possible, the source's side is written by PostgreSQL's own output functions.
- All tables are read in one REPEATABLE READ transaction: one moment of the source.
- Rows are compared by content, as multisets, so a row that occurs twice is not equal to one that occurs once.
- A value that the lake's type cannot hold is counted as different; it never ends the comparison.
- No row value is printed or kept in a verdict, except those of the primary key.

Both sides become text, column by column, so that equal text means equal value. Integers, exact text and enum labels
stay as they are. Floats are written by their bits, decimals by their digits without the point. Dates are days and
timestamps microseconds from 1970, so that no year is out of range. bytea is hex, and lists are as Python prints them.

The lake's rule for `infinity` is the last, for `-infinity` the first instant of the years 1 to 9999.

A whole table is held in memory, twice. PostgreSQL 14 or later. The file is longer than most so that a reader who doubts
a verdict finds all of it in one file.
"""

from __future__ import annotations

import enum
import io
import re
import tempfile
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, unquote

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as csv
import pyarrow.parquet as pq
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError
from psycopg import sql
from psycopg.rows import TupleRow

Connection = psycopg.Connection[TupleRow]

SAMPLE_MAX = 10
CSV_BLOCK_BYTES = 16 << 20
CSV_BLOCK_BYTES_MAX = 1 << 30
DECIMAL_DIGITS_MAX = 38

_SESSION_SQL = """
SET datestyle = 'ISO, YMD'; SET intervalstyle = postgres; SET timezone = 'UTC';
SET extra_float_digits = 3; SET bytea_output = hex;
"""


class LakeUnreadable(RuntimeError):
    """The table uses a feature that this reader does not know. Continuing could give a false verdict."""


@dataclass(frozen=True, kw_only=True)
class TableVerdict:
    """The result for one table. `missing` rows are only in the source, `extra` only in the lake."""

    schema: str
    table: str
    source_rows: int = 0
    lake_rows: int = 0
    missing: int = 0
    extra: int = 0
    differing: int = 0
    """Rows of one primary key whose other columns are not equal. Always 0 for a table without one."""
    columns: tuple[str, ...] = ()
    """Problems of the table as a whole: it or a column is missing, or of another type."""
    sample: tuple[str, ...] = ()
    """Primary keys of some rows at fault."""

    @property
    def equal(self) -> bool:
        return not (self.missing or self.extra or self.differing or self.columns)


def compare(connection_url: str, lake: Path, tables: Iterable[tuple[str, str]]) -> list[TableVerdict]:
    """Compare each (schema, table) of the source with the Delta table at `<lake>/<schema>/<table>`."""
    with psycopg.connect(connection_url, autocommit=True, connect_timeout=10) as connection:
        connection.execute(_SESSION_SQL)
        connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        types = _types(connection)
        return [_compare_table(connection, types, lake, schema, table) for schema, table in tables]


def table_folder(lake: Path, schema: str, table: str) -> Path:
    return lake / _path_part(schema) / _path_part(table)


def _compare_table(
    connection: Connection, types: dict[int, PgType], lake: Path, schema: str, table: str
) -> TableVerdict:
    relation = _relation(connection, schema, table)
    if relation is None:
        return TableVerdict(schema=schema, table=table, columns=("the source does not have the table",))
    folder = table_folder(lake, schema, table)
    if not (folder / "_delta_log").is_dir():
        return TableVerdict(
            schema=schema,
            table=table,
            source_rows=_count(connection, relation),
            missing=_count(connection, relation),
            columns=("the lake does not have the table",),
        )
    stored = _read_delta(folder)
    expected = _columns(connection, types, relation, stored.schema.names)
    problems = _column_problems(expected, stored.schema)
    shared = [column for column in expected if column.name not in problems]
    source = _read_source(connection, relation, shared)
    mirror = _lake_texts(stored, shared)
    difference = _difference(source, mirror, _key_indices(expected, shared), shared)
    return TableVerdict(
        schema=schema,
        table=table,
        source_rows=source.num_rows,
        lake_rows=mirror.num_rows,
        missing=difference.missing,
        extra=difference.extra,
        differing=difference.differing,
        columns=tuple(problems.values()),
        sample=difference.sample,
    )


def _path_part(name: str) -> str:
    """Percent-encode only `/`, `%`, control characters and a leading dot."""
    encoded = "".join(
        quote(character, safe="") if character in "/%" or unicodedata.category(character) == "Cc" else character
        for character in name
    )
    return "%2E" + encoded[1:] if encoded.startswith(".") else encoded


# --- the contract of the lake: the expected type of a source column ---------------------------------------


class ValueKind(enum.Enum):
    """The storage of a source type's values in the lake."""

    BOOLEAN = "boolean"
    INTEGER = "integer"
    REAL = "float"
    DOUBLE = "double"
    DECIMAL = "decimal"
    TEXT = "string"
    BINARY = "binary"
    DATE = "date"
    TIMESTAMP = "timestamp without zone"
    TIMESTAMPTZ = "timestamp in UTC"


_KINDS = {
    "bool": ValueKind.BOOLEAN,
    "int2": ValueKind.INTEGER,
    "int4": ValueKind.INTEGER,
    "int8": ValueKind.INTEGER,
    "oid": ValueKind.INTEGER,
    "float4": ValueKind.REAL,
    "float8": ValueKind.DOUBLE,
    "text": ValueKind.TEXT,
    "varchar": ValueKind.TEXT,
    "bpchar": ValueKind.TEXT,
    "name": ValueKind.TEXT,
    "char": ValueKind.TEXT,
    "bytea": ValueKind.BINARY,
    "date": ValueKind.DATE,
    "timestamp": ValueKind.TIMESTAMP,
    "timestamptz": ValueKind.TIMESTAMPTZ,
}


class ComparedType(NamedTuple):
    """The expected type of a lake column. A decimal's precision does not count: more room does no harm."""

    kind: ValueKind
    scale: int = 0
    is_list: bool = False

    def __str__(self) -> str:
        name = f"decimal with scale {self.scale}" if self.kind is ValueKind.DECIMAL else self.kind.value
        return f"list of {name}" if self.is_list else name


class PgType(NamedTuple):
    """A type of the source, with domains replaced by their base types."""

    name: str
    built_in: bool
    base: int
    base_modifier: int
    element: int
    """The element's type if this is its array type, else 0."""


class SourceColumn(NamedTuple):
    """One column of the source."""

    name: str
    lake_type: ComparedType
    key_index: int | None
    """Its index in the primary key, or None."""


class Relation(NamedTuple):
    """One table of the source."""

    oid: int
    only: bool
    schema: str
    table: str

    def sql(self) -> sql.Composed:
        # A plain table's inheritance children are tables of their own; a partitioned one is its partitions.
        name = sql.Identifier(self.schema, self.table)
        return sql.SQL("ONLY {}").format(name) if self.only else sql.Composed([name])


def _types(connection: Connection) -> dict[int, PgType]:
    rows = connection.execute(
        """SELECT t.oid, t.typname, t.typnamespace = 'pg_catalog'::regnamespace, t.typbasetype, t.typtypmod,
                  CASE WHEN e.typarray = t.oid THEN e.oid ELSE 0 END
           FROM pg_type t LEFT JOIN pg_type e ON e.oid = t.typelem"""
    )
    return {row[0]: PgType(*row[1:]) for row in rows}


def _expected_type(types: dict[int, PgType], oid: int, modifier: int) -> ComparedType:
    pg_type = types[oid]
    while pg_type.base:
        modifier, pg_type = pg_type.base_modifier, types[pg_type.base]
    element = types.get(pg_type.element)
    scalar = element or pg_type
    if not scalar.built_in:
        return ComparedType(ValueKind.TEXT)
    if scalar.name == "numeric":
        return _decimal_type(modifier, is_list=element is not None)
    kind = _KINDS.get(scalar.name)
    return ComparedType(kind, is_list=element is not None) if kind is not None else ComparedType(ValueKind.TEXT)


def _decimal_type(modifier: int, *, is_list: bool) -> ComparedType:
    """Return numeric(p, s). The modifier is ((p << 16) | s) + 4, and s has eleven bits and a sign."""
    if modifier < 4:
        return ComparedType(ValueKind.TEXT)
    precision, scale = (modifier - 4) >> 16 & 0xFFFF, (modifier - 4) & 0x7FF
    scale = scale - 2048 if scale >= 1024 else scale
    digits = max(precision - min(scale, 0), scale)
    if digits > DECIMAL_DIGITS_MAX:
        return ComparedType(ValueKind.TEXT)
    return ComparedType(ValueKind.DECIMAL, max(scale, 0), is_list)


def _lake_type(stored: pa.DataType) -> ComparedType | None:
    """Return the type of a lake column; None for a type outside the contract."""
    if pa.types.is_list(stored) or pa.types.is_large_list(stored):
        element = _lake_type(stored.value_type)
        return element._replace(is_list=True) if element is not None and not element.is_list else None
    if pa.types.is_decimal(stored):
        return ComparedType(ValueKind.DECIMAL, stored.scale)
    if pa.types.is_timestamp(stored) and stored.unit == "us":
        return ComparedType({None: ValueKind.TIMESTAMP, "UTC": ValueKind.TIMESTAMPTZ}.get(stored.tz, ValueKind.TEXT))
    tests = (
        (pa.types.is_boolean, ValueKind.BOOLEAN),
        (pa.types.is_integer, ValueKind.INTEGER),
        (pa.types.is_float32, ValueKind.REAL),
        (pa.types.is_float64, ValueKind.DOUBLE),
        (pa.types.is_string, ValueKind.TEXT),
        (pa.types.is_large_string, ValueKind.TEXT),
        (pa.types.is_binary, ValueKind.BINARY),
        (pa.types.is_large_binary, ValueKind.BINARY),
        (pa.types.is_date32, ValueKind.DATE),
    )
    return next((ComparedType(kind) for test, kind in tests if test(stored)), None)


def _column_problems(expected: list[SourceColumn], stored: pa.Schema) -> dict[str, str]:
    """Return what is wrong, by column name."""
    problems = {}
    for column in expected:
        if column.name not in stored.names:
            problems[column.name] = f"{column.name}: not in the lake"
        elif _lake_type(stored.field(column.name).type) != column.lake_type:
            lake_type = stored.field(column.name).type
            problems[column.name] = f"{column.name}: must be {column.lake_type}, but the lake has {lake_type}"
    names = {column.name for column in expected}
    problems |= {name: f"{name}: not in the source" for name in stored.names if name not in names}
    return problems


# --- the source --------------------------------------------------------------------------------------------


def _relation(connection: Connection, schema: str, table: str) -> Relation | None:
    row = connection.execute(
        """SELECT c.oid, c.relkind = 'r' FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
           WHERE n.nspname = %s AND c.relname = %s AND c.relkind IN ('r', 'p', 'f', 'v', 'm')""",
        (schema, table),
    ).fetchone()
    return Relation(row[0], row[1], schema, table) if row is not None else None


def _columns(
    connection: Connection, types: dict[int, PgType], relation: Relation, mirrored: list[str]
) -> list[SourceColumn]:
    """Return the published columns; of the generated ones those that the lake has."""
    rows = connection.execute(
        """SELECT a.attname, a.atttypid, a.atttypmod, array_position(k.indkey::int2[], a.attnum)
           FROM pg_attribute a LEFT JOIN pg_index k ON k.indrelid = a.attrelid AND k.indisprimary
           WHERE a.attrelid = %s AND a.attnum > 0 AND NOT a.attisdropped
           AND (a.attgenerated = '' OR a.attgenerated = 's' AND a.attname = ANY(%s))
           ORDER BY a.attnum""",
        (relation.oid, mirrored),
    )
    return [SourceColumn(name, _expected_type(types, oid, mod), key_index) for name, oid, mod, key_index in rows]


def _count(connection: Connection, relation: Relation) -> int:
    row = connection.execute(sql.SQL("SELECT count(*) FROM {}").format(relation.sql())).fetchone()
    assert row is not None
    return int(row[0])


# Each expression replaces `{}`: a value as the text described at the top of this file. Where there is no expression,
# COPY writes what the type's output function prints, which a cast to text does not always equal.
_EXPRESSIONS = {
    ValueKind.REAL: """CASE WHEN {} = 'NaN' THEN 'NaN'
        ELSE ('x' || encode(float4send({}), 'hex'))::bit(32)::int::text END""",
    ValueKind.DOUBLE: """CASE WHEN {} = 'NaN' THEN 'NaN'
        ELSE ('x' || encode(float8send({}), 'hex'))::bit(64)::bigint::text END""",
    ValueKind.DATE: """CASE WHEN isfinite({}) THEN {} - date '1970-01-01'
        WHEN {} > 'epoch' THEN date '9999-12-31' - date '1970-01-01'
        WHEN {} < 'epoch' THEN date '0001-01-01' - date '1970-01-01' END""",
    ValueKind.TIMESTAMP: """CASE WHEN isfinite({}) THEN trunc(extract(epoch FROM {}) * 1000000)
        WHEN {} > 'epoch' THEN trunc(extract(epoch FROM timestamp '9999-12-31 23:59:59.999999') * 1000000)
        WHEN {} < 'epoch' THEN trunc(extract(epoch FROM timestamp '0001-01-01') * 1000000) END""",
}
_EXPRESSIONS[ValueKind.TIMESTAMPTZ] = _EXPRESSIONS[ValueKind.TIMESTAMP].replace("timestamp '", "timestamptz '")


def _expression(column: SourceColumn) -> sql.Composable:
    name = sql.Identifier(column.name)
    template = _EXPRESSIONS.get(column.lake_type.kind)
    if template is None:
        return name
    if not column.lake_type.is_list:
        return _filled(template, name)
    # unnest() would flatten an array of more dimensions into one that looks fit.
    return sql.SQL(
        "CASE WHEN array_ndims({array}) > 1 THEN '{{{{' WHEN {array} IS NOT NULL THEN "
        "ARRAY(SELECT {one} FROM unnest({array}) WITH ORDINALITY AS u(e, i) ORDER BY i)::text END"
    ).format(array=name, one=_filled(template, sql.Identifier("e")))


def _filled(template: str, value: sql.Identifier) -> sql.Composed:
    first, *rest = (sql.SQL(piece) for piece in template.split("{}"))
    return sql.Composed([first, *(part for piece in rest for part in (value, piece))])


def _read_source(connection: Connection, relation: Relation, columns: list[SourceColumn]) -> pa.Table:
    """Return every row as text, one string column per column, named by its index."""
    # The constant in front keeps a row of one NULL, or of no columns, from being an empty line.
    selected = sql.SQL(", ").join([sql.SQL("1"), *(_expression(column) for column in columns)])
    query = sql.SQL("COPY (SELECT {} FROM {}) TO STDOUT (FORMAT csv, FORCE_QUOTE *)").format(selected, relation.sql())
    text, longest = io.BytesIO(), 0
    with connection.cursor() as cursor, cursor.copy(query) as rows:
        for row in rows:
            longest = max(longest, text.write(row))
    table = _parse_csv(text, longest, len(columns))
    for index, column in enumerate(columns):
        table = table.set_column(index, str(index), _source_texts(table.column(index), column.lake_type))
    return table


def _parse_csv(text: io.BytesIO, longest: int, width: int) -> pa.Table:
    names = ["", *map(str, range(width))]
    if not text.tell():
        return pa.schema([(name, pa.string()) for name in (*names[1:], "")]).empty_table()
    text.seek(0)
    table = csv.read_csv(
        text,
        # A row must fit into a block.
        read_options=csv.ReadOptions(
            column_names=names, block_size=min(max(CSV_BLOCK_BYTES, 2 * longest), CSV_BLOCK_BYTES_MAX)
        ),
        parse_options=csv.ParseOptions(newlines_in_values=True, ignore_empty_lines=False),
        # FORCE_QUOTE: what is not quoted is NULL, and the empty string is quoted.
        convert_options=csv.ConvertOptions(
            column_types=dict.fromkeys(names, pa.string()),
            null_values=[""],
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
        ),
    )
    return table.select([*names[1:], ""])


def _source_texts(texts: pa.ChunkedArray, compared_type: ComparedType) -> pa.ChunkedArray:
    if compared_type.is_list:
        return _mapped(texts, lambda value: _list_text(value, compared_type))
    return _mapped(texts, _digits) if compared_type.kind is ValueKind.DECIMAL else texts


def _digits(text: str) -> str:
    """Turn `-0.50` into `-50`: a column's scale is fixed, so the point adds nothing. `NaN` stays."""
    sign, digits = ("-", text[1:]) if text.startswith("-") else ("", text)
    return sign + (digits.replace(".", "").lstrip("0") or "0")


def _mapped(values: pa.ChunkedArray, change: Callable[[str], str]) -> pa.ChunkedArray:
    chunks = [
        pa.array([None if value is None else change(value) for value in chunk.to_pylist()], pa.string())
        for chunk in values.chunks
    ]
    return pa.chunked_array(chunks, pa.string())


_ELEMENT = re.compile(r'"((?:[^"\\]|\\.)*)"|([^,]+)', re.DOTALL)
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)
_BOUNDS = re.compile(r"^(\[-?[0-9]+:-?[0-9]+\])+=")


def _list_text(text: str, compared_type: ComparedType) -> str:
    """Turn `{a,"b,c",NULL}` into `['a', 'b,c', None]`.

    With more dimensions the text stays, equal to no list.
    """
    body = _BOUNDS.sub("", text, count=1) if text.startswith("[") else text
    if body.startswith("{{"):
        return text
    elements = _elements(body[1:-1])
    if compared_type.kind is ValueKind.DECIMAL:
        elements = (None if element is None else _digits(element) for element in elements)
    return repr(list(elements))


def _elements(inner: str) -> Iterator[str | None]:
    if '"' not in inner:
        for piece in inner.split(",") if inner else ():
            yield None if piece == "NULL" else piece
        return
    for quoted, plain in _ELEMENT.findall(inner):
        if plain:
            yield None if plain == "NULL" else plain
        else:
            yield _ESCAPED.sub(r"\1", quoted)


# --- the lake ----------------------------------------------------------------------------------------------


def _read_delta(folder: Path) -> pa.Table:
    """Return the table's newest version, with its own schema. Files older than a column have nulls there."""
    # delta-rs decodes percent signs in a table's own path and then looks in the wrong folder. So it gets the log
    # through a link with a harmless name; the data files are opened here.
    with tempfile.TemporaryDirectory(prefix="tailrace-compare-") as stand_in:
        Path(stand_in, "_delta_log").symlink_to((folder / "_delta_log").resolve())
        try:
            table = DeltaTable(stand_in)
            if _needs_delta_reader(table, folder):
                return _scanned(DeltaTable(str(folder.resolve()), version=table.version()))
            schema = pa.schema(table.schema().to_arrow())
            adds = pa.table(table.get_add_actions(flatten=True))
        except DeltaError as error:
            raise LakeUnreadable(f"{folder}: the Delta log cannot be read") from error
    # Partition values are only in the log.
    partition_values = {name: adds.column(f"partition.{name}") for name in table.metadata().partition_columns}
    files = [
        _read_file(folder / unquote(path), schema, {name: values[i] for name, values in partition_values.items()})
        for i, path in enumerate(adds.column("path").to_pylist())
    ]
    return pa.concat_tables([schema.empty_table(), *files])


def _needs_delta_reader(table: DeltaTable, folder: Path) -> bool:
    """Return whether the data files alone do not define the table's content."""
    metadata = table.metadata()
    mapped = metadata.configuration.get("delta.columnMapping.mode", "none") != "none"
    return mapped or bool(pa.table(table.deletion_vectors()).num_rows)


def _scanned(table: DeltaTable) -> pa.Table:
    """Return the table as delta-rs reads it."""
    schema = pa.schema(table.schema().to_arrow())
    stored = pa.table(table.scan())
    return pa.table([stored.column(field.name).cast(field.type) for field in schema], schema=schema)


def _read_file(path: Path, schema: pa.Schema, partition_values: dict[str, pa.Scalar]) -> pa.Table:
    if not path.is_file():
        raise LakeUnreadable(f"{path}: named by the Delta log, but missing")
    # ParquetFile, not read_table: that would take `name=value` in the path for a partition.
    with pq.ParquetFile(path) as file:
        stored = file.read()
    for name, value in partition_values.items():
        stored = stored.append_column(name, pa.repeat(value, stored.num_rows))
    columns = [
        stored.column(field.name).cast(field.type)
        if field.name in stored.column_names
        else pa.nulls(stored.num_rows, field.type)
        for field in schema
    ]
    return pa.table(columns, schema=schema)


def _lake_texts(stored: pa.Table, columns: list[SourceColumn]) -> pa.Table:
    texts = {
        str(index): pa.chunked_array(
            [_texts(chunk, column.lake_type) for chunk in stored.column(column.name).chunks], pa.string()
        )
        for index, column in enumerate(columns)
    }
    ones = pa.repeat(pa.scalar("1", pa.string()), stored.num_rows)
    return pa.table({**texts, "": ones})


def _texts(values: pa.Array, compared_type: ComparedType) -> pa.Array:
    """Return a lake column as the text described at the top of this file."""
    if compared_type.is_list:
        return _list_texts(values, compared_type._replace(is_list=False))
    match compared_type.kind:
        case ValueKind.BOOLEAN:
            return pc.if_else(values, "t", "f")
        case ValueKind.REAL | ValueKind.DOUBLE:
            bits = values.view(pa.int32() if compared_type.kind is ValueKind.REAL else pa.int64()).cast(pa.string())
            return pc.if_else(pc.is_nan(values), "NaN", bits)
        case ValueKind.DECIMAL:
            return _unscaled(values.cast(pa.decimal128(DECIMAL_DIGITS_MAX, compared_type.scale))).cast(pa.string())
        case ValueKind.DATE:
            return values.view(pa.int32()).cast(pa.string())
        case ValueKind.TIMESTAMP | ValueKind.TIMESTAMPTZ:
            return values.view(pa.int64()).cast(pa.string())
        case ValueKind.BINARY:
            hexed = [None if value is None else "\\x" + value.hex() for value in values.to_pylist()]
            return pa.array(hexed, pa.string())
        case ValueKind.INTEGER | ValueKind.TEXT:
            return values.cast(pa.string())


def _unscaled(values: pa.Array) -> pa.Array:
    """Return the same digits with no point. Arrow's own text of a decimal may use an exponent."""
    whole = pa.decimal128(DECIMAL_DIGITS_MAX, 0)
    return pa.Array.from_buffers(whole, len(values), values.buffers(), offset=values.offset)


def _list_texts(values: pa.Array, compared_type: ComparedType) -> pa.Array:
    lengths = pc.list_value_length(values).to_pylist()
    flat = _texts(pc.list_flatten(values), compared_type).to_pylist()
    texts: list[str | None] = []
    begin = 0
    for length in lengths:
        if length is None:
            texts.append(None)
        else:
            texts.append(repr(flat[begin : begin + length]))
            begin += length
    return pa.array(texts, pa.string())


# --- the difference ----------------------------------------------------------------------------------------


class RowDifferences(NamedTuple):
    """The differences of two multisets of rows."""

    missing: int
    extra: int
    differing: int
    sample: tuple[str, ...]


def _key_indices(expected: list[SourceColumn], shared: list[SourceColumn]) -> list[int]:
    """Return the indices of the primary key's columns among the shared ones. None if one is missing."""
    key = [column for column in expected if column.key_index is not None]
    if not all(column in shared for column in key):
        return []
    return [shared.index(column) for column in sorted(key, key=lambda column: column.key_index or 0)]


def _difference(
    source: pa.Table, mirror: pa.Table, key_indices: list[int], columns: list[SourceColumn]
) -> RowDifferences:
    leftover = _leftover(source, mirror)
    missing_of: Counter[tuple[str, ...]] = Counter()
    extra_of: Counter[tuple[str, ...]] = Counter()
    counts = leftover.column("side_sum").to_pylist()
    keys = zip(*(leftover.column(str(index)).to_pylist() for index in key_indices), strict=True)
    for count, key in zip(counts, keys if key_indices else ((),) * len(counts), strict=True):
        if count > 0:
            missing_of[key] += count
        else:
            extra_of[key] -= count
    both = missing_of & extra_of if key_indices else Counter[tuple[str, ...]]()
    differing = both.total()
    names = [columns[index].name for index in key_indices]
    at_fault = sorted(missing_of.keys() | extra_of.keys())[:SAMPLE_MAX] if key_indices else []
    sample = tuple(", ".join(f"{n}={v}" for n, v in zip(names, key, strict=True)) for key in at_fault)
    return RowDifferences(missing_of.total() - differing, extra_of.total() - differing, differing, sample)


def _leftover(source: pa.Table, mirror: pa.Table) -> pa.Table:
    """Return rows that do not occur equally often on both sides.

    Each is there once, with how often more it occurs in the source.
    """
    sides = [
        table.append_column("side", pa.repeat(pa.scalar(weight, pa.int64()), table.num_rows))
        for table, weight in ((source, 1), (mirror, -1))
    ]
    together = pa.concat_tables(sides)
    names = [name for name in together.column_names if name != "side"]
    counted = together.group_by(names).aggregate([("side", "sum")])
    return counted.filter(pc.not_equal(counted.column("side_sum"), 0))
