"""Run tests with another Spark than all others: `engines.py [core|spark|spark-4.1|iceberg|connect] [pytest's …]`.

There is no connector for the Spark that everything else is tested with, so each gets an environment of its own,
`.venv-spark` for Delta's and `.venv-iceberg` for Iceberg's, with one that has; Delta's connector for the Spark of the
latter is held to some of the tests there. Spark Connect needs pandas, which nothing of ours may, so it has one as well,
`.venv-connect`. Each has a Spark of its own and shares all other packages with the environment that this runs in.
Where that, or the connector's jars, cannot be had, the last line says so and the rest passes: what is skipped never
counts as a pass. Tests learn of who writes tables from TAILRACE_TEST_ENGINE.

`core` holds both connectors for Spark 4.1, in their one environment, to the few tests that `make test` ends with.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
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
SPECS, DELTA = "tests/contract/test_table_specs.py::", "tests/integration/test_delta_table.py::"
CORE = (
    f"{SPECS}test_a_mirror_names_the_change_of_each_row",
    f"{SPECS}test_a_deleted_row_stays_marked_with_its_last_values",
    f"{SPECS}test_every_change_is_a_row",
    f"{SPECS}test_changes_of_a_keyless_table_are_rows_too",
    f"{SPECS}test_a_row_has_a_version_for_each_transaction_that_changed_it",
    f"{SPECS}test_a_truncate_marks_every_row",
    f"{SPECS}test_a_value_that_does_not_fit_is_refused_in_every_change",
    f"{DELTA}test_every_commit_carries_the_position",
    f"{DELTA}test_a_commit_made_meanwhile_fails_ours",
    f"{DELTA}test_two_appliers_of_one_log_one_wins",
    f"{DELTA}test_a_load_refuses_a_table_that_is_not_ours",
    f"{DELTA}test_k_deletes_of_one_image_remove_exactly_k_copies",
)
"""Every form of table, and the promises of a commit: its position, its changes once, and nobody else's in between."""
CORE_SPARK_41 = (
    *CORE,
    "tests/integration/test_spark_engine.py::test_each_engine_goes_on_with_the_other_s_table",
    "tests/integration/test_spark_engine.py::test_small_files_are_joined_and_the_position_stays",
)
CORE_ICEBERG = (
    *CORE,
    "tests/integration/test_iceberg_table.py::test_a_row_that_changes_is_struck_out_where_it_lies",
    "tests/integration/test_iceberg_table.py::test_a_commit_made_before_ours_is_published_fails_ours",
    "tests/integration/test_iceberg_table.py::test_small_files_are_joined_and_old_snapshots_go",
)
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
READY = "import pyspark, tailrace, pytest"
READY_SECONDS_MAX, INSTALL_SECONDS_MAX, PROBE_SECONDS_MAX = 120, 1800, 600


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
    core: tuple[str, ...] = ()
    """Those of them that `make test` runs, too."""
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
            needs=SPARK_41, venv=VENV_41, tests=SPARK_41_TESTS, core=CORE_SPARK_41, flags=FLAGS_41,
        ),
        Engine(
            name="iceberg", title="Spark 4.1, Iceberg connector", missing=JARS.format("Iceberg"), writer="iceberg",
            needs=SPARK_41, venv=VENV_41, tests=ICEBERG_TESTS, core=CORE_ICEBERG, door=DOOR_TESTS, listed=LISTED,
            flags=FLAGS_41,
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
    if arguments[:1] == ["core"]:
        return core(arguments[1:])
    named = [ENGINES[name] for name in arguments[:1] if name in ENGINES]
    verdicts = [held(engine, arguments[len(named) :]) for engine in named or ENGINES.values()]
    return 1 if any(verdict.startswith(FAILED) for verdict in verdicts) else 0


def core(arguments: Sequence[str]) -> int:
    """Hold the connectors to their core; 0 if every test passed, or if there is nothing to run them with.

    The last lines say for each connector how many tests passed, or why none was run.
    """
    print(f"\n{CORE_LINE}these follow", flush=True)
    lines, failed = list[str](), False
    for engine in (engine for engine in ENGINES.values() if engine.core):
        started = time.monotonic()
        if missing := _missing(engine):
            _tell_skipped(engine.core, missing)
            lines.append(f"{engine.title}: {SKIPPED}: {missing}")
            continue
        ran = _test(engine, [*engine.core, *arguments])
        failed = failed or ran.code != 0
        passed = ran.tests - ran.failed - ran.reasons.total()
        told = "".join(f", {count} skipped ({reason})" for reason, count in ran.reasons.items())
        outcome = f"{FAILED} (exit code {ran.code}), {ran.failed} failed, " if ran.code else ""
        lines.append(f"{engine.title}: {outcome}{passed} passed{told} in {time.monotonic() - started:.0f} s")
    print("\n".join(["", *(f"{CORE_LINE}{line}" for line in lines)]), flush=True)
    return int(failed)


CORE_LINE = "core of the connectors: "
"""How the first line and each of the last begin: `.ci/run` looks for them."""


def held(engine: Engine, arguments: Sequence[str]) -> str:
    """What became of one engine, held to the tests."""
    if missing := _missing(engine):
        return _skipped(engine, missing)
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


def _missing(engine: Engine) -> str:
    """Make the engine's environment if there is none; why it cannot be used, or nothing if it can."""
    if _trouble(engine, ["-c", READY], READY_SECONDS_MAX) and not _install(engine):
        return f"no environment with {', '.join(engine.needs)} could be made at {engine.venv}"
    trouble = _trouble(engine, ["-c", engine.probe], PROBE_SECONDS_MAX)
    return f"{engine.missing} ({trouble})" if trouble else ""


def _test(engine: Engine, arguments: Sequence[str], **environment: str) -> Ran:
    command: list[str | Path] = [engine.python, "-m", "pytest", "--timeout=1800", *engine.flags, *arguments]
    return run_tests(command, {**_environment(engine), **environment})


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What became of one run of pytest."""

    code: int
    tests: int
    failed: int = 0
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
    failed = sum(case.find("failure") is not None or case.find("error") is not None for case in cases)
    return Ran(code=done.returncode, tests=len(cases), failed=failed, reasons=reasons)


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
    """Make an environment that has what the engine needs, and everything else from the one that this runs in."""
    print(f"engines: making {engine.venv} (about 500 MB)", file=sys.stderr, flush=True)
    base = getattr(sys, "_base_executable", sys.executable)
    if not _run([base, "-m", "venv", "--clear", "--without-pip", engine.venv]):
        return False
    shared = sysconfig.get_path("purelib")
    if uv := shutil.which("uv"):
        installed = _run([uv, "pip", "install", "--quiet", "--python", engine.python, *engine.needs])
    else:
        command: list[str | Path] = [engine.python, "-m", "pip", "install", *_QUIET_PIP, *engine.needs]
        installed = _run(command, PYTHONPATH=shared)
    # What is installed there comes first on the path, so its Spark wins over the one that is shared. Without this file
    # the environment cannot be used: it comes last, so that one that was left half made is made again.
    if installed:
        own = sysconfig.get_path("purelib", vars={"base": str(engine.venv), "platbase": str(engine.venv)})
        Path(own, "shared.pth").write_text(f"{ROOT / 'src'}\n{shared}\n")
    return installed


_QUIET_PIP = ("--quiet", "--quiet", "--disable-pip-version-check", "--root-user-action=ignore", "--no-input")


def _run(command: list[str | Path], **environment: str) -> bool:
    try:
        done = subprocess.run(
            command, cwd=ROOT, env={**os.environ, **environment}, timeout=INSTALL_SECONDS_MAX, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


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
    _tell_skipped(dict.fromkeys((*engine.tests, *engine.door, *engine.featured, *engine.listed)), why)
    return f"{SKIPPED}: {why}"


def _tell_skipped(tests: Iterable[str], why: str) -> None:
    left = "\n".join(f"  {name}" for name in tests)
    print(f"\nengines: these were not run:\n{left}\nengines: {SKIPPED}: {why}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
