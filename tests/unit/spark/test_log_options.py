"""Options of `format("cdc")` over a change log: what cannot be meant is said, with the next step."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from tailrace.errors import ConfigError
from tailrace.model.position import Lsn
from tailrace.model.schema import TableId
from tailrace.spark.log_options import LogOptions, Shape, is_of_log

ONE = {"log": "/log", "table": "public.t"}


def test_what_is_not_said_has_a_default() -> None:
    options = LogOptions.parse(ONE)
    assert (options.shape, options.start, options.end) == (Shape.TYPED, "earliest", "latest")
    assert (options.rows_max, options.bytes_max, options.consumer, options.url) == (None, None, None, None)
    assert LogOptions.parse({"log": "/log", "tables": "public.*"}).shape is Shape.ENVELOPE


def test_a_log_is_named_by_its_whole_path_for_tasks_have_another_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    assert LogOptions.parse({**ONE, "log": "a/log"}).log == "/a/log"


@pytest.mark.parametrize(
    ("options", "log"),
    [
        ({"path": "/data/log"}, "/data/log"), ({"log": "/data/log", "path": "file:///data/log"}, "/data/log"),
        ({"path": "s3://bucket/log"}, "s3://bucket/log"), ({"log": "file:/data/log"}, "/data/log"),
        ({"checkpointLocation": "/ck/"}, "/ck/tailrace-log"), ({"checkpointLocation": "file:/ck"}, "/ck/tailrace-log"),
        ({"checkpointLocation": "/ck", "log": "/data/log"}, "/data/log"),
    ],
)  # fmt: skip
def test_a_log_is_named_by_an_option_by_load_or_by_the_checkpoint(options: dict[str, str], log: str) -> None:
    assert is_of_log(options)
    assert LogOptions.parse({"table": "public.t", **options}).log == log


@pytest.mark.parametrize(
    ("text", "point"),
    [
        ("earliest", "earliest"), ("LATEST", "latest"), ("42", 42), ("16/B374D848", Lsn.parse("16/B374D848")),
        ("2026-11-16T12:00:00Z", datetime(2026, 11, 16, 12, tzinfo=UTC)),
        ("2026-11-16 13:00+01:00", datetime(2026, 11, 16, 12, tzinfo=UTC)),
        ("2026-11-16", datetime(2026, 11, 16, tzinfo=UTC)),
    ],
)  # fmt: skip
def test_a_place_is_a_word_a_commit_a_position_or_a_time(text: str, point: object) -> None:
    assert LogOptions.parse({**ONE, "startingPosition": text}).start == point
    assert LogOptions.parse({**ONE, "endingPosition": text}).end == point


def test_tables_are_named_or_matched() -> None:
    options = LogOptions.parse({"log": "/log", "tables": 'public.orders, sales.*'})
    assert options.takes(TableId("public", "orders"))
    assert options.takes(TableId("sales", "any"))
    assert not options.takes(TableId("public", "other"))
    assert LogOptions.parse({"log": "/log", "tables": "*"}).takes(TableId("any", "any"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"table": "public.t", "shape": "typed"}, "the option `log` is missing"),
        ({**ONE, "path": "/other"}, "the option `log` names another log than `load(…)` does"),
        ({"table": "public.t", "url": "postgresql://x", "checkpointLocation": "s3://b/c"}, "needs a log in a folder"),
        ({"log": " "}, "the option `log` is missing"),
        ({"log": "/log"}, "either the option `table` or the option `tables` is needed"),
        ({**ONE, "tables": "*"}, "either the option `table` or the option `tables` is needed"),
        ({**ONE, "table": "t"}, "the option `table` is not the name of a table"),
        ({**ONE, "maxRowPerTrigger": "1"}, "Did you mean `maxRowsPerTrigger`?"),
        ({**ONE, "colour": "red"}, "the option `colour` is not known"),
        ({**ONE, "startingPosition": "yesterday"}, "the option `startingPosition` is no place in a log"),
        ({**ONE, "endingPosition": "1/x"}, "the option `endingPosition` is no place in a log"),
        ({**ONE, "shape": "flat"}, "They are typed, envelope, changelog."),
        ({"log": "/log", "tables": "*", "shape": "typed"}, "the option `shape` is not one for many tables"),
        ({**ONE, "maxRowsPerTrigger": "0"}, "the option `maxRowsPerTrigger` is not a whole number above 0"),
        ({**ONE, "maxBytesPerTrigger": "much"}, "the option `maxBytesPerTrigger` is not a size"),
        ({**ONE, "onSchemaChange": "cry"}, "They are stop, envelope."),
        ({**ONE, "shape": "changelog", "onSchemaChange": "envelope"}, "`onSchemaChange` is for typed columns"),
        ({**ONE, "consumer": "../x"}, "a consumer's name is"),
        ({**ONE, "url": "host=x password=secret"}, "the option `url` is not a URL of PostgreSQL"),
    ],
)  # fmt: skip
def test_what_cannot_be_meant_is_refused(options: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LogOptions.parse(options)
    assert said in str(caught.value)
    assert caught.value.hint
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("name", ["maxRowsPerTrigger", "maxBytesPerTrigger", "consumer", "onSchemaChange"])
def test_what_is_for_streams_is_not_for_reads(name: str) -> None:
    options = LogOptions.parse({**ONE, name: {"consumer": "c", "onSchemaChange": "stop"}.get(name, "1")})
    options.refuse_for_stream()
    with pytest.raises(ConfigError, match=f"`{name}` is for streams"):
        options.refuse_for_read()


def test_an_end_is_for_reads_and_not_for_streams() -> None:
    options = LogOptions.parse({**ONE, "endingPosition": "latest"})
    options.refuse_for_read()
    with pytest.raises(ConfigError, match="`endingPosition` is for reads"):
        options.refuse_for_stream()


def test_a_table_of_a_database_is_told_from_a_log() -> None:
    assert not is_of_log({"url": "postgresql://x", "table": "public.t", "where": "true", "maxPartitions": "1"})
    assert is_of_log({"url": "postgresql://x", "table": "public.t", "startingPosition": "latest"})
    assert is_of_log(ONE)
