"""int4: the 4-bit blocks of GGUF files, kept as they are: a scale and a minimum for every 32 inputs of an output channel.

    Q4_0    18 bytes    | d float16 | 16 bytes |                                   d * (nibble - 8)
    Q4_1    20 bytes    | d, m float16 | 16 bytes |                                d * nibble + m
    Q4_K    144 bytes   | d, dmin float16 | 12 bytes of s, t | 128 bytes |         d * s * nibble - dmin * t

In a row of 32 numbers the low nibbles of 16 bytes come first, then the high ones (Q4_0, Q4_1); in Q4_K 32 bytes hold 64 numbers alike.
Nothing is quantised anew; scales are rounded to float16.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.quantization.blocks import PART, TILE, BlockShape

KINDS = ("Q4_0", "Q4_1", "Q4_K")  # GGUF's names
_SUPER = 256  # numbers in a Q4_K block

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
    out = torch.zeros(shape.blocks, dtype=torch.uint8)
    head = torch.stack((scales, minima), dim=1).half()  # [rows, 2, parts]
    whole = torch.zeros(shape.tiles * TILE, 2, shape.parts, dtype=torch.float16)
    whole[:rows] = head
    by_part = whole.view(shape.tiles, TILE, 2 * shape.parts).transpose(1, 2).contiguous()  # [tiles, scales then minima, 32]
    out[:, : shape.head_bytes] = by_part.view(torch.uint8).view(shape.tiles, -1)
    padded = torch.zeros(shape.tiles * TILE, shape.padded, dtype=torch.uint8)
    padded[:rows, :inputs] = nibbles
    low, high = padded.view(shape.tiles, 2, TILE // 2, shape.padded // 4, 4).unbind(1)
    out[:, shape.head_bytes :] = (low | high << 4).transpose(1, 2).reshape(shape.tiles, -1)
    return out


def unpack(blocks: Tensor, shape: BlockShape) -> Parts:
    """Blocks of whole tiles as nibbles int16 [tiles * 32, padded], scales and minima float32 [tiles * 32, parts], padding included."""
    tiles = len(blocks)
    head = blocks[:, : shape.head_bytes].contiguous().view(torch.float16).float().view(tiles, 2, shape.parts, TILE)
    scales, minima = (head[:, index].transpose(1, 2).reshape(tiles * TILE, shape.parts) for index in (0, 1))
    both = blocks[:, shape.head_bytes :].reshape(tiles, shape.padded // 4, TILE // 2, 4).transpose(1, 2)  # [tiles, 16, inputs / 4, 4]
    nibbles = torch.stack((both & 15, both >> 4), dim=1).reshape(tiles * TILE, shape.padded)
    return nibbles.short(), scales, minima


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
