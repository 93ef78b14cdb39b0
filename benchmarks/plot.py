"""The figures that are held to something, as one picture: a bar for each ratio, a mark for what it must reach.

It is drawn from the table on top of the page, so the two never say different things.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape

_WIDTH, _LEFT, _RIGHT, _ROW, _TOP = 980, 400, 60, 19, 56
_LEAST, _MOST = 0.1, 20.0
_TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20)
_STYLE = """
    text { font: 12px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #12343d; }
    .peer, .tick { fill: #4f6b74; }
    .bar { fill: #2b7a8f; }
    .missed { fill: #b4552d; }
    .must { stroke: #12343d; stroke-width: 2; }
    .grid { stroke: #c5d5da; stroke-width: 1; }
    .even { stroke: #7d959c; stroke-width: 1.4; stroke-dasharray: 4 3; }
    @media (prefers-color-scheme: dark) {
      text { fill: #e6f4f8; }
      .peer, .tick { fill: #9bb7bf; }
      .bar { fill: #5fb3c9; }
      .missed { fill: #e08a5f; }
      .must { stroke: #e6f4f8; }
      .grid { stroke: #2a454e; }
      .even { stroke: #8aa3ab; }
    }
"""


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One line of the table."""

    name: str
    peer: str
    ratio: float
    must_reach: float


def figures(lines: Iterable[str]) -> list[Figure]:
    """Those of a table's lines that must reach something."""
    found = []
    for line in lines:
        name, peer, _, _, ratio, _, must_reach, _ = (cell.strip() for cell in line.strip().strip("|").split("|"))
        if must_reach != "–":
            found.append(Figure(name=name, peer=peer, ratio=float(ratio.strip("*")), must_reach=float(must_reach)))
    return found


def picture(shown: list[Figure]) -> str:
    """An SVG that reads on light and on dark pages."""
    bottom = _TOP + _ROW * len(shown)
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {bottom + 12}" role="img" '
            'aria-labelledby="title description">'
        ),
        '  <title id="title">Every figure that must reach something</title>',
        (
            '  <desc id="description">A bar is our ratio to the peer, longer is better; the mark is what it must '
            "reach. The scale is logarithmic.</desc>"
        ),
        f"  <style>{_STYLE}  </style>",
        f'  <text x="{_LEFT}" y="18">ratio to the peer, higher is better; the mark is what must be reached</text>',
    ]
    for tick in _TICKS:
        x, kind = _across(tick), "even" if tick == 1 else "grid"
        parts.append(f'  <line class="{kind}" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 8}" y2="{bottom}"/>')
        parts.append(f'  <text class="tick" x="{x:.1f}" y="{_TOP - 14}" text-anchor="middle">{tick:g}</text>')
    for number, figure in enumerate(shown):
        parts += _row(figure, _TOP + _ROW * number)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _row(figure: Figure, y: int) -> list[str]:
    middle, end, must = y + _ROW * 0.68, _across(figure.ratio), _across(figure.must_reach)
    kind = "bar" if figure.ratio >= _shown(figure.must_reach) else "bar missed"
    return [
        (
            f'  <text x="{_LEFT - 10}" y="{middle:.1f}" text-anchor="end">{escape(figure.name)} '
            f'<tspan class="peer">· {escape(figure.peer)}</tspan></text>'
        ),
        f'  <rect class="{kind}" x="{_LEFT}" y="{y + 3}" width="{end - _LEFT:.1f}" height="{_ROW - 6}" rx="2"/>',
        f'  <line class="must" x1="{must:.1f}" x2="{must:.1f}" y1="{y + 1}" y2="{y + _ROW - 1}"/>',
        f'  <text x="{max(end, must) + 6:.1f}" y="{middle:.1f}">{figure.ratio:.2f}</text>',
    ]


def _shown(must_reach: float) -> float:
    """As exact as the ratios of the table are: what was just reached must not look missed."""
    return math.floor(must_reach * 100) / 100


def _across(ratio: float) -> float:
    share = math.log(min(max(ratio, _LEAST), _MOST) / _LEAST) / math.log(_MOST / _LEAST)
    return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)
