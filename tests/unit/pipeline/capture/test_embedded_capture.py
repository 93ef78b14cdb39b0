"""The capture of a stream: its settings, and the logs it may write."""

from __future__ import annotations

import pickle
import uuid
from pathlib import Path

import pytest

from tailrace.capture.postgres.connect import map_error_text
from tailrace.changelog.write.writer import LogWriter
from tailrace.errors import (
    POSITION_LOST_HINT,
    ConfigError,
    HistoryDiverged,
    LogBusy,
    LogCorrupt,
    LogForeign,
    LogUnreachable,
    PositionLost,
    SlotBusy,
    SourceUnreachable,
    TailraceError,
)
from tailrace.model.schema import TableId
from tailrace.pipeline.capture.embedded_capture import (
    MARK_FILE,
    EmbeddedCapture,
    claim_log,
    stream_settings,
    with_stream_hint,
)
from tailrace.pipeline.config.source_settings import matches
from tailrace.pipeline.datasource import CdcSource, capture_of
from tailrace.spark.datasource.log.log_options import LogOptions
from tailrace.storage import objects
from tailrace.storage.objects import ObjectPath
from tests.support.stores import ENVIRONMENT
from tests.support.windows import SOURCE

URL = "postgresql://me:secret@127.0.0.1:1/none"


def test_a_new_log_is_marked_and_accepted_again(tmp_path: Path) -> None:
    log = tmp_path / "a" / "log"
    claim_log(log)
    LogWriter(log, SOURCE).close()
    claim_log(log)
    assert (log / MARK_FILE).exists()


def test_a_claimed_log_returns_the_tables_asked_for_so_far(tmp_path: Path) -> None:
    assert claim_log(tmp_path) == ()
    (tmp_path / MARK_FILE).write_text('{"tables": ["public.t", "sales.*"], "start": "a"}')
    assert claim_log(tmp_path) == ("public.t", "sales.*")
    (tmp_path / MARK_FILE).write_text('{"tables": ["pub')
    with pytest.raises(LogCorrupt, match="cannot be read"):
        claim_log(tmp_path)


@pytest.mark.parametrize("kind", [LogBusy, SlotBusy])
def test_a_second_capture_is_advised_to_read_what_the_first_captures(kind: type[TailraceError]) -> None:
    error = with_stream_hint(kind("another process has it", hint="Start this with `--take-over`.", pid=7))
    assert (type(error), error.message, error.fields) == (kind, "another process has it", {"pid": 7})
    assert "Leave out `url`" in error.hint
    assert "--take-over" not in error.hint
    other = ConfigError("something else", hint="Do.")
    assert with_stream_hint(other) is other


@pytest.mark.parametrize("kind", [PositionLost, HistoryDiverged])
def test_the_hint_for_a_lost_position_names_no_settings_and_no_lake_tables(kind: type[TailraceError]) -> None:
    error = with_stream_hint(kind("the replication slot is gone", hint=POSITION_LOST_HINT, slot="tailrace_1"))
    assert (type(error), error.message, error.fields) == (kind, "the replication slot is gone", {"slot": "tailrace_1"})
    assert "begin with a new checkpoint and a new path for the log" in error.hint
    assert not any(word in error.hint for word in ("load.mode", "tailrace drop", "snapshot_tables"))


def test_hints_use_the_names_of_the_options(tmp_path: Path) -> None:
    lacking = with_stream_hint(map_error_text("permission denied for database x", state="42501"))
    assert "; or have a pipeline capture, which takes publication and slot that others made" in lacking.hint
    hint = "Look at `source.tables`."
    found = with_stream_hint(ConfigError("nothing is there", hint=hint, at="x").with_option_hint("Look at `tables`."))
    assert (found.fields, found.hint) == ({"at": "x"}, "Look at `tables`.")
    same = ConfigError("nothing is there", hint="Try again.")
    assert with_stream_hint(same) is same
    with pytest.raises(SourceUnreachable, match="host and port in the option `url` match"):
        EmbeddedCapture(url=URL, log=str(tmp_path / "log"), tables=("public.t",)).start()
    with pytest.raises(SourceUnreachable, match="host and port in the option `url` match"):
        CdcSource({"url": URL, "log": str(tmp_path / "log"), "table": "public.t"}).schema()


@pytest.mark.parametrize("kind", ["folder", "store"])
def test_a_pipelines_log_is_refused(tmp_path: Path, kind: str) -> None:
    log = tmp_path / "log" if kind == "folder" else ObjectPath.parse(f"memory://{uuid.uuid4().hex}/log")
    LogWriter(log, SOURCE).close()
    with pytest.raises(LogForeign, match="Leave out `url`"):
        claim_log(log)
    assert not (log / MARK_FILE).exists()


def test_a_store_that_does_not_answer_is_reported_with_the_option_to_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "_TRIES_MAX", 0)
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LogUnreachable, match="logEndpoint"):
        claim_log(ObjectPath.parse("s3://bucket/log", endpoint="http://127.0.0.1:9"))


def test_a_log_in_a_store_uses_the_options_of_the_store() -> None:
    store_options = {"log": "s3a://bucket/log", "logEndpoint": "http://minio:9000", "logRegion": "eu-west-1"}
    capture = capture_of(LogOptions.parse({"url": URL, "table": "public.t", **store_options}))
    assert isinstance(capture, EmbeddedCapture)
    store = {"endpoint": capture.endpoint, "region": capture.region}
    log = stream_settings(capture.url, capture.log, capture.tables, **store).log
    assert isinstance(log.path, ObjectPath)
    assert str(log.path) == "s3://bucket/log"
    assert log.path.options == (("endpoint", "http://minio:9000"), ("region", "eu-west-1"))


@pytest.mark.parametrize(
    ("options", "taken", "left"),
    [
        ({"table": "public.t"}, TableId("public", "t"), TableId("public", "other")),
        ({"table": 'public."a*[b]"'}, TableId("public", "a*[b]"), TableId("public", "axb")),
        ({"tables": "sales.*, public.t"}, TableId("sales", "any"), TableId("public", "other")),
        ({"tables": "*"}, TableId("any", "any"), None),
    ],
)
def test_it_captures_only_the_tables_of_the_stream(
    tmp_path: Path, options: dict[str, str], taken: TableId, left: TableId | None
) -> None:
    capture = capture_of(LogOptions.parse({"url": URL, "log": str(tmp_path / "log"), **options}))
    assert isinstance(capture, EmbeddedCapture)
    settings = stream_settings(capture.url, capture.log, capture.tables)
    assert matches(settings.source, taken)
    assert left is None or not matches(settings.source, left)
    assert settings.log.path == tmp_path / "log"
    assert "secret" not in repr(pickle.loads(pickle.dumps(capture)))


def test_an_invalid_table_is_reported_without_a_secret(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        stream_settings(URL, str(tmp_path / "log"), ("orders",))
    assert "which names no schema" in str(caught.value)
    assert "secret" not in str(caught.value)
