"""Invalid arguments are refused where they are passed, with a hint, never ignored and never later."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tailrace.capture.memory.source import MemoryCapture
from tailrace.errors import ConfigError
from tailrace.runtime.loop import CdcRuntime
from tailrace.runtime.output_batch import BatchKind, Limits, Transactions
from tailrace.runtime.runtime_state import State
from tailrace.runtime.sinks import FanOut, JsonlSink, MemorySink, TableRouter
from tailrace.state.checkpoint_stores import MemoryCheckpointStore
from tailrace.state.schema_history import MemorySchemaHistory
from tests.support.changes import SHOP
from tests.support.runtimes import inserts

NAN, ENDLESS = float("nan"), float("inf")


def refused(make: Callable[[], object], words: str, hint: str) -> None:
    with pytest.raises(ConfigError) as error:
        make()
    assert words in str(error.value)
    assert hint in error.value.hint


@pytest.mark.parametrize(
    ("given", "words", "hint"),
    [
        ({"transactions": "split"}, "`transactions` is not a `Transactions` (found=str)", "`Transactions.SPLIT`"),
        ({"rows": 2.5}, "`rows` is not a whole number (found=float)", "1 or more"),
        ({"rows": "5"}, "`rows` is not a whole number (found=str)", "1 or more"),
        ({"rows": True}, "`rows` is not a whole number", "1 or more"),
        ({"rows": 0}, "`rows` is too small (found=0)", "1 or more"),
        ({"bytes": 0}, "`bytes` is too small", "1 or more"),
        ({"bytes": 1e6}, "`bytes` is not a whole number", "1 or more"),
        ({"transaction_bytes": -1}, "`transaction_bytes` is too small", "1 or more"),
        ({"seconds": NAN}, "`seconds` must be seconds >= 0 (found=nan)", "0 or more"),
        ({"seconds": ENDLESS}, "`seconds` must be seconds >= 0", "0 or more"),
        ({"seconds": -0.1}, "`seconds` must be seconds >= 0", "0 or more"),
        ({"seconds": "1"}, "`seconds` is not a number (found=str)", "0 or more"),
    ],
)
def test_invalid_limits_are_refused(given: dict[str, Any], words: str, hint: str) -> None:
    refused(lambda: Limits(**given), words, hint)


def test_valid_limits_are_accepted() -> None:
    assert Limits(rows=1, bytes=1, seconds=0, transactions=Transactions.SPLIT, transaction_bytes=1).seconds == 0


@pytest.mark.parametrize("source", [None, object(), MemoryCapture, "postgresql://localhost/shop"])
def test_an_object_that_is_not_a_source_is_refused(source: Any) -> None:
    refused(lambda: CdcRuntime(source, MemoryCheckpointStore()), "`source` cannot be used as one", "PostgresCapture")


@pytest.mark.parametrize(("name", "value"), [
    *((name, value) for name in ("retry_seconds_max", "stalled_seconds") for value in (-1, NAN, "5", None)),
    *(("idle_seconds_max", value) for value in (-1, NAN, "5")),
])  # fmt: skip
def test_invalid_times_are_refused(name: str, value: Any) -> None:
    given = {name: value}
    refused(lambda: CdcRuntime(MemoryCapture(), MemoryCheckpointStore(), **given), f"`{name}`", "Give seconds")


def test_an_endless_wait_is_accepted() -> None:
    runtime = CdcRuntime(MemoryCapture(), MemoryCheckpointStore(), retry_seconds_max=ENDLESS, stalled_seconds=ENDLESS)
    runtime.start()
    assert runtime.poll(0.0).kind is BatchKind.EMPTY
    runtime.stop()


def test_a_table_named_twice_is_refused() -> None:
    source = MemoryCapture(keep_tables=True)
    source.commit(inserts(1))
    twice = (SHOP.table, SHOP.table)
    for name in ("snapshot_tables", "incremental_snapshot"):
        given: dict[str, Any] = {name: twice}
        refused(lambda g=given: CdcRuntime(source, MemoryCheckpointStore(), **g), "named twice", "once")  # type: ignore[misc] # bound
    runtime = CdcRuntime(source, MemoryCheckpointStore())
    refused(lambda: runtime.control.snapshot(*twice), "named twice", "once")


def test_sinks_without_a_target_are_refused() -> None:
    refused(FanOut, "fan-out has no sink", "FanOut(")
    refused(lambda: FanOut(MemorySink(), print), "`sink` cannot be used as one", "JsonlSink")  # type: ignore[arg-type]
    refused(lambda: FanOut(MemorySink), "`sink` cannot be used as one", "JsonlSink")  # type: ignore[arg-type]
    refused(lambda: TableRouter({}), "router has no sink", "otherwise")
    refused(lambda: TableRouter({str(SHOP.table): MemorySink()}), "table is not a `TableId`", "TableId(")  # type: ignore[dict-item]
    refused(lambda: TableRouter({SHOP.table: None}), "`sink` cannot be used", "JsonlSink")  # type: ignore[dict-item]
    TableRouter({}, otherwise=MemorySink())


@pytest.mark.parametrize(
    "given",
    [{"bytes_max": -5}, {"bytes_max": 0}, {"bytes_max": 1.5}, {"fsync_bytes": 0}, {"fsync_seconds": NAN}, {"fsync": 1}],
)
def test_an_invalid_file_sink_creates_no_folder(given: dict[str, Any], tmp_path: Path) -> None:
    refused(lambda: JsonlSink(tmp_path / "out", **given), next(iter(given)), "")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("store", [None, "state", Path("state"), MemoryCheckpointStore, {}])
def test_an_object_that_is_not_a_store_is_refused(store: Any) -> None:
    refused(lambda: CdcRuntime(MemoryCapture(), store), "`checkpoint` cannot be used as one", "FileCheckpointStore(")


@pytest.mark.parametrize(
    ("given", "words", "hint"),
    [
        ({"schema_history": "shapes"}, "`schema_history` cannot be used as one", "FileSchemaHistory("),
        ({"schema_history": MemorySchemaHistory}, "`schema_history` cannot be used as one", "FileSchemaHistory("),
        ({"limits": 5}, "`limits` is not a `Limits` (found=int)", "Limits(rows="),
        ({"target": "16/1"}, "the value is not a position (found=str)", "Lsn.parse"),
        ({"observers": print}, "`observers` is not a list", "[function]"),
        ({"observers": [None]}, "`observers` cannot be called", "observers=[function]"),
        ({"on_dead_letter": []}, "`on_dead_letter` cannot be called (found=list)", "without calling it"),
        ({"transform": "upper"}, "`transform` cannot be called", "without calling it"),
        ({"snapshot_tables": SHOP.table}, "tables are not a list", "[TableId("),
        ({"incremental_snapshot": None}, "tables are not a list", "[TableId("),
        ({"key": None}, "key is not a string (found=NoneType)", "shop-orders"),
    ],
)
def test_arguments_of_the_wrong_type_are_refused(given: dict[str, Any], words: str, hint: str) -> None:
    refused(lambda: CdcRuntime(MemoryCapture(), MemoryCheckpointStore(), **given), words, hint)


@pytest.fixture
def runtime() -> Iterator[CdcRuntime]:
    source = MemoryCapture()
    source.commit(inserts(1, 2))
    made = CdcRuntime(source, MemoryCheckpointStore())
    made.start()
    yield made
    made.force_stop()


def test_values_that_cannot_be_injected_are_refused(runtime: CdcRuntime) -> None:
    given: list[Any] = ["x", {"id": 1}, None, runtime.poll()]
    for one in given:
        refused(lambda o=one: runtime.enqueue(o), "neither a change batch nor an event", "batch.batches")  # type: ignore[misc] # bound
    assert runtime.control.status().injected == 0


@pytest.mark.parametrize("rows", [1.5, "2", True, -1, 3])
def test_numbers_of_rows_that_cannot_be_acknowledged_are_refused(runtime: CdcRuntime, rows: Any) -> None:
    batch = runtime.poll()
    refused(lambda: runtime.commit(batch.ack, rows=rows), "rows", "")
    assert runtime.poll() is batch


@pytest.mark.parametrize("wait", ["x", -1, NAN, ENDLESS])
def test_an_invalid_wait_is_refused(runtime: CdcRuntime, wait: Any) -> None:
    refused(lambda: runtime.poll(wait), "`wait_seconds`", "Give seconds")


def test_a_run_with_invalid_arguments_does_not_begin() -> None:
    runtime = CdcRuntime(MemoryCapture(), MemoryCheckpointStore())
    wrong: Any = print
    refused(lambda: runtime.run(wrong, lambda: True), "`sink` cannot be used as one", "JsonlSink")
    wrong = None
    refused(lambda: runtime.run(MemorySink(), wrong), "`stop` cannot be called", "threading.Event")
    wrong = []
    refused(lambda: runtime.run(MemorySink(), lambda: True, on_rejected=wrong), "`on_rejected`", "function")
    assert runtime.state is State.IDLE
