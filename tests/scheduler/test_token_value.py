"""What an accepted token saves, on traffic whose mix of steps is known."""

from __future__ import annotations

import math

import pytest

from specdec.scheduler.token_value import TokenValue


def value(prompts_in: int, of: int, steps: int = 600) -> float:
    """A row takes 10 ms in a step without prompts and 1 ms beside them; so many of so many steps have some."""
    known = TokenValue()
    for step in range(steps):
        has_prompts = step % of < prompts_in
        known.observe(0.001 if has_prompts else 0.010, has_prompts)
    return known.seconds


def test_a_saved_row_is_taken_from_a_step_without_prompts_as_long_as_there_are_some() -> None:
    assert TokenValue().seconds == math.inf
    assert value(0, 1) == pytest.approx(0.010)
    assert value(1, 2) == pytest.approx(0.010)
    assert 0.001 < value(19, 20) < 0.004
    assert value(1, 1) == pytest.approx(0.001)


def test_the_prompts_that_traffic_starts_with_say_little() -> None:
    known = TokenValue()
    for _ in range(6):
        known.observe(0.001, has_prompts=True)
    assert known.seconds == math.inf
    known.observe(0.010, has_prompts=False)
    assert known.seconds == pytest.approx(0.010)


def test_in_a_step_that_a_target_fills_up_drafts_take_the_place_of_prompts() -> None:
    known = TokenValue()
    for step in range(100):
        known.observe(0.001 if step % 2 else 0.010, has_prompts=step % 2 == 1)
    assert known.within(math.inf, has_prompts=True) == known.within(0.02, has_prompts=False) == pytest.approx(0.010)
    assert known.within(0.02, has_prompts=True) == pytest.approx(0.001)
