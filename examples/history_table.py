"""A history table: every version of every row, with the time it was valid (SCD 2), and what it was at some moment.

    python examples/history_table.py

It brings a PostgreSQL of its own (`pip install "tailrace[demo]"`) and leaves nothing behind.
"""

from __future__ import annotations

import subprocess
import sys
import time
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
  mode: history
"""
VERSIONS = "select id, price, _valid_from, _valid_to, _current from prices order by _seq, id"
AS_OF = "select id, price from prices where _valid_from <= $1 and (_valid_to > $1 or _valid_to is null) order by id"
WAIT_SECONDS_MAX = 240.0


def main() -> None:
    with EmbeddedPostgres() as server, TemporaryDirectory() as folder, server.connect() as source:
        source.execute("create table prices (id int primary key, price numeric(10,2))")
        source.execute("insert into prices values (1, 9.99), (2, 20.00)")
        file = Path(folder, "tailrace.yaml")
        file.write_text(SETTINGS.format(url=server.url()))
        pipeline = subprocess.Popen([sys.executable, "-m", "tailrace", "run", file, "--quiet"])
        try:
            table = Path(folder, "lake", "public", "prices")
            wait_for(table, versions=2)
            source.execute("update prices set price = 12.49 where id = 1")
            [(moment,)] = source.execute("select clock_timestamp()").fetchall()
            source.execute("update prices set price = 14.99 where id = 1")
            source.execute("delete from prices where id = 2")
            rows = wait_for(table, versions=4, current=1)
        finally:
            pipeline.terminate()
            pipeline.wait()
        database = duckdb.connect()
        database.execute("set timezone = 'UTC'")
        database.register("prices", rows)
        print("Every version:")
        database.sql(VERSIONS).show(max_width=120)
        print("What it was after the first change, before the second:")
        database.sql(AS_OF, params=[moment]).show()


def wait_for(folder: Path, versions: int, current: int | None = None) -> pa.Table:
    """The lake table, once it has so many versions, and so many of them are current."""
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    while time.monotonic() < deadline:
        if DeltaTable.is_deltatable(str(folder)):
            rows = pa.table(DeltaTable(str(folder)).scan())
            if rows.num_rows == versions and current in (None, sum(rows.column("_current").to_pylist())):
                return rows
        time.sleep(0.2)
    raise SystemExit("the lake table did not get there in time")


if __name__ == "__main__":
    main()
