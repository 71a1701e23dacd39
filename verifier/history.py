"""What a request's text has said so far, kept up to date token by token: occurrence counts, and ids that may not follow.

Committed tokens enter once, when they are first seen; nothing here scans the history or the vocabulary per step. Draft
tokens never enter: a node's own path is handed in and forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


class TokenCounts:
    """How often each token of a request occurs in its output, for those that occur in its text.

    Args:
        num_prompt: leading tokens that are prompt.
        with_prompt: tokens that occur in the prompt only are among `ids`, with a count of 0.
    """

    def __init__(self, num_prompt: int, *, with_prompt: bool) -> None:
        self._num_prompt = num_prompt
        self._with_prompt = with_prompt
        self._done = 0
        self._places: dict[int, int] = {}
        self._ids = np.empty(64, dtype=np.int64)
        self._counts = np.zeros(64, dtype=np.float32)

    @property
    def ids(self) -> NDArray[np.int64]:
        """int64 [u], each id once; valid until the next `update`."""
        return self._ids[: len(self._places)]

    @property
    def counts(self) -> NDArray[np.float32]:
        """float32 [u], occurrences of each of `ids` in the output; valid until the next `update`."""
        return self._counts[: len(self._places)]

    def count(self, token: int) -> float:
        """Occurrences of `token` in the output."""
        place = self._places.get(token)
        return 0.0 if place is None else float(self._counts[place])

    def update(self, tokens: Sequence[int], length: int) -> None:
        """Takes in those of the first `length` tokens that were not seen yet."""
        if self._done < self._num_prompt:
            self._done = self._num_prompt
            if self._with_prompt:
                for token in sorted(set(tokens[: self._num_prompt])):  # in order, so that reading logits runs through memory
                    self._place(token)
        for index in range(self._done, length):
            place = self._place(tokens[index])  # may move the arrays
            self._counts[place] += 1
        self._done = max(self._done, length)

    def _place(self, token: int) -> int:
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[place] = token
        return place


class BadWords:
    """Which ids may not follow a text, given id sequences whose last id may never come after the others."""

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        self._always = tuple(dict.fromkeys(word[0] for word in words if len(word) == 1))
        self._longest = max((len(word) for word in words), default=1) - 1
        self._by_previous: dict[int, list[tuple[tuple[int, ...], int]]] = {}  # last id but one -> (all but the last, last)
        for word in words:
            if len(word) > 1:
                self._by_previous.setdefault(word[-2], []).append((tuple(word[:-1]), word[-1]))

    def after(self, tokens: Sequence[int], length: int, path: Sequence[int]) -> list[int]:
        """Ids that may not follow the first `length` of `tokens` and then `path`."""
        banned = list(self._always)
        if not self._by_previous:
            return banned
        left = max(0, self._longest - len(path))
        tail = (*tokens[max(0, length - left) : length], *path)
        for start, last in self._by_previous.get(tail[-1], ()) if tail else ():
            if tail[-len(start) :] == start:
                banned.append(last)
        return banned
