"""int4: the 4-bit blocks of GGUF files, kept as they are: a scale and a minimum for every 32 inputs of an output channel.

    Q4_0    18 bytes    | d float16 | 16 bytes |                                   d * (nibble - 8)
    Q4_1    20 bytes    | d, m float16 | 16 bytes |                                d * nibble + m
    Q4_K    144 bytes   | d, dmin float16 | 12 bytes of s, t | 128 bytes |         d * s * nibble - dmin * t

In a row of 32 numbers the low nibbles of 16 bytes come first, then the high ones (Q4_0, Q4_1); in Q4_K 32 bytes hold 64 numbers alike.
Nothing is quantised anew; scales and minima are rounded to steps of an output's own, of which its largest scale has 12,000: at 14 bits
as near as float16 comes.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.quantization.blocks import GROUP_PAIRS, PAIR_BYTES, PAIR_HEAD, PART, TILE, BlockShape

KINDS = ("Q4_0", "Q4_1", "Q4_K")  # GGUF's names
_SUPER = 256  # numbers in a Q4_K block
# In steps: the sum of a group, 4 * (32 * 8 * 127 * scale + 32 * 127 * offset), must stay below 2**31.
_MOST_SCALE, _MOST_OFFSET = 12_000, 32_000

Parts = tuple[Tensor, Tensor, Tensor]
"""Nibbles uint8 [rows, inputs], scales and minima float32 [rows, inputs / 32]."""


def read_gguf_blocks(raw: NDArray[np.uint8], kind: str) -> Parts:
    """Takes rows of a GGUF tensor apart.

    Args:
        raw: uint8 [rows, bytes of a row].
        kind: one of KINDS.
    """
    return _read_q4_k(raw) if kind == "Q4_K" else _read_q4(raw, with_minimum=kind == "Q4_1")


def pack(parts: Parts) -> Tensor:
    """uint8 of `BlockShape.blocks` of nibbles, scales and minima."""
    nibbles, scales, minima = parts
    rows, inputs = nibbles.shape
    shape = BlockShape(rows, inputs, "int4")
    steps, integers = _in_steps(*(_padded(numbers, shape.tiles * TILE, shape.parts) for numbers in (scales, minima)))
    out = torch.empty(shape.blocks, dtype=torch.uint8)
    out[:, : TILE * 4] = steps.view(shape.tiles, TILE).view(torch.uint8)
    pairs = torch.empty(shape.tiles, 2 * shape.pairs, PAIR_BYTES, dtype=torch.uint8)  # [tiles, halves and pairs, bytes]
    heads = torch.stack(integers).view(2, shape.tiles, 2, TILE // 2, shape.pairs, 2)
    heads = heads.permute(1, 2, 4, 0, 3, 5).contiguous()  # [tiles, halves, pairs, scales then offsets, 16, 2 parts]
    pairs[..., :PAIR_HEAD] = heads.view(shape.tiles, 2 * shape.pairs, -1).view(torch.uint8)
    wide = _padded(nibbles, shape.tiles * TILE, shape.padded)
    low, high = wide.view(shape.tiles, 2, 4, 2, 2, shape.pairs, 2, PART // 4, 4).unbind(3)  # [tiles, halves, 4, 2, pairs, 2 parts, 8, 4]
    both = (low | high << 4).permute(0, 1, 4, 6, 2, 3, 5, 7)  # [tiles, halves, pairs, 8, 4, 2, 2 parts, 4]
    pairs[..., PAIR_HEAD:] = both.reshape(shape.tiles, 2 * shape.pairs, -1)
    out[:, TILE * 4 :] = pairs[:, _order(shape)].flatten(1)
    return out


def unpack(blocks: Tensor, shape: BlockShape) -> Parts:
    """Blocks of whole tiles as nibbles - 8, int16 [tiles * 32, padded], scales and minima float32 [tiles * 32, parts], padding included."""
    tiles, rows = len(blocks), len(blocks) * TILE
    steps = blocks[:, : TILE * 4].contiguous().view(torch.float32).view(rows, 1)
    stream = blocks[:, TILE * 4 :].view(tiles, 2 * shape.pairs, PAIR_BYTES)
    pairs = torch.empty_like(stream)
    pairs[:, _order(shape)] = stream
    heads = pairs[..., :PAIR_HEAD].contiguous().view(torch.int16).view(tiles, 2, shape.pairs, 2, TILE // 2, 2)
    scales, offsets = heads.permute(3, 0, 1, 4, 2, 5).reshape(2, rows, shape.parts) * steps
    both = pairs[..., PAIR_HEAD:].reshape(tiles, 2, shape.pairs, PART // 4, 4, 2, 2, 4).permute(0, 1, 4, 5, 2, 6, 3, 7)
    nibbles = torch.stack((both & 15, both >> 4), dim=3).reshape(rows, shape.padded)
    return nibbles.short() - 8, scales, -offsets


def _in_steps(scales: Tensor, minima: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Steps float32 [rows]; and in these, scales and offsets, int16 [rows, parts].

    scale * nibble - minimum = scale * (nibble - 8) + offset
    """
    numbers = (scales, 8 * scales - minima)
    most = torch.stack([number.abs().amax(1) / limit for number, limit in zip(numbers, (_MOST_SCALE, _MOST_OFFSET), strict=True)])
    steps = most.amax(0)  # [rows]
    inverse = torch.where(steps > 0, 1.0 / steps, 0.0).unsqueeze(1)
    return steps, [(number * inverse).round().short() for number in numbers]


def _padded(numbers: Tensor, rows: int, columns: int) -> Tensor:
    return torch.nn.functional.pad(numbers, (0, columns - numbers.shape[1], 0, rows - numbers.shape[0]))


def _order(shape: BlockShape) -> list[int]:
    """Where the pairs of a tile's stream are among those of its first 16 outputs, then its last."""
    groups = [range(pair, min(pair + GROUP_PAIRS, shape.pairs)) for pair in range(0, shape.pairs, GROUP_PAIRS)]
    return [half * shape.pairs + pair for group in groups for half in range(2) for pair in group]


def _read_q4(raw: NDArray[np.uint8], with_minimum: bool) -> Parts:
    header = 4 if with_minimum else 2
    blocks = raw.reshape(len(raw), -1, header + PART // 2)  # [rows, parts, bytes]
    numbers = np.ascontiguousarray(blocks[..., :header]).view(np.float16).astype(np.float32)
    scales = torch.from_numpy(numbers[..., 0])
    minima = -torch.from_numpy(numbers[..., 1]) if with_minimum else 8 * scales
    both = blocks[..., header:]
    nibbles = np.concatenate((both & 15, both >> 4), axis=-1)
    return torch.from_numpy(nibbles.reshape(len(raw), -1)), scales, minima


def _read_q4_k(raw: NDArray[np.uint8]) -> Parts:
    blocks = raw.reshape(len(raw), -1, 4 + 12 + _SUPER // 2)
    numbers = np.ascontiguousarray(blocks[..., :4]).view(np.float16).astype(np.float32)  # [rows, blocks, d and dmin]
    packed = blocks[..., 4:16]
    first, second, third = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate((first & 63, (third & 15) | (first >> 6) << 4), axis=-1)  # [rows, blocks, 8], 6 bits
    minima = np.concatenate((second & 63, (third >> 4) | (second >> 6) << 4), axis=-1)
    both = blocks[..., 16:].reshape(len(raw), -1, 4, PART)  # [rows, blocks, pairs of parts, 32]
    nibbles = np.stack((both & 15, both >> 4), axis=-2).reshape(len(raw), -1)
    numbers_by_part = (
        torch.from_numpy((scales * numbers[..., :1]).reshape(len(raw), -1)),
        torch.from_numpy((minima * numbers[..., 1:]).reshape(len(raw), -1)),
    )
    return torch.from_numpy(nibbles), *numbers_by_part
