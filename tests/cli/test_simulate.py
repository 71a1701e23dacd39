"""`specdec simulate`: its options, its JSON, its chart and its errors."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from specdec.cli import run


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "t.csv"
    lines = [f"{0.05 * number},{100 + 10 * number},{5 + number % 7}" for number in range(30)]
    path.write_text("ARRIVAL_S,PROMPT_TOKENS,OUTPUT_TOKENS\n" + "\n".join(lines) + "\n")
    return path


def test_command(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, plot = tmp_path / "out.json", tmp_path / "out.svg"
    arguments = ["simulate", "--trace", str(trace), "--policy", "off", "--policy", "fixed:3", "--policy", "auto", "--load", "2"]
    arguments += ["--target-ttft", "500", "--target-itl", "50", "--limit", "20", "--json", str(output), "--plot", str(plot)]
    assert run(arguments) == 0
    shown = capsys.readouterr().out
    assert shown.count("20 requests in") == 3
    results = json.loads(output.read_text())["results"]
    assert [result["case"]["policy"] for result in results] == ["off", "fixed:3", "auto"]
    assert [result["speculation"]["drafted"] > 0 for result in results[:2]] == [False, True]
    assert results[0]["case"]["load"] == 2.0
    assert [result["case"]["engine"]["draft_budget"] for result in results] == ["all", 3, "auto"]
    assert results[0]["goodput"]["share"] == 1.0
    ElementTree.fromstring(plot.read_text())


def test_show_profile(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", "--show-profile", "--model-profile", "h200-671b-tp8"]) == 0
    shown = capsys.readouterr().out
    assert "max(bytes / bandwidth, operations / rate)" in shown
    assert "256 (1 - (1 - 8/256)^tokens)" in shown


def test_replicas_concurrency_and_limits(trace: Path, tmp_path: Path) -> None:
    output = tmp_path / "out.json"
    arguments = ["simulate", "--trace", str(trace), "--policy", "off", "--replicas", "2", "--concurrency", "6", "--max-num-seqs", "2"]
    assert run([*arguments, "--noise", "0.1", "--num-pages", "100", "--json", str(output)]) == 0
    result = json.loads(output.read_text())["results"][0]
    assert result["requests"]["ended"] == 30
    assert max(interval["running"] for interval in result["course"]) <= 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "Missing option '--trace'"),
        (["--trace", "/nowhere/t.csv"], "cannot read the trace"),
        (["--trace", "TRACE", "--policy", "fast"], "a policy is off, auto, all, or fixed:K"),
        (["--trace", "TRACE", "--acceptance", "2"], "between 0 and 1"),
        (["--trace", "TRACE", "--model-profile", "h100"], "unknown model profile"),
        (["--trace", "TRACE", "--drafter", "suffix"], "has no drafter 'suffix'"),
        (["--trace", "TRACE", "--json", "/nowhere/o.json"], "the folder /nowhere does not exist"),
        (["--trace", "TRACE", "--load", "0"], "--load"),
        (["--trace", "TRACE", "--load", "2", "--concurrency", "3"], "give one of them"),
    ],
)
def test_errors_are_one_line(trace: Path, arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", *(str(trace) if word == "TRACE" else word for word in arguments)]) == 2
    shown = capsys.readouterr()
    assert words in shown.err
    assert shown.err.count("\n") == 1
