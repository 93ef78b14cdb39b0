"""The options of `format("cdc")` alone choose one of its three readers."""

from __future__ import annotations

import importlib.metadata
import pickle
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest
from pyspark.sql.datasource import InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.types import StructType

import pyspark_cdc
import tailrace
from tailrace.errors import ConfigError, LogUnreachable, TailraceError, Unsupported
from tailrace.pipeline.datasource import CdcSource
from tailrace.spark.datasource.log.log_part import LogBatchReader
from tailrace.spark.datasource.log.stream_41 import Spark41StreamReader
from tailrace.spark.datasource.log.stream_42 import LogStreamReader
from tailrace.spark.datasource.option_values import without_traceback
from tailrace.spark.datasource.table.table_read import TableBatchReader
from tailrace.storage import objects
from tests.support.logs import Diary, inserts, quick_folder
from tests.support.stores import ENVIRONMENT

URL = "postgresql://me@127.0.0.1:1/none"


@pytest.fixture
def log(tmp_path: Path) -> Iterator[str]:
    with quick_folder(tmp_path) as folder:
        diary = Diary(folder / "log")
        diary.commit(inserts(1))
        diary.close()
        yield str(diary.path)


def source(**options: str) -> CdcSource:
    """Return a source as Spark makes it, asks it for its columns, and sends it to another process."""
    original = CdcSource(options)
    original.schema()
    copy = pickle.loads(pickle.dumps(original))
    assert isinstance(copy, CdcSource)
    return copy


def test_spark_finds_it_by_a_module_of_this_name() -> None:
    assert pyspark_cdc.DefaultSource is tailrace.CdcSource
    assert pyspark_cdc.DefaultSource.name() == "cdc"


def test_the_installed_package_has_that_module_at_its_top() -> None:
    """The project's own build made the package, with the same settings as for a wheel."""
    files = [file for file in importlib.metadata.files("tailrace") or () if str(file) == "pyspark_cdc.py"]
    assert [file.read_text() for file in files] == [Path(pyspark_cdc.__file__).read_text()]


def test_a_log_is_a_range_or_a_stream_and_a_url_alone_a_table(log: str) -> None:
    cdc_source = source(log=log, table="public.things")
    assert isinstance(cdc_source.reader(cdc_source.schema()), LogBatchReader)
    assert isinstance(cdc_source.streamReader(cdc_source.schema()), LogStreamReader)
    assert isinstance(CdcSource({"url": URL, "table": "public.t"}).reader(StructType()), TableBatchReader)


def test_a_stream_without_a_log_gets_both_ways_to_have_one() -> None:
    refused = CdcSource({"url": URL, "table": "public.t"}).streamReader(StructType())
    with pytest.raises(ConfigError, match=r"`log` is missing.*`url`.*`checkpointLocation`"):
        refused.initialOffset()


def test_every_call_of_a_refused_stream_raises_its_error(log: str) -> None:
    cdc_source = source(log=log, table="public.things", endingPosition="latest")
    refused = pickle.loads(pickle.dumps(cdc_source.streamReader(cdc_source.schema())))
    calls = (
        refused.initialOffset,
        refused.latestOffset,
        lambda: refused.partitions({}, {}),
        lambda: refused.read(InputPartition(None)),
    )
    for call in calls:
        with pytest.raises(ConfigError, match="`endingPosition` is for reads"):
            call()


def _calls_of_spark(log: str, **options: str) -> Callable[[str], object]:
    """Return a function that calls a stream or a range as Spark does, by the call's name."""
    cdc_source = CdcSource({"log": log, "table": "public.things", **options})
    offset, everything = {"log": "another", "commit": 1}, ReadAllAvailable()
    calls: dict[str, Callable[[], object]] = {
        "schema": cdc_source.schema,
        "reader": lambda: cdc_source.reader(cdc_source.schema()),
        "range": lambda: cdc_source.reader(cdc_source.schema()).partitions(),
        "first": lambda: cdc_source.streamReader(cdc_source.schema()).initialOffset(),
        "latest": lambda: cast("LogStreamReader", cdc_source.streamReader(cdc_source.schema())).latestOffset(
            offset, everything
        ),
        "partitions": lambda: cdc_source.streamReader(cdc_source.schema()).partitions(offset, offset),
    }
    return lambda name: calls[name]()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("schema", {"startingPosition": "junk"}), ("schema", {"log": "/nowhere"}), ("schema", {"tables": "a.b.c"}),
        ("reader", {"maxRowsPerTrigger": "1"}), ("range", {"startingPosition": "99"}),
        ("range", {"endingPosition": "2999/0"}), ("first", {"endingPosition": "2"}),
        ("first", {"startingPosition": "99"}), ("latest", {}), ("partitions", {}),
    ],
)  # fmt: skip
def test_an_error_is_raised_without_our_traceback(log: str, name: str, options: dict[str, str]) -> None:
    call = _calls_of_spark(**{"log": log, **options})
    with pytest.raises(TailraceError) as caught:
        call(name)
    reported = traceback.TracebackException.from_exception(caught.value)
    ours = [frame for frame in reported.stack if "/src/tailrace/" in frame.filename]
    assert len(ours) <= 2, "the method that Spark called, and the one that raised again"
    assert not any("The above exception" in line or "During handling" in line for line in reported.format())


def test_another_exception_keeps_its_traceback() -> None:
    with pytest.raises(ZeroDivisionError) as caught, without_traceback:
        raise ZeroDivisionError from KeyError()
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_store_that_does_not_answer_is_not_taken_for_one_without_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(objects, "_TRIES_MAX", 0)
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LogUnreachable):
        source(url=URL, log="s3a://bucket/log", logEndpoint="http://127.0.0.1:9", table="public.t")


def test_columns_of_the_users_own_are_refused(log: str) -> None:
    with pytest.raises(ConfigError, match="Leave out"):
        CdcSource({"log": log, "table": "public.things"}).reader(StructType())


@pytest.mark.parametrize(
    ("options", "message"),
    [({"consumer": "me"}, "`consumer` is for streams"), ({"url": URL, "tables": "*"}, "`url` is for streams")],
)
def test_an_option_for_streams_is_refused_when_spark_reads(log: str, options: dict[str, str], message: str) -> None:
    cdc_source = source(**{"log": log, **({} if "tables" in options else {"table": "public.things"}), **options})
    with pytest.raises(ConfigError, match=message):
        cdc_source.reader(cdc_source.schema())


def test_a_spark_without_admission_control_streams_and_only_limits_are_refused(
    log: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "tailrace.spark.datasource.log.stream_42", raising=False)
    monkeypatch.setitem(sys.modules, "pyspark.sql.streaming.datasource", None)  # as with Spark 4.1
    cdc_source = source(log=log, table="public.things")
    assert isinstance(cdc_source.streamReader(cdc_source.schema()), Spark41StreamReader)
    for limit in ({"maxRowsPerTrigger": "5"}, {"maxBytesPerTrigger": "5MiB"}):
        cdc_source = source(log=log, table="public.things", **limit)
        with pytest.raises(Unsupported, match=r"limits need Spark 4\.2.*Leave out `maxRowsPerTrigger`"):
            cdc_source.streamReader(cdc_source.schema()).initialOffset()
