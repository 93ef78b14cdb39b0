"""One suite over every sink, a user's own among them."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from tailrace.errors import ConfigError
from tailrace.model.event_json import to_json_line
from tailrace.model.mirror import Mirror
from tailrace.model.schema import TableId, TableSchema
from tailrace.runtime.output_batch import Batch
from tailrace.runtime.sinks import FanOut, JsonlSink, MemorySink, Rejected, Sink, StreamSink, TableRouter
from tailrace.testing.checks import Check, ContractBroken
from tailrace.testing.sink_checks import EXACTLY_ONCE, MIRROR, ORDERS, SINK, Open, SinkAt, check_sink
from tests.support.logs import quick_folder


def lines_of(paths: Sequence[Path]) -> list[int]:
    return [json.loads(line)["seq"] for path in paths for line in path.read_text().splitlines()]


def memory(_: Path) -> Open:
    sink = MemorySink()
    return lambda: SinkAt(sink, kept=lambda: sorted(event.seq for event in sink.events()))


def files(**given: Any) -> Callable[[Path], Open]:
    return lambda folder: (
        lambda: SinkAt(
            JsonlSink(folder / "out", **given), kept=lambda: lines_of(sorted((folder / "out").glob("*.jsonl")))
        )
    )


class ToFile(StreamSink):
    """Writes lines to a file, as standard output often is."""

    def __init__(self, path: Path) -> None:
        self._path = path.open("a")
        super().__init__(self._path)

    def close(self) -> None:
        self._path.close()


def stream(folder: Path) -> Open:
    return lambda: SinkAt(ToFile(folder / "out"), kept=lambda: lines_of([folder / "out"]))


def to_two(folder: Path) -> Open:
    """Both sinks get everything."""
    other = MemorySink()

    def found() -> list[int]:
        return lines_of(sorted((folder / "out").glob("*.jsonl")))

    def at() -> SinkAt:
        return SinkAt(
            FanOut(JsonlSink(folder / "out"), other),
            kept=lambda: found() if sorted(event.seq for event in other.events()) == list(found()) else [-1],
        )

    return at


def routed(folder: Path) -> Open:
    """One table has no sink: its rows are rejected."""

    def at() -> SinkAt:
        return SinkAt(
            TableRouter({ORDERS.table: JsonlSink(folder / "out")}),
            kept=lambda: lines_of(sorted((folder / "out").glob("*.jsonl"))),
        )

    return at


class SqliteSink:
    """A sink as a user writes one: `_seq` is the key, so a repeated batch is stored once."""

    def __init__(self, path: Path, or_else: str = "REPLACE") -> None:
        self._or_else = or_else
        self._database = sqlite3.connect(path)
        self._database.execute("CREATE TABLE IF NOT EXISTS changes (seq INTEGER PRIMARY KEY, line TEXT NOT NULL)")

    def write(self, batch: Batch) -> Sequence[Rejected]:
        rows = [(event.seq, to_json_line(event)) for event in batch.events()]
        self._database.executemany(f"INSERT OR {self._or_else} INTO changes VALUES (?, ?)", rows)
        return ()

    def flush(self, caught_up: bool) -> None:
        self._database.commit()

    def close(self) -> None:
        self._database.close()


def sqlite(folder: Path, or_else: str = "REPLACE") -> Open:
    def kept() -> list[int]:
        with sqlite3.connect(folder / "out.db") as reader:
            return [seq for (seq,) in reader.execute("SELECT seq FROM changes ORDER BY seq")]

    return lambda: SinkAt(SqliteSink(folder / "out.db", or_else), kept=kept)


SINKS = {
    "memory": memory, "files": files(), "files that roll": files(bytes_max=1),
    "files, synced now and then": files(fsync="interval"), "files, never synced": files(fsync="never"),
    "a stream": stream, "two at once": to_two, "by table": routed, "a user's": sqlite,
}  # fmt: skip


@pytest.mark.parametrize("kind", SINKS)
@pytest.mark.parametrize("check", SINK, ids=str)
def test_a_sink_promises(check: Check[SinkAt], kind: str, tmp_path: Path) -> None:
    with quick_folder(tmp_path) as folder:
        check(SINKS[kind](folder))


@pytest.mark.parametrize("or_else", ["REPLACE", "IGNORE"])
@pytest.mark.parametrize("check", EXACTLY_ONCE, ids=str)
def test_a_sink_that_stores_the_numbers_stores_each_row_once(
    check: Check[SinkAt], or_else: str, tmp_path: Path
) -> None:
    check(sqlite(tmp_path, or_else))


class Tables:
    """A sink that keeps the last state of each row."""

    def __init__(self) -> None:
        self.tables: dict[TableId, Mirror] = {}

    def write(self, batch: Batch) -> Sequence[Rejected]:
        for event in batch.events():
            self.tables.setdefault(event.schema.table, Mirror()).apply(event.row_write())
        return ()

    def flush(self, caught_up: bool) -> None:
        """Nothing is durable here."""

    def rows(self, shape: TableSchema) -> list[dict[str, Any]]:
        return list(self.tables[shape.table].rows.values())


@pytest.mark.parametrize("check", MIRROR, ids=str)
def test_a_mirror_promises(check: Check[SinkAt]) -> None:
    sink = Tables()
    check(lambda: SinkAt(sink, rows=sink.rows))


# --- the suite itself finds what is wrong -------------------------------------------------------------------


def at_new_sink(sink: Callable[[], Any], kept: Callable[[Any], Sequence[int]]) -> Callable[[], Open]:
    def place() -> Open:
        made = sink()
        return lambda: SinkAt(made, kept=lambda: kept(made))

    return place


class Appending(MemorySink):
    """Ignores that a batch is repeated, and drops rows it does not accept."""

    def write(self, batch: Batch) -> tuple[()]:
        wanted = [rows for rows in batch.batches if rows.schema.key]
        self._unflushed.append(batch.with_rows(wanted))
        return ()


def test_all_broken_promises_of_a_sink_are_reported_at_once() -> None:
    with pytest.raises(ContractBroken) as caught:
        check_sink(at_new_sink(Appending, lambda sink: sorted(event.seq for event in sink.events())), *EXACTLY_ONCE)
    assert [line.partition(":")[0] for line in str(caught.value).splitlines()] == [
        "a batch that arrives again before its flush is stored once",
        "every kind of change is stored, or rejected by its number and with a reason; nothing is silently left out",
        "a batch that arrives again after its flush is stored once",
        "a batch that arrives again after a restart is stored once",
    ]


class DeletesFirst(Tables):
    """Applies every delete at once, as if the next row did not need the old one."""

    def write(self, batch: Batch) -> Sequence[Rejected]:
        for event in batch.events():
            mirror = self.tables.setdefault(event.schema.table, Mirror())
            if event.kept_for is not None and event.key is not None:
                mirror.rows.pop(tuple(event.key.values()), None)
            mirror.apply(event.row_write())
        return ()


def test_a_mirror_that_loses_a_large_value_is_reported() -> None:
    broken = []
    for check in MIRROR:
        sink: Sink = (made := DeletesFirst())
        try:
            check(lambda sink=sink, made=made: SinkAt(sink, rows=made.rows))  # type: ignore[misc] # bound at once
        except ContractBroken:
            broken.append(str(check))
    assert broken == ["a key that changes takes unsent values along, also twice in one batch"]


@pytest.mark.parametrize(("place", "said"), [
    (lambda: 3, "cannot be called"), (lambda: lambda: 3, "not a `SinkAt`"), (lambda: MemorySink, "not a `SinkAt`"),
    (lambda: lambda: SinkAt(cast("Any", 3), kept=tuple), "`sink` cannot be used as one"),
    (lambda: lambda: SinkAt(MemorySink()), "no function that reads its rows"),
    (lambda: lambda: SinkAt(MemorySink(), kept=cast("Any", 3)), "`kept` cannot be called"),
])  # fmt: skip
def test_a_suite_without_access_to_the_rows_is_refused(place: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as raised:
        check_sink(place)
    assert raised.value.hint


def test_only_checks_of_the_suite_are_accepted() -> None:
    with pytest.raises(ConfigError, match="not a `Check`"):
        check_sink(lambda: memory(Path()), cast("Any", 3))


def test_a_mirror_without_row_numbers_is_checked_as_a_mirror() -> None:
    with pytest.raises(ContractBroken) as raised:
        check_sink(lambda: lambda: SinkAt(MemorySink(), rows=lambda _: []))
    assert str(MIRROR[0]) in str(raised.value)
    assert str(SINK[1]) not in str(raised.value)
