"""Bars on a logarithmic axis of time, as an SVG of our own: one group of bars a class of jobs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

__all__ = ["Group", "plot"]

_COLOURS: Final = ("#0072b2", "#e69f00", "#666666")  # told apart by the colour-blind too
_TICKS: Final = ((1, "1 s"), (10, "10 s"), (60, "1 min"), (600, "10 min"), (3600, "1 h"), (36_000, "10 h"))
_LEFT, _TOP, _WIDTH, _BAR, _GAP = 110, 64, 560, 11, 12


@dataclass(frozen=True, slots=True)
class Group:
    """A class of jobs: for each series its (bar, line) in seconds."""

    name: str
    values: Sequence[tuple[float, float]]


def plot(title: str, series: Sequence[str], groups: Sequence[Group]) -> str:
    """The whole file. What is below a second is drawn as a second."""
    step = len(series) * _BAR + _GAP
    bottom = _TOP + step * len(groups)
    size = f'width="{_LEFT + _WIDTH + 30}" height="{bottom + 30}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="#fff"/>',
        f'<text x="10" y="20" font-size="14">{escape(title)}</text>',
    ]
    for place, name in enumerate(series):
        x = _LEFT + place * 170
        parts.append(f'<rect x="{x}" y="34" width="12" height="12" fill="{_COLOURS[place]}"/>')
        parts.append(f'<text x="{x + 17}" y="44">{escape(name)}</text>')
    for secs, text in _TICKS:
        x = _x(secs)
        parts.append(f'<line x1="{x}" y1="{_TOP - 6}" x2="{x}" y2="{bottom}" stroke="#ddd"/>')
        parts.append(f'<text x="{x}" y="{bottom + 16}" text-anchor="middle">{text}</text>')
    for row, group in enumerate(groups):
        y = _TOP + row * step
        middle = y + len(series) * _BAR / 2 + 4
        parts.append(f'<text x="{_LEFT - 8}" y="{middle}" text-anchor="end">{escape(group.name)}</text>')
        for place, (bar, line) in enumerate(group.values):
            parts.extend(_bar(y + place * _BAR, bar, line, _COLOURS[place]))
    return "\n".join([*parts, "</svg>", ""])


def _x(secs: float) -> float:
    decades = math.log10(_TICKS[-1][0])
    return round(_LEFT + _WIDTH * min(math.log10(max(secs, 1.0)) / decades, 1.0), 1)


def _bar(y: int, bar: float, line: float, colour: str) -> list[str]:
    left, end, far = _x(1), _x(bar), _x(line)
    middle = y + _BAR / 2
    return [
        f'<rect x="{left}" y="{y + 1}" width="{round(end - left, 1)}" height="{_BAR - 2}" fill="{colour}"/>',
        f'<line x1="{end}" y1="{middle}" x2="{far}" y2="{middle}" stroke="{colour}"/>',
        f'<line x1="{far}" y1="{y + 2}" x2="{far}" y2="{y + _BAR - 2}" stroke="{colour}" stroke-width="2"/>',
    ]
