"""Show loads to a person: each while it runs, and one line at its end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import ConsoleRenderable
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tailrace.cli.log_lines import one_line
from tailrace.cli.output import human_bytes, human_count, human_rate, human_seconds
from tailrace.pipeline.report import LoadResult, LoadStatus, TableState, TableStatus

BAR_COLUMNS = 16
LINES_MAX = 10
"""Running loads to print, where they are printed line by line."""
BUSY = "slower: the source is busy"

_STAGES = {
    "waiting": "waiting for open transactions",
    "landing": "committing",
    "replaying": "applying changes committed during the load",
}


# ---- while they run --------------------------------------------------------------------------------------


def running_loads(tables: Sequence[TableStatus]) -> list[tuple[TableStatus, LoadStatus]]:
    """Return the tables that are being loaded, each with its load."""
    return [(table, table.load) for table in tables if table.load is not None]


def rows_under_way(table: TableStatus) -> int:
    """Return the rows that a load has read and not yet committed."""
    if table.load is None:
        return table.rows_loaded if table.state is TableState.SEEDING else 0
    return 0 if table.load.stage == "replaying" else table.load.rows


def stage_text(load: LoadStatus) -> str:
    """Return the stage of the load as text."""
    text = _STAGES.get(load.stage, load.stage)
    if load.stage == "waiting" and load.waiting_for:
        text = f"waiting for {load.waiting_for}"
    return f"{text}, {BUSY}" if load.backing_off and load.stage == "reading" else text


def load_fraction(table: TableStatus, load: LoadStatus) -> float:
    """Return the fraction of the load that is done, by chunks and rows.

    Rows count within the running chunks. It stays below 1 until the load ends, because the estimated row count may be
    low.
    """
    by_chunks = load.chunks_done / load.chunks if load.chunks else 0.0
    by_rows = load.rows / table.load_rows_estimated if table.load_rows_estimated else 0.0
    most = (load.chunks_done + 1) / load.chunks if load.chunks > 1 else 1.0
    return min(max(by_chunks, min(by_rows, most)), 0.99)


def load_cell(table: TableStatus) -> ConsoleRenderable:
    """Return the rows loaded and, during a load, the fraction of the whole."""
    load = table.load
    if load is not None:  # its bar is in the list of loads
        rows = human_count(load.rows)
        return Text(rows if load.stage == "replaying" else f"{load_fraction(table, load):.0%} {rows}")
    if table.state not in (TableState.SEEDING, TableState.REFRESHING):
        return Text(human_count(table.rows_loaded))
    if not table.load_rows_estimated:
        return Text(f"{human_count(table.rows_loaded)} …")
    done = min(table.rows_loaded / table.load_rows_estimated, 0.99)
    cell = Table.grid(padding=(0, 1))
    cell.add_row(_bar(done), Text(f"{done:.0%}"), Text(human_count(table.rows_loaded)))
    return cell


def loads_view(tables: Sequence[TableStatus], *, rows_max: int | None = None) -> Table:
    """Return the running loads, each on one line where only some rows fit."""
    loads = sorted(running_loads(tables), key=lambda pair: pair[1].stage != "reading")
    view = Table(box=SIMPLE_HEAD, pad_edge=False)
    view.add_column("load of", overflow="fold", min_width=10)
    view.add_column("", no_wrap=True)
    view.add_column("progress", overflow="fold")
    for table, load in loads[:rows_max]:
        bar = Text("") if load.stage == "replaying" else _bar(load_fraction(table, load))
        text = Text(_figures(table, load), style=_style(load))
        if rows_max is not None:  # set on the text: a column without wrapping would take the whole width
            text.no_wrap, text.overflow = True, "ellipsis"
        view.add_row(Text(one_line(table.name)), bar, text)
    if rows_max is not None and len(loads) > rows_max:
        view.add_row(Text(f"… and {len(loads) - rows_max} more", style="dim"))
    return view


def load_lines(tables: Sequence[TableStatus]) -> list[str]:
    """Return the running loads, a line each, for output that cannot be redrawn."""
    loads = running_loads(tables)
    lines = [f"load of {table.name}: {_figures(table, load)}" for table, load in loads[:LINES_MAX]]
    return lines + ([f"… and {len(loads) - LINES_MAX} more loads"] if len(loads) > LINES_MAX else [])


def _figures(table: TableStatus, load: LoadStatus) -> str:
    """Return the figures of a load, the most important first.

    The rest may be cut off.
    """
    if load.stage == "replaying":
        return stage_text(load)
    parts = [
        f"{load_fraction(table, load):.0%}",
        stage_text(load),
        *([f"{human_seconds(load.seconds_left)} left"] if load.seconds_left is not None else []),
        human_count(load.rows, "row"),
        human_rate(load.rows_per_second),
        f"{human_bytes(load.bytes)} of {human_bytes(load.bytes_total)}",
        f"{load.chunks_done:,} of {human_count(load.chunks, 'chunk')}",
        f"{load.way}, {load.mode}",
    ]
    return " · ".join(parts)


def _bar(done: float) -> ProgressBar:
    return ProgressBar(total=1.0, completed=done, width=BAR_COLUMNS)


def _style(load: LoadStatus) -> str:
    return "dim" if load.stage == "paused" else "yellow" if load.backing_off else ""


# ---- when they have ended --------------------------------------------------------------------------------


class FinishedLoads:
    """Finds the loads that have ended, in a series of statuses."""

    def __init__(self) -> None:
        self._reported: dict[tuple[str, str], float] = {}
        self.finished: list[TableStatus] = []
        """One entry per load: the table's status when that load had ended."""

    def update(self, tables: Sequence[TableStatus]) -> list[TableStatus]:
        """Return the tables whose load has ended since the last status."""
        loaded = [table for table in tables if table.last_load]
        ended = {(table.schema, table.table): table.last_load.landed_at for table in loaded if table.last_load}
        fresh = [table for table in loaded if ended[key := (table.schema, table.table)] != self._reported.get(key)]
        self._reported |= ended
        self.finished += fresh
        return fresh


def done_json(table: TableStatus) -> dict[str, Any]:
    """Return the table's last load as JSON values."""
    assert table.last_load is not None, "a loaded table"
    return {"schema": table.schema, "table": table.table, **table.last_load.to_json()}


def loaded_line(table: TableStatus) -> str:
    """Return `loaded public.orders: …`."""
    assert table.last_load is not None, "a loaded table"
    return f"loaded {table.name}: " + " · ".join(_totals(table.last_load))


def loaded_text(loads: Sequence[TableStatus]) -> str:
    """Return all loads of a command, and their sum if there are several."""
    lines = [loaded_line(table) for table in loads[:LINES_MAX]]
    if len(loads) > LINES_MAX:
        lines.append(f"… and {len(loads) - LINES_MAX} more")
    if len(loads) > 1:
        all_of_them = [table.last_load for table in loads if table.last_load]
        rows, size = sum(done.rows for done in all_of_them), sum(done.bytes for done in all_of_them)
        lines.append(f"loaded {human_count(len(loads), 'table')}: {human_count(rows, 'row')} · {human_bytes(size)}")
    return "\n".join(one_line(line) for line in lines)


def _totals(done: LoadResult) -> list[str]:
    return [
        human_count(done.rows, "row"),
        human_bytes(done.bytes),
        human_seconds(done.seconds),
        human_rate(done.rows_per_second),
        f"{done.way}, {done.mode}",
    ]
