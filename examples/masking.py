"""Masking in flight: values that must not leave the database are hidden before anything is stored.

    python examples/masking.py

It brings a PostgreSQL of its own (`pip install "tailrace[demo]"`) and leaves nothing behind. Rules stand before the
change log, so what reads the log, lake tables and queries alike, never meets the value. It needs no Spark.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tailrace import ChangeLog
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
transforms:
  keys:
    main: {{env: TAILRACE_KEY}}
  rules:
    - {{do: mask, tables: ["public.users"], columns: [phone], keep_last: 2}}
    - {{do: hmac, tables: ["public.users"], columns: [email], key: main}}
    - {{do: exclude, tables: ["public.users"], columns: [password]}}
    - {{do: filter, tables: ["public.users"], where: "country in ('DE', 'AT')"}}
"""
LOOKED_FOR = ("Ada", "ada@example.com", "555-0100", "hunter2", "Grace")


def main() -> None:
    os.environ["TAILRACE_KEY"] = secrets.token_hex(32)
    with EmbeddedPostgres() as server, TemporaryDirectory() as folder, server.connect() as source:
        source.execute(
            "create table users (id int primary key, name text, email text, phone text, password text, country text)"
        )
        file = Path(folder, "tailrace.yaml")
        file.write_text(SETTINGS.format(url=server.url()))
        capture(file)  # makes slot and log; what is committed from now on is captured
        source.execute("insert into users values (1, 'Ada', 'ada@example.com', '555-0100', 'hunter2', 'DE')")
        source.execute("insert into users values (2, 'Grace', 'grace@example.com', '555-0199', 'secret', 'US')")
        source.execute("update users set phone = '555-0123' where id = 1")
        capture(file)

        print("What the log holds:")
        for batch in ChangeLog.open(Path(folder, "changes")).follow(table="public.users"):
            for event in batch.events():
                print(f"  {event.operation.value:7}", dict(event.values))
        stored = b"".join(path.read_bytes() for path in Path(folder).rglob("*") if path.is_file())
        for text in LOOKED_FOR:
            print(f"{text!r} stands in a file:", text.encode() in stored)


def capture(file: Path) -> None:
    subprocess.run([sys.executable, "-m", "tailrace", "capture", file, "--until-caught-up", "--quiet"], check=True)


if __name__ == "__main__":
    main()
