import pytest

from specdec.plan import BatchPlan, Row, RowOutcome, StepCost
from specdec.request import Request, SamplingParams
from specdec.scheduler.accounting import account
from specdec.tree import EMPTY, DraftTree


def make_request(name: str, tokens: int, prompt: int) -> Request:
    return Request(name, list(range(tokens)), prompt, SamplingParams(), 0, 100)


def test_the_shares_add_up_to_the_step_and_only_decoding_rows_count_as_verifies() -> None:
    decoding, prefilling = make_request("a", 9, 4), make_request("b", 20, 20)
    plan = BatchPlan((Row(decoding, 8, 1, 4, 9, "x"), Row(prefilling, 0, 16)))
    outcomes = [RowOutcome(emitted=(1, 2, 3), path=(0, 1)), RowOutcome()]
    cost = StepCost({"x": 0.1}, verify_s=0.4, sample_s=0.02, commit_s=0.01, host_s=0.03)
    account(plan, [DraftTree.chain([1, 2, 9]), EMPTY], outcomes, cost)
    stats = [decoding.stats, prefilling.stats]
    total = sum(s.draft_s + s.verify_s + s.prefill_s + s.sample_s + s.commit_s + s.host_s for s in stats)
    assert total == pytest.approx(cost.total_s)
    assert decoding.stats.verify_s == pytest.approx(0.4 * 4 / 20) and decoding.stats.prefill_s == 0
    assert prefilling.stats.prefill_s == pytest.approx(0.4 * 16 / 20) and prefilling.stats.draft_s == 0
    assert (decoding.stats.verifies, decoding.stats.drafted, decoding.stats.accepted, decoding.stats.emitted) == (1, 3, 2, 3)
    assert (prefilling.stats.verifies, prefilling.stats.prefill_tokens) == (0, 16)
    assert decoding.stats.acceptance_length == 3 and decoding.stats.wasted == 1


def test_a_drafter_that_proposed_nothing_still_costs_its_rows() -> None:
    requests = [make_request("a", 9, 4), make_request("b", 9, 4)]
    plan = BatchPlan(tuple(Row(request, 8, 1, 4, 9, "x") for request in requests))
    account(plan, [EMPTY, EMPTY], [RowOutcome(emitted=(1,))] * 2, StepCost({"x": 0.1}))
    assert [request.stats.draft_s for request in requests] == pytest.approx([0.05, 0.05])


def test_a_sum_of_drafters_books_each_part_and_kv_that_is_read_weighs() -> None:
    long, short = make_request("a", 109, 4), make_request("b", 9, 4)
    plan = BatchPlan((Row(long, 108, 1, 4, 9, "x+y"), Row(short, 8, 1, 4, 9, "x")))
    trees = [DraftTree.chain([1]), DraftTree.chain([1, 2, 3])]
    cost = StepCost({"x": 0.1, "y": 0.2}, verify_s=1.0, host_s=0.4)
    plain = StepCost(verify_s=0.8, host_s=0.4)
    account(plan, trees, [RowOutcome(emitted=(1,)), RowOutcome(emitted=(1, 2), path=(0,))], cost, kv_weight=0.01, plain=plain)
    assert long.stats.draft_by == pytest.approx({"x": 0.1 / 4, "y": 0.2})
    assert short.stats.draft_by == pytest.approx({"x": 0.3 / 4})
    assert long.stats.verify_s / short.stats.verify_s == pytest.approx((2 + 1.09) / (4 + 0.09))
    assert long.stats.decode_s + short.stats.decode_s == pytest.approx(cost.total_s)
    token_off_s = 0.8 * (1 + 0.09) / (1 + 1.09 + 1 + 0.09) + 0.2
    assert short.stats.speedup == pytest.approx(2 * token_off_s / short.stats.decode_s)
