"""Where batches go: the port, and sinks for memory, a text stream and files; to several at once, or each table apart.

What a sink must promise: `write` takes a batch whole or raises; it may keep it in memory. When `flush` has returned,
everything written before is as durable as the sink ever makes it. Rows may come again, and then come with the same
`_seq`, which no other row ever has; where a snapshot was under way they may also come under new ones. A batch that
comes again before it was flushed takes its own place, for it was somebody else that failed. A row that the sink will
never take is told by `write` and is not an error; one that it could not take now is. `testing.sinks` has these
promises as checks.
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
        """Make durable what was written. `caught_up`: nothing more is waiting, so there is time for more than that.
        Where that turns out only afterwards, it is called once more, with nothing written between."""


def require_rejected(answer: object) -> Sequence[Rejected]:
    """What a sink said of a batch; nothing at all means that it took every row."""
    if answer is None:
        return ()
    rows = tuple(answer) if isinstance(answer, Iterable) else (answer,)
    for row in rows:
        if not isinstance(row, Rejected):
            raise SinkError(
                f"`write` of the sink returned {type(row).__name__} where rows that it rejects are meant",
                hint="Return `Rejected(table=…, seq=…, reason=…)` for each such row, or `()`.",
            )
    return rows


def require_sink(what: str, sink: object) -> None:
    """Refuse what takes no batches."""
    require_methods(what, sink, ("write", "flush"), 'Give a sink such as `JsonlSink("out")`, or one of your own.')


class MemorySink:
    """Keeps the batches, as they are."""

    def __init__(self) -> None:
        self.batches: list[ChangeBatch] = []
        self._unflushed: list[Batch] = []
        self.flushes = 0

    def write(self, batch: Batch) -> tuple[()]:
        if batch.rows:
            first, numbered = first_seq(batch.window), batch.ack is not None
            self._unflushed = [held for held in self._unflushed if not _comes_again(held, first, numbered)]
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


def _comes_again(held: Batch, first: int, numbered: bool) -> bool:
    """Whether a batch that begins with this number is one that is held, or is followed by it. What was injected is not
    in the order of the source; it has numbers below zero, or none that mean anything."""
    seq = first_seq(held.window)
    if held.ack is None or not numbered:
        return held.ack is None and not numbered and seq == first < 0
    return seq >= first


class _Lines:
    """Lines that were written and not flushed; a batch that comes again takes its own place."""

    def __init__(self, encode: Encode) -> None:
        require_callable("encode", encode, "Give a function of an event that gives a line: `encode=to_json_line`.")
        self._encode = encode
        self._held: list[tuple[Batch, list[str]]] = []

    def add(self, batch: Batch) -> None:
        if not batch.rows:
            return
        lines = [self._encode(event) + "\n" for event in batch.events()]
        first, numbered = first_seq(batch.window), batch.ack is not None
        self._held = [(held, text) for held, text in self._held if not _comes_again(held, first, numbered)]
        self._held.append((batch, lines))

    def text(self) -> str:
        return "".join(line for _, lines in self._held for line in lines)

    def clear(self) -> None:
        self._held.clear()


class StreamSink:
    """Lines to standard output, or another text stream: one JSON object for each change."""

    def __init__(self, stream: TextIO | None = None, *, encode: Encode = to_json_line) -> None:
        if stream is not None:
            hint = 'Give one that is open for text: `open("changes.jsonl", "a")`, or nothing for standard output.'
            require_methods("stream", stream, ("write", "flush"), hint)
            given: object = stream
            if isinstance(given, io.RawIOBase | io.BufferedIOBase):
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
            raise _failed(error, "the stream") from error
        except ValueError as error:
            if self._stream.closed:
                raise SinkError("the stream is closed", hint="Give the sink one that is open.") from error
            raise


class JsonlSink:
    """Lines in files of a folder, `<number>.jsonl`: a new one once the last has so many bytes.

    `fsync`: `always` at each flush; `never` by us; `interval`: at a flush once so many seconds have passed or bytes
    have come since the last, and whenever nothing more is waiting. A crash of the process costs nothing with any of
    them; one of the machine costs what was not synced, and what was acknowledged of it does not come again.

    After a crash the files hold whole lines, for one that was torn is cut off when the folder is opened again. Lines of
    a batch that was not acknowledged may be there: its rows come again, with the same `seq`, or, where a snapshot was
    under way, with new ones.

    Once it is closed it takes nothing. What was written and not flushed until then was delivered to nobody. A folder
    has one sink at a time: another one is refused until this one is closed, forgotten, or gone with its process.
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
            raise ConfigError("there is no such `fsync`", hint="It is `always`, `interval` or `never`.")
        require_integer("bytes_max", bytes_max, least=1)
        require_integer("fsync_bytes", fsync_bytes, least=1)
        require_seconds("fsync_seconds", fsync_seconds, endless=True)
        self._folder, self._bytes_max, self._fsync = require_folder(folder, "the files"), bytes_max, fsync
        self._fsync_seconds, self._fsync_bytes = fsync_seconds, fsync_bytes
        self._lines = _Lines(encode)
        self._unsynced, self._synced_at = 0, time.monotonic()
        self._torn = False
        """Whether there may be something behind what was flushed."""
        self._closed = False
        self._let_in: Callable[[], object] = lambda: None
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._let_in = _locked(self, self._folder)
            numbers = sorted(int(path.stem) for path in self._folder.iterdir() if _NAME.fullmatch(path.name))
            self._number = numbers[-1] if numbers else 1
            if numbers:
                _cut_torn(self._path(self._number))
            self._file = self._open(self._number)
            self._size = os.fstat(self._file).st_size
        except OSError as error:
            self._let_in()
            raise SinkError(
                f"the folder cannot be used: {os.strerror(error.errno or 0)}",
                folder=self._folder,
                hint="Give one that this program may make and write to.",
            ) from error

    def _path(self, number: int) -> Path:
        return self._folder / f"{number:08d}.jsonl"

    def _open(self, number: int) -> int:
        """A file, and its name in the folder durable."""
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
        self._lines.clear()  # if it fails, all of it comes again
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
            with suppress(OSError):  # or it is cut off before the next one
                os.ftruncate(self._file, self._size)
                self._torn = False
            raise _failed(error, "the file") from error

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
        """Go on in a new file: that one first, so that there is always one that is open, and it is ours."""
        if self._fsync == "interval" and self._unsynced:
            self._sync()
        following = self._open(self._number + 1)
        old, self._file = self._file, following
        self._number, self._size = self._number + 1, 0
        os.close(old)

    def _require_open(self) -> None:
        """The number of a file that was closed may be that of anybody's by now."""
        if self._closed:
            raise SinkError("the sink is closed", folder=self._folder, hint="Make another one of the same folder.")

    def close(self) -> None:
        """Let go of the file; a second time does nothing."""
        if self._closed:
            return
        self._closed = True
        try:
            try:
                if self._fsync == "interval" and self._unsynced:
                    self._sync()
            finally:
                os.close(self._file)
                self._let_in()
        except OSError as error:
            raise _failed(error, "the file") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_NAME = re.compile(r"(?!0+\.)([0-9]{8}|[1-9][0-9]{8,17})\.jsonl")


def _locked(sink: JsonlSink, folder: Path) -> Callable[[], object]:
    """Keep others out of the folder: what one cuts off behind its own lines would be theirs. What lets them in."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(handle)
        raise SinkError(
            "another sink writes to the folder",
            folder=folder,
            hint="Close that one first (`sink.close()`), or end its process; or give another folder.",
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


def _close(sinks: Iterable[Sink]) -> None:
    with ExitStack() as closing:  # each, also if another one fails at it
        for sink in sinks:
            close = getattr(sink, "close", None)
            if callable(close):
                closing.callback(close)


class FanOut:
    """Every batch to every sink. A batch is delivered once all have it; if one fails, it comes again to all."""

    def __init__(self, *sinks: Sink) -> None:
        if not sinks:
            raise ConfigError("a batch would go nowhere", hint="Name the sinks: `FanOut(JsonlSink(…), MemorySink())`.")
        for sink in sinks:
            require_sink("sink", sink)
        self._sinks = sinks

    def write(self, batch: Batch) -> Sequence[Rejected]:
        return [rejected for sink in self._sinks for rejected in require_rejected(sink.write(batch))]

    def flush(self, caught_up: bool) -> None:
        for sink in self._sinks:
            sink.flush(caught_up)

    def close(self) -> None:
        """Close those that can be."""
        _close(self._sinks)


class TableRouter:
    """Each table to its own sink; what no route names goes to `otherwise`, or is rejected."""

    def __init__(self, routes: Mapping[TableId, Sink], otherwise: Sink | None = None) -> None:
        require_instance("routes", routes, Mapping, 'Give `{TableId("public", "orders"): sink}`.')
        if not routes and otherwise is None:
            raise ConfigError("every row would be rejected", hint="Name a sink for a table, or `otherwise`.")
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
        for sink, some in parts.values():
            rejected += require_rejected(sink.write(batch.with_rows(some)))
        return rejected

    def flush(self, caught_up: bool) -> None:
        for sink in self._sinks:
            sink.flush(caught_up)

    def close(self) -> None:
        """Close those that can be."""
        _close(self._sinks)

    @property
    def _sinks(self) -> list[Sink]:
        """Each once."""
        return list({id(sink): sink for sink in (*self._routes.values(), self._otherwise) if sink is not None}.values())
