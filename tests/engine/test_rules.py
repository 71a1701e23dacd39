"""The verification rules in an engine: D7's law and acceptance, D6, and what each rule keeps of identity."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specdec.drafters.registry import register_instance, unregister
from specdec.llm import LLM, GenerationOutput
from specdec.request import SamplingParams
from specdec.testing import NEVER, TINY_VOCAB_SIZE, OneHot, Oracle, RandomTree, self_drafter, table, tiny_prompt, write_const_checkpoint
from specdec.testing import write_tiny_checkpoint as write_tiny
from tests.engine.conftest import GREEDY, PROMPT, MakeLLM, Reference, same

P = np.array([0.5, 0.2, 0.1, 0.1, 0.05, 0.03, 0.02, 0.0])
Q = [0.02, 0.03, 0.05, 0.1, 0.1, 0.2, 0.25, 0.25]
RULES = pytest.mark.parametrize("rule", ["coupled", "rejection", "traversal"])
WEIGHING = pytest.mark.parametrize("rule", ["rejection", "traversal"])
SAMPLED = SamplingParams(temperature=0.8, max_tokens=24, seed=5)


@pytest.fixture(scope="session")
def const(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """F-CONST with the law P at temperature 1."""
    logits = [float(np.log(chance)) if chance else NEVER * 3 for chance in P]
    return write_const_checkpoint(tmp_path_factory.mktemp("models") / "const", logits)


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("models") / "other", seed=99)


def law_of(outputs: Sequence[GenerationOutput]) -> np.ndarray:
    counts = np.bincount(np.concatenate([output.token_ids for output in outputs]), minlength=8)
    return counts / counts.sum()


def pooled(outputs: Sequence[GenerationOutput]) -> float:
    """Tokens per verify."""
    return sum(output.stats.emitted for output in outputs) / sum(output.stats.verifies for output in outputs)


@RULES
@pytest.mark.parametrize("draft", [table(Q, limit=3), table(Q, limit=2, width=2), table(Q, independent=True, limit=2)])
def test_the_law_is_p_in_a_batch_of_mixed_lengths(const: Path, rule: str, draft: Any) -> None:
    llm = LLM(str(const), drafter=draft, dtype="float32", verify_rule=rule, num_pages=1024, max_num_seqs=8)
    prompts = [[1] * (1 + index % 3) for index in range(8)]
    params = [SamplingParams(temperature=1.0, seed=index, max_tokens=100 + 20 * index) for index in range(8)]
    outputs = llm.generate(prompts, params)
    law, count = law_of(outputs), sum(len(output.token_ids) for output in outputs)
    assert law[7] == 0 and np.abs(law[:8] - P).sum() / 2 < 1.8 / count**0.5
    if rule == "coupled":
        plain = llm.generate(prompts, params, drafter="off")
        assert all(same(output, want) for output, want in zip(outputs, plain, strict=True))


@pytest.fixture
def mixed_drafters() -> Iterator[list[str]]:
    names = [register_instance(draft) for draft in (table(Q), table(Q, limit=3), table(Q, limit=2, width=2), OneHot(2))]
    yield names
    for name in names:
        unregister(name)


@RULES
@pytest.mark.parametrize("batch", [1, 2, 3, 8])
def test_the_law_is_p_where_every_request_has_another_drafter(const: Path, mixed_drafters: list[str], rule: str, batch: int) -> None:
    engine = LLM(str(const), dtype="float32", verify_rule=rule, num_pages=1024, max_num_seqs=batch).engine
    for index in range(12):
        drafter = mixed_drafters[index % len(mixed_drafters)]
        engine.add([1], SamplingParams(temperature=1.0, seed=100 + index, max_tokens=60 + index), drafter=drafter)
    ids: list[int] = []
    while engine.has_work:
        ids += [token for event in engine.step() for token in event.token_ids]
    law = np.bincount(ids, minlength=8) / len(ids)
    assert len(ids) == sum(60 + index for index in range(12)) and max(ids) < 7
    assert np.abs(law[:8] - P).sum() / 2 < 1.8 / len(ids) ** 0.5


@pytest.mark.parametrize(("rule", "expected"), [("rejection", 1.300), ("coupled", 1.2322), ("traversal", 1.300)])
def test_acceptance_of_a_drawn_token(const: Path, rule: str, expected: float) -> None:
    llm = LLM(str(const), drafter=table(Q), dtype="float32", verify_rule=rule, num_pages=1024, draft_budget="all")
    outputs = llm.generate([[1]] * 8, [SamplingParams(temperature=1.0, seed=index, max_tokens=400) for index in range(8)])
    assert abs(pooled(outputs) - expected) < 0.035


@RULES
@pytest.mark.parametrize(("max_tokens", "count", "reason"), [(5, 3, "stop"), (2, 2, "length"), (3, 3, "stop")])
def test_the_earlier_of_cap_and_stop_wins_within_one_block(
    make_llm: MakeLLM, reference: Reference, rule: str, max_tokens: int, count: int, reason: str
) -> None:
    ids = reference.ids(PROMPT)
    params = replace(GREEDY, stop_token_ids=(ids[2],), max_tokens=max_tokens)
    output = make_llm(Oracle({tuple(PROMPT): ids}, 5), verify_rule=rule).generate([PROMPT], params)[0]
    assert (list(output.token_ids), output.finish_reason) == (ids[:count], reason)


@WEIGHING
@pytest.mark.parametrize("spec", ["ngram", "model:{tiny}(depth=4)", "model:{other}(tree=3-2-1)", "ngram+model:{other}(tree=2-1)"])
def test_greedy_ids_are_those_without_drafts_under_every_rule(
    make_llm: MakeLLM, reference: Reference, tiny: Path, other: Path, rule: str, spec: str
) -> None:
    prompts = [tiny_prompt(length) for length in (1, 16, 33)]
    outputs = make_llm(spec.format(tiny=tiny, other=other), verify_rule=rule).generate(prompts, GREEDY)
    assert all(same(output, want) for output, want in zip(outputs, reference.outputs(prompts), strict=True))


@WEIGHING
@pytest.mark.parametrize("filters", [{}, {"top_k": 20}, {"top_p": 0.9, "min_p": 0.05}])
def test_a_self_draft_is_always_accepted(make_llm: MakeLLM, rule: str, filters: dict[str, Any]) -> None:
    outputs = make_llm(self_drafter(4), verify_rule=rule).generate([tiny_prompt(9)] * 4, replace(SAMPLED, max_tokens=60, **filters))
    assert all(output.stats.drafted == output.stats.accepted > 30 for output in outputs)


@pytest.mark.parametrize("spec", ["model:{other}(tree=3-2-1)", "model:{other}(tree=2-2)+ngram", "model:{tiny}(tree=4-1-1-1)"])
@pytest.mark.parametrize("filters", [{}, {"top_k": 2}])
def test_coupled_ids_are_those_without_drafts_with_trees_of_a_model(
    make_llm: MakeLLM, reference: Reference, tiny: Path, other: Path, spec: str, filters: dict[str, Any]
) -> None:
    prompts = [tiny_prompt(length) for length in (1, 16, 33)]
    params = replace(SAMPLED, **filters)
    outputs = make_llm(spec.format(tiny=tiny, other=other), page_size=1, num_pages=512).generate(prompts, params)
    assert all(same(output, want) for output, want in zip(outputs, reference.outputs(prompts, params), strict=True))
    if "4-1-1-1" in spec:  # the target's own first choice is the target's choice
        assert all(output.stats.acceptance_length > 4 for output in outputs)


@WEIGHING
def test_a_request_is_the_same_alone_and_among_others_and_again(make_llm: MakeLLM, other: Path, rule: str) -> None:
    spec = f"model:{other}(tree=2-1)"
    mine = (tiny_prompt(9), SAMPLED)
    llm = make_llm(spec, verify_rule=rule, max_num_seqs=4)
    alone = llm.generate([mine[0]], mine[1])[0]
    crowd = [mine[0], tiny_prompt(20), tiny_prompt(3)], [mine[1], replace(SAMPLED, seed=9), replace(SAMPLED, temperature=0)]
    assert same(llm.generate(*crowd)[0], alone)
    assert same(make_llm(spec, verify_rule=rule).generate([mine[0]], mine[1])[0], alone)
    assert alone.stats.drafted > 20


@RULES
def test_the_rule_of_a_request_wins_over_the_engines(make_llm: MakeLLM, reference: Reference, other: Path, rule: str) -> None:
    llm = make_llm(f"model:{other}(depth=3)", verify_rule="rejection" if rule == "coupled" else "coupled")
    asked = llm.generate([PROMPT], replace(SAMPLED, verify_rule=rule))[0]
    configured = make_llm(f"model:{other}(depth=3)", verify_rule=rule).generate([PROMPT], SAMPLED)[0]
    assert same(asked, configured)
    assert same(asked, reference.outputs([PROMPT], SAMPLED)[0]) == (rule == "coupled")


def test_several_rules_in_one_batch_do_not_disturb_each_other(make_llm: MakeLLM, other: Path) -> None:
    llm = make_llm(f"model:{other}(depth=3)", max_num_seqs=4)
    params = [replace(SAMPLED, verify_rule=rule) for rule in ("coupled", "rejection", "traversal")]
    alone = [llm.generate([PROMPT], one)[0] for one in params]
    assert all(same(output, want) for output, want in zip(llm.generate([PROMPT] * 3, params), alone, strict=True))


@WEIGHING
def test_the_scheduler_is_never_shown_what_was_drawn(make_llm: MakeLLM, other: Path, rule: str) -> None:
    """Non-anticipation by construction: shapes have no tokens, and under a blind rule no confidences."""
    llm = make_llm(f"model:{other}(tree=2-1)", max_num_seqs=4)
    seen: set[tuple[str | None, tuple[str, ...], bool]] = set()
    trim = llm.engine.scheduler.trim

    def watched(plan: Any, shapes: Any) -> Any:
        for row, shape in zip(plan.rows, shapes, strict=True):
            if len(shape):
                seen.add((row.request.params.verify_rule, tuple(vars(shape)), shape.confidence is not None))
        return trim(plan, shapes)

    llm.engine.scheduler.trim = watched  # type: ignore[method-assign]  # a spy
    llm.generate([PROMPT] * 2, [replace(SAMPLED, verify_rule=name) for name in ("coupled", rule)])
    fields = ("parents", "confidence")
    assert seen == {("coupled", fields, True), (rule, fields, False)}


@WEIGHING
def test_fixed_drafts_lose_nothing_under_rules_that_read_q(make_llm: MakeLLM, rule: str) -> None:
    """Random trees say no q: each node counts as certain, and the law is the target's."""
    llm = make_llm(RandomTree(TINY_VOCAB_SIZE, 6), verify_rule=rule)
    output = llm.generate([PROMPT], SAMPLED)[0]
    assert len(output.token_ids) == 24 and output.stats.drafted > 50


@WEIGHING
def test_a_broken_q_is_counted_and_costs_nothing_else(make_llm: MakeLLM, rule: str) -> None:
    from specdec.drafters.base import Drafter, DrafterContext, DraftRow
    from specdec.plan import DraftNeeds
    from specdec.tree import DraftTree

    class Broken(Drafter):
        needs = DraftNeeds(q=True)

        def propose(self, rows: Sequence[DraftRow]) -> list[DraftTree]:
            return [DraftTree.chain([3], q=torch.full((1, TINY_VOCAB_SIZE), torch.nan)) for _ in rows]

    def build(context: DrafterContext) -> Broken:
        return Broken()

    llm = make_llm(build, verify_rule=rule)
    output = llm.generate([PROMPT], SAMPLED)[0]
    assert len(output.token_ids) == 24
    bad = llm.engine.status()["verifier"]["bad_q"]
    assert bad[rule] == output.stats.drafted > 0 and sum(bad.values()) == bad[rule]
