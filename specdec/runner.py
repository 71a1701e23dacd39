"""ModelRunner: one model, one KV storage, one forward. It knows neither requests nor who asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from specdec.backend.base import Backend
from specdec.kernels.pack_ops import pack
from specdec.models import Decoder
from specdec.models.fused import decoder_tensors
from specdec.pack import PackRow


class KVTensors(Protocol):
    """The pool a runner writes to: two tensors [layers, pages, page_size, kv heads, head_dim]."""

    keys: Tensor
    values: Tensor


@dataclass(frozen=True)
class ForwardOutput:
    """Results of one forward.

    Attributes:
        logits: float32 [R, vocabulary], for the last `num_logits` tokens of each row, in row order. The runner's next forward
            may overwrite it.
        hidden: layer -> [T, hidden], the captured states of all token rows.
    """

    logits: Tensor
    hidden: dict[int, Tensor]


class ModelRunner:
    """Runs a decoder over packed rows, appending their KV to a storage."""

    def __init__(self, model: Decoder, backend: Backend, storage: KVTensors) -> None:
        self.model = model
        self.backend = backend
        self.storage = storage
        self.page_size = storage.keys.shape[2]
        tensors = decoder_tensors(model)
        self._fused = backend.fuse(tensors) if tensors is not None else None
        self.row_tile = 1 if self._fused is not None else backend.prepare(model)

    @torch.inference_mode()
    def forward(self, rows: Sequence[PackRow], capture: Sequence[int] = ()) -> ForwardOutput:
        """Forwards `rows`, at least one of them, and captures the output states of the layers in `capture`."""
        packed = pack(rows, self.page_size, self.row_tile)
        if self._fused is not None:
            return ForwardOutput(*self._fused(packed, self.storage.keys, self.storage.values, capture))
        batch = self.backend.upload(packed)
        attend = self.backend.attention(batch, self.storage.keys, self.storage.values, self.model.attention_specs)
        hidden, captured = self.model(batch.tokens, batch.positions, attend, capture)
        return ForwardOutput(self._logits(hidden[batch.logit_rows]), captured)

    def _logits(self, hidden: Tensor) -> Tensor:
        """float32 [R, vocabulary]; padded to the row tile like every other matrix product."""
        count = len(hidden)
        padding = -count % self.row_tile
        if padding:
            hidden = nn.functional.pad(hidden, (0, 0, 0, padding))
        return self.model.logits(hidden)[:count]
