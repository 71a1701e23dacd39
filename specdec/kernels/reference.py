"""Plain references of the compiled kernels, in torch and numpy. They run where there is no compiler, and in tests.

Every query is computed on its own, over exactly the keys of its path, so a row's bits do not depend on the batch here
either.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.backend.base import AttentionSpec, ChoiceBatch
from specdec.kernels.filters import filter_logits
from specdec.pack import PackedBatch

MARGIN = 26.5  # nats below the best from which no noise can win: gumbel lies between -3.14 and 22.88


def paged_attention(q: Tensor, keys: Tensor, values: Tensor, batch: PackedBatch, spec: AttentionSpec) -> Tensor:
    """Attention of every token over its own path.

    Args:
        q: [T, num_heads, head_dim].
        keys: [pages, page_size, num_kv_heads, head_dim], one layer; this step's k is already in it.
        values: the same shape.
        batch: the packed rows.
        spec: the layer.

    Returns:
        [T, num_heads, head_dim] in q's dtype, zero on padding rows.
    """
    out = torch.zeros_like(q)
    keys, values = keys.flatten(0, 1), values.flatten(0, 1)
    group = spec.num_heads // spec.num_kv_heads
    for row in range(len(batch.cached)):
        start, end = int(batch.row_offsets[row]), int(batch.row_offsets[row + 1])
        for token in range(start, end):
            slots = torch.from_numpy(_path_slots(batch, row, token - start))
            if spec.window:
                slots = slots[-spec.window :]
            k = keys[slots].float().transpose(0, 1)  # [num_kv_heads, length, head_dim]
            v = values[slots].float().transpose(0, 1)
            query = q[token].float().view(spec.num_kv_heads, group, spec.head_dim) * spec.scale
            scores = query @ k.transpose(1, 2)  # [num_kv_heads, group, length]
            if spec.soft_cap:
                scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
            out[token] = (torch.softmax(scores, dim=-1) @ v).reshape(spec.num_heads, spec.head_dim).to(q.dtype)
    return out


def _path_slots(batch: PackedBatch, row: int, local: int) -> NDArray[np.int64]:
    """int64 [length]: flat KV slots of a token's path, in position order."""
    first, cached = int(batch.row_offsets[row]), int(batch.cached[row])
    path = []
    while local >= 0:
        path.append(local)
        local = int(batch.parents[first + local])
    logical = np.concatenate([np.arange(cached), cached + np.asarray(path[::-1])]).astype(np.int64)
    pages = batch.page_table[row][logical // batch.page_size].astype(np.int64)
    slots: NDArray[np.int64] = pages * batch.page_size + logical % batch.page_size
    return slots


def philox(seed: int, tokens: NDArray[np.int64], position: int, stream: int, salt: int = 0) -> NDArray[np.uint32]:
    """Philox-4x32-10 (Salmon et al. 2011), keyed by its arguments alone.

    Args:
        seed: 64 bits.
        tokens: int64 [n], token ids x.
        position: index in the sequence of the token to be chosen.
        stream: 0 for target choices and drafts that share their noise.
        salt: 0 for stream 0; elsewhere the root's position, so that a position drafted again draws new numbers.

    Returns:
        uint32 [n]: lane x % 4 of counter (x // 4, position, stream, salt).
    """
    low = np.uint64(0xFFFFFFFF)
    shift = np.uint64(32)
    c0 = (tokens // 4).astype(np.uint64) & low
    c1 = np.full_like(c0, position) & low
    c2 = np.full_like(c0, stream)
    c3 = np.full_like(c0, salt) & low
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(10):
        a, b = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1, c2, c3 = (b >> shift) ^ c1 ^ np.uint64(k0), b & low, (a >> shift) ^ c3 ^ np.uint64(k1), a & low
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return np.choose(tokens % 4, [c0, c1, c2, c3]).astype(np.uint32)


def gumbel(words: NDArray[np.uint32]) -> NDArray[np.float64]:
    """float64 [n]: -log(-log v) for v = 1 - (word + 0.5) / 2**32, which is exact and never 0 or 1.

    float64, so that what another implementation of log rounds otherwise does not decide a race.
    """
    v = (np.float64(2**32 - 0.5) - words) * np.float64(2.0**-32)
    noise: NDArray[np.float64] = -np.log(-np.log(v))
    return noise


def choose(logits: Tensor, choice: ChoiceBatch) -> Tensor:
    """Row choice of the coupled rule: argmax of logit / temperature + gumbel over what the filters keep, lowest id on ties.

    Scores are float64.

    Args:
        logits: float32 [R, vocabulary].
        choice: per-row parameters.

    Returns:
        int64 [R]; -1 where a logit is NaN or none is finite.
    """
    filtered = filter_logits(logits, choice.temperature, choice.top_k, choice.top_p, choice.min_p, choice.typical_p)
    chosen = []
    for row, (row_logits, all_logits) in enumerate(zip(filtered.numpy(), logits.numpy(), strict=True)):
        top = row_logits.max()
        if not np.isfinite(all_logits.max()):  # a filter may have hidden a NaN
            chosen.append(-1)
        elif float(choice.temperature[row]) == 0:
            chosen.append(int(row_logits.argmax()))
        else:
            t = float(choice.temperature[row])
            tokens = np.flatnonzero(row_logits >= float(top) - MARGIN * t)
            salt = 0 if choice.salts is None else int(choice.salts[row])
            words = philox(int(choice.seeds[row]) % 2**64, tokens, int(choice.positions[row]), choice.stream, salt)
            chosen.append(int(tokens[np.argmax(row_logits[tokens].astype(np.float64) / t + gumbel(words))]))
    return torch.tensor(chosen, dtype=torch.int64)


def log_sum_exp(logits: Tensor, temperature: Tensor) -> Tensor:
    """float64 [R]: log of the sum of exp(logit / temperature), by which a logit becomes a log-probability.

    Args:
        logits: float32 [R, vocabulary].
        temperature: float32 [R], above 0.

    Returns:
        NaN for a row with a NaN, a positive infinity, or no finite logit.
    """
    top = logits.amax(1)
    sums = torch.logsumexp(logits.double() / temperature.to(logits.device)[:, None], 1)
    return torch.where(top.isfinite(), sums, torch.nan)
