"""`specdec bench`: what is measured, that what is compared takes turns, and that the figures hang together."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from specdec.config import EngineConfig
from specdec.engine import Engine
from specdec.errors import ConfigError, ContextLengthError
from specdec.eval import bench, bench_decode, bench_forward, machine
from specdec.eval.bench import BenchSettings, Measurements, check_settings, run_bench
from specdec.eval.bench_decode import DecodeRun, decode, measure_decode
from specdec.eval.bench_forward import measure_steps, weights_read
from specdec.eval.bench_prompts import SHIPPED
from specdec.eval.bench_report import build_report, format_tables
from specdec.eval.datasets import PromptRow
from specdec.eval.machine import ReadBandwidth, busy_cores
from specdec.eval.samples import Samples
from specdec.pack import PackRow
from specdec.testing.fixtures import TINY_VOCAB_SIZE, tiny_prompt, write_tiny_checkpoint

SETTINGS = BenchSettings(drafters=("ngram",), repeats=2, max_tokens=12)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(autouse=True)
def small_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_forward, "ReadBandwidth", lambda: ReadBandwidth(1 << 20))


@pytest.fixture
def engine(tiny: Path) -> Iterator[Engine]:
    built = Engine.from_config(EngineConfig(model=str(tiny), dtype="float32", check_invariants=True))
    yield built
    built.close()


def report_of(found: Measurements, tiny: Path, settings: BenchSettings = SETTINGS) -> dict[str, Any]:
    return build_report(found, EngineConfig(model=str(tiny), dtype="float32"), settings, model_file=tiny, data=[])


def test_report_has_every_part(tiny: Path) -> None:
    said: list[str] = []
    found = run_bench(EngineConfig(model=str(tiny), dtype="float32"), SETTINGS, say=said.append)
    report = report_of(found, tiny)
    assert list(report) == ["case", "prefill", "steps", "decode", "host_ms_per_step"]
    case = report["case"]
    assert case["dtype"] == "float32"
    assert case["model_file"]["bytes"] == (tiny / "model.safetensors").stat().st_size
    assert {"config", "versions", "machine", "read_bandwidth", "weight_bytes", "repeats"} <= set(case)
    assert [entry["tokens"] for entry in report["prefill"]] == [128]
    assert [entry["rows"] for entry in report["steps"]] == [1, 2, 4, 8, 16, 32, 64]
    assert [(entry["batch"], entry["drafter"]) for entry in report["decode"]] == [(b, d) for b in (1, 4, 16) for d in ("off", "ngram")]
    assert [entry["batch"] for entry in report["host_ms_per_step"]] == [1, 16]
    for text in ("skipped prefill of 512 tokens: there is room for 255", "no tokenizer"):
        assert any(text in line for line in said)
        assert any(text in note for note in case["notes"])


def test_figures_hang_together(tiny: Path) -> None:
    report = report_of(run_bench(EngineConfig(model=str(tiny), dtype="float32"), SETTINGS), tiny)
    for entry in (*report["prefill"], *report["decode"]):
        assert 0 < entry["tokens_per_s_low"] <= entry["tokens_per_s"] <= entry["tokens_per_s_high"]
    one = report["steps"][0]
    assert one["of_one_row"] == 1.0
    assert one["byte_floor_share"] > 0
    for entry in report["steps"]:
        assert 0 < entry["seconds_low"] <= entry["seconds"] <= entry["seconds_high"]
        assert entry["context"] == 192
    for entry in report["host_ms_per_step"]:
        assert all(entry[name] >= 0 for name in ("draft_ms", "sample_ms", "commit_ms"))
        assert entry["ms"] > 0
    assert all(entry["identical_to_off"] for entry in report["decode"])


def test_parts_can_be_left_out(tiny: Path) -> None:
    settings = BenchSettings(parts=("prefill",), repeats=1)
    report = report_of(run_bench(EngineConfig(model=str(tiny), dtype="float32"), settings), tiny, settings)
    assert report["prefill"]
    assert report["steps"] == report["decode"] == report["host_ms_per_step"] == []
    assert report["case"]["read_bandwidth"] is None
    assert "step after" not in format_tables(report)


def test_batches_and_rows_beyond_the_limits_are_skipped(tiny: Path) -> None:
    config = EngineConfig(model=str(tiny), dtype="float32", max_num_seqs=4, max_model_len=64)
    report = report_of(run_bench(config, SETTINGS), tiny)
    assert [entry["batch"] for entry in report["decode"] if entry["drafter"] == "off"] == [1, 4]
    assert report["steps"][-1]["rows"] == 32
    assert report["prefill"] == []
    assert [entry["batch"] for entry in report["host_ms_per_step"]] == [1]
    assert "skipped decoding 16 at once: there is room for 4" in format_tables(report)


def test_drafters_with_weights_get_engines_of_their_own(tiny: Path, tmp_path: Path) -> None:
    other = write_tiny_checkpoint(tmp_path / "other", seed=7)
    specs = (f"model:{tiny}", "ngram", f"model:{other}")
    settings = BenchSettings(parts=("decode",), drafters=specs, repeats=1, max_tokens=6)
    lines: list[str] = []
    found = run_bench(EngineConfig(model=str(tiny), dtype="float32", max_num_seqs=1), settings, say=lines.append)
    assert sum(line.startswith("memory:") for line in lines) == 2
    report = report_of(found, tiny, settings)
    assert {entry["drafter"] for entry in report["decode"]} == {"off", *specs}
    (off,) = (entry for entry in report["decode"] if entry["drafter"] == "off")
    assert off["samples"] == 3
    assert str(tiny.parent) not in format_tables(report).partition("\n")[2]


def test_only_off(tiny: Path) -> None:
    settings = BenchSettings(parts=("decode",), drafters=(), repeats=2, max_tokens=6)
    report = report_of(run_bench(EngineConfig(model=str(tiny), dtype="float32", max_num_seqs=1), settings), tiny, settings)
    assert [(entry["drafter"], entry["samples"]) for entry in report["decode"]] == [("off", 2)]
    assert report["host_ms_per_step"][0]["drafter"] == "ngram"


def test_runs_of_a_pair_follow_each_other(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def scripted(_engine: Engine, spec: str, prompts: list[list[int]], _batch: int, tokens: int) -> DecodeRun:
        if tokens == SETTINGS.max_tokens:
            order.append(spec)
        return DecodeRun(token_ids=[[1]], tokens=1, seconds=1.0)

    monkeypatch.setattr(bench_decode, "decode", scripted)
    settings = BenchSettings(drafters=("ngram", "prediction"), repeats=2, max_tokens=SETTINGS.max_tokens)
    measure_decode(engine, settings, [[1]], 1, lambda: None)
    assert order == ["off", "ngram", "off", "prediction"] * 2


def test_decoding_counts_what_follows_the_prompts(engine: Engine) -> None:
    prompts = [tiny_prompt(length) for length in (3, 17, 64, 15)]
    apart = decode(engine, "off", prompts, 1, 9)
    together = decode(engine, "off", prompts, 4, 9)
    assert [len(ids) for ids in apart.token_ids] == [9] * 4
    assert apart.token_ids == together.token_ids
    assert apart.tokens == together.tokens == 4 * 8  # the first tokens come with the prompts
    assert (len(apart.host), len(together.host)) == (4 * 8, 8)
    assert apart.tokens_per_s == apart.tokens / apart.seconds
    assert all(0 < cost.total_s < apart.seconds for cost in apart.host)


def test_chunked_prompts_are_not_decoding(tiny: Path) -> None:
    engine = Engine.from_config(EngineConfig(model=str(tiny), dtype="float32", max_batch_tokens=16, max_num_seqs=2))
    run = decode(engine, "off", [tiny_prompt(64), tiny_prompt(3)], 2, 9)
    assert [len(ids) for ids in run.token_ids] == [9, 9]
    assert 8 <= run.tokens < 16  # what the short one emitted while the long one was read does not count
    engine.close()


def test_another_text_is_noticed(tiny: Path) -> None:
    run = DecodeRun(token_ids=[[1, 2]], tokens=2, seconds=1.0)
    other = DecodeRun(token_ids=[[1, 3]], tokens=2, seconds=0.5)
    pair = bench_decode.Paired("ngram", [run], [other])
    found = Measurements(weights={"float32": 1}, decode={1: [pair]})
    report = report_of(found, tiny)
    assert report["decode"][1]["identical_to_off"] is False
    assert report["decode"][1]["speedup"] == 2.0
    assert "NO" in format_tables(report)


def test_steps_forward_one_request_behind_a_context(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[PackRow] = []
    forward = engine.target.forward
    monkeypatch.setattr(engine.target, "forward", lambda given: (rows.extend(given), forward(given))[1])
    before = engine.kv.num_available
    times = measure_steps(engine, (1, 4, 16), 2, lambda _done, _total: None)
    assert times.context == 240
    timed = [len(row.tokens) for row in rows if row.cached == 240]
    assert timed == [1, 4, 16, *[1, 1, 4, 16] * 2]  # warm-up; then one more after each reading of the memory
    assert {row.num_logits for row in rows if row.cached == 240} == {1, 4, 16}
    assert [len(samples.values) for samples in times.seconds.values()] == [2, 2, 2]
    assert len(times.bandwidth.values) == 2
    assert engine.kv.num_available == before
    engine.kv.check()


def test_steps_compute_what_decoding_computes(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The timed forward is the real one: its logits are those of a prompt of the same tokens."""
    outputs: dict[int, torch.Tensor] = {}
    forward = engine.target.forward

    def kept(given: list[PackRow]) -> Any:
        output = forward(given)
        outputs[len(given[0].tokens)] = output.logits
        return output

    monkeypatch.setattr(engine.target, "forward", kept)
    measure_steps(engine, (1, 4, 16), 1, lambda _done, _total: None)
    assert torch.equal(outputs[16][:4], outputs[4])
    assert torch.equal(outputs[4][:1], outputs[1])


def test_weights_are_counted_without_embeddings() -> None:
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 8, dtype=torch.bfloat16), nn.LayerNorm(8))
    assert weights_read(model) == {"bfloat16": (32 + 8) * 2, "float32": 16 * 4}


def test_packed_weights_are_counted(engine: Engine) -> None:
    hidden, inner, kv = 64, 128, 32
    layer = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * inner + 2 * hidden
    wanted = 4 * (2 * layer + hidden + hidden * TINY_VOCAB_SIZE)
    counted = sum(weights_read(engine.target.model).values())
    assert wanted <= counted <= wanted + 4096  # and the frequencies of the rotary embedding


def test_bandwidth_reads_its_buffer() -> None:
    bandwidth = ReadBandwidth(1 << 20)
    assert bandwidth.num_bytes == 1 << 20
    assert bandwidth.sample() > 0
    assert len(bandwidth.samples) == 1
    assert f"{torch.get_num_threads()} threads" in str(bandwidth)


def test_busy_cores_are_those_of_all_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([[10, 0, 0, 100, 0, 0, 0, 0], [40, 0, 20, 140, 10, 0, 0, 0]])
    monkeypatch.setattr(machine, "_processor_times", lambda: next(times))
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 4)
    assert busy_cores(0.0) == pytest.approx(4 * 50 / 100)
    monkeypatch.setattr(machine, "_processor_times", list)
    assert busy_cores(0.0) is None


def test_a_busy_machine_is_noted(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = BenchSettings(parts=("prefill",), repeats=1)
    for cores, noted in ((1.5, True), (0.1, False), (None, False)):
        monkeypatch.setattr(bench, "busy_cores", lambda cores=cores: cores)
        report = report_of(run_bench(EngineConfig(model=str(tiny), dtype="float32"), settings), tiny, settings)
        assert report["case"]["machine"]["busy_cores"] == cores
        assert any("1.5 cores busy" in note for note in report["case"]["notes"]) is noted


def test_samples() -> None:
    samples = Samples.of([4.0, 1.0, 2.0, 3.0, 5.0])
    assert samples.to_json("x") == {"x": 3.0, "x_low": 2.0, "x_high": 4.0, "samples": 5}
    assert Samples.of([2.0]).middle_half == (2.0, 2.0)
    assert Samples.of([2.0, 9.0]).ratios(Samples.of([1.0, 3.0])).values == (2.0, 3.0)


def test_shipped_prompts_are_mixed() -> None:
    assert len({row.id for row in SHIPPED}) == len({row.turns for row in SHIPPED}) == 16
    for start in range(0, 16, 4):
        assert {row.category for row in SHIPPED[start : start + 4]} == {"edit", "prose", "code", "list"}


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'ngram'"):
        check_settings(BenchSettings(drafters=("ngrm",)))
    with pytest.raises(ConfigError, match="at least 2"):
        check_settings(BenchSettings(max_tokens=1))


@pytest.mark.demo_model
def test_prompts_are_real_ones(demo_model: Path) -> None:
    config = EngineConfig(model=str(demo_model), max_num_seqs=1, max_model_len=128)
    settings = BenchSettings(parts=("decode",), repeats=1, max_tokens=8)
    found = run_bench(config, settings)
    (pair,) = found.decode[1]
    assert len(pair.runs[0].token_ids) == 4
    assert pair.identical
    with pytest.raises(ContextLengthError, match="none of the 1 prompts fits"):
        run_bench(config, settings, [PromptRow("long", "edit", ("one two three " * 100,))])
