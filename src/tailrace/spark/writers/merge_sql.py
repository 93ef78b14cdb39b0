"""What a table's form asks of Spark's connector: how its rows are merged, and how they differ from what a load read.

The rows are those that `tables/fold/by_mode.py` makes, of the lake table's own shape. Nothing here runs a job.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import pyarrow as pa
from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame
from pyspark.sql import functions as f

from tailrace.errors import RELOAD_TABLE_HINT, BaseRowMissing
from tailrace.model import change
from tailrace.model.schema import Column, TableSchema
from tailrace.spark.session.arrow_types import spark_schema
from tailrace.tables.delta.diff import RetirementRule
from tailrace.tables.fold.fold import DELETE, END_VERSION, MARK_DELETED, UPSERT, TruncateEffect, key_ordinals
from tailrace.tables.spec import CURRENT, VALID_FROM, VALID_TO, TableMode, TableSpec


def quoted(name: str) -> str:
    """A column's name as Spark's SQL has it, verbatim."""
    return "`" + name.replace("`", "``") + "`"


def table_at(folder: Path) -> str:
    """A Delta table as Spark's SQL names it."""
    return f"delta.{quoted(str(folder))}"


def column_named(name: str) -> SparkColumn:
    """A column by its very name."""
    return f.col(quoted(name))


def own_columns(schema: TableSchema) -> list[str]:
    """The names of the table's own columns in folded rows."""
    return [f"c{i}" for i in range(len(schema.columns))]


def all_of(conditions: Sequence[SparkColumn]) -> SparkColumn:
    """One condition of several."""
    whole = conditions[0]
    for condition in conditions[1:]:
        whole = whole & condition
    return whole


def comparable_bits(value: SparkColumn, column: Column) -> SparkColumn:
    """To compare images by: 0.0 is not -0.0 there, and Spark takes them for equal."""
    kind = column.type.value_type if pa.types.is_list(column.type) else column.type
    return value.cast("string") if pa.types.is_floating(kind) else value


def as_table_rows(schema: TableSchema, rows: DataFrame) -> DataFrame:
    """The folded rows that come, under the table's own names; a row of a keyless table as often as it came."""
    came = rows.where(f.col("op") == UPSERT)
    if not schema.key:
        came = came.withColumn("copy", f.explode(f.sequence(f.lit(1), f.col("copies").cast("int"))))
    return came.select(*(f.col(f"c{i}").alias(column.name) for i, column in enumerate(schema.columns)))


def mirror_merge_sql(
    schema: TableSchema,
    target: str,
    view: str,
    kept: Collection[int],
    emptied: Collection[str] = (),
    *,
    matched: str = "",
    also: str = "",
) -> str:
    """The merge of a view's rows `c0…cN` and `op` into a table; where a flag `k<i>` is set its own row keeps its value.
    Columns that are emptied have null in rows that change. `matched` is what else is done with rows that are there,
    `also` what else is known of them."""
    names = [quoted(column.name) for column in schema.columns]
    over = ", ".join(
        f"{name} = CASE WHEN s.k{i} THEN t.{name} ELSE s.c{i} END" if i in kept else f"{name} = s.c{i}"
        for i, name in enumerate(names)
    )
    over += "".join(f", {quoted(name)} = NULL" for name in emptied)
    return (
        f"MERGE INTO {target} t USING {view} s"
        f" ON {' AND '.join(f't.{names[i]} = s.c{i}' for i in key_ordinals(schema))}{also}"
        f" WHEN MATCHED AND s.op = {DELETE} THEN DELETE"
        f" WHEN MATCHED AND s.op = {UPSERT} THEN UPDATE SET {over}{matched}"
        f" WHEN NOT MATCHED AND s.op = {UPSERT} THEN INSERT ({', '.join(names)})"
        f" VALUES ({', '.join(f's.c{i}' for i in range(len(names)))})"
    )


REINSERTED = "back"
"""Beside the rows of a difference: whether a row that goes comes again, changed."""


def merge_sql_for(
    form: TableSpec,
    stored: TableSchema,
    target: str,
    view: str,
    kept: Collection[int],
    emptied: Collection[str] = (),
    ended: TruncateEffect | None = None,
    also: str = "",
) -> str:
    """The merge of a view's rows into a table of the form; `kept`, `emptied` and `also` are as `merge_statement` has
    them."""
    if form.mode is TableMode.HISTORY:
        return _merge_versions(stored, target, view, ended, also)
    if not form.soft_delete:
        return mirror_merge_sql(stored, target, view, kept, emptied, also=also)
    there = f"NOT t.{quoted(form.deleted_column)}"
    said = {column.name: f"s.c{stored.names.index(column.name)}" for column in form.added_columns}
    marks = f" WHEN MATCHED AND s.op = {MARK_DELETED} AND {there} THEN UPDATE SET {_assigned(said)}"
    statement = mirror_merge_sql(stored, target, view, kept, emptied, matched=marks, also=also)
    if ended is not None:
        statement += f" WHEN NOT MATCHED BY SOURCE AND {there} THEN UPDATE SET {_assigned(_literals(ended.values))}"
    return statement


def _merge_versions(stored: TableSchema, target: str, view: str, ended: TruncateEffect | None, also: str) -> str:
    """What comes in stands beside what is there; of that only current versions end, or go if what ends them is the
    transaction that they are from."""
    places = {name: f"s.c{i}" for i, name in enumerate(stored.names)}
    keys = [stored.names[i] for i in key_ordinals(stored)]
    tx, current = f"t.{quoted(change.TX)}", f"t.{quoted(CURRENT)}"
    statement = (
        f"MERGE INTO {target} t USING {view} s"
        f" ON {' AND '.join(f't.{quoted(name)} = {places[name]}' for name in keys)}"
        f" AND {current} AND s.op = {END_VERSION}{also}"
        f" WHEN MATCHED AND {tx} = {places[change.TX]} THEN DELETE"
        f" WHEN MATCHED THEN UPDATE SET {_assigned({VALID_TO: places[VALID_TO], CURRENT: 'false'})}"
        f" WHEN NOT MATCHED AND s.op = {UPSERT} THEN INSERT ({', '.join(map(quoted, places))})"
        f" VALUES ({', '.join(places.values())})"
    )
    if ended is not None:
        statement += (
            f" WHEN NOT MATCHED BY SOURCE AND {current} AND {tx} = {ended.tx} THEN DELETE"
            f" WHEN NOT MATCHED BY SOURCE AND {current} THEN UPDATE SET {_assigned(_literals(ended.values))}"
        )
    return statement


def partition_condition(stored: TableSchema, partitions: Mapping[str, Collection[str] | None]) -> str:
    """What else is true of rows of the table that a merge is about, as a condition to follow others: Spark passes over
    partitions that do not meet it, which it does not find out by itself from the rows that come."""
    kinds = {field.name: field.dataType.simpleString() for field in spark_schema(pa.schema(stored.row_fields()))}
    return "".join(
        f" AND t.{quoted(name)} IN ({', '.join(_typed(text, kinds[name]) for text in sorted(texts))})"
        for name, texts in partitions.items()
        if texts
    )


def _typed(text: str, kind: str) -> str:
    """A value by its text, whatever that holds."""
    return f"CAST(CAST(X'{text.encode().hex()}' AS STRING) AS {kind})"


def _assigned(values: Mapping[str, str]) -> str:
    return ", ".join(f"{quoted(name)} = {value}" for name, value in values.items())


def _literals(values: Mapping[str, pa.Scalar]) -> dict[str, str]:
    return {name: _literal(value) for name, value in values.items()}


def _literal(value: pa.Scalar) -> str:
    """A value as Spark's SQL. An instant by its number: a text would be read in the session's time zone."""
    if not value.is_valid:
        return "NULL"
    if pa.types.is_timestamp(value.type):
        return f"timestamp_micros({value.value})"
    if pa.types.is_boolean(value.type):
        return str(value.as_py()).lower()
    said = value.as_py()
    return str(said) if isinstance(said, int) else "'" + str(said).replace("\\", "\\\\").replace("'", "\\'") + "'"


def not_before_clock(stored: TableSchema, rows: DataFrame, clock: int) -> DataFrame:
    """Folded rows of a history with no time before the clock."""
    for name in (VALID_FROM, VALID_TO):
        place = f"c{stored.names.index(name)}"
        rows = rows.withColumn(place, _at_least(f.col(place), f.timestamp_micros(f.lit(clock))))
    return rows


def _at_least(column: SparkColumn, least: SparkColumn) -> SparkColumn:
    """Null stays null."""
    return f.when(column < least, least).otherwise(column)


def rows_to_change(
    stored: TableSchema,
    counts: int,
    table: DataFrame,
    staged: DataFrame,
    listed: DataFrame | None,
    keeping: RetirementRule | None = None,
) -> DataFrame:
    """What must be written and what must go, so that a table holds the staged rows, as a merge takes it; and whether
    a row that goes comes again. Only the first `counts` columns tell whether two rows are the same. With `listed` keys,
    rows of the table that are not staged stay if their key is listed."""
    columns, own = stored.columns, key_ordinals(stored)
    staged = staged.select(*(column_named(c.name).alias(f"c{i}") for i, c in enumerate(columns)))
    there = table.select(*(column_named(c.name).alias(f"t{i}") for i, c in enumerate(columns)))
    there = there.withColumn("there", f.lit(True))
    flag = f.col(f"t{stored.names.index(keeping.flag)}") if keeping is not None else f.lit(False)
    if keeping is not None and not keeping.replaces:
        there = there.where(flag != f.lit(keeping.retired_value))
    same_key = [f.col(f"c{i}") == f.col(f"t{i}") for i in own]
    same = all_of(
        [
            comparable_bits(f.col(f"c{i}"), c).eqNullSafe(comparable_bits(f.col(f"t{i}"), c))
            for i, c in enumerate(columns[:counts])
        ]
    )
    came = staged.join(there, same_key, "left").where(f.col("there").isNull() | ~same)
    gone = there.join(staged, same_key, "left_anti")
    if listed is not None:
        listed = listed.select(*(column_named(columns[i].name).alias(f"l{i}") for i in own))
        gone = gone.join(listed, [f.col(f"t{i}") == f.col(f"l{i}") for i in own], "left_anti")
    if keeping is None:
        return _upserts(stored, came).unionByName(_removals(stored, gone, DELETE))
    upserts, values = _upserts(stored, came, keeping.least), keeping.values
    if keeping.replaces:
        return upserts.unionByName(
            _removals(stored, gone.where(flag != f.lit(keeping.retired_value)), MARK_DELETED, values)
        )
    changed = there.join(staged, same_key).where(~same)
    ends = _removals(stored, gone, END_VERSION, values).unionByName(
        _removals(stored, changed, END_VERSION, values, back=True)
    )
    return upserts.unionByName(ends)


def _upserts(stored: TableSchema, rows: DataFrame, least: Mapping[str, pa.Scalar] | None = None) -> DataFrame:
    lifted = [
        _at_least(f.col(place), f.expr(_literal(least[name]))).alias(place) if least and name in least else f.col(place)
        for place, name in zip(own_columns(stored), stored.names, strict=True)
    ]
    return rows.select(*lifted, _op(UPSERT), f.lit(False).alias(REINSERTED))


def _removals(
    stored: TableSchema, rows: DataFrame, op: int, values: Mapping[str, pa.Scalar] | None = None, *, back: bool = False
) -> DataFrame:
    """Rows that go under their keys; what is written into them where they stay all the same, and nothing else."""
    places = {}
    for i, column in enumerate(stored.columns):
        known = values is None or column.name in stored.key
        places[i] = f.col(f"t{i}") if known else f.lit(None).cast(rows.schema[f"t{i}"].dataType)
        if values is not None and column.name in values:
            places[i] = f.expr(_literal(values[column.name])).cast(rows.schema[f"t{i}"].dataType)
    own = [value.alias(f"c{i}") for i, value in places.items()]
    return rows.select(*own, _op(op), f.lit(back).alias(REINSERTED))


def _op(kind: int) -> SparkColumn:
    return f.lit(kind).cast("tinyint").alias("op")


def remove_copies(
    schema: TableSchema, table: DataFrame, rows: DataFrame, keep: Callable[[DataFrame], DataFrame]
) -> DataFrame:
    """The table's rows less so many copies of each image among the folded rows; too few of one is an error. `keep` has
    rows stay as they are, however often they are asked for."""
    there = table.select(*(column_named(c.name).alias(f"t{i}") for i, c in enumerate(schema.columns)))
    gone = keep(rows.where(f.col("op") == DELETE).withColumn("image", f.monotonically_increasing_id()))
    same = [
        comparable_bits(f.col(f"t{i}"), c).eqNullSafe(comparable_bits(f.col(f"c{i}"), c))
        for i, c in enumerate(schema.columns)
    ]
    joined = there.join(gone.select(*(f"c{i}" for i in range(len(same))), "image", "copies"), same, "left")
    number = "row_number() OVER (PARTITION BY image ORDER BY image) AS n"
    # Which of equal rows goes is all the same, but it must stay the same.
    numbered = keep(joined.where("image IS NOT NULL").selectExpr("*", number))
    dropped = f.col("n") <= -f.col("copies")
    wanted = gone.agg(f.coalesce(-f.sum("copies"), f.lit(0))).first()
    found = numbered.where(dropped).count()
    assert wanted is not None, "an aggregate"
    if found < wanted[0]:
        raise BaseRowMissing(
            "rows to be removed are not in the table",
            table=schema.table,
            rows=int(wanted[0]) - found,
            hint=RELOAD_TABLE_HINT,
        )
    kept = joined.where("image IS NULL").unionByName(numbered.where(~dropped).drop("n"))
    return kept.select(*(f.col(f"t{i}").alias(c.name) for i, c in enumerate(schema.columns)))
