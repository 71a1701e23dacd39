"""Prompt lookup, compiled: the index of one growing text, and the trees of many in one call.

The reference is `specdec.drafters.ngram_reference`.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import numpy as np

from specdec.kernels.build import load_cpu_kernels
from specdec.kernels.step_ops import address, compiled
from specdec.tree import EMPTY, DraftTree


def is_available() -> bool:
    """Whether the kernels could be built."""
    return load_cpu_kernels() is not None


class Index:
    """Where the n-grams of a growing text ended; `grow_trees` takes tokens in and looks them up.

    Args:
        shortest: tokens of the shortest match, at least 1.
        longest: matches longer than this count as equally good, at most 32.

    Attributes:
        length: tokens taken in.
        handle: of the index on the compiled side.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self.length = 0
        self.handle: int = compiled("specdec_ngram_new")(shortest, longest)
        weakref.finalize(self, compiled("specdec_ngram_free"), self.handle)


def grow_trees(indexes: Sequence[Index], texts: Sequence[Sequence[int]], limits: Sequence[int], depths: Sequence[int]) -> list[DraftTree]:
    """See `specdec.drafters.ngram_reference.grow_trees`."""
    added = [text[index.length :] for index, text in zip(indexes, texts, strict=True)]
    rows, width = len(indexes), max(limits)
    asks = np.array([[index.handle for index in indexes], [len(tokens) for tokens in added], limits, depths], dtype=np.int64)
    fresh = np.array([token for tokens in added for token in tokens], dtype=np.int32)
    tokens, parents = np.empty((2, rows, width), dtype=np.int32)
    confidence, sizes = np.empty((rows, width), dtype=np.float32), np.empty(rows, dtype=np.int64)
    compiled("specdec_ngram_propose")(
        address(asks, np.int64),
        rows,
        address(fresh, np.int32),
        width,
        *(address(tokens, np.int32), address(parents, np.int32), address(confidence, np.float32), address(sizes, np.int64)),
    )
    for index, text in zip(indexes, texts, strict=True):
        index.length = len(text)
    return [
        DraftTree(tokens[row, :size], parents[row, :size], confidence[row, :size]) if size else EMPTY
        for row, size in enumerate(sizes.tolist())
    ]
