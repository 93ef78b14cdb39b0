"""Results as text: a few lines for a terminal, a page for the documentation."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

from benchmarks.measure import Bench, Result


def summary(result: Result) -> str:
    """Say what a person wants to know of one bench."""
    low, high = result.spread
    verdict = "reached" if result.reached else "MISSED"
    return "\n".join(
        (
            (
                f"{result.name}: {result.ratio:.2f} × {result.peer_name} (rounds {low:.2f}–{high:.2f}), "
                f"must reach {result.must_reach:g}: {verdict}"
            ),
            f"  ours {result.ours:,.0f}, {result.peer_name} {result.peer:,.0f} {result.unit}",
            f"  CPU-seconds: {_cpu(result)}",
            f"  measured as ours: {result.setup['ours']}",
            f"  {_machine(result)}",
        )
    )


def page(results: Sequence[tuple[Bench, Result]]) -> str:
    """`docs/benchmarks.md`: all figures on top, then each bench with its rules and its rounds."""
    parts = [
        "# Benchmarks",
        (
            "Written by `make bench`; do not edit. Each figure is the median, over interleaved rounds, of the "
            "ratio between our rate and the peer's in the same round. Higher is better for us."
        ),
        f"Measured as ours: {'; '.join(dict.fromkeys(str(result.setup['ours']) for _, result in results))}.",
        _overview([result for _, result in results]),
        *(_section(bench, result) for bench, result in results),
    ]
    return "\n\n".join(parts) + "\n"


def _overview(results: Sequence[Result]) -> str:
    lines = [
        "| bench | peer | ours | peer's | ratio | spread | must reach | |",
        "|---|---|--:|--:|--:|---|--:|---|",
    ]
    for result in results:
        low, high = result.spread
        lines.append(
            f"| {result.name} | {result.peer_name} | {result.ours:,.0f} | {result.peer:,.0f} {result.unit} "
            f"| **{result.ratio:.2f}** | {low:.2f}–{high:.2f} | {result.must_reach:g} "
            f"| {'reached' if result.reached else 'missed'} |"
        )
    return "\n".join(lines)


def _section(bench: Bench, result: Result) -> str:
    setup = [
        f"{name.replace('_', ' ')}: {value}" for name, value in result.setup.items() if value is not None
    ]
    return "\n\n".join(
        (
            f"## {bench.name}",
            inspect.cleandoc(bench.about),
            f"Run again with `python -m benchmarks {bench.name}`.",
            _rounds(result),
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


def _cpu(result: Result) -> str:
    cpu = result.cpu_seconds()
    return (
        f"ours {_seconds(cpu['ours'])} (server {_seconds(cpu['server_for_ours'])}), "
        f"{result.peer_name} {_seconds(cpu['peer'])} (server {_seconds(cpu['server_for_peer'])})"
    )


def _machine(result: Result) -> str:
    about = result.machine
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    return (
        f"{about['cpu']}, {about['cores']} cores, {about['memory_gib']} GiB, {about['kernel']}, log on "
        f"{about['log_filesystem']}, load {about['load_1min_at_start']} at the start; {versions}"
    )


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
