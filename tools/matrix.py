"""Run the tests that talk to a server on several versions of PostgreSQL: `matrix.py 15 16 18 -- [pytest's]`.

A version whose programs are not on this machine is skipped, and the last lines say so: a skipped version never
counts as a pass. Tests learn the version from TAILRACE_TEST_PG.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tailrace.demo.server import EmbeddedPostgres, ServerFailed

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("tests/contract", "tests/integration", "tests/oracle")
_NO_TESTS = 5


def main(arguments: list[str]) -> int:
    """Run each version; 0 only if every one that could be run passed."""
    split = arguments.index("--") if "--" in arguments else len(arguments)
    versions, extra = [int(text) for text in arguments[:split]], arguments[split + 1 :]
    verdicts = {version: run(version, extra) for version in versions}
    print("\nmatrix:")
    for version, verdict in verdicts.items():
        print(f"  PostgreSQL {version:<3} {verdict}")
    return (
        0 if all(verdict == "passed" or verdict.startswith("SKIPPED") for verdict in verdicts.values()) else 1
    )


def run(version: int, extra: list[str]) -> str:
    """What became of one version."""
    try:
        EmbeddedPostgres(version=version).bin  # noqa: B018 - asking for it is the question
    except ServerFailed as error:
        return f"SKIPPED, NOT TESTED: {error}"
    print(f"\n=== PostgreSQL {version} ===", flush=True)
    folders = [folder for folder in FOLDERS if any((ROOT / folder).rglob("test_*.py"))]
    environment = {**os.environ, "TAILRACE_TEST_PG": str(version)}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *folders, *extra], cwd=ROOT, env=environment, check=False
    )
    if done.returncode == _NO_TESTS:
        return "FAILED: there was no test to run"
    return "passed" if done.returncode == 0 else f"FAILED (exit code {done.returncode})"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
