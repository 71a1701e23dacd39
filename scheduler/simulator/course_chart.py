"""The course of simulated runs as an SVG chart: what was drafted, what came of it, and who waited."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.scheduler.simulator.chart import Line, Panel, draw
from specdec.scheduler.simulator.report import Json

_PANELS = (
    ("draft_length", "draft nodes per decoding row"),
    ("tokens_per_s", "tokens/s"),
    ("running", "requests running"),
    ("waiting", "requests waiting"),
    ("kv_used", "share of the KV pool in use"),
    ("predicted_over_observed", "seconds of steps, predicted over observed"),
)


def draw_courses(reports: Sequence[Json]) -> str:
    """One panel per figure, one line per run."""
    return draw(
        [
            Panel(title, "simulated seconds", [Line(report["case"]["policy"], _points(report, key)) for report in reports])
            for key, title in _PANELS
        ]
    )


def _points(report: Json, key: str) -> list[tuple[float, float | None]]:
    return [(interval["end_s"], interval[key]) for interval in report["course"]]
