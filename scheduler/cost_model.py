"""What a step costs, by what is in it: predicted before it runs, corrected by what it took. No torch, no clock.

verify   a table over token rows and KV tokens read, x corrections learned per size, see `verify_curve`
draft    per drafter, linear in rows, steps, rows x steps and tokens to catch up with
sample   linear in logit rows;   commit   linear in requests;   host   linear in requests and in those that draft

All of it is plain numbers: a step asks for a few sizes, and arrays that small cost more to call than to compute.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np
from numpy.typing import NDArray

from specdec.plan import BatchPlan, StepCost
from specdec.scheduler.cost_table import CostTable
from specdec.scheduler.linear_cost import LinearCost
from specdec.scheduler.options import parts_of
from specdec.scheduler.verify_curve import VerifyCurve

_RING = 1024
_ALL_STEPS = 64  # that the small costs are learned from; later every so many are enough, and cost the host less
_SMALL_EVERY = 4
_CATCH_UP_SHARE = 0.1  # of the target's own seconds per prompt token: what a drafter is taken to need before it is measured


@dataclass(frozen=True)
class DraftWork:
    """What one drafter does in a step.

    Attributes:
        rows: rows that it drafts for.
        depth: levels of the deepest draft.
        catch_up: committed tokens that it reads first, over all rows, beyond the newest one of each.
    """

    rows: int
    depth: int
    catch_up: int = 0

    @property
    def features(self) -> tuple[int, int, int, int, int]:
        """What its seconds are linear in: 1, rows, levels, rows x levels, tokens to catch up with."""
        return (1, self.rows, self.depth, self.rows * self.depth, self.catch_up)


@dataclass(frozen=True)
class StepWork:
    """What is in a step, as far as it costs time.

    Attributes:
        tokens: token rows of the target's forward.
        kv_tokens: tokens of KV that its attention reads, over all requests.
        pairs: of a token row and a token of KV from before the step that it attends to.
        logit_rows: rows of logits.
        requests: batch rows.
        drafts: by drafter name.
    """

    tokens: int
    kv_tokens: int = 0
    logit_rows: int = 0
    requests: int = 0
    drafts: Mapping[str, DraftWork] = field(default_factory=dict)
    pairs: int = 0

    @classmethod
    def of(cls, plan: BatchPlan, num_nodes: Sequence[int]) -> StepWork:
        """The work of a plan whose rows verify `num_nodes` nodes each."""
        drafts: dict[str, tuple[int, int, int]] = {}
        nodes, pending, cached, logits, pairs = sum(num_nodes), 0, 0, 0, 0
        for row, count in zip(plan.rows, num_nodes, strict=True):
            pending += row.pending
            cached += row.cached
            pairs += (row.pending + count) * row.cached
            # most rows want no scores of their prompt: said without two calls per row
            plain = row.request.params.prompt_logprobs is None
            logits += (count + 1 if row.cached + row.pending == row.length else 0) if plain else row.num_logits(count)
            if row.draft_limit:
                depth = min(row.draft_limit, row.depth_limit)
                for place, name in enumerate(parts_of(row.drafter)):
                    rows, deepest, unread = drafts.get(name, (0, 0, 0))
                    unread += max(0, row.catch_up[place] - 1) if row.catch_up else 0
                    drafts[name] = (rows + 1, max(deepest, depth), unread)
        works = {name: DraftWork(*work) for name, work in drafts.items()}
        return cls(pending + nodes, cached + pending + nodes, logits, len(plan.rows), works, pairs)

    def with_nodes(self, count: int) -> StepWork:
        """The same step, verifying `count` nodes more."""
        pairs = self.pairs + int(count * self.context)
        return StepWork(self.tokens + count, self.kv_tokens + count, self.logit_rows + count, self.requests, self.drafts, pairs)

    @property
    def drafting(self) -> int:
        """Rows that draft."""
        return max([draft.rows for draft in self.drafts.values()], default=0)

    @property
    def context(self) -> float:
        """Tokens of KV per request."""
        return self.kv_tokens / self.requests if self.requests else 0.0


class CostModel:
    """Predicts and learns the seconds of steps.

    Args:
        table: what verifying and drafting cost to begin with.

    Attributes:
        table: the one it started from.
        curve: what verifying costs.
        history: (predicted, observed) seconds of the last steps, the oldest first.
    """

    def __init__(self, table: CostTable | None = None) -> None:
        self.start(table or CostTable.guess())

    def start(self, table: CostTable) -> None:
        """Starts over from a table."""
        self.table = table
        self.history: deque[tuple[StepCost, StepCost]] = deque(maxlen=_RING)
        self._num_steps = 0
        self.curve = VerifyCurve(table)
        self._drafts: dict[str, LinearCost] = {name: LinearCost(own, measured=True) for name, own in table.drafts.items()}
        self._deepest: dict[str, int] = dict.fromkeys(table.drafts, table.deepest)
        self._pace_then: dict[str, float] = {}  # the curve's, when a drafter was last timed
        first = table.seconds[0]
        self._sample = LinearCost((0.01 * first, 0.001 * first))
        self._commit = LinearCost((0.002 * first, 0.0005 * first))
        self._host = LinearCost((0.01 * first, 0.001 * first, 0.0005 * first))

    # Predicting

    def verify_s(self, tokens: NDArray[np.float64] | NDArray[np.int64]) -> NDArray[np.float64]:
        """Seconds of forwards of so many token rows ([n], at least 1 each, maybe broken) that read no KV; ascending."""
        return self.curve.many_s(tokens)

    def verify_one_s(self, tokens: float, kv_tokens: float = 0.0, pairs: float = 0.0) -> float:
        """The same for one size, which need not be whole, with KV: see `StepWork`."""
        return self.curve.one_s(tokens, kv_tokens, pairs)

    def draft_s(self, name: str, rows: int, depth: int, catch_up: int = 0) -> float:
        """Seconds of a drafter's call for so many rows, so many levels deep, with so many tokens to catch up with; the host's included."""
        if not rows:
            return 0.0
        return self._drift(name) * self._draft(name).predict(DraftWork(rows, depth, catch_up).features) + self._host_draft_s * rows

    def catch_up_token_s(self, name: str) -> float:
        """Seconds per committed token that a drafter has to catch up with."""
        return self._drift(name) * self._draft(name).coefficients[4]

    def deepest_draft(self, name: str) -> int:
        """The most levels that the drafter was called for so far; 0 for one that never was."""
        return self._deepest.get(name, 0)

    def draft_coefficients(self, name: str) -> Sequence[float]:
        """Seconds of a call per 1, row, level, row x level and token to catch up with; the host's included."""
        drift = self._drift(name)
        coefficients = [drift * own for own in self._draft(name).coefficients]
        coefficients[1] += self._host_draft_s
        return coefficients

    def predict(self, work: StepWork) -> StepCost:
        """Seconds of a step, by kind."""
        return StepCost(
            draft_s={name: self._drift(name) * self._draft(name).predict(draft.features) for name, draft in work.drafts.items()}
            if work.drafts
            else _NOTHING,
            verify_s=self.verify_one_s(work.tokens, work.kv_tokens, work.pairs),
            sample_s=self._sample.predict((1, work.logit_rows)),
            commit_s=self._commit.predict((1, work.requests)),
            host_s=self._host.predict((1, work.requests, work.drafting)),
        )

    @property
    def kv_token_s(self) -> float:
        """Seconds per token of KV read."""
        return self.curve.kv_token_s

    @property
    def _host_draft_s(self) -> float:
        """Seconds that the host takes for a row more that drafts."""
        return self._host.coefficients[2]

    def node_kv_s(self, context: float) -> float:
        """Seconds that the attention of one token row more computes, behind so many tokens of KV."""
        return self.curve.pair_s * context

    @property
    def logit_row_s(self) -> float:
        """Seconds per row of logits, to choose from it."""
        return self._sample.coefficients[1]

    # Learning

    def observe(self, work: StepWork, cost: StepCost, predicted: StepCost | None = None) -> None:
        """Learns from what a step took.

        Args:
            predicted: what `predict` says of the work, where it was asked before.
        """
        self.history.append((predicted or self.predict(work), cost))
        self._num_steps += 1
        if cost.verify_s > 0:
            self.curve.observe(work.tokens, work.kv_tokens, work.pairs, cost.verify_s)
        for name, draft in work.drafts.items():
            if name in cost.draft_s:
                self._deepest[name] = max(self._deepest.get(name, 0), draft.depth)
                self._draft(name).scale(self._drift(name))
                self._pace_then[name] = self.curve.pace
                self._draft(name).observe(draft.features, cost.draft_s[name])
        if self._num_steps <= _ALL_STEPS or self._num_steps % _SMALL_EVERY == 0:
            self._sample.observe((1, work.logit_rows), cost.sample_s)
            self._commit.observe((1, work.requests), cost.commit_s)
            self._host.observe((1, work.requests, work.drafting), cost.host_s)

    def median_error(self) -> float | None:
        """Median of |predicted / observed - 1| over the last steps; None before the first."""
        errors = [abs(predicted.total_s / cost.total_s - 1) for predicted, cost in self.history if cost.total_s > 0]
        return float(median(errors)) if errors else None

    def _drift(self, name: str) -> float:
        """By how much the machine has become slower since a drafter was last timed, to judge by the target's forwards.

        A drafter that is not asked is not timed, and one that was timed on a busy machine would never be asked again.
        """
        return self.curve.pace / self._pace_then.get(name, 1.0)

    def _draft(self, name: str) -> LinearCost:
        """A drafter's cost; one that was never called is taken to be cheap, which its first call will tell.

        What that call takes is put down to the call and its levels rather than to its rows: a drafter that is thought too cheap
        for many rows is asked and found out, one that is thought too dear is not.
        """
        known = self._drafts.get(name)
        if known is None:
            step = 0.01 * self.verify_one_s(1)
            known = self._drafts[name] = LinearCost((step, step / 40, step, step / 40, _CATCH_UP_SHARE * self.curve.slope))
            self._pace_then[name] = self.curve.pace
        return known


_NOTHING: dict[str, float] = {}
