"""How likely the nodes of a draft are to be accepted: by drafter, request and depth, from what was verified so far.

An observation is censored by its window: a level that was not reached says nothing, and a draft accepted to its end says "at
least". So the rates kept are conditional, of a level given that the one above was accepted, and survival is their product.

    draft   n0 - n1 - n2 - n3      accepted n0, n1:   level 1 hit, level 2 hit, level 3 miss, level 4 unseen

A request's rates are those of all requests of the drafter, shifted in log odds by as much as it differs, see `request_rates`.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from specdec.kernels import budget as kernel
from specdec.plan import Row, RowOutcome
from specdec.scheduler.calibration import Calibration
from specdec.scheduler.request_rates import EDGE, RequestRates, log_odds
from specdec.tree import DraftShape, DraftTree, Mask

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
    """What is known of one drafter, or sum of drafters.

    Args:
        is_compiled: whether kernels learn from its drafts; None where they can be built.
    """

    def __init__(self, is_compiled: bool | None = None) -> None:
        self._is_compiled = kernel.is_available() if is_compiled is None else is_compiled
        self.calibration = Calibration()
        self.width = array("d", [1.0] * LEVELS)  # nodes proposed per level, of rows that asked for it
        self.verified_width = array("d", [1.0] * LEVELS)  # those that were verified: a draft that proves to be of little confidence is not
        self.requests = RequestRates()
        self.ranks = array("d", [2.0**-place for place in range(1, RANKS + 1)])  # accepted nodes by their place among siblings
        self._proposed = False
        self._within: list[int] = []  # nodes on so many levels; emptied when they move
        self._levels = array("d", [0.0] * (3 * LEVELS))  # hits, trials and log odds over all requests, LEVELS each
        self._deepest = 0  # levels that were ever tried
        self._step = 0
        self._learn_odds()

    def tick(self) -> None:
        """A step has passed."""
        self._step += 1

    def shift(self, request_id: str) -> float:
        """By how much log odds a request is accepted better than its drafter's others."""
        return self.requests.shift(request_id, self._step)

    def odds(self, levels: int) -> array[float]:
        """Log odds of each of the first levels over all requests."""
        return self._levels[2 * LEVELS : 2 * LEVELS + levels]

    def level_rates(self, request_id: str, levels: int) -> list[float]:
        """Chance that each of the first levels is accepted, given that it is proposed and that the one above was accepted."""
        shift = self.shift(request_id)
        return [1 / (1 + math.exp(-odds - shift)) for odds in self.odds(levels)]

    def levels_above(self, request_id: str, levels: int, least: float) -> int:
        """How many of the first levels, at least one, are accepted with a chance of `least` or more, the levels above them included."""
        factor, chance = math.exp(-self.shift(request_id)), 1.0
        for level, odds in enumerate(self.odds(levels)):
            chance /= 1 + math.exp(-odds) * factor
            if chance < least:
                return max(level, 1)
        return levels

    def rates(self, request_ids: Sequence[str], levels: int) -> Floats:
        """[rows, levels]: the same as `level_rates` for several requests."""
        shifts = np.array([self.shift(name) for name in request_ids])
        rates: Floats = 1 / (1 + np.exp(-np.array(self.odds(levels)) - shifts[:, None]))
        return rates

    def node_rates(self, confidence: Floats, rows: Ints, request_ids: Sequence[str]) -> Floats:
        """[n]: chance that each node is accepted given that its parent was, from the drafter's confidence in it.

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
        falling = np.minimum.accumulate(self.ranks)  # elder siblings are kept first, whatever was seen
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

    def propose(self, asked: Sequence[int], shapes: Sequence[DraftShape], keep: Sequence[Mask]) -> None:
        """Learns how many nodes it proposes per level, and how many of those are verified: the rates are those of such nodes.

        Args:
            asked: per draft, the levels that it was asked for; at most LEVELS of them.
            keep: per draft bool [n], the nodes that are verified.
        """
        self._proposed = True
        if self._is_compiled:
            moved = kernel.follow_widths(self.width, self.verified_width, asked, [shape.parents for shape in shapes], keep)
        else:
            rows, proposed, kept = count_levels(asked, shapes, keep)
            _follow(self.verified_width, kept, rows)
            moved = _follow(self.width, proposed, rows)
        if moved:
            self._within = []

    def verify(self, request_ids: Sequence[str], trees: Sequence[DraftTree], outcomes: Sequence[RowOutcome]) -> None:
        """Learns from verified drafts of different requests, each with at least one node."""
        if self._is_compiled:
            self._deepest = max(self._deepest, self._verify_compiled(request_ids, trees, outcomes))
        else:
            self._deepest = max(self._deepest, self._verify_plainly(request_ids, trees, outcomes))

    def _verify_compiled(self, request_ids: Sequence[str], trees: Sequence[DraftTree], outcomes: Sequence[RowOutcome]) -> int:
        """`verify`; returns how many levels were tried."""
        rows, place = array("q"), self.requests.place
        for name, tree, outcome in zip(request_ids, trees, outcomes, strict=True):
            rows.extend((len(tree), len(outcome.path), outcome.finish_reason is not None, tree.confidence is not None, place(name)))
        return kernel.learn_drafts(
            rows,
            [tree.parents for tree in trees],
            [tree.confidence for tree in trees if tree.confidence is not None],
            [node for outcome in outcomes for node in outcome.path],
            self._step,
            evidence=self.requests.evidence,
            shared=self.requests.shared,
            levels=self._levels,
            tried=self._deepest,
            calibration=self.calibration.numbers,
            ranks=self.ranks,
        )

    def _verify_plainly(self, request_ids: Sequence[str], trees: Sequence[DraftTree], outcomes: Sequence[RowOutcome]) -> int:
        """The same without kernels."""
        seen = [Verified.of(tree, outcome) for tree, outcome in zip(trees, outcomes, strict=True)]
        levels = min(max([one.hits for one in seen]) + 1, LEVELS)
        pooled = self.odds(levels)
        stated: list[float] = []
        accepted: list[bool] = []
        for name, one in zip(request_ids, seen, strict=True):
            if one.stated is None:
                self.requests.observe(name, self._step, pooled[: one.trials], one.accepted)
            else:
                odds = [log_odds(rate) for rate in self.calibration.rates(np.array(one.stated)).tolist()]
                self.requests.observe(name, self._step, odds, one.accepted)
                stated += one.stated
                accepted += one.accepted
        if stated:
            self.calibration.observe(stated, accepted)
        for level in range(max(levels, self._deepest)):
            hit, tried = sum([level < one.hits for one in seen]), sum([level < one.trials for one in seen])
            keep = math.exp(-tried / _MEMORY) if tried else _KEEP_UNTRIED
            self._levels[level] = keep * self._levels[level] + hit
            self._levels[LEVELS + level] = keep * self._levels[LEVELS + level] + tried
        self._learn_odds()
        ranks = [rank for one in seen for rank in one.ranks]
        if ranks:
            keep = math.exp(-len(ranks) / _RANK_MEMORY)
            for rank in range(RANKS):
                self.ranks[rank] = keep * self.ranks[rank] + ranks.count(rank)
        return levels

    def _learn_odds(self) -> None:
        """Brings the log odds of the levels up to date; a level's prior is the rate of the level above it."""
        rate, weight = _FIRST_RATE, _FIRST_PRIOR
        for level in range(LEVELS):
            rate = (self._levels[level] + weight * rate) / (self._levels[LEVELS + level] + weight)
            weight = _LEVEL_PRIOR
            self._levels[2 * LEVELS + level] = log_odds(rate)


def count_levels(asked: Sequence[int], shapes: Sequence[DraftShape], keep: Sequence[Mask]) -> tuple[list[int], list[int], list[int]]:
    """By level: the rows that asked for it, the nodes proposed and those kept; see `DrafterAcceptance.propose`."""
    levels = max(asked)
    depths = [shape.depths() for shape in shapes]
    proposed, kept = (
        np.bincount(np.concatenate(own), minlength=levels + 1)[1 : levels + 1].tolist()
        for own in (depths, [own[mask] for own, mask in zip(depths, keep, strict=True)])
    )
    return [sum([level < own for own in asked]) for level in range(levels)], proposed, kept


def _follow(widths: array[float], counts: Sequence[int], asked: Sequence[int]) -> bool:
    """Moves each level's nodes per row towards those of a step; whether any moved."""
    moved = False
    for level, (count, rows) in enumerate(zip(counts, asked, strict=True)):
        if rows and count != rows * widths[level]:
            moved = True
            widths[level] += (1 - _KEEP_WIDTH ** min(rows, 4)) * (count / rows - widths[level])
    return moved


class AcceptanceModel:
    """What is known of all drafters.

    Args:
        is_compiled: see `DrafterAcceptance`.
    """

    def __init__(self, is_compiled: bool | None = None) -> None:
        self._is_compiled = is_compiled
        self._drafters: dict[str, DrafterAcceptance] = {}

    def of(self, drafter: str) -> DrafterAcceptance:
        """The books of a drafter or sum of drafters."""
        known = self._drafters.get(drafter)
        if known is None:
            known = self._drafters[drafter] = DrafterAcceptance(self._is_compiled)
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


@dataclass(frozen=True, slots=True)
class Verified:
    """What one draft tells.

    Attributes:
        hits: levels accepted.
        trials: levels decided: one more where none of the next level's nodes was accepted.
        accepted: of the nodes whose parent was accepted, of the levels decided where there are no confidences.
        stated: their confidences; None where there are none.
        ranks: of the accepted nodes of a tree, how many elder siblings each has.
    """

    hits: int
    trials: int
    accepted: Sequence[bool]
    stated: Sequence[float] | None = None
    ranks: Sequence[int] = ()

    @classmethod
    def of(cls, tree: DraftTree, outcome: RowOutcome) -> Verified:
        path, confidence = outcome.path, tree.confidence
        hits = min(len(path), LEVELS)
        goes_on = outcome.finish_reason is None and hits < LEVELS  # behind a stop nobody knows what would have been accepted
        if tree.is_chain():
            trials = hits + (goes_on and hits < len(tree))
            stated = None if confidence is None else confidence[:trials].tolist()
            return cls(hits, trials, [level < hits for level in range(trials)], stated)
        parents = tree.parents.tolist()
        last = path[-1] if path else -1
        missed = goes_on and last in parents[last + 1 :]
        ranks = [min(parents[:node].count(parents[node]), RANKS - 1) for node in path]
        if confidence is None:
            return cls(hits, hits + missed, [level < hits for level in range(hits + missed)], None, ranks)
        known = set((-1, *path) if missed else (-1, *path[:-1]) if path else ())
        reached = [node for node, parent in enumerate(parents) if parent in known]
        return cls(hits, hits + missed, [node in path for node in reached], [float(confidence[node]) for node in reached], ranks)
