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
from array import array
from collections.abc import Sequence
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

# Where things lie in what is known of a request:
#   step until when it was brought up to date, -1 before the first | shift of each view | variance of each | loss of each | shift
_SHIFTS, _SPREADS, _LOSSES, _SHIFT = 1, 1 + _COUNT, 1 + 2 * _COUNT, 1 + 3 * _COUNT
_FIRST = array("d", [-1.0, *[0.0] * _COUNT, *[deviation * deviation for deviation, _ in VIEWS], *[0.0] * _COUNT, 0.0])
_SIZE = len(_FIRST)


class RequestRates:
    """Log odds by which the requests of one drafter differ from its average.

    Attributes:
        evidence: what is known of each request, 11 numbers at the place that `place` tells.
        shared: losses of the views over all requests, then the logs of their shares.
    """

    def __init__(self) -> None:
        self._places: dict[str, int] = {}
        self._free: list[int] = []
        self.evidence = array("d")
        self.shared = array("d", [0.0] * (2 * _COUNT))

    def __len__(self) -> int:
        return len(self._places)

    def place(self, request_id: str) -> int:
        """Where in `evidence` a request's begins; made where there is none yet."""
        place = self._places.get(request_id)
        if place is None:
            place = self._free.pop() if self._free else len(self.evidence)
            self.evidence[place : place + _SIZE] = _FIRST
            self._places[request_id] = place
        return place

    def shift(self, request_id: str, step: int) -> float:
        """Of one request, in the step of this number."""
        place = self._places.get(request_id)
        if place is None:
            return 0.0
        idle = step - self.evidence[place]
        if idle >= _IDLE_STEPS:
            self._pass_idle(place, step)
        return self.evidence[place + _SHIFT]

    def observe(self, request_id: str, step: int, odds: Sequence[float], accepted: Sequence[bool]) -> None:
        """Learns from a verified draft.

        Args:
            step: its number.
            odds: log odds, by the rates of all requests, of each node that was decided.
            accepted: whether it was.
        """
        place, evidence = self.place(request_id), self.evidence
        if evidence[place] >= 0:
            self.shift(request_id, step)
            self._pass_steps(place, 1)
        evidence[place] = step
        losses = []
        for view in range(_COUNT):
            shift, spread, likelihood = evidence[place + _SHIFTS + view], evidence[place + _SPREADS + view], 1.0
            for node_odds, was in zip(odds, accepted, strict=True):
                rate = 1 / (1 + exp(-node_odds - shift))
                likelihood *= rate if was else 1 - rate
                if spread:
                    spread /= 1 + spread * rate * (1 - rate)
                    move = spread * (was - rate)
                    shift += move if -_MOST_MOVE < move < _MOST_MOVE else math.copysign(_MOST_MOVE, move)
            evidence[place + _SHIFTS + view], evidence[place + _SPREADS + view] = shift, spread
            losses.append(-log(likelihood) if likelihood > _LEAST_LIKELIHOOD else _MOST_LOSS)
        least = min(losses)
        for view, loss in enumerate(losses):
            self.shared[view] = _KEEP_SHARED * self.shared[view] + loss - least
            evidence[place + _LOSSES + view] = _KEEP_OWN * evidence[place + _LOSSES + view] + loss - least
        self.shared[_COUNT:] = array("d", [log(share + _LEAST_SHARE) for share in _shares(self.shared[:_COUNT])])
        self._average(place)

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        place = self._places.pop(request_id, None)
        if place is not None:
            self._free.append(place)

    def _pass_idle(self, place: int, step: int) -> None:
        """Brings up to date what was not drafted for long."""
        idle = step - int(self.evidence[place])
        self._pass_steps(place, idle // _IDLE_STEPS)
        self.evidence[place] = step - idle % _IDLE_STEPS
        self._average(place)

    def _pass_steps(self, place: int, count: int) -> None:
        """The differences fade, and less is known of them."""
        evidence = self.evidence
        for view in range(1, _COUNT):
            deviation, keep_step = VIEWS[view]
            keep = keep_step**count
            evidence[place + _SHIFTS + view] *= keep
            spread = evidence[place + _SPREADS + view]
            evidence[place + _SPREADS + view] = keep * keep * spread + (1 - keep * keep) * deviation * deviation
        if count > 1:
            for view in range(_COUNT):
                evidence[place + _LOSSES + view] *= _KEEP_OWN ** (count - 1)

    def _average(self, place: int) -> None:
        """The shift becomes the average of what the views say."""
        losses = self.evidence[place + _LOSSES : place + _SHIFT]
        shares = _shares([loss - prior for loss, prior in zip(losses, self.shared[_COUNT:], strict=True)])
        shifts = self.evidence[place + _SHIFTS : place + _SPREADS]
        self.evidence[place + _SHIFT] = sum([share * shift for share, shift in zip(shares, shifts, strict=True)])


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
