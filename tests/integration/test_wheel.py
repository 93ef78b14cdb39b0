"""The package as users get it: a wheel in an environment of its own, away from this folder.

Dependencies are lent by the environment that the tests run in: a `.pth` file names its folder, and `.pth` files in
there, the one of the editable install among them, are not read. So what is imported as `tailrace` is the wheel's.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

import tailrace

ROOT = Path(__file__).parents[2]
COMMAND_SECONDS_MAX = 600
SPARKS = ("CdcSource", "register", "tables_at")
SETTINGS = """\
name: shop
source:
  url: postgresql://tailrace@localhost:5432/shop
  tables: ["public.*"]
log: ./changes
tables:
  format: delta
  path: ./lake
"""
TYPES = """\
[mypy]
strict = true
[mypy-pyarrow.*]
ignore_missing_imports = true
"""
PROGRAM = """\
import tailrace
from tailrace import ChangeLog, to_json

first: str = tailrace.Lsn(1)
for batch in ChangeLog.open("changes").follow():
    for event in batch.events():
        second: str = to_json(event)
"""


def run(*command: str | Path, cwd: Path, code: int = 0) -> str:
    """What it printed; it knows nothing of the environment that the tests run in."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=COMMAND_SECONDS_MAX, check=False, env=environment, cwd=cwd
    )
    assert done.returncode == code, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=ROOT)
    (made,) = folder.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel alone, and what it depends on."""
    folder = tmp_path_factory.mktemp("bare")
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    python = folder / "bin" / "python"
    flags = ("--quiet", "--no-deps", "--no-index")
    if uv := shutil.which("uv"):
        run(uv, "pip", "install", "--python", python, *flags, wheel, cwd=folder)
    else:
        run(sys.executable, "-m", "pip", "--python", python, "install", *flags, wheel, cwd=folder)
    packages = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip())
    lent = sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    (packages / "dependencies.pth").write_text("".join(f"{path}\n" for path in lent))
    return folder


def test_the_wheel_holds_the_package_its_types_and_sparks_door(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {"tailrace/py.typed", "tailrace/__init__.py", "pyspark_cdc.py"} <= set(names)
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"tailrace", "pyspark_cdc.py"}


def test_the_command_of_the_wheel_answers_and_checks_settings(bare: Path, tmp_path: Path) -> None:
    assert run(bare / "bin" / "tailrace", "--version", cwd=tmp_path).startswith("tailrace ")
    (tmp_path / "tailrace.yaml").write_text(SETTINGS)
    run(bare / "bin" / "tailrace", "check", "tailrace.yaml", cwd=tmp_path)
    (tmp_path / "tailrace.yaml").write_text(SETTINGS.replace("delta", "alpha"))
    run(bare / "bin" / "tailrace", "check", "tailrace.yaml", cwd=tmp_path, code=2)


def test_every_public_name_can_be_had_from_the_wheel(bare: Path, tmp_path: Path) -> None:
    names = [*tailrace.__all__, *SPARKS]
    code = f"""
import tailrace, pyspark_cdc
from tailrace import {", ".join(names)}
print(tailrace.__file__, pyspark_cdc.__file__, pyspark_cdc.DefaultSource is CdcSource, sep="\\n")
"""
    package, door, same = run(bare / "bin" / "python", "-c", code, cwd=tmp_path).split()
    assert Path(package).is_relative_to(bare)
    assert Path(door).is_relative_to(bare)
    assert same == "True"


def test_the_examples_are_typed_by_the_wheel(bare: Path, tmp_path: Path) -> None:
    (tmp_path / "mypy.ini").write_text(TYPES)
    (tmp_path / "program.py").write_text(PROGRAM)
    command = (
        sys.executable, "-m", "mypy", "--config-file", tmp_path / "mypy.ini", "--cache-dir", tmp_path / "cache",
        "--python-executable", bare / "bin" / "python",
    )  # fmt: skip
    run(*command, *sorted((ROOT / "examples").glob("*.py")), cwd=tmp_path)
    wrong = run(*command, "program.py", cwd=tmp_path, code=1)
    assert 'program.py:4: error: Incompatible types in assignment (expression has type "Lsn"' in wrong
    assert 'program.py:7: error: Incompatible types in assignment (expression has type "dict[str, Any]"' in wrong
