"""Build the statements and frames with which Spark writes a table. They are for merges and for load commits.

The rows are those of `tables/fold/by_mode.py`, with the lake table's own schema. Nothing here runs a job, except
`remove_copies`.
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
from tailrace.tables.fold.folded_changes import DELETE, END_VERSION, MARK_DELETED, UPSERT, TruncateEffect, key_ordinals
from tailrace.tables.spec import CURRENT, VALID_FROM, VALID_TO, TableMode, TableSpec


def quoted(name: str) -> str:
    """Return a column's name as Spark's SQL has it, verbatim."""
    return "`" + name.replace("`", "``") + "`"


def table_at(folder: Path) -> str:
    """Return the name of a Delta table in Spark's SQL."""
    return f"delta.{quoted(str(folder))}"


def column_named(name: str) -> SparkColumn:
    """Return the column with exactly this name."""
    return f.col(quoted(name))


def own_columns(schema: TableSchema) -> list[str]:
    """Return the names of the table's own columns in folded rows."""
    return [f"c{i}" for i in range(len(schema.columns))]


def all_of(conditions: Sequence[SparkColumn]) -> SparkColumn:
    """Return one condition that holds if all these hold."""
    whole = conditions[0]
    for condition in conditions[1:]:
        whole = whole & condition
    return whole


def comparable_bits(value: SparkColumn, column: Column) -> SparkColumn:
    """Return a value to compare rows by. 0.0 differs from -0.0 in it, which Spark takes for equal."""
    kind = column.type.value_type if pa.types.is_list(column.type) else column.type
    return value.cast("string") if pa.types.is_floating(kind) else value


def as_table_rows(schema: TableSchema, rows: DataFrame) -> DataFrame:
    """Return the folded rows to write, under the table's own names.

    A row of a keyless table is repeated for each copy.
    """
    upserts = rows.where(f.col("op") == UPSERT)
    if not schema.key:
        upserts = upserts.withColumn("copy", f.explode(f.sequence(f.lit(1), f.col("copies").cast("int"))))
    return upserts.select(*(f.col(f"c{i}").alias(column.name) for i, column in enumerate(schema.columns)))


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
    """Return the merge of a view's rows `c0…cN` and `op` into a table.

    Where a flag `k<i>` is set, the table's own row keeps its value. Columns in `emptied` become null in rows that
    change. `matched` has further actions for matched rows, `also` a further condition on them.
    """
    names = [quoted(column.name) for column in schema.columns]
    assignments = ", ".join(
        f"{name} = CASE WHEN s.k{i} THEN t.{name} ELSE s.c{i} END" if i in kept else f"{name} = s.c{i}"
        for i, name in enumerate(names)
    )
    assignments += "".join(f", {quoted(name)} = NULL" for name in emptied)
    return (
        f"MERGE INTO {target} t USING {view} s"
        f" ON {' AND '.join(f't.{names[i]} = s.c{i}' for i in key_ordinals(schema))}{also}"
        f" WHEN MATCHED AND s.op = {DELETE} THEN DELETE"
        f" WHEN MATCHED AND s.op = {UPSERT} THEN UPDATE SET {assignments}{matched}"
        f" WHEN NOT MATCHED AND s.op = {UPSERT} THEN INSERT ({', '.join(names)})"
        f" VALUES ({', '.join(f's.c{i}' for i in range(len(names)))})"
    )


REINSERTED = "back"
"""Column of a difference's rows: whether a row that is removed is inserted again, changed."""


def merge_sql_for(
    spec: TableSpec,
    stored: TableSchema,
    target: str,
    view: str,
    kept: Collection[int],
    emptied: Collection[str] = (),
    ended: TruncateEffect | None = None,
    also: str = "",
) -> str:
    """Return the merge of a view's rows into a table with this table spec.

    `kept`, `emptied` and `also` are as in `mirror_merge_sql`.
    """
    if spec.mode is TableMode.HISTORY:
        return _merge_versions(stored, target, view, ended, also)
    if not spec.soft_delete:
        return mirror_merge_sql(stored, target, view, kept, emptied, also=also)
    not_deleted = f"NOT t.{quoted(spec.deleted_column)}"
    metadata = {column.name: f"s.c{stored.names.index(column.name)}" for column in spec.added_columns}
    marks = f" WHEN MATCHED AND s.op = {MARK_DELETED} AND {not_deleted} THEN UPDATE SET {_assigned(metadata)}"
    statement = mirror_merge_sql(stored, target, view, kept, emptied, matched=marks, also=also)
    if ended is not None:
        statement += (
            f" WHEN NOT MATCHED BY SOURCE AND {not_deleted} THEN UPDATE SET {_assigned(_literals(ended.values))}"
        )
    return statement


def _merge_versions(stored: TableSchema, target: str, view: str, ended: TruncateEffect | None, also: str) -> str:
    """Return the merge into a history: new versions are added, and current versions end.

    A current version is removed instead if the transaction that ends it also made it.
    """
    expressions = {name: f"s.c{i}" for i, name in enumerate(stored.names)}
    keys = [stored.names[i] for i in key_ordinals(stored)]
    tx, current = f"t.{quoted(change.TX)}", f"t.{quoted(CURRENT)}"
    statement = (
        f"MERGE INTO {target} t USING {view} s"
        f" ON {' AND '.join(f't.{quoted(name)} = {expressions[name]}' for name in keys)}"
        f" AND {current} AND s.op = {END_VERSION}{also}"
        f" WHEN MATCHED AND {tx} = {expressions[change.TX]} THEN DELETE"
        f" WHEN MATCHED THEN UPDATE SET {_assigned({VALID_TO: expressions[VALID_TO], CURRENT: 'false'})}"
        f" WHEN NOT MATCHED AND s.op = {UPSERT} THEN INSERT ({', '.join(map(quoted, expressions))})"
        f" VALUES ({', '.join(expressions.values())})"
    )
    if ended is not None:
        statement += (
            f" WHEN NOT MATCHED BY SOURCE AND {current} AND {tx} = {ended.tx} THEN DELETE"
            f" WHEN NOT MATCHED BY SOURCE AND {current} THEN UPDATE SET {_assigned(_literals(ended.values))}"
        )
    return statement


def partition_condition(stored: TableSchema, partitions: Mapping[str, Collection[str] | None]) -> str:
    """Return a condition on the rows that a merge affects. It follows other conditions.

    Spark skips partitions that do not meet it. It does not derive that from the merge's rows.
    """
    kinds = {field.name: field.dataType.simpleString() for field in spark_schema(pa.schema(stored.row_fields()))}
    return "".join(
        f" AND t.{quoted(name)} IN ({', '.join(_typed(text, kinds[name]) for text in sorted(texts))})"
        for name, texts in partitions.items()
        if texts
    )


def _typed(text: str, kind: str) -> str:
    """Return SQL for a value by its text, which may contain anything."""
    return f"CAST(CAST(X'{text.encode().hex()}' AS STRING) AS {kind})"


def _assigned(values: Mapping[str, str]) -> str:
    return ", ".join(f"{quoted(name)} = {value}" for name, value in values.items())


def _literals(values: Mapping[str, pa.Scalar]) -> dict[str, str]:
    return {name: _literal(value) for name, value in values.items()}


def _literal(value: pa.Scalar) -> str:
    """Return a value as Spark's SQL. An instant is a number: a text would be read in the session's time zone."""
    if not value.is_valid:
        return "NULL"
    if pa.types.is_timestamp(value.type):
        return f"timestamp_micros({value.value})"
    if pa.types.is_boolean(value.type):
        return str(value.as_py()).lower()
    raw = value.as_py()
    return str(raw) if isinstance(raw, int) else "'" + str(raw).replace("\\", "\\\\").replace("'", "\\'") + "'"


def not_before_clock(stored: TableSchema, rows: DataFrame, clock: int) -> DataFrame:
    """Return folded rows of a history with no time before the clock."""
    for name in (VALID_FROM, VALID_TO):
        column = f"c{stored.names.index(name)}"
        rows = rows.withColumn(column, _at_least(f.col(column), f.timestamp_micros(f.lit(clock))))
    return rows


def _at_least(column: SparkColumn, least: SparkColumn) -> SparkColumn:
    """Return the column, raised to a least value. Null stays null."""
    return f.when(column < least, least).otherwise(column)


def rows_to_change(
    stored: TableSchema,
    counts: int,
    table: DataFrame,
    staged: DataFrame,
    listed: DataFrame | None,
    retirement: RetirementRule | None = None,
) -> DataFrame:
    """Return the rows that a merge must write and remove. After it the table holds the staged rows.

    The column `back` says whether a row that is removed is inserted again. Only the first `counts` columns decide
    whether two rows are the same. With `listed` keys, rows of the table that are not staged stay if their key is
    listed.
    """
    columns, key = stored.columns, key_ordinals(stored)
    staged = staged.select(*(column_named(c.name).alias(f"c{i}") for i, c in enumerate(columns)))
    existing = table.select(*(column_named(c.name).alias(f"t{i}") for i, c in enumerate(columns)))
    existing = existing.withColumn("there", f.lit(True))
    flag = f.col(f"t{stored.names.index(retirement.flag)}") if retirement is not None else f.lit(False)
    if retirement is not None and not retirement.replaces:
        existing = existing.where(flag != f.lit(retirement.retired_value))
    same_key = [f.col(f"c{i}") == f.col(f"t{i}") for i in key]
    is_same = all_of(
        [
            comparable_bits(f.col(f"c{i}"), c).eqNullSafe(comparable_bits(f.col(f"t{i}"), c))
            for i, c in enumerate(columns[:counts])
        ]
    )
    changed_rows = staged.join(existing, same_key, "left").where(f.col("there").isNull() | ~is_same)
    removed = existing.join(staged, same_key, "left_anti")
    if listed is not None:
        listed = listed.select(*(column_named(columns[i].name).alias(f"l{i}") for i in key))
        removed = removed.join(listed, [f.col(f"t{i}") == f.col(f"l{i}") for i in key], "left_anti")
    if retirement is None:
        return _upserts(stored, changed_rows).unionByName(_removals(stored, removed, DELETE))
    upserts, values = _upserts(stored, changed_rows, retirement.least), retirement.values
    if retirement.replaces:
        return upserts.unionByName(
            _removals(stored, removed.where(flag != f.lit(retirement.retired_value)), MARK_DELETED, values)
        )
    changed = existing.join(staged, same_key).where(~is_same)
    ends = _removals(stored, removed, END_VERSION, values).unionByName(
        _removals(stored, changed, END_VERSION, values, back=True)
    )
    return upserts.unionByName(ends)


def _upserts(stored: TableSchema, rows: DataFrame, least: Mapping[str, pa.Scalar] | None = None) -> DataFrame:
    values = [
        _at_least(f.col(column), f.expr(_literal(least[name]))).alias(column)
        if least and name in least
        else f.col(column)
        for column, name in zip(own_columns(stored), stored.names, strict=True)
    ]
    return rows.select(*values, _op(UPSERT), f.lit(False).alias(REINSERTED))


def _removals(
    stored: TableSchema, rows: DataFrame, op: int, values: Mapping[str, pa.Scalar] | None = None, *, back: bool = False
) -> DataFrame:
    """Return rows to remove. With `values` they have only their keys and these values.

    The values are written into rows that stay all the same.
    """
    expressions = {}
    for i, column in enumerate(stored.columns):
        is_kept = values is None or column.name in stored.key
        expressions[i] = f.col(f"t{i}") if is_kept else f.lit(None).cast(rows.schema[f"t{i}"].dataType)
        if values is not None and column.name in values:
            expressions[i] = f.expr(_literal(values[column.name])).cast(rows.schema[f"t{i}"].dataType)
    columns = [value.alias(f"c{i}") for i, value in expressions.items()]
    return rows.select(*columns, _op(op), f.lit(back).alias(REINSERTED))


def _op(kind: int) -> SparkColumn:
    return f.lit(kind).cast("tinyint").alias("op")


def remove_copies(
    schema: TableSchema, table: DataFrame, rows: DataFrame, keep: Callable[[DataFrame], DataFrame]
) -> DataFrame:
    """Return the table's rows without the removed copies of each image. The folded rows say how many.

    Too few copies of one are an error. `keep` makes rows stay the same, however often they are read.
    """
    existing = table.select(*(column_named(c.name).alias(f"t{i}") for i, c in enumerate(schema.columns)))
    removals = keep(rows.where(f.col("op") == DELETE).withColumn("image", f.monotonically_increasing_id()))
    is_same = [
        comparable_bits(f.col(f"t{i}"), c).eqNullSafe(comparable_bits(f.col(f"c{i}"), c))
        for i, c in enumerate(schema.columns)
    ]
    joined = existing.join(removals.select(*(f"c{i}" for i in range(len(is_same))), "image", "copies"), is_same, "left")
    number = "row_number() OVER (PARTITION BY image ORDER BY image) AS n"
    # It does not matter which of equal rows is removed, but it must always be the same one.
    numbered = keep(joined.where("image IS NOT NULL").selectExpr("*", number))
    is_removed = f.col("n") <= -f.col("copies")
    requested = removals.agg(f.coalesce(-f.sum("copies"), f.lit(0))).first()
    removed = numbered.where(is_removed).count()
    assert requested is not None, "an aggregate"
    if removed < requested[0]:
        raise BaseRowMissing(
            "rows to be removed are not in the table",
            table=schema.table,
            rows=int(requested[0]) - removed,
            hint=RELOAD_TABLE_HINT,
        )
    kept = joined.where("image IS NULL").unionByName(numbered.where(~is_removed).drop("n"))
    return kept.select(*(f.col(f"t{i}").alias(c.name) for i, c in enumerate(schema.columns)))
