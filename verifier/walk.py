"""The walk: from the root down, to the child whose token was chosen, until none is."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.tree import DraftTree


def children_of(tree: DraftTree) -> dict[int, list[int]]:
    """Node -> its children in node order, -1 for the root; leaves have no entry."""
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(tree.parents.tolist()):
        children.setdefault(parent, []).append(node)
    return children


def walk(tree: DraftTree, chosen: Sequence[int]) -> tuple[list[int], int]:
    """Follows the chosen tokens through a tree.

    Args:
        tree: n nodes; of siblings with equal tokens the first counts.
        chosen: n + 1 tokens: the choice at the root, then at every node.

    Returns:
        The accepted nodes from the root down, and the token that follows them: the correction, or the bonus.
    """
    children: dict[tuple[int, int], int] = {}
    for node, (parent, token) in enumerate(zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True)):
        children.setdefault((parent, token), node)
    path: list[int] = []
    token = chosen[0]
    accepted = children.get((-1, token))
    while accepted is not None:
        path.append(accepted)
        token = chosen[accepted + 1]
        accepted = children.get((accepted, token))
    return path, token
