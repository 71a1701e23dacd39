"""int8: weights of 8 bits with a scale per output channel and group of 128 inputs.

Groups keep one large weight from costing all others their precision: with one scale per row, perplexity suffers three times as much.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.quantization.blocks import GROUP, TILE, BlockShape

_LEVELS = 127
_MOST_NUMBERS = 1 << 24  # of a weight, quantised at once: bounds the temporaries


def quantize(weight: Tensor, out: Tensor | None = None) -> Tensor:
    """
    Args:
        weight: float [outputs, inputs].
        out: uint8 of `BlockShape.blocks`, written to where given.

    Returns:
        uint8 of `BlockShape.blocks`.
    """
    shape = BlockShape(*weight.shape)
    blocks = torch.empty(shape.blocks, dtype=torch.uint8) if out is None else out
    step = max(1, _MOST_NUMBERS // (TILE * shape.inputs))
    for tile in range(0, shape.tiles, step):
        _quantize_tiles(weight[tile * TILE : (tile + step) * TILE], shape, blocks[tile : tile + step])
    return blocks


def unpack(blocks: Tensor, shape: BlockShape) -> tuple[Tensor, Tensor]:
    """Blocks of whole tiles as int16 [tiles * 32, padded] and float32 scales [tiles * 32, groups], padding included."""
    tiles = len(blocks)
    scales = blocks[:, : shape.head_bytes].contiguous().view(torch.bfloat16).float().view(tiles, shape.groups, TILE)
    values = blocks[:, shape.head_bytes :].reshape(tiles, shape.padded // 4, TILE, 4).transpose(1, 2).reshape(tiles * TILE, shape.padded)
    return values.short() - 128, scales.transpose(1, 2).reshape(tiles * TILE, shape.groups)


def _quantize_tiles(weight: Tensor, shape: BlockShape, out: Tensor) -> None:
    """`weight`: rows of whole tiles, but for the last tile of all. Scales are rounded first, so that weights are rounded once."""
    tiles, rows, whole = len(out), len(out) * TILE, shape.groups * GROUP
    padded = weight.new_zeros((rows, whole), dtype=torch.float32)
    padded[: len(weight), : shape.inputs] = weight
    grouped = padded.view(rows, shape.groups, GROUP)
    scales = (grouped.abs().amax(-1) / _LEVELS).to(torch.bfloat16)  # [rows, groups]
    wide = scales.float()
    inverse = torch.where(wide > 0, 1.0 / wide, 0.0).unsqueeze(-1)
    values = (grouped * inverse).round_().clamp_(-_LEVELS, _LEVELS).add_(128).to(torch.uint8).view(rows, whole)[:, : shape.padded]
    out[:, : shape.head_bytes] = scales.view(tiles, TILE, shape.groups).transpose(1, 2).contiguous().view(torch.uint8).view(tiles, -1)
    out[:, shape.head_bytes :] = values.reshape(tiles, TILE, shape.padded // 4, 4).transpose(1, 2).reshape(tiles, -1)
