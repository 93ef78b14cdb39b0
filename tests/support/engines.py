"""Lake tables of the engine under test: delta-rs, or with `TAILRACE_TEST_ENGINE=spark` Spark's Delta connector.

The same tests hold both to the same promises. `tools/engines.py` runs them with the second, in an environment of its
own: there is no connector for the Spark that everything else is tested with.
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tailrace.tables.delta import DeltaRsTable
from tailrace.tables.features import Features
from tailrace.tables.forms import PLAIN, Form

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tailrace.spark.delta_engine import SparkDeltaTable
    from tailrace.spark.driving import SparkEngine

    AnyTable = DeltaRsTable | SparkDeltaTable

ENGINE = os.environ.get("TAILRACE_TEST_ENGINE", "delta-rs")
IS_SPARK = ENGINE == "spark"
FEATURES_SAID = os.environ.get("TAILRACE_TEST_FEATURES", "").split()
"""What tables are made with, by the names of the settings; only Spark's connector writes them."""
FEATURES = Features(**dict.fromkeys(FEATURES_SAID, True))
only_spark = pytest.mark.skipif(not IS_SPARK, reason="needs Spark's Delta connector: `make engines` runs it")
not_spark = pytest.mark.skipif(IS_SPARK, reason="of delta-rs alone")


def examples(count: int) -> int:
    """How many a property is tried with: a merge by Spark takes seconds."""
    return max(2, count // 8) if IS_SPARK else count


def open_table(path: Path, log_id: str, form: Form = PLAIN, features: Features = FEATURES) -> AnyTable:
    """A lake table of the engine under test."""
    if not IS_SPARK:
        return DeltaRsTable(path, log_id, form)
    from tailrace.spark.delta_engine import SparkDeltaTable

    return SparkDeltaTable(session(), path, log_id, form, features)


def engine_lines() -> str:
    """What settings say below `tables:` for the engine under test."""
    said = "".join(f"  {name}: true\n" for name in FEATURES_SAID)
    return f"  engine: spark\n{said}" if IS_SPARK else ""


@functools.cache
def spark_engine() -> SparkEngine:
    """What does the work of its tables."""
    from tailrace.spark.driving import SparkEngine

    return SparkEngine(session())


@functools.cache
def session() -> SparkSession:
    """One Spark with the connector for the whole process."""
    from tailrace.spark.connector import connector_settings
    from tailrace.spark.session import Jvm

    scratch = Path(tempfile.mkdtemp(prefix="tailrace-engine-"))
    jvm = Jvm("tests", scratch, scratch / "spark.log", settings=connector_settings({}))
    atexit.register(shutil.rmtree, scratch, ignore_errors=True)
    atexit.register(jvm.kill)
    return jvm.open_session()
