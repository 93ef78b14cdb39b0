"""Options of `format("cdc")` over a change log: an invalid one is refused, with the next step."""

from __future__ import annotations

import pickle
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tailrace.errors import ConfigError
from tailrace.model.position import Lsn
from tailrace.model.schema import TableId
from tailrace.spark.datasource.log.log_options import LogOptions, RowFormat, is_log_read
from tailrace.spark.datasource.table.table_options import ReadOptions
from tailrace.storage.objects import ObjectPath

ONE = {"log": "/log", "table": "public.t"}
IN_STORE = {"log": "s3://bucket/log", "table": "public.t"}


def test_an_option_left_out_has_a_default() -> None:
    options = LogOptions.parse(ONE)
    assert (options.row_format, options.start, options.end) == (RowFormat.TYPED, "earliest", "latest")
    assert (options.rows_max, options.bytes_max, options.consumer, options.url) == (None, None, None, None)
    assert LogOptions.parse({"log": "/log", "tables": "public.*"}).row_format is RowFormat.ENVELOPE


def test_a_relative_log_path_becomes_absolute_because_tasks_have_another_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir("/")
    assert LogOptions.parse({**ONE, "log": "a/log"}).log == "/a/log"


@pytest.mark.parametrize(
    ("options", "log"),
    [
        ({"path": "/data/log"}, "/data/log"), ({"log": "/data/log", "path": "file:///data/log"}, "/data/log"),
        ({"path": "s3://bucket/log"}, "s3://bucket/log"), ({"log": "file:/data/log"}, "/data/log"),
        ({"log": "s3a://bucket/log/"}, "s3://bucket/log"), ({"path": "s3a://bucket/log"}, "s3://bucket/log"),
        ({"log": "s3a://bucket/log", "path": "s3://bucket/log"}, "s3://bucket/log"),
        ({"checkpointLocation": "/ck/"}, "/ck/tailrace-log"), ({"checkpointLocation": "file:/ck"}, "/ck/tailrace-log"),
        ({"checkpointLocation": "/ck", "log": "/data/log"}, "/data/log"),
        ({"checkpointLocation": "s3a://bucket/ck/"}, "s3://bucket/ck/tailrace-log"),
        ({"checkpointLocation": "hdfs://namenode:8020/ck", "log": "s3a://bucket/log"}, "s3://bucket/log"),
    ],
)  # fmt: skip
def test_a_log_is_named_by_an_option_by_load_or_by_the_checkpoint(options: dict[str, str], log: str) -> None:
    assert is_log_read(options)
    assert LogOptions.parse({"table": "public.t", **options}).log == log


def test_endpoint_and_region_of_a_log_are_pickled_with_the_options() -> None:
    written = {**ONE, "log": "s3://bucket/log", "logEndpoint": "http://minio:9000", "logRegion": "eu-west-1"}
    options = pickle.loads(pickle.dumps(LogOptions.parse(written)))
    assert isinstance(options.log_path, ObjectPath)
    assert str(options.log_path) == "s3://bucket/log"
    assert options.log_path.options == (("endpoint", "http://minio:9000"), ("region", "eu-west-1"))
    assert is_log_read(written)
    assert LogOptions.parse(ONE).log_path == Path("/log")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("earliest", "earliest"), ("LATEST", "latest"), ("42", 42), ("16/B374D848", Lsn.parse("16/B374D848")),
        ("2026-11-16T12:00:00Z", datetime(2026, 11, 16, 12, tzinfo=UTC)),
        ("2026-11-16 13:00+01:00", datetime(2026, 11, 16, 12, tzinfo=UTC)),
        ("2026-11-16", datetime(2026, 11, 16, tzinfo=UTC)),
    ],
)  # fmt: skip
def test_a_start_or_end_is_a_word_a_commit_a_position_or_a_time(text: str, expected: object) -> None:
    assert LogOptions.parse({**ONE, "startingPosition": text}).start == expected
    assert LogOptions.parse({**ONE, "endingPosition": text}).end == expected


def test_tables_are_named_or_matched() -> None:
    options = LogOptions.parse({"log": "/log", "tables": "public.orders, sales.*"})
    assert options.matches(TableId("public", "orders"))
    assert options.matches(TableId("sales", "any"))
    assert not options.matches(TableId("public", "other"))
    assert LogOptions.parse({"log": "/log", "tables": "*"}).matches(TableId("any", "any"))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"table": "public.t", "shape": "typed"}, "the option `log` is missing"),
        ({**ONE, "path": "/other"}, "the option `log` names another log than `load(…)` does"),
        ({"table": "public.t", "url": "postgresql://x", "log": "memory://b/c"}, "the option `url` needs a log"),
        ({"table": "public.t", "checkpointLocation": "hdfs://host:8020/ck"}, "the option `checkpointLocation` is"),
        ({"table": "public.t", "checkpointLocation": "hdfs:/ck"}, "Give `log` a location of its own"),
        ({"table": "public.t", "checkpointLocation": "abfss://c@secret/ck"}, "Give `log` a location of its own"),
        ({**ONE, "log": "dbfs:/data/log"}, "a log cannot be at `dbfs://`"),
        ({"log": " "}, "the option `log` is missing"),
        ({**ONE, "logEndpoint": "http://minio:9000"}, "the option `logEndpoint` is for a log in an object store"),
        ({**ONE, "logRegion": "eu-west-1"}, "the option `logRegion` is for a log in an object store"),
        ({**IN_STORE, "logEndpoint": "minio:9000"}, "the option `logEndpoint` is not the address of an S3 server"),
        ({**IN_STORE, "logEndpoint": "http://me:secret@minio"}, "Credentials come from the environment"),
        ({**IN_STORE, "logRegion": "eu west"}, "the option `logRegion` is not the name of a region"),
        ({**IN_STORE, "logSecretKey": "secret"}, "the option `logSecretKey` is not known"),
        ({**ONE, "log": "gs://bucket/log"}, "a log cannot be at `gs://`"),
        ({**ONE, "log": "s3a://key:secret@bucket/log"}, "more than a bucket and a prefix"),
        ({"log": "/log"}, "either the option `table` or the option `tables` is needed"),
        ({**ONE, "tables": "*"}, "the options `table` and `tables` are both given"),
        ({**ONE, "table": "t"}, "the option `table` is not the name of a table"),
        ({**ONE, "maxRowPerTrigger": "1"}, "Did you mean `maxRowsPerTrigger`?"),
        ({**ONE, "colour": "red"}, "the option `colour` is not known"),
        ({"provider": "cdc", "option.log": "/log", **ONE}, "CREATE TEMPORARY VIEW … USING cdc OPTIONS (…)"),
        ({**ONE, "where": "true"}, "the option `where` is for a database table"),
        ({"url": "postgresql://x", "tables": "*"}, "give `url` and one `table`, and no `tables`."),
        ({**ONE, "startingPosition": "yesterday"}, "the option `startingPosition` is not a position in a log"),
        ({**ONE, "endingPosition": "1/x"}, "the option `endingPosition` is not a position in a log"),
        ({**ONE, "shape": "flat"}, "Use one of typed, envelope, changelog."),
        ({"log": "/log", "tables": "*", "shape": "typed"}, "the option `shape` cannot be used for many tables"),
        ({**ONE, "maxRowsPerTrigger": "0"}, "the option `maxRowsPerTrigger` is not a whole number above 0"),
        ({**ONE, "maxBytesPerTrigger": "much"}, "the option `maxBytesPerTrigger` is not a size"),
        ({**ONE, "onSchemaChange": "cry"}, "Use one of stop, envelope."),
        ({**ONE, "shape": "changelog", "onSchemaChange": "envelope"}, "`onSchemaChange` is for typed columns"),
        ({"log": "/log", "tables": "*", "onSchemaChange": "envelope"}, "`onSchemaChange` is for typed columns"),
        ({"log": "/log", "tables": "a.b.c"}, "the option `tables` has `a.b.c`"),
        ({**ONE, "consumer": "../x"}, "the option `consumer` cannot be used: a consumer's name is"),
        ({**ONE, "url": "host=x password=secret"}, "the option `url` is not a URL of PostgreSQL"),
    ],
)  # fmt: skip
def test_an_invalid_option_is_refused(options: dict[str, str], expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        LogOptions.parse(options)
    assert expected in str(caught.value)
    assert caught.value.hint
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("name", ["maxRowsPerTrigger", "maxBytesPerTrigger", "consumer", "onSchemaChange"])
def test_an_option_for_streams_is_refused_by_reads(name: str) -> None:
    options = LogOptions.parse({**ONE, name: {"consumer": "c", "onSchemaChange": "stop"}.get(name, "1")})
    options.refuse_for_stream()
    with pytest.raises(ConfigError, match=f"`{name}` is for streams"):
        options.refuse_for_read()


def test_an_ending_position_is_refused_by_streams() -> None:
    options = LogOptions.parse({**ONE, "endingPosition": "latest"})
    options.refuse_for_read()
    with pytest.raises(ConfigError, match="`endingPosition` is for reads"):
        options.refuse_for_stream()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"logs": "/log", "table": "public.t"}, "the option `logs` is not known | Did you mean `log`?"),
        ({"logg": "/log", "table": "public.t"}, "Did you mean `log`?"),
        (
            {"url": "postgresql://x", "table": "public.t", "startingPositon": "latest"},
            "the option `startingPositon` is not known | Did you mean `startingPosition`?",
        ),
        ({"url": "postgresql://x", "tabel": "public.t"}, "Did you mean `table`?"),
        ({}, "neither the option `url` nor the option `log` is given | For a database table"),
        ({"table": "public.t"}, "`log`, and `table` or `tables`"),
        ({"url": "postgresql://x"}, "the option `table` is missing"),
    ],
)
def test_a_refused_read_names_the_options_of_a_table_and_of_a_log(options: dict[str, str], expected: str) -> None:
    assert not is_log_read(options)
    with pytest.raises(ConfigError) as caught:
        ReadOptions.parse(options)
    assert expected in f"{caught.value.message} | {caught.value.hint}"


def test_a_read_of_a_database_table_is_distinguished_from_a_log() -> None:
    assert not is_log_read({"url": "postgresql://x", "table": "public.t", "where": "true", "maxPartitions": "1"})
    assert is_log_read({"url": "postgresql://x", "table": "public.t", "startingPosition": "latest"})
    assert is_log_read(ONE)
