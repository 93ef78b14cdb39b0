"""`make matrix`: what it would run, and that what was skipped is not told as passed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import engines, matrix
from tools.engines import FAILED, PASSED, SKIPPED

SUPPORT = Path(__file__).parents[2] / "docs" / "reference" / "support.md"


def test_every_kind_of_cell_can_be_chosen() -> None:
    assert list(matrix.cells(matrix.KINDS, [15, 18], [])) == [
        "PostgreSQL 15", "PostgreSQL 18", "Spark 4.2, Delta connector", "Spark 4.1, Iceberg connector",
        "Spark 4.3, Connect and declarative pipelines",
    ]  # fmt: skip
    assert list(matrix.cells(["iceberg"], [15, 16], [])) == ["Spark 4.1, Iceberg connector"]


def test_the_verdict_of_every_cell_is_printed_and_one_that_failed_is_the_verdict_of_all(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {"spark": f"{SKIPPED}: no jars", "iceberg": f"{FAILED} (exit code 1)", "connect": PASSED}
    monkeypatch.setattr(engines, "held", lambda engine, _: found[engine.name])
    assert matrix.main(["--only", "spark iceberg connect", "--", "-x"]) == 1
    *_, spark, iceberg, connect = capsys.readouterr().out.splitlines()
    assert spark == "  Spark 4.2, Delta connector                    SKIPPED, NOT TESTED: no jars · 0 min"
    assert iceberg.endswith("FAILED (exit code 1) · 0 min")
    assert connect.endswith("  passed · 0 min")
    assert matrix.main(["--only", "spark connect"]) == 0


def test_a_cell_that_there_is_not_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert matrix.main(["--only", "sprak", "16"]) == 2
    assert "no such cells: sprak; there are postgres, spark, iceberg, connect" in capsys.readouterr().err


def test_every_test_that_an_engine_is_held_to_is_there() -> None:
    root = Path(__file__).parents[2]
    for engine in engines.ENGINES.values():
        for test in (*engine.tests, *engine.door, *engine.featured):
            assert (root / test.partition("::")[0]).is_file(), test


def test_the_page_of_what_is_supported_names_every_cell() -> None:
    page = SUPPORT.read_text()
    for kind in matrix.KINDS:
        assert f"`ONLY={kind}`" in page
