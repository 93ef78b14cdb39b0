"""Convert columns between Arrow and Spark, the same way with every supported Spark. Their defaults differ."""

from __future__ import annotations

import inspect

import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import StructType


def spark_schema(fields: pa.Schema) -> StructType:
    """Return the columns as a DataFrame has them. A time without a zone stays one."""
    return from_arrow_schema(fields, prefer_timestamp_ntz=True)


def arrow_schema(schema: StructType) -> pa.Schema:
    """Return the columns as Spark takes them from a source. Times with a zone are in UTC."""
    if "timezone" in inspect.signature(to_arrow_schema).parameters:
        return to_arrow_schema(schema, timezone="UTC")
    return to_arrow_schema(schema)  # up to Spark 4.1 that is a switch, which is on by default
