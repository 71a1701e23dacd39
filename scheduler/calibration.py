"""How often a drafter is right when it says p: learned from what was accepted."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_BINS = 16
_PRIOR = 4.0  # observations in every bin that take the drafter at its word
_MEMORY = 2000.0  # observations after which an old one counts 1 / e
_SMOOTH = np.array([0.25, 0.5, 0.25])


class Calibration:
    """Maps stated confidences to observed rates: equal bins, each smoothed with its neighbours, linear between their means."""

    def __init__(self) -> None:
        self._weight = np.full(_BINS, _PRIOR)
        self._stated = _PRIOR * (np.arange(_BINS) + 0.5) / _BINS
        self._accepted = self._stated.copy()
        self._stale = True
        self._x = self._y = np.zeros(0)

    def observe(self, stated: Floats, accepted: NDArray[np.bool_]) -> None:
        """Learns from nodes that were reached.

        Args:
            stated: [n], the drafter's confidence in each.
            accepted: [n], whether it was.
        """
        keep = np.exp(-len(stated) / _MEMORY)
        bins = np.minimum((stated * _BINS).astype(np.int64), _BINS - 1)
        prior = _PRIOR * (np.arange(_BINS) + 0.5) / _BINS
        self._weight = _PRIOR + keep * (self._weight - _PRIOR) + np.bincount(bins, minlength=_BINS)
        self._stated = prior + keep * (self._stated - prior) + np.bincount(bins, stated, _BINS)
        self._accepted = prior + keep * (self._accepted - prior) + np.bincount(bins, accepted, _BINS)
        self._stale = True

    def rates(self, stated: Floats) -> Floats:
        """[n]: the rate at which nodes of such confidence are accepted, never decreasing in it; linear between bins."""
        if self._stale:
            weight, mean, rate = (np.convolve(values, _SMOOTH, "same") for values in (self._weight, self._stated, self._accepted))
            # the same smoothing on both axes: a line stays a line
            self._x = mean / weight
            self._y = np.maximum.accumulate(rate / weight)
            self._stale = False
        found: Floats = np.interp(stated, self._x, self._y)
        return found
