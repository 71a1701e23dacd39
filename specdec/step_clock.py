"""Splits the wall time of a step over what it was spent on."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from specdec.plan import StepCost


class StepClock:
    """Each `mark` books the time since the last one; nothing is left out and nothing is counted twice.

    Args:
        clock: seconds.
        host_s: host time to begin with: what the step before did after its books were closed.
    """

    def __init__(self, clock: Callable[[], float], host_s: float = 0.0) -> None:
        self._clock = clock
        self._last = clock()
        self._spent: dict[str, float] = {"host": host_s}

    def mark(self, kind: str) -> None:
        """Books the time since the last mark to `kind`: draft, verify, sample, commit or host."""
        now = self._clock()
        self._spent[kind] = self._spent.get(kind, 0.0) + now - self._last
        self._last = now

    def cost(self, draft_s: Mapping[str, float]) -> StepCost:
        """The step's cost, with the drafters' own seconds; what the draft marks hold beyond those is host time."""
        self.mark("host")
        routing = self._spent.get("draft", 0.0) - sum(draft_s.values())
        return StepCost(
            draft_s=dict(draft_s),
            verify_s=self._spent.get("verify", 0.0),
            sample_s=self._spent.get("sample", 0.0),
            commit_s=self._spent.get("commit", 0.0),
            host_s=self._spent["host"] + max(routing, 0.0),
        )

    def since_last(self) -> float:
        """Seconds since the last mark, which are booked nowhere."""
        return self._clock() - self._last
