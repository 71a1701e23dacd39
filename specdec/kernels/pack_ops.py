"""Packing the rows of a step, compiled where that could be built. The reference is `specdec.pack`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specdec import pack as reference
from specdec.kernels.build import load_cpu_kernels
from specdec.kernels.step_ops import address, compiled
from specdec.pack import PackedBatch, PackRow


def pack(rows: Sequence[PackRow], page_size: int, row_tile: int = 1) -> PackedBatch:
    """See `specdec.pack.pack`. Raises IndexError where the pages of a row do not cover its tokens."""
    if load_cpu_kernels() is None:
        return reference.pack(rows, page_size, row_tile)
    lengths = [len(row.tokens) for row in rows]
    num_pages = [len(row.pages) for row in rows]
    for row, length, pages in zip(rows, lengths, num_pages, strict=True):
        if row.cached + length > pages * page_size:  # C++ would read beyond them
            raise IndexError(f"{pages} pages of {page_size} tokens do not hold {row.cached} cached and {length} more")
    drafts = [reference.NO_INTS if row.parents is None else row.parents for row in rows]
    num_logits = [row.num_logits for row in rows]
    counts = np.array([lengths, [row.cached for row in rows], num_logits, list(map(len, drafts)), num_pages], dtype=np.int32)
    given = (counts, np.concatenate([*drafts, reference.NO_INTS]), np.concatenate([*[row.pages for row in rows], reference.NO_INTS]))
    num_tokens, widest = sum(lengths), max(num_pages, default=0)
    flat = reference.blank(-(-num_tokens // row_tile) * row_tile)
    flat[0, :num_tokens] = [token for row in rows for token in row.tokens]
    row_offsets = np.zeros(len(rows) + 1, dtype=np.int32)
    page_table = np.zeros((len(rows), widest), dtype=np.int32)
    logit_rows = np.empty(sum(num_logits), dtype=np.int32)
    compiled("specdec_pack")(
        len(rows),
        *(address(array, np.int32) for array in given),
        page_size,
        address(flat, np.int32),
        flat.shape[1],
        *(address(array, np.int32) for array in (row_offsets, page_table)),
        widest,
        address(logit_rows, np.int32),
    )
    tokens, positions, slots, parents, depths = flat
    return PackedBatch(tokens, positions, slots, parents, depths, row_offsets, counts[1], page_table, logit_rows, page_size)
