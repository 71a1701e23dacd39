"""`specdec generate` against a scripted engine, and once against the demo model."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import pytest

from specdec.cli import run
from specdec.config import EngineConfig
from specdec.plan import Event, TokenLogprobs
from specdec.request import RequestStats, SamplingParams


class Tokenizer:
    chat_template: str | None = "present"

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [0] * add_special_tokens + [ord(char) for char in text]

    def apply_chat_template(self, messages: Sequence[dict[str, str]], **_: object) -> str:
        return "".join(f"<{message['role'][0]}>{message['content']}" for message in messages)


class ScriptedEngine:
    """Emits "ab", then "cd" of which "c" was an accepted draft, then stops."""

    last: ScriptedEngine
    tokenizer: Any = Tokenizer()

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.left: dict[str, list[str]] = {}
        self.closed = False
        ScriptedEngine.last = self

    @classmethod
    def from_config(cls, config: EngineConfig, *, progress: Callable[[str], None]) -> ScriptedEngine:
        progress("loading the model")
        return cls(config)

    def add(self, prompt_ids: Sequence[int], params: SamplingParams, *, prediction: Sequence[int] = ()) -> list[str]:
        self.prompt, self.params, self.prediction = list(prompt_ids), params, list(prediction)
        self.left = {f"r-{choice}": ["ab", "cd"] for choice in range(params.n)}
        return list(self.left)

    @property
    def has_work(self) -> bool:
        return bool(self.left)

    def step(self) -> list[Event]:
        events = []
        for name in list(self.left):
            piece = self.left[name].pop(0)
            done = not self.left[name]
            stats = RequestStats(drafted=3, accepted=1, verifies=1, emitted=2, draft_s=0.25, verify_s=0.5)
            events.append(Event(name, tuple(map(ord, piece)), tuple(piece), int(done), stats, "stop" if done else None))
            if done:
                del self.left[name]
        return events

    def close(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True)
def scripted(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "demo_model" not in request.fixturenames:
        import specdec.engine

        monkeypatch.setattr(specdec.engine, "Engine", ScriptedEngine)


def test_text_and_summary(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "-p", "hi", "--seed", "4", "--stop", "x", "--stop", "y"]) == 0
    shown = capsys.readouterr()
    assert shown.out == "abcd\n"
    loading, summary = shown.err.splitlines()
    assert loading == "loading the model"
    assert summary.startswith("4 tokens, ")
    assert "of prefill, acceptance length 2.00; draft 0.25 s, verify 0.50 s, other" in summary
    engine = ScriptedEngine.last
    assert engine.params == SamplingParams(max_tokens=256, temperature=0.0, seed=4, stop=("x", "y"))
    assert engine.prompt == [ord(char) for char in "<u>hi"]
    assert engine.closed


def test_accepted_tokens_are_coloured_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    monkeypatch.setattr(click, "echo", lambda text="", nl=True, err=False, **_: err or out.write(text + "\n" * nl))
    assert run(["generate", "-p", "hi"]) == 0
    assert out.getvalue() == "ab" + click.style("c", fg="green") + "d\n"


def test_json_is_one_object_per_choice(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "-p", "hi", "--json", "-n", "2", "--temperature", "1"]) == 0
    objects = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(objects) == 2
    assert objects[0].pop("stats").keys() == {"drafted", "accepted", "acceptance_length", "draft_s", "verify_s", "tokens_per_s"}
    assert objects[0] == {"text": "abcd", "token_ids": [97, 98, 99, 100], "finish_reason": "stop"}


def test_every_sampling_option_reaches_the_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--top-k", "5", "--typical-p", "0.9", "--repetition-penalty", "1.1", "--presence-penalty", "0.5", "--min-tokens", "2"]
    arguments += ["--logit-bias", "3=-2.5", "--logit-bias", "4=1", "--bad-word", "x", "--allowed-token-id", "5", "--stop-token-id", "6"]
    arguments += ["--frequency-penalty", "-0.5", "--ignore-eos"]
    assert run(["generate", "-p", "hi", *arguments]) == 0
    assert ScriptedEngine.last.params == SamplingParams(
        max_tokens=256,
        temperature=0.0,
        seed=0,
        top_k=5,
        typical_p=0.9,
        repetition_penalty=1.1,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        min_tokens=2,
        logit_bias=((3, -2.5), (4, 1.0)),
        bad_words=("x",),
        allowed_token_ids=(5,),
        stop_token_ids=(6,),
        ignore_eos=True,
    )
    capsys.readouterr()
    for wrong in (["--logit-bias", "3"], ["--repetition-penalty", "0"], ["--logprobs", "2"]):
        assert run(["generate", "-p", "hi", *wrong]) == 2
        assert wrong[0].strip("-").replace("-", "_") in capsys.readouterr().err.replace("-", "_")


def test_logprobs_stand_in_the_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    scores = (TokenLogprobs(97, -0.5, ((97, -0.5), (98, -1.0))),)
    event = Event("r-0", (97,), ("a",), 0, RequestStats(), "stop", logprobs=scores)
    monkeypatch.setattr(ScriptedEngine, "step", lambda self: self.left.clear() or [event])
    assert run(["generate", "-p", "hi", "--json", "--logprobs", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["logprobs"] == [{"token_id": 97, "logprob": -0.5, "top": [[97, -0.5], [98, -1.0]]}]


def test_several_choices_come_one_after_the_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "-p", "hi", "-n", "3"]) == 0
    assert capsys.readouterr().out == "abcd\n--- choice 2 ---\nabcd\n--- choice 3 ---\nabcd\n"


def test_prompt_from_stdin_raw_and_with_system(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("from\nstdin"))
    assert run(["generate", "-p", "-", "--raw"]) == 0
    assert ScriptedEngine.last.prompt == [0] + [ord(char) for char in "from\nstdin"]
    assert run(["generate", "-p", "hi", "--system", "be kind"]) == 0
    assert ScriptedEngine.last.prompt == [ord(char) for char in "<s>be kind<u>hi"]
    assert run(["generate", "-p", "hi", "--system", "be kind", "--raw"]) == 2
    assert "--system needs a chat template" in capsys.readouterr().err


def test_model_without_tokenizer_or_template(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(Tokenizer, "chat_template", None)
    assert run(["generate", "-p", "hi"]) == 0
    assert ScriptedEngine.last.prompt == [0, ord("h"), ord("i")]
    assert run(["generate", "-p", "hi", "--chat"]) == 2
    assert "no chat template" in capsys.readouterr().err
    monkeypatch.setattr(ScriptedEngine, "tokenizer", None)
    assert run(["generate", "-p", "hi"]) == 2
    assert "without a tokenizer" in capsys.readouterr().err


def test_prediction_is_never_ignored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "predicted.txt"
    path.write_text("xy")
    assert run(["generate", "-p", "hi", "--prediction", str(path)]) == 0
    assert ScriptedEngine.last.config.drafter == "prediction"
    assert ScriptedEngine.last.prediction == [ord("x"), ord("y")]
    assert run(["generate", "-p", "hi", "--prediction", str(path), "--drafter", "prediction+ngram"]) == 0
    capsys.readouterr()
    assert run(["generate", "-p", "hi", "--prediction", str(path), "--drafter", "ngram"]) == 2
    assert "prediction+ngram" in capsys.readouterr().err


@pytest.mark.demo_model
def test_demo_model(demo_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "generate",
        str(demo_model),
        "-p",
        "Name the capital of France.",
        "--max-tokens",
        "12",
        "--json",
        "--max-model-len",
        "128",
        "--max-num-seqs",
        "1",
    ]
    assert run([*arguments, "--drafter", "ngram"]) == 0
    drafted = json.loads(capsys.readouterr().out)
    assert "Paris" in drafted["text"]
    assert drafted["finish_reason"] == "stop"
    assert run(arguments) == 0
    plain = json.loads(capsys.readouterr().out)
    assert plain["token_ids"] == drafted["token_ids"]
    assert plain["stats"]["drafted"] == 0
