"""From options to the parts of an engine: every check that needs no weights first, then memory, then loading."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from specdec.backend import create_backend
from specdec.backend.base import Backend
from specdec.config import EngineConfig
from specdec.drafter_spec import parse_drafter_spec
from specdec.drafters.registry import check_spec, model_of
from specdec.kernels.build import cpu_kernels_are_missing
from specdec.kv_manager.storage import KVStorage
from specdec.memory import MemoryPlan, ModelMemory, free_memory, plan_memory
from specdec.models import ModelSource, load_model, open_model, weight_bytes

if TYPE_CHECKING:
    from specdec.models import LoadedModel


def load_engine_parts(config: EngineConfig, progress: Callable[[str], None]) -> tuple[LoadedModel, Backend, MemoryPlan]:
    """Target, backend and memory plan for `Engine`. See `Engine.from_config` for what it raises."""
    check_spec(config.drafter)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    backend = create_backend(config.device)
    if cpu_kernels_are_missing():
        progress("compiling the kernels for this processor (once, some ten seconds)")
    drafts = [found for part in parse_drafter_spec(config.drafter) if (found := model_of(part, config)) is not None]
    named = [(config.model, config.dtype), *drafts]
    sources = [open_model(name) for name, _ in named]
    models = [_memory_of(source, dtype, config, backend.device) for source, (_, dtype) in zip(sources, named, strict=True)]
    memory = plan_memory(config, models, sources[0].config.max_position_embeddings, free_memory())
    progress(str(memory))
    start = time.perf_counter()
    target = load_model(sources[0], dtype=config.dtype, device=backend.device, progress=progress, max_positions=memory.max_model_len)
    reason = f" ({target.precision.reason})" if target.precision.reason else ""
    progress(f"loaded {target.source} as {target.weights} in {time.perf_counter() - start:.1f} s{reason}")
    return target, backend, memory


def _memory_of(source: ModelSource, dtype: str, config: EngineConfig, device: torch.device) -> ModelMemory:
    model, precision = source.config, source.precision(dtype, device)
    return ModelMemory(
        name=os.path.basename(source.name.rstrip("/")),
        weight_bytes=weight_bytes(model, precision),
        page_bytes=KVStorage.bytes_per_page(model.num_layers, config.page_size, model.num_kv_heads, model.head_dim, precision.kv_dtype),
    )
