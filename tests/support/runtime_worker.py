"""A program of a user's own that captures with a runtime, in a process that a test kills.

`python -m tests.support.runtime_worker URL FOLDER HOW ROWS …` prints a JSON object for each thing it does. HOW is
`hold` (take the first batch and never acknowledge it), `one` (acknowledge the first batch, then wait), `two` (the same,
and take the second one before), `all` (poll and acknowledge until so many rows are committed), `until` (the same until
the stream has brought the row of that id), `run` (the loop, into files in FOLDER/out, until it has) or `prefix` (the
same by hand, and of each batch a half is accepted first). Behind it may stand `snapshot` (the tables are read first),
`encrypt` (a rule encrypts names, with the key in the environment) and `parts` (large transactions come in parts).
`forked` is the same in a process that was forked, which costs no start of Python.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from tailrace import failpoints
from tailrace.capture.postgres import stream
from tailrace.capture.postgres.config import PostgresSettings
from tailrace.capture.postgres.source import PostgresCapture
from tailrace.model.schema import TableId
from tailrace.runtime.loop import CdcRuntime
from tailrace.runtime.output_batch import Batch, BatchKind, Limits, Transactions
from tailrace.runtime.sinks import JsonlSink
from tailrace.state.checkpoint_stores import FileCheckpointStore
from tailrace.transforms.rules import Encrypt, KeySource, Transforms

ITEMS = TableId("public", "items")
SECONDS_MAX = 240.0
KEY_ID, KEY_VARIABLE = "main", "TAILRACE_WORKER_KEY"
ENCRYPTING = Transforms(
    keys={KEY_ID: KeySource(env=KEY_VARIABLE)}, rules=(Encrypt(tables=(str(ITEMS),), columns=("name",), key=KEY_ID),)
)


def capture(url: str) -> PostgresCapture:
    made = PostgresCapture(
        PostgresSettings(url=url, wanted=lambda table: table == ITEMS, slot="library", publication="library")
    )
    made.scan_chunk_bytes = 8192
    return made


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def told(batch: Batch) -> dict[str, Any]:
    events = list(batch.events())
    names = [event.values["name"] for event in events]
    return {
        "kind": batch.kind.value,
        "ids": [event.values["id"] for event in events],
        "seqs": [event.seq for event in events],
        "ops": [event.operation.value for event in events],
        "names": [name.hex() if isinstance(name, bytes) else name for name in names],
    }


class Followed(JsonlSink):
    """Files, and the highest id that the stream has brought."""

    last = 0

    def write(self, batch: Batch) -> tuple[()]:
        if batch.kind is BatchKind.STREAM:
            self.last = max([self.last, *(event.values["id"] for event in batch.events())])
        return super().write(batch)


def forked(place: str, log: Path, *arguments: str) -> None:
    """The program, to be killed at a place."""
    os.setsid()  # it dies with its group
    os.environ["TAILRACE_FAILPOINT_LOG"] = str(log)
    failpoints.arm(place)
    main(*arguments)


def main(url: str, folder: str, how: str, rows: str, *more: str) -> None:
    tables = (ITEMS,) if "snapshot" in more else ()
    in_parts = how in ("run", "prefix")
    limits = Limits(rows=50 if in_parts else 100, transactions=Transactions.SPLIT if in_parts else Transactions.WHOLE)
    if "parts" in more:
        stream.BIG_BYTES, stream.DRAIN_BYTES = 2_000, 250
    with FileCheckpointStore(Path(folder) / "state") as store:
        rules = ENCRYPTING if "encrypt" in more else None
        runtime = CdcRuntime(capture(url), store, snapshot_tables=tables, limits=limits, transforms=rules)
        runtime.start()
        say(started=str(runtime.position), committed=runtime.rows_committed)
        follow(runtime, how, int(rows), Path(folder) / "out")
        say(ended=True, committed=runtime.rows_committed)


def follow(runtime: CdcRuntime, how: str, rows: int, out: Path) -> None:
    deadline = time.monotonic() + SECONDS_MAX
    if how in ("run", "prefix"):
        sink = Followed(out)
        if how == "run":
            runtime.run(sink, lambda: sink.last >= rows or time.monotonic() > deadline)
        while how == "prefix" and time.monotonic() < deadline:
            batch = runtime.poll()
            sink.write(batch)
            sink.flush(caught_up=False)
            runtime.commit(batch.ack, rows=(batch.rows + 1) // 2)
        return
    came = False
    while not came and time.monotonic() < deadline:
        batch = runtime.poll()
        if not batch.rows:
            continue
        say(**told(batch))
        if how == "hold":
            say(marker="taken")
            time.sleep(SECONDS_MAX)
        runtime.commit(batch.ack)
        if how == "two":
            say(**told(runtime.poll()))
        if how in ("one", "two"):
            say(marker="acknowledged", committed=runtime.rows_committed)
            time.sleep(SECONDS_MAX)
        if how == "until":
            came = batch.kind is BatchKind.STREAM and rows in told(batch)["ids"]
        else:
            came = runtime.rows_committed >= rows
    runtime.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
