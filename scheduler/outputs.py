"""How long outputs still are, from those that have ended."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

_MEMORY = 256
_USUAL = 128  # tokens, of the one output that is taken for granted


class OutputLengths:
    """Lengths of the last outputs."""

    def __init__(self) -> None:
        self._lengths: deque[int] = deque(maxlen=_MEMORY)

    def end(self, length: int) -> None:
        """An output of so many tokens has ended."""
        self._lengths.append(length)

    def expected_rest(self, length: int, running: Sequence[int]) -> float:
        """Tokens that an output of so many is expected to have still, if its chance to end is the same at every further token.

        Those that still run count with what they have: the short ones end first, and alone would make all look short.

        Args:
            running: lengths so far of the outputs that go on.
        """
        ended = [own - length for own in self._lengths if own > length]
        going = sum([own - length for own in running if own > length])
        return (sum(ended) + going + _USUAL) / (len(ended) + 1)
