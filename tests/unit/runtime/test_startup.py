"""A start that cannot succeed is refused before a row is read or anything is saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tailrace.capture.memory.source import MemoryCapture
from tailrace.errors import ConfigError, SinkError, SinkUnready, SourceTableMissing
from tailrace.runtime.loop import CdcRuntime
from tailrace.runtime.observers import Fact, StartFailed
from tailrace.runtime.runtime_state import State
from tailrace.runtime.sinks import JsonlSink
from tailrace.state.checkpoint_stores import MemoryCheckpointStore
from tailrace.transforms.rules import Decrypt, Encrypt, Hmac, KeySource, Transforms
from tailrace.transforms.transform_plan import TransformPlan
from tests.support.changes import SHOP
from tests.support.runtimes import inserts, keys_of
from tests.support.windows import named

OTHER = named("public", "others", 20)


@pytest.fixture
def source() -> MemoryCapture:
    made = MemoryCapture(keep_tables=True)
    made.commit(inserts(1))
    return made


@pytest.fixture
def store() -> MemoryCheckpointStore:
    return MemoryCheckpointStore()


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize(
    "rule", [Encrypt(columns=("name",), key="main"), Hmac(columns=("name",), key="main"), Decrypt(columns=("name",))]
)
def test_a_runtime_without_a_key_that_a_rule_needs_does_not_start(
    source: MemoryCapture,
    store: MemoryCheckpointStore,
    rule: Encrypt | Hmac | Decrypt,
    planned: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TAILRACE_TEST_KEY", raising=False)
    rules = Transforms(keys={"main": KeySource(env="TAILRACE_TEST_KEY")}, rules=(rule,))
    heard: list[Fact] = []
    runtime = CdcRuntime(
        source, store, transforms=TransformPlan(rules) if planned else rules, observers=(heard.append,)
    )
    with pytest.raises(ConfigError, match="TAILRACE_TEST_KEY"):
        runtime.start()
    assert isinstance(heard[-1], StartFailed)
    assert runtime.state is State.IDLE
    assert store.list() == ()
    monkeypatch.setenv("TAILRACE_TEST_KEY", "ab" * 32)
    runtime.start()
    runtime.force_stop()


def test_a_key_that_no_rule_needs_may_be_missing(
    source: MemoryCapture, store: MemoryCheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TAILRACE_TEST_KEY", "ab" * 32)
    keys = {"main": KeySource(env="TAILRACE_TEST_KEY"), "old": KeySource(env="TAILRACE_TEST_GONE")}
    rules = Transforms(keys=keys, rules=(Hmac(columns=("name",), key="main"),))
    runtime = CdcRuntime(source, store, transforms=rules)
    runtime.start()
    assert keys_of(runtime.poll()) == [1]
    runtime.force_stop()


@pytest.mark.parametrize("how", ["snapshot_tables", "incremental_snapshot"])
def test_a_missing_table_is_reported_before_another_is_read(
    source: MemoryCapture, store: MemoryCheckpointStore, how: str
) -> None:
    runtime = CdcRuntime(source, store, **{how: (SHOP.table, OTHER.table)})  # type: ignore[arg-type] # either
    with pytest.raises(SourceTableMissing):
        runtime.start()
    assert runtime.state is State.IDLE
    assert store.list() == ()


def test_an_unusable_folder_is_an_error_without_retry(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    for folder in (tmp_path / "file", tmp_path / "file" / "out"):
        with pytest.raises(SinkError, match="folder cannot be used") as refused:
            JsonlSink(folder)
        assert not isinstance(refused.value, SinkUnready)
        assert refused.value.hint == "Pass one that this program may create and write to."


@pytest.mark.parametrize("given", [3, "0/7", {"position": "0/7"}], ids=str)
def test_a_store_that_returns_no_checkpoint_is_an_error_and_never_counts_as_empty(given: Any) -> None:
    class Odd(MemoryCheckpointStore):
        def load(self, key: str) -> Any:
            return given

    runtime = CdcRuntime(MemoryCapture(), Odd())
    with pytest.raises(ConfigError, match="not a `Checkpoint`") as raised:
        runtime.start()
    assert "Checkpoint.from_json" in raised.value.hint
    assert runtime.state is State.IDLE
