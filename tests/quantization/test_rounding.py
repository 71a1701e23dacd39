"""Rounding to 4 bits: nearer than plain rounding over the whole range, and exact where 16 levels suffice."""

from __future__ import annotations

import pytest
import torch

from specdec.quantization.rounding import round_to_four_bits


def _restored(weights: torch.Tensor) -> torch.Tensor:
    nibbles, scales, minima = round_to_four_bits(weights)
    assert nibbles.dtype == torch.uint8 and nibbles.shape == weights.shape and nibbles.max() <= 15
    wide = nibbles.float(), *(numbers.repeat_interleave(32, 1)[:, : weights.shape[1]] for numbers in (scales, minima))
    return wide[1] * wide[0] - wide[2]


@pytest.mark.parametrize("inputs", [1, 31, 32, 33, 160])
@pytest.mark.parametrize("heavy", [False, True])
def test_it_is_at_least_as_near_as_plain_rounding(inputs: int, heavy: bool) -> None:
    weights = torch.randn(64, inputs, generator=torch.Generator().manual_seed(inputs))
    weights = weights**3 if heavy else weights
    parts = torch.nn.functional.pad(weights, (0, -inputs % 32)).view(64, -1, 32)
    low, high = parts.amin(2, keepdim=True), parts.amax(2, keepdim=True)
    scale = (high - low) / 15
    plain = (((parts - low) / scale).round() * scale + low).view(64, -1)[:, :inputs]
    error, plain_error = ((found - weights).square().mean() for found in (_restored(weights), plain))
    assert error <= plain_error * (1.0 if inputs == 1 else 0.95) + 1e-12


def test_what_sixteen_levels_can_say_is_kept() -> None:
    levels = torch.arange(64) % 16
    for weights in (0.25 * levels - 3.0, torch.zeros(64), torch.full((64,), -2.5), torch.full((64,), 1e-30)):
        found = _restored(weights.float()[None])
        assert torch.allclose(found, weights.float()[None], atol=1e-6)
