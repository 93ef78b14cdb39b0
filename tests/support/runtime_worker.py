"""A program of a user's own that captures with a runtime, in a process that a test kills.

`python -m tests.support.runtime_worker URL FOLDER HOW ROWS` prints a JSON object for each thing it does. HOW is
`hold` (take the first batch and never acknowledge it), `one` (acknowledge the first batch, then wait), `all` (poll and
acknowledge until so many rows are committed) or `run` (the same with the loop, into files in FOLDER/out). With
`snapshot` behind it the tables are read first, with `hide` names pass a function that hides them.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa

from tailrace.capture.postgres.settings import PostgresSettings
from tailrace.capture.postgres.source import PostgresCapture
from tailrace.model.batch import ChangeBatch
from tailrace.model.schema import TableId
from tailrace.runtime.batch import Batch, Limits, Transactions
from tailrace.runtime.loop import CdcRuntime
from tailrace.runtime.sinks import JsonlSink
from tailrace.state.checkpoints import FileCheckpointStore

ITEMS = TableId("public", "items")
SECONDS_MAX = 60.0


def capture(url: str) -> PostgresCapture:
    made = PostgresCapture(PostgresSettings(
        url=url, wanted=lambda table: table == ITEMS, slot="library", publication="library",
    ))  # fmt: skip
    made.scan_chunk_bytes = 8192
    return made


def hidden(batch: ChangeBatch) -> ChangeBatch:
    """Each name as its hash."""
    place = batch.data.schema.get_field_index("name")
    names = [name and hashlib.sha256(name.encode()).hexdigest() for name in batch.data.column(place).to_pylist()]
    column = pa.array(names, pa.string())
    return replace(batch, data=batch.data.set_column(place, batch.data.schema.field(place), column))


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def told(batch: Batch) -> dict[str, Any]:
    events = list(batch.events())
    return {
        "kind": batch.kind.value, "ids": [event.values["id"] for event in events],
        "seqs": [event.seq for event in events], "names": [event.values["name"] for event in events],
    }  # fmt: skip


def main() -> None:
    url, folder, how, rows = sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    tables = (ITEMS,) if "snapshot" in sys.argv[5:] else ()
    limits = Limits(rows=100, transactions=Transactions.SPLIT if how == "run" else Transactions.WHOLE)
    with FileCheckpointStore(folder / "state") as store:
        hide = hidden if "hide" in sys.argv[5:] else None
        runtime = CdcRuntime(capture(url), store, snapshot_tables=tables, limits=limits, transform=hide)
        runtime.start()
        say(started=str(runtime.position), committed=runtime.rows_committed)
        deadline = time.monotonic() + SECONDS_MAX
        if how == "run":
            sink = JsonlSink(folder / "out")
            runtime.run(sink, lambda: runtime.rows_committed >= rows or time.monotonic() > deadline)
        else:
            poll(runtime, how, rows, deadline)
        say(ended=True, committed=runtime.rows_committed)


def poll(runtime: CdcRuntime, how: str, rows: int, deadline: float) -> None:
    while runtime.rows_committed < rows and time.monotonic() < deadline:
        batch = runtime.poll()
        if not batch.rows:
            continue
        say(**told(batch))
        if how == "hold":
            say(marker="taken")
            time.sleep(SECONDS_MAX)
        runtime.commit(batch.ack)
        if how == "one":
            say(marker="acknowledged", committed=runtime.rows_committed)
            time.sleep(SECONDS_MAX)
    runtime.stop()


if __name__ == "__main__":
    main()
