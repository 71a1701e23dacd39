"""top-k, top-p and min-p as masks on logits, in one vectorised pass over the rows that ask for them.

The order is temperature, top_k, top_p on what is left, min_p. Ties at a boundary are broken by the lowest id, so exactly
k tokens survive top_k.
"""

from __future__ import annotations

import torch
from torch import Tensor


def filter_logits(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Masks the tokens that a request's filters exclude.

    Args:
        logits: float32 [R, vocabulary], read only.
        temperature: float32 [R]; greedy rows (0) are never filtered, the most probable token always survives.
        top_k: int64 [R], 0 is off.
        top_p: float32 [R], 1 is off.
        min_p: float32 [R], 0 is off.

    Returns:
        float32 [R, vocabulary]: `logits` itself where no row filters, else a copy with -inf at excluded tokens.
    """
    active = (temperature > 0) & ((top_k > 0) | (top_p < 1) | (min_p > 0))
    if not bool(active.any()):
        return logits
    rows = active.nonzero().squeeze(1)
    out = logits.clone()
    out[rows] = _filter(logits[rows], temperature[rows], top_k[rows], top_p[rows], min_p[rows])
    return out


def _filter(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    ordered, order = torch.sort(logits, dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[1]).expand_as(logits)
    keep = (top_k[:, None] == 0) | (rank < top_k[:, None])
    scaled = (ordered / temperature[:, None]).masked_fill(~keep, -torch.inf)
    p = torch.softmax(scaled, dim=-1)
    # keep a token while the mass before it is short of top_p: the smallest set that reaches it
    before = p.cumsum(-1) - p
    keep &= (top_p[:, None] >= 1) | (before < top_p[:, None])
    keep &= p >= min_p[:, None] * p[:, :1]
    keep[:, 0] = True
    return logits.masked_fill(~torch.zeros_like(keep).scatter(1, order, keep), -torch.inf)
