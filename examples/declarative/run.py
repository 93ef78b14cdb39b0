"""A Spark Declarative Pipeline whose flow reads the changes of a database, run twice.

    pip install "tailrace[demo]" "pyspark[pipelines]"
    python examples/declarative/run.py

It brings a PostgreSQL of its own and leaves nothing behind. The pipeline itself is `transformations/orders.py`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import duckdb
from pyspark.find_spark_home import _find_spark_home

from tailrace.demo.server import EmbeddedPostgres

HERE = Path(__file__).resolve().parent
SETTINGS = """\
name: shop
source:
  url: {url}
  tables: ["public.*"]
log: ./changes
tables:
  format: delta
  path: ./lake
"""
NOW = """
select id, state, total from changes
qualify row_number() over (partition by id order by _seq desc) = 1 and _op <> 'delete' order by id
"""
"""Each order as its last change left it."""


def main() -> None:
    with EmbeddedPostgres() as server, TemporaryDirectory() as name, server.connect() as source:
        folder = Path(name)
        shutil.copytree(HERE / "transformations", folder / "transformations")
        spec = (HERE / "spark-pipeline.yml").read_text().replace("${FOLDER}", str(folder))
        (folder / "spark-pipeline.yml").write_text(spec)
        file = folder / "tailrace.yaml"
        file.write_text(SETTINGS.format(url=server.url()))

        source.execute("create table orders (id int primary key, state text, total numeric(10,2))")
        capture(file)  # makes slot and log; what is committed from now on is captured
        source.execute("insert into orders select i, 'new', i * 10 from generate_series(1, 3) i")
        run(file)
        show("After the first run:", folder)
        source.execute("update orders set state = 'paid' where id = 1")
        source.execute("delete from orders where id = 3")
        run(file)
        show("After the second:", folder)


def run(file: Path) -> None:
    """Take in what there is: capture into the log, then one run of the pipeline."""
    capture(file)
    program = Path(_find_spark_home(), "bin", "spark-pipelines")
    # A catalog that outlives the run: the tables are there the next time.
    catalog = ["--conf", "spark.sql.catalogImplementation=hive"]
    environment = {**os.environ, "SHOP_LOG": str(file.parent / "changes"), "PYSPARK_PYTHON": sys.executable}
    command = [program, "run", *catalog, "--conf", "spark.log.level=ERROR"]
    subprocess.run(command, cwd=file.parent, env=environment, check=True)


def capture(file: Path) -> None:
    command = [sys.executable, "-m", "tailrace", "capture", file, "--until-caught-up", "--quiet"]
    subprocess.run(command, check=True)


def show(title: str, folder: Path) -> None:
    print(title, flush=True)
    changes = duckdb.read_parquet(f"{folder}/spark-warehouse/order_changes/*.parquet")
    changes.order("_seq").show()
    changes.query("changes", NOW).show()


if __name__ == "__main__":
    main()
