"""Charts as SVG text: panels under each other, each with lines or dots over a common x. Text only, no dependency."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

COLOURS = ("#1f6feb", "#d1495b", "#2e933c", "#e08e0b", "#7b4bb7", "#12908e", "#8a8f98", "#444444")
_WIDTH, _HEIGHT = 760, 210
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 150, 30, 40
_FEWEST_TICKS, _MOST_TICKS = 3, 12


@dataclass(frozen=True)
class Line:
    """Points (x, y) in order of x; where y is None the line is broken. `dots` are not joined, and come in any order."""

    name: str
    points: Sequence[tuple[float, float | None]]
    bold: bool = False
    dots: bool = False


@dataclass(frozen=True)
class Panel:
    """One set of axes.

    Attributes:
        log_x: spaces x by its logarithm, and marks the points' own values where they are few.
        log_y: spaces y by its logarithm.
        height: pixels.
    """

    title: str
    x_label: str
    lines: Sequence[Line]
    log_x: bool = False
    y_from_zero: bool = True
    log_y: bool = False
    height: int = _HEIGHT


def draw(panels: Sequence[Panel]) -> str:
    """The panels as one SVG document."""
    height = sum(panel.height for panel in panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    top = 0
    for panel in panels:
        parts += [f'<g transform="translate(0,{top})">', *_panel(panel), "</g>"]
        top += panel.height
    return "\n".join([*parts, "</svg>", ""])


def _panel(panel: Panel) -> list[str]:
    xs = sorted({x for line in panel.lines for x, _ in line.points})
    ys = [y for line in panel.lines for _, y in line.points if y is not None]
    parts = [f'<text x="{_LEFT}" y="18" font-weight="bold">{escape(panel.title)}</text>']
    if not xs or not ys:
        return parts
    ticks = _log_ticks(min(ys), max(ys)) if panel.log_y else _ticks(0.0 if panel.y_from_zero else min(ys), max(ys))
    low, high = (min(ys), max(ys)) if panel.log_y else (ticks[0], ticks[-1])
    x_axis = _Axis(xs[0], xs[-1], _LEFT, _WIDTH - _RIGHT, panel.log_x)
    y_axis = _Axis(low, high, panel.height - _BOTTOM, _TOP, panel.log_y)
    for tick in ticks:
        y = y_axis.place(tick)
        parts.append(f'<path d="M{_LEFT},{y:.1f}H{_WIDTH - _RIGHT}" stroke="#e3e5e8"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for tick in _x_ticks(xs, panel.log_x):
        if xs[0] <= tick <= xs[-1]:
            parts.append(f'<text x="{x_axis.place(tick):.1f}" y="{panel.height - _BOTTOM + 16}" text-anchor="middle">{tick:g}</text>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    parts.append(f'<text x="{middle:.0f}" y="{panel.height - 8}" text-anchor="middle" fill="#57606a">{escape(panel.x_label)}</text>')
    for place, line in enumerate(panel.lines):
        colour = COLOURS[place % len(COLOURS)]
        width = 3 if line.bold or line.dots else 1.5
        round_ends = ' stroke-linecap="round" stroke-opacity="0.5"' if line.dots else ""
        parts.append(f'<path d="{_path(line, x_axis, y_axis)}" fill="none" stroke="{colour}" stroke-width="{width}"{round_ends}/>')
        y = _TOP + 8 + 16 * place
        parts.append(f'<path d="M{_WIDTH - _RIGHT + 12},{y}h18" stroke="{colour}" stroke-width="{width}"/>')
        parts.append(f'<text x="{_WIDTH - _RIGHT + 36}" y="{y + 4}">{escape(line.name)}</text>')
    return parts


@dataclass(frozen=True)
class _Axis:
    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def place(self, value: float) -> float:
        low, high = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        value = math.log(value) if self.log else value
        share = (value - low) / (high - low) if high > low else 0.5
        return self.start + share * (self.end - self.start)


def _path(line: Line, x_axis: _Axis, y_axis: _Axis) -> str:
    commands, pen = [], "M"
    for x, y in line.points:
        if y is None:
            pen = "M"
            continue
        commands.append(f"{pen}{x_axis.place(x):.1f},{y_axis.place(y):.1f}")
        if line.dots:
            commands.append("h0")
        else:
            pen = "L"
    return "".join(commands)


def _x_ticks(xs: Sequence[float], log: bool) -> Sequence[float]:
    if not log:
        return _ticks(xs[0], xs[-1])
    return xs if len(xs) <= _MOST_TICKS else _log_ticks(xs[0], xs[-1])


def _log_ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten from `low` to `high`; powers alone where those are many, even steps where they are few."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found = [round(factor * 10.0**decade, 10) for decade in decades for factor in (1, 2, 5)]
    within = [tick for tick in found if low <= tick <= high]
    if len(within) < _FEWEST_TICKS:
        return [tick for tick in _ticks(low, high) if low <= tick <= high]
    return within if len(within) <= _MOST_TICKS else [tick for tick in within if math.log10(tick).is_integer()]


def _ticks(low: float, high: float) -> list[float]:
    """Four to nine round numbers from at most `low` to at least `high`."""
    span = high - low or abs(high) or 1.0
    step = 10 ** math.floor(math.log10(span / 4))
    step *= next(factor for factor in (1, 2, 5, 10) if span / (step * factor) <= 7)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(place * step, 10) for place in range(first, max(last, first + 1) + 1)]
