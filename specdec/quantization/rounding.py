"""Float weights to 4 bits: a scale and a minimum for every 32 inputs of an output channel, chosen for the least squared error."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.quantization.blocks import PART
from specdec.quantization.int4 import Parts

_LEVELS = 15
_RANGES = (1.0, 0.9, 0.8)
"""Shares of the range of a part that its levels span: the numbers at its ends are few, and cutting them off serves the others."""


def round_to_four_bits(weights: Tensor) -> Parts:
    """Nibbles, scales and minima of float rows [rows, inputs]; weight = scale * nibble - minimum.

    Each range is tried with the levels that it gives, and then with the best line through these (least squares), as k-means would go on.
    """
    rows, inputs = weights.shape
    padding = -inputs % PART
    x = torch.nn.functional.pad(weights.float(), (0, padding)).view(rows, -1, PART)
    low, high = x.amin(2, keepdim=True), x.amax(2, keepdim=True)
    middle, half = (low + high) / 2, (high - low) / 2
    best_error = torch.full_like(low, torch.inf)
    nibbles, scales, starts = torch.zeros_like(x, dtype=torch.uint8), torch.zeros_like(low), low.clone()
    for share in _RANGES:
        levels = _levels(x, 2 * share * half / _LEVELS, middle - share * half)
        scale, start = _line(x, levels)
        levels = _levels(x, scale, start)
        error = (scale * levels + start - x).square().sum(2, keepdim=True)
        better = error < best_error
        best_error = torch.where(better, error, best_error)
        nibbles = torch.where(better, levels.to(torch.uint8), nibbles)
        scales, starts = torch.where(better, scale, scales), torch.where(better, start, starts)
    return nibbles.view(rows, -1)[:, :inputs].contiguous(), scales.squeeze(2), -starts.squeeze(2)


def _levels(x: Tensor, scale: Tensor, start: Tensor) -> Tensor:
    inverse = torch.where(scale > 0, 1 / scale, 0.0)
    return ((x - start) * inverse).round_().clamp_(0, _LEVELS)


def _line(x: Tensor, levels: Tensor) -> tuple[Tensor, Tensor]:
    """Scale and start of the line through (level, number) with the least squared error; flat where all levels are one."""
    mean_level, mean = levels.mean(2, keepdim=True), x.mean(2, keepdim=True)
    off = levels - mean_level
    spread = off.square().sum(2, keepdim=True)
    scale = torch.where(spread > 0, (off * (x - mean)).sum(2, keepdim=True) / spread, 0.0).clamp_(min=0.0)
    return scale, mean - scale * mean_level
