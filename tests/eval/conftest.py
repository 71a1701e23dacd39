"""A scripted engine for the evaluation: it counts like a real one, and its drafters are as good as their names say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from specdec.config import EngineConfig
from specdec.plan import Event
from specdec.request import RequestStats, SamplingParams


class WordTokenizer:
    """One id per character, and a chat template that shows who spoke."""

    chat_template: str | None = "present"

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + [ord(char) % 256 for char in text]

    def apply_chat_template(self, messages: Sequence[dict[str, str]], **_: object) -> str:
        return "".join(f"<{message['role'][0]}>{message['content']}" for message in messages)


class ScriptedEngine:
    """Emits letters that depend on the prompt and the seed only; the drafter `broken` changes the fourth one.

    Drafters get two tokens accepted of three drafted in every step; `off` emits one token a step.
    """

    built: list[ScriptedEngine] = []  # noqa: RUF012  # reset by the fixture

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.tokenizer = WordTokenizer()
        self.max_model_len = 200
        self.model_name = "scripted"
        self.running: dict[str, dict[str, Any]] = {}
        self.log: list[Any] = []
        self.most_at_once = 0
        self.number = 0
        self.built.append(self)

    @classmethod
    def from_config(cls, config: EngineConfig, *, progress: Callable[[str], None] | None = None) -> ScriptedEngine:
        if progress is not None:
            progress("loading")
        return cls(config)

    def add(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, drafter: str | None = None, prediction: Sequence[int] = ()
    ) -> list[str]:
        self.number += 1
        self.log.append((drafter, tuple(prompt_ids), params, tuple(prediction)))
        start = sum(prompt_ids) + (params.seed or 0)
        answer = [97 + (start + i) % 26 for i in range(params.max_tokens or 1)]
        if drafter == "broken" and len(answer) > 3:
            answer[3] = 65
        self.running[str(self.number)] = {"left": answer, "drafter": drafter, "stats": RequestStats(), "first": True}
        self.most_at_once = max(self.most_at_once, len(self.running))
        return [str(self.number)]

    def step(self) -> list[Event]:
        events = []
        for name, state in list(self.running.items()):
            size = 1 if state["first"] or state["drafter"] == "off" else 3
            ids, state["left"] = state["left"][:size], state["left"][size:]
            stats = state["stats"]
            if not state["first"]:
                stats.verifies += 1
                stats.emitted += len(ids)
                stats.verify_s += 0.01
                if size > 1:
                    stats.drafted += 3
                    stats.accepted += len(ids) - 1
                    stats.draft_s += 0.001
            state["first"] = False
            if not state["left"]:
                del self.running[name]
            events.append(Event(name, tuple(ids), tuple(map(chr, ids)), len(ids) - 1, stats, None if state["left"] else "length"))
        return events

    @property
    def has_work(self) -> bool:
        return bool(self.running)

    def reset_prefix_cache(self) -> None:
        self.log.append("reset")

    def close(self) -> None:
        self.log.append("close")


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[ScriptedEngine]:
    """Every engine that the test builds."""
    import specdec.engine

    monkeypatch.setattr(specdec.engine, "Engine", ScriptedEngine)
    monkeypatch.setattr(ScriptedEngine, "built", [])
    return ScriptedEngine.built
