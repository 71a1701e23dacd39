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
from specdec.kv_manager.storage import KVStorage
from specdec.memory import MemoryPlan, ModelMemory, free_memory, plan_memory
from specdec.models import inspect_model, load_model, resolve_dtype

if TYPE_CHECKING:
    from specdec.models import LoadedModel


def load_engine_parts(config: EngineConfig, progress: Callable[[str], None]) -> tuple[LoadedModel, Backend, MemoryPlan]:
    """Target, backend and memory plan for `Engine`. See `Engine.from_config` for what it raises."""
    check_spec(config.drafter)
    backend = create_backend(config.device)
    sources = [config.model, *filter(None, (model_of(part) for part in parse_drafter_spec(config.drafter)))]
    models = [_memory_of(source, config, backend.device) for source in sources]
    limit = inspect_model(config.model).max_position_embeddings
    memory = plan_memory(config, models, limit, free_memory())
    progress(str(memory))
    start = time.perf_counter()
    target = load_model(config.model, dtype=config.dtype, device=backend.device, progress=progress)
    progress(f"loaded {target.source} as {str(target.dtype).removeprefix('torch.')} in {time.perf_counter() - start:.1f} s")
    return target, backend, memory


def _memory_of(source: str, config: EngineConfig, device: torch.device) -> ModelMemory:
    model = inspect_model(source)
    dtype = resolve_dtype(config.dtype, model, device)
    return ModelMemory(
        name=os.path.basename(source.rstrip("/")),
        weight_bytes=model.num_parameters * dtype.itemsize,
        page_bytes=KVStorage.bytes_per_page(model.num_layers, config.page_size, model.num_kv_heads, model.head_dim, dtype),
    )
