"""The code that guides show is run as it stands there."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from tailrace.cli.main import main
from tailrace.model.schema import Column
from tests.support.changes import SHOP, delete, insert, move, update
from tests.support.logs import Diary, inserts, seal
from tests.support.windows import named

GUIDES = Path(__file__).parents[2] / "docs" / "guides"
GUIDE = GUIDES / "read-the-log.md"
BLOCKS = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
ELSEWHERE = ("spark.",)
"""What takes a JVM."""

ORDERS = named("public", "orders", 16384)
LATER = replace(ORDERS, columns=(*SHOP.columns, Column(name="extra", source_type="text", type=pa.string())))


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A log at `shop/changes` whose sealed files differ in their columns."""
    monkeypatch.chdir(tmp_path)
    diary = Diary(tmp_path / "shop" / "changes")
    diary.commit(inserts(1, 2, schema=ORDERS))
    seal(diary.path, join=False)
    diary.commit((ORDERS, [*move(1, 11, unchanged=("big",)), update(2, name="x", unchanged=("big",)), delete(11)]))
    seal(diary.path, join=False)
    diary.commit((LATER, [insert(4, extra="e")]))
    seal(diary.path, join=False)
    diary.commit(inserts(5, schema=LATER))
    diary.close()
    return Path(diary.path)


@pytest.mark.parametrize("block", [block for block in BLOCKS if not any(name in block for name in ELSEWHERE)])
def test_the_code_of_the_guide_runs(block: str, log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    exec(compile(block, GUIDE.name, "exec"), names)
    said = capsys.readouterr().out
    if "follow" in block:
        assert said.count("public.orders") == 4, "sealed or not"
        assert "8 insert {'id': 5" in said
    elif "duckdb" in block or "polars" in block:
        assert re.search(r"delete\s*[│┆]\s*2", said)
        assert re.search(r"insert\s*[│┆]\s*4", said)
    else:
        assert len(names["files"]) == 3  # type: ignore[arg-type]


def test_the_guide_has_code_for_each_tool_it_names() -> None:
    assert sum("duckdb" in block for block in BLOCKS) == 1
    assert sum("polars" in block for block in BLOCKS) == 1
    assert sum("spark.read" in block for block in BLOCKS) == 1
    assert sum("ChangeLog" in block for block in BLOCKS) == 2


def test_the_code_of_the_guide_to_the_library_runs_from_top_to_bottom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    page = (GUIDES / "library.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names: dict[str, object] = {}
    for block in blocks:
        if "PostgresCapture" not in block:  # that one takes a server: tests/integration/test_runtime.py
            exec(compile(block, "library.md", "exec"), names)
    said = capsys.readouterr().out
    assert said.startswith("public.orders 2\npublic.orders 1\n3\n")
    assert "delete {'id': 2} None" in said
    assert "['SENT']" in said
    assert "[('shop.orders', 7)] [('numbers'," in said
    assert '"op":"insert"' in said
    assert "\npublic.orders 7\n" in said
    assert said.endswith("running healthy\ninjected\nNone 0 0\n2 1 ['paid']\n")


def test_the_code_of_the_guide_to_checkpoints_runs_from_top_to_bottom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    page = (GUIDES / "checkpoints.md").read_text()
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(compile(block, "checkpoints.md", "exec"), {})
    assert capsys.readouterr().out.splitlines() == [
        "16/B374D848 postgresql-lsn {'rows': 1200}",
        "('invoices',) True",
        "invoices postgresql 16/B374D848",
        "mysql-bin.000042:1547",
        "it keeps every promise",
        "1 create ['id'] []",
        "2 alter ['id', 'total'] ['add']",
        "['id'] 2",
    ]
    listing, seeding, deleting = re.findall(r"`tailrace (checkpoints state/[^`]*)`", page)
    assert [main(command.split()) for command in (listing, deleting, seeding)] == [0, 0, 0]


def test_who_follows_both_guides_in_one_folder_finds_no_checkpoint_of_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for page in ("checkpoints.md", "library.md"):
        first = re.findall(r"```python\n(.*?)```", (GUIDES / page).read_text(), re.DOTALL)[0]
        exec(compile(first, page, "exec"), names)
    assert names["runtime"].rows_committed == 3  # type: ignore[attr-defined] # of the guide


def test_the_code_of_the_guide_to_testing_runs_from_top_to_bottom(capsys: pytest.CaptureFixture[str]) -> None:
    page = (GUIDES / "testing.md").read_text()
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        if "needs a server" not in block:  # that one: tests/integration/test_wire.py
            exec(compile(block, "testing.md", "exec"), names)
    assert capsys.readouterr().out.splitlines() == [
        "[1, 1, 2, 3, 4]",
        "state-unusable",
        "['delay confirm', 'duplicate read'] ['fail save']",
        "it keeps every promise",
    ]
