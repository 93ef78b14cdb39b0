"""Faults around a checkpoint store or a source. They are at fixed calls, so a test always runs the same.

```python
store = FaultyStore(MemoryCheckpointStore(), fail("save", at=2), lose("save", at=5))
source = faulty_source(MemoryCapture(), duplicate("read", at=3), delay("confirm", calls=2))
```

Calls are counted from 1, separately for each method, over all streams of a source. `struck` lists the faults that have
happened, so that a test can assert that they did.

- `fail` raises, before or (`acted`) after the store has acted; a stream that failed stays broken.
- `slow` waits first.
- `corrupt`: after a `save` no `load` can read the checkpoint; a `load` or a `read` finds damaged data.
- `lose`: `save` and `delete` succeed and do nothing; `load` finds nothing; a window is lost with its connection; a
  `confirm` never arrives.
- `duplicate`: a store acts twice, a window arrives a second time, a `confirm` arrives twice.
- `delay`: the effect is that many calls later.
"""

from __future__ import annotations

import enum
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from tailrace.capture.port import CustomPositionSource, Stream
from tailrace.errors import (
    ConfigError,
    ProtocolViolation,
    SourceUnreachable,
    StateCorrupt,
    StateUnusable,
    TailraceError,
)
from tailrace.model.batch import Window
from tailrace.model.position_kinds import P
from tailrace.runtime.intake import StreamSource
from tailrace.state.checkpoint import Checkpoint, CheckpointStore
from tailrace.validation import require_instance, require_integer, require_methods, require_seconds

_T = TypeVar("_T")


class FaultKind(enum.Enum):
    """The kind of a fault."""

    FAIL = "fail"
    SLOW = "slow"
    CORRUPT = "corrupt"
    LOSE = "lose"
    DUPLICATE = "duplicate"
    DELAY = "delay"


@dataclass(frozen=True, kw_only=True)
class InjectedFault:
    """A fault at calls of one method: from the `at`-th on, `times` times."""

    kind: FaultKind
    call: str
    at: int = 1
    times: int = 1
    seconds: float = 0.0
    calls: int = 1
    error: TailraceError | None = None
    acted: bool = False

    def __post_init__(self) -> None:
        for what in ("at", "times", "calls"):
            require_integer(what, getattr(self, what), least=1)
        require_seconds("seconds", self.seconds)
        if self.error is not None:
            hint = 'Give an error of Tailrace: `StateUnusable("…")`, `SourceUnreachable("…")`.'
            require_instance("error", self.error, TailraceError, hint)

    def __str__(self) -> str:
        return f"{self.kind.value} {self.call}"


def fail(
    call: str, *, at: int = 1, times: int = 1, error: TailraceError | None = None, acted: bool = False
) -> InjectedFault:
    """Return a failing call. `acted`: the request is carried out, and only the answer is lost."""
    return InjectedFault(kind=FaultKind.FAIL, call=call, at=at, times=times, error=error, acted=acted)


def slow(call: str, *, seconds: float, at: int = 1, times: int = 1) -> InjectedFault:
    return InjectedFault(kind=FaultKind.SLOW, call=call, at=at, times=times, seconds=seconds)


def corrupt(call: str, *, at: int = 1, times: int = 1) -> InjectedFault:
    return InjectedFault(kind=FaultKind.CORRUPT, call=call, at=at, times=times)


def lose(call: str, *, at: int = 1, times: int = 1) -> InjectedFault:
    return InjectedFault(kind=FaultKind.LOSE, call=call, at=at, times=times)


def duplicate(call: str, *, at: int = 1, times: int = 1) -> InjectedFault:
    return InjectedFault(kind=FaultKind.DUPLICATE, call=call, at=at, times=times)


def delay(call: str, *, calls: int = 1, at: int = 1, times: int = 1) -> InjectedFault:
    return InjectedFault(kind=FaultKind.DELAY, call=call, at=at, times=times, calls=calls)


class _Schedule:
    """Decides which call has which fault."""

    def __init__(self, faults: tuple[InjectedFault, ...], allowed: dict[FaultKind, tuple[str, ...]]) -> None:
        for fault in faults:
            require_instance("faults", fault, InjectedFault, 'Give `fail("save")`, `lose("read")` or another fault.')
            if fault.call not in allowed[fault.kind]:
                raise ConfigError(
                    f"`{fault.call}` cannot {fault.kind.value}", hint=f"Name one of: {', '.join(allowed[fault.kind])}."
                )
        self._faults, self._calls = faults, Counter[str]()
        self.struck: list[str] = []

    def due(self, call: str) -> InjectedFault | None:
        """Count a call, and return its fault."""
        self._calls[call] += 1
        number = self._calls[call]
        for fault in self._faults:
            if fault.call == call and fault.at <= number < fault.at + fault.times:
                self.struck.append(str(fault))
                if fault.kind is FaultKind.SLOW:
                    time.sleep(fault.seconds)
                    return None
                return fault
        return None


_WRITES, _STORE = ("save", "delete"), ("save", "load", "delete", "list", "all")
_OF_STORES = {
    FaultKind.FAIL: _STORE, FaultKind.SLOW: _STORE, FaultKind.CORRUPT: ("save", "load"),
    FaultKind.LOSE: ("save", "load", "delete"), FaultKind.DUPLICATE: _WRITES, FaultKind.DELAY: _WRITES,
}  # fmt: skip


class FaultyStore:
    """A checkpoint store with faults."""

    def __init__(self, store: CheckpointStore, *faults: InjectedFault) -> None:
        require_methods("store", store, _STORE, "Give the store first: `FaultyStore(MemoryCheckpointStore(), …)`.")
        self._store, self._schedule = store, _Schedule(faults, _OF_STORES)
        self._damaged: set[str] = set()
        self._late: list[tuple[int, Callable[[], object]]] = []

    @property
    def struck(self) -> list[str]:
        return self._schedule.struck

    def save(self, key: str, checkpoint: Checkpoint) -> None:
        fault = self._act("save", lambda: self._store.save(key, checkpoint), None)[1]
        if fault is None or fault.kind is FaultKind.DUPLICATE:
            self._damaged.discard(key)
        elif fault.kind is FaultKind.CORRUPT:
            self._damaged.add(key)

    def load(self, key: str) -> Checkpoint | None:
        checkpoint, fault = self._act("load", lambda: self._store.load(key), None)
        if key in self._damaged or (fault is not None and fault.kind is FaultKind.CORRUPT):
            raise StateCorrupt("a test damaged the checkpoint", key=key, hint="Check the test's faults.")
        return checkpoint

    def delete(self, key: str) -> bool:
        self._damaged.discard(key)
        return self._act("delete", lambda: self._store.delete(key), True)[0]

    def list(self) -> tuple[str, ...]:
        nothing: tuple[str, ...] = ()
        return self._act("list", lambda: tuple(self._store.list()), nothing)[0]

    def all(self) -> dict[str, Checkpoint]:
        nothing: dict[str, Checkpoint] = {}
        return self._act("all", lambda: dict(self._store.all()), nothing)[0]

    def close(self) -> None:
        """Close the store; delayed calls are dropped."""
        self._late.clear()
        close = getattr(self._store, "close", None)
        if callable(close):
            close()

    def _act(self, call: str, act: Callable[[], _T], nothing: _T) -> tuple[_T, InjectedFault | None]:
        self._late = [(calls_left - 1, late) for calls_left, late in self._late]
        for calls_left, late in self._late:
            if calls_left <= 0:
                late()
        self._late = [(calls_left, late) for calls_left, late in self._late if calls_left > 0]
        fault = self._schedule.due(call)
        kind = fault.kind if fault is not None else None
        if fault is not None and kind is FaultKind.FAIL:
            if fault.acted:
                act()
            raise fault.error or StateUnusable("the store fails in a test", hint="Check the test's faults.")
        if fault is not None and kind is FaultKind.DELAY:
            self._late.append((fault.calls, act))
            return nothing, fault
        if kind is FaultKind.LOSE:
            return nothing, fault
        result = act()
        return (act() if kind is FaultKind.DUPLICATE else result), fault


_OF_SOURCES = {
    FaultKind.FAIL: ("live", "read", "confirm"), FaultKind.SLOW: ("live", "read", "confirm"),
    FaultKind.CORRUPT: ("read",), FaultKind.LOSE: ("read", "confirm"),
    FaultKind.DUPLICATE: ("read", "confirm"), FaultKind.DELAY: ("read", "confirm"),
}  # fmt: skip


class FaultySource(Generic[P]):
    """The result of `faulty_source`: the source, with faults in its streams."""

    def __init__(self, source: StreamSource[P], *faults: InjectedFault) -> None:
        require_methods("source", source, ("live",), "Give the source first: `faulty_source(MemoryCapture(), …)`.")
        self._source, self._schedule = source, _Schedule(faults, _OF_SOURCES)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._source, name)

    @property
    def struck(self) -> list[str]:
        return self._schedule.struck

    def live(self, after: P) -> Stream[P]:
        if (fault := self._schedule.due("live")) is not None:
            raise _broken(fault)
        return FaultyStream(self._source.live(after), self._schedule)


def faulty_source(source: StreamSource[P], *faults: InjectedFault) -> FaultySource[P]:
    """Return the source with faults. It keeps all abilities of the source, such as scans and its identity."""
    own = {name for name in dir(type(source)) if not name.startswith("_") and callable(getattr(type(source), name))}
    methods: dict[str, Any] = {name: _forwarding(name) for name in own - set(dir(FaultySource))}
    if isinstance(source, CustomPositionSource):
        methods["beginning"] = source.beginning
    # A runtime checks for methods, not for names, so they have to be in a class.
    faulty: FaultySource[P] = type("FaultySource", (FaultySource,), methods)(source, *faults)
    return faulty


def _forwarding(name: str) -> Callable[..., Any]:
    def call(self: FaultySource[Any], *arguments: Any, **named: Any) -> Any:
        return getattr(self._source, name)(*arguments, **named)

    return call


def _broken(fault: InjectedFault) -> TailraceError:
    return fault.error or SourceUnreachable("the source breaks in a test", hint="Check the test's faults.")


class FaultyStream(Generic[P]):
    """A stream with faults. Only calls of `read` that return a window with rows count."""

    def __init__(self, stream: Stream[P], schedule: _Schedule) -> None:
        self._stream, self._schedule = stream, schedule
        self._failure: TailraceError | None = None
        self._again: deque[Window[P]] = deque()
        self._delayed: tuple[int, Window[P]] | None = None
        self._late: list[tuple[int, P]] = []

    def read(self, after: P, wait_seconds: float) -> Window[P] | None:
        if self._failure is not None:
            raise self._failure
        if self._again:
            return self._again.popleft()
        if self._delayed is not None:
            reads_left, window = self._delayed
            self._delayed = (reads_left - 1, window) if reads_left > 1 else None
            return None if reads_left > 1 else window
        window_read = self._stream.read(after, wait_seconds)
        fault = self._schedule.due("read") if window_read is not None and not window_read.is_empty else None
        if window_read is None or fault is None:
            return window_read
        if fault.kind is FaultKind.DELAY:
            self._delayed = (fault.calls, window_read)
            return None
        if fault.kind is FaultKind.DUPLICATE:
            self._again.append(window_read)
            return window_read
        corrupt = ProtocolViolation("a test damaged the data that was sent", hint="Check the test's faults.")
        self._failure = corrupt if fault.kind is FaultKind.CORRUPT else _broken(fault)
        raise self._failure

    def confirm(self, position: P) -> None:
        if self._failure is not None:
            raise self._failure
        self._late = [(calls_left - 1, late) for calls_left, late in self._late]
        for calls_left, late in self._late:
            if calls_left <= 0:
                self._stream.confirm(late)
        self._late = [(calls_left, late) for calls_left, late in self._late if calls_left > 0]
        fault = self._schedule.due("confirm")
        if fault is None or fault.kind is FaultKind.DUPLICATE:
            self._stream.confirm(position)
        if fault is None or fault.kind is FaultKind.LOSE:
            return
        if fault.kind is FaultKind.DELAY:
            self._late.append((fault.calls, position))
        elif fault.kind is FaultKind.DUPLICATE:
            self._stream.confirm(position)
        else:
            self._failure = _broken(fault)
            raise self._failure

    def close(self) -> None:
        """Close the stream; delayed confirmations are dropped."""
        self._stream.close()
