"""Plain references of the kernels of a step's host side: the walk through drafts, and the copies within a KV pool."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.backend.base import ChoiceBatch, TreeBatch, Walked
from specdec.kernels.reference import choose
from specdec.tree import DraftTree


def walk(logits: Tensor, trees: TreeBatch) -> Walked:
    """Chooses at every root and node, then follows the chosen tokens from each root down. See `Backend.walk`."""
    requests = len(trees.starts)
    paths, tokens = [], []
    for index in range(requests):
        first, end = trees.offsets[index : index + 2].tolist()
        tree = DraftTree(trees.tokens[first:end], trees.parents[first:end])
        start = int(trees.starts[index])
        chosen = choose(logits[start : start + len(tree) + 1], _at_every_node(trees.choice, index, tree))
        path, token = tree.walk(chosen.tolist())
        paths.append(path)
        tokens.append(token)
    nodes = np.full((requests, int(np.diff(trees.offsets).max(initial=0))), -1, dtype=np.int32)
    for index, path in enumerate(paths):
        nodes[index, : len(path)] = path
    return Walked(nodes, np.asarray([len(path) for path in paths], dtype=np.int32), np.asarray(tokens, dtype=np.int32))


def _at_every_node(choice: ChoiceBatch, index: int, tree: DraftTree) -> ChoiceBatch:
    """The parameters of request `index` for its root and each of its nodes."""

    def repeated(column: Tensor) -> Tensor:
        return column[index].repeat(len(tree) + 1)

    return ChoiceBatch(
        seeds=repeated(choice.seeds),
        positions=choice.positions[index] + torch.tensor([0, *tree.depths().tolist()]),
        temperature=repeated(choice.temperature),
        top_k=repeated(choice.top_k),
        top_p=repeated(choice.top_p),
        min_p=repeated(choice.min_p),
        typical_p=None if choice.typical_p is None else repeated(choice.typical_p),
    )


def copy_rows(pool: Tensor, src: NDArray[np.int64], dst: NDArray[np.int64]) -> None:
    """Copies rows within a pool; every source is read before any destination is written.

    Args:
        pool: [2, layers, rows, ...], keys and values, changed in place.
        src: int64 [m], rows to copy.
        dst: int64 [m], where to, each once.
    """
    source, target = (torch.tensor(rows, dtype=torch.int64, device=pool.device) for rows in (src, dst))
    pool.index_copy_(2, target, pool.index_select(2, source))
