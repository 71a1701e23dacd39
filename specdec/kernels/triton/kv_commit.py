"""Moves the KV of accepted nodes together, in all layers at once. Safe where sources and destinations overlap."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# (kernels are not Python: their arguments are pointers and device scalars)

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 512


def kv_commit(pool: Tensor, src: Tensor, dst: Tensor, block: int = BLOCK) -> None:
    """Copies slots in place; every source of a row is read before any of its destinations is written.

    Args:
        pool: [2, layers, slots, ...], keys and values, contiguous.
        src: int64 [B, D]; entries that are -1 are left out.
        dst: int64 [B, D]. No two rows share a slot.
        block: elements of a slot at a time, a power of two.
    """
    rows, depth = src.shape
    slots = pool.shape[2]
    width = pool[0, 0, 0].numel()
    planes = pool.shape[0] * pool.shape[1]
    if rows and depth:
        move[(rows, planes, triton.cdiv(width, block))](
            pool, src, dst, slots, width, depth, DEPTH=triton.next_power_of_2(depth), BLOCK=block
        )


@triton.jit
def move(pool, src, dst, slots, width, depth, DEPTH: tl.constexpr, BLOCK: tl.constexpr):
    """One slice of a row's slots in one plane. Program (row, plane, slice)."""
    row, plane, piece = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    node = tl.arange(0, DEPTH)
    source = tl.load(src + row * depth + node, mask=node < depth, other=-1)
    target = tl.load(dst + row * depth + node, mask=node < depth, other=-1)
    column = piece * BLOCK + tl.arange(0, BLOCK)
    start = plane.to(tl.int64) * slots
    moved = (source >= 0)[:, None] & (column < width)[None, :]
    values = tl.load(pool + (start + source)[:, None] * width + column[None, :], mask=moved)
    tl.debug_barrier()  # a thread may load what another stores
    tl.store(pool + (start + target)[:, None] * width + column[None, :], values, mask=moved)
