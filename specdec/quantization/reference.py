"""What the products of quantised weights compute, by torch's own operations."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.quantization import int4, int8
from specdec.quantization.blocks import GROUP, GROUP_PARTS, PART, BlockShape

_LEVELS = 127


def unpack(blocks: Tensor, shape: BlockShape) -> int4.Parts:
    """Blocks of whole tiles as integers int16 [tiles * 32, padded], scales and minima float32 [tiles * 32, parts], of either format."""
    if shape.format == "int4":
        return int4.unpack(blocks, shape)
    values, scales = int8.unpack(blocks, shape)
    by_part = scales.repeat_interleave(GROUP_PARTS, dim=1)[:, : shape.parts]
    return values, by_part, torch.zeros_like(by_part)


def dequantize(blocks: Tensor, shape: BlockShape) -> Tensor:
    """float32 [rows, inputs] of blocks of whole tiles, which may end in padding rows."""
    values, scales, minima = unpack(blocks, shape)
    weight = values.view(len(values), shape.parts, PART) * scales.unsqueeze(-1) - minima.unsqueeze(-1)
    return weight.view(len(values), -1)[:, : shape.inputs]


def quantize_rows(x: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Activations float [T, inputs] as integers, float32 [T, groups, 128], and their scales, float32 [T, groups]."""
    padded = torch.nn.functional.pad(x.float(), (0, groups * GROUP - x.shape[1])).view(len(x), groups, GROUP)
    most = padded.abs().amax(-1)  # [T, groups]
    inverse = torch.where(most > 0, _LEVELS / most, 0.0)
    return (padded * inverse.unsqueeze(-1)).round(), most / _LEVELS


def linear_reference(x: Tensor, blocks: Tensor, shape: BlockShape, bias: Tensor | None) -> Tensor:
    """What the kernels compute, but that they sum up a whole group exactly, and this in float32.

    Args:
        x: float [T, inputs].
        blocks: uint8 of `shape.blocks`.
        shape: of the weight.
        bias: float32 [outputs] or None.

    Returns:
        float32 [T, outputs].
    """
    values, row_scales = quantize_rows(x, shape.groups)
    weights, scales, minima = unpack(blocks, shape)
    out = torch.zeros(len(x), len(weights))
    for group in range(shape.groups):
        total = torch.zeros_like(out)
        for part in range(group * GROUP_PARTS, min((group + 1) * GROUP_PARTS, shape.parts)):
            own = values[:, group, part % GROUP_PARTS * PART :][:, :PART]
            dots = own @ weights[:, part * PART : (part + 1) * PART].float().T  # integers below 2**24: exact in any order
            total += dots * scales[:, part] - own.sum(1, keepdim=True) * minima[:, part]
        out += total * row_scales[:, group, None]
    out = out[:, : shape.outputs]
    return out if bias is None else out + bias
