"""`benchmarks/never_slower_simulated.py`: what it calls a failure, its table, and that runs are not repeated."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "never_slower_simulated.py"


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("never_slower_under_test", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def runs(*points: tuple[float, float, float]) -> dict[tuple[str, float, float], dict[str, dict[str, float]]]:
    """Of goodputs (off, fixed:1, auto) at loads 1, 2, ..."""
    policies = ("off", "fixed:1", "auto")
    return {
        ("t", 0.6, float(load)): {
            policy: {"tokens_per_s": speed, "draft_length": 1.0} for policy, speed in zip(policies, speeds, strict=True)
        }
        for load, speeds in enumerate(points, 1)
    }


POLICIES = ("off", "fixed:1", "auto")


def test_what_fails(script: ModuleType) -> None:
    assert script.failures(runs((10, 20, 20), (30, 25, 29.8)), POLICIES) == []
    slow = script.failures(runs((10, 20, 20), (30, 25, 29.0)), POLICIES)
    assert len(slow) == 1
    assert "0.967 of off" in slow[0]
    never_better = script.failures(runs((10, 20, 19.9), (10, 25, 24.9)), POLICIES)
    assert never_better == ["over the whole sweep fixed:1 is no worse"]


def test_table_and_chart(script: ModuleType) -> None:
    found = runs((10, 20, 21), (30, 25, 29.8))
    text = script.table(found, POLICIES)
    assert "| t | 0.6 | 1 | 10 | fixed:1 | 20 | 21 | 1.00 | 1.050 |" in text
    assert "| off | 0.738 | 0.476 |" in text
    assert script.chart(found, POLICIES, False).count("<path") > 3


@pytest.mark.parametrize("arguments", [[], ["--arrivals"]])
def test_runs_are_kept_in_the_file(script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    trace, output = tmp_path / "t.csv", tmp_path / "o.json"
    lines = [f"{0.05 * number},{50 + number},{5 + number % 7}" for number in range(20)]
    trace.write_text("ARRIVAL_S,PROMPT_TOKENS,OUTPUT_TOKENS\n" + "\n".join(lines) + "\n")
    command = [str(trace), "--acceptance", "0.6", "--loads", "1", "2", "--policies", "off", "fixed:2", "--json", str(output), *arguments]
    assert script.main(command) == 0
    points = json.loads(output.read_text())["points"]
    assert [(point["load"], sorted(point["policies"])) for point in points] == [(1.0, ["fixed:2", "off"]), (2.0, ["fixed:2", "off"])]
    points[0]["policies"]["off"]["tokens_per_s"] = 12345.0
    output.write_text(json.dumps({"points": points}))
    capsys.readouterr()
    assert script.main(command) == 0
    assert "12345" in capsys.readouterr().out
