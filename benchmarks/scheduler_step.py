"""Times what the scheduler costs per step: planning, trimming and learning, and the trim alone on many nodes.

    python benchmarks/scheduler_step.py [--requests N ...] [--steps N]

No model runs: drafts are chains with random confidences, accepted by chance, and all costs are virtual. The times are those of
this machine, medians over steps.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np
import torch  # noqa: F401  (the kernels need it loaded, as in an engine)

from specdec.config import EngineConfig
from specdec.kv_manager.manager import KVManager
from specdec.plan import BatchPlan, Row, RowOutcome, StepCost
from specdec.request import Request, SamplingParams
from specdec.scheduler.cost_model import StepWork
from specdec.scheduler.scheduler import Scheduler
from specdec.tree import EMPTY, DraftTree

LIMIT = 8


class Timed:
    """Seconds of each call, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}

    def call(self, name: str, function: Any, *args: Any) -> Any:  # whatever the scheduler's methods take and give
        start = time.perf_counter()
        result = function(*args)
        self.seconds.setdefault(name, []).append(time.perf_counter() - start)
        return result


def verify_s(tokens: int) -> float:
    return 0.010 * max(1.0, tokens / 32)


def time_steps(requests: int, steps: int) -> dict[str, float]:
    """Median seconds of `plan`, `trim` and `finish`."""
    config = EngineConfig(max_num_seqs=requests, max_batch_tokens=max(512, requests * (LIMIT + 1)))
    kv = KVManager(requests * 400, config.page_size)
    scheduler = Scheduler(config, kv, lambda _spec: LIMIT, lambda _id: None, lambda: 0.0)
    for index in range(requests):
        scheduler.add(Request(f"r{index}", [index * 1000 + place for place in range(16)], 16, SamplingParams(), 0, 6000, "ngram"))
    random, timed = np.random.default_rng(0), Timed()
    for _ in range(steps):
        plan = timed.call("plan", scheduler.plan)
        kv.reserve(plan)
        trees = [_draft(row, random) for row in plan.rows]
        plan, keep = timed.call("trim", scheduler.trim, plan, [tree.shape() for tree in trees])
        trees = [tree.select(mask) for tree, mask in zip(trees, keep, strict=True)]
        outcomes = []
        for row, tree in zip(plan.rows, trees, strict=True):
            accepted = min(int(random.geometric(0.4)) - 1, len(tree))
            row.request.tokens += [0] * (accepted + 1)
            outcomes.append(RowOutcome((0,) * (accepted + 1), tuple(range(accepted))))
        work = StepWork.of(plan, [len(tree) for tree in trees])
        kv.commit(plan, outcomes)
        cost = StepCost({name: 3e-5 for name in work.drafts}, verify_s(work.tokens), 1e-4, 1e-5, 1e-4)
        timed.call("finish", scheduler.finish, plan, trees, outcomes, cost)
    return {name: statistics.median(seconds[len(seconds) // 4 :]) for name, seconds in timed.seconds.items()}


def time_trim(requests: int, nodes: int, repeats: int) -> float:
    """Median seconds of the budget's decision over `requests` drafts of `nodes` nodes."""
    config = EngineConfig(max_num_seqs=requests, max_batch_tokens=requests * (nodes + 1))
    random = np.random.default_rng(0)
    rows = tuple(Row(Request(f"r{i}", [0] * 20, 10, SamplingParams(), 0, 999), 19, 1, nodes, nodes, "ngram") for i in range(requests))
    shapes = [DraftTree.chain(range(nodes), random.random(nodes, dtype=np.float32)).shape() for _ in rows]
    timed = Timed()
    for _ in range(repeats):
        scheduler = Scheduler(config, KVManager(8, 16), lambda _spec: nodes, lambda _id: None, lambda: 0.0)
        timed.call("trim", scheduler.trim, BatchPlan(rows), shapes)
    return statistics.median(timed.seconds["trim"])


def _draft(row: Row, random: np.random.Generator) -> DraftTree:
    size = min(row.draft_limit, row.depth_limit)
    return DraftTree.chain(range(size), random.uniform(0.3, 0.9, size).astype(np.float32)) if size else EMPTY


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    print("requests      plan ms   trim ms  finish ms")
    for requests in options.requests:
        times = time_steps(requests, options.steps)
        print(f"{requests:8d}   " + " ".join(f"{times[name] * 1e3:9.3f}" for name in ("plan", "trim", "finish")))
    print(f"trim of 64 drafts of 64 nodes: {time_trim(64, 64, options.steps) * 1e3:.3f} ms")


if __name__ == "__main__":
    main()
