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
