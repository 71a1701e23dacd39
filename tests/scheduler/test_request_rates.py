"""How requests differ from each other is learned: chance must not look like a difference, and a difference must be followed."""

from __future__ import annotations

import numpy as np
import pytest

from specdec.scheduler.request_rates import RequestRates, log_odds


def follow(
    known: RequestRates, rates: dict[str, float], steps: int, random: np.random.Generator, start: int = 0, pooled: float = 0.5
) -> None:
    """Two nodes of each request are decided per step, all expected to be accepted at the pooled rate."""
    for step in range(start, start + steps):
        for name, rate in rates.items():
            known.observe(name, step, [log_odds(pooled)] * 2, (random.random(2) < rate).tolist())


def rate_of(known: RequestRates, name: str, step: int, pooled: float = 0.5) -> float:
    return float(1 / (1 + np.exp(-log_odds(pooled) - known.shift(name, step))))


@pytest.mark.parametrize("seed", range(5))
def test_where_all_requests_are_alike_chance_moves_none_of_them(seed: int) -> None:
    known, random = RequestRates(), np.random.default_rng(seed)
    follow(known, {f"r{index}": 0.5 for index in range(8)}, 60, random)
    assert [rate_of(known, f"r{index}", 60) for index in range(8)] == pytest.approx([0.5] * 8, abs=0.06)


@pytest.mark.parametrize("seed", range(5))
def test_where_requests_differ_a_new_one_is_known_after_a_few_drafts(seed: int) -> None:
    known, random = RequestRates(), np.random.default_rng(seed)
    follow(known, {f"r{index}": 0.9 if index % 2 else 0.1 for index in range(8)}, 30, random)
    follow(known, {"good": 0.95, "bad": 0.05}, 6, random, start=30)
    assert rate_of(known, "good", 36) > 0.7 > 0.3 > rate_of(known, "bad", 36)


@pytest.mark.parametrize("seed", range(5))
def test_one_that_changes_among_others_that_do_not_is_followed(seed: int) -> None:
    known, random = RequestRates(), np.random.default_rng(seed)
    crowd = {f"r{index}": 0.1 for index in range(8)}
    follow(known, crowd, 60, random, pooled=0.1)
    follow(known, {**crowd, "r0": 0.95}, 8, random, start=60, pooled=0.1)
    assert rate_of(known, "r0", 68, pooled=0.1) > 0.6
    assert rate_of(known, "r1", 68, pooled=0.1) < 0.25


def test_what_was_not_drafted_for_long_is_like_the_others_again_and_an_ended_one_is_forgotten() -> None:
    known, random = RequestRates(), np.random.default_rng(0)
    follow(known, {"r": 0.0}, 20, random)
    assert rate_of(known, "r", 20) < 0.15
    assert rate_of(known, "r", 40) < 0.3, "not at once"
    assert rate_of(known, "r", 20_000) == pytest.approx(0.5, abs=0.05)
    known.forget("r")
    assert known.shift("r", 20_001) == 0.0 and len(known) == 0


def test_outcomes_that_were_thought_impossible_break_nothing() -> None:
    known = RequestRates()
    for step in range(50):
        known.observe("r", step, [log_odds(0.0)] * 64, [True] * 64)
    assert rate_of(known, "r", 50, pooled=0.0) > 0.9
    for step in range(50, 100):
        known.observe("r", step, [log_odds(1.0)] * 64, [False] * 64)
    assert rate_of(known, "r", 100, pooled=1.0) < 0.1
