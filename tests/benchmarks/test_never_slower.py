"""`benchmarks/never_slower.py`: what it calls a failure, its table and charts, and that runs are not repeated. On F-TINY."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from specdec.testing import write_tiny_checkpoint
from tests.tiny_tokenizer import tiny_tokenizer

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "never_slower.py"
POLICIES = ("auto", "off", "2")


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    sys.path.insert(0, str(SCRIPT.parent))  # as for a script that is run
    spec = importlib.util.spec_from_file_location("never_slower_real_under_test", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]
    sys.path.remove(str(SCRIPT.parent))


def runs(script: ModuleType, *rounds: tuple[float, float, float]) -> list[Any]:
    """Of speeds (auto, off, 2) in each round, with 32 steps that took a tenth more than predicted and brought 3 tokens for 2."""
    steps = ((0.010, 0.011, 2.0, 3),) * 32
    return [
        script.Run(number, 4, policy, 100, 100 / speed, 10, 5, 0.0, "same", steps if policy == "auto" else ())
        for number, speeds in enumerate(rounds)
        for policy, speed in zip(POLICIES, speeds, strict=True)
    ]


def test_what_fails(script: ModuleType) -> None:
    assert script.failures(runs(script, (100, 90, 102), (100, 90, 102), (80, 90, 100)), POLICIES) == [], "by the median over rounds"
    slow = script.failures(runs(script, (95, 99, 90), (96, 101, 90)), POLICIES)
    assert slow == ["4 at once: auto reaches 0.955 of off"]
    first, *others = runs(script, (100, 90, 90))
    assert "the ids of off" in script.failures([first, replace(others[0], ids="other"), others[1]], POLICIES)[0]


def test_rounds_are_compared_one_by_one(script: ModuleType) -> None:
    """A machine that was slow for a while was slow for all."""
    found = runs(script, (100, 100, 100), (50, 50, 50), (101, 100, 100))
    text = script.table(found, POLICIES)
    assert "| 4 | 3 | 100.0 | 100.0 | 100.0 | 30 | 15 | 1.000 (off) | 1.000 to 1.005 |" in text


def test_predictions_are_told_and_drawn(script: ModuleType) -> None:
    found = runs(script, (100, 90, 90))
    assert list(script.sys.modules["never_slower_report"].goodputs(found[0].steps)) == [pytest.approx((200.0, 3 / 0.011))] * 2
    assert "32 steps of auto: 0.091; of the goodput of 16 steps 0.267" in script.errors_line(found)
    chart = script.chart(found, POLICIES)
    assert chart.count("h0") == 32 + 2, "a dot per step and per window"
    assert "nan" not in chart


def test_hostile_limits(script: ModuleType) -> None:
    assert script.hostile_failures({"wall_over_off": [1.05, 1.1], "resumed_at": 64}) == []
    assert len(script.hostile_failures({"wall_over_off": [1.05, 1.11], "resumed_at": 65})) == 2
    assert script.hostile_failures({"wall_over_off": [], "resumed_at": None}) == ["drafting resumed after None tokens"]


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Model and prompts."""
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny")
    tokenizer = tiny_tokenizer(end=None)
    tokenizer.chat_template = "{{ messages[0].content }}"
    tokenizer.save_pretrained(folder)
    prompts = folder / "prompts.jsonl"
    lines = [json.dumps({"id": str(number), "category": "all", "turns": [f"{number} ababab {number}" * 3]}) for number in range(9)]
    prompts.write_text("\n".join(lines))
    return ["--model", str(folder), "--prompts", str(prompts), "--longest", "100", "--max-tokens", "24"]


def test_policies_take_turns_and_runs_are_kept(
    script: ModuleType, case: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, plot = tmp_path / "o.json", tmp_path / "o.svg"
    command = [*case, "--policies", *POLICIES, "--concurrency", "1", "3", "--requests", "2", "--json", str(output), "--plot", str(plot)]
    script.main([*command, "--rounds", "1"])  # the status depends on the machine
    kept = json.loads(output.read_text())["runs"]
    assert sorted((run["concurrency"], run["policy"]) for run in kept) == sorted((c, p) for c in (1, 3) for p in POLICIES)
    assert all(run["tokens"] == 24 * max(2, script.TURNS * run["concurrency"]) for run in kept)
    assert len({run["ids"] for run in kept}) == 2, "one answer per set of prompts"
    assert all(bool(run["steps"]) == (run["policy"] == "auto") for run in kept)
    assert all(sum(step[3] for step in run["steps"]) == run["tokens"] for run in kept if run["policy"] == "auto")
    assert all((run["drafted"] > 0) == (run["policy"] == "2") for run in kept if run["policy"] != "auto")
    assert plot.read_text().startswith("<svg")
    script.main([*command, "--rounds", "2"])
    again = json.loads(output.read_text())["runs"]
    assert again[: len(kept)] == kept
    assert len(again) == 2 * len(kept)
    capsys.readouterr()
    script.main([*command, "--rounds", "2"])
    assert "loading" not in capsys.readouterr().err, "nothing is left to run"
    with pytest.raises(SystemExit, match="another requests"):
        script.main([*command, "--requests", "5"])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--rounds", "0"], "--rounds must be 1 or more, got 0"),
        (["--concurrency", "4", "0"], "--concurrency must be 1 or more, got 0"),
        (["--max-tokens", "-4"], "--max-tokens must be 1 or more, got -4"),
        (["--policies", "off", "2"], "--policies must name auto and at least one other"),
        (["--policies", "auto"], "--policies must name auto and at least one other"),
        (["--policies", "auto", "0"], "must be auto, off or a number of nodes from 1, got '0'"),
        (["--prompts", "/nowhere/p.jsonl"], "cannot read the prompt file"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_is_loaded(
    script: ModuleType, case: list[str], options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        script.main([*case, *options])
    assert words in capsys.readouterr().err


def test_a_file_that_holds_no_runs_is_refused(script: ModuleType, case: list[str], tmp_path: Path) -> None:
    for text in ("", "{}", "[1]"):
        (tmp_path / "o.json").write_text(text)
        with pytest.raises(SystemExit, match="holds no runs of this script"):
            script.main([*case, "--json", str(tmp_path / "o.json")])


def test_a_hostile_drafter_is_run_against_none(script: ModuleType, case: list[str], tmp_path: Path) -> None:
    output = tmp_path / "o.json"
    script.main([*case, "--hostile", "--rounds", "2", "--json", str(output)])
    found = json.loads(output.read_text())
    assert len(found["wall_over_off"]) == 2
    assert found["sleep_s"] > 0
