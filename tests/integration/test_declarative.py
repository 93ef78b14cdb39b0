"""The example of a Spark Declarative Pipeline runs as it stands, twice over. It needs Connect: `make matrix
ONLY=connect`."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.find_spark_home import _find_spark_home

from tailrace.changelog.format.schemas import record_known_table
from tailrace.model.schema import TableId
from tailrace.spark.session.java import find_java
from tests.support.changes import table_schema
from tests.support.logs import Diary

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "declarative"
RUN_SECONDS_MAX = 1700
ORDERS = replace(
    table_schema({"id": pa.int32(), "state": pa.string(), "total": pa.decimal128(10, 2)}),
    table=TableId("public", "orders"),
)
connect = pytest.mark.skipif(
    not importlib.util.find_spec("grpc"), reason="needs Spark Connect: `make matrix ONLY=connect`"
)


@connect
@pytest.mark.timeout(1800)
def test_a_flow_takes_in_what_came_since_the_run_before(tmp_path: Path) -> None:
    said = run([sys.executable, EXAMPLE / "run.py"], tmp_path)
    first, second = (rows(part) for part in said.partition("After the second:")[::2])
    assert [row[-2:] for row in first if len(row) == 3] == [("new", f"{i}0.00") for i in (1, 2, 3)]
    assert [(row[1], row[3], row[4]) for row in second if len(row) == 6] == [
        ("insert", "1", "new"),
        ("insert", "2", "new"),
        ("insert", "3", "new"),
        ("update", "1", "paid"),
        ("delete", "3", "NULL"),
    ]
    assert [row for row in second if len(row) == 3] == [("1", "paid", "10.00"), ("2", "new", "20.00")]


@connect
@pytest.mark.timeout(1800)
def test_an_auto_cdc_flow_over_the_source_is_planned(tmp_path: Path) -> None:
    """Spark compares what the flow names with the columns of the source; no table is there to apply it to."""
    diary = Diary(tmp_path / "changes")
    diary.commit()
    record_known_table(diary.path, ORDERS)
    diary.close()
    shutil.copytree(EXAMPLE / "not_run", tmp_path / "transformations")
    spec = (EXAMPLE / "spark-pipeline.yml").read_text().replace("${FOLDER}", str(tmp_path))
    (tmp_path / "spark-pipeline.yml").write_text(spec)
    program = Path(_find_spark_home(), "bin", "spark-pipelines")
    told = run([program, "dry-run"], tmp_path, SHOP_LOG=str(diary.path), PYSPARK_PYTHON=sys.executable)
    assert "Run is COMPLETED" in told


def test_what_was_not_run_says_so_where_it_stands_and_is_not_part_of_the_pipeline() -> None:
    (file,) = (EXAMPLE / "not_run").glob("*.py")
    assert "create_auto_cdc_flow" in file.read_text()
    assert "NOT RUN" in file.read_text().partition('"""\n')[0]
    assert "not_run" not in (EXAMPLE / "spark-pipeline.yml").read_text()
    page = (ROOT / "docs" / "guides" / "declarative-pipelines.md").read_text()
    assert "this was not run" in page


def run(command: Sequence[str | Path], folder: Path, **more: str) -> str:
    """What a program prints that must succeed."""
    environment = {
        **os.environ,
        "JAVA_HOME": str(find_java()),
        "PYTHONPATH": f"{ROOT / 'src'}",
        "SPARK_LOCAL_IP": "127.0.0.1",
        **more,
    }
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=RUN_SECONDS_MAX, check=False, env=environment, cwd=folder
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def rows(said: str) -> list[tuple[str, ...]]:
    """The rows of tables that DuckDB printed, by their ids."""
    lines = [line.strip().split("│")[1:-1] for line in said.splitlines() if re.match(r"\s*│\s*\d", line)]
    return [tuple(cell.strip() for cell in line) for line in lines]
