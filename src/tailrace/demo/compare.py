"""Is the lake equal to the source? Answered without any of Tailrace's own code.

What must stay true:

- Nothing here imports the rest of Tailrace: a mistake in the product's decoding must not be made again by
  its judge. Where it can, the source's side is written by PostgreSQL's own output functions.
- All tables are read in one REPEATABLE READ transaction: one moment of the source.
- Rows are compared by content, as multisets, so a row that stands twice is not equal to one that stands once.
- A value that the lake's type cannot hold is counted as different; it never ends the comparison.
- No row value is printed or kept in a verdict, except those of the primary key.

Both sides become text, column by column, in a form where equal text means equal value: integers, exact text
and enum labels as they are, floats by their bits, decimals by their digits without the point, dates as days
and timestamps as microseconds from 1970 (so that no year is out of range), bytea as hex, lists as Python
shows them.
The rule of the lake for `infinity` is the last, for `-infinity` the first instant of the years 1 to 9999.

A whole table is held in memory, twice. PostgreSQL 14 or later. The file is longer than most so that one who
doubts a verdict finds all of it in one place.
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
    """The table uses something this reader does not know; to go on could give a false verdict."""


@dataclass(frozen=True, kw_only=True)
class TableVerdict:
    """What was found for one table. `missing` rows are only in the source, `extra` only in the lake."""

    schema: str
    table: str
    source_rows: int = 0
    lake_rows: int = 0
    missing: int = 0
    extra: int = 0
    differing: int = 0
    """Rows of one primary key whose other columns are not equal; always 0 for a table without one."""
    columns: tuple[str, ...] = ()
    """What is wrong with the table as a whole, in words: it or a column is missing, or of another type."""
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
        return TableVerdict(schema=schema, table=table, columns=("the source has no such table",))
    folder = table_folder(lake, schema, table)
    if not (folder / "_delta_log").is_dir():
        return TableVerdict(
            schema=schema,
            table=table,
            source_rows=_count(connection, relation),
            missing=_count(connection, relation),
            columns=("the lake has no such table",),
        )
    stored = _read_delta(folder)
    wanted = _columns(connection, types, relation, stored.schema.names)
    problems = _column_problems(wanted, stored.schema)
    shared = [column for column in wanted if column.name not in problems]
    source = _read_source(connection, relation, shared)
    mirror = _lake_texts(stored, shared)
    difference = _difference(source, mirror, _key_places(wanted, shared), shared)
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
    """Only `/`, `%`, control characters and a leading dot are percent-encoded; the rest stands as it is."""
    encoded = "".join(
        quote(letter, safe="") if letter in "/%" or unicodedata.category(letter) == "Cc" else letter for letter in name
    )
    return "%2E" + encoded[1:] if encoded.startswith(".") else encoded


# --- the contract of the lake: how a source column must stand in it ----------------------------------------


class ValueKind(enum.Enum):
    """How a type of the source stands in the lake."""

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
    """How a value of the source is expected to stand in the lake."""

    """How a column stands in the lake. A decimal's precision is not part of it: more room does no harm."""

    kind: ValueKind
    scale: int = 0
    is_list: bool = False

    def __str__(self) -> str:
        name = f"decimal with scale {self.scale}" if self.kind is ValueKind.DECIMAL else self.kind.value
        return f"list of {name}" if self.is_list else name


class PgType(NamedTuple):
    """A type of the source, domains replaced by what they stand on."""

    name: str
    built_in: bool
    base: int
    base_modifier: int
    element: int
    """The element's type if this is its array type, else 0."""


class SourceColumn(NamedTuple):
    """One column of the source."""

    name: str
    shape: ComparedType
    key_place: int | None
    """Its place in the primary key, or None."""


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


def _shape_in_lake(types: dict[int, PgType], oid: int, modifier: int) -> ComparedType:
    found = types[oid]
    while found.base:
        modifier, found = found.base_modifier, types[found.base]
    element = types.get(found.element)
    scalar = element or found
    if not scalar.built_in:
        return ComparedType(ValueKind.TEXT)
    if scalar.name == "numeric":
        return _decimal_shape(modifier, is_list=element is not None)
    kind = _KINDS.get(scalar.name)
    return ComparedType(kind, is_list=element is not None) if kind is not None else ComparedType(ValueKind.TEXT)


def _decimal_shape(modifier: int, *, is_list: bool) -> ComparedType:
    """numeric(p, s), where the modifier is ((p << 16) | s) + 4 and s has eleven bits and a sign."""
    if modifier < 4:
        return ComparedType(ValueKind.TEXT)
    precision, scale = (modifier - 4) >> 16 & 0xFFFF, (modifier - 4) & 0x7FF
    scale = scale - 2048 if scale >= 1024 else scale
    digits = max(precision - min(scale, 0), scale)
    if digits > DECIMAL_DIGITS_MAX:
        return ComparedType(ValueKind.TEXT)
    return ComparedType(ValueKind.DECIMAL, max(scale, 0), is_list)


def _shape_of(stored: pa.DataType) -> ComparedType | None:
    """The shape of a lake column, or None for a type that the contract never gives."""
    if pa.types.is_list(stored) or pa.types.is_large_list(stored):
        element = _shape_of(stored.value_type)
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


def _column_problems(wanted: list[SourceColumn], stored: pa.Schema) -> dict[str, str]:
    """What is wrong, by column name."""
    problems = {}
    for column in wanted:
        if column.name not in stored.names:
            problems[column.name] = f"{column.name}: not in the lake"
        elif _shape_of(stored.field(column.name).type) != column.shape:
            found = stored.field(column.name).type
            problems[column.name] = f"{column.name}: must be {column.shape}, but the lake has {found}"
    names = {column.name for column in wanted}
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
    """The columns that are published: of the generated ones those that are mirrored, as the publication decides."""
    rows = connection.execute(
        """SELECT a.attname, a.atttypid, a.atttypmod, array_position(k.indkey::int2[], a.attnum)
           FROM pg_attribute a LEFT JOIN pg_index k ON k.indrelid = a.attrelid AND k.indisprimary
           WHERE a.attrelid = %s AND a.attnum > 0 AND NOT a.attisdropped
           AND (a.attgenerated = '' OR a.attgenerated = 's' AND a.attname = ANY(%s))
           ORDER BY a.attnum""",
        (relation.oid, mirrored),
    )
    return [SourceColumn(name, _shape_in_lake(types, oid, mod), place) for name, oid, mod, place in rows]


def _count(connection: Connection, relation: Relation) -> int:
    row = connection.execute(sql.SQL("SELECT count(*) FROM {}").format(relation.sql())).fetchone()
    assert row is not None
    return int(row[0])


# Each takes the place of `{}`: a value to the text described at the top of this file. Where there is none,
# COPY writes what the type's output function says, which is not always what a cast to text says.
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
    template = _EXPRESSIONS.get(column.shape.kind)
    if template is None:
        return name
    if not column.shape.is_list:
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
    """Every row as text, one string column per column, named by its place."""
    # The constant in front keeps a row of one NULL, or of no columns, from being an empty line.
    chosen = sql.SQL(", ").join([sql.SQL("1"), *(_expression(column) for column in columns)])
    query = sql.SQL("COPY (SELECT {} FROM {}) TO STDOUT (FORMAT csv, FORCE_QUOTE *)").format(chosen, relation.sql())
    text, longest = io.BytesIO(), 0
    with connection.cursor() as cursor, cursor.copy(query) as rows:
        for row in rows:
            longest = max(longest, text.write(row))
    table = _parse_csv(text, longest, len(columns))
    for place, column in enumerate(columns):
        table = table.set_column(place, str(place), _source_texts(table.column(place), column.shape))
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


def _source_texts(texts: pa.ChunkedArray, shape: ComparedType) -> pa.ChunkedArray:
    if shape.is_list:
        return _mapped(texts, lambda value: _list_text(value, shape))
    return _mapped(texts, _digits) if shape.kind is ValueKind.DECIMAL else texts


def _digits(text: str) -> str:
    """`-0.50` to `-50`: a column's scale is fixed, so the point says nothing. `NaN` stays."""
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


def _list_text(text: str, shape: ComparedType) -> str:
    """`{a,"b,c",NULL}` to `['a', 'b,c', None]`; with more dimensions it stays, equal to no list."""
    body = _BOUNDS.sub("", text, count=1) if text.startswith("[") else text
    if body.startswith("{{"):
        return text
    elements = _elements(body[1:-1])
    if shape.kind is ValueKind.DECIMAL:
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
    """The table's newest version, with its own schema; files older than a column have nulls there."""
    # delta-rs decodes percent signs in a table's own path and then looks elsewhere. It is shown the log
    # through a link with a harmless name; the data files are opened by us.
    with tempfile.TemporaryDirectory(prefix="tailrace-compare-") as stand_in:
        Path(stand_in, "_delta_log").symlink_to((folder / "_delta_log").resolve())
        try:
            table = DeltaTable(stand_in)
            if _says_more(table, folder):
                return _scanned(DeltaTable(str(folder.resolve()), version=table.version()))
            schema = pa.schema(table.schema().to_arrow())
            adds = pa.table(table.get_add_actions(flatten=True))
        except DeltaError as error:
            raise LakeUnreadable(f"{folder}: the Delta log cannot be read") from error
    # What a table is partitioned by stands in the log alone.
    said = {name: adds.column(f"partition.{name}") for name in table.metadata().partition_columns}
    files = [
        _read_file(folder / unquote(path), schema, {name: values[i] for name, values in said.items()})
        for i, path in enumerate(adds.column("path").to_pylist())
    ]
    return pa.concat_tables([schema.empty_table(), *files])


def _says_more(table: DeltaTable, folder: Path) -> bool:
    """Whether its files alone do not tell what the table holds."""
    metadata = table.metadata()
    mapped = metadata.configuration.get("delta.columnMapping.mode", "none") != "none"
    return mapped or bool(pa.table(table.deletion_vectors()).num_rows)


def _scanned(table: DeltaTable) -> pa.Table:
    """As delta-rs reads it."""
    schema = pa.schema(table.schema().to_arrow())
    stored = pa.table(table.scan())
    return pa.table([stored.column(field.name).cast(field.type) for field in schema], schema=schema)


def _read_file(path: Path, schema: pa.Schema, said: dict[str, pa.Scalar]) -> pa.Table:
    if not path.is_file():
        raise LakeUnreadable(f"{path}: named by the Delta log, but not there")
    # ParquetFile, not read_table: that would take `name=value` in the path for a partition.
    with pq.ParquetFile(path) as file:
        stored = file.read()
    for name, value in said.items():
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
        str(place): pa.chunked_array(
            [_texts(chunk, column.shape) for chunk in stored.column(column.name).chunks], pa.string()
        )
        for place, column in enumerate(columns)
    }
    ones = pa.repeat(pa.scalar("1", pa.string()), stored.num_rows)
    return pa.table({**texts, "": ones})


def _texts(values: pa.Array, shape: ComparedType) -> pa.Array:
    """The text form of a column of the lake, as told at the top of this file."""
    if shape.is_list:
        return _list_texts(values, shape._replace(is_list=False))
    match shape.kind:
        case ValueKind.BOOLEAN:
            return pc.if_else(values, "t", "f")
        case ValueKind.REAL | ValueKind.DOUBLE:
            bits = values.view(pa.int32() if shape.kind is ValueKind.REAL else pa.int64()).cast(pa.string())
            return pc.if_else(pc.is_nan(values), "NaN", bits)
        case ValueKind.DECIMAL:
            return _unscaled(values.cast(pa.decimal128(DECIMAL_DIGITS_MAX, shape.scale))).cast(pa.string())
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
    """The same digits with no point: Arrow's own text of a decimal may use an exponent."""
    whole = pa.decimal128(DECIMAL_DIGITS_MAX, 0)
    return pa.Array.from_buffers(whole, len(values), values.buffers(), offset=values.offset)


def _list_texts(values: pa.Array, shape: ComparedType) -> pa.Array:
    lengths = pc.list_value_length(values).to_pylist()
    flat = _texts(pc.list_flatten(values), shape).to_pylist()
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
    """How two multisets of rows differ."""

    missing: int
    extra: int
    differing: int
    sample: tuple[str, ...]


def _key_places(wanted: list[SourceColumn], shared: list[SourceColumn]) -> list[int]:
    """Where the primary key's columns stand among the shared ones, in its order; none if one is not there."""
    key = [column for column in wanted if column.key_place is not None]
    if not all(column in shared for column in key):
        return []
    return [shared.index(column) for column in sorted(key, key=lambda column: column.key_place or 0)]


def _difference(
    source: pa.Table, mirror: pa.Table, key_places: list[int], columns: list[SourceColumn]
) -> RowDifferences:
    leftover = _leftover(source, mirror)
    missing_of: Counter[tuple[str, ...]] = Counter()
    extra_of: Counter[tuple[str, ...]] = Counter()
    counts = leftover.column("side_sum").to_pylist()
    keys = zip(*(leftover.column(str(place)).to_pylist() for place in key_places), strict=True)
    for count, key in zip(counts, keys if key_places else ((),) * len(counts), strict=True):
        if count > 0:
            missing_of[key] += count
        else:
            extra_of[key] -= count
    both = missing_of & extra_of if key_places else Counter[tuple[str, ...]]()
    differing = both.total()
    names = [columns[place].name for place in key_places]
    at_fault = sorted(missing_of.keys() | extra_of.keys())[:SAMPLE_MAX] if key_places else []
    sample = tuple(", ".join(f"{n}={v}" for n, v in zip(names, key, strict=True)) for key in at_fault)
    return RowDifferences(missing_of.total() - differing, extra_of.total() - differing, differing, sample)


def _leftover(source: pa.Table, mirror: pa.Table) -> pa.Table:
    """Rows that do not stand equally often on both sides, each once, with how often more in the source."""
    sides = [
        table.append_column("side", pa.repeat(pa.scalar(weight, pa.int64()), table.num_rows))
        for table, weight in ((source, 1), (mirror, -1))
    ]
    together = pa.concat_tables(sides)
    names = [name for name in together.column_names if name != "side"]
    counted = together.group_by(names).aggregate([("side", "sum")])
    return counted.filter(pc.not_equal(counted.column("side_sum"), 0))
