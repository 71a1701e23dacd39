"""Spends draft and verify seconds where they pay: the most expected tokens per predicted second.

Before drafting it decides who drafts, with which drafter and how deep; after drafting, which nodes are verified. Both times the
candidates, in the order of their chance to be accepted, form a list of which every prefix is closed (a child never exceeds its
parent), so the best set is the best prefix:

    argmax over n of   (rows that emit + sum of the first n chances) / predicted seconds with n nodes

Drafting nothing is the prefix n = 0 (Hu et al. 2025, arXiv 2406.14066, choose one length for all by the same quotient). Each step
decides anew. What is not expected to pay is probed now and then, see `probing`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import mul

import numpy as np

from specdec.plan import BatchPlan, Row, RowOutcome, StepCost
from specdec.scheduler.acceptance import LEVELS, AcceptanceModel
from specdec.scheduler.ask import Ask, Candidate, choose_depths, net_values
from specdec.scheduler.cost_model import CostModel, StepWork
from specdec.scheduler.node_choice import choose_nodes, within
from specdec.scheduler.options import options_of, parts_of
from specdec.scheduler.outlook import Outlook
from specdec.scheduler.outputs import OutputLengths
from specdec.scheduler.plain_steps import PlainSteps
from specdec.scheduler.probing import Probing
from specdec.scheduler.token_value import TokenValue
from specdec.tree import DraftShape, DraftTree, Mask

FREE_SHARE = 0.01
"""A drafter that costs less than this share of a step is always asked: what to verify is decided knowing its confidences."""
_FIRST_LEVELS = 2  # of a drafter's first call


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
        self._outputs = OutputLengths()
        self._token_value = TokenValue()
        self._plain_steps = PlainSteps()
        self._probes: dict[str, int] = {}  # request -> levels to verify at least, in this step
        self._decided: set[str] = set()  # requests whose depth was chosen by the rates of the past, in this step

    def ask(self, rows: Sequence[Row], base: StepWork, num_emitting: int, cap_s: float, prompt_tokens: int = 0) -> list[Ask | None]:
        """Who drafts in this step, before it is known what the drafters will say.

        Args:
            rows: decoding rows that may draft, with the limits that their requests set.
            base: the step without drafts.
            num_emitting: rows of the step that emit a token in any case.
            cap_s: drafting must not make the step longer than this.
            prompt_tokens: what will join the step after the drafts.
        """
        self._probes = {}
        self._decided = set()
        token_s = self._token_value.within(cap_s, prompt_tokens > 0)
        outlook = Outlook(self._costs, base, num_emitting, token_s=token_s, prompt_tokens=prompt_tokens)
        if outlook.full_s > cap_s or (num_emitting == base.tokens and self._plain_steps.is_due(self._costs.curve, base.tokens)):
            return [None] * len(rows)
        options = self._options(rows)
        known = {spec: [option for option in own if self._is_known(option)] for spec, own in options.items()}
        asks = self._ask_free(rows, known, outlook)
        paid = [index for index, row in enumerate(rows) if known[row.request.drafter] and not _is_full(asks[index], row)]
        for index, ask in self._ask_paid([rows[index] for index in paid], known, outlook, cap_s):
            before = asks[paid[index]]
            if before is None or ask.drafter != before.drafter or ask.depth > before.depth:
                asks[paid[index]] = ask
                self._decided.add(rows[paid[index]].request.id)
        if None in asks:
            self._ask_probes(rows, options, outlook, cap_s, asks)
        return asks

    def trim(self, plan: BatchPlan, shapes: Sequence[DraftShape], base: StepWork, cap_s: float) -> list[Mask]:
        """Which nodes are verified, per row bool [n], now that the drafts are there.

        A draft without confidences, of a depth that was chosen by the rates of the past, tells nothing new: all of it is verified.

        Args:
            base: the step without nodes.
            cap_s: drafts must not make the step longer than this.
        """
        rows = plan.rows
        decoding = sum([row.decodes for row in rows])
        is_plain = decoding == len(rows)
        token_s = self._token_value.within(cap_s, not is_plain)
        outlook = Outlook(self._costs, base, decoding if is_plain else sum([row.emits for row in rows]), drafting=True, token_s=token_s)
        if decoding:  # follows what a token takes without drafts
            self._token_value.observe(outlook.token_s(decoding), outlook.has_prompts(decoding))
        keep = [_NONE] * len(shapes)
        drafted = [index for index, shape in enumerate(shapes) if len(shape)]
        if drafted:
            own = self._choose([rows[index] for index in drafted], [shapes[index] for index in drafted], outlook, cap_s)
            for index, mask in zip(drafted, own, strict=True):
                keep[index] = mask
        for option, indices in _by_drafter(rows).items():
            asked = [min(rows[index].depth_limit, rows[index].draft_limit, LEVELS) for index in indices]
            self.acceptance.of(option).propose(asked, [shapes[index] for index in indices], [keep[index] for index in indices])
        return keep

    def finish(self, plan: BatchPlan, trees: Sequence[DraftTree], outcomes: Sequence[RowOutcome], cost: StepCost) -> None:
        """Learns from a step."""
        self.acceptance.verify(plan.rows, trees, outcomes)
        self._probing.tick(cost.total_s)
        for row, outcome in zip(plan.rows, outcomes, strict=True):
            if outcome.finish_reason is not None:
                self._outputs.end(row.request.num_output)
        groups = _by_drafter(plan.rows)
        node_s = self._node_s(plan, trees) if groups else 0.0
        self._learn_advantage(plan.rows, trees, outcomes, cost, node_s)
        for option, indices in groups.items():
            total_s = sum([cost.draft_s.get(part, 0.0) for part in parts_of(option)])
            self._learn_gains(option, indices, plan.rows, trees, outcomes, total_s, node_s)
        self._probes = {}

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self.acceptance.forget((request_id,))
        self._probing.forget(request_id)

    # Before drafting

    def _options(self, rows: Sequence[Row]) -> dict[str, list[str]]:
        """Spec -> the ways to draft under it that are in working order."""
        specs = dict.fromkeys([row.request.drafter for row in rows])
        return {spec: [option for option in options_of(spec) if self._draft_limit(option)] for spec in specs}

    def _is_known(self, option: str) -> bool:
        """Whether it was ever called: what it costs is not known before, so that it begins with a probe."""
        return all([self._costs.deepest_draft(part) for part in parts_of(option)])

    def _catch_up_s(self, row: Row, option: str | None = None) -> float:
        """Seconds that a drafter, or that of the row, needs to catch up with a row."""
        return sum(
            [
                self._costs.catch_up_token_s(part) * max(0, tokens - 1)
                for part, tokens in zip(parts_of(row.drafter), row.catch_up, strict=False)
                if option is None or part in parts_of(option)
            ]
        )

    def _fee_s(self, row: Row, option: str, running: Sequence[Row]) -> float:
        """What the drafter needs to catch up with a row, spread over the steps that it is expected to draft."""
        seconds = self._catch_up_s(row, option)
        if seconds == 0:
            return 0.0
        rates = self.acceptance.of(option).level_rates(row.request.id, min(row.draft_limit, row.depth_limit, LEVELS))
        rest = min(
            row.request.remaining, self._outputs.expected_rest(row.request.num_output, [other.request.num_output for other in running])
        )
        gains: float = sum(accumulate(rates, mul))
        return seconds / max(1.0, rest / (1 + gains))

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
        values = np.stack([net_values(assignment, rows, self.acceptance, outlook) for assignment in uniform])  # [options, rows]
        picked = values.argmax(0).tolist()
        return [*uniform, [uniform[place][index] for index, place in enumerate(picked)]]

    def _ask_free(self, rows: Sequence[Row], options: dict[str, list[str]], outlook: Outlook) -> list[Ask | None]:
        """Asks drafters as deep as costs next to nothing: what to verify is decided when their confidences are known."""
        free: dict[str, tuple[str, int]] = {}
        for spec, own in options.items():
            for option in own:
                depth = outlook.depth_within(option, len(rows), self._draft_limit(option), FREE_SHARE)
                if depth > 0:
                    free[spec] = (option, depth)
                    break
        if not free:
            return [None] * len(rows)
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
            candidates = [
                Candidate(row, option, self._fee_s(row, option, rows) if row.catch_up and option else 0.0)
                for row, option in zip(rows, assignment, strict=True)
            ]
            asks, goodput = choose_depths(candidates, self.acceptance, outlook, cap_s, self._limit)
            if goodput > best_goodput:
                best, best_goodput = asks, goodput
        return [(index, ask) for index, ask in enumerate(best) if ask is not None]

    def _ask_probes(
        self, rows: Sequence[Row], options: dict[str, list[str]], outlook: Outlook, cap_s: float, asks: list[Ask | None]
    ) -> None:
        """Lets some of the rows that would not draft do so, to see."""
        for spec, own in options.items():
            for option in own:
                if not self._probing.has_turn(option):
                    continue
                unasked = {row.request.id: index for index, row in enumerate(rows) if asks[index] is None and row.request.drafter == spec}
                if not unasked:
                    continue
                dear_s = {name: self._dear_s(rows[index], option, outlook) for name, index in unasked.items()}
                picked = self._probing.pick(option, dear_s, outlook.probe_rows(option))
                if not picked:
                    continue
                levels = self._probe_levels(option, len(picked), outlook)
                if levels > max(_FIRST_LEVELS, outlook.probe_levels(option, len(picked), levels)):
                    picked = picked[:1]  # what a level costs can be learned from one row
                if outlook.full_s + outlook.probe_s(option, len(picked), levels) > cap_s:
                    continue
                for name in picked:
                    row = rows[unasked[name]]
                    depth = min(levels, row.depth_limit)
                    asks[unasked[name]] = Ask(option, self._limit(option, row, depth), depth)
                    self._probes[name] = depth
                    self._decided.add(name)

    def _dear_s(self, row: Row, option: str, outlook: Outlook) -> float:
        """Seconds to catch up with a row where they are more than a probe may cost, else 0."""
        seconds = self._catch_up_s(row, option) if row.catch_up else 0.0
        return seconds if seconds > outlook.probe_budget_s else 0.0

    def _limit(self, option: str, row: Row, depth: int) -> int:
        """Nodes that a draft of so many levels may have."""
        most = min(self._draft_limit(option), row.draft_limit)
        nodes = self.acceptance.of(option).nodes_within(min(depth, LEVELS))
        return most if nodes is None else min(most, nodes)

    # After drafting

    def _choose(self, rows: Sequence[Row], shapes: Sequence[DraftShape], outlook: Outlook, cap_s: float) -> list[Mask]:
        """The nodes of non-empty drafts that are verified, those of probes among them."""
        is_decided = all([shape.confidence is None and row.request.id in self._decided for row, shape in zip(rows, shapes, strict=True)])
        if is_decided and outlook.full_s + outlook.node_s(sum([len(shape) for shape in shapes])) <= cap_s:
            return [within(shape, row.draft_limit, row.depth_limit) for row, shape in zip(rows, shapes, strict=True)]
        masks, kept = choose_nodes(rows, shapes, self.acceptance, outlook, cap_s)
        if self._probes:
            self._keep_probes(rows, shapes, masks, kept)
        if not all(kept):
            self._probe_unverified(rows, shapes, masks, kept, outlook, cap_s)
        return masks

    def _keep_probes(self, rows: Sequence[Row], shapes: Sequence[DraftShape], masks: list[Mask], kept: list[int]) -> None:
        """Adds to `masks`, and to their counts `kept`, the nodes that are verified because their row is probed."""
        for index, row in enumerate(rows):
            levels = self._probes.get(row.request.id, 0)
            if levels:
                masks[index] = masks[index] | within(shapes[index], row.draft_limit, min(row.depth_limit, levels))
                kept[index] = int(np.count_nonzero(masks[index]))

    def _probe_unverified(
        self, rows: Sequence[Row], shapes: Sequence[DraftShape], masks: list[Mask], kept: list[int], outlook: Outlook, cap_s: float
    ) -> None:
        """Verifies a little of some drafts that would not be, to see. Changes `masks` and their counts `kept`."""
        for option, indices in _by_drafter(rows).items():
            if not self._probing.has_turn(option):
                continue
            unverified = {rows[index].request.id: index for index in indices if kept[index] == 0}
            picked = self._probing.pick(option, dict.fromkeys(unverified, 0.0), outlook.probe_rows("")) if unverified else []
            levels = outlook.probe_levels("", len(picked), max([len(shapes[unverified[name]]) for name in picked])) if picked else 0
            for name in picked:
                index = unverified[name]
                row, shape = rows[index], shapes[index]
                mask = within(shape, min(levels, row.draft_limit), row.depth_limit)
                count = int(np.count_nonzero(mask))
                if outlook.full_s + outlook.node_s(sum(kept) + count) > cap_s:
                    return
                masks[index], kept[index] = mask, count
                self._probes[name] = count

    # After verifying

    def _learn_gains(
        self,
        option: str,
        indices: Sequence[int],
        rows: Sequence[Row],
        trees: Sequence[DraftTree],
        outcomes: Sequence[RowOutcome],
        total_s: float,
        node_s: float,
    ) -> None:
        """Tells what drafting saved, less what it cost.

        Args:
            indices: of the rows that drafted with this option.
            total_s: what its drafters took.
            node_s: what a node added to the forward.
        """
        catch_up_s = [self._catch_up_s(rows[index]) if rows[index].catch_up else 0.0 for index in indices]
        spent_s = max(0.0, total_s - sum(catch_up_s)) / len(indices)
        token_s = self._token_value.seconds
        gains = {rows[index].request.id: len(outcomes[index].path) * token_s - spent_s - node_s * len(trees[index]) for index in indices}
        if not self._probes:
            self._probing.drafted(option, list(gains), max(0.0, -sum(gains.values())))
            return
        probed = {name: gain for name, gain in gains.items() if name in self._probes}
        if probed:
            read_s = {name: own for name, own in zip(gains, catch_up_s, strict=True) if own > 0 and name in probed}
            self._probing.probed(option, probed, read_s, total_s)
        regular = [name for name in gains if name not in probed]
        if regular:
            self._probing.drafted(option, regular, max(0.0, -sum([gains[name] for name in regular])))

    def _learn_advantage(
        self, rows: Sequence[Row], trees: Sequence[DraftTree], outcomes: Sequence[RowOutcome], cost: StepCost, node_s: float
    ) -> None:
        """Follows what drafts bring, in steps that have nothing but decoding rows."""
        if self._probes or not all([row.decodes for row in rows]) or cost.verify_s <= 0:
            return
        nodes = sum(map(len, trees))
        emitted = sum([len(outcome.path) + 1 for outcome in outcomes]) / len(rows)
        drafting_s = sum(cost.draft_s.values()) + node_s * nodes
        self._plain_steps.observe(nodes, emitted, cost.total_s, cost.verify_s, drafting_s)

    def _node_s(self, plan: BatchPlan, trees: Sequence[DraftTree]) -> float:
        """Predicted seconds per node of this step's forward."""
        nodes, pending = sum([len(tree) for tree in trees]), sum([row.pending for row in plan.rows])
        if nodes == 0:
            return 0.0
        products_s = (self._costs.verify_one_s(pending + nodes) - self._costs.verify_one_s(pending)) / nodes
        return products_s + self._costs.logit_row_s + self._costs.node_kv_s(sum([row.cached for row in plan.rows]) / len(plan.rows))


_NONE: Mask = np.zeros(0, dtype=np.bool_)


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
