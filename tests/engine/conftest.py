"""Tiny engines: F-TINY in float32, with the books checked after every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from specdec.llm import LLM, GenerationOutput
from specdec.request import SamplingParams
from specdec.testing import tiny_prompt, write_tiny_checkpoint

MakeLLM = Callable[..., LLM]
GREEDY = SamplingParams(temperature=0, max_tokens=32)
PROMPT = tiny_prompt(17)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def make_llm(tiny: Path) -> MakeLLM:
    def make(drafter: Any = "off", *, model: Path | None = None, **options: Any) -> LLM:  # as LLM's own arguments
        defaults = {"dtype": "float32", "num_pages": 256, "page_size": 4, "check_invariants": True, "draft_budget": "all"}
        if "kv_memory_gb" in options:
            del defaults["num_pages"]
        return LLM(str(model or tiny), drafter=drafter, **{**defaults, **options})

    return make


@dataclass(frozen=True)
class Reference:
    """Runs without drafts: what every other run must equal."""

    llm: LLM

    def outputs(self, prompts: Sequence[list[int]], params: SamplingParams = GREEDY) -> list[GenerationOutput]:
        return self.llm.generate(prompts, params)

    def ids(self, prompt: list[int], params: SamplingParams = GREEDY) -> list[int]:
        return list(self.llm.generate([prompt], params)[0].token_ids)

    def table(self, prompts: Sequence[list[int]], params: SamplingParams = GREEDY) -> dict[tuple[int, ...], list[int]]:
        """For the scripted drafters."""
        return {tuple(out.prompt_token_ids): list(out.token_ids) for out in self.outputs(prompts, params)}


@pytest.fixture(scope="session")
def reference(tiny: Path) -> Reference:
    return Reference(LLM(str(tiny), dtype="float32", num_pages=2048, page_size=4))


def same(output: GenerationOutput, expected: GenerationOutput) -> bool:
    """Equal ids, text, finish reason and usage: what every run owes to the run without drafts."""
    return [(c.token_ids, c.text, c.finish_reason) for c in output.choices] == [
        (c.token_ids, c.text, c.finish_reason) for c in expected.choices
    ]
