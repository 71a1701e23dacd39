"""What an accepted token saves: seconds of a later step that one row takes less.

A saved row is taken from steps without prompt tokens, as long as there are such: how many steps carry prompts is up to the
prompts, and the rows that decode ride along in each of them whatever is drafted. With M steps that carry prompts and R rows
riding along in each, N requests that have S tokens to decode need

    seconds = M x (a step with prompts) + (S - R M) / N x (a step without)         while S > R M

so that a token is worth the N-th part of a step without prompts. Only where nearly every step carries prompts, it is worth no
more than what a row adds to such a step.
"""

from __future__ import annotations

import math

_RATE = 0.02
_FIRST_STEPS = 8  # without prompts, that are taken for granted: traffic starts with prompts, and says nothing yet
_ENOUGH = 0.5
"""Share of steps without prompts from which on a saved row is taken from those alone. Requests come unevenly, and one that ends sooner
also rides along in fewer steps with prompts: half did best on code and conversation traffic, a fifth and all lost 1 to 2 %."""


class TokenValue:
    """Follows what a row takes for a token without drafts, in steps with prompt tokens and without."""

    def __init__(self) -> None:
        self._plain_s = self._riding_s = math.nan
        self._share = 1.0  # of steps without prompts
        self._count = _FIRST_STEPS

    @property
    def seconds(self) -> float:
        """What a token is worth; infinite where that is as much as in a step without prompts, and there was none yet."""
        weight = min(1.0, self._share / _ENOUGH)
        if math.isnan(self._plain_s):
            return math.inf if weight == 1 else self._riding_s
        return self._plain_s if math.isnan(self._riding_s) else weight * self._plain_s + (1 - weight) * self._riding_s

    def within(self, cap_s: float, has_prompts: bool) -> float:
        """The same in a step that may take so long: where a target fills it up, drafts take the place of prompts that wait for theirs."""
        is_full = has_prompts and cap_s < math.inf and not math.isnan(self._riding_s)
        return self._riding_s if is_full else self.seconds

    def observe(self, token_s: float, has_prompts: bool) -> None:
        """A step with decoding rows: what one of them would have taken in it without drafts."""
        self._count += 1
        self._share += max(_RATE, 1 / self._count) * ((not has_prompts) - self._share)
        if has_prompts:
            self._riding_s = _follow(self._riding_s, token_s)
        else:
            self._plain_s = _follow(self._plain_s, token_s)


def _follow(before_s: float, now_s: float) -> float:
    return now_s if math.isnan(before_s) else before_s + _RATE * (now_s - before_s)
