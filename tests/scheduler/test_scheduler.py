"""The scheduler against the real page accounting, with a fake model: every row emits token 0 and accepts nothing."""

from typing import Any

import pytest

from specdec.config import EngineConfig
from specdec.kv_manager.manager import KVManager
from specdec.plan import BatchPlan, RowOutcome, StepCost
from specdec.request import Request, SamplingParams
from specdec.scheduler.scheduler import Scheduler
from specdec.tree import EMPTY


class Loop:
    """Runs a scheduler to the end, checking the books after every step."""

    def __init__(self, num_pages: int = 64, **options: object) -> None:
        self.config = EngineConfig.from_dict({"page_size": 4, "max_num_seqs": 4, "max_batch_tokens": 16, **options})
        self.kv = KVManager(num_pages, self.config.page_size)
        self.released: list[str] = []
        self.num_steps = 0
        self.scheduler = Scheduler(self.config, self.kv, lambda spec: 3, self.released.append, lambda: float(self.num_steps))
        self.plans: list[BatchPlan] = []

    def add(self, name: str, prompt: int, output: int, **fields: Any) -> Request:
        first = sum(map(ord, name))  # prompts differ, so that none shares pages with another
        tokens = [first + i for i in range(prompt)]
        request = Request(name, tokens, prompt, SamplingParams(), 0, prompt + output, arrival_s=float(self.num_steps), **fields)
        self.scheduler.add(request)
        return request

    def step(self) -> BatchPlan:
        plan = self.scheduler.plan()
        self.kv.reserve(plan)
        outcomes = []
        for row in plan.rows:
            outcome = RowOutcome()
            if row.emits:
                row.request.tokens.append(0)
                outcome = RowOutcome((0,), (), "length" if row.request.remaining == 0 else None)
            outcomes.append(outcome)
        self.kv.commit(plan, outcomes)
        for event in self.scheduler.finish(plan, [EMPTY] * len(plan.rows), outcomes, StepCost()):
            if event.finish_reason:
                self.kv.release(next(row.request for row in plan.rows if row.request.id == event.request_id))
        self.kv.check()
        assert plan.num_tokens <= self.config.max_batch_tokens
        self.plans.append(plan)
        self.num_steps += 1
        return plan

    def run(self) -> None:
        while self.scheduler.has_work:
            assert len(self.plans) < 500
            self.step()


def test_a_prompt_is_forwarded_in_chunks_and_then_decodes() -> None:
    loop = Loop(prefill_chunk=8)
    loop.add("a", prompt=19, output=3)
    loop.run()
    assert [(row.cached, row.pending, row.emits, row.decodes) for plan in loop.plans for row in plan.rows] == [
        (0, 8, False, False), (8, 8, False, False), (16, 3, True, False), (19, 1, True, True), (20, 1, True, True),
    ]  # fmt: skip


def test_decoding_rows_never_wait_for_a_prompt() -> None:
    loop = Loop()
    loop.add("a", prompt=4, output=20)
    loop.step()
    loop.add("b", prompt=60, output=2)
    for _ in range(4):
        rows = {row.request.id: row for row in loop.step().rows}
        assert rows["a"].decodes
        assert rows["b"].pending == 15


def test_drafts_are_capped_by_what_may_still_be_emitted_and_by_the_drafter() -> None:
    loop = Loop(draft_budget="all")
    loop.add("a", prompt=4, output=7, drafter="x")
    loop.run()
    # the first token comes from the prefill; a draft of k leaves room for the token behind it
    assert [row.draft_limit for plan in loop.plans for row in plan.rows] == [0, 3, 3, 3, 3, 3, 0]
    assert [row.depth_limit for plan in loop.plans for row in plan.rows] == [0, 5, 4, 3, 2, 1, 0]


def test_the_newest_request_is_preempted_and_comes_back() -> None:
    loop = Loop(num_pages=8)
    first, second = loop.add("a", prompt=12, output=12), loop.add("b", prompt=12, output=12)
    loop.run()
    assert (len(first.tokens), len(second.tokens)) == (24, 24)
    assert first.stats.preemptions == 0 and second.stats.preemptions > 0
    assert loop.scheduler.preemptions == second.stats.preemptions == len(loop.released)
    assert loop.kv.num_available == 8


def test_a_request_that_waits_for_pages_counts_once_among_the_prefix_queries() -> None:
    loop = Loop(num_pages=8)
    loop.add("a", prompt=20, output=8)
    loop.add("b", prompt=20, output=2)
    loop.run()
    assert loop.scheduler.preemptions == 0
    assert loop.kv.stats.queries == 40


def test_priority_goes_before_arrival() -> None:
    loop = Loop(max_num_seqs=1)
    loop.add("late", prompt=2, output=1, priority=1)
    loop.add("soon", prompt=2, output=1, priority=-1)
    loop.run()
    assert [plan.rows[0].request.id for plan in loop.plans] == ["soon", "late"]


def test_the_wait_and_the_time_to_the_first_token_are_told_by_the_clock() -> None:
    loop = Loop(max_num_seqs=1, prefill_chunk=4)
    loop.add("a", prompt=4, output=3)
    later = loop.add("b", prompt=8, output=2)
    loop.run()
    assert (later.stats.queue_s, later.stats.first_token_s) == (3.0, 4.0)


def test_drafts_are_shed_before_a_request_is_preempted() -> None:
    loop = Loop(num_pages=6)
    loop.add("a", prompt=8, output=4, drafter="x")
    loop.add("b", prompt=8, output=4, drafter="x")
    loop.run()
    assert loop.scheduler.preemptions == 0
    limits = [row.draft_limit for plan in loop.plans for row in plan.rows if row.decodes and row.depth_limit]
    assert limits, "some rows drafted, with what pages were left"


def test_a_choice_waits_for_the_prompt_of_its_sibling_and_shares_its_pages() -> None:
    loop = Loop()
    tokens = list(range(100, 110))
    siblings = [Request(f"c-{i}", list(tokens), 10, SamplingParams(), i, 14, parent="c-0" if i else None) for i in range(3)]
    for request in siblings:
        loop.scheduler.add(request)
    assert [row.request.id for row in loop.step().rows] == ["c-0"]
    rows = {row.request.id: row for row in loop.step().rows}
    assert rows["c-1"].cached == rows["c-2"].cached == 9
    loop.run()
    assert [len(request.tokens) for request in siblings] == [14] * 3


@pytest.mark.parametrize("where", ["waiting", "running"])
def test_a_request_can_be_taken_out_wherever_it_is(where: str) -> None:
    loop = Loop()
    request = loop.add("a", prompt=3, output=9)
    if where == "running":
        loop.step()
    assert loop.scheduler.remove("a") is request
    assert loop.scheduler.remove("a") is None
    assert not loop.scheduler.has_work
