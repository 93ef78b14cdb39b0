"""Every example runs by itself, from nothing, and prints what its page promises."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import pytest

from tailrace.spark.session.java import find_java
from tests.support.engines import IS_SPARK

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PAGES = ROOT / "docs" / "guides" / "examples"
RUN_SECONDS_MAX = 800.0
pytestmark = [pytest.mark.pg, pytest.mark.skipif(IS_SPARK, reason="examples choose their tables' engine themselves")]

AS_CELLS = """
import json, sys
names = {"__name__": "__main__"}
for cell in json.load(open(sys.argv[1]))["cells"]:
    if cell["cell_type"] == "code":
        exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
"""


def run(*command: str | Path, cwd: Path) -> str:
    """What it printed. Java is found by Spark itself where one is on the path."""
    environment = {
        **os.environ,
        "JAVA_HOME": str(find_java()),
        "PYTHONPATH": f"{ROOT / 'src'}",
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    environment.pop("PYSPARK_PYTHON", None)
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS_MAX,
        check=False,
        env=environment,
        cwd=cwd,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


def rows(said: str) -> list[tuple[str, ...]]:
    """The rows of tables that were printed, by DuckDB or by Spark."""
    lines = [re.split(r"[│|]", line.strip())[1:-1] for line in said.splitlines() if re.match(r"\s*[│|]", line)]
    return [tuple(cell.strip() for cell in line) for line in lines]


def test_the_mirror_loads_and_follows(tmp_path: Path) -> None:
    said = run(EXAMPLES / "lake_mirror.py", cwd=tmp_path)
    assert said.strip() in (PAGES / "lake-mirror.md").read_text()
    loaded, followed = said.split("And followed:")
    assert [row for row in rows(loaded) if row[0].isdigit()] == [(str(i), "new", f"{i}0.00") for i in range(1, 6)]
    assert [row for row in rows(followed) if row[0].isdigit()] == [
        ("1", "paid", "10.00"),
        ("2", "paid", "20.00"),
        ("3", "new", "30.00"),
        ("4", "new", "40.00"),
        ("6", "new", "1.50"),
    ]


def test_the_history_tells_every_version_and_what_it_was(tmp_path: Path) -> None:
    versions, as_of = run(EXAMPLES / "history_table.py", cwd=tmp_path).split("What it was")
    told = [(row[0], row[1], row[-1]) for row in rows(versions) if row[0].isdigit()]
    assert told == [("1", "9.99", "false"), ("2", "20.00", "false"), ("1", "12.49", "false"), ("1", "14.99", "true")]
    assert [row for row in rows(as_of) if row[0].isdigit()] == [("1", "12.49"), ("2", "20.00")]
    page, _, query = (PAGES / "history-table.md").read_text().partition("What it was")
    assert told == [(row[0], row[1], row[-1]) for row in rows(page) if row[0].isdigit()]
    assert as_of.strip() in query


def test_a_foreach_batch_of_ones_own_counts_each_order_once(tmp_path: Path) -> None:
    said = run(EXAMPLES / "foreach_batch.py", cwd=tmp_path)
    assert said in (PAGES / "foreach-batch.md").read_text()
    assert said.split() == [
        *("Two", "transactions", "later:", "ada", "20.49", "grace", "5.50"),
        *("Gone", "on", "where", "it", "stopped:", "ada", "20.49", "grace", "105.50"),
    ]


def test_what_is_masked_stands_in_no_file(tmp_path: Path) -> None:
    said = run(EXAMPLES / "masking.py", cwd=tmp_path)
    assert "'phone': '******00', 'country': 'DE'" in said
    assert re.findall(r"'(\S+)' stands in a file: True", said) == ["Ada"], "the search finds what is there"
    assert said.count("False") == 4
    page = (PAGES / "masking.md").read_text()
    assert said.partition("'Ada' stands")[2] in page
    rules = textwrap.dedent((EXAMPLES / "masking.py").read_text().partition("  rules:\n")[2].partition('"""')[0])
    assert textwrap.indent(rules, "    ").replace("{{", "{").replace("}}", "}") in page


def test_the_cells_of_the_notebook_run_in_order(tmp_path: Path) -> None:
    notebook = json.loads((EXAMPLES / "changes.ipynb").read_text())
    assert (notebook["nbformat"], len({cell["id"] for cell in notebook["cells"]})) == (4, len(notebook["cells"]))
    assert not any(cell.get("outputs") for cell in notebook["cells"]), "kept without what it printed"
    found = rows(run("-c", AS_CELLS, EXAMPLES / "changes.ipynb", cwd=tmp_path))
    changes = [row for row in rows((PAGES / "notebook.md").read_text()) if row[0].isdigit()]
    assert [row[:5] for row in found if len(row) == 6 and row[0].isdigit()] == changes
    assert ("4", "new", "40.00") in found
    assert [row[1:5] for row in found if len(row) == 6 and row[0].isdigit()] == [
        ("update", "1", "paid", "10.00"),
        ("update", "2", "paid", "20.00"),
        ("delete", "3", "NULL", "NULL"),
        ("insert", "5", "new", "1.50"),
    ]
    assert [row for row in found if len(row) == 2 and row[1].isdigit()] == [
        ("delete", "1"),
        ("insert", "1"),
        ("update", "2"),
    ]


def test_every_example_is_named_where_people_look_for_them() -> None:
    listed, page = (EXAMPLES / "README.md").read_text(), (ROOT / "docs" / "guides" / "examples.md").read_text()
    for file in (*EXAMPLES.glob("*.py"), *EXAMPLES.glob("*.ipynb")):
        assert f"({file.name})" in listed, file.name
        assert f"(../../examples/{file.name})" in page, file.name
        own = [text for guide in PAGES.glob("*.md") if f"examples/{file.name})" in (text := guide.read_text())]
        assert len(own) == 1, f"{file.name} has a page of its own"
    built = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["sdist"]
    assert "examples" in built["include"]
