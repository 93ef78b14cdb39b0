"""Encode and read step files, each with dead letters of one schema.

A step is an Arrow file: `CAUSE_FIELDS`, then the columns of a change. Its header, in the schema's metadata, says which
dead letters it has and which it clears. Format and key names are stored, so they stay as they are. A file that is
missing raises FileNotFoundError, because a step may be removed while it is read. Any other failure is an error of ours.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import pyarrow as pa

from tailrace.errors import LogCorrupt, TailraceError
from tailrace.model import change
from tailrace.model.schema import TableId, TableSchema
from tailrace.storage import files
from tailrace.storage.files import FileStamp, LogPath

FORMAT = 1
_META = b"tailrace"
_STEPS_KNOWN_MAX = 4096
CAUSE_CODE, CAUSE, HINT, REJECTED_AT = "_cause_code", "_cause", "_hint", "_set_aside_at"
CAUSE_FIELDS = (
    pa.field(CAUSE_CODE, pa.string()), pa.field(CAUSE, pa.string()), pa.field(HINT, pa.string()),
    pa.field(REJECTED_AT, pa.timestamp("us", "UTC")),
)  # fmt: skip
"""Columns of a dead letter in addition to those of a change.

A step has them first, so they never clash with a column of the table.
"""


SEQ_INDEX = len(CAUSE_FIELDS) + [field.name for field in change.REQUIRED].index(change.SEQ)


class DeadLetterOrigin(NamedTuple):
    """The origin that a load's rows record.

    Rows that the load could not write record it too when they are written later.
    """

    seq: int
    position: str


@dataclass(frozen=True, kw_only=True)
class DeadLetterBatch:
    """Dead letters of one schema, in `_seq` order: `CAUSE_FIELDS`, then the columns of a change."""

    schema: TableSchema
    rows: pa.Table
    origin: DeadLetterOrigin | None = None

    @property
    def changes(self) -> pa.Table:
        return self.rows.select(range(len(CAUSE_FIELDS), self.rows.num_columns))

    @property
    def seqs(self) -> list[int]:
        found: list[int] = self.changes.column(change.SEQ).to_pylist()
        return found


@dataclass(frozen=True, kw_only=True)
class StepHeader:
    """The facts of a step without its payloads."""

    counts_from_seq: int
    dead_letters: tuple[int, ...]
    cleared: tuple[int, ...]
    schema: dict[str, Any]
    load: str | None = None
    """The load whose rows they are: the step counts only for a table from this load."""
    superseded: tuple[int, ...] = ()
    origin: DeadLetterOrigin | None = None
    replay_id: str | None = None
    """Id of a replay intent; None for other steps."""


def with_causes(changes: pa.Table, causes: Sequence[TailraceError]) -> pa.Table:
    """Return changes as dead letters, with cause and time as the first columns."""
    columns = [
        pa.array([cause.code for cause in causes], pa.string()),
        pa.array([cause.headline for cause in causes], pa.string()),
        pa.array([cause.hint for cause in causes], pa.string()),
        pa.array([time.time_ns() // 1000] * len(causes), pa.timestamp("us", "UTC")),
    ]
    return pa.Table.from_arrays([*columns, *changes.columns], schema=pa.schema([*CAUSE_FIELDS, *changes.schema]))


def encode_dead_letters(schema: TableSchema, dead_letters: pa.Table) -> bytes:
    """Encode dead letters that are in no step yet as a file."""
    return encode_step(schema.table, schema, 0, dead_letters, ())


def read_dead_letters(path: LogPath) -> DeadLetterBatch:
    """Read a file made by `encode_dead_letters`."""
    return DeadLetterBatch(
        schema=TableSchema.from_json(read_step(path, files.read_stamp(path)).schema), rows=read_rows(path)
    )


def encode_step(
    table: TableId,
    schema: TableSchema,
    seq: int,
    dead_letters: pa.Table,
    cleared: Sequence[int],
    load: str | None = None,
    *,
    superseded: Sequence[int] = (),
    origin: DeadLetterOrigin | None = None,
    replay_id: str | None = None,
) -> bytes:
    meta = {
        "format": FORMAT,
        "schema": table.schema,
        "table": table.name,
        "reaches": seq,
        "shape": schema.to_json(),
        "letters": dead_letters.column(SEQ_INDEX).to_pylist(),
        "cleared": [int(number) for number in cleared],
        **({} if load is None else {"load": load}),
        **({"passed": [int(number) for number in superseded]} if superseded else {}),
        **({} if origin is None else {"origin": list(origin)}),
        **({} if replay_id is None else {"late": replay_id}),
    }
    fields = dead_letters.schema.with_metadata({_META: json.dumps(meta).encode()})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, fields) as writer:
        writer.write_table(dead_letters.replace_schema_metadata(fields.metadata))
    content: bytes = sink.getvalue().to_pybytes()
    return content


@lru_cache(maxsize=_STEPS_KNOWN_MAX)
def read_step(path: LogPath, _: FileStamp | None) -> StepHeader:
    """Read a step's header, cached by the file's identity because status asks twice a second."""
    try:
        with files.arrow_file(path) as handle:
            stored = json.loads(pa.ipc.open_file(handle).schema.metadata[_META])
        if stored["format"] != FORMAT:
            raise ValueError("unknown format")
        return StepHeader(
            counts_from_seq=stored["reaches"],
            dead_letters=tuple(stored["letters"]),
            cleared=tuple(stored["cleared"]),
            schema=stored["shape"],
            load=stored.get("load"),
            superseded=tuple(stored.get("passed", ())),
            replay_id=stored.get("late"),
            origin=DeadLetterOrigin(*stored["origin"]) if "origin" in stored else None,
        )
    except FileNotFoundError:
        raise
    except files.STORE_ERRORS as error:
        raise files.explained_error(error, path) from error
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
        raise unreadable_error(path) from error


def read_rows(path: LogPath) -> pa.Table:
    try:
        return pa.ipc.open_file(files.arrow_file(path)).read_all()  # memory-mapped: only used columns are read
    except FileNotFoundError:
        raise
    except files.STORE_ERRORS as error:
        raise files.explained_error(error, path) from error
    except (OSError, pa.ArrowException) as error:
        raise unreadable_error(path) from error


def key_columns(schema: TableSchema, rows: pa.Table) -> list[int]:
    """Return the indices of cause, metadata, key and unfit columns."""
    always = len(CAUSE_FIELDS) + len(change.REQUIRED)
    wanted = {change.UNFIT, *(change.stored_name(name) for name in schema.key)}
    return [*range(always), *(i for i in range(always, rows.num_columns) if rows.schema.field(i).name in wanted)]


def unreadable_error(path: LogPath) -> LogCorrupt:
    return LogCorrupt(
        "a dead letter cannot be read",
        path=path,
        hint="Restore the file from a copy of the log. Or move it away and run `tailrace snapshot FILE TABLE`.",
    )
