"""The command line of the benches.

    python -m benchmarks --list
    python -m benchmarks NAME [--json] [--rounds 5] [--scale 1] [--write docs/benchmarks.md]
    python -m benchmarks all [--json] [--rounds 5] [--write docs/benchmarks.md]

Results go to stdout, progress to stderr. With `--json` the last line of stdout is one object. `--scale 0.02`
shrinks the work to see whether a bench runs; what comes out is no figure, says so, and cannot be written to a
page. Exit codes:

    0  every figure was reached
    2  the command line was wrong
    3  measured, and at least one figure was missed
    4  at least one bench could not be measured
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import (
    apply,
    end_to_end,
    log_commit,
    log_scan,
    many_tables,
    pg_bigtx,
    pg_copy,
    pg_debezium,
    pg_growth,
    pg_latency,
    pg_mixed,
    pg_oltp,
    pg_snapshot,
    pg_stream,
    pg_types,
    plot,
    report,
    runtime,
    seal,
    snapshot_growth,
    spark_source,
    spark_trigger,
    transforms,
)
from benchmarks.measure import Bench, BenchError, Outcome

BENCHES: tuple[Bench, ...] = (
    pg_stream.BENCH,
    pg_types.BENCH,
    pg_oltp.BENCH,
    pg_mixed.BENCH,
    pg_debezium.BENCH,
    log_commit.BENCH,
    runtime.BENCH,
    pg_latency.BENCH,
    pg_bigtx.BENCH,
    pg_growth.BENCH,
    pg_copy.BENCH,
    pg_snapshot.BENCH,
    snapshot_growth.BENCH,
    seal.BENCH,
    log_scan.BENCH,
    apply.BENCH,
    many_tables.BENCH,
    end_to_end.BENCH,
    spark_source.BENCH,
    spark_trigger.BENCH,
    end_to_end.LARGE,
    transforms.BENCH,
)
ALL = "all"
ASKED_FOR = (end_to_end.LARGE,)
"""Not among `all`: nothing is promised of them, and they take very long."""
ROUNDS = 5
EXIT_REACHED, EXIT_MISSED, EXIT_NOT_MEASURED = 0, 3, 4


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for and return the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.write and options.scale != 1:
        parser.error("--write takes figures, and with --scale there are none")
    if options.list:
        print("\n".join(f"{bench.name:<18}{_title(bench)}" for bench in BENCHES))
        return EXIT_REACHED
    chosen = [
        bench for bench in BENCHES if options.name == bench.name or (options.name == ALL and bench not in ASKED_FOR)
    ]
    results = _run(chosen, options.rounds, options.scale, options.write)
    for _, result in results:
        print(report.summary(result))
    if options.json and results:
        print(json.dumps(_answer(options.name, [result for _, result in results])))
    if len(results) < len(chosen):
        return EXIT_NOT_MEASURED
    return EXIT_REACHED if all(result.reached for _, result in results) else EXIT_MISSED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("name", nargs="?", choices=[*(bench.name for bench in BENCHES), ALL], help="the bench to run")
    what.add_argument("--list", action="store_true", help="name the benches")
    parser.add_argument("--json", action="store_true", help="end with one JSON object on a line of its own")
    parser.add_argument("--rounds", type=_positive, default=ROUNDS, help=f"rounds to measure (default {ROUNDS})")
    parser.add_argument(
        "--scale", type=_fraction, default=1.0, help="shrink the work for a quick try (default 1: in full)"
    )
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the results into a Markdown page")
    return parser


def _run(benches: Sequence[Bench], rounds: int, scale: float, page: Path | None) -> list[tuple[Bench, Outcome]]:
    """Run one after the other; one that cannot be measured is reported and does not stop the rest.

    The page is written after each, so that one who loses patience keeps what was measured; what it says of others
    stays.
    """
    results: list[tuple[Bench, Outcome]] = []
    for bench in benches:
        try:
            results.append((bench, bench.run(rounds, scale)))
        except BenchError as exc:
            print(f"error: {bench.name}: {exc}\nhint: {exc.hint}", file=sys.stderr, flush=True)
        if page is not None and results:
            page.parent.mkdir(parents=True, exist_ok=True)
            before = page.read_text(encoding="utf-8") if page.exists() else ""
            text = report.page(results, [bench.name for bench in BENCHES], before)
            page.write_text(text, encoding="utf-8")
            shown = plot.figures(report.overview_of(text))
            page.with_suffix(".svg").write_text(plot.picture(shown), encoding="utf-8")
    return results


def _answer(name: str, results: Sequence[Outcome]) -> dict[str, Any]:
    """Answer for one bench with itself, for `all` with the one that has the least to spare."""
    if name != ALL:
        return results[0].as_json()
    tightest = min(results, key=_to_spare)
    return {
        **tightest.as_json(),
        "name": ALL,
        "tightest": tightest.name,
        "benches": [result.as_json() for result in results],
    }


def _to_spare(result: Outcome) -> float:
    return math.inf if result.must_reach is None else result.ratio / result.must_reach


def _title(bench: Bench) -> str:
    first_line = bench.about.splitlines()[0]
    limits = ", ".join(f"{limit:.4g} {cell}".strip() for cell, limit in bench.limits.items())
    return f"{first_line.split(': ', 1)[1]} (must reach {limits})" if limits else first_line.split(": ", 1)[1]


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def _fraction(text: str) -> float:
    number = float(text)
    if not 0 < number <= 1:
        raise argparse.ArgumentTypeError("must be above 0 and at most 1")
    return number


if __name__ == "__main__":
    sys.exit(main())
