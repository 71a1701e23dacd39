"""Prompt lookup in plain Python: what `specdec/kernels/cpu/ngram.cpp` does faster, and what runs where it cannot be built.

Prompt lookup is due to Saxena (2023); weighing several matches against each other is prediction by partial match.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from specdec.tree import EMPTY, DraftTree

CANDIDATES = 16
"""Earlier occurrences weighed against each other in one proposal."""
WORTH = 0.01
"""Nodes less likely than this to be reached are not proposed."""


@dataclass(frozen=True)
class Match:
    """An earlier occurrence of the text's end.

    Attributes:
        length: tokens that agree, going back from the end.
        follows: what came after it; text that runs into its own end goes round.
    """

    length: int
    follows: list[int]

    def token(self, depth: int) -> int:
        return self.follows[depth % len(self.follows)]


class Index:
    """Where each n-gram of a growing text last ended, and before that, for two values of n.

        tokens        a  b  c  a  b  c  a  b        n = 2
        end           1  2  3  4  5  6  7  8
        previous[end] -  -  -  -  2  3  4  5        the chain 8 -> 5 -> 2 are the ends of (a, b)

    The long grams find the good matches of a text in which the short ones occur everywhere.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self.length = 0
        self._longest = longest
        long = min(longest, max(4, shortest))
        self._sizes = (long, shortest) if long > shortest else (shortest,)
        self._last: list[dict[Hashable, int]] = [{} for _ in self._sizes]
        self._previous: list[list[int]] = [[0] for _ in self._sizes]  # 0: there is none before

    def extend(self, tokens: Sequence[int]) -> None:
        """Takes in the tokens that were added since the last call."""
        if len(tokens) == self.length:
            return
        start = max(0, self.length - self._sizes[0])
        recent = tokens[start:]
        for size, last, previous in zip(self._sizes, self._last, self._previous, strict=True):
            for end in range(self.length + 1, len(tokens) + 1):
                if end < size:
                    previous.append(0)
                    continue
                gram = tuple(recent[end - size - start : end - start])
                previous.append(last.get(gram, 0))
                last[gram] = end
        self.length = len(tokens)

    def matches(self, tokens: Sequence[int], depth: int) -> list[Match]:
        """Up to `CANDIDATES` earlier occurrences of the end, the latest long ones first."""
        found: dict[int, Match] = {}
        suffix = tokens[max(0, self.length - self._longest) :]
        for size, previous in zip(self._sizes, self._previous, strict=True):
            end = previous[self.length]
            while end and len(found) < CANDIDATES:
                if end not in found:
                    before = tokens[max(0, end - self._longest) : end]
                    found[end] = Match(_agreeing(suffix, before, size), list(tokens[end : end + depth]))
                end = previous[end]
        return list(found.values())


def _agreeing(a: Sequence[int], b: Sequence[int], known: int) -> int:
    """How many last tokens of `a` and `b` agree, of which `known` are known to."""
    most = min(len(a), len(b))
    while known < most and a[-known - 1] == b[-known - 1]:
        known += 1
    return known


def weight(length: int) -> float:
    """Odds that a match of this length foretells the next token."""
    return 0.3 * math.pow(length, 1.2)


def grow_tree(matches: Sequence[Match], max_nodes: int, max_depth: int) -> DraftTree:
    """The nodes most likely to be reached, best first, so that every parent comes before its children.

    At a node, the matches that agree with the path so far vote for the next token with their odds, against odds of 1
    for something new. A match that has foretold the path so far is by so much longer.
    """
    tokens: list[int] = []
    parents: list[int] = []
    confidence: list[float] = []
    heap: list[tuple[float, int, int, int, int, float, list[Match]]] = []  # -reach, order, depth, parent, token, chance, matches
    order = 0

    def push_children(node: int, depth: int, reach: float, agreeing: Sequence[Match]) -> None:
        nonlocal order
        votes: dict[int, list[Match]] = {}
        odds: dict[int, float] = {}
        total = 1.0
        for match in agreeing:
            token, own = match.token(depth), weight(match.length + depth)
            votes.setdefault(token, []).append(match)
            odds[token] = odds.get(token, 0.0) + own
            total += own
        for token, voters in votes.items():
            chance = odds[token] / total
            if reach * chance >= WORTH:
                order += 1
                heapq.heappush(heap, (-reach * chance, order, depth + 1, node, token, chance, voters))

    if matches:
        push_children(-1, 0, 1.0, matches)
    while heap and len(tokens) < max_nodes:
        negative_reach, _, depth, parent, token, chance, voters = heapq.heappop(heap)
        tokens.append(token)
        parents.append(parent)
        confidence.append(chance)
        if depth < max_depth:
            push_children(len(tokens) - 1, depth, -negative_reach, voters)
    if not tokens:
        return EMPTY
    return DraftTree(np.asarray(tokens, dtype=np.int32), np.asarray(parents, dtype=np.int32), np.asarray(confidence, dtype=np.float32))


def grow_trees(indexes: Sequence[Index], texts: Sequence[Sequence[int]], limits: Sequence[int], depths: Sequence[int]) -> list[DraftTree]:
    """One tree per text.

    Args:
        indexes: of the texts; each takes in the tokens that its text has gained.
        texts: token ids.
        limits: the most nodes of each tree.
        depths: its deepest node.
    """
    trees = []
    for index, text, limit, depth in zip(indexes, texts, limits, depths, strict=True):
        index.extend(text)
        trees.append(grow_tree(index.matches(text, depth), limit, depth))
    return trees
