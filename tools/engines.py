"""Run tests with another Spark than all others: `engines.py [spark|spark-4.1|iceberg|connect] [pytest's arguments]`.

There is no connector for the Spark that everything else is tested with, so each gets an environment of its own,
`.venv-spark` for Delta's and `.venv-iceberg` for Iceberg's, with one that has; Delta's connector for the Spark of the
latter is held to some of the tests there. Spark Connect needs pandas, which nothing of ours may, so it has one as well,
`.venv-connect`. Where that, or the connector's jars, cannot be had, the
last line says so and the rest passes: what is skipped never counts as a pass. Tests learn of who writes tables from
TAILRACE_TEST_ENGINE.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree as ET

ROOT = Path(__file__).resolve().parent.parent
SPARK_TESTS = (
    "tests/integration/test_spark_engine.py", "tests/integration/test_spark_driver.py",
    "tests/integration/test_delta_table.py",
    "tests/integration/test_spark_modes.py", "tests/contract/test_table_specs.py",
    "tests/unit/tables/test_merge_load.py", "tests/unit/tables/evolve/test_schema_plan.py",
    "tests/unit/tasks/test_fold_files.py",
    "tests/unit/tasks/test_fold_files_by_mode.py", "tests/unit/tasks/test_apply_with_dead_letters.py",
    "tests/unit/tasks/test_keyless_replay.py",
    "tests/integration/test_spark_features.py", "tests/integration/test_delivery.py",
    "tests/integration/test_table_readers.py", "tests/integration/test_spark_big.py",
    "tests/contract/test_partitions.py", "tests/contract/test_delta_partitions.py",
    "tests/integration/test_partitions.py",
    "tests/integration/test_spark_partitions.py", "tests/crash/test_kill_the_connector.py",
    "tests/integration/test_rows_that_come_back.py",
    "tests/integration/test_evolution.py::test_after_an_alter_and_no_row_more",
    "tests/integration/test_evolution.py::test_rows_before_and_after_an_alter",
)  # fmt: skip
SPARK_41_TESTS = ("tests/integration/test_spark_engine.py", "tests/contract/test_table_specs.py")
ICEBERG_TESTS = (
    "tests/integration/test_iceberg_table.py", "tests/integration/test_iceberg_pipeline.py",
    "tests/integration/test_iceberg_letters.py", "tests/integration/test_iceberg_rebuild.py",
    "tests/unit/tasks/test_apply_with_dead_letters.py", "tests/unit/tasks/test_keyless_replay.py",
    "tests/integration/test_delta_table.py", "tests/contract/test_table_specs.py", "tests/contract/test_partitions.py",
    "tests/unit/tables/test_merge_load.py", "tests/unit/tables/evolve/test_schema_plan.py",
    "tests/integration/test_delivery.py",
    "tests/unit/tasks/test_fold_files.py", "tests/unit/tasks/test_fold_files_by_mode.py",
    "tests/crash/test_kill_the_connector.py",
)  # fmt: skip
CONNECT_TESTS = ("tests/integration/test_connect.py", "tests/integration/test_declarative.py")
DOOR_TESTS = ("tests/integration/test_stream_format.py", "tests/integration/test_read_format.py")
"""In a process of their own, with tables by delta-rs: they start a Spark without a connector, and a process has one."""
PLAIN_WRITER = "delta-rs"
FEATURES = "deletion_vectors column_mapping"
FEATURED = (
    "tests/unit/tables/evolve/test_schema_plan.py", "tests/unit/tables/test_merge_load.py",
    "tests/integration/test_delivery.py",
    "tests/integration/test_evolution.py::test_after_an_alter_and_no_row_more",
    "tests/integration/test_evolution.py::test_rows_before_and_after_an_alter", "tests/contract/test_table_specs.py",
    "tests/contract/test_partitions.py", "tests/contract/test_delta_partitions.py",
)  # fmt: skip
"""Once more, with tables that have these features."""
CATALOGS = ("jdbc", "rest")
LISTED = (
    "tests/contract/test_table_specs.py", "tests/integration/test_delivery.py",
    "tests/integration/test_delta_table.py::test_every_commit_carries_the_position",
    "tests/integration/test_delta_table.py::test_maintenance_keeps_the_position",
    "tests/integration/test_delta_table.py::test_a_foreign_write_stops_the_table_even_under_maintenance",
    "tests/integration/test_delta_table.py::test_a_load_refuses_a_table_that_is_not_ours",
    "tests/integration/test_delta_table.py::test_a_commit_made_meanwhile_fails_ours",
    "tests/integration/test_delta_table.py::test_two_appliers_of_one_log_one_wins",
    "tests/integration/test_delta_table.py::test_two_first_loads_one_wins",
)  # fmt: skip
"""Once more, with Iceberg tables that each of these lists: of what a catalog decides, all."""
PASSED, FAILED, SKIPPED = "passed", "FAILED", "SKIPPED, NOT TESTED"
PROBE = "from tests.support.engines import session; session().sql('select 1').collect()"
JARS = "Spark's {} connector could not be loaded: are its jars to be had?"
_NO_TESTS = 5
"""How pytest ends when it found none, or none that was not skipped as a file."""
INSTALL_SECONDS_MAX, PROBE_SECONDS_MAX = 1800, 600


@dataclass(frozen=True, kw_only=True)
class Engine:
    """Which Spark, who writes the tables under test, and what that needs."""

    name: str
    title: str
    missing: str
    """Why, most likely, when the environment is there and the probe fails."""
    venv: Path
    needs: tuple[str, ...]
    tests: tuple[str, ...]
    featured: tuple[str, ...] = ()
    listed: tuple[str, ...] = ()
    door: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    """For pytest."""
    writer: str = PLAIN_WRITER
    """As TAILRACE_TEST_ENGINE says it."""
    probe: str = PROBE

    @property
    def python(self) -> Path:
        return self.venv / "bin" / "python"


SPARK_41 = ("pyspark>=4.1,<4.2", "pyiceberg>=0.12,<0.13")
VENV_41 = Path(os.environ.get("TAILRACE_ICEBERG_VENV", ROOT / ".venv-iceberg"))
FLAGS_41 = ("-W", "ignore:unclosed <socket:ResourceWarning")
"""PySpark 4.1 leaves the socket of a `collect` to the garbage collector."""

ENGINES = {
    engine.name: engine
    for engine in (
        Engine(
            name="spark", title="Spark 4.2, Delta connector", missing=JARS.format("Delta"), writer="spark",
            needs=("pyspark>=4.2,<4.3",), tests=SPARK_TESTS, featured=FEATURED, door=DOOR_TESTS,
            venv=Path(os.environ.get("TAILRACE_SPARK_VENV", ROOT / ".venv-spark")),
        ),
        Engine(
            name="spark-4.1", title="Spark 4.1, Delta connector", missing=JARS.format("Delta"), writer="spark",
            needs=SPARK_41, venv=VENV_41, tests=SPARK_41_TESTS, flags=FLAGS_41,
        ),
        Engine(
            name="iceberg", title="Spark 4.1, Iceberg connector", missing=JARS.format("Iceberg"), writer="iceberg",
            needs=SPARK_41, venv=VENV_41, tests=ICEBERG_TESTS, door=DOOR_TESTS, listed=LISTED, flags=FLAGS_41,
        ),
        Engine(
            name="connect", title="Spark 4.3, Connect and declarative pipelines", tests=CONNECT_TESTS,
            missing="what Spark Connect needs could not be imported",
            needs=("pyspark[connect,pipelines]>=4.3,<4.4",), probe="import grpc_status, pandas, google.rpc, zstandard",
            venv=Path(os.environ.get("TAILRACE_CONNECT_VENV", ROOT / ".venv-connect")),
        ),
    )
}  # fmt: skip


def main(arguments: list[str]) -> int:
    """0 if every test passed, or if there is nothing to run them with."""
    named = [ENGINES[name] for name in arguments[:1] if name in ENGINES]
    verdicts = [held(engine, arguments[len(named) :]) for engine in named or ENGINES.values()]
    return 1 if any(verdict.startswith(FAILED) for verdict in verdicts) else 0


def held(engine: Engine, arguments: Sequence[str]) -> str:
    """What became of one engine, held to the tests."""
    if _trouble(engine, ["-c", "import pyspark, tailrace, pytest"], 120) and not _install(engine):
        return _skipped(engine, f"no environment with {', '.join(engine.needs)} could be made at {engine.venv}")
    if trouble := _trouble(engine, ["-c", engine.probe], PROBE_SECONDS_MAX):
        return _skipped(engine, f"{engine.missing} ({trouble})")
    if any(argument.startswith("tests/") for argument in arguments):
        runs = [_test(engine, arguments)]
    else:
        runs = [_test(engine, [*engine.tests, *arguments])]
        if engine.door:
            runs.append(_test(engine, [*engine.door, *arguments], TAILRACE_TEST_ENGINE=PLAIN_WRITER))
        if engine.featured:
            runs.append(_test(engine, [*engine.featured, *arguments], TAILRACE_TEST_FEATURES=FEATURES))
        for catalog in CATALOGS if engine.listed else ():
            runs.append(_test(engine, [*engine.listed, *arguments], TAILRACE_TEST_CATALOG=catalog))
    said = verdict(runs)
    if said.startswith(SKIPPED):
        print(f"\nengines: {said}", file=sys.stderr, flush=True)
    return said


def _test(engine: Engine, arguments: Sequence[str], **environment: str) -> Ran:
    command: list[str | Path] = [engine.python, "-m", "pytest", "--timeout=1800", *engine.flags, *arguments]
    return run_tests(command, {**_environment(engine), **environment})


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What became of one run of pytest."""

    code: int
    tests: int
    reasons: Counter[str]
    """Of each that was skipped, why."""

    @property
    def skipped(self) -> bool:
        """Whether nothing was tested."""
        return self.code in (0, _NO_TESTS) and self.tests == self.reasons.total() > 0


def run_tests(command: Sequence[str | Path], environment: Mapping[str, str]) -> Ran:
    """Run pytest; its own report says what was skipped, which its exit code does not."""
    with tempfile.TemporaryDirectory(prefix="tailrace-verdict-") as folder:
        report = Path(folder) / "report.xml"
        done = subprocess.run([*command, f"--junitxml={report}"], cwd=ROOT, env=environment, check=False)
        cases = list(ET.parse(report).iter("testcase")) if report.exists() else []
    found = [skipped for case in cases if (skipped := case.find("skipped")) is not None]
    # One that was expected to fail, and did, is called skipped there, too.
    reasons = Counter(_why(skipped) for skipped in found if skipped.get("type") != "pytest.xfail")
    return Ran(code=done.returncode, tests=len(cases), reasons=reasons)


def _why(skipped: ET.Element) -> str:
    """In the words of the test; of a whole file that was skipped the report has them only as text."""
    said = re.search(r"Skipped: (.*)['\"]\)$", skipped.text or "")
    return said[1] if said else str(skipped.get("message"))


def verdict(runs: Sequence[Ran]) -> str:
    """Of a cell. It passed only if something was tested."""
    reasons = sum((run.reasons for run in runs), Counter[str]())
    if all(run.skipped for run in runs):
        return f"{SKIPPED}: all {reasons.total()} tests were skipped, most because: {reasons.most_common(1)[0][0]}"
    failed = [str(run.code) for run in runs if run.code and not run.skipped]
    if failed == [str(_NO_TESTS)]:
        return f"{FAILED}: there was no test to run"
    if failed:
        return f"{FAILED} (exit code {', '.join(failed)})"
    tests = sum(run.tests for run in runs)
    return f"{PASSED}, but for {reasons.total()} of {tests} tests that were skipped" if reasons else PASSED


def _install(engine: Engine) -> bool:
    print(f"engines: making {engine.venv} (about 900 MB)", file=sys.stderr, flush=True)
    target = [f"--editable={ROOT}[demo,test]", *engine.needs]
    commands: list[list[str | Path]]
    if uv := shutil.which("uv"):
        commands = [
            [uv, "venv", "--quiet", "--allow-existing", "--python", sys.executable, engine.venv],
            [uv, "pip", "install", "--quiet", "--python", engine.python, *target],
        ]
    else:
        base = getattr(sys, "_base_executable", sys.executable)
        commands = [
            [base, "-m", "venv", engine.venv],
            [engine.python, "-m", "pip", "install", "--quiet", "--root-user-action=ignore", "--no-input", *target],
        ]
    return all(_run(command) for command in commands)


def _run(command: list[str | Path]) -> bool:
    try:
        return subprocess.run(command, cwd=ROOT, timeout=INSTALL_SECONDS_MAX, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def _trouble(engine: Engine, arguments: list[str], seconds: float) -> str:
    """Why the engine's Python cannot do this, in its own last words; nothing if it can."""
    command: list[str | Path] = [engine.python, *arguments]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=_environment(engine), timeout=seconds, check=False, capture_output=True
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if not done.returncode:
        return ""
    return done.stderr.decode(errors="replace").strip().rpartition("\n")[2] or f"exit code {done.returncode}"


def _environment(engine: Engine) -> dict[str, str]:
    return {**os.environ, "TAILRACE_TEST_ENGINE": engine.writer, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}


def _skipped(engine: Engine, why: str) -> str:
    every = dict.fromkeys((*engine.tests, *engine.door, *engine.featured, *engine.listed))
    left = "\n".join(f"  {name}" for name in every)
    print(f"\nengines: these were not run:\n{left}\nengines: {SKIPPED}: {why}", file=sys.stderr, flush=True)
    return f"{SKIPPED}: {why}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
