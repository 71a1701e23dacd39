"""Fair shares between users: a virtual token counter each (Sheng et al. 2024, OSDI, "Fairness in Serving Large Language Models").

Who was served least goes first. A user who comes back is lifted to the least counter of those present, so that time spent away
is no credit; the difference between two users who both wait is then bounded, whatever they send.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from specdec.request import Request

PROMPT_WEIGHT = 1.0
OUTPUT_WEIGHT = 2.0  # as the paper has it: an output token costs a step of its own


class FairShare:
    """Counts the tokens served to each user."""

    def __init__(self) -> None:
        self.served: dict[str, float] = {}

    def arrive(self, user: str, present: Collection[str]) -> None:
        """A request of a user comes in; `present` are the users that wait or run already."""
        if user not in present:
            others = [self.served.get(name, 0.0) for name in present]
            self.served[user] = max(self.served.get(user, 0.0), min(others, default=0.0))

    def serve(self, user: str, prompt_tokens: int, output_tokens: int) -> None:
        """Counts what a step did for a user."""
        self.served[user] = self.served.get(user, 0.0) + PROMPT_WEIGHT * prompt_tokens + OUTPUT_WEIGHT * output_tokens

    def order(self, waiting: Iterable[Request]) -> list[Request]:
        """Those waiting, within each priority those of the user first who was served least; a user's own in their order."""
        return sorted(waiting, key=lambda request: (request.priority, self.served.get(request.user, 0.0)))

    def keep(self, present: Collection[str]) -> None:
        """Forgets users that are gone and were served less than anybody present: they would be lifted anyway."""
        least = min((self.served.get(name, 0.0) for name in present), default=0.0)
        self.served = {name: count for name, count in self.served.items() if name in present or count > least}
