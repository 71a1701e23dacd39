"""How often a drafter is right when it says p: learned from what was accepted."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_BINS = 16
_PRIOR = 4.0  # observations in every bin that take the drafter at its word
_MEMORY = 2000.0  # observations after which an old one counts 1 / e
_CENTERS = [_PRIOR * (place + 0.5) / _BINS for place in range(_BINS)]


class Calibration:
    """Maps stated confidences to observed rates: equal bins, each smoothed with its neighbours, linear between their means."""

    def __init__(self) -> None:
        self._weight = [_PRIOR] * _BINS
        self._stated = list(_CENTERS)
        self._accepted = list(_CENTERS)
        self._stale = True
        self._x: list[float] = []
        self._y: list[float] = []

    def observe(self, stated: Sequence[float], accepted: Sequence[bool]) -> None:
        """Learns from nodes that were reached.

        Args:
            stated: the drafter's confidence in each.
            accepted: whether it was.
        """
        keep = math.exp(-len(stated) / _MEMORY)
        self._weight = [_PRIOR + keep * (weight - _PRIOR) for weight in self._weight]
        self._stated = [center + keep * (own - center) for own, center in zip(self._stated, _CENTERS, strict=True)]
        self._accepted = [center + keep * (own - center) for own, center in zip(self._accepted, _CENTERS, strict=True)]
        for confidence, was in zip(stated, accepted, strict=True):
            place = min(int(confidence * _BINS), _BINS - 1)
            self._weight[place] += 1
            self._stated[place] += confidence
            self._accepted[place] += was
        self._stale = True

    def rates(self, stated: Floats) -> Floats:
        """[n]: the rate at which nodes of such confidence are accepted, never decreasing in it; linear between bins."""
        self._refresh()
        found: Floats = np.interp(stated, self._x, self._y)
        return found

    def rate(self, stated: float) -> float:
        """The same for one node."""
        self._refresh()
        x, y = self._x, self._y
        place = bisect_right(x, stated)
        if place == 0:
            return y[0]
        if place == _BINS:
            return y[-1]
        left, left_rate = x[place - 1], y[place - 1]
        return left_rate + (y[place] - left_rate) * (stated - left) / (x[place] - left)

    def _refresh(self) -> None:
        if self._stale:
            weight = _smooth(self._weight)
            # the same smoothing on both axes: a line stays a line
            self._x = [own / w for own, w in zip(_smooth(self._stated), weight, strict=True)]
            self._y = list(accumulate([own / w for own, w in zip(_smooth(self._accepted), weight, strict=True)], max))
            self._stale = False


def _smooth(values: list[float]) -> list[float]:
    """Each with a quarter of both neighbours."""
    padded = [0.0, *values, 0.0]
    return [0.25 * padded[i] + 0.5 * padded[i + 1] + 0.25 * padded[i + 2] for i in range(len(values))]
