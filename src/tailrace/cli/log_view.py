"""Show a log and its readers to a person, from the values of `pipeline.report`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.progress import BarColumn, DownloadColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from tailrace.cli.log_lines import one_line
from tailrace.cli.output import human_bytes, human_count, human_seconds
from tailrace.cli.status_view import console_for
from tailrace.pipeline.report import (
    LoggedSchemaVersion,
    LogOverview,
    LogReaderStatus,
    LogSealResult,
    LogTrimResult,
    LogVerifyResult,
)

NONE = "–"
WIDE_COLUMNS = 130
"""Width from which all columns about a reader fit."""
_STYLES = {"live": "green", "expired": "dim", "detached": "bold red"}


def render_text(*parts: RenderableType) -> str:
    """Return the parts as text for stdout.

    Lines are never wrapped, and tables are as wide as the screen.
    """
    console = console_for(stream_is_stderr=False)
    with console.capture() as captured:
        for part in parts:
            console.print(part, soft_wrap=isinstance(part, Text))
    return "\n".join(line.rstrip() for line in captured.get().rstrip("\n").split("\n"))


@contextmanager
def progress_bar(text: str, *, of_bytes: bool) -> Iterator[Callable[[int, int], None]]:
    """Show a bar on stderr while the work runs; nothing without a terminal."""
    console = console_for(stream_is_stderr=True)
    if not console.is_terminal:
        yield lambda done, of: None
        return
    amount = DownloadColumn(binary_units=True) if of_bytes else TaskProgressColumn(show_speed=False)
    columns = (TextColumn(text), BarColumn(), amount, TimeRemainingColumn())
    shown = Progress(*columns, console=console, transient=True)
    task = shown.add_task("", total=None)
    with console.until_pipe_closes():
        shown.start()
    try:
        yield lambda done, of: shown.update(task, completed=done, total=of)
    finally:
        with console.until_pipe_closes():
            shown.stop()


def log_text(log: LogOverview) -> str:
    """Return the whole log as text: its contents, its size and its tables."""
    sizes = (("hot", log.hot_bytes), ("big", log.big_bytes), ("cold", log.cold_bytes))
    lines = [
        f"log {log.path} ({log.id}) of {log.source}",
        _commits(log),
        f"positions {log.start_position or NONE} to {log.end_position or NONE}"
        + (f" · last transaction committed {log.committed_to}" if log.committed_to else ""),
        f"written {log.written_from or NONE} to {log.written_to or NONE}",
        f"on disk {human_bytes(log.bytes)}: " + ", ".join(f"{name} {human_bytes(size)}" for name, size in sizes),
        f"kept for {human_count(log.lake_tables, 'lake table')} and {human_count(log.consumers, 'consumer')}",
    ]
    parts: list[RenderableType] = [Text(one_line(line)) for line in lines]
    return render_text(*parts, _tables_view(log) if log.tables else Text("no tables yet"))


def _commits(log: LogOverview) -> str:
    if log.last_commit is None:
        return "no commits yet"
    kept = (
        f"commits {log.first_commit:,} to {log.last_commit:,}"
        if log.first_commit is not None
        else f"all {log.last_commit:,} commits are trimmed"
    )
    parts = [
        kept + (f", sealed up to {log.sealed_commit:,}" if log.sealed_commit else ", none sealed"),
        f"{human_count(log.rows, 'row')} in {human_count(log.transactions, 'transaction')}",
        *([f"{human_count(log.rows_trimmed, 'row')} trimmed"] if log.rows_trimmed else []),
        *([f"changes missing before commit {', '.join(f'{gap:,}' for gap in log.gaps)}"] if log.gaps else []),
    ]
    return " · ".join(parts)


def _tables_view(log: LogOverview) -> Table:
    view = Table(box=SIMPLE_HEAD, pad_edge=False)
    view.add_column("#", justify="right", no_wrap=True)
    view.add_column("table", overflow="fold", min_width=10)
    for title in ("versions", "rows", "bytes", "files", "commits", "trimmed"):
        view.add_column(title, justify="right", no_wrap=True)
    for table in log.tables:
        commits = f"{table.first_commit:,} to {table.last_commit:,}" if table.first_commit is not None else NONE
        view.add_row(
            str(table.number),
            Text(one_line(table.name), style="" if table.schema else "dim"),
            human_count(table.versions),
            human_count(table.rows),
            human_bytes(table.bytes),
            human_count(table.files),
            commits,
            human_count(table.rows_trimmed),
        )
    return view


def versions_text(versions: Sequence[LoggedSchemaVersion]) -> str:
    """Return every version of every table's schema, with its schema change."""
    if not versions:
        return "no tables yet"
    view = Table(box=SIMPLE_HEAD, pad_edge=False)
    view.add_column("table", overflow="fold", min_width=10)
    for title in ("version", "from position", "committed"):
        view.add_column(title, no_wrap=True)
    view.add_column("what changed", overflow="fold", min_width=20)
    for version in versions:
        view.add_row(
            Text(one_line(version.name)),
            str(version.version),
            version.position or NONE,
            version.committed_at or NONE,
            Text(one_line("; ".join(_changed(version)))),
        )
    return render_text(view)


def _changed(version: LoggedSchemaVersion) -> Iterator[str]:
    definition = version.definition
    if version.version == 1:
        key = ", ".join(definition["key"])
        yield human_count(len(definition["columns"]), "column") + (f", key {key}" if key else ", no key")
    yield from describe_evolution(definition)


def describe_evolution(evolution: dict[str, Any]) -> Iterator[str]:
    """Yield the changes from one schema version to the next, as text."""
    for change in evolution.get("changes", ()):
        yield _CHANGES[change["kind"]](change)
    if evolution.get("rewritten") is True:
        yield "all rows rewritten"
    elif evolution.get("rewritten") == "unknown":
        yield "it is unknown whether older rows changed"


_AT_REST = {"null": "null", "written": "own values", "unknown": "unknown"}
_CHANGES: dict[str, Callable[[dict[str, Any]], str]] = {
    "add": lambda c: f"add {c['column']} {c['now']} (older rows: {_AT_REST.get(c['at_rest'], repr(c.get('value')))})",
    "drop": lambda c: f"drop {c['column']}",
    "rename": lambda c: f"rename {c['was']} to {c['now']}",
    "retype": lambda c: f"retype {c['column']} from {c['was']} to {c['now']}",
    "nullability": lambda c: f"{c['column']} {'may' if c['now'] else 'may not'} be null",
    "default": lambda c: f"default of {c['column']}: {c['now'] or 'none'}",
    "key": lambda c: f"key ({', '.join(c['was'])}) to ({', '.join(c['now'])})",
    "identity": lambda c: f"replica identity {c['was']} to {c['now']}",
    "rename table": lambda c: f"rename the table from {c['was']}",
    "attach": lambda c: f"attach partition {c['now']}",
    "detach": lambda c: f"detach partition {c['was']}",
    "replace": lambda c: f"partition {c['now']} truncated or rewritten",
}


def verdict_text(result: LogVerifyResult) -> str:
    """Return the result of verifying, in one line."""
    verdict = "ok" if result.ok else human_count(result.problems_total, "problem")
    return (
        f"{result.path}: {verdict} · {human_count(result.commits, 'commit')}, {human_count(result.rows, 'row')}, "
        f"{human_count(result.files, 'file')}, {human_bytes(result.bytes)} in {human_seconds(result.seconds)}"
    )


def sealed_text(done: LogSealResult) -> str:
    """Return the result of sealing, in one line."""
    parts = []
    if done.commits:
        parts.append(
            f"sealed {human_count(done.commits, 'commit')} ({human_count(done.rows, 'row')}) into "
            f"{human_bytes(done.bytes)} of Parquet"
        )
    else:
        parts.append("nothing to seal")
    if done.joined:
        parts.append(f"merged {human_count(done.joined, 'small seal')}")
    if done.removed:
        parts.append(f"removed {human_count(done.removed, 'replaced file')}")
    return " · ".join([*parts, human_seconds(done.seconds)])


def trim_text(done: LogTrimResult, file: str) -> str:
    """Return what trimming removed, and which readers hold the rest."""
    lines = ["nothing to trim"]
    if done.files:
        rest = f"begins at commit {done.first_commit:,}" if done.first_commit is not None else "is now empty"
        removed = f"{human_count(done.rows, 'row')} in {human_count(done.files, 'file')} ({human_bytes(done.bytes)})"
        lines = [f"trimmed {removed}; the log {rest}"]
    if done.unsealed_commits:
        unsealed = human_count(done.unsealed_commits, "commit")
        lines.append(f"{unsealed} not sealed yet can be trimmed only after `tailrace log {file} seal`")
    for reader in done.readers:
        if reader.held_bytes:
            lines.append(f"{reader.kind} {reader.name} holds {human_bytes(reader.held_bytes)}")
        elif reader.state != "live":
            lines.append(f"{reader.kind} {reader.name} is {reader.state} and holds nothing")
    return render_text(*(Text(one_line(line)) for line in lines))


def readers_text(readers: Sequence[LogReaderStatus]) -> str:
    """Return the log's readers, with fewer columns on a narrow screen."""
    if not readers:
        return "no lake table or consumer reads this log yet"
    wide = console_for(stream_is_stderr=False).width >= WIDE_COLUMNS
    view = Table(box=SIMPLE_HEAD, pad_edge=False)
    view.add_column("kind", no_wrap=True)
    view.add_column("name", overflow="fold", min_width=8)
    view.add_column("state", no_wrap=True)
    for title in ("commit", "seq", "position") if wide else ():
        view.add_column(title, justify="right", no_wrap=True)
    for title in ("behind", "holds"):
        view.add_column(title, justify="right", no_wrap=True)
    view.add_column("last seen", no_wrap=True)
    if wide:
        view.add_column("expires", no_wrap=True)
        view.add_column("reads", overflow="fold", min_width=6)
    for reader in readers:
        view.add_row(*_cells(reader, wide=wide))
    return render_text(view)


def _cells(reader: LogReaderStatus, *, wide: bool) -> list[RenderableType]:
    behind = human_count(reader.behind_rows, "row") if reader.behind_rows else NONE
    if wide and reader.behind_rows:
        behind += f", {human_count(reader.behind_commits, 'commit')}"
    offset_cells = [human_count(reader.commit), human_count(reader.seq), reader.position or NONE]
    reads = ", ".join(reader.tables) if reader.tables is not None else "everything"
    rest = [_minute(reader.expires_at) if reader.expires_at else "never", Text(one_line(reads))]
    return [
        reader.kind,
        Text(one_line(reader.name)),
        Text(reader.state, style=_STYLES.get(reader.state, "")),
        *(offset_cells if wide else ()),
        behind,
        human_bytes(reader.held_bytes) if reader.held_bytes else NONE,
        _minute(reader.seen_at),
        *(rest if wide else ()),
    ]


def _minute(time: str) -> str:
    return time[:16].replace("T", " ") + "Z"
