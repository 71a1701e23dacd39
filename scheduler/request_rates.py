"""By how much one request is accepted better or worse than its drafter's others, and for how long that stays so: both learned.

A request's difference from the others, in log odds, is taken to wander about 0 (an Ornstein-Uhlenbeck process) and is followed
with an extended Kalman filter on the accepted and rejected nodes, each against what the rates of all requests led to expect.
How far and how fast requests wander is not known, so several answers are kept:

    view      1st: not at all     2nd: by a factor of 3 in the odds, slowly     3rd: by one of 12, five times as fast

Which of them predicts best is known from the log loss of every decided node: over all requests of the drafter (do requests
differ at all?) and over the request's own last ones (does this one change?). What they say is averaged by exp(-loss), as a
mixture of experts is (Vovk 1990; Cesa-Bianchi and Lugosi 2006, section 2.2). So where all requests are alike chance does not
move a request's rate, and where they differ or change it is followed within a few verifies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp, log

VIEWS = ((0.0, 1.0), (1.0, 0.995), (2.5, 0.97))
"""Of each: the standard deviation of a request's log odds, and what of its difference is left after a step."""
_KEEP_SHARED = 0.998  # of the loss over all requests, per draft verified
_KEEP_OWN = 0.9
_LEAST_SHARE = 0.005  # of every view, whatever the other requests say
_MOST_MOVE = 2.0  # log odds that one node moves a request: the filter is exact for small moves only
_IDLE_STEPS = 8  # of not being drafted count as one: what does not pay is tried again when it is probed, not before
EDGE = 0.002
"""Rates stay this far from 0 and 1."""
_COUNT = len(VIEWS)
_LEAST_LIKELIHOOD = 1e-40
_MOST_LOSS = -log(_LEAST_LIKELIHOOD)


@dataclass(slots=True)
class _Evidence:
    """What is known of one request.

    Attributes:
        step: until when this was brought up to date.
        shifts, spreads: what each view says, in log odds, and its variance.
        losses: of each view, over the request's last drafts.
        shift: the average of what they say.
    """

    step: int
    shifts: list[float] = field(default_factory=lambda: [0.0] * _COUNT)
    spreads: list[float] = field(default_factory=lambda: [deviation * deviation for deviation, _ in VIEWS])
    losses: list[float] = field(default_factory=lambda: [0.0] * _COUNT)
    shift: float = 0.0

    def pass_steps(self, count: int) -> None:
        """The differences fade, and less is known of them."""
        for view in range(1, _COUNT):
            deviation, keep_step = VIEWS[view]
            keep = keep_step**count
            self.shifts[view] *= keep
            self.spreads[view] = keep * keep * self.spreads[view] + (1 - keep * keep) * deviation * deviation
        if count > 1:
            self.losses = [_KEEP_OWN ** (count - 1) * loss for loss in self.losses]


class RequestRates:
    """Log odds by which the requests of one drafter differ from its average."""

    def __init__(self) -> None:
        self._known: dict[str, _Evidence] = {}
        self._losses = [0.0] * _COUNT
        self._priors = [0.0] * _COUNT  # log shares of the views over all requests

    def __len__(self) -> int:
        return len(self._known)

    def shift(self, request_id: str, step: int) -> float:
        """Of one request, in the step of this number."""
        known = self._known.get(request_id)
        if known is None:
            return 0.0
        idle = step - known.step
        if idle >= _IDLE_STEPS:
            known.pass_steps(idle // _IDLE_STEPS)
            known.step = step - idle % _IDLE_STEPS
            self._average(known)
        return known.shift

    def observe(self, request_id: str, step: int, odds: Sequence[float], accepted: Sequence[bool]) -> None:
        """Learns from a verified draft.

        Args:
            step: its number.
            odds: log odds, by the rates of all requests, of each node that was decided; at least one.
            accepted: whether it was.
        """
        known = self._known.get(request_id)
        if known is None:
            known = self._known[request_id] = _Evidence(step)
        else:
            self.shift(request_id, step)
            known.pass_steps(1)
            known.step = step
        losses = []
        for view, (shift, spread) in enumerate(zip(known.shifts, known.spreads, strict=True)):
            likelihood = 1.0
            for node_odds, was in zip(odds, accepted, strict=True):
                rate = 1 / (1 + exp(-node_odds - shift))
                likelihood *= rate if was else 1 - rate
                if spread:
                    spread /= 1 + spread * rate * (1 - rate)
                    move = spread * (was - rate)
                    shift += move if -_MOST_MOVE < move < _MOST_MOVE else math.copysign(_MOST_MOVE, move)
            known.shifts[view], known.spreads[view] = shift, spread
            losses.append(-log(likelihood) if likelihood > _LEAST_LIKELIHOOD else _MOST_LOSS)
        least = min(losses)
        self._losses = [_KEEP_SHARED * before + loss - least for before, loss in zip(self._losses, losses, strict=True)]
        self._priors = [math.log(share + _LEAST_SHARE) for share in _shares(self._losses)]
        known.losses = [_KEEP_OWN * before + loss - least for before, loss in zip(known.losses, losses, strict=True)]
        self._average(known)

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._known.pop(request_id, None)

    def _average(self, known: _Evidence) -> None:
        shares = _shares([loss - prior for loss, prior in zip(known.losses, self._priors, strict=True)])
        known.shift = sum([share * shift for share, shift in zip(shares, known.shifts, strict=True)])


def log_odds(rate: float) -> float:
    """Of a rate kept EDGE away from 0 and 1."""
    inside = min(max(rate, EDGE), 1 - EDGE)
    return math.log(inside / (1 - inside))


def _shares(losses: Sequence[float]) -> list[float]:
    """exp(-loss), adding up to 1."""
    least = min(losses)
    weights = [exp(least - loss) for loss in losses]
    total = sum(weights)
    return [weight / total for weight in weights]
