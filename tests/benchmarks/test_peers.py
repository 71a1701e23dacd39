"""`benchmarks/peers.py`: who takes part, what becomes of drivers that fail, and which way a comparison points."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "peers.py"
ANSWERS = """
import json, sys
job = json.load(sys.stdin)
if job["mode"] == "broken":
    sys.exit("no such instruction")
if job["mode"] == "unable":
    print("loading", json.dumps({"error": "it cannot"}), sep="\\n")
else:
    print("loading")
    print(json.dumps({"version": "v1", "values": {"a": job["threads"] * 1.0}, "texts": {"a": job["mode"]}}))
"""


@pytest.fixture(scope="module")
def peers() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("peers_under_test", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def options(**values: object) -> argparse.Namespace:
    given = {
        "dtype": "auto",
        "draft": None,
        "llama_cpp": None,
        "transformers_python": None,
        "openvino_python": None,
        "only": [],
        "prompts": None,
    }
    return argparse.Namespace(**{**given, "rounds": 2, "threads": 3, "max_tokens": 8, **values})


def column(peers: ModuleType, name: str, mode: str = "off", **values: list[float]) -> object:
    return peers.Column(peers.Contender(name, (), {"mode": mode}), "v", dict(values))


def test_peers_that_are_not_there_are_named(peers: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    found = peers.programs(options(openvino_python="py"))
    assert [program.name for program in found] == ["specdec", "openvino"]
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["llama.cpp", "transformers"]
    assert "--llama-cpp FOLDER" in lines[0]


def test_modes_by_case(peers: ModuleType) -> None:
    given = options(openvino_python="py", draft=Path("d.gguf"), llama_cpp=Path("bin"))
    found = peers.programs(given)

    def names(case: str) -> list[str]:
        return [contender.name for contender in peers.contenders(case, found, given)]

    assert names("steps") == ["specdec", "llama.cpp", "openvino"]
    assert names("concurrency") == ["specdec off", "specdec ngram", "llama.cpp", "openvino"]
    assert names("mix")[:4] == ["specdec off", "specdec ngram", "specdec draft", "specdec ngram+draft"]
    assert names("mix")[4:] == [
        f"{peer} {mode}" for peer, second in (("llama.cpp", "ngram"), ("openvino", "lookup")) for mode in ("plain", second, "draft")
    ]
    given.only = ["llama"]
    assert names("decode") == ["llama.cpp"]


def test_rounds_and_failures(peers: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    driver = tmp_path / "driver.py"
    driver.write_text(ANSWERS)
    found = [peers.Contender(mode, (sys.executable, str(driver)), {"mode": mode}) for mode in ("fine", "broken", "unable")]
    found.append(peers.Contender("nobody", (str(tmp_path / "python"), str(driver)), {"mode": "fine"}))
    (fine,) = peers.measure("decode", tmp_path / "m.gguf", found, options(), tmp_path)
    assert fine.values == {"a": [3.0, 3.0]}
    assert fine.version == "v1"
    shown = capsys.readouterr().out
    assert "broken: left out: its driver failed with code 1: no such instruction" in shown
    assert "unable: left out: it cannot" in shown
    assert "nobody: left out: " in shown
    (entry,) = peers.to_json(tmp_path / "m.gguf", "decode", fine)
    assert (entry["median"], entry["unit"], entry["row"]) == (3.0, "tokens_per_s", "a")


def test_comparison_is_how_many_times_as_fast(peers: ModuleType) -> None:
    columns = [
        column(peers, "specdec off", a=[10.0, 20.0, 40.0]),
        column(peers, "specdec ngram", a=[1.0, 1.0, 1.0]),
        column(peers, "llama.cpp", a=[5.0, 5.0, 10.0]),
        column(peers, "openvino", a=[4.0, 4.0, 4.0]),
    ]
    assert peers.comparison("decode", columns, "a") == "4.00x"  # the median of 2, 4 and 4
    assert peers.comparison("decode", columns[:2], "a") == "-"
    seconds = [column(peers, "specdec", a=[0.1, 0.2]), column(peers, "llama.cpp", a=[0.2, 0.4]), column(peers, "openvino", a=[9.0, 9.0])]
    assert peers.comparison("steps", seconds, "a") == "2.00x"


def test_table(peers: ModuleType) -> None:
    columns = [column(peers, "specdec", one=[0.010], two=[0.015]), column(peers, "llama.cpp", "plain", one=[0.020])]
    columns[0].busy = [0.0, 1.5]
    table = peers.format_table("steps", columns)
    assert "10.0 (1.00x)" in table
    assert "15.0 (1.50x)" in table
    assert table.splitlines()[2].split()[-2:] == ["-", "-"]
    assert "other programs kept up to 1.5 cores busy" in table
    assert peers.format_table("steps", []) == "nothing was measured"


def test_texts_are_held_against_the_same_program_without_drafts(peers: ModuleType) -> None:
    columns = [column(peers, f"llama.cpp {mode}", mode, a=[1.0]) for mode in ("plain", "ngram", "draft")]
    for one, texts in zip(columns, ({"a": "x", "b": "y"}, {"a": "x", "b": "y"}, {"a": "x", "b": "z"}), strict=True):
        one.texts = texts
    assert [(found.contender.name, count) for found, count in peers.differing(columns)] == [("llama.cpp draft", 1)]
