"""How likely the nodes of a draft are to be accepted: by drafter, request and depth, from what was verified so far.

An observation is censored by its window: a level that was not reached says nothing, and a draft accepted to its end says "at
least". So the rates kept are conditional, of a level given that the one above was accepted, and survival is their product.

    draft   n0 - n1 - n2 - n3      accepted n0, n1:   level 1 hit, level 2 hit, level 3 miss, level 4 unseen

A request's rates are those of all requests of the drafter, shifted in log odds by as much as it differs, see `request_rates`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from specdec.plan import Row, RowOutcome
from specdec.scheduler.calibration import Calibration
from specdec.scheduler.request_rates import EDGE, RequestRates, log_odds
from specdec.tree import DraftTree

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

LEVELS = 64
"""Levels told apart; deeper ones are taken to be like the last."""
_KEEP_WIDTH = 0.93  # of what is known of the nodes proposed, per row
_MEMORY = 300.0  # trials of a level after which an old one counts 1 / e
_FIRST_RATE = 0.6
_FIRST_PRIOR = 2.0  # trials that it is worth
_LEVEL_PRIOR = 10.0  # trials that the rate of the level above is worth
_KEEP_UNTRIED = 0.998  # of what is known of deeper levels, per step that they were not tried: or they would stay so for ever
RANKS = 8
"""Siblings told apart."""
_RANK_MEMORY = 33.0


class DrafterAcceptance:
    """What is known of one drafter, or sum of drafters."""

    def __init__(self) -> None:
        self.calibration = Calibration()
        self.width = [1.0] * LEVELS  # nodes proposed per level, of rows that asked for it
        self.verified_width = [1.0] * LEVELS  # those that were verified: a draft that proves to be of little confidence is not
        self.requests = RequestRates()
        self._proposed = False
        self._within: list[int] = []  # nodes on so many levels; emptied when they move
        self._hits = [0.0] * LEVELS
        self._trials = [0.0] * LEVELS
        self._deepest = 0  # levels that were ever tried
        self._odds: list[float] = []  # of the first levels, over all requests; emptied when they move
        self._ranks = [2.0**-place for place in range(1, RANKS + 1)]  # accepted nodes by their place among siblings
        self._step = 0

    def tick(self) -> None:
        """A step has passed."""
        self._step += 1

    def shift(self, request_id: str) -> float:
        """By how much log odds a request is accepted better than its drafter's others."""
        return self.requests.shift(request_id, self._step)

    def level_rates(self, request_id: str, levels: int) -> list[float]:
        """Chance that each of the first levels is accepted, given that it is proposed and that the one above was accepted."""
        shift = self.shift(request_id)
        return [1 / (1 + math.exp(-odds - shift)) for odds in self._level_odds(levels)]

    def levels_above(self, request_id: str, levels: int, least: float) -> int:
        """How many of the first levels, at least one, are accepted with a chance of `least` or more, the levels above them included."""
        factor, chance = math.exp(-self.shift(request_id)), 1.0
        for level, odds in enumerate(self._level_odds(levels)):
            chance /= 1 + math.exp(-odds) * factor
            if chance < least:
                return max(level, 1)
        return levels

    def rates(self, request_ids: Sequence[str], levels: int) -> Floats:
        """[rows, levels]: the same for several requests."""
        shifts = np.array([self.shift(name) for name in request_ids])
        rates: Floats = 1 / (1 + np.exp(-np.array(self._level_odds(levels)) - shifts[:, None]))
        return rates

    def node_rate(self, confidence: float, request_id: str) -> float:
        """Chance that a node is accepted given that its parent was, from the drafter's confidence in it."""
        inside = min(max(self.calibration.rate(confidence), EDGE), 1 - EDGE)
        return 1 / (1 + (1 / inside - 1) * math.exp(-self.shift(request_id)))

    def node_rates(self, confidence: Floats, rows: Ints, request_ids: Sequence[str]) -> Floats:
        """[n]: the same for many nodes.

        Args:
            confidence: [n], as stated by the drafter.
            rows: [n], the index into `request_ids` of each node.
        """
        inside = np.clip(self.calibration.rates(confidence), EDGE, 1 - EDGE)
        falling = np.exp([-self.shift(name) for name in request_ids])
        rates: Floats = 1 / (1 + (1 / inside - 1) * falling[rows])
        return rates

    def rank_shares(self) -> Floats:
        """[siblings, rank]: of the chance that a level is accepted, the share of a node with so many elder siblings among so many.

        At most RANKS are told apart.
        """
        falling = np.minimum.accumulate(self._ranks)  # elder siblings are kept first, whatever was seen
        totals = falling.cumsum()
        shares: Floats = falling / totals[:, None]
        return shares

    def nodes_within(self, depth: int) -> int | None:
        """Nodes that it proposes on so many levels, rounded up; None before it proposed anything."""
        if not self._proposed:
            return None
        if not self._within:
            sums = accumulate([max(width, 1.0) for width in self.width], initial=0.0)
            self._within = [math.ceil(nodes - 1e-6) for nodes in sums]
        return self._within[depth]

    def propose(self, counts: Sequence[int], asked: Sequence[int]) -> None:
        """Learns how many nodes it proposes per level.

        Args:
            counts: by level, nodes proposed, all rows together.
            asked: by level, rows that asked for it; at most LEVELS of them.
        """
        self._proposed = True
        if _follow(self.width, counts, asked):
            self._within = []

    def keep(self, counts: Sequence[int], asked: Sequence[int]) -> None:
        """Learns how many of the nodes it proposes per level are verified: the rates are those of such nodes. See `propose`."""
        _follow(self.verified_width, counts, asked)

    def verify(self, request_ids: Sequence[str], trees: Sequence[DraftTree], outcomes: Sequence[RowOutcome]) -> None:
        """Learns from verified drafts of different requests, each with at least one node."""
        seen = [_Verified.of(tree, outcome) for tree, outcome in zip(trees, outcomes, strict=True)]
        levels = max([one.hits for one in seen]) + 1
        pooled = self._level_odds(min(levels, LEVELS))
        hits, trials = [0] * levels, [0] * levels
        stated: list[float] = []
        accepted: list[bool] = []
        for name, one in zip(request_ids, seen, strict=True):
            for level in range(one.hits):
                hits[level] += 1
            for level in range(one.trials):
                trials[level] += 1
            if one.stated is None:
                self.requests.observe(name, self._step, pooled[: one.trials], _HITS[one.hits][: one.trials])
            else:
                odds = [log_odds(self.calibration.rate(confidence)) for confidence in one.stated]
                self.requests.observe(name, self._step, odds, one.accepted)
                stated += one.stated
                accepted += one.accepted
        if stated:
            self.calibration.observe(stated, accepted)
        for level, (hit, tried) in enumerate(zip(hits[:LEVELS], trials[:LEVELS], strict=True)):
            keep = math.exp(-tried / _MEMORY) if tried else _KEEP_UNTRIED
            self._hits[level] = keep * self._hits[level] + hit
            self._trials[level] = keep * self._trials[level] + tried
        for level in range(levels, self._deepest):
            self._hits[level] *= _KEEP_UNTRIED
            self._trials[level] *= _KEEP_UNTRIED
        self._deepest = max(self._deepest, min(levels, LEVELS))
        self._odds = []
        ranks = [rank for one in seen for rank in one.ranks]
        if ranks:
            keep = math.exp(-len(ranks) / _RANK_MEMORY)
            self._ranks = [keep * count for count in self._ranks]
            for rank in ranks:
                self._ranks[rank] += 1

    def _level_rates(self, levels: int) -> list[float]:
        """Over all requests; a level's prior is the rate of the level above it."""
        rates = []
        rate, weight = _FIRST_RATE, _FIRST_PRIOR
        for hits, trials in zip(self._hits[:levels], self._trials[:levels], strict=True):
            rate = (hits + weight * rate) / (trials + weight)
            weight = _LEVEL_PRIOR
            rates.append(rate)
        return rates

    def _level_odds(self, levels: int) -> list[float]:
        if len(self._odds) < levels:
            self._odds = [log_odds(rate) for rate in self._level_rates(levels)]
        return self._odds[:levels]


def _follow(widths: list[float], counts: Sequence[int], asked: Sequence[int]) -> bool:
    """Moves each level's nodes per row towards those of a step; whether any moved."""
    moved = False
    for level, (count, rows) in enumerate(zip(counts, asked, strict=True)):
        if rows and count != rows * widths[level]:
            moved = True
            widths[level] += (1 - _KEEP_WIDTH ** min(rows, 4)) * (count / rows - widths[level])
    return moved


class AcceptanceModel:
    """What is known of all drafters."""

    def __init__(self) -> None:
        self._drafters: dict[str, DrafterAcceptance] = {}

    def of(self, drafter: str) -> DrafterAcceptance:
        """The books of a drafter or sum of drafters."""
        known = self._drafters.get(drafter)
        if known is None:
            known = self._drafters[drafter] = DrafterAcceptance()
        return known

    def verify(self, rows: Sequence[Row], trees: Sequence[DraftTree], outcomes: Sequence[RowOutcome]) -> None:
        """Learns from a step."""
        for known in self._drafters.values():
            known.tick()
        drafted: dict[str, list[int]] = {}
        for index, (row, tree) in enumerate(zip(rows, trees, strict=True)):
            if len(tree):
                drafted.setdefault(row.drafter, []).append(index)
        for drafter, chosen in drafted.items():
            names = [rows[index].request.id for index in chosen]
            self.of(drafter).verify(names, [trees[index] for index in chosen], [outcomes[index] for index in chosen])

    def forget(self, request_ids: Iterable[str]) -> None:
        """These requests have ended."""
        for request_id in request_ids:
            for drafter in self._drafters.values():
                drafter.requests.forget(request_id)


_HITS = [[True] * hits + [False] for hits in range(LEVELS + 1)]
"""By accepted levels: whether each decided one was."""


@dataclass(frozen=True, slots=True)
class _Verified:
    """What one draft tells.

    Attributes:
        hits: levels accepted.
        trials: levels decided: one more where none of the next level's nodes was accepted.
        accepted: of the nodes whose parent was accepted.
        stated: their confidences; None where there are none.
        ranks: of the accepted nodes of a tree, how many elder siblings each has.
    """

    hits: int
    trials: int
    accepted: Sequence[bool] = ()
    stated: Sequence[float] | None = None
    ranks: Sequence[int] = ()

    @classmethod
    def of(cls, tree: DraftTree, outcome: RowOutcome) -> _Verified:
        path, confidence = outcome.path, tree.confidence
        hits = min(len(path), LEVELS)
        goes_on = outcome.finish_reason is None and hits < LEVELS  # behind a stop nobody knows what would have been accepted
        if tree.is_chain():
            trials = hits + (goes_on and hits < len(tree))
            if confidence is None:
                return cls(hits, trials)
            return cls(hits, trials, [level < hits for level in range(trials)], confidence[:trials].tolist())
        parents = tree.parents.tolist()
        last = path[-1] if path else -1
        missed = goes_on and last in parents[last + 1 :]
        known = set((-1, *path) if missed else (-1, *path[:-1]) if path else ())
        reached = [node for node, parent in enumerate(parents) if parent in known]
        on_path = set(path)
        ranks = [min(parents[:node].count(parents[node]), RANKS - 1) for node in path]
        stated = None if confidence is None else [float(confidence[node]) for node in reached]
        return cls(hits, hits + missed, [node in on_path for node in reached], stated, ranks)
