"""Continuous batching: plans each step's rows within token, page and time budgets, and preempts when pages run out.

Decoding rows come first, then drafts, then prefill chunks, then waiting requests: a prompt never stalls those that run.
Everything is counters: a request that was preempted is one whose cached tokens are 0 again, unless the host keeps them. What drafts
are worth is `draft_budget`'s business, what time a step may take `targets`'.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from specdec.config import EngineConfig
from specdec.errors import InvariantError
from specdec.kv_manager.manager import KVManager
from specdec.plan import BatchPlan, Event, Row, RowOutcome, StepCost
from specdec.request import Request, RequestStats
from specdec.scheduler.accounting import account
from specdec.scheduler.ask import Ask
from specdec.scheduler.cost_model import CostModel, StepWork
from specdec.scheduler.draft_budget import DraftBudget
from specdec.scheduler.fair_share import FairShare
from specdec.scheduler.options import parts_of
from specdec.scheduler.preemption import swap_pays
from specdec.scheduler.queue import RequestQueue, order
from specdec.scheduler.targets import check_ttft, predict_ttft_s, prompt_room, step_cap_s
from specdec.tree import DraftShape, DraftTree, Mask

_SMALL_CATCH_UP = 16  # tokens that a drafter reads along with its first level: what it accepted, and what it was not asked for
_SHOWN = 32  # steps in the status


class Scheduler:
    """Owns which requests wait and which run.

    Args:
        config: limits.
        kv: page accounting; the scheduler asks and admits, the engine reserves and commits.
        draft_limit: drafter spec -> the most nodes it drafts per request and step.
        on_release: called with a request whose KV was just given up, by preemption.
        clock: seconds; the same clock that stamps arrivals.
        costs: predicts steps, and learns from them; None starts from a guess.
        catch_up: (drafter, request) -> its committed tokens that the drafter has not read; None for a drafter without KV.
    """

    def __init__(
        self,
        config: EngineConfig,
        kv: KVManager,
        draft_limit: Callable[[str], int],
        on_release: Callable[[str], None],
        clock: Callable[[], float],
        costs: CostModel | None = None,
        catch_up: Callable[[str, Request], int | None] = lambda _drafter, _request: None,
    ) -> None:
        self._config = config
        self._kv = kv
        self._draft_limit = draft_limit
        self._on_release = on_release
        self._clock = clock
        self._catch_up = catch_up
        self.costs = costs or CostModel()
        self._budget = DraftBudget(self.costs, draft_limit)
        self._fair_share = FairShare() if config.fair_share else None
        self._prefill_chunk = config.prefill_chunk or config.max_batch_tokens
        self.waiting = RequestQueue()
        self.running: list[Request] = []
        self.preemptions = 0
        self._ended = RequestStats()  # seconds of requests that have ended, all together

    @property
    def has_work(self) -> bool:
        return bool(self.running) or len(self.waiting) > 0

    def check(self, request: Request) -> None:
        """Raises OverloadedError if the first token of this request is predicted to come later than its target."""
        if request.target_ttft_s is not None:
            check_ttft(request.target_ttft_s, self._predict_ttft_s(request))

    def add(self, request: Request) -> None:
        if self._fair_share is not None:
            self._fair_share.arrive(request.user, self._users())
        self.waiting.push(request)

    def remove(self, request_id: str) -> Request | None:
        """Takes a request out, wherever it is; None if it is not here. Its KV is the caller's to release."""
        self._budget.forget(request_id)
        request = self.waiting.find(request_id)
        if request is not None:
            self.waiting.remove(request)
            return request
        request = next((r for r in self.running if r.id == request_id), None)
        if request is not None:
            self.running.remove(request)
        return request

    def plan(self) -> BatchPlan:
        """The rows of the next step; none if nothing waits or runs."""
        self.running.sort(key=order)
        step = _Step(self._kv, self._config.max_batch_tokens)
        self._plan_decodes(step)
        self._plan_drafts(step)
        self._leave_room(step)
        self._plan_prefills(step)
        if not step.preempted:
            self._admit(step)
        if self.has_work and not step.rows:
            raise InvariantError(
                f"no row can run: {len(self.running)} running, {len(self.waiting)} waiting, {self._kv.num_available} pages"
            )
        return BatchPlan(tuple(step.rows))

    def trim(self, plan: BatchPlan, shapes: Sequence[DraftShape]) -> tuple[BatchPlan, list[Mask]]:
        """Decides which nodes are verified: those that pay, or all within the row's limits where the budget is fixed.

        It is shown the shapes of the drafts and never their tokens, because under some verification rules the output's
        law would change if it looked at them.

        Returns:
            The plan with its predicted cost, and for each row bool [n]: the nodes to keep. A node whose parent goes, goes too.
        """
        base = StepWork.of(plan, [0] * len(plan.rows))
        if self._config.draft_budget == "auto":
            keep = self._budget.trim(plan, shapes, base, step_cap_s(self.running))
        else:
            keep = [shape.within(row.draft_limit, row.depth_limit) for row, shape in zip(plan.rows, shapes, strict=True)]
        num_kept = sum([int(np.count_nonzero(mask)) for mask in keep])
        return replace(plan, predicted=self.costs.predict(base.with_nodes(num_kept))), keep

    def finish(self, plan: BatchPlan, trees: Sequence[DraftTree], outcomes: Sequence[RowOutcome], cost: StepCost) -> list[Event]:
        """Books the step and tells what each request got out of it; ended requests stop running."""
        self._learn(plan, trees, outcomes, cost)
        events = []
        for row, outcome in zip(plan.rows, outcomes, strict=True):
            request = row.request
            if outcome.emitted and request.stats.first_token_s is None:
                request.stats.first_token_s = self._clock() - request.arrival_s
            if outcome.finish_reason is not None:
                request.finish_reason = outcome.finish_reason
                self.running.remove(request)
                self._budget.forget(request.id)
                self._ended.off_s += request.stats.off_s
                self._ended.decode_s += request.stats.decode_s
            if outcome.emitted or outcome.prompt_logprobs or outcome.finish_reason is not None:
                events.append(_event(request, outcome))
        return events

    def status(self) -> dict[str, Any]:
        """What the cost model knows, how well it predicted the last steps, and what drafting brought so far; JSON values."""
        history = list(self.costs.history)[-_SHOWN:]
        return {
            "draft_budget": self._config.draft_budget,
            "speedup": self._ended.speedup,
            "median_error": self.costs.median_error(),
            "verify_s": {str(size): self.costs.verify_one_s(size) for size in (1, 2, 4, 8, 16, 32, 64, 128)},
            "recent_steps": [{"predicted_s": predicted.total_s, "observed_s": cost.total_s} for predicted, cost in history],
        }

    def _learn(self, plan: BatchPlan, trees: Sequence[DraftTree], outcomes: Sequence[RowOutcome], cost: StepCost) -> None:
        """Books the step to its requests, and feeds the models with it."""
        sizes = [len(tree) for tree in trees]
        work = StepWork.of(plan, sizes)
        predicted = plan.predicted or self.costs.predict(work)
        plain = None
        if work.drafts:
            plain = _as_observed(self.costs.predict(replace(work.with_nodes(-sum(sizes)), drafts={})), predicted, cost)
        account(plan, trees, outcomes, cost, kv_weight=self.costs.kv_token_s * work.tokens / predicted.verify_s, plain=plain)
        self.costs.observe(work, cost, predicted)
        self._budget.finish(plan, trees, outcomes, cost)
        if self._fair_share is not None:
            for row, outcome in zip(plan.rows, outcomes, strict=True):
                self._fair_share.serve(row.request.user, 0 if row.decodes else row.pending, len(outcome.emitted))
            self._fair_share.keep(self._users())

    def _plan_decodes(self, step: _Step) -> None:
        for request in tuple(self.running):
            if request not in self.running:  # an earlier one has preempted it
                continue
            cached = self._kv.cached(request.id)
            if len(request.tokens) - cached == 1:
                while not step.add(Row(request, cached, 1)):
                    victim = self._preempt(step)
                    if victim is request:
                        break

    def _plan_drafts(self, step: _Step) -> None:
        """Gives decoding rows their drafts: what the budget asks for, or a fixed length, as tokens and pages allow."""
        open_ = {index: row for index, row in enumerate(map(self._with_limits, step.rows)) if row.draft_limit > 0}
        if not open_:
            return
        rows = list(open_.values())
        if self._config.draft_budget == "auto":
            base = StepWork.of(BatchPlan(tuple(step.rows)), [0] * len(step.rows))
            asks = self._budget.ask(rows, base, len(step.rows), step_cap_s(self.running), self._prompt_tokens(step))
        else:
            asks = [Ask(row.drafter, row.draft_limit, row.depth_limit) for row in rows]
        for index, ask in zip(open_, asks, strict=True):
            if ask is not None:
                step.widen(index, ask, open_[index])

    def _prompt_tokens(self, step: _Step) -> int:
        """How many prompt tokens will join the decoding rows, as far as can be told before the drafts are planned."""
        tokens = 0
        if len(step.rows) < len(self.running):
            tokens = sum([pending for request in self.running if (pending := self._pending(request)) > 1])
        if len(self.running) < self._config.max_num_seqs:
            for request in self.waiting:
                if tokens >= step.budget or not step.fits(request, len(request.tokens)):
                    break
                tokens += len(request.tokens)
        return min(tokens, step.budget)

    def _with_limits(self, row: Row) -> Row:
        """The row with as much draft as its drafter, its request and its end allow."""
        request = row.request
        depth = request.remaining - 1
        if not row.decodes or request.drafter == "off" or depth < 1:
            return row
        limit = self._draft_limit(request.drafter)
        if request.max_draft is not None:
            limit = min(limit, request.max_draft)
        if isinstance(self._config.draft_budget, int):
            limit = min(limit, self._config.draft_budget)
        unread = [self._catch_up(part, request) or 0 for part in parts_of(request.drafter)]
        catch_up = tuple(unread) if max(unread) > _SMALL_CATCH_UP else ()
        return Row(request, row.cached, row.pending, limit, depth, request.drafter, catch_up)

    def _leave_room(self, step: _Step) -> None:
        """Keeps prompt chunks so small that the step stays within the target of those that decode."""
        cap_s = step_cap_s(row.request for row in step.rows)
        if cap_s < math.inf:
            work = StepWork.of(BatchPlan(tuple(step.rows)), [0] * len(step.rows))
            step.budget = prompt_room(self.costs, work, cap_s, step.budget)

    def _plan_prefills(self, step: _Step) -> None:
        planned = {row.request.id for row in step.rows}
        for request in tuple(self.running):
            if request.id in planned or request not in self.running:
                continue
            row = self._prefill_row(request, step)
            while row is not None and not step.add(row):
                if self._preempt(step) is request:
                    break

    def _admit(self, step: _Step) -> None:
        for request in self._queue():
            if len(self.running) >= self._config.max_num_seqs or step.budget == 0:
                return
            if self._awaits_parent(request):
                continue
            # All its tokens must fit, not just this chunk, or it would be preempted half way through its prompt
            if not step.fits(request, len(request.tokens)):
                return  # in order: a small request must not overtake a large one for ever
            self._kv.admit(request)
            row = self._prefill_row(request, step)
            if row is None or not step.add(row):
                self._kv.release(request)
                return
            self.waiting.remove(request)
            self.running.append(request)
            if request.stats.preemptions == 0:
                request.stats.cached_prompt_tokens = row.cached
                request.stats.queue_s = self._clock() - request.arrival_s

    def _queue(self) -> Sequence[Request]:
        """Those waiting, in the order in which they are admitted."""
        return tuple(self.waiting) if self._fair_share is None else self._fair_share.order(self.waiting)

    def _users(self) -> set[str]:
        return {request.user for request in (*self.running, *self.waiting)}

    def _predict_ttft_s(self, request: Request) -> float:
        """Seconds until a request that arrives now has its first token, if all that runs goes on."""
        place = order(request)
        ahead = [pending for other in self.running if (pending := self._pending(other)) > 1]
        ahead += [len(other.tokens) for other in self.waiting if order(other) < place]
        own = request.num_prompt - self._kv.lookup(request.tokens)
        decoding = min(len(self.running), self._config.max_num_seqs - 1)
        return predict_ttft_s(self.costs, ahead, own, decoding, min(self._prefill_chunk, self._config.max_batch_tokens - decoding))

    def _prefill_row(self, request: Request, step: _Step) -> Row | None:
        pending = min(self._pending(request), self._prefill_chunk, step.budget)
        return Row(request, self._kv.cached(request.id), pending) if pending > 0 else None

    def _pending(self, request: Request) -> int:
        return len(request.tokens) - self._kv.cached(request.id)

    def _awaits_parent(self, request: Request) -> bool:
        """Whether a sibling is still computing the prompt whose pages this request will share."""
        if request.parent is None:
            return False
        if self.waiting.find(request.parent) is not None:
            return True
        parent = next((r for r in self.running if r.id == request.parent), None)
        return parent is not None and self._kv.cached(parent.id) < request.num_prompt

    def _preempt(self, step: _Step) -> Request:
        """Gives up the KV of the last request in order, or lets the host keep it where that is cheaper; it waits for its next turn."""
        victim = self.running.pop()
        step.drop(victim)
        step.preempted = True
        offer = self._kv.swap_offer(victim)
        if offer is not None and swap_pays(offer, self.costs, self._prefill_chunk, len(self.running)):
            self._kv.swap_out(victim)
        else:
            self._kv.release(victim)
        self._on_release(victim.id)
        victim.stats.preemptions += 1
        self.preemptions += 1
        self.waiting.push(victim)
        return victim


_EVICTED_BY_DRAFTS = 16
"""One in so many cached pages may be evicted for drafts: they come back to the free list and serve the next step's."""


class _Step:
    """Rows planned so far, and the tokens and pages that are left."""

    def __init__(self, kv: KVManager, max_tokens: int) -> None:
        self._kv = kv
        self._pages: list[int] = []
        self._taken = 0
        evictable = kv.num_available - kv.num_free
        self._draftable = kv.num_free + evictable // _EVICTED_BY_DRAFTS
        self.rows: list[Row] = []
        self.budget = max_tokens
        self.preempted = False

    def fits(self, request: Request, num_tokens: int) -> bool:
        """Whether the pages for so many tokens of a request are left."""
        return self._kv.pages_needed(request, num_tokens) <= self._kv.num_available - self._taken

    def add(self, row: Row) -> bool:
        """Takes the row if its tokens and pages fit."""
        needed = self._kv.pages_needed(row.request, row.cached + row.pending)
        if row.pending > self.budget or needed > self._kv.num_available - self._taken:
            return False
        self.rows.append(row)
        self._pages.append(needed)
        self._taken += needed
        self.budget -= row.pending
        return True

    def widen(self, index: int, ask: Ask, most: Row) -> None:
        """Gives a planned row the draft asked for, or as many nodes of it as tokens and pages allow.

        Args:
            most: the row with all that its request's drafters could do.
        """
        row = self.rows[index]
        left = self._draftable - self._taken + self._pages[index]
        limit = min(ask.limit, self.budget)
        while limit > 0 and (needed := self._kv.pages_needed(row.request, row.cached + row.pending + limit)) > left:
            limit -= 1
        if limit > 0:
            catch_up = most.catch_up
            if catch_up and ask.drafter != most.drafter:
                unread = dict(zip(parts_of(most.drafter), catch_up, strict=True))
                catch_up = tuple([unread[part] for part in parts_of(ask.drafter)])
            self.rows[index] = Row(row.request, row.cached, row.pending, limit, ask.depth, ask.drafter, catch_up)
            self._taken += needed - self._pages[index]
            self._pages[index] = needed
            self.budget -= limit

    def drop(self, request: Request) -> None:
        """Takes a row back."""
        for index, row in enumerate(self.rows):
            if row.request is request:
                self.budget += row.pending + row.draft_limit
                self._taken -= self._pages[index]
                del self.rows[index], self._pages[index]
                return


def _as_observed(plain: StepCost, predicted: StepCost, cost: StepCost) -> StepCost:
    """What the step would have taken without drafts: the prediction, as far off as that of the step was which ran."""
    verify_s = plain.verify_s * cost.verify_s / predicted.verify_s
    sample_s = plain.sample_s * cost.sample_s / predicted.sample_s if predicted.sample_s > 0 else cost.sample_s
    return StepCost(verify_s=verify_s, sample_s=sample_s, commit_s=cost.commit_s, host_s=cost.host_s)


def _event(request: Request, outcome: RowOutcome) -> Event:
    return Event(
        request_id=request.id,
        token_ids=outcome.emitted,
        pieces=outcome.text,
        num_accepted=len(outcome.path),
        stats=request.stats,
        finish_reason=outcome.finish_reason,
        error=outcome.error,
        logprobs=outcome.logprobs,
        prompt_logprobs=outcome.prompt_logprobs,
    )
