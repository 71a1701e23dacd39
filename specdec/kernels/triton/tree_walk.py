"""The walk through every row's tree, and the KV slots to move, in one launch: one program for each row."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# (kernels are not Python: their arguments are pointers and device scalars)

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True)
class Walked:
    """Where the walks of B rows ended, D being the most nodes of a row.

    Attributes:
        nodes: int32 [B, D], accepted nodes from the root down, then -1.
        counts: int32 [B], how many.
        next_tokens: int64 [B], the token after them.
        src: int64 [B, D], KV slot of each accepted node; -1 where it need not move.
        dst: int64 [B, D], the slot it belongs into.
    """

    nodes: Tensor
    counts: Tensor
    next_tokens: Tensor
    src: Tensor
    dst: Tensor


def tree_walk(
    tokens: Tensor, parents: Tensor, offsets: Tensor, chosen: Tensor, bases: Tensor, page_table: Tensor, page_size: int
) -> Walked:
    """See `specdec.tree.DraftTree.walk` for the walk and `KVManager.commit` for the slots.

    Args:
        tokens: int32 [N], the nodes of all rows.
        parents: int32 [N], index within the row; -1 is the root.
        offsets: int32 [B + 1] on the host, first node of each row.
        chosen: int64 [N + B]: for each row the token at the root, then at every node.
        bases: int32 [B], position in its sequence at which the KV of a row's node 0 lies.
        page_table: int32 [B, pages].
        page_size: slots of a page.
    """
    rows, device = len(offsets) - 1, tokens.device
    most = int((offsets[1:] - offsets[:-1]).max()) if rows else 0
    depth = max(most, 1)
    nodes = torch.full((rows, depth), -1, dtype=torch.int32, device=device)
    counts = torch.empty(rows, dtype=torch.int32, device=device)
    next_tokens = torch.empty(rows, dtype=torch.int64, device=device)
    src, dst = (torch.full((rows, depth), -1, dtype=torch.int64, device=device) for _ in range(2))
    if rows:
        walk[(rows,)](
            *(tokens, parents, offsets.to(device), chosen, bases, page_table, page_table.stride(0), page_size),
            *(nodes, counts, next_tokens, src, dst, depth),
            NODES=triton.next_power_of_2(depth),
        )
    return Walked(nodes, counts, next_tokens, src, dst)


@triton.jit
def walk(
    tokens,
    parents,
    offsets,
    chosen,
    bases,
    page_table,
    table_stride,
    page_size,
    out_nodes,
    out_counts,
    out_tokens,
    out_src,
    out_dst,
    depth,
    NODES: tl.constexpr,
):
    """Follows the chosen tokens of a row; of siblings with equal tokens the first counts. Program (row)."""
    row = tl.program_id(0)
    first = tl.load(offsets + row)
    count = tl.load(offsets + row + 1) - first
    node = tl.arange(0, NODES)
    token = tl.load(tokens + first + node, mask=node < count, other=-1)
    parent = tl.load(parents + first + node, mask=node < count, other=-2)
    base = tl.load(bases + row)
    table = page_table + row.to(tl.int64) * table_stride
    at = tl.full((), -1, tl.int32)
    accepted = tl.full((), 0, tl.int32)
    picked = tl.load(chosen + first + row)
    found = tl.min(tl.where((parent == at) & (token == picked), node, NODES), axis=0)
    while found < NODES:
        at = found
        tl.store(out_nodes + row * depth + accepted, at)
        if at != accepted:
            source, target = base + at, base + accepted
            page = tl.load(table + source // page_size).to(tl.int64)
            tl.store(out_src + row * depth + accepted, page * page_size + source % page_size)
            page = tl.load(table + target // page_size).to(tl.int64)
            tl.store(out_dst + row * depth + accepted, page * page_size + target % page_size)
        accepted += 1
        picked = tl.load(chosen + first + row + 1 + at)
        found = tl.min(tl.where((parent == at) & (token == picked), node, NODES), axis=0)
    tl.store(out_counts + row, accepted)
    tl.store(out_tokens + row, picked)
