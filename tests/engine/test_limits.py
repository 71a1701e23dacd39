"""D2 counters, D3 end tokens, D5 budgets, D6 cap against stop, D12 length limits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specdec.errors import ContextLengthError, RequestError
from specdec.request import SamplingParams
from specdec.testing import TINY_VOCAB_SIZE, Anti, Oracle, tiny_prompt, write_tiny_checkpoint
from tests.engine.conftest import GREEDY, PROMPT, MakeLLM, Reference, same


@pytest.mark.parametrize(("max_tokens", "verifies", "drafted"), [(61, 12, 48), (64, 13, 50)])
@pytest.mark.parametrize("batch", [1, 16])
def test_self_drafts_are_all_accepted_and_counted_once(
    make_llm: MakeLLM, tiny: Path, max_tokens: int, verifies: int, drafted: int, batch: int
) -> None:
    llm = make_llm(f"model:{tiny}(depth=4)", num_pages=1024, max_num_seqs=16)
    params = replace(GREEDY, max_tokens=max_tokens)
    prompts = [tiny_prompt(length) for length in range(5, 5 + batch)]
    for _ in range(200 // batch if batch == 16 else 1):
        outputs = llm.generate(prompts, params)
        for output in outputs:
            stats = output.stats
            assert (stats.verifies, stats.drafted, stats.accepted, len(output.token_ids)) == (verifies, drafted, drafted, max_tokens)
            assert stats.emitted == max_tokens - 1  # the first token came with the prompt
            assert stats.acceptance_length == (max_tokens - 1) / verifies


def declared_end(token: int) -> SamplingParams:
    return replace(GREEDY, stop_token_ids=(token,))


@pytest.mark.parametrize("offset", range(16))
def test_an_end_token_ends_at_its_first_occurrence_at_every_offset_of_a_block(make_llm: MakeLLM, reference: Reference, offset: int) -> None:
    ids = reference.ids(PROMPT)
    expected = ids[: ids.index(ids[offset]) + 1]
    params = declared_end(ids[offset])
    output = make_llm(Oracle({tuple(PROMPT): ids}, 8)).generate([PROMPT], params)[0]
    assert list(output.token_ids) == expected and output.finish_reason == "stop"
    assert same(output, reference.outputs([PROMPT], params)[0])
    assert output.stats.emitted == len(expected) - 1
    assert output.stats.accepted <= output.stats.emitted


@pytest.mark.parametrize("drafter", ["off", "oracle"])
def test_the_end_token_of_the_model_ends_unless_it_is_ignored(
    make_llm: MakeLLM, reference: Reference, tmp_path: Path, drafter: str
) -> None:
    ids = reference.ids(PROMPT)
    model = write_tiny_checkpoint(tmp_path / "tiny")
    (model / "generation_config.json").write_text(f'{{"eos_token_id": {ids[5]}}}')
    llm = make_llm(Oracle({tuple(PROMPT): ids}, 8) if drafter == "oracle" else drafter, model=model)
    assert list(llm.generate([PROMPT], GREEDY)[0].token_ids) == ids[: ids.index(ids[5]) + 1]
    ignoring = llm.generate([PROMPT], replace(GREEDY, ignore_eos=True))[0]
    assert list(ignoring.token_ids) == ids and ignoring.finish_reason == "length"


def test_a_drafted_end_token_that_the_target_does_not_choose_ends_nothing(make_llm: MakeLLM, reference: Reference) -> None:
    ids = reference.ids(PROMPT)
    end = next(token for token in range(TINY_VOCAB_SIZE) if token not in ids)
    output = make_llm(lambda tokens, limit: [end] * limit).generate([PROMPT], declared_end(end))[0]
    assert list(output.token_ids) == ids and output.finish_reason == "length"
    assert output.stats.drafted > 0 and output.stats.accepted == 0


@pytest.mark.parametrize("max_tokens", range(1, 13))
def test_exactly_the_allowed_tokens_are_delivered(make_llm: MakeLLM, reference: Reference, max_tokens: int) -> None:
    ids = reference.ids(PROMPT)
    output = make_llm(Oracle({tuple(PROMPT): ids}, 8)).generate([PROMPT], replace(GREEDY, max_tokens=max_tokens))[0]
    assert list(output.token_ids) == ids[:max_tokens] and output.finish_reason == "length"
    assert output.stats.accepted == output.stats.drafted == max(0, max_tokens - 1 - output.stats.verifies)
    if max_tokens == 1:
        assert output.stats.drafted == 0


def test_no_tokens_are_an_error() -> None:
    with pytest.raises(RequestError, match="max_tokens"):
        SamplingParams(max_tokens=0)


@pytest.mark.parametrize(("max_tokens", "count", "reason"), [(5, 3, "stop"), (2, 2, "length"), (3, 3, "stop")])
def test_the_earlier_of_cap_and_stop_wins_within_one_block(
    make_llm: MakeLLM, reference: Reference, max_tokens: int, count: int, reason: str
) -> None:
    ids = reference.ids(PROMPT)
    assert ids.index(ids[2]) == 2
    params = replace(declared_end(ids[2]), max_tokens=max_tokens)
    output = make_llm(Oracle({tuple(PROMPT): ids}, 5)).generate([PROMPT], params)[0]
    assert (list(output.token_ids), output.finish_reason) == (ids[:count], reason)


def length_drafters(tiny: Path, short: Path) -> dict[str, Any]:
    return {"off": "off", "self": f"model:{tiny}(depth=8)", "short context": f"model:{short}(depth=8)", "ngram": "ngram"}


@pytest.fixture
def short(tmp_path: Path) -> Path:
    """The same weights with a context of 32."""
    model = write_tiny_checkpoint(tmp_path / "short")
    config = model / "config.json"
    config.write_text(config.read_text().replace('"max_position_embeddings": 256', '"max_position_embeddings": 32'))
    return model


@pytest.mark.parametrize("name", ["off", "self", "short context", "ngram"])
@pytest.mark.parametrize("length", [20, *range(55, 64)])
def test_output_ends_at_the_length_limit(make_llm: MakeLLM, reference: Reference, tiny: Path, short: Path, name: str, length: int) -> None:
    params = replace(GREEDY, max_tokens=100)
    expected = reference.ids(tiny_prompt(length), replace(GREEDY, max_tokens=64 - length))
    llm = make_llm(length_drafters(tiny, short)[name], max_model_len=64)
    output = llm.generate([tiny_prompt(length)], params)[0]
    assert list(output.token_ids) == expected
    assert len(expected) == 64 - length and output.finish_reason == "length"
    if name == "short context":
        assert (output.stats.drafted > 0) == (length < 32)


def test_past_its_own_limit_a_drafter_stops_and_its_neighbours_go_on(make_llm: MakeLLM, reference: Reference, short: Path) -> None:
    llm = make_llm(f"model:{short}(depth=8)", max_model_len=64)
    long, brief = llm.generate([tiny_prompt(20), tiny_prompt(3)], [replace(GREEDY, max_tokens=100), replace(GREEDY, max_tokens=20)])
    assert list(long.token_ids) == reference.ids(tiny_prompt(20), replace(GREEDY, max_tokens=44))
    # 21 tokens stand after the prompt; 8 drafts and a bonus make 30, and 2 drafts reach position 32
    assert long.stats.accepted == long.stats.drafted == 8 + 2
    assert brief.stats.accepted == brief.stats.drafted > 0


@pytest.mark.parametrize("length", [64, 65, 200])
def test_a_prompt_that_leaves_no_room_is_refused(make_llm: MakeLLM, length: int) -> None:
    llm = make_llm(max_model_len=64)
    with pytest.raises(ContextLengthError, match=f"{length} tokens") as caught:
        llm.generate([tiny_prompt(length)], GREEDY)
    assert caught.value.code == "context_length_exceeded"
    assert not llm.engine.has_work
    assert len(llm.generate([PROMPT], GREEDY)[0].token_ids) == 32


def test_a_request_that_the_pool_can_never_hold_ends_at_the_pool(make_llm: MakeLLM, reference: Reference) -> None:
    llm = make_llm(Anti(reference.table([PROMPT]), TINY_VOCAB_SIZE), num_pages=6, page_size=4)
    assert llm.engine.max_model_len == 24
    output = llm.generate([PROMPT], replace(GREEDY, max_tokens=100))[0]
    assert list(output.token_ids) == reference.ids(PROMPT)[:7] and output.finish_reason == "length"
    with pytest.raises(ContextLengthError):
        llm.generate([tiny_prompt(24)], GREEDY)
