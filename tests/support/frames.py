"""A DataFrame over a log, without Spark: planned and read as its driver and its tasks do it."""

from __future__ import annotations

from typing import Any

from tailrace.changelog.read.offsets import LogOffset
from tailrace.spark.datasource.log.log_options import LogOptions
from tailrace.spark.datasource.log.log_part import read_part
from tailrace.spark.datasource.log.log_plan import LogPart, LogPlanner
from tailrace.spark.datasource.log.log_schema import LogFrame, resolve_frame
from tailrace.storage.files import LogPath

Rows = list[dict[str, Any]]


def frame(log: LogPath, **options: object) -> LogFrame:
    """What `load()` makes."""
    return resolve_frame(LogOptions.parse({"log": str(log)} | {name: str(value) for name, value in options.items()}))


def rows_of_parts(made: LogFrame, parts: list[LogPart]) -> Rows:
    """What tasks give to Spark; each batch has the DataFrame's very fields."""
    found: Rows = []
    for part in parts:
        for batch in read_part(made, part, made.fields):
            assert batch.num_rows
            assert batch.schema == made.fields
            found += batch.to_pylist()
    return found


def steps(made: LogFrame, *, after: LogOffset | None = None) -> list[tuple[int, Rows]]:
    """Micro-batch after micro-batch until nothing is left: the commit each ends with, and its rows."""
    view, found = LogPlanner(made), []
    place = after or view.start_offset()
    while (end := view.next_end(place, view.newest(), limited=True)) > place.commit:
        found.append((end, rows_of_parts(made, view.plan_parts(place, end))))
        place = LogOffset(end)
    return found


def stream(log: LogPath, **options: object) -> Rows:
    """All rows of a stream, micro-batch after micro-batch."""
    return [row for _, rows in steps(frame(log, **options)) for row in rows]
