"""Rotary position embeddings from tables. Which frequencies: config.py."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.models.config import Rope

Rotation = tuple[Tensor, Tensor]


class RotaryTables:
    """cos and sin of every position, in float32, for each rope of a model.

    A table makes a row's rotation depend on its position alone, and costs one gather per forward. It is not a module, so that
    casting a model to bfloat16 leaves it in float32. Built on first use.
    """

    def __init__(self, ropes: Sequence[Rope], max_positions: int) -> None:
        self.max_positions = max_positions
        self._ropes = tuple(ropes)
        self._tables: list[Rotation] = []

    def rotations(self, positions: Tensor) -> list[Rotation]:
        """
        Args:
            positions: int64 [T], each less than `max_positions`.

        Returns:
            per rope, cos and sin, float32 [T, 1, head_dim / 2].
        """
        return [(cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)) for cos, sin in self.tables(positions.device)]

    def tables(self, device: torch.device) -> list[Rotation]:
        """Per rope, cos and sin of every position, float32 [max_positions, head_dim / 2]."""
        if not self._tables or self._tables[0][0].device != device:
            self._tables = [_table(rope, self.max_positions, device) for rope in self._ropes]
        return self._tables


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotates each pair (x[i], x[i + head_dim / 2]) of x [T, heads, head_dim]; computed in float32, returned in x's dtype."""
    cos, sin = rotation
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def _table(rope: Rope, max_positions: int, device: torch.device) -> Rotation:
    positions = torch.arange(max_positions, dtype=torch.float32)
    angles = torch.outer(positions, torch.tensor(rope.inv_freq, dtype=torch.float32))  # [positions, head_dim / 2]
    return (angles.cos() * rope.scaling).to(device), (angles.sin() * rope.scaling).to(device)
