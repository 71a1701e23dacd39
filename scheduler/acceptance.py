"""How likely the nodes of a draft are to be accepted: by drafter, request and depth, from what was verified so far.

An observation is censored by its window: a level that was not reached says nothing, and a draft accepted to its end says "at
least". So the rates kept are conditional, of a level given that the one above was accepted, and survival is their product.

    draft   n0 - n1 - n2 - n3      accepted n0, n1:   level 1 hit, level 2 hit, level 3 miss, level 4 unseen

A request's rate is its own count with a prior of a few observations: the rate of all requests of the drafter, shifted in log
odds by as much as this request differs from the others so far.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specdec.plan import Row, RowOutcome
from specdec.scheduler.calibration import Calibration
from specdec.scheduler.options import options_of
from specdec.tree import DraftTree

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

LEVELS = 64
"""Levels told apart; deeper ones are taken to be like the last."""
_KEEP = 0.93  # of a request's evidence per verify: what lies 14 verifies back counts 1 / e
_KEEP_IDLE = 0.98  # per step that it was not drafted, so that later probes are believed
_KEEP_POOL = 0.97  # of what is known of all requests, per step
_FIRST_RATE = 0.6
_POOL_PRIOR = 2.0
_LEAST_PRIOR = 3.0  # trials that the others' rate is worth against a request's own, where requests differ much
_MOST_PRIOR = 40.0  # and where they are all alike
_USUAL_PRIOR = 8.0
_RANKS = 8
_EDGE = 0.002  # rates stay this far from 0 and 1


class DrafterAcceptance:
    """What is known of one drafter, or sum of drafters."""

    def __init__(self) -> None:
        self.calibration = Calibration()
        self.width: Floats = np.ones(LEVELS)  # nodes proposed per level, of rows that asked for it
        self.nodes_within: list[int] | None = None  # by levels, from 0, rounded up; None before anything was proposed
        self._hits = np.zeros(LEVELS)
        self._trials = np.zeros(LEVELS)
        self._ranks = 2.0 ** -np.arange(1, _RANKS + 1)  # accepted nodes by their place among siblings
        self._slots: dict[str, int] = {}
        self._free: list[int] = []
        self._own = np.zeros((0, 2, LEVELS))  # hits, trials
        self._shift = np.zeros((0, 3))  # predicted hits, hits, trials

    def rates(self, request_ids: Sequence[str], levels: int) -> Floats:
        """[rows, levels]: chance that a level is accepted, given that it is proposed and that the one above was accepted."""
        slots = self.slots(request_ids)
        own = self._own[slots, :, :levels]
        prior = _shifted(self._pooled(levels)[None], self._shifts(slots)[:, None])
        weight = 2 * self._prior_weight()  # a request's levels differ from those of others less than its level as a whole
        rates: Floats = (own[:, 0] + weight * prior) / (own[:, 1] + weight)
        return rates

    def node_rates(self, confidence: Floats, rows: Ints, request_ids: Sequence[str]) -> Floats:
        """[n]: chance that each node is accepted given that its parent was, from the drafter's confidences.

        Args:
            confidence: [n], as stated by the drafter.
            rows: [n], the index into `request_ids` of each node.
        """
        shift = self._shifts(self.slots(request_ids))
        rates = self.calibration.rates(confidence)
        return _shifted(rates, shift[rows]) if shift.any() else rates

    def rank_shares(self, ranks: Ints) -> Floats:
        """[n]: of the chance that a level is accepted, the share of a node with so many elder siblings."""
        falling = np.minimum.accumulate(self._ranks)  # elder siblings are kept first, whatever was seen
        shares: Floats = (falling / falling.sum())[np.minimum(ranks, _RANKS - 1)]
        return shares

    def slots(self, request_ids: Sequence[str]) -> Ints:
        """Places of the requests' evidence, made for those that have none."""
        found = [self._slots[name] if name in self._slots else self._slot(name) for name in request_ids]
        return np.array(found, dtype=np.int64)

    def idle(self, request_ids: Sequence[str]) -> None:
        """A step in which these requests were not drafted by it."""
        slots = self.slots(request_ids)
        self._own[slots] *= _KEEP_IDLE
        self._shift[slots] *= _KEEP_IDLE

    def forget(self, request_id: str) -> None:
        slot = self._slots.pop(request_id, None)
        if slot is not None:
            self._own[slot] = 0
            self._shift[slot] = 0
            self._free.append(slot)

    def propose(self, counts: Floats, asked: Floats) -> None:
        """Learns how many nodes it proposes per level.

        Args:
            counts: [LEVELS], nodes proposed, all rows together.
            asked: [LEVELS], rows that asked for the level.
        """
        weight = 1 - _KEEP ** np.minimum(asked, 4)
        self.width = self.width + weight * (counts / np.maximum(asked, 1) - self.width)
        within = np.ceil(np.maximum(self.width, 1.0).cumsum() - 1e-6).astype(np.int64)
        self.nodes_within = [0, *within.tolist()]

    def verify(self, request_ids: Sequence[str], trees: Sequence[DraftTree], outcomes: Sequence[RowOutcome]) -> None:
        """Learns from verified drafts of different requests, each with at least one node."""
        seen = [_Verified.of(tree, outcome) for tree, outcome in zip(trees, outcomes, strict=True)]
        hits = np.array([one.hits for one in seen])
        trials = np.array([one.trials for one in seen])
        levels = np.arange(int(trials.max()))
        was_hit, was_tried = levels < hits[:, None], levels < trials[:, None]  # [rows, levels]
        expected = was_tried @ self._pooled(len(levels))
        self._calibrate(seen, expected)
        slots = self.slots(request_ids)
        own = self._own[slots, :, : len(levels)] * np.where(was_tried, _KEEP, 1.0)[:, None]  # what was not tried is not forgotten
        self._own[slots, :, : len(levels)] = own + np.stack([was_hit, was_tried], axis=1)
        self._shift[slots] *= _KEEP
        self._shift[slots] += np.stack([np.minimum(expected, trials), hits, trials], axis=1)
        tried = was_tried.sum(0)
        keep = np.where(tried > 0, _KEEP_POOL, 1.0)
        self._hits[: len(levels)] = keep * self._hits[: len(levels)] + was_hit.sum(0)
        self._trials[: len(levels)] = keep * self._trials[: len(levels)] + tried
        for one in seen:
            if one.ranks:
                self._ranks *= _KEEP_POOL
                np.add.at(self._ranks, list(one.ranks), 1)

    def _calibrate(self, seen: Sequence[_Verified], expected: Floats) -> None:
        """Learns from the confidences, and puts what they led to expect into `expected` ([rows])."""
        told = [(row, one) for row, one in enumerate(seen) if one.stated is not None and len(one.stated)]
        if not told:
            return
        stated = np.concatenate([one.stated for _, one in told if one.stated is not None]).astype(np.float64)
        accepted = np.concatenate([one.accepted for _, one in told])
        rows = np.repeat([row for row, _ in told], [len(one.accepted) for _, one in told])
        sums = np.bincount(rows, self.calibration.rates(stated), len(seen))
        known = [row for row, _ in told]
        expected[known] = sums[known]
        self.calibration.observe(stated, accepted)

    def _pooled(self, levels: int) -> Floats:
        """[levels]: rates over all requests; a level's prior is the rate of the level above it."""
        rates = []
        rate = _FIRST_RATE
        for hits, trials in zip(self._hits[:levels].tolist(), self._trials[:levels].tolist(), strict=True):
            rate = (hits + _POOL_PRIOR * rate) / (trials + _POOL_PRIOR)
            rates.append(rate)
        return np.array(rates)

    def _shifts(self, slots: Ints) -> Floats:
        """[rows]: by how much log odds a request is accepted better than its drafter's others."""
        predicted, hits, trials = self._shift[slots].T
        mean = np.where(trials > 0, predicted / np.maximum(trials, 1e-9), 0.5)
        weight = self._prior_weight()
        seen = (hits + weight * mean) / (trials + weight)
        shifts: Floats = _log_odds(seen) - _log_odds(mean)
        return shifts

    def _prior_weight(self) -> float:
        """Trials that the others' rate is worth: the more, the less requests differ beyond chance (beta-binomial, by moments).

        Without it the requests that were lucky would be drafted deep, and the others not at all.
        """
        predicted, hits, trials = self._shift.T
        told = trials > 2
        count = int(told.sum())
        if count < 4:
            return _USUAL_PRIOR
        predicted, hits, trials = predicted[told], hits[told], trials[told]
        mean = np.clip(predicted / trials, _EDGE, 1 - _EDGE)
        # sums with forgetting vary by half as much as plain ones
        by_chance = float((trials * mean * (1 - mean)).sum()) / (1 + _KEEP)
        excess = float(np.square(hits - predicted).sum()) / by_chance - 1
        return float(np.clip(trials.mean() / max(excess, 1e-3), _LEAST_PRIOR, _MOST_PRIOR))

    def _slot(self, request_id: str) -> int:
        if not self._free:
            size = len(self._own)
            grown = max(8, size)
            self._own = np.concatenate([self._own, np.zeros((grown, 2, LEVELS))])
            self._shift = np.concatenate([self._shift, np.zeros((grown, 3))])
            self._free = list(range(size + grown - 1, size - 1, -1))
        self._slots[request_id] = slot = self._free.pop()
        return slot


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
        """Learns from a step; requests that were not drafted forget a little."""
        idle: dict[str, list[str]] = {}
        drafted: dict[str, list[int]] = {}
        for index, (row, tree) in enumerate(zip(rows, trees, strict=True)):
            if len(tree):
                drafted.setdefault(row.drafter, []).append(index)
            for option in options_of(row.request.drafter) if row.decodes else ():
                if option in self._drafters and not (len(tree) and option == row.drafter):
                    idle.setdefault(option, []).append(row.request.id)
        for drafter, chosen in drafted.items():
            names = [rows[index].request.id for index in chosen]
            self.of(drafter).verify(names, [trees[index] for index in chosen], [outcomes[index] for index in chosen])
        for drafter, request_ids in idle.items():
            self.of(drafter).idle(request_ids)

    def forget(self, request_ids: Iterable[str]) -> None:
        """These requests have ended."""
        for request_id in request_ids:
            for drafter in self._drafters.values():
                drafter.forget(request_id)


@dataclass(frozen=True)
class _Verified:
    """What one draft tells.

    Attributes:
        hits: levels accepted.
        trials: levels decided: one more where none of the next level's nodes was accepted.
        accepted: bool [m], of the nodes whose parent was accepted.
        stated: float32 [m], their confidences; None where there are none.
        ranks: of the accepted nodes of a tree, how many elder siblings each has.
    """

    hits: int
    trials: int
    accepted: NDArray[np.bool_]
    stated: NDArray[np.float32] | None
    ranks: tuple[int, ...] = ()

    @classmethod
    def of(cls, tree: DraftTree, outcome: RowOutcome) -> _Verified:
        path, parents, confidence = outcome.path, tree.parents, tree.confidence
        hits = min(len(path), LEVELS)
        last = path[-1] if path else -1
        goes_on = outcome.finish_reason is None and hits < LEVELS  # behind a stop nobody knows what would have been accepted
        if tree.is_chain():
            trials = hits + (goes_on and hits < len(tree))
            return cls(hits, trials, _PLACES[:trials] < hits, None if confidence is None else confidence[:trials])
        missed = goes_on and bool((parents[last + 1 :] == last).any())
        known = (-1, *path) if missed else (-1, *path[:-1]) if path else ()
        reached = np.isin(parents, known)
        accepted = np.zeros(len(tree), dtype=np.bool_)
        accepted[list(path)] = True
        ranks = tuple(min(int((parents[:node] == parents[node]).sum()), _RANKS - 1) for node in path)
        return cls(hits, hits + missed, accepted[reached], None if confidence is None else confidence[reached], ranks)


_PLACES = np.arange(4096)


def _log_odds(rates: Floats) -> Floats:
    inside = np.clip(rates, _EDGE, 1 - _EDGE)
    odds: Floats = np.log(inside / (1 - inside))
    return odds


def _shifted(rates: Floats, shift: Floats) -> Floats:
    moved: Floats = 1 / (1 + np.exp(-(_log_odds(rates) + shift)))
    return moved
