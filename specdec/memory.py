"""Plans memory for weights and KV pools before anything is loaded, and refuses what does not fit."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from specdec.config import EngineConfig
from specdec.errors import ConfigError

GB = 1e9
POOL_SHARE = 0.25
"""Of the free memory, where the user states no size."""


@dataclass(frozen=True)
class ModelMemory:
    """What one model needs.

    Attributes:
        name: for the report.
        weight_bytes: weights in their loaded dtype.
        page_bytes: one KV page over all its layers.
    """

    name: str
    weight_bytes: int
    page_bytes: int


@dataclass(frozen=True)
class MemoryPlan:
    """The budget of an engine, all models together.

    Attributes:
        models: target first, then drafters that have weights.
        num_pages: pages in every KV pool.
        page_size: tokens in a page.
        max_model_len: the most tokens of one request.
        free_bytes: memory free before loading.
        swap_pages: pages that preempted requests may keep on the host.
    """

    models: tuple[ModelMemory, ...]
    num_pages: int
    page_size: int
    max_model_len: int
    free_bytes: int
    swap_pages: int = 0

    @property
    def weight_bytes(self) -> int:
        return sum(model.weight_bytes for model in self.models)

    @property
    def kv_bytes(self) -> int:
        return self.num_pages * self.page_bytes

    @property
    def page_bytes(self) -> int:
        """Of one page, all models together."""
        return sum(model.page_bytes for model in self.models)

    @property
    def swap_bytes(self) -> int:
        return self.swap_pages * self.page_bytes

    def __str__(self) -> str:
        weights = " + ".join(f"{model.name} {model.weight_bytes / GB:.2f} GB" for model in self.models)
        swap = f", swap {self.swap_bytes / GB:.2f} GB ({self.swap_pages} pages)" if self.swap_pages else ""
        return (
            f"memory: weights {weights}, KV {self.kv_bytes / GB:.2f} GB "
            f"({self.num_pages} pages of {self.page_size} tokens){swap}, of {self.free_bytes / GB:.1f} GB free"
        )


def free_memory() -> int:
    """Bytes of host memory that can be had without swapping."""
    try:
        with open("/proc/meminfo") as file:
            fields = dict(line.split(":", 1) for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def plan_memory(config: EngineConfig, models: Sequence[ModelMemory], model_limit: int, free_bytes: int) -> MemoryPlan:
    """Sizes the KV pools.

    Args:
        config: `max_model_len`, `num_pages`, `kv_memory_gb`, `swap_gb`, `max_num_seqs` and `page_size` count here.
        models: target first.
        model_limit: the target's own context limit.
        free_bytes: what there is.

    Raises:
        ConfigError: `max_model_len` is beyond the model's limit, or weights and KV do not fit.
    """
    if config.max_model_len is not None and config.max_model_len > model_limit:
        raise ConfigError(f"max_model_len may be at most {model_limit}, the model's own limit, got {config.max_model_len}")
    max_model_len = config.max_model_len or model_limit
    page_bytes = sum(model.page_bytes for model in models)
    weight_bytes = sum(model.weight_bytes for model in models)
    longest = -(-max_model_len // config.page_size)
    if config.num_pages is not None:
        num_pages = config.num_pages
    elif config.kv_memory_gb is not None:
        num_pages = int(config.kv_memory_gb * GB) // page_bytes
    else:
        affordable = int(POOL_SHARE * max(free_bytes - weight_bytes, 0)) // page_bytes
        num_pages = min(config.max_num_seqs * longest, affordable)
    swap_pages = int(config.swap_gb * GB) // page_bytes
    plan = MemoryPlan(tuple(models), num_pages, config.page_size, max_model_len, free_bytes, swap_pages)
    if num_pages < 1:
        raise ConfigError(f"the KV pool would hold no page of {page_bytes / GB:.4f} GB: raise kv_memory_gb, or free memory ({plan})")
    if config.swap_gb > 0 and swap_pages < 1:
        raise ConfigError(f"swap_gb = {config.swap_gb} holds no page of {page_bytes / GB:.4f} GB: raise it, or switch it off with 0")
    if plan.weight_bytes + plan.kv_bytes + plan.swap_bytes > free_bytes:
        needed = (plan.weight_bytes + plan.kv_bytes + plan.swap_bytes) / GB
        raise ConfigError(
            f"{needed:.2f} GB are needed but {free_bytes / GB:.2f} GB are free: "
            f"lower kv_memory_gb, num_pages or swap_gb, or take a smaller dtype ({plan})"
        )
    return plan
