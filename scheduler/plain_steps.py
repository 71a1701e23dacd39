"""Steps without drafts, now and then, where it is not certain that drafting pays: so what it is compared with is measured too.

Where every step drafts, what a step without drafts takes is only predicted, from a table that may have been measured on a busier
machine. The `doubt` about the quotient of both goes against what drafting brings: drafts that bring far more than could be
mistaken are never left out, and those that bring 2 % are, one step in 16, until the quotient is known to within 1 %.
"""

from __future__ import annotations

import math

from specdec.scheduler.verify_curve import VerifyCurve

EVERY = 16
"""Steps with drafts between two without, at least."""
_RATE = 0.1
_DEVIATIONS = 2.0


class PlainSteps:
    """Follows what drafting brings, and says when a step without drafts is due."""

    def __init__(self) -> None:
        self._advantage: float | None = None  # log of tokens per second over that without drafts, as predicted, of the last steps
        self._drafted_steps = 0  # since the last one without drafts
        self._nodes = 0
        self._verify_share = 1.0  # of a step's time

    def is_due(self, curve: VerifyCurve, tokens: int) -> bool:
        """Whether the next step, of so many token rows, should have no drafts."""
        if self._drafted_steps < EVERY or self._advantage is None:
            return False
        doubt = self._verify_share * curve.doubt(tokens, tokens + self._nodes)
        return _DEVIATIONS * doubt > self._advantage

    def observe(self, nodes: int, emitted: float, total_s: float, verify_s: float, drafting_s: float) -> None:
        """Learns from a step in which all rows decode.

        Args:
            nodes: verified; 0 for a step without drafts.
            emitted: tokens per row.
            total_s: of the step; `verify_s` of it by the forward.
            drafting_s: what of it is predicted to be due to the drafts.
        """
        if nodes == 0:
            self._drafted_steps = 0
            return
        self._drafted_steps += 1
        plain_s = max(total_s - drafting_s, 0.01 * total_s)
        advantage = math.log(emitted * plain_s / total_s)
        self._advantage = advantage if self._advantage is None else self._advantage + _RATE * (advantage - self._advantage)
        self._nodes = nodes
        self._verify_share = verify_s / total_s
