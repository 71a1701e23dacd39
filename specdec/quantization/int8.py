"""int8: weights of 8 bits with a scale per output channel and group of 128 inputs.

Groups keep one large weight from costing all others their precision: with one scale per row, perplexity suffers three times as much.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.quantization.blocks import GROUP, GROUP_PAIRS, PAIR, PART, TILE, BlockShape

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
    rows = len(blocks) * TILE
    values, scales = [], []
    for groups in _by_group(blocks, shape):
        scales.append(groups[..., : TILE * 2].contiguous().view(torch.bfloat16).float().transpose(1, 2).reshape(rows, -1))
        mixed = groups[..., TILE * 2 :].reshape(*groups.shape[:2], -1, PART // 4, 2, TILE, 4)  # [tiles, groups, pairs, 8, 2 parts, 32, 4]
        values.append(mixed.permute(0, 5, 1, 2, 4, 3, 6).reshape(rows, -1))
    return torch.cat(values, dim=1).short() - 128, torch.cat(scales, dim=1)


def _quantize_tiles(weight: Tensor, shape: BlockShape, out: Tensor) -> None:
    """`weight`: rows of whole tiles, but for the last tile of all. Scales are rounded first, so that weights are rounded once."""
    tiles, rows, whole = len(out), len(out) * TILE, shape.groups * GROUP
    padded = weight.new_zeros((rows, whole), dtype=torch.float32)
    padded[: len(weight), : shape.inputs] = weight
    grouped = padded.view(rows, shape.groups, GROUP)
    scales = (grouped.abs().amax(-1) / _LEVELS).to(torch.bfloat16)  # [rows, groups]
    wide = scales.float()
    inverse = torch.where(wide > 0, 1.0 / wide, 0.0).unsqueeze(-1)
    values = (grouped * inverse).round_().clamp_(-_LEVELS, _LEVELS).add_(128).to(torch.uint8)
    head = scales.view(tiles, TILE, shape.groups).transpose(1, 2).contiguous().view(torch.uint8)  # [tiles, groups, 64]
    mixed = values.view(tiles, TILE, shape.groups, GROUP_PAIRS, 2, PART // 4, 4).permute(0, 2, 3, 5, 4, 1, 6).flatten(3)
    group = 0
    for groups in _by_group(out, shape):
        end = group + groups.shape[1]
        groups[..., : TILE * 2] = head[:, group:end]
        groups[..., TILE * 2 :] = mixed[:, group:end].flatten(2)[..., : groups.shape[-1] - TILE * 2]
        group = end


def _by_group(blocks: Tensor, shape: BlockShape) -> list[Tensor]:
    """Views uint8 [tiles, groups, bytes] of the groups of two pairs and of the last one where it is a single pair."""
    size, last = TILE * (2 + GROUP), TILE * (2 + PAIR)
    groups, rest = divmod(shape.pairs, GROUP_PAIRS)
    views = []
    if groups:
        views.append(blocks[:, : groups * size].view(len(blocks), groups, size))
    if rest:
        views.append(blocks[:, groups * size :].view(len(blocks), 1, last))
    return views
