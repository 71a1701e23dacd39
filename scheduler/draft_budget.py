"""Spends draft and verify seconds where they pay: the most expected tokens per predicted second.

Before drafting it decides who drafts, with which drafter and how deep; after drafting, which nodes are verified. Both times the
candidates, in the order of their chance to be accepted, form a list of which every prefix is closed (a child never exceeds its
parent), so the best set is the best prefix:

    argmax over n of   (rows that emit + sum of the first n chances) / predicted seconds with n nodes

Drafting nothing is the prefix n = 0 (Hu et al. 2025, arXiv 2406.14066, choose one length for all by the same quotient). Each step
decides anew. What is not expected to pay is probed now and then, see `probing`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from specdec.plan import BatchPlan, Row, RowOutcome, StepCost
from specdec.scheduler.acceptance import LEVELS, AcceptanceModel
from specdec.scheduler.ask import Ask, Outlook, choose_depths
from specdec.scheduler.cost_model import CostModel, StepWork
from specdec.scheduler.flat_drafts import FlatDrafts
from specdec.scheduler.options import options_of, parts_of
from specdec.scheduler.probing import Probing
from specdec.tree import DraftShape, DraftTree, Mask

Floats = NDArray[np.float64]

FREE_SHARE = 0.01
"""A drafter that costs less than this share of a step is always asked: what to verify is decided knowing its confidences."""
_TOKEN_RATE = 0.1
_FIRST_LEVELS = 2  # of a drafter's first call
_MOST_RATE = 1 - 1e-6  # chances are kept below 1, so that a child never exceeds its parent by rounding


class DraftBudget:
    """Decides how much is drafted and verified in a step.

    Args:
        costs: predicts seconds; whoever books the steps feeds it.
        draft_limit: drafter spec -> the most nodes it drafts per request and step; 0 for one that is out of order.
    """

    def __init__(self, costs: CostModel, draft_limit: Callable[[str], int]) -> None:
        self._costs = costs
        self._draft_limit = draft_limit
        self.acceptance = AcceptanceModel()
        self._probing = Probing()
        self._token_s = math.inf  # what a row takes for a token without drafts, over the last steps
        self._probes: dict[str, int] = {}  # request -> levels to verify at least, in this step

    def ask(self, rows: Sequence[Row], base: StepWork, num_emitting: int, cap_s: float) -> list[Ask | None]:
        """Who drafts in this step, before it is known what the drafters will say.

        Args:
            rows: decoding rows that may draft, with the limits that their requests set.
            base: the step without drafts.
            num_emitting: rows of the step that emit a token in any case.
            cap_s: drafting must not make the step longer than this.
        """
        self._probes = {}
        outlook = Outlook(self._costs, base, num_emitting, token_s=self._token_s)
        if outlook.full_s > cap_s:
            return [None] * len(rows)
        options = self._options(rows)
        known = {spec: [option for option in own if self._is_known(option)] for spec, own in options.items()}
        asks = self._ask_free(rows, known, outlook)
        paid = [index for index, row in enumerate(rows) if known[row.request.drafter] and not _is_full(asks[index], row)]
        for index, ask in self._ask_paid([rows[index] for index in paid], known, outlook, cap_s):
            before = asks[paid[index]]
            if before is None or ask.drafter != before.drafter or ask.depth > before.depth:
                asks[paid[index]] = ask
        self._ask_probes(rows, options, outlook, cap_s, asks)
        return asks

    def trim(self, plan: BatchPlan, shapes: Sequence[DraftShape], base: StepWork, cap_s: float) -> list[Mask]:
        """Which nodes are verified, per row bool [n], now that the drafts are there.

        Args:
            base: the step without nodes.
            cap_s: drafts must not make the step longer than this.
        """
        keep = [np.zeros(len(shape), dtype=np.bool_) for shape in shapes]
        drafted = [index for index, shape in enumerate(shapes) if len(shape)]
        rows, own = [plan.rows[index] for index in drafted], [shapes[index] for index in drafted]
        flat = FlatDrafts.of(own) if drafted else None
        self._learn_widths(plan, drafted, flat)
        outlook = Outlook(self._costs, base, sum([row.emits for row in plan.rows]), drafting=True, token_s=self._token_s)
        self._learn_token_s(outlook.token_s(sum([row.decodes for row in plan.rows])))
        if flat is None:
            return keep
        chances = flat.path_products(self._rates(rows, own, flat))
        allowed = _within_limits(rows, flat)
        chances *= allowed
        ordered = np.sort(chances)[::-1]
        chosen = _first(chances, ordered, outlook.best_prefix(ordered, cap_s))
        if self._probes:
            chosen |= self._forced(rows, flat) & allowed
        self._probe_unverified(rows, flat, chosen, allowed, outlook, cap_s)
        for index, mask in zip(drafted, flat.split(chosen), strict=True):
            keep[index] = mask
        return keep

    def finish(
        self, plan: BatchPlan, trees: Sequence[DraftTree], outcomes: Sequence[RowOutcome], cost: StepCost, plain: StepCost | None
    ) -> None:
        """Learns from a step.

        Args:
            plain: what the step was predicted to take without drafts; None where no row decodes.
        """
        self.acceptance.verify(plan.rows, trees, outcomes)
        self._probing.tick(cost.total_s)
        decoding = sum([row.decodes for row in plan.rows])
        if plain is None or decoding == 0:
            return
        token_s = plain.total_s / decoding
        node_s = self._node_s(plan, trees)
        for option, indices in _by_drafter(plan.rows).items():
            spent_s = sum([cost.draft_s.get(part, 0.0) for part in parts_of(option)]) / len(indices)
            gains = {}
            for index in indices:
                gains[plan.rows[index].request.id] = len(outcomes[index].path) * token_s - spent_s - node_s * len(trees[index])
            probed = {name: gain for name, gain in gains.items() if name in self._probes}
            if probed:
                self._probing.probed(option, probed)
            regular = [name for name in gains if name not in probed]
            if regular:
                self._probing.drafted(option, regular, max(0.0, -sum(gains[name] for name in regular)))
        self._probes = {}

    def catching_up(self, plan: BatchPlan) -> set[str]:
        """Drafters of the step with requests that they did not draft in the last one: their seconds say little of their use."""
        names: set[str] = set()
        for option, indices in _by_drafter(plan.rows).items():
            if not self._probing.is_in_use(option, [plan.rows[index].request.id for index in indices]):
                names.update(parts_of(option))
        return names

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self.acceptance.forget((request_id,))
        self._probing.forget(request_id)

    # Before drafting

    def _options(self, rows: Sequence[Row]) -> dict[str, list[str]]:
        """Spec -> the ways to draft under it that are in working order."""
        specs = dict.fromkeys(row.request.drafter for row in rows)
        return {spec: [option for option in options_of(spec) if self._draft_limit(option)] for spec in specs}

    def _is_known(self, option: str) -> bool:
        """Whether it was ever called: what it costs is not known before, so that it begins with a probe."""
        return all(self._costs.deepest_draft(part) for part in parts_of(option))

    def _probe_levels(self, option: str, rows: int, outlook: Outlook) -> int:
        """How deep to probe. What a level costs beyond a call is not known before it was called deep, so the first probes double."""
        limit = self._draft_limit(option)
        deepest = min(self._costs.deepest_draft(part) for part in parts_of(option))
        if deepest < limit:
            return min(limit, max(_FIRST_LEVELS, 2 * deepest))
        return outlook.probe_levels(option, rows, limit)

    def _assignments(self, rows: Sequence[Row], options: dict[str, list[str]], outlook: Outlook) -> list[list[str]]:
        """Ways to give every row a drafter: the same one wherever it is allowed, and each row the one that suits it best."""
        own = [options[row.request.drafter] or [""] for row in rows]
        most = max(map(len, own)) if any(options.values()) else 0
        uniform = [[allowed[min(place, len(allowed) - 1)] for allowed in own] for place in range(most)]
        if most < 2:
            return uniform
        values = np.stack([outlook.net_values(assignment, rows, self.acceptance) for assignment in uniform])  # [options, rows]
        picked = values.argmax(0).tolist()
        return [*uniform, [uniform[place][index] for index, place in enumerate(picked)]]

    def _ask_free(self, rows: Sequence[Row], options: dict[str, list[str]], outlook: Outlook) -> list[Ask | None]:
        """Asks drafters as deep as costs next to nothing: what to verify is decided when their confidences are known."""
        free: dict[str, tuple[str, int]] = {}
        for spec, own in options.items():
            for option in own:
                depths = range(self._draft_limit(option), 0, -1)
                depth = next((d for d in depths if outlook.draft_s(option, len(rows), d) <= FREE_SHARE * outlook.base_s), 0)
                if depth > 0:
                    free[spec] = (option, depth)
                    break
        asks: list[Ask | None] = []
        for row in rows:
            option, depth = free.get(row.request.drafter, ("", 0))
            depth = min(depth, row.depth_limit)
            asks.append(Ask(option, self._limit(option, row, depth), depth) if depth else None)
        return asks

    def _ask_paid(self, rows: Sequence[Row], options: dict[str, list[str]], outlook: Outlook, cap_s: float) -> list[tuple[int, Ask]]:
        """What pays by the rates of the past: (row, ask) for those that should draft."""
        if not rows:
            return []
        best: list[Ask | None] = []
        best_goodput = outlook.goodput_off
        for assignment in self._assignments(rows, options, outlook):
            asks, goodput = choose_depths(rows, assignment, self.acceptance, outlook, cap_s, self._limit)
            if goodput > best_goodput:
                best, best_goodput = asks, goodput
        return [(index, ask) for index, ask in enumerate(best) if ask is not None]

    def _ask_probes(
        self, rows: Sequence[Row], options: dict[str, list[str]], outlook: Outlook, cap_s: float, asks: list[Ask | None]
    ) -> None:
        """Lets some of the rows that would not draft do so, to see."""
        for spec, own in options.items():
            for option in own:
                unasked = {row.request.id: index for index, row in enumerate(rows) if asks[index] is None and row.request.drafter == spec}
                picked = self._probing.pick(option, unasked, outlook.probe_rows(option)) if unasked else []
                levels = self._probe_levels(option, len(picked), outlook) if picked else 0
                if picked and levels > max(_FIRST_LEVELS, outlook.probe_levels(option, len(picked), levels)):
                    picked = picked[:1]  # what a level costs can be learned from one row
                if picked and outlook.full_s + float(outlook.probe_costs(option, len(picked), levels)[-1]) > cap_s:
                    continue
                for name in picked:
                    row = rows[unasked[name]]
                    depth = min(levels, row.depth_limit)
                    asks[unasked[name]] = Ask(option, self._limit(option, row, depth), depth)
                    self._probes[name] = depth

    def _limit(self, option: str, row: Row, depth: int) -> int:
        """Nodes that a draft of so many levels may have."""
        most = min(self._draft_limit(option), row.draft_limit)
        nodes = self.acceptance.of(option).nodes_within
        return most if nodes is None else min(most, nodes[min(depth, LEVELS)])

    # After drafting

    def _learn_token_s(self, seconds: float | None) -> None:
        """Follows what a token takes without drafts; None for a step in which no row decodes."""
        if seconds is not None:
            before = seconds if self._token_s == math.inf else self._token_s
            self._token_s = before + _TOKEN_RATE * (seconds - before)

    def _learn_widths(self, plan: BatchPlan, drafted: Sequence[int], flat: FlatDrafts | None) -> None:
        """Learns how much the drafters propose; `flat` are the drafts of the rows `drafted`."""
        groups = _by_drafter(plan.rows)
        for option, indices in groups.items():
            wanted = np.array([min(plan.rows[index].depth_limit, plan.rows[index].draft_limit, LEVELS) for index in indices])
            asked = len(wanted) - np.bincount(wanted, minlength=LEVELS + 1).cumsum()[:LEVELS]
            counts = np.zeros(LEVELS)
            if flat is not None:
                own = np.isin(drafted, indices)[flat.rows] if len(groups) > 1 else slice(None)
                counts += np.bincount(np.minimum(flat.depths[own], LEVELS), minlength=LEVELS + 1)[1:]
            self.acceptance.of(option).propose(counts, asked)

    def _rates(self, rows: Sequence[Row], shapes: Sequence[DraftShape], flat: FlatDrafts) -> Floats:
        """[n]: chance of each node given that its parent is accepted."""
        rates = np.empty(len(flat.rows))
        ranks = None if flat.are_chains else flat.ranks()
        for option, indices in _by_drafter(rows).items():
            known = self.acceptance.of(option)
            for told in (True, False):
                chosen = [index for index in indices if (shapes[index].confidence is not None) == told]
                if not chosen:
                    continue
                place = np.full(len(rows), -1)
                place[chosen] = np.arange(len(chosen))
                at = slice(None) if len(chosen) == len(rows) else place[flat.rows] >= 0
                names, own = [rows[index].request.id for index in chosen], place[flat.rows[at]]
                if told:
                    stated = np.concatenate([shapes[index].confidence for index in chosen]).astype(np.float64)
                    rates[at] = known.node_rates(stated, own, names)
                else:
                    levels = np.minimum(flat.depths[at], LEVELS) - 1
                    rates[at] = known.rates(names, int(levels.max()) + 1)[own, levels]
                    if ranks is not None:
                        rates[at] *= known.rank_shares(ranks[at])
        return np.clip(rates, 1e-6, _MOST_RATE)

    def _forced(self, rows: Sequence[Row], flat: FlatDrafts) -> Mask:
        """bool [n]: nodes that are verified because their row is probed."""
        levels = np.array([self._probes.get(row.request.id, 0) for row in rows])
        forced: Mask = flat.depths <= levels[flat.rows]
        return forced

    def _probe_unverified(self, rows: Sequence[Row], flat: FlatDrafts, chosen: Mask, allowed: Mask, outlook: Outlook, cap_s: float) -> None:
        """Verifies a little of some drafts that would not be, to see. Changes `chosen`."""
        verified = np.bincount(flat.rows, chosen, len(rows))
        for option, indices in _by_drafter(rows).items():
            unverified = {rows[index].request.id: index for index in indices if verified[index] == 0}
            picked = self._probing.pick(option, unverified, outlook.probe_rows("")) if unverified else []
            levels = outlook.probe_levels("", len(picked), int(flat.depths.max())) if picked else 0
            for name in picked:
                index = unverified[name]
                start, count = int(flat.starts[index]), min(levels, int(flat.sizes[index]))
                if outlook.seconds_with(int(chosen.sum()) + count) > cap_s:
                    return
                chosen[start : start + count] = allowed[start : start + count]
                self._probes[name] = count

    def _node_s(self, plan: BatchPlan, trees: Sequence[DraftTree]) -> float:
        """Predicted seconds per node of this step's forward."""
        nodes, pending = sum([len(tree) for tree in trees]), sum([row.pending for row in plan.rows])
        if nodes == 0:
            return 0.0
        return (self._costs.verify_one_s(pending + nodes) - self._costs.verify_one_s(pending)) / nodes + self._costs.logit_row_s


def _by_drafter(rows: Sequence[Row]) -> dict[str, list[int]]:
    """Drafter -> indices of the rows that draft with it."""
    found: dict[str, list[int]] = {}
    for index, row in enumerate(rows):
        if row.draft_limit:
            found.setdefault(row.drafter, []).append(index)
    return found


def _is_full(ask: Ask | None, row: Row) -> bool:
    """Whether the row is asked for all that it may draft."""
    return ask is not None and ask.drafter == row.request.drafter and (ask.limit >= row.draft_limit or ask.depth >= row.depth_limit)


def _within_limits(rows: Sequence[Row], flat: FlatDrafts) -> Mask:
    """bool [n]: the nodes within the limits that their rows were planned with."""
    nodes, depths = np.array([(row.draft_limit, row.depth_limit) for row in rows]).T
    if (flat.sizes <= np.minimum(nodes, depths)).all():
        return np.ones(len(flat.rows), dtype=np.bool_)
    places = np.arange(len(flat.rows)) - flat.starts[flat.rows]
    within: Mask = (places < nodes[flat.rows]) & (flat.depths <= depths[flat.rows])
    return within


def _first(chances: Floats, ordered: Floats, count: int) -> Mask:
    """bool [n]: the `count` nodes of the highest chance; of equal ones those that come first, so that parents stay.

    Args:
        ordered: `chances`, the highest first.
    """
    if count <= 0:
        return np.zeros(len(chances), dtype=np.bool_)
    least = ordered[count - 1]
    keep: Mask = chances > least
    equal = np.flatnonzero(chances == least)
    keep[equal[: count - int(keep.sum())]] = True
    return keep
