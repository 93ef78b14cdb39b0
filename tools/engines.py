"""Run the tests of lake tables with Spark's Delta connector: `engines.py [pytest's arguments]`.

There is no connector for the Spark that everything else is tested with, so this makes an environment of its own,
`.venv-spark`, with one that has. Where that, or the connector's jars, cannot be had, the last line says so and the rest
passes: what is skipped never counts as a pass. Tests learn of the engine from TAILRACE_TEST_ENGINE.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = Path(os.environ.get("TAILRACE_SPARK_VENV", ROOT / ".venv-spark"))
PYTHON = VENV / "bin" / "python"
SPARK = "pyspark>=4.2,<4.3"
TESTS = (
    "tests/integration/test_spark_engine.py", "tests/integration/test_delta_table.py",
    "tests/integration/test_spark_modes.py", "tests/contract/test_table_forms.py",
    "tests/unit/tables/test_refresh.py", "tests/unit/tables/test_evolving.py", "tests/unit/spark/test_folding.py",
    "tests/unit/spark/test_folding_forms.py",
    "tests/integration/test_spark_features.py", "tests/integration/test_delivery.py",
    "tests/integration/test_table_readers.py", "tests/integration/test_spark_big.py",
    "tests/integration/test_evolution.py::test_after_an_alter_and_no_row_more",
    "tests/integration/test_evolution.py::test_rows_before_and_after_an_alter",
)  # fmt: skip
FEATURES = "deletion_vectors column_mapping"
FEATURED = (
    "tests/unit/tables/test_evolving.py", "tests/unit/tables/test_refresh.py", "tests/integration/test_delivery.py",
    "tests/integration/test_evolution.py::test_rows_before_and_after_an_alter", "tests/contract/test_table_forms.py",
)  # fmt: skip
"""Once more, with tables that have these features."""
PROBE = "from tests.support.engines import session; session().sql('select 1').collect()"
INSTALL_SECONDS_MAX, PROBE_SECONDS_MAX = 1800, 600


def main(arguments: list[str]) -> int:
    """0 if every test passed, or if there is nothing to run them with."""
    if not _have(["-c", "import pyspark, tailrace, pytest"], 120) and not _install():
        return _skipped(f"no environment with {SPARK} could be made at {VENV}")
    if not _have(["-c", PROBE], PROBE_SECONDS_MAX):
        return _skipped("Spark's Delta connector could not be loaded: are its jars to be had?")
    if any(argument.startswith("tests/") for argument in arguments):
        return _test(arguments)
    return max(_test([*TESTS, *arguments]), _test([*FEATURED, *arguments], TAILRACE_TEST_FEATURES=FEATURES))


def _test(arguments: Sequence[str], **environment: str) -> int:
    command: list[str | Path] = [PYTHON, "-m", "pytest", "--timeout=1800", *arguments]
    return subprocess.run(command, cwd=ROOT, env={**_environment(), **environment}, check=False).returncode


def _install() -> bool:
    print(f"engines: making {VENV} (about 900 MB)", file=sys.stderr, flush=True)
    target = [f"--editable={ROOT}[demo,test]", SPARK]
    commands: list[list[str | Path]]
    if uv := shutil.which("uv"):
        commands = [
            [uv, "venv", "--quiet", "--allow-existing", "--python", sys.executable, VENV],
            [uv, "pip", "install", "--quiet", "--python", PYTHON, *target],
        ]
    else:
        base = getattr(sys, "_base_executable", sys.executable)
        commands = [
            [base, "-m", "venv", VENV],
            [PYTHON, "-m", "pip", "install", "--quiet", "--root-user-action=ignore", "--no-input", *target],
        ]
    return all(_run(command) for command in commands)


def _run(command: list[str | Path]) -> bool:
    try:
        return subprocess.run(command, cwd=ROOT, timeout=INSTALL_SECONDS_MAX, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def _have(arguments: list[str], seconds: float) -> bool:
    try:
        done = subprocess.run(
            [PYTHON, *arguments], cwd=ROOT, env=_environment(), timeout=seconds, check=False, capture_output=True
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


def _environment() -> dict[str, str]:
    return {**os.environ, "TAILRACE_TEST_ENGINE": "spark", "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}


def _skipped(why: str) -> int:
    left = "\n".join(f"  {name}" for name in dict.fromkeys((*TESTS, *FEATURED)))
    print(f"\nengines: these were not run:\n{left}\nengines: SKIPPED, NOT TESTED: {why}", file=sys.stderr, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
