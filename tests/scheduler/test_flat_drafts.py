"""Flat drafts against what the trees themselves say."""

from __future__ import annotations

import numpy as np
import pytest

from specdec.scheduler.flat_drafts import FlatDrafts
from specdec.scheduler.node_choice import first
from specdec.tree import DraftTree


def random_trees(random: np.random.Generator, chains: bool) -> list[DraftTree]:
    trees = []
    for size in random.integers(1, 20, size=6):
        parents = np.arange(size) - 1 if chains else [random.integers(-1, node) if node else -1 for node in range(size)]
        trees.append(DraftTree(np.zeros(size, dtype=np.int32), np.array(parents, dtype=np.int32)))
    return trees


@pytest.mark.parametrize("chains", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_paths_depths_and_ranks_are_those_of_the_trees(chains: bool, seed: int) -> None:
    random = np.random.default_rng(seed)
    trees = random_trees(random, chains)
    flat = FlatDrafts.of([tree.shape() for tree in trees])
    rates = [random.uniform(0.1, 1.0, len(tree)) for tree in trees]
    products = flat.path_products(np.concatenate(rates))
    assert flat.are_chains == chains
    expected = [float(np.prod(own[tree.path(node)])) for tree, own in zip(trees, rates, strict=True) for node in range(len(tree))]
    assert products == pytest.approx(expected)
    assert flat.depths.tolist() == [depth for tree in trees for depth in tree.depths().tolist()]
    ranks = [int((tree.parents[:node] == tree.parents[node]).sum()) for tree in trees for node in range(len(tree))]
    assert flat.ranks().tolist() == ranks
    assert flat.siblings().tolist() == [int((tree.parents == parent).sum()) for tree in trees for parent in tree.parents]
    assert [len(part) for part in flat.split(products > 0)] == [len(tree) for tree in trees]


@pytest.mark.parametrize("seed", range(10))
def test_the_first_nodes_are_closed_under_parents_even_among_equals(seed: int) -> None:
    random = np.random.default_rng(seed)
    trees = random_trees(random, chains=False)
    flat = FlatDrafts.of([tree.shape() for tree in trees])
    chances = flat.path_products(np.full(len(flat.rows), 1 - 1e-6).clip(max=random.choice([0.5, 1 - 1e-6])))
    for count in range(len(chances) + 1):
        keep = first(chances, np.sort(chances)[::-1], count)
        assert keep.sum() == count
        below = flat.parents >= 0
        assert keep[flat.parents[below]][keep[below]].all()
