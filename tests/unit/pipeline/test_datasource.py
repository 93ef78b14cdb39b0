"""`format("cdc")`: which of its three readers is meant, told from the options alone."""

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
from tailrace.spark.datasource.log.stream import LogStreamReader
from tailrace.spark.datasource.log.stream_41 import Spark41StreamReader
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
    """As Spark makes it, asks for its columns, and sends it to another process."""
    made = CdcSource(options)
    made.schema()
    again = pickle.loads(pickle.dumps(made))
    assert isinstance(again, CdcSource)
    return again


def test_spark_finds_it_by_a_module_of_this_name() -> None:
    assert pyspark_cdc.DefaultSource is tailrace.CdcSource
    assert pyspark_cdc.DefaultSource.name() == "cdc"


def test_what_is_installed_has_that_module_at_its_top() -> None:
    """As the project's own build made it, of the same settings as for a wheel."""
    files = [file for file in importlib.metadata.files("tailrace") or () if str(file) == "pyspark_cdc.py"]
    assert [file.read_text() for file in files] == [Path(pyspark_cdc.__file__).read_text()]


def test_a_log_is_a_range_or_a_stream_and_a_url_alone_a_table(log: str) -> None:
    made = source(log=log, table="public.things")
    assert isinstance(made.reader(made.schema()), LogBatchReader)
    assert isinstance(made.streamReader(made.schema()), LogStreamReader)
    assert isinstance(CdcSource({"url": URL, "table": "public.t"}).reader(StructType()), TableBatchReader)


def test_a_stream_without_a_log_is_told_both_ways_to_have_one() -> None:
    refused = CdcSource({"url": URL, "table": "public.t"}).streamReader(StructType())
    with pytest.raises(ConfigError, match=r"`log` is missing.*`url`.*`checkpointLocation`"):
        refused.initialOffset()


def test_whatever_spark_asks_of_a_stream_that_cannot_be_it_is_told_why(log: str) -> None:
    made = source(log=log, table="public.things", endingPosition="latest")
    refused = pickle.loads(pickle.dumps(made.streamReader(made.schema())))
    asked = (
        refused.initialOffset,
        refused.latestOffset,
        lambda: refused.partitions({}, {}),
        lambda: refused.read(InputPartition(None)),
    )
    for ask in asked:
        with pytest.raises(ConfigError, match="`endingPosition` is for reads"):
            ask()


def _asked(log: str, **options: str) -> Callable[[str], object]:
    """Spark's question of that name to a stream, or to a range."""
    made = CdcSource({"log": log, "table": "public.things", **options})
    there, all_there_is = {"log": "another", "commit": 1}, ReadAllAvailable()
    questions: dict[str, Callable[[], object]] = {
        "schema": made.schema,
        "reader": lambda: made.reader(made.schema()),
        "range": lambda: made.reader(made.schema()).partitions(),
        "first": lambda: made.streamReader(made.schema()).initialOffset(),
        "latest": lambda: cast("LogStreamReader", made.streamReader(made.schema())).latestOffset(there, all_there_is),
        "partitions": lambda: made.streamReader(made.schema()).partitions(there, there),
    }
    return lambda name: questions[name]()


@pytest.mark.parametrize(
    ("question", "options"),
    [
        ("schema", {"startingPosition": "junk"}), ("schema", {"log": "/nowhere"}), ("schema", {"tables": "a.b.c"}),
        ("reader", {"maxRowsPerTrigger": "1"}), ("range", {"startingPosition": "99"}),
        ("range", {"endingPosition": "2999/0"}), ("first", {"endingPosition": "2"}),
        ("first", {"startingPosition": "99"}), ("latest", {}), ("partitions", {}),
    ],
)  # fmt: skip
def test_an_error_is_told_without_the_way_it_came(log: str, question: str, options: dict[str, str]) -> None:
    ask = _asked(**{"log": log, **options})
    with pytest.raises(TailraceError) as caught:
        ask(question)
    told = traceback.TracebackException.from_exception(caught.value)
    ours = [frame for frame in told.stack if "/src/tailrace/" in frame.filename]
    assert len(ours) <= 2, "what Spark called, and what told it"
    assert not any("The above exception" in line or "During handling" in line for line in told.format())


def test_a_fault_of_ours_keeps_its_traceback() -> None:
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
    ("options", "said"),
    [({"consumer": "me"}, "`consumer` is for streams"), ({"url": URL, "tables": "*"}, "`url` is for streams")],
)
def test_what_is_for_streams_is_refused_for_reads(log: str, options: dict[str, str], said: str) -> None:
    made = source(**{"log": log, **({} if "tables" in options else {"table": "public.things"}), **options})
    with pytest.raises(ConfigError, match=said):
        made.reader(made.schema())


def test_a_spark_without_admission_control_streams_and_only_limits_are_refused(
    log: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "tailrace.spark.datasource.log.stream", raising=False)
    monkeypatch.setitem(sys.modules, "pyspark.sql.streaming.datasource", None)  # as with Spark 4.1
    made = source(log=log, table="public.things")
    assert isinstance(made.streamReader(made.schema()), Spark41StreamReader)
    for limit in ({"maxRowsPerTrigger": "5"}, {"maxBytesPerTrigger": "5MiB"}):
        made = source(log=log, table="public.things", **limit)
        with pytest.raises(Unsupported, match=r"limits need Spark 4\.2.*Leave out `maxRowsPerTrigger`"):
            made.streamReader(made.schema()).initialOffset()
