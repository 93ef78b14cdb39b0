"""Read chunks of a table in a Spark task, in the read's one snapshot."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress

import psycopg
import pyarrow as pa

from tailrace.capture.postgres.connect import map_error
from tailrace.capture.postgres.snapshot import SnapshotReader
from tailrace.errors import SnapshotGone, SourceError, SourceRewritten
from tailrace.spark.datasource.table.snapshot_holder import begin_reading, end_reading
from tailrace.spark.datasource.table.table_options import RECREATE_HINT, TableReadPart

_DATA_ERRORS = "22"


def read_part(url: str, part: TableReadPart) -> Iterator[pa.RecordBatch]:
    """Yield the rows of the part as the snapshot has them."""
    deadline = time.monotonic() + part.seconds_max
    try:
        with _AnnouncedReader(url, part) as reader:
            for chunk in part.chunks:
                if chunk.leaf.file:  # what has no file of its own cannot have been rewritten
                    reader.lock_chunk(part.schema, chunk)
                yield from reader.rows(part.schema, chunk, part.condition)
            reader.end()
    except SnapshotGone:
        raise SnapshotGone(
            "the snapshot that this DataFrame is read in is gone",
            table=part.schema.table,
            hint=f"{RECREATE_HINT}. It is held until no task has read for `idleSeconds`, and for `snapshotSeconds` "
            "at most.",
        ) from None
    except SourceRewritten:
        raise SourceRewritten(
            "the table was rewritten, truncated or altered while it was read",
            table=part.schema.table,
            hint=f"{RECREATE_HINT}.",
        ) from None
    except SourceError as error:
        state = str(error.fields.get("sqlstate", ""))
        if state.startswith(_DATA_ERRORS) and part.condition is not None:
            # The server's message may contain a value of the row.
            raise SourceError(
                "the condition `where` failed on a row",
                table=part.schema.table,
                sqlstate=state,
                hint="Write `where` so that it can be evaluated for every row, for example with CASE.",
            ) from None
        if time.monotonic() > deadline:
            raise SourceError(
                "the read took too long and was stopped, because it holds back the server's clean-up",
                table=part.schema.table,
                hint="Raise `snapshotSeconds`, or read with more executors.",
            ) from None
        raise


class _AnnouncedReader(SnapshotReader):
    """A reader that the holder of the snapshot knows of."""

    def __init__(self, url: str, part: TableReadPart) -> None:
        super().__init__(url, part.snapshot, None, seconds_max=part.seconds_max)
        self._number = part.snapshot_id

    def __enter__(self) -> _AnnouncedReader:
        super().__enter__()
        try:
            begin_reading(self._connection, self._number)
        except psycopg.Error as error:
            self._connection.close()
            raise map_error(error) from error
        return self

    def end(self) -> None:
        """Announce that all rows were read."""
        with suppress(psycopg.Error):  # the session is gone, and nothing depends on it any more
            end_reading(self._connection, self._number)
