"""Judges inputs in a process of its own, where a crash, a hang or a hunger for memory harms nobody.

`Judge` starts the process and asks it. The process runs every input twice, once with a forbidden page right behind
its bytes and once right before them, and answers with the outcome, which must be the same both times. It may take
only so much memory beyond what it starts with. A compiled loop cannot be interrupted, so the time is kept here: a
process that does not answer is killed. Whatever happens, `Fell` tells the input it happened to.

The engine is the caller's choice: compiled as in the product; compiled with bounds checks, which sees the arrays
that no page guards; or interpreted, where coverage can be seen.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import functools
import importlib
import os
import resource
import select
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from tailrace.kernels import cache_folder
from tests.support.guarded import Guarded

ROOT = Path(__file__).parents[2]
TARGETS = "tests.fuzz.targets:TARGETS"
SECONDS_MAX = 20.0
"""For one input. Most take a millisecond; two shared cores are no place for a tight limit."""
START_SECONDS_MAX = 300.0
"""Until the first answer: every kernel may have to be compiled."""
MEMORY_MAX = 1 << 30
"""Beyond what the process has when it has answered once."""
_HEAD = struct.Struct(">BI")


class Engine(enum.Enum):
    """How the kernels are run."""

    COMPILED = "compiled"
    CHECKED = "checked"
    """Compiled with bounds checks, and kept apart from the others: numba's cache does not tell them apart."""
    INTERPRETED = "interpreted"

    def environment(self) -> dict[str, str]:
        """What the process is started with."""
        # Arrow's own allocator reserves address space by the gigabyte, which would count as memory. Fresh memory
        # is filled with a pattern: what is read before it is written differs from one engine to the next.
        plain = {**os.environ, "ARROW_DEFAULT_MEMORY_POOL": "system", "MALLOC_PERTURB_": "165"}
        if self is Engine.INTERPRETED:
            return {**plain, "NUMBA_DISABLE_JIT": "1"}
        if self is Engine.CHECKED:
            folder = cache_folder().with_name("kernels-checked")
            return {**plain, "NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(folder)}
        return plain


class Fell(AssertionError):
    """An input that broke the process: what happened, and the input itself."""

    def __init__(self, target: str, data: bytes, why: str) -> None:
        super().__init__(f"{target}: {why}\ninput ({len(data)} bytes): {data.hex()}")
        self.target, self.data, self.why = target, data, why


class Judge:
    """Asks a process for outcomes; one that fell is replaced by the next question. Use it in a `with` block."""

    def __init__(
        self, engine: Engine = Engine.COMPILED, *, targets: str = TARGETS, seconds_max: float = SECONDS_MAX
    ) -> None:
        self._engine, self._targets, self._seconds_max = engine, targets, seconds_max
        self._names = list(_load(targets))
        self._process: subprocess.Popen[bytes] | None = None
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the judge

    def __enter__(self) -> Judge:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self._said.close()

    def outcome(self, target: str, data: bytes) -> bytes:
        """What became of the input; `Fell` if it broke the process."""
        process = self._process or self._start()
        assert process.stdin is not None
        try:
            process.stdin.write(_HEAD.pack(self._names.index(target), len(data)) + data)
            process.stdin.flush()
            return self._answer(process, self._seconds_max)
        except _Stalled:
            self._end()
            raise Fell(target, data, f"no answer in {self._seconds_max:.0f} s") from None
        except (EOFError, BrokenPipeError):
            code = process.wait(timeout=10)
            self._end()
            raise Fell(target, data, f"exit code {code}\n{self._last_words()}") from None

    def _start(self) -> subprocess.Popen[bytes]:
        self._said.seek(0)
        self._said.truncate()
        process = subprocess.Popen(
            [sys.executable, "-X", "faulthandler", "-m", "tests.fuzz.judge", self._targets],
            cwd=ROOT,
            env=self._engine.environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
        )
        self._process = process
        try:
            self._answer(process, START_SECONDS_MAX)
        except (EOFError, _Stalled):
            self._end()
            raise RuntimeError(f"the judge did not start:\n{self._last_words()}") from None
        return process

    def _answer(self, process: subprocess.Popen[bytes], seconds: float) -> bytes:
        deadline = time.monotonic() + seconds
        (size,) = struct.unpack(">I", self._exactly(process, 4, deadline))
        return self._exactly(process, size, deadline)

    def _exactly(self, process: subprocess.Popen[bytes], size: int, deadline: float) -> bytes:
        assert process.stdout is not None
        number, found = process.stdout.fileno(), b""
        while len(found) < size:
            if not select.select([number], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise _Stalled
            piece = os.read(number, size - len(found))
            if not piece:
                raise EOFError
            found += piece
        return found

    def _last_words(self) -> str:
        self._said.seek(0)
        return self._said.read()[-4000:].decode(errors="replace")

    def _end(self) -> None:
        if self._process is not None:
            process, self._process = self._process, None
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(BrokenPipeError):
                    if pipe is not None:
                        pipe.close()


class _Stalled(Exception):
    """No answer in time."""


def interpret() -> None:
    """Give what only compiled code can do its plain meaning, so that the kernels can be run as Python."""
    from tailrace.capture.postgres import copy_binary, decode, values, wire

    def call(address: int, *words: int) -> int:
        return int(_function(int(address))(*map(int, words)))

    @functools.cache
    def _function(address: int) -> Any:
        return ctypes.CFUNCTYPE(*[ctypes.c_int64] * 4)(address)

    set_meaning: Any = setattr
    set_meaning(wire, "_call", call)
    for module in (values, copy_binary):
        set_meaning(module, "_COPY_BYTES_MIN", 1 << 62)  # all are copied byte by byte, where every index is checked
    set_meaning(decode, "_signed", lambda word: np.array(word, np.uint64).astype(np.int64)[()])
    np.seterr(all="ignore")


def _load(name: str) -> dict[str, Any]:
    module, _, attribute = name.partition(":")
    found: dict[str, Any] = getattr(importlib.import_module(module), attribute)
    return found


def _limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY_MAX
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _serve(targets: dict[str, Any]) -> None:
    """Answer questions until there are no more."""
    # What is printed by accident must not be taken for an answer.
    answers, questions = os.fdopen(os.dup(1), "wb"), sys.stdin.buffer
    os.dup2(2, 1)
    guarded, runs = Guarded(), list(targets.values())

    def answer(said: bytes) -> None:
        answers.write(struct.pack(">I", len(said)) + said)
        answers.flush()

    if os.environ.get("NUMBA_DISABLE_JIT") != "1":
        from tailrace.capture.postgres.warm import warm_kernels

        warm_kernels()  # what is compiled while an input waits would count as its time
    for run in runs:
        run(b"", guarded.at_end)
    _limit_memory()
    answer(b"ready")
    while head := questions.read(_HEAD.size):
        number, size = _HEAD.unpack(head)
        data = questions.read(size)
        found = runs[number](data, guarded.at_end)
        again = runs[number](data, guarded.at_start)
        assert found == again, (found, again)
        answer(found)


if __name__ == "__main__":
    if os.environ.get("NUMBA_DISABLE_JIT") == "1":
        interpret()
    _serve(_load(sys.argv[1]))
