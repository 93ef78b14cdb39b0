"""Run the cells of the support matrix: `python -m tools.matrix [--only "postgres spark …"] 15 16 18 -- [pytest's]`.

`postgres` is the tests that talk to a server, on each version of PostgreSQL that is named; `spark`, `spark-4.1`,
`iceberg` and `connect` are those of `tools/engines.py`, each with another Spark or another connector. What cannot be
run on this machine is skipped, and the last lines say so: a skipped cell never counts as a pass. Tests learn the
server's version from TAILRACE_TEST_PG.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from tailrace.demo.server import EmbeddedPostgres
from tailrace.demo.server_binaries import ServerFailed
from tools import engines
from tools.engines import FAILED, SKIPPED, run_tests, verdict

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("tests/contract", "tests/integration", "tests/oracle")
POSTGRES = "postgres"
KINDS = (POSTGRES, *engines.ENGINES)

Cells = dict[str, Callable[[], str]]
"""What runs each, and says what became of it, by what it is called."""


def main(arguments: list[str]) -> int:
    """Run every cell that is asked for; 0 only if each one that could be run passed."""
    split = arguments.index("--") if "--" in arguments else len(arguments)
    named, extra = arguments[:split], arguments[split + 1 :]
    kinds: Sequence[str] = KINDS
    if named[:1] == ["--only"]:
        kinds, named = named[1].split() or KINDS, named[2:]
    if unknown := set(kinds) - set(KINDS):
        print(f"matrix: no such cells: {', '.join(sorted(unknown))}; there are {', '.join(KINDS)}", file=sys.stderr)
        return 2
    verdicts = dict[str, str]()
    for name, run in cells(kinds, [int(text) for text in named], extra).items():
        print(f"\n=== {name} ===", flush=True)
        started = time.monotonic()
        verdicts[name] = f"{run()} · {(time.monotonic() - started) / 60:.0f} min"
    print(table(verdicts), flush=True)
    return 1 if any(verdict.startswith(FAILED) for verdict in verdicts.values()) else 0


def cells(kinds: Sequence[str], versions: Sequence[int], extra: Sequence[str]) -> Cells:
    """The cells of these kinds, in order."""
    found: Cells = {}
    if POSTGRES in kinds:
        for version in versions:
            found[f"PostgreSQL {version}"] = partial(_on_server, version, extra)
    for engine in engines.ENGINES.values():
        if engine.name in kinds:
            found[engine.title] = partial(engines.held, engine, extra)
    return found


def table(verdicts: Mapping[str, str]) -> str:
    """What became of every cell, a line each."""
    width = max(map(len, verdicts), default=0)
    return "\n".join(["\nmatrix:", *(f"  {name:<{width}}  {verdict}" for name, verdict in verdicts.items())])


def _on_server(version: int, extra: Sequence[str]) -> str:
    try:
        EmbeddedPostgres(version=version).bin  # noqa: B018 - asking for it is the question
    except ServerFailed as error:
        return f"{SKIPPED}: {error}"
    folders = [folder for folder in FOLDERS if any((ROOT / folder).rglob("test_*.py"))]
    environment = {**os.environ, "TAILRACE_TEST_PG": str(version)}
    return verdict([run_tests([sys.executable, "-m", "pytest", *folders, *extra], environment)])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
