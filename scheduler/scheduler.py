"""Continuous batching: plans each step's rows within token and page budgets, and preempts when pages run out.

Decoding rows come first, then drafts, then prefill chunks, then waiting requests: a prompt never stalls those that run.
Everything is counters: a request that was preempted is one whose cached tokens are 0 again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from specdec.config import EngineConfig
from specdec.errors import InvariantError
from specdec.kv_manager.manager import KVManager
from specdec.plan import BatchPlan, Event, Row, RowOutcome, StepCost
from specdec.request import Request
from specdec.scheduler.accounting import account
from specdec.scheduler.queue import RequestQueue, order
from specdec.tree import DraftShape, DraftTree, Mask


class Scheduler:
    """Owns which requests wait and which run.

    Args:
        config: limits.
        kv: page accounting; the scheduler asks and admits, the engine reserves and commits.
        draft_limit: drafter spec -> the most nodes it drafts per request and step.
        on_release: called with a request whose KV was just given up, by preemption.
        clock: seconds; the same clock that stamps arrivals.
    """

    def __init__(
        self,
        config: EngineConfig,
        kv: KVManager,
        draft_limit: Callable[[str], int],
        on_release: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._kv = kv
        self._draft_limit = draft_limit
        self._on_release = on_release
        self._clock = clock
        self._prefill_chunk = config.prefill_chunk or config.max_batch_tokens
        self.waiting = RequestQueue()
        self.running: list[Request] = []
        self.preemptions = 0

    @property
    def has_work(self) -> bool:
        return bool(self.running) or len(self.waiting) > 0

    def add(self, request: Request) -> None:
        self.waiting.push(request)

    def remove(self, request_id: str) -> Request | None:
        """Takes a request out, wherever it is; None if it is not here. Its KV is the caller's to release."""
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
        self._plan_prefills(step)
        if not step.preempted:
            self._admit(step)
        if self.has_work and not step.rows:
            raise InvariantError(
                f"no row can run: {len(self.running)} running, {len(self.waiting)} waiting, {self._kv.num_available} pages"
            )
        return BatchPlan(tuple(step.rows))

    def trim(self, plan: BatchPlan, shapes: Sequence[DraftShape]) -> tuple[BatchPlan, list[Mask]]:
        """Decides which nodes are verified: those that pay. Without a cost model every node within the row's limits does.

        It is shown the shapes of the drafts and never their tokens, because under some verification rules the output's
        law would change if it looked at them.

        Returns:
            The plan, and for each row bool [n]: the nodes to keep. A node whose parent goes, goes too.
        """
        return plan, [shape.within(row.draft_limit, row.depth_limit) for row, shape in zip(plan.rows, shapes, strict=True)]

    def finish(self, plan: BatchPlan, trees: Sequence[DraftTree], outcomes: Sequence[RowOutcome], cost: StepCost) -> list[Event]:
        """Books the step and tells what each request got out of it; ended requests stop running."""
        account(plan, trees, outcomes, cost)
        events = []
        for row, outcome in zip(plan.rows, outcomes, strict=True):
            request = row.request
            if outcome.emitted and request.stats.first_token_s is None:
                request.stats.first_token_s = self._clock() - request.arrival_s
            if outcome.finish_reason is not None:
                request.finish_reason = outcome.finish_reason
                self.running.remove(request)
            if outcome.emitted or outcome.prompt_logprobs or outcome.finish_reason is not None:
                events.append(
                    Event(
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
                )
        return events

    def _plan_decodes(self, step: _Step) -> None:
        for request in tuple(self.running):
            if request in self.running and self._pending(request) == 1:  # an earlier one may have preempted it
                cached = self._kv.cached(request.id)
                while not step.add(Row(request, cached, 1)):
                    victim = self._preempt(step)
                    if victim is request:
                        break

    def _plan_drafts(self, step: _Step) -> None:
        for index, row in enumerate(step.rows):
            request = row.request
            depth = request.remaining - 1
            if not row.decodes or request.drafter == "off" or depth < 1:
                continue
            limit = min(self._draft_limit(request.drafter), step.budget)
            step.widen(index, replace(row, draft_limit=limit, depth_limit=depth, drafter=request.drafter))

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
        for request in self.waiting:
            if len(self.running) >= self._config.max_num_seqs or step.budget == 0:
                return
            if self._awaits_parent(request):
                continue
            self._kv.admit(request)
            row = self._prefill_row(request, step)
            # All its tokens must fit, not just this chunk, or it would be preempted half way through its prompt
            if row is None or not step.fits(request, len(request.tokens)) or not step.add(row):
                self._kv.release(request)
                return  # in order: a small request must not overtake a large one for ever
            self.waiting.remove(request)
            self.running.append(request)
            if request.stats.preemptions == 0:
                request.stats.cached_prompt_tokens = row.cached
                request.stats.queue_s = self._clock() - request.arrival_s

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
        """Gives up the KV of the last request in order; it waits, and recomputes when its turn comes."""
        victim = self.running.pop()
        step.drop(victim)
        step.preempted = True
        self._kv.release(victim)
        self._on_release(victim.id)
        victim.stats.preemptions += 1
        self.preemptions += 1
        self.waiting.push(victim)
        return victim


class _Step:
    """Rows planned so far, and the tokens and pages that are left."""

    def __init__(self, kv: KVManager, max_tokens: int) -> None:
        self._kv = kv
        self._pages: list[int] = []
        self._taken = 0
        self.rows: list[Row] = []
        self.budget = max_tokens
        self.preempted = False

    def _needed(self, row: Row) -> int:
        return self._kv.pages_needed(row.request, row.cached + row.pending + row.draft_limit)

    def fits(self, request: Request, num_tokens: int) -> bool:
        """Whether the pages for so many tokens of a request are left."""
        return self._kv.pages_needed(request, num_tokens) <= self._kv.num_available - self._taken

    def add(self, row: Row) -> bool:
        """Takes the row if its tokens and pages fit."""
        needed = self._needed(row)
        if row.pending > self.budget or needed > self._kv.num_available - self._taken:
            return False
        self.rows.append(row)
        self._pages.append(needed)
        self._taken += needed
        self.budget -= row.pending
        return True

    def widen(self, index: int, row: Row) -> None:
        """Gives a planned row its draft, or as much of it as tokens and pages allow."""
        left = self._kv.num_available - self._taken + self._pages[index]
        limit = min(row.draft_limit, self.budget)
        while limit > 0 and self._needed(replace(row, draft_limit=limit)) > left:
            limit -= 1
        if limit > 0:
            self._replace(index, replace(row, draft_limit=limit))

    def _replace(self, index: int, row: Row) -> None:
        needed = self._needed(row)
        self._taken += needed - self._pages[index]
        self.budget -= row.draft_limit - self.rows[index].draft_limit
        self.rows[index], self._pages[index] = row, needed

    def drop(self, request: Request) -> None:
        """Takes a row back."""
        for index, row in enumerate(self.rows):
            if row.request is request:
                self.budget += row.pending + row.draft_limit
                self._taken -= self._pages[index]
                del self.rows[index], self._pages[index]
                return
