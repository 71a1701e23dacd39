"""What a drafter is built with, without an engine: for unit tests of drafters."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from specdec.backend.base import Backend
from specdec.config import EngineConfig
from specdec.drafters.base import DrafterContext, DraftRow
from specdec.request import SamplingParams
from specdec.verifier.sampling import NoiseSampler

GREEDY = SamplingParams(temperature=0)


def make_row(
    tokens: Sequence[int],
    *,
    limit: int = 8,
    depth: int | None = None,
    num_prompt: int | None = None,
    request_id: str = "request",
    params: SamplingParams = GREEDY,
    seed: int = 0,
    prediction: Sequence[int] = (),
    wants_q: bool = False,
) -> DraftRow:
    """A row as the engine would hand it out; `depth` is `limit` and all tokens are prompt where nothing else is said."""
    prompt = len(tokens) if num_prompt is None else num_prompt
    return DraftRow(request_id, tokens, prompt, limit, limit if depth is None else depth, params, seed, tuple(prediction), wants_q)


def make_context(
    vocab_size: int = 512,
    *,
    max_model_len: int = 256,
    config: EngineConfig | None = None,
    backend: Backend | None = None,
    tokenizer_fingerprint: str | None = None,
) -> DrafterContext:
    """A context on the CPU that samples as an engine does and gives every request pages of its own."""
    if backend is None:
        from specdec.backend.cpu import CPUBackend

        backend = CPUBackend()
    config = config or EngineConfig(dtype="float32")

    def create_kv(name: str, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> ScratchKV:
        return ScratchKV(layers, kv_heads, head_dim, dtype, config.page_size, max_model_len)

    return DrafterContext(
        config=config,
        backend=backend,
        vocab_size=vocab_size,
        max_model_len=max_model_len,
        page_size=config.page_size,
        sample=NoiseSampler(backend),
        create_kv=create_kv,
        tokenizer_fingerprint=tokenizer_fingerprint,
    )


class ScratchKV:
    """Implements `specdec.drafters.base.DraftKV` for up to 16 requests, each with room for the longest text."""

    def __init__(self, layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype, page_size: int, max_length: int) -> None:
        self._per_request = -(-max_length // page_size) + 4
        shape = (layers, 16 * self._per_request, page_size, kv_heads, head_dim)
        self.keys = torch.zeros(shape, dtype=dtype)
        self.values = torch.zeros(shape, dtype=dtype)
        self._cached: dict[str, int] = {}
        self._places: dict[str, int] = {}

    def pages(self, request_id: str) -> NDArray[np.int32]:
        place = self._places.setdefault(request_id, len(self._places))
        return np.arange(place * self._per_request, (place + 1) * self._per_request, dtype=np.int32)

    def cached(self, request_id: str) -> int:
        return self._cached.get(request_id, 0)

    def set_cached(self, request_id: str, count: int) -> None:
        self._cached[request_id] = count
