"""`tables.engine: spark` on a Spark that has no Delta connector: said before anything is begun."""

from __future__ import annotations

from pathlib import Path

from tailrace.errors import ExitCode
from tests.support.engines import not_spark
from tests.support.pipelines import Pipeline, execute


@not_spark  # there the connector is
def test_a_spark_without_a_connector_is_refused_with_the_next_step(database: str, tmp_path: Path) -> None:
    execute(database, "CREATE TABLE t (id int PRIMARY KEY)", "INSERT INTO t VALUES (1)")
    pipeline = Pipeline(tmp_path / "one", database)
    pipeline.file.write_text(pipeline.file.read_text() + "  engine: spark\n")
    done = pipeline.call("run", "--until-caught-up")
    assert done.returncode == ExitCode.CONFIG, done.stderr
    assert "error: this version of Spark has no tested Delta connector (pyspark=4.3" in done.stderr
    assert "hint: Install a pyspark that has one (4.1, 4.2)" in done.stderr
    assert not (pipeline.lake / "public" / "t").exists()
