"""The drafts of a step as flat arrays, so that deciding over all nodes is a few operations on arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from specdec.tree import DraftShape, node_depths

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class FlatDrafts:
    """All nodes of several non-empty drafts, one draft after the other.

    Attributes:
        rows: int [n], the draft that each node belongs to.
        parents: int [n], as indices over all nodes; -1 under a root.
        depths: int [n], 1 under a root.
        sizes: int [drafts], nodes of each.
        starts: int [drafts], index of the first.
        are_chains: whether all of them are.
    """

    rows: Ints
    parents: Ints
    depths: Ints
    sizes: Ints
    starts: Ints
    are_chains: bool

    @classmethod
    def of(cls, shapes: Sequence[DraftShape]) -> FlatDrafts:
        sizes = np.array([len(shape) for shape in shapes], dtype=np.int64)
        ends = sizes.cumsum()
        starts = ends - sizes
        rows = np.repeat(np.arange(len(sizes)), sizes)
        offsets = starts[rows]
        places = np.arange(int(ends[-1])) - offsets
        own = np.concatenate([shape.parents for shape in shapes])
        are_chains = bool((own == places - 1).all())
        parents = np.where(own >= 0, own + offsets, -1)
        depths = places + 1 if are_chains else node_depths(parents.astype(np.int32), int(sizes.max())).astype(np.int64)
        return cls(rows, parents, depths, sizes, starts, are_chains)

    def path_products(self, rates: Floats) -> Floats:
        """[n]: the product of `rates` ([n]) from the root down to each node, multiplied in this order: equal rates are to stay equal."""
        products = np.append(rates, 1.0)  # the last stands for the roots, to which -1 points
        for depth in range(2, int(self.depths.max()) + 1):
            nodes = np.flatnonzero(self.depths == depth)
            products[nodes] *= products[self.parents[nodes]]
        return products[:-1]

    def ranks(self) -> Ints:
        """int [n]: how many elder siblings each node has."""
        ranks = np.zeros(len(self.rows), dtype=np.int64)
        if self.are_chains:
            return ranks
        family = self._families()
        order = family.argsort(kind="stable")
        ordered = family[order]
        first = np.append(True, ordered[1:] != ordered[:-1])
        places = np.arange(len(ordered))
        ranks[order] = places - np.maximum.accumulate(np.where(first, places, 0))
        return ranks

    def siblings(self) -> Ints:
        """int [n]: how many nodes hang off the same parent, the node itself among them."""
        family = self._families()
        counts: Ints = np.bincount(family)[family]
        return counts

    def _families(self) -> Ints:
        """int [n]: equal for nodes of one parent; roots first, then nodes."""
        families: Ints = np.where(self.parents >= 0, self.parents + len(self.starts), self.rows)
        return families

    def split(self, keep: NDArray[np.bool_]) -> list[NDArray[np.bool_]]:
        """`keep` ([n]) cut into one view per draft."""
        starts = self.starts.tolist()
        return [keep[start : start + size] for start, size in zip(starts, self.sizes.tolist(), strict=True)]
