"""Sinks: the port, and sinks for memory, a text stream, files and several sinks.

A sink must keep these promises, which `testing.sink_checks` checks:

- `write` takes a batch whole or raises; it may keep it in memory. Once `flush` has returned, everything written before
  is as durable as the sink ever makes it.
- Rows may be repeated, with the same `_seq`, which no other row ever has. Where a snapshot was under way they may be
  repeated under new ones. A batch that is repeated before it was flushed replaces itself: something else had failed.
- `write` returns rows that the sink will never take; those are not an error. A row that it cannot take now is an error.
"""

from __future__ import annotations

import fcntl
import io
import os
import re
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, Self, TextIO

from tailrace.errors import ConfigError, SinkError, SinkUnready
from tailrace.model.batch import ChangeBatch
from tailrace.model.event import Event
from tailrace.model.event_json import to_json_line
from tailrace.model.schema import TableId
from tailrace.runtime.handle import require_distinct_tables
from tailrace.runtime.output_batch import Batch, first_seq
from tailrace.validation import (
    require_callable,
    require_folder,
    require_instance,
    require_integer,
    require_methods,
    require_seconds,
)

Encode = Callable[[Event], str]
"""A function that returns an event as one line of text."""


@dataclass(frozen=True, kw_only=True)
class Rejected:
    """A row that the sink does not take, now or later. The reason contains no values."""

    table: TableId
    seq: int
    reason: str


class Sink(Protocol):
    """A receiver of batches, in order, from one thread."""

    def write(self, batch: Batch) -> Sequence[Rejected]:
        """Take the whole batch, except for the rows returned as rejected."""

    def flush(self, caught_up: bool) -> None:
        """Make durable what was written.

        `caught_up` means that nothing more is waiting, so the sink has time for more work. If that turns out only
        later, `flush` is called once more, with nothing written between.
        """


def require_rejected(answer: object) -> Sequence[Rejected]:
    """Return the rows that a sink rejected; None means that it took every row."""
    if answer is None:
        return ()
    rows = tuple(answer) if isinstance(answer, Iterable) else (answer,)
    for row in rows:
        if not isinstance(row, Rejected):
            raise SinkError(
                f"sink's `write` returned {type(row).__name__} instead of rejected rows",
                hint="Return `Rejected(table=…, seq=…, reason=…)` for each such row, or `()`.",
            )
    return rows


def require_sink(what: str, sink: object) -> None:
    """Refuse anything without the methods of a sink."""
    require_methods(what, sink, ("write", "flush"), 'Pass a sink such as `JsonlSink("out")`, or one of your own.')


class MemorySink:
    """A sink that keeps the batches in a list."""

    def __init__(self) -> None:
        self.batches: list[ChangeBatch] = []
        self._unflushed: list[Batch] = []
        self.flushes = 0

    def write(self, batch: Batch) -> tuple[()]:
        if batch.rows:
            first, numbered = first_seq(batch.window), batch.ack is not None
            self._unflushed = [kept for kept in self._unflushed if not _is_repeated(kept, first, numbered)]
            self._unflushed.append(batch)
        return ()

    def flush(self, caught_up: bool) -> None:
        self.batches += [rows for batch in self._unflushed for rows in batch.batches]
        self._unflushed.clear()
        self.flushes += 1

    @property
    def rows(self) -> int:
        return sum(map(len, self.batches))

    def events(self) -> list[Event]:
        return [event for batch in self.batches for event in batch.events()]


def _is_repeated(kept: Batch, first: int, numbered: bool) -> bool:
    """Return whether a batch that begins with this number repeats a kept one.

    Kept batches after the repeated one repeat too. Injected batches are not in the source's order; they have numbers
    below zero, or meaningless ones.
    """
    seq = first_seq(kept.window)
    if kept.ack is None or not numbered:
        return kept.ack is None and not numbered and seq == first < 0
    return seq >= first


class _Lines:
    """Lines that were written and not flushed. A repeated batch replaces itself."""

    def __init__(self, encode: Encode) -> None:
        require_callable("encode", encode, "Pass a function from an event to a line: `encode=to_json_line`.")
        self._encode = encode
        self._kept: list[tuple[Batch, list[str]]] = []

    def add(self, batch: Batch) -> None:
        if not batch.rows:
            return
        lines = [self._encode(event) + "\n" for event in batch.events()]
        first, numbered = first_seq(batch.window), batch.ack is not None
        self._kept = [(kept, text) for kept, text in self._kept if not _is_repeated(kept, first, numbered)]
        self._kept.append((batch, lines))

    def text(self) -> str:
        return "".join(line for _, lines in self._kept for line in lines)

    def clear(self) -> None:
        self._kept.clear()


class StreamSink:
    """A sink of JSON lines to standard output or another text stream."""

    def __init__(self, stream: TextIO | None = None, *, encode: Encode = to_json_line) -> None:
        if stream is not None:
            hint = 'Pass one that is open for text: `open("changes.jsonl", "a")`, or None for standard output.'
            require_methods("stream", stream, ("write", "flush"), hint)
            stream_object: object = stream
            if isinstance(stream_object, io.RawIOBase | io.BufferedIOBase):
                raise ConfigError("`stream` takes bytes, not text", found=type(stream).__name__, hint=hint)
        self._stream, self._lines = stream or sys.stdout, _Lines(encode)

    def write(self, batch: Batch) -> tuple[()]:
        self._lines.add(batch)
        return ()

    def flush(self, caught_up: bool) -> None:
        text = self._lines.text()
        self._lines.clear()
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError as error:
            raise _write_error(error, "the stream") from error
        except ValueError as error:
            if self._stream.closed:
                raise SinkError("the stream is closed", hint="Pass the sink an open one.") from error
            raise


class JsonlSink:
    """A sink that writes JSON lines to files of a folder, `<number>.jsonl`.

    A new file begins once the last one has `bytes_max` bytes.

    `fsync` is `always` (at each flush), `never` (the operating system decides) or `interval`. `interval` syncs at a
    flush once so many seconds have passed or bytes were written since the last sync, and whenever nothing more is
    waiting. A crash of the process loses nothing with any of them. A crash of the machine loses what was not synced;
    acknowledged rows among it are not repeated.

    After a crash the files have whole lines: a torn line is cut off when the folder is opened again. Lines of a batch
    that was not acknowledged may be there. Its rows are repeated with the same `seq` or, where a snapshot was under
    way, with new ones.

    A closed sink takes nothing. What was written and not flushed by then was not delivered. A folder has one sink at a
    time. Another one is refused until this one is closed, garbage collected, or its process has ended.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        bytes_max: int = 128 << 20,
        fsync: Literal["always", "interval", "never"] = "always",
        fsync_seconds: float = 1.0,
        fsync_bytes: int = 8 << 20,
        encode: Encode = to_json_line,
    ) -> None:
        if fsync not in ("always", "interval", "never"):
            raise ConfigError("`fsync` is not a known value", hint="Use `always`, `interval` or `never`.")
        require_integer("bytes_max", bytes_max, least=1)
        require_integer("fsync_bytes", fsync_bytes, least=1)
        require_seconds("fsync_seconds", fsync_seconds, endless=True)
        self._folder, self._bytes_max, self._fsync = require_folder(folder, "the files"), bytes_max, fsync
        self._fsync_seconds, self._fsync_bytes = fsync_seconds, fsync_bytes
        self._lines = _Lines(encode)
        self._unsynced, self._synced_at = 0, time.monotonic()
        self._torn = False
        """True if the file may have bytes after what was flushed."""
        self._closed = False
        self._release_folder: Callable[[], object] = lambda: None
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._release_folder = _lock_folder(self, self._folder)
            numbers = sorted(int(path.stem) for path in self._folder.iterdir() if _NAME.fullmatch(path.name))
            self._number = numbers[-1] if numbers else 1
            if numbers:
                _cut_torn(self._path(self._number))
            self._file = self._open(self._number)
            self._size = os.fstat(self._file).st_size
        except OSError as error:
            self._release_folder()
            raise SinkError(
                f"folder cannot be used: {os.strerror(error.errno or 0)}",
                folder=self._folder,
                hint="Pass one that this program may create and write to.",
            ) from error

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:08d}.jsonl"

    def _open(self, number: int) -> int:
        """Open a file and make its name in the folder durable."""
        file = os.open(self._path(number), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            if self._fsync != "never":
                _sync_folder(self._folder)
        except OSError:
            os.close(file)
            raise
        return file

    def write(self, batch: Batch) -> tuple[()]:
        self._require_open()
        self._lines.add(batch)
        return ()

    def flush(self, caught_up: bool) -> None:
        self._require_open()
        text = self._lines.text().encode()
        self._lines.clear()  # if this fails, the runtime repeats all of it
        try:
            if self._torn:
                os.ftruncate(self._file, self._size)
                self._torn = False
            if text and self._size >= self._bytes_max:
                self._roll()
            self._torn = bool(text)
            left = memoryview(text)
            while left:
                left = left[os.write(self._file, left) :]
            self._unsynced += len(text)
            if self._sync_due(caught_up):
                self._sync()
            self._size, self._torn = self._size + len(text), False
        except OSError as error:
            with suppress(OSError):  # else the next flush cuts it off
                os.ftruncate(self._file, self._size)
                self._torn = False
            raise _write_error(error, "the file") from error

    def _sync_due(self, caught_up: bool) -> bool:
        if self._fsync == "never" or not self._unsynced:
            return False
        waited = time.monotonic() - self._synced_at
        due = caught_up or self._unsynced >= self._fsync_bytes or waited >= self._fsync_seconds
        return due or self._fsync == "always"

    def _sync(self) -> None:
        os.fsync(self._file)
        self._unsynced, self._synced_at = 0, time.monotonic()

    def _roll(self) -> None:
        """Switch to a new file. It is opened before the old one is closed, so one is always open."""
        if self._fsync == "interval" and self._unsynced:
            self._sync()
        following = self._open(self._number + 1)
        old, self._file = self._file, following
        self._number, self._size = self._number + 1, 0
        os.close(old)

    def _require_open(self) -> None:
        """Refuse a closed sink: its file number may belong to another file by now."""
        if self._closed:
            raise SinkError("sink is closed", folder=self._folder, hint="Open another one for the same folder.")

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        try:
            try:
                if self._fsync == "interval" and self._unsynced:
                    self._sync()
            finally:
                os.close(self._file)
                self._release_folder()
        except OSError as error:
            raise _write_error(error, "the file") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_NAME = re.compile(r"(?!0+\.)([0-9]{8}|[1-9][0-9]{8,17})\.jsonl")


def _lock_folder(sink: JsonlSink, folder: Path) -> Callable[[], object]:
    """Lock the folder and return a function that releases it.

    Another sink would cut off this one's lines as torn.
    """
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(handle)
        raise SinkError(
            "folder is in use by another sink",
            folder=folder,
            hint="Close that sink first (`sink.close()`), end its process, or pass another folder.",
        ) from error
    except BaseException:
        os.close(handle)
        raise
    return weakref.finalize(sink, os.close, handle)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _cut_torn(path: Path) -> None:
    """Cut off a last line that has no end."""
    with path.open("r+b") as file:
        file.seek(0, os.SEEK_END)
        end = file.tell()
        step = 1 << 16
        line_end = end
        while line_end:
            begin = max(0, line_end - step)
            file.seek(begin)
            found = file.read(line_end - begin).rfind(b"\n")
            if found >= 0:
                line_end = begin + found + 1
                break
            line_end = begin
        if line_end < end:
            file.truncate(line_end)


def _write_error(error: OSError, what: str) -> SinkError:
    reason = os.strerror(error.errno) if error.errno else type(error).__name__
    if isinstance(error, BrokenPipeError):
        return SinkError(
            f"{what} cannot be written: {reason}", hint="Restart the program that reads it, or write to a file."
        )
    return SinkUnready(f"{what} cannot be written: {reason}", hint="Check the disk. The runtime retries.")


def _close(sinks: Iterable[Sink]) -> None:
    with ExitStack() as closing:  # closes each, even if another one fails to close
        for sink in sinks:
            close = getattr(sink, "close", None)
            if callable(close):
                closing.callback(close)


class FanOut:
    """A sink that gives every batch to several sinks.

    A batch is delivered once all have it. If one fails, all get it again.
    """

    def __init__(self, *sinks: Sink) -> None:
        if not sinks:
            raise ConfigError("fan-out has no sink", hint="Name the sinks: `FanOut(JsonlSink(…), MemorySink())`.")
        for sink in sinks:
            require_sink("sink", sink)
        self._sinks = sinks

    def write(self, batch: Batch) -> Sequence[Rejected]:
        return [rejected for sink in self._sinks for rejected in require_rejected(sink.write(batch))]

    def flush(self, caught_up: bool) -> None:
        for sink in self._sinks:
            sink.flush(caught_up)

    def close(self) -> None:
        """Close the sinks that have a `close`."""
        _close(self._sinks)


class TableRouter:
    """A sink with one sink per table. Other tables use `otherwise`, or are rejected."""

    def __init__(self, routes: Mapping[TableId, Sink], otherwise: Sink | None = None) -> None:
        require_instance("routes", routes, Mapping, 'Pass `{TableId("public", "orders"): sink}`.')
        if not routes and otherwise is None:
            raise ConfigError("router has no sink", hint="Name a sink for a table, or `otherwise`.")
        require_distinct_tables(routes)
        for sink in (*routes.values(), *([otherwise] if otherwise is not None else [])):
            require_sink("sink", sink)
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
        for sink, batches in parts.values():
            rejected += require_rejected(sink.write(batch.with_rows(batches)))
        return rejected

    def flush(self, caught_up: bool) -> None:
        for sink in self._sinks:
            sink.flush(caught_up)

    def close(self) -> None:
        """Close the sinks that have a `close`."""
        _close(self._sinks)

    @property
    def _sinks(self) -> list[Sink]:
        """Return each sink once."""
        return list({id(sink): sink for sink in (*self._routes.values(), self._otherwise) if sink is not None}.values())
