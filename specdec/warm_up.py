"""Measures what forwards of different sizes take, once per model and machine, so that the first request is already budgeted."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from specdec.cache import cache_dir
from specdec.config import EngineConfig
from specdec.kv_manager.manager import KVManager
from specdec.pack import PackRow
from specdec.plan import BatchPlan, Row
from specdec.request import Request, SamplingParams
from specdec.scheduler.cost_model import CostModel, DraftWork
from specdec.scheduler.cost_table import GRID, CostTable
from specdec.scheduler.draft_costs import draft_works, fit_draft
from specdec.tree import DraftTree

_REPEATS = 3
_PASSES = 7
_SMALL = 64  # token rows, of which there are so many passes
_LARGE_SHARE, _SMALL_SHARE = 0.6, 0.8  # of the time, until which larger sizes are begun, and passes over the small ones
_MOST_LOGITS = 64  # as in a step: nodes need logits each, prompt chunks do not
_KV_TOKENS = 1024
_PAIR_ROWS = 16  # token rows that tell what attention computes from what it reads
_CATCH_UP = 2048
_CATCH_UP_SHARE = 0.1  # of the time, for one call that catches up: a target forward of so many tokens bounds it
_SEEN = 16  # tokens of requests with nothing to catch up with
_WORTH_KEEPING_S = 0.5
_VERSION = 4


class _Runner(Protocol):
    """The part of a ModelRunner that is measured."""

    page_size: int

    def forward(self, rows: list[PackRow], capture: tuple[int, ...] = ()) -> Any: ...  # its output is not looked at


def measure_costs(runner: _Runner, num_slots: int, max_tokens: int, max_s: float, clock: Callable[[], float]) -> CostTable | None:
    """Forwards rows of growing size, the small ones several times, and keeps the medians; stops early when `max_s` is up.

    Writes to the first pages of the pool: nothing may be in use yet.

    Args:
        num_slots: tokens that one request may have in the pool.
        max_tokens: larger forwards never happen.
        clock: seconds, waiting for the device.

    Returns:
        None where there was no time for two sizes.
    """
    start = clock()
    seconds: dict[int, list[float]] = {}

    def time_s(tokens: int, cached: int = 0) -> float:
        pages = np.arange(-(-(cached + tokens) // runner.page_size), dtype=np.int32)
        before = clock()
        runner.forward([PackRow([0] * tokens, cached, pages, min(tokens, _MOST_LOGITS))])
        return clock() - before

    def time_all(sizes: Sequence[int], until_s: float) -> None:
        """Adds a measurement of each size, as far as time allows."""
        for tokens in sizes:
            known = tokens in seconds
            expected_s = seconds[tokens][-1] if known else 4 * seconds[max(seconds)][-1] if seconds else 0.0
            if clock() - start + expected_s > until_s:
                return
            if not known:  # the first forward touches memory that was not touched yet
                time_s(tokens)
            seconds.setdefault(tokens, []).append(time_s(tokens))

    # a machine is busier at one time than at another: the sizes that drafting is decided by are gone through several times
    sizes = [tokens for tokens in GRID if tokens <= min(max_tokens, num_slots)]
    small = [tokens for tokens in sizes if tokens <= _SMALL]
    time_all(small, max_s)
    time_all(sizes[len(small) :], _LARGE_SHARE * max_s)
    for _ in range(_PASSES - 1):
        time_all(small, _SMALL_SHARE * max_s)
    if len(seconds) < 2:
        return None
    points = {tokens: statistics.median(own) for tokens, own in seconds.items()}
    most = max([tokens for tokens in points if tokens <= min(_PAIR_ROWS, num_slots // 2)], default=1)
    if most == 1:
        return CostTable.measured(points)
    cached = min(_KV_TOKENS, num_slots - most)
    time_s(most, cached)  # touches memory
    behind_s: list[tuple[float, float]] = []
    while len(behind_s) < _REPEATS or (len(behind_s) < _PASSES and clock() - start < max_s):
        behind_s.append((time_s(1, cached) - points[1], time_s(most, cached) - points[most]))
    one_s, most_s = (statistics.median(own) for own in zip(*behind_s, strict=True))
    least_s = 1e-3 * points[1]
    pair_s = max(most_s - one_s, least_s) / (most - 1)
    return CostTable.measured(points, max(one_s - pair_s, least_s) / cached, pair_s=pair_s / cached)


class _Drafters(Protocol):
    """The part of a DrafterRouter that is measured."""

    draft_s: dict[str, float]

    def default_limit(self, spec: str) -> int: ...

    def propose(self, plan: BatchPlan) -> list[DraftTree]: ...

    def forget(self, request_id: str) -> None: ...


def measure_drafts(
    table: CostTable,
    drafters: _Drafters,
    kv: KVManager,
    names: Sequence[str],
    config: EngineConfig,
    max_length: int,
    clock: Callable[[], float],
) -> CostTable:
    """Lets drafters with KV draft for made-up requests, and adds what that takes to a table; stops early when time is up.

    Args:
        names: the drafters to time.
        max_length: tokens that a request may have.
    """
    start, stats = clock(), replace(kv.stats)
    drafts: dict[str, tuple[float, ...]] = {}
    deepest = min([drafters.default_limit(name) for name in names])
    most = min(_CATCH_UP, config.max_batch_tokens, max_length // 2, kv.num_available * kv.page_size // 8)
    while most > _SEEN and CostModel(table).verify_one_s(most) > _CATCH_UP_SHARE * config.warm_up_s:
        most //= 2
    for name in names:
        seconds: dict[DraftWork, float] = {}
        for work in draft_works(drafters.default_limit(name), most):
            if clock() - start > config.warm_up_s:
                break
            found_s = _median_draft_s(work, drafters, kv, name)
            if found_s is not None:
                seconds[work] = found_s
        if len(seconds) > 1:
            drafts[name] = fit_draft(seconds)
    kv.stats = stats  # made-up prompts are no queries
    return replace(table, drafts=drafts, deepest=deepest)


def _median_draft_s(work: DraftWork, drafters: _Drafters, kv: KVManager, name: str) -> float | None:
    """Seconds of such a call, the first one aside; None where the drafter drafts nothing, or the pool is too small."""
    limit, length = drafters.default_limit(name) if work.depth > 1 else 1, work.catch_up + 1 if work.catch_up else _SEEN
    if work.rows * (length + limit + kv.page_size) > kv.num_available * kv.page_size:
        return None
    requests = [Request(f"warm-up-{index}", [0] * length, length, SamplingParams(), 0, length + limit + 1) for index in range(work.rows)]
    plan = BatchPlan(tuple([Row(request, 0, length, limit, work.depth, name) for request in requests]))
    seconds = []
    try:
        for repeat in range(_REPEATS + 2):
            if work.catch_up or not repeat:  # the request is new to the drafter; otherwise all but its last token has been read
                for request in requests:
                    drafters.forget(request.id)
                    kv.release(request)
                    kv.admit(request)
                kv.reserve(plan)
            if not all(map(len, drafters.propose(plan))):
                return None
            seconds.append(drafters.draft_s[name])
    finally:
        for request in requests:
            drafters.forget(request.id)
            kv.release(request)
    return statistics.median(seconds[2:])


def cached_costs(identity: dict[str, Any], measure: Callable[[], CostTable | None], clock: Callable[[], float]) -> CostTable | None:
    """The table kept for this model on this machine, or a new one, which is kept if it took a while.

    Args:
        identity: what the costs depend on; JSON values.
    """
    key = {**identity, "machine": platform.machine(), "cpus": os.cpu_count(), "threads": torch.get_num_threads(), "version": _VERSION}
    name = f"{hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]}.json"
    try:
        return CostTable.from_dict(json.loads((cache_dir("costs") / name).read_text("utf-8"))["table"])
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        pass  # not there, or damaged: measured again
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
