"""Merges the trees of several drafters for one request.

Under a rule that reads q a drawn node is never shared with another drafter's: which nodes coincide depends on what was
drawn, and dropping one of them biases the output. It stands beside it, with a q of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specdec.tree import EMPTY, DraftTree

UNKNOWN_CONFIDENCE = 0.5
"""For nodes of a drafter that gives none, beside one that does."""


def merge_trees(trees: Sequence[DraftTree], max_nodes: int) -> DraftTree:
    """One tree with the nodes of all, common prefixes shared; earlier trees get the node budget first.

    A shared node keeps the confidence of the first tree that has it. Trees with q share no nodes, and where there is one
    the merged tree says of all its nodes what they were drawn from: those of trees without q, from their own token alone.
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
    sources: list[tuple[DraftTree, int]] = []  # merged node -> where it came from
    for tree in trees:
        given = tree.confidence.tolist() if tree.confidence is not None else [UNKNOWN_CONFIDENCE] * len(tree)
        placed: list[int | None] = []  # node -> merged node; None where the budget was spent
        for own, (token, parent, chance) in enumerate(zip(tree.tokens.tolist(), tree.parents.tolist(), given, strict=True)):
            above = -1 if parent < 0 else placed[parent]
            node = children.get((above, token)) if above is not None and tree.q is None else None
            if node is None and above is not None and len(tokens) < max_nodes:
                node = len(tokens)
                if tree.q is None:
                    children[above, token] = node
                tokens.append(token)
                sources.append((tree, own))
                parents.append(above)
                confidence.append(chance)
            placed.append(node)
    known = any(tree.confidence is not None for tree in trees)
    return DraftTree(
        np.asarray(tokens, dtype=np.int32),
        np.asarray(parents, dtype=np.int32),
        np.asarray(confidence, dtype=np.float32) if known else None,
        _merged_q(sources),
    )


def _merged_q(sources: Sequence[tuple[DraftTree, int]]) -> Tensor | None:
    """[n, vocabulary]: what each node was drawn from; None where no tree says."""
    said = next((tree.q for tree, _ in sources if tree.q is not None), None)
    if said is None:
        return None
    q = torch.zeros(len(sources), said.shape[1], dtype=said.dtype)
    for node, (tree, own) in enumerate(sources):
        if tree.q is None:
            q[node, int(tree.tokens[own])] = 1
        else:
            q[node] = tree.q[own]
    return q


def shared_nodes(tree: DraftTree, own: DraftTree, path: Sequence[int]) -> tuple[int, int]:
    """How many nodes of `tree` one drafter's `own` tree holds, and how many of those lie on the accepted `path`."""
    children = {(parent, token): node for node, (parent, token) in enumerate(zip(own.parents.tolist(), own.tokens.tolist(), strict=True))}
    place: list[int | None] = []
    for parent, token in zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True):
        above = -1 if parent < 0 else place[parent]
        place.append(None if above is None else children.get((above, token)))
    return sum(node is not None for node in place), sum(place[node] is not None for node in path)
