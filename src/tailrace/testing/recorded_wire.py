"""Records what a PostgreSQL server sent, and decodes it again without the server.

A recording holds the messages of whole transactions as they arrived, and the schemas that the catalogue had for their
tables. It also holds the decoded rows, or the code of the error that decoding ended with. `replay()` decodes the same
bytes with the current decoder; `check()` compares the result. So a recording attached to a bug report reproduces the
bug, and later is the test that it stays fixed.

`record` changes nothing: the slot keeps everything. **A recording holds rows of your tables**: read it before you share
it.
"""

from __future__ import annotations

import base64
import json
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa

from tailrace.capture.postgres.catalogue import Catalogue
from tailrace.capture.postgres.connect import connect, map_error
from tailrace.capture.postgres.decode import Decoder
from tailrace.capture.postgres.invalid_text import TextHandling, text_handling_of
from tailrace.errors import ConfigError, ProtocolViolation, TailraceError
from tailrace.model.batch import ChangeBatch, Window
from tailrace.model.position import Lsn
from tailrace.model.schema import TableSchema
from tailrace.testing.checks import ContractBroken

FORMAT = 1
CHANGES_MAX = 10_000
"""Changes to record at most. The transaction that exceeds it is recorded to its end."""
_RELATION, _COMMIT = b"R", b"C"
_PEEK = """
select data from pg_logical_slot_peek_binary_changes(
  %s, null, %s, 'proto_version', '1', 'publication_names', %s)
"""
_ABOUT = """
select current_setting('server_version'), coalesce(confirmed_flush_lsn, '0/0')::text, active
from pg_replication_slots where slot_name = %s
"""


@dataclass(frozen=True, kw_only=True)
class Recording:
    """The messages sent after a position, and the decoded result."""

    server: str
    """The server's version."""
    after: Lsn
    end: Lsn
    xid_near: int
    text: TextHandling = TextHandling.SOUND
    messages: tuple[bytes, ...] = field(repr=False)
    schemas: Mapping[bytes, TableSchema] = field(repr=False)
    """By the message that announced the table."""
    batches: tuple[ChangeBatch, ...] = field(default=(), repr=False)
    """The decoded batches."""
    error: str | None = None
    """The code of the error that decoding raised."""

    def replay(self) -> Window:
        """Decode it with the current decoder."""
        starts = np.zeros(len(self.messages) + 1, np.int64)
        starts[1:] = np.cumsum([len(message) for message in self.messages])
        content = np.frombuffer(b"".join(self.messages), np.uint8).copy()
        decoder = Decoder(self._describe, self.xid_near, None, self.text)
        return decoder.decode(content, starts, len(self.messages), self.after, self.end)

    def check(self) -> None:
        """Raise ContractBroken unless decoding gives the same result as when it was recorded."""
        try:
            batches, error = self.replay().batches, None
        except TailraceError as raised:
            batches, error = (), raised.code
        if error != self.error:
            raise ContractBroken(f"it ended with {error or 'no error'}, recorded is {self.error or 'none'}")
        if len(batches) != len(self.batches):
            raise ContractBroken(f"it made {len(batches)} batches, recorded are {len(self.batches)}")
        for mine, recorded in zip(batches, self.batches, strict=True):
            if mine.schema != recorded.schema:
                raise ContractBroken(f"{recorded.schema.table} has another schema")
            names = [name for name, column in _columns(recorded) if not _same(column, dict(_columns(mine)).get(name))]
            if names or len(mine.data.schema) != len(recorded.data.schema):
                raise ContractBroken(f"{recorded.schema.table} has other values or columns: {', '.join(names)}")

    def _describe(self, messages: Sequence[bytes]) -> list[TableSchema]:
        unknown = [message for message in messages if message not in self.schemas]
        if unknown:
            raise ProtocolViolation("the recording does not know a table that is announced", hint="Record it again.")
        return [self.schemas[message] for message in messages]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file: JSON, with bytes as base64."""
        Path(path).write_text(json.dumps(self._to_json(), indent=1) + "\n")

    def _to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "server": self.server,
            "after": str(self.after),
            "end": str(self.end),
            "xid_near": self.xid_near,
            "text": self.text.name,
            "error": self.error,
            "messages": [_base64(message) for message in self.messages],
            "shapes": [
                {"message": _base64(announcement), "shape": schema.to_json()}
                for announcement, schema in self.schemas.items()
            ],
            "batches": [{"shape": batch.schema.to_json(), "rows": _base64(_rows_of(batch))} for batch in self.batches],
        }


_HINT = "Create one with `record(…).save(path)`."


def load(path: str | os.PathLike[str]) -> Recording:
    """Read a recording from a file."""
    try:
        content = Path(path).read_text()
    except (OSError, TypeError) as error:
        reason = os.strerror(error.errno or 0) if isinstance(error, OSError) else "it is not a path"
        raise ConfigError(f"the recording cannot be read: {reason}", path=path, hint="Check the path.") from error
    except UnicodeDecodeError as error:
        raise ConfigError("the file is not a recording", path=path, hint=_HINT) from error
    try:
        stored = json.loads(content)
        if stored["format"] != FORMAT:
            raise ValueError("an unknown format")
        return Recording(
            server=stored["server"],
            after=Lsn.parse(stored["after"]),
            end=Lsn.parse(stored["end"]),
            xid_near=stored["xid_near"],
            text=TextHandling[stored["text"]],
            error=stored["error"],
            messages=tuple(base64.b64decode(message) for message in stored["messages"]),
            schemas={
                base64.b64decode(item["message"]): TableSchema.from_json(item["shape"]) for item in stored["shapes"]
            },
            batches=tuple(_batch(item) for item in stored["batches"]),
        )
    except (KeyError, TypeError, ValueError, ConfigError, pa.ArrowException) as error:
        raise ConfigError("the file is not a recording", path=path, hint=_HINT) from error


def record(url: str, *, slot: str, publications: Sequence[str], changes_max: int = CHANGES_MAX) -> Recording:
    """Return the unconfirmed content of the slot, decoded. Nothing is confirmed.

    No other process may read the slot meanwhile.
    """
    if isinstance(publications, str):
        raise ConfigError("`publications` is not a list", found="str", hint=f"Give `publications=[{publications!r}]`.")
    names = ",".join(f'"{name}"' for name in publications)
    try:
        with connect(url) as connection:
            about = connection.execute(_ABOUT, (slot,)).fetchone()
            if about is None or about[2]:
                raise ConfigError(
                    "the slot does not exist" if about is None else "another process reads the slot",
                    slot=slot,
                    hint="Find the slots with `select slot_name, active from pg_replication_slots`; stop the "
                    "capture first.",
                )
            sent = connection.execute(_PEEK, (slot, changes_max, names)).fetchall()
            messages = tuple(bytes(data) for (data,) in sent)
            if not messages:
                raise ConfigError("there is nothing to record", slot=slot, hint="Write something at the server first.")
            catalogue = Catalogue(connection)
            announced = list(dict.fromkeys(message for message in messages if message[:1] == _RELATION))
            recording = Recording(
                server=about[0],
                after=Lsn.parse(about[1]),
                end=_end(messages),
                messages=messages,
                xid_near=catalogue.next_transaction(),
                text=text_handling_of(connection.pgconn, replaced=False),
                schemas=dict(zip(announced, catalogue.describe_messages(announced, publications, {}), strict=True)),
            )
    except psycopg.Error as error:
        raise map_error(error, url) from error
    return _decoded(recording)


def _decoded(recording: Recording) -> Recording:
    """Return the recording with the result of the current decoder."""
    fields = {name: getattr(recording, name) for name in recording.__dataclass_fields__}
    try:
        return Recording(**fields | {"batches": recording.replay().batches})
    except TailraceError as error:
        return Recording(**fields | {"error": error.code})


def _end(messages: Sequence[bytes]) -> Lsn:
    """Return the end of the last transaction, from its commit."""
    ends = [struct.unpack_from(">Q", message, 10)[0] for message in messages if message[:1] == _COMMIT]
    return Lsn(ends[-1])


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _rows_of(batch: ChangeBatch) -> bytes:
    columns = [
        pa.concat_arrays([column]) for column in batch.data.columns
    ]  # copied out of the arrays that they are slices of
    data = pa.RecordBatch.from_arrays(columns, schema=batch.data.schema)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, data.schema) as writer:
        writer.write_batch(data)
    return bytes(sink.getvalue())


def _columns(batch: ChangeBatch) -> list[tuple[str, pa.Array]]:
    return list(zip(batch.data.schema.names, batch.data.columns, strict=True))


def _same(one: pa.Array, other: pa.Array | None) -> bool:
    """Return whether the values are the same; NaN equals NaN, and 0 is not -0."""
    if other is None or one.type != other.type or len(one) != len(other):
        return False
    if not one.is_valid().equals(other.is_valid()):
        return False
    if pa.types.is_floating(one.type):
        bits = {32: pa.int32(), 64: pa.int64()}[one.type.bit_width]
        return bool(one.view(bits).equals(other.view(bits)))
    if pa.types.is_list(one.type):
        return bool(one.value_lengths().equals(other.value_lengths())) and _same(one.flatten(), other.flatten())
    if pa.types.is_struct(one.type):
        return all(map(_same, one.flatten(), other.flatten()))
    return bool(one.equals(other))


def _batch(stored: Mapping[str, Any]) -> ChangeBatch:
    with pa.ipc.open_stream(base64.b64decode(stored["rows"])) as reader:
        return ChangeBatch(schema=TableSchema.from_json(stored["shape"]), data=reader.read_next_batch())
