"""The benches of the lake run: at a hundredth of their size, where what they find is no figure."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from benchmarks import end_to_end, ours, report
from benchmarks.__main__ import EXIT_MISSED, EXIT_REACHED, main
from benchmarks.cells import Cell, CellsResult, Pair

CELLS = {
    "apply": ["delta-rs, 1 M rows", "delta-rs, 10 M rows"],
    "many-tables": ["200 tables"],
    "runtime": [
        "batches of 64, checkpoint in memory", "batches of 64, checkpoint in a file",
        "batches of 1,024, checkpoint in memory", "batches of 1,024, checkpoint in a file",
        "batches of 65,536, checkpoint in memory", "batches of 65,536, checkpoint in a file", "events()",
    ],
    "end-to-end": ["keeps up", "p50", "p99"],
    "spark-source": ["1 partition", "2 partitions", "sealed, 1 partition", "sealed, 2 partitions"],
    "spark-trigger": ["p50", "p99", "p50, collected"],
    "transforms": ["hash", "mask", "filter", "encrypt"],
}  # fmt: skip


# The others start Spark: they run where there is time.
RUN = CELLS if os.environ.get("TAILRACE_THOROUGH") else ["runtime", "transforms"]


@pytest.mark.slow
@pytest.mark.parametrize("bench", RUN)
def test_a_bench_measures_every_cell(
    bench: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ours, "SPARK_VENV", tmp_path)  # as if there were none
    assert main([bench, "--rounds", "1", "--scale", "0.01", "--json"]) in (EXIT_REACHED, EXIT_MISSED)
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [cell["name"] for cell in found["cells"]] == CELLS[bench]
    assert all(cell["ours"] > 0 and cell["peer"] > 0 for cell in found["cells"])
    assert found["scale"] == 0.01


def test_a_cell_without_a_limit_is_shown_and_misses_nothing() -> None:
    free = Cell(name="p50", unit="s", must_reach=None, pairs=(Pair(ours=60.0, peer=6.0),))
    limited = Cell(name="p99", unit="s", must_reach=1.0, pairs=(Pair(ours=10.0, peer=15.0),))
    about = {"cpu": "", "cores": 2, "memory_gib": 1, "kernel": "", "log_filesystem": "", "load_1min_at_start": 0}
    result = CellsResult(
        name="end-to-end-large",
        peer_name="limit",
        cells=(free, limited),
        machine={**about, "versions": {}},
        setup={"ours": "this"},
    )
    assert result.reached
    assert result.tightest is limited
    assert "p50: 0.100 × limit (rounds 0.100–0.100), no limit; ours 60" in report.summary(result)
    page = report.page([(end_to_end.LARGE, result)], [result.name])
    assert "| end-to-end-large, p50 | limit | 60 | 6 s | **0.10** | 0.10–0.10 | – |  |" in page
    assert "| end-to-end-large, p99 | limit | 10 | 15 s | **1.50** | 1.50–1.50 | 1 | reached |" in page
