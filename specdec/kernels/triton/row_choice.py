"""Row choice of the coupled rule on the device: one pass over each row, no softmax and no copy.

The vocabulary of a row is split over programs, so that few rows still fill the device; a second, tiny kernel picks the
best of a row's parts. Filters enter as a boundary per row, computed for those rows only that filter.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# (kernels are not Python: their arguments are pointers and device scalars)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.backend.base import ChoiceBatch
from specdec.kernels.filters import boundaries, filter_logits
from specdec.kernels.triton.noise import first_best, gumbel, gumbel_bound, noise_words

BLOCK = 2048
PROGRAMS = 264
"""Programs to aim at: two for each multiprocessor of an H200."""


def choose(logits: Tensor, choice: ChoiceBatch, block: int = BLOCK) -> Tensor:
    """See `specdec.kernels.reference.choose`.

    Args:
        logits: float32, bfloat16 or float16 [R, vocabulary], rows contiguous.
        choice: per-row parameters, on any device.
        block: logits at a time, a power of two.

    Returns:
        int64 [R] on the device of `logits`.
    """
    rows, vocabulary = logits.shape
    device = logits.device
    temperature, top_k, top_p, min_p = (t.to(device) for t in (choice.temperature, choice.top_k, choice.top_p, choice.min_p))
    if choice.typical_p is not None and bool((choice.typical_p < 1).any()):
        # what typical_p keeps has no boundary, so it is masked, with the other filters
        logits = filter_logits(logits.float(), temperature, top_k, top_p, min_p, choice.typical_p.to(device))
        top_k, top_p, min_p = torch.zeros_like(top_k), torch.ones_like(top_p), torch.zeros_like(min_p)
    low_logits, low_tokens = boundaries(logits, temperature, top_k, top_p, min_p)
    splits = max(1, min(triton.cdiv(vocabulary, block), PROGRAMS // max(rows, 1)))
    span = triton.cdiv(triton.cdiv(vocabulary, block), splits) * block
    splits = triton.cdiv(vocabulary, span)
    scores = torch.empty(rows, splits, dtype=torch.float64, device=device)
    tokens = torch.empty(rows, splits, dtype=torch.int32, device=device)
    out = torch.empty(rows, dtype=torch.int64, device=device)
    seeds, positions = choice.seeds.to(device), choice.positions.to(device)
    salts = torch.zeros_like(seeds) if choice.salts is None else choice.salts.to(device)
    race[(rows, splits)](
        *(logits, logits.stride(0), vocabulary, span, temperature, low_logits, low_tokens),
        *(seeds, positions, choice.stream, salts, scores, tokens),
        BLOCK=block,
    )
    best_part[(rows,)](scores, tokens, splits, out, PARTS=triton.next_power_of_2(splits))
    return out


@triton.jit
def race(
    logits,
    stride,
    vocabulary,
    span,
    temperatures,
    low_logits,
    low_tokens,
    seeds,
    positions,
    stream,
    salts,
    out_scores,
    out_tokens,
    BLOCK: tl.constexpr,
):
    """The best score and its token of `span` logits of a row; program (row, part).

    A part with a NaN or infinite logit reports the score +inf and the token -1, one without a token -inf and -1.
    """
    row, part = tl.program_id(0), tl.program_id(1)
    temperature = tl.load(temperatures + row)
    low_logit, low_token = tl.load(low_logits + row), tl.load(low_tokens + row)
    seed, position, salt = tl.load(seeds + row), tl.load(positions + row), tl.load(salts + row)
    best_score = tl.full((), float("-inf"), tl.float64)
    best_token = tl.full((), -1, tl.int32)
    bad = tl.full((), 0, tl.int32)
    end = tl.minimum((part + 1) * span, vocabulary)
    for first in range(part * span, end, BLOCK):
        token = first + tl.arange(0, BLOCK)
        x = tl.load(logits + row.to(tl.int64) * stride + token, mask=token < end, other=float("-inf")).to(tl.float32)
        bad |= tl.max(((x != x) | (x == float("inf"))).to(tl.int32), axis=0)
        kept = (x > low_logit) | ((x == low_logit) & (token <= low_token))
        x = tl.where(kept, x, float("-inf"))
        if temperature == 0:
            score, chosen = first_best(x.to(tl.float64), token)
            if score > best_score:
                best_score = score
                best_token = chosen
        else:
            words = noise_words(seed, first, position, tl.to_tensor(stream), salt, BLOCK)
            possible = x > float("-inf")
            scaled = tl.where(possible, x, 0.0) / temperature
            bound = scaled + gumbel_bound(words) + 1e-3 + 1e-6 * tl.abs(scaled)
            # float64 logarithms are dear: taken only where a token of the block could still win
            if tl.max(tl.where(possible, bound, float("-inf")), axis=0) >= best_score:
                score, chosen = first_best(x.to(tl.float64) / temperature.to(tl.float64) + gumbel(words), token)
                if score > best_score:
                    best_score = score
                    best_token = chosen
    at = row * tl.num_programs(1) + part
    tl.store(out_scores + at, tl.where(bad > 0, float("inf"), best_score))
    tl.store(out_tokens + at, tl.where(bad > 0, -1, best_token))


@triton.jit
def best_part(scores, tokens, parts, out, PARTS: tl.constexpr):
    """The token of the best part of a row, the lowest where parts tie; -1 where a part is bad or none has a token."""
    row = tl.program_id(0)
    part = tl.arange(0, PARTS)
    score = tl.load(scores + row * parts + part, mask=part < parts, other=float("-inf"))
    _, token = first_best(score, tl.load(tokens + row * parts + part, mask=part < parts, other=-1))
    tl.store(out + row, token.to(tl.int64))
