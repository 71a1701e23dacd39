"""D8: parameters inside a block, with literal outputs; and on a model that attends, the ids without drafts, trees included."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.errors import RequestError
from specdec.llm import LLM
from specdec.request import SamplingParams
from specdec.testing import TINY_VOCAB_SIZE, Empty, OneHot, Oracle, RandomTree, tiny_prompt, write_const_checkpoint
from tests.engine.conftest import MakeLLM, Reference, same

LOGITS = [2, 1.9, 0.5, 0.4, 0, 0, 0, -1]
PROMPT = [5]
GREEDY = SamplingParams(temperature=0, max_tokens=6)


def only_even(tokens: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
    """Allows ids of the parity of the output's length."""
    return logits.masked_fill(torch.arange(len(logits)) % 2 != (len(tokens) - 1) % 2, -torch.inf)


CASES: dict[str, tuple[dict[str, Any], list[int]]] = {
    "none": ({}, [0, 0, 0, 0, 0, 0]),
    "frequency": ({"frequency_penalty": 0.2}, [0, 1, 0, 1, 0, 1]),
    "presence": ({"presence_penalty": 0.2}, [0, 1, 0, 0, 0, 0]),
    "repetition": ({"repetition_penalty": 1.1}, [0, 1, 0, 0, 0, 0]),
    "bias": ({"logit_bias": {0: -100}}, [1, 1, 1, 1, 1, 1]),
    "banned by bias": ({"logit_bias": {0: float("-inf")}}, [1, 1, 1, 1, 1, 1]),
    "bad word": ({"bad_words": [[0]]}, [1, 1, 1, 1, 1, 1]),
    "bad pair": ({"bad_words": [[0, 0]]}, [0, 1, 0, 1, 0, 1]),
    "bad after the prompt": ({"bad_words": [[5, 0]]}, [1, 0, 0, 0, 0, 0]),
    "allowed": ({"allowed_token_ids": [2, 3]}, [2, 2, 2, 2, 2, 2]),
    "allowed and bad": ({"allowed_token_ids": [2, 3], "bad_words": [[2]]}, [3, 3, 3, 3, 3, 3]),
    "min tokens": ({"stop_token_ids": [0], "min_tokens": 3}, [1, 1, 1, 0]),
    "processor": ({"logits_processors": [only_even]}, [0, 1, 0, 1, 0, 1]),
    "processors in turn": ({"logits_processors": [lambda _, logits: -logits, only_even]}, [8, 9, 8, 9, 8, 9]),
}
DRAFTERS: dict[str, Callable[[list[int], int], Any]] = {
    "onehot0": lambda reference, k: OneHot(0, k),
    "onehot1": lambda reference, k: OneHot(1, k),
    "oracle": lambda reference, k: Oracle({(5,): reference}, k),
    "empty": lambda reference, k: Empty(),
}


@pytest.fixture(scope="module")
def const(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_const_checkpoint(tmp_path_factory.mktemp("models") / "const", LOGITS)


@pytest.fixture(scope="module", params=[(name, k) for name in DRAFTERS for k in range(1, 6)], ids=lambda param: f"{param[0]}-k{param[1]}")
def const_llm(const: Path, request: pytest.FixtureRequest) -> Callable[[list[int]], LLM]:
    """An engine with a drafter that may know what will come."""
    name, k = request.param
    expected: list[int] = []
    llm = LLM(
        str(const),
        drafter=DRAFTERS[name](expected, k),
        dtype="float32",
        num_pages=64,
        page_size=4,
        check_invariants=True,
        draft_budget="all",
    )

    def make(reference: list[int]) -> LLM:
        expected[:] = reference
        return llm

    return make


@pytest.mark.parametrize("rule", ["coupled", "rejection", "traversal"])
def test_literal_outputs(const_llm: Callable[[list[int]], LLM], rule: str) -> None:
    for name, (parameters, expected) in CASES.items():
        output = const_llm(expected).generate([PROMPT], replace(GREEDY, verify_rule=rule, **parameters))[0]
        assert list(output.token_ids) == expected, name
        assert output.finish_reason == ("stop" if name == "min tokens" else "length")


@pytest.mark.parametrize("drafter", ["off", "onehot0", "onehot1"])
def test_min_p_leaves_the_law_of_what_is_left(const: Path, drafter: str) -> None:
    drafters = {"off": "off", "onehot0": OneHot(0, 3), "onehot1": OneHot(1, 3)}
    llm = LLM(str(const), drafter=drafters[drafter], dtype="float32", num_pages=4096, draft_budget="all")
    outputs = llm.generate([PROMPT] * 8, [SamplingParams(min_p=0.5, seed=seed, max_tokens=250) for seed in range(8)])
    counts = torch.bincount(torch.tensor([token for output in outputs for token in output.token_ids]), minlength=3)
    assert counts[2:].sum() == 0
    assert abs(int(counts[0]) / 2000 - 0.525) < 0.03


def picky(tokens: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
    """Favours a token that the last two name."""
    logits[(7 * tokens[-1] + tokens[-2]) % 200] += 5
    return logits


PARAMETERS: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.4},
    "presence and frequency": {"presence_penalty": 1.2, "frequency_penalty": 0.8},
    "rewards": {"presence_penalty": -2.0, "frequency_penalty": -2.0},
    "bias": {"logit_bias": {token: 4.0 for token in range(0, 512, 50)}},
    "bad words": {
        "bad_words": [(token,) for token in range(0, 512, 3)] + [(first, second) for first in (1, 4, 7) for second in range(1, 99)]
    },
    "allowed": {"allowed_token_ids": range(40)},
    "min tokens": {"stop_token_ids": tuple(range(0, 512, 4)), "min_tokens": 9},
    "typical": {"typical_p": 0.6},
    "typical after others": {"typical_p": 0.9, "top_k": 30, "top_p": 0.95, "min_p": 0.01},
    "processor": {"logits_processors": (picky,)},
}
PARAMETERS["all"] = {name: value for parameters in PARAMETERS.values() for name, value in parameters.items()} | {
    "allowed_token_ids": range(200),
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
}


@pytest.mark.parametrize("name", ["ngram", "self", "trees"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_ids_are_those_without_drafts(make_llm: MakeLLM, reference: Reference, tiny: Path, name: str, temperature: float) -> None:
    """Every set of parameters, batched with the others; prompts that repeat, and an alphabet of 40, give ngram something."""
    drafter = {"ngram": "ngram(min=1)", "self": f"model:{tiny}(depth=4)", "trees": RandomTree(40, 12)}[name]
    params = [
        SamplingParams(**{"temperature": temperature, "seed": seed, "max_tokens": 24, **parameters})
        for seed, parameters in enumerate(PARAMETERS.values())
    ]
    prompts = [tiny_prompt(4, seed) * 4 for seed in range(len(params))]
    expected = reference.llm.generate(prompts, params)
    plain = reference.llm.generate(prompts, [SamplingParams(temperature=temperature, seed=p.seed, max_tokens=24) for p in params])
    outputs = make_llm(drafter, num_pages=512).generate(prompts, params)
    for parameters, output, want, without in zip(PARAMETERS, outputs, expected, plain, strict=True):
        assert same(output, want), parameters
        if temperature or "typical" not in parameters:
            assert output.token_ids != without.token_ids, f"{parameters} changed nothing"
    assert sum(output.stats.drafted for output in outputs) > 0
    if name != "trees":
        assert sum(output.stats.accepted for output in outputs) > 0


@pytest.mark.parametrize("drafter", ["off", "oracle", "onehot0"])
def test_a_failing_processor_ends_its_own_request_where_it_would_without_drafts(const: Path, drafter: str) -> None:
    def fragile(tokens: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        if len(tokens) == 5:
            raise RuntimeError("five is too many")
        return logits

    drafters = {"off": "off", "oracle": Oracle({(5,): [0] * 6}, 5), "onehot0": OneHot(0, 5)}
    llm = LLM(str(const), drafter=drafters[drafter], dtype="float32", num_pages=64, check_invariants=True, draft_budget="all")
    failed, fine = llm.generate([PROMPT] * 2, [replace(GREEDY, logits_processors=(fragile,)), GREEDY])
    assert (failed.token_ids, failed.finish_reason) == ((0, 0, 0, 0), "error")
    assert failed.choices[0].error == (
        "logits processor test_a_failing_processor_ends_its_own_request_where_it_would_without_drafts.<locals>.fragile failed: "
        "RuntimeError: five is too many"
    )
    assert (fine.token_ids, fine.finish_reason) == ((0, 0, 0, 0, 0, 0), "length")


@pytest.mark.parametrize("drafter", ["off", "onehot0"])
@pytest.mark.parametrize("rule", ["coupled", "rejection", "traversal"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bans_that_leave_nothing_end_the_request_with_the_reason(const: Path, drafter: str, rule: str, temperature: float) -> None:
    llm = LLM(str(const), drafter={"off": "off", "onehot0": OneHot(0, 5)}[drafter], dtype="float32", num_pages=64, draft_budget="all")
    params = replace(GREEDY, temperature=temperature, verify_rule=rule, allowed_token_ids=(0,), bad_words=((0, 0, 0),))
    output = llm.generate([PROMPT], params)[0]
    assert (output.token_ids, output.finish_reason) == ((0, 0), "error")
    assert output.choices[0].error == "the request's parameters or its constraint leave no token that can be chosen"


@pytest.mark.parametrize(
    ("parameters", "field"),
    [
        ({"logit_bias": {512: 1.0}}, "logit_bias"),
        ({"allowed_token_ids": [3, 600]}, "allowed_token_ids"),
        ({"bad_words": [[3, 512]]}, "bad_words"),
        ({"bad_words": ["text"]}, "bad_words"),
        ({"stop_token_ids": [512]}, "stop_token_ids"),
    ],
)
def test_what_the_model_does_not_have_is_refused_by_name(reference: Reference, parameters: dict[str, Any], field: str) -> None:
    assert TINY_VOCAB_SIZE == 512
    with pytest.raises(RequestError, match=field) as caught:
        reference.llm.generate([PROMPT], SamplingParams(**parameters))
    assert caught.value.param == field


@pytest.mark.parametrize(
    ("parameters", "field"),
    [
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty"),
        ({"logit_bias": {1: float("inf")}}, "logit_bias"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias"),
        ({"bad_words": [[]]}, "bad_words"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"min_tokens": 7, "max_tokens": 6}, "min_tokens"),
        ({"typical_p": 0.0}, "typical_p"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"logprobs": -1}, "logprobs"),
        ({"prompt_logprobs": 101}, "prompt_logprobs"),
    ],
)
def test_impossible_values_are_refused_by_name(parameters: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError, match=field) as caught:
        SamplingParams(**parameters)
    assert caught.value.param == field
