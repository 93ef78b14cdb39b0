"""A source in memory that plays a script.

Steps are transactions, silence, a lagging reader, and a broken connection.

```python
source = ScriptedSource(
    Transaction(changes(orders, insert({"id": 1}))),
    Behind(3, Transaction(changes(orders, insert({"id": 2}))), Quiet(1 << 20)),
    Transaction(changes(altered(orders, add={"note": pa.string()}), insert({"id": 3, "note": "x"}))),
)
```

A step is played when a reader has received everything played before. So there is no clock and no second thread, and the
same script gives the same windows each time. Played steps become a `MemoryCapture`'s log, with all its promises.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any, TypeAlias

from tailrace.capture.memory.source import MemoryCapture
from tailrace.capture.port import Stream
from tailrace.errors import ConfigError, TailraceError
from tailrace.model.batch import ChangeBatch, Window
from tailrace.model.position import Lsn
from tailrace.validation import require_instance, require_integer


@dataclass(frozen=True, init=False)
class Transaction:
    """Commits these batches as one transaction."""

    batches: tuple[ChangeBatch, ...]

    def __init__(self, *batches: ChangeBatch) -> None:
        for batch in batches:
            require_instance("batches", batch, ChangeBatch, "Give the result of `changes(…)`.")
        if not batches:
            raise ConfigError("a transaction needs changes", hint="Use `Quiet` to move the log without changes.")
        object.__setattr__(self, "batches", batches)


@dataclass(frozen=True)
class Quiet:
    """The log grows by that many bytes of no captured table."""

    bytes: int

    def __post_init__(self) -> None:
        require_integer("bytes", self.bytes, least=0)


@dataclass(frozen=True, init=False)
class Behind:
    """All these steps are logged at once, but arrive only after that many reads.

    Meanwhile `lag()` shows them.
    """

    reads: int
    steps: tuple[Transaction | Quiet, ...]

    def __init__(self, reads: int, *steps: Transaction | Quiet) -> None:
        require_integer("reads", reads, least=1)
        for step in steps:
            if not isinstance(step, Transaction | Quiet):
                raise _invalid_step(step, "`Transaction(…)` and `Quiet(…)`")
        object.__setattr__(self, "reads", reads)
        object.__setattr__(self, "steps", steps)


@dataclass(frozen=True)
class Break:
    """The stream breaks with this error, and has to be opened again."""

    error: TailraceError

    def __post_init__(self) -> None:
        require_instance("error", self.error, TailraceError, 'Give an error of Tailrace: `SourceUnreachable("…")`.')


Step: TypeAlias = Transaction | Quiet | Behind | Break


def _invalid_step(step: object, known: str) -> ConfigError:
    return ConfigError(
        "a step of the script is invalid",
        found=type(step).__name__,
        hint=f'Use {known}: `Transaction(changes(orders, insert({{"id": 1}})))`.',
    )


class ScriptedSource(MemoryCapture):
    """Plays its steps to its reader. More may be committed meanwhile, as to any memory source."""

    def __init__(self, *steps: Step, **options: Any) -> None:
        """Create the source; `options` are those of `MemoryCapture`."""
        for step in steps:
            if not isinstance(step, Transaction | Quiet | Behind | Break):
                raise _invalid_step(step, "`Transaction(…)`, `Quiet(…)`, `Behind(…)` and `Break(…)`")
        super().__init__(**options)
        self._steps = deque(steps)
        self._silent = 0

    @property
    def played(self) -> bool:
        """True if no step is left."""
        return not self._steps

    def play(self) -> None:
        """Play the next step now."""
        if not self._steps:
            raise ConfigError("the script is at its end", hint="Check `played` first, or `commit` more.")
        step = self._steps.popleft()
        if isinstance(step, Break):
            self.break_next_read(step.error)
            return
        inner = step.steps if isinstance(step, Behind) else (step,)
        for one in inner:
            if isinstance(one, Transaction):
                self.commit(*one.batches)
            else:
                self.quiet(one.bytes)
        self._silent = step.reads if isinstance(step, Behind) else 0

    def live(self, after: Lsn) -> Stream:
        return _ScriptedStream(self, super().live(after))

    def _before_read(self, after: Lsn) -> bool:
        """Play what is due; return whether nothing arrives."""
        if not self._silent and self._steps and not self._bytes_after(after):
            self.play()
        if not self._silent:
            return False
        self._silent -= 1
        return True


class _ScriptedStream:
    """One reader's stream of the script."""

    def __init__(self, source: ScriptedSource, stream: Stream) -> None:
        self._source, self._stream = source, stream

    def read(self, after: Lsn, wait_seconds: float) -> Window | None:
        if self._source._before_read(after):
            return None
        return self._stream.read(after, wait_seconds if self._source.played else 0.0)

    def confirm(self, position: Lsn) -> None:
        self._stream.confirm(position)

    def close(self) -> None:
        self._stream.close()
