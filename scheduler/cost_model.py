"""What a step costs, by what is in it: predicted before it runs, corrected by what it took. No torch, no clock.

verify   a table over token rows x corrections learned per size, + seconds per KV token read
draft    per drafter, linear in rows, steps and rows x steps
sample   linear in logit rows;   commit, host   linear in requests
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specdec.plan import BatchPlan, StepCost
from specdec.scheduler.cost_table import CostTable
from specdec.scheduler.linear_cost import LinearCost, correction
from specdec.scheduler.options import parts_of

_DENSE = 1024  # token rows up to which the curve is kept row by row, so that the budget only has to index it
_REACH = 6.0  # a size corrects its neighbours too, less and less up to 64 times as large or small: prompts say little of decoding
_RING = 1024


@dataclass(frozen=True)
class DraftWork:
    """What one drafter does in a step: for so many rows, so many levels deep."""

    rows: int
    depth: int


@dataclass(frozen=True)
class StepWork:
    """What is in a step, as far as it costs time.

    Attributes:
        tokens: token rows of the target's forward.
        kv_tokens: tokens of KV that its attention reads, over all rows.
        logit_rows: rows of logits.
        requests: batch rows.
        drafts: by drafter name.
    """

    tokens: int
    kv_tokens: int = 0
    logit_rows: int = 0
    requests: int = 0
    drafts: Mapping[str, DraftWork] = field(default_factory=dict)

    @classmethod
    def of(cls, plan: BatchPlan, num_nodes: Sequence[int]) -> StepWork:
        """The work of a plan whose rows verify `num_nodes` nodes each."""
        drafts: dict[str, tuple[int, int]] = {}
        nodes, pending, cached, logits = sum(num_nodes), 0, 0, 0
        for row, count in zip(plan.rows, num_nodes, strict=True):
            pending += row.pending
            cached += row.cached
            logits += row.num_logits(count)
            if row.draft_limit:
                depth = min(row.draft_limit, row.depth_limit)
                for name in parts_of(row.drafter):
                    rows, deepest = drafts.get(name, (0, 0))
                    drafts[name] = (rows + 1, max(deepest, depth))
        works = {name: DraftWork(*work) for name, work in drafts.items()}
        return cls(pending + nodes, cached + pending + nodes, logits, len(plan.rows), works)

    def with_nodes(self, count: int) -> StepWork:
        """The same step, verifying `count` nodes more."""
        return StepWork(self.tokens + count, self.kv_tokens + count, self.logit_rows + count, self.requests, self.drafts)


class CostModel:
    """Predicts and learns the seconds of steps.

    Args:
        table: what verifying costs to begin with.

    Attributes:
        history: (predicted, observed) seconds of the last steps, the oldest first.
    """

    def __init__(self, table: CostTable | None = None) -> None:
        self.start(table or CostTable.guess())

    def start(self, table: CostTable) -> None:
        """Starts over from a table."""
        self.table = table
        self.history: deque[tuple[StepCost, StepCost]] = deque(maxlen=_RING)
        self._grid = np.array(self.table.tokens, dtype=np.float64)
        self._log_grid = np.log2(self._grid)
        self._seconds = np.array(self.table.seconds, dtype=np.float64)
        self._correction = np.zeros(len(self._grid))  # log of observed / table
        self._seen = np.full(len(self._grid), float(self.table.weight))
        self._kv_token_s = self.table.kv_token_s
        self._drafts: dict[str, LinearCost] = {}
        self._deepest: dict[str, int] = {}
        first = self.table.seconds[0]
        self._sample = LinearCost((0.01 * first, 0.001 * first))
        self._commit = LinearCost((0.002 * first, 0.0005 * first))
        self._host = LinearCost((0.01 * first, 0.001 * first))
        self._rebuild()

    # Predicting

    def verify_s(self, tokens: NDArray[np.integer[Any]], kv_tokens: float = 0.0) -> NDArray[np.float64]:
        """Seconds of forwards of so many token rows (int [n], each at least 1) that read `kv_tokens` of KV; ascending in both."""
        over = np.maximum(tokens - _DENSE, 0)
        seconds: NDArray[np.float64] = self._curve[tokens - over] + self._slope * over + self._kv_token_s * kv_tokens
        return seconds

    def verify_one_s(self, tokens: int, kv_tokens: float = 0.0) -> float:
        """The same for one size."""
        over = max(tokens - _DENSE, 0)
        return float(self._curve[tokens - over]) + self._slope * over + self._kv_token_s * kv_tokens

    def draft_s(self, name: str, rows: int, depth: int) -> float:
        """Seconds of a drafter's call for so many rows, so many levels deep."""
        return self._draft(name).predict((1, rows, depth, rows * depth)) if rows else 0.0

    def deepest_draft(self, name: str) -> int:
        """The most levels that the drafter was called for so far; 0 for one that never was."""
        return self._deepest.get(name, 0)

    def draft_coefficients(self, name: str) -> tuple[float, ...]:
        """Seconds of a call per 1, row, level and row x level."""
        return tuple(self._draft(name).coefficients)

    def predict(self, work: StepWork) -> StepCost:
        """Seconds of a step, by kind."""
        return StepCost(
            draft_s={name: self.draft_s(name, draft.rows, draft.depth) for name, draft in work.drafts.items()},
            verify_s=self.verify_one_s(work.tokens, work.kv_tokens),
            sample_s=self._sample.predict((1, work.logit_rows)),
            commit_s=self._commit.predict((1, work.requests)),
            host_s=self._host.predict((1, work.requests)),
        )

    @property
    def kv_token_s(self) -> float:
        """Seconds per token of KV read."""
        return self._kv_token_s

    @property
    def logit_row_s(self) -> float:
        """Seconds per row of logits, to choose from it."""
        return self._sample.coefficients[1]

    # Learning

    def observe(self, work: StepWork, cost: StepCost, catching_up: Collection[str] = ()) -> None:
        """Learns from what a step took.

        Args:
            catching_up: drafters that had more to do than to draft; only what is known of nothing else is learned from them.
        """
        self.history.append((self.predict(work), cost))
        if cost.verify_s > 0:
            self._observe_verify(work, cost.verify_s)
        for name, draft in work.drafts.items():
            if name in cost.draft_s and (name not in catching_up or self._draft(name).num_seen < 2):
                self._deepest[name] = max(self._deepest.get(name, 0), draft.depth)
                self._draft(name).observe((1, draft.rows, draft.depth, draft.rows * draft.depth), cost.draft_s[name])
        self._sample.observe((1, work.logit_rows), cost.sample_s)
        self._commit.observe((1, work.requests), cost.commit_s)
        self._host.observe((1, work.requests), cost.host_s)

    def median_error(self) -> float | None:
        """Median of |predicted / observed - 1| over the last steps; None before the first."""
        errors = [abs(predicted.total_s / cost.total_s - 1) for predicted, cost in self.history if cost.total_s > 0]
        return float(np.median(errors)) if errors else None

    def _observe_verify(self, work: StepWork, seconds: float) -> None:
        """Moves the corrections of sizes near this one most, and shares the error between rows and KV by their part in it.

        The kernel of the update is positive definite, so that sizes which disagree both come right.
        """
        kv_s = self._kv_token_s * work.kv_tokens
        predicted = self.verify_one_s(work.tokens) + kv_s
        place = math.log2(max(work.tokens, 1))
        nearness = np.maximum(0.0, 1 - np.abs(self._log_grid - place) / _REACH)
        seen = int(self._seen[int(nearness.argmax())])
        moved = correction(math.log(seconds / predicted), seen)
        kv_share = kv_s / predicted
        # nothing measured yet: the first steps set the scale of all sizes
        self._correction += moved * (1 - kv_share) * (nearness if seen > 8 else 1.0)
        self._kv_token_s *= math.exp(moved * kv_share)
        self._seen += np.maximum(nearness, 1.0 if seen <= 8 else 0.0)
        self._rebuild(int(nearness.argmax()))

    def _rebuild(self, anchor: int = 0) -> None:
        """Makes the curve, ascending: the sizes on either side give way to the one just seen."""
        seconds = self._seconds * np.exp(self._correction)
        seconds[anchor:] = np.maximum.accumulate(seconds[anchor:])
        seconds[: anchor + 1] = np.minimum.accumulate(seconds[anchor::-1])[::-1]
        self._correction = np.log(seconds / self._seconds)
        self._slope = 0.0
        if len(seconds) > 1:
            self._slope = float((seconds[-1] - seconds[-2]) / (self._grid[-1] - self._grid[-2]))
        sizes = _SIZES
        self._curve = np.interp(sizes, self._grid, seconds) + self._slope * np.maximum(sizes - self._grid[-1], 0)

    def _draft(self, name: str) -> LinearCost:
        """A drafter's cost; one that was never called is taken to be cheap, which its first call will tell.

        What that call takes is put down to the call and its levels rather than to its rows: a drafter that is thought too cheap
        for many rows is asked and found out, one that is thought too dear is not.
        """
        known = self._drafts.get(name)
        if known is None:
            step = 0.01 * float(self._curve[1])
            known = self._drafts[name] = LinearCost((step, step / 40, step, step / 40))
        return known


_SIZES = np.arange(_DENSE + 1, dtype=np.float64)
