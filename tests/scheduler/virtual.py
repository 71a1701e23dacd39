"""A virtual machine for the scheduler: steps cost what a truth says, drafts are accepted as a law says, time is counted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specdec.config import EngineConfig
from specdec.kv_manager.manager import KVManager
from specdec.plan import BatchPlan, Row, RowOutcome, StepCost
from specdec.request import Request, SamplingParams
from specdec.scheduler.cost_model import CostModel, StepWork
from specdec.scheduler.options import parts_of
from specdec.scheduler.scheduler import Scheduler
from specdec.tree import EMPTY, DraftTree

Law = Callable[[str, Request, int], float]
"""(drafter, request, level from 1) -> chance that the level is accepted given the one above."""


@dataclass
class Truth:
    """What things really cost, in seconds.

    Attributes:
        verify: token rows -> seconds.
        draft: drafter -> (rows, depth) -> seconds.
        catch_up_token_s: of every committed token that a drafter reads for the first time, beside the newest.
        noise: standard deviation of the log of all costs.
    """

    verify: Callable[[int], float]
    draft: Mapping[str, Callable[[int, int], float]] = field(default_factory=dict)
    catch_up_token_s: float = 0.0
    host_s: float = 1e-4
    noise: float = 0.0

    def cost(self, work: StepWork, random: np.random.Generator) -> StepCost:
        def noisy(seconds: float) -> float:
            return seconds * float(np.exp(self.noise * random.standard_normal()))

        return StepCost(
            draft_s={
                name: noisy(self.draft[name](one.rows, one.depth) + self.catch_up_token_s * one.catch_up)
                for name, one in work.drafts.items()
            },
            verify_s=noisy(self.verify(work.tokens)),
            host_s=noisy(self.host_s),
        )


def _none(_drafter: str, _request: Request) -> None:
    """Of drafters without KV."""


class Machine:
    """Runs a scheduler on a truth. `now_s` is the virtual time."""

    def __init__(
        self,
        truth: Truth,
        law: Law,
        *,
        limit: int = 8,
        confidence: Callable[[float, np.random.Generator], float] | None = None,
        costs: CostModel | None = None,
        seed: int = 0,
        num_pages: int = 4096,
        **options: Any,
    ) -> None:
        self.truth, self.law, self.limit = truth, law, limit
        self.config = EngineConfig.from_dict({"page_size": 16, "max_num_seqs": 64, "max_batch_tokens": 2048, **options})
        self.kv = KVManager(num_pages, 16)
        self.now_s = 0.0
        self._read: dict[tuple[str, str], int] = {}  # (drafter, request) -> tokens
        self.scheduler = Scheduler(
            self.config,
            self.kv,
            lambda _spec: limit,
            lambda _id: None,
            lambda: self.now_s,
            costs,
            self._catch_up if truth.catch_up_token_s else _none,
        )
        self.tokens = 0
        self.draft_s = 0.0
        self.plans: list[tuple[BatchPlan, list[int], StepCost]] = []
        self._confidence = confidence
        self._random = np.random.default_rng(seed)
        self._count = 0

    def add(self, output: int, drafter: str = "d", prompt: int = 8, **fields: Any) -> Request:
        name = f"r{self._count}"
        self._count += 1
        tokens = [self._count * 1000 + place for place in range(prompt)]
        request = Request(name, tokens, prompt, SamplingParams(), 0, prompt + output, drafter, arrival_s=self.now_s, **fields)
        self.scheduler.add(request)
        return request

    def step(self) -> BatchPlan:
        plan = self.scheduler.plan()
        self.kv.reserve(plan)
        fates = [self._draft(row) for row in plan.rows]
        self._read.update({(part, row.request.id): row.length for row in plan.rows if row.draft_limit for part in parts_of(row.drafter)})
        plan, keep = self.scheduler.trim(plan, [tree.shape() for tree, _ in fates])
        trees = [tree.select(mask) for (tree, _), mask in zip(fates, keep, strict=True)]
        outcomes = [self._outcome(row, tree, right) for row, tree, (_, right) in zip(plan.rows, trees, fates, strict=True)]
        cost = self.truth.cost(StepWork.of(plan, [len(tree) for tree in trees]), self._random)
        self.now_s += cost.total_s
        self.draft_s += sum(cost.draft_s.values())
        self.kv.commit(plan, outcomes)
        self.scheduler.finish(plan, trees, outcomes, cost)
        for row, outcome in zip(plan.rows, outcomes, strict=True):
            self.tokens += len(outcome.emitted)
            if outcome.finish_reason:
                self.kv.release(row.request)
        self.plans.append((plan, [len(tree) for tree in trees], cost))
        return plan

    def run(self, steps: int | None = None) -> Machine:
        while self.scheduler.has_work and (steps is None or steps > 0):
            self.step()
            steps = None if steps is None else steps - 1
        return self

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.now_s

    def _catch_up(self, drafter: str, request: Request) -> int:
        return len(request.tokens) - self._read.get((drafter, request.id), 0)

    def _draft(self, row: Row) -> tuple[DraftTree, int]:
        """A chain as deep as was asked, and how many of its tokens are right: decided by request and position alone."""
        depth = min(row.draft_limit, row.depth_limit)
        if depth == 0:
            return EMPTY, 0
        random = np.random.default_rng([row.length, *row.request.id.encode()])
        coins = random.random(self.limit)
        chances = [max(self.law(part, row.request, level) for part in parts_of(row.drafter)) for level in range(1, depth + 1)]
        right = next((level for level, chance in enumerate(chances) if coins[level] >= chance), depth)
        stated = None
        if self._confidence is not None:
            stated = np.array([self._confidence(chance, random) for chance in chances], dtype=np.float32)
        return DraftTree.chain(range(depth), stated), right

    def _outcome(self, row: Row, tree: DraftTree, right: int) -> RowOutcome:
        if not row.emits:
            return RowOutcome()
        accepted = min(right, len(tree), row.request.remaining - 1)
        row.request.tokens += [0] * (accepted + 1)
        done = row.request.remaining == 0
        return RowOutcome((0,) * (accepted + 1), tuple(range(accepted)), "length" if done else None)
