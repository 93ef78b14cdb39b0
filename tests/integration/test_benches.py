"""The benches of the lake run: at a hundredth of their size, where what they find is no figure."""

from __future__ import annotations

import json
import os

import pytest

from benchmarks.__main__ import EXIT_MISSED, EXIT_REACHED, main

CELLS = {
    "apply": ["delta-rs, 1 M rows", "delta-rs, 10 M rows"],
    "many-tables": ["200 tables"],
    "end-to-end": ["keeps up", "p50", "p99"],
}


# many-tables starts Spark twice: it runs where there is time.
RUN = CELLS if os.environ.get("TAILRACE_THOROUGH") else ["apply", "end-to-end"]


@pytest.mark.parametrize("bench", RUN)
def test_a_bench_measures_every_cell(bench: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([bench, "--rounds", "1", "--scale", "0.01", "--json"]) in (EXIT_REACHED, EXIT_MISSED)
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [cell["name"] for cell in found["cells"]] == CELLS[bench]
    assert all(cell["ours"] > 0 and cell["peer"] > 0 for cell in found["cells"])
    assert found["scale"] == 0.01
