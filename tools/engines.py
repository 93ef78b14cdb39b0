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
)  # fmt: skip
PROBE = "from tests.support.engines import session; session().sql('select 1').collect()"
INSTALL_SECONDS_MAX, PROBE_SECONDS_MAX = 1800, 600


def main(arguments: list[str]) -> int:
    """0 if every test passed, or if there is nothing to run them with."""
    if not _have(["-c", "import pyspark, tailrace, pytest"], 120) and not _install():
        return _skipped(f"no environment with {SPARK} could be made at {VENV}")
    if not _have(["-c", PROBE], PROBE_SECONDS_MAX):
        return _skipped("Spark's Delta connector could not be loaded: are its jars to be had?")
    chosen = [] if any(argument.startswith("tests/") for argument in arguments) else list(TESTS)
    done = subprocess.run(
        [PYTHON, "-m", "pytest", "--timeout=1800", *chosen, *arguments], cwd=ROOT, env=_environment(), check=False
    )
    return done.returncode


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
    print(f"\nengines: SKIPPED, NOT TESTED: {why}", file=sys.stderr, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
