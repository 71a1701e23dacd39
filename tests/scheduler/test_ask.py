"""How deep rows draft: the kernel and its reference agree, and both find the best of all they were to look at."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from specdec.kernels import budget as kernel
from specdec.plan import Row, RowOutcome
from specdec.request import Request, SamplingParams
from specdec.scheduler.acceptance import AcceptanceModel
from specdec.scheduler.ask import Candidate, choose_compiled, choose_plainly
from specdec.scheduler.cost_model import CostModel, StepWork
from specdec.scheduler.cost_table import GRID, CostTable
from specdec.scheduler.outlook import Outlook
from specdec.tree import DraftShape, DraftTree

Choose = Callable[[Sequence[Candidate], AcceptanceModel, Outlook, float], tuple[list[int], float]]
needs_kernels = pytest.mark.skipif(not kernel.is_available(), reason="no C++ compiler: the references are what runs")


def some_rows(random: np.random.Generator, count: int) -> tuple[list[Candidate], AcceptanceModel]:
    """Rows of two drafters and their sum, with rates, widths and limits of their own; some have to be caught up with."""
    acceptance = AcceptanceModel()
    rows = [
        Row(
            Request(f"r{index}", [0] * 20, 10, SamplingParams(), 0, 99, "a+b"),
            19,
            1,
            int(random.integers(1, 9)),
            int(random.integers(1, 9)),
            "a+b",
        )
        for index in range(count)
    ]
    options = [str(random.choice(["a", "b", "a+b", ""])) for _ in rows]
    for row, option in zip(rows, options, strict=True):
        for _ in range(int(random.integers(0, 8))):
            if option:
                right = int(random.integers(0, 9))
                acceptance.of(option).verify(
                    [row.request.id], [DraftTree.chain(range(8))], [RowOutcome((0,) * (right + 1), tuple(range(right)))]
                )
    for option in ("a", "b"):
        shapes = [DraftShape(random.integers(-1, np.arange(24), dtype=np.int32)) for _ in range(4)]
        masks = [np.arange(24) < random.integers(0, 25) for _ in shapes]
        for _ in range(9):  # until widths come close to 0
            acceptance.of(option).propose([8] * 4, shapes, masks)
    fees = [float(random.choice([0.0, 0.0, 1e-4, 5e-3])) for _ in rows]
    return [Candidate(row, option, fee) for row, option, fee in zip(rows, options, fees, strict=True)], acceptance


def costs(random: np.random.Generator) -> CostModel:
    knee = int(random.integers(1, 60))
    drafts = {name: (*(10 ** random.uniform(-5, -3, 4)).tolist(), 1e-6) for name in ("a", "b")}
    return CostModel(CostTable.measured({size: 0.004 * max(1.0, size / knee) for size in GRID}, drafts=drafts, deepest=8))


@needs_kernels
@pytest.mark.parametrize("seed", range(200))
def test_compiled_and_plain_choices_agree(seed: int) -> None:
    random = np.random.default_rng(seed)
    count = int(random.integers(1, 24))
    candidates, acceptance = some_rows(random, count)
    outlook = Outlook(costs(random), StepWork(count + int(random.choice([0, 50])), 0, count, count), count)
    cap_s = float(random.choice([math.inf, 1.2 * outlook.full_s]))
    depths, goodput = choose_compiled(candidates, acceptance, outlook, cap_s)
    expected, expected_goodput = choose_plainly(candidates, acceptance, outlook, cap_s)
    assert goodput == pytest.approx(expected_goodput, rel=1e-12)
    assert depths == expected
    assert all(depth <= one.limit for depth, one in zip(depths, candidates, strict=True))
    assert goodput >= outlook.goodput_off


@pytest.mark.parametrize("choose", [choose_plainly, pytest.param(choose_compiled, marks=needs_kernels)])
@pytest.mark.parametrize("seed", range(10))
def test_rows_that_are_alike_get_the_best_of_all_uniform_depths(seed: int, choose: Choose) -> None:
    random = np.random.default_rng(seed)
    acceptance, model, count = AcceptanceModel(), costs(random), 3
    rows = [Row(Request(f"r{index}", [0] * 20, 10, SamplingParams(), 0, 99, "a"), 19, 1, 8, 8, "a") for index in range(count)]
    candidates = [Candidate(row, "a") for row in rows]
    outlook = Outlook(model, StepWork(count, 0, count, count), count)
    _, goodput = choose(candidates, acceptance, outlook, math.inf)
    rates = acceptance.of("a").level_rates("r0", 8)

    def uniform(depth: int) -> float:
        gains = sum(itertools.accumulate(rates[:depth], lambda above, rate: above * rate))
        return count * (1 + gains) / (outlook.base_s + outlook.node_s(count * depth) + model.draft_s("a", count, depth))

    assert goodput >= max(uniform(depth) for depth in range(1, 9)) - 1e-9
