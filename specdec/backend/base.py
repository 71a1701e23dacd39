"""The backend seam: attention over paged KV, host-to-device copies and the clock. Everything that asks where it runs.

A backend is chosen once, by `create_backend`; no other module names a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from specdec.pack import PackedBatch

if TYPE_CHECKING:
    from specdec.kernels.decoder_ops import DecoderTensors


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


class FusedForward(Protocol):
    """A forward in one call: appends the batch's KV to the pool and computes the logits."""

    def __call__(self, packed: PackedBatch, keys: Tensor, values: Tensor, capture: Sequence[int]) -> tuple[Tensor, dict[int, Tensor]]:
        """
        Args:
            packed: the batch, without padding rows.
            keys: [layers, pages, page_size, num_kv_heads, head_dim], the pool.
            values: the same shape and strides.
            capture: layers whose output to return.

        Returns:
            float32 [R, vocabulary], which the next forward may overwrite, and per captured layer float32 [T, hidden].
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

    def fuse(self, tensors: DecoderTensors) -> FusedForward | None:
        """A decoder's whole forward as one call; None where this device has none for such a model."""
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

    def walk(self, logits: Tensor, trees: TreeBatch) -> Walked:
        """Chooses by the coupled rule at each request's root and follows its draft: to the child that was chosen, until none is.

        What a node's logits choose is what `choose` says for its position; nodes that are not reached may be left out.

        Args:
            logits: float32 [R, vocabulary], read only.
            trees: the drafts, and which rows of logits are theirs.
        """
        ...

    def copy_out(self, pool: Tensor, pages: Sequence[int], host: Tensor, places: Sequence[int]) -> None:
        """Copies pages of a KV pool to host memory, pages[i] to places[i]; returns when they are there.

        Args:
            pool: [2, layers, pages, page_size, kv_heads, head_dim], on the device.
            host: [places, 2, layers, page_size, kv_heads, head_dim], on the host, same dtype.
        """
        ...

    def copy_in(self, host: Tensor, places: Sequence[int], pool: Tensor, pages: Sequence[int]) -> None:
        """The way back, places[i] to pages[i]; whatever runs on the device next finds them there."""
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


@dataclass(frozen=True)
class TreeBatch:
    """The drafts of B requests that choose in a step, N nodes in all, and how they choose; on the host.

    Attributes:
        tokens: int32 [N], the nodes of the first request, then of the next.
        parents: int32 [N], index of the parent within the request; -1 is the root, and parents come before children.
        offsets: int64 [B + 1], first node of each request.
        starts: int64 [B], logit row of each root; those of its nodes follow it in order.
        choice: parameters [B]; `positions` are those of the tokens chosen at the roots. Stream 0.
    """

    tokens: NDArray[np.int32]
    parents: NDArray[np.int32]
    offsets: NDArray[np.int64]
    starts: NDArray[np.int64]
    choice: ChoiceBatch


@dataclass(frozen=True)
class Walked:
    """Where the walks of B requests ended, D being the most nodes that one of them has.

    Attributes:
        nodes: int32 [B, D], accepted nodes from the root down, then -1.
        counts: int32 [B], how many.
        next_tokens: int32 [B], the token after them: the correction or the bonus; -1 where none can be chosen.
    """

    nodes: NDArray[np.int32]
    counts: NDArray[np.int32]
    next_tokens: NDArray[np.int32]
