"""Where batches go: the port, and sinks for memory, a text stream and files; to several at once, or each table apart.

What a sink must promise: `write` takes a batch whole or raises; it may keep it in memory. When `flush` has returned,
everything written before is as durable as the sink ever makes it. A batch may come again, and then comes with the same
`_seq`. A row that the sink will never take is told by `write` and is not an error; one that it could not take now is.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, TextIO

from tailrace.errors import SinkError, SinkUnready
from tailrace.model.batch import ChangeBatch
from tailrace.model.encode import to_json_line
from tailrace.model.event import Event
from tailrace.model.schema import TableId
from tailrace.runtime.batch import Batch

Encode = Callable[[Event], str]
"""An event as one line of text."""


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """A row that the sink does not take, and will not take if it comes again. The reason holds no values."""

    table: TableId
    seq: int
    reason: str


class Sink(Protocol):
    """Takes batches, in order, from one thread."""

    def write(self, batch: Batch) -> Sequence[Rejected]:
        """Take the batch, all of it but what is rejected."""

    def flush(self, caught_up: bool) -> None:
        """Make durable what was written. `caught_up`: nothing more is waiting, so there is time for more than that."""


class MemorySink:
    """Keeps the batches, as they are."""

    def __init__(self) -> None:
        self.batches: list[ChangeBatch] = []
        self._unflushed: list[ChangeBatch] = []
        self.flushes = 0

    def write(self, batch: Batch) -> tuple[()]:
        self._unflushed += batch.batches
        return ()

    def flush(self, caught_up: bool) -> None:
        self.batches += self._unflushed
        self._unflushed.clear()
        self.flushes += 1

    @property
    def rows(self) -> int:
        return sum(map(len, self.batches))

    def events(self) -> list[Event]:
        return [event for batch in self.batches for event in batch.events()]


class StreamSink:
    """Lines to standard output, or another text stream: one JSON object for each change."""

    def __init__(self, stream: TextIO | None = None, *, encode: Encode = to_json_line) -> None:
        self._stream, self._encode = stream or sys.stdout, encode

    def write(self, batch: Batch) -> tuple[()]:
        try:
            self._stream.writelines(self._encode(event) + "\n" for event in batch.events())
        except OSError as error:
            raise _failed(error, "the stream") from error
        return ()

    def flush(self, caught_up: bool) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            raise _failed(error, "the stream") from error


class JsonlSink:
    """Lines in files of a folder, `<number>.jsonl`: a new one once the last has so many bytes.

    `fsync`: `always` at each flush, `never` by us. Only a whole flush is ever seen after a crash of the process: what
    stands behind the last one is cut off when the folder is opened again, for it comes again.
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, bytes_max: int = 128 << 20,
        fsync: Literal["always", "never"] = "always", encode: Encode = to_json_line,
    ) -> None:  # fmt: skip
        self._folder, self._bytes_max, self._fsync, self._encode = Path(folder), bytes_max, fsync, encode
        self._lines: list[bytes] = []
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            numbers = sorted(int(path.stem) for path in self._folder.glob("*.jsonl") if path.stem.isdigit())
            self._number = numbers[-1] if numbers else 1
            if numbers:
                _cut_torn(self._path)
            self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            self._size = os.fstat(self._file).st_size
            self._sync_folder()
        except OSError as error:
            raise _failed(error, "the folder") from error

    @property
    def _path(self) -> Path:
        return self._folder / f"{self._number:08d}.jsonl"

    def write(self, batch: Batch) -> tuple[()]:
        self._lines += [(self._encode(event) + "\n").encode() for event in batch.events()]
        return ()

    def flush(self, caught_up: bool) -> None:
        try:
            if self._size >= self._bytes_max:
                self._roll()
            left = memoryview(b"".join(self._lines))
            begun = self._size
            try:
                while left:
                    written = os.write(self._file, left)
                    self._size += written
                    left = left[written:]
                if self._fsync == "always":
                    os.fsync(self._file)
            except OSError:
                os.ftruncate(self._file, begun)  # all of it comes again
                self._size = begun
                raise
        except OSError as error:
            self._lines.clear()
            raise _failed(error, "the file") from error
        self._lines.clear()

    def _roll(self) -> None:
        os.close(self._file)
        self._number += 1
        self._file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._size = 0
        self._sync_folder()

    def _sync_folder(self) -> None:
        if self._fsync == "always":
            handle = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)

    def close(self) -> None:
        os.close(self._file)


def _cut_torn(path: Path) -> None:
    """Cut off a last line that has no end."""
    with path.open("r+b") as file:
        file.seek(0, os.SEEK_END)
        end = file.tell()
        step = 1 << 16
        at = end
        while at:
            begin = max(0, at - step)
            file.seek(begin)
            found = file.read(at - begin).rfind(b"\n")
            if found >= 0:
                at = begin + found + 1
                break
            at = begin
        if at < end:
            file.truncate(at)


def _failed(error: OSError, what: str) -> SinkError:
    said = os.strerror(error.errno) if error.errno else type(error).__name__
    if isinstance(error, BrokenPipeError):
        return SinkError(f"{what} cannot be written: {said}", hint="Nobody reads it any more.")
    return SinkUnready(f"{what} cannot be written: {said}", hint="Look at the disk; it is tried again.")


class FanOut:
    """Every batch to every sink. A batch is delivered once all have it; if one fails, it comes again to all."""

    def __init__(self, *sinks: Sink) -> None:
        self._sinks = sinks

    def write(self, batch: Batch) -> Sequence[Rejected]:
        return [rejected for sink in self._sinks for rejected in sink.write(batch)]

    def flush(self, caught_up: bool) -> None:
        for sink in self._sinks:
            sink.flush(caught_up)


class TableRouter:
    """Each table to its own sink; what no route names goes to `otherwise`, or is rejected."""

    def __init__(self, routes: Mapping[TableId, Sink], otherwise: Sink | None = None) -> None:
        self._routes, self._otherwise = dict(routes), otherwise

    def write(self, batch: Batch) -> Sequence[Rejected]:
        parts: dict[int, tuple[Sink, list[ChangeBatch]]] = {}
        rejected: list[Rejected] = []
        for rows in batch.batches:
            sink = self._routes.get(rows.schema.table, self._otherwise)
            if sink is None:
                seqs = rows.data.column("_seq").to_pylist()
                reason = "no sink is named for the table"
                rejected += [Rejected(table=rows.schema.table, seq=seq, reason=reason) for seq in seqs]
            else:
                parts.setdefault(id(sink), (sink, []))[1].append(rows)
        for sink, some in parts.values():
            rejected += sink.write(batch.with_rows(some))
        return rejected

    def flush(self, caught_up: bool) -> None:
        sinks = {id(sink): sink for sink in (*self._routes.values(), self._otherwise) if sink is not None}
        for sink in sinks.values():
            sink.flush(caught_up)
