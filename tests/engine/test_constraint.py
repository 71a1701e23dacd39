"""D10: constrained requests with drafts equal those without, whatever was drafted (K7)."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from specdec.errors import RequestError
from specdec.llm import LLM, GenerationOutput
from specdec.request import Constraint, SamplingParams
from specdec.testing import (
    TINY_VOCAB_SIZE,
    Anti,
    OneHot,
    Oracle,
    RandomTree,
    table,
    tiny_prompt,
    write_const_checkpoint,
    write_tiny_checkpoint,
)
from tests.engine.conftest import same
from tests.tiny_tokenizer import END, save_tiny_tokenizer, tiny_tokenizer

DATE = Constraint("regex", "[0-9]{4}-[0-9]{2}")
GREEDY = SamplingParams(temperature=0, max_tokens=32, constraint=DATE)
SAMPLED = replace(GREEDY, temperature=0.9, seed=4)
PROMPTS = [tiny_prompt(length) for length in (3, 17)]
TOKENIZER = tiny_tokenizer()
ILLEGAL = TOKENIZER.convert_tokens_to_ids("zz"[:1])


@pytest.fixture(scope="module")
def worded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """F-TINY with a vocabulary of bytes, digits and letters."""
    return save_tiny_tokenizer(write_tiny_checkpoint(tmp_path_factory.mktemp("models") / "worded"))


@pytest.fixture(scope="module")
def plain(worded: Path) -> LLM:
    return make(worded)


def make(model: Path, drafter: Any = "off", **options: Any) -> LLM:  # as LLM's own arguments
    return LLM(
        str(model),
        drafter=drafter,
        **{"dtype": "float32", "num_pages": 512, "page_size": 4, "check_invariants": True, "draft_budget": "all", **options},
    )


def by_prompt(outputs: Sequence[GenerationOutput]) -> dict[tuple[int, ...], list[int]]:
    return {tuple(output.prompt_token_ids): list(output.token_ids) for output in outputs}


def drafters(plain: LLM, params: SamplingParams, limit: int) -> dict[str, Any]:
    constrained = by_prompt(plain.generate(PROMPTS, params))
    free = by_prompt(plain.generate(PROMPTS, replace(params, constraint=None)))
    return {
        "anti": Anti(constrained, TINY_VOCAB_SIZE, limit),
        "illegal": OneHot(ILLEGAL, limit),
        "free oracle": Oracle(free, limit),
        "oracle": Oracle(constrained, limit),
        "ngram": "ngram",
        "grammar": "grammar",
        "both": "grammar+ngram",
        "random trees": RandomTree(TINY_VOCAB_SIZE, limit),
    }


@pytest.mark.parametrize("name", ["anti", "illegal", "free oracle", "oracle", "ngram", "grammar", "both", "random trees"])
@pytest.mark.parametrize("limit", range(1, 7))
def test_the_output_matches_and_is_that_without_drafts(plain: LLM, worded: Path, name: str, limit: int) -> None:
    for params in (GREEDY, SAMPLED) if limit in (2, 5) else (GREEDY,):
        expected = plain.generate(PROMPTS, params)
        llm = make(worded, drafters(plain, params, limit)[name])
        outputs = llm.generate(PROMPTS, params)
        for output, reference in zip(outputs, expected, strict=True):
            assert same(output, reference)
            assert re.fullmatch("[0-9]{4}-[0-9]{2}", output.text) and len(output.text) == 7
            assert output.finish_reason == "stop" and END not in output.token_ids
            if name == "oracle":
                assert output.stats.accepted == output.stats.drafted > 0
            if name in ("anti", "illegal"):
                assert output.stats.accepted == 0 < output.stats.drafted


def test_sixteen_in_parallel_and_a_plain_one_after(plain: LLM, worded: Path) -> None:
    """Several grammars in one batch, beside unconstrained neighbours."""
    grammars = [DATE, Constraint("choice", '["yes", "no", "maybe"]'), Constraint("json_object"), Constraint("regex", "(ab|[0-9])*x"), None]
    prompts = [tiny_prompt(3 + index) for index in range(16)]
    params = [
        SamplingParams(temperature=index % 2 * 0.8, seed=index, max_tokens=24, constraint=grammars[index % len(grammars)])
        for index in range(16)
    ]
    expected = [plain.generate([prompt], [one])[0] for prompt, one in zip(prompts, params, strict=True)]
    llm = make(worded, RandomTree(TINY_VOCAB_SIZE, 5))
    outputs = llm.generate(prompts, params)
    assert all(same(output, reference) for output, reference in zip(outputs, expected, strict=True))
    assert {output.text for index, output in enumerate(outputs) if index % 5 == 1} <= {"yes", "no", "maybe"}
    free = SamplingParams(temperature=0, max_tokens=12)
    assert same(llm.generate([PROMPTS[0]], free)[0], plain.generate([PROMPTS[0]], free)[0])
    assert not llm.engine.constraints._states


@pytest.mark.parametrize("rule", ["rejection", "traversal"])
def test_other_rules_keep_the_constraint_and_the_greedy_ids(plain: LLM, worded: Path, rule: str) -> None:
    for name in ("anti", "oracle", "random trees"):
        llm = make(worded, drafters(plain, GREEDY, 4)[name], verify_rule=rule)
        outputs = llm.generate(PROMPTS, GREEDY)
        assert all(same(a, b) for a, b in zip(outputs, plain.generate(PROMPTS, GREEDY), strict=True))
        for seed in range(2):
            for output in llm.generate(PROMPTS, replace(SAMPLED, seed=seed)):
                assert re.fullmatch("[0-9]{4}-[0-9]{2}", output.text) and output.finish_reason == "stop"


@pytest.mark.parametrize("rule", ["coupled", "rejection", "traversal"])
@pytest.mark.parametrize("shape", [(3, 1), (1, 2)])
def test_the_law_under_a_mask_is_the_renormalised_one(tmp_path: Path, rule: str, shape: tuple[int, int]) -> None:
    """F-CONST p = [.5, .2, .1, ...] with mask {1, 2}: (2/3, 1/3), whatever TABLE(q) drafts."""
    import math

    chances = [0.5, 0.2, 0.1, 0.1, 0.05, 0.03, 0.02]
    model = save_const_tokenizer(write_const_checkpoint(tmp_path / "const", [math.log(p) for p in chances]))
    limit, width = shape
    drafter = table([0.02, 0.03, 0.05, 0.1, 0.1, 0.2, 0.25, 0.25], limit=limit, width=width)
    constraint = Constraint("regex", "[12]*")
    params = SamplingParams(max_tokens=90, constraint=constraint, ignore_eos=True)
    llm = make(model, drafter, verify_rule=rule, check_invariants=False, max_num_seqs=32)
    outputs = llm.generate([[5]] * 32, [replace(params, seed=seed) for seed in range(32)])
    tokens = [token for output in outputs for token in output.token_ids]
    assert set(tokens) == {1, 2} and len(tokens) == 2880
    assert tokens.count(1) / len(tokens) == pytest.approx(2 / 3, abs=0.033)  # 3.7 standard deviations
    if rule == "coupled":
        reference = make(model).generate([[5]] * 2, [replace(params, seed=seed) for seed in range(2)])
        assert [out.token_ids for out in outputs[:2]] == [out.token_ids for out in reference]


def save_const_tokenizer(folder: Path) -> Path:
    """Ids 0 to 9 are digits, the others letters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE({char: index for index, char in enumerate("0123456789abcdef")}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("limit", [0, 1, 4])
@pytest.mark.parametrize("cut", (0, 4, 9))
def test_a_constraint_that_begins_behind_a_marker(plain: LLM, worded: Path, cut: int, limit: int) -> None:
    """The marker is a piece of what the model writes by itself, at every place of a block."""
    free = plain.generate([PROMPTS[1]], SamplingParams(temperature=0, max_tokens=16))[0]
    marker = TOKENIZER.decode(free.token_ids[cut : cut + 2])
    if "\ufffd" in marker or not marker:
        marker = next(piece for token in free.token_ids[cut:] if "\ufffd" not in (piece := TOKENIZER.decode([token])))
    params = replace(GREEDY, constraint=replace(DATE, after=marker))
    expected = plain.generate([PROMPTS[1]], params)[0]
    head, found, tail = expected.text.partition(marker)
    assert found and re.fullmatch("[0-9]{4}-[0-9]{2}", tail) and expected.finish_reason == "stop"
    assert free.text.startswith(head)
    for drafter in (Oracle(by_prompt([expected]), limit), RandomTree(TINY_VOCAB_SIZE, limit)) if limit else ("ngram",):
        assert same(make(worded, drafter).generate([PROMPTS[1]], params)[0], expected)


def test_other_ends_still_end_a_constrained_request(plain: LLM) -> None:
    whole = plain.generate([PROMPTS[0]], GREEDY)[0]
    cut = plain.generate([PROMPTS[0]], replace(GREEDY, max_tokens=2))[0]
    assert (cut.token_ids, cut.finish_reason) == (whole.token_ids[:2], "length")
    exact = plain.generate([PROMPTS[0]], replace(GREEDY, max_tokens=len(whole.token_ids)))[0]
    assert (exact.token_ids, exact.finish_reason) == (whole.token_ids, "stop")
    stopped = plain.generate([PROMPTS[0]], replace(GREEDY, stop=("-",)))[0]
    assert (stopped.text, stopped.finish_reason) == (whole.text[:4], "stop")
    by_id = plain.generate([PROMPTS[0]], replace(GREEDY, stop_token_ids=(whole.token_ids[1],)))[0]
    assert (by_id.token_ids, by_id.finish_reason) == (whole.token_ids[:2], "stop")


def test_end_tokens_end_an_open_pattern_but_not_before_min_tokens(plain: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=20, constraint=Constraint("regex", "[0-9]*"), logit_bias={END: 100.0})
    assert plain.generate([PROMPTS[0]], params)[0].token_ids == (END,)
    later = plain.generate([PROMPTS[0]], replace(params, min_tokens=5))[0]
    assert len(later.token_ids) == 6 and later.token_ids[-1] == END and later.text.isdigit()
    going_on = plain.generate([PROMPTS[0]], replace(params, ignore_eos=True))[0]
    assert len(going_on.token_ids) == 20 and going_on.finish_reason == "length" and going_on.text.isdigit()


@pytest.mark.parametrize("drafter", ["off", "oracle"])
def test_a_constraint_that_nothing_can_meet_fails_its_request_only(plain: LLM, worded: Path, drafter: str) -> None:
    """After two digits the pattern wants a letter that the request bans."""
    params = replace(GREEDY, constraint=Constraint("regex", "[0-9]{2}z"), bad_words=((ILLEGAL,),))
    llm = make(worded, Oracle({tuple(PROMPTS[0]): [9] * 9}, 3) if drafter == "oracle" else "off")
    ids = [llm.engine.add(PROMPTS[0], one)[0] for one in (params, GREEDY)]
    events = []
    while llm.engine.has_work:
        events += llm.engine.step()
    failed = [event for event in events if event.request_id == ids[0]]
    assert failed[-1].finish_reason == "error" and "constraint" in (failed[-1].error or "")
    assert "".join(event.text for event in failed).isdigit(), "what came before is told"
    fine = [event for event in events if event.request_id == ids[1]]
    assert "".join(event.text for event in fine) == plain.generate([PROMPTS[0]], GREEDY)[0].text
    assert not llm.engine.constraints._states


def test_preemption_and_abort_leave_the_state_right(plain: LLM, worded: Path) -> None:
    params = SamplingParams(temperature=0.9, max_tokens=40, constraint=Constraint("regex", "([0-9]|[a-z]{2}-){40}"))
    prompts = [tiny_prompt(20, seed=seed) for seed in range(4)]
    each = [replace(params, seed=seed) for seed in range(4)]
    llm = make(worded, RandomTree(TINY_VOCAB_SIZE, 4), num_pages=32, prefix_cache=False)
    outputs = llm.generate(prompts, each)
    assert llm.engine.scheduler.preemptions > 0
    assert [out.token_ids for out in outputs] == [out.token_ids for out in plain.generate(prompts, each)]
    (request_id,) = llm.engine.add(prompts[0], params)
    llm.engine.step()
    llm.engine.abort(request_id)
    llm.engine.step()
    assert not llm.engine.has_work and not llm.engine.constraints._states


def test_choices_of_one_request_are_constrained_apart(plain: LLM) -> None:
    (output,) = plain.generate([PROMPTS[0]], replace(SAMPLED, temperature=2.0, n=4))
    assert all(re.fullmatch("[0-9]{4}-[0-9]{2}", choice.text) for choice in output.choices)
    assert len({choice.text for choice in output.choices}) > 1


def test_json_is_valid_json(plain: LLM) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 22]}}, "required": ["ok", "n"]}
    schema |= {"additionalProperties": False}
    params = SamplingParams(temperature=1.0, max_tokens=200, seed=1, constraint=Constraint("json_schema", json.dumps(schema)))
    (output,) = plain.generate([PROMPTS[0]], params)
    assert output.finish_reason == "stop" and json.loads(output.text)["n"] in (1, 22)


def test_refusals_come_before_anything_runs(plain: LLM, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="unclosed group") as caught:
        plain.generate([PROMPTS[0]], replace(GREEDY, constraint=Constraint("regex", "(a")))
    assert caught.value.param == "constraint" and not plain.engine.has_work
    wordless = make(write_tiny_checkpoint(tmp_path / "wordless"))
    with pytest.raises(RequestError, match="without a tokenizer"):
        wordless.generate([PROMPTS[0]], GREEDY)
    small = make(write_tiny_checkpoint(tmp_path / "small"), grammar_max_bytes=8)
    with pytest.raises(RequestError, match="grammar_max_bytes allows 8"):
        small.engine.compile(DATE)
    assert wordless.generate([PROMPTS[0]], SamplingParams(temperature=0, max_tokens=2))[0].finish_reason == "length"
