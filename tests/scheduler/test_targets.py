"""Latency targets, priorities and fair shares on a virtual machine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from specdec.errors import OverloadedError
from specdec.request import Request, SamplingParams
from specdec.scheduler.cost_model import CostModel, StepWork
from specdec.scheduler.cost_table import GRID, CostTable
from specdec.scheduler.fair_share import FairShare
from specdec.scheduler.targets import MARGIN, MIN_CHUNK, predict_ttft_s, prompt_room, step_cap_s
from tests.scheduler.virtual import Machine, Truth


def verify(tokens: int) -> float:
    return 0.004 + 0.0001 * tokens


DRAFTS = {"d": lambda rows, depth: 1e-3 * depth}


def machine(rate: float = 0.9, **options: Any) -> Machine:
    costs = CostModel(CostTable.measured({size: verify(size) for size in GRID}))
    return Machine(Truth(verify, DRAFTS), lambda _drafter, _request, _level: rate, costs=costs, **{"max_batch_tokens": 512, **options})


def test_a_target_between_tokens_keeps_prompt_chunks_and_drafts_small() -> None:
    own = machine(max_num_seqs=4)
    own.add(1500, "d", target_itl_s=0.012)
    own.run(40)  # what sampling and the host take has been learned
    own.add(3, "off", prompt=2000)
    for _ in range(30):
        own.step()
        plan, _, cost = own.plans[-1]
        assert cost.total_s <= 0.012 * 1.1
        assert plan.rows[0].decodes, "the row with the target runs in every step"
    chunks = [row.pending for plan, _, _ in own.plans[40:] for row in plan.rows if not row.decodes]
    assert chunks
    assert all(MIN_CHUNK <= chunk < 100 for chunk in chunks)
    free = machine(max_num_seqs=4)
    free.add(1500, "d")
    free.run(40)
    free.add(3, "off", prompt=2000)
    free.step()
    assert max(row.pending for row in free.plans[-1][0].rows) > 400


def test_a_target_that_cannot_be_met_slows_prompts_down_and_stops_nothing() -> None:
    own = machine(max_num_seqs=2)
    own.add(100, "d", target_itl_s=1e-4)
    own.step()
    own.add(3, "off", prompt=100)
    own.run()
    assert not own.scheduler.has_work
    assert all(sum(nodes) == 0 for _, nodes, _ in own.plans[2:90])


def test_the_tightest_target_among_those_that_run_counts() -> None:
    requests = [Request(str(index), [1], 1, SamplingParams(), 0, 9, target_itl_s=target) for index, target in enumerate((None, 0.5, 0.2))]
    assert step_cap_s(requests) == pytest.approx(0.2 * MARGIN)
    assert step_cap_s(requests[:1]) == np.inf


def test_the_room_for_a_prompt_is_the_most_that_fits() -> None:
    costs = CostModel(CostTable.measured({size: verify(size) for size in GRID}))
    work = StepWork(4, 100, 4, 4)
    room = prompt_room(costs, work, 0.020, 500)

    def total_s(more: int) -> float:
        return costs.predict(StepWork(4 + more, 100 + more, 4, 4)).total_s

    assert MIN_CHUNK < room < 500
    assert total_s(room) <= 0.020 < total_s(room + 1)
    assert prompt_room(costs, work, np.inf, 500) == 500
    assert prompt_room(costs, work, 1e-9, 500) == MIN_CHUNK
    assert prompt_room(costs, work, 1e-9, 7) == 7


def test_the_time_to_the_first_token_is_predicted_within_a_fifth() -> None:
    own = machine(max_num_seqs=8)
    for _ in range(4):
        own.add(300, "off")
    own.run(30)
    for _ in range(3):
        own.add(5, "off", prompt=700)
    late = own.add(5, "off", prompt=600, target_ttft_s=100.0)
    ahead = [700, 700, 700]
    predicted = predict_ttft_s(own.scheduler.costs, ahead, 600, 4, 508)
    own.run(20)
    assert late.stats.first_token_s == pytest.approx(predicted, rel=0.2)


def test_a_request_whose_first_token_would_come_too_late_is_refused_with_the_prediction() -> None:
    own = machine()
    own.add(5, "off", prompt=3000, priority=-1)
    request = Request("late", list(range(50)), 50, SamplingParams(), 0, 60, target_ttft_s=0.05)
    with pytest.raises(OverloadedError, match=r"predicted after \d+ ms, and target_ttft_ms is 50"):
        own.scheduler.check(request)
    request.target_ttft_s = 5.0
    own.scheduler.check(request)


def test_a_tight_first_token_target_goes_ahead_of_those_that_wait() -> None:
    own = machine(max_num_seqs=1)
    own.add(5, "off")
    own.step()
    own.add(3, "off")
    soon = own.add(3, "off", target_ttft_s=0.5)
    own.run(10)
    assert own.plans[-1][0].rows[0].request is soon or soon.finish_reason is not None
    first = next(row.request for plan, _, _ in own.plans[5:] for row in plan.rows)
    assert first is soon


def test_with_fair_shares_a_user_with_many_requests_does_not_hold_up_another() -> None:
    def first_tokens(fair: bool) -> list[float]:
        own = machine(max_num_seqs=2, fair_share=fair)
        greedy = [own.add(20, "off", user="a") for _ in range(20)]
        modest = [own.add(20, "off", user="b") for _ in range(4)]
        own.run()
        assert all(request.stats.first_token_s is not None for request in greedy)
        return [request.stats.first_token_s or 0.0 for request in modest]

    assert max(first_tokens(True)) < 0.6 * max(first_tokens(False))


def test_who_comes_back_gets_no_credit_for_the_time_away() -> None:
    shares = FairShare()
    shares.arrive("a", ())
    shares.serve("a", prompt_tokens=100, output_tokens=50)
    shares.arrive("b", ("a",))
    assert shares.served == {"a": 200.0, "b": 200.0}
    shares.serve("b", 0, 1)
    requests = [Request(user, [1], 1, SamplingParams(), 0, 9, user=user) for user in ("b", "a")]
    assert [request.user for request in shares.order(requests)] == ["a", "b"]
    shares.keep(("a",))
    assert shares.served == {"a": 200.0, "b": 202.0}, "b was served more than those present: that is not forgotten"
    shares.keep(("b",))
    assert shares.served == {"b": 202.0}
