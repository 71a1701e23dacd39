"""Drafts from the output that the user predicted, such as a file that is to be edited.

It follows the prediction as long as the output does. Where they part, it offers both readings at once, a changed token
and an inserted one, and takes up the prediction again where the last few tokens of the output occur in it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from specdec.drafters.base import Drafter, DraftRow
from specdec.errors import ConfigError
from specdec.tree import EMPTY, DraftTree

MAX_LIMIT = 256
GRAMS = (3, 2, 1)
"""Lengths of the matches that bring the cursor back, surest first."""
REACH = {3: None, 2: 64, 1: 8}
"""How many tokens past the cursor a match of that length may lie; a match of 3 may lie anywhere."""


def check_options(limit: int = 16) -> None:
    """Raises ConfigError unless 1 <= limit <= 256."""
    if not 1 <= limit <= MAX_LIMIT:
        raise ConfigError(f"drafter 'prediction': limit must be between 1 and {MAX_LIMIT}, got {limit}")


class PredictionDrafter(Drafter):
    """Drafts from the request's predicted output; nothing for a request that brings none.

    Args:
        limit: nodes per step where nobody asks for less.
    """

    def __init__(self, limit: int = 16) -> None:
        check_options(limit)
        self.default_limit = limit
        self._cursors: dict[str, PredictionCursor] = {}

    def propose(self, rows: Sequence[DraftRow]) -> list[DraftTree]:
        return [self._propose(row) if row.prediction else EMPTY for row in rows]

    def forget(self, request_id: str) -> None:
        self._cursors.pop(request_id, None)

    def _propose(self, row: DraftRow) -> DraftTree:
        cursor = self._cursors.get(row.request_id)
        if cursor is None or cursor.consumed > len(row.tokens):
            cursor = self._cursors[row.request_id] = PredictionCursor(row.prediction, row.num_prompt)
        cursor.follow(row.tokens)
        return cursor.draft(row.limit, min(row.limit, row.depth))


class PredictionCursor:
    """Where in the prediction the output is.

    Attributes:
        consumed: tokens of the request that were followed, prompt included.
        at: index in the prediction of the token expected next.
        streak: tokens that agreed since the last divergence.
        lost: the output has left the prediction and is not known to be back; `at` is where it left.
    """

    def __init__(self, prediction: Sequence[int], num_prompt: int) -> None:
        self.prediction = prediction
        self.consumed = num_prompt
        self.at = 0
        self.streak = 0
        self.lost = False
        self._start = num_prompt
        self._places: dict[tuple[int, ...], list[int]] | None = None  # gram -> ends in the prediction, ascending

    def follow(self, tokens: Sequence[int]) -> None:
        """Moves over the tokens that were committed since the last call."""
        for index in range(self.consumed, len(tokens)):
            token = tokens[index]
            if not self.lost and self.at < len(self.prediction) and self.prediction[self.at] == token:
                self.at += 1
                self.streak += 1
                continue
            self.lost, self.streak = True, 0
            recent = tuple(tokens[max(self._start, index + 1 - GRAMS[0]) : index + 1])
            place = self._place_of(recent)
            if place is not None:
                self.lost, self.at = False, place
        self.consumed = len(tokens)

    def draft(self, max_nodes: int, max_depth: int) -> DraftTree:
        """The prediction from the cursor on; where lost, from the cursor and from the token after it, side by side."""
        ahead = self.prediction[self.at : self.at + max_depth]
        if not self.lost:
            return _with_confidence(DraftTree.chain(ahead), 0.98 if self.streak >= GRAMS[0] else 0.8)
        changed = self.prediction[self.at + 1 : self.at + 1 + max_depth]
        half = max_nodes - max_nodes // 2
        return _with_confidence(DraftTree.from_paths([changed[:half], ahead], max_nodes), 0.4)

    def _place_of(self, recent: tuple[int, ...]) -> int | None:
        """The index after the match nearest to the cursor, ahead of it if there is one."""
        if self._places is None:
            self._places = _places(self.prediction)
        for size in GRAMS:
            ends = self._places.get(recent[-size:]) if len(recent) >= size else None
            if not ends:
                continue
            ahead = bisect_left(ends, self.at + 1)
            reach = REACH[size]
            if ahead < len(ends) and (reach is None or ends[ahead] <= self.at + reach):
                return ends[ahead]
            if reach is None:
                return ends[-1]
        return None


def _places(prediction: Sequence[int]) -> dict[tuple[int, ...], list[int]]:
    places: dict[tuple[int, ...], list[int]] = {}
    for size in GRAMS:
        for end in range(size, len(prediction) + 1):
            places.setdefault(tuple(prediction[end - size : end]), []).append(end)
    return places


def _with_confidence(tree: DraftTree, chance: float) -> DraftTree:
    return DraftTree(tree.tokens, tree.parents, np.full(len(tree), chance, dtype=np.float32)) if len(tree) else EMPTY
