"""How often a drafter is right when it says p: learned from what was accepted."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

BINS = 16
_PRIOR = 4.0  # observations in every bin that take the drafter at its word
_MEMORY = 2000.0  # observations after which an old one counts 1 / e
_CENTERS = [_PRIOR * (place + 0.5) / BINS for place in range(BINS)]


class Calibration:
    """Maps stated confidences to observed rates: equal bins, each smoothed with its neighbours, linear between their means.

    Attributes:
        numbers: by bin the weight, the sum of what was stated, of what was accepted, and as smoothed means x what was stated and
            y what was accepted: BINS each.
    """

    def __init__(self) -> None:
        self.numbers = array("d", [*[_PRIOR] * BINS, *_CENTERS, *_CENTERS, *[0.0] * (2 * BINS)])
        self._smooth()

    @property
    def line(self) -> array[float]:
        """x, then y of each bin: between them rates are linear."""
        return self.numbers[3 * BINS :]

    def observe(self, stated: Sequence[float], accepted: Sequence[bool]) -> None:
        """Learns from nodes that were reached.

        Args:
            stated: the drafter's confidence in each.
            accepted: whether it was.
        """
        keep, numbers = math.exp(-len(stated) / _MEMORY), self.numbers
        for place, prior in enumerate([*[_PRIOR] * BINS, *_CENTERS, *_CENTERS]):
            numbers[place] = prior + keep * (numbers[place] - prior)
        for confidence, was in zip(stated, accepted, strict=True):
            place = min(int(confidence * BINS), BINS - 1)
            numbers[place] += 1
            numbers[BINS + place] += confidence
            numbers[2 * BINS + place] += was
        self._smooth()

    def rates(self, stated: Floats) -> Floats:
        """[n]: the rate at which nodes of such confidence are accepted, never decreasing in it; linear between bins."""
        line = np.array(self.line)
        found: Floats = np.interp(stated, line[:BINS], line[BINS:])
        return found

    def _smooth(self) -> None:
        """Brings the means up to date."""
        weight, stated, accepted = (_smooth(self.numbers[start : start + BINS]) for start in (0, BINS, 2 * BINS))
        # the same smoothing on both axes: a line stays a line
        x = [own / w for own, w in zip(stated, weight, strict=True)]
        y = accumulate([own / w for own, w in zip(accepted, weight, strict=True)], max)
        self.numbers[3 * BINS :] = array("d", [*x, *y])


def _smooth(values: Sequence[float]) -> list[float]:
    """Each with a quarter of both neighbours."""
    padded = [0.0, *values, 0.0]
    return [0.25 * padded[i] + 0.5 * padded[i + 1] + 0.25 * padded[i + 2] for i in range(len(values))]
