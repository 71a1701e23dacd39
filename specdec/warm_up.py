"""Measures what forwards of different sizes take, once per model and machine, so that the first request is already budgeted."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from specdec.cache import cache_dir
from specdec.pack import PackRow
from specdec.scheduler.cost_table import GRID, CostTable

_REPEATS = 3
_MOST_LOGITS = 64  # as in a step: nodes need logits each, prompt chunks do not
_KV_TOKENS = 1024
_WORTH_KEEPING_S = 0.5
_VERSION = 1


class _Runner(Protocol):
    """The part of a ModelRunner that is measured."""

    page_size: int

    def forward(self, rows: list[PackRow], capture: tuple[int, ...] = ()) -> Any: ...  # its output is not looked at


def measure_costs(runner: _Runner, num_slots: int, max_tokens: int, max_s: float, clock: Callable[[], float]) -> CostTable | None:
    """Forwards rows of growing size and keeps the medians; stops early when `max_s` is up.

    Writes to the first pages of the pool: nothing may be in use yet.

    Args:
        num_slots: tokens that one request may have in the pool.
        max_tokens: larger forwards never happen.
        clock: seconds, waiting for the device.

    Returns:
        None where there was no time for two sizes.
    """
    start = clock()
    points: dict[int, float] = {}
    largest = min(max_tokens, num_slots)

    def median_s(tokens: int, cached: int = 0) -> float:
        pages = np.arange(-(-(cached + tokens) // runner.page_size), dtype=np.int32)
        row = PackRow([0] * tokens, cached, pages, min(tokens, _MOST_LOGITS))
        seconds = []
        for _ in range(_REPEATS + 1):  # the first touches memory that was not touched yet
            before = clock()
            runner.forward([row])
            seconds.append(clock() - before)
        return statistics.median(seconds[1:])

    for tokens in GRID:
        known = list(points.values())
        expected_s = (_REPEATS + 1) * 2 * known[-1] if known else 0.0
        if tokens > largest or clock() - start + expected_s > max_s:
            break
        points[tokens] = median_s(tokens)
    if len(points) < 2:
        return None
    cached = min(_KV_TOKENS, num_slots - 1)
    kv_token_s = max(median_s(1, cached) - points[1], 1e-3 * points[1]) / cached
    return CostTable.measured(points, kv_token_s)


def cached_costs(identity: dict[str, Any], measure: Callable[[], CostTable | None], clock: Callable[[], float]) -> CostTable | None:
    """The table kept for this model on this machine, or a new one, which is kept if it took a while.

    Args:
        identity: what the costs depend on; JSON values.
    """
    key = {**identity, "machine": platform.machine(), "cpus": os.cpu_count(), "threads": torch.get_num_threads(), "version": _VERSION}
    name = f"{hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]}.json"
    try:
        return CostTable.from_dict(json.loads((cache_dir("costs") / name).read_text("utf-8"))["table"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # not there, or not readable: measured again
    start = clock()
    table = measure()
    if table is not None and clock() - start >= _WORTH_KEEPING_S:
        with contextlib.suppress(OSError):  # where nothing can be kept, every start measures
            _write(cache_dir("costs") / name, {"key": key, "table": table.to_dict()})
    return table


def model_identity(source: str) -> dict[str, Any]:
    """What changes when the file or folder of a model does; JSON values."""
    path = Path(source)
    files = sorted(item for item in path.iterdir() if item.is_file()) if path.is_dir() else [path] if path.is_file() else []
    return {"source": source, "files": [[item.name, item.stat().st_size, int(item.stat().st_mtime)] for item in files]}


def _write(path: Path, values: dict[str, Any]) -> None:
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix="tmp", suffix=".json", delete=False, encoding="utf-8") as file:
        json.dump(values, file)
    os.replace(file.name, path)
