"""D1: greedy identity, and D9: seeds and isolation. The output never depends on the drafter or on the neighbours."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specdec.llm import LLM, GenerationOutput
from specdec.request import SamplingParams
from specdec.testing import TINY_PROMPT_LENGTHS, TINY_VOCAB_SIZE, Alt, Anti, Empty, Oracle, RandomTree, tiny_prompt, write_tiny_checkpoint
from tests.engine.conftest import MakeLLM, Reference, same

PROMPTS = [tiny_prompt(length) for length in TINY_PROMPT_LENGTHS]
PARAMS = SamplingParams(temperature=0, max_tokens=64)
SAMPLED = SamplingParams(temperature=0.8, max_tokens=24)

DrafterOf = Callable[[dict[tuple[int, ...], list[int]], int, Path, Path], Any]
DRAFTERS: dict[str, DrafterOf] = {
    "self": lambda refs, k, tiny, other: f"model:{tiny}(depth={k})",
    "ngram": lambda refs, k, tiny, other: "ngram",
    "oracle": lambda refs, k, tiny, other: Oracle(refs, k),
    "anti": lambda refs, k, tiny, other: Anti(refs, TINY_VOCAB_SIZE, k),
    "alt1": lambda refs, k, tiny, other: Alt(refs, 1, TINY_VOCAB_SIZE, k),
    "alt2": lambda refs, k, tiny, other: Alt(refs, 2, TINY_VOCAB_SIZE, k),
    "empty": lambda refs, k, tiny, other: Empty(),
    "random weights": lambda refs, k, tiny, other: f"model:{other}(depth={k})",
    "random trees": lambda refs, k, tiny, other: RandomTree(TINY_VOCAB_SIZE, k),
    "merged": lambda refs, k, tiny, other: f"ngram+model:{tiny}(depth={k})",
}


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("models") / "other", seed=99)


def cases() -> list[Any]:
    """Every drafter with every k at one layout, and every layout with every drafter at one k: pairs, not the product."""
    layouts = [(page, chunk) for page in (1, 4, 16) for chunk in (8, None)]
    found = [(name, k, layouts[(i + j) % 6]) for i, name in enumerate(DRAFTERS) for j, k in enumerate((1, 2, 3, 5, 8, 16))]
    found += [(name, 5, layout) for name in DRAFTERS for layout in layouts]
    return [pytest.param(name, k, *layout, id=f"{name}-k{k}-page{layout[0]}-chunk{layout[1]}") for name, k, layout in dict.fromkeys(found)]


@pytest.mark.parametrize(("name", "k", "page_size", "chunk"), cases())
def test_greedy_ids_are_those_without_drafts(
    make_llm: MakeLLM, reference: Reference, tiny: Path, other: Path, name: str, k: int, page_size: int, chunk: int | None
) -> None:
    expected = reference.outputs(PROMPTS, PARAMS)
    references = {tuple(out.prompt_token_ids): list(out.token_ids) for out in expected}
    llm = make_llm(
        DRAFTERS[name](references, k, tiny, other), page_size=page_size, num_pages=2048 // page_size, prefill_chunk=chunk, max_num_seqs=5
    )
    outputs = llm.generate(PROMPTS, PARAMS)
    assert all(same(out, want) for out, want in zip(outputs, expected, strict=True))
    drafted = sum(out.stats.drafted for out in outputs)
    accepted = sum(out.stats.accepted for out in outputs)
    if name == "anti":
        assert drafted > 0 and accepted == 0
    if name in ("oracle", "self"):
        assert drafted > 0 and accepted == drafted
    if name == "empty":
        assert drafted == 0


@pytest.mark.parametrize("name", ["self", "ngram", "random weights", "random trees", "merged"])
@pytest.mark.parametrize("filters", [{}, {"top_k": 20}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 50, "top_p": 0.8, "temperature": 1.3}])
def test_sampled_ids_are_those_without_drafts(
    make_llm: MakeLLM, reference: Reference, tiny: Path, other: Path, name: str, filters: dict[str, Any]
) -> None:
    params = [replace(SAMPLED, seed=seed, **filters) for seed in range(len(PROMPTS))]
    expected = reference.llm.generate(PROMPTS, params)
    llm = make_llm(DRAFTERS[name]({}, 5, tiny, other))
    outputs = llm.generate(PROMPTS, params)
    assert all(same(out, want) for out, want in zip(outputs, expected, strict=True))
    if name == "self":
        assert sum(out.stats.accepted for out in outputs) == sum(out.stats.drafted for out in outputs) > 0


@pytest.fixture(scope="module", params=[PARAMS, replace(SAMPLED, seed=1)], ids=["greedy", "sampled"])
def int8(request: pytest.FixtureRequest, tiny: Path) -> tuple[SamplingParams, list[GenerationOutput]]:
    """Parameters, and the outputs of each prompt alone, in int8 and without drafts."""
    llm = LLM(str(tiny), dtype="int8", num_pages=2048, page_size=4, max_num_seqs=1)
    return request.param, [llm.generate([prompt], request.param)[0] for prompt in PROMPTS]


@pytest.mark.parametrize("name", [name for name in DRAFTERS if name != "empty"])
@pytest.mark.parametrize(("page_size", "chunk"), [(4, None), (16, 8)])
def test_in_int8_ids_are_those_of_each_prompt_alone_without_drafts(
    make_llm: MakeLLM,
    int8: tuple[SamplingParams, list[GenerationOutput]],
    tiny: Path,
    other: Path,
    name: str,
    page_size: int,
    chunk: int | None,
) -> None:
    params, expected = int8
    references = {tuple(out.prompt_token_ids): list(out.token_ids) for out in expected}
    drafter = DRAFTERS[name](references, 5, tiny, other)
    llm = make_llm(drafter, dtype="int8", page_size=page_size, num_pages=2048 // page_size, prefill_chunk=chunk, max_num_seqs=5)
    outputs = llm.generate(PROMPTS, params)
    assert all(same(out, want) for out, want in zip(outputs, expected, strict=True))
    drafted, accepted = sum(out.stats.drafted for out in outputs), sum(out.stats.accepted for out in outputs)
    assert drafted > 0 and (name not in ("oracle", "self") or accepted == drafted)


def test_a_seeded_request_is_the_same_with_any_neighbours_in_any_order(make_llm: MakeLLM, tiny: Path) -> None:
    llm = make_llm("ngram", max_num_seqs=8)
    mine = (tiny_prompt(9), replace(SAMPLED, seed=1))
    alone = llm.generate([mine[0]], mine[1])[0].token_ids
    neighbours = [
        (tiny_prompt(9), replace(SAMPLED, seed=2)),
        (tiny_prompt(9), replace(SAMPLED, seed=3)),
        (tiny_prompt(12, seed=5), SAMPLED),
        (tiny_prompt(30), replace(SAMPLED, temperature=0)),
        (tiny_prompt(1), replace(SAMPLED, top_k=3)),
        (tiny_prompt(20), replace(SAMPLED, top_p=0.5, seed=1)),
        (tiny_prompt(5), replace(SAMPLED, max_tokens=3)),
    ]
    for order in range(5):
        batch = [mine, *neighbours]
        random.Random(order).shuffle(batch)
        outputs = llm.generate([prompt for prompt, _ in batch], [params for _, params in batch])
        assert outputs[batch.index(mine)].token_ids == alone
        assert outputs[batch.index(neighbours[0])].token_ids != alone
    assert llm.engine.num_steps > 100
    llm.generate([tiny_prompt(3)] * 20, replace(PARAMS, max_tokens=200))
    assert llm.engine.num_steps > 500
    assert llm.generate([mine[0]], mine[1])[0].token_ids == alone


@pytest.mark.parametrize("drafter", ["off", "ngram"])
def test_choices_differ_and_are_reproducible(make_llm: MakeLLM, drafter: str) -> None:
    params = replace(SAMPLED, seed=1, n=4)
    runs = [make_llm(drafter).generate([tiny_prompt(9)], params)[0] for _ in range(2)]
    streams = [choice.token_ids for choice in runs[0].choices]
    assert len(set(streams)) > 1
    assert streams == [choice.token_ids for choice in runs[1].choices]
    assert streams[0] == make_llm(drafter).generate([tiny_prompt(9)], replace(params, n=1))[0].token_ids


def test_requests_without_a_seed_differ_and_follow_the_seed_of_the_engine(make_llm: MakeLLM) -> None:
    def run(seed: int) -> list[tuple[int, ...]]:
        return [out.token_ids for out in make_llm(seed=seed).generate([tiny_prompt(9)] * 2, SAMPLED)]

    first = run(1)
    assert first[0] != first[1]
    assert run(1) == first != run(2)


def test_choices_share_the_pages_of_their_prompt(make_llm: MakeLLM) -> None:
    llm = make_llm(prefix_cache=False, max_num_seqs=8)
    llm.generate([tiny_prompt(63)], replace(SAMPLED, n=4, seed=0, max_tokens=2))
    assert llm.engine.kv.stats.hits == 3 * 62
    assert llm.engine.kv.stats.copies >= 3


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_warm_prefix_changes_nothing(make_llm: MakeLLM, tiny: Path, prefix_cache: bool) -> None:
    llm = make_llm(f"model:{tiny}(depth=4)", prefix_cache=prefix_cache)
    outputs = [llm.generate([tiny_prompt(33)], PARAMS)[0] for _ in range(3)]
    assert outputs[0].token_ids == outputs[1].token_ids == outputs[2].token_ids
    assert [out.stats.acceptance_length for out in outputs] == [outputs[0].stats.acceptance_length] * 3
    assert [out.stats.accepted == out.stats.drafted for out in outputs] == [True] * 3
    assert [out.stats.cached_prompt_tokens for out in outputs] == ([0, 32, 32] if prefix_cache else [0, 0, 0])


def test_an_always_wrong_drafter_leaves_the_prefix_cache_as_it_would_be_without(make_llm: MakeLLM, reference: Reference) -> None:
    table = reference.table(PROMPTS, PARAMS)
    contents = []
    for drafter in ("off", Anti(table, TINY_VOCAB_SIZE), RandomTree(TINY_VOCAB_SIZE)):
        llm = make_llm(drafter, num_pages=1024)
        llm.generate(PROMPTS, PARAMS)
        contents.append((llm.engine.kv.published, llm.engine.kv.stats.hits))
    assert contents[0] == contents[1] == contents[2]


def test_a_single_prompt_may_be_given_bare(reference: Reference) -> None:
    llm: LLM = reference.llm
    assert llm.generate(tiny_prompt(3), PARAMS)[0].token_ids == llm.generate([tiny_prompt(3)], PARAMS)[0].token_ids
