"""Results as text: a few lines for a terminal, a page for the documentation."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence

from benchmarks.cells import Cell, CellsResult
from benchmarks.measure import Bench, Outcome, Result


def summary(result: Outcome) -> str:
    """Say what a person wants to know of one bench."""
    lines = _cells_lines(result) if isinstance(result, CellsResult) else _rates_lines(result)
    return "\n".join((*lines, f"  measured as ours: {result.setup['ours']}", f"  {_machine(result)}"))


def page(results: Sequence[tuple[Bench, Outcome]], order: Sequence[str], before: str = "") -> str:
    """`docs/benchmarks.md`: all figures on top, then each bench with its rules and its rounds.

    What the page `before` says of benches that were not measured now stays as it is.
    """
    lines, sections = _parse(before)
    for bench, result in results:
        lines[bench.name], sections[bench.name] = _overview_lines(result), _section(bench, result)
    named = [name for name in order if name in sections]
    overview = [
        "| bench | peer | ours | peer's | ratio | spread | must reach | |",
        "|---|---|--:|--:|--:|---|--:|---|",
        *(line for name in named for line in lines[name]),
    ]
    picture = "![A bar for every ratio, with a mark for what it must reach](benchmarks.svg)"
    parts = [
        "# Benchmarks",
        (
            "Written by `make bench`; do not edit. Each figure is the median, over interleaved rounds, of the "
            "ratio between our value and the peer's in the same round. Higher is better for us: where the values "
            "are costs, the ratio is the peer's over ours."
        ),
        picture,
        "\n".join(overview),
        *(sections[name] for name in named),
    ]
    return "\n\n".join(parts) + "\n"


def overview_of(text: str) -> list[str]:
    """The lines of a page's table, in order."""
    return [line for lines in _parse(text)[0].values() for line in lines]


def _parse(text: str) -> tuple[dict[str, list[str]], dict[str, str]]:
    """By bench, its lines in the overview of a page and its section."""
    head, *rest = re.split(r"^## (.+)\n", text, flags=re.MULTILINE)
    sections = {name: f"## {name}\n{body.rstrip()}" for name, body in zip(rest[::2], rest[1::2], strict=True)}
    lines: dict[str, list[str]] = {name: [] for name in sections}
    for line in head.splitlines():
        name = line.strip("| ").partition("|")[0].partition(",")[0].strip()
        if name in lines:
            lines[name].append(line)
    return lines, sections


def _rates_lines(result: Result) -> list[str]:
    low, high = result.spread
    return [
        (
            f"{result.name}: {result.ratio:.2f} × {result.peer_name} (rounds {low:.2f}–{high:.2f}), "
            f"must reach {result.must_reach:g}: {_verdict(result.reached)}{_reduced(result)}"
        ),
        f"  ours {result.ours:,.0f}, {result.peer_name} {result.peer:,.0f} {result.unit}",
        f"  CPU-seconds: {_cpu(result)}",
    ]


def _cells_lines(result: CellsResult) -> list[str]:
    lines = [f"{result.name}: {_verdict(result.reached)}{_reduced(result)}"]
    for cell in result.cells:
        low, high = cell.spread
        lines.append(
            f"  {cell.name}: {cell.ratio:.3f} × {result.peer_name} (rounds {low:.3f}–{high:.3f}), "
            f"{_held_to(cell)}; ours {_value(cell.ours)}, {result.peer_name} {_value(cell.peer)} {cell.unit}"
        )
    return lines


def _overview_lines(result: Outcome) -> list[str]:
    if isinstance(result, CellsResult):
        return [_overview_line(f"{result.name}, {cell.name}", result.peer_name, cell) for cell in result.cells]
    return [_overview_line(result.name, result.peer_name, result)]


def _overview_line(name: str, peer_name: str, figure: Cell | Result) -> str:
    low, high = figure.spread
    return (
        f"| {name} | {peer_name} | {_value(figure.ours)} | {_value(figure.peer)} {figure.unit} "
        f"| **{figure.ratio:.2f}** | {low:.2f}–{high:.2f} | {_limit(figure.must_reach)} "
        f"| {'' if figure.must_reach is None else 'reached' if figure.reached else 'missed'} |"
    )


def _held_to(cell: Cell) -> str:
    return (
        "no limit" if cell.must_reach is None else (f"must reach {_limit(cell.must_reach)}: {_verdict(cell.reached)}")
    )


def _limit(must_reach: float | None) -> str:
    return "–" if must_reach is None else f"{must_reach:.4g}"


def _section(bench: Bench, result: Outcome) -> str:
    setup = [f"{name.replace('_', ' ')}: {value}" for name, value in result.setup.items() if value is not None]
    return "\n\n".join(
        (
            f"## {bench.name}",
            inspect.cleandoc(bench.about),
            f"Run again with `python -m benchmarks {bench.name}`.",
            _cell_rounds(result) if isinstance(result, CellsResult) else _rounds(result),
            f"Machine: {_machine(result)}.",
            f"Set-up: {'; '.join(setup)}.",
        )
    )


def _rounds(result: Result) -> str:
    lines = [
        "| round | ours, wall s | CPU s | server CPU s | peer, wall s | CPU s | server CPU s | ratio |",
        "|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for number, done in enumerate(result.rounds, start=1):
        cells = [
            f"{run.wall_seconds:.2f} | {run.cpu_seconds:.2f} | {_seconds(run.server_cpu_seconds)}"
            for run in (done.ours, done.peer)
        ]
        lines.append(f"| {number} | {' | '.join(cells)} | {done.ratio:.2f} |")
    return "\n".join(lines)


def _cell_rounds(result: CellsResult) -> str:
    lines = ["| cell | round | ours | peer's | | ratio |", "|---|--:|--:|--:|---|--:|"]
    for cell in result.cells:
        lines += [
            f"| {cell.name} | {number} | {_value(pair.ours)} | {_value(pair.peer)} | {cell.unit} "
            f"| {cell.ratio_of(pair):.3f} |"
            for number, pair in enumerate(cell.pairs, start=1)
        ]
    return "\n".join(lines)


def _cpu(result: Result) -> str:
    cpu = result.cpu_seconds()
    return (
        f"ours {_seconds(cpu['ours'])} (server {_seconds(cpu['server_for_ours'])}), "
        f"{result.peer_name} {_seconds(cpu['peer'])} (server {_seconds(cpu['server_for_peer'])})"
    )


def _machine(result: Outcome) -> str:
    about = result.machine
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    return (
        f"{about['cpu']}, {about['cores']} cores, {about['memory_gib']} GiB, {about['kernel']}, log on "
        f"{about['log_filesystem']}, load {about['load_1min_at_start']} at the start; {versions}"
    )


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _value(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _reduced(result: Outcome) -> str:
    return "" if result.scale == 1 else f" (a try at {result.scale:g} of the size, no figure)"


def _verdict(reached: bool) -> str:
    return "reached" if reached else "MISSED"
