"""The demo: a busy shop in PostgreSQL, mirrored into Delta tables and compared.

It uses the pipeline as any user would, from a settings file, and decides nothing about it. Exit 0 means that every
table equals its source by content. Whatever happens, the server is stopped and no process is left.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import threading
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tailrace.cli import log_lines
from tailrace.cli.status_view import LiveObserver, PlainObserver, QuietObserver, observer_for
from tailrace.demo.compare import TableVerdict, compare
from tailrace.demo.server import EmbeddedPostgres
from tailrace.demo.server_binaries import ServerFailed
from tailrace.demo.shop import Workload
from tailrace.demo.shop_tables import SCHEMA_SQL, TABLES, load_first_rows
from tailrace.errors import ConfigError, ExitCode, TailraceError
from tailrace.model.position import Lsn
from tailrace.pipeline import runner
from tailrace.pipeline.config.settings import PipelineSettings
from tailrace.pipeline.config.settings_file import load_settings
from tailrace.pipeline.report import PipelineStatus, TableState

DATABASE = "shop"
MARKER = ".tailrace-demo"
LIVE_SECONDS_MIN = 10.0
"""The workload runs at least this long after the first load."""
FIRST_LOAD_SECONDS_MAX = 180.0
ACCIDENT_AT_COMMIT = 400
CATCH_UP_SECONDS_MAX = 120.0

SETTINGS = """\
name: shop
source:
  url: {url}
  tables: ["public.*"]
log: ./changes
tables:
  format: delta
  path: ./lake
"""

console = Console(stderr=True, highlight=False)


class Director:
    """Watches the pipeline, and ends workload and pipeline when it is time."""

    def __init__(
        self,
        shown: LiveObserver | PlainObserver | QuietObserver,
        workload: Workload,
        seconds: float,
        *,
        keep: bool,
        server: EmbeddedPostgres,
    ) -> None:
        self.stop = threading.Event()
        self.lag_seconds_max = 0.0
        self.first_change_seconds: float | None = None
        self._shown = shown
        self._workload = workload
        self._server = server
        self._started = time.monotonic()
        self._ends = self._started + seconds
        self._keep = keep
        self._live_since: float | None = None
        self._horizon: Lsn | None = None
        self._caught_up_by = 0.0

    def event(self, text: str, **fields: object) -> None:
        self._shown.event(text, **fields)
        os.environ.pop("TAILRACE_FAILPOINT", None)  # the first capture has it; its successor must not

    def tick(self, status: PipelineStatus) -> None:
        """Show the current state, and decide whether it is the last."""
        self._shown.tick(status)
        now = time.monotonic()
        self._note(status, now)
        if self._workload.failed is not None or any(table.state.is_blocked for table in status.tables):
            self.stop.set()
        elif self._horizon is not None:
            if _caught_up(status, self._horizon) or now > self._caught_up_by:
                self.stop.set()
        elif not self._keep and now >= self._ends and self._long_enough(now):
            self._workload.stop()
            self._horizon = self._end_of_source()
            self._caught_up_by = now + CATCH_UP_SECONDS_MAX
            self.event("workload stopped, catching up", transactions=self._workload.operations)

    def _note(self, status: PipelineStatus, now: float) -> None:
        if status.tables and all(table.state is TableState.LIVE for table in status.tables):
            self._live_since = self._live_since or now
        if self.first_change_seconds is None and any(table.rows_applied for table in status.tables):
            self.first_change_seconds = now - self._started
        if self._live_since is not None and now - self._live_since > LIVE_SECONDS_MIN / 2:
            lags = [table.lag_seconds for table in status.tables if table.lag_seconds is not None]
            self.lag_seconds_max = max([self.lag_seconds_max, *lags])

    def _long_enough(self, now: float) -> bool:
        if self._live_since is None:
            return now - self._started > FIRST_LOAD_SECONDS_MAX
        return now - self._live_since >= LIVE_SECONDS_MIN

    def _end_of_source(self) -> Lsn:
        with self._server.connect(DATABASE) as connection:
            row = connection.execute("select pg_current_wal_flush_lsn()::text").fetchone()
        assert row is not None, "a function returns a row"
        return Lsn.parse(row[0])


def _caught_up(status: PipelineStatus, horizon: Lsn) -> bool:
    reached = status.log.position is not None and Lsn.parse(status.log.position) >= horizon
    return reached and all(
        table.state is TableState.LIVE and table.rows_applied == table.rows_captured for table in status.tables
    )


def main(argv: list[str] | None = None) -> int:
    """Run the demo; return the exit code."""
    arguments = _arguments(argv)
    log_lines.set_up(arguments.log_level)
    try:
        folder = _prepare_folder(arguments.folder)
        console.print("starting an embedded PostgreSQL and loading a small shop…")
        with EmbeddedPostgres() as server:
            return _demo(server, folder, arguments)
    except KeyboardInterrupt:
        console.print("stopped.")
        return ExitCode.INTERRUPTED
    except TailraceError as error:
        console.print(f"error: {error.headline}\nhint: {error.hint}", markup=False)
        return error.exit_code
    except ServerFailed as error:
        console.print(f"error: {error}\nhint: The demo's own server did not start; see the lines above.", markup=False)
        return ExitCode.SOURCE


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make demo", description="A busy shop, mirrored and compared.")
    parser.add_argument("--seconds", type=float, default=40.0, help="how long the shop is busy (default: 40)")
    parser.add_argument("--keep", action="store_true", help="leave it running until Ctrl-C")
    parser.add_argument("--folder", type=Path, default=Path("demo-shop"), help="where log and tables go")
    parser.add_argument("--rate", type=float, default=200.0, help="transactions a second (default: 200)")
    parser.add_argument("--log-level", choices=log_lines.LEVELS, default="warning", help="what is logged to stderr")
    return parser.parse_args(argv)


def _prepare_folder(folder: Path) -> Path:
    """Return an empty folder; only one that an earlier demo created is cleared."""
    folder = folder.absolute()
    if folder.exists() and any(folder.iterdir()):
        if not (folder / MARKER).exists():
            raise ConfigError(
                "the demo's folder is not empty, and no earlier demo created it",
                folder=folder,
                hint="Give another folder with `--folder`.",
            )
        shutil.rmtree(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARKER).touch()
    return folder


def _demo(server: EmbeddedPostgres, folder: Path, arguments: argparse.Namespace) -> int:
    with server.connect() as connection:
        connection.execute(f"CREATE DATABASE {DATABASE}")
    with server.connect(DATABASE) as connection:
        connection.execute(SCHEMA_SQL)
        load_first_rows(connection)
    settings = folder / "tailrace.yaml"
    settings.write_text(SETTINGS.format(url=server.url(DATABASE)))
    workload = Workload(server.url(DATABASE), transactions_per_second=arguments.rate)
    _arm_accident(folder)
    try:
        workload.start()
        _run(load_settings(settings), server, workload, arguments)
        workload.stop()
        verdicts = compare(server.url(DATABASE), folder / "lake", list(TABLES))
    finally:
        workload.stop(raise_error=False)
    return _verdict(verdicts, folder)


def _arm_accident(folder: Path) -> None:
    """Kill the first capture process once, with a window read but not yet durable."""
    os.environ |= {
        "TAILRACE_FAILPOINT": f"log.before_write:{ACCIDENT_AT_COMMIT}",
        "TAILRACE_FAILPOINT_SCOPE": "process",
        "TAILRACE_FAILPOINT_LOG": str(folder / "accidents.txt"),
    }


def _run(
    settings: PipelineSettings, server: EmbeddedPostgres, workload: Workload, arguments: argparse.Namespace
) -> None:
    console.print("on purpose, capture will be killed once while it writes")
    with observer_for(quiet=False) as shown:
        director = Director(shown, workload, arguments.seconds, keep=arguments.keep, server=server)
        try:
            runner.run(settings, until_caught_up=False, observer=director, stop=director.stop)
        except KeyboardInterrupt:
            if not arguments.keep:
                raise
            # With --keep, Ctrl-C ends the demo; the lake is still compared after a catch-up.
            workload.stop()
            runner.run(settings, until_caught_up=True, observer=shown)
    kinds = sum(1 for count in workload.counts.values() if count)
    console.print(f"workload: {workload.operations:,} transactions of {kinds} kinds", markup=False)
    first = director.first_change_seconds
    first_change = f"first change applied after {first:.0f} s" if first is not None else "no change was applied"
    if (settings.file.parent / "accidents.txt").exists():
        console.print("capture was killed once, with a window read and not yet durable; it started again")
    console.print(f"{first_change}; largest lag while live {director.lag_seconds_max:.1f} s", markup=False)


def _verdict(verdicts: list[TableVerdict], folder: Path) -> int:
    view = Table(box=None)
    view.add_column("table", no_wrap=True)
    for heading in ("source rows", "lake rows", "missing", "extra", "differing"):
        view.add_column(heading, justify="right", no_wrap=True)
    view.add_column("verdict", no_wrap=True)
    for found in verdicts:
        numbers = (found.source_rows, found.lake_rows, found.missing, found.extra, found.differing)
        outcome = "[green]equal[/green]" if found.equal else "[red]DIFFERENT[/red]"
        view.add_row(f"{found.schema}.{found.table}", *(f"{n:,}" for n in numbers), outcome)
    out = Console(highlight=False)
    out.print(view)
    if not all(found.equal for found in verdicts):
        out.print("[red]the tables differ from the source[/red]")
        return ExitCode.DIFFERENT
    out.print("[green]every table equals its source[/green], compared by content")
    out.print(f"\nThe tables are in {folder / 'lake'}. Query one with DuckDB, in {sys.executable}:\n", markup=False)
    out.print(
        "  import duckdb; from deltalake import DeltaTable\n"
        f'  orders = DeltaTable("{folder / "lake" / "public" / "orders"}").to_pyarrow_dataset()\n'
        '  duckdb.sql("select status, count(*) from orders group by 1").show()\n',
        markup=False,
        soft_wrap=True,
    )
    out.print("or with Spark, where it has its Delta connector (Spark 4.2 has, 4.3 not yet):\n", markup=False)
    out.print(
        f'  spark.read.format("delta").load("{folder / "lake" / "public" / "orders"}").show()\n',
        markup=False,
        soft_wrap=True,
    )
    return ExitCode.OK
