"""When a drafter that does not pay is tried again.

A probe that lost some time is paid off before the next one: it may cost 0.3 % of the time, or up to 8 % where that would mean to
wait for more than 52 steps. It takes two steps: in the first one a drafter with KV of its own catches up with what it missed, which
says nothing of what it costs in use. Only where nothing was read and more was lost than a step takes, one is enough. A probe that paid
is repeated at once, so that a drafter which has become good is in use again as soon as the first probe finds out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

SHARE = 0.003
MOST_SHARE = 0.08
PATIENCE = 52
_REST = 4  # steps between probes, however cheap they seem
_MOST_ROWS = 8
_WIDE = 4  # one probe in so many takes as many rows as that


@dataclass
class _Option:
    """One way to draft.

    Attributes:
        last_s, last_step: when it was probed last.
        loss_s: what that cost more than it brought.
        count: probes so far.
        tried: request -> step in which it was drafted last.
        again: requests to be drafted in the next step too: those whose last probe paid, or has just begun.
    """

    last_s: float
    last_step: int
    loss_s: float = 0.0
    count: int = 0
    tried: dict[str, int] = field(default_factory=dict)
    again: set[str] = field(default_factory=set)


class Probing:
    """Keeps, per way to draft, when it was last tried on requests for which it is not expected to pay."""

    def __init__(self) -> None:
        self._options: dict[str, _Option] = {}
        self._elapsed_s = self._last_s = 0.0
        self._step = 0

    def tick(self, seconds: float) -> None:
        """A step of so many seconds has passed."""
        self._elapsed_s += seconds
        self._last_s = seconds
        self._step += 1

    def has_turn(self, option: str) -> bool:
        """Whether `pick` may give any request in this step."""
        state = self._options.get(option)
        return state is None or bool(state.again) or self._is_due(state)

    def pick(self, option: str, dear_s: Mapping[str, float], affordable: int) -> list[str]:
        """The requests to probe in this step: those whose last probe paid, and when it is time, those not tried for longest.

        Args:
            dear_s: request -> seconds to catch up with it first, where these are more than a probe may cost: the cheapest first.
            affordable: how many may be probed at once, beside those whose last probe paid.
        """
        most = max(1, min(affordable, _MOST_ROWS))
        state = self._options.get(option)
        if state is None:
            return sorted(dear_s, key=dear_s.__getitem__)[:most]
        if state.count % _WIDE == 1:  # what a call costs many rows is not known from calls for one, and may be believed too dear
            most = _MOST_ROWS
        again = [name for name in dear_s if name in state.again] if state.again else []
        if not self._is_due(state):
            return again
        rest = [name for name in dear_s if name not in state.again]
        rest.sort(key=lambda name: (dear_s[name], state.tried.get(name, -1)))
        return [*again, *rest[: max(0, most - len(again))]]

    def drafted(self, option: str, request_ids: Sequence[str], loss_s: float) -> None:
        """These requests were drafted because it was expected to pay."""
        state = self._options.get(option)
        if state is None:  # its first loss has to be paid off like a probe's
            state = self._options[option] = _Option(self._elapsed_s, self._step, loss_s)
        state.tried.update(dict.fromkeys(request_ids, self._step))

    def probed(self, option: str, gains: Mapping[str, float], read_s: Mapping[str, float], total_s: float) -> None:
        """These requests were drafted as a probe, in the step that `tick` was told of.

        Args:
            gains: request -> seconds that it saved, less those that it cost.
            read_s: request -> seconds to catch up with it before, where there was something to read.
            total_s: what the drafters took in all.
        """
        state = self._options.setdefault(option, _Option(self._elapsed_s, self._step))
        if state.last_step != self._step - 1:  # the first of its steps
            state.loss_s = 0.0
            state.count += 1
        loss_s = -sum(gains.values())
        is_dear = not read_s and loss_s > self._last_s - loss_s
        state.loss_s += loss_s + min(sum(read_s.values()), total_s)
        state.last_s, state.last_step = self._elapsed_s, self._step
        for name, gain in gains.items():
            begins = state.tried.get(name) != self._step - 1 and not is_dear
            state.tried[name] = self._step
            (state.again.add if begins or gain > 0 else state.again.discard)(name)

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        for state in self._options.values():
            state.tried.pop(request_id, None)
            state.again.discard(request_id)

    def _is_due(self, state: _Option) -> bool:
        steps, seconds = self._step - state.last_step, self._elapsed_s - state.last_s
        if state.loss_s <= 0:
            return True
        return steps >= _REST and (seconds * SHARE >= state.loss_s or (steps >= PATIENCE and seconds * MOST_SHARE >= state.loss_s))
