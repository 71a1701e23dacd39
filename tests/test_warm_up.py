"""Warm-up measurements on a runner that only lets a fake clock go on."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from specdec.config import EngineConfig
from specdec.engine import Engine
from specdec.kv_manager.manager import KVManager
from specdec.pack import PackRow
from specdec.plan import BatchPlan
from specdec.scheduler.cost_model import CostModel
from specdec.scheduler.cost_table import CostTable
from specdec.testing import write_tiny_checkpoint
from specdec.tree import DraftTree
from specdec.warm_up import cached_costs, measure_costs, measure_drafts, model_identity


class Runner:
    page_size = 16

    def __init__(self) -> None:
        self.now_s = 0.0
        self.sizes: list[int] = []

    def forward(self, rows: list[PackRow], capture: tuple[int, ...] = ()) -> Any:
        (row,) = rows
        assert len(row.pages) * self.page_size >= row.cached + len(row.tokens)
        self.sizes.append(len(row.tokens))
        self.now_s += 0.01 * max(1, len(row.tokens) / 16) + 1e-5 * row.cached + 1e-6 * row.cached * len(row.tokens)

    def clock(self) -> float:
        return self.now_s


def test_medians_by_size_and_the_price_of_kv() -> None:
    runner = Runner()
    table = measure_costs(runner, num_slots=1600, max_tokens=64, max_s=100.0, clock=runner.clock)
    assert table is not None
    assert table.tokens[-1] == 64
    assert dict(zip(table.tokens, table.seconds, strict=True))[32] == pytest.approx(0.02)
    assert (table.kv_token_s, table.pair_s) == pytest.approx((1e-5, 1e-6))


def test_it_stops_in_time_and_within_the_pool() -> None:
    runner = Runner()
    table = measure_costs(runner, num_slots=1600, max_tokens=512, max_s=1.0, clock=runner.clock)
    assert table is not None and table.tokens[-1] < 512
    assert runner.now_s < 1.2
    runner = Runner()
    table = measure_costs(runner, num_slots=32, max_tokens=512, max_s=100.0, clock=runner.clock)
    assert table is not None and table.tokens[-1] == 32
    runner = Runner()
    assert measure_costs(runner, num_slots=1600, max_tokens=512, max_s=0.05, clock=runner.clock) is None


def test_what_took_long_is_kept_for_the_same_model_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))
    model = tmp_path / "model.gguf"
    model.write_bytes(b"x")
    runner, measured = Runner(), []

    def measure() -> CostTable | None:
        measured.append(True)
        return measure_costs(runner, 1600, 64, 100.0, runner.clock)

    first = cached_costs(model_identity(str(model)), measure, runner.clock)
    assert cached_costs(model_identity(str(model)), measure, runner.clock) == first
    assert len(measured) == 1
    (kept,) = (tmp_path / "cache" / "costs").iterdir()
    kept.write_text("{")
    assert cached_costs(model_identity(str(model)), measure, runner.clock) is not None
    model.write_bytes(b"xy")
    cached_costs(model_identity(str(model)), measure, runner.clock)
    assert len(measured) == 3


def test_an_engine_that_drafts_starts_measured_and_says_so(tmp_path: Path) -> None:
    folder = write_tiny_checkpoint(tmp_path / "tiny")
    said: list[str] = []
    config = EngineConfig(model=str(folder), dtype="float32", num_pages=64, page_size=4, drafter="ngram", max_batch_tokens=32)
    engine = Engine.from_config(config, progress=said.append)
    assert any("measuring what steps take" in line for line in said)
    assert engine.scheduler.costs.table.weight > 0
    assert engine.kv.num_free == 64
    plain = Engine.from_config(EngineConfig(model=str(folder), dtype="float32", num_pages=64, page_size=4))
    assert plain.scheduler.costs.table.weight == 0


def test_drafters_with_kv_are_timed_before_the_first_request_and_leave_no_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))
    folder = write_tiny_checkpoint(tmp_path / "tiny")
    config = EngineConfig(
        model=str(folder), dtype="float32", num_pages=64, page_size=4, drafter=f"ngram+model:{folder}", max_batch_tokens=32
    )
    engine = Engine.from_config(config)
    table = engine.scheduler.costs.table
    name = f"model:{folder}"
    assert set(table.drafts) == {name}, "what keeps no KV is cheap to try"
    deep, shallow = (engine.scheduler.costs.draft_s(name, 1, depth) for depth in (4, 1))
    assert deep > 1.5 * shallow > 0
    assert engine.scheduler.costs.deepest_draft(name) == 4
    assert engine.kv.num_free == 64
    assert (engine.kv.stats.queries, len(engine.kv.published)) == (0, 0)
    assert all((lane["drafted"], lane["errors"]) == (0, {}) for lane in engine.drafters.status())
    assert CostTable.from_dict(table.to_dict()) == table


class Drafters:
    """Draft for as long as a law says, on a clock that the test holds."""

    def __init__(self) -> None:
        self.draft_s: dict[str, float] = {}
        self.read: dict[str, int] = {}

    def default_limit(self, spec: str) -> int:
        return 4

    def propose(self, plan: BatchPlan) -> list[DraftTree]:
        unread = sum(len(row.request.tokens) - self.read.get(row.request.id, 1) for row in plan.rows)
        self.read.update({row.request.id: len(row.request.tokens) for row in plan.rows})
        depth = min(plan.rows[0].draft_limit, plan.rows[0].depth_limit)
        self.draft_s = {"d": 0.001 + depth * (0.002 + 0.0005 * len(plan.rows)) + 1e-5 * unread}
        return [DraftTree.chain(range(depth)) for _ in plan.rows]

    def forget(self, request_id: str) -> None:
        self.read.pop(request_id, None)


def test_what_a_drafter_needs_per_level_row_and_token_to_catch_up_with_is_told_apart() -> None:
    kv = KVManager(256, 16)
    table = measure_drafts(CostTable.guess(), Drafters(), kv, ["d"], EngineConfig(), 2048, lambda: 0.0)
    costs = CostModel(table)
    for rows, depth, unread in ((1, 1, 0), (1, 4, 0), (4, 4, 0), (2, 3, 100), (8, 2, 1000)):
        expected = 0.001 + depth * (0.002 + 0.0005 * rows) + 1e-5 * unread
        assert costs.draft_s("d", rows, depth, unread) == pytest.approx(expected, rel=0.1)
    assert kv.num_free == 256
    little = measure_drafts(CostTable.guess(), Drafters(), KVManager(1, 16), ["d"], EngineConfig(), 32, lambda: 0.0)
    assert little.drafts == {}, "too small a pool to try anything"


@pytest.mark.parametrize(
    "damage",
    [
        {"drafts": []},
        {"drafts": None},
        {"drafts": {"model:x": []}},
        {"drafts": {"model:x": [1e-3] * 6}},
        {"drafts": {"model:x": [math.nan] * 5}},
        {"drafts": {"model:x": [-1e-3] * 5}},
        {"weight": math.inf},
        {"weight": -20},
        {"weight": 10**400},
        {"deepest": math.inf},
        {"deepest": -1},
        {"kv_token_s": 1e308},
        {"seconds": [2.0, 1.0]},
        {"seconds": [1e300, 2e300]},
        {"tokens": [1, 10**400]},
    ],
)
def test_a_damaged_table_is_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: dict[str, Any]) -> None:
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path))
    table = CostTable((1, 8), (0.01, 0.02), 1e-7, 20, {"model:x": (1e-3,) * 5}, 4)
    clock = iter(range(0, 1000, 100)).__next__
    assert cached_costs({"source": "x"}, lambda: table, clock) == table
    (path,) = tmp_path.rglob("*.json")
    kept = json.loads(path.read_text())
    path.write_text(json.dumps({**kept, "table": {**kept["table"], **damage}}))
    again = CostTable((1, 8), (0.03, 0.04))
    assert cached_costs({"source": "x"}, lambda: again, clock) == again
    path.write_text("[" * 100_000)
    assert cached_costs({"source": "x"}, lambda: table, clock) == table
