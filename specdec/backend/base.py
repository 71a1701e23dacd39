"""The backend seam: attention over paged KV, host-to-device copies and the clock. Everything that asks where it runs.

A backend is chosen once, by `create_backend`; no other module names a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from specdec.pack import PackedBatch


@dataclass(frozen=True)
class AttentionSpec:
    """Attention of one layer, as far as a kernel needs to know.

    Attributes:
        num_heads: query heads.
        num_kv_heads: key and value heads; divides `num_heads`.
        head_dim: size of one head.
        scale: factor on q·k.
        window: a query at position p sees positions above p - window; 0 sees all.
        soft_cap: scores become `cap * tanh(score / cap)`; 0 leaves them.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int = 0
    soft_cap: float = 0.0


@dataclass(frozen=True)
class ForwardBatch:
    """A PackedBatch on the device.

    Attributes:
        tokens: int64 [T].
        positions: int64 [T].
        logit_rows: int64 [R].
        packed: the host arrays it came from.
    """

    tokens: Tensor
    positions: Tensor
    logit_rows: Tensor
    packed: PackedBatch


class Attend(Protocol):
    """Attention of one forward: appends k and v to the pool, then attends, for one layer."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """
        Args:
            layer: index of the layer.
            q: [T, num_heads, head_dim].
            k: [T, num_kv_heads, head_dim], after rotary embedding.
            v: [T, num_kv_heads, head_dim].

        Returns:
            [T, num_heads, head_dim], zero on padding rows.
        """
        ...


class Backend(Protocol):
    """What a device must offer."""

    device: torch.device

    def upload(self, packed: PackedBatch) -> ForwardBatch:
        """Copies a packed batch to the device, in one transfer."""
        ...

    def attention(self, batch: ForwardBatch, keys: Tensor, values: Tensor, specs: Sequence[AttentionSpec]) -> Attend:
        """Plans the attention of one forward.

        Args:
            batch: the uploaded batch.
            keys: [layers, pages, page_size, num_kv_heads, head_dim], the pool to append to and read from.
            values: the same shape and strides.
            specs: one per layer.
        """
        ...

    def prepare(self, model: nn.Module) -> int:
        """Makes a built model run well here, in place; doing it twice does no harm.

        Returns:
            The row tile: token rows are padded to a multiple of it, so that a row's result is the same bits whatever
            the other rows are. 1 where rows never depend on each other.
        """
        ...

    def choose(self, logits: Tensor, choice: ChoiceBatch) -> Tensor:
        """Chooses a token for every row by the coupled rule (docs/architecture.md).

        Args:
            logits: float32 [R, vocabulary], read only.
            choice: per-row parameters.

        Returns:
            int64 [R] on the CPU; -1 where no token has a finite logit or a logit is NaN.
        """
        ...

    def clock(self) -> float:
        """Seconds of a monotonic clock, after all work queued so far is done."""
        ...


@dataclass(frozen=True)
class ChoiceBatch:
    """Sampling parameters of each logit row, host tensors.

    Attributes:
        seeds: int64 [R], the 64 bits of the request's seed.
        positions: int64 [R], index in the sequence of the token to be chosen.
        temperature: float32 [R], 0 is greedy.
        top_k: int64 [R], 0 is off.
        top_p: float32 [R], 1 is off.
        min_p: float32 [R], 0 is off.
        typical_p: float32 [R], 1 is off; None where all are.
        stream: noise stream: 0 for target choices and drafts that share their noise, 3 for other drafts.
        salts: int64 [R] or None, fourth word of the noise counter: the root's position for streams other than 0.
    """

    seeds: Tensor
    positions: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    stream: int = 0
    salts: Tensor | None = None
    typical_p: Tensor | None = None
