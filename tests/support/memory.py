"""The most memory that each kind of process of a pipeline ever held, as the kernel keeps it (VmHWM)."""

from __future__ import annotations

import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.pipelines import descendants

MIB = 1 << 20
LOOK_SECONDS = 0.2


@dataclass
class Peaks:
    """By process; of a process that ended between two looks what the last one saw."""

    root: int
    of: dict[int, tuple[str, int]] = field(default_factory=dict)

    @classmethod
    def watch(cls, process: subprocess.Popen[bytes], seconds_max: float) -> Peaks:
        """Until the process ends, or the time is over."""
        found, deadline = cls(process.pid), time.monotonic() + seconds_max
        while process.poll() is None and time.monotonic() < deadline:
            found.look()
            time.sleep(LOOK_SECONDS)
        return found

    def look(self) -> None:
        for pid in descendants(self.root):
            with suppress(OSError, StopIteration):
                said = Path(f"/proc/{pid}/cmdline").read_bytes()
                lines = Path(f"/proc/{pid}/status").read_text().splitlines()
                peak = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
                self.of[pid] = (self._kind(pid, said), peak)

    def _kind(self, pid: int, said: bytes) -> str:
        if pid == self.root:
            return "driver"
        if b"java" in said.split(b"\0")[0]:
            return "java"
        return "worker" if b"spark.daemon" in said else "capture"

    def _most(self, kind: str) -> int:
        return max((peak for found, peak in self.of.values() if found == kind), default=0)

    @property
    def driver(self) -> int:
        return self._most("driver")

    @property
    def java(self) -> int:
        return self._most("java")

    @property
    def worker(self) -> int:
        return self._most("worker")

    @property
    def capture(self) -> int:
        return self._most("capture")

    def __str__(self) -> str:
        kinds = ("driver", "java", "worker", "capture")
        return ", ".join(f"{kind} {self._most(kind) // MIB}" for kind in kinds)
