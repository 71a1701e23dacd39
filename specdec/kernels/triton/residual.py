"""One pass over what rejected children left of a row's target: its mass, and the token drawn from it.

With p_0 = p and the proposals q_1 ... q_n of the rejected children,

    p_j = (m_j p_(j-1) - q_j)+ / S_j,      S_j its sum

where m_j is 1 in recursive rejection and the mass of the node in traversal. The pass computes p_n elementwise from the
known S_1 ... S_(n-1) and never stores it, sums up S_n, and runs the race for the token that a step would end with. So a
row is read once for each rejected child, and a row that no walk visits not at all.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# (kernels are not Python: their arguments are pointers and device scalars)

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.triton.noise import first_best, gumbel, noise_words
from specdec.kernels.triton.row_choice import PROGRAMS, best_part

BLOCK = 1024


@dataclass(frozen=True)
class Rejected:
    """The children rejected so far at the nodes of B rows, at most K each.

    Attributes:
        counts: int32 [B].
        tokens: int32 [B, K].
        q_rows: int32 [B, K], row of the child's proposal in `q`; -1 where the child was certain.
        masses: float64 [B, K], m_j.
        totals: float64 [B, K], S_j; that of the last child is not read.
    """

    counts: Tensor
    tokens: Tensor
    q_rows: Tensor
    masses: Tensor
    totals: Tensor


@dataclass(frozen=True)
class Draws:
    """Where the residuals are drawn from, and with which noise.

    Attributes:
        rows: int32 [B], rows of the logits.
        temperature: float32 [B], positive.
        log_totals: float64 [B], log of the sum of exp(logit / temperature) over what is kept.
        seeds: int64 [B].
        positions: int64 [B].
        salts: int64 [B].
        stream: noise stream.
    """

    rows: Tensor
    temperature: Tensor
    log_totals: Tensor
    seeds: Tensor
    positions: Tensor
    salts: Tensor
    stream: int = 2


def residual(logits: Tensor, q: Tensor, draws: Draws, rejected: Rejected, block: int = BLOCK) -> tuple[Tensor, Tensor]:
    """
    Args:
        logits: float32, bfloat16 or float16 [R, vocabulary], -inf at what filters and masks exclude.
        q: float32 [nodes, vocabulary], proposals; [0, vocabulary] where all are certain.
        draws: B rows.
        rejected: what was rejected at each.
        block: logits at a time, a power of two.

    Returns:
        float64 [B], the sum of (m p - q)+ for the last rejected child, of p where there is none; int64 [B], the token drawn
        from it, -1 where that sum is 0.
    """
    count, vocabulary = len(draws.rows), logits.shape[1]
    splits = max(1, min(triton.cdiv(vocabulary, block), PROGRAMS // max(count, 1)))
    span = triton.cdiv(triton.cdiv(vocabulary, block), splits) * block
    splits = triton.cdiv(vocabulary, span)
    sums, scores = (torch.empty(count, splits, dtype=torch.float64, device=logits.device) for _ in range(2))
    tokens = torch.empty(count, splits, dtype=torch.int32, device=logits.device)
    out = torch.empty(count, dtype=torch.int64, device=logits.device)
    remains[(count, splits)](
        *(logits, logits.stride(0), q, q.stride(0), vocabulary, span),
        *(draws.rows, draws.temperature, draws.log_totals, draws.seeds, draws.positions, draws.salts, draws.stream),
        *(rejected.counts, rejected.tokens, rejected.q_rows, rejected.masses, rejected.totals, rejected.tokens.shape[1]),
        *(sums, scores, tokens),
        BLOCK=block,
    )
    best_part[(count,)](scores, tokens, splits, out, PARTS=triton.next_power_of_2(splits))
    return sums.sum(1), out


@triton.jit
def remains(
    logits,
    stride,
    q,
    q_stride,
    vocabulary,
    span,
    rows,
    temperatures,
    log_totals,
    seeds,
    positions,
    salts,
    stream,
    counts,
    child_tokens,
    child_rows,
    masses,
    totals,
    most,
    out_sums,
    out_scores,
    out_tokens,
    BLOCK: tl.constexpr,
):
    """Sum, best score and its token of `span` entries of a residual. Program (draw, part)."""
    draw, part = tl.program_id(0), tl.program_id(1)
    row = tl.load(rows + draw).to(tl.int64)
    temperature = tl.load(temperatures + draw).to(tl.float64)
    log_total = tl.load(log_totals + draw)
    seed, position, salt = tl.load(seeds + draw), tl.load(positions + draw), tl.load(salts + draw)
    count = tl.load(counts + draw)
    mass = tl.full((), 0.0, tl.float64)
    best_score = tl.full((), float("-inf"), tl.float64)
    best_token = tl.full((), -1, tl.int32)
    end = tl.minimum((part + 1) * span, vocabulary)
    for first in range(part * span, end, BLOCK):
        token = first + tl.arange(0, BLOCK)
        x = tl.load(logits + row * stride + token, mask=token < end, other=float("-inf")).to(tl.float64)
        left = tl.exp(x / temperature - log_total)
        for child in range(0, count):
            at = draw * most + child
            q_row = tl.load(child_rows + at)
            q_end = tl.where(q_row >= 0, end, 0)
            from_q = tl.load(q + q_row.to(tl.int64) * q_stride + token, mask=token < q_end, other=0.0).to(tl.float64)
            certain = tl.where(token == tl.where(q_row < 0, tl.load(child_tokens + at), -1), 1.0, 0.0)
            left = tl.maximum(left * tl.load(masses + at) - from_q - certain, 0.0)
            if child + 1 < count:
                left = left / tl.load(totals + at)
        mass += tl.sum(left, axis=0)
        words = noise_words(seed, first, position, tl.to_tensor(stream), salt, BLOCK)
        possible = left > 0
        score, chosen = first_best(tl.where(possible, tl.log(tl.where(possible, left, 1.0)) + gumbel(words), float("-inf")), token)
        if score > best_score:
            best_score = score
            best_token = chosen
    at = draw * tl.num_programs(1) + part
    tl.store(out_sums + at, mass)
    tl.store(out_scores + at, best_score)
    tl.store(out_tokens + at, best_token)
