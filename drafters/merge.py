"""Merges the trees of several drafters for one request."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specdec.tree import EMPTY, DraftTree

UNKNOWN_CONFIDENCE = 0.5
"""For nodes of a drafter that gives none, beside one that does."""


def merge_trees(trees: Sequence[DraftTree], max_nodes: int) -> DraftTree:
    """One tree with the nodes of all, common prefixes shared; earlier trees get the node budget first.

    A shared node keeps the confidence of the first tree that has it. `q` is dropped: the node of a merged tree was
    not drawn from one drafter's distribution.
    """
    trees = [tree for tree in trees if len(tree)]
    if not trees:
        return EMPTY
    if len(trees) == 1:
        return trees[0].limited(max_nodes, max_nodes)
    children: dict[tuple[int, int], int] = {}
    tokens: list[int] = []
    parents: list[int] = []
    confidence: list[float] = []
    for tree in trees:
        given = tree.confidence.tolist() if tree.confidence is not None else [UNKNOWN_CONFIDENCE] * len(tree)
        placed: list[int | None] = []  # node -> merged node; None where the budget was spent
        for token, parent, chance in zip(tree.tokens.tolist(), tree.parents.tolist(), given, strict=True):
            above = -1 if parent < 0 else placed[parent]
            node = None if above is None else children.get((above, token))
            if node is None and above is not None and len(tokens) < max_nodes:
                node = children[above, token] = len(tokens)
                tokens.append(token)
                parents.append(above)
                confidence.append(chance)
            placed.append(node)
    known = any(tree.confidence is not None for tree in trees)
    return DraftTree(
        np.asarray(tokens, dtype=np.int32),
        np.asarray(parents, dtype=np.int32),
        np.asarray(confidence, dtype=np.float32) if known else None,
    )


def shared_nodes(tree: DraftTree, own: DraftTree, path: Sequence[int]) -> tuple[int, int]:
    """How many nodes of `tree` one drafter's `own` tree holds, and how many of those lie on the accepted `path`."""
    children = {(parent, token): node for node, (parent, token) in enumerate(zip(own.parents.tolist(), own.tokens.tolist(), strict=True))}
    place: list[int | None] = []
    for parent, token in zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True):
        above = -1 if parent < 0 else place[parent]
        place.append(None if above is None else children.get((above, token)))
    return sum(node is not None for node in place), sum(place[node] is not None for node in path)
