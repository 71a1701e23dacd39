"""What a drafter's calls take, from a few of them that were timed before the first request."""

from __future__ import annotations

from collections.abc import Mapping

from specdec.scheduler.cost_model import DraftWork
from specdec.scheduler.linear_cost import LinearCost

_ROWS = 4
_PASSES = 4


def draft_works(depth: int, catch_up: int) -> tuple[DraftWork, ...]:
    """The calls to time: they tell rows, levels and tokens to catch up with apart.

    Args:
        depth: the most levels.
        catch_up: the most tokens to catch up with.
    """
    calls = [(1, 1, 0), (1, depth, 0), (_ROWS, 1, 0), (_ROWS, depth, 0), (1, 1, catch_up), (1, depth, catch_up // 2)]
    return tuple(dict.fromkeys([DraftWork(*call) for call in calls]))


def fit_draft(seconds: Mapping[DraftWork, float]) -> tuple[float, ...]:
    """Seconds of a call per 1, row, level, row x level and token to catch up with, for a `CostTable`."""
    least = max(min(seconds.values()), 1e-9)
    cost = LinearCost((least / 2, least / 20, least / 2, least / 20, least / 1000))
    for _ in range(_PASSES):
        for work, own in seconds.items():
            cost.observe(work.features, own)
    return tuple(cost.coefficients)
