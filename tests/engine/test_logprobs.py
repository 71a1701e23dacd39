"""K9: logprobs of every emitted and prompt token equal a teacher-forced pass, whatever drafted, batched or chunked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.errors import RequestError
from specdec.llm import Choice
from specdec.plan import TokenLogprobs
from specdec.request import SamplingParams
from specdec.testing import TINY_VOCAB_SIZE, Oracle, RandomTree, tiny_prompt
from tests.engine.conftest import GREEDY, MakeLLM, Reference

PROMPTS = [tiny_prompt(length) for length in (1, 2, 9, 17)]
SCORED = replace(GREEDY, logprobs=3, max_tokens=16)


class Teacher:
    """The model in transformers: log-probabilities of every token of a text, after those before it."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    @torch.no_grad()
    def scores(self, tokens: Sequence[int]) -> torch.Tensor:
        """float32 [len(tokens) - 1, vocabulary]: row i is about token i + 1."""
        return torch.log_softmax(self._model(torch.tensor([tokens])).logits[0, :-1], dim=-1)

    def check(self, tokens: Sequence[int], entries: Sequence[TokenLogprobs | None], first: int, num_top: int) -> None:
        """Compares the entries of tokens `first` and on."""
        scores = self.scores(tokens)
        for position, entry in enumerate(entries, first):
            if position == 0:
                assert entry is None
                continue
            assert entry is not None and entry.token == tokens[position]
            row = scores[position - 1]
            assert abs(entry.logprob - float(row[entry.token])) < 1e-4
            assert len(entry.top) == num_top
            assert [value for _, value in entry.top] == sorted((value for _, value in entry.top), reverse=True)
            assert [value for _, value in entry.top] == pytest.approx(row.topk(num_top).values.tolist(), abs=1e-4)
            for token, value in entry.top:
                assert abs(value - float(row[token])) < 1e-4


@pytest.fixture(scope="module")
def teacher(tiny: Path) -> Teacher:
    return Teacher(tiny)


def drafters(table: dict[tuple[int, ...], list[int]], tiny: Path) -> dict[str, Any]:
    return {
        "off": "off",
        "ngram": "ngram",
        "oracle": Oracle(table, 5),
        "trees": RandomTree(TINY_VOCAB_SIZE, 8),
        "self": f"model:{tiny}(depth=4)",
    }


PARAMETERS: dict[str, SamplingParams] = {
    "greedy": SCORED,
    "sampled": replace(SCORED, temperature=0.8, seed=3, top_p=0.9),
    "penalised": replace(
        SCORED, repetition_penalty=1.5, frequency_penalty=0.3, logit_bias={7: 2.0}, allowed_token_ids=tuple(range(0, 512, 2))
    ),
    "none beside": replace(SCORED, logprobs=0),
}


@pytest.mark.parametrize("parameters", PARAMETERS)
@pytest.mark.parametrize("name", ["off", "ngram", "oracle", "trees", "self"])
def test_emitted_tokens(make_llm: MakeLLM, reference: Reference, teacher: Teacher, tiny: Path, name: str, parameters: str) -> None:
    params = PARAMETERS[parameters]
    expected = reference.outputs(PROMPTS, params)
    table = {tuple(out.prompt_token_ids): list(out.token_ids) for out in expected}
    outputs = make_llm(drafters(table, tiny)[name]).generate(PROMPTS, params)
    for prompt, output, want in zip(PROMPTS, outputs, expected, strict=True):
        choice = output.choices[0]
        assert choice.logprobs is not None and len(choice.logprobs) == len(choice.token_ids) == 16
        teacher.check([*prompt, *choice.token_ids], choice.logprobs, len(prompt), params.logprobs or 0)
        assert choice.logprobs == want.choices[0].logprobs
        assert choice.cumulative_logprob == sum(entry.logprob for entry in choice.logprobs)
        assert output.prompt_logprobs is None


@pytest.mark.parametrize("offset", range(6))
def test_a_stop_within_a_block_cuts_them_too(make_llm: MakeLLM, reference: Reference, offset: int) -> None:
    ids = reference.ids(tiny_prompt(17))
    params = replace(SCORED, stop_token_ids=(ids[offset],))
    llm = make_llm(Oracle({tuple(tiny_prompt(17)): ids}, 8))
    choice = llm.generate([tiny_prompt(17)], params)[0].choices[0]
    assert choice.finish_reason == "stop"
    assert choice.logprobs is not None
    assert [entry.token for entry in choice.logprobs] == list(choice.token_ids)
    assert choice.logprobs == reference.outputs([tiny_prompt(17)], params)[0].choices[0].logprobs


def test_they_are_told_only_where_they_are_asked_for(make_llm: MakeLLM) -> None:
    plain, scored = make_llm().generate([tiny_prompt(5)] * 2, [GREEDY, SCORED])
    assert plain.choices[0].logprobs is None and plain.choices[0].cumulative_logprob is None
    assert scored.choices[0].logprobs is not None
    assert plain.token_ids[:16] == scored.token_ids


@pytest.mark.parametrize("chunk", [1, 2, 7, 16, None])
@pytest.mark.parametrize("drafter", ["off", "ngram"])
def test_prompt_tokens(make_llm: MakeLLM, reference: Reference, teacher: Teacher, chunk: int | None, drafter: str) -> None:
    prompts = [*PROMPTS, tiny_prompt(5) * 6]
    params = replace(SCORED, prompt_logprobs=2, max_tokens=4)
    llm = make_llm(drafter, prefill_chunk=chunk, max_num_seqs=3)
    expected = reference.outputs(prompts, params)
    for _ in range(2):  # the second time the prefix cache holds the prompts
        outputs = llm.generate(prompts, params)
        for prompt, output, want in zip(prompts, outputs, expected, strict=True):
            assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(prompt)
            teacher.check(prompt, output.prompt_logprobs, 0, 2)
            assert output.prompt_logprobs == want.prompt_logprobs
            assert output.choices[0].logprobs == want.choices[0].logprobs
            assert output.stats.cached_prompt_tokens == 0
    assert llm.generate([prompts[-1]], replace(params, prompt_logprobs=None))[0].stats.cached_prompt_tokens > 0


def test_choices_share_one_scoring_of_their_prompt(make_llm: MakeLLM, teacher: Teacher) -> None:
    llm = make_llm(max_num_seqs=4)
    params = SamplingParams(n=3, seed=1, max_tokens=4, logprobs=0, prompt_logprobs=1)
    output = llm.generate([tiny_prompt(30)], params)[0]
    assert output.prompt_logprobs is not None
    teacher.check(tiny_prompt(30), output.prompt_logprobs, 0, 1)
    assert sum(choice.stats.prefill_tokens for choice in output.choices) == 30 + 2
    assert [choice.token_ids for choice in output.choices] == [
        choice.token_ids for choice in llm.generate([tiny_prompt(30)], replace(params, prompt_logprobs=None))[0].choices
    ]


@pytest.mark.parametrize("swap", [False, True])
def test_preemption_in_the_middle_of_a_prompt_scores_nothing_twice(
    make_llm: MakeLLM, teacher: Teacher, monkeypatch: pytest.MonkeyPatch, swap: bool
) -> None:
    monkeypatch.setattr("specdec.scheduler.scheduler.swap_pays", lambda *_: True)
    prompts = [tiny_prompt(14, seed) for seed in range(6)]
    llm = make_llm(num_pages=11, page_size=4, prefill_chunk=3, max_num_seqs=6, swap_gb=0.001 * swap)
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=20, logprobs=0, prompt_logprobs=1))
    assert llm.engine.scheduler.preemptions > 0
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.prompt_logprobs is not None
        teacher.check(prompt, output.prompt_logprobs, 0, 1)
        assert output.choices[0].logprobs is not None
        teacher.check([*prompt, *output.token_ids], output.choices[0].logprobs, len(prompt), 0)


def mean(choice: Choice) -> float:
    assert choice.cumulative_logprob is not None
    return choice.cumulative_logprob / len(choice.token_ids)


@pytest.mark.parametrize("drafter", ["off", "ngram"])
def test_the_best_of_several_choices_are_returned(make_llm: MakeLLM, drafter: str) -> None:
    llm = make_llm(drafter)
    params = SamplingParams(n=5, seed=4, max_tokens=8, logprobs=1)
    everything = llm.generate([tiny_prompt(9)], params)[0].choices
    best = llm.generate([tiny_prompt(9)], replace(params, n=2, best_of=5, logprobs=None))[0].choices
    ranked = sorted(everything, key=mean, reverse=True)
    assert len({mean(choice) for choice in everything}) == 5
    assert [choice.token_ids for choice in best] == [choice.token_ids for choice in ranked[:2]]
    assert [mean(choice) for choice in best] == [mean(choice) for choice in ranked[:2]]


def test_a_stream_has_one_choice(make_llm: MakeLLM) -> None:
    with pytest.raises(RequestError, match="best_of=2") as caught:
        next(make_llm().stream(tiny_prompt(3), SamplingParams(best_of=2)))
    assert caught.value.param == "best_of"
