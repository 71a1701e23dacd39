"""Packs the rows of a step into flat arrays for one forward. numpy only; a backend uploads the result in one copy.

    row 0: pending ... nodes ...   row 1: pending ... nodes ...   padding
    |<------- span 0 ------->|     |<------- span 1 ------->|

Within a row, local token i is written to KV slot `cached + i` of the request, whatever its depth: siblings sit side
by side, and the accepted path is moved into place after the walk. Its position is `cached + depth(i)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]


@dataclass(frozen=True)
class PackRow:
    """One row before packing.

    Attributes:
        tokens: pending committed tokens, then draft nodes.
        cached: tokens of this sequence whose KV is in the pool.
        pages: int32 [p], the request's block table, covering `cached + len(tokens)` slots.
        num_logits: how many of the last tokens need logits.
        parents: int32 [n], parents of the last n tokens (the draft nodes) as node indices, -1 for the last pending
            token; None where there are no nodes.
    """

    tokens: Sequence[int]
    cached: int
    pages: Ints
    num_logits: int
    parents: Ints | None = None


@dataclass(frozen=True)
class PackedBatch:
    """Flat arrays of one forward. T token rows (padding included), B batch rows, R logit rows.

    Attributes:
        tokens: int32 [T], padding is 0.
        positions: int32 [T], rotary positions, `cached + depth`.
        slots: int32 [T], flat KV slot (page * page_size + offset) to write; -1 for padding.
        parents: int32 [T], local index of the parent within the row; -1 for the first token of a row.
        depths: int32 [T], local depth; equal to the local index exactly where all earlier local tokens are ancestors.
        row_offsets: int32 [B + 1], spans of the rows; row_offsets[B] <= T.
        cached: int32 [B].
        page_table: int32 [B, widest], padded with 0.
        logit_rows: int32 [R], token rows whose logits are wanted, in row order.
        page_size: tokens in a page.
    """

    tokens: Ints
    positions: Ints
    slots: Ints
    parents: Ints
    depths: Ints
    row_offsets: Ints
    cached: Ints
    page_table: Ints
    logit_rows: Ints
    page_size: int


def pack(rows: Sequence[PackRow], page_size: int, row_tile: int = 1) -> PackedBatch:
    """Packs `rows`, padding the token rows to a multiple of `row_tile`."""
    lengths = np.fromiter((len(row.tokens) for row in rows), dtype=np.int32, count=len(rows))
    offsets = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum(lengths, out=offsets[1:])
    num_tokens = int(offsets[-1])
    padded = -(-num_tokens // row_tile) * row_tile
    tokens, positions, parents, depths = (np.zeros(padded, dtype=np.int32) for _ in range(4))
    slots = np.full(padded, -1, dtype=np.int32)
    page_table = np.zeros((len(rows), max((len(row.pages) for row in rows), default=0)), dtype=np.int32)
    logit_rows = []
    for index, row in enumerate(rows):
        start, end = int(offsets[index]), int(offsets[index + 1])
        count = end - start
        local = np.arange(count, dtype=np.int32)
        tokens[start:end] = row.tokens
        parents[start:end] = local - 1
        depths[start:end] = local
        if row.parents is not None and len(row.parents):
            _place_nodes(row.parents, parents[start:end], depths[start:end])
        positions[start:end] = row.cached + depths[start:end]
        logical = row.cached + local
        slots[start:end] = row.pages[logical // page_size] * page_size + logical % page_size
        page_table[index, : len(row.pages)] = row.pages
        logit_rows.append(np.arange(end - row.num_logits, end, dtype=np.int32))
    return PackedBatch(
        tokens=tokens,
        positions=positions,
        slots=slots,
        parents=parents,
        depths=depths,
        row_offsets=offsets,
        cached=np.fromiter((row.cached for row in rows), dtype=np.int32, count=len(rows)),
        page_table=page_table,
        logit_rows=np.concatenate(logit_rows) if logit_rows else np.empty(0, dtype=np.int32),
        page_size=page_size,
    )


def _place_nodes(node_parents: Ints, parents: Ints, depths: Ints) -> None:
    """Writes local parents and depths of the draft nodes, the last `len(node_parents)` tokens of a row."""
    first = len(parents) - len(node_parents)
    parents[first:] = node_parents + first
    if (node_parents == np.arange(len(node_parents)) - 1).all():
        return  # a chain: the depths are those of the linear case
    for node, parent in enumerate(node_parents.tolist()):
        depths[first + node] = depths[first + parent] + 1
