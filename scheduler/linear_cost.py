"""Seconds as a non-negative combination of features, learned step by step from a noisy machine."""

from __future__ import annotations

import math
from collections.abc import Sequence

RATE = 0.15
"""Share of an error that one step corrects, at least."""
CLIP = 0.4
"""The most that one slow step is believed, in log seconds: a stall of ten times moves a cost by 6 %, and a machine that is twice as
slow for good is learned within 15 steps."""
_FAST_RATE = 0.5
_NOISE = 0.01  # variance of a step's relative error
_FIRST = 100.0  # how far from its prior a coefficient may lie, as a factor
_UNLIKE = 0.8  # share of the error from which on nothing was known of such a step
_MEASURED = 0.3  # the same for one that was measured


def correction(error: float, num_seen: int, share: float = RATE) -> float:
    """By how much a cost moves, in log seconds.

    A step may stall for any reason, so slow ones are clipped, but none is much faster than it can be: those are believed.

    Args:
        error: log of observed / predicted.
        num_seen: steps seen before; the first ones are averaged and taken whole, for nothing better is known.
        share: of the error to correct, at least.
    """
    if error < -CLIP:
        return _FAST_RATE * error
    return max(share, 1 / (num_seen + 1)) * (min(error, CLIP) if num_seen >= 4 else error)


class LinearCost:
    """seconds = sum of coefficient x feature, by a Kalman filter on relative errors.

    Steps that are all alike are predicted right at once, and steps that differ tell the coefficients apart. In directions that
    were seen often a step still corrects RATE of the error, so that change is followed; what was not seen stays uncertain.
    Plain numbers: there are at most five features, and arrays that small cost more to call than to compute.

    Args:
        prior: coefficients before anything was seen, in seconds.
        measured: the prior was measured, and counts like steps seen.
    """

    def __init__(self, prior: Sequence[float], measured: bool = False) -> None:
        self.coefficients = list(prior)
        self.num_seen = 4 if measured else 0
        size, factor = len(prior), _MEASURED if measured else _FIRST
        # covariance of the coefficients
        self._spread = [[(factor * prior[row]) ** 2 if row == column else 0.0 for column in range(size)] for row in range(size)]

    def predict(self, features: Sequence[float]) -> float:
        return sum([a * x for a, x in zip(self.coefficients, features, strict=True)])

    def scale(self, factor: float) -> None:
        """Everything takes `factor` times as long from now on."""
        if factor != 1.0:
            self.coefficients = [factor * own for own in self.coefficients]
            self._spread = [[factor * factor * own for own in row] for row in self._spread]

    def observe(self, features: Sequence[float], seconds: float) -> None:
        """Learns from one step."""
        predicted = max(self.predict(features), 1e-9)
        error = math.log(max(seconds, 1e-9) / predicted)
        relative = [feature / predicted for feature in features]
        along = [sum([a * x for a, x in zip(row, relative, strict=True)]) for row in self._spread]
        variance = sum([a * x for a, x in zip(along, relative, strict=True)])
        if variance <= 0:
            return
        share = variance / (variance + _NOISE)
        if share > RATE:
            scale = 1 / (variance + _NOISE)
            for row, left in zip(self._spread, along, strict=True):
                for column, right in enumerate(along):
                    row[column] -= scale * left * right
        # a step unlike those before it is believed as the first ones are
        believed_s = predicted * math.exp(correction(error, 0 if share > _UNLIKE else self.num_seen, max(share, RATE)))
        self.num_seen += 1
        step = (believed_s - predicted) / predicted / variance
        moved = [a + step * b for a, b in zip(self.coefficients, along, strict=True)]
        self.coefficients = [max(a, 0.0) for a in moved]
        if min(moved) < 0:  # cutting moved the prediction: scale the others to what is believed
            scale = believed_s / max(self.predict(features), 1e-12)
            self.coefficients = [scale * a for a in self.coefficients]
