"""What makes a commit of Spark's Delta connector a compare-and-swap: a task that fails if someone else was first.

The connector opens its transaction at the newest version there is, which may be newer than the one that was looked at.
The guard is part of what is written, so it runs after that, and fails unless the version that was looked at is still
the newest. From then on the number of the next commit decides.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Callable
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f
from pyspark.sql.types import StructType

_CODE = "tailrace-version-moved"
_OVERTAKEN = re.compile(rf"{_CODE}|Concurrent\w*Exception|DELTA_CONCURRENT|commit attempts|DELTA_MAX_COMMIT")
"""In what Spark says: ours, and the connector's own for a number that is taken."""


def version_guard(session: SparkSession, fields: StructType, folder: Path, version: int) -> DataFrame:
    """A frame of no rows and these fields, to be written beside others; it fails if there is a newer version."""
    check = f.udf(_check(folder, version), "boolean", useArrow=False).asNondeterministic()
    nulls = [f.lit(None).cast(field.dataType).alias(field.name) for field in fields]
    return session.range(1, numPartitions=1).where(check("id")).select(*nulls)


def was_overtaken(said: str) -> bool:
    """Whether a statement failed because someone else committed."""
    return _OVERTAKEN.search(said.partition("\n\tat ")[0]) is not None


def _check(folder: Path, version: int) -> Callable[[int], bool]:
    following = str(folder / "_delta_log" / f"{version + 1:020d}.json")

    def check(_: int) -> bool:
        if os.path.exists(following):
            raise RuntimeError(_CODE)
        return False

    return check
