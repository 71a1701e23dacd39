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

from specdec.tree import node_depths

Ints = NDArray[np.int32]
NO_INTS: Ints = np.empty(0, dtype=np.int32)


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
    lengths = np.array([len(row.tokens) for row in rows], dtype=np.int32)
    cached = np.array([row.cached for row in rows], dtype=np.int32)
    offsets = np.zeros(len(rows) + 1, dtype=np.int32)
    lengths.cumsum(out=offsets[1:])
    num_tokens = int(offsets[-1])
    tokens, positions, slots, parents, depths = blank(-(-num_tokens // row_tile) * row_tile)
    if rows:
        tokens[:num_tokens] = np.array([token for row in rows for token in row.tokens], dtype=np.int32)
    row_of, local = _spans(lengths)
    parents[:num_tokens] = local - 1
    depths[:num_tokens] = local
    _place_nodes(rows, offsets, parents, depths)
    before = cached[row_of]
    positions[:num_tokens] = before + depths[:num_tokens]
    page_table = np.zeros((len(rows), max((len(row.pages) for row in rows), default=0)), dtype=np.int32)
    for index, row in enumerate(rows):
        page_table[index, : len(row.pages)] = row.pages
    page, offset = np.divmod(before + local, page_size)
    slots[:num_tokens] = page_table[row_of, page] * page_size + offset
    return PackedBatch(
        tokens=tokens,
        positions=positions,
        slots=slots,
        parents=parents,
        depths=depths,
        row_offsets=offsets,
        cached=cached,
        page_table=page_table,
        logit_rows=_logit_rows(rows, offsets),
        page_size=page_size,
    )


def _logit_rows(rows: Sequence[PackRow], offsets: Ints) -> Ints:
    """The last `num_logits` token rows of every row."""
    if all(row.num_logits == len(row.tokens) for row in rows):  # decoding
        return np.arange(offsets[-1], dtype=np.int32)
    num_logits = np.array([row.num_logits for row in rows], dtype=np.int32)
    row_of, local = _spans(num_logits)
    return (offsets[1:] - num_logits)[row_of] + local


def blank(count: int) -> Ints:
    """int32 [5, count]: tokens, positions, slots, parents and depths as they stand in the padding."""
    flat = np.zeros((5, count), dtype=np.int32)
    flat[2] = -1
    return flat


def _spans(lengths: Ints) -> tuple[Ints, Ints]:
    """For each item of spans that lie end to end: which span it is in, and its place there; int32 [sum of lengths] each."""
    span = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    starts = lengths.cumsum(dtype=np.int32) - lengths
    return span, np.arange(len(span), dtype=np.int32) - starts[span]


def _place_nodes(rows: Sequence[PackRow], offsets: Ints, parents: Ints, depths: Ints) -> None:
    """Writes local parents and depths of the draft nodes, the last tokens of their rows."""
    drafts = [(index, row.parents) for index, row in enumerate(rows) if row.parents is not None]
    if not drafts:
        return
    which = np.array([index for index, _ in drafts], dtype=np.int32)
    counts = np.array([len(own) for _, own in drafts], dtype=np.int32)
    span, node = _spans(counts)
    ends = offsets[which + 1]
    first = (ends - offsets[which] - counts)[span]  # local index of the row's node 0, behind the pending tokens
    own = np.concatenate([own for _, own in drafts])
    at = (ends - counts)[span] + node
    parents[at] = own + first
    in_all = own + np.arange(len(own), dtype=np.int32) - node
    in_all[own < 0] = -1
    depths[at] = first - 1 + node_depths(in_all, int(counts.max()))
