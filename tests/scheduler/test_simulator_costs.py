"""Rooflines, measured tables and profiles: arithmetic against figures worked out by hand or published."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from specdec.errors import ConfigError
from specdec.scheduler.cost_table import CostTable
from specdec.scheduler.simulator import shapes
from specdec.scheduler.simulator.costs import DraftCost, MeasuredForward
from specdec.scheduler.simulator.profiles import describe, load_profile, profile_names
from specdec.scheduler.simulator.roofline import Device, Experts, Load, ModelShape, Roofline

DEVICE = Device("d", 100.0, 1000.0, 1e6, 10.0, bandwidth_share=1.0, flops_share=1.0, reduce_latency_s=0.5, launch_s=0.25)
SHAPE = ModelShape(layers=2, hidden=4, dense_params=50.0, head_params=10.0, kv_values=6, attention_width=3)


def test_seconds_are_the_longer_of_reading_and_computing() -> None:
    roofline = Roofline(SHAPE, DEVICE)
    light, heavy = Load(1, 5, 5, 1), Load(100, 5, 5, 1)
    assert roofline.memory_s(light) == pytest.approx((50 * 2 + 5 * 12) / 100)
    assert roofline.seconds(light) == pytest.approx(roofline.memory_s(light) + 0.25)
    assert roofline.compute_s(heavy) == pytest.approx(2 * (40 * 100 + 10 + 2 * 3 * 5) / 1000)
    assert roofline.seconds(heavy) == pytest.approx(roofline.compute_s(heavy) + 0.25)


def test_ranks_share_weights_and_heads_and_pay_for_it() -> None:
    one, two = Roofline(SHAPE, DEVICE), Roofline(SHAPE, DEVICE, 2)
    load = Load(1, 5, 5, 1)
    assert two.read_bytes(load) == pytest.approx(one.read_bytes(load) / 2)
    assert two.operations(load) == pytest.approx(one.operations(load) / 2)
    assert two.reduce_s(3) == pytest.approx(2 * 2 * (0.5 + 3 * 4 * 2 * 2 * 0.5 / 10))
    assert one.reduce_s(3) == 0.0


def test_latent_kv_is_on_every_rank() -> None:
    latent = ModelShape(2, 4, 50.0, 10.0, 6, 3, kv_shared=True)
    assert Roofline(latent, DEVICE, 2).kv_token_bytes == 12.0


def test_experts_read_grow_with_tokens_to_all_of_them() -> None:
    experts = Experts(layers=3, total=256, active=8, width=2)
    assert experts.read(1) == pytest.approx(8.0)
    assert experts.read(2) == pytest.approx(256 * (1 - (248 / 256) ** 2))
    assert 255.9 < experts.read(500) <= 256
    moe = ModelShape(3, 4, 50.0, 10.0, 6, 3, experts)
    assert moe.expert_params == 24.0
    assert moe.read_params(1) == pytest.approx(50 + 3 * 8 * 24)
    assert moe.active_params == pytest.approx(40 + 3 * 8 * 24)
    assert moe.params == pytest.approx(50 + 3 * 256 * 24)


@pytest.mark.parametrize(
    ("shape", "total", "embedding", "tolerance"),
    [
        (shapes.LLAMA_1B, 1.24e9, 0.0, 0.01),  # its head is tied to its embedding
        (shapes.LLAMA_8B, 8.03e9, 128256 * 4096, 0.01),
        (shapes.LLAMA_70B, 70.6e9, 128256 * 8192, 0.01),
        (shapes.DEEPSEEK_V3, 671e9, 129280 * 7168, 0.01),
    ],
)
def test_shapes_have_the_published_numbers_of_weights(shape: ModelShape, total: float, embedding: int, tolerance: float) -> None:
    assert shape.params + embedding == pytest.approx(total, rel=tolerance)


def test_deepseek_v3_has_the_published_active_weights() -> None:
    assert shapes.DEEPSEEK_V3.active_params + shapes.DEEPSEEK_V3.head_params == pytest.approx(37e9, rel=0.02)


def test_measured_times_are_joined_by_lines() -> None:
    forward = MeasuredForward((1, 4, 8), (1.0, 1.6, 4.0), context=10, token_s=0.5, pair_s=0.01)
    assert forward.seconds(Load(1)) == 1.0
    assert forward.seconds(Load(2)) == pytest.approx(1.2)
    assert forward.seconds(Load(6)) == pytest.approx(2.8)
    assert forward.seconds(Load(8)) == 4.0
    assert forward.seconds(Load(10)) == pytest.approx(5.0)
    assert forward.seconds(Load(4, pairs=140)) == pytest.approx(1.6 + 1.0)


def test_draft_seconds() -> None:
    model = MeasuredForward((1, 2), (1.0, 1.5), context=0, token_s=0.1, pair_s=0.0)
    assert DraftCost(8, call_s=0.2, row_s=0.1).seconds(rows=3, depth=5, catch_up=99, kv_tokens=99) == pytest.approx(0.5)
    assert DraftCost(8, model).seconds(rows=1, depth=3, catch_up=12, kv_tokens=0) == pytest.approx(2.5 + 2 * 1.0)


@pytest.mark.parametrize("name", profile_names())
def test_built_in_profiles(name: str) -> None:
    profile = load_profile(name)
    sizes = (1, 2, 3, 5, 8, 16, 33, 64, 100, 256, 1000)
    times = [profile.forward.seconds(Load(size, 256 * size, 256 * size, size)) for size in sizes]
    assert all(0 < a < b * 1.2 for a, b in itertools.pairwise(times))  # measured ones are noisy
    assert profile.kv_tokens > 4096
    text = describe(profile)
    assert profile.about in text
    for drafter, cost in profile.drafters.items():
        assert drafter in text
        assert 0 < cost.seconds(4, 1, 4, 1024) < cost.seconds(4, 4, 4, 1024) * 1.001


def test_profile_of_a_bench_file(tmp_path: Path) -> None:
    report = {
        "case": {
            "model": "/models/m.gguf",
            "dtype": "int8",
            "machine": {"cpu": "C", "cores": 2},
            "config": {"max_num_seqs": 4, "max_batch_tokens": 128},
        },
        "steps": [{"rows": rows, "seconds": 0.01 + 0.001 * rows, "context": 256} for rows in (4, 1, 2)],
        "prefill": [{"tokens": 100, "tokens_per_s": 1 / 0.003}, {"tokens": 200, "tokens_per_s": 1 / 0.004}],
        "host_ms_per_step": [
            {"batch": 1, "other_ms": 1.0, "sample_ms": 0.5, "commit_ms": 0.1},
            {"batch": 5, "other_ms": 2.0, "sample_ms": 0.5, "commit_ms": 0.5},
        ],
    }
    path = tmp_path / "m.json"
    path.write_text(json.dumps(report))
    profile = load_profile(str(path))
    assert (profile.name, profile.kind, profile.max_num_seqs, profile.max_batch_tokens) == ("m", "measured", 4, 128)
    assert profile.forward.seconds(Load(3)) == pytest.approx(0.013)
    # a prompt of n takes a n + b n^2 / 2: a = 2 ms, b = 20 us
    assert profile.forward.seconds(Load(14)) == pytest.approx(0.014 + 10 * 0.002)
    assert profile.forward.seconds(Load(1, pairs=356)) == pytest.approx(0.011 + 100 * 20e-6)
    assert (profile.host.step_s, profile.host.row_s) == pytest.approx((0.00075, 0.00025))


def test_profile_of_the_warm_up(tmp_path: Path) -> None:
    table = CostTable.measured({1: 0.010, 2: 0.011, 4: 0.012}, kv_token_s=1e-6)
    path = tmp_path / "c.json"
    path.write_text(json.dumps({"key": {"source": "/models/m.gguf"}, "table": table.to_dict()}))
    profile = load_profile(str(path))
    assert "warm-up of m.gguf" in profile.about
    assert profile.forward.seconds(Load(3, kv_tokens=1000)) == pytest.approx(0.0115 + 0.001)
    assert profile.forward.seconds(Load(6)) == pytest.approx(0.013)


@pytest.mark.parametrize(("text", "words"), [("{}", "wanted the JSON of `specdec bench --json`"), ("no", "is no profile")])
def test_files_that_are_no_profile(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        load_profile(str(path))


def test_unknown_profiles_are_told_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'h200-8b'"):
        load_profile("h200-8")
    with pytest.raises(ConfigError, match="cannot read the profile"):
        load_profile("/nowhere/p.json")
