"""A capture beside a stream: its settings, and whose log it may write."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from tailrace.changelog.writer import LogWriter
from tailrace.errors import ConfigError, LogForeign
from tailrace.model.schema import TableId
from tailrace.pipeline.beside import MARK, Beside, claim, settings_of
from tailrace.pipeline.datasource import capture_of
from tailrace.pipeline.settings import matches
from tailrace.spark.log_options import LogOptions
from tests.support.windows import SOURCE

URL = "postgresql://me:secret@127.0.0.1:1/none"


def test_a_log_that_is_new_is_marked_and_found_again(tmp_path: Path) -> None:
    log = tmp_path / "a" / "log"
    claim(log)
    LogWriter(log, SOURCE).close()
    claim(log)
    assert (log / MARK).exists()


def test_a_pipelines_log_is_refused(tmp_path: Path) -> None:
    LogWriter(tmp_path / "log", SOURCE).close()
    with pytest.raises(LogForeign, match="Leave out `url`"):
        claim(tmp_path / "log")
    assert not (tmp_path / "log" / MARK).exists()


@pytest.mark.parametrize(
    ("options", "taken", "left"),
    [
        ({"table": "public.t"}, TableId("public", "t"), TableId("public", "other")),
        ({"table": 'public."a*[b]"'}, TableId("public", "a*[b]"), TableId("public", "axb")),
        ({"tables": "sales.*, public.t"}, TableId("sales", "any"), TableId("public", "other")),
        ({"tables": "*"}, TableId("any", "any"), None),
    ],
)
def test_it_captures_what_the_stream_asks_for_and_no_more(
    tmp_path: Path, options: dict[str, str], taken: TableId, left: TableId | None
) -> None:
    beside = capture_of(LogOptions.parse({"url": URL, "log": str(tmp_path / "log"), **options}))
    assert isinstance(beside, Beside)
    settings = settings_of(beside.url, beside.log, beside.tables)
    assert matches(settings.source, taken)
    assert left is None or not matches(settings.source, left)
    assert settings.log.path == tmp_path / "log"
    assert "secret" not in repr(pickle.loads(pickle.dumps(beside)))


def test_what_cannot_be_captured_is_told_without_a_secret(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        settings_of(URL, str(tmp_path / "log"), ("orders",))
    assert "which names no schema" in str(caught.value)
    assert "secret" not in str(caught.value)
