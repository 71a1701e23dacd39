"""The command line: options follow EngineConfig, errors are one line with status 2."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields
from typing import Any

import pytest

from specdec import __version__
from specdec.cli import run
from specdec.config import EngineConfig

CHANGED: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "drafter": "ngram(max=4)",
    "draft_budget": 3,
    "warm_up_s": 0.5,
    "target_itl_ms": 40.0,
    "target_ttft_ms": 900.0,
    "fair_share": True,
    "verify_rule": "coupled",
    "seed": 7,
    "max_model_len": 99,
    "max_num_seqs": 3,
    "max_batch_tokens": 64,
    "prefill_chunk": 32,
    "page_size": 4,
    "num_pages": 50,
    "kv_memory_gb": 0.5,
    "swap_gb": 0.25,
    "threads": 2,
    "prefix_cache": False,
    "draft_timeout_s": 1.5,
    "max_queue": 9,
    "grammar_max_bytes": 4096,
    "grammar_timeout_s": 2.5,
    "check_invariants": True,
}


def shown_config(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert run([*arguments, "--show-config"]) == 0
    config = json.loads(capsys.readouterr().out)
    assert isinstance(config, dict)
    return config


@pytest.mark.parametrize("command", [["serve"], ["generate", "-p", "x"]], ids=["serve", "generate"])
def test_every_engine_option_reaches_the_config(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert {field.name for field in fields(EngineConfig)} == {"model", *CHANGED}
    plain = shown_config(capsys, *command)
    assert {name: plain[name] for name in EngineConfig().to_dict()} == EngineConfig().to_dict()
    for name, value in CHANGED.items():
        flag = f"--{name.replace('_', '-')}"
        option = [flag.replace("--", "--no-", 1)] if value is False else [flag] if value is True else [flag, str(value)]
        assert shown_config(capsys, *command, *option) == {**plain, name: value}
    assert shown_config(capsys, command[0], "some/model", *command[1:])["model"] == "some/model"


def test_every_engine_option_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "--help"]) == 0
    text = capsys.readouterr().out
    for name in CHANGED:
        assert f"--{name.replace('_', '-')}" in text
    assert "KV pages" in text


def test_server_options_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    server = shown_config(capsys, "serve", "--host", "::1", "--port", "0", "--served-model-name", "m", "--stall-s", "3")["server"]
    assert server == {"host": "::1", "port": 0, "served_model_name": "m", "max_body_bytes": 4194304, "stall_s": 3.0}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["genrate"], "Did you mean 'generate'?"),
        (["nothing"], "generate, serve, eval"),
        (["eval", "acceptence"], "acceptence"),
        (["generate"], "--prompt"),
        (["generate", "-p", "x", "--drafer", "ngram"], "--drafter"),
        (["generate", "-p", "x", "--dtype", "float8"], "bfloat16"),
        (["generate", "-p", "x", "--page-size", "0"], "page_size"),
        (["generate", "-p", "x", "--num-pages", "5", "--kv-memory-gb", "1"], "give one of them"),
        (["generate", "-p", "x", "--drafter", "off+ngram"], "'off' stands alone"),
        (["generate", "-p", "x", "--temperature", "-1"], "temperature"),
        (["generate", "-p", "x", "--max-tokens", "0"], "max_tokens"),
        (["generate", "-p", "x", "--prediction", "/nowhere"], "/nowhere"),
        (["serve", "--port", "70000"], "port"),
        (["serve", "--stall-s", "0"], "stall_s"),
        (["serve", "--host", "not an address"], "cannot serve on"),
    ],
)
def test_errors_are_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("specdec: error: ")
    assert shown.err.count("\n") == 1
    assert message in shown.err


def test_port_in_use_is_noticed_before_anything_loads(capsys: pytest.CaptureFixture[str]) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert run(["serve", "--port", str(taken.getsockname()[1])]) == 2
    assert "choose another --port" in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"specdec {__version__}\n"
    as_module = subprocess.run([sys.executable, "-m", "specdec", "--version"], capture_output=True, text=True, check=True)
    assert as_module.stdout == f"specdec {__version__}\n"
