"""How a person sees loads: each while it runs, and in one line when it has ended."""

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
"""Of loads under way, where they are told line by line."""
BUSY = "slower: the source is busy"

_STAGES = {
    "waiting": "waiting for open transactions",
    "landing": "making the commit",
    "replaying": "replaying what was committed meanwhile",
}


# ---- while they run --------------------------------------------------------------------------------------


def running_loads(tables: Sequence[TableStatus]) -> list[tuple[TableStatus, LoadStatus]]:
    """The tables that are being loaded, each with how that stands."""
    return [(table, table.load) for table in tables if table.load is not None]


def rows_under_way(table: TableStatus) -> int:
    """Rows that a load has read and that are not in the table yet."""
    if table.load is None:
        return table.rows_loaded if table.state is TableState.SEEDING else 0
    return 0 if table.load.stage == "replaying" else table.load.rows


def stage_text(load: LoadStatus) -> str:
    """What the load is at, in words."""
    said = _STAGES.get(load.stage, load.stage)
    if load.stage == "waiting" and load.waiting_for:
        said = f"waiting for {load.waiting_for}"
    return f"{said}, {BUSY}" if load.backing_off and load.stage == "reading" else said


def load_fraction(table: TableStatus, load: LoadStatus) -> float:
    """How much of the load is done: by chunks and, inside of them, by the rows that the source expects.

    Only its own end makes it whole, for the estimate may be low.
    """
    by_chunks = load.chunks_done / load.chunks if load.chunks else 0.0
    by_rows = load.rows / table.load_rows_estimated if table.load_rows_estimated else 0.0
    most = (load.chunks_done + 1) / load.chunks if load.chunks > 1 else 1.0
    return min(max(by_chunks, min(by_rows, most)), 0.99)


def load_cell(table: TableStatus) -> ConsoleRenderable:
    """Rows loaded; while they are, how much of the whole that is."""
    load = table.load
    if load is not None:  # its bar stands with the loads
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
    """The loads that are under way, each on one line where there is room for so many only."""
    found = sorted(running_loads(tables), key=lambda pair: pair[1].stage != "reading")
    view = Table(box=SIMPLE_HEAD, pad_edge=False)
    view.add_column("load of", overflow="fold", min_width=10)
    view.add_column("", no_wrap=True)
    view.add_column("progress", overflow="fold")
    for table, load in found[:rows_max]:
        bar = Text("") if load.stage == "replaying" else _bar(load_fraction(table, load))
        said = Text(_figures(table, load), style=_style(load))
        if rows_max is not None:  # of the text, not of the column: a column that may not wrap takes all there is
            said.no_wrap, said.overflow = True, "ellipsis"
        view.add_row(Text(one_line(table.name)), bar, said)
    if rows_max is not None and len(found) > rows_max:
        view.add_row(Text(f"… and {len(found) - rows_max} more", style="dim"))
    return view


def load_lines(tables: Sequence[TableStatus]) -> list[str]:
    """The same, a line each, for where nothing can be redrawn."""
    found = running_loads(tables)
    lines = [f"load of {table.name}: {_figures(table, load)}" for table, load in found[:LINES_MAX]]
    return lines + ([f"… and {len(found) - LINES_MAX} more loads"] if len(found) > LINES_MAX else [])


def _figures(table: TableStatus, load: LoadStatus) -> str:
    """What matters most first: the rest may be cut."""
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
    """Sees statuses, one after the other, and tells which loads have landed in between."""

    def __init__(self) -> None:
        self._told: dict[tuple[str, str], float] = {}
        self.finished: list[TableStatus] = []
        """A table is here as often as it was loaded, each time as it was then."""

    def update(self, tables: Sequence[TableStatus]) -> list[TableStatus]:
        """The tables of which a load has landed since the last look."""
        loaded = [table for table in tables if table.last_load]
        landed = {(table.schema, table.table): table.last_load.landed_at for table in loaded if table.last_load}
        fresh = [table for table in loaded if landed[key := (table.schema, table.table)] != self._told.get(key)]
        self._told |= landed
        self.finished += fresh
        return fresh


def done_json(table: TableStatus) -> dict[str, Any]:
    """The table's last load, for a program."""
    assert table.last_load is not None, "of a table that was loaded"
    return {"schema": table.schema, "table": table.table, **table.last_load.to_json()}


def loaded_line(table: TableStatus) -> str:
    """`loaded public.orders: …`."""
    assert table.last_load is not None, "of a table that was loaded"
    return f"loaded {table.name}: " + " · ".join(_totals(table.last_load))


def loaded_text(loads: Sequence[TableStatus]) -> str:
    """All loads of a command, and their sum where there are several."""
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
