"""top-k, top-p, min-p and typical-p as masks on logits, in one vectorised pass over the rows that ask for them.

The order is temperature, top_k, top_p on what is left, min_p, typical_p on what is left. Ties at a boundary are broken by
the lowest id, so exactly k tokens survive top_k.
"""

from __future__ import annotations

import torch
from torch import Tensor


def filter_logits(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, typical_p: Tensor | None = None
) -> Tensor:
    """Masks the tokens that a request's filters exclude.

    Args:
        logits: float32 [R, vocabulary], read only.
        temperature: float32 [R]; greedy rows (0) are never filtered. At least one token survives, and without typical_p
            the most probable one.
        top_k: int64 [R], 0 is off.
        top_p: float32 [R], 1 is off.
        min_p: float32 [R], 0 is off.
        typical_p: float32 [R], 1 is off; None where all are.

    Returns:
        float32 [R, vocabulary]: `logits` itself where no row filters, else a copy with -inf at excluded tokens.
    """
    active = active_rows(temperature, top_k, top_p, min_p, typical_p)
    if not bool(active.any()):
        return logits
    rows = active.nonzero().squeeze(1)
    out = logits.clone()
    typical = None if typical_p is None else typical_p[rows]
    out[rows] = _filter(logits[rows], temperature[rows], top_k[rows], top_p[rows], min_p[rows], typical)
    return out


def active_rows(temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, typical_p: Tensor | None) -> Tensor:
    """bool [R]: the rows that filter anything; arguments as for `filter_logits`."""
    asked = (top_k > 0) | (top_p < 1) | (min_p > 0)
    if typical_p is not None:
        asked |= typical_p < 1
    return (temperature > 0) & asked


def boundaries(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> tuple[Tensor, Tensor]:
    """What top_k, top_p and min_p keep, as the last token that they do: it and all before it, by logit and then by id.

    Args:
        logits: float [R, vocabulary]; the others as for `filter_logits`, on its device.

    Returns:
        float32 [R] logit and int64 [R] id of that token; -inf and the greatest id in rows that filter nothing.
    """
    low_logits = torch.full((len(logits),), -torch.inf, device=logits.device)
    low_tokens = torch.full((len(logits),), torch.iinfo(torch.int64).max, device=logits.device)
    rows = active_rows(temperature, top_k, top_p, min_p, None).nonzero().squeeze(1)
    if len(rows):
        ordered, order, _, keep = _ranked(logits[rows].float(), temperature[rows], top_k[rows], top_p[rows], min_p[rows])
        last = keep.sum(-1, keepdim=True) - 1
        low_logits[rows] = ordered.gather(1, last).squeeze(1)
        low_tokens[rows] = order.gather(1, last).squeeze(1)
    return low_logits, low_tokens


def _filter(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, typical_p: Tensor | None) -> Tensor:
    _, order, gaps, keep = _ranked(logits, temperature, top_k, top_p, min_p)
    if typical_p is not None:
        keep &= _typical(gaps, keep, typical_p)
    return logits.masked_fill(~torch.zeros_like(keep).scatter(1, order, keep), -torch.inf)


def _ranked(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits in descending order, their ids, their nats below the first (float64), and which are kept: leading ones."""
    ordered, order = torch.sort(logits, dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[1], device=logits.device).expand_as(logits)
    # float64, so that the order of a sum (here by rank, in the compiled kernel by id) does not decide what is kept
    gaps = (ordered - ordered[:, :1]).double() / temperature[:, None].double()
    keep = (top_k[:, None] == 0) | (rank < top_k[:, None])
    mass = (gaps.exp() * keep).cumsum(-1)
    # keep a token while the mass before it is short of top_p: the smallest set that reaches it
    before = torch.nn.functional.pad(mass, (1, 0))[:, :-1]
    keep &= (top_p[:, None] >= 1) | (before < top_p[:, None].double() * mass[:, -1:])
    keep &= gaps >= min_p[:, None].double().log()
    keep[:, 0] = True
    return ordered, order, gaps, keep


def _typical(gaps: Tensor, keep: Tensor, typical_p: Tensor) -> Tensor:
    """The locally typical set (Meister et al. 2023, "Locally typical sampling", eq. 10).

    The smallest set of mass `typical_p` of those tokens whose surprise is nearest to the entropy; of equally near ones
    the more probable, then the lower id.

    Args:
        gaps: float64 [R, vocabulary], log-probabilities less that of the most probable token, descending.
        keep: bool [R, vocabulary], what the other filters left.
        typical_p: float32 [R], 1 keeps all.

    Returns:
        bool [R, vocabulary]; tokens of probability 0 are never in.
    """
    possible = keep & gaps.isfinite()
    gaps = gaps.masked_fill(~possible, 0)
    weights = gaps.exp() * possible
    # a running sum, because a plain one may be split over threads and then depends on how many rows there are
    total = weights.cumsum(-1)[:, -1:]
    # surprise less entropy: both hold the log of the total, which cancels
    mean = (weights * gaps).cumsum(-1)[:, -1:] / total
    order = (gaps - mean).abs().masked_fill(~possible, torch.inf).argsort(dim=-1, stable=True)
    mass = weights.gather(1, order).cumsum(-1)
    before = torch.nn.functional.pad(mass, (1, 0))[:, :-1]
    kept = (typical_p[:, None] >= 1) | (before < typical_p[:, None].double() * total)
    return torch.zeros_like(kept).scatter(1, order, kept) & possible
