"""The code and settings in the guide to transforms work as shown."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tailrace.pipeline.config.settings_file import check_settings, load_settings
from tailrace.transforms.rules import RULE_TYPES

GUIDE = (Path(__file__).parents[3] / "docs" / "guides" / "transforms.md").read_text()
FRAME = "name: shop\nsource: {url: postgresql://a@h/d, tables: ['public.*']}\nlog: ./changes\ntables: {path: ./lake}\n"


def test_the_guides_program_prints_the_shown_output(capsys: pytest.CaptureFixture[str]) -> None:
    program, message = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", GUIDE, re.DOTALL)[0]
    exec(compile(program, "transforms.md", "exec"), {})
    assert capsys.readouterr().out == message


def test_the_function_of_the_guide_works(capsys: pytest.CaptureFixture[str]) -> None:
    function = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)[1]
    exec(compile(function, "transforms.md", "exec"), {})
    assert capsys.readouterr().out == "[{'email': 'example.org'}]\n"


def test_the_guides_settings_are_valid(tmp_path: Path) -> None:
    kinds = []
    for block in re.findall(r"```yaml\n(.*?)```", GUIDE, re.DOTALL):
        file = tmp_path / "tailrace.yaml"
        file.write_text(FRAME + block)
        assert check_settings(file) == []
        kinds.append([rule.do for rule in load_settings(file).transforms.rules])
    assert kinds == [["mask", "encrypt", "filter", "exclude"], ["route", "route", "route", "outbox"]]


def test_the_guide_has_every_rule() -> None:
    table = GUIDE.partition("## What there is")[2].partition("Types are")[0]
    named = " ".join(re.findall(r"^\| (`.*?`) \|", table, re.MULTILINE))
    assert set(re.findall(r"`(\w+)`", named)) - {"do"} == set(RULE_TYPES)
