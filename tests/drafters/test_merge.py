"""Trees of several drafters for one request."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.drafters.merge import merge_trees, shared_nodes
from specdec.tree import EMPTY, DraftTree

PATHS = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=4)


def all_prefixes(tree):
    return {tuple(tree.tokens[tree.path(node)].tolist()) for node in range(len(tree))}


@given(PATHS, PATHS, st.integers(1, 12))
def test_merging_is_the_union_with_the_first_in_front(first, second, limit):
    a, b = DraftTree.from_paths(first), DraftTree.from_paths(second)
    merged = merge_trees([a, b], limit)
    merged.validate(4)
    assert len(merged) == min(limit, len(all_prefixes(a) | all_prefixes(b)))
    assert len(all_prefixes(merged)) == len(merged)
    assert all_prefixes(merged) <= all_prefixes(a) | all_prefixes(b)
    if limit >= len(a):
        assert all_prefixes(a) <= all_prefixes(merged)
    else:
        assert merged == a.limited(limit, limit)


def test_confidence_is_the_first_ones_and_filled_where_none_is_given():
    sure = DraftTree.chain([1, 2], np.array([0.9, 0.8], dtype=np.float32))
    merged = merge_trees([sure, DraftTree.chain([1, 3])], 8)
    assert merged.confidence is not None and np.allclose(merged.confidence, [0.9, 0.8, 0.5])
    assert merge_trees([DraftTree.chain([1]), DraftTree.chain([2])], 8).confidence is None


def test_empty_trees_do_not_count():
    assert merge_trees([EMPTY, EMPTY], 4) is EMPTY
    assert merge_trees([EMPTY, DraftTree.chain([1, 2, 3])], 2).tokens.tolist() == [1, 2]


def test_shared_nodes_counts_what_each_brought():
    own, other = DraftTree.chain([1, 2]), DraftTree.from_paths([[1, 3, 4]])
    merged = merge_trees([own, other], 8)  # 1 2 | 3 4 under 1
    path = [0, 2, 3]
    assert shared_nodes(merged, own, path) == (2, 1)
    assert shared_nodes(merged, other, path) == (3, 3)
    assert shared_nodes(merged, EMPTY, path) == (0, 0)


def test_drawn_nodes_are_shared_with_nobody_and_every_node_says_what_it_was_drawn_from():
    q = torch.tensor([[0.2, 0.3, 0.5], [0.1, 0.2, 0.7]])
    drawn = DraftTree.chain([1, 2], q=q)
    fixed = [DraftTree.chain([1, 0]), DraftTree.chain([1, 2])]
    merged = merge_trees([fixed[0], drawn, fixed[1]], 8)
    merged.validate(3)
    assert merged.tokens.tolist() == [1, 0, 1, 2, 2] and merged.parents.tolist() == [-1, 0, -1, 2, 0]
    certain = torch.eye(3)
    assert torch.equal(merged.q, torch.stack([certain[1], certain[0], q[0], q[1], certain[2]]))
    other = DraftTree.chain([1], q=q[:1])
    assert merge_trees([drawn, other], 8).tokens.tolist() == [1, 2, 1]
    assert merge_trees([drawn, other], 2) == drawn
    assert merge_trees(fixed, 8).q is None
