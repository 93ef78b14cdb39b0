"""A disk that fails on demand, and that forgets at a power cut whatever nobody made durable.

The calls of a process are caught by a small library (`failing_disk.c`) that it is started with, so what fails is the
real call of whoever made it. What survives a power cut is worked out from the calls, as strictly as POSIX allows:

- a file's bytes, if it was synced after they were written; a name, if its folder was synced after it was given;
- nothing of what a *failed* sync was to save, even if a later one succeeds, unless it is written or named anew.
  Linux lets go of such pages and counts them as written.
"""

from __future__ import annotations

import ctypes
import enum
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

_SOURCE = Path(__file__).with_suffix(".c")


class Call(enum.IntFlag):
    """The calls that may fail, as the library counts them."""

    SYNC = 1
    WRITE = 2
    LINK = 4
    RENAME = 8
    UNLINK = 16
    MKDIR = 32
    CREATE = 64
    SYMLINK = 128


ANY = Call(255)


def built(folder: Path) -> Path | None:
    """The library, compiled; None where there is no compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        return None
    library = folder / "failing_disk.so"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-U_FORTIFY_SOURCE", "-o", str(library), str(_SOURCE), "-ldl"], check=True
    )
    return library


@dataclass
class _Kept:
    """What is on the disk, and what of it is durable. Names are paths, what they name are numbers."""

    names: dict[str, int] = field(default_factory=dict)
    durable: dict[str, int] = field(default_factory=dict)
    clean: set[int] = field(default_factory=set)
    spoilt: set[int] = field(default_factory=set)
    spoilt_names: set[tuple[str, int]] = field(default_factory=set)
    folders: set[int] = field(default_factory=set)
    links: set[int] = field(default_factory=set)
    made: int = 0

    def take(self, call: str, error: int, one: str, two: str) -> None:
        """One call, as it went."""
        if call == "fsync":
            self._sync(one, error)
        elif error:
            return
        elif call in ("create", "mkdir", "symlink"):
            self.made += 1
            self.names[one] = self.made
            {"mkdir": self.folders, "symlink": self.links}.get(call, set()).add(self.made)
        elif call == "write" and one in self.names:
            self.clean.discard(self.names[one])
        elif call == "unlink":
            self.names.pop(one, None)
        elif call == "link":
            self.names[two] = self.names[one]
        elif call == "rename":
            self.names[two] = self.names.pop(one)

    def _sync(self, path: str, error: int) -> None:
        number = self.names.get(path, 0)
        if number and number not in self.folders:
            if error:
                self.spoilt.add(number)
            elif number not in self.spoilt:
                self.clean.add(number)
            return
        inside = {name: kept for name, kept in self.names.items() if os.path.dirname(name) == path}
        fresh = {(name, kept) for name, kept in inside.items() if self.durable.get(name) != kept}
        if error:
            self.spoilt_names |= fresh
            return
        self.durable |= dict(fresh - self.spoilt_names)
        for name in [name for name in self.durable if os.path.dirname(name) == path and name not in inside]:
            del self.durable[name]


class Disk:
    """The disk below a folder, in a process that was started with the library."""

    def __init__(self, folder: Path, trace: Path, *, remembers: bool = False) -> None:
        """A disk that `remembers` gives back what stood under a name whose new file is not durable, as it was at the
        last power cut; otherwise the new file is taken for the old one."""
        self._contents: dict[int, bytes] | None = {} if remembers else None
        self._library = ctypes.CDLL(None)
        self._library.disk_seen.restype = ctypes.c_long
        self._folder, self._trace = folder, trace
        self._kept, self._read = _Kept(), 0
        self._library.disk_watch(str(folder).encode(), str(trace).encode())

    def fail(self, calls: Call, nth: int, error: int, *, lasting: bool = False) -> None:
        """Let the nth of these calls from now on fail, or all from the nth on."""
        self._library.disk_fail(int(calls), ctypes.c_long(nth), error, lasting)

    def heal(self) -> int:
        """Let nothing fail any more; how many of the calls there were."""
        seen = int(self._library.disk_seen())
        self._library.disk_fail(0, ctypes.c_long(0), 0, 0)
        return seen

    def after_power_cut(self, to: Path) -> None:
        """Make a folder of what the disk is sure to hold now. What was removed is gone; links are left out."""
        with self._trace.open() as lines:
            lines.seek(self._read)
            for line in lines.read().splitlines():
                call, error, one, two = line.split("\t")
                self._kept.take(call, int(error), one, two)
            self._read = lines.tell()
        shutil.rmtree(to, ignore_errors=True)
        to.mkdir()
        for name in sorted(self._kept.durable):
            target = to / Path(name).relative_to(self._folder)
            if name not in self._kept.names or not target.parent.is_dir():
                continue
            number = self._kept.names[name]
            if self._contents is not None and (old := self._kept.durable[name]) != number:
                target.write_bytes(self._contents[old])
            elif number in self._kept.folders:
                target.mkdir()
            elif number in self._kept.clean:
                shutil.copyfile(name, target)
                if self._contents is not None:
                    self._contents[number] = target.read_bytes()
            elif number not in self._kept.links:
                target.write_bytes(bytes(os.path.getsize(name)))
