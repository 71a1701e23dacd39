"""The budget on virtual machines: it finds what pays, pays little for what does not, and takes nothing for ever."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from specdec.request import Request
from specdec.scheduler.ask import Outlook
from specdec.scheduler.cost_model import CostModel, StepWork
from specdec.scheduler.cost_table import GRID, CostTable
from tests.scheduler.virtual import Law, Machine, Truth


def flat(tokens: int) -> float:
    """A CPU that reads its weights: 16 rows cost what one does."""
    return 0.012 * max(1.0, 0.5 + tokens / 32)


def linear(tokens: int) -> float:
    """A machine that is busy as it is."""
    return 0.004 + 0.002 * tokens


DRAFTS: dict[str, Callable[[int, int], float]] = {
    "cheap": lambda rows, depth: 3e-5 + 1e-5 * rows,
    "model": lambda rows, depth: depth * (1.5e-3 + 1e-4 * rows),
    "sleepy": lambda rows, depth: 4 * flat(1),
}


def always(rate: float) -> Law:
    return lambda _drafter, _request, _level: rate


def machine(verify: Callable[[int], float], law: Law, **options: Any) -> Machine:
    sizes = sorted({*GRID, *range(64, 1024, 32)})
    costs = CostModel(CostTable.measured({size: verify(size) for size in sizes}))
    return Machine(Truth(verify, DRAFTS, noise=0.05), law, costs=costs, **options)


def run(
    verify: Callable[[int], float], law: Law, policy: str | int, drafter: str, requests: int, tokens: int = 300, **options: Any
) -> Machine:
    own = machine(verify, law, draft_budget="all" if policy == "off" else policy, **options)
    for _ in range(requests):
        own.add(tokens, "off" if policy == "off" else drafter)
    return own.run()


@pytest.mark.parametrize("verify", [flat, linear])
@pytest.mark.parametrize("drafter", ["cheap", "model"])
@pytest.mark.parametrize("rate", [0.1, 0.5, 0.85])
@pytest.mark.parametrize("requests", [2, 8])
def test_auto_is_about_as_fast_as_the_best_fixed_length(verify: Callable[[int], float], drafter: str, rate: float, requests: int) -> None:
    tokens = 1600 // requests  # short: what it costs to learn is in it, and chance
    best = max(run(verify, always(rate), policy, drafter, requests, tokens).tokens_per_s for policy in ("off", 1, 2, 4, 8))
    assert run(verify, always(rate), "auto", drafter, requests, tokens).tokens_per_s >= 0.9 * best


def test_among_many_requests_it_drafts_those_that_it_pays_for() -> None:
    def law(_drafter: str, request: Request, _level: int) -> float:
        return 0.95 if int(request.id[1:]) % 4 == 0 else 0.05

    def rate(policy: str | int) -> Machine:
        own = machine(flat, law, draft_budget=policy)
        for _ in range(16):
            own.add(400, "cheap")
        return own.run(60)

    own = rate("auto")
    assert own.tokens_per_s > 1.1 * max(rate(policy).tokens_per_s for policy in (1, 2, 4, 8))
    stats = {int(row.request.id[1:]): row.request.stats for row in own.plans[0][0].rows}
    good, bad = ([one for number, one in stats.items() if (number % 4 == 0) == kind] for kind in (True, False))
    assert sum(stats.drafted for stats in good) > 3 * sum(stats.drafted for stats in bad)


@pytest.mark.parametrize("requests", [1, 4])
def test_a_slow_and_useless_drafter_costs_at_most_a_tenth(requests: int) -> None:
    own = run(flat, always(0.0), "auto", "sleepy", requests, tokens=400)
    assert own.draft_s <= 0.1 * own.now_s
    assert own.tokens_per_s >= run(flat, always(0.0), "off", "sleepy", requests, tokens=400).tokens_per_s / 1.1


@pytest.mark.parametrize(("drafter", "verify"), [("cheap", linear), ("model", flat), ("sleepy", flat)])
def test_a_drafter_that_becomes_perfect_is_used_within_64_tokens_and_dropped_when_it_is_not_any_more(
    drafter: str, verify: Callable[[int], float]
) -> None:
    turns = {"good_from": 300, "bad_from": 600}

    def law(_drafter: str, request: Request, _level: int) -> float:
        return 1.0 if turns["good_from"] <= request.num_output < turns["bad_from"] else 0.0

    own = machine(verify, law)
    request = own.add(1000, drafter)
    drafted: dict[int, int] = {}
    while own.scheduler.has_work:
        at = request.num_output
        own.step()
        drafted[at] = own.plans[-1][1][0]
    resumed = min(at for at, nodes in drafted.items() if at >= 300 and nodes >= 4)
    assert resumed <= 364
    soon = [nodes for at, nodes in drafted.items() if 420 <= at < 590]
    assert np.mean(soon) >= 5, "in use, not only probed"
    late = [nodes for at, nodes in drafted.items() if at >= 700]
    assert np.mean([nodes > 0 for nodes in late]) < 0.1


def test_the_better_part_of_a_sum_is_found() -> None:
    def law(drafter: str, _request: Request, _level: int) -> float:
        return 0.9 if drafter == "model" else 0.1

    def sleepier(drafter: str, _request: Request, _level: int) -> float:
        return 0.9 if drafter == "cheap" else 0.1

    good = run(flat, law, "auto", "cheap+model", 2, tokens=400)
    assert good.tokens_per_s >= 0.93 * run(flat, law, "auto", "model", 2, tokens=400).tokens_per_s
    cheap = run(flat, sleepier, "auto", "cheap+sleepy", 2, tokens=400)
    assert cheap.tokens_per_s >= 0.85 * run(flat, sleepier, "auto", "cheap", 2, tokens=400).tokens_per_s


def test_confidences_are_used_where_there_are_some() -> None:
    def law(_drafter: str, request: Request, _level: int) -> float:
        return 0.95 if request.num_output % 3 == 0 else 0.05

    def stated(rate: float, _random: np.random.Generator) -> float:
        return 0.5 + 0.3 * rate  # overconfident where it is bad, and the other way round

    blind, seeing = (run(linear, law, "auto", "cheap", 4, confidence=confidence) for confidence in (None, stated))
    assert seeing.tokens_per_s > 1.1 * blind.tokens_per_s


def test_a_request_may_cap_its_drafts() -> None:
    own = machine(flat, always(1.0))
    own.add(60, "cheap", max_draft=2)
    own.add(60, "cheap", max_draft=0)
    own.run()
    nodes = {row.request.id: count for plan, counts, _ in own.plans for row, count in zip(plan.rows, counts, strict=True) if count}
    assert nodes
    assert all(row.draft_limit <= (2 if row.request.id == "r0" else 0) for plan, _, _ in own.plans for row in plan.rows)


@pytest.mark.parametrize("seed", range(4))
def test_no_set_is_chosen_that_is_predicted_to_be_worse_than_nothing(seed: int) -> None:
    random = np.random.default_rng(seed)
    costs = CostModel(CostTable.measured({size: linear(size) for size in GRID}))
    for _ in range(50):
        rows = int(random.integers(1, 20))
        outlook = Outlook(costs, StepWork(rows, 0, rows, rows), rows)
        chances = random.random(int(random.integers(1, 200))) ** random.integers(1, 6)
        ordered = np.sort(chances)[::-1]
        count = outlook.best_prefix(ordered, np.inf)
        goodput = [(rows + ordered[:n].sum()) / (outlook.base_s + outlook.node_seconds(np.array([n]))[0]) for n in range(len(chances) + 1)]
        assert goodput[count] == pytest.approx(max(goodput))
        assert goodput[count] >= outlook.goodput_off


def test_fixed_lengths_and_all_are_what_they_say() -> None:
    for policy, expected in ((3, 3), ("all", 8)):
        own = run(flat, always(0.5), policy, "cheap", 1, tokens=60)
        assert {nodes[0] for _, nodes, _ in own.plans[1:-8]} == {expected}


def measured(verify: Callable[[int], float], **drafts: tuple[float, ...]) -> CostModel:
    """What a warm-up would have found: drafters as seconds per 1, row, level, row x level and token to catch up with."""
    return CostModel(CostTable.measured({size: verify(size) for size in GRID}, drafts=drafts, deepest=4))


def small_model(tokens: int) -> float:
    return 0.031 + 0.0024 * tokens


@pytest.mark.parametrize("rate", [0.0, 0.1, 0.2, 0.3])
@pytest.mark.parametrize("seed", range(2))
def test_a_dear_drafter_that_loses_costs_little_within_the_first_short_answer(rate: float, seed: int) -> None:
    """A draft model that takes a third of the target's step per level, as 0.5B takes of 1.5B on a CPU."""

    def speed(policy: str, drafter: str) -> float:
        truth = Truth(small_model, {"m": lambda rows, depth: 0.001 + depth * (0.0105 + 0.0005 * rows)}, host_s=2e-3, noise=0.05)
        costs = measured(small_model, m=(0.001, 0.0, 0.0105, 0.0005, 0.0))
        own = Machine(truth, always(rate), costs=costs, seed=seed, limit=4, draft_budget=policy)
        own.add(128, drafter)
        return own.run().tokens_per_s

    assert speed("auto", "m") >= 0.97 * speed("all", "off")


def test_a_drafter_that_is_seldom_sure_is_asked_for_what_it_is_worth_and_not_for_what_its_sure_nodes_are() -> None:
    """Only the nodes that it is sure of are verified, and nearly all of these are accepted: deeper calls cost as much, and bring less."""

    def law(_drafter: str, request: Request, _level: int) -> float:
        return 0.9 if request.num_output % 2 == 0 else 0.1

    def honest(rate: float, random: np.random.Generator) -> float:
        return float(np.clip(rate + 0.1 * random.normal(), 0.01, 0.99))

    def verify(tokens: int) -> float:
        return 0.033 + 0.0013 * tokens

    def speed(policy: str, drafter: str) -> float:
        speeds = []
        for seed in range(8):
            truth = Truth(verify, {"m": lambda rows, depth: 0.001 + depth * (0.0105 + 0.0005 * rows)}, host_s=2e-3, noise=0.05)
            costs = measured(verify, m=(0.001, 0.0, 0.0105, 0.0005, 0.0))
            own = Machine(truth, law, costs=costs, seed=seed, limit=4, draft_budget=policy, confidence=honest)
            for _ in range(8):
                own.add(128, drafter)
            speeds.append(own.run().tokens_per_s)
        return float(np.mean(speeds))

    assert speed("auto", "m") >= 1.05 * speed("all", "off")


@pytest.mark.parametrize(("output", "is_worth_it"), [(12, False), (400, True)])
def test_a_drafter_that_must_read_the_prompt_first_is_started_where_enough_is_still_to_come(output: int, is_worth_it: bool) -> None:
    def run_all(policy: str, drafter: str) -> Machine:
        truth = Truth(flat, {"head": lambda rows, depth: 5e-4 * depth}, catch_up_token_s=5e-5)
        own = Machine(
            truth, always(0.7), costs=measured(flat, head=(0.0, 0.0, 5e-4, 0.0, 5e-5)), limit=4, max_num_seqs=2, draft_budget=policy
        )
        for _ in range(30 if output < 100 else 6):
            own.add(output, drafter, prompt=2000)
        return own.run()

    off, own = run_all("all", "off"), run_all("auto", "head")
    drafting = sum(sum(nodes) > 0 for _, nodes, _ in own.plans) / len(own.plans)
    if is_worth_it:  # 0.1 s to read the prompt, against some 400 tokens of 12 ms
        assert own.tokens_per_s > 1.2 * off.tokens_per_s
        assert drafting > 0.8
    else:  # against 12
        assert own.tokens_per_s >= 0.98 * off.tokens_per_s
        assert drafting < 0.15


def test_seconds_of_catching_up_are_no_reason_to_think_a_drafter_dear() -> None:
    truth = Truth(flat, {"head": lambda rows, depth: 5e-4 * depth}, catch_up_token_s=2e-5)
    own = Machine(truth, always(0.7), limit=4, max_num_seqs=4)  # its costs are not known before
    for _ in range(24):
        own.add(100, "head", prompt=1000)
    own.run()
    costs = own.scheduler.costs
    assert costs.draft_s("head", 2, 4) == pytest.approx(2e-3, rel=0.3)
    assert costs.catch_up_token_s("head") == pytest.approx(2e-5, rel=0.3)
    assert sum(sum(nodes) > 0 for _, nodes, _ in own.plans) > 0.8 * len(own.plans)


def test_where_prompts_are_in_every_step_a_saved_row_saves_little() -> None:
    """Steps that are full of prompt tokens cost by the token: a rejected node is as dear as a prompt token, a saved row as cheap."""

    def full(tokens: int) -> float:
        return 0.004 * max(1.0, tokens / 128)

    def speed(policy: str | int, drafter: str) -> float:
        own = machine(full, always(0.6), limit=4, max_batch_tokens=512, max_num_seqs=32, draft_budget=policy)
        for _ in range(300):
            own.add(8, drafter, prompt=400)
        return own.run().tokens_per_s

    assert speed("auto", "cheap") >= 0.99 * max(speed("all", "off"), speed("all", "cheap"), *(speed(k, "cheap") for k in (1, 2)))


@pytest.mark.parametrize("rate", [0.3, 0.5, 0.7])
def test_a_table_that_takes_nodes_to_be_free_is_found_out(rate: float) -> None:
    """Sixteen rows take twice as long as eight, and were measured to take as long: every step drafts, and none shows what it is without."""

    def steep(tokens: int) -> float:
        return 0.005 * max(1.0, tokens / 8)

    def speed(policy: str, drafter: str) -> float:
        costs = CostModel(CostTable.measured({size: steep(8 if size <= 16 else size) for size in GRID}))
        own = Machine(Truth(steep, DRAFTS, host_s=2e-4, noise=0.05), always(rate), costs=costs, draft_budget=policy)
        for _ in range(8):
            own.add(300, drafter)
        return own.run().tokens_per_s

    assert speed("auto", "cheap") >= 0.92 * speed("all", "off")
