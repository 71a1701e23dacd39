"""Which nodes are verified: the kernel and its reference agree, on chains and trees, with and without confidences."""

from __future__ import annotations

import math

import numpy as np
import pytest

from specdec.plan import Row, RowOutcome
from specdec.request import Request, SamplingParams
from specdec.scheduler.acceptance import AcceptanceModel
from specdec.scheduler.cost_model import CostModel, StepWork
from specdec.scheduler.cost_table import GRID, CostTable
from specdec.scheduler.node_choice import choose_nodes, choose_plainly, is_chain, within
from specdec.scheduler.outlook import Outlook
from specdec.tree import DraftShape, DraftTree


def some_shape(random: np.random.Generator) -> DraftShape:
    size = int(random.integers(1, 12))
    parents = np.arange(size) - 1 if random.random() < 0.5 else [random.integers(-1, node) if node else -1 for node in range(size)]
    confidence = random.random(size, dtype=np.float32) if random.random() < 0.6 else None
    return DraftShape(np.array(parents, dtype=np.int32), confidence)


@pytest.mark.parametrize("seed", range(200))
def test_the_kernel_and_its_reference_agree_and_keep_parents(seed: int) -> None:
    random = np.random.default_rng(seed)
    count = int(random.integers(1, 10))
    shapes, acceptance = [some_shape(random) for _ in range(count)], AcceptanceModel()
    rows = []
    for index in range(count):
        request = Request(f"r{index}", [0] * 20, 10, SamplingParams(), 0, 99, "a+b")
        limits = int(random.integers(1, 14)), int(random.integers(1, 9))
        rows.append(Row(request, 19, 1, *limits, str(random.choice(["a", "b"]))))
        for _ in range(int(random.integers(0, 6))):
            right = int(random.integers(0, 5))
            tree = DraftTree.chain(range(4), np.full(4, 0.6, dtype=np.float32))
            acceptance.of(rows[-1].drafter).verify([request.id], [tree], [RowOutcome((0,) * (right + 1), tuple(range(right)))])
    knee = int(random.integers(1, 60))
    costs = CostModel(CostTable.measured({size: 0.004 * max(1.0, size / knee) for size in GRID}))
    outlook = Outlook(costs, StepWork(count, 0, count, count), count)
    cap_s = float(random.choice([math.inf, 1.1 * outlook.full_s]))
    masks, counts = choose_nodes(rows, shapes, acceptance, outlook, cap_s)
    assert [mask.tolist() for mask in masks] == [mask.tolist() for mask in choose_plainly(rows, shapes, acceptance, outlook, cap_s)]
    assert counts == [int(mask.sum()) for mask in masks]
    for row, shape, mask in zip(rows, shapes, masks, strict=True):
        kept = np.flatnonzero(mask)
        assert all(shape.parents[node] == -1 or mask[shape.parents[node]] for node in kept), "a node whose parent goes, goes too"
        assert not mask[~(shape.depths() <= row.depth_limit)].any() and not mask[row.draft_limit :].any()


@pytest.mark.parametrize("seed", range(20))
def test_within_is_what_the_shape_says(seed: int) -> None:
    random = np.random.default_rng(seed)
    shape = some_shape(random)
    for limits in ((1, 9), (9, 1), (4, 3), (99, 99)):
        assert within(shape, *limits).tolist() == shape.within(*limits).tolist()
    assert is_chain(shape) == (shape.depths().tolist() == list(range(1, len(shape) + 1)))
