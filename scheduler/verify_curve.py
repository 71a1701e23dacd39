"""Seconds of the target's forward by its token rows, and what its attention reads and computes: a table, corrected by every step.

The corrections, one per size of the table, one for tokens of KV and one for pairs of those and token rows, are log factors and follow a
Kalman filter. What is taken to move them tells what a step says of sizes that it did not have:

    pace     all sizes together: the machine is busier, or less, than when it was measured
    spread   sizes near each other, up to 64 times as large or small, much less
    local    each size alone, and a little its neighbours, less again: the table's own noise

So a step of twelve rows moves the size of eight as well, for most of the error is the machine's pace, but what the two differ by is
only known once both were seen: `doubt` says how well it is. What is known fades, for a machine changes.
"""

from __future__ import annotations

import math
from bisect import bisect_left

import numpy as np
from numpy.typing import NDArray

from specdec.scheduler.cost_table import CostTable
from specdec.scheduler.linear_cost import RATE, correction

Floats = NDArray[np.float64]

# variances of log factors where nothing was measured; a table divides them by 1 + its weight
_PACE, _SPREAD, _LOCAL, _KV = 4.0, 0.5, 0.5, 4.0
_REACH, _NEAR = 6.0, 0.7  # doublings over which sizes are alike
_FADE = 1e-3  # of what is known beyond a table, per step
_LEAST_WEIGHT = 20  # that it fades to
_NOISE = 0.007  # of a step
_UNLIKE = 0.8  # share of the error from which on nothing was known of such a step
_MEASURED_STEPS = 4  # that a measured table counts for: a stall is not believed from the first step on
_SMALL_SIZES = 4  # of the table, that tell the machine's pace


class VerifyCurve:
    """Predicts and learns the seconds of forwards.

    Args:
        table: to begin with.

    Attributes:
        tokens: the sizes of the table, in token rows, ascending.
        seconds: of each, as corrected; ascending.
        kv_token_s, pair_s: seconds per token of KV read, and per token row and token of KV that it attends to.
        pace: seconds of small forwards over those of the table: the machine may have been slower or faster then.
    """

    def __init__(self, table: CostTable) -> None:
        self._table = table
        self.tokens = list(table.tokens)
        self.seconds = list(table.seconds)
        self.kv_token_s, self.pair_s = table.kv_token_s, table.pair_s
        self.pace = 1.0
        self._num_steps = _MEASURED_STEPS if table.weight else 0
        places = np.log2(self.tokens)
        apart = np.abs(places[:, None] - places)
        reach, near = np.exp(-apart / _REACH), np.exp(-apart / _NEAR)
        size = len(self.tokens) + 2  # the last are KV and pairs
        prior = np.full((size, size), _PACE)
        prior[:-2, :-2] += _SPREAD * reach + _LOCAL * near
        prior[-2:, -2:] += np.diag([_KV, _KV])
        self._covariance = prior / (1 + table.weight)
        self._faded = _FADE / (1 + max(table.weight, _LEAST_WEIGHT)) * prior

    def many_s(self, tokens: Floats | NDArray[np.int64]) -> Floats:
        """Seconds of forwards of so many token rows ([n], at least 1 each, maybe broken) that read no KV; ascending."""
        seconds: Floats = np.interp(tokens, self.tokens, self.seconds)
        seconds += self.slope * np.maximum(tokens - self.tokens[-1], 0)
        return seconds

    def one_s(self, tokens: float, kv_tokens: float = 0.0, pairs: float = 0.0) -> float:
        """The same for one size, which need not be whole, with KV. Plain numbers: an array library takes ten times as long."""
        grid, seconds = self.tokens, self.seconds
        place = bisect_left(grid, tokens)
        if place == len(grid):
            own_s = seconds[-1] + self.slope * (tokens - grid[-1])
        elif grid[place] == tokens:
            own_s = seconds[place]
        else:
            left, left_s = grid[place - 1], seconds[place - 1]
            own_s = left_s + (seconds[place] - left_s) * ((tokens - left) / (grid[place] - left))
        return own_s + self.kv_token_s * kv_tokens + self.pair_s * pairs

    @property
    def slope(self) -> float:
        """Seconds per token row beyond the largest size."""
        if len(self.tokens) < 2:
            return 0.0
        return (self.seconds[-1] - self.seconds[-2]) / (self.tokens[-1] - self.tokens[-2])

    def doubt(self, few: float, many: float) -> float:
        """Standard deviation of the log of what `many` token rows take over what `few` take."""
        apart = self._gradient(many) - self._gradient(few)
        return math.sqrt(max(0.0, float(apart @ self._covariance @ apart)))

    def observe(self, tokens: int, kv_tokens: int, pairs: int, seconds: float) -> None:
        """Learns from a step. The curve stays ascending: the sizes on either side give way to those just seen."""
        gradient = self._gradient(tokens, kv_tokens, pairs)
        along = self._covariance @ gradient
        variance = float(gradient @ along)
        share = variance / (variance + _NOISE)
        is_new = self._table.weight == 0 and share > _UNLIKE
        error = math.log(seconds / self.one_s(tokens, kv_tokens, pairs))
        moved = correction(error, 0 if is_new else self._num_steps, max(share, RATE))
        self._num_steps += 1
        factors = np.exp(along * (moved / variance))
        self._covariance -= np.outer(along, along / (variance + _NOISE))
        self._covariance *= 1 - _FADE
        self._covariance += self._faded
        self.kv_token_s *= float(factors[-2])
        self.pair_s *= float(factors[-1])
        self._seconds_of(np.array(self.seconds) * factors[:-2], tokens)
        small = range(min(_SMALL_SIZES, len(self.seconds)))
        self.pace = math.exp(sum([math.log(self.seconds[index] / self._table.seconds[index]) for index in small]) / len(small))

    def _seconds_of(self, seconds: Floats, tokens: int) -> None:
        """Takes over new seconds, made ascending around the sizes on either side of a step's."""
        right = min(bisect_left(self.tokens, tokens), len(self.tokens) - 1)
        left = right if self.tokens[right] <= tokens or right == 0 else right - 1
        if left != right and seconds[left] > seconds[right]:
            seconds[left] = seconds[right] = math.sqrt(seconds[left] * seconds[right])
        np.maximum.accumulate(seconds[right:], out=seconds[right:])
        below = seconds[left::-1]
        np.minimum.accumulate(below, out=below)
        self.seconds = seconds.tolist()

    def _gradient(self, tokens: float, kv_tokens: float = 0.0, pairs: float = 0.0) -> Floats:
        """[sizes + 2]: by what share of itself a step's time grows with each correction."""
        gradient = np.zeros(len(self.tokens) + 2)
        place = bisect_left(self.tokens, tokens)
        if place == len(self.tokens):
            gradient[-3] = self.one_s(tokens)
        elif place == 0 or self.tokens[place] == tokens:
            gradient[place] = self.seconds[place]
        else:
            left, right = self.tokens[place - 1 : place + 1]
            part = (tokens - left) / (right - left)
            gradient[place - 1] = (1 - part) * self.seconds[place - 1]
            gradient[place] = part * self.seconds[place]
        gradient[-2], gradient[-1] = self.kv_token_s * kv_tokens, self.pair_s * pairs
        return gradient / self.one_s(tokens, kv_tokens, pairs)
