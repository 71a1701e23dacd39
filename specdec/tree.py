"""Draft trees: what a drafter proposes and the verifier walks. Values only; no torch, no model.

A tree hangs off the request's last committed token, its root, which is not a node:

    root ── a ── b ── d          tokens  = [a, b, c, d]
             └── c               parents = [-1, 0, 0, 1]     (-1 is the root)

Parents come before children, so a prefix of the node list is a tree again. A chain is `arange(n) - 1`.
`DraftShape` is what a scheduler may know of a tree.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specdec.errors import DrafterError

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
Mask = NDArray[np.bool_]


def node_depths(parents: Ints, deepest: int) -> Ints:
    """int32 [n]: edges from the root to each node, so 1 where the parent is -1. Any number of trees at once.

    By doubling: a node lies as deep below the root as below the node 2**k above it, and that one below the root.

    Args:
        parents: int32 [n].
        deepest: no node lies deeper; the size of the largest tree will do.
    """
    n = len(parents)
    depths = np.ones(n + 1, dtype=np.int32)
    depths[n] = 0  # the root, to which -1 points
    above = np.empty(n + 1, dtype=np.int32)
    above[:n], above[n] = parents, -1
    for _ in range(deepest.bit_length()):
        depths += depths[above]
        above = above[above]
    return depths[:n]


@dataclass(frozen=True, eq=False)
class DraftShape:
    """What a draft looks like, without its tokens: all that may decide how much of it is verified.

    Attributes:
        parents: int32 [n], as in `DraftTree`.
        confidence: float32 [n]; None where the drafter gives none, and where the verification rule forbids to look at
            anything that was computed from sampled tokens.
    """

    parents: Ints
    confidence: Floats | None = None

    def __len__(self) -> int:
        return len(self.parents)

    def depths(self) -> Ints:
        """int32 [n]: edges from the root to each node, so 1 for a child of the root."""
        return node_depths(self.parents, len(self))

    def within(self, max_nodes: int, max_depth: int) -> Mask:
        """bool [n]: the first `max_nodes` nodes that lie no deeper than `max_depth`."""
        if len(self) <= min(max_nodes, max_depth):
            return np.ones(len(self), dtype=np.bool_)
        keep = self.depths() <= max_depth
        keep &= np.cumsum(keep) <= max_nodes
        return keep


@dataclass(frozen=True, eq=False)
class DraftTree:
    """Candidate continuations of one request.

    Attributes:
        tokens: int32 [n], token ids.
        parents: int32 [n], index of each node's parent; -1 is the last committed token.
        confidence: float32 [n] or None, the drafter's estimate that a node is accepted given that its parent was.
        q: float32 [n, vocabulary] tensor or None: row i is the distribution that node i was really drawn from.
    """

    tokens: Ints
    parents: Ints
    confidence: Floats | None = None
    q: Any = None  # a torch.Tensor where given; this module must not import torch

    def __len__(self) -> int:
        return len(self.tokens)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DraftTree):
            return NotImplemented
        return bool(np.array_equal(self.tokens, other.tokens) and np.array_equal(self.parents, other.parents))

    __hash__ = None  # type: ignore[assignment]  # holds arrays, so it cannot be a key

    @staticmethod
    def chain(tokens: Iterable[int], confidence: Floats | None = None, q: Any = None) -> DraftTree:
        """A single path: each token is the only child of the one before it."""
        ids = np.asarray(list(tokens), dtype=np.int32)
        return DraftTree(ids, np.arange(len(ids), dtype=np.int32) - 1, confidence, q)

    @staticmethod
    def from_paths(paths: Iterable[Sequence[int]], max_nodes: int | None = None) -> DraftTree:
        """Merges paths that start at the root, sharing common prefixes; earlier paths get the node budget first."""
        children: dict[tuple[int, int], int] = {}
        tokens: list[int] = []
        parents: list[int] = []
        for path in paths:
            node = -1
            for token in path:
                child = children.get((node, token))
                if child is None:
                    if max_nodes is not None and len(tokens) >= max_nodes:
                        break
                    child = children[node, token] = len(tokens)
                    tokens.append(token)
                    parents.append(node)
                node = child
        return DraftTree(np.asarray(tokens, dtype=np.int32), np.asarray(parents, dtype=np.int32))

    def depths(self) -> Ints:
        """int32 [n]: edges from the root to each node, so 1 for a child of the root."""
        return node_depths(self.parents, len(self))

    def shape(self, blind: bool = False) -> DraftShape:
        """Its shape; without confidences if `blind`."""
        return DraftShape(self.parents, None if blind else self.confidence)

    def is_chain(self) -> bool:
        """Whether every node is the only child of the one before it."""
        return bool((self.parents == np.arange(len(self)) - 1).all())

    def path(self, node: int) -> list[int]:
        """Node indices from a child of the root down to `node`."""
        path = []
        while node >= 0:
            path.append(node)
            node = int(self.parents[node])
        return path[::-1]

    def paths(self) -> list[list[int]]:
        """Token paths from the root to every leaf, in node order of the leaves."""
        inner = set(self.parents.tolist())
        return [self.tokens[self.path(leaf)].tolist() for leaf in range(len(self)) if leaf not in inner]

    def children(self) -> dict[int, list[int]]:
        """Node -> its children in node order, -1 for the root; leaves have no entry."""
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents.tolist()):
            children.setdefault(parent, []).append(node)
        return children

    def walk(self, chosen: Sequence[int]) -> tuple[list[int], int]:
        """Follows chosen tokens from the root down, to the child whose token was chosen, until none is.

        Args:
            chosen: n + 1 tokens: the choice at the root, then at every node.

        Returns:
            The accepted nodes, and the token that follows them: the correction, or the bonus. Of siblings with equal tokens
            the first counts.
        """
        path: list[int] = []
        last, token = -1, chosen[0]
        for node, (parent, own) in enumerate(zip(self.parents.tolist(), self.tokens.tolist(), strict=True)):
            if parent == last and own == token:  # the children of `last` all come after it
                path.append(node)
                last, token = node, chosen[node + 1]
        return path, token

    def select(self, keep: Mask) -> DraftTree:
        """The nodes where `keep` (bool [n]) is true and all of whose ancestors are kept, renumbered."""
        if np.count_nonzero(keep) == len(keep):
            return self
        kept = keep.copy()
        for node, parent in enumerate(self.parents.tolist()):
            if parent >= 0:
                kept[node] &= kept[parent]
        renumbered = np.cumsum(kept, dtype=np.int32) - 1
        parents = self.parents[kept]
        return DraftTree(
            self.tokens[kept],
            np.where(parents >= 0, renumbered[parents], np.int32(-1)).astype(np.int32),
            None if self.confidence is None else self.confidence[kept],
            None if self.q is None else self.q[kept.nonzero()[0]],
        )

    def limited(self, max_nodes: int, max_depth: int) -> DraftTree:
        """The first `max_nodes` nodes that lie no deeper than `max_depth`."""
        if max_nodes <= 0 or max_depth <= 0:
            return EMPTY
        if len(self) <= min(max_nodes, max_depth):
            return self
        return self.select(self.shape().within(max_nodes, max_depth))

    def validate(self, vocab_size: int) -> None:
        """Raises DrafterError unless ids lie in the vocabulary, parents come first and numbers are finite."""
        n = len(self.tokens)
        if self.tokens.ndim != 1 or self.parents.shape != (n,):
            shapes = f"{self.tokens.shape} and {self.parents.shape}"
            raise DrafterError(f"tokens and parents must be one-dimensional and equally long, got shapes {shapes}")
        if not (np.issubdtype(self.tokens.dtype, np.integer) and np.issubdtype(self.parents.dtype, np.integer)):
            raise DrafterError(f"tokens and parents must be integers, got {self.tokens.dtype} and {self.parents.dtype}")
        if n == 0:
            return
        low, high = int(self.tokens.min()), int(self.tokens.max())
        if low < 0 or high >= vocab_size:
            raise DrafterError(f"token ids must lie in [0, {vocab_size}), got {low if low < 0 else high}")
        bad = (self.parents < -1) | (self.parents >= np.arange(n))
        if bad.any():
            node = int(bad.argmax())
            raise DrafterError(f"a parent must come before its child: node {node} names parent {int(self.parents[node])}")
        if self.confidence is not None:
            if self.confidence.shape != (n,):
                raise DrafterError(f"confidence must have shape ({n},), got {self.confidence.shape}")
            if not bool(((self.confidence >= 0) & (self.confidence <= 1)).all()):
                raise DrafterError("confidence must lie in [0, 1] and be finite")
        if self.q is not None and tuple(self.q.shape) != (n, vocab_size):
            raise DrafterError(f"q must have shape ({n}, {vocab_size}), got {tuple(self.q.shape)}")


EMPTY = DraftTree(np.empty(0, dtype=np.int32), np.empty(0, dtype=np.int32))


def are_valid(trees: Sequence[object], vocab_size: int) -> bool:
    """Whether all of `trees` are plain trees, int32 and without q, that `validate` would pass: all of them looked at in one go.

    False says only that they have to be looked at one by one.
    """
    drafts = [tree for tree in trees if isinstance(tree, DraftTree) and tree.q is None]
    if len(drafts) != len(trees):
        return False
    if not drafts:
        return True
    sizes = [len(tree.tokens) for tree in drafts]
    given = [tree.parents if tree.confidence is None else tree.confidence for tree in drafts]
    if max(sizes) > len(_PLACES) or sizes != [len(tree.parents) for tree in drafts] or sizes != [len(array) for array in given]:
        return False
    tokens, parents = np.concatenate([tree.tokens for tree in drafts]), np.concatenate([tree.parents for tree in drafts])
    chances = np.concatenate([tree.confidence for tree in drafts if tree.confidence is not None] or [_NO_CHANCES])
    as_stated = tokens.dtype == parents.dtype == np.int32 and chances.dtype == np.float32
    if not as_stated or not tokens.ndim == parents.ndim == chances.ndim == 1:
        return False
    places = np.concatenate([_PLACES[:size] for size in sizes])
    fits = (tokens >= 0) & (tokens < vocab_size) & (parents >= -1) & (parents < places)
    return bool(fits.all() and ((chances >= 0) & (chances <= 1)).all())


_PLACES = np.arange(4096, dtype=np.int32)
_NO_CHANCES = np.empty(0, dtype=np.float32)
