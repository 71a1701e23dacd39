"""The options of `specdec generate` that constrain the output, against the demo model's real command line up to the engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specdec.cli import run
from specdec.request import Constraint, SamplingParams


class _ParamsSeen(Exception):
    pass


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[SamplingParams]:
    """The sampling parameters that the command has made of its options."""
    from specdec.cli import generate

    found: list[SamplingParams] = []

    def note(**values: Any) -> SamplingParams:
        found.append(SamplingParams(**values))
        return found[-1]

    monkeypatch.setattr(generate, "SamplingParams", note)
    return found


def constraint_of(seen: list[SamplingParams], *options: str, monkeypatch: pytest.MonkeyPatch) -> Constraint | None:
    from specdec.engine import Engine

    def stop(*_: object, **__: object) -> None:
        raise _ParamsSeen

    monkeypatch.setattr(Engine, "from_config", stop)
    with pytest.raises(_ParamsSeen):
        run(["generate", "--prompt", "x", *options])
    return seen[-1].constraint


def test_constraints(seen: list[SamplingParams], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "object"}')
    grammar = tmp_path / "grammar"
    grammar.write_text('root ::= "a"')
    assert constraint_of(seen, monkeypatch=monkeypatch) is None
    assert constraint_of(seen, "--json-schema", str(schema), monkeypatch=monkeypatch) == Constraint("json_schema", '{"type": "object"}')
    assert constraint_of(seen, "--regex", "a+", "--after", "x", monkeypatch=monkeypatch) == Constraint("regex", "a+", "x")
    assert constraint_of(seen, "--choice", "a", "--choice", "é", monkeypatch=monkeypatch) == Constraint("choice", '["a", "é"]')
    assert constraint_of(seen, "--grammar", str(grammar), monkeypatch=monkeypatch) == Constraint("ebnf", 'root ::= "a"')


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--regex", "a", "--choice", "b"], "--regex and --choice"),
        (["--after", "x"], "--after"),
        (["--json-schema", "/nowhere"], "/nowhere"),
    ],
)
def test_refusals(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "--prompt", "x", *options]) == 2
    assert message in capsys.readouterr().err


def test_a_bad_grammar_is_one_line(demo_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "--prompt", "x", "--regex", "(a", "--max-tokens", "2"]) == 2
    assert "unclosed group" in capsys.readouterr().err


def test_the_demo_model_answers_in_json(demo_model: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text(
        json.dumps({"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False})
    )
    assert run(["generate", "--prompt", "One or two?", "--json-schema", str(schema), "--json", "--drafter", "grammar+ngram"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert json.loads(answer["text"])["n"] in (1, 2) and answer["finish_reason"] == "stop"
