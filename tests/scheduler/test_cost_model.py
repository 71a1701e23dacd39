"""The cost model on synthetic machines: noisy, stalling, slower than measured, or not measured at all."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable

import numpy as np
import pytest

from specdec.plan import StepCost
from specdec.scheduler.cost_model import CostModel, DraftWork, StepWork
from specdec.scheduler.cost_table import GRID, CostTable

KV_S = 2e-8


def flat_then_linear(tokens: int) -> float:
    return 0.010 * max(1.0, tokens / 24)


def truth_of(work: StepWork, verify: Callable[[int], float] = flat_then_linear) -> StepCost:
    drafts = {name: 1e-4 + draft.depth * (1e-3 + 1e-4 * draft.rows) for name, draft in work.drafts.items()}
    return StepCost(drafts, verify(work.tokens) + KV_S * work.kv_tokens, 2e-4 + 5e-5 * work.logit_rows, 5e-5, 1e-4 + 2e-5 * work.requests)


def noisy(cost: StepCost, random: np.random.Generator, noise: float = 0.08, outliers: float = 0.02) -> StepCost:
    def one(seconds: float) -> float:
        return seconds * float(np.exp(noise * random.standard_normal())) * (10 if random.random() < outliers else 1)

    drafts = {name: one(seconds) for name, seconds in cost.draft_s.items()}
    return StepCost(drafts, one(cost.verify_s), one(cost.sample_s), one(cost.commit_s), one(cost.host_s))


def some_work(random: np.random.Generator) -> StepWork:
    requests = int(random.integers(1, 17))
    depth = int(random.integers(0, 6))
    prompt = int(random.choice([0, 0, 0, 64, 200]))
    logits = requests * (1 + depth)
    drafts = {"d": DraftWork(requests, depth)} if depth else {}
    return StepWork(logits + prompt, requests * int(random.integers(50, 2000)), logits, requests, drafts)


def table(scale: float = 1.0) -> CostTable:
    return CostTable.measured({size: scale * flat_then_linear(size) for size in GRID}, KV_S)


@pytest.mark.parametrize("start", [None, table(), table(2.5)], ids=["nothing measured", "measured", "measured when it was slower"])
@pytest.mark.parametrize("seed", range(3))
def test_the_median_error_is_within_a_tenth_after_200_noisy_steps(start: CostTable | None, seed: int) -> None:
    random = np.random.default_rng(seed)
    costs = CostModel(start)
    errors = []
    for step in range(400):
        work = some_work(random)
        predicted = costs.predict(work).total_s
        if step >= 200:
            errors.append(abs(predicted / truth_of(work).total_s - 1))
        costs.observe(work, noisy(truth_of(work), random))
    assert np.median(errors) <= 0.10


def test_a_stall_does_not_matter() -> None:
    costs = CostModel(table())
    work = StepWork(8, 0, 8, 1)
    for _ in range(20):
        costs.observe(work, truth_of(work))
    before = costs.predict(work).verify_s
    costs.observe(work, dataclasses.replace(truth_of(work), verify_s=10 * truth_of(work).verify_s))
    assert costs.predict(work).verify_s == pytest.approx(before, rel=0.08)


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_another_speed_for_good_is_learned_within_20_steps(factor: float) -> None:
    costs = CostModel(table())
    work = StepWork(8, 0, 8, 1)
    for _ in range(100):
        costs.observe(work, truth_of(work))
    slower = dataclasses.replace(truth_of(work), verify_s=factor * truth_of(work).verify_s)
    for _ in range(20):
        costs.observe(work, slower)
    assert costs.predict(work).verify_s == pytest.approx(slower.verify_s, rel=0.12)


def test_verify_is_monotone_and_one_size_is_as_many() -> None:
    random = np.random.default_rng(1)
    costs = CostModel(table())
    for _ in range(100):
        work = some_work(random)
        costs.observe(work, noisy(truth_of(work), random, noise=0.4))
    sizes = np.arange(1, 3000)
    seconds = costs.verify_s(sizes)
    assert (np.diff(seconds) >= -1e-15).all()
    assert [costs.verify_one_s(size) for size in (1, 7, 1024, 1025, 2999)] == pytest.approx(seconds[[0, 6, 1023, 1024, 2998]])


def test_a_drafter_is_known_from_its_first_call_and_its_levels_are_told_from_its_rows() -> None:
    costs = CostModel(table())
    assert costs.deepest_draft("d") == 0
    slow = StepWork(3, drafts={"d": DraftWork(1, 2)})
    costs.observe(slow, StepCost({"d": 0.3}, 0.01))
    assert costs.deepest_draft("d") == 2
    assert costs.draft_s("d", 1, 2) == pytest.approx(0.3, rel=0.01)
    random = np.random.default_rng(0)
    for _ in range(60):
        rows, depth = int(random.integers(1, 9)), int(random.integers(1, 7))
        work = StepWork(9, drafts={"d": DraftWork(rows, depth)})
        costs.observe(work, noisy(truth_of(work), random, noise=0.03, outliers=0))
    for rows, depth in ((1, 1), (8, 1), (1, 6), (8, 6)):
        expected = truth_of(StepWork(9, drafts={"d": DraftWork(rows, depth)})).draft_s["d"]
        assert costs.draft_s("d", rows, depth) == pytest.approx(expected, rel=0.15)


def test_a_step_without_seconds_breaks_nothing() -> None:
    costs = CostModel()
    work = StepWork(1, 0, 1, 1, {"d": DraftWork(1, 1)})
    for _ in range(30):
        costs.observe(work, StepCost({"d": 0.0}))
    assert costs.predict(work).verify_s > 0
    assert costs.predict(work).sample_s < 1e-4


def test_tables_survive_json_and_refuse_nonsense() -> None:
    assert CostTable.from_dict(json.loads(json.dumps(table().to_dict()))) == table()
    assert CostTable.measured({1: 2.0, 2: 1.0, 4: 3.0}).seconds == (1.5, 1.5, 3.0)
    roofline = CostTable.roofline(1e9, 2e9, bytes_per_s=1e11, flops_per_s=1e12, tokens=(1, 5, 50))
    assert roofline.seconds == pytest.approx((0.01, 0.01, 0.1))
    for tokens, seconds in (((2, 3), (1.0, 1.0)), ((1, 1), (1.0, 1.0)), ((1,), (0.0,)), ((1, 2), (1.0,))):
        with pytest.raises(ValueError, match="seconds"):
            CostTable(tokens, seconds)


def test_a_drafter_that_is_not_asked_goes_with_the_pace_of_the_machine() -> None:
    """Measured while the machine was busy, three times too slow: what the target's forwards tell holds for the drafter too."""
    table = CostTable.measured({size: 0.03 * (1 + size / 16) for size in GRID}, drafts={"m": (3e-3, 0.0, 3e-2, 3e-3, 3e-4)}, deepest=4)
    costs = CostModel(table)
    before = costs.draft_s("m", 2, 3)
    for _ in range(120):
        costs.observe(StepWork(2, 100, 2, 2), StepCost(verify_s=0.01 * (1 + 2 / 16)))
    assert costs.draft_s("m", 2, 3) == pytest.approx(before / 3, rel=0.1)
    assert costs.catch_up_token_s("m") == pytest.approx(1e-4, rel=0.1)
    work = StepWork(2, 100, 2, 2, {"m": DraftWork(2, 3)})
    for _ in range(20):  # timed anew: its own seconds count
        costs.observe(work, StepCost({"m": 0.02}, 0.01 * (1 + 2 / 16)))
    assert costs.draft_s("m", 2, 3) == pytest.approx(0.02, rel=0.1)
