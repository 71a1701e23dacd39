"""Seconds as a non-negative combination of features, learned step by step from a noisy machine."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

RATE = 0.15
"""Share of an error that one step corrects, at least."""
CLIP = 0.4
"""The most that one slow step is believed, in log seconds: a stall of ten times moves a cost by 6 %, and a machine that is twice as
slow for good is learned within 15 steps."""
_FAST_RATE = 0.5
_NOISE = 0.01  # variance of a step's relative error
_FIRST = 100.0  # how far from its prior a coefficient may lie, as a factor


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

    Args:
        prior: coefficients before anything was seen, in seconds.
    """

    def __init__(self, prior: Sequence[float]) -> None:
        self.coefficients = list(prior)
        self.num_seen = 0
        self._spread = np.diag(np.square(_FIRST * np.array(prior)))  # covariance of the coefficients

    def predict(self, features: Sequence[float]) -> float:
        return sum([a * x for a, x in zip(self.coefficients, features, strict=True)])

    def observe(self, features: Sequence[float], seconds: float) -> None:
        """Learns from one step."""
        predicted = max(self.predict(features), 1e-9)
        error = math.log(max(seconds, 1e-9) / predicted)
        relative = np.array(features) / predicted
        along = self._spread @ relative
        variance = float(relative @ along)
        if variance <= 0:
            return
        share = variance / (variance + _NOISE)
        if share > RATE:
            self._spread -= np.outer(along, along) / (variance + _NOISE)
        believed_s = predicted * math.exp(correction(error, self.num_seen, max(share, RATE)))
        self.num_seen += 1
        moved = np.array(self.coefficients) + along * ((believed_s - predicted) / predicted / variance)
        self.coefficients = np.maximum(moved, 0.0).tolist()
        if moved.min() < 0:  # cutting moved the prediction: scale the others to what is believed
            scale = believed_s / max(self.predict(features), 1e-12)
            self.coefficients = [scale * a for a in self.coefficients]
