"""The view of loads: while they run, and when they have ended."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tailrace.cli import load_view, status_view
from tailrace.cli.main import main
from tailrace.errors import ExitCode
from tailrace.pipeline.config.settings import PipelineSettings
from tailrace.pipeline.report import (
    LoadResult,
    LoadStatus,
    LogStatus,
    Observer,
    PipelineStatus,
    SourceStatus,
    Summary,
    TableState,
    TableStatus,
)

READING = LoadStatus(
    stage="reading",
    way="exact",
    mode="replace",
    chunks=40,
    chunks_done=10,
    rows=1_000_000,
    bytes=256 << 20,
    bytes_total=1 << 30,
    seconds=10.0,
    rows_per_second=100_000.4,
    seconds_left=31.0,
)
FIGURES = "1,000,000 rows · 100,000 rows/s · 256.0 MiB of 1.0 GiB · 10 of 40 chunks · exact, replace"


def table(
    name: str, state: TableState = TableState.SEEDING, load: LoadStatus | None = None, **more: Any
) -> TableStatus:
    return TableStatus(schema="public", table=name, state=state, path="/lake", load=load, **more)


def status_of(*tables: TableStatus) -> PipelineStatus:
    return PipelineStatus(
        name="shop",
        running=True,
        source=SourceStatus(reachable=True, place="h"),
        log=LogStatus(path="/log"),
        tables=tables,
    )


def screen(width: int = 200, **options: Any) -> status_view.PatientConsole:
    return status_view.PatientConsole(file=io.StringIO(), width=width, height=30, highlight=False, **options)


def shown(console: status_view.PatientConsole) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


# ---- while they run


@pytest.mark.parametrize(
    ("load", "words"),
    [
        (READING, f"25% · reading · 31 s left · {FIGURES}"),
        (replace(READING, backing_off=True), "25% · reading, slower: the source is busy · 31 s left"),
        (replace(READING, stage="waiting", seconds_left=None), "25% · waiting for open transactions · 1,000,000"),
        (replace(READING, stage="paused", seconds_left=None, backing_off=True), "25% · paused · 1,000,000 rows"),
        (replace(READING, stage="landing", chunks_done=40), "99% · committing"),
        (replace(READING, way="chunked", mode="refresh"), "chunked, refresh"),
        (replace(READING, stage="replaying", chunks=0), "applying changes committed during the load"),
        (replace(READING, stage="of a later version"), "of a later version"),
    ],
)
def test_a_load_shows_its_progress_its_speed_and_what_it_waits_for(load: LoadStatus, words: str) -> None:
    (line,) = load_view.load_lines([table("orders", load=load)])
    assert line.startswith("load of public.orders: ")
    assert words in line
    console = screen()
    status_view.print_status(status_of(table("orders", load=load)), console)
    assert words in shown(console)


def test_progress_counts_rows_for_one_chunk_and_chunks_for_many() -> None:
    one = replace(READING, chunks=1, chunks_done=0, rows=500)
    assert load_view.load_fraction(table("a", load_rows_estimated=1000), one) == 0.5
    assert load_view.load_fraction(table("a", load_rows_estimated=100), one) == 0.99, "the estimate is the server's"
    assert load_view.load_fraction(table("a"), one) == 0.0
    low = table("a", load_rows_estimated=5)
    assert load_view.load_fraction(low, READING) == 11 / 40, "chunks know better than a low estimate"


def test_a_load_has_a_bar_and_a_paused_table_without_a_load_has_none() -> None:
    console = screen()
    tables = [table("orders", load=READING), table("held", TableState.PAUSED), table("b", TableState.LOADED)]
    status_view.print_status(status_of(*tables), console)
    bar = next(line for line in shown(console).splitlines() if "10 of 40 chunks" in line)
    assert bar.split()[:1] == ["public.orders"]
    assert "━" in bar
    assert "25% 1,000,000" in shown(console)
    assert sum("public.held" in line for line in shown(console).splitlines()) == 1


def test_without_loads_none_are_shown() -> None:
    console = screen()
    status_view.print_status(status_of(table("a", TableState.LIVE)), console)
    assert "load of" not in shown(console)


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_many_loads_fit_a_screen(width: int) -> None:
    tables = [table(f"t{number}", load=READING) for number in range(50)]
    console = screen(width)
    console.print(status_view.live_view(status_of(*tables), rows_fit=30))
    lines = shown(console).splitlines()
    assert len(lines) <= 30
    shown_loads = [line for line in lines if "reading" in line]
    assert len(shown_loads) >= 3
    assert all(line.split()[0].startswith("public.t") for line in shown_loads), "one line each"
    assert any("… and" in line for line in lines)


def test_a_waiting_load_shows_what_it_waits_for() -> None:
    waiting = replace(READING, stage="waiting")
    (line,) = load_view.load_lines([table("orders", load=waiting)])
    assert "waiting for open transactions" in line
    (line,) = load_view.load_lines([table("orders", load=replace(waiting, waiting_for="1 open transaction: pid 7"))])
    assert "waiting for 1 open transaction: pid 7" in line


def test_without_a_terminal_each_load_has_a_line_every_few_seconds() -> None:
    console, now = screen(), [0.0]
    observer = status_view.PlainObserver(console, clock=lambda: now[0])
    tables = [table(f"t{number:02d}", load=READING) for number in range(12)]
    for second in range(7):
        now[0] = float(second)
        observer.tick(status_of(*tables))
    lines = shown(console).splitlines()
    assert sum(line.startswith("load of public.t00: 25%") for line in lines) == 2
    assert sum(line == "… and 2 more loads" for line in lines) == 2
    assert sum("loading 12,000,000 rows" in line for line in lines) == 2


# ---- when they have ended


LOADED = LoadResult(
    landed_at=1.0, mode="replace", way="exact", rows=2_000_000, bytes=1 << 30, seconds=12.5, rows_per_second=160_000.0
)


def first_load() -> list[TableStatus]:
    """Return the statuses of a table during its first load, tick by tick."""
    return [
        table("orders", TableState.NEW),
        table("orders", load=replace(READING, chunks_done=0)),
        table("orders", load=replace(READING, seconds=12.5)),
        table("orders", TableState.CATCHING_UP, replace(READING, stage="replaying"), last_load=LOADED),
        table("orders", TableState.LIVE, last_load=LOADED),
    ]


def seen(*ticks: TableStatus) -> list[str]:
    loads = load_view.FinishedLoads()
    return [load_view.loaded_line(done) for tick in ticks for done in loads.update([tick])]


def test_a_finished_load_is_summed_up_once() -> None:
    assert seen(*first_load()) == [
        "loaded public.orders: 2,000,000 rows · 1.0 GiB · 12 s · 160,000 rows/s · exact, replace"
    ]


def test_a_load_between_two_ticks_is_not_missed() -> None:
    first, *_, last = first_load()
    assert len(seen(first, last)) == len(seen(last)) == 1


def test_each_reload_of_a_table_is_summed_up() -> None:
    live = table("orders", TableState.LIVE, last_load=LOADED)
    again = replace(live, state=TableState.REFRESHING, load=replace(READING, stage="landing", mode="refresh"))
    reloaded = replace(live, last_load=replace(LOADED, landed_at=2.0))
    assert len(seen(live, again, live, again, reloaded, reloaded)) == 2


def test_a_cancelled_load_is_not_summed_up() -> None:
    assert seen(table("orders", load=READING), table("orders", TableState.FAILED, reason="value-unfit")) == []
    live = table("orders", TableState.LIVE, last_load=LOADED)
    assert len(seen(live, replace(live, state=TableState.REFRESHING, load=READING), live)) == 1


def test_several_loads_have_a_sum() -> None:
    loads = load_view.FinishedLoads()
    for tick in first_load():
        loads.update([tick, replace(tick, table="others")])
    assert load_view.loaded_text(loads.finished).splitlines()[-1] == "loaded 2 tables: 4,000,000 rows · 2.0 GiB"
    many = load_view.loaded_text(loads.finished * 10).splitlines()
    assert len(many) == load_view.LINES_MAX + 2
    assert many[-2] == "… and 10 more"


class Engine:
    """A pipeline that loads a table while it runs."""

    def run(self, settings: PipelineSettings, *, until_caught_up: bool, observer: Observer, take_over: bool) -> Summary:
        *ticks, last = first_load()
        for tick in ticks[:3]:
            observer.tick(status_of(tick))
        return Summary(name="shop", command="run", seconds=20.0, tables=(last,), message="caught up")

    def __getattr__(self, name: str) -> Any:
        raise NotImplementedError


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "tailrace.yaml"
    path.write_text(
        "name: shop\nsource: {url: postgresql://h/shop, tables: [public.*]}\nlog: ./log\ntables: {path: ./lake}\n"
    )
    return str(path)


def test_a_run_ends_with_what_it_has_loaded(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", file, "--until-caught-up"], engine=Engine()) == ExitCode.OK
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("loaded public.orders: 2,000,000 rows · 1.0 GiB · 12 s")
    assert second.startswith("shop: caught up")


def test_a_run_with_json_lists_what_it_has_loaded(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", file, "--json", "--quiet"], engine=Engine()) == ExitCode.OK
    (load,) = json.loads(capsys.readouterr().out)["loads"]
    assert load == {
        "schema": "public",
        "table": "orders",
        "mode": "replace",
        "way": "exact",
        "rows": 2_000_000,
        "bytes": 1 << 30,
        "seconds": 12.5,
        "rows_per_second": 160_000.0,
        "landed_at": 1.0,
    }


def test_the_status_with_json_has_the_loads() -> None:
    data = status_of(table("orders", load=READING)).to_json()
    assert json.loads(json.dumps(data)) == data
    assert data["tables"][0]["load"]["chunks_done"] == 10
    assert data["tables"][0]["load"]["rows_per_second"] == 100_000.4
