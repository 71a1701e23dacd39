"""`specdec bench`: its options, its JSON and its exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specdec.cli import run
from specdec.drafters.registry import register_drafter, unregister
from specdec.eval import bench_forward
from specdec.eval.machine import ReadBandwidth
from specdec.testing.fixtures import write_tiny_checkpoint


@pytest.fixture(autouse=True)
def small_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_forward, "ReadBandwidth", lambda: ReadBandwidth(1 << 20))


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, output = write_tiny_checkpoint(tmp_path / "tiny"), tmp_path / "out.json"
    assert run(["bench", str(model), "--dtype", "float32", "--repeats", "1", "--max-tokens", "8", "--json", str(output)]) == 0
    shown = capsys.readouterr()
    for text in ("128 tokens", "64 rows", "ngram", "ms per step outside the forward", "of the speed that reading allows"):
        assert text in shown.out
    report = json.loads(output.read_text())
    assert set(report) == {"case", "prefill", "steps", "decode", "host_ms_per_step"}
    assert report["case"]["model"] == str(model)


def test_parts_and_engine_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, output = write_tiny_checkpoint(tmp_path / "tiny"), tmp_path / "out.json"
    arguments = [
        "bench",
        str(model),
        "--dtype",
        "float32",
        "--only",
        "steps",
        "--repeats",
        "1",
        "--max-model-len",
        "128",
        "--json",
        str(output),
    ]
    assert run(arguments) == 0
    report = json.loads(output.read_text())
    assert report["case"]["config"]["max_model_len"] == 128
    assert report["case"]["parts"] == ["steps"]
    assert report["prefill"] == report["decode"] == []
    assert "speed-up" not in capsys.readouterr().out


def test_prompt_files_and_drafters_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    register_drafter("mine", lambda tokens, limit: [])
    try:
        assert run(["bench", "m", "--drafter", "mine", "--drafter", "off", "--data", "p.jsonl", "--show-config"]) == 0
    finally:
        unregister("mine")
    shown = json.loads(capsys.readouterr().out)
    assert shown["bench"] == {"parts": [], "drafters": ["mine", "off"], "data": ["p.jsonl"], "max_tokens": 64, "repeats": 3}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "prefil"], "prefill"),
        (["--drafter", "ngrm"], "did you mean 'ngram'"),
        (["--data", "/nowhere/x.jsonl"], "/nowhere/x.jsonl"),
        (["--json", "/nowhere/out.json"], "/nowhere"),
        (["--max-tokens", "1"], "--max-tokens"),
        (["--repeats", "0"], "--repeats"),
    ],
)
def test_errors_come_before_loading(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "no/such/model.gguf", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("specdec: error: ")
    assert error.count("\n") == 1
    assert message in error
