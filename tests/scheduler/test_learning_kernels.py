"""What drafts teach: kernels and their references keep the same books, draft after draft."""

from __future__ import annotations

import numpy as np
import pytest

from specdec.kernels import budget as kernel
from specdec.plan import RowOutcome
from specdec.scheduler.acceptance import LEVELS, DrafterAcceptance
from specdec.tree import DraftTree

pytestmark = pytest.mark.skipif(not kernel.is_available(), reason="no C++ compiler: the references are what runs")


def some_tree(random: np.random.Generator, confident: float) -> DraftTree:
    size = int(random.choice([1, 4, 12, 90]))
    bushy = random.random() < 0.5
    parents = [int(random.integers(-1, node)) if bushy and node else node - 1 for node in range(size)]
    confidence = random.random(size, dtype=np.float32) if random.random() < confident else None
    return DraftTree(np.zeros(size, dtype=np.int32), np.array(parents, dtype=np.int32), confidence)


def some_outcome(random: np.random.Generator, tree: DraftTree) -> RowOutcome:
    """Some path from the root, maybe to a leaf."""
    node, path = -1, list[int]()
    while len(children := np.flatnonzero(tree.parents == node)) and random.random() < 0.8:
        node = int(random.choice(children))
        path.append(node)
    ending = str(random.choice(["stop", "length"])) if random.random() < 0.2 else None
    return RowOutcome((0,) * (len(path) + 1), tuple(path), ending)


def books(known: DrafterAcceptance) -> list[float]:
    """All that was learned."""
    requests = known.requests
    names = [f"r{index}" for index in range(8)]
    rates = [known.rates(names, LEVELS).ravel(), known.rank_shares().ravel(), requests.evidence, requests.shared]
    return np.concatenate([*rates, known.calibration.numbers, known.width, known.verified_width]).tolist()


@pytest.mark.parametrize("seed", range(12))
def test_the_same_is_learned_from_the_same_drafts(seed: int) -> None:
    random = np.random.default_rng(seed)
    own, expected = DrafterAcceptance(is_compiled=True), DrafterAcceptance(is_compiled=False)
    confident = float(random.choice([0.0, 0.5, 1.0]))
    for step in range(80):
        # some are not drafted for long, and a request that ends leaves its place to another
        names = [f"r{index}" for index in range(8) if random.random() < (0.05 if index % 2 else 0.7)]
        trees = [some_tree(random, confident) for _ in names]
        outcomes = [some_outcome(random, tree) for tree in trees]
        asked = [int(random.integers(1, LEVELS + 1)) for _ in names]
        keep = [np.arange(len(tree)) < random.integers(0, len(tree) + 1) for tree in trees]
        ended = f"r{random.integers(0, 8)}" if random.random() < 0.1 else None
        for known in (own, expected):
            known.tick()
            if names:
                known.verify(names, trees, outcomes)
                known.propose(asked, [tree.shape() for tree in trees], keep)
            if ended:
                known.requests.forget(ended)
        if step % 10 == 9:
            assert books(own) == pytest.approx(books(expected), rel=1e-9, abs=1e-12)
            assert [own.nodes_within(depth) for depth in range(LEVELS)] == [expected.nodes_within(depth) for depth in range(LEVELS)]


def test_numbers_of_another_size_are_refused() -> None:
    known = DrafterAcceptance(is_compiled=True)
    tree = DraftTree(np.zeros(3, dtype=np.int32), np.arange(3, dtype=np.int64) - 1)  # type: ignore[arg-type]  # what is to be refused
    with pytest.raises(TypeError, match="int64"):
        known.verify(["r"], [tree], [RowOutcome((0,))])
