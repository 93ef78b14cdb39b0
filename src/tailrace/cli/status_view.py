"""Show a pipeline to a person: its status, its progress and a summary.

Everything shown comes from the values of `pipeline.report` and nothing else. Names from the database are shown as text:
they can neither style nor control the terminal. Observers write to stderr only and never raise, because a closed
terminal must not stop a pipeline.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Self

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tailrace.cli.load_view import (
    FinishedLoads,
    load_cell,
    load_lines,
    loaded_line,
    loads_view,
    rows_under_way,
    running_loads,
)
from tailrace.cli.log_lines import one_line, redact
from tailrace.cli.output import human_bytes, human_count, human_seconds
from tailrace.pipeline.report import LogStatus, PipelineStatus, Summary, TableState, TableStatus, amplification

PLAIN_SECONDS = 5.0
"""Seconds between two lines where no table can be redrawn."""
PIPED_COLUMNS = 250
"""Width without a screen: enough that no cell is cut."""
LIVE_ROWS_MIN = 3

_STYLES = {
    TableState.LIVE: "green",
    TableState.NEW: "cyan",
    TableState.SEEDING: "cyan",
    TableState.CATCHING_UP: "yellow",
    TableState.REFRESHING: "yellow",
    TableState.PAUSED: "dim",
    TableState.LOADED: "green",
    TableState.FAILED: "bold red",
    TableState.NEEDS_SNAPSHOT: "bold red",
}


# ---- the table -------------------------------------------------------------------------------------------


def headline(status: PipelineStatus) -> str:
    """Return one line about the pipeline as a whole."""
    processes = (("capture", status.capture_pid), ("apply", status.apply_pid))
    pids = [f"{name} pid {pid}" for name, pid in processes if pid]
    state = "running" if status.running else "stopped"
    source = status.source.place if status.source.reachable else f"{status.source.place} (not reachable)"
    parts = [
        f"{status.name}: {state}" + (f" ({', '.join(pids)})" if pids else ""),
        f"source {source}" + (f" at {status.source.position}" if status.source.position else ""),
        _log_part(status.log),
    ]
    if status.source.retained_bytes is not None:
        parts.append(f"kept at the source {human_bytes(status.source.retained_bytes)}")
    if status.merging_share is not None:
        parts.append(f"merging {status.merging_share:.0%} of the time")
    return one_line(" · ".join(parts))


def _log_part(log: LogStatus) -> str:
    size = log.bytes if log.disk_bytes is None else log.disk_bytes
    first = log.first_commit or 1
    kept = human_count(max(0, log.commits - first + 1), "commit")
    return (
        f"log {human_bytes(size)} in {kept}"
        + (f" from {first:,} on" if first > 1 else "")
        + (f" up to {log.position}" if log.position else "")
    )


def tables_view(tables: Sequence[TableStatus], *, rows_max: int | None = None) -> Table:
    """Return the tables; if they are too many, those that need attention first."""
    shown = list(tables)
    if rows_max is not None and len(shown) > rows_max:
        shown = sorted(shown, key=_urgency)[:rows_max]
    view = Table(box=SIMPLE_HEAD, pad_edge=False)
    view.add_column("table", overflow="fold", min_width=10)
    modes = any(table.mode != "mirror" for table in tables)
    if modes:
        view.add_column("mode", no_wrap=True)
    view.add_column("state", no_wrap=True)
    for title in ("loaded", "captured", "applied", "behind", "lag"):
        view.add_column(title, justify="right", no_wrap=True)
    amplified = any(table.write_amplification is not None for table in tables)
    if amplified:
        view.add_column("written", justify="right", no_wrap=True)
    for table in shown:
        view.add_row(
            Text(one_line(table.name)),
            *([Text(table.mode)] if modes else []),
            Text(table.state.value, style=_STYLES[table.state]),
            load_cell(table),
            human_count(table.rows_captured),
            human_count(table.rows_applied),
            human_bytes(table.lag_bytes),
            human_seconds(table.lag_seconds),
            *([_written(table)] if amplified else []),
        )
    if len(shown) < len(tables):
        view.add_row(Text(f"… and {len(tables) - len(shown)} more", style="dim"))
    return view


def _written(table: TableStatus) -> str:
    """Return the bytes written, and how many times the size of the changes that is."""
    if table.write_amplification is None:
        return ""
    return f"{human_bytes(table.bytes_written)} ({table.write_amplification:.1f}×)"


def _urgency(table: TableStatus) -> tuple[bool, bool, int]:
    return not table.state.is_blocked, table.state is TableState.LIVE, -(table.lag_bytes or 0)


def remarks(tables: Sequence[TableStatus]) -> list[str]:
    """Return errors, hints and notes of single tables, one line each, ready to copy."""
    lines = []
    for table in tables:
        if table.state.is_blocked or table.reason or table.detail:
            reason = f" [{table.reason}]" if table.reason else ""
            detail = f": {table.detail}" if table.detail else ""
            lines.append(f"{table.name} is {table.state.value}{reason}{detail}")
        if table.hint:
            lines.append(f"hint for {table.name}: {table.hint}")
        if table.note:
            lines.append(f"note on {table.name}: {table.note}")
    return [redact(one_line(line)) for line in lines]


class PatientConsole(Console):
    """A console that falls silent when its reader has gone.

    Rich itself would end the process and close its stdout.
    """

    def on_broken_pipe(self) -> None:
        self.quiet = True

    @contextlib.contextmanager
    def until_pipe_closes(self) -> Iterator[None]:
        """Print inside this context: once the stream is gone, output is dropped and nothing raises."""
        try:
            yield
        except OSError:
            self.quiet = True


def console_for(*, stream_is_stderr: bool) -> PatientConsole:
    """Return a console as wide as the screen, or wide enough for everything without one."""
    console = PatientConsole(stderr=stream_is_stderr, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = PIPED_COLUMNS
    return console


def print_status(status: PipelineStatus, console: Console) -> None:
    """Print the whole status.

    Remarks are never wrapped, so that SQL in them can be copied.
    """
    console.print(Text(headline(status)), soft_wrap=True)
    if status.tables:
        console.print(tables_view(status.tables))
    else:
        console.print(Text("no tables yet"))
    if running_loads(status.tables):
        console.print(loads_view(status.tables))
    for line in remarks(status.tables):
        console.print(Text(line), soft_wrap=True)


def summary_text(summary: Summary) -> str:
    """Return what the command did, in one line."""
    states = Counter(table.state for table in summary.tables)
    parts = [
        f"{summary.name}: {summary.message or summary.command + ' ended'}",
        human_seconds(summary.seconds),
        human_count(summary.transactions, "transaction"),
        f"{human_count(summary.rows_captured, 'row')} captured",
        *(f"{human_count(count, 'table')} {state.value}" for state, count in states.items()),
    ]
    if (times := amplification(summary.tables)) is not None:
        written = sum(table.bytes_written for table in summary.tables)
        changed = sum(table.bytes_changed for table in summary.tables)
        parts.append(f"{human_bytes(written)} written for {human_bytes(changed)} of changes ({times:.1f}×)")
    return redact(one_line(" · ".join(parts)))


# ---- observers -------------------------------------------------------------------------------------------


class QuietObserver:
    """Shows nothing; errors still reach the person, because they end the command."""

    def __init__(self) -> None:
        self.finished_loads = FinishedLoads()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        pass

    def tick(self, status: PipelineStatus) -> None:
        self.finished_loads.update(status.tables)

    def event(self, text: str, **fields: object) -> None:
        pass


class PlainObserver:
    """Prints a line every few seconds, and one per load, state change and event."""

    def __init__(self, console: PatientConsole, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._due = clock()
        self._states: dict[tuple[str, str], TableState] = {}
        self._lock = threading.Lock()
        self.finished_loads = FinishedLoads()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        pass

    def tick(self, status: PipelineStatus) -> None:
        with self._lock:
            for table in status.tables:
                self._print_change(table)
            for done in self.finished_loads.update(status.tables):
                _print_line(self._console, loaded_line(done))
            if self._clock() >= self._due:
                self._due = self._clock() + PLAIN_SECONDS
                for line in (progress_line(status), *load_lines(status.tables)):
                    _print_line(self._console, line)

    def event(self, text: str, **fields: object) -> None:
        with self._lock:
            _print_line(self._console, event_line(text, fields))

    def _print_change(self, table: TableStatus) -> None:
        key = (table.schema, table.table)
        before = self._states.get(key)
        self._states[key] = table.state
        if before is table.state:
            return
        was = before.value if before else "found"
        _print_line(self._console, f"{table.name}: {was} → {table.state.value}")
        if table.state.is_blocked:
            for line in remarks([table]):
                _print_line(self._console, line)


class LiveObserver:
    """Redraws the table in place on a terminal; events scroll above it."""

    def __init__(self, console: PatientConsole) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, transient=False)
        self._lock = threading.Lock()
        self.finished_loads = FinishedLoads()

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # The terminal may be gone; then there is nothing to restore.
        with self._lock, self._console.until_pipe_closes():
            self._live.stop()

    def tick(self, status: PipelineStatus) -> None:
        with self._lock, self._console.until_pipe_closes():
            for done in self.finished_loads.update(status.tables):
                _print_line(self._console, loaded_line(done))
            self._live.update(live_view(status, rows_fit=self._console.height), refresh=True)

    def event(self, text: str, **fields: object) -> None:
        with self._lock:
            _print_line(self._console, event_line(text, fields))


def live_view(status: PipelineStatus, *, rows_fit: int) -> Group:
    """Return the status cut to a screen: tables, then loads, then remarks."""
    lines = remarks([table for table in status.tables if table.state.is_blocked])
    loads = min(len(running_loads(status.tables)), max(rows_fit // 4, LIVE_ROWS_MIN))
    # Headline, the table's head and rules, the line that counts the rest, and the terminal's cursor line; loads have a
    # head too.
    taken = 7 + min(len(lines), rows_fit // 3) + (loads + 5 if loads else 0)
    rows = max(rows_fit - taken, LIVE_ROWS_MIN)
    cut = [Text(line, no_wrap=True, overflow="ellipsis", style="red") for line in lines[: rows_fit // 3]]
    return Group(
        Text(headline(status), no_wrap=True, overflow="ellipsis"),
        tables_view(status.tables, rows_max=rows) if status.tables else Text("no tables yet"),
        *([loads_view(status.tables, rows_max=loads)] if loads else []),
        *cut,
    )


def progress_line(status: PipelineStatus) -> str:
    """Return the whole pipeline in one line."""
    states = Counter(table.state for table in status.tables)
    behind = [table.lag_bytes for table in status.tables if table.lag_bytes is not None]
    late = [table.lag_seconds for table in status.tables if table.lag_seconds is not None]
    loaded = sum(rows_under_way(table) for table in status.tables)
    parts = [
        ", ".join(f"{count} {state.value}" for state, count in states.items()) or "no tables yet",
        f"captured {human_count(sum(table.rows_captured for table in status.tables), 'row')}",
        f"applied {human_count(sum(table.rows_applied for table in status.tables), 'row')}",
        *([f"loading {human_count(loaded, 'row')}"] if loaded else []),
        *([f"behind {human_bytes(max(behind))}"] if behind else []),
        *([f"lag {human_seconds(max(late))}"] if late else []),
    ]
    return f"{status.name}: " + " · ".join(parts)


def event_line(text: str, fields: dict[str, object]) -> str:
    """Return the fragment and its fields."""
    return " ".join([text, *(f"{name}={value}" for name, value in fields.items())])


def _print_line(console: PatientConsole, line: str) -> None:
    with console.until_pipe_closes():
        console.print(Text(redact(one_line(line))), soft_wrap=True)


def observer_for(*, quiet: bool) -> LiveObserver | PlainObserver | QuietObserver:
    """Return the observer that fits stderr."""
    if quiet:
        return QuietObserver()
    console = console_for(stream_is_stderr=True)
    return LiveObserver(console) if console.is_terminal else PlainObserver(console)
