"""Whether a preempted request's KV is copied to the host or computed anew."""

from __future__ import annotations

import pytest

from specdec.kv_manager.swap import SwapOffer
from specdec.scheduler.cost_model import CostModel
from specdec.scheduler.cost_table import CostTable
from specdec.scheduler.preemption import recompute_s, swap_pays

COSTS = CostModel(CostTable.measured({1: 0.010, 16: 0.010, 512: 0.400}, kv_token_s=0.0))


def test_recomputing_is_a_step_per_chunk_where_nothing_else_runs() -> None:
    assert recompute_s(COSTS, 512, 512, 0) == pytest.approx(0.400)
    assert recompute_s(COSTS, 1024, 512, 0) == pytest.approx(0.800)
    assert recompute_s(COSTS, 513, 512, 0) == pytest.approx(0.410)


def test_recomputing_costs_what_it_adds_to_steps_that_are_made_anyway() -> None:
    assert recompute_s(COSTS, 8, 512, 8) == pytest.approx(0.0), "a step of 16 rows takes as long as one of 8"
    assert recompute_s(COSTS, 511, 512, 1) == pytest.approx(0.390)


def test_the_cheaper_way_is_taken() -> None:
    assert swap_pays(SwapOffer(512, seconds=0.399), COSTS, 512, 0)
    assert not swap_pays(SwapOffer(512, seconds=0.401), COSTS, 512, 0)
    assert not swap_pays(SwapOffer(8, seconds=1e-6), COSTS, 512, 8)
