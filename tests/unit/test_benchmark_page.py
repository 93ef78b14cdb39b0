"""The page of figures and its picture."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree as ET

from benchmarks import plot, report

DOCS = Path(__file__).resolve().parents[2] / "docs"
REACHED = "| apply, spark | by hand | 7,095 | 6,121 changes/s | **1.16** | 1.16–1.16 | 0.9 | reached |"
MISSED = "| apply, delta-rs | by <hand> | 7,095 | 9,121 changes/s | **0.78** | 0.78–0.78 | 0.9 | missed |"
INFORMATIVE = "| runtime, events() | promised | 142,994 | 5,000,000 rows/s | **0.03** | 0.03–0.03 | – |  |"


def test_only_what_must_reach_something_is_drawn() -> None:
    (shown,) = plot.figures([INFORMATIVE, REACHED])
    assert shown == plot.Figure(name="apply, spark", peer="by hand", ratio=1.16, must_reach=0.9)


def test_a_figure_that_is_missed_looks_so() -> None:
    drawn = ET.fromstring(plot.picture(plot.figures([REACHED, MISSED])))
    bars = drawn.findall("{http://www.w3.org/2000/svg}rect")
    assert [bar.get("class") for bar in bars] == ["bar", "bar missed"]


def test_a_figure_that_is_just_reached_does_not_look_missed() -> None:
    just = "| log-commit | plain file | 5.91 | 1.08 ms | **0.16** | 0.16–0.19 | 0.1667 | reached |"
    assert "missed" not in plot.picture(plot.figures([just])).partition("</style>")[2]


def test_the_picture_in_the_docs_is_that_of_the_page() -> None:
    lines = report.overview_of((DOCS / "benchmarks.md").read_text(encoding="utf-8"))
    assert (DOCS / "benchmarks.svg").read_text(encoding="utf-8") == plot.picture(plot.figures(lines))
