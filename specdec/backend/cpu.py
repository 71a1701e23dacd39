"""CPU backend: torch for the matrix products, own kernels for attention and choice. Correct first."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from specdec.backend.base import AttentionSpec, ChoiceBatch, ForwardBatch, TreeBatch, Walked
from specdec.backend.cpu_linear import exact_row_tile, pack_linears
from specdec.kernels import cpu_ops, step_ops
from specdec.kernels.decoder_ops import DecoderTensors, FusedDecoder, fuse_decoder
from specdec.pack import PackedBatch


class CPUBackend:
    """Implements `specdec.backend.base.Backend` on the host."""

    device = torch.device("cpu")

    def upload(self, packed: PackedBatch) -> ForwardBatch:
        tokens, positions, logit_rows = (
            torch.from_numpy(array.astype(np.int64)) for array in (packed.tokens, packed.positions, packed.logit_rows)
        )
        return ForwardBatch(tokens, positions, logit_rows, packed)

    def attention(self, batch: ForwardBatch, keys: Tensor, values: Tensor, specs: Sequence[AttentionSpec]) -> PagedAttention:
        return PagedAttention(batch.packed, keys, values, specs)

    def prepare(self, model: nn.Module) -> int:
        pack_linears(model)
        return exact_row_tile(model)

    def fuse(self, tensors: DecoderTensors) -> FusedDecoder | None:
        return fuse_decoder(tensors)

    def choose(self, logits: Tensor, choice: ChoiceBatch) -> Tensor:
        return cpu_ops.choose(logits, choice)

    def walk(self, logits: Tensor, trees: TreeBatch) -> Walked:
        return step_ops.walk(logits, trees)

    def copy_out(self, pool: Tensor, pages: Sequence[int], host: Tensor, places: Sequence[int]) -> None:
        for page, place in zip(pages, places, strict=True):
            host[place].copy_(pool[:, :, page])

    def copy_in(self, host: Tensor, places: Sequence[int], pool: Tensor, pages: Sequence[int]) -> None:
        for place, page in zip(places, pages, strict=True):
            pool[:, :, page].copy_(host[place])

    def clock(self) -> float:
        return time.perf_counter()


class PagedAttention:
    """Attention of one forward on the host; implements `specdec.backend.base.Attend`."""

    def __init__(self, packed: PackedBatch, keys: Tensor, values: Tensor, specs: Sequence[AttentionSpec]) -> None:
        self._packed = packed
        self._keys, self._values = keys, values
        self._specs = specs
        self._num_tokens = int(packed.row_offsets[-1])
        self._slots = torch.from_numpy(packed.slots[: self._num_tokens].astype(np.int64))

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        keys, values = self._keys[layer], self._values[layer]
        keys.flatten(0, 1).index_copy_(0, self._slots, k[: self._num_tokens].to(keys.dtype))
        values.flatten(0, 1).index_copy_(0, self._slots, v[: self._num_tokens].to(values.dtype))
        return cpu_ops.paged_attention(q, keys, values, self._packed, self._specs[layer])
