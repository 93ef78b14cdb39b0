"""A lake mirror: the tables of a database as Delta tables, loaded once and then kept up to date.

    python examples/lake_mirror.py

It brings a PostgreSQL of its own (`pip install "tailrace[demo]"`) and leaves nothing behind.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import duckdb
import pyarrow as pa
from deltalake import DeltaTable

from tailrace.demo.server import EmbeddedPostgres

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
WAIT_SECONDS_MAX = 240.0


def main() -> None:
    with EmbeddedPostgres() as server, TemporaryDirectory() as folder, server.connect() as source:
        source.execute("create table orders (id int primary key, state text, total numeric(10,2))")
        source.execute("insert into orders select i, 'new', i * 10 from generate_series(1, 5) i")
        file = Path(folder, "tailrace.yaml")
        file.write_text(SETTINGS.format(url=server.url()))
        pipeline = subprocess.Popen([sys.executable, "-m", "tailrace", "run", file, "--quiet"])
        try:
            orders = Path(folder, "lake", "public", "orders")
            show("Loaded:", wait_for(orders, lambda rows: rows.num_rows == 5))
            source.execute("update orders set state = 'paid' where id <= 2")
            source.execute("delete from orders where id = 5")
            source.execute("insert into orders values (6, 'new', 1.50)")
            show("And followed:", wait_for(orders, lambda rows: 6 in rows.column("id").to_pylist()))
        finally:
            pipeline.terminate()
            pipeline.wait()


def wait_for(folder: Path, is_there: Callable[[pa.Table], bool]) -> pa.Table:
    """The lake table, once it holds what we wait for."""
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while time.monotonic() < deadline:
        if DeltaTable.is_deltatable(str(folder)):
            rows = pa.table(DeltaTable(str(folder)).scan())
            if is_there(rows):
                return rows
        time.sleep(0.2)
    raise SystemExit("the lake table did not get there in time")


def show(title: str, rows: pa.Table) -> None:
    print(title)
    duckdb.from_arrow(rows).order("id").show()


if __name__ == "__main__":
    main()
