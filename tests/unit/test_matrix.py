"""`make matrix`: what it would run, and that what was skipped is not told as passed."""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from tailrace.spark.session.connectors import CONNECTORS, ICEBERG_CONNECTORS
from tools import engines, matrix
from tools.engines import FAILED, PASSED, SKIPPED

ROOT = Path(__file__).parents[2]
SUPPORT = ROOT / "docs" / "reference" / "support.md"
ICEBERG = ROOT / "docs" / "guides" / "iceberg.md"


def test_every_kind_of_cell_can_be_chosen() -> None:
    assert list(matrix.cells(matrix.KINDS, [15, 18], [])) == [
        "PostgreSQL 15",
        "PostgreSQL 18",
        "Spark 4.2, Delta connector",
        "Spark 4.1, Delta connector",
        "Spark 4.1, Iceberg connector",
        "Spark 4.3, Connect and declarative pipelines",
    ]
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


LEFT_OUT = """
import pytest
@pytest.mark.skip(reason="no jars")
@pytest.mark.parametrize("n", range(2))
def test_it(n):
    pass
"""
WHOLE = "import pytest\npytest.skip('no jars', allow_module_level=True)\n"
FAILS_AS_EXPECTED = "import pytest\n@pytest.mark.xfail\ndef test_it():\n    assert False\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("files", "said"),
    [
        ([LEFT_OUT, WHOLE], f"{SKIPPED}: all 3 tests were skipped, most because: no jars"),
        ([WHOLE, FAILS_AS_EXPECTED], f"{PASSED}, but for 1 of 2 tests that were skipped"),
    ],
)
def test_what_pytest_has_skipped_is_known(tmp_path: Path, files: list[str], said: str) -> None:
    settings = tmp_path / "pytest.ini"
    settings.write_text("[pytest]\n")
    for number, content in enumerate(files):
        (tmp_path / f"test_{number}.py").write_text(content)
    command = [sys.executable, "-m", "pytest", "-q", f"--rootdir={tmp_path}", "-c", str(settings), str(tmp_path)]
    assert engines.verdict([engines.run_tests(command, os.environ)]) == said


def test_an_engine_that_cannot_be_had_is_told_with_its_own_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    says = "import sys; sys.exit('much else\\nunresolved dependency: a#b;1.0')"
    engine = replace(engines.ENGINES["spark"], venv=tmp_path, probe=says)
    # A link to an interpreter has none of the packages of its environment.
    monkeypatch.setattr(engines, "_install", lambda _: True)
    assert engines.held(engine, []) == f"{SKIPPED}: {engine.missing} (unresolved dependency: a#b;1.0)"
    assert "tests/integration/test_spark_engine.py" in capsys.readouterr().err


def ran_core(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ran: engines.Ran) -> tuple[int, str]:
    """Of the Delta connector, where Iceberg's cannot be had: the exit code, and what was printed."""
    missing = {"spark-4.1": "", "iceberg": "no jars"}
    monkeypatch.setattr(engines, "_missing", lambda engine: missing[engine.name])
    monkeypatch.setattr(engines, "_test", lambda engine, tests: ran)
    code = engines.core([])
    said = capsys.readouterr()
    assert "these were not run:\n  tests/contract/test_table_specs.py::" in said.err
    return code, said.out


def test_the_core_tells_of_each_connector_what_passed_or_why_nothing_was_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = ran_core(monkeypatch, capsys, ran(9, 2))
    assert (code, said.splitlines()) == (0, [
        "", "core of the connectors: these follow", "",
        "core of the connectors: Spark 4.1, Delta connector: 7 passed, 2 skipped (no jars) in 0 s",
        f"core of the connectors: Spark 4.1, Iceberg connector: {SKIPPED}: no jars",
    ])  # fmt: skip


def test_a_core_that_fails_fails_the_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = ran_core(monkeypatch, capsys, replace(ran(9, code=1), failed=3))
    assert code == 1
    assert f"Delta connector: {FAILED} (exit code 1), 3 failed, 6 passed in 0 s" in said


def ran(tests: int, skipped: int = 0, code: int = 0) -> engines.Ran:
    return engines.Ran(code=code, tests=tests, reasons=Counter({"no jars": skipped} if skipped else {}))


@pytest.mark.parametrize(
    ("runs", "said"),
    [
        ([ran(9)], PASSED),
        ([ran(2, 2), ran(3, 3, code=5)], f"{SKIPPED}: all 5 tests were skipped, most because: no jars"),
        ([ran(9), ran(3, 3)], f"{PASSED}, but for 3 of 12 tests that were skipped"),
        ([ran(3, 3), ran(9, 8, code=1)], f"{FAILED} (exit code 1)"),
        ([ran(0, code=5)], f"{FAILED}: there was no test to run"),
        ([ran(0, code=5), ran(9)], f"{FAILED}: there was no test to run"),
        ([ran(0, code=4), ran(9, code=1)], f"{FAILED} (exit code 4, 1)"),
    ],
)  # fmt: skip
def test_a_cell_of_which_nothing_was_tested_has_not_passed(runs: list[engines.Ran], said: str) -> None:
    assert engines.verdict(runs) == said


def test_a_cell_that_there_is_not_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert matrix.main(["--only", "sprak", "16"]) == 2
    assert "no such cells: sprak; there are postgres, spark, spark-4.1, iceberg, connect" in capsys.readouterr().err


def test_every_test_that_an_engine_is_held_to_is_there() -> None:
    for engine in engines.ENGINES.values():
        for test in (*engine.tests, *engine.core, *engine.door, *engine.featured, *engine.listed):
            file, _, name = test.partition("::")
            assert f"def {name}(" in (ROOT / file).read_text() or not name, test


def test_the_page_of_what_is_supported_names_every_cell() -> None:
    page = SUPPORT.read_text()
    for kind in matrix.KINDS:
        assert f"`ONLY={kind}`" in page


def cells(page: Path, heading: str) -> list[list[str]]:
    """The cells of the table under a heading, row by row."""
    lines = page.read_text().split(f"# {heading}\n")[1].split("\n#")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]


@pytest.mark.parametrize("heading", ["Spark and the formats of tables", "PostgreSQL", "Where Spark runs"])
def test_a_cell_of_the_page_is_one_that_the_matrix_runs_or_that_nothing_does(heading: str) -> None:
    for row in cells(SUPPORT, heading):
        for cell in filter(None, row[1:]):
            named = re.findall(r"`ONLY=([^`]+)`", cell)
            assert set(named) <= set(matrix.KINDS), row
            assert named or cell in (*cells(SUPPORT, heading)[0], "none", "there is none"), row


def test_what_the_page_says_of_a_connector_is_what_the_connector_is_held_to() -> None:
    head, *rows = cells(SUPPORT, "What connectors are held to")
    assert head[1:] == ["Delta connector, Spark 4.2", "Delta connector, Spark 4.1", "Iceberg connector, Spark 4.1"]
    linked = [(re.findall(r"\]\(../../(tests/[^)]+)\)", what), said) for what, *said in rows]
    assert sum(bool(files) for files, _ in linked) == 6
    for files, said in linked:
        for name, told in zip(("spark", "spark-4.1", "iceberg"), said, strict=True):
            held = {test.partition("::")[0] for test in engines.ENGINES[name].tests}
            assert [file in held for file in files] == [told == "yes"] * len(files), (name, files)


@pytest.mark.parametrize(
    ("page", "heading", "delta", "iceberg"),
    [(SUPPORT, "Spark and the formats of tables", 2, 3), (ICEBERG, "Iceberg tables", 2, 3)],
)
def test_the_pages_name_the_connectors_that_are_fetched_and_no_others(
    page: Path, heading: str, delta: int, iceberg: int
) -> None:
    rows = {re.sub("[^0-9.]", "", row[0]): row for row in cells(page, heading)[1:]}
    assert set(rows) == {"4.1", "4.2", "4.3"}
    for column, connectors in ((delta, CONNECTORS), (iceberg, ICEBERG_CONNECTORS)):
        for line, row in rows.items():
            versions = re.findall(r"`([0-9.]+)`", row[column])
            assert versions == ([connectors[line].rpartition(":")[2]] if line in connectors else []), row
