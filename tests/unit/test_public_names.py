"""The public names are a contract: this list changes only together with CHANGELOG.md."""

from __future__ import annotations

import subprocess
import sys

import pytest

import tailrace

PUBLIC = {
    "Ack", "TransformResult", "Batch", "BinlogPosition", "Capabilities", "CdcRuntime", "ChangeBatch",
    "ChangeCapture", "ChangeLog", "Checkpoint", "CheckpointStore", "Column", "Committed", "Control",
    "CustomPosition", "Delete", "Delivered", "Drained", "Event", "ExitCode", "Fact", "Failed", "FanOut",
    "FileCheckpointStore", "FileSchemaHistory", "Health", "Identity", "JsonlSink", "KeySource", "BatchKind", "Lag",
    "DeadLetter", "Limits", "LogSink", "LogWriter", "Lost", "Lsn", "MariadbGtidSet", "MemoryCapture",
    "MemoryCheckpointStore", "MemorySchemaHistory", "MemorySink", "Merge", "MysqlGtidSet", "Nothing",
    "Operation", "Paused", "PollFailed", "PositionType", "PostgresCapture", "PostgresSettings", "RecordedStream",
    "Rejected", "Remedy", "Replace", "Resumed", "Retention", "RowsRejected", "Rule", "RuleHalted", "RuleUnmatched",
    "SchemaEvent", "SchemaHistory", "SchemaVersion", "RowsDeadLettered", "SchemaSeen", "Sink", "SnapshotBegun",
    "SnapshotEnded", "SourceId", "SqlServerLsn", "StartFailed", "Started", "State", "Status", "Stopped",
    "Stream", "StreamOpened", "StreamSink", "TableId", "TableRead", "TableRouter", "TableSchema",
    "TailraceError", "Transactions", "TransformPlan", "TransformedStream", "Transforms", "Truncate",
    "UnmatchedRule", "Verdict", "Window", "batch_of", "check_key", "rules", "seed_checkpoint", "to_debezium", "to_json",
}  # fmt: skip
SPARKS = {"CdcSource", "register", "tables_at"}
"""Named by whoever wants them: `import *` is for those without Spark, too."""


def test_the_public_names_are_these_and_each_can_be_had() -> None:
    assert set(tailrace.__all__) == PUBLIC
    assert all(getattr(tailrace, name) is not None for name in PUBLIC | SPARKS)


HEAVY = "print({'pyspark', 'numba', 'pyarrow', 'deltalake'} & set(sys.modules))"


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert printed(f"import sys, tailrace; {HEAVY}") == "set()"


def test_checkpoints_need_nothing_heavy_and_a_schema_history_only_arrow() -> None:
    stores = "from tailrace import Checkpoint, FileCheckpointStore, MemoryCheckpointStore, seed_checkpoint"
    assert printed(f"import sys; {stores}; {HEAVY}") == "set()"
    assert printed(f"import sys; from tailrace import FileSchemaHistory, RecordedStream; {HEAVY}") == "{'pyarrow'}"


def test_a_runtime_needs_no_spark_and_no_lake() -> None:
    """Made, started, polled and stopped, with sinks and stores."""
    code = """
import sys
from tailrace import *
from tailrace.capture.memory.source import batch_of
schema = TableSchema(table=TableId("a", "b"), relation=1, key=(), identity=Identity.NONE, columns=())
source = MemoryCapture()
source.commit(batch_of(schema, (Operation.INSERT, {})))
runtime, sink = CdcRuntime(source, MemoryCheckpointStore(), MemorySchemaHistory()), FanOut(MemorySink())
runtime.run(sink, lambda: runtime.rows_committed)
print({name for name in ('pyspark', 'py4j', 'deltalake', 'numba') if name in sys.modules}, runtime.rows_committed)
"""
    compiled = {
        "PostgresCapture",
        "TransformResult",
        "DeadLetter",
        "TransformPlan",
        "TransformedStream",
        "UnmatchedRule",
    }
    light = PUBLIC - compiled - {"rules"}
    names = "from tailrace import " + ", ".join(sorted(light))
    assert printed(code.replace("from tailrace import *", names)) == "set() 1"


MISSING = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"pyspark", "py4j", "deltalake", "pandas", "yaml", "rich"}:
            raise ModuleNotFoundError(name, name=name)
sys.meta_path.insert(0, Missing())
"""


def test_capture_runs_where_only_the_packages_of_the_librarys_guide_are_installed() -> None:
    names = ("faults", "scripted_source", "sink_checks", "recorded_wire")
    modules = "import " + ", ".join(f"tailrace.testing.{name}" for name in names)
    assert printed(f"{MISSING}{modules}\nfrom tailrace import {', '.join(sorted(PUBLIC))}; print('all')") == "all"


def test_everything_at_once_can_be_imported_where_there_is_no_spark() -> None:
    code = "from tailrace import *\nprint(CdcRuntime.__name__, to_json.__name__)"
    assert printed(MISSING + code) == "CdcRuntime to_json"


def test_everything_at_once_brings_no_spark_where_there_is_one() -> None:
    code = "import sys\nfrom tailrace import *\nprint({'pyspark', 'py4j', 'deltalake'} & set(sys.modules))"
    assert printed(code) == "set()"


@pytest.mark.parametrize(("name", "needs"), [("register", "pyspark"), ("CdcSource", "pyspark"), ("tables_at", "yaml")])
def test_a_name_whose_needs_are_not_installed_says_what_to_install(name: str, needs: str) -> None:
    code = f"""
try:
    from tailrace import {name}
except ImportError as error:
    print(error)
"""
    assert printed(MISSING + code) == (
        f"`tailrace.{name}` needs the package `{needs}`, which is not installed: `pip install tailrace` installs "
        "all that pipelines need"
    )


def printed(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
