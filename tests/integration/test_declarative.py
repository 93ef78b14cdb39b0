"""The example of a Spark Declarative Pipeline runs as it stands, twice over. It needs Connect: `make matrix
ONLY=connect`."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tailrace.spark.java import find_java

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "declarative"
RUN_SECONDS_MAX = 1700
connect = pytest.mark.skipif(
    not importlib.util.find_spec("grpc"), reason="needs Spark Connect: `make matrix ONLY=connect`"
)


@connect
@pytest.mark.timeout(1800)
def test_a_flow_takes_in_what_came_since_the_run_before(tmp_path: Path) -> None:
    environment = {
        **os.environ, "JAVA_HOME": str(find_java()), "PYTHONPATH": f"{ROOT / 'src'}", "SPARK_LOCAL_IP": "127.0.0.1",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, EXAMPLE / "run.py"], capture_output=True, text=True, timeout=RUN_SECONDS_MAX, check=False,
        env=environment, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    first, second = (rows(part) for part in done.stdout.partition("After the second:")[::2])
    assert [row[-2:] for row in first if len(row) == 3] == [("new", f"{i}0.00") for i in (1, 2, 3)]
    assert [(row[1], row[3], row[4]) for row in second if len(row) == 6] == [
        ("insert", "1", "new"), ("insert", "2", "new"), ("insert", "3", "new"), ("update", "1", "paid"),
        ("delete", "3", "NULL"),
    ]  # fmt: skip
    assert [row for row in second if len(row) == 3] == [("1", "paid", "10.00"), ("2", "new", "20.00")]


def test_what_was_not_run_says_so_where_it_stands_and_is_not_part_of_the_pipeline() -> None:
    (file,) = (EXAMPLE / "not_run").glob("*.py")
    assert "create_auto_cdc_flow" in file.read_text()
    assert "NOT RUN" in file.read_text().partition('"""\n')[0]
    assert "not_run" not in (EXAMPLE / "spark-pipeline.yml").read_text()
    page = (ROOT / "docs" / "guides" / "declarative-pipelines.md").read_text()
    assert "this was not run" in page


def rows(said: str) -> list[tuple[str, ...]]:
    """The rows of tables that DuckDB printed, by their ids."""
    lines = [line.strip().split("│")[1:-1] for line in said.splitlines() if re.match(r"\s*│\s*\d", line)]
    return [tuple(cell.strip() for cell in line) for line in lines]
